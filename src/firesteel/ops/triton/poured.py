"""New residual streams and their products with the coefficients' weights on Hopper: one warp copies, two groups work.

The sums of ``streams.post_parts``, with its bits, for many rows. A program has a chunk of channels and keeps its
weights in shared memory. A copying warp brings tiles of rows, STAGES ahead; a warp group makes the new streams of a
tile where the old ones lie, which are then a matrix operand and what is copied out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from firesteel.ops.triton.launch import cdiv, gdc_launch_dependents, gdc_wait, launched_early, usable
from firesteel.ops.triton.piped_parts import HALVES, barrier
from firesteel.ops.triton.rounding import narrow
from firesteel.ops.triton.spec import Spec

ROWS = 32  # of a tile
WIDE = 64  # channels of a chunk
LINES = 128  # of the weights' pieces, see ``streams._weights``
TILE = gl.constexpr(ROWS)
CHANNELS = gl.constexpr(WIDE)
KINDS = gl.constexpr(LINES)
GROUPS = gl.constexpr(2)


@gluon.constexpr_function
def row_layout():
    """Of bf16 [rows, channels]: 16 bytes a thread. The sum of squares is in the order that it gives."""
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.constexpr_function
def sum_layout():
    """Of float32 products [lines, rows]."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])


@gluon.jit
def coefficients(post_ptr, comb_ptr, row, rows, HC: gl.constexpr):
    """(post_i, ...), (comb_ji, ...) of rows [TILE], nothing past the end."""
    post = ()
    comb = ()
    live = row < rows
    wide = row.to(gl.int64)
    for i in gl.static_range(HC):
        post += (gl.load(post_ptr + wide * HC + i, mask=live, other=0.0),)  # type: ignore[assignment]
    for i in gl.static_range(HC * HC):
        comb += (gl.load(comb_ptr + wide * (HC * HC) + i, mask=live, other=0.0),)  # type: ignore[assignment]
    return post, comb


@gluon.jit
def factor(c):
    """Values of rows [TILE] for all channels."""
    return gl.expand_dims(c, 1).broadcast_to([TILE, CHANNELS])


@gluon.jit
def what_ran(ring, at, row, rows, valid_ptr, TOP: gl.constexpr, SHARED: gl.constexpr, MASKED: gl.constexpr):
    """``streams.what_ran`` of the blocks from ``at`` on, as float32 [TILE, CHANNELS]."""
    LAYOUT: gl.constexpr = row_layout()
    acc = ring.index(at).load(LAYOUT).to(gl.float32)
    if TOP > 0:
        for j in gl.static_range(1, TOP + SHARED):
            acc += ring.index(at + j).load(LAYOUT).to(gl.float32)
        if MASKED:
            real = gl.load(valid_ptr + row, mask=row < rows, other=0) != 0
            acc = gl.where(gl.expand_dims(real, 1).broadcast_to([TILE, CHANNELS]), acc, 0.0)
        acc = narrow(acc).to(gl.float32)
    return acc


@gluon.jit
def work(
    valid_ptr, post_ptr, comb_ptr, out, part_ptr, weights, ring, full, empty, rows,
    GROUP: gl.constexpr, N: gl.constexpr, D: gl.constexpr, HC: gl.constexpr, NP: gl.constexpr,
    TOP: gl.constexpr, SHARED: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles GROUP, GROUP + GROUPS ... of the program."""
    LAYOUT: gl.constexpr = row_layout()
    BOXES: gl.constexpr = HC + (TOP + SHARED if TOP > 0 else 1)
    walkers, chunk = gl.num_programs(0), gl.program_id(1)
    count = ((rows + TILE - 1) // TILE - gl.program_id(0) + walkers - 1) // walkers
    line = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    gdc_wait()
    start = (gl.program_id(0) + GROUP * walkers) * TILE
    post, comb = coefficients(post_ptr, comb_ptr, start + line, rows, HC)
    for i in range(GROUP, count, GROUPS):
        stage, turn = i % STAGES, (i // STAGES) & 1
        row, at = start + line, stage * BOXES
        mbarrier.wait(full.index(stage), turn)
        f = what_ran(ring, at + HC, row, rows, valid_ptr, TOP, SHARED, MASKED)
        old = ()
        for j in gl.static_range(HC):
            old += (ring.index(at + j).load(LAYOUT),)  # type: ignore[assignment]
        squares = gl.zeros([TILE, CHANNELS], gl.float32, LAYOUT)
        for j in gl.static_range(HC):
            y = factor(post[j]) * f
            for k in gl.static_range(HC):
                y = gl.fma(factor(comb[k * HC + j]), old[k].to(gl.float32), y)
            new = narrow(y)
            ring.index(at + j).store(new)
            y = new.to(gl.float32)
            squares = gl.fma(y, y, squares)
        fence_async_shared()
        barrier()
        acc = gl.zeros([KINDS, TILE], gl.float32, sum_layout())
        for j in gl.static_range(HC):
            acc = warpgroup_mma(weights.index(j), ring.index(at + j).permute((1, 0)), acc, is_async=True)
        for j in gl.static_range(HC):
            tma.async_copy_shared_to_global(out, [start, j * D + chunk * CHANNELS], ring.index(at + j))
        place = part_ptr + (chunk.to(gl.int64) * rows + row) * NP
        gl.store(place + N, gl.sum(squares, axis=1), mask=row < rows)
        start += GROUPS * walkers * TILE
        post, comb = coefficients(post_ptr, comb_ptr, start + line, rows, HC)
        acc = warpgroup_mma_wait(0, deps=[acc])
        acc = gl.sum(gl.reshape(acc, [2, NP // 8, 2, 8, TILE]), axis=0)
        acc = gl.reshape(gl.sum(acc, axis=1), [NP, TILE])
        FLAT: gl.constexpr = acc.type.layout
        n = gl.expand_dims(gl.arange(0, NP, layout=gl.SliceLayout(1, FLAT)), 1)
        to = start - GROUPS * walkers * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, FLAT))
        place = gl.expand_dims((chunk.to(gl.int64) * rows + to) * NP, 0) + n
        gl.store(part_ptr + place, acc, mask=gl.expand_dims(to < rows, 0) & (n != N))
        tma.store_wait(0)
        barrier()
        mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def bring(
    h, f, shared, ring, full, empty, rows,
    D: gl.constexpr, HC: gl.constexpr, TOP: gl.constexpr, SHARED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp."""
    ONES: gl.constexpr = TOP if TOP > 0 else 1
    BOXES: gl.constexpr = HC + ONES + (SHARED if TOP > 0 else 0)
    walkers = gl.num_programs(0)
    count = ((rows + TILE - 1) // TILE - gl.program_id(0) + walkers - 1) // walkers
    channel = gl.program_id(1) * CHANNELS
    gdc_wait()
    for i in range(count):
        stage, turn = i % STAGES, (i // STAGES) & 1
        start, at = (gl.program_id(0) + i * walkers) * TILE, stage * BOXES
        mbarrier.wait(empty.index(stage), turn ^ 1)
        mbarrier.expect(full.index(stage), BOXES * TILE * CHANNELS * 2)
        for j in gl.static_range(ONES):
            tma.async_copy_global_to_shared(
                f, [start, j * D + channel], full.index(stage), ring.index(at + HC + j)
            )
        if TOP > 0:
            for j in gl.static_range(SHARED):
                tma.async_copy_global_to_shared(
                    shared, [j * rows + start, channel], full.index(stage), ring.index(at + HC + TOP + j)
                )
        for j in gl.static_range(HC):
            tma.async_copy_global_to_shared(
                h, [start, j * D + channel], full.index(stage), ring.index(at + j)
            )


@gluon.jit(do_not_specialize=["rows"])
def poured_kernel(
    f, shared, valid_ptr, h, post_ptr, comb_ptr, out, fn_ptr, part_ptr, rows,
    N: gl.constexpr, D: gl.constexpr, HC: gl.constexpr, NP: gl.constexpr, TOP: gl.constexpr,
    SHARED: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``streams.post_parts`` with POST in official numerics; f, shared, h, out: descriptors of blocks [TILE, CHANNELS].

    They see f [R, max(1, TOP) * D], shared [SHARED * R, D], h and out [R, HC * D].
    """
    gdc_launch_dependents()
    ONES: gl.constexpr = TOP + SHARED if TOP > 0 else 1
    weights = gl.allocate_shared_memory(gl.bfloat16, [HC, KINDS, CHANNELS], HALVES)
    ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * (HC + ONES), TILE, CHANNELS], HALVES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    LAYOUT: gl.constexpr = row_layout()
    line = gl.arange(0, KINDS, layout=gl.SliceLayout(1, LAYOUT))
    piece = line // (2 * NP) * 2 + line // 8 % 2
    n = line % (2 * NP) // 16 * 8 + line % 8
    live = gl.expand_dims((n < N) & (piece < 3), 1)
    channel = gl.program_id(1) * CHANNELS + gl.arange(0, CHANNELS, layout=gl.SliceLayout(0, LAYOUT))
    place = gl.expand_dims((piece * N + n) * (HC * D), 1) + gl.expand_dims(channel, 0)
    for j in gl.static_range(HC):  # nobody writes weights: no need to wait
        w = gl.load(fn_ptr + place + j * D, mask=live & gl.expand_dims(channel < D, 0), other=0.0)
        weights.index(j).store(w)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (
                work,
                (
                    valid_ptr, post_ptr, comb_ptr, out, part_ptr, weights, ring, full, empty, rows, 0, N, D, HC, NP,
                    TOP, SHARED, MASKED, STAGES,
                ),
            ),
            (
                work,
                (
                    valid_ptr, post_ptr, comb_ptr, out, part_ptr, weights, ring, full, empty, rows, 1, N, D, HC, NP,
                    TOP, SHARED, MASKED, STAGES,
                ),
            ),
            (bring, (h, f, shared, ring, full, empty, rows, D, HC, TOP, SHARED, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


# ---- launches ---------------------------------------------------------------------------
ROOM = 160 * 1024  # bytes of shared memory for tiles
LEAST = 512  # rows from which this form was the quicker one on an H200
WALKERS = 2  # programs of a chunk: as many programs as multiprocessors


def stages_for(hc: int, boxes: int) -> int:
    """Tiles that are copied ahead."""
    return min(8, ROOM // ((hc + boxes) * ROWS * WIDE * 2))


def blocks_of(x: Tensor, width: int) -> TensorDescriptor:
    """A descriptor of blocks of a tile of x as lines of ``width`` values."""
    return TensorDescriptor.from_tensor(x.view(-1, width), [ROWS, WIDE], HALVES)


def serves(rows: int, hc: int, d: int, n: int, terms: int) -> bool:
    """Whether ``pour`` takes the shape, with so many terms of f, and is the quicker form."""
    fits = d % WIDE == 0 and 16 <= n < 32 and hc <= 4 and stages_for(hc, terms) > 1
    return rows >= LEAST and fits and usable()


def pour(
    f: Tensor,
    shared: Sequence[Tensor],
    valid: Tensor | None,
    h: Tensor,
    post: Tensor,
    comb: Tensor,
    w: Tensor,
    part: Tensor,
    top: int,
) -> Tensor:
    """New streams [R, hc, D], and ``part`` [chunks, R, NP] filled; see ``streams.parts``.

    f [R * max(1, top), D] and h bfloat16, w bfloat16 [3, N, hc * D].
    """
    rows, hc, d = h.shape
    out = torch.empty_like(h)
    also = f if not shared else shared[0].contiguous() if len(shared) == 1 else torch.cat(list(shared))
    ones = max(1, top)
    poured_kernel[(min(WALKERS, cdiv(rows, ROWS)), d // WIDE)](
        blocks_of(f, ones * d), blocks_of(also, d), post if valid is None else valid, blocks_of(h, hc * d),
        post, comb, blocks_of(out, hc * d), w, part, rows, N=w.shape[1], D=d, HC=hc, NP=part.shape[2], TOP=top,
        SHARED=len(shared) if top else 0, MASKED=valid is not None,
        STAGES=stages_for(hc, ones + (len(shared) if top else 0)), num_warps=4, launch_pdl=launched_early(),
    )  # fmt: skip
    return out


# ---- offline compilation ----------------------------------------------------------------
def _specs() -> list[Spec]:
    block = f"tensordesc<bf16[{ROWS}, {WIDE}],{HALVES!r}>"
    signature = {
        "f": block, "shared": block, "valid_ptr": "*i1", "h": block, "post_ptr": "*fp32", "comb_ptr": "*fp32",
        "out": block, "fn_ptr": "*bf16", "part_ptr": "*fp32", "rows": "i32",
    }  # fmt: skip
    shape = {"N": 24, "D": 4096, "HC": 4, "NP": 32}
    return [
        Spec(
            f"hyper_{kind}_poured",
            poured_kernel,
            signature,
            {
                **shape,
                "TOP": top,
                "SHARED": shared,
                "MASKED": top > 0,
                "STAGES": stages_for(4, max(1, top) + shared),
            },
            {"num_warps": 4},
            targets=("sm_90",),
        )
        for kind, top, shared in (("step", 0, 0), ("experts", 6, 1))
    ]


KERNELS = _specs()
