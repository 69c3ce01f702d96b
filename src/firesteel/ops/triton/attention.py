"""Attention of rows over window and compressed entries: one kernel for the target, another mode for the drafter.

K = V is one vector shared by all heads. Keys are the M side of the first product and
dims that of the second; the heads of a row are the N side of both, so that a program may
take any number of them without touching a bit. A program takes one row, some heads and
one part of its keys: part 0 the window and the first ``PART`` entries, every further
part ``PART`` entries. Parts of a row depend on its own position alone; those of a row
with several are merged in ascending order by a second kernel. Masked lanes hold zeros
as keys and values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from firesteel.ops.triton import gathered, relay
from firesteel.ops.triton.ends import finish, queries
from firesteel.ops.triton.launch import begin, cdiv, dense, kernel, pow2
from firesteel.ops.triton.norms import angles, types
from firesteel.ops.triton.rounding import operand
from firesteel.ops.triton.spec import Spec
from firesteel.ops.triton.target import Target
from firesteel.ops.types import PassContext

PART = 512  # entries of one part; the first has the window as well
LOG2E = 1.4426950408889634
AMD = {"num_stages": 1, "matrix_instr_nonkdim": 16}  # 16x16 tiles: a wave holds fewer rows of q
LOWEST = tl.constexpr(-1e30)  # a finite start of the running maximum: a part without keys has no NaN

NONE, ALL, CHOSEN = (tl.constexpr(i) for i in range(3))  # which entries a row sees


@triton.jit
def _add_keys(q, keys, valid, top, total, acc, scale, real, PIECES: tl.constexpr):
    """One tile of keys into a running softmax (base 2); ``scale`` holds log2 e.

    q, keys and acc in pieces of dims: [BP, BH], [BN, BP] and [BP, BH]. ``real`` is true: behind a
    branch the compiler no longer sees that one product feeds the other, for which it would give
    every warp group all of the first.
    """
    scores = tl.dot(keys[0], q[0], input_precision="ieee")
    for i in tl.static_range(1, PIECES):
        scores = tl.dot(keys[i], q[i], scores, input_precision="ieee")
    scores = tl.where(valid[:, None], scores * scale, float("-inf"))
    best = tl.maximum(top, tl.max(scores, axis=0))
    if real:
        fade = tl.exp2(top - best)
        p = tl.exp2(scores - best[None, :])
        total = total * fade + tl.sum(p, axis=0)
        narrow = p.to(keys[0].dtype)
    else:
        fade = tl.zeros_like(top)
        narrow = tl.zeros_like(scores).to(keys[0].dtype)
    out = ()
    for i in tl.static_range(PIECES):
        out += (tl.dot(tl.trans(keys[i]), narrow, acc[i] * fade[None, :], input_precision="ieee"),)  # type: ignore[assignment]
    return best, total, out


@triton.jit
def _window_rows(
    kv_ptr,
    ring_ptr,
    i,
    place,
    D: tl.constexpr,
    SPAN: tl.constexpr,
    RING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Addresses of raw rows i, 0 where there is none: of the pass from ``kv``, older ones from the ring."""
    position, start, first, last, slot = place
    if BLOCK:  # SPAN rows before the group, then all of the group
        want = start - SPAN + i
        here = i >= SPAN
        source = first + i - SPAN
        valid = (want >= 0) & ((i < SPAN) | (source <= last))
    else:  # the SPAN rows up to this one
        want = position - SPAN + 1 + i
        here = want >= start
        source = first + want - start
        valid = (want >= 0) & (i < SPAN)
    older = (ring_ptr + slot * (RING * D) + tl.maximum(want, 0) % RING * D).to(tl.int64)
    return tl.where(valid, tl.where(here, (kv_ptr + source * D).to(tl.int64), older), 0)


@triton.jit
def _part_keys(
    lane,
    lo,
    hi,
    most,
    kv_ptr,
    ring_ptr,
    entry_ptr,
    chosen_ptr,
    page_ptr,
    place,
    page_stride,
    D: tl.constexpr,
    WINDOW: tl.constexpr,
    SPAN: tl.constexpr,
    RING: tl.constexpr,
    PER_PAGE: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Addresses of a part's keys, 0 where there is none: WINDOW lanes for raw rows, the others for entries lo ... hi.

    ``most``: how many entries, or columns of a selection, are addressable.

    All of them at once and each by one thread: found tile by tile, every thread would
    find those of all rows that it copies, and wait for the two loads they hang on.
    """
    address = _window_rows(kv_ptr, ring_ptr, lane, place, D, SPAN, RING, BLOCK)
    if KIND != NONE:
        entry = lo + lane - WINDOW
        seen = (lane >= WINDOW) & (entry < hi)
        inside = (lane >= WINDOW) & (entry < most)  # loads that need not wait for the row's position
        if KIND == CHOSEN:
            entry = tl.load(chosen_ptr + entry, mask=inside, other=-1).to(tl.int32)
            seen, inside = seen & (entry >= 0), entry >= 0
        page = tl.load(page_ptr + entry // PER_PAGE, mask=inside, other=0)
        other = (entry_ptr + page * page_stride + (entry % PER_PAGE) * D).to(tl.int64)
        address = tl.where(lane < WINDOW, address, tl.where(seen, other, 0))
    return address


@triton.jit
def _visible(position, chosen, RATIO: tl.constexpr, KIND: tl.constexpr):
    """How many entries a row attends to; a selection of ``chosen`` columns holds all it can."""
    if KIND == NONE:
        return chosen  # 0, but the compiler cannot know: an unrolled loop would not fit the registers
    count = (position + 1) // RATIO
    if KIND == CHOSEN:
        count = tl.minimum(count, chosen)
    return count


@kernel("rows", "chosen", "columns")
def attend(
    q_ptr,
    kv_ptr,
    ring_ptr,
    sink_ptr,
    entry_ptr,
    chosen_ptr,
    page_ptr,
    position_ptr,
    slot_ptr,
    first_ptr,
    last_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    acc_ptr,
    stat_ptr,
    rows,
    chosen,
    columns,
    page_stride,
    scale,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    PIECES: tl.constexpr,
    BN: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW_TILES: tl.constexpr,
    RING: tl.constexpr,
    RATIO: tl.constexpr,
    PER_PAGE: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    TURN: tl.constexpr,
    SIZE: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    begin()
    groups: tl.constexpr = (H + BH - 1) // BH
    BP: tl.constexpr = BD // PIECES
    row = (tl.program_id(0) // groups).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(position_ptr + row).to(tl.int32)
    count = _visible(position, chosen, RATIO, KIND)
    lo = part * SIZE
    if (part > 0) & (lo >= count):
        return
    hi = tl.minimum(lo + SIZE, count)
    slot = tl.load(slot_ptr + row)
    first = tl.load(first_ptr + row).to(tl.int32)
    last = tl.load(last_ptr + row).to(tl.int32)
    start = tl.load(position_ptr + first).to(tl.int32)
    head = tl.program_id(0) % groups * BH + tl.arange(0, BH)
    q = queries(
        q_ptr + row * (H * D), cos_ptr, sin_ptr, row, head, eps, H, D, HALF, BD, PIECES, TURN, OFFICIAL
    )
    acc = ()
    for _i in tl.static_range(PIECES):
        acc += (tl.zeros([BP, BH], tl.float32),)  # type: ignore[assignment]
    sink = tl.load(sink_ptr + head, mask=head < H, other=0.0).to(tl.float32) * 1.4426950408889634
    top = tl.where(part == 0, sink, LOWEST)  # the sink counts once, in part 0
    total = tl.where(part == 0, tl.full([BH], 1.0, tl.float32), 0.0)
    window: tl.constexpr = WINDOW_TILES * BN
    addresses = _part_keys(
        tl.arange(0, KEYS), lo, hi, chosen if KIND == CHOSEN else columns * PER_PAGE, kv_ptr, ring_ptr, entry_ptr,
        chosen_ptr + row * chosen, page_ptr + slot * columns, (position, start, first, last, slot), page_stride,
        D, window, SPAN, RING, PER_PAGE, KIND, BLOCK,
    )  # fmt: skip
    for tile in range(tl.where(part == 0, 0, WINDOW_TILES), WINDOW_TILES + (hi - lo + BN - 1) // BN):
        # the pipeline looks at tiles past the last one: a lane beyond the list would lie outside of shared memory
        address = tl.gather(addresses, tl.minimum(tile * BN + tl.arange(0, BN), KEYS - 1), 0)
        pointer = address.to(tl.pointer_type(kv_ptr.dtype.element_ty))
        if D % 8 == 0:  # rows begin at 16 bytes
            pointer = tl.multiple_of(pointer, 16)
        keys = ()
        for i in tl.static_range(PIECES):
            dim = i * BP + tl.arange(0, BP)
            inside_keys = (address != 0)[:, None]
            if BD > D:
                inside_keys = inside_keys & (dim < D)[None, :]
            keys += (  # type: ignore[assignment]
                operand(tl.load(pointer[:, None] + dim[None, :], mask=inside_keys, other=0.0), OFFICIAL),
            )
        top, total, acc = _add_keys(q, keys, address != 0, top, total, acc, scale, rows > 0, PIECES)
    whole = count <= SIZE
    line = (part.to(tl.int64) * rows + row) * H
    for i in tl.static_range(PIECES):
        dim = i * BP + tl.arange(0, BP)
        if whole:
            finish(
                acc[i], total, cos_ptr, sin_ptr, out_ptr, row, head, dim, i * BP, BP, BD, H, D, HALF, OFFICIAL
            )
        else:
            inside = (head < H)[:, None]
            if BD > D:
                inside = inside & (dim < D)[None, :]
            tl.store(acc_ptr + line * D + head[:, None] * D + dim[None, :], tl.trans(acc[i]), mask=inside)
    if count > SIZE:
        tl.store(stat_ptr + line * 2 + head * 2, top, mask=head < H)
        tl.store(stat_ptr + line * 2 + head * 2 + 1, total, mask=head < H)


@kernel("rows", "chosen")
def merge_parts(
    acc_ptr,
    stat_ptr,
    position_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    rows,
    chosen,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    RATIO: tl.constexpr,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    begin()
    row = tl.program_id(0).to(tl.int64)
    count = _visible(tl.load(position_ptr + row).to(tl.int32), chosen, RATIO, KIND)
    if count <= SIZE:
        return
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    lane = tl.arange(0, BD)
    inside = (head < H)[:, None]
    if BD > D:
        inside = inside & (lane < D)[None, :]
    at = head[:, None] * D + lane[None, :]
    acc = tl.zeros([BD, BH], tl.float32)
    top = tl.full([BH], LOWEST, tl.float32)
    total = tl.zeros([BH], tl.float32)
    for part in range((count + SIZE - 1) // SIZE):
        line = (part * rows.to(tl.int64) + row) * H
        stat = stat_ptr + line * 2 + head * 2
        more = tl.load(stat, mask=head < H, other=0.0)
        best = tl.maximum(top, more)
        fade, weight = tl.exp2(top - best), tl.exp2(more - best)
        total = total * fade + tl.load(stat + 1, mask=head < H, other=1.0) * weight
        add = tl.trans(tl.load(acc_ptr + line * D + at, mask=inside, other=0.0))
        acc = acc * fade[None, :] + add * weight[None, :]
        top = best
    finish(acc, total, cos_ptr, sin_ptr, out_ptr, row, head, lane, 0, BD, BD, H, D, HALF, OFFICIAL)


@dataclass(frozen=True)
class Shape:
    """Tiles of a geometry on a target: heads, dims and keys of a tile, and launch options."""

    heads: int
    dims: int
    keys: int
    pieces: int
    options: dict[str, int]


PIECES = 4


def unturned(q: Tensor, heads: int, eps: float) -> Tensor:
    """q [R, H*d] as heads [R, H, d], which ``attention`` is to norm (with ``eps``) and to turn."""
    out = q.unflatten(1, (heads, -1))
    out.unturned = eps  # type: ignore[attr-defined]
    return out


GATHERED = True  # Hopper's own form, ``gathered``, for every row count: faster from 64 rows on, slower below
RELAY_FROM = 64  # rows from which ``relay`` serves passes of one part: faster for all layers
SPREAD = 132  # programs that a pass of few rows is spread over: multiprocessors of an H200


def shape_of(heads: int, dim: int, official: bool, target: Target, rows: int) -> Shape:
    """Tiles of a geometry.

    Only the heads of a program follow the row count: they are the N side of both products,
    and few rows leave multiprocessors idle unless a row's heads are spread over several.
    """
    bd = max(16, pow2(dim))
    wide = bd >= 256  # the accumulator decides how many registers are left
    if not official:
        return Shape(16, bd, 16 if wide else 64, 1, {"num_warps": 4, "num_stages": 1})
    if target.backend == "hip":
        return Shape(
            max(16, min(32 if wide else 64, pow2(heads))), bd, 32 if wide else 64, 1, {"num_warps": 4, **AMD}
        )
    if not wide:
        return Shape(max(16, min(64, pow2(heads))), bd, 64, 2, {"num_warps": 4, "num_stages": 1})
    most = next((n for n in (16, 32) if rows * cdiv(heads, n) <= SPREAD), 64)
    pieces = 1 if target.name == "sm_100" else PIECES
    bh = 16 if target.name == "sm_100" else max(16, min(most, pow2(heads)))
    return Shape(
        bh,
        bd,
        64,
        pieces,
        {"num_warps": 4, "num_stages": 3} if bh == 16 else {"num_warps": 8, "num_stages": 2},
    )


def attention(
    q: Tensor,
    kv: Tensor,
    window: Tensor,
    span: int,
    sinks: Tensor,
    entries: Tensor | None,
    ratio: int,
    selection: Tensor | None,
    table: str,
    ctx: PassContext,
    store: torch.dtype,
    official: bool,
    target: Target,
) -> Tensor:
    """Output [R, H, d] of ``Ops.attention``; with ``ctx.block`` set that of ``Ops.block_attention``.

    q that ``unturned`` made is normed and turned here.
    """
    rows, heads, dim = q.shape
    eps: float | None = getattr(q, "unturned", None)
    out = torch.empty(rows, heads, dim, dtype=store, device=q.device)
    if rows == 0:
        return out
    assert window.is_contiguous(), "a ring lies in order"
    assert entries is None or entries.dtype == window.dtype, "rings and entries have one dtype"
    if kv.dtype != window.dtype:  # one pointer type for rows of the pass and of the ring
        kv = kv.to(window.dtype)
    q, kv, (cos, sin), s = (
        dense(q),
        dense(kv),
        angles(table, ctx),
        shape_of(heads, dim, official, target, rows),
    )
    kind, chosen, most, per_page = NONE, 0, 0, 1
    if entries is not None:
        assert entries.stride()[1:] == (dim, 1), "the entries of a page lie in order"
        assert dim % 8 or entries.stride(0) % 8 == 0, "entries begin at 16 bytes"
        per_page, most = ctx.page_size // ratio, (ctx.rows.max_position + 1) // ratio
        kind = ALL
        if selection is not None:
            selection, chosen, kind = dense(selection), selection.shape[1], CHOSEN
            most = min(most, chosen)
    parts = max(1, cdiv(most, PART))
    scratch = (parts if parts > 1 else 0) * rows * heads
    acc = torch.empty(scratch, dim, dtype=torch.float32, device=q.device)
    stat = torch.empty(scratch, 2, dtype=torch.float32, device=q.device)
    r, tiles = ctx.rows, cdiv(span + ctx.block, s.keys)
    if GATHERED and official and gathered.fits(heads, dim, cos.shape[1], q.dtype):
        constants = {
            "SPAN": span, "TILES": cdiv(span + ctx.block, 64), "RING": window.shape[1], "RATIO": max(ratio, 1),
            "PER_PAGE": per_page, "KIND": kind.value, "BLOCK": ctx.block > 0, "SIZE": PART,
        }  # fmt: skip
        tables = dense(ctx.page_table), r, (cos, sin)
        tensors = q, kv, window, sinks, entries, selection, *tables, out
        if parts == 1 and rows >= RELAY_FROM:
            constants["FEW"] = relay.few_form(span, ctx.block, entries is not None)
            relay.attend(*tensors, constants, LOG2E / math.sqrt(dim), eps)
        else:
            gathered.attend(*tensors, (acc, stat), parts, constants, LOG2E / math.sqrt(dim), eps)
    else:
        attend[(rows * cdiv(heads, s.heads), parts)](
            q, kv, window, sinks, window if entries is None else entries, r.slots if selection is None else selection,
            dense(ctx.page_table), r.positions, r.slots, r.first, r.last, cos, sin, out, acc, stat, rows, chosen,
            ctx.page_table.shape[1], 0 if entries is None else entries.stride(0), LOG2E / math.sqrt(dim),
            0.0 if eps is None else eps, H=heads, D=dim, HALF=cos.shape[1], BH=s.heads, BD=s.dims,
            PIECES=s.pieces, BN=s.keys, KEYS=pow2(tiles * s.keys + (PART if kind else 0)), SPAN=span,
            WINDOW_TILES=tiles, RING=window.shape[1], RATIO=max(ratio, 1), PER_PAGE=per_page, KIND=kind.value,
            BLOCK=ctx.block > 0, TURN=eps is not None, SIZE=PART, OFFICIAL=official, **s.options,
        )  # fmt: skip
    if parts > 1:
        some = min(s.heads, 16)
        merge_parts[(rows, cdiv(heads, some))](
            acc, stat, r.positions, cos, sin, out, rows, chosen, H=heads, D=dim, HALF=cos.shape[1], BH=some,
            BD=s.dims, RATIO=max(ratio, 1), KIND=kind.value, SIZE=PART, OFFICIAL=official, num_warps=4,
        )  # fmt: skip
    return out


def _specs() -> list[Spec]:
    shape = {"H": 64, "D": 512, "HALF": 32, "BD": 512, "SIZE": PART, "OFFICIAL": True}
    signature = types(
        bf16="q_ptr kv_ptr ring_ptr entry_ptr out_ptr",
        f32="sink_ptr cos_ptr sin_ptr acc_ptr stat_ptr",
        i64="chosen_ptr page_ptr position_ptr slot_ptr first_ptr last_ptr",
        int="rows chosen columns page_stride",
        float="scale eps",
    )
    out: list[Spec] = []
    for name, kind, ratio in (
        ("window", NONE, 4),
        ("block", NONE, 4),
        ("all", ALL, 128),
        ("chosen", CHOSEN, 4),
    ):
        keys = 128 + (32 if name == "block" else 0)
        most = PART if kind != NONE else 0
        entries = {
            "RATIO": ratio,
            "PER_PAGE": 256 // ratio,
            "KIND": kind.value,
            "BLOCK": name == "block",
            "TURN": True,
        }

        def tiles(bn: int, keys: int = keys, most: int = most) -> dict[str, int]:
            return {"BN": bn, "WINDOW_TILES": cdiv(keys, bn), "KEYS": pow2(cdiv(keys, bn) * bn + most)}

        narrow = {**AMD, **tiles(32), "BH": 32, "PIECES": 1, "num_warps": 4}
        for heads in (16, 32, 64):
            few = heads == 16
            targets = (
                ("sm_90", "sm_100") if few else ("sm_90",) if heads == 32 else ("gfx950", "gfx942", "sm_90")
            )
            out.append(
                Spec(
                    f"attention_{name}_{heads}_official",
                    attend,
                    signature,
                    {
                        **shape,
                        **entries,
                        **tiles(64),
                        "BH": heads,
                        "PIECES": PIECES,
                        "SPAN": 128,
                        "RING": 152,
                    },
                    {"num_warps": 4, "num_stages": 3} if few else {"num_warps": 8, "num_stages": 2},
                    targets=targets,
                    aligned=("page_stride",),
                    overrides={"gfx942": narrow, "gfx950": narrow, "sm_100": {"num_stages": 2, "PIECES": 1}},
                )
            )
    merge = Spec(
        "attention_merge_official",
        merge_parts,
        types(f32="acc_ptr stat_ptr cos_ptr sin_ptr", i64="position_ptr", bf16="out_ptr", int="rows chosen"),
        {**shape, "BH": 16, "RATIO": 128, "KIND": ALL.value},
        {"num_warps": 4},
    )
    return [*out, merge]


SHAPE = {"H": 64, "D": 512, "HALF": 32, "SIZE": PART}
KERNELS = [*_specs(), *gathered.specs(SHAPE), *relay.specs(SHAPE)]
