"""What the adaptive policy learns from steps, and how little a step costs it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firesteel.bench.virtual import tables
from firesteel.speculation.adaptive import Adaptive
from firesteel.speculation.book import Book
from firesteel.speculation.budget import best_of, best_of_few
from firesteel.speculation.cost import CostModel, CostTable
from firesteel.speculation.recent import SIZE, Recent
from firesteel.speculation.survival import Calibrator, Coefficients
from firesteel.speculation.terms import Candidate, DraftBlocks, Load, Proposed, Timing, Verified
from firesteel.speculation.watch import Watch

K = 3


def table(**changes: object) -> CostTable:
    values: dict[str, object] = {
        "fingerprint": "t",
        "rows": (1, 8, 64),
        "step_ms": (4.0, 5.0, 12.0),
        "context": 64,
        "context_ms": 0.0,
        "requests": (1, 8),
        "draft": {1: (0.5, 1.0), K: (0.8, 2.0)},
    }
    return CostTable(**(values | changes))  # type: ignore[arg-type]


def blocks(ids: list[int], value: float, width: int = K) -> DraftBlocks:
    signal = np.full((len(ids), width), value)
    return DraftBlocks(ids, [1] * len(ids), signal, signal + 1.0, np.full((len(ids), width), 0.5))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_few_gains_are_searched_like_many(data: st.DataObject) -> None:
    gains = sorted(data.draw(st.lists(st.floats(0, 1), max_size=8)), reverse=True)
    base, room = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 10))
    rate = data.draw(st.none() | st.floats(0.01, 3))
    model = CostModel(table(staircase=data.draw(st.booleans())))
    many = best_of(np.array(gains), base, float(base), lambda r: model.step_ms(r, 64), 0.3, room, rate)
    few = best_of_few(gains, base, float(base), lambda r: model.row_ms(r, 64), 0.3, room, rate)
    value = [
        b.expected_tokens / b.predicted_ms if rate is None else b.expected_tokens - rate * b.predicted_ms
        for b in (many, few)
    ]
    assert value[0] == pytest.approx(value[1], rel=1e-9, abs=1e-9)


def test_columns_are_a_sequence_of_blocks() -> None:
    made = [
        Proposed(4, 1, (0.5, 0.25), (1.0, 2.0), (0.9, 0.8)),
        Proposed(7, 0, (1.0, 2.0), (3.0, 4.0), (0.7, 0.1)),
    ]
    assert list(DraftBlocks.of(made)) == made and DraftBlocks.of(made)[-1] == made[-1]


def test_lines_survive_going_round_and_growing() -> None:
    recent, numbers = Recent(K), []
    for i in range(SIZE):  # twice round, then passes too wide for the lines there are
        numbers.append(recent.add(blocks([i, i + 1], float(i), 1 if i % 3 == 1 else K)))
    at = recent.lines(numbers[-5])
    assert recent.owner[at].tolist() == [j for i in range(SIZE - 5, SIZE) for j in (i, i + 1)]
    recent.add(blocks(list(range(100)), -1.0))
    got = recent.outcomes([(numbers[-1], 2, 1), (numbers[-2] + 1, 1, 1)])
    assert got.head.tolist() == [SIZE - 1, SIZE - 1, SIZE - 2] and got.depth.tolist() == [0, 1, 0]
    assert got.accepted.tolist() == [1.0, 0.0, 1.0] and recent.size > SIZE


def test_outcomes_correct_a_calibration_that_is_wrong_today() -> None:
    """Signals say that drafts are good; those of request 1 are not, and others are doubted a little, too."""
    sure = Coefficients(np.full((2, K), 4.0), np.zeros(2), np.zeros(2), True, True)
    book = Book(K, sure, proven=True)
    signal = np.zeros((8, K))
    book.take([1] * 4 + [2] * 4, np.ones(8, dtype=np.int64), np.full(8, K), signal, signal)
    before = [book.expected(Candidate(i, 0, K))[0] for i in (1, 2)]
    book.settle({1: (0.0, 12.0)})
    after = [book.expected(Candidate(i, 0, K))[0] for i in (1, 2)]
    assert min(before) > 0.9 and after[0] < 0.5 and after[0] < after[1] < before[1]
    book.settle({1: (600.0, 0.0)})
    assert book.expected(Candidate(1, 0, K))[0] <= 1.0


def test_a_draft_price_that_was_lost_in_noise_is_not_believed_and_heals() -> None:
    model = CostModel(table(draft={1: (1e-3, 1.0), K: (0.8, 2.0)}))
    assert model.draft_ms(1, 1) >= 0.02 * 4.0
    for _ in range(200):  # plain steps are priced right, drafting costs 1.5 ms
        model.observe(1, model.price(1, 64, 0, 0), 4.0)
        model.observe(1, model.price(1, 64, 1, K), 5.5, 1, K)
    assert model.draft_ms(1, K) == pytest.approx(1.5, rel=0.15) and model.row_ms(1, 64) == pytest.approx(
        4.0, rel=0.1
    )


def test_many_requests_do_not_make_a_step_dear() -> None:
    """Of wide passes some stand for all, fates go to the right blocks, and nothing piles up."""
    policy = Adaptive(K, CostModel(table()), Calibrator(Coefficients.prior(K, True, True), trust=10.0))
    ids = list(range(100))
    for _ in range(64):
        policy.learn(blocks(ids, 1.0), [Verified(i, K, 1, 0) for i in ids], Timing(64, 12.0, 12.0))
    lessons = policy.lessons
    assert lessons.recent.count <= 20 * len(ids) and len(lessons._steps) <= 8 and len(lessons._fates) <= 128
    share = np.array(policy.book._hits) / np.maximum(policy.book._tried, 1)
    assert share[0] == 1.0 and share[1] == 0.0, "every block had its first draft accepted, no second one"


def test_the_same_question_gets_the_same_answer_object() -> None:
    """While nothing was learned a step costs a comparison."""
    policy = Adaptive(
        K,
        CostModel(table(draft={1: (1e-2,), K: (1e-2,)}, requests=(1,))),
        Calibrator(Coefficients.prior(K, True, True)),
    )
    policy.learn(blocks([1] * 8, 9.0), [], Timing(1, 4.0, 4.0))
    asked, load = [Candidate(1, K, K)], Load(1, 1.0, 64.0, 32)
    first = policy.drafting(asked, load)
    assert first.request_ids == {1} and policy.drafting(list(asked), load) is first
    assert policy.budget(asked, load) is policy.budget(list(asked), load)


def test_a_head_that_fails_now_and_then_is_named_once() -> None:
    watch, rng, news = Watch(CostModel(tables(3)["linear"])), np.random.default_rng(0), []
    for i in range(300):
        head = rng.normal(size=(4, 3))
        if i % 5 == 0:
            head[0, 0] = np.nan
        watch.signals(head, np.full(4, 3))
        news += watch.news()
    assert [name for name, _ in news] == ["confidence not finite"]
    for _ in range(10):  # more than 64 finite ones
        watch.signals(rng.normal(size=(4, 3)), np.full(4, 3))
    assert "confidence not finite" not in watch.alarms


def test_answers_that_go_on_worse_than_they_begin_are_judged_by_later_blocks() -> None:
    """Of others, and of a request itself: its own first blocks are as little like what is to come."""
    book = Book(K, Coefficients.prior(K, True, False), proven=True)

    def answer(request: int, late: float) -> None:
        for n in range(20):
            head = np.full((1, K), 4.0 if n < 4 else late)
            book.take([request], np.ones(1, dtype=np.int64), np.full(1, K), head, np.zeros((1, K)))

    for request in range(12):
        answer(request, -1.0)
        book.forget(request)
    begin = book.expected(Candidate(100, 0, K))[0]
    answer(101, -1.0)
    later = book.expected(Candidate(101, 0, K))[0]
    assert begin > 0.8 and later < 0.45, (begin, later)
    cases = book.usual([Candidate(100, 0, K), Candidate(101, 0, K)])[:, 0]
    assert cases[0] > 0.8 and cases[1] < 0.45, cases

    steady = Book(K, Coefficients.prior(K, True, False), proven=True)
    for request in range(12):
        for n in range(20):
            head = np.full((1, K), 4.0 if (7 * n + 3 * request) % 5 == 0 else -1.0)
            steady.take([request], np.ones(1, dtype=np.int64), np.full(1, K), head, np.zeros((1, K)))
    assert not any(steady._staged)


@pytest.mark.parametrize(("value", "soon"), [(1.0, False), (-3.0, True)])
def test_a_newcomer_is_learned_from_soon_unless_it_is_like_all_before(value: float, soon: bool) -> None:
    known = Coefficients.prior(K, True, True)
    policy = Adaptive(K, CostModel(table()), Calibrator(known, trust=10.0))
    lessons, kind = policy.lessons, np.ones((1, K), dtype=np.int64)

    def step(request_id: int, signal: float) -> None:
        line = np.full((1, K), signal)
        survival = known.probability(line, line + 1.0, np.arange(K)[None], kind).cumprod(1)
        drafted = DraftBlocks([request_id], [1], line, line + 1.0, survival)
        policy.learn(drafted, [], Timing(1, 4.0, 4.0))

    for i in range(400):
        step(i // 40, 1.0)  # ten requests alike
    while lessons._steps:
        step(9, 1.0)
    before = lessons._digests
    for _ in range(3):
        step(10, value)
    assert (lessons._digests > before) == soon
    for _ in range(16):
        step(10, value)
    assert lessons._digests > before, "learned from in the end"
