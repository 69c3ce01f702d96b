"""Context rows that target passes owe to the drafter's windows.

A row has to be in its window when its request drafts, is saved or leaves a
snapshot, and not before: a request that does not draft, or ends first, never
pays for its own, nor does a row that has left its window before. What waits is
written together, which costs a fraction of row by row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from firesteel.models.deepseek_v4.dspark import Drafter
from firesteel.models.deepseek_v4.model import LayerMemory
from firesteel.ops.types import PassContext

MOST_BYTES = 256 << 20  # streams that may wait: windows of a hundred requests of a small model
APART = 64  # passes between two looks for what has left its window
LATE = 3  # steps by which a snapshot may come late, at most


class Owed:
    """Passes whose rows wait, and from which pass on each slot's are its own and not yet written."""

    def __init__(self, drafter: Drafter, windows: Sequence[LayerMemory], slots: int):
        """``slots``: lines of a window, the scratch one included."""
        self.drafter, self.windows = drafter, windows
        self.passes: list[tuple[list[Tensor], PassContext]] = []
        self._owners: list[Sequence[int]] = []  # slots that have rows in each pass
        self._begun = 0  # number of the first pass that waits
        self._since = [0] * slots  # number of a slot's first pass that counts
        self._full_at = APART  # passes from which on those that have left their windows are looked for
        block = drafter.dspark.block_size
        # a pass has at least one row that stays; what a window held so many passes ago has left it
        self.most = drafter.config.sliding_window + LATE * (1 + block)
        self.nbytes = 0  # of the passes' streams

    def add(self, streams: list[Tensor], ctx: PassContext, owners: Sequence[int]) -> None:
        """A pass of ``owners`` has run; ``streams`` [R, hc, D] of its tapped layers."""
        self.passes.append((streams, ctx))
        self._owners.append(owners)
        self.nbytes += sum(h.nbytes for h in streams)
        if len(self.passes) >= self._full_at:
            self._prune()

    def _prune(self) -> None:
        """Of each slot only the newest passes count that its window may hold."""
        counts = [0] * len(self._since)
        for i in reversed(range(len(self.passes))):
            for slot in self._owners[i]:
                counts[slot] += 1
                if counts[slot] == self.most:
                    self._since[slot] = max(self._since[slot], self._begun + i)
        self._let_go()
        self._full_at = len(self.passes) + APART

    @property
    def full(self) -> bool:
        """Whether waiting takes too much memory."""
        return self.nbytes > MOST_BYTES

    def write(self, slots: Iterable[int] | None = None) -> None:
        """Write what ``slots`` wait for; without them everything."""
        count = len(self.passes)
        if slots is None:
            slots = range(len(self._since))
        first = [count] * len(self._since)
        for slot in slots:
            first[slot] = max(self._since[slot] - self._begun, 0)
            self._since[slot] = self._begun + count
        at = min(first)
        if at < count:
            wanted = torch.tensor([f - at for f in first]) if any(f > at for f in first) else None
            self.drafter.write_context(self.passes[at:], self.windows, wanted)
        self._let_go()

    def change(self, taken: Iterable[int], left: set[int], wanted: set[int]) -> None:
        """Slots ``taken`` by new requests; those ``left`` by old ones stay in it as far as windows are ``wanted``."""
        self.forgive({*taken, *left} - wanted)
        left &= wanted

    def forgive(self, slots: Iterable[int]) -> None:
        """What earlier passes owe to these slots belongs to requests that left them."""
        for slot in slots:
            self._since[slot] = self._begun + len(self.passes)
        self._let_go()

    def _let_go(self) -> None:
        """Of the oldest passes, as far as nobody waits for them."""
        n, since = 0, self._since
        while n < len(self.passes) and all(since[s] > self._begun + n for s in self._owners[n]):
            self.nbytes -= sum(h.nbytes for h in self.passes[n][0])
            n += 1
        del self.passes[:n], self._owners[:n]
        self._begun += n
