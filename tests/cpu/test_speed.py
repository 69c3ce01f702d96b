"""``firesteel bench speed`` on a few tokens: every arm runs, the texts agree, the patch is undone."""

from __future__ import annotations

import json
from pathlib import Path

from firesteel.bench import speed
from firesteel.ops.reference import linear


def test_free_rows_are_undone_even_after_a_failure() -> None:
    kept = linear.matmul_rows
    try:
        with speed.free_rows():
            assert linear.matmul_rows is not kept
            raise KeyError
    except KeyError:
        assert linear.matmul_rows is kept


def test_every_arm_runs_and_writes_the_same(tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    argv = ["--k", "7", "--problems", "1", "--rounds", "1", "--max-tokens", "12", "--json", str(path)]
    assert speed.main(argv) == 0
    found = {a["arm"]: a for a in json.loads(path.read_text())["arms"]}
    assert list(found) == ["none", "K=7", "adaptive", speed.PLAIN, speed.FREE]
    assert found["none"]["ratio"] == 1.0 and found["none"]["tokens_per_step"] <= 1.1
    assert found["K=7"]["tokens_per_step"] > 3, "the bundled drafter is accepted"
    assert found["K=7"]["same_text"] and found["adaptive"]["same_text"]


def test_bad_settings_are_named(capsys: object) -> None:
    assert speed.main(["--model", "/nowhere", "--problems", "1"]) == 2
