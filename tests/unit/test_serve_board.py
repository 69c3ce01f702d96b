"""What the page reads: complete seconds, means by step size, reasons, and no NaN; and the files themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from firesteel.serve import pages
from firesteel.serve.app import ServeOptions, create_app
from firesteel.serve.board import SECONDS, Board
from firesteel.serve.client import EngineClient
from firesteel.serve.messages import ModelInfo
from firesteel.serve.metrics import Metrics

pytestmark = pytest.mark.unit

INFO = ModelInfo("p", 512, 4096, 0, (1,), True, 5, 4, 100, 256, adaptive=True)


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def step(**changes: Any) -> dict[str, Any]:
    base = {
        "prompt_rows": 0, "decodes": 2, "drafts": 10, "reason": "fixed width", "expected_tokens": 4.0, "rows": 12,
        "emitted": 6, "verified": 10, "accepted": 4, "predicted_ms": 2.0, "measured_ms": 3.0, "host_ms": 1.0,
        "draft_reason": "drafting pays", "drafting": 2, "draft_width": 5,
    }  # fmt: skip
    return {**base, **changes}


def stats(*steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    counters = {
        "running": 1, "waiting": 2, "pages": 100, "pages_free": 60, "pages_cached": 10, "preemptions": 0,
        "recomputes": 0, "prefix": {},
    }  # fmt: skip
    depth = {"verified_at": [4, 2], "accepted_at": [3, 1]}
    return {"counters": counters, "depth": depth, "steps": list(steps), **more}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def board(clock: Clock) -> Board:
    made = Board(clock)
    made.ready(INFO)
    return made


def test_seconds(board: Board, clock: Clock) -> None:
    board.stats(stats(step(), step(emitted=3)))
    assert board.snapshot()["points"]["t"] == [], "the second is not over"
    clock.now += 3
    points = board.snapshot()["points"]
    assert points["t"] == [1000, 1001, 1002]
    assert points["tokens"] == [9, 0, 0] and points["groups"] == [4, 0, 0]
    assert points["running"] == [1, 1, 1] and points["pages_held"] == [30, 30, 30]
    assert board.snapshot(1001)["points"]["t"] == [1002]
    assert all(len(v) == 3 for v in points.values())


def test_a_long_silence_keeps_the_newest_seconds(board: Board, clock: Clock) -> None:
    board.stats(stats(step()))
    clock.now += 10 * SECONDS
    points = board.snapshot()["points"]
    assert points["t"] == list(range(int(clock.now) - SECONDS, int(clock.now)))
    assert sum(points["tokens"]) == 0


def test_cost_by_size(board: Board) -> None:
    board.stats(
        stats(step(rows=12, measured_ms=2.0), step(rows=12, measured_ms=4.0), step(rows=7, predicted_ms=0.0))
    )
    assert board.snapshot()["cost"]["steps"] == [[7, 1, 3.0, None], [12, 2, 3.0, 2.0]]


def test_large_steps_share_a_line(board: Board) -> None:
    board.stats(stats(*(step(rows=rows) for rows in range(1024, 1152))))
    assert [line[:2] for line in board.snapshot()["cost"]["steps"]] == [[1024, 128]]


def test_why_nothing_is_verified(board: Board, clock: Clock) -> None:
    board.stats(
        stats(step(draft_reason="drafting does not pay"), step(drafts=0, reason="no drafts to verify"))
    )
    said = board.snapshot()["speculation"]
    assert said == {"gamma": 5, "active": False, "reason": "drafting does not pay", "adaptive": True}
    board.stats(stats(step()))
    assert board.snapshot()["speculation"]["active"] and not board.snapshot()["speculation"]["reason"]
    off = Board(clock)
    assert "not ready" in off.snapshot()["speculation"]["reason"]
    off.ready(ModelInfo("p", 512, 4096, 0, (1,), True, 0, 4, 100, 256))
    assert "--speculative-config" in off.snapshot()["speculation"]["reason"]


def test_no_nan_leaves(board: Board) -> None:
    quality = [{"depth": 1, "ece": 0.1, "auc": float("nan")}]
    board.stats(stats(step(), quality=quality, reliability=[(0.5, float("inf"), 3)], curve=[(1, 2.0)]))
    told = board.snapshot()
    json.dumps(told, allow_nan=False)
    assert told["quality"][0]["auc"] is None and told["reliability"] == [[0.5, None, 3]]


def test_a_new_engine_forgets_what_the_old_one_learned(board: Board, clock: Clock) -> None:
    board.stats(stats(step(), curve=[(1, 2.0)]))
    clock.now += 1
    board.ready(INFO)
    told = board.snapshot()
    assert told["points"]["tokens"] == [6], "the past stays"
    assert told["cost"] == {"curve": [], "steps": []} and told["depth"]["verified_at"] == []


def test_of_a_dead_engine_nothing_runs(board: Board, clock: Clock) -> None:
    board.stats(stats(step()))
    assert board.snapshot()["now"]["running"] == 1
    assert board.snapshot(up=False)["now"]["running"] == 0
    board.stats(stats(step()))
    board.ready(INFO)
    assert board.snapshot()["now"] == {
        "running": 0, "waiting": 0, "pages_held": 0, "pages_cached": 0, "pages_free": 100,
    }  # fmt: skip


# ---- over HTTP ---------------------------------------------------------------------
class NoEngine(EngineClient):
    """Never becomes ready."""

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    def _send(self, message: Mapping[str, Any]) -> None:
        raise AssertionError("it is never ready")


@pytest.mark.parametrize("path", list(pages.FILES))
def test_files_are_open_and_strict(path: str) -> None:
    with TestClient(create_app(NoEngine(), ServeOptions(api_keys=("k",)))) as http:
        reply = http.get(path)
        assert reply.status_code == 200
        assert reply.headers["content-security-policy"] == pages.POLICY
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert http.get("/firesteel/stats").status_code == 401
        assert http.get(path, headers={"if-none-match": reply.headers["etag"]}).status_code in (200, 304)


def test_stats_before_the_engine_is_ready() -> None:
    with TestClient(create_app(NoEngine(), ServeOptions())) as http:
        told = http.get("/firesteel/stats").json()
        assert told["state"] == "starting" and told["engine"] is None and told["reason"]
        assert http.get("/firesteel/stats?since=x").status_code == 400


def test_the_page_loads_nothing_from_elsewhere() -> None:
    for name in pages.FILES.values():
        text = (pages.FOLDER / name).read_text()
        links = re.findall(r"https?://[^\s\"'<>)]+", text)
        assert set(links) <= {"http://www.w3.org/2000/svg"}, name
        assert " style=" not in text and " onclick" not in text, f"{name}: the policy forbids inline code"
    assert {p.name for p in pages.FOLDER.iterdir()} == set(pages.FILES.values())


# ---- Grafana -------------------------------------------------------------------------
GRAFANA = Path(__file__).parents[2] / "deploy" / "grafana" / "firesteel.json"


def expressions(node: Any) -> list[str]:
    """Every query of a dashboard, those of its variables included."""
    if isinstance(node, dict):
        own = [v for k, v in node.items() if k in ("expr", "query", "definition") and isinstance(v, str)]
        return own + [e for v in node.values() for e in expressions(v)]
    return [e for v in node for e in expressions(v)] if isinstance(node, list) else []


def test_grafana_asks_for_metrics_that_exist() -> None:
    metrics = Metrics("v4")
    metrics.ready(INFO)
    names = set()
    for family in metrics.registry.collect():
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        names |= {family.name + end for end in ends}
    found = [e for e in expressions(json.loads(GRAFANA.read_text())) if "firesteel:" in e]
    assert len(found) >= 20
    asked = {name for e in found for name in re.findall(r"firesteel:[a-z0-9_]+", e)}
    assert asked <= names, f"unknown: {sorted(asked - names)}"


def test_grafana_panels_do_not_overlap() -> None:
    board = json.loads(GRAFANA.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    assert len({p["id"] for p in board["panels"]}) == len(board["panels"])
