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
from firesteel.ops.triton.launch import begin, cdiv, kernel, pow2
from firesteel.ops.triton.linear import Scratch
from firesteel.ops.triton.plan import KERNELS as PLANS
from firesteel.ops.triton.plan import Tiles as Tiles  # callers find these here too
from firesteel.ops.triton.plan import plan as plan
from firesteel.ops.triton.plan import scales_of_lines
from firesteel.ops.triton.plan import tile_of as tile_of
from firesteel.ops.triton.rounding import store_form
from firesteel.ops.triton.spec import Spec
from firesteel.ops.triton.target import Target

FEW = 512  # programs below which ranges of K run side by side


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
        scales = xs if part.by_rows else scales_of_lines(xs, tiles, top)
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
SWIGLU = {
    "x": "*bf16", "out": "*bf16", "q": "*fp8", "steps": "*fp32", "rows": "i32", "limit": "fp32",
}  # fmt: skip
KERNELS: list[Spec] = [
    *PLANS,
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
