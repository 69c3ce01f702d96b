"""What a step costs: measured at start, corrected while it runs.

    step_ms(rows) = table(rows) * correction(rows) + rows * context_ms * (mean context / 1000)

``table`` comes from replaying real steps (head, sampling and commit included).
It is a staircase where graphs have buckets and piecewise linear where they do
not. Drafting has its own table by (requests, width). The online correction is
a slow average of measured over predicted time, so a wrong table heals.

A machine that is shared, or gets hot, is slower at times, all sizes alike. So
what steps have in common moves all prices together, which changes no decision;
what is left tells one size from another, and drafting from both (proportions.py).
How far single steps are from the pace (``noise``) tells how far prices can be trusted.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firesteel.speculation.proportions import Proportions, Run, Shares

Floats = NDArray[np.float64]
RATE = 0.05  # weight of one new measurement in the correction
EARLY = 0.2  # the same while a size has hardly been measured
SPIKE = 2.0  # a price this far outside of what its neighbours say was mismeasured
TOGETHER, ALONE = 32, 16  # steps that are learned from at once, and first ones that are not
NEWS = 2.0  # sum of their log ratios that does not wait
PACE = 0.125  # weight of one step in the pace
CALM = 0.02  # weight of one step in the noise
CLIP = 0.7  # log ratio from which on a step is an accident
LEAST_DRAFT = 0.02  # a drafting pass costs at least this share of the smallest step for its requests
LIMIT = 3.9  # log of a correction at most
DEPARTS = 1.3  # a step this far from its prediction is reported


class CostError(ValueError):
    """A cost table that must not be used here; says why and what to do."""


@dataclass(frozen=True)
class CostTable:
    """Measured prices of one model on one machine.

    rows, step_ms: price of a step by rows at ``context`` tokens per request.
    context_ms: added per row and thousand tokens of context beyond that.
    draft: width -> price of a drafting pass by ``requests``.
    staircase: whether prices between two entries are those of the next one.
    """

    fingerprint: str
    rows: tuple[int, ...]
    step_ms: tuple[float, ...]
    context: int
    context_ms: float
    requests: tuple[int, ...]
    draft: Mapping[int, tuple[float, ...]]
    staircase: bool = False

    def __post_init__(self) -> None:
        ok = all(
            line and line[0] >= 1 and list(line) == sorted(set(line)) for line in (self.rows, self.requests)
        )
        ok = ok and len(self.rows) == len(self.step_ms) and all(w >= 1 for w in self.draft)
        ok = ok and self.context >= 0 and math.isfinite(self.context_ms) and self.context_ms >= 0
        widths = all(len(v) == len(self.requests) for v in self.draft.values())
        prices = [*self.step_ms, *(p for v in self.draft.values() for p in v)]
        if not (ok and widths and all(np.isfinite(p) and p > 0 for p in prices)):
            raise CostError(
                "cost table: needs ascending positive rows, requests and widths, positive finite prices and a "
                "finite context price of at least 0; profile again"
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "fingerprint": self.fingerprint,
            "rows": list(self.rows),
            "step_ms": list(self.step_ms),
            "context": self.context,
            "context_ms": self.context_ms,
            "requests": list(self.requests),
            "draft": {str(k): list(v) for k, v in self.draft.items()},
            "staircase": self.staircase,
        }

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> CostTable:
        """Rebuild; raises CostError on anything malformed."""
        try:
            return cls(
                fingerprint=str(raw["fingerprint"]),
                rows=tuple(int(r) for r in raw["rows"]),
                step_ms=tuple(float(v) for v in raw["step_ms"]),
                context=int(raw["context"]),
                context_ms=float(raw["context_ms"]),
                requests=tuple(int(r) for r in raw["requests"]),
                draft={int(k): tuple(float(p) for p in v) for k, v in raw["draft"].items()},
                staircase=bool(raw.get("staircase", False)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise CostError(f"cost table: malformed ({err}); profile again") from err

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path, fingerprint: str) -> CostTable:
        """Read and refuse a table of another model, machine or build."""
        try:
            raw = json.loads(Path(path).read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as err:
            raise CostError(f"{path}: no readable cost table ({err}); profile again") from err
        table = cls.from_json(raw)
        if table.fingerprint != fingerprint:
            raise CostError(
                f"{path}: measured for {table.fingerprint!r}, this is {fingerprint!r}; profile again on this machine"
            )
        return table


@dataclass
class CostModel:
    """Prices steps and learns from measured ones."""

    table: CostTable
    scale: float = 1.0  # of all prices
    departures: int = 0
    measured: int = 0
    spikes: tuple[int, ...] = ()  # sizes whose price was out of line
    pace: float = 0.0  # log of measured over predicted, lately
    noise: float = 0.05  # how far single steps are from that: standard deviation, robust
    entry_ms: float = 0.0  # what a request's first drafting pass after steps without costs more than another

    def __post_init__(self) -> None:
        self._rows = np.array(self.table.rows, dtype=np.float64)
        ms, self.spikes = _without_spikes(self._rows, np.array(self.table.step_ms, dtype=np.float64))
        # more rows never cost less: a size dearer than a larger one was mismeasured
        self._ms = np.minimum.accumulate(ms[::-1])[::-1]
        # plain floats: a step asks for single prices and corrects a dozen, which is too few for arrays
        self._sizes = [float(r) for r in self.table.rows]
        self._base: list[float] = self._ms.tolist()
        self._corrected: list[float] = list(self._base)
        self.corrections = [1.0] * len(self._sizes)
        self._requests = [float(r) for r in self.table.requests]
        self.draft_corrections = [1.0] * len(self._requests)
        self.proportions = Proportions(self._sizes, self._requests)
        self._array: Floats | None = None  # of ``_corrected``
        self._hopes: Floats | None = None
        self._newest: tuple[int, float, int, int] | None = None  # the newest step without prompts
        self._alike = 0  # steps without prompts
        self._common, self._commons = 0.0, 0  # sum of the log ratios of those that wait, and how many
        self._news, self._unlearned = 0.0, 0  # absolute log ratios of those, and how many
        self._entries = 0  # first drafting passes that told what beginning costs
        self._widths = sorted(self.table.draft)
        self._draft_table = _draft_prices(self.table, self._widths, self.row_ms)
        self._shares: dict[int, Shares] = {}
        self._drafts: dict[tuple[int, int], float] = {}  # uncorrected prices that were asked for

    def step_ms(self, rows: NDArray[np.int64], context: float | None = None) -> Floats:
        """Predicted milliseconds for each row count; ``context``: mean tokens per row."""
        if self._array is None:
            self._array = np.array(self._corrected)
        rows, corrected = np.asarray(rows), self._array
        if self.table.staircase:
            at = np.minimum(np.searchsorted(self._rows, rows), len(self._rows) - 1)
            out = corrected[at] * np.maximum(rows / self._rows[at], 1.0)
        else:
            out = np.interp(rows, self._rows, corrected)
            last = self._rows[-1]
            slope = (corrected[-1] - corrected[0]) / max(last - self._rows[0], 1.0)
            out = out + np.maximum(rows - last, 0) * slope
        beyond = (self.table.context if context is None else context) - self.table.context
        priced: Floats = np.maximum(out + rows * self.table.context_ms * beyond / 1000.0, 1e-3)
        return priced

    def hopeful_ms(self, rows: NDArray[np.int64], context: float | None = None) -> Floats:
        """``step_ms``, less what sizes near the newest one may prove cheaper; the first of ``rows`` as it is."""
        out = self.step_ms(rows, context)
        if self._hopes is None:
            self._hopes = self.proportions.hopes()
        if self.table.staircase:
            out[1:] *= self._hopes[np.minimum(np.searchsorted(self._rows, rows[1:]), len(self._rows) - 1)]
        else:
            out[1:] *= np.interp(rows[1:], self._rows, self._hopes)
        return out

    def row_ms(self, rows: int, context: float | None = None) -> float:
        """``step_ms`` of one row count."""
        sizes, ms = self._sizes, self._corrected
        at, last = bisect_left(sizes, rows), len(sizes) - 1
        if self.table.staircase:
            at = min(at, last)
            out = ms[at] * max(rows / sizes[at], 1.0)
        elif at > last:
            out = ms[-1] + (rows - sizes[-1]) * (ms[-1] - ms[0]) / max(sizes[-1] - sizes[0], 1.0)
        elif at == 0:
            out = ms[0]
        else:
            low = sizes[at - 1]
            out = ms[at - 1] + (ms[at] - ms[at - 1]) * (rows - low) / (sizes[at] - low)
        beyond = (self.table.context if context is None else context) - self.table.context
        return max(out + rows * self.table.context_ms * beyond / 1000.0, 1e-3)

    def curve(self) -> list[tuple[int, float]]:
        """(rows, predicted milliseconds) at the measured row counts, as corrected so far."""
        ms = self.step_ms(np.array(self.table.rows))
        return [(rows, float(v)) for rows, v in zip(self.table.rows, ms, strict=True)]

    def draft_ms(self, requests: int, width: int) -> float:
        """Predicted milliseconds of a drafting pass."""
        if requests == 0 or width == 0 or not self.table.draft:
            return 0.0
        fix = sum(share * self.draft_corrections[i] for i, share in self._draft_shares(requests))
        return self._draft_base(requests, width) * fix * self.scale

    def _draft_shares(self, requests: int) -> Shares:
        """Which request counts of the table a drafting pass is priced by, with their weights."""
        out = self._shares.get(requests)
        if out is None:
            out = self._shares[requests] = _between(self._requests, requests, self.table.staircase)
        return out

    def _draft_base(self, requests: int, width: int) -> float:
        """Milliseconds of a drafting pass by the table."""
        base: float | None = self._drafts.get((requests, width))
        if base is None:
            known, asked = self.table.requests, requests
            if self.table.staircase:  # padded to the next recorded size
                asked = known[min(bisect_left(known, requests), len(known) - 1)]
            prices = [float(np.interp(asked, known, line)) for line in self._draft_table]
            base = float(np.interp(width, self._widths, prices)) * max(
                requests / self.table.requests[-1], 1.0
            )
            self._drafts[requests, width] = base
        return base

    def price(self, rows: int, context: float, requests: int, width: int) -> float:
        """Milliseconds of a whole step: its rows, and drafting ``width`` for ``requests``."""
        return (self.row_ms(rows, context) if rows else 0.0) + self.draft_ms(requests, width)

    def observe(
        self,
        rows: int,
        predicted_ms: float,
        measured_ms: float,
        drafting: int = 0,
        width: int = 0,
        entered: int = 0,
        prompt_rows: int = 0,
        context: float = -1.0,
    ) -> bool:
        """Learn from a whole step, in which ``drafting`` requests drafted ``width``, ``entered`` of them anew.

        A step with prompts tells what its size costs and nothing else: it is not like those around it.
        context: mean tokens per row; without it the prediction is taken for what prices of now say.
        True if it departed from its prediction by more than 1.3x.
        """
        if rows <= 0 or not (0 < measured_ms < math.inf and 0 < predicted_ms < math.inf):
            return False
        self.measured += 1
        now = self.price(rows, context, drafting, width) if context >= 0 else predicted_ms
        # against prices of now: what was corrected since the prediction is not corrected again
        log = math.log(min(max(measured_ms / now, 0.2), 5.0))
        own = min(max(log - self.pace, -CLIP), CLIP) if self._alike else 0.0
        if not prompt_rows:
            self._alike += 1
            self.pace += max(PACE, 1.0 / self._alike) * (log - self.pace)
            # 1.25 mean deviations are a standard deviation; spikes count less than their squares
            self.noise += max(CALM, 1.0 / (4.0 + self._alike)) * (1.25 * abs(own) - self.noise)
            self._common, self._commons = self._common + log, self._commons + 1
            self._newest = rows, context if context >= 0 else float(self.table.context), drafting, width
        self._news, self._unlearned = self._news + abs(log), self._unlearned + 1
        if drafting and width and 2 * entered > drafting:  # what they caught up with is in it
            if self.table.draft and not prompt_rows:
                rate = max(RATE, EARLY / (1.0 + self._entries / 8.0))
                self._entries += 1
                self.entry_ms += rate * (predicted_ms * math.expm1(own) / entered - self.entry_ms)
        elif drafting or not prompt_rows:  # what prompts cost beside plain steps decides nothing
            took = math.log(measured_ms)
            known = took if context >= 0 else log + math.log(self.scale)
            key = (self._padded(rows), drafting, width)
            self.proportions.hear(key, context, known, took, prompt_rows > 0)
        if self._unlearned >= TOGETHER or self._news >= NEWS or self.measured <= ALONE:
            self._learn()
        return self._departs(predicted_ms, measured_ms)

    def count(self, predicted_ms: float, measured_ms: float) -> None:
        """A step like others that were observed: it only counts."""
        if measured_ms > 0 and 0 < predicted_ms < math.inf:
            self.measured += 1
            self._departs(predicted_ms, measured_ms)

    def _departs(self, predicted_ms: float, measured_ms: float) -> bool:
        departed = not 1 / DEPARTS <= measured_ms / predicted_ms <= DEPARTS
        self.departures += departed
        return departed

    def _padded(self, rows: int) -> int:
        """The size that so many rows run as."""
        at = bisect_left(self._sizes, rows)
        return rows if not self.table.staircase or at == len(self._sizes) else self.table.rows[at]

    def _learn(self) -> None:
        """Steps that wait move all prices by what they have in common, and sizes and drafting by their proportions."""
        usual = self._newest
        before = self.price(*usual) if usual is not None else 0.0
        if self.proportions.learn(self._parts):
            self.draft_corrections = np.exp(self.proportions.drafts.clip(-LIMIT, LIMIT)).tolist()
            self.corrections = np.exp(self.proportions.sizes.clip(-LIMIT, LIMIT)).tolist()
            if usual is not None:  # the price of what runs now stays what it was
                self._correct()
                self.scale = min(max(self.scale * before / self.price(*usual), 0.02), 50.0)
        if self._commons:
            rate = max(RATE, EARLY / (1.0 + self.measured / 8.0))
            common = self._common / self._commons * -math.expm1(-self._commons * rate)
            self.scale = min(max(self.scale * math.exp(common), 0.02), 50.0)
        self._correct()
        self._common, self._commons, self._news, self._unlearned = 0.0, 0, 0.0, 0

    def _correct(self) -> None:
        scale = self.scale
        self._corrected = [b * c * scale for b, c in zip(self._base, self.corrections, strict=True)]
        self._array = self._hopes = None

    def _parts(self, run: Run) -> tuple[float, Shares, float, Shares]:
        """Price of a run's rows at a pace of 1 and the sizes it comes from; the same of its drafting."""
        row = self.row_ms(run.rows, run.context if run.context >= 0 else None) / self.scale
        drafts = self.draft_ms(run.drafting, run.width) / self.scale
        sizes = _between(self._sizes, run.rows, self.table.staircase)
        return row, sizes, drafts, self._draft_shares(run.drafting) if drafts else ()


def _between(known: Sequence[float], asked: int, staircase: bool) -> Shares:
    """Entries of ``known`` that ``asked`` is priced by, with their weights: the next one, or those around it."""
    at = min(bisect_left(known, asked), len(known) - 1)
    if staircase or at == 0 or asked >= known[at]:
        return ((at, 1.0),)
    high = (asked - known[at - 1]) / (known[at] - known[at - 1])
    return (at - 1, 1.0 - high), (at, high)


def _draft_prices(table: CostTable, widths: Sequence[int], row_ms: Callable[[int], float]) -> list[Floats]:
    """Prices by width, then by requests, of a table that was measured as small differences of large numbers.

    More requests and wider drafts never cost less: where the table says so, the truth is
    taken to lie between. No pass is nearly free.
    """
    if not widths:
        return []
    ms = np.array([table.draft[w] for w in widths], dtype=np.float64)
    for axis in (0, 1):
        up = np.maximum.accumulate(ms, axis)
        down = np.flip(np.minimum.accumulate(np.flip(ms, axis), axis), axis)
        ms = 0.5 * (up + down)
    least = np.array([LEAST_DRAFT * row_ms(n) for n in table.requests])
    return list(np.maximum(ms, least))


def _without_spikes(rows: Floats, ms: Floats) -> tuple[Floats, tuple[int, ...]]:
    """Prices with single sizes that are far above or below both neighbours put between them; and which."""
    out, found = ms.copy(), []
    for i in range(1, len(ms) - 1):
        low, high = sorted((out[i - 1], ms[i + 1]))
        if ms[i] > SPIKE * high or ms[i] < low / SPIKE:
            out[i] = np.interp(rows[i], rows[[i - 1, i + 1]], [out[i - 1], ms[i + 1]])
            found.append(int(rows[i]))
    return out, tuple(found)


def from_samples(
    fingerprint: str,
    steps: Sequence[tuple[int, int, float]],
    drafts: Sequence[tuple[int, int, float]],
    staircase: bool = False,
) -> CostTable:
    """A table from measured (rows, context, ms) and (requests, width, ms).

    The shortest context is the base; longer ones give the context term by
    least squares over their surplus.
    """
    contexts = sorted({c for _, c, _ in steps})
    if not contexts:
        raise CostError("cost table: no measured steps; profile again")
    base = {r: ms for r, c, ms in steps if c == contexts[0]}
    surplus = [
        (r * (c - contexts[0]) / 1000.0, ms - base[r]) for r, c, ms in steps if c > contexts[0] and r in base
    ]
    norm = sum(x * x for x, _ in surplus)
    slope = max(sum(x * y for x, y in surplus) / norm, 0.0) if norm else 0.0
    requests = tuple(sorted({n for n, _, _ in drafts}))
    draft = {w: tuple(ms for _, ms in sorted((n, ms) for n, k, ms in drafts if k == w)) for _, w, _ in drafts}
    rows = tuple(sorted(base))
    return CostTable(
        fingerprint,
        rows,
        tuple(base[r] for r in rows),
        contexts[0],
        slope,
        requests or (1,),
        draft,
        staircase,
    )
