"""What running with drafts takes, against running without: the books of whole stretches, not of single steps.

A price list sees one step at a time. That a drafting pass pushes the target's
weights out of the caches, so that the plain steps behind it are slower, or that
planning for drafts takes the host longer, shows in no single price; where the
gain is small it decides. So stretches of both ways of running are measured by
the same list, planning included:

    slowness = log(milliseconds taken / milliseconds by the price list)
    pair     = slowness of a stretch with drafts - that of the plain one next to it
    trust    = exp(-mean of pairs), at most 1, as far as the mean is sure

Only neighbours in time are compared: a machine that others use, too, changes
its pace by more than what is looked for here. A plan has to pay by more than
the lacking trust. Where every plan pays, a few steps run plainly now and then
to be compared; that costs at most ``share`` of the time.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

SETTLED = 3  # plain steps in a row from which on nothing of a drafting pass is felt
BURST = SETTLED + 6  # plain steps in a row on purpose
APART = 8 * BURST  # steps between bursts at least
SOON, SURE = 2 * BURST, 3.0  # the same while a promise is below so many of its standard errors
NEAR, LEAST_STEPS = 24, 4  # steps of a stretch that are compared: at most, at least
MEMORY = 32.0  # pairs that are looked back on
USUAL = 0.05  # how large the difference may be expected to be: standard deviation of its logarithm
LEAST = 0.5  # trust
HEALS = 3000.0  # plain steps after which half the distrust is gone


@dataclass
class Pairs:
    """Decaying sums over pairs: weights, weighted differences and squares."""

    count: float = 0.0
    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def add(self, difference: float, weight: float) -> None:
        """One pair; ``weight`` grows with the steps it stands for."""
        keep = 1.0 - 1.0 / MEMORY
        self.count = keep * self.count + 1.0
        self.weight = keep * self.weight + weight
        self.total = keep * self.total + weight * difference
        self.squares = keep * self.squares + weight * difference * difference

    @property
    def mean(self) -> float:
        """The difference, drawn towards 0 as far as it may be chance; 0 before there are three pairs."""
        if self.count < 2.5 or self.weight <= 0.0:
            return 0.0
        mean = self.total / self.weight
        error = max(self.squares / self.weight - mean * mean, 0.0) / (self.count - 1.0)
        return mean * USUAL**2 / (USUAL**2 + error)


class Ledger:
    """Hears of every step; ``trust`` is what the rate of a plan is worth."""

    def __init__(self, share: float = 0.002):
        self.share = share
        self.pairs = Pairs()
        self.bursts = 0
        self._row, self._drew = 0, False  # plain steps in a row; whether a step with drafts was before them
        self._idle = 0.0  # plain steps since drafting was felt last
        self._credit, self._left, self._since = 0.0, 0, 0  # for a burst, of a burst, steps since the last one
        self._plain: bool | None = None  # the kind of the present stretch
        self._tail: deque[tuple[float, float]] = deque(maxlen=NEAR)  # its newest steps: priced, spent
        self._before: tuple[float, int] | None = (
            None  # slowness and steps at the end of the other kind's stretch
        )
        self._paired = False  # with the present one

    def interrupt(self) -> None:
        """A step that compares with nothing, such as one with a prompt."""
        self._row, self._drew = 0, False

    def note(self, plain: bool, priced_ms: float, spent_ms: float) -> None:
        """A step without prompts; ``plain``: it neither verified nor made drafts."""
        self._row, self._drew = (self._row + 1, self._drew) if plain else (0, True)
        if plain and self._row > SETTLED:
            self._take(True, priced_ms, spent_ms)
            self._idle += 1.0
        elif self._drew:  # what drafting leaves behind is its own
            self._take(False, priced_ms, spent_ms)
            self._idle = 0.0

    def _take(self, plain: bool, priced_ms: float, spent_ms: float) -> None:
        if plain is not self._plain:
            self._pair()
            long = len(self._tail) >= LEAST_STEPS
            self._before = (_slowness(self._tail), len(self._tail)) if long else None
            self._plain, self._paired = plain, False
            self._tail.clear()
        self._tail.append((priced_ms, spent_ms))
        if len(self._tail) == NEAR:
            self._pair()

    def _pair(self) -> None:
        """Compare the present stretch with the one before it, once."""
        if self._paired or self._before is None or len(self._tail) < LEAST_STEPS:
            return
        (slowness, steps), here = self._before, len(self._tail)
        more = _slowness(self._tail) - slowness
        self.pairs.add(-more if self._plain else more, 1.0 / (1.0 / steps + 1.0 / here))
        self._paired = True

    @property
    def trust(self) -> float:
        """In (0, 1]: by how much the rate of plans is overrated."""
        found = min(max(math.exp(-self.pairs.mean), LEAST), 1.0)
        return 1.0 - (1.0 - found) * math.exp2(-self._idle / HEALS)

    def stop(self) -> None:
        """Break off a burst: the load is another one than what it was to cost was reckoned for."""
        self._left = 0

    def burst(self, promise: float, doubt: float = 0.0) -> bool:
        """Whether this step, whose plan promises ``promise`` times the rate of plain steps, is to be plain.

        ``doubt``: relative standard error of that; a promise it may explain is tested soon, since it may cost as much.
        """
        if self._left > 0:
            self._left -= 1
            return True
        self._credit, self._since = self._credit + self.share, self._since + 1
        lost = BURST * (1.0 - 1.0 / max(promise, 1.0))  # in steps
        tested = promise < 1.0 + SURE * doubt and self._since >= SOON
        if not tested and (self._credit < lost or self._since < APART):
            return False
        self._credit, self._left, self._since = 0.0, BURST - 1, 0
        self.bursts += 1
        return True


def _slowness(steps: deque[tuple[float, float]]) -> float:
    """Log of the time taken over the priced one."""
    return math.log(max(sum(s for _, s in steps), 1e-9) / max(sum(p for p, _ in steps), 1e-9))
