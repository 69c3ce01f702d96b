"""Notices what is wrong with prices, signals and drafts, and says it by name.

Nothing here decides: a wrong price is corrected by the cost model, a signal
that is stuck gets no weight in the next calibration, a drafter that is always
wrong stops paying. But whoever runs the engine should hear of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from firesteel.speculation.cost import DEPARTS, CostModel, CostTable
from firesteel.speculation.terms import Timing

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
PRICES, OFTEN = 64, 8  # newest steps that are looked at, after as many new ones
OUTCOMES = 24  # newest first drafts
SIGNALS = 64  # newest confidences at least


class Watch:
    """Alarms by name, each raised once while its cause lasts; ``alarms`` are those of now."""

    def __init__(self, cost: CostModel):
        self.alarms: dict[str, str] = {}
        self.raised: dict[str, int] = {}
        self._news: list[tuple[str, str]] = []
        self._ratios: deque[float] = deque(maxlen=PRICES)
        self._firsts: deque[bool] = deque(maxlen=OUTCOMES)
        self._heads: deque[tuple[float, float, int]] = deque(maxlen=SIGNALS)
        self._priced = 0  # steps since they were looked at
        self._whole = 0  # finite confidences since the last one that was not
        self._look_at(cost.table, cost.spikes)

    def _look_at(self, table: CostTable, spikes: Sequence[int]) -> None:
        """A table in which rows are free makes every draft pay: true on a simulator, hardly elsewhere."""
        flat = table.rows[-1] >= 8 * table.rows[0] and max(table.step_ms) < 1.02 * min(table.step_ms)
        self._set(
            "flat cost table",
            flat,
            f"{table.rows[-1]} rows cost what {table.rows[0]} do, so all drafts pay; profile again",
        )
        self._set(
            "cost table spikes",
            bool(spikes),
            f"the prices of {', '.join(map(str, spikes))} rows are out of line with their neighbours "
            "and were smoothed; profile again",
        )

    def _set(self, name: str, on: bool, text: str) -> None:
        if on and name not in self.alarms:
            self.raised[name] = self.raised.get(name, 0) + 1
            self._news.append((name, text))
        if on:
            self.alarms[name] = text
        else:
            self.alarms.pop(name, None)

    def news(self) -> list[tuple[str, str]]:
        """(name, sentence) of alarms raised since the last call."""
        news, self._news = self._news, []
        return news

    def prices(self, timings: Sequence[Timing]) -> None:
        """Some steps' predictions and their truth."""
        ratios = [t.measured_ms / t.predicted_ms for t in timings if t.predicted_ms > 0 and t.measured_ms > 0]
        self._ratios.extend(ratios)
        self._priced += len(ratios)
        if self._priced >= OFTEN and len(self._ratios) >= 16:
            self._priced = 0
            newest = sorted(list(self._ratios)[-16:])
            middle = 0.5 * (newest[7] + newest[8])
            self._set(
                "cost table departs",
                not 1 / DEPARTS <= middle <= DEPARTS,
                f"steps take {middle:.2f}x their predicted time; prices are being corrected, "
                "profile again if it stays",
            )

    def outcomes(self, firsts: Sequence[bool]) -> None:
        """Whether first drafts of blocks were accepted."""
        self._firsts.extend(firsts)
        if len(self._firsts) == OUTCOMES:
            self._set(
                "drafts never accepted",
                not any(self._firsts),
                f"none of the last {OUTCOMES} first drafts was accepted; does the drafter fit the model?",
            )

    def signals(self, head: Floats, width: Ints) -> None:
        """Confidences [n, K] of new blocks, ``width`` [n] of them each."""
        depths = head.shape[1]
        values = head if int(width.min()) == depths else head[np.arange(depths) < width[:, None]]
        broken = not np.isfinite(values).all()
        self._whole = 0 if broken else self._whole + values.size
        if broken:
            values = np.nan_to_num(values)
        low, high = float(values.min()), float(values.max())
        self._heads.append((low, high, values.size))
        self._set(
            "confidence not finite",
            self._whole < SIGNALS and bool(broken or "confidence not finite" in self.alarms),
            "the confidence head gives NaN or infinity; it counts as 0",
        )
        while len(self._heads) > 1 and sum(h[2] for h in self._heads) - self._heads[0][2] >= SIGNALS:
            self._heads.popleft()
        if sum(h[2] for h in self._heads) >= SIGNALS:
            low, high = min(h[0] for h in self._heads), max(h[1] for h in self._heads)
            self._set(
                "confidence stuck",
                high - low < 1e-6 and not broken,
                f"every confidence logit is {low:.3g}; the head counts for nothing until it moves",
            )
