"""What running with drafts takes, against running without: the books of whole stretches, not of single steps.

A price list sees one step at a time. That a drafting pass pushes the target's
weights out of the caches, so that the plain steps behind it are slower, or that
planning for drafts takes the host longer, shows in no single price; where the
gain is small it decides. So both ways of running are measured by the same
list, planning included:

    rate  = milliseconds by the price list / milliseconds taken
    trust = rate with drafts / rate without, at most 1

A plan has to pay by more than the lacking trust. Where every plan pays, a few
steps run plainly now and then to be compared; that costs at most ``share`` of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SETTLED = 3  # plain steps in a row from which on nothing of a drafting pass is felt
BURST = SETTLED + 6  # plain steps in a row on purpose
APART = 8 * BURST  # steps between bursts at least
PLAIN, DRAFTED = 96.0, 192.0  # steps that the rates look back on
ENOUGH_PLAIN, ENOUGH_DRAFTED = 12.0, 24.0  # before that nothing is said
LEAST = 0.5  # trust
HEALS = 3000.0  # plain steps after which half the distrust is gone


@dataclass
class Rate:
    """Decaying sums of what steps should have taken and took."""

    memory: float
    priced: float = 0.0  # ms
    spent: float = 0.0  # ms
    count: float = 0.0

    def add(self, priced: float, spent: float) -> None:
        """One step."""
        keep = 1.0 - 1.0 / self.memory
        self.priced, self.spent = keep * self.priced + priced, keep * self.spent + spent
        self.count = keep * self.count + 1.0

    @property
    def rate(self) -> float:
        """Above 1: faster than the list says."""
        return self.priced / max(self.spent, 1e-9)


class Ledger:
    """Hears of every step; ``trust`` is what the rate of a plan is worth."""

    def __init__(self, share: float = 0.002):
        self.share = share
        self.plain, self.drafted = Rate(PLAIN), Rate(DRAFTED)
        self.bursts = 0
        self._row, self._drew = 0, False  # plain steps in a row; whether a step with drafts was before them
        self._idle = 0.0  # plain steps since drafting was felt last
        self._credit, self._left, self._since = 0.0, 0, 0  # for a burst, of a burst, steps since the last one

    def interrupt(self) -> None:
        """A step that compares with nothing, such as one with a prompt."""
        self._row, self._drew = 0, False

    def note(self, plain: bool, priced_ms: float, spent_ms: float) -> None:
        """A step without prompts; ``plain``: it neither verified nor made drafts."""
        self._row, self._drew = (self._row + 1, self._drew) if plain else (0, True)
        if plain and self._row > SETTLED:
            self.plain.add(priced_ms, spent_ms)
            self._idle += 1.0
        elif self._drew:  # what drafting leaves behind is its own
            self.drafted.add(priced_ms, spent_ms)
            self._idle = 0.0

    @property
    def trust(self) -> float:
        """In (0, 1]: by how much the rate of plans is overrated."""
        if self.plain.count < ENOUGH_PLAIN or self.drafted.count < ENOUGH_DRAFTED:
            return 1.0
        found = min(max(self.drafted.rate / max(self.plain.rate, 1e-9), LEAST), 1.0)
        return 1.0 - (1.0 - found) * math.exp2(-self._idle / HEALS)

    def burst(self, promise: float) -> bool:
        """Whether this step, whose plan promises ``promise`` times the rate of plain steps, is to be plain."""
        if self._left > 0:
            self._left -= 1
            return True
        self._credit, self._since = self._credit + self.share, self._since + 1
        lost = BURST * (1.0 - 1.0 / max(promise, 1.0))  # in steps
        if self._credit < lost or self._since < APART:
            return False
        self._credit, self._left, self._since = 0.0, BURST - 1, 0
        self.bursts += 1
        return True
