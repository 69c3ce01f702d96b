"""Routed experts: weights of every hit expert read once, rows grouped on the device.

Rows are sorted by expert into tiles of TILE_N lines; a tile belongs to one expert
and is padded. Grids have the worst-case size and programs beyond the last tile
leave at once, so nothing waits for the host. A row's result depends on its own
line of a tile alone, and its experts are added in ascending id in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import triton.language as tl
from torch import Tensor

from firesteel.ops.triton.experts import down_kernel, swiglu, up_kernel
from firesteel.ops.triton.launch import cdiv, kernel, pow2
from firesteel.ops.triton.linear import Scratch
from firesteel.ops.triton.spec import Spec
from firesteel.ops.triton.target import Target

FEW = 512  # programs below which ranges of K run side by side


# ---- plan -----------------------------------------------------------------------------
@kernel("count", "slots")
def plan_kernel(
    ids,
    order,
    owner,
    count,
    slots,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TILE_N: tl.constexpr,
    STEP: tl.constexpr,
):
    """Sort assignments by expert; program e places those of expert e.

    ids int64 [count] (expert of assignment row * k + place); order int32 [slots * TILE_N]:
    assignment of each line, -1 for padding; owner int32 [slots]: expert of each tile,
    -1 beyond the last one. BINS > EXPERTS: the last bin takes what lies past the end.
    """
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    lane = tl.arange(0, STEP)
    load = tl.zeros((BINS,), tl.int32)
    for at in range(0, count, STEP):
        i = at + lane
        load += tl.histogram(tl.load(ids + i, mask=i < count, other=BINS - 1).to(tl.int32), BINS)
    load = tl.where(bins < EXPERTS, load, 0)
    tiles = (load + TILE_N - 1) // TILE_N
    first = tl.sum(tl.where(bins < expert, tiles, 0), axis=0)
    mine = tl.sum(tl.where(bins == expert, tiles, 0), axis=0)
    wanted = tl.sum(tl.where(bins == expert, load, 0), axis=0)
    if mine > 0:
        placed = 0
        for at in range(0, count, STEP):
            i = at + lane
            hit = (tl.load(ids + i, mask=i < count, other=-1).to(tl.int32) == expert).to(tl.int32)
            rank = placed + tl.cumsum(hit, axis=0) - 1
            tl.store(order + first * TILE_N + rank, i, mask=hit != 0)
            placed += tl.sum(hit, axis=0)
        last = (mine - 1) * TILE_N + tl.arange(0, TILE_N)
        tl.store(order + first * TILE_N + last, tl.full((TILE_N,), -1, tl.int32), mask=last >= wanted)
        for tile in range(mine):
            tl.store(owner + first + tile, expert)
    if expert == EXPERTS - 1:
        for at in range(first + mine, slots, STEP):
            tl.store(owner + at + lane, tl.full((STEP,), -1, tl.int32), mask=at + lane < slots)


@kernel("rows", "limit")
def swiglu_kernel(x, out, rows, limit, INNER: tl.constexpr, STEP: tl.constexpr):
    """out [rows, INNER] = SwiGLU of x [rows, 2 * INNER], gate first: of the shared expert."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * STEP + tl.arange(0, STEP)
    live = at < INNER
    gate = tl.load(x + row * (2 * INNER) + at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * INNER) + INNER + at, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * INNER + at, swiglu(gate, up, limit).to(out.dtype.element_ty), mask=live)


@kernel("rows")
def combine_kernel(
    parts, shared, out, rows, D: tl.constexpr, TOP: tl.constexpr, SHARED: tl.constexpr, STEP: tl.constexpr
):
    """out [rows, D] = parts [rows, TOP, D] in ascending place, then shared [SHARED, rows, D], summed in float32."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * STEP + tl.arange(0, STEP)
    live = at < D
    acc = tl.load(parts + row * (TOP * D) + at, mask=live, other=0.0).to(tl.float32)
    for j in tl.static_range(1, TOP):
        acc += tl.load(parts + row * (TOP * D) + j * D + at, mask=live, other=0.0).to(tl.float32)
    for j in tl.static_range(SHARED):
        acc += tl.load(shared + (j * rows.to(tl.int64) + row) * D + at, mask=live, other=0.0).to(tl.float32)
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

    ``capped``: registers that a thread may have in tiles of 16 lines of FP4; ranges of K then always
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


def tile_of(rows: int, top: int, experts: int) -> int:
    """Lines per tile: about what an expert gets, so that its weights are read once; changes no bit."""
    return 16 if cdiv(rows * top, experts) <= 16 else 32


def plan(ids: Tensor, experts: int, tile_n: int) -> tuple[Tensor, Tensor]:
    """(order int32 [slots * tile_n], owner int32 [slots]) of ids int64 [R, k]; see ``plan_kernel``."""
    count = ids.numel()
    slots = min(count, experts) + count // tile_n
    order = torch.empty(slots * tile_n, dtype=torch.int32, device=ids.device)
    owner = torch.empty(slots, dtype=torch.int32, device=ids.device)
    plan_kernel[(experts,)](
        ids, order, owner, count, slots, EXPERTS=experts, BINS=1 << experts.bit_length(), TILE_N=tile_n,
        STEP=min(1024, max(16, pow2(count))), num_warps=4,
    )  # fmt: skip
    return order, owner


def ranges(k: int) -> int:
    """Ranges of K of an expert product; depends on the weight's shape alone."""
    blocks = k // 128
    return 2 if blocks % 2 == 0 and blocks >= 4 else 1


def side_by_side(how: Arithmetic, splits: int, tiles: int) -> bool:
    """Whether ranges of K get programs of their own: always where one program for all needs too many registers."""
    return splits > 1 and (how.capped > 0 or tiles < FEW)


def up(
    w: Grouped,
    how: Arithmetic,
    x: Tensor,
    xs: Tensor,
    weights: Tensor,
    tiles: tuple[Tensor, Tensor],
    top: int,
    limit: float,
    scratch: Scratch,
    *,
    official: bool,
    round_h: bool,
    parallel: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(h [lines, INNER], its scales) of prepared rows x [R, K]; see ``up_kernel``."""
    order, owner = tiles
    inner, lines, splits = w.m // 2, order.shape[0], ranges(w.k)
    h = torch.empty(lines, inner, dtype=x.dtype, device=x.device)
    hs = torch.empty(lines, inner // 128, dtype=torch.float32, device=x.device)
    grid: tuple[int, ...] = (owner.shape[0], inner // 128)
    if parallel is None:
        parallel = side_by_side(how, splits, grid[0] * grid[1])
    part = torch.empty(splits if parallel else 0, lines, w.m, dtype=torch.float32, device=x.device)
    up_kernel[(*grid, splits) if parallel else grid](
        w.data, w.scale, x, xs, order, owner, weights, h, hs, part, scratch.arrived, lines, limit, K=w.k,
        INNER=inner, TOP=top, SPLITS=splits, PARALLEL=parallel, TILE_N=lines // owner.shape[0],
        FORMAT=w.format, KIND=how.kind, OFFICIAL=official, ROUND=round_h, FNUZ=how.fnuz, ASM=how.asm,
        **how.options(w.format, lines // owner.shape[0]),
    )  # fmt: skip
    return h, hs


def down(
    w: Grouped,
    how: Arithmetic,
    h: Tensor,
    hs: Tensor,
    tiles: tuple[Tensor, Tensor],
    out: Tensor,
    scratch: Scratch,
    parallel: bool | None = None,
) -> Tensor:
    """Fill out [assignments, D]; see ``down_kernel``."""
    order, owner = tiles
    lines, splits = order.shape[0], ranges(w.k)
    grid: tuple[int, ...] = (owner.shape[0], w.m // 128)
    if parallel is None:
        parallel = side_by_side(how, splits, grid[0] * grid[1])
    part = torch.empty(splits if parallel else 0, lines, w.m, dtype=torch.float32, device=out.device)
    down_kernel[(*grid, splits) if parallel else grid](
        w.data, w.scale, h, hs, order, owner, out, part, scratch.arrived, lines, D=out.shape[1], WIDE=w.m,
        K=w.k, SPLITS=splits, PARALLEL=parallel, TILE_N=lines // owner.shape[0], FORMAT=w.format,
        KIND=how.kind, FNUZ=how.fnuz, ASM=how.asm, **how.options(w.format, lines // owner.shape[0]),
    )  # fmt: skip
    return out


def combine(parts: Tensor, shared: Sequence[Tensor], rows: int, dtype: torch.dtype) -> Tensor:
    """[R, D] of parts [R * k, D] and the shared experts' results [R, D]."""
    d, top = parts.shape[1], parts.shape[0] // rows
    out = torch.empty(rows, d, dtype=dtype, device=parts.device)
    extra = shared[0] if len(shared) == 1 else torch.stack(list(shared)) if shared else parts
    step = min(1024, pow2(d))
    combine_kernel[(rows, cdiv(d, step))](
        parts, extra, out, rows, D=d, TOP=top, SHARED=len(shared), STEP=step, num_warps=4
    )
    return out


def apply_swiglu(x: Tensor, limit: float) -> Tensor:
    """[R, I] of [R, 2I] in the same dtype."""
    rows, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty(rows, inner, dtype=x.dtype, device=x.device)
    step = min(1024, pow2(inner))
    swiglu_kernel[(rows, cdiv(inner, step))](x, out, rows, limit, INNER=inner, STEP=step, num_warps=4)
    return out


# ---- offline compilation ------------------------------------------------------------------
KERNELS: list[Spec] = [
    Spec(
        name="experts-plan",
        fn=plan_kernel,
        signature={"ids": "*i64", "order": "*i32", "owner": "*i32", "count": "i32", "slots": "i32"},
        constexprs={"EXPERTS": 256, "BINS": 512, "TILE_N": 16, "STEP": 1024},
        options={"num_warps": 4},
    ),
    Spec(
        name="swiglu",
        fn=swiglu_kernel,
        signature={"x": "*bf16", "out": "*bf16", "rows": "i32", "limit": "fp32"},
        constexprs={"INNER": 2048, "STEP": 1024},
        options={"num_warps": 4},
    ),
    Spec(
        name="experts-combine",
        fn=combine_kernel,
        signature={"parts": "*bf16", "shared": "*bf16", "out": "*bf16", "rows": "i32"},
        constexprs={"D": 4096, "TOP": 6, "SHARED": 1, "STEP": 1024},
        options={"num_warps": 4},
    ),
]
