"""Paired comparisons: quantiles from a table, honest choice of the best arm, bounds that cover."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from firesteel.bench.pairing import Ratio, judge, overall, paired, percentiles, t_quantile
from firesteel.bench.rounds import order_of
from firesteel.config import ParameterError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("share", "degrees", "value"),
    [(0.95, 1, 6.3138), (0.95, 3, 2.3534), (0.975, 3, 3.1824), (0.95, 30, 1.6973), (0.5, 5, 0.0)],
)
def test_t_quantiles(share: float, degrees: int, value: float) -> None:
    assert t_quantile(share, degrees) == pytest.approx(value, abs=2e-4)


def test_ratio_by_hand() -> None:
    found = paired([1.1, 1.2], [1.0, 1.0])
    logs = [math.log(1.1), math.log(1.2)]
    error = abs(logs[1] - logs[0]) / 2
    assert found.ratio == pytest.approx(math.exp(sum(logs) / 2))
    assert found.lower == pytest.approx(math.exp(sum(logs) / 2 - 6.3138 * error), rel=1e-3)
    assert paired([2.0], [1.0]).to_json() == {"ratio": 2.0, "lower": None, "error": None, "rounds": 1}


def test_the_bound_covers() -> None:
    """The one-sided bound lies below the truth in about 95 of 100 cases."""
    draw = np.random.default_rng(0)
    covered = sum(
        paired(np.exp(draw.normal(0.0, 0.05, 4)).tolist(), [1.0] * 4).lower <= 1.0 for _ in range(2000)
    )
    assert 0.93 <= covered / 2000 <= 0.97


def test_the_best_arm_is_chosen_on_even_and_scored_on_odd_rounds() -> None:
    rates = {"none": [10.0, 1.0, 10.0, 1.0], "K=3": [9.0, 8.0, 9.0, 8.0], "adaptive": [9.0, 4.0, 9.0, 4.0]}
    found = judge(rates, "adaptive", ["none", "K=3"])
    assert found.best == "none" and found.held_out.ratio == pytest.approx(4.0)
    assert found.crossed.ratio == pytest.approx((4.0**2 * 1.0**2) ** 0.25)  # odd rounds choose K=3
    assert found.hindsight == pytest.approx((9 / 9 * 4 / 8) ** 0.5)
    with pytest.raises(ParameterError, match="rounds=1"):
        judge({k: v[:1] for k, v in rates.items()}, "adaptive", ["none"])


def test_equal_arms_do_not_win_by_luck() -> None:
    """Scored on the rounds that chose it, the best of six equal arms would beat the seventh by luck."""
    draw = np.random.default_rng(1)
    held, hindsight = [], []
    for _ in range(400):
        rates = {str(a): np.exp(draw.normal(0, 0.05, 8)).tolist() for a in range(7)}
        found = judge(rates, "6", [str(a) for a in range(6)])
        held.append(math.log(found.held_out.ratio))
        hindsight.append(math.log(found.hindsight))
    assert abs(np.mean(held)) < 0.005 and np.mean(hindsight) < -0.015


def test_overall_and_percentiles() -> None:
    both = overall([Ratio(1.21, 1.0, 0.03, 4), Ratio(1.0, 0.9, 0.04, 4)])
    assert both.ratio == pytest.approx(1.1) and both.error == pytest.approx(0.025)
    assert both.lower == pytest.approx(1.1 * math.exp(-t_quantile(0.95, 6) * 0.025))
    assert percentiles([])["p50"] is None
    assert percentiles([1.0, 2.0, 3.0])["p50"] == 2.0


@pytest.mark.parametrize("arms", [1, 2, 3, 4, 5, 6, 7])
def test_every_arm_runs_at_every_place_and_behind_every_other_equally_often(arms: int) -> None:
    rounds = arms if arms % 2 == 0 else 2 * arms
    lines = [order_of(arms, turn) for turn in range(rounds)]
    places = [(at, arm) for line in lines for at, arm in enumerate(line)]
    behind = [pair for line in lines for pair in itertools.pairwise(line)]
    assert {places.count((at, arm)) for at in range(arms) for arm in range(arms)} == {rounds // arms}
    assert len({behind.count((a, b)) for a in range(arms) for b in range(arms) if a != b}) <= 1
