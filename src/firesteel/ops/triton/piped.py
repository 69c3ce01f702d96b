"""Products of rows on Hopper: one warp copies, one or two warp groups multiply.

Here the parts of a program that Triton lays out by itself are written out (Gluon). A program takes one piece
of work after another: a tile of 64 or 128 outputs by up to 256 rows. One warp copies blocks of K ahead into a
ring of shared memory, the weight's first ones before the kernel in front has finished. While one warp group
scales and adds its product of 128 channels, the tensor cores work for the other.
A row's additions are those of ``products.range_sum``, ranges and all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from firesteel.ops.triton.launch import cdiv, gdc_launch_dependents, gdc_wait, launched_early, processors
from firesteel.ops.triton.piped_parts import (
    CODES,
    HALVES,
    arrives,
    bf16_range,
    copy_ahead,
    fp8_range,
    keep_both,
    piece,
    put,
    put_quantised,
    whole,
    zeros,
)
from firesteel.ops.triton.spec import Spec


@dataclass(frozen=True)
class Pipe:
    """How a product is launched; changes no bit.

    A program's tile: ``m`` outputs by ``n`` + ``more`` rows (each a power of two, ``more`` 0 or at least 16) for
    ``groups`` warp groups, which share the outputs of 128 and the rows of 64. ``stages`` blocks of K are copied
    ahead. ``side``: pieces of work that the ranges of K are shared out to.
    """

    m: int
    n: int
    more: int = 0
    groups: int = 2
    stages: int = 6
    side: int = 1


@gluon.jit
def multiply(
    ws, xs, out, exact, o1, o2, part, arrived, table, a_ring, b_ring, c_ring, o_ring, p_ring, full, empty, rows,
    programs,
    SHARE: gl.constexpr, K: gl.constexpr, N8: gl.constexpr, N16: gl.constexpr, SPLITS_8: gl.constexpr,
    SIDE_8: gl.constexpr, SPLITS_16: gl.constexpr, SIDE_16: gl.constexpr, MEMBERS: gl.constexpr,
    COPIED: gl.constexpr, M: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A warp group: its half of a tile's outputs, or of its rows if there are 64 outputs.

    With SIDE == 1 sums of earlier ranges wait in ``part``.
    """
    BLOCKS: gl.constexpr = K // 128
    BY_ROWS: gl.constexpr = GROUPS == 2 and M == 64
    TWO: gl.constexpr = N2 > 0 or M == 256
    QUANTISED: gl.constexpr = out.dtype.element_ty == gl.float8e4nv
    W1: gl.constexpr = N1 // 2 if BY_ROWS else N1
    W2: gl.constexpr = N1 if M == 256 else N2 if N2 > 0 else 16
    OWN: gl.constexpr = 64 * (W1 + W2 if TWO else W1)  # numbers of a warp group in part
    MOST: gl.constexpr = SPLITS_8 if SPLITS_8 > SPLITS_16 else SPLITS_16
    TILES_16: gl.constexpr = (N16 + M - 1) // M
    PLACES: gl.constexpr = (N8 + M - 1) // M * SIDE_8 + TILES_16 * SIDE_16
    spans = (rows + N1 + N2 - 1) // (N1 + N2)
    gdc_wait()
    at = 0
    for work in range(gl.program_id(0), PLACES * spans, programs):
        narrow, tile, split = piece(work // spans, M, N16, SIDE_8, SIDE_16)
        span = work % spans
        n0 = span * (N1 + N2)
        if BY_ROWS:
            n0 += SHARE * W1
        m0 = tile * M
        if M > 64:
            m0 += SHARE * (M // 2)
        # sums that one program makes one after another need no place of their own
        slot = (tile + gl.where(narrow, TILES_16, 0)) * spans + span
        if SIDE_8 == 1 and SIDE_16 == 1:
            slot = gl.program_id(0)
        slot = slot * GROUPS + SHARE
        mine = part + (slot * MOST).to(gl.int64) * OWN
        if N16 == 0 or (N8 > 0 and narrow):
            STEPS_8: gl.constexpr = BLOCKS // SPLITS_8  # of a range
            HERE_8: gl.constexpr = SPLITS_8 // SIDE_8  # ranges of this program
            wsp, block = ws + m0 // 128 * BLOCKS, split * (HERE_8 * STEPS_8)
            if HERE_8 == 1:
                acc, more, at = fp8_range(
                    wsp + block, xs, n0, n0 + N1, rows, block, a_ring, b_ring, c_ring, full, empty,
                    at, SHARE, BLOCKS, STEPS_8, M, W1, W2, TWO, BY_ROWS, STAGES,
                )  # fmt: skip
            else:
                acc, more = zeros(W1, 32), zeros(W2, 32)
                for r in range(HERE_8):  # not unrolled: the registers hold one range's sums
                    acc, more, at = fp8_range(
                        wsp + block, xs, n0, n0 + N1, rows, block, a_ring, b_ring, c_ring, full, empty,
                        at, SHARE, BLOCKS, STEPS_8, M, W1, W2, TWO, BY_ROWS, STAGES,
                    )  # fmt: skip
                    block += STEPS_8
                    if r < HERE_8 - 1:
                        keep_both(acc, more, mine + (split * HERE_8 + r) * OWN, W1, W2, TWO)
            last = arrives(acc, more, mine, arrived, slot, split, SPLITS_8, SIDE_8, OWN, W1, W2, TWO)
        else:
            STEPS_16: gl.constexpr = K // 64 // SPLITS_16
            HERE_16: gl.constexpr = SPLITS_16 // SIDE_16
            if N8 > 0:
                a_half = a_ring._reinterpret(gl.bfloat16, [STAGES, M, 64], HALVES)
                b_half = b_ring._reinterpret(gl.bfloat16, [STAGES, N1, 64], HALVES)
                c_half = c_ring._reinterpret(gl.bfloat16, [STAGES, N2 if N2 > 0 else N1, 64], HALVES)
            else:
                a_half, b_half, c_half = a_ring, b_ring, c_ring
            if HERE_16 == 1:
                acc, more, at = bf16_range(
                    a_half, b_half, c_half, full, empty, at, SHARE, STEPS_16, M, W1, W2, TWO, BY_ROWS, STAGES
                )
            else:
                acc, more = zeros(W1, 32), zeros(W2, 32)
                for r in range(HERE_16):
                    acc, more, at = bf16_range(
                        a_half,
                        b_half,
                        c_half,
                        full,
                        empty,
                        at,
                        SHARE,
                        STEPS_16,
                        M,
                        W1,
                        W2,
                        TWO,
                        BY_ROWS,
                        STAGES,
                    )
                    if r < HERE_16 - 1:
                        keep_both(acc, more, mine + (split * HERE_16 + r) * OWN, W1, W2, TWO)
            last = arrives(acc, more, mine, arrived, slot, split, SPLITS_16, SIDE_16, OWN, W1, W2, TWO)
        if last:
            if SIDE_8 > 1 or SIDE_16 > 1:
                gl.store(arrived + slot, 0)
            m1, n1 = m0, n0 + N1  # of the second sum
            if M == 256:
                m1, n1 = m0 + 64, n0
            lead, base, wide, live = N8 + N16, m0, 0, m0 < N8 + N16
            if MEMBERS:
                live = m0 < gl.where(narrow, N8, N16)
                entry = table + gl.where(narrow, m0 // 64, (N8 + m0) // 64) * 4
                lead = gl.multiple_of(gl.load(entry, mask=live, other=0), 64)
                begun, column = gl.load(entry + 1, mask=live, other=0), gl.load(entry + 2, mask=live, other=0)
                wide = gl.load(entry + 3, mask=live, other=0)
                base = gl.multiple_of(rows * column, 64) + gl.multiple_of(m0 - begun, 64)
            acc = whole(acc, mine, narrow, N8, N16, SPLITS_8, SIDE_8, SPLITS_16, SIDE_16, OWN, W1)
            if QUANTISED:
                more = whole(
                    more, mine + 64 * W1, narrow, N8, N16, SPLITS_8, SIDE_8, SPLITS_16, SIDE_16, OWN, W2
                )
                put_quantised(acc, more, out, exact, o_ring.index(SHARE), N8 + N16, rows, m0, n0, live, W1)
            else:
                put(
                    acc,
                    out,
                    exact,
                    o1,
                    o_ring.index(SHARE),
                    base,
                    lead,
                    wide,
                    rows,
                    m0,
                    n0,
                    live,
                    MEMBERS,
                    COPIED,
                    W1,
                )
                if TWO:
                    more = whole(
                        more, mine + 64 * W1, narrow, N8, N16, SPLITS_8, SIDE_8, SPLITS_16, SIDE_16, OWN, W2
                    )
                    if M == 256:
                        base, live = m1, m1 < N8 + N16
                    room = p_ring.index(SHARE)
                    put(more, out, exact, o2, room, base, lead, wide, rows, m1, n1, live, MEMBERS, COPIED, W2)
    if COPIED:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows", "programs"])
def piped_kernel(
    w8, x8, y8, w16, x16, y16, ws, xs, out, exact, o1, o2, part, arrived, table, rows, programs,
    K: gl.constexpr, N8: gl.constexpr, N16: gl.constexpr, GROUP_N: gl.constexpr, SPLITS_8: gl.constexpr,
    SIDE_8: gl.constexpr, SPLITS_16: gl.constexpr, SIDE_16: gl.constexpr, MEMBERS: gl.constexpr,
    COPIED: gl.constexpr, M: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Rows times w8 [N8, K] and w16 [N16, K] transposed, one of which may be missing.

    w8 (blocks [M, 128]), x8 ([N1, 128]), y8 ([N2, 128]): e4m3 weight and rows by descriptors, y8 for the last N2 rows
    of a tile; ws float32 [N8 / 128, K / 128] and xs float32 [rows, K / 128] are their scales. w16, x16, y16: bfloat16,
    in blocks of 64 channels. With MEMBERS results go to out and exact as ``together.Group.table`` says, else to
    out [rows, N8 + N16], with COPIED through its descriptors o1 and o2 of blocks [*, 64], an e4m3 out with its scales
    float32 [rows, (N8 + N16) / 128] in exact; outputs g * GROUP_N ... then
    use columns g * K ... of x. SIDE pieces of work share a weight's SPLITS ranges of K: part float32 [tiles * GROUPS,
    most ranges, *], or [programs * GROUPS, most ranges, *] if all SIDE are 1; a counter per tile and warp group.
    """
    gdc_launch_dependents()
    w, x, y = (w8, x8, y8) if N8 > 0 else (w16, x16, y16)
    STEP: gl.constexpr = 128 if N8 > 0 else 64
    a_ring = gl.allocate_shared_memory(w.dtype, [STAGES, M, STEP], w.layout)
    b_ring = gl.allocate_shared_memory(x.dtype, [STAGES, N1, STEP], x.layout)
    c_ring = gl.allocate_shared_memory(y.dtype, [STAGES, N2, STEP], y.layout) if N2 > 0 else b_ring
    if out.dtype.element_ty == gl.float8e4nv:
        o_ring = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, N1, 64], HALVES)
        p_ring = o_ring
    elif COPIED:
        W1: gl.constexpr = N1 // 2 if GROUPS == 2 and M == 64 else N1
        o_ring = gl.allocate_shared_memory(o1.dtype, [GROUPS, W1, 64], o1.layout)
        p_ring = (
            gl.allocate_shared_memory(o2.dtype, [GROUPS, N2, 64], o2.layout) if N2 > 0 and N2 < W1 else o_ring
        )
    else:
        o_ring, p_ring = a_ring, a_ring
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (
                    multiply,
                    (
                        ws, xs, out, exact, o1, o2, part, arrived, table, a_ring, b_ring, c_ring, o_ring, p_ring, full,
                        empty, rows, programs, 0, K, N8, N16, SPLITS_8, SIDE_8, SPLITS_16, SIDE_16, MEMBERS,
                        COPIED, M, N1, N2, GROUPS, STAGES,
                    ),
                ),
                (
                    multiply,
                    (
                        ws, xs, out, exact, o1, o2, part, arrived, table, a_ring, b_ring, c_ring, o_ring, p_ring, full,
                        empty, rows, programs, 1, K, N8, N16, SPLITS_8, SIDE_8, SPLITS_16, SIDE_16, MEMBERS,
                        COPIED, M, N1, N2, GROUPS, STAGES,
                    ),
                ),
                (
                    copy_ahead,
                    (
                        w8, x8, y8, w16, x16, y16, a_ring, b_ring, c_ring, full, empty, rows, programs, K, N8, N16,
                        GROUP_N, SIDE_8, SIDE_16, M, N1, N2, STAGES,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    multiply,
                    (
                        ws, xs, out, exact, o1, o2, part, arrived, table, a_ring, b_ring, c_ring, o_ring, p_ring, full,
                        empty, rows, programs, 0, K, N8, N16, SPLITS_8, SIDE_8, SPLITS_16, SIDE_16, MEMBERS,
                        COPIED, M, N1, N2, GROUPS, STAGES,
                    ),
                ),
                (
                    copy_ahead,
                    (
                        w8, x8, y8, w16, x16, y16, a_ring, b_ring, c_ring, full, empty, rows, programs, K, N8, N16,
                        GROUP_N, SIDE_8, SIDE_16, M, N1, N2, STAGES,
                    ),
                ),
            ],
            [1],
            [24],
        )  # fmt: skip


# ---- launches ---------------------------------------------------------------------------
def blocks_of(x: Tensor, lines: int) -> TensorDescriptor:
    """A descriptor of blocks of 128 bytes of as many lines."""
    narrow = x.element_size() == 1
    return TensorDescriptor.from_tensor(x, [lines, 128 if narrow else 64], CODES if narrow else HALVES)


def fits(k: int, splits: int, pipe: Pipe) -> bool:
    """Whether a range of K is made of whole groups of four blocks."""
    return k % (512 * splits) == 0 and splits % min(pipe.side, splits) == 0


def launch(
    narrow: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    wide: tuple[Tensor, Tensor] | None,
    out: Tensor,
    arrived: Tensor,
    pipe: Pipe,
    *,
    splits: tuple[int, int],
    programs: int | None = None,
    groups: int = 1,
    table: Tensor | None = None,
    exact: Tensor | None = None,
) -> None:
    """Fill out [R, n], or the outputs of a group's members (``table``: then out and exact are flat).

    An e4m3 out has its scales float32 [R, n / 128] in ``exact``, as ``activations.quantise`` makes them.

    narrow: (w, its scales, x, its scales) of e4m3; wide: (w, x) of bfloat16, x [R, groups * k]; each w [*, k].
    ``splits``: ranges of K of either; ``programs``: at most so many run at a time, by default one per multiprocessor.
    """
    w8, x8 = (narrow[0], narrow[2]) if narrow else (None, None)
    w16, x16 = wide or (w8, x8)
    w8, x8 = (w16, x16) if w8 is None else (w8, x8)
    assert w8 is not None and x8 is not None and w16 is not None and x16 is not None, (
        "a weight of either format"
    )
    (rows, _), k = x8.shape, w8.shape[1]
    n8, n16 = w8.shape[0] if narrow else 0, w16.shape[0] if wide else 0
    cuts = (splits[0] if narrow else 1, splits[1] if wide else 1)
    sides = tuple(min(pipe.side, cut) for cut in cuts)
    assert all(fits(k, cut, pipe) for cut in cuts) and n8 % 64 == n16 % 64 == 0, "a weight of whole tiles"
    assert pipe.groups == 2 or pipe.m == 64, "a warp group has 64 outputs"
    assert pipe.more == 0 or pipe.m == 128, "two sums of a warp group are of rows or of outputs"
    assert pipe.m < 256 or (table is None and narrow is None), (
        "a member has an entry per 64 outputs; ``crossed``"
    )
    tiles, spans = (cdiv(n8, pipe.m), cdiv(n16, pipe.m)), cdiv(rows, pipe.n + pipe.more)
    grid = min(programs or processors(out.device), (tiles[0] * sides[0] + tiles[1] * sides[1]) * spans)
    assert max(sides) == 1 or sum(tiles) * spans * pipe.groups <= arrived.shape[0], "more tiles than counters"
    part = arrived
    if max(cuts) > 1:
        places = grid if max(sides) == 1 else sum(tiles) * spans
        size = places * max(cuts) * pipe.m * (pipe.n + pipe.more)
        part = torch.empty(size, dtype=torch.float32, device=out.device)
    copied, half = table is None and out.dtype == torch.bfloat16, pipe.groups == 2 and pipe.m == 64
    to = blocks_of(out, pipe.n // 2 if half else pipe.n) if copied else arrived
    quantised = out.dtype == torch.float8_e4m3fn
    assert not quantised or (pipe.m == 256 and exact is not None and table is None), (
        "128 outputs of a warp group"
    )
    stages = pipe.stages if copied or quantised else pipe.stages - 1
    piped_kernel[(grid,)](
        blocks_of(w8, pipe.m), blocks_of(x8, pipe.n), blocks_of(x8, pipe.more or pipe.n), blocks_of(w16, pipe.m),
        blocks_of(x16, pipe.n), blocks_of(x16, pipe.more or pipe.n), narrow[1] if narrow else arrived,
        narrow[3] if narrow else arrived, out, out if exact is None else exact, to,
        blocks_of(out, pipe.more) if copied and pipe.more else to, part, arrived, arrived if table is None else table,
        rows, grid, K=k, N8=n8, N16=n16, GROUP_N=(n8 + n16) // groups, SPLITS_8=cuts[0], SIDE_8=sides[0],
        SPLITS_16=cuts[1], SIDE_16=sides[1], MEMBERS=table is not None, COPIED=copied, M=pipe.m, N1=pipe.n,
        N2=pipe.more, GROUPS=pipe.groups, STAGES=stages, num_warps=4, launch_pdl=launched_early(),
    )  # fmt: skip


# ---- which form -------------------------------------------------------------------------
MOST = 132  # pieces of work at a time: multiprocessors of the H200 that the figures are of
SHORT = (3072, 5120)  # outputs of FP8 weights whose ranges of K are chosen for these kernels
# row counts up to which a form serves a short weight of one range of K, and one of two: more are ``crossed``'s
ONE = {
    16: Pipe(64, 16, groups=1, stages=18), 32: Pipe(64, 32, groups=1, stages=15), 128: Pipe(64, 64, stages=12),
    192: Pipe(128, 64, stages=8),
}  # fmt: skip
TWO = {
    16: Pipe(64, 16, groups=1, stages=18, side=2), 32: Pipe(64, 32, groups=1, stages=15, side=2),
    64: Pipe(64, 64, stages=12, side=2), 128: Pipe(64, 128, stages=8, side=2), 192: Pipe(128, 128, side=2),
}  # fmt: skip
MANY = Pipe(256, 128, stages=4)


def ranges_for(n: int, k: int) -> int | None:
    """Ranges of K of an FP8 weight [n, k] that these kernels serve at every row count; None of any other."""
    if not SHORT[0] < n <= SHORT[1] or n % 128 or k % 1024:
        return None
    return 2 if k >= 8192 else 1


def pipe_for(kind: str, n: int, k: int, splits: int, rows: int, groups: int = 1) -> Pipe | None:
    """As measured on an H200; None where this form does not fit or was not compared.

    None of a row count at which the form of ``products`` is as good.
    """
    if kind == "fp8" and groups == 1 and splits == ranges_for(n, k):
        return next((pipe for most, pipe in (ONE if splits == 1 else TWO).items() if rows <= most), None)
    if kind == "bf16" and splits == 1 and 6144 <= n <= 8448 and n // groups % 256 == 0 and fits(k, 1, MANY):
        if 64 < rows <= 128:
            return Pipe(64, 128, stages=8)
        if 256 < rows <= 320:
            return Pipe(128, 128, 32, stages=5)
        return MANY if rows > 512 else None
    if kind == "bf16" and splits == 4 and n == 256 and groups == 1 and fits(k, 4, MANY):  # a router
        if 256 < rows <= 512:
            return Pipe(64, 64, stages=12, side=4)
        return Pipe(64, 128, stages=8, side=2) if rows > 1024 else None
    return None


def pipe_for_group(n: tuple[int, int], k: int, splits: tuple[int, int], rows: int) -> Pipe | None:
    """``pipe_for`` of weights of both formats that share a launch."""
    cuts = [cut for size, cut in zip(n, splits, strict=True) if size]
    tiles, cut, spans = sum(n) // 64, cuts[0], cdiv(rows, 128)
    if rows <= 32 or tiles > 66 or len(set(cuts)) > 1 or k % (512 * cut):
        return None
    if rows > 384:
        return Pipe(128, 128) if tiles > 60 and cut == 2 else None
    if tiles > 60 and cut == 2:  # as many pieces of work as multiprocessors
        if rows <= 64:
            return Pipe(64, 64, stages=11, side=2)
        if rows > 128:
            return Pipe(128, 128, side=2) if rows <= 256 else Pipe(128, 128, 64, stages=5, side=2)
    sides = [side for side in (4, 2, 1) if cut % side == 0 and tiles * spans * side <= MOST]
    return Pipe(64, 128, stages=8, side=sides[0]) if sides and rows > 64 else None


# ---- offline compilation ------------------------------------------------------------------
def spec(
    name: str, n8: int, n16: int, k: int, splits: int, pipe: Pipe, groups: int = 1, members: bool = False,
    out: str = "*bf16",
) -> Spec:  # fmt: skip
    """A kernel as launched for weights [n8, k] and [n16, k]."""

    def blocks(lines: int, narrow: bool) -> str:
        element, step, layout = ("fp8e4nv", 128, CODES) if narrow else ("bf16", 64, HALVES)
        return f"tensordesc<{element}[{lines}, {step}],{layout!r}>"

    lines, cuts = (pipe.m, pipe.n, pipe.more or pipe.n), (splits if n8 else 1, splits if n16 else 1)
    w8, x8, y8 = (blocks(a, n8 > 0) for a in lines)
    w16, x16, y16 = (blocks(a, n16 == 0) for a in lines)
    half = pipe.groups == 2 and pipe.m == 64
    copied, codes = not members and out == "*bf16", out == "*fp8"
    to = blocks(pipe.n // 2 if half else pipe.n, False) if copied else "*i32"
    return Spec(
        name=name,
        fn=piped_kernel,
        signature={
            "w8": w8, "x8": x8, "y8": y8, "w16": w16, "x16": x16, "y16": y16, "ws": "*fp32", "xs": "*fp32",
            "out": out, "exact": "*fp32" if members or codes else out, "o1": to,
            "o2": blocks(pipe.more, False) if copied and pipe.more else to, "part": "*fp32", "arrived": "*i32",
            "table": "*i32", "rows": "i32", "programs": "i32",
        },
        constexprs={
            "K": k, "N8": n8, "N16": n16, "GROUP_N": (n8 + n16) // groups, "SPLITS_8": cuts[0],
            "SIDE_8": min(pipe.side, cuts[0]), "SPLITS_16": cuts[1], "SIDE_16": min(pipe.side, cuts[1]),
            "MEMBERS": members, "COPIED": copied, "M": pipe.m, "N1": pipe.n, "N2": pipe.more,
            "GROUPS": pipe.groups, "STAGES": pipe.stages - (not copied and not codes),
        },
        options={"num_warps": 4},
        targets=("sm_90",),
    )  # fmt: skip


# tiles of 192 rows keep addresses in a frame outside the loop (compile.FRAMES)
KERNELS: list[Spec] = [
    *(
        spec(f"linear-fp8-piped-{splits}-{rows}", 4096, 0, k, splits, pipe)
        for splits, k, forms in ((1, 4096, ONE), (2, 8192, TWO))
        for rows, pipe in forms.items()
    ),
    spec("linear-bf16-piped-128", 0, 8192, 4096, 1, Pipe(64, 128, stages=8), 8),
    spec("linear-bf16-piped-320", 0, 8192, 4096, 1, Pipe(128, 128, 32, stages=5), 8),
    spec("linear-bf16-piped-more", 0, 8192, 4096, 1, MANY, 8),
    spec("linears-together-piped-64", 1536, 2624, 4096, 2, Pipe(64, 64, stages=11, side=2), 1, True),
    spec("linears-together-piped-128", 1536, 2624, 4096, 2, Pipe(64, 128, stages=8, side=2), 1, True),
    spec("linears-together-piped-256", 1536, 2624, 4096, 2, Pipe(128, 128, side=2), 1, True),
    spec("linears-together-piped-384", 1536, 2624, 4096, 2, Pipe(128, 128, 64, stages=5, side=2), 1, True),
    spec("linears-together-piped-more", 1536, 2624, 4096, 2, Pipe(128, 128), 1, True),
    spec("linears-together-piped-fp8", 1536, 0, 4096, 4, Pipe(64, 128, stages=8, side=4), 1, True),
]
