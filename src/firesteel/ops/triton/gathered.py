"""Attention of rows on Hopper: the next keys are gathered while the matrix units work on these.

The same sums as ``attention`` in another order, so that a device runs this form for every row count
or for none. Written in Triton's Gluon: heads are the M side of both products, so that shares go from
the first to the second in registers and the values are read once. A program stays and takes one item
(row, 64 heads, some dims of the result) after another; it has two tiles of keys in shared memory and
fetches the first keys and the queries of its next item before it ends this one.

No product is in flight across a branch or where a loop turns: the assembler would put a wait behind
every instruction, without an error.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from firesteel.core import RowBatch
from firesteel.ops.triton.launch import gdc_launch_dependents, gdc_wait, launched_early, processors, usable
from firesteel.ops.triton.norms import types
from firesteel.ops.triton.spec import Spec

HEADS = gl.constexpr(64)  # of a program
BN = gl.constexpr(64)  # keys of a tile
PIECE = gl.constexpr(128)  # dims of a piece
WARPS = gl.constexpr(8)
LOWEST = gl.constexpr(-1e30)
NONE, ALL, CHOSEN = (gl.constexpr(i) for i in range(3))  # as in ``attention``

COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # a thread copies parts of two keys
WIDE = COPY  # queries and results [64, 128]
SCORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
SUM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 64, 16]))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


# ---- keys -------------------------------------------------------------------------------
@gluon.jit
def item_of(
    item, rows, position_ptr, slot_ptr, first_ptr, last_ptr,
    GROUPS: gl.constexpr, TILES: gl.constexpr, MANY: gl.constexpr,
):  # fmt: skip
    """(row, part, first tile, where its keys lie) of an item."""
    line = item // GROUPS
    if MANY:
        part, row = line // rows, line % rows
    else:
        part, row = line * 0, line
    position = gl.load(position_ptr + row).to(gl.int32)
    slot = gl.load(slot_ptr + row).to(gl.int32)
    first = gl.load(first_ptr + row).to(gl.int32)
    last = gl.load(last_ptr + row).to(gl.int32)
    start = gl.load(position_ptr + first).to(gl.int32)
    return row, part, gl.where(part == 0, 0, TILES), (row, position, start, first, last, slot, part)


@gluon.jit
def count_of(place, chosen, RATIO: gl.constexpr, KIND: gl.constexpr):
    """How many entries a row attends to; see ``attention._visible``."""
    count = chosen  # 0
    if KIND == ALL:
        count = (place[1] + 1) // RATIO
    if KIND == CHOSEN:
        count = gl.minimum((place[1] + 1) // RATIO, chosen)
    return count


@gluon.jit
def end_of(place, chosen, RATIO: gl.constexpr, KIND: gl.constexpr, SIZE: gl.constexpr, TILES: gl.constexpr):
    """Tiles of an item, those of the window among them."""
    some = gl.minimum(count_of(place, chosen, RATIO, KIND) - place[6] * SIZE, SIZE)
    return TILES + (gl.maximum(some, 0) + BN - 1) // BN


@gluon.jit
def tile_at(
    t, place, chosen,
    RATIO: gl.constexpr, KIND: gl.constexpr, SIZE: gl.constexpr, TILES: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Which tile of an item is the t-th: at odd positions the entries come first; see ``relay.tile_at``."""
    SHIFT: gl.constexpr = 2 if BLOCK and TILES == 3 else TILES
    end = end_of(place, chosen, RATIO, KIND, SIZE, TILES)
    other = gl.where(t + SHIFT >= end, t + SHIFT - end, t + SHIFT)
    return gl.where(((place[1] & 1) == 1) & (place[6] == 0), other, t)


@gluon.jit
def entry_of(
    t, live, place, chosen, chosen_ptr,
    RATIO: gl.constexpr, KIND: gl.constexpr, SIZE: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Entries of tile t, -1 where there is none; -1 throughout if not ``live``."""
    lane = (t - TILES) * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, COPY))
    entry = place[6] * SIZE + lane
    inside = (lane >= 0) & (lane < SIZE) & (entry < count_of(place, chosen, RATIO, KIND)) & live
    if KIND == CHOSEN:
        to = chosen_ptr + place[0].to(gl.int64) * chosen + entry
        entry = gl.load(to, mask=inside, other=-1).to(gl.int32)
    else:
        entry = gl.where(inside, entry, -1)
    return entry


@gluon.jit
def page_of(entry, place, columns, page_ptr, PER_PAGE: gl.constexpr, KIND: gl.constexpr):
    """Pages of entries."""
    page = entry
    if KIND != NONE:
        to = page_ptr + place[5].to(gl.int64) * columns + gl.maximum(entry, 0) // PER_PAGE
        page = gl.load(to, mask=entry >= 0, other=0).to(gl.int32)
    return page


@gluon.jit
def address_of(
    t, live, place, entry, page, kv_ptr, ring_ptr, entry_ptr, page_stride,
    D: gl.constexpr, SPAN: gl.constexpr, RING: gl.constexpr, PER_PAGE: gl.constexpr, KIND: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    """Addresses of the keys of tile t, 0 where there is none."""
    _row, position, start, first, last, slot, _part = place
    i = t * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, COPY))
    if BLOCK:  # SPAN rows before the group, then all of the group
        want = start - SPAN + i
        here = i >= SPAN
        source = first + i - SPAN
        valid = (want >= 0) & ((i < SPAN) | (source <= last))
    else:  # the SPAN rows up to this one, each at the remainder of its position: the next row's differ in one
        want = position - ((position - i + SPAN).to(gl.uint32) % SPAN).to(gl.int32)
        here = want >= start
        source = first + want - start
        valid = (want >= 0) & (i < SPAN)
    older = (ring_ptr + (slot.to(gl.int64) * (RING * D) + gl.maximum(want, 0) % RING * D)).to(gl.int64)
    address = gl.where(here, (kv_ptr + source * D).to(gl.int64), older)
    address = gl.where(valid & live, address, 0)
    if KIND != NONE:
        other = page.to(gl.int64) * page_stride + gl.maximum(entry, 0) % PER_PAGE * D
        address = gl.where(entry >= 0, (entry_ptr + other).to(gl.int64), address)
    return address


@gluon.jit
def either(inner, a, b):
    """Place a if ``inner``, else place b."""
    out = ()
    for i in gl.static_range(7):
        out += (gl.where(inner, a[i], b[i]),)  # type: ignore[assignment]
    return out


@gluon.jit
def fetch_keys(address, keys, valids, slot, kv_ptr):
    """Start copying the keys at ``address`` [64] into a slot, zeros where it is 0."""
    pointer = gl.multiple_of(address.to(gl.pointer_type(kv_ptr.dtype.element_ty)), 16)
    there = gl.expand_dims(address != 0, 1)
    valids.index(slot).store((address != 0).to(gl.int32))
    for i in gl.static_range(4):
        dim = i * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(0, COPY))
        async_copy.async_copy_global_to_shared(
            keys.index(slot * 4 + i), gl.expand_dims(pointer, 1) + gl.expand_dims(dim, 0), mask=there
        )


# ---- queries and results ----------------------------------------------------------------
@gluon.jit
def fetch_queries(q_ptr, row, head, q, D: gl.constexpr, H: gl.constexpr):
    """Start copying 64 heads of a row as they come."""
    line = row.to(gl.int64) * (H * D) + head * D
    lane = gl.arange(0, HEADS, layout=gl.SliceLayout(1, COPY)) * D
    for i in gl.static_range(4):
        dim = i * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(0, COPY))
        async_copy.async_copy_global_to_shared(
            q.index(i), q_ptr + line + gl.expand_dims(lane, 1) + gl.expand_dims(dim, 0)
        )


@gluon.jit
def turned(y, cos_ptr, sin_ptr, row, dim, D: gl.constexpr, HALF: gl.constexpr, BACK: gl.constexpr):
    """y [64, 128] of dims ``dim`` ... with the pairs among the last 2*HALF of all dims turned."""
    even, odd = gl.split(gl.reshape(y, [HEADS, PIECE // 2, 2]))
    pair = gl.arange(0, PIECE // 2, layout=gl.SliceLayout(0, even.type.layout)) + (dim // 2 - (D // 2 - HALF))
    inside = (pair >= 0) & (pair < HALF)
    cos = gl.expand_dims(gl.load(cos_ptr + row * HALF + pair, mask=inside, other=1.0), 0)
    sin = gl.expand_dims(gl.load(sin_ptr + row * HALF + pair, mask=inside, other=0.0), 0)
    if BACK:
        sin = -sin
    out = gl.reshape(gl.join(even * cos - odd * sin, odd * cos + even * sin), [HEADS, PIECE])
    return gl.convert_layout(out, WIDE)


@gluon.jit
def ready_queries(q, cos_ptr, sin_ptr, row, eps, D: gl.constexpr, HALF: gl.constexpr, TURN: gl.constexpr):
    """Norm and turn the queries in shared memory; see ``ends.queries``."""
    if TURN:
        squares = gl.zeros([HEADS, PIECE], gl.float32, WIDE)
        for i in gl.static_range(4):
            x = q.index(i).load(WIDE).to(gl.float32)
            squares += x * x
        factor = gl.expand_dims(gl.rsqrt(gl.sum(squares, axis=1) / D + eps), 1)
        for i in gl.static_range(3):
            q.index(i).store((q.index(i).load(WIDE).to(gl.float32) * factor).to(gl.bfloat16))
        x = (q.index(3).load(WIDE).to(gl.float32) * factor).to(gl.bfloat16).to(gl.float32)
        q.index(3).store(turned(x, cos_ptr, sin_ptr, row, D - PIECE, D, HALF, False).to(gl.bfloat16))


@gluon.jit
def keep(
    acc, total, cos_ptr, sin_ptr, out_ptr, row, head, dim, turn: gl.constexpr,
    H: gl.constexpr, D: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Store dims ``dim`` ... of acc [64, 128] / total; ``turn``: those of the last piece, turned back."""
    y = gl.convert_layout((acc * gl.expand_dims(1.0 / total, 1)).to(gl.bfloat16), WIDE)
    if turn:
        y = turned(y.to(gl.float32), cos_ptr, sin_ptr, row, dim, D, HALF, True).to(gl.bfloat16)
    line = head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, WIDE))
    column = dim + gl.arange(0, PIECE, layout=gl.SliceLayout(0, WIDE))
    to = out_ptr + row.to(gl.int64) * (H * D) + gl.expand_dims(line * D, 1) + gl.expand_dims(column, 0)
    gl.store(to, y.to(out_ptr.dtype.element_ty))


@gluon.jit
def keep_sums(acc, top, total, acc_ptr, stat_ptr, line, piece, D: gl.constexpr, NP: gl.constexpr):
    """Store the sums of one of several parts of a row as lines ``line`` ..."""
    to = line + gl.arange(0, HEADS, layout=gl.SliceLayout(1, SUM))
    for i in gl.static_range(NP):
        column = (piece + i) * PIECE + gl.arange(0, PIECE, layout=gl.SliceLayout(0, SUM))
        gl.store(acc_ptr + gl.expand_dims(to * D, 1) + gl.expand_dims(column, 0), acc[i])
    stat = stat_ptr + (line + gl.arange(0, HEADS, layout=gl.SliceLayout(1, SCORE))) * 2
    gl.store(stat, top)
    gl.store(stat + 1, total)


@gluon.jit
def keep_all(
    acc, total, cos_ptr, sin_ptr, out_ptr, row, head, piece,
    H: gl.constexpr, D: gl.constexpr, HALF: gl.constexpr, NP: gl.constexpr,
):  # fmt: skip
    """Store the results of a row with one part."""
    sums = gl.convert_layout(total, gl.SliceLayout(1, SUM))
    for i in gl.static_range(NP):
        dim = (piece + i) * PIECE
        keep(acc[i], sums, cos_ptr, sin_ptr, out_ptr, row, head, dim, i == NP - 1, H, D, HALF)


# ---- the kernel -------------------------------------------------------------------------
@gluon.jit
def products(q, keys, slot):
    """Scores [64, 64] of the queries and the keys in a slot, not waited for."""
    scores = gl.zeros([HEADS, BN], gl.float32, SCORE)
    for i in gl.static_range(4):
        key = keys.index(slot * 4 + i).permute((1, 0))
        scores = warpgroup_mma(q.index(i), key, scores, use_acc=i > 0, is_async=True)
    return scores


@gluon.jit
def shares(scores, valid, top, total, scale):
    """A tile's scores into a running softmax of base 2: (top, total, shares as an operand, fade of the sums)."""
    scores = gl.where(gl.expand_dims(valid, 0), scores * scale, float("-inf"))
    best = gl.maximum(top, gl.max(scores, axis=1))
    fade = gl.exp2(top - best)
    p = gl.exp2(scores - gl.expand_dims(best, 1))
    total = total * fade + gl.sum(p, axis=1)
    p = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, SUM, 2))
    return best, total, p, gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, SUM)), 1)


@gluon.jit
def one_tile(
    t, end, buffers, at, ahead, top, total, acc, scale, piece, place, follower, tile2, more,
    pointers, sizes,
    H: gl.constexpr, D: gl.constexpr, NP: gl.constexpr, SPAN: gl.constexpr, TILES: gl.constexpr,
    RING: gl.constexpr, RATIO: gl.constexpr, PER_PAGE: gl.constexpr, KIND: gl.constexpr, BLOCK: gl.constexpr,
    SIZE: gl.constexpr,
):  # fmt: skip
    """Tile t of an item, the keys of the one after it on their way, the addresses of the second after it found."""
    q, keys, valids = buffers
    kv_ptr, ring_ptr, entry_ptr, chosen_ptr, page_ptr = pointers
    chosen, columns, page_stride = sizes
    async_copy.wait_group(0)
    scores = products(q, keys, at)
    fetch_keys(ahead, keys, valids, 1 - at, kv_ptr)
    async_copy.commit_group()
    inner = t + 2 < end  # of this item, or of the next one
    then, live = gl.where(inner, t + 2, tile2 + t + 2 - end), inner | more
    follower = either(inner, place, follower)
    then = tile_at(then, follower, chosen, RATIO, KIND, SIZE, TILES, BLOCK)
    entry = entry_of(then, live, follower, chosen, chosen_ptr, RATIO, KIND, SIZE, TILES)
    scores = warpgroup_mma_wait(0, deps=[scores])
    valid = valids.index(at).load(gl.SliceLayout(0, SCORE)) != 0
    top, total, p, fade = shares(scores, valid, top, total, scale)
    page = page_of(entry, follower, columns, page_ptr, PER_PAGE, KIND)
    flying = ()
    for i in gl.static_range(NP):
        value = keys.index(at * 4 + piece + i)
        flying += (warpgroup_mma(p, value, acc[i] * fade, is_async=True),)  # type: ignore[assignment]
    ahead = address_of(
        then, live, follower, entry, page, kv_ptr, ring_ptr, entry_ptr, page_stride, D, SPAN, RING, PER_PAGE,
        KIND, BLOCK,
    )  # fmt: skip
    if NP == 1:
        acc = (warpgroup_mma_wait(0, deps=flying),)
    else:
        acc = warpgroup_mma_wait(0, deps=flying)
    return ahead, top, total, acc


@gluon.jit(do_not_specialize=["rows", "items", "chosen", "columns"])
def gathered_kernel(
    q_ptr, kv_ptr, ring_ptr, sink_ptr, entry_ptr, chosen_ptr, page_ptr, position_ptr, slot_ptr, first_ptr,
    last_ptr, cos_ptr, sin_ptr, out_ptr, acc_ptr, stat_ptr, rows, items, chosen, columns, page_stride, scale, eps,
    H: gl.constexpr, D: gl.constexpr, HALF: gl.constexpr, NP: gl.constexpr, SPAN: gl.constexpr,
    TILES: gl.constexpr, RING: gl.constexpr, RATIO: gl.constexpr, PER_PAGE: gl.constexpr, KIND: gl.constexpr,
    BLOCK: gl.constexpr, TURN: gl.constexpr, SIZE: gl.constexpr, MANY: gl.constexpr,
):  # fmt: skip
    """See ``attention.attend``. MANY: rows may have several parts; then a program has one item only."""
    gdc_launch_dependents()
    gdc_wait()
    SHARES: gl.constexpr = 4 // NP  # programs that share the dims of a row's heads
    GROUPS: gl.constexpr = H // HEADS * SHARES
    q = gl.allocate_shared_memory(gl.bfloat16, [4, HEADS, PIECE], TILE)
    keys = gl.allocate_shared_memory(gl.bfloat16, [8, BN, PIECE], TILE)
    valids = gl.allocate_shared_memory(gl.int32, [2, BN], FLAT)
    buffers = q, keys, valids
    pointers = kv_ptr, ring_ptr, entry_ptr, chosen_ptr, page_ptr
    sizes = chosen, columns, page_stride
    item = gl.program_id(0)
    head = item % GROUPS // SHARES * HEADS
    if not MANY:
        fetch_queries(q_ptr, item // GROUPS, head, q, D, H)
    row, part, tile, place = item_of(
        item, rows, position_ptr, slot_ptr, first_ptr, last_ptr, GROUPS, TILES, MANY
    )
    if MANY:
        if (part > 0) & (part * SIZE >= count_of(place, chosen, RATIO, KIND)):
            return
        fetch_queries(q_ptr, row, head, q, D, H)
    for i in gl.static_range(2):  # the first tile, then the addresses of the second
        if i == 1:
            fetch_keys(ahead, keys, valids, 0, kv_ptr)  # type: ignore[has-type]  # noqa: F821
            async_copy.commit_group()
        live = tile + i < end_of(place, chosen, RATIO, KIND, SIZE, TILES)
        t = tile_at(tile + i, place, chosen, RATIO, KIND, SIZE, TILES, BLOCK)
        entry = entry_of(t, live, place, chosen, chosen_ptr, RATIO, KIND, SIZE, TILES)
        page = page_of(entry, place, columns, page_ptr, PER_PAGE, KIND)
        ahead = address_of(
            t, live, place, entry, page, kv_ptr, ring_ptr, entry_ptr, page_stride, D, SPAN, RING, PER_PAGE,
            KIND, BLOCK,
        )  # fmt: skip
    at = 0
    while item < items:
        following = items if MANY else item + gl.num_programs(0)
        more = following < items
        if MANY:
            row2, part2, tile2, place2 = row, part, tile, place
        else:
            row2, part2, tile2, place2 = item_of(
                gl.where(more, following, item), rows, position_ptr, slot_ptr, first_ptr, last_ptr, GROUPS,
                TILES, MANY,
            )  # fmt: skip
        head = item % GROUPS // SHARES * HEADS
        piece = item % SHARES * NP
        sink = gl.load(sink_ptr + head + gl.arange(0, HEADS, layout=gl.SliceLayout(1, SCORE))).to(gl.float32)
        top = gl.where(part == 0, sink * 1.4426950408889634, LOWEST)  # the sink counts once, in part 0
        total = gl.where(part == 0, gl.full([HEADS], 1.0, gl.float32, gl.SliceLayout(1, SCORE)), 0.0)
        acc = ()
        for _i in gl.static_range(NP):
            acc += (gl.zeros([HEADS, PIECE], gl.float32, SUM),)  # type: ignore[assignment]
        async_copy.wait_group(0)
        ready_queries(q, cos_ptr, sin_ptr, row, eps, D, HALF, TURN)
        fence_async_shared()
        end = end_of(place, chosen, RATIO, KIND, SIZE, TILES)
        for t in range(tile, end):
            ahead, top, total, acc = one_tile(
                t, end, buffers, at, ahead, top, total, acc, scale, piece, place, place2, tile2, more,
                pointers, sizes, H, D, NP, SPAN, TILES, RING, RATIO, PER_PAGE, KIND, BLOCK, SIZE,
            )  # fmt: skip
            at = 1 - at
        if not MANY:  # code that the compiler finds dead would stop it
            if more:
                fetch_queries(q_ptr, row2, following % GROUPS // SHARES * HEADS, q, D, H)
            async_copy.commit_group()
        if MANY:
            if count_of(place, chosen, RATIO, KIND) > SIZE:
                line = (part.to(gl.int64) * rows + row) * H + head
                keep_sums(acc, top, total, acc_ptr, stat_ptr, line, piece, D, NP)
            else:
                keep_all(acc, total, cos_ptr, sin_ptr, out_ptr, row, head, piece, H, D, HALF, NP)
        else:
            keep_all(acc, total, cos_ptr, sin_ptr, out_ptr, row, head, piece, H, D, HALF, NP)
        item = following
        row, part, tile, place = row2, part2, tile2, place2


# ---- launch -----------------------------------------------------------------------------
def fits(heads: int, dim: int, half: int, dtype: torch.dtype) -> bool:
    """Whether the kernel takes such heads on this device; ``half``: pairs of dims that turn."""
    return usable() and heads % 64 == 0 and dim == 512 and half <= 64 and dtype == torch.bfloat16


def pieces_of(items: int, most: int) -> int:
    """Pieces of 128 dims that a program makes: few rows leave multiprocessors idle."""
    return next((n for n in (1, 2) if items * (4 // n) <= most), 4)


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
    scratch: tuple[Tensor, Tensor],
    parts: int,
    constants: dict[str, int | bool],
    scale: float,
    eps: float | None,
) -> None:
    """Fill out [R, H, 512], or the sums in ``scratch`` of rows with several parts; see ``attention.attend``."""
    (rows, heads, _), (cos, sin) = q.shape, angles
    most = processors(q.device)
    whole = rows * (heads // 64) * parts
    pieces = pieces_of(whole, most)
    items = whole * (4 // pieces)
    gathered_kernel[(items if parts > 1 else min(items, most),)](
        q, kv, ring, sinks, ring if entries is None else entries, r.slots if selection is None else selection,
        page_table, r.positions, r.slots, r.first, r.last, cos, sin, out, *scratch, rows, items,
        0 if selection is None else selection.shape[1], page_table.shape[1],
        0 if entries is None else entries.stride(0), scale, 0.0 if eps is None else eps, H=heads, D=q.shape[2],
        HALF=cos.shape[1], NP=pieces, TURN=eps is not None, MANY=parts > 1, **constants, num_warps=8,
        launch_pdl=launched_early(),
    )  # fmt: skip


# ---- offline compilation ----------------------------------------------------------------
def specs(shape: dict[str, int]) -> list[Spec]:
    """All ways the kernel is launched for the widths in ``shape``."""
    signature = types(
        bf16="q_ptr kv_ptr ring_ptr entry_ptr out_ptr",
        f32="sink_ptr cos_ptr sin_ptr acc_ptr stat_ptr",
        i64="chosen_ptr page_ptr position_ptr slot_ptr first_ptr last_ptr",
        int="rows items chosen columns page_stride",
        float="scale eps",
    )
    made = []
    for name, kind, ratio, many in (
        ("window", 0, 4, False), ("block", 0, 4, False), ("all", 1, 128, False), ("parts", 1, 128, True),
        ("chosen", 2, 4, False),
    ):  # fmt: skip
        for pieces in (1, 2, 4):
            constants = {
                **shape, "NP": pieces, "SPAN": 128, "TILES": 3 if name == "block" else 2, "RING": 152,
                "RATIO": ratio, "PER_PAGE": 256 // ratio, "KIND": kind, "BLOCK": name == "block", "TURN": True,
                "MANY": many,
            }  # fmt: skip
            made.append(
                Spec(
                    f"attention_{name}_gathered_{pieces}", gathered_kernel, signature, constants,
                    {"num_warps": 8}, targets=("sm_90",), aligned=("page_stride",),
                )
            )  # fmt: skip
    return made
