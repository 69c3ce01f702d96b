"""Attention of many rows on Hopper: warps of different work hand a tile of keys on to each other.

    one warp group    keys -> two slots of shared memory, found and gathered ahead over the ends of items
    one warp group    queries, normed and turned; scores of a tile, their softmax -> shares, fades
    two warp groups   shares times the tile's values, 256 dims each; results

So the scores of a tile are made while the matrix units still work on the values of the one before, and a row's
first tile while the row before it is stored. The sums of ``gathered`` in the same order, hence the same bits.

Rows of a program are neighbours, those of one request among them. A raw row lies in its tile at the remainder of
its position, so the windows of two rows that follow each other differ in one key: where a slot still holds the
tile of the row before, eight keys are copied, not 64. Whether it does changes no bit of the sums.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from firesteel.core import RowBatch
from firesteel.ops.triton.gathered import (
    BN,
    FLAT,
    HEADS,
    PIECE,
    TILE,
    count_of,
    either,
    end_of,
    item_of,
    processors,
    usable,
)
from firesteel.ops.triton.launch import gdc_launch_dependents, gdc_wait, launched_early
from firesteel.ops.triton.norms import types
from firesteel.ops.triton.relay_parts import (
    LINES,
    OUT,
    SCORE,
    SHARES,
    SUM,
    WIDE,
    address_of,
    copy_keys,
    copy_some,
    fetch_queries,
    ready_queries,
    turned,
)
from firesteel.ops.triton.spec import Spec

try:
    from triton.experimental.gluon.language import barrier
except ImportError:  # its name up to Triton 3.6
    from triton.experimental.gluon.language import thread_barrier as barrier


# ---- work -------------------------------------------------------------------------------
@gluon.jit
def own_items(items):
    """First and one past the last item of a program."""
    pid, programs = gl.program_id(0), gl.num_programs(0)
    return pid * items // programs, (pid + 1) * items // programs


@gluon.jit
def keys_of(position_ptr, row, chosen, HOW: gl.constexpr):
    """(tiles, entries, position) of a row."""
    position = gl.load(position_ptr + row).to(gl.int32)
    place = row, position, 0, 0, 0, 0, 0
    end = end_of(place, chosen, HOW[6], HOW[8], HOW[10], HOW[4])
    return end, count_of(place, chosen, HOW[6], HOW[8]), position


@gluon.jit
def tile_at(t, end, position, HOW: gl.constexpr):
    """Which tile is the t-th: of an odd position the entries come first, so that its next row finds the window."""
    TURN: gl.constexpr = 2 if HOW[9] and HOW[4] == 3 else HOW[4]
    other = gl.where(t + TURN >= end, t + TURN - end, t + TURN)
    return gl.where(position % 2 == 1, other, t)


@gluon.jit
def few_keys(t, count, HOW: gl.constexpr):
    """Whether all keys of tile t are among its first 16."""
    TILES: gl.constexpr = HOW[4]
    few = count - (t - TILES) * BN <= 16
    if HOW[12] == 2:  # the last tile of the window
        few = few | (t == TILES - 1)
    return few


# ---- keys -------------------------------------------------------------------------------
@gluon.jit
def fetch(q_ptr, buffers, bars, tables, rowed, sizes, items, HOW: gl.constexpr):
    """Gather the keys of all tiles of all items into the slots."""
    gdc_wait()
    _, keys, valids, _, _, _ = buffers
    full, empty, _, _ = bars
    position_ptr, slot_ptr, first_ptr, last_ptr = rowed
    kv_ptr = tables[0]
    GROUPS: gl.constexpr = HOW[0] // HEADS
    TILES: gl.constexpr = HOW[4]
    begin, stop = own_items(items)
    n = 0
    _, _, _, place = item_of(begin, items, position_ptr, slot_ptr, first_ptr, last_ptr, GROUPS, TILES, False)
    held, held_at = begin * 0 - 1, begin * 0  # what the next slot holds: group and tile, position of the row
    other, other_at = held, held_at  # and the one after it
    end = end_of(place, sizes[0], HOW[6], HOW[8], HOW[10], TILES)
    tile = tile_at(0, end, place[1], HOW)
    ahead = address_of(tile, place, tables, sizes, HOW)
    for item in range(begin, stop):
        following = gl.minimum(item + 1, stop - 1)
        _, _, _, after = item_of(
            following, items, position_ptr, slot_ptr, first_ptr, last_ptr, GROUPS, TILES, False
        )
        end2 = end_of(after, sizes[0], HOW[6], HOW[8], HOW[10], TILES)
        line = q_ptr + following.to(gl.int64) * (HEADS * HOW[1]) + gl.arange(0, 512, layout=LINES) * 64
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line], dtype=gl.int32, is_pure=False, pack=1
        )
        for t in range(end):
            slot, turn = n & 1, (n >> 1) & 1
            own = gl.where(tile < TILES, place[3] * TILES + tile, -2)
            step = gl.where(
                own == held, place[1] - held_at, 2
            )  # rows from that which the slot holds to this one
            if HOW[9]:
                step = gl.where(own == held, 0, 2)
            newest = place[1] % HOW[3]
            mbarrier.wait(empty.index(slot), turn ^ 1)
            valids.index(slot).store((ahead != 0).to(gl.int32))
            if step > 1:
                copy_keys(ahead, keys, slot, kv_ptr)
            elif (step == 1) & (newest // BN == tile):
                copy_some(newest % BN // 8, tile, place, keys, slot, tables, HOW)
            held, held_at = other, other_at
            other, other_at = gl.where(tile < TILES, own, -1), place[1]
            inner = t + 1 < end
            which = either(inner, place, after)
            tile = tile_at(gl.where(inner, t + 1, 0), gl.where(inner, end, end2), which[1], HOW)
            ahead = address_of(tile, which, tables, sizes, HOW)
            async_copy.wait_group(1)
            fence_async_shared()
            barrier()
            mbarrier.arrive(full.index(slot * 2))
            async_copy.wait_group(0)
            fence_async_shared()
            barrier()
            mbarrier.arrive(full.index(slot * 2 + 1))
            n += 1
        place, end = after, end2


# ---- scores -----------------------------------------------------------------------------
@gluon.jit
def row_sum(p):
    """Sum over keys in the order of eight warps, two by two."""
    return gl.sum(gl.sum(gl.reshape(p, [HEADS, 2, BN // 2]), axis=2), axis=1)


@gluon.jit
def score(buffers, bars, rowed, inputs, numbers, sizes, items, HOW: gl.constexpr):
    """Scores and shares of all tiles."""
    gdc_wait()
    q, keys, valids, shares, fades, totals = buffers
    full, _, ready, taken = bars
    q_ptr, sink_ptr, cos_ptr, sin_ptr = inputs
    scale, eps = numbers
    H: gl.constexpr = HOW[0]
    D: gl.constexpr = HOW[1]
    GROUPS: gl.constexpr = H // HEADS
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORE)
    begin, stop = own_items(items)
    fetch_queries(q_ptr, begin // GROUPS, begin % GROUPS * HEADS, q, D, H)
    end, _, _ = keys_of(rowed[0], begin // GROUPS, sizes[0], HOW)
    n = 0
    for item in range(begin, stop):
        row, head = item // GROUPS, item % GROUPS * HEADS
        following = gl.minimum(item + 1, stop - 1)
        after, _, _ = keys_of(rowed[0], following // GROUPS, sizes[0], HOW)
        sink = gl.load(sink_ptr + head + gl.arange(0, HEADS, layout=ROWS)).to(gl.float32)
        top = sink * 1.4426950408889634
        total = gl.full([HEADS], 1.0, gl.float32, ROWS)
        async_copy.wait_group(0)
        barrier()
        if HOW[11]:
            ready_queries(q, cos_ptr, sin_ptr, row, eps, D, HOW[2])
        fence_async_shared()
        barrier()
        for t in range(end):
            slot, turn = n & 1, (n >> 1) & 1
            scores = gl.zeros([HEADS, BN], gl.float32, SCORE)
            for i in gl.static_range(2):
                mbarrier.wait(full.index(slot * 2 + i), turn)
                key = keys.index(slot * 2 + i).permute((1, 0))
                scores = warpgroup_mma(q.index(i), key, scores, use_acc=i > 0, is_async=True)
                scores = warpgroup_mma_wait(0, deps=[scores])
            valid = valids.index(slot).load(gl.SliceLayout(0, SCORE)) != 0
            if (t == end - 1) & (item + 1 < stop):
                barrier()
                fetch_queries(q_ptr, following // GROUPS, following % GROUPS * HEADS, q, D, H)
            scores = gl.where(gl.expand_dims(valid, 0), scores * scale, float("-inf"))
            best = gl.maximum(top, gl.max(scores, axis=1))
            fade = gl.exp2(top - best)
            p = gl.exp2(scores - gl.expand_dims(best, 1))
            total = total * fade + gl.convert_layout(row_sum(p), ROWS)
            top = best
            mbarrier.wait(taken.index(slot), turn ^ 1)
            shares.index(slot).store(p.to(gl.bfloat16))
            fades.index(slot).store(fade)
            totals.index(slot).store(total)
            fence_async_shared()
            barrier()
            mbarrier.arrive(ready.index(slot))
            n += 1
        end = after


# ---- values -----------------------------------------------------------------------------
@gluon.jit
def keep(acc, total, cos_ptr, sin_ptr, out_ptr, row, head, piece: gl.constexpr, HOW: gl.constexpr):
    """Store a piece of acc [64, 128] / total; the rotated dims are turned back."""
    D: gl.constexpr = HOW[1]
    y = gl.convert_layout((acc * gl.expand_dims(1.0 / total, 1)).to(gl.bfloat16), OUT)
    if (piece + 1) * PIECE == D:
        y = turned(y.to(gl.float32), cos_ptr, sin_ptr, row, piece * PIECE, D, HOW[2], True).to(gl.bfloat16)
    line = head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, OUT))
    column = piece * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(0, OUT))
    to = out_ptr + row.to(gl.int64) * (HOW[0] * D) + gl.expand_dims(line * D, 1) + gl.expand_dims(column, 0)
    gl.store(to, y.to(out_ptr.dtype.element_ty))


@gluon.jit
def add_values(shares, values, one, two):
    """Add shares times values to sums."""
    one = warpgroup_mma(shares, values.slice(0, PIECE, 1), one, is_async=True)
    two = warpgroup_mma(shares, values.slice(PIECE, PIECE, 1), two, is_async=True)
    return warpgroup_mma_wait(0, deps=[one, two])


@gluon.jit
def value(buffers, bars, rowed, outputs, sizes, items, GROUP: gl.constexpr, HOW: gl.constexpr):
    """Dims 256 * GROUP ... of all items."""
    gdc_wait()
    _, keys, _, shares, fades, totals = buffers
    full, empty, ready, taken = bars
    cos_ptr, sin_ptr, out_ptr = outputs
    GROUPS: gl.constexpr = HOW[0] // HEADS
    ROWS: gl.constexpr = gl.SliceLayout(1, SUM)
    begin, stop = own_items(items)
    end, count, position = keys_of(rowed[0], begin // GROUPS, sizes[0], HOW)
    n = 0
    for item in range(begin, stop):
        row, head = item // GROUPS, item % GROUPS * HEADS
        after, then, place = keys_of(rowed[0], gl.minimum(item + 1, stop - 1) // GROUPS, sizes[0], HOW)
        one = gl.zeros([HEADS, PIECE], gl.float32, SUM)
        two = gl.zeros([HEADS, PIECE], gl.float32, SUM)
        total = gl.full([HEADS], 1.0, gl.float32, ROWS)
        for t in range(end):
            slot, turn = n & 1, (n >> 1) & 1
            mbarrier.wait(ready.index(slot), turn)
            mbarrier.wait(full.index(slot * 2 + GROUP), turn)
            fade = gl.expand_dims(fades.index(slot).load(ROWS), 1)
            total = totals.index(slot).load(ROWS)
            some, these = shares.index(slot), keys.index(slot * 2 + GROUP)
            one, two = one * fade, two * fade
            if HOW[12] > 0:
                if few_keys(tile_at(t, end, position, HOW), count, HOW):
                    one, two = add_values(some.slice(0, 16, 1), these.slice(0, 16), one, two)
                else:
                    one, two = add_values(some, these, one, two)
            else:
                one, two = add_values(some, these, one, two)
            barrier()
            mbarrier.arrive(taken.index(slot))
            mbarrier.arrive(empty.index(slot))
            n += 1
        end, count, position = after, then, place
        keep(one, total, cos_ptr, sin_ptr, out_ptr, row, head, 2 * GROUP, HOW)
        keep(two, total, cos_ptr, sin_ptr, out_ptr, row, head, 2 * GROUP + 1, HOW)


# ---- the kernel -------------------------------------------------------------------------
@gluon.jit(do_not_specialize=["items", "chosen", "columns"])
def relay_kernel(
    q_ptr, kv_ptr, ring_ptr, sink_ptr, entry_ptr, chosen_ptr, page_ptr, position_ptr, slot_ptr, first_ptr,
    last_ptr, cos_ptr, sin_ptr, out_ptr, items, chosen, columns, page_stride, scale, eps,
    H: gl.constexpr, D: gl.constexpr, HALF: gl.constexpr, SPAN: gl.constexpr, TILES: gl.constexpr,
    RING: gl.constexpr, RATIO: gl.constexpr, PER_PAGE: gl.constexpr, KIND: gl.constexpr, BLOCK: gl.constexpr,
    TURN: gl.constexpr, SIZE: gl.constexpr, FEW: gl.constexpr, MULTIPLY: gl.constexpr, COPYING: gl.constexpr,
):  # fmt: skip
    """See ``attention.attend``; rows have one part."""
    gdc_launch_dependents()
    q = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, WIDE], TILE)
    keys = gl.allocate_shared_memory(gl.bfloat16, [4, BN, WIDE], TILE)
    valids = gl.allocate_shared_memory(gl.int32, [2, BN], FLAT)
    shares = gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, BN], SHARES)
    fades = gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT)
    totals = gl.allocate_shared_memory(gl.float32, [2, HEADS], FLAT)
    full = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(2):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(full.index(s + 2), count=1)
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
        mbarrier.init(taken.index(s), count=2)
    # 0 H, 1 D, 2 HALF, 3 SPAN, 4 TILES, 5 RING, 6 RATIO, 7 PER_PAGE, 8 KIND, 9 BLOCK, 10 SIZE, 11 TURN, 12 FEW
    HOW: gl.constexpr = (H, D, HALF, SPAN, TILES, RING, RATIO, PER_PAGE, KIND, BLOCK, SIZE, TURN, FEW)
    buffers = (q, keys, valids, shares, fades, totals)
    bars = (full, empty, ready, taken)
    rowed = (position_ptr, slot_ptr, first_ptr, last_ptr)
    sizes = (chosen, columns, page_stride)
    tables = (kv_ptr, ring_ptr, entry_ptr, chosen_ptr, page_ptr)
    gl.warp_specialize(
        [
            (
                score,
                (buffers, bars, rowed, (q_ptr, sink_ptr, cos_ptr, sin_ptr), (scale, eps), sizes, items, HOW),
            ),
            (value, (buffers, bars, rowed, (cos_ptr, sin_ptr, out_ptr), sizes, items, 0, HOW)),
            (value, (buffers, bars, rowed, (cos_ptr, sin_ptr, out_ptr), sizes, items, 1, HOW)),
            (fetch, (q_ptr, buffers, bars, tables, rowed, sizes, items, HOW)),
        ],
        [4, 4, 4],
        [MULTIPLY, MULTIPLY, COPYING],
    )


# ---- launch -----------------------------------------------------------------------------
REGISTERS = {"MULTIPLY": 168, "COPYING": 72}  # of a thread that multiplies by values and of one that copies


def few_form(span: int, block: int, entries: bool) -> int:
    """Which tiles may have 16 keys or fewer: 0 none, 1 the last one of the entries, 2 that of the window."""
    return 1 if entries else 2 if block and 0 < (span + block) % 64 <= 16 else 0


def attend(
    q: Tensor,
    kv: Tensor,
    ring: Tensor,
    sinks: Tensor,
    entries: Tensor | None,
    selection: Tensor | None,
    page_table: Tensor,
    r: RowBatch,
    angles: tuple[Tensor, Tensor],
    out: Tensor,
    constants: dict[str, int | bool],
    scale: float,
    eps: float | None,
) -> None:
    """Fill out [R, H, 512]; see ``attention.attend``."""
    assert usable(), "the caller asks gathered.fits"
    (rows, heads, _), (cos, sin) = q.shape, angles
    items = rows * (heads // 64)
    relay_kernel[(min(items, processors(q.device)),)](
        q, kv, ring, sinks, ring if entries is None else entries, r.slots if selection is None else selection,
        page_table, r.positions, r.slots, r.first, r.last, cos, sin, out, items,
        0 if selection is None else selection.shape[1], page_table.shape[1],
        0 if entries is None else entries.stride(0), scale, 0.0 if eps is None else eps, H=heads, D=q.shape[2],
        HALF=cos.shape[1], TURN=eps is not None, **REGISTERS, **constants,
        num_warps=4, launch_pdl=launched_early(),
    )  # fmt: skip


# ---- offline compilation ----------------------------------------------------------------
def specs(shape: dict[str, int]) -> list[Spec]:
    """All ways the kernel is launched for the widths in ``shape``."""
    signature = types(
        bf16="q_ptr kv_ptr ring_ptr entry_ptr out_ptr",
        f32="sink_ptr cos_ptr sin_ptr",
        i64="chosen_ptr page_ptr position_ptr slot_ptr first_ptr last_ptr",
        int="items chosen columns page_stride",
        float="scale eps",
    )
    made = []
    for name, kind, ratio in (("window", 0, 4), ("block", 0, 4), ("all", 1, 128), ("chosen", 2, 4)):
        constants = {
            **shape, "SPAN": 128, "TILES": 3 if name == "block" else 2, "RING": 152, "RATIO": ratio,
            "PER_PAGE": 256 // ratio, "KIND": kind, "BLOCK": name == "block", "TURN": True,
            "FEW": few_form(128, 7 * (name == "block"), kind > 0), **REGISTERS,
        }  # fmt: skip
        made.append(
            Spec(
                f"attention_{name}_relay", relay_kernel, signature, constants, {"num_warps": 4},
                targets=("sm_90",), aligned=("page_stride",),
            )
        )  # fmt: skip
    return made
