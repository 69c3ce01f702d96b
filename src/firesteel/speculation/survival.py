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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
CLASSES = 2
BINS = 15
MAX_MARGIN = 50.0
MAX_LOGIT = 40.0
ENOUGH = 16  # samples after which a signal that has one value counts as stuck


class CalibrationError(ValueError):
    """A calibration file that does not fit this checkpoint; says why."""


def logistic(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), stable."""
    out: Floats = 0.5 * (1.0 + np.tanh(0.5 * x))
    return out


@dataclass(frozen=True)
class Coefficients:
    """The logistic model; ``depth`` [classes, K], ``head`` and ``margin`` [classes].

    ``usual``: mean conditional acceptance by depth where it was fitted; empty if nobody knows.
    """

    depth: Floats
    head: Floats
    margin: Floats
    uses_head: bool
    uses_margin: bool
    usual: tuple[float, ...] = ()

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
        return Coefficients(self.depth[:, at], self.head, self.margin, uses_head, uses_margin, self.usual)

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
            "usual": list(self.usual),
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
                tuple(float(v) for v in raw.get("usual", ())),
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
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as err:
            raise CalibrationError(f"{path}: not readable ({err}); run firesteel calibrate again") from err


def margin_feature(margin: Floats) -> Floats:
    """log1p of the margin, NaN and infinity tamed."""
    out: Floats = np.log1p(np.fmin(np.fmax(margin, 0.0), MAX_MARGIN))  # fmax(NaN, 0) is 0
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


COMMON, DEPTH, SLOPE = 0.5, 2.0, 2.0  # penalties: of a shift of all depths, of one depth, of a signal


def fit(
    samples: Samples,
    start: Coefficients,
    rounds: int = 25,
    trust: float = 1.0,
    warm: Coefficients | None = None,
) -> Coefficients:
    """Penalised maximum likelihood; the penalty, times ``trust``, pulls towards ``start``.

    Each temperature class is its own concave problem (a shift of all depths,
    K shifts of single ones, one slope for the head, one for the margin),
    solved by Newton's method with halved steps: a start that is confidently
    wrong would make full steps oscillate. A signal that never changes says
    nothing: it gets no weight. ``warm``: coefficients to search from.
    """
    job = Fit(samples, start, rounds, trust, warm)
    while not job.step():
        pass
    return job.coefficients


class Fit:
    """``fit`` in small steps, for whoever has a step of the engine to catch: one Newton step each."""

    def __init__(
        self,
        samples: Samples,
        start: Coefficients,
        rounds: int = 25,
        trust: float = 1.0,
        warm: Coefficients | None = None,
    ):
        self._samples, self._start, self._rounds, self._trust = samples, start, rounds, trust
        origin = start if warm is None else warm  # a class of which nothing is new stays as it is
        self._depth, self._head, self._margin = origin.depth.copy(), origin.head.copy(), origin.margin.copy()
        self._warm = warm
        self._kinds = [k for k in range(CLASSES) if bool((samples.kind == k).any())]
        self._search: _Search | None = None

    @property
    def coefficients(self) -> Coefficients:
        """What was found."""
        s = self._start
        return Coefficients(self._depth, self._head, self._margin, s.uses_head, s.uses_margin, s.usual)

    def step(self) -> bool:
        """Some work; True if none is left."""
        if not self._kinds:
            return True
        kind = self._kinds[0]
        if self._search is None:
            self._search = self._begin(kind)
        elif self._search.step():
            k, w = self._depth.shape[1], self._search.w
            self._depth[kind], self._head[kind], self._margin[kind] = w[:k] + w[k + 2], w[k], w[k + 1]
            self._kinds, self._search = self._kinds[1:], None
        return not self._kinds

    def _begin(self, kind: int) -> _Search:
        mine = self._samples.kind == kind
        x, anchor, free = _design(self._samples, mine, self._start, kind)
        k = self._depth.shape[1]
        ridge = self._trust * np.concatenate((np.full(k, DEPTH), [SLOPE, SLOPE, COMMON]))
        w = anchor.copy()
        if self._warm is not None:
            w[:k], w[k], w[k + 1] = self._warm.depth[kind], self._warm.head[kind], self._warm.margin[kind]
            w = np.where(free > 0, w, anchor)
        return _Search(x, self._samples.accepted[mine], w, anchor, free, ridge, self._rounds)


class _Search:
    """argmax over ``w`` of the penalised log-likelihood of a logistic model."""

    def __init__(
        self, x: Floats, y: Floats, w: Floats, anchor: Floats, free: Floats, ridge: Floats, rounds: int
    ):
        self.x, self.y, self.w, self.anchor, self.free, self.ridge = x, y, w, anchor, free, ridge
        self.left, self.value = rounds, self._objective(w)

    def _objective(self, w: Floats) -> float:
        z = self.x @ w
        likelihood = float((self.y * z - np.logaddexp(0.0, z)).sum())
        return likelihood - 0.5 * float((self.ridge * (w - self.anchor) ** 2).sum())

    def step(self) -> bool:
        """One Newton step; True if it was the last."""
        if self.left == 0:
            return True
        self.left -= 1
        x, p = self.x, logistic(self.x @ self.w)
        grad = (x.T @ (self.y - p) - self.ridge * (self.w - self.anchor)) * self.free
        hess = (x * (p * (1 - p))[:, None]).T @ x + np.diag(self.ridge)
        step = np.linalg.solve(hess, grad) * self.free
        for _ in range(30):
            better = self._objective(self.w + step)
            if better >= self.value:
                break
            step = step / 2
        else:
            return True
        gain, self.w, self.value = better - self.value, self.w + step, better
        return gain < 1e-7 * (1 + abs(better))


def _design(
    samples: Samples, mine: NDArray[np.bool_], start: Coefficients, kind: int
) -> tuple[Floats, Floats, Floats]:
    """(design [n, K+3], starting weights, 1 for weights that may move)."""
    k, n = start.depth.shape[1], int(mine.sum())
    x = np.zeros((n, k + 3))
    x[np.arange(n), np.minimum(samples.depth[mine], k - 1)] = 1.0
    x[:, k] = np.nan_to_num(samples.head[mine]).clip(-MAX_LOGIT, MAX_LOGIT) * start.uses_head
    x[:, k + 1] = margin_feature(samples.margin[mine]) * start.uses_margin
    x[:, k + 2] = 1.0
    anchor = np.concatenate((start.depth[kind], [start.head[kind], start.margin[kind], 0.0]))
    free = np.ones(k + 3)
    for at, used in ((k, start.uses_head), (k + 1, start.uses_margin)):
        if used and (n < ENOUGH or float(np.ptp(x[:, at])) > 1e-6):
            continue
        free[at] = 0.0  # absent, or stuck at one value
        if used:
            anchor[at] = 0.0
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


WORK, SETUP = 4096, 512  # outcomes that one part of a refit looks at, and what a pass over none costs


class Calibrator:
    """Coefficients in use, the newest outcomes, and their quality.

    ``add`` takes outcomes; the model is refitted on the newest ``keep``, first
    after ``first`` of them, then at twice as many each time until every
    ``every``. ``seen`` counts all, by temperature class. ``trust`` multiplies
    the pull towards the first coefficients: large if they come from a file.
    ``first`` None: few without a file, more with one.

    Who has no time for a whole refit calls ``collect``, and ``work`` until
    nothing is ``due``. ``source`` is asked for outcomes that wait elsewhere
    whenever somebody looks at the quality.
    """

    def __init__(
        self,
        coefficients: Coefficients,
        keep: int = 4096,
        every: int = 16384,
        first: int | None = None,
        trust: float = 1.0,
    ):
        self.coefficients, self.trust, self.every = coefficients, trust, every
        self.refits, self.seen = 0, [0] * CLASSES
        self.source: Callable[[], Samples | None] | None = None
        self._start = coefficients
        self._recent = np.zeros((keep, 6))  # head, margin, depth, kind, accepted, predicted
        soon = 16 if trust <= 1.0 else 256  # a file need not be corrected in the first steps
        self._count, self._fresh, self._next = 0, 0, min(first or soon, every)
        self._job: Fit | None = None

    def add(self, outcomes: Samples | list[Outcome]) -> bool:
        """Take outcomes, each with the probability that was in force; True if the model changed."""
        self.collect(outcomes if isinstance(outcomes, Samples) else Samples.of(outcomes))
        changed = False
        while self.due:
            changed |= self.work()
        return changed

    def collect(self, s: Samples) -> None:
        """Keep outcomes, each with the probability that is in force."""
        n, keep = len(s.accepted), len(self._recent)
        if n == 0:
            return
        predicted = self.coefficients.probability(s.head, s.margin, s.depth, s.kind)
        lines = np.stack((s.head, s.margin, s.depth, s.kind, s.accepted, predicted), axis=1)[-keep:]
        self._recent[(self._count + np.arange(len(lines))) % keep] = lines
        self._count += len(lines)
        self._fresh += n
        sampled = int(s.kind.sum())
        self.seen[0] += n - sampled
        self.seen[1] += sampled

    @property
    def due(self) -> bool:
        """Whether a refit is due or under way."""
        return self._job is not None or self._fresh >= self._next

    @property
    def missing(self) -> int:
        """Outcomes until the next refit."""
        return max(self._next - self._fresh, 0)

    def work(self) -> bool:
        """A part of the refit that is due, well below a millisecond; True if the model changed."""
        if self._job is None:
            self._fresh, self._next = 0, min(2 * self._next, self.every)
            self._job = Fit(self.recent(), self._start, trust=self.trust, warm=self.coefficients)
            return False
        for _ in range(max(WORK // (min(self._count, len(self._recent)) + SETUP), 1)):
            if self._job.step():
                break
        else:
            return False
        self.coefficients, self._job = self._job.coefficients, None
        self.refits += 1
        return True

    def _lines(self) -> Floats:
        """[n, 6] outcomes with what was predicted."""
        more = self.source() if self.source is not None else None
        if more is not None:
            self.collect(more)
        return self._recent[: self._count]

    def recent(self) -> Samples:
        """The newest outcomes."""
        r = self._recent[: self._count].copy()
        return Samples(r[:, 0], r[:, 1], r[:, 2].astype(np.int64), r[:, 3].astype(np.int64), r[:, 4])

    def quality(self) -> list[dict[str, float]]:
        """ECE, Brier score and AUC of the predictions that were in force, by depth."""
        r, out = self._lines(), []
        for depth in sorted(set(r[:, 2].tolist())):
            truth, predicted = r[r[:, 2] == depth][:, 4], r[r[:, 2] == depth][:, 5]
            out.append(
                {
                    "depth": int(depth) + 1,
                    "samples": len(truth),
                    "accepted": float(truth.mean()),
                    "ece": ece(predicted, truth),
                    "brier": brier(predicted, truth),
                    "auc": auc(predicted, truth),
                }
            )
        return out

    def reliability(self, bins: int = BINS) -> list[tuple[float, float, int]]:
        """(mean predicted, share accepted, samples) in equal-mass bins of the predictions that were in force."""
        r = self._lines()
        order = np.argsort(r[:, 5], kind="stable")
        parts = [p for p in np.array_split(order, min(bins, max(len(order), 1))) if len(p)]
        return [(float(r[p, 5].mean()), float(r[p, 4].mean()), len(p)) for p in parts]
