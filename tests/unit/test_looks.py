"""Looking once at a new request where drafting does not pay."""

from __future__ import annotations

import numpy as np
import pytest

from firesteel.speculation.adaptive import UNSURE, Adaptive
from firesteel.speculation.book import SHRINK
from firesteel.speculation.budget import DraftPlan
from firesteel.speculation.cost import CostModel, CostTable
from firesteel.speculation.survival import Calibrator, Coefficients
from firesteel.speculation.terms import Candidate, Load, Proposed, Timing

STEP, PASS = 4.0, 1.0
GAMMA = 3


def policy(shrink: float, monkeypatch: pytest.MonkeyPatch) -> Adaptive:
    """Prices of 4 ms a step and 1 ms a drafting pass; every search finds that drafting does not pay."""
    table = CostTable("t", (1, 64), (STEP, STEP), 64, 0.0, (1, 8), {1: (PASS, PASS), GAMMA: (PASS, PASS)})
    made = Adaptive(GAMMA, CostModel(table), Calibrator(Coefficients.prior(GAMMA, True, True)))
    made.book.shrink, made.probe_share = shrink, 0.0
    monkeypatch.setattr(made, "_search", lambda *_: DraftPlan(0, 0, 1.0, 1.0))
    return made


def run(made: Adaptive, ids: list[int], steps: int) -> list[tuple[int, ...]]:
    """Who drafts in each step; their blocks come one step later."""
    out: list[tuple[int, ...]] = []
    for _ in range(steps):
        plan = made.drafting([Candidate(i, 0, GAMMA) for i in ids], Load(len(ids), len(ids), 64.0, 32))
        out.append(tuple(sorted(plan.request_ids)))
        shown = [Proposed(i, 1, (9.0,) * GAMMA, (9.0,) * GAMMA, (0.9,) * GAMMA) for i in plan.request_ids]
        made.learn(shown, [], Timing(len(ids), STEP, STEP))
    return out


def test_every_new_request_is_looked_at_once_and_within_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    made = policy(1.0, monkeypatch)
    seen = run(made, [1, 2, 3], 400)
    looked = [i for ids in seen for i in ids]
    assert sorted(looked) == [1, 2, 3]
    first = next(n for n, ids in enumerate(seen) if ids)
    assert first >= PASS / (made.look_share * STEP) - 2, "it is earned before"
    made.forget(2)
    made._digest()
    assert sorted(i for ids in run(made, [4], 200) for i in ids) == [4], "a later one is new again"


def test_a_look_is_learned_from_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = policy(1.0, monkeypatch)
    before = made.book.usual([Candidate(7, 0, GAMMA)])[0].copy()
    while not run(made, [7], 1)[0]:
        assert made._plan is not None
    assert made._plan is None, "the next step plans anew"
    after = made.book.usual([Candidate(7, 0, GAMMA)])[0]
    assert np.all(after > before), "its signals say that its drafts are good"


def test_requests_that_are_alike_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(run(policy(SHRINK, monkeypatch), [1, 2], 400))


def test_a_gain_within_its_doubt_is_tried_once_and_then_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest of many noisy gains is mostly noise: it needs what it may lose put by, or to be surely real."""
    made = policy(SHRINK, monkeypatch)
    made.cost.noise = 0.2
    monkeypatch.setattr(made, "_search", lambda *_: DraftPlan(GAMMA, 1, 1.1, 1.0))
    asked, load = [Candidate(1, 0, GAMMA)], Load(1, 1.0, 64.0, 32)
    made.book.take([1] * 32, np.ones(32, dtype=np.int64), np.full(32, GAMMA), *np.full((2, 32, GAMMA), 2.0))
    made._replan(asked, asked, load)
    assert made._plan is not None and made._plan.pays, "the first trial is free"
    made._paid = False
    made._replan(asked, asked, load)
    assert not made._plan.pays and made._refused == UNSURE
    made.cost.noise = 0.01
    made._replan(asked, asked, load)
    assert made._plan.pays
    made.cost.noise = 0.2
    made._replan(asked, asked, load)
    assert made._plan.pays, "who drafts goes on while it pays"


def test_a_comparison_begun_by_the_last_few_does_not_cost_the_next_crowd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Plain steps that two requests can spare would cost two hundred a hundred times as much."""
    made = policy(SHRINK, monkeypatch)
    monkeypatch.setattr(made, "_search", lambda _, able, __: DraftPlan(GAMMA, len(able), 1.05, 1.0))
    few = [Candidate(i, 0, GAMMA) for i in range(2)]
    many = [Candidate(i, 0, GAMMA) for i in range(2, 40)]
    blocks = (np.ones(64, dtype=np.int64), np.full(64, GAMMA), *np.full((2, 64, GAMMA), 2.0))
    made.book.take([0] * 64, *blocks)
    made.cost.noise = 0.2  # a promise of 1.05 may be chance: it is tested soon
    reasons = [made.drafting(few, Load(2, 2.0, 64.0, 300)).reason for _ in range(60)]
    assert any("compare" in r for r in reasons), "few are compared"
    while "compare" not in made.drafting(few, Load(2, 2.0, 64.0, 300)).reason:
        pass
    first = made.drafting(many, Load(38, 38.0, 64.0, 300))
    assert first.request_ids, f"the crowd drafts at once, not: {first.reason}"
