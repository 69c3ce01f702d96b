"""Routed experts: weights of every hit expert read once, rows grouped on the device.

Rows are sorted by expert into tiles of TILE_N lines; a tile belongs to one expert
and is padded. Grids have the worst-case size and programs beyond the last tile
leave at once, so nothing waits for the host. A row's result depends on its own
line of a tile alone, and its experts are added in ascending id in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import triton.language as tl
from torch import Tensor

from firesteel.ops.triton import folded
from firesteel.ops.triton.experts import down_kernel, swiglu, up_kernel
from firesteel.ops.triton.launch import begin, cdiv, dense, kernel, pow2
from firesteel.ops.triton.linear import Scratch
from firesteel.ops.triton.rounding import store_form
from firesteel.ops.triton.spec import Spec
from firesteel.ops.triton.target import Target

FEW = 512  # programs below which ranges of K run side by side


# ---- plan -----------------------------------------------------------------------------
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
    """Sort assignments by expert; program p places those of experts EACH * p ...

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


@kernel("rows", "limit")
def swiglu_kernel(x, out, q, steps, rows, limit, INNER: tl.constexpr, STEP: tl.constexpr, FORM: tl.constexpr):
    """out [rows, INNER] = SwiGLU of x [rows, 2 * INNER], gate first: of the shared expert.

    With FORM also its e4m3 form (see ``store_form``); STEP then divides INNER.
    """
    begin()
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * STEP
    at = start + tl.arange(0, STEP)
    live = at < INNER
    gate = tl.load(x + row * (2 * INNER) + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * INNER) + INNER + at, mask=live, other=0.0).to(tl.float32)
    v = swiglu(gate, up, limit).to(out.dtype.element_ty)
    tl.store(out + row * INNER + at, v, mask=live)
    if FORM:
        store_form(v.to(tl.float32), q + start, steps + start // 128, row, INNER, STEP, FORM)


@kernel("rows")
def combine_kernel(
    parts,
    shared,
    valid,
    out,
    rows,
    D: tl.constexpr,
    TOP: tl.constexpr,
    SHARED: tl.constexpr,
    STEP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """out [rows, D] = parts [rows, TOP, D] in ascending place, then shared [SHARED, rows, D], summed in float32.

    With MASKED zeros for rows that are not ``valid``, whose parts nobody wrote.
    """
    begin()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * STEP + tl.arange(0, STEP)
    live = at < D
    real = (tl.load(valid + row) != 0) & live if MASKED else live
    acc = tl.load(parts + row * (TOP * D) + at, mask=real, other=0.0).to(tl.float32)
    for j in tl.static_range(1, TOP):
        acc += tl.load(parts + row * (TOP * D) + j * D + at, mask=real, other=0.0).to(tl.float32)
    for j in tl.static_range(SHARED):
        acc += tl.load(shared + (j * rows.to(tl.int64) + row) * D + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * D + at, acc.to(out.dtype.element_ty), mask=live)


# ---- launches -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Grouped:
    """Weights of all experts for one product.

    FORMAT "planes" or "pairs": FP4 blocks and scale words of all experts one after another;
    "rows": [E, m, k] of FP8 with float32 scales [E, m/128, k/128], bfloat16 or float32.
    ``m`` outputs and ``k`` inputs per expert, padded to whole blocks.
    """

    format: str
    data: Tensor
    scale: Tensor
    m: int
    k: int

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(t.numel() * t.element_size() for t in (self.data, self.scale))


@dataclass(frozen=True)
class Arithmetic:
    """How experts multiply on a target: ``kind`` as in ``linear_kernel``, warps, stages.

    ``capped``: registers that a thread may have in tiles of 16 lines of "planes"; ranges of K then always
    get programs of their own, since one program for all needs more. 0: no cap.
    """

    kind: str
    warps: int
    stages: int
    fnuz: bool = False
    asm: bool = False
    capped: int = 0
    extra: Mapping[str, int] = field(default_factory=dict)

    def options(self, format_: str, tile_n: int) -> dict[str, int]:
        """Launch options for weights of a ``Grouped.format`` and tiles of ``tile_n`` lines."""
        cap = {"maxnreg": self.capped} if self.capped and format_ == "planes" and tile_n == 16 else {}
        warps = 8 if self.capped and format_ == "rows" else self.warps  # its tiles of 128 inputs are large
        return {"num_warps": warps, "num_stages": self.stages, **self.extra, **cap}


def arithmetic(kind: str, target: Target) -> Arithmetic:
    """Warps and stages of the expert kernels, the same for every row count.

    On sm_90 168 registers let three programs share a multiprocessor, which hides the latency of the
    short matrix steps; eight warps took half as long again.
    """
    if target.backend == "hip":
        return Arithmetic(kind, 4, 2, target.fnuz, extra=target.options)
    capped = 168 if target.name == "sm_90" and kind == "fp8" else 0
    stages, asm = 2 if kind == "f32" else 4, target.backend == "cuda"
    return Arithmetic(kind, 4, stages, target.fnuz, asm, capped)


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
    few = count < experts
    step = max(16, pow2(count)) if few else min(4096, pow2(count))
    if (
        scales is not None
        and folded.shape_for(tile_n, slots, folded.streams(256, scales.shape[1] * 128)).up.unroll
    ):
        scales = None
    blocks = 0 if scales is None else scales.shape[1]
    ts = order if scales is None else scales.new_empty(blocks, slots * tile_n)
    plan_kernel[(cdiv(experts, EACH.value),)](
        ids, ids if valid is None else valid, order if scales is None else scales, order, owner, ts, count,
        slots, TOP=ids.shape[-1], EXPERTS=experts, BINS=1 << experts.bit_length() if few else 0,
        TILE_N=tile_n, STEP=step, MASKED=valid is not None, BLOCKS=blocks, LANES=pow2(max(blocks, 1)),
        num_warps=4 if step <= 512 else 16,
    )  # fmt: skip
    return Tiles(order, owner, None if scales is None else ts)


def scales_of_lines(scales: Tensor, tiles: Tiles, top: int) -> Tensor:
    """Rows' scales [R, K / 128] as [K / 128, lines]; the plan has them where the launch was foreseen."""
    if tiles.scales is not None:
        return tiles.scales
    index = tiles.order.clamp(0, scales.shape[0] * top - 1)  # lines of no expert hold anything
    return dense(scales[(index // top).long()].t())


def ranges(k: int) -> int:
    """Ranges of K of an expert product; depends on the weight's shape alone."""
    blocks = k // 128
    return 2 if blocks % 2 == 0 and blocks >= 4 else 1


def side_by_side(how: Arithmetic, splits: int, tiles: int) -> bool:
    """Whether ranges of K get programs of their own: always where one program for all needs too many registers."""
    return splits > 1 and (how.capped > 0 or tiles < FEW)


def up(
    w: Grouped | folded.Weights,
    how: Arithmetic,
    x: Tensor,
    xs: Tensor,
    weights: Tensor,
    tiles: Tiles,
    top: int,
    limit: float,
    scratch: Scratch,
    *,
    official: bool,
    round_h: bool,
    parallel: bool | None = None,
    shape: folded.Shape | None = None,
) -> tuple[Tensor, Tensor]:
    """(h [lines, INNER], its scales for ``down``) of prepared rows x [R, K].

    See ``up_kernel`` and ``folded_up_kernel``; folded weights take their rows' scales from the tiles.
    """
    order, owner = tiles.order, tiles.owner
    if isinstance(w, folded.Weights):
        assert official and round_h, "folded weights are of official numerics"
        part = (shape or folded.shape_for(tiles.n, owner.shape[0], folded.streams(w.m, w.k))).up
        scales = xs if part.unroll else scales_of_lines(xs, tiles, top)
        return folded.up(w, part, x, scales, weights, order, owner, top, limit, scratch, how.asm)
    inner, lines, splits = w.m // 2, order.shape[0], ranges(w.k)
    h = torch.empty(lines, inner, dtype=x.dtype, device=x.device)
    hs = torch.empty(lines, inner // 128, dtype=torch.float32, device=x.device)
    grid: tuple[int, ...] = (owner.shape[0], inner // 128)
    if parallel is None:
        parallel = side_by_side(how, splits, grid[0] * grid[1])
    sums = torch.empty(splits if parallel else 0, lines, w.m, dtype=torch.float32, device=x.device)
    up_kernel[(*grid, splits) if parallel else grid](
        w.data, w.scale, x, xs, order, owner, weights, h, hs, sums, scratch.arrived, lines, limit, K=w.k,
        INNER=inner, TOP=top, SPLITS=splits, PARALLEL=parallel, TILE_N=lines // owner.shape[0],
        FORMAT=w.format, KIND=how.kind, OFFICIAL=official, ROUND=round_h, FNUZ=how.fnuz, ASM=how.asm,
        **how.options(w.format, lines // owner.shape[0]),
    )  # fmt: skip
    return h, hs


def down(
    w: Grouped | folded.Weights,
    how: Arithmetic,
    h: Tensor,
    hs: Tensor,
    tiles: Tiles,
    out: Tensor,
    scratch: Scratch,
    parallel: bool | None = None,
    shape: folded.Shape | None = None,
) -> Tensor:
    """Fill out [assignments, D]; see ``down_kernel`` and ``folded_down_kernel``, whose scales are hs transposed."""
    order, owner = tiles.order, tiles.owner
    if isinstance(w, folded.Weights):
        stream = how.kind == "fp8" and folded.streams(w.m, w.k)
        part = (shape or folded.shape_for(tiles.n, owner.shape[0], stream)).down
        return folded.down(w, part, how.kind, h, hs, order, owner, out, how.asm)
    lines, splits = order.shape[0], ranges(w.k)
    grid: tuple[int, ...] = (owner.shape[0], w.m // 128)
    if parallel is None:
        parallel = side_by_side(how, splits, grid[0] * grid[1])
    sums = torch.empty(splits if parallel else 0, lines, w.m, dtype=torch.float32, device=out.device)
    down_kernel[(*grid, splits) if parallel else grid](
        w.data, w.scale, h, hs, order, owner, out, sums, scratch.arrived, lines, D=out.shape[1], WIDE=w.m,
        K=w.k, SPLITS=splits, PARALLEL=parallel, TILE_N=lines // owner.shape[0], FORMAT=w.format,
        KIND=how.kind, FNUZ=how.fnuz, ASM=how.asm, **how.options(w.format, lines // owner.shape[0]),
    )  # fmt: skip
    return out


def combine(
    parts: Tensor, shared: Sequence[Tensor], rows: int, dtype: torch.dtype, valid: Tensor | None = None
) -> Tensor:
    """[R, D] of parts [R * k, D] and the shared experts' results [R, D]; zeros for rows that are not ``valid``."""
    d, top = parts.shape[1], parts.shape[0] // rows
    out = torch.empty(rows, d, dtype=dtype, device=parts.device)
    extra = shared[0] if len(shared) == 1 else torch.stack(list(shared)) if shared else parts
    step = min(1024, pow2(d))
    combine_kernel[(rows, cdiv(d, step))](
        parts, extra, parts if valid is None else valid, out, rows, D=d, TOP=top, SHARED=len(shared),
        STEP=step, MASKED=valid is not None, num_warps=4,
    )  # fmt: skip
    return out


def apply_swiglu(x: Tensor, limit: float, form: torch.dtype | None = None) -> Tensor:
    """[R, I] of [R, 2I] in the same dtype; ``form`` e4m3fn: with its quantised form for ``linear.quantised``."""
    rows, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
    also = form == torch.float8_e4m3fn and inner % 128 == 0
    q = torch.empty(rows, inner, dtype=torch.float8_e4m3fn, device=x.device) if also else out
    steps = torch.empty(rows, inner // 128, dtype=torch.float32, device=x.device) if also else out
    step = math.gcd(inner, 1024) if also else min(1024, pow2(inner))
    swiglu_kernel[(rows, cdiv(inner, step))](
        x, out, q, steps, rows, limit, INNER=inner, STEP=step, FORM=int(also), num_warps=4
    )
    if also:
        out.quantised_forms = {(inner, q.dtype): (q, steps)}  # type: ignore[attr-defined]
    return out


# ---- offline compilation ------------------------------------------------------------------
PLAN = {
    "ids": "*i64", "valid": "*i1", "xs": "*fp32", "order": "*i32", "owner": "*i32", "ts": "*fp32", "count": "i32",
    "slots": "i32",
}  # fmt: skip
SWIGLU = {
    "x": "*bf16", "out": "*bf16", "q": "*fp8", "steps": "*fp32", "rows": "i32", "limit": "fp32",
}  # fmt: skip
KERNELS: list[Spec] = [
    Spec(
        name="experts-plan",
        fn=plan_kernel,
        signature=PLAN,
        constexprs={
            "TOP": 6,
            "EXPERTS": 256,
            "BINS": 512,
            "TILE_N": 16,
            "STEP": 256,
            "MASKED": True,
            "BLOCKS": 32,
            "LANES": 32,
        },
        options={"num_warps": 4},
    ),
    Spec(
        name="experts-plan-many",
        fn=plan_kernel,
        signature=PLAN,
        constexprs={
            "TOP": 6,
            "EXPERTS": 256,
            "BINS": 0,
            "TILE_N": 64,
            "STEP": 4096,
            "MASKED": True,
            "BLOCKS": 32,
            "LANES": 32,
        },
        options={"num_warps": 16},
    ),
    Spec(
        name="swiglu",
        fn=swiglu_kernel,
        signature=SWIGLU,
        constexprs={"INNER": 2048, "STEP": 1024, "FORM": 1},
        options={"num_warps": 4},
    ),
    Spec(
        name="experts-combine",
        fn=combine_kernel,
        signature={"parts": "*bf16", "shared": "*bf16", "valid": "*i1", "out": "*bf16", "rows": "i32"},
        constexprs={"D": 4096, "TOP": 6, "SHARED": 1, "STEP": 1024, "MASKED": True},
        options={"num_warps": 4},
    ),
]
