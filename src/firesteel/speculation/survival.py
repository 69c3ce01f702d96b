"""How likely a draft survives: calibrated conditional probabilities and their running product.

For draft j of a block, given that all before it were accepted,

    p_j = sigmoid(a[c, j] + b[c] * z_j + m[c] * log1p(margin_j))

where z_j is the confidence head's logit (less, if the checkpoint has no head),
margin_j the drafter's perturbed margin in units of T, and c the temperature
class (0: greedy, 1: sampled). Survival of draft j is p_1 ... p_j. The margin may
be looked at because coupled acceptance makes every decision lossless; under
classical rejection it is left out, since it depends on the draft it judges.

The coefficients start from a calibration file or from a prior, and are
refitted from accepted and rejected drafts; those behind a rejection are
censored and do not count. How good it is, is always measured.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CLASSES = 2
BINS = 15
MAX_MARGIN = 50.0


class CalibrationError(ValueError):
    """A calibration file that does not fit this checkpoint; says why."""


def logistic(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), stable."""
    out: Floats = 0.5 * (1.0 + np.tanh(0.5 * x))
    return out


@dataclass(frozen=True)
class Coefficients:
    """The logistic model; ``depth`` [classes, K], ``head`` and ``margin`` [classes]."""

    depth: Floats
    head: Floats
    margin: Floats
    uses_head: bool
    uses_margin: bool

    @classmethod
    def prior(cls, depths: int, uses_head: bool, uses_margin: bool) -> Coefficients:
        """Before anything was seen: trust the head, and a clear margin a little."""
        start = 0.0 if uses_head else 0.5
        shift = -0.8 if uses_margin else 0.0
        return cls(
            depth=np.full((CLASSES, depths), start + shift),
            head=np.full(CLASSES, 1.0 if uses_head else 0.0),
            margin=np.full(CLASSES, 0.8 if uses_margin else 0.0),
            uses_head=uses_head,
            uses_margin=uses_margin,
        )

    def fitted_to(self, depths: int, uses_head: bool, uses_margin: bool) -> Coefficients:
        """For another number of drafts: deeper ones get the last intercept.

        Raises CalibrationError if it was fitted with other signals: its intercepts would be wrong.
        """
        if (self.uses_head, self.uses_margin) != (uses_head, uses_margin):
            raise CalibrationError(
                f"calibration file: fitted with head={self.uses_head}, margin={self.uses_margin}; "
                f"here head={uses_head}, margin={uses_margin}; run firesteel calibrate with these settings"
            )
        at = np.minimum(np.arange(depths), self.depth.shape[1] - 1)
        return Coefficients(self.depth[:, at], self.head, self.margin, uses_head, uses_margin)

    def logit(
        self, head: Floats, margin: Floats, depth: NDArray[np.int64], kind: NDArray[np.int64]
    ) -> Floats:
        """Conditional log-odds of samples; all arrays of one shape."""
        at = np.minimum(depth, self.depth.shape[1] - 1)
        out: Floats = self.depth[kind, at] + self.margin[kind] * margin_feature(margin)
        return out + self.head[kind] * np.nan_to_num(head) if self.uses_head else out

    def probability(
        self, head: Floats, margin: Floats, depth: NDArray[np.int64], kind: NDArray[np.int64]
    ) -> Floats:
        """Conditional acceptance probability of samples."""
        return logistic(self.logit(head, margin, depth, kind))

    def plain(self) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...], tuple[float, ...]]:
        """(depth, head, margin) as plain values for a plan."""
        depth = tuple(tuple(float(v) for v in row) for row in self.depth)
        return depth, tuple(float(v) for v in self.head), tuple(float(v) for v in self.margin)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "depth": self.depth.tolist(),
            "head": self.head.tolist(),
            "margin": self.margin.tolist(),
            "uses_head": self.uses_head,
            "uses_margin": self.uses_margin,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Coefficients:
        """Rebuild; raises CalibrationError on anything malformed."""
        try:
            out = cls(
                np.array(raw["depth"], dtype=np.float64),
                np.array(raw["head"], dtype=np.float64),
                np.array(raw["margin"], dtype=np.float64),
                bool(raw["uses_head"]),
                bool(raw["uses_margin"]),
            )
        except (KeyError, TypeError, ValueError) as err:
            raise CalibrationError(
                f"calibration file: malformed ({err}); run firesteel calibrate again"
            ) from err
        shapes = (
            out.depth.ndim == 2
            and out.depth.shape[0] == CLASSES
            and out.head.shape == out.margin.shape == (CLASSES,)
        )
        if not shapes or not all(np.isfinite(a).all() for a in (out.depth, out.head, out.margin)):
            raise CalibrationError("calibration file: wrong shapes or values; run firesteel calibrate again")
        return out

    @classmethod
    def load(cls, path: str | Path) -> Coefficients:
        """Read a calibration file."""
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except (OSError, json.JSONDecodeError) as err:
            raise CalibrationError(f"{path}: not readable ({err}); run firesteel calibrate again") from err


def margin_feature(margin: Floats) -> Floats:
    """log1p of the margin, NaN and infinity tamed."""
    out: Floats = np.log1p(np.clip(np.nan_to_num(margin, nan=0.0, posinf=MAX_MARGIN), 0.0, MAX_MARGIN))
    return out


@dataclass(frozen=True)
class Outcome:
    """One verified draft that was not behind a rejection."""

    head: float
    margin: float
    depth: int
    kind: int
    accepted: bool


@dataclass
class Samples:
    """Outcomes as columns."""

    head: Floats
    margin: Floats
    depth: NDArray[np.int64]
    kind: NDArray[np.int64]
    accepted: Floats

    @classmethod
    def of(cls, outcomes: list[Outcome]) -> Samples:
        """From a list."""
        return cls(
            np.array([o.head for o in outcomes]),
            np.array([o.margin for o in outcomes]),
            np.array([o.depth for o in outcomes], dtype=np.int64),
            np.array([o.kind for o in outcomes], dtype=np.int64),
            np.array([o.accepted for o in outcomes], dtype=np.float64),
        )


def fit(samples: Samples, start: Coefficients, rounds: int = 25, ridge: float = 2.0) -> Coefficients:
    """Penalised maximum likelihood; the penalty pulls towards ``start``.

    Each temperature class is its own concave problem (K intercepts, one slope
    for the head, one for the margin), solved by Newton's method with halved
    steps: a start that is confidently wrong would make full steps oscillate.
    """
    depth, head, margin = start.depth.copy(), start.head.copy(), start.margin.copy()
    for kind in range(CLASSES):
        mine = samples.kind == kind
        if not mine.any():
            continue
        x, anchor, free = _design(samples, mine, start, kind)
        w = _maximise(x, samples.accepted[mine], anchor, free, ridge, rounds)
        k = depth.shape[1]
        depth[kind], head[kind], margin[kind] = w[:k], w[k], w[k + 1]
    return Coefficients(depth, head, margin, start.uses_head, start.uses_margin)


def _maximise(x: Floats, y: Floats, anchor: Floats, free: Floats, ridge: float, rounds: int) -> Floats:
    """argmax of the penalised log-likelihood of a logistic model."""

    def objective(w: Floats) -> float:
        z = x @ w
        likelihood = float((y * z - np.logaddexp(0.0, z)).sum())
        return likelihood - 0.5 * ridge * float(((w - anchor) ** 2).sum())

    w, value = anchor.copy(), objective(anchor)
    for _ in range(rounds):
        p = logistic(x @ w)
        grad = (x.T @ (y - p) - ridge * (w - anchor)) * free
        hess = (x * (p * (1 - p))[:, None]).T @ x + ridge * np.eye(len(w))
        step = np.linalg.solve(hess, grad) * free
        for _ in range(30):
            better = objective(w + step)
            if better >= value:
                break
            step = step / 2
        else:
            break
        w, gain, value = w + step, better - value, better
        if gain < 1e-7 * (1 + abs(value)):
            break
    return w


def _design(
    samples: Samples, mine: NDArray[np.bool_], start: Coefficients, kind: int
) -> tuple[Floats, Floats, Floats]:
    """(design [n, K+2], starting weights, 1 for weights that may move)."""
    k, n = start.depth.shape[1], int(mine.sum())
    x = np.zeros((n, k + 2))
    x[np.arange(n), np.minimum(samples.depth[mine], k - 1)] = 1.0
    x[:, k] = np.nan_to_num(samples.head[mine]) * start.uses_head
    x[:, k + 1] = margin_feature(samples.margin[mine]) * start.uses_margin
    anchor = np.concatenate((start.depth[kind], [start.head[kind], start.margin[kind]]))
    free = np.ones(k + 2)
    free[k], free[k + 1] = float(start.uses_head), float(start.uses_margin)
    return x, anchor, free


def sequential_temperatures(
    head: list[Floats], survived: list[Floats], grid: Floats | None = None
) -> list[float]:
    """One temperature per depth, found left to right (DSpark 3.2.1).

    head[j], survived[j]: logits of depth j and whether the draft and all
    before it were accepted, over all blocks. Each temperature minimises the ECE
    of the running product, the earlier ones fixed.
    """
    grid = np.geomspace(0.25, 6.0, 48) if grid is None else grid
    product, out = np.ones_like(head[0]), []
    for logits, truth in zip(head, survived, strict=True):
        errors = [ece(product * logistic(logits / t), truth) for t in grid]
        best = float(grid[int(np.argmin(errors))])
        out.append(best)
        product = product * logistic(logits / best)
    return out


# ---- how good it is ----------------------------------------------------------
def ece(predicted: Floats, truth: Floats, bins: int = BINS) -> float:
    """Expected calibration error over equal-mass bins."""
    if len(predicted) == 0:
        return 0.0
    order = np.argsort(predicted, kind="stable")
    parts = [p for p in np.array_split(order, min(bins, len(order))) if len(p)]
    gaps = [abs(predicted[p].mean() - truth[p].mean()) * len(p) for p in parts]
    return float(sum(gaps) / len(predicted))


def brier(predicted: Floats, truth: Floats) -> float:
    """Mean squared error of the probability."""
    return float(((predicted - truth) ** 2).mean()) if len(predicted) else 0.0


def auc(score: Floats, truth: Floats) -> float:
    """Chance that an accepted draft outranks a rejected one (ties half); NaN with one kind only."""
    ones, zeros = score[truth > 0.5], score[truth <= 0.5]
    if len(ones) == 0 or len(zeros) == 0:
        return float("nan")
    values = np.concatenate((ones, zeros))
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2.0
    return float(
        (ranks[inverse[: len(ones)]].sum() - len(ones) * (len(ones) + 1) / 2) / (len(ones) * len(zeros))
    )


@dataclass
class Calibrator:
    """Coefficients in use, the newest outcomes, and their quality.

    ``add`` takes outcomes; the model is refitted on the newest ``keep``, first
    after ``first`` of them, then at twice as many each time until every
    ``every``. ``seen`` counts all, by temperature class.
    """

    coefficients: Coefficients
    keep: int = 8192
    every: int = 1024
    first: int = 64
    refits: int = 0
    seen: list[int] = field(default_factory=lambda: [0] * CLASSES)
    _recent: deque[tuple[Outcome, float]] = field(default_factory=deque)
    _fresh: int = 0

    def __post_init__(self) -> None:
        self._recent = deque(maxlen=self.keep)
        self._start = self.coefficients
        self._due = min(self.first, self.every)

    def add(self, outcomes: list[Outcome]) -> bool:
        """Take outcomes, each with the probability that was in force; True if the model changed."""
        if not outcomes:
            return False
        s = Samples.of(outcomes)
        predicted = self.coefficients.probability(s.head, s.margin, s.depth, s.kind)
        self._recent.extend(zip(outcomes, predicted.tolist(), strict=True))
        self._fresh += len(outcomes)
        for outcome in outcomes:
            self.seen[outcome.kind] += 1
        if self._fresh < self._due:
            return False
        self._fresh, self._due = 0, min(2 * self._due, self.every)
        self.coefficients = fit(Samples.of([o for o, _ in self._recent]), self._start)
        self.refits += 1
        return True

    def usual(self, depths: int) -> Floats:
        """Survival by depth that verified drafts have had lately, all requests together."""
        hits, tries = np.ones(depths), np.full(depths, 1.5)  # two thirds until something is known
        for o, _ in self._recent:
            if o.depth < depths:
                hits[o.depth] += o.accepted
                tries[o.depth] += 1
        out: Floats = np.cumprod(np.minimum(hits / tries, 1.0))
        return out

    def quality(self) -> list[dict[str, float]]:
        """ECE, Brier score and AUC of the predictions that were in force, by depth."""
        depths = sorted({o.depth for o, _ in self._recent})
        out = []
        for depth in depths:
            pairs = [(p, float(o.accepted)) for o, p in self._recent if o.depth == depth]
            predicted, truth = np.array([p for p, _ in pairs]), np.array([t for _, t in pairs])
            out.append(
                {
                    "depth": depth + 1,
                    "samples": len(pairs),
                    "accepted": float(truth.mean()),
                    "ece": ece(predicted, truth),
                    "brier": brier(predicted, truth),
                    "auc": auc(predicted, truth),
                }
            )
        return out
