"""Parts of attention by warps of different work: layouts, keys and queries on their way to shared memory.

See ``relay``, whose kernel is made of these. HOW: its constants.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from firesteel.ops.triton.gathered import BN, CHOSEN, HEADS, NONE, PIECE, TILE, count_of

LINES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))  # of places without a second dimension
SOME = gl.constexpr(16)  # heads that a warp group norms at once
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
SCORE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
WIDE = gl.constexpr(256)  # dims of a warp group
SHARES = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
OUT = gl.constexpr(  # as SUM, but that a thread has eight neighbouring dims
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, 128],
    )
)  # fmt: skip


# ---- keys -------------------------------------------------------------------------------
@gluon.jit
def window_of(i, place, kv_ptr, ring_ptr, HOW: gl.constexpr):
    """Addresses of the raw rows at places i of the window, 0 where there is none; see ``gathered.address_of``."""
    D: gl.constexpr = HOW[1]
    SPAN: gl.constexpr = HOW[3]
    RING: gl.constexpr = HOW[5]
    _row, position, start, first, last, slot, _part = place
    if HOW[9]:  # SPAN rows before the group, then all of the group
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
    return gl.where(valid, gl.where(here, (kv_ptr + source * D).to(gl.int64), older), 0)


@gluon.jit
def address_of(t, place, tables, sizes, HOW: gl.constexpr):
    """Addresses of the keys of tile t, 0 where there is none."""
    kv_ptr, ring_ptr, entry_ptr, chosen_ptr, page_ptr = tables
    chosen, columns, page_stride = sizes
    PER_PAGE: gl.constexpr = HOW[7]
    KIND: gl.constexpr = HOW[8]
    lane = gl.arange(0, BN, layout=gl.SliceLayout(1, COPY))
    address = window_of(t * BN + lane, place, kv_ptr, ring_ptr, HOW)
    if KIND != NONE:
        entry = (t - HOW[4]) * BN + lane
        inside = (entry >= 0) & (entry < count_of(place, chosen, HOW[6], KIND))
        if KIND == CHOSEN:
            to = chosen_ptr + place[0].to(gl.int64) * chosen + entry
            entry = gl.load(to, mask=inside, other=-1).to(gl.int32)
        else:
            entry = gl.where(inside, entry, -1)
        to = page_ptr + place[5].to(gl.int64) * columns + gl.maximum(entry, 0) // PER_PAGE
        page = gl.load(to, mask=entry >= 0, other=0).to(gl.int64)
        other = page * page_stride + gl.maximum(entry, 0) % PER_PAGE * HOW[1]
        address = gl.where(entry >= 0, (entry_ptr + other).to(gl.int64), address)
    return address


@gluon.jit
def copy_keys(address, keys, slot, kv_ptr):
    """Start copying the keys at ``address`` [64] into a slot, zeros where it is 0: two groups of copies."""
    pointer = gl.multiple_of(address.to(gl.pointer_type(kv_ptr.dtype.element_ty)), 16)
    there = gl.expand_dims(address != 0, 1)
    for i in gl.static_range(2):
        dim = i * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, COPY))
        async_copy.async_copy_global_to_shared(
            keys.index(slot * 2 + i), gl.expand_dims(pointer, 1) + gl.expand_dims(dim, 0), mask=there
        )
        async_copy.commit_group()


@gluon.jit
def copy_some(group, t, place, keys, slot, tables, HOW: gl.constexpr):
    """Start copying eight keys of a tile of the window: the other keys of the slot are in place."""
    kv_ptr = tables[0]
    lane = gl.arange(0, 8, layout=gl.SliceLayout(1, COPY))
    address = window_of(t * BN + group * 8 + lane, place, kv_ptr, tables[1], HOW)
    pointer = gl.multiple_of(address.to(gl.pointer_type(kv_ptr.dtype.element_ty)), 16)
    there = gl.expand_dims(address != 0, 1)
    atoms = keys._reinterpret(gl.bfloat16, [2 * 64, 8, 64], TILE)  # 64 dims of eight keys lie together
    for i in gl.static_range(8):
        dim = i * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, COPY))
        async_copy.async_copy_global_to_shared(
            atoms.index(slot * 64 + i * 8 + group),
            gl.expand_dims(pointer, 1) + gl.expand_dims(dim, 0),
            mask=there,
        )
    async_copy.commit_group()
    async_copy.commit_group()  # the second of two groups, as of all keys


# ---- queries ----------------------------------------------------------------------------
@gluon.jit
def fetch_queries(q_ptr, row, head, q, D: gl.constexpr, H: gl.constexpr):
    """Start copying 64 heads of a row as they come."""
    line = row.to(gl.int64) * (H * D) + head * D
    lane = gl.arange(0, HEADS, layout=gl.SliceLayout(1, COPY)) * D
    for i in gl.static_range(2):
        dim = i * WIDE + gl.arange(0, WIDE, layout=gl.SliceLayout(0, COPY))
        async_copy.async_copy_global_to_shared(
            q.index(i), q_ptr + line + gl.expand_dims(lane, 1) + gl.expand_dims(dim, 0)
        )
    async_copy.commit_group()


@gluon.jit
def turned(y, cos_ptr, sin_ptr, row, dim, D: gl.constexpr, HALF: gl.constexpr, BACK: gl.constexpr):
    """``gathered.turned`` of any rows, in the layout of y."""
    even, odd = gl.split(gl.reshape(y, [y.shape[0], PIECE // 2, 2]))
    pair = gl.arange(0, PIECE // 2, layout=gl.SliceLayout(0, even.type.layout)) + (dim // 2 - (D // 2 - HALF))
    inside = (pair >= 0) & (pair < HALF)
    cos = gl.expand_dims(gl.load(cos_ptr + row * HALF + pair, mask=inside, other=1.0), 0)
    sin = gl.expand_dims(gl.load(sin_ptr + row * HALF + pair, mask=inside, other=0.0), 0)
    if BACK:
        sin = -sin
    out = gl.reshape(gl.join(even * cos - odd * sin, odd * cos + even * sin), y.shape)
    return gl.convert_layout(out, y.type.layout)


@gluon.jit
def ready_queries(q, cos_ptr, sin_ptr, row, eps, D: gl.constexpr, HALF: gl.constexpr):
    """Norm and turn the queries in shared memory; see ``ends.queries``."""
    for j in gl.static_range(HEADS // SOME):
        squares = gl.zeros([SOME, PIECE], gl.float32, COPY)
        raw = ()
        for i in gl.static_range(4):
            x = q.index(i // 2).slice(j * SOME, SOME).slice(i % 2 * PIECE, PIECE, 1).load(COPY)
            squares += x.to(gl.float32) * x.to(gl.float32)
            raw += (x,)  # type: ignore[assignment]
        factor = gl.expand_dims(gl.rsqrt(gl.sum(squares, axis=1) / D + eps), 1)
        for i in gl.static_range(4):
            x = (raw[i].to(gl.float32) * factor).to(gl.bfloat16)
            if i == 3:
                x = turned(x.to(gl.float32), cos_ptr, sin_ptr, row, D - PIECE, D, HALF, False).to(gl.bfloat16)
            q.index(i // 2).slice(j * SOME, SOME).slice(i % 2 * PIECE, PIECE, 1).store(x)
