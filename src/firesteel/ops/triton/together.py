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
from triton.tools.tensor_descriptor import TensorDescriptor

from firesteel.ops.triton import crossed, piped
from firesteel.ops.triton.launch import begin, cdiv, kernel, pow2
from firesteel.ops.triton.linear import COUNTERS, GROUP, TILE_M, Scratch, Weight
from firesteel.ops.triton.products import range_sum, ranges_end, wide_sum
from firesteel.ops.triton.spec import Spec
from firesteel.ops.triton.target import Target

FEW = 32  # rows up to which ``together_kernel`` serves
SOME = 64  # rows up to which products share a launch, by tensor descriptors, if their tiles are not many
MANY = 128  # tiles that keep a device busy by themselves
SMALL = 32  # tiles of FP8 up to which products share a launch at any row count
WORK = 192  # units of work, a tile of FP8 or half one of bfloat16, that a group's ranges of K make ...
LONG = 8  # ... of at least so many blocks


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


def ranges_of(tiles: tuple[int, int], blocks: int) -> int:
    """Ranges of K that a group of so many tiles of FP8 and of bfloat16 is cut into."""
    s = 1
    while (tiles[0] + 2 * tiles[1]) * s < WORK and blocks % (2 * s) == 0 and blocks // (2 * s) >= LONG:
        s *= 2
    return s


def stack(parts: Sequence[Weight], ranges: int) -> Weight | None:
    """One weight of several; the parts become views of it and take over its ranges of K."""
    if not parts:
        return None
    data = torch.cat([p.data for p in parts])
    scale = torch.cat([p.scale for p in parts if p.scale is not None]) if parts[0].scale is not None else None
    whole = Weight(data, scale, parts[0].lines_of, ranges=ranges)
    at = 0
    for part in parts:
        n = part.shape[0]
        part.data = data[at : at + n]
        if scale is not None:
            part.scale = scale[at // GROUP : (at + n) // GROUP]
        part.ranges = ranges
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
    tiles = [sum(w.shape[0] for w, _ in some) // TILE_M for some in (fp8, bf16)]
    ranges = ranges_of((tiles[0], tiles[1]), k // GROUP)
    own = fp8[0][0].ranges if len(fp8) == 1 else None  # a weight that has ranges keeps them
    whole = (stack([w for w, _ in fp8], own or ranges), stack([w for w, _ in bf16], ranges))
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
    AT_ONCE_8: tl.constexpr = 1,
    AT_ONCE_16: tl.constexpr = 1,
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
    n, first = tl.multiple_of(tl.load(entry), 64), tl.multiple_of(tl.load(entry + 1), 64)
    column, wide = tl.multiple_of(tl.load(entry + 2), 64), tl.load(entry + 3)
    line = span * TILE_N + tl.arange(0, TILE_N)
    rn = tl.minimum(line, rows - 1)
    live = (line < rows)[None, :] & (tl.arange(0, TILE_M) >= 0)[:, None]
    long, counter = line.to(tl.int64)[None, :], arrived + tile * tl.num_programs(1) + span
    count: tl.constexpr = BLOCKS // SPLITS_8
    each: tl.constexpr = BLOCKS // SPLITS_16
    begin()
    if at < FP8:
        split = at // BY_8
        m = tile * TILE_M + tl.arange(0, TILE_M)
        own, plane = long * (TILES_8 * TILE_M) + m[:, None], rows.to(tl.int64) * (TILES_8 * TILE_M)
        to = rows.to(tl.int64) * column + long * n + (m - first)[:, None]
        acc = range_sum(
            w8, q, ws, qs, m, rn, split * count, count, K, K, BLOCKS, 128, TILE_M, TILE_N, "fp8", True
        )  # fmt: skip
        last, total = ranges_end(
            acc, part_8, own, plane, counter, live, split, SPLITS_8, TILE_M, TILE_N, AT_ONCE_8
        )
        if last & (wide != 0):
            tl.store(exact + to, total, mask=live)
        if last & (wide == 0):
            tl.store(out + to, total.to(out.dtype.element_ty), mask=live)
    elif TILES_16 > 0:
        split = (at - FP8) // BY_16
        m = (tile - TILES_8) * TILE_M + tl.arange(0, TILE_M)
        own, plane = long * (TILES_16 * TILE_M) + m[:, None], rows.to(tl.int64) * (TILES_16 * TILE_M)
        to = rows.to(tl.int64) * column + long * n + (m - first)[:, None]
        acc = range_sum(
            w16, x, ws, qs, m, rn, split * each, each, K, K, BLOCKS, 1, TILE_M, TILE_N, "bf16", False
        )  # fmt: skip
        last, total = ranges_end(
            acc, part_16, own, plane, counter, live, split, SPLITS_16, TILE_M, TILE_N, AT_ONCE_16
        )
        if last & (wide != 0):
            tl.store(exact + to, total, mask=live)
        if last & (wide == 0):
            tl.store(out + to, total.to(out.dtype.element_ty), mask=live)


@kernel()
def member_end(
    acc,
    out,
    exact,
    part,
    counter,
    rows,
    m0,
    n0,
    split,
    n,
    first,
    column,
    wide,
    WIDTH: tl.constexpr,
    SIDE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Store a tile's sum in its member's output; with SIDE > 1 programs for its ranges, by the last of them.

    part float32 [SIDE, rows, WIDTH]; n, first, column, wide: the tile's line of ``Group.table``.
    """
    line = n0 + tl.arange(0, TILE_N)
    m = m0 + tl.arange(0, TILE_M)
    live = (line < rows)[None, :] & (m >= 0)[:, None]
    long, last = line.to(tl.int64)[None, :], split >= 0
    if SIDE > 1:
        own, plane = long * WIDTH + m[:, None], rows.to(tl.int64) * WIDTH
        last, acc = ranges_end(acc, part, own, plane, counter, live, split, SIDE, TILE_M, TILE_N, AT_ONCE)
    to = rows.to(tl.int64) * column + long * n + (m - first)[:, None]
    if last & (wide != 0):
        tl.store(exact + to, acc, mask=live)
    if last & (wide == 0):
        tl.store(out + to, acc.to(out.dtype.element_ty), mask=live)


@kernel("rows", "spans")
def together_wide_kernel(
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
    spans,
    K: tl.constexpr,
    TILES_8: tl.constexpr,
    SPLITS_8: tl.constexpr,
    SIDE_8: tl.constexpr,
    TILES_16: tl.constexpr,
    SPLITS_16: tl.constexpr,
    SIDE_16: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STEP: tl.constexpr,
    AT_ONCE_8: tl.constexpr,
    AT_ONCE_16: tl.constexpr,
):
    """``together_kernel`` for many rows; w8, q, w16 and x are tensor descriptors as ``wide_kernel`` takes them.

    SIDE: whether the format's ranges of K run side by side. The longer bfloat16 tiles come first, and
    programs that share a weight tile are neighbours.
    """
    pid = tl.program_id(0)
    span, at = pid % spans, pid // spans
    BY_8: tl.constexpr = TILES_8 if TILES_8 > 0 else 1
    BY_16: tl.constexpr = TILES_16 if TILES_16 > 0 else 1
    LONG: tl.constexpr = TILES_16 * (SPLITS_16 if SIDE_16 else 1)
    tile = tl.where(at < LONG, TILES_8 + at % BY_16, (at - LONG) % BY_8)
    entry = table + tile * 4
    n, first = tl.multiple_of(tl.load(entry), 64), tl.multiple_of(tl.load(entry + 1), 64)
    column, wide = tl.multiple_of(tl.load(entry + 2), 64), tl.load(entry + 3)
    n0, counter = span * TILE_N, arrived + tile * spans + span
    rn = tl.minimum(n0 + tl.arange(0, TILE_N), rows - 1)
    begin()
    if at >= LONG:
        m0 = tile * TILE_M
        STEPS_8: tl.constexpr = K // 128 // SPLITS_8
        SUMS_8: tl.constexpr = 1 if SIDE_8 else SPLITS_8
        split = (at - LONG) // BY_8 * STEPS_8
        acc = wide_sum(w8, q, ws, qs, m0, n0, 0, rn, split, K, 128, STEPS_8, SUMS_8, TILE_M, TILE_N, "fp8")
        member_end(
            acc, out, exact, part_8, counter, rows, m0, n0, split // STEPS_8, n, first, column, wide,
            TILES_8 * TILE_M, SPLITS_8 // SUMS_8, TILE_M, TILE_N, AT_ONCE_8,
        )  # fmt: skip
    elif TILES_16 > 0:
        m0 = (tile - TILES_8) * TILE_M
        STEPS_16: tl.constexpr = K // STEP // SPLITS_16
        SUMS_16: tl.constexpr = 1 if SIDE_16 else SPLITS_16
        split = at // BY_16 * STEPS_16
        acc = wide_sum(
            w16, x, ws, qs, m0, n0, 0, rn, split, K, STEP, STEPS_16, SUMS_16, TILE_M, TILE_N, "bf16"
        )
        member_end(
            acc, out, exact, part_16, counter, rows, m0, n0, split // STEPS_16, n, first, column, wide,
            TILES_16 * TILE_M, SPLITS_16 // SUMS_16, TILE_M, TILE_N, AT_ONCE_16,
        )  # fmt: skip


@dataclass(frozen=True)
class Manner:
    """How a group is launched for some row count; changes no bit.

    ``wide``: by tensor descriptors, for many rows; ``side``: whether the ranges of K of FP8 and of bfloat16 run
    side by side then, as they always do for few rows. ``pipe``: in the form of ``piped``, to which the others say
    nothing; ``cross``: FP8 in the form of ``crossed``, the others by ``pipe`` in a launch of their own. The rest as
    ``linear.Shape`` has it.
    """

    tile_n: int
    stages: int
    wide: bool = False
    side: tuple[bool, bool] = (True, True)
    at_once: int = 1
    pipe: piped.Pipe | None = None
    cross: crossed.Cross | None = None


def pipes_of(group: Group, rows: int) -> tuple[piped.Pipe | None, crossed.Cross | None]:
    """The pipelined form for some row count, and that of the FP8 weights if it is another; None: no good one."""
    sizes = [0 if w is None else w.shape[0] for w in (group.fp8, group.bf16)]
    cuts = [1 if w is None else w.splits for w in (group.fp8, group.bf16)]
    some = group.fp8 or group.bf16
    assert some is not None, "a group has members"
    shape = (sizes[0], sizes[1]), some.shape[1], (cuts[0], cuts[1]), rows
    if (cross := crossed.cross_for_group(*shape)) is not None:
        return crossed.BESIDE if group.bf16 is not None else None, cross
    return piped.pipe_for_group(*shape), None


def manner_for(group: Group, rows: int, target: Target) -> Manner | None:
    """As measured on an H200; None if every product is better off with a launch of its own."""
    fp8, bf16 = (0 if w is None else w.shape[0] // TILE_M for w in (group.fp8, group.bf16))
    if target.name == "sm_90":
        pipe, cross = pipes_of(group, rows)
        if cross is not None:
            return Manner(cross.rows, cross.stages, True, pipe=pipe, cross=cross)
        if pipe is not None:
            return Manner(pipe.n + pipe.more, pipe.stages, True, pipe=pipe)
    if group.fp8 is not None and group.fp8.splits == piped.ranges_for(*group.fp8.shape):
        return None  # its few ranges of K want blocks copied ahead
    if rows <= FEW:
        return Manner(max(16, pow2(rows)), 2 if target.backend == "hip" else 4, at_once=8)
    if target.name != "sm_90" or not 0 < fp8 + bf16 < MANY:
        return None
    if rows <= SOME:
        return Manner(64, 4, True, at_once=4)
    if fp8 > SMALL:
        return None
    few = (fp8 + bf16) * cdiv(rows, 128) < 3 * MANY // 4
    return Manner(128, 3, True, (few, few))


def members_of(group: Group, rows: int, out: Tensor, exact: Tensor) -> list[Tensor]:
    """The members' results [R, n] as parts of the two buffers."""
    found, at = [], [0, 0]
    for w, wide in group.members:
        n = rows * w.shape[0]
        found.append((exact if wide else out)[at[wide] : at[wide] + n].view(rows, w.shape[0]))
        at[wide] += n
    return found


def products(
    x: Tensor,
    form: tuple[Tensor, Tensor],
    group: Group,
    dtype: torch.dtype,
    scratch: Scratch,
    target: Target,
    manner: Manner | None = None,
) -> list[Tensor]:
    """Every member's x [R, k] times w^T: [R, n] of ``dtype`` or float32; ``form``: x quantised, if FP8 is there."""
    rows, k = x.shape
    how = manner or manner_for(group, rows, target)
    assert how is not None, "a row count at which the group shares no launch"
    tile = how.tile_n
    fp8, bf16 = (0 if w is None else w.shape[0] // TILE_M for w in (group.fp8, group.bf16))
    splits, ranges = (1 if w is None else w.splits for w in (group.fp8, group.bf16))
    side = (splits if how.side[0] else 1, ranges if how.side[1] else 1)
    out = torch.empty(rows * group.widths[0], dtype=dtype, device=x.device)
    exact = torch.empty(rows * group.widths[1], dtype=torch.float32, device=x.device)
    if how.cross is not None:
        assert group.fp8 is not None, "FP8 in the form of ``crossed``"
        crossed.launch(
            group.fp8.data, group.fp8.scale, *form, out, scratch.arrived, how.cross, splits, table=group.table,
            exact=exact,
        )  # fmt: skip
        if group.bf16 is not None:
            assert how.pipe is not None, "a form for either format"
            piped.launch(
                None, (group.bf16.data, x), out, scratch.arrived, how.pipe, splits=(1, ranges),
                table=group.table[fp8:], exact=exact,
            )  # fmt: skip
        return members_of(group, rows, out, exact)
    if how.pipe is not None:
        scale = None if group.fp8 is None else group.fp8.scale
        narrow = None if group.fp8 is None or scale is None else (group.fp8.data, scale, *form)
        piped.launch(
            narrow, None if group.bf16 is None else (group.bf16.data, x), out, scratch.arrived, how.pipe,
            splits=(splits, ranges), table=group.table, exact=exact,
        )  # fmt: skip
        return members_of(group, rows, out, exact)
    sums = torch.empty(side[0], rows, TILE_M * fp8, dtype=torch.float32, device=x.device)
    more = torch.empty(side[1], rows, TILE_M * bf16, dtype=torch.float32, device=x.device)
    spans = cdiv(rows, tile)
    assert (fp8 + bf16) * spans <= COUNTERS, "more tiles than counters"
    other = group.fp8 or group.bf16
    assert other is not None, "a group has members"
    w8, w16 = group.fp8 or other, group.bf16 or other
    scale = form[1] if w8.scale is None else w8.scale
    constants = {
        "K": k, "TILES_8": fp8, "SPLITS_8": splits, "TILES_16": bf16, "SPLITS_16": ranges, "TILE_M": TILE_M,
        "TILE_N": tile, "AT_ONCE_8": min(how.at_once, splits), "AT_ONCE_16": min(how.at_once, ranges),
        "num_warps": 4, "num_stages": how.stages, **target.options,
    }  # fmt: skip
    ends = (group.table, out, exact, sums, more, scratch.arrived, rows)
    if how.wide:
        step, half = (GROUP if w.data.element_size() == 1 else GROUP // 2 for w in (w8, w16))
        together_wide_kernel[((fp8 * side[0] + bf16 * side[1]) * spans,)](
            TensorDescriptor.from_tensor(w8.data, [TILE_M, step]), scale,
            TensorDescriptor.from_tensor(form[0], [tile, step]), form[1],
            TensorDescriptor.from_tensor(w16.data, [TILE_M, half]),
            TensorDescriptor.from_tensor(x if half < GROUP else form[0], [tile, half]), *ends, spans,
            SIDE_8=how.side[0], SIDE_16=how.side[1], STEP=half, **constants,
        )  # fmt: skip
    else:
        together_kernel[(fp8 * splits + bf16 * ranges, spans)](
            w8.data, scale, *form, w16.data, x, *ends, **constants
        )
    return members_of(group, rows, out, exact)


def _wide_spec(tiles: tuple[int, int], tile_n: int, stages: int, side: bool) -> Spec:
    once, half = (1 if tile_n > SOME else 4), (GROUP // 2 if tiles[1] else GROUP)
    other = "bf16" if tiles[1] else "fp8e4nv"
    return Spec(
        name=f"linears-together-{tile_n}{'-fp8' if not tiles[1] else ''}{'-split' if side else ''}",
        fn=together_wide_kernel,
        signature={
            "w8": f"tensordesc<fp8e4nv[64, {GROUP}]>", "ws": "*fp32", "q": f"tensordesc<fp8e4nv[{tile_n}, {GROUP}]>",
            "qs": "*fp32", "w16": f"tensordesc<{other}[64, {half}]>", "x": f"tensordesc<{other}[{tile_n}, {half}]>",
            "table": "*i32", "out": "*bf16", "exact": "*fp32", "part_8": "*fp32", "part_16": "*fp32",
            "arrived": "*i32", "rows": "i32", "spans": "i32",
        },
        constexprs={
            "K": 4096, "TILES_8": tiles[0], "SPLITS_8": 4, "SIDE_8": side, "TILES_16": tiles[1], "SPLITS_16": 4,
            "SIDE_16": side, "TILE_M": TILE_M, "TILE_N": tile_n, "STEP": half, "AT_ONCE_8": once, "AT_ONCE_16": once,
        },
        options={"num_warps": 4, "num_stages": stages},
        targets=("sm_90",),
    )  # fmt: skip


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
            "AT_ONCE_8": 1, "AT_ONCE_16": 1,
        },
        options={"num_warps": 4, "num_stages": 4},
        overrides={t: {"num_stages": 2, "matrix_instr_nonkdim": 16} for t in ("gfx950", "gfx942")},
    ),
    _wide_spec((24, 41), 64, 4, True), _wide_spec((24, 41), 128, 3, True), _wide_spec((24, 41), 128, 3, False),
    _wide_spec((24, 0), 128, 3, True), _wide_spec((24, 0), 128, 3, False),
]  # fmt: skip
