"""Forty streaming clients for a minute, many of which leave; and that the judgement of such a run can fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from firesteel.bench.soak import MAX_GROWTH, Asked, Tally, _compare, faults, growth, soak

SECONDS = float(os.environ.get("FIRESTEEL_SOAK_SECONDS", "60"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_soak(tmp_path: Path) -> None:
    """Every kept stream is the offline text, no page is lost, memory stays, nothing restarts."""
    result = soak(tmp_path, clients=40, seconds=SECONDS)
    assert not result["faults"], result
    assert result["most_waiting"] > 0 and result["preemptions"] > 0, "the load was too light to show anything"


GOOD: dict[str, Any] = {
    "wrong": [], "wrong_count": 0, "left_running": 0, "pages_lost": 0, "restarts": 0, "exit_code": 0, "steps": 9,
    "kept_tokens": 9, "prefix_hit_tokens": 9, "accepted_drafts": 9, "memory": {"engine": {"growth": 0.01}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"wrong": ["x"], "wrong_count": 2}, "2 answers are wrong"),
        ({"left_running": 1}, "left_running"),
        ({"pages_lost": 1}, "pages_lost"),
        ({"restarts": 1}, "restarts"),
        ({"exit_code": -9}, "exit_code"),
        ({"kept_tokens": 0}, "nothing was tested"),
        ({"memory": {"engine": {"growth": MAX_GROWTH + 0.001}}}, "grew by 3.1%"),
    ],
)
def test_every_fault_is_seen(change: dict[str, Any], word: str) -> None:
    assert not faults(GOOD)
    assert any(word in fault for fault in faults({**GOOD, **change}))


def test_a_wrong_answer_is_noted() -> None:
    asked, tally = Asked({"prompt": "p"}, "ab", (5, 6), "stop"), Tally()
    _compare(asked, "ab", (5, 6), "stop", 2, tally)
    assert not tally.wrong
    for got in (
        ("aB", (5, 6), "stop", 2),
        ("ab", (5,), "stop", 2),
        ("ab", (5, 6), "length", 2),
        ("ab", (5, 6), "stop", 3),
    ):
        _compare(asked, *got, tally)
    assert len(tally.wrong) == 4


def test_growth_begins_behind_the_first_quarter() -> None:
    steady = [{"at": float(at), "m": 10.0 * min(at, 20) + 100} for at in range(101)]
    assert growth(steady, "m")["growth"] == 0, "warming up is no leak"
    leak = [{"at": float(at), "m": 100.0 + at} for at in range(101)]
    assert growth(leak, "m")["growth"] == pytest.approx(195 / 130 - 1)
