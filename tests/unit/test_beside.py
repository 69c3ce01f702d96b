"""Drafts beside prompts: worth their rows only if they bring more than their time brings later."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firesteel.bench.virtual import tables
from firesteel.speculation.adaptive import Adaptive
from firesteel.speculation.beside import TAKEN, Answer, beside_prompts, full, later_rate
from firesteel.speculation.cost import CostModel
from firesteel.speculation.survival import Calibrator, Coefficients
from firesteel.speculation.terms import Candidate, DraftBlocks, Load, Timing

K = 3


def asked(gains: np.ndarray, load: Load, cost: CostModel, widths: tuple[int, ...] = (1, 2, 3)) -> Answer:
    later = later_rate(gains[None], len(gains), load, lambda r: cost.step_ms(r, 64), cost.draft_ms, widths)
    return beside_prompts(
        gains[None], later, cost.row_ms(load.limit, 64) / load.limit, load.others, cost.draft_ms, widths
    )


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_it_is_the_best_of_all_choices(data: st.DataObject) -> None:
    """Against every set of drafts of every width, at the rate of every set of drafts of all requests later."""
    requests, others = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    p = np.array(
        data.draw(
            st.lists(
                st.lists(st.floats(0.05, 1), min_size=K, max_size=K), min_size=requests, max_size=requests
            )
        )
    )
    gains, limit = np.cumprod(p, 1), data.draw(st.integers(12, 64))
    cost = CostModel(tables(7)[data.draw(st.sampled_from(["staircase", "linear", "flat"]))])
    found = asked(gains, Load(limit, requests, 64.0, 0, others, limit), cost)

    total, rates = requests + others, []
    for k in range(K + 1):
        drafts = gains[:, :k].ravel()
        for chosen in itertools.product((0, 1), repeat=len(drafts)):
            kept = np.array(chosen)
            rows = round(total / requests * (requests + kept.sum()))
            if rows <= limit or not kept.any():
                tokens = total / requests * (requests + float((kept * drafts).sum()))
                rates.append(tokens / (cost.row_ms(rows, 64) + cost.draft_ms(total, k)))
    later, row = max(rates), cost.row_ms(limit, 64) / limit
    worth = {0: 0.0}
    for k in range(1, K + 1):
        drafts = gains[:, :k].ravel()
        sets = [np.array(c) for c in itertools.product((0, 1), repeat=len(drafts))]
        worth[k] = max(float((c * drafts).sum()) - later * row * float(c.sum()) for c in sets)
        worth[k] -= later * cost.draft_ms(requests, k)
    assert found.least == pytest.approx(later * row)
    assert worth[found.width] == pytest.approx(max(worth.values()), abs=1e-9)


def test_many_wait_for_prompts_and_nobody_drafts() -> None:
    """All 64 together make tokens fast later; eight of nine would not, and a long prompt need not stop them."""
    cost, gains = CostModel(tables(7)["staircase"]), np.cumprod(np.full((30, 7), 0.9), 1)
    crowd = asked(gains, Load(576, 30.0, 64.0, 0, 34, 576), cost, tuple(range(1, 8)))
    alone = asked(gains[:8], Load(2048, 8.0, 64.0, 0, 1, 2048), cost, tuple(range(1, 8)))
    assert crowd.width == 0 < 3 <= alone.width


def test_a_step_is_full_only_if_prompts_wait() -> None:
    assert full(Load(64, 8.0, 64.0, 0, 3, 64))
    assert not full(Load(64, 8.0, 64.0, 0, 0, 64)), "the last prompt has run"
    assert not full(Load(60, 8.0, 64.0, 4, 3, 64)), "there is room"
    assert not full(Load(64, 8.0, 64.0, 0)), "nobody said how many rows a step may have"


def test_the_plan_is_as_before_when_the_prompts_are_done() -> None:
    """And a budget beside prompts has the drafts that are worth a row."""
    policy = Adaptive(K, CostModel(tables(K)["staircase"]), Calibrator(Coefficients.prior(K, True, True)))
    ids = list(range(32))
    signal = np.full((32, K), 4.0)
    for _ in range(16):
        policy.learn(
            DraftBlocks(ids, [1] * 32, signal, signal, np.full((32, K), 0.9)), [], Timing(32, 5.0, 5.0)
        )
    able = [Candidate(i, 0, K) for i in ids]
    open_, filled = Load(32, 32.0, 64.0, 200), Load(256, 32.0, 64.0, 0, 96, 256)
    before = policy.drafting(able, open_)
    beside = policy.drafting(able, filled)
    assert before.width > 0 and beside.width == 0 and "prompts" in beside.reason
    after = policy.drafting(able, open_)
    assert (after.width, after.request_ids) == (before.width, before.request_ids)
    ready = [Candidate(i, K, K) for i in ids]
    for least, room, drafts in ((0.0, 96, 96), (0.0, 40, 40), (1.01, 96, 0)):
        policy._beside.answer = Answer(0, least, 32, 96)
        budget = policy.budget(ready, Load(256, 32.0, 64.0, room, 0, 256))
        assert budget.drafts == drafts and "prompts" in budget.reason


def known(k: int, signal: float, requests: int = 8) -> Adaptive:
    """A policy on a staircase that has seen drafts with these signals."""
    policy = Adaptive(k, CostModel(tables(k)["staircase"]), Calibrator(Coefficients.prior(k, True, True)))
    line, ids = np.full((requests, k), signal), list(range(requests))
    for _ in range(40):
        policy.learn(
            DraftBlocks(ids, [1] * requests, line, line, np.full((requests, k), 0.5)), [], Timing(8, 5.0, 5.0)
        )
    return policy


def test_a_wish_for_speed_and_priority_count_beside_prompts() -> None:
    """Whoever waits for its tokens does not wait for all prompts; that everybody is urgent changes nothing."""
    ids, load = range(8), Load(512, 8.0, 64.0, 0, 56, 512)
    policy = known(7, 1.0)
    assert policy.drafting([Candidate(i, 0, 7) for i in ids], load).width == 0
    assert policy.drafting([Candidate(i, 0, 7, weight=4.0) for i in ids], load).width == 0
    wishing = known(7, 1.0)
    asked = [Candidate(i, 0, 7, floor=500.0 if i == 3 else 0.0) for i in ids]
    for _ in range(60):
        answer = wishing.drafting(asked, load)
        wishing.book.clock(list(ids), np.ones(8, dtype=np.int64), 20.0)  # 50 tokens a second
    assert answer.width > 0 and answer.weights[3] > 8 * answer.weights[2]


def test_drafts_that_got_better_are_found_beside_endless_prompts() -> None:
    policy, load = known(7, -6.0), Load(512, 8.0, 64.0, 0, 1, 512)
    asked = [Candidate(i, 0, 7) for i in range(8)]
    answers = [policy.drafting(asked, load) for _ in range(400)]
    assert answers[0].reason == TAKEN
    probes = [a for a in answers if a.request_ids]
    assert 0 < len(probes) < 20 and all(len(a.request_ids) == 1 for a in probes)


def test_an_answer_does_not_outlive_its_load() -> None:
    policy, asked = known(7, 3.0), [Candidate(i, 0, 7) for i in range(8)]
    alone, crowd, open_ = (
        Load(2048, 8.0, 64.0, 0, 1, 2048),
        Load(512, 8.0, 64.0, 0, 56, 512),
        Load(8, 8.0, 64.0, 99),
    )
    assert policy.drafting(asked, alone).width > 0
    assert policy.drafting(asked, crowd).width == 0, "other many wait"
    for _ in range(10):
        policy.drafting(asked, open_)
    assert policy._beside.answer is None


def test_nobody_ends_answers_by_a_few_that_were_short() -> None:
    """Ends are counted over all tokens; one short answer says little, and no rate of them stops all drafts."""
    policy = known(7, 3.0)
    asked, open_ = [Candidate(i, 0, 7) for i in range(8)], Load(8, 8.0, 64.0, 99)
    before = policy.drafting(asked, open_).width
    policy.learn([], [], Timing(8, 5.0, 5.0, tokens=1, ends=1))
    policy._digest()
    assert before > 0 and policy.drafting(asked, open_).width == before
    for _ in range(100):
        policy.learn([], [], Timing(8, 5.0, 5.0, tokens=8, ends=8))
    policy._digest()
    assert policy.book.lasting([1.0])[0] == pytest.approx(0.75), "not less, whatever ended"
    for _ in range(2000):
        policy.learn([], [], Timing(8, 5.0, 5.0, tokens=8))
    policy._digest()
    assert policy.book.lasting([1.0])[0] > 0.99, "answers are long again"
