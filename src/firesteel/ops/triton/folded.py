"""Routed experts with folded FP4 weights (see ``fp4``): e4m3 blocks with one scale, unpacked in registers.

Official numerics. All blocks of K are added one after another whatever the shape of a launch: tiles may
have any number of lines and programs any part of the outputs, which changes no bit. So a step of few rows
spreads the outputs over many programs, and one of many rows unpacks a block for many lines.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from firesteel.ops.triton import fed, fp4, streamed
from firesteel.ops.triton.experts import finish_up
from firesteel.ops.triton.fp4 import inputs, unfold
from firesteel.ops.triton.launch import begin, kernel, usable
from firesteel.ops.triton.linear import Scratch
from firesteel.ops.triton.spec import Spec


@kernel()
def block_of(w, ws, line_at, half, i, K: tl.constexpr, M: tl.constexpr, ASM: tl.constexpr):
    """e4m3 [M, 128] of block i of block line line_at, from its line half * M on."""
    rm = tl.arange(0, M)
    at = (line_at * (K // 128) + i) * 8192 + half * (M * 32) + rm[:, None] * 32 + tl.arange(0, 32)[None, :]
    scale = ws.to(tl.pointer_type(tl.uint8)) + ((line_at * (K // 128) + i) * 128 + half * M) * 4
    group = tl.arange(0, 8) % 4  # twice, so that a thread of eight warps, too, reads four bytes
    scales = tl.load(scale + rm[:, None] * 4 + group[None, :])
    return unfold(tl.load(w + at), tl.load(w + at + 4096), scales, ASM)


@kernel()
def one_sum(
    w,
    ws,
    wb,
    x,
    xs,
    row,
    live,
    first,
    lines,
    line_at,
    half,
    K: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    KIND: tl.constexpr,
    ARRANGED: tl.constexpr,
    AHEAD: tl.constexpr,
    ASM: tl.constexpr,
):
    """Lines half * M ... of a block line times rows x: float32 [M, N]. KIND "f32": plain x without scales.

    xs float32 [K / 128, lines]: scales of all tiles' lines, of which this one's begin at ``first``; ``live``
    [N]: lines that are no padding, others are not read. Scales are read one block ahead by hand: only what
    feeds a dot gets pipelined.
    """
    blocks: tl.constexpr = K // 128
    lane = tl.arange(0, 128) if ARRANGED else inputs()
    xp, bp = x + row[None, :] * K + lane[:, None], wb + line_at * blocks
    tp = xs + first + tl.arange(0, N)
    some = tl.broadcast_to(live[None, :], (128, N))
    acc = tl.zeros((M, N), tl.float32)
    if AHEAD:
        b = tl.load(bp)
        t = tl.load(tp) if KIND == "fp8" else b
    for i in range(blocks):
        if AHEAD:
            ahead = tl.minimum(i + 1, blocks - 1)
            b1 = tl.load(bp + ahead)
            t1 = tl.load(tp + ahead * lines) if KIND == "fp8" else b1
        else:
            b = tl.load(bp + i)
            t = tl.load(tp + i * lines) if KIND == "fp8" else b
        value = tl.load(xp + i * 128, mask=some, other=0.0)
        a = block_of(w, ws, line_at, half, i, K, M, ASM)
        if KIND == "fp8":
            acc += tl.dot(a, value) * (t * b)[None, :]
        else:
            acc += tl.dot(a.to(tl.float32), value, input_precision="ieee") * b
        if AHEAD:
            t, b = t1, b1
    return acc


@kernel()
def pair_sum(
    w,
    ws,
    wb,
    x,
    xs,
    row,
    live,
    first,
    lines,
    line_at,
    other_at,
    K: tl.constexpr,
    N: tl.constexpr,
    AHEAD: tl.constexpr,
    ASM: tl.constexpr,
):
    """Two block lines times the same rows: float32 [128, N] twice, with the bits of ``one_sum``."""
    blocks: tl.constexpr = K // 128
    xp, tp = x + row[None, :] * K + inputs()[:, None], xs + first + tl.arange(0, N)
    some = tl.broadcast_to(live[None, :], (128, N))
    acc = tl.zeros((128, N), tl.float32)
    other = tl.zeros((128, N), tl.float32)
    bp, cp = wb + line_at * blocks, wb + other_at * blocks
    if AHEAD:
        t, b, c = tl.load(tp), tl.load(bp), tl.load(cp)
    for i in range(blocks):
        if AHEAD:
            ahead = tl.minimum(i + 1, blocks - 1)
            t1, b1, c1 = tl.load(tp + ahead * lines), tl.load(bp + ahead), tl.load(cp + ahead)
        else:
            t, b, c = tl.load(tp + i * lines), tl.load(bp + i), tl.load(cp + i)
        value = tl.load(xp + i * 128, mask=some, other=0.0)
        acc += tl.dot(block_of(w, ws, line_at, 0, i, K, 128, ASM), value) * (t * b)[None, :]
        other += tl.dot(block_of(w, ws, other_at, 0, i, K, 128, ASM), value) * (t * c)[None, :]
        if AHEAD:
            t, b, c = t1, b1, c1
    return acc, other


@kernel()
def keep_part(part, acc, order, first, at, INNER: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Store sums [M, N] of lines first ... as bfloat16 from column ``at`` of part [lines, 2 * INNER]."""
    line = first + tl.arange(0, N)
    live = tl.broadcast_to((tl.load(order + line) >= 0)[None, :], (M, N))
    to = part + line.to(tl.int64)[None, :] * (2 * INNER) + at + tl.arange(0, M)[:, None]
    tl.store(to, acc.to(tl.bfloat16), mask=live)


@kernel("slots", "limit")
def folded_up_kernel(
    w,
    ws,
    wb,
    x,
    xs,
    order,
    owner,
    weights,
    h,
    hs,
    part,
    arrived,
    slots,
    limit,
    K: tl.constexpr,
    INNER: tl.constexpr,
    TOP: tl.constexpr,
    TILE_N: tl.constexpr,
    PIECES: tl.constexpr,
    AHEAD: tl.constexpr,
    ASM: tl.constexpr,
):
    """h [lines, INNER] = SwiGLU(w1 x, w3 x) times the route weight, e4m3 with scales hs [INNER / 128, lines].

    x e4m3 [rows, K]; xs float32 [K / 128, lines] its scales in the order of lines (see ``plan_kernel``).

    One program per tile and 128 columns of h makes both halves (PIECES 1), or 2 programs one half each, or
    4 programs 64 outputs each, the last of which finishes: part bfloat16 [lines, 2 * INNER].
    """
    begin()
    tile, m = tl.program_id(0), tl.program_id(1)
    expert = tl.load(owner + tile)
    if expert < 0:
        return
    first, lines = tile * TILE_N, slots * TILE_N
    line = first + tl.arange(0, TILE_N)
    gate_at = (expert * (2 * INNER // 128) + m).to(tl.int64)
    index = tl.load(order + line)
    row = (tl.maximum(index, 0) // TOP).to(tl.int64)
    if PIECES == 1:
        gate, up = pair_sum(
            w, ws, wb, x, xs, row, index >= 0, first, lines, gate_at, gate_at + INNER // 128, K, TILE_N, AHEAD,
            ASM,
        )  # fmt: skip
        share = tl.load(weights + tl.maximum(tl.load(order + line), 0))  # again: registers are short
        at = hs + m * lines + line
        finish_up(gate, up, share, limit, h, at, line, m, INNER, "fp8", True, True, False, True)
    else:
        piece = tl.program_id(2)
        size: tl.constexpr = 256 // PIECES
        which = piece % 2
        half = piece // 2
        at = which * INNER + m * 128 + half * size
        acc = one_sum(
            w, ws, wb, x, xs, row, index >= 0, first, lines, gate_at + which * (INNER // 128), half, K, size,
            TILE_N, "fp8", False, AHEAD, ASM,
        )  # fmt: skip
        keep_part(part, acc, order, first, at, INNER, size, TILE_N)
        tl.debug_barrier()  # all stores of this program stand before its arrival
        counter = arrived + tile * tl.num_programs(1) + m
        if tl.atomic_add(counter, 1, sem="acq_rel") == PIECES - 1:
            index = tl.load(order + line)
            live = tl.broadcast_to((index >= 0)[None, :], (128, TILE_N))
            base = part + line.to(tl.int64)[None, :] * (2 * INNER) + m * 128 + tl.arange(0, 128)[:, None]
            gate = tl.load(base, mask=live, other=0.0, cache_modifier=".cg").to(tl.float32)
            up = tl.load(base + INNER, mask=live, other=0.0, cache_modifier=".cg").to(tl.float32)
            share = tl.load(weights + tl.maximum(index, 0))
            finish_up(
                gate,
                up,
                share,
                limit,
                h,
                hs + m * lines + line,
                line,
                m,
                INNER,
                "fp8",
                True,
                True,
                False,
                True,
            )
            tl.store(counter, 0)


@kernel()
def keep_out(out, acc, order, first, at, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Store sums [M, N] of lines first ... as columns ``at`` ... of their assignments in out [*, D]."""
    taken = tl.load(order + first + tl.arange(0, N))
    n = at + tl.arange(0, M)
    keep = (n < D)[:, None] & (taken >= 0)[None, :]
    to = out + taken.to(tl.int64)[None, :] * D + n[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=keep)


@kernel("slots")
def folded_down_kernel(
    w,
    ws,
    wb,
    h,
    hs,
    order,
    owner,
    out,
    slots,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    K: tl.constexpr,
    TILE_N: tl.constexpr,
    M: tl.constexpr,
    KIND: tl.constexpr,
    AHEAD: tl.constexpr,
    ASM: tl.constexpr,
):
    """out [assignments, D] = h [lines, K] times w2 of the tile's expert; WIDE is D in whole blocks of 128.

    M outputs per program, 128 or 64. KIND as in ``one_sum``.
    """
    begin()
    tile, piece = tl.program_id(0), tl.program_id(1)
    expert = tl.load(owner + tile)
    if expert < 0:
        return
    line_at = (expert * (WIDE // 128) + piece * M // 128).to(tl.int64)
    first, lines = tile * TILE_N, slots * TILE_N
    line = first + tl.arange(0, TILE_N)
    live = tl.load(order + line) >= 0
    acc = one_sum(
        w, ws, wb, h, hs, line.to(tl.int64), live, first, lines, line_at, piece % (128 // M), K, M, TILE_N, KIND,
        True, AHEAD, ASM,
    )  # fmt: skip
    keep_out(out, acc, order, first, piece * M, D, M, TILE_N)


FEW = 12  # tiles up to which programs take fewer outputs each
ALONE = 8  # tiles up to which every program has a multiprocessor to itself


# ---- launches --------------------------------------------------------------------------------
@dataclass(frozen=True)
class Part:
    """How one of the two products is launched; changes no bit.

    ``pieces``: programs that share 128 columns of h (1, 2 or 4), or 128 outputs of the second product (1 or 2).
    ``ahead``: scales of rows are read one block ahead, which costs registers. ``unroll`` > 0: the form of
    ``streamed`` with so many blocks unrolled and so many ``registers`` per thread; it has no pieces. ``feed``: the
    form of ``fed`` instead, which knows all the rest by itself.
    """

    pieces: int
    warps: int
    stages: int
    ahead: bool = True
    unroll: int = 0
    registers: int = 0
    feed: fed.Feed | None = None

    @property
    def by_rows(self) -> bool:
        """Whether rows' scales are taken as the rows lie."""
        return self.unroll > 0 or self.feed is not None

    @property
    def stream(self) -> streamed.How:
        """What ``streamed`` has to know."""
        return self.warps, self.stages, self.unroll, self.registers


@dataclass(frozen=True)
class Shape:
    """Launches of both products."""

    up: Part
    down: Part


def streams(m: int, k: int) -> bool:
    """Whether weights [m, k] per expert may take the form of ``streamed`` here."""
    return usable() and m % 256 == 0 and k % 512 == 0


def streamed_shape(tile_n: int, slots: int) -> Shape:
    """As ``shape_for``, of the streamed form."""
    if tile_n == 64:
        return Shape(*(Part(1, 4, 4, feed=fed.Feed(4)),) * 2)
    if tile_n == 32:
        return Shape(*(Part(1, 4, 4, unroll=2, registers=255),) * 2)
    if slots <= ALONE:
        return Shape(Part(1, 8, 8, unroll=2, registers=255), Part(2, 4, 8))
    if slots <= FEW:
        return Shape(Part(1, 4, 6), Part(2, 4, 8))
    if slots <= 300:
        return Shape(Part(1, 8, 3, unroll=1, registers=80), Part(1, 8, 3, unroll=1, registers=80))
    return Shape(Part(1, 4, 3, unroll=1, registers=168), Part(1, 4, 3, unroll=1, registers=168))


def shape_for(tile_n: int, slots: int, stream: bool = False) -> Shape:
    """By lines per tile and tiles; the numbers are measured ones of an H200. ``stream``: see ``streams``."""
    if stream:
        return streamed_shape(tile_n, slots)
    if tile_n == 64:
        return Shape(Part(2, 4, 3, ahead=False), Part(1, 4, 3, ahead=False))
    if tile_n == 32:
        return Shape(Part(1, 8, 3), Part(1, 4, 3))
    if slots <= FEW:
        return Shape(Part(1, 4, 6), Part(2, 4, 8))
    return Shape(Part(1, 4, 4 if slots <= 256 else 3), Part(1, 4, 4))


@dataclass(frozen=True)
class Weights:
    """FP4 weights of all experts: blocks, scale words and block scales one after another; [m, k] per expert."""

    data: Tensor
    words: Tensor
    base: Tensor
    m: int
    k: int

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(t.numel() * t.element_size() for t in (self.data, self.words, self.base))


def up(
    w: Weights,
    part: Part,
    x: Tensor,
    xs: Tensor,
    weights: Tensor,
    order: Tensor,
    owner: Tensor,
    top: int,
    limit: float,
    scratch: Scratch,
    asm: bool,
) -> tuple[Tensor, Tensor]:
    """(h e4m3 [lines, INNER], scales float32 [INNER / 128, lines]); see ``folded_up_kernel``.

    xs: scales in the order of lines [K / 128, lines]; of the streamed and fed forms in that of rows [rows, K / 128].
    """
    inner, lines, slots = w.m // 2, order.shape[0], owner.shape[0]
    h = torch.empty(lines, inner, dtype=x.dtype, device=x.device)
    hs = torch.empty(inner // 128, lines, dtype=torch.float32, device=x.device)
    if part.feed or (part.unroll and lines // slots > streamed.FEW):
        x = fp4.arranged_rows(x)
    if part.feed:
        fed.up(w.data, w.words, w.base, x, xs, weights, order, owner, h, hs, top, limit, part.feed)
        return h, hs
    if part.unroll:
        streamed.up(w.data, w.words, w.base, x, xs, weights, order, owner, h, hs, top, limit, part.stream)
        return h, hs
    assert part.pieces == 1 or slots * (inner // 128) <= scratch.arrived.numel(), "more tiles than counters"
    kept = torch.empty(lines if part.pieces > 1 else 0, w.m, dtype=torch.bfloat16, device=x.device)
    folded_up_kernel[(slots, inner // 128, part.pieces)](
        w.data, w.words, w.base, x, xs, order, owner, weights, h, hs, kept, scratch.arrived, slots, limit,
        K=w.k, INNER=inner, TOP=top, TILE_N=lines // slots, PIECES=part.pieces, AHEAD=part.ahead,
        ASM=asm,
        num_warps=part.warps, num_stages=part.stages,
    )  # fmt: skip
    return h, hs


def down(
    w: Weights,
    part: Part,
    kind: str,
    h: Tensor,
    hs: Tensor,
    order: Tensor,
    owner: Tensor,
    out: Tensor,
    asm: bool,
) -> Tensor:
    """Fill out [assignments, D]; see ``folded_down_kernel``."""
    lines, slots = order.shape[0], owner.shape[0]
    if part.feed:
        assert kind == "fp8", "streams take e4m3 rows"
        fed.down(w.data, w.words, w.base, w.m, h, hs, order, owner, out, part.feed)
        return out
    if part.unroll:
        assert kind == "fp8", "streams take e4m3 rows"
        streamed.down(w.data, w.words, w.base, w.m, h, hs, order, owner, out, part.stream)
        return out
    folded_down_kernel[(slots, w.m // 128 * part.pieces)](
        w.data, w.words, w.base, h, hs, order, owner, out, slots, D=out.shape[1], WIDE=w.m, K=w.k,
        TILE_N=lines // slots, M=128 // part.pieces, KIND=kind, AHEAD=part.ahead, ASM=asm,
        num_warps=part.warps, num_stages=part.stages,
    )  # fmt: skip
    return out


# ---- offline compilation ---------------------------------------------------------------------
UP = {
    "w": "*u8", "ws": "*i32", "wb": "*fp32", "x": "*fp8", "xs": "*fp32", "order": "*i32", "owner": "*i32",
    "weights": "*fp32", "h": "*fp8", "hs": "*fp32", "part": "*bf16", "arrived": "*i32", "slots": "i32",
    "limit": "fp32",
}  # fmt: skip
DOWN = {
    "w": "*u8", "ws": "*i32", "wb": "*fp32", "h": "*fp8", "hs": "*fp32", "order": "*i32", "owner": "*i32",
    "out": "*bf16", "slots": "i32",
}  # fmt: skip


def _specs(tile_n: int, slots: int, name: str) -> list[Spec]:
    shape = shape_for(tile_n, slots)
    up_spec = Spec(
        name=f"experts-up-folded-{name}",
        fn=folded_up_kernel,
        signature=UP,
        constexprs={
            "K": 4096, "INNER": 2048, "TOP": 6, "TILE_N": tile_n, "PIECES": shape.up.pieces,
            "AHEAD": shape.up.ahead, "ASM": True,
        },
        options={"num_warps": shape.up.warps, "num_stages": shape.up.stages},
        targets=("sm_90",),
    )  # fmt: skip
    down_spec = Spec(
        name=f"experts-down-folded-{name}",
        fn=folded_down_kernel,
        signature=DOWN,
        constexprs={
            "D": 4096, "WIDE": 4096, "K": 2048, "TILE_N": tile_n, "M": 128 // shape.down.pieces,
            "KIND": "fp8", "AHEAD": shape.down.ahead, "ASM": True,
        },
        options={"num_warps": shape.down.warps, "num_stages": shape.down.stages},
        targets=("sm_90",),
    )  # fmt: skip
    return [up_spec, down_spec]


def _streamed(tile_n: int, slots: int, name: str) -> list[Spec]:
    shape = streamed_shape(tile_n, slots)
    up_how, down_how = (part.stream if part.unroll else None for part in (shape.up, shape.down))
    made = streamed.specs(tile_n, name, up_how, down_how)
    return made + fed.specs(tile_n, slots, name, shape.up.feed, shape.down.feed)


KERNELS: list[Spec] = [
    Spec(
        name="experts-arranged",
        fn=fp4.arrange_kernel,
        signature={"x": "*i32", "out": "*i32"},
        constexprs={"K": 4096, "SPAN": 1024},
        options={"num_warps": 4},
        targets=("sm_90",),
    ),
    *_specs(16, 6, "16-few"), *_specs(16, 256, "16"), *_specs(32, 256, "32"), *_specs(64, 256, "64"),
    *_streamed(16, 6, "16-few"), *_streamed(16, 256, "16"), *_streamed(16, 350, "16-many"),
    *_streamed(32, 300, "32"), *_streamed(64, 300, "64"),
]  # fmt: skip
