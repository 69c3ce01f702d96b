"""The budget against brute force, prices that heal, and survivals that are calibrated."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firesteel.speculation.budget import choose, choose_width, fixed
from firesteel.speculation.cost import CostError, CostModel, CostTable, from_samples
from firesteel.speculation.survival import (
    Calibrator,
    Coefficients,
    Outcome,
    Samples,
    auc,
    brier,
    ece,
    fit,
    logistic,
    sequential_temperatures,
)

Curve = Callable[[np.ndarray], np.ndarray]


def curves() -> dict[str, Curve]:
    return {
        "linear": lambda r: 5.0 + 0.3 * r,
        "flat": lambda r: np.full(len(r), 7.0),
        "stairs": lambda r: 4.0 + 3.0 * np.ceil(r / 4),
        "steep": lambda r: 1.0 + 1.0 * r**1.5,
    }


@pytest.mark.parametrize("name", list(curves()))
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_choose_equals_brute_force(name: str, data: st.DataObject) -> None:
    """Over every subset of drafts: no subset has a better rate than the chosen number of best ones."""
    gains = np.array(data.draw(st.lists(st.floats(0, 1), max_size=8)))
    base = data.draw(st.integers(1, 9))
    extra = data.draw(st.floats(0, 5))
    room = data.draw(st.integers(0, 10))
    cost = curves()[name]
    budget = choose(gains, base, float(base), cost, extra, room)
    best = max(
        (base + sum(subset)) / (cost(np.array([base + len(subset)]))[0] + extra)
        for n in range(min(len(gains), room) + 1)
        for subset in itertools.combinations(gains, n)
    )
    assert budget.drafts <= min(len(gains), room)
    assert budget.expected_tokens / budget.predicted_ms == pytest.approx(best, rel=1e-9)


def test_choose_does_not_stop_at_the_first_descent() -> None:
    """10 ms up to 64 rows, 14 up to 128: 65 rows are a bad buy, 128 a good one."""
    survivals = np.full(120, 0.9)
    budget = choose(survivals, 8, 8.0, lambda r: np.where(r <= 64, 10.0, 14.0), 0.0, 1000)
    assert budget.drafts == 120 and budget.reason == "every draft pays"


def test_choose_ties_take_fewer_and_nan_counts_for_nothing() -> None:
    assert choose(np.zeros(5), 1, 1.0, lambda r: np.full(len(r), 3.0), 0.0, 9).drafts == 0
    budget = choose(np.array([np.nan, 0.9, np.nan]), 1, 1.0, lambda r: np.full(len(r), 3.0), 0.0, 9)
    assert budget.drafts == 1 and budget.expected_tokens == pytest.approx(1.9)


def test_reasons_say_what_limited() -> None:
    flat: Curve = lambda r: np.full(len(r), 3.0)  # noqa: E731
    steep: Curve = lambda r: r**3.0  # noqa: E731
    assert choose(np.array([]), 1, 1.0, flat, 0.0, 9).reason == "no drafts to verify"
    assert choose(np.ones(3), 1, 1.0, flat, 0.0, 0).reason == "no rows left for drafts"
    assert choose(np.ones(3), 1, 1.0, flat, 0.0, 2).reason == "cut by max_num_batched_tokens"
    assert (
        choose(np.full(3, 0.1), 1, 1.0, steep, 0.0, 9).reason
        == "verifying any draft costs more than it gains"
    )
    assert fixed([3, 0, 2], 4).drafts == 4 and "cut" in fixed([3, 0, 2], 4).reason
    assert fixed([0, 0], 4).drafts == 0


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_width_never_loses_to_any_fixed_setting(data: st.DataObject) -> None:
    """At the same prices the chosen cycle is at least as fast as no drafting and as every fixed width for all."""
    requests, k = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 7))
    p = np.array(data.draw(st.lists(st.floats(0.01, 1), min_size=requests * k, max_size=requests * k)))
    profiles = np.cumprod(p.reshape(requests, k), axis=1)
    profiles = profiles[np.argsort(-profiles.sum(1), kind="stable")]
    cost = curves()[data.draw(st.sampled_from(sorted(curves())))]
    unit = data.draw(st.floats(0, 2))
    draft = lambda m, w: 0.5 + unit * m * w**0.5  # noqa: E731
    plan = choose_width(profiles, requests, float(requests), cost, draft, tuple(range(1, k + 1)), 10_000)
    plain = requests / cost(np.array([requests]))[0]
    assert plan.plain_rate == pytest.approx(plain) and plan.rate >= plain * (1 - 1e-9)
    for w in range(1, k + 1):
        rows = requests * (1 + w)
        rate = (requests + profiles[:, :w].sum()) / (cost(np.array([rows]))[0] + draft(requests, w))
        assert plan.rate >= rate * (1 - 1e-9)
    assert plan.pays == (plan.rate > plain * (1 + 1e-9))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.integers(1, 5), st.floats(0, 1.5))
def test_plans_that_are_ruled_out_unseen_would_not_have_won(
    seed: int, requests: int, k: int, unit: float
) -> None:
    """All requests at every width, searched one by one in sampled cases: none beats the chosen cycle."""
    cases = np.cumprod(np.random.default_rng(seed).uniform(0.2, 1.0, (16, requests, k)), axis=2)
    cost = curves()[sorted(curves())[seed % len(curves())]]
    draft = lambda m, w: 0.3 + unit * m * w  # noqa: E731
    plan = choose_width(cases, requests, float(requests), cost, draft, tuple(range(1, k + 1)), 10_000)
    for w in range(1, k + 1):
        gains = -np.sort(-cases[:, :, :w].reshape(16, -1), axis=1).mean(0)
        ms = cost(np.arange(requests, requests + len(gains) + 1)) + draft(requests, w)
        assert plan.rate * (1 + 1e-9) >= ((requests + np.append(0.0, np.cumsum(gains))) / ms).max()


# ---- prices -------------------------------------------------------------------------
def table(**changes: object) -> CostTable:
    values: dict[str, object] = {
        "fingerprint": "here",
        "rows": (1, 2, 4, 8),
        "step_ms": (5.0, 5.5, 6.5, 9.0),
        "context": 64,
        "context_ms": 0.01,
        "requests": (1, 4),
        "draft": {1: (1.0, 2.0), 5: (2.0, 6.0)},
    }
    return CostTable(**(values | changes))  # type: ignore[arg-type]


def test_prices_between_and_beyond_the_measured() -> None:
    m = CostModel(table())
    assert m.step_ms(np.array([1, 3, 8]), 64).tolist() == pytest.approx([5.0, 6.0, 9.0])
    assert m.step_ms(np.array([16]), 64)[0] > 9.0
    assert m.step_ms(np.array([4]), 1064)[0] == pytest.approx(6.5 + 4 * 0.01)
    stairs = CostModel(table(staircase=True))
    assert stairs.step_ms(np.array([3, 4, 5]), 64).tolist() == pytest.approx([6.5, 6.5, 9.0])
    assert stairs.draft_ms(2, 3) == pytest.approx(4.0) and stairs.draft_ms(1, 1) == pytest.approx(1.0)
    assert m.draft_ms(2, 3) == pytest.approx((1.0 + 1 / 3 + 2.0 + 4 / 3) / 2)
    assert m.draft_ms(0, 3) == 0.0


def test_one_mismeasured_size_does_not_raise_the_larger_ones() -> None:
    for wrong in (55.0, 0.55):
        poisoned = CostModel(table(step_ms=(5.0, wrong, 6.5, 9.0)))
        assert poisoned.step_ms(np.array([1, 2, 4, 8]), 64).tolist() == pytest.approx([5.0, 5.5, 6.5, 9.0])
        assert poisoned.spikes == (2,)
    dear_first = CostModel(table(step_ms=(55.0, 5.5, 6.5, 9.0)))
    assert dear_first.step_ms(np.array([1, 2]), 64).tolist() == pytest.approx([5.5, 5.5])


def test_a_wrong_table_heals_and_departures_are_counted() -> None:
    m = CostModel(table(step_ms=(50.0, 55.0, 65.0, 90.0)))
    for _ in range(200):
        for rows, real in ((1, 5.0), (4, 6.5), (8, 9.0)):
            m.observe(rows, float(m.step_ms(np.array([rows]), 64)[0]), real)
    assert m.step_ms(np.array([1, 4, 8]), 64).tolist() == pytest.approx([5.0, 6.5, 9.0], rel=0.1)
    assert m.departures > 10 and m.measured == 600
    before = m.corrections.copy()
    assert not m.observe(0, 1.0, 1.0) and not m.observe(4, 5.0, float("nan"))
    assert np.array_equal(before, m.corrections)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": (-5, 2, 4, 8)},
        {"rows": (0, 2, 4, 8)},
        {"requests": ()},
        {"requests": (0, 4)},
        {"requests": (4, 1)},
        {"draft": {0: (1.0, 2.0)}},
        {"context_ms": float("nan")},
        {"context_ms": float("inf")},
        {"context_ms": -0.1},
        {"context": -1},
    ],
)
def test_a_malformed_table_is_refused(changes: dict[str, object]) -> None:
    if changes.get("requests") == ():
        changes = changes | {"draft": {1: ()}}
    with pytest.raises(CostError, match="profile again"):
        table(**changes)


def test_a_price_that_is_no_number_teaches_nothing() -> None:
    m = CostModel(table())
    before = m.corrections.copy()
    assert not m.observe(4, float("nan"), 5.0) and not m.observe(4, float("inf"), 5.0)
    assert m.corrections == before


def test_a_slow_spell_of_the_machine_leaves_prices_in_proportion() -> None:
    """Everything takes twice as long for a while: no size and no drafting has become dearer than the others."""
    m = CostModel(table())

    def shape() -> list[float]:
        return [m.row_ms(8, 64) / m.row_ms(1, 64), m.draft_ms(2, 3) / m.row_ms(1, 64)]

    before = shape()
    for step in range(80):
        pace = 2.0 if step >= 40 else 1.0
        m.observe(1, m.price(1, 64, 0, 0), 5.0 * pace)
    assert shape() == pytest.approx(before, rel=0.06) and m.row_ms(1, 64) > 8.0
    assert m.noise < 0.1


def test_what_a_first_drafting_pass_catches_up_with_is_its_own_price() -> None:
    """Context rows that wait are written when a request begins to draft; drafting on costs what it did."""
    m = CostModel(table())
    before = m.draft_ms(1, 3)
    for _ in range(60):
        for _ in range(8):
            m.observe(1, m.price(1, 64, 0, 0), 5.0)
        m.observe(1, m.price(1, 64, 1, 3), 5.0 + before + 2.0, 1, 3, entered=1)
        m.observe(1, m.price(1, 64, 1, 3), 5.0 + before, 1, 3)
    assert m.entry_ms == pytest.approx(2.0, rel=0.25) and m.draft_ms(1, 3) == pytest.approx(before, rel=0.15)


def test_steps_with_prompts_say_nothing_of_the_pace() -> None:
    m = CostModel(table())
    for _ in range(20):
        m.observe(1, m.price(1, 64, 0, 0), 5.0)
        m.observe(8, m.price(8, 64, 0, 0), 30.0, prompt_rows=7)
    assert abs(m.pace) < 0.15 and m.noise < 0.06


def test_a_stall_of_the_card_at_one_size_makes_no_size_dear() -> None:
    """Equal steps tell of the pace only; a size is told from another where they change."""
    sizes = (256, 512, 640, 768, 896, 1024)
    m = CostModel(table(rows=sizes, step_ms=(9.0, 11.1, 12.8, 13.6, 14.9, 15.7), staircase=True))
    true = {768: 13.6, 896: 14.5}  # 896 rows are cheaper than the table says

    def run(rows: int, steps: int, pace: float = 1.0) -> None:
        for _ in range(steps):
            m.observe(rows, m.price(rows, 64, 0, 0), true[rows] * pace, context=64)

    def ratio() -> float:
        return m.row_ms(896, 64) / m.row_ms(768, 64)

    for _ in range(4):
        run(768, 8)
        run(896, 8)
    m._learn()
    assert ratio() == pytest.approx(14.5 / 13.6, rel=0.006)
    for pace in (1.1, 1.2, 1.3, 1.3, 1.2, 1.1):
        run(896, 1, pace)
    run(896, 40)
    run(896, 16, 1.17)  # and from here on it is slower for good
    m._learn()
    assert ratio() == pytest.approx(14.5 / 13.6, rel=0.006)
    run(768, 16, 1.17)
    m._learn()
    assert ratio() == pytest.approx(14.5 / 13.6, rel=0.006) and m.row_ms(768, 64) == pytest.approx(
        13.6 * 1.17, rel=0.05
    )


def test_a_size_that_was_never_tried_is_hoped_to_be_cheaper() -> None:
    """And the one that runs is not: its price is known."""
    m = CostModel(table(rows=(8, 16, 20, 24, 64), step_ms=(5.0, 6.0, 6.5, 7.0, 12.0), staircase=True))
    for _ in range(40):
        m.observe(20, m.price(20, 64, 0, 0), 6.5, context=64)
        m.observe(16, m.price(16, 64, 0, 0), 6.0, context=64)
    m._learn()
    rows = np.array([8, 16, 20, 24, 64])
    hoped = m.hopeful_ms(rows, 64) / m.step_ms(rows, 64)
    assert hoped[0] == 1.0 and hoped[4] == 1.0, "what runs anyway, and what is far off"
    assert 0.97 < hoped[3] < 0.995 and hoped[1] > 0.997, hoped


def test_tables_travel_only_to_where_they_belong(tmp_path: object) -> None:
    file = f"{tmp_path}/cost.json"
    table().save(file)
    assert CostTable.load(file, "here") == table()
    with pytest.raises(CostError, match="measured for 'here', this is 'there'"):
        CostTable.load(file, "there")
    with pytest.raises(CostError, match="no readable cost table"):
        CostTable.load(f"{file}.none", "here")
    for bad in ({"step_ms": (5.0, 5.5, float("nan"), 9.0)}, {"rows": (1, 2, 2, 8)}, {"draft": {1: (1.0,)}}):
        with pytest.raises(CostError):
            table(**bad)
    with pytest.raises(CostError, match="malformed"):
        CostTable.from_json({"fingerprint": "x"})


def test_samples_give_base_and_context_term() -> None:
    made = from_samples(
        "x", [(1, 64, 5.0), (4, 64, 8.0), (1, 1064, 5.2), (4, 1064, 8.8)], [(1, 2, 1.5), (4, 2, 3.0)]
    )
    assert made.rows == (1, 4) and made.step_ms == (5.0, 8.0) and made.context_ms == pytest.approx(0.2)
    assert made.draft == {2: (1.5, 3.0)} and made.requests == (1, 4)


# ---- survival -------------------------------------------------------------------------
def draw(n: int, seed: int, truth: Coefficients) -> Samples:
    rng = np.random.default_rng(seed)
    head, margin = rng.normal(0.5, 1.5, n), rng.gamma(1.5, 1.5, n)
    depth, kind = rng.integers(0, 5, n), rng.integers(0, 2, n)
    p = truth.probability(head, margin, depth, kind)
    return Samples(head, margin, depth, kind, (rng.random(n) < p).astype(float))


TRUTH = Coefficients(
    np.array([[1.0, 0.5, 0.0, -0.5, -1.0], [0.0, -0.3, -0.6, -0.9, -1.2]]),
    np.array([0.6, 0.9]),
    np.array([1.2, 0.7]),
    True,
    True,
)


def test_fit_recovers_what_made_the_data() -> None:
    got = fit(draw(40_000, 1, TRUTH), Coefficients.prior(5, True, True))
    assert np.abs(got.depth - TRUTH.depth).max() < 0.2
    assert np.abs(got.head - TRUTH.head).max() < 0.1 and np.abs(got.margin - TRUTH.margin).max() < 0.15
    fresh = draw(40_000, 2, TRUTH)
    p = got.probability(fresh.head, fresh.margin, fresh.depth, fresh.kind)
    assert ece(p, fresh.accepted) < 0.015
    blind = fit(draw(40_000, 1, TRUTH), Coefficients.prior(5, False, True))
    assert blind.head.tolist() == [0.0, 0.0]  # a signal that is not there gets no weight
    without = blind.probability(fresh.head, fresh.margin, fresh.depth, fresh.kind)
    assert auc(p, fresh.accepted) > auc(without, fresh.accepted) + 0.02


def test_fit_leaves_a_start_that_is_confidently_wrong() -> None:
    """A head whose logits are far off and mean the opposite: full Newton steps would oscillate."""
    rng = np.random.default_rng(5)
    head = rng.normal(0.0, 4.0, 300)
    n = np.zeros(300, dtype=np.int64)
    truth = (rng.random(300) < logistic(1.0 - 0.5 * head)).astype(float)
    got = fit(Samples(head, np.ones(300), n, n + 1, truth), Coefficients.prior(3, True, True))
    assert got.head[1] == pytest.approx(-0.5, abs=0.2)


def test_few_samples_stay_near_the_start() -> None:
    start = Coefficients.prior(5, True, True)
    rejected = Samples.of([Outcome(1.0, 1.0, 0, 0, False)])
    one = fit(rejected, start)
    assert 0.1 < np.abs(one.depth - start.depth).max() < 1.0  # all depths learn from it
    trusted = fit(rejected, start, trust=50.0)
    assert np.abs(trusted.depth - start.depth).max() < 0.05
    assert np.array_equal(one.depth[1], start.depth[1])  # the other class saw nothing


def test_signals_that_are_stuck_or_broken_give_finite_probabilities() -> None:
    start = Coefficients.prior(3, True, True)
    odd = np.array([np.nan, np.inf, -np.inf, 0.0])
    p = start.probability(odd, odd, np.zeros(4, dtype=np.int64), np.zeros(4, dtype=np.int64))
    assert np.isfinite(p).all() and (p >= 0).all() and (p <= 1).all()
    got = fit(
        Samples(
            np.full(500, np.nan),
            np.full(500, np.inf),
            np.zeros(500, dtype=np.int64),
            np.zeros(500, dtype=np.int64),
            np.ones(500),
        ),
        start,
    )
    assert all(np.isfinite(a).all() for a in (got.depth, got.head, got.margin))


def test_calibrator_refits_and_reports() -> None:
    c = Calibrator(Coefficients.prior(5, True, True), keep=4096, every=512)
    s = draw(4096, 3, TRUTH)
    outcomes = [
        Outcome(*v)
        for v in zip(
            s.head.tolist(),
            s.margin.tolist(),
            s.depth.tolist(),
            s.kind.tolist(),
            (s.accepted > 0).tolist(),
            strict=True,
        )
    ]
    changes = sum(c.add(outcomes[i : i + 64]) for i in range(0, len(outcomes), 64))
    # at 64, 128, 192, 320, 576, then every 512
    assert changes == c.refits == 11 and sum(c.seen) == 4096 and not c.add([])
    bins = c.reliability()
    assert len(bins) == 15 and sum(n for _, _, n in bins) == 4096
    assert all(abs(p - t) < 0.2 for p, t, _ in bins)
    quality = c.quality()
    assert [q["depth"] for q in quality] == [1, 2, 3, 4, 5]
    assert all(q["ece"] < 0.12 and q["auc"] > 0.7 for q in quality)


def test_measures_on_known_values() -> None:
    fifth = (np.arange(15_000) % 5 == 0).astype(float)
    assert ece(np.full(15_000, 0.2), fifth) == pytest.approx(0.0, abs=1e-9)
    assert ece(np.full(15_000, 0.3), fifth) == pytest.approx(0.1, abs=1e-9)
    assert ece(np.array([0.9] * 100), np.zeros(100)) == pytest.approx(0.9)
    assert brier(np.array([1.0, 0.0]), np.array([1.0, 1.0])) == pytest.approx(0.5)
    assert auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0.0, 0.0, 1.0, 1.0])) == pytest.approx(0.75)
    assert auc(np.array([0.5, 0.5]), np.array([0.0, 1.0])) == pytest.approx(0.5)
    assert np.isnan(auc(np.array([0.5]), np.array([1.0])))


def test_sequential_temperatures_undo_overconfidence() -> None:
    """Logits twice too large at depth 1 and thrice at depth 2."""
    rng = np.random.default_rng(0)
    heads, survived, alive = [], [], np.ones(40_000)
    for scale in (2.0, 3.0):
        true = rng.normal(1.0, 1.0, 40_000)
        alive = alive * (rng.random(40_000) < logistic(true))
        heads.append(true * scale)
        survived.append(alive.copy())
    assert sequential_temperatures(heads, survived) == pytest.approx([2.0, 3.0], rel=0.15)
