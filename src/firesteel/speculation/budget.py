"""How many drafts a step verifies, and how many the next drafting pass proposes.

A step that verifies the B most promising drafts yields, in expectation,

    tokens(B) = requests + sum of the B best survivals

in predicted_ms(rows + B) + the price of drafting. ``choose`` maximises
tokens per millisecond over every B: real cost curves are staircases, so a
search that stops at the first descent stops too early. B = 0 is plain
decoding, all drafts are fixed-width verification: both are points of the same
search, so the choice is never worse than either, as far as the prices are right.

Which drafts those are is decided on the device (``admit``), best survival
first. Under coupled acceptance no choice can change the text, so survivals may
be as fresh as they come; under classical rejection the budget is sized on
survivals of an earlier step only (DSpark, Appendix A).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from firesteel.core import NO_DRAFTS, Budget

Floats = NDArray[np.float64]
# predicted milliseconds of a step for every row count in an array
StepCost = Callable[[NDArray[np.int64]], Floats]


def fixed(ready: Sequence[int], room: int) -> Budget:
    """All drafts that exist, or as many as there are rows for.

    ``ready``: drafts each request could verify (0: none proposed, or it does
    not want any); ``room``: rows left in the step.
    """
    wanted = sum(ready)
    if wanted == 0:
        return NO_DRAFTS
    drafts = min(wanted, max(room, 0))
    reason = "fixed width" if drafts == wanted else "fixed width, cut by max_num_batched_tokens"
    return Budget(drafts, expected_tokens=float(len(ready)), reason=reason)


def choose(
    survivals: Floats, base_rows: int, base_value: float, step_ms: StepCost, extra_ms: float, room: int
) -> Budget:
    """The B that maximises expected tokens per millisecond; ties go to the smaller B.

    survivals: [n] expected gain of every draft that could be verified
        (survival times the weight of its request) in any order, or [s, n] for
        s equally likely cases: the device picks the best B of whichever comes.
    base_rows: rows that run anyway (prompt chunks and anchors); base_value:
        expected gain without drafts (sampling requests times their weights).
    step_ms: prices row counts; extra_ms: what the step costs besides, e.g. drafting.
    room: most drafts there are rows for.
    """
    cases = np.atleast_2d(np.nan_to_num(survivals, nan=0.0).clip(min=0.0))
    gains = np.sort(cases, axis=1)[:, ::-1].mean(0)
    most = min(len(gains), max(room, 0))
    value = base_value + np.concatenate(([0.0], np.cumsum(gains[:most])))
    ms = step_ms(np.arange(base_rows, base_rows + most + 1)) + extra_ms
    rate = value / np.maximum(ms, 1e-6)
    best = int(np.argmax(rate))
    return Budget(best, float(value[best]), float(ms[best]), _why(best, most, len(gains), rate))


def _why(best: int, most: int, drafts: int, rate: Floats) -> str:
    """One plain sentence for the metrics."""
    if drafts == 0:
        return "no drafts to verify"
    if most == 0:
        return "no rows left for drafts"
    if best == 0:
        return "verifying any draft costs more than it gains"
    if best == drafts:
        return "every draft pays"
    if best == most:
        return "cut by max_num_batched_tokens"
    return f"{drafts - best} drafts would cost more than they gain"


@dataclass(frozen=True)
class DraftPlan:
    """How the next drafts are made: ``width`` per request for ``requests`` of them."""

    width: int
    requests: int
    rate: float  # expected tokens per millisecond of a draft-and-verify cycle
    plain_rate: float  # the same without drafting

    @property
    def pays(self) -> bool:
        """Whether drafting is expected to win."""
        return self.width > 0 and self.requests > 0


def choose_width(
    profiles: Floats,
    other_rows: int,
    other_value: float,
    step_ms: StepCost,
    draft_ms: Callable[[int, int], float],
    widths: Sequence[int],
    room: int,
) -> DraftPlan:
    """How wide to draft, and for how many requests: the best whole cycle of draft and verify.

    profiles: [R, K] survival that each request's drafts usually reach, most
        promising request first. A cycle with width k for the first m requests
        costs draft_ms(m, k) plus the verification of the best of their drafts.
    other_rows, other_value: rows that run besides and what they yield.
    """
    requests = profiles.shape[0]
    rows = other_rows + requests
    value = other_value + requests
    plain = value / max(float(step_ms(np.array([rows]))[0]), 1e-6) if rows else 0.0
    best = DraftPlan(0, 0, plain, plain)
    for m in _steps(requests):
        for k in widths:
            gains = profiles[:m, :k].ravel()
            budget = choose(gains, rows, value, step_ms, draft_ms(m, k), room)
            rate = budget.expected_tokens / max(budget.predicted_ms, 1e-6)
            if rate > best.rate * (1 + 1e-9):
                best = DraftPlan(k, m, rate, plain)
    return best


def _steps(requests: int) -> list[int]:
    """Request counts worth trying: all of few, and halvings of many."""
    out, m = [], requests
    while m > 0:
        out.append(m)
        m = m - 1 if m <= 4 else m * 3 // 4
    return out
