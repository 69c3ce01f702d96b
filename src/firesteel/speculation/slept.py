"""Steps of a rest, planned without asking the policy: they wait, and are learned from when it wakes."""

from __future__ import annotations

from collections.abc import Callable

from firesteel.speculation.cost import CostModel
from firesteel.speculation.lessons import Lessons
from firesteel.speculation.terms import Timing

REST = 32  # steps at most for which the scheduler need not ask
SHOWN, FIRST = 4, 256  # steps of a rest are alike: one in so many is learned from, but for the first ones


class Slept:
    """``account`` hears of every step: (comparable, plain, priced ms, spent ms)."""

    def __init__(
        self, cost: CostModel, lessons: Lessons, account: Callable[[bool, bool, float, float], None]
    ):
        self.cost, self.lessons, self.account = cost, lessons, account
        self.steps: list[tuple[int, float, float, float]] = []  # rows, context, measured ms, spent ms

    def add(self, rows: int, context: float, measured_ms: float, spent_ms: float) -> None:
        """A step was committed."""
        self.steps.append((rows, context, measured_ms, spent_ms))
        if len(self.steps) > 2 * REST:
            self.wake()

    def wake(self) -> None:
        """By prices of now: those of the begin of a rest may have been corrected meanwhile."""
        steps, self.steps = self.steps, []
        for i, (rows, context, measured_ms, spent_ms) in enumerate(steps):
            priced = self.cost.row_ms(rows, context)
            self.account(True, True, priced, spent_ms)
            if i % SHOWN and self.cost.measured > FIRST:
                self.cost.count(priced, measured_ms)
            else:
                self.lessons.hear(((), (), Timing(rows, priced, measured_ms, context=context)))
