"""Paired comparisons of arms over rounds: which fixed arm is best, and by how much another one surely beats it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from firesteel.config import ParameterError


def t_quantile(share: float, degrees: int) -> float:
    """Quantile of Student's t, ``share`` in [0.5, 1): bisection on Simpson's integral of the density, good to 1e-6."""
    assert 0.5 <= share < 1 and degrees >= 1, "callers ask for upper quantiles"
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)

    def below(t: float) -> float:
        x = np.linspace(0.0, t, 2001)
        y = scale * (1 + x * x / degrees) ** (-(degrees + 1) / 2)
        return 0.5 + float(t / 6000 * (y[0] + y[-1] + 4 * y[1:-1:2].sum() + 2 * y[2:-1:2].sum()))

    low, high = 0.0, 1.0
    while below(high) < share and high < 64:
        low, high = high, 2 * high
    for _ in range(60):
        mid = (low + high) / 2
        low, high = (mid, high) if below(mid) < share else (low, mid)
    return high


@dataclass(frozen=True)
class Ratio:
    """A geometric mean of paired ratios; ``lower`` is its one-sided 95 % bound, ``error`` that of its logarithm."""

    ratio: float
    lower: float
    error: float
    rounds: int

    def to_json(self) -> dict[str, Any]:
        """Plain values; a bound that one round cannot give is None."""
        return {k: v if math.isfinite(v) else None for k, v in asdict(self).items()}


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """ours / theirs over rounds, with Student's t on the logarithms; one round has no bound (-inf)."""
    assert len(ours) == len(theirs) >= 1, "rates of the same rounds"
    logs = np.log(np.asarray(ours, dtype=np.float64)) - np.log(np.asarray(theirs, dtype=np.float64))
    mean, n = float(logs.mean()), len(logs)
    if n == 1:
        return Ratio(math.exp(mean), -math.inf, math.inf, 1)
    error = float(logs.std(ddof=1)) / math.sqrt(n)
    return Ratio(math.exp(mean), math.exp(mean - t_quantile(0.95, n - 1) * error), error, n)


@dataclass(frozen=True)
class Verdict:
    """One point: the best fixed arm by even rounds, and the ratio to it over odd rounds."""

    best: str
    held_out: Ratio
    crossed: Ratio  # both halves, each against the arm that is best in the other half
    hindsight: float  # against the arm that is best over all rounds: biased towards that arm

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "best_fixed": self.best,
            "held_out": self.held_out.to_json(),
            "crossed": self.crossed.to_json(),
            "hindsight_ratio": self.hindsight,
        }


def judge(rates: Mapping[str, Sequence[float]], ours: str, fixed: Sequence[str]) -> Verdict:
    """Compare ``ours`` with the best of ``fixed``; rates: tokens per second by arm and round.

    The arm is chosen on one half of the rounds and scored on the other: chosen
    and scored on the same rounds, the luckiest arm would win.
    """
    rounds = len(rates[ours])
    if rounds < 2:
        raise ParameterError(
            f"rounds={rounds}: the best arm is chosen on even and scored on odd rounds; give 2 or more"
        )
    even, odd = range(0, rounds, 2), range(1, rounds, 2)

    def best(which: Sequence[int]) -> str:
        return max(fixed, key=lambda arm: sum(math.log(rates[arm][r]) for r in which))

    def ratios(arm: str, which: Sequence[int]) -> tuple[list[float], list[float]]:
        return [rates[ours][r] for r in which], [rates[arm][r] for r in which]

    chosen, other = best(even), best(odd)
    mine, theirs = ratios(chosen, odd)
    back, their_back = ratios(other, even)
    everything = paired(*ratios(best(range(rounds)), range(rounds)))
    return Verdict(chosen, paired(mine, theirs), paired(mine + back, theirs + their_back), everything.ratio)


def overall(points: Sequence[Ratio]) -> Ratio:
    """Geometric mean over points with independent errors."""
    assert points, "a sweep has points"
    mean = sum(math.log(p.ratio) for p in points) / len(points)
    if any(p.rounds < 2 for p in points):
        return Ratio(math.exp(mean), -math.inf, math.inf, min(p.rounds for p in points))
    error = math.sqrt(sum(p.error**2 for p in points)) / len(points)
    degrees = sum(p.rounds - 1 for p in points)
    lower = math.exp(mean - t_quantile(0.95, degrees) * error)
    return Ratio(math.exp(mean), lower, error, sum(p.rounds for p in points))


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Median, 90th and 99th percentile and mean; None for no values."""
    if not values:
        return {"p50": None, "p90": None, "p99": None, "mean": None}
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p99 = (float(v) for v in np.percentile(array, (50, 90, 99)))
    return {"p50": p50, "p90": p90, "p99": p99, "mean": float(array.mean())}
