"""The newest drafting passes as columns, a line per block.

Blocks come a pass at a time and are learned from many passes at once, so they
wait here as arrays; what became of a block is known a step later and refers to
its number. Lines are overwritten in turn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from firesteel.speculation.survival import Samples
from firesteel.speculation.terms import DraftBlocks

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SIZE = 1024  # lines at first
PASSES = 64  # drafting passes that the lines hold at least


class Recent:
    """A ring of lines; ``count`` blocks so far, block n in line n modulo the size. ``depths`` is K."""

    def __init__(self, depths: int):
        self.depths, self.size, self.count = depths, SIZE, 0
        self.owner = np.zeros(SIZE, dtype=np.int64)  # request ids
        self.kind = np.zeros(SIZE, dtype=np.int64)
        self.width = np.zeros(SIZE, dtype=np.int64)
        self.head, self.margin = np.zeros((SIZE, depths)), np.zeros((SIZE, depths))
        self._passes: list[DraftBlocks] = []  # of the newest blocks, which have no lines yet

    @property
    def oldest(self) -> int:
        """Number of the oldest block that is still there."""
        return max(self.count - self.size, 0)

    def add(self, blocks: DraftBlocks) -> int:
        """Keep one pass; the number of its first block."""
        first, n = self.count, len(blocks)
        if n * PASSES > self.size:
            self._write()
            self._grow(n * PASSES)
        self._passes.append(blocks)
        self.count += n
        return first

    def _write(self) -> None:
        """Passes of one width become lines together: arrays of a few numbers cost what larger ones do."""
        passes, self._passes = self._passes, []
        at = self.count - sum(map(len, passes))
        while passes:
            width = passes[0].margin.shape[1]
            same = next((i for i, b in enumerate(passes) if b.margin.shape[1] != width), len(passes))
            at = self._write_same(passes[:same], at, width)
            passes = passes[same:]

    def _write_same(self, passes: list[DraftBlocks], first: int, width: int) -> int:
        ids = [i for b in passes for i in b.request_ids]
        at, end = first % self.size, first % self.size + len(ids)
        line = slice(at, end) if end <= self.size else np.arange(first, first + len(ids)) % self.size
        self.owner[line], self.width[line] = ids, width
        self.kind[line] = [k for b in passes for k in b.kinds]
        self.margin[line, :width] = np.concatenate([b.margin for b in passes])
        heads = [b.head for b in passes if b.head is not None]
        self.head[line, :width] = np.concatenate(heads) if len(heads) == len(passes) else 0.0
        return first + len(ids)

    def lines(self, first: int) -> slice | Ints:
        """Where the blocks from number ``first`` on stand, oldest first."""
        assert first >= self.oldest, "blocks were overwritten before anybody learned from them"
        self._write()
        at, n = first % self.size, self.count - first
        if at + n <= self.size:
            return slice(at, at + n)
        out: Ints = np.arange(first, self.count) % self.size
        return out

    def outcomes(self, fates: list[tuple[int, int, int]]) -> Samples:
        """Samples of (block number, drafts whose fate is known, accepted ones)."""
        self._write()
        block, known, hits = np.array(fates, dtype=np.int64).reshape(-1, 3).T
        block, ends = block % self.size, np.cumsum(known)
        line = np.repeat(block, known)
        depth: Ints = np.arange(len(line)) - np.repeat(ends - known, known)
        accepted = (depth < np.repeat(hits, known)).astype(np.float64)
        return Samples(self.head[line, depth], self.margin[line, depth], depth, self.kind[line], accepted)

    def _grow(self, least: int) -> None:
        old, size = self.size, 1 << (least - 1).bit_length()
        numbers = np.arange(self.oldest, self.count)
        for name in ("owner", "kind", "width", "head", "margin"):
            have = getattr(self, name)
            fresh = np.zeros((size, *have.shape[1:]), dtype=have.dtype)
            fresh[numbers % size] = have[numbers % old]
            setattr(self, name, fresh)
        self.size = size
