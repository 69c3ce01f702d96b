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
ALL_WIDTHS = 8  # K up to which every width is tried


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
    survivals: Floats,
    base_rows: int,
    base_value: float,
    step_ms: StepCost,
    extra_ms: float,
    room: int,
    going_rate: float | None = None,
) -> Budget:
    """The B that maximises expected tokens per millisecond; ties go to the smaller B.

    With ``going_rate`` (tokens per millisecond that the engine makes anyway),
    the B that maximises tokens - going_rate * milliseconds: the same where all
    steps are alike, and right for one step among others that a long prompt
    makes dear, whose price no draft must help to pay.

    survivals: [n] expected gain of every draft that could be verified
        (survival times the weight of its request) in any order, or [s, n] for
        s equally likely cases: the device picks the best B of whichever comes.
    base_rows: rows that run anyway (prompt chunks and anchors); base_value:
        expected gain without drafts (sampling requests times their weights).
    step_ms: prices row counts; extra_ms: what the step costs besides, e.g. drafting.
    room: most drafts there are rows for.
    """
    return best_of(average_gains(survivals), base_rows, base_value, step_ms, extra_ms, room, going_rate)


def best_of(
    gains: Floats,
    base_rows: int,
    base_value: float,
    step_ms: StepCost,
    extra_ms: float,
    room: int,
    going_rate: float | None = None,
) -> Budget:
    """``choose`` for gains [n] that are known by rank, best first."""
    most = min(len(gains), max(room, 0))
    ms = step_ms(np.arange(base_rows, base_rows + most + 1)) + extra_ms
    value = np.empty(most + 1)
    value[0] = base_value
    np.cumsum(gains[:most], out=value[1:])
    value[1:] += base_value
    best = int(np.argmax(value / np.maximum(ms, 1e-6) if going_rate is None else value - going_rate * ms))
    return Budget(best, float(value[best]), float(ms[best]), _why(best, most, len(gains)))


def best_of_few(
    gains: Sequence[float],
    base_rows: int,
    base_value: float,
    row_ms: Callable[[int], float],
    extra_ms: float,
    room: int,
    going_rate: float | None = None,
) -> Budget:
    """``best_of`` for a handful of gains, which arrays would cost more than they save; prices row by row."""
    most = min(len(gains), max(room, 0))
    best, top, value = 0, 0.0, base_value
    tokens, price = base_value, 0.0
    for b in range(most + 1):
        ms = row_ms(base_rows + b) + extra_ms
        value += gains[b - 1] if b else 0.0
        score = value / max(ms, 1e-6) if going_rate is None else value - going_rate * ms
        if b == 0 or score > top:
            best, top, tokens, price = b, score, value, ms
    return Budget(best, tokens, price, _why(best, most, len(gains)))


def average_gains(survivals: Floats) -> Floats:
    """[n] gains, best first, of [n] or, averaged by rank, of [s, n] equally likely cases; NaN counts as 0."""
    cases = np.atleast_2d(np.fmax(survivals, 0.0))  # fmax(NaN, 0) is 0
    out: Floats = (np.add.reduce(np.sort(cases, axis=1)) / len(cases))[::-1]
    return out


def _why(best: int, most: int, drafts: int) -> str:
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
    drafts: int = 0  # of them verified
    gain: float = 0.0  # tokens of a cycle over those of a plain step

    @property
    def pays(self) -> bool:
        """Whether drafting is expected to win."""
        return self.width > 0 and self.requests > 0


def choose_width(
    profiles: Floats,
    base_rows: int,
    base_value: float,
    step_ms: StepCost,
    draft_ms: Callable[[int, int], float],
    widths: Sequence[int],
    room: int,
) -> DraftPlan:
    """How wide to draft, and for how many requests: the best whole cycle of draft and verify.

    profiles: [R, K] expected gain of every draft that the next blocks may
        have, or [S, R, K] for S equally likely cases; most promising request first.
    base_rows, base_value: rows that run anyway (anchors) and what they yield.
    A cycle with width k for the first m requests costs draft_ms(m, k) plus the
    verification of the best of their drafts.
    """
    cases = np.fmax(profiles if profiles.ndim == 3 else profiles[None], 0.0)
    s, requests, depths = cases.shape
    if requests == 1 and bool((cases[..., 1:] <= cases[..., :-1]).all()):
        prices = step_ms(np.arange(base_rows, base_rows + min(max(widths, default=0), depths, room) + 1))
        gains_of_one = cases[:, 0].mean(0).tolist()
        return width_of_one(gains_of_one, bool(base_rows), base_value, prices.tolist(), draft_ms, widths)
    flat = cases.reshape(s, -1)
    ms = step_ms(np.arange(base_rows, base_rows + min(requests * max(widths, default=0), room) + 1))
    plain = base_value / max(float(ms[0]), 1e-6) if base_rows else 0.0
    tries = [(m, k, draft_ms(m, k)) for m in _steps(requests) for k in widths]
    bounds = _bounds(average_gains(flat), base_value, ms, tries)
    best, least = DraftPlan(0, 0, plain, plain), plain * (1 + 1e-9)
    if max(bounds, default=0.0) <= least:
        return best

    def found(m: int, k: int, draft: float) -> DraftPlan:
        kept = average_gains(cases[:, :m, :k].reshape(s, m * k))[: len(ms) - 1]
        value = np.concatenate(([base_value], kept)).cumsum()
        rates = value / np.maximum(ms[: len(value)] + draft, 1e-6)
        at = int(rates.argmax())
        return DraftPlan(k, m, float(rates[at]), plain, at, _over(float(value[at]), base_value))

    hopeful = max(
        range(len(widths)), key=bounds.__getitem__
    )  # of all requests: what it brings rules most others out
    first = found(*tries[hopeful])
    for at, (m, k, draft) in enumerate(tries):
        if bounds[at] < first.rate or bounds[at] <= best.rate or (m < requests and abs(k - best.width) > 1):
            continue  # fewer requests draft about as wide
        plan = first if at == hopeful else found(m, k, draft)
        if plan.rate > best.rate * (1 + 1e-9):
            best = plan
    return best


def _bounds(
    gains: Floats, base_value: float, ms: Floats, tries: Sequence[tuple[int, int, float]]
) -> list[float]:
    """Rates that no plan (requests, width, price of its drafts) exceeds: as if its drafts were the best of all."""
    value = np.concatenate(([base_value], gains[: len(ms) - 1])).cumsum()
    most = np.array([m * k for m, k, _ in tries])[:, None]
    rates = value / np.maximum(ms + np.array([d for _, _, d in tries])[:, None], 1e-6)
    out: list[float] = np.where(np.arange(len(value)) <= most, rates, 0.0).max(1).tolist()
    return out


def width_of_one(
    gains: Sequence[float],
    runs: bool,
    base_value: float,
    step_ms: Sequence[float],
    draft_ms: Callable[[int, int], float],
    widths: Sequence[int],
) -> DraftPlan:
    """``choose_width`` for one request whose gains fall with depth: its best drafts are its first.

    step_ms: prices with 0, 1, ... drafts, as many as there are rows for; ``runs``: whether
    anything runs without drafts.
    """
    plain = base_value / max(step_ms[0], 1e-6) if runs else 0.0
    best = DraftPlan(0, 0, plain, plain)
    for k in widths:
        draft, value = draft_ms(1, k), base_value
        top, at, found = value / max(step_ms[0] + draft, 1e-6), 0, value
        for b in range(1, min(k, len(step_ms) - 1, len(gains)) + 1):
            value += gains[b - 1]
            rate = value / max(step_ms[b] + draft, 1e-6)
            if rate > top:
                top, at, found = rate, b, value
        if top > best.rate * (1 + 1e-9):
            best = DraftPlan(k, 1, top, plain, at, _over(found, base_value))
    return best


def _over(value: float, base: float) -> float:
    return value / base if base > 0.0 else 0.0


def _steps(requests: int) -> list[int]:
    """Request counts worth trying: all of few, and half of many again and again."""
    out, m = [], requests
    while m > 0:
        out.append(m)
        m = m - 1 if m <= 4 else m // 2
    return out


def draft_widths(gamma: int) -> tuple[int, ...]:
    """Widths worth trying: all of few, and a third fewer again and again of many."""
    if gamma <= ALL_WIDTHS:
        return tuple(range(1, gamma + 1))
    out, k = [], gamma
    while k > 4:
        out.append(k)
        k = k * 2 // 3
    return tuple(sorted({*out, *range(1, k + 1)}))
