"""Checks that any backend must pass, and random inputs for them.

``assert_row_invariant`` runs an op for rows alone and in many batches and
demands the same bits. ``World`` makes requests with a history: chunks of their
rows become passes whose rings and pages hold what earlier passes left, and NaN
wherever a row has no business.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from firesteel.core import RowBatch
from firesteel.ops.interface import Ops
from firesteel.ops.types import Compressor, CompressorMemory, PassContext, Rope, SlotState

SIZES = (2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 33, 64)  # row counts of the batches

Row = Any  # names one row: an index, or (slot, position)
Outputs = Tensor | tuple[Tensor, ...]


def assert_row_invariant(
    op: Callable[[Any], Outputs],
    make_inputs: Callable[[list[Row]], Any],
    rows: Sequence[Row],
    *,
    batches: Callable[[int, random.Random], list[Row]] | None = None,
    sizes: Iterable[int] = SIZES,
    alone: int = 24,
    seed: int = 0,
) -> None:
    """Demand that ``op`` gives a row the same bits in every batch, and alone.

    make_inputs turns a list of rows into what ``op`` takes; op returns one or
    several tensors [R, ...], line i of each belonging to the i-th row (None
    among the rows is padding, whose line is not looked at). ``batches`` draws
    a list of about n rows, in an order that the op allows; without it any rows
    in any order, with repetitions. Every row is compared between batches, the
    first ``alone`` also with a call of its own. Raises AssertionError naming
    the row, the batch size and the largest difference.
    """
    rng = random.Random(seed)
    known: dict[Row, tuple[Tensor, ...]] = {}
    for size in sizes:
        drawn = batches(size, rng) if batches else rng.choices(list(rows), k=size)
        got = _tuple(op(make_inputs(list(drawn))))
        for i, row in enumerate(drawn):
            if row is None:
                continue
            have = tuple(t[i] for t in got)
            if row not in known:
                own = len(known) < alone
                known[row] = tuple(t[0] for t in _tuple(op(make_inputs([row])))) if own else have
            _compare(known[row], have, f"row {row!r} in a batch of {len(drawn)} rows (line {i})")


def _compare(want: tuple[Tensor, ...], have: tuple[Tensor, ...], where: str) -> None:
    for part, (a, b) in enumerate(zip(want, have, strict=True)):
        if not same_bits(a, b):
            gap = float((a.double() - b.double()).abs().max())
            raise AssertionError(
                f"output {part} of {where} differs from its bits elsewhere, by at most {gap:.3g}"
            )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape and values; NaN equals NaN."""
    return a.shape == b.shape and bool(torch.all((a == b) | ((a != a) & (b != b))))


def _tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


# ---- how far two backends may differ ---------------------------------------------
def assert_close(got: Tensor, want: Tensor, exact: Tensor, *, grid: bool, flips: float = 0.03) -> None:
    """Demand that ``got`` is as near to the truth as ``want`` is.

    ``exact`` is the oracle's result with products summed in float64: what
    separates it from ``want`` is the noise floor. Without a grid ``got`` may be
    four floors off. On a rounding grid (official numerics) last bits tip
    values over an edge: at most ``flips`` of them may differ visibly, each by
    no more than four floors and two bf16 steps.
    """
    size = float(exact.abs().max())
    floor = float((want.double() - exact.double()).abs().max())
    gap = (got.double() - exact.double()).abs()
    most = 4 * floor + size * (2.0**-7 if grid else 2.0**-21)
    assert not bool(torch.isnan(gap).any()), "NaN in a result"
    assert float(gap.max()) <= most, f"off by {float(gap.max()):.3g}, allowed {most:.3g} (floor {floor:.3g})"
    if grid:
        off = float((gap > size * 2.0**-20).double().mean())
        floor_off = float(((want.double() - exact.double()).abs() > size * 2.0**-20).double().mean())
        assert off <= 4 * floor_off + flips, f"{off:.2%} of the values differ (floor {floor_off:.2%})"


# ---- requests with a history --------------------------------------------------------
@dataclass(frozen=True)
class Geometry:
    """Sizes of a ``World``; ``ring`` counts K=V rows, ``raw_ring`` compressor rows."""

    hidden: int = 96
    heads: int = 8
    dim: int = 64
    rope: int = 16
    span: int = 16
    ring: int = 22
    ratio: int = 4
    raw_ring: int = 14
    index_heads: int = 16
    index_dim: int = 32
    page_size: int = 256
    length: int = 300
    slots: int = 4


class World:
    """Random rows of ``slots`` requests and the memory a pass over some of them finds."""

    def __init__(self, geometry: Geometry, seed: int = 0):
        self.g = g = geometry
        self.generator = torch.Generator().manual_seed(seed)
        n = (g.slots, g.length)
        self.x = self.normal(*n, g.hidden)
        self.q = self.normal(*n, g.heads, g.dim)
        self.kv = self.normal(*n, g.dim)
        self.tokens = torch.randint(0, 64, n, generator=self.generator)
        self.index_q = self.normal(*n, g.index_heads, g.index_dim)
        self.index_weights = self.normal(*n, g.index_heads)
        per_slot = -(-g.length // g.page_size)
        pages = torch.randperm(g.slots * per_slot, generator=self.generator) + 1
        self.table = torch.zeros(g.slots + 1, per_slot, dtype=torch.int64)  # the last line is scratch
        self.table[:-1] = pages.view(g.slots, per_slot)
        self.pages = g.slots * per_slot + 1
        half = torch.arange(0, g.rope, 2, dtype=torch.float32)
        self.ropes = {
            name: Rope(base ** (-half / g.rope), g.rope) for name, base in (("main", 1e4), ("compress", 16e4))
        }
        per_page = g.page_size // g.ratio
        self.entries = self.normal(g.slots, per_slot * per_page, g.dim)
        self.keys = self.normal(g.slots, per_slot * per_page, g.index_dim)

    def normal(self, *shape: int) -> Tensor:
        """Random bf16 values as float32."""
        return torch.randn(*shape, generator=self.generator).bfloat16().float()

    def batch(self, size: int, rng: random.Random) -> list[Row]:
        """About ``size`` rows: chunks of several requests in random order, with padding now and then."""
        left = size
        out: list[Row] = []
        slots = list(range(self.g.slots))
        rng.shuffle(slots)
        for slot in slots:
            n = left if slot == slots[-1] else min(left, rng.randint(0, max(1, size // 2)))
            start = rng.choice((0, 0, rng.randrange(self.g.length), self.g.page_size - 2, self.g.length - n))
            start = max(0, min(start, self.g.length - n))
            out += [(slot, p) for p in range(start, start + n)]
            left -= n
            if rng.random() < 0.3:
                out.append(None)
        return out

    def rows(self, drawn: Sequence[Row]) -> RowBatch:
        """The pass over these rows; neighbours of one slot at successive positions form a group."""
        first: list[int] = []
        for i, row in enumerate(drawn):
            before = drawn[i - 1] if i else None
            joined = row is not None and before is not None and (before[0], before[1] + 1) == row
            first.append(first[-1] if joined else i)
        last = [max(j for j, f in enumerate(first) if f == first[i]) for i in range(len(drawn))]
        scratch = (self.g.slots, 0)
        slots, positions = zip(*(row or scratch for row in drawn), strict=True)
        tokens = [0 if row is None else int(self.tokens[row]) for row in drawn]
        return RowBatch(
            tokens=torch.tensor(tokens),
            positions=torch.tensor(positions),
            slots=torch.tensor(slots),
            first=torch.tensor(first),
            last=torch.tensor(last),
            valid=torch.tensor([row is not None for row in drawn]),
            max_position=max(positions) + 3,
        )

    def context(self, ops: Ops, drawn: Sequence[Row]) -> PassContext:
        """The context of a pass over these rows."""
        return ops.begin_pass(self.rows(drawn), self.table, self.g.page_size, self.ropes, (self.g.ratio,))

    def pick(self, of: Tensor, drawn: Sequence[Row]) -> Tensor:
        """Lines of a [slots, length, ...] tensor; zeros for padding."""
        lines = [torch.zeros_like(of[0, 0]) if row is None else of[row] for row in drawn]
        return torch.stack(lines)

    def ring(self, of: Tensor, size: int, drawn: Sequence[Row]) -> Tensor:
        """Rings [slots + 1, size, w] as the pass finds them; rows that it must not see are NaN."""
        out = torch.full((self.g.slots + 1, size, of.shape[-1]), float("nan"))
        for slot, start in self._starts(drawn).items():
            p = torch.arange(max(0, start - size), start)
            out[slot, p % size] = of[slot, p]
        return out

    def paged(self, of: Tensor, drawn: Sequence[Row], *, after: bool) -> Tensor:
        """Pages [P, n, dim] of entries [slots, entries, dim]: those visible before or after the pass."""
        per_page = self.g.page_size // self.g.ratio
        wide = torch.full((self.pages, 2 * per_page, of.shape[-1]), float("nan"))
        out = wide[:, :per_page]  # pages lie apart, as in the engine
        ends = {row[0]: row[1] + 1 for row in drawn if row is not None}
        for slot, start in self._starts(drawn).items():
            e = torch.arange((ends[slot] if after else start) // self.g.ratio)
            out[self.table[slot, e // per_page], e % per_page] = of[slot, e]
        return out

    @staticmethod
    def _starts(drawn: Sequence[Row]) -> dict[int, int]:
        starts: dict[int, int] = {}
        for row in drawn:
            if row is not None:
                starts.setdefault(row[0], row[1])
        return starts

    def raw_history(self, ops: Ops, w: Compressor) -> Tensor:
        """[slots, length, 2*width]: the raw compressor rows that ``ops`` itself would store."""
        g = self.g
        flat = ops.linear_f32(self.x.flatten(0, 1), w.project).unflatten(0, (g.slots, g.length))
        width = flat.shape[-1] // 2
        ape = w.ape[torch.arange(g.length) % w.ratio]
        return torch.cat((flat[..., :width], flat[..., width:] + ape), -1)

    def memory(self, raw: Tensor, entries: Tensor, drawn: Sequence[Row]) -> CompressorMemory:
        """A compressor's memory before a pass over these rows."""
        return CompressorMemory(
            self.ring(raw, self.g.raw_ring, drawn), self.paged(entries, drawn, after=False)
        )

    def closed(self, memory: CompressorMemory, drawn: Sequence[Row]) -> Tensor:
        """[R, dim]: the entry each row closed; zeros for the others."""
        per_page = self.g.page_size // self.g.ratio
        out = torch.zeros(len(drawn), memory.entries.shape[-1])
        for i, row in enumerate(drawn):
            if row is not None and (row[1] + 1) % self.g.ratio == 0:
                e = row[1] // self.g.ratio
                out[i] = memory.entries[self.table[row[0], e // per_page], e % per_page]
        return out

    def chosen(self, rng: random.Random, drawn: Sequence[Row], n: int) -> Tensor:
        """A selection int64 [R, n] among each row's visible entries, a function of the row alone."""
        out = torch.full((len(drawn), n), -1, dtype=torch.int64)
        for i, row in enumerate(drawn):
            visible = 0 if row is None else (row[1] + 1) // self.g.ratio
            own = random.Random(f"{row}")
            picked = sorted(own.sample(range(visible), min(n, visible)))
            out[i, : len(picked)] = torch.tensor(picked, dtype=torch.int64)
        return out


def slot_state(slots: int, vocab: int, length: int, gamma: int = 4, **changes: Tensor) -> SlotState:
    """Neutral per-slot state of ``slots`` lines (scratch included); ``changes`` replaces fields."""
    shapes = {"stop_ids": (4,), "history": (length,), "bias_ids": (0,), "bad_words": (0, 1)}
    shapes |= dict.fromkeys(("drafts", "margin", "confidence", "survival"), (gamma,))
    values: dict[str, Any] = {"bias_values": torch.zeros(slots, 0), "allowed": None, "draft_logits": None}
    floats = (
        "temperature",
        "top_p",
        "min_p",
        "repetition",
        "presence",
        "frequency",
        "margin",
        "confidence",
        "survival",
    )
    for field in fields(SlotState):
        if field.name in values or field.name in changes:
            continue
        kind = torch.float32 if field.name in floats else torch.int64
        values[field.name] = torch.zeros(slots, *shapes.get(field.name, ()), dtype=kind)
    for name in ("top_p", "repetition"):
        if name in values:
            values[name] += 1
    for name in ("stop_ids", "bad_words"):
        if name in values:
            values[name] -= 1
    return SlotState(**{**values, **changes})
