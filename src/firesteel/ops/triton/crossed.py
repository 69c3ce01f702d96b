"""FP8 products of many rows on Hopper with the rows as the M operand: a thread then has two rows' scales, not 32.

``piped`` has the weight there, so that few rows do not waste the tensor cores; but the scale of every row has to
reach every thread, through shared memory that the tensor cores read from as well. A product of two
numbers does not know which operand it came from, and neither do the sums: the bits are those of ``piped``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from firesteel.ops.triton.crossed_parts import all_ranges, first_scales, left_out, one_range, plain_range, put
from firesteel.ops.triton.launch import cdiv, gdc_launch_dependents, gdc_wait, launched_early, processors
from firesteel.ops.triton.piped import SHORT, Pipe, blocks_of, ranges_for
from firesteel.ops.triton.piped_parts import CODES, HALVES, arrives, copy_first, keep, zeros
from firesteel.ops.triton.spec import Spec


@dataclass(frozen=True)
class Cross:
    """How a product is launched; changes no bit.

    A program's tile: 128 outputs by 64 rows for each of ``groups`` warp groups. ``stages`` blocks of K are copied
    ahead; ``side`` pieces of work share the ranges of K.
    """

    groups: int = 2
    stages: int = 6
    side: int = 1

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 64 * self.groups

    def spare(self, copied: bool) -> int:
        """Stages that fit besides if results are not ``copied`` out of shared memory."""
        return int(self.groups == 3 and not copied)


@gluon.jit
def scales_of_work(
    ws, xs, work, spans, rows,
    SHARE: gl.constexpr, BLOCKS: gl.constexpr, STEPS: gl.constexpr, WORK: gl.constexpr, SIDE: gl.constexpr,
    TALL: gl.constexpr, SOME: gl.constexpr,
):  # fmt: skip
    """The first scales of a piece of work of STEPS blocks, or of the last one."""
    work = gl.minimum(work, WORK * spans - 1)
    place, n0 = work // spans, work % spans * TALL + SHARE * 64
    return first_scales(ws + place // SIDE * BLOCKS, xs, n0, rows, place % SIDE * STEPS, BLOCKS, SOME)


@gluon.jit
def multiply(
    ws, xs, out, exact, to, part, arrived, table, w_ring, x_ring, o_ring, full, empty, rows, programs,
    SHARE: gl.constexpr, K: gl.constexpr, N: gl.constexpr, SPLITS: gl.constexpr, SIDE: gl.constexpr,
    MEMBERS: gl.constexpr, COPIED: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warp group: its rows of a tile. With SIDE == 1 sums of earlier ranges wait in registers or in ``part``."""
    NARROW: gl.constexpr = w_ring.dtype == gl.float8e4nv
    BLOCKS: gl.constexpr = K // 128
    STEPS: gl.constexpr = BLOCKS // SPLITS  # of a range
    HERE: gl.constexpr = SPLITS // SIDE  # ranges of this program
    HELD: gl.constexpr = HERE > 1 and SIDE == 1 and GROUPS == 2  # there are registers
    SOME: gl.constexpr = 4 if SPLITS == 1 and GROUPS == 2 else 2
    WORK: gl.constexpr = N // 128 * SIDE
    TALL: gl.constexpr = 64 * GROUPS
    OWN: gl.constexpr = 64 * 128
    spans = (rows + TALL - 1) // TALL
    gdc_wait()
    stage, turn = 0, 0
    if NARROW:
        s, t = scales_of_work(
            ws, xs, gl.program_id(0), spans, rows, SHARE, BLOCKS, HERE * STEPS, WORK, SIDE, TALL, SOME
        )
    for work in range(gl.program_id(0), WORK * spans, programs):
        place, span = work // spans, work % spans
        tile, split = place // SIDE, place % SIDE
        n0, m0 = span * TALL + SHARE * 64, tile * 128
        slot = gl.program_id(0) if SIDE == 1 else tile * spans + span
        slot = slot * GROUPS + SHARE
        mine = part + (slot * SPLITS).to(gl.int64) * OWN
        scales, block = ws + tile * BLOCKS, split * (HERE * STEPS)
        if n0 < rows:
            if not NARROW:
                acc, stage, turn = plain_range(
                    w_ring, x_ring, full, empty, stage, turn, SHARE, K // 64, GROUPS, STAGES
                )
            elif HERE == 1:
                acc, stage, turn = one_range(
                    scales, xs, n0, rows, block, s, t, w_ring, x_ring, full, empty, stage, turn,
                    SHARE, BLOCKS, STEPS, GROUPS, STAGES, SOME,
                )  # fmt: skip
            else:
                acc = zeros(128, 32)
                # not unrolled: the registers hold one range's sums, and the earlier ranges' if HELD
                for r in range(HERE):
                    here = block + r * STEPS
                    if r > 0:
                        s, t = first_scales(scales, xs, n0, rows, here, BLOCKS, SOME)
                    one, stage, turn = one_range(
                        scales, xs, n0, rows, here, s, t, w_ring, x_ring, full, empty, stage, turn,
                        SHARE, BLOCKS, STEPS, GROUPS, STAGES, SOME,
                    )  # fmt: skip
                    if HELD:
                        acc += one
                    else:
                        acc = one
                        if r < HERE - 1:
                            keep(acc, mine + (split * HERE + r) * OWN, 128)
            if NARROW:  # on their way while the results leave
                s, t = scales_of_work(
                    ws, xs, work + programs, spans, rows, SHARE, BLOCKS, HERE * STEPS, WORK, SIDE, TALL, SOME
                )
            if arrives(acc, acc, mine, arrived, slot, split, SPLITS, SIDE, OWN, 128, 128, False):
                if SIDE > 1:
                    gl.store(arrived + slot, 0)
                if SPLITS > 1 and not HELD:
                    acc = all_ranges(acc, mine, SPLITS, SIDE, OWN)
                put(acc, out, exact, to, o_ring.index(SHARE), table, rows, m0, n0, N, MEMBERS, COPIED)
        else:  # the tensor cores are the others'
            DRAINED: gl.constexpr = K // 128 // SIDE if NARROW else K // 64
            stage, turn = left_out(full, empty, stage, turn, DRAINED, STAGES)
            if NARROW:
                s, t = scales_of_work(
                    ws, xs, work + programs, spans, rows, SHARE, BLOCKS, HERE * STEPS, WORK, SIDE, TALL, SOME
                )
    if COPIED:
        tma.store_wait(0)


@gluon.jit
def copy_ahead(
    w8, x8, w_ring, x_ring, full, empty, rows, programs,
    K: gl.constexpr, N: gl.constexpr, GROUP_N: gl.constexpr, SIDE: gl.constexpr, GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: blocks of weight and rows in the order in which they are multiplied."""
    STEP: gl.constexpr = 128 if w_ring.dtype == gl.float8e4nv else 64
    STEPS: gl.constexpr = K // STEP // SIDE
    TALL: gl.constexpr = 64 * GROUPS
    BYTES: gl.constexpr = (128 + TALL) * 128
    AHEAD: gl.constexpr = STAGES if STAGES < STEPS else STEPS
    spans = (rows + TALL - 1) // TALL
    place = gl.program_id(0) // spans
    # nothing writes weights: no need to wait
    copy_first(w8, w_ring, full, place // SIDE * 128, place % SIDE * (STEPS * STEP), STEP, AHEAD, BYTES)
    gdc_wait()
    at, stage, turn = 0, 0, 1
    for work in range(gl.program_id(0), N // 128 * SIDE * spans, programs):
        place = work // spans
        n0, m0, k = work % spans * TALL, place // SIDE * 128, place % SIDE * (STEPS * STEP)
        column = m0 // GROUP_N * K
        for _ in range(STEPS):
            if at >= AHEAD:
                mbarrier.wait(empty.index(stage), turn)
                mbarrier.expect(full.index(stage), BYTES)
                tma.async_copy_global_to_shared(w8, [m0, k], full.index(stage), w_ring.index(stage))
            for g in gl.static_range(GROUPS):
                tma.async_copy_global_to_shared(
                    x8,
                    [n0 + g * 64, column + k],
                    full.index(stage),
                    x_ring.index(stage * GROUPS + g),
                )
            k += STEP
            at += 1
            stage += 1
            if stage == STAGES:
                stage = 0
                turn ^= 1


@gluon.jit(do_not_specialize=["rows", "programs"])
def crossed_kernel(
    w8, x8, ws, xs, out, exact, to, part, arrived, table, rows, programs,
    K: gl.constexpr, N: gl.constexpr, GROUP_N: gl.constexpr, SPLITS: gl.constexpr, SIDE: gl.constexpr,
    MEMBERS: gl.constexpr, COPIED: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out [rows, N] = rows times w8 [N, K] transposed, by ``piped.piped_kernel``'s additions.

    w8 (blocks [128, 128]), x8 (blocks [64, 128]): e4m3 weight and rows by descriptors; ws float32
    [N / 128, K / 128] and xs float32 [rows, K / 128] their scales. With COPIED out is bfloat16 and leaves through its
    descriptor ``to`` of blocks [64, 128]. SIDE pieces of work share SPLITS ranges of K: part float32 [tiles * GROUPS,
    SPLITS, *], or [programs * GROUPS, SPLITS, *] if SIDE is 1; a counter in ``arrived`` per tile and warp group.
    """
    gdc_launch_dependents()
    STEP: gl.constexpr = 128 if w8.dtype == gl.float8e4nv else 64
    w_ring = gl.allocate_shared_memory(w8.dtype, [STAGES, 128, STEP], w8.layout)
    x_ring = gl.allocate_shared_memory(x8.dtype, [STAGES * GROUPS, 64, STEP], x8.layout)
    if COPIED:
        o_ring = gl.allocate_shared_memory(gl.bfloat16, [GROUPS, 64, 128], to.layout)
    else:
        o_ring = x_ring
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    if GROUPS == 3:
        gl.warp_specialize(
            [
                (
                    multiply,
                    (
                        ws, xs, out, exact, to, part, arrived, table, w_ring, x_ring, o_ring, full, empty, rows,
                        programs, 0, K, N, SPLITS, SIDE, MEMBERS, COPIED, GROUPS, STAGES,
                    ),
                ),
                (
                    multiply,
                    (
                        ws, xs, out, exact, to, part, arrived, table, w_ring, x_ring, o_ring, full, empty, rows,
                        programs, 1, K, N, SPLITS, SIDE, MEMBERS, COPIED, GROUPS, STAGES,
                    ),
                ),
                (
                    multiply,
                    (
                        ws, xs, out, exact, to, part, arrived, table, w_ring, x_ring, o_ring, full, empty, rows,
                        programs, 2, K, N, SPLITS, SIDE, MEMBERS, COPIED, GROUPS, STAGES,
                    ),
                ),
                (
                    copy_ahead,
                    (w8, x8, w_ring, x_ring, full, empty, rows, programs, K, N, GROUP_N, SIDE, GROUPS, STAGES),
                ),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    multiply,
                    (
                        ws, xs, out, exact, to, part, arrived, table, w_ring, x_ring, o_ring, full, empty, rows,
                        programs, 0, K, N, SPLITS, SIDE, MEMBERS, COPIED, GROUPS, STAGES,
                    ),
                ),
                (
                    multiply,
                    (
                        ws, xs, out, exact, to, part, arrived, table, w_ring, x_ring, o_ring, full, empty, rows,
                        programs, 1, K, N, SPLITS, SIDE, MEMBERS, COPIED, GROUPS, STAGES,
                    ),
                ),
                (
                    copy_ahead,
                    (w8, x8, w_ring, x_ring, full, empty, rows, programs, K, N, GROUP_N, SIDE, GROUPS, STAGES),
                ),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip


# ---- launches ---------------------------------------------------------------------------
def launch(
    w: Tensor, ws: Tensor | None, x: Tensor, xs: Tensor | None, out: Tensor, arrived: Tensor, form: Cross, splits: int,
    programs: int | None = None, table: Tensor | None = None, exact: Tensor | None = None, groups: int = 1,
) -> None:  # fmt: skip
    """Fill out [R, n] with x [R, groups * k] times w [n, k], both e4m3 with scales xs and ws, or both bfloat16.

    out: bfloat16, float32, or of bfloat16 operands e4m3 with its scales float32 [R, n / 128] in ``exact``. With a
    ``table`` w is a group's stack of e4m3, out and exact are its flat buffers (``together.Group``). ``splits``: ranges
    of K; ``programs``: at most so many run at a time, by default one per multiprocessor.
    """
    rows, (n, k) = x.shape[0], w.shape
    narrow = w.dtype == torch.float8_e4m3fn
    side = min(form.side, splits)
    assert n % 128 == 0 and k % (512 * splits) == 0 and splits % side == 0, "a weight of whole tiles"
    assert x.dtype == w.dtype and x.shape[1] == groups * k and n // groups % 128 == 0, (
        "operands of one format"
    )
    assert narrow or splits == 1, "bfloat16 in one range of K"
    spans = cdiv(rows, form.rows)
    grid = min(programs or processors(out.device), n // 128 * side * spans)
    assert side == 1 or n // 128 * spans * form.groups <= arrived.shape[0], "more tiles than counters"
    part = arrived
    if splits > 1 and (side > 1 or form.groups == 3):
        places = grid if side == 1 else n // 128 * spans
        part = torch.empty(places * splits * form.rows * 128, dtype=torch.float32, device=out.device)
    copied = out.dtype == torch.bfloat16 and table is None
    to = TensorDescriptor.from_tensor(out, [64, 128], HALVES) if copied else arrived
    crossed_kernel[(grid,)](
        blocks_of(w, 128), blocks_of(x, 64), arrived if ws is None else ws,
        arrived if xs is None else xs, out, out if exact is None else exact, to, part, arrived,
        arrived if table is None else table, rows, grid,
        K=k, N=n, GROUP_N=n // groups, SPLITS=splits, SIDE=side, MEMBERS=table is not None, COPIED=copied,
        GROUPS=form.groups, STAGES=form.stages + form.spare(copied), num_warps=4, launch_pdl=launched_early(),
    )  # fmt: skip


# ---- which form -------------------------------------------------------------------------
PAIR, TRIO = Cross(2), Cross(3, stages=4)
BESIDE = Pipe(128, 128)  # of a group's bfloat16 weights


def cross_for(kind: str, n: int, k: int, splits: int, rows: int, groups: int = 1) -> Cross | None:
    """As measured on an H200; None where this form does not fit or is not the quicker one."""
    if n // groups % 128 or k % (512 * splits):
        return None
    if kind == "bf16" and splits == 1 and 6144 <= n <= 8448:  # whose results leave as codes
        return TRIO if 320 < rows <= 384 else PAIR if 480 < rows <= 512 else None
    many = n >= 16384
    if kind != "fp8" or groups > 1 or n <= SHORT[0] or rows <= (128 if many else 192):
        return None
    if splits == 1:
        return TRIO if many and (320 < rows <= 384 or 512 < rows <= 768 or rows > 1024) else PAIR
    if splits != 2 or splits != ranges_for(n, k):
        return None
    if rows <= 384:
        return replace(PAIR if rows <= 256 else TRIO, side=2)
    return TRIO if 512 < rows <= 768 else PAIR


def cross_for_group(n: tuple[int, int], k: int, splits: tuple[int, int], rows: int) -> Cross | None:
    """``cross_for`` of the FP8 weights of a group whose others have a launch of their own."""
    (narrow, wide), cut = n, splits[0]
    if not 0 < narrow <= 2048 or narrow % 128 or k % (512 * cut) or cut != 4:
        return None
    return PAIR if rows >= (1024 if wide else 385) else None


# ---- offline compilation ------------------------------------------------------------------
def spec(
    name: str, n: int, k: int, splits: int, form: Cross, members: bool = False, out: str = "*bf16",
    groups: int = 1, kind: str = "fp8",
) -> Spec:  # fmt: skip
    """A kernel as launched for a weight [n, k], with ``members`` of a group."""
    copied = out == "*bf16" and not members
    element, step, layout = ("fp8e4nv", 128, CODES) if kind == "fp8" else ("bf16", 64, HALVES)
    return Spec(
        name=name,
        fn=crossed_kernel,
        signature={
            "w8": f"tensordesc<{element}[128, {step}],{layout!r}>",
            "x8": f"tensordesc<{element}[64, {step}],{layout!r}>", "ws": "*fp32", "xs": "*fp32",
            "out": out, "exact": "*fp32" if members or out == "*fp8" else out,
            "to": f"tensordesc<bf16[64, 128],{HALVES!r}>" if copied else "*i32", "part": "*fp32",
            "arrived": "*i32", "table": "*i32", "rows": "i32", "programs": "i32",
        },
        constexprs={
            "K": k, "N": n, "GROUP_N": n // groups, "SPLITS": splits, "SIDE": min(form.side, splits),
            "MEMBERS": members, "COPIED": copied, "GROUPS": form.groups,
            "STAGES": form.stages + form.spare(copied),
        },
        options={"num_warps": 4},
        targets=("sm_90",),
    )  # fmt: skip


KERNELS: list[Spec] = [
    spec("linear-fp8-crossed-1", 4096, 4096, 1, PAIR),
    spec("linear-fp8-crossed-1-many", 32768, 1024, 1, TRIO),
    spec("linear-fp8-crossed-2", 4096, 8192, 2, PAIR),
    spec("linear-fp8-crossed-2-256", 4096, 8192, 2, replace(PAIR, side=2)),
    spec("linear-fp8-crossed-2-384", 4096, 8192, 2, replace(TRIO, side=2)),
    spec("linear-fp8-crossed-2-768", 4096, 8192, 2, TRIO),
    spec("linear-bf16-crossed-384", 8192, 4096, 1, TRIO, groups=8, kind="bf16"),
    spec("linear-bf16-crossed-512", 8192, 4096, 1, PAIR, groups=8, kind="bf16"),
    spec("linear-bf16-crossed-codes-384", 8192, 4096, 1, TRIO, groups=8, kind="bf16", out="*fp8"),
    spec("linear-bf16-crossed-codes-512", 8192, 4096, 1, PAIR, groups=8, kind="bf16", out="*fp8"),
    spec("linears-together-crossed", 1536, 4096, 4, PAIR, members=True),
]
