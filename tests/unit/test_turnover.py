"""What a plan promises where answers are short, against places counted step by step."""

from __future__ import annotations

import pytest

from firesteel.bench.virtual import tables
from firesteel.speculation.budget import DraftPlan, choose_width, width_of_one
from firesteel.speculation.cost import CostModel, CostTable
from firesteel.speculation.turnover import FEWEST, LONG, SURE, Turnover

pytestmark = pytest.mark.unit
GAMMA, PROMPT = 7, 12
LINEAR = CostModel(tables(GAMMA)["linear"])


def counted(cost: CostModel, places: int, length: int, each: int, verified: int, width: int) -> float:
    """Tokens per millisecond of a closed loop; ``width`` 0: plain steps.

    A place runs its prompt, then ``each`` tokens a step until ``length`` are there, then stands empty for a step.
    Places begin one after the other, so that they are not in step.
    """
    left = [0] * places  # tokens to come; 0: the prompt is next, -1: empty
    wait = [i * (2 + (length - 1) // each) // places for i in range(places)]
    tokens, ms = 0, 0.0
    for step in range(6000):
        rows = drafting = got = 0
        for i in range(places):
            if wait[i]:
                wait[i] -= 1
            elif left[i] == -1:
                left[i] = 0
            elif left[i] == 0:
                rows, got, drafting = rows + PROMPT, got + 1, drafting + 1
                left[i] = length - 1
            else:
                rows, drafting, n = rows + 1 + verified, drafting + 1, min(each, left[i])
                left[i] -= n
                got += n
                if left[i] == 0:
                    left[i] = -1
        if step >= 500:
            tokens += got
            ms += cost.row_ms(rows, 64.0) if rows else 0.0
            ms += cost.draft_ms(drafting, width) if width and drafting else 0.0
    return tokens / ms


def told(length: int, sampling: float) -> Turnover:
    out = Turnover()
    for _ in range(200):
        out.step(int(sampling))
        out.hear(length, PROMPT)
        out.end()
    out._sampling = sampling
    return out


@pytest.mark.parametrize("places", [12, 60])
@pytest.mark.parametrize(("length", "each", "verified"), [(5, 2, 2), (5, 4, 5), (9, 2, 3), (13, 3, 4)])
def test_promise_is_what_places_bring(places: int, length: int, each: int, verified: int) -> None:
    plain = counted(LINEAR, places, length, 1, 0, 0)
    wide = counted(LINEAR, places, length, each, verified, 3)
    sampling = places * length / (length + 1)  # while all steps are plain
    plan = DraftPlan(3, 100, 1.0, 1.0, 100 * verified, float(each))
    promise = told(length, sampling).promise(plan, 100, False, LINEAR, 64.0)
    assert promise == pytest.approx(SURE * wide / plain, rel=0.02)
    # the same places, seen while all draft
    steps = (length - 1) / each
    turnover = told(length, places * (1 + steps) / (2 + steps))
    turnover.promise(plan, 100, True, LINEAR, 64.0)
    assert turnover.promise(plan, 100, True, LINEAR, 64.0) == pytest.approx(SURE * wide / plain, rel=0.02)


def test_promise_of_one_at_a_time() -> None:
    """By hand: a prompt, its drafts, two steps of 2 tokens with drafts, and a step in vain, against 1 + 4 steps."""
    price, draft = (lambda rows: LINEAR.row_ms(rows, 64.0)), LINEAR.draft_ms(1, 3)
    plain = price(PROMPT) + 4 * price(1)
    wide = price(PROMPT) + draft + 2 * (price(4) + draft) + price(1)
    plan = DraftPlan(3, 1, 1.0, 1.0, 3, 2.0)
    assert told(5, 1.0).promise(plan, 1, False, LINEAR, 64.0) == pytest.approx(plain / wide)


def test_says_nothing_of_long_answers_or_of_few() -> None:
    plan = DraftPlan(3, 10, 1.0, 1.0, 20, 2.0)
    assert told(int(LONG) + 1, 10.0).promise(plan, 10, True, LINEAR, 64.0) is None
    few = Turnover()
    for i in range(int(FEWEST)):
        assert few.promise(plan, 10, True, LINEAR, 64.0) is None, i
        few.step(10)
        few.hear(4, PROMPT)
        few.end()
    assert few.promise(plan, 10, True, LINEAR, 64.0) is not None
    assert told(1, 10.0).promise(plan, 10, True, LINEAR, 64.0) == 0.0, "one token: nothing decodes"


def test_new_answers_displace_old_ones() -> None:
    turnover, plan = told(4, 10.0), DraftPlan(3, 10, 1.0, 1.0, 20, 2.0)
    assert turnover.promise(plan, 10, True, LINEAR, 64.0) is not None
    for _ in range(200):
        turnover.hear(64, PROMPT)
        turnover.end()
    assert turnover.promise(plan, 10, True, LINEAR, 64.0) is None


def test_answers_that_go_on_count() -> None:
    """Of many that began together the shortest end first; that says nothing of how long answers are."""
    turnover, plan = Turnover(), DraftPlan(3, 100, 1.0, 1.0, 200, 2.0)
    for _ in range(10):
        turnover.step(100)
        turnover.hear(100, 0)
        turnover.end()  # one of them, of 1 to 10 tokens
    assert turnover.promise(plan, 100, True, LINEAR, 64.0) is None


def test_plans_know_their_gain() -> None:
    """Tokens of a cycle over those of a plain step."""
    import numpy as np

    table = CostTable("flat", (1, 64), (8.0, 8.0), 64, 0.0, (1, 64), {1: (0.1, 0.1), 3: (0.1, 0.1)}, False)
    cost = CostModel(table)
    gains = [0.5, 0.25, 0.125]
    one = width_of_one(gains, True, 1.0, [cost.row_ms(r, 64) for r in range(1, 5)], cost.draft_ms, (1, 2, 3))
    assert (one.width, one.drafts) == (3, 3) and one.gain == pytest.approx(1.875)
    profiles = np.array([gains, gains])
    two = choose_width(profiles, 2, 2.0, lambda r: cost.step_ms(r, 64), cost.draft_ms, (1, 2, 3), 16)
    assert (two.width, two.requests, two.drafts) == (3, 2, 6) and two.gain == pytest.approx(1.875)
    ms = float(cost.step_ms(np.array([2 + 6]), 64.0)[0]) + cost.draft_ms(2, 3)
    assert two.gain * 2.0 / two.rate == pytest.approx(ms)
