"""Compressors: pool the tokens that a row closes, finish the entry, keep raw rows.

Two kernels: pooling reads older raw rows from the ring, so the ring is written by
the second one, after every read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firesteel.ops.triton.launch import begin, cdiv, dense, kernel, pow2
from firesteel.ops.triton.norms import KV_GROUP, types, warps
from firesteel.ops.triton.rounding import e2m1_groups, e4m3_groups, on_grid, rotation
from firesteel.ops.triton.spec import Spec
from firesteel.ops.types import Compressor, CompressorMemory, PassContext

INDEX_GROUP = 32
POOL_VALUES = 8192  # values and as many scores that one pooling program holds
STORE_TILE = 2048


@kernel()
def pool_rows(
    raw_ptr,
    ring_ptr,
    ape_ptr,
    pooled_ptr,
    position_ptr,
    slot_ptr,
    first_ptr,
    valid_ptr,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    TOKENS: tl.constexpr,
    TP: tl.constexpr,
    BC: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    """pooled [R, D]: the softmax-weighted sum over the tokens that a closing row pools, per channel."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + row)
    if (tl.load(valid_ptr + row) == 0) | ((position + 1) % RATIO != 0):
        return
    first = tl.load(first_ptr + row)
    start = tl.load(position_ptr + first)
    slot = tl.load(slot_ptr + row)
    token = tl.arange(0, TP)
    want = position - TOKENS + 1 + token
    here = want >= start
    live = (token < TOKENS) & (want >= 0)
    channel = tl.program_id(1) * BC + tl.arange(0, BC)
    column = (
        channel[None, :] + tl.where(token >= TOKENS - RATIO, WIDTH - D, 0)[:, None]
    )  # CSA: A half, then B half
    inside = live[:, None] & (channel < D)[None, :]
    line = raw_ptr + (first + want - start) * (2 * WIDTH)
    older = ring_ptr + (slot * RING + tl.maximum(want, 0) % RING) * (2 * WIDTH)
    pointer = tl.where(here, line, older)[:, None] + column
    value = tl.load(pointer, mask=inside, other=0.0)
    score = tl.load(pointer + WIDTH, mask=inside, other=float("-inf"))
    bias = ape_ptr + (tl.maximum(want, 0) % RATIO)[:, None] * WIDTH + column
    score += tl.load(bias, mask=inside & here[:, None], other=0.0)  # rows in the ring have it already
    top = tl.max(tl.where((channel < D)[None, :], score, 0.0), axis=0)
    share = tl.exp(score - top[None, :])
    total = tl.where(channel < D, tl.sum(share, axis=0), 1.0)
    entry = tl.sum(share * value, axis=0) / total
    tl.store(pooled_ptr + row * D + channel, on_grid(entry, OFFICIAL), mask=channel < D)


@triton.jit
def hadamard_row(x, D: tl.constexpr):
    """Walsh-Hadamard transform of x [D], scaled by D^-0.5."""
    return tl.sum(hadamard_signs(D) * x[None, :], axis=1) * (D**-0.5)


@triton.jit
def hadamard_signs(D: tl.constexpr):
    """[D, D] of 1 and -1: the parity of the common bits of row and column."""
    i = tl.arange(0, D)
    bits = i[:, None] & i[None, :]
    bits = bits ^ (bits >> 8)
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    bits = bits ^ (bits >> 1)
    return (1 - 2 * (bits & 1)).to(tl.float32)


@kernel("columns")
def finish_entries(
    raw_ptr,
    ring_ptr,
    ape_ptr,
    pooled_ptr,
    weight_ptr,
    entry_ptr,
    page_ptr,
    position_ptr,
    slot_ptr,
    last_ptr,
    valid_ptr,
    cos_ptr,
    sin_ptr,
    columns,
    page_stride,
    eps,
    D: tl.constexpr,
    BD: tl.constexpr,
    HALF: tl.constexpr,
    RATIO: tl.constexpr,
    PER_PAGE: tl.constexpr,
    RING: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    INDEX: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    """Program 0 of a row finishes the entry that the row closes; the others write its raw row into the ring."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(valid_ptr + row) == 0:
        return
    position = tl.load(position_ptr + row)
    slot = tl.load(slot_ptr + row)
    piece = tl.program_id(1)
    if piece > 0:
        newest = tl.load(position_ptr + tl.load(last_ptr + row))
        if newest - position >= RING:
            return
        column = (piece - 1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < 2 * WIDTH
        x = tl.load(raw_ptr + row * (2 * WIDTH) + column, mask=inside, other=0.0)
        scored = inside & (column >= WIDTH)
        x += tl.load(ape_ptr + (position % RATIO) * WIDTH + column - WIDTH, mask=scored, other=0.0)
        tl.store(ring_ptr + (slot * RING + position % RING) * (2 * WIDTH) + column, x, mask=inside)
        return
    if (position + 1) % RATIO != 0:
        return
    lane = tl.arange(0, BD)
    inside = lane < D
    flat: tl.constexpr = D - 2 * HALF
    x = tl.load(pooled_ptr + row * D + lane, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(x * x) / D + eps)
    turned = inside & (lane >= flat)
    partner = tl.load(pooled_ptr + row * D + (lane ^ 1), mask=turned, other=0.0)
    weight = tl.load(weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    weight2 = tl.load(weight_ptr + (lane ^ 1), mask=turned, other=0.0).to(tl.float32)
    cos, sin = rotation(cos_ptr, sin_ptr, row * HALF, lane, flat, D)
    y = on_grid(x * scale * weight, OFFICIAL) * cos + on_grid(partner * scale * weight2, OFFICIAL) * sin
    y = on_grid(y, OFFICIAL)
    if OFFICIAL:
        if INDEX:
            y = e2m1_groups(on_grid(hadamard_row(y, BD), OFFICIAL), BD // GROUP, GROUP)
        else:
            y = tl.where(lane < flat, e4m3_groups(tl.where(lane < flat, y, 0.0), BD // GROUP, GROUP), y)
    entry = position // RATIO
    page = tl.load(page_ptr + slot * columns + entry // PER_PAGE)
    at = page * page_stride + (entry % PER_PAGE) * D
    tl.store(entry_ptr + at + lane, y.to(entry_ptr.dtype.element_ty), mask=inside)


def compress(raw: Tensor, w: Compressor, memory: CompressorMemory, ctx: PassContext, official: bool) -> None:
    """Entries and raw rows of a pass; raw float32 [R, 2*width] is the compressor's projection of its rows."""
    rows, d, r = ctx.rows.count, w.dim, ctx.rows
    if rows == 0:
        return
    ring, entries = memory.raw, memory.entries
    assert ring.is_contiguous() and ring.dtype == torch.float32 and entries.stride()[1:] == (d, 1)
    assert w.norm.weight is not None, "a compressor's norm has a weight"
    width = raw.shape[1] // 2
    tokens = w.ratio * (2 if w.overlap else 1)
    tp, bd = pow2(tokens), pow2(d)
    bc = max(16, min(bd, POOL_VALUES // tp))
    raw, ape = dense(raw), dense(w.ape)
    pooled = torch.empty(rows, d, dtype=torch.float32, device=raw.device)
    pool_rows[(rows, cdiv(d, bc))](
        raw,
        ring,
        ape,
        pooled,
        r.positions,
        r.slots,
        r.first,
        r.valid,
        d,
        w.ratio,
        tokens,
        tp,
        bc,
        ring.shape[1],
        width,
        official,
        num_warps=4,
    )
    cos, sin = ctx.entry_rotary[w.ratio]
    block = min(STORE_TILE, pow2(2 * width))
    if w.index:
        assert not official or bd == d, f"Hadamard needs a power of two, got {d}"
        group = min(INDEX_GROUP, bd)
    else:
        bd = max(bd, KV_GROUP)
        group = KV_GROUP
    finish_entries[(rows, 1 + cdiv(2 * width, block))](
        raw,
        ring,
        ape,
        pooled,
        dense(w.norm.weight),
        entries,
        dense(ctx.page_table),
        r.positions,
        r.slots,
        r.last,
        r.valid,
        dense(cos),
        dense(sin),
        ctx.page_table.shape[1],
        entries.stride(0),
        w.norm.eps,
        d,
        bd,
        cos.shape[1],
        w.ratio,
        ctx.page_size // w.ratio,
        ring.shape[1],
        width,
        block,
        group,
        w.index,
        official,
        num_warps=warps(max(2048, block)),
    )


def _specs() -> list[Spec]:
    out = []
    for name, d, ratio, ring in (("csa", 512, 4, 32), ("hca", 512, 128, 136), ("index", 128, 4, 32)):
        index, halves = name == "index", 2 if ratio == 4 else 1
        tokens, width = halves * ratio, halves * d
        shape = {"D": d, "RATIO": ratio, "RING": ring, "WIDTH": width, "OFFICIAL": True}
        out += [
            Spec(
                f"compress_pool_{name}",
                pool_rows,
                types(
                    f32="raw_ptr ring_ptr ape_ptr pooled_ptr",
                    i64="position_ptr slot_ptr first_ptr",
                    bool="valid_ptr",
                ),
                {**shape, "TOKENS": tokens, "TP": tokens, "BC": max(16, min(d, POOL_VALUES // tokens))},
                {"num_warps": 4},
            ),
            Spec(
                f"compress_finish_{name}",
                finish_entries,
                types(
                    f32="raw_ptr ring_ptr ape_ptr pooled_ptr weight_ptr cos_ptr sin_ptr",
                    bf16="entry_ptr",
                    i64="page_ptr position_ptr slot_ptr last_ptr",
                    bool="valid_ptr",
                    int="columns page_stride",
                    float="eps",
                ),
                {
                    **shape,
                    "BD": d,
                    "HALF": 32,
                    "PER_PAGE": 256 // ratio,
                    "BLOCK": min(STORE_TILE, 2 * width),
                    "GROUP": INDEX_GROUP if index else KV_GROUP,
                    "INDEX": index,
                },
                {"num_warps": 4},
                aligned=("page_stride",),
            ),
        ]
    return out


KERNELS = _specs()
