"""Tiles of lines for the routed experts: assignments sorted by expert, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from firesteel.ops.triton import folded
from firesteel.ops.triton.launch import begin, cdiv, dense, kernel, pow2
from firesteel.ops.triton.spec import Spec

ONCE = 8192  # assignments that a program holds at once
PAIR = tl.constexpr(2)  # experts per program of ``plan_once``
PER = tl.constexpr(8)  # neighbours that it adds up before it looks further
EACH = tl.constexpr(4)  # experts per program of ``plan_kernel``: their counts share 64 bits


@kernel("count", "slots")
def plan_kernel(
    ids,
    valid,
    xs,
    order,
    owner,
    ts,
    count,
    slots,
    TOP: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TILE_N: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Sort assignments by expert, any number of them; program p places those of experts EACH * p ...

    ids int64 [count] (expert of assignment row * TOP + place), those of rows not ``valid`` [rows] left out;
    order int32 [slots * TILE_N]: assignment of each line, -1 for padding; owner int32 [slots]: expert of each
    tile, -1 for none. Expert e's tiles begin at (assignments before it) // TILE_N + (experts before it): no
    two experts' tiles meet, and nobody needs all the others' loads. With BINS > 0, for fewer assignments
    than experts, only experts with assignments count; the last bin takes what lies past the end.
    With BLOCKS > 0 scales of rows are put in the order of lines: xs float32 [rows, BLOCKS] to
    ts [BLOCKS, slots * TILE_N].
    """
    begin()
    expert = tl.program_id(0) * EACH
    lane = tl.arange(0, STEP)
    less, before = 0, expert
    mine = tl.zeros((), tl.int64)
    for at in range(0, count, STEP):
        id_ = assigned(ids, valid, at + lane, count, TOP, MASKED)
        less += tl.sum((id_ < expert).to(tl.int32), axis=0)
        mine += tl.sum(one_of(id_ - expert), axis=0)
        if BINS > 0:  # one step holds all
            bins = tl.arange(0, BINS)
            hit = (tl.histogram(tl.minimum(id_, BINS - 1), BINS) > 0) & (bins < expert)
            before = tl.sum(hit.to(tl.int32), axis=0)
    if mine > 0:
        placed = tl.zeros((), tl.int64)
        for at in range(0, count, STEP):
            i = at + lane
            which = assigned(ids, valid, i, count, TOP, MASKED) - expert
            hit = one_of(which)
            rank = tl.cumsum(hit, axis=0) + placed
            placed += tl.sum(hit, axis=0)
            inside = (which >= 0) & (which < EACH)
            shift = (16 * tl.where(inside, which, 0)).to(tl.int64)
            to = ((rank >> shift) & 0xFFFF).to(tl.int32) - 1
            start, past, ahead = less, 0, before
            for j in tl.static_range(EACH):
                to = tl.where(which == j, to + (start // TILE_N + ahead) * TILE_N, to)
                past = ((mine >> (16 * j)) & 0xFFFF).to(tl.int32)
                start += past
                ahead += 1 if BINS == 0 else tl.minimum(past, 1)
            tl.store(order + to, i, mask=inside)
        tl.debug_barrier()  # reads below what other threads wrote to ``order``
    for j in tl.static_range(EACH):
        if expert + j < EXPERTS:
            mine_j = ((mine >> (16 * j)) & 0xFFFF).to(tl.int32)
            first = less // TILE_N + before
            tiles = (mine_j + TILE_N - 1) // TILE_N
            for tile in range(tiles):
                tl.store(owner + first + tile, expert + j)
                n = tile * TILE_N + tl.arange(0, TILE_N)
                line = first * TILE_N + n
                tl.store(order + line, tl.full((TILE_N,), -1, tl.int32), mask=n >= mine_j)
                if BLOCKS > 0:
                    block = tl.arange(0, LANES)
                    row = tl.load(order + line, mask=n < mine_j, other=0) // TOP
                    there = tl.broadcast_to((block < BLOCKS)[None, :], (TILE_N, LANES))
                    t = tl.load(xs + row[:, None] * BLOCKS + block[None, :], mask=there, other=0.0)
                    tl.store(ts + block[None, :] * (slots * TILE_N) + line[:, None], t, mask=there)
            less += mine_j
            before += 1 if BINS == 0 else tl.minimum(mine_j, 1)
            end = slots if expert + j == EXPERTS - 1 else less // TILE_N + before
            hole = tl.arange(0, 16)
            for at in range(first + tiles, end, 16):
                tl.store(owner + at + hole, tl.full((16,), -1, tl.int32), mask=at + hole < end)


@kernel()
def assigned(ids, valid, i, count, TOP: tl.constexpr, MASKED: tl.constexpr):
    """Experts of assignments i as int32; no expert's number past the end and for rows that are not valid."""
    live = i < count
    id_ = tl.load(ids + i, mask=live, other=0x7FFFFF).to(tl.int32)
    if MASKED:
        id_ = tl.where(tl.load(valid + i // TOP, mask=live, other=0) != 0, id_, 0x7FFFFF)
    return id_


@kernel()
def one_of(which):
    """int64 1 << 16 * which for numbers from 0 to EACH - 1, else 0."""
    inside = (which >= 0) & (which < EACH)
    one = tl.full(which.shape, 1, tl.int64) << (16 * tl.where(inside, which, 0)).to(tl.int64)
    return tl.where(inside, one, 0)


@kernel("count", "slots")
def plan_once(
    ids,
    valid,
    xs,
    order,
    owner,
    ts,
    count,
    slots,
    TOP: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TILE_N: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
):
    """``plan_kernel`` for at most STEP assignments, which are read once: program p places experts 2 p and 2 p + 1."""
    begin()
    expert = tl.program_id(0) * PAIR
    i = tl.arange(0, STEP // PER)[:, None] * PER + tl.arange(0, PER)[None, :]
    id_ = assigned(ids, valid, i, count, TOP, MASKED)
    which = id_ - expert
    hit = tl.where(which == 0, 1, tl.where(which == 1, 1 << 16, 0))
    less = tl.sum(tl.sum((which < 0).to(tl.int32), axis=1), axis=0)
    near = tl.sum(hit, axis=1)
    mine = tl.sum(near, axis=0)
    first, before = mine & 0xFFFF, expert
    if BINS > 0:
        bins = tl.arange(0, BINS)
        seen = (tl.histogram(tl.reshape(tl.minimum(id_, BINS - 1), [STEP]), BINS) > 0) & (bins < expert)
        before = tl.sum(seen.to(tl.int32), axis=0)
    if mine > 0:
        rank = tl.cumsum(hit, axis=1) + (tl.cumsum(near, axis=0) - near)[:, None]
        ahead = before + (1 if BINS == 0 else tl.minimum(first, 1))
        tile = tl.where(which == 0, less // TILE_N + before, (less + first) // TILE_N + ahead)
        to = tile * TILE_N + tl.where(which == 0, rank & 0xFFFF, rank >> 16) - 1
        tl.store(order + to, i, mask=(which >= 0) & (which < PAIR))
        if BLOCKS > 0:
            tl.debug_barrier()  # reads below what other threads wrote to ``order``
    for j in tl.static_range(PAIR):
        if expert + j < EXPERTS:
            mine_j = first if j == 0 else mine >> 16
            at = less // TILE_N + before
            tiles = (mine_j + TILE_N - 1) // TILE_N
            for tile in range(tiles):
                tl.store(owner + at + tile, expert + j)
                if BLOCKS > 0:
                    n = tile * TILE_N + tl.arange(0, TILE_N)
                    line = at * TILE_N + n
                    block = tl.arange(0, LANES)
                    row = tl.load(order + line, mask=n < mine_j, other=0) // TOP
                    there = tl.broadcast_to((block < BLOCKS)[None, :], (TILE_N, LANES))
                    t = tl.load(xs + row[:, None] * BLOCKS + block[None, :], mask=there, other=0.0)
                    tl.store(ts + block[None, :] * (slots * TILE_N) + line[:, None], t, mask=there)
            n = mine_j + tl.arange(0, TILE_N)
            tl.store(order + at * TILE_N + n, tl.full((TILE_N,), -1, tl.int32), mask=n < tiles * TILE_N)
            less += mine_j
            before += 1 if BINS == 0 else tl.minimum(mine_j, 1)
            end = slots if expert + j == EXPERTS - 1 else less // TILE_N + before
            hole = tl.arange(0, 16)
            for empty in range(at + tiles, end, 16):
                tl.store(owner + empty + hole, tl.full((16,), -1, tl.int32), mask=empty + hole < end)


def tile_of(rows: int, top: int, experts: int, *, folded: bool = False) -> int:
    """Lines per tile: about what an expert gets, so that its weights are read once; changes no bit."""
    mean = cdiv(rows * top, experts)
    if mean <= (13 if folded else 16):
        return 16
    return 64 if folded and mean > 35 else 32


@dataclass(frozen=True)
class Tiles:
    """Lines by expert: ``order`` int32 [slots * n] assignment of each line, -1 for padding; ``owner`` int32
    [slots] expert of each tile of n lines, -1 for none; ``scales`` float32 [K / 128, slots * n] of the lines' rows.
    """

    order: Tensor
    owner: Tensor
    scales: Tensor | None = None

    @property
    def n(self) -> int:
        """Lines per tile."""
        return self.order.shape[0] // self.owner.shape[0]


def plan(
    ids: Tensor, experts: int, tile_n: int, valid: Tensor | None = None, scales: Tensor | None = None
) -> Tiles:
    """Tiles of ids int64 [R, k]; see ``plan_kernel``.

    ``valid`` bool [R]: rows that have experts at all; None for every row. ``scales`` float32 [R, K / 128]
    of quantised rows: put in the order of lines, unless ``up`` takes them as they are.
    """
    count = ids.numel()
    assert ids.shape[0] < 1 << 16, "counts of 16 bits"
    slots = min(count, experts) + count // tile_n
    order = torch.empty(slots * tile_n, dtype=torch.int32, device=ids.device)
    owner = torch.empty(slots, dtype=torch.int32, device=ids.device)
    few, once = count < experts, count <= ONCE
    step = max(16, pow2(count)) if once else 4096
    if (
        scales is not None
        and folded.shape_for(tile_n, slots, folded.streams(256, scales.shape[1] * 128)).up.by_rows
    ):
        scales = None
    blocks = 0 if scales is None else scales.shape[1]
    ts = order if scales is None else scales.new_empty(blocks, slots * tile_n)
    fn, each = (plan_once, PAIR.value) if once else (plan_kernel, EACH.value)
    fn[(cdiv(experts, each),)](
        ids, ids if valid is None else valid, order if scales is None else scales, order, owner, ts, count,
        slots, TOP=ids.shape[-1], EXPERTS=experts, BINS=1 << experts.bit_length() if few else 0,
        TILE_N=tile_n, STEP=step, MASKED=valid is not None, BLOCKS=blocks, LANES=pow2(max(blocks, 1)),
        num_warps=_warps(step, once),
    )  # fmt: skip
    return Tiles(order, owner, None if scales is None else ts)


def _warps(step: int, once: bool) -> int:
    """Measured on an H200; changes no result."""
    if not once:
        return 16
    return 4 if step <= 2048 else 16


def scales_of_lines(scales: Tensor, tiles: Tiles, top: int) -> Tensor:
    """Rows' scales [R, K / 128] as [K / 128, lines]; the plan has them where the launch was foreseen."""
    if tiles.scales is not None:
        return tiles.scales
    index = tiles.order.clamp(0, scales.shape[0] * top - 1)  # lines of no expert hold anything
    return dense(scales[(index // top).long()].t())


# ---- offline compilation ------------------------------------------------------------------
PLAN = {
    "ids": "*i64", "valid": "*i1", "xs": "*fp32", "order": "*i32", "owner": "*i32", "ts": "*fp32", "count": "i32",
    "slots": "i32",
}  # fmt: skip


def _spec(name: str, once: bool, bins: int, tile: int, step: int) -> Spec:
    return Spec(
        name=name,
        fn=plan_once if once else plan_kernel,
        signature=PLAN,
        constexprs={
            "TOP": 6, "EXPERTS": 256, "BINS": bins, "TILE_N": tile, "STEP": step, "MASKED": True, "BLOCKS": 32,
            "LANES": 32,
        },
        options={"num_warps": _warps(step, once)},
    )  # fmt: skip


KERNELS: list[Spec] = [
    _spec("experts-plan-few", True, 512, 16, 256),
    _spec("experts-plan", True, 0, 32, ONCE),
    _spec("experts-plan-many", False, 0, 64, 4096),
]
