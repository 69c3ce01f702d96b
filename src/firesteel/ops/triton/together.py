"""Several products of one input in one launch, for few rows.

A launch of few rows is short: what it costs beyond reading its weight counts. Weights
that always read the same input are stacked by format when the model is loaded, and the
first product asked of an input makes all of them. A program's arithmetic is that of a
launch of its own, so that the bits are too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from firesteel.ops.triton.launch import begin, cdiv, kernel, pow2
from firesteel.ops.triton.linear import COUNTERS, GROUP, TILE_M, Scratch, Weight
from firesteel.ops.triton.products import range_sum, ranges_end
from firesteel.ops.triton.spec import Spec
from firesteel.ops.triton.target import Target

FEW = 32  # rows up to which products share a launch


@dataclass
class Group:
    """Stacks of one input's weights: ``fp8`` and ``bf16`` [*, k], either may be missing.

    ``members``: (weight, outputs float32) in stack order, FP8 first; the parts are views of the stacks.
    ``table`` int32 [tiles, 4]: per tile of 64 outputs its member's n, first line of the stack, first column
    in its output buffer, and whether that is the float32 one. ``widths``: columns of the two buffers.
    """

    fp8: Weight | None
    bf16: Weight | None
    members: list[tuple[Weight, bool]]
    table: Tensor
    widths: tuple[int, int]


def stack(parts: Sequence[Weight]) -> Weight | None:
    """One weight of several; the parts become views of it and take over its ranges of K."""
    if not parts:
        return None
    data = torch.cat([p.data for p in parts])
    scale = torch.cat([p.scale for p in parts if p.scale is not None]) if parts[0].scale is not None else None
    whole = Weight(data, scale, parts[0].lines_of)
    at = 0
    for part in parts:
        n = part.shape[0]
        part.data = data[at : at + n]
        if scale is not None:
            part.scale = scale[at // GROUP : (at + n) // GROUP]
        part.ranges = whole.splits
        at += n
    return whole


def group_of(parts: Sequence[tuple[Weight, bool]]) -> Group | None:
    """The group of (weight, outputs float32) that see one input; None if they cannot be stacked.

    The first weight, whose product is asked for before the others', knows the group.
    """
    weights = [w for w, _ in parts]
    k = weights[0].shape[1]
    if len(parts) < 2 or k % GROUP or any(w.shape[1] != k or w.shape[0] % TILE_M for w in weights):
        return None
    if any(w.group is not None or w.joined is not None for w in weights):
        return None
    fp8 = [(w, wide) for w, wide in parts if w.scale is not None]
    bf16 = [(w, wide) for w, wide in parts if w.data.dtype == torch.bfloat16]
    if len(fp8) + len(bf16) < len(parts) or any(w.lines_of != GROUP or w.shape[0] % GROUP for w, _ in fp8):
        return None
    lines: list[tuple[int, int, int, int]] = []
    widths = [0, 0]
    for some in (fp8, bf16):
        first = 0
        for w, wide in some:
            n = w.shape[0]
            lines += [(n, first, widths[wide], int(wide))] * (n // TILE_M)
            widths[wide] += n
            first += n
    table = torch.tensor(lines, dtype=torch.int32, device=weights[0].data.device)
    whole = (stack([w for w, _ in fp8]), stack([w for w, _ in bf16]))
    weights[0].group = Group(*whole, [*fp8, *bf16], table, (widths[0], widths[1]))
    return weights[0].group


@kernel("rows")
def together_kernel(
    w8,
    ws,
    q,
    qs,
    w16,
    x,
    table,
    out,
    exact,
    part_8,
    part_16,
    arrived,
    rows,
    K: tl.constexpr,
    TILES_8: tl.constexpr,
    SPLITS_8: tl.constexpr,
    TILES_16: tl.constexpr,
    SPLITS_16: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """out and exact, each the [rows, n] results of its members one after another, as ``Group.table`` says.

    q e4m3 [rows, K] with qs float32 [rows, K / 128] times w8 [64 * TILES_8, K] with its scales ws;
    x bf16 [rows, K] times w16 [64 * TILES_16, K]. A program sums one of SPLITS ranges of K of one tile;
    part as ``linear_kernel`` has it, [*, rows, 64 * TILES].
    """
    at, span = tl.program_id(0), tl.program_id(1)
    BLOCKS: tl.constexpr = K // 128
    FP8: tl.constexpr = TILES_8 * SPLITS_8
    BY_8: tl.constexpr = TILES_8 if TILES_8 > 0 else 1
    BY_16: tl.constexpr = TILES_16 if TILES_16 > 0 else 1
    tile = tl.where(at < FP8, at % BY_8, TILES_8 + (at - FP8) % BY_16)
    entry = table + tile * 4
    n, first = tl.load(entry), tl.load(entry + 1)
    column, wide = tl.load(entry + 2), tl.load(entry + 3)
    line = span * TILE_N + tl.arange(0, TILE_N)
    rn = tl.minimum(line, rows - 1)
    live = (line < rows)[None, :] & (tl.arange(0, TILE_M) >= 0)[:, None]
    long, counter = line.to(tl.int64)[None, :], arrived + tile * tl.num_programs(1) + span
    begin()
    if at < FP8:
        split = at // BY_8
        m = tile * TILE_M + tl.arange(0, TILE_M)
        own, plane = long * (TILES_8 * TILE_M) + m[:, None], rows.to(tl.int64) * (TILES_8 * TILE_M)
        to = rows.to(tl.int64) * column + long * n + (m - first)[:, None]
        count: tl.constexpr = BLOCKS // SPLITS_8
        acc = range_sum(
            w8, q, ws, qs, m, rn, split * count, count, K, K, BLOCKS, 128, TILE_M, TILE_N, "fp8", True
        )  # fmt: skip
        last, total = ranges_end(acc, part_8, own, plane, counter, live, split, SPLITS_8, TILE_M, TILE_N)
        if last & (wide != 0):
            tl.store(exact + to, total, mask=live)
        if last & (wide == 0):
            tl.store(out + to, total.to(out.dtype.element_ty), mask=live)
    elif TILES_16 > 0:
        split = (at - FP8) // BY_16
        m = (tile - TILES_8) * TILE_M + tl.arange(0, TILE_M)
        own, plane = long * (TILES_16 * TILE_M) + m[:, None], rows.to(tl.int64) * (TILES_16 * TILE_M)
        to = rows.to(tl.int64) * column + long * n + (m - first)[:, None]
        each: tl.constexpr = BLOCKS // SPLITS_16
        acc = range_sum(
            w16, x, ws, qs, m, rn, split * each, each, K, K, BLOCKS, 1, TILE_M, TILE_N, "bf16", False
        )  # fmt: skip
        last, total = ranges_end(acc, part_16, own, plane, counter, live, split, SPLITS_16, TILE_M, TILE_N)
        if last & (wide != 0):
            tl.store(exact + to, total, mask=live)
        if last & (wide == 0):
            tl.store(out + to, total.to(out.dtype.element_ty), mask=live)


def products(
    x: Tensor, form: tuple[Tensor, Tensor], group: Group, dtype: torch.dtype, scratch: Scratch, target: Target
) -> list[Tensor]:
    """Every member's x [R, k] times w^T: [R, n] of ``dtype`` or float32; ``form``: x quantised, if FP8 is there."""
    rows, k = x.shape
    tile = max(16, pow2(rows))
    fp8, bf16 = (0 if w is None else w.shape[0] // TILE_M for w in (group.fp8, group.bf16))
    splits, ranges = (1 if w is None else w.splits for w in (group.fp8, group.bf16))
    out = torch.empty(rows * group.widths[0], dtype=dtype, device=x.device)
    exact = torch.empty(rows * group.widths[1], dtype=torch.float32, device=x.device)
    sums = torch.empty(splits, rows, TILE_M * fp8, dtype=torch.float32, device=x.device)
    more = torch.empty(ranges, rows, TILE_M * bf16, dtype=torch.float32, device=x.device)
    grid = (fp8 * splits + bf16 * ranges, cdiv(rows, tile))
    assert (fp8 + bf16) * grid[1] <= COUNTERS, "more tiles than counters"
    other = group.fp8 or group.bf16
    assert other is not None, "a group has members"
    w8, w16 = group.fp8 or other, group.bf16 or other
    together_kernel[grid](
        w8.data, form[1] if w8.scale is None else w8.scale, *form, w16.data, x, group.table, out, exact, sums,
        more, scratch.arrived, rows, K=k, TILES_8=fp8, SPLITS_8=splits, TILES_16=bf16, SPLITS_16=ranges,
        TILE_M=TILE_M, TILE_N=tile, num_warps=4, num_stages=2 if target.backend == "hip" else 4,
        **target.options,
    )  # fmt: skip
    found, at = [], [0, 0]
    for w, wide in group.members:
        n = rows * w.shape[0]
        found.append((exact if wide else out)[at[wide] : at[wide] + n].view(rows, w.shape[0]))
        at[wide] += n
    return found


KERNELS: list[Spec] = [
    Spec(
        name="linears-together",
        fn=together_kernel,
        signature={
            "w8": "*fp8", "ws": "*fp32", "q": "*fp8", "qs": "*fp32", "w16": "*bf16", "x": "*bf16", "table": "*i32",
            "out": "*bf16", "exact": "*fp32", "part_8": "*fp32", "part_16": "*fp32", "arrived": "*i32", "rows": "i32",
        },
        constexprs={
            "K": 4096, "TILES_8": 24, "SPLITS_8": 8, "TILES_16": 41, "SPLITS_16": 8, "TILE_M": TILE_M, "TILE_N": 16,
        },
        options={"num_warps": 4, "num_stages": 4},
        overrides={t: {"num_stages": 2, "matrix_instr_nonkdim": 16} for t in ("gfx950", "gfx942")},
    )
]  # fmt: skip
