"""Products of rows with weights that stay in their checkpoint formats.

Weights are the M operand of ``tl.dot`` and rows its N operand, so that one matrix
instruction family serves every row count. The K dimension is cut into
``splits`` ranges that depend on the weight's shape alone; their sums are added in
ascending order, by the last of several programs or by one program, with the
same bits. A tile of rows may have any width for the same reason: it changes
which rows share an instruction, not the order of a row's additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from firesteel.checkpoint.codecs import FP8_BLOCK, QTensor, scale_to_float
from firesteel.ops.triton import launch
from firesteel.ops.triton.launch import cdiv, kernel
from firesteel.ops.triton.spec import Spec
from firesteel.ops.triton.target import TARGETS, Target

GROUP = 128  # channels per activation scale and per step of K
TILE_M = 64  # outputs of one program: the least that a Hopper warp group multiplies
WANTED = 192  # programs that a short weight is cut into
WIDE_ENOUGH = 256  # programs that keep a device busy
COUNTERS = 1 << 16


# ---- weights --------------------------------------------------------------------------
@dataclass
class Weight:
    """A weight [n, k] on the device: ``data`` float8, bfloat16 or float32 [n, k].

    ``scale`` float32 [lines, ceil(k/128)] of FP8, one line per ``lines_of`` outputs; fnuz codes
    mean half and have theirs doubled. ``exact``: a float32 weight whose values are all bfloat16's.
    ``joined``: the first of several groups' weights knows all of them as one.
    """

    data: Tensor
    scale: Tensor | None
    lines_of: int
    exact: bool = False
    joined: Weight | None = None

    @property
    def weight(self) -> Tensor:
        """The dense data."""
        return self.data

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k)."""
        return self.data.shape[0], self.data.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        own = self.data.numel() * self.data.element_size()
        return own + (0 if self.scale is None else self.scale.numel() * 4)

    @property
    def splits(self) -> int:
        """Ranges of K: as many as give short weights enough programs, each of at least two blocks."""
        tiles, blocks, s = cdiv(self.shape[0], TILE_M), cdiv(self.shape[1], GROUP), 1
        while tiles * s < WANTED and blocks % (2 * s) == 0 and blocks // (2 * s) >= 2:
            s *= 2
        return s

    def narrow(self) -> Weight:
        """The same weight as bfloat16 if that is exact; made once, instead of the float32 form."""
        if self.exact and self.data.dtype == torch.float32:
            self.data = self.data.to(torch.bfloat16)
        return self


def to_fnuz(data: Tensor) -> Tensor:
    """e4m3fn codes as e4m3fnuz ones of half the value.

    The bits agree but for two: minus zero (0x80, NaN in fnuz) becomes zero, and NaN (0x7F, 0xFF) becomes 0x80.
    """
    code = data.view(torch.uint8)
    code = torch.where(code == 0x80, 0, torch.where((code & 0x7F) == 0x7F, 0x80, code))
    return code.view(torch.float8_e4m3fnuz)


def fp8_parts(weights: Sequence[QTensor], device: torch.device, target: Target) -> Weight:
    """Stacked FP8 weights; scales per 128 outputs where the parts' borders allow it, else per output."""
    aligned = all(w.shape[0] % FP8_BLOCK == 0 for w in weights[:-1])
    grids = []
    for w in weights:
        assert w.scale is not None
        grid = scale_to_float(w.scale.to(device))
        grids.append(grid if aligned else grid.repeat_interleave(FP8_BLOCK, 0)[: w.shape[0]])
    data = torch.cat([w.data.to(device) for w in weights])
    scale = torch.cat(grids).contiguous()
    if target.fnuz:
        data, scale = to_fnuz(data), scale * 2
    return Weight(data.contiguous(), scale, FP8_BLOCK if aligned else 1)


def dense_parts(weights: Sequence[QTensor], device: torch.device) -> Weight:
    """Stacked unquantised weights, bfloat16 if all of them are."""
    parts = [w.data.to(device) for w in weights]
    if all(p.dtype == torch.bfloat16 for p in parts):
        return Weight(torch.cat(parts).contiguous(), None, 1)
    data = torch.cat([p.to(torch.float32) for p in parts]).contiguous()
    return Weight(data, None, 1, exact=bool((data == data.to(torch.bfloat16).to(torch.float32)).all()))


# ---- activations ----------------------------------------------------------------------
@kernel("rows", "width")
def quantise_kernel(
    x,
    q,
    scale,
    rows,
    width,
    PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    STEP: tl.constexpr,
    FNUZ: tl.constexpr,
    GRID: tl.constexpr,
):
    """x [rows, width] to e4m3 q [rows, PADDED] with power-of-two scales float32 [rows, PADDED / 128].

    The scale 2^ceil(log2(max(amax, 1e-4) / 448)) is read off the float's bits:
    448 is 1.75 * 2^8. fnuz codes mean half, so that their scale is doubled.
    GRID: q holds bfloat16 values instead, scale included.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * STEP + tl.arange(0, STEP)
    k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    live = group < GROUPS
    v = tl.load(x + row * width + k, mask=k < width, other=0.0).to(tl.float32)
    bits = tl.maximum(tl.max(tl.abs(v), axis=1), 1e-4).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    step = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    code = tl.minimum(tl.maximum(v * inverse[:, None], -448.0), 448.0)
    code = tl.where(v != v, v, code)  # a clamp would hide NaN
    if GRID:
        value = code.to(tl.float8e4nv).to(tl.float32) * step[:, None]
        tl.store(q + row * PADDED + k, value.to(tl.bfloat16), mask=live[:, None])
    else:
        if FNUZ:
            code, step = code * 0.5, step * 2.0
        tl.store(q + row * PADDED + k, code.to(q.dtype.element_ty), mask=live[:, None])
        tl.store(scale + row * GROUPS + group, step, mask=live)


def quantise(x: Tensor, padded: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(q [R, padded], scales float32 [R, padded/128]) of x [R, K] by the official rule.

    ``dtype``: an e4m3 type, or bfloat16 for the rounded values themselves (scales then unwritten).
    """
    rows, width = x.shape
    groups = padded // GROUP
    step = min(8, launch.pow2(groups))
    q = torch.empty(rows, padded, dtype=dtype, device=x.device)
    scale = torch.empty(rows, groups, dtype=torch.float32, device=x.device)
    if rows:
        quantise_kernel[(rows, cdiv(groups, step))](
            x, q, scale, rows, width, PADDED=padded, GROUPS=groups, STEP=step,
            FNUZ=dtype == torch.float8_e4m3fnuz, GRID=dtype == torch.bfloat16, num_warps=4,
        )  # fmt: skip
    return q, scale


def fresh(x: Tensor) -> Tensor:
    """Mark a tensor that nobody will write to again: its quantised form is then made once."""
    x.quantised_forms = {}  # type: ignore[attr-defined]
    return x


def quantised(x: Tensor, padded: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``quantise``, remembered by ``fresh`` tensors."""
    forms = getattr(x, "quantised_forms", None)
    if forms is None:
        return quantise(launch.dense(x), padded, dtype)
    if (padded, dtype) not in forms:
        forms[padded, dtype] = quantise(launch.dense(x), padded, dtype)
    return forms[padded, dtype]


# ---- one product ------------------------------------------------------------------------
@kernel()
def range_sum(
    w,
    x,
    ws,
    xs,
    rm,
    rn,
    first,
    COUNT: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
    LINES: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Sum over COUNT blocks of 128 channels from block ``first``: float32 [TILE_M, TILE_N].

    w [*, K] lines rm; x [*, STRIDE] lines rn; scales of a block are read one block ahead by hand: only
    what feeds a dot gets pipelined, and a value carried over two iterations would stop that too.
    """
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    rk = tl.arange(0, 128)
    wp = w + rm.to(tl.int64)[:, None] * K + rk[None, :]
    xp = x + rn.to(tl.int64)[None, :] * STRIDE + rk[:, None]
    if LINES == 128:  # a tile of at most 128 aligned outputs has one scale: a scalar
        wsp = ws + (tl.min(rm, axis=0) // LINES) * BLOCKS
    else:
        wsp = ws + (rm // LINES) * BLOCKS
    xsp = xs + rn * BLOCKS
    last = first + COUNT - 1
    if SCALED:
        s = tl.load(wsp + first)
        if KIND != "f32":
            t = tl.load(xsp + first)
    for i in range(COUNT):
        block = first + i
        if K % 128 == 0:
            a = tl.load(wp + block * 128)
            b = tl.load(xp + block * 128)
        else:
            inside = block * 128 + rk < K
            a = tl.load(wp + block * 128, mask=inside[None, :], other=0.0)
            b = tl.load(xp + block * 128, mask=inside[:, None], other=0.0)
        if SCALED:
            ahead = tl.minimum(block + 1, last)
            s1 = tl.load(wsp + ahead)
            if KIND == "f32":
                acc += tl.dot(a.to(tl.float32), b, input_precision="ieee") * (
                    s if LINES == 128 else s[:, None]
                )
            else:
                t1 = tl.load(xsp + ahead)
                if KIND == "f16":
                    a, b = a.to(tl.float16), b.to(tl.float16)
                if LINES == 128:
                    acc += tl.dot(a, b) * (s * t)[None, :]
                else:
                    acc += tl.dot(a, b) * (s[:, None] * t[None, :])
                t = t1
            s = s1
        elif KIND == "f32":
            acc = tl.dot(a.to(tl.float32), b, acc, input_precision="ieee")
        else:
            acc = tl.dot(a, b, acc)
    return acc


@kernel("rows")
def linear_kernel(
    w,
    ws,
    x,
    xs,
    out,
    part,
    arrived,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
    LINES: tl.constexpr,
    GROUP_N: tl.constexpr,
    SPLITS: tl.constexpr,
    PARALLEL: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
):
    """out [rows, N] = x times w [N, K] transposed.

    KIND says what is multiplied: "fp8" and "f16" e4m3 x [rows, STRIDE] with xs float32 [rows, BLOCKS],
    "bf16" and "f32" values. SCALED: ws float32 [N / LINES, BLOCKS] belongs to w. Outputs
    g * GROUP_N ... use columns g * K ... of x. With PARALLEL every program sums one of SPLITS ranges
    of K into ``part`` float32 [SPLITS, rows, N] and the last one of a tile to arrive adds them.
    """
    tile, span = tl.program_id(0), tl.program_id(1)
    rm = tile * TILE_M + tl.arange(0, TILE_M)
    line = span * TILE_N + tl.arange(0, TILE_N)
    live = (rm < N)[:, None] & (line < rows)[None, :]
    at = line.to(tl.int64)[None, :] * N + rm[:, None]
    # lines past the end repeat the last one and are not stored
    wm = tl.minimum(rm, N - 1)
    rn = tl.minimum(line, rows - 1)
    x += tile * TILE_M // GROUP_N * K
    count: tl.constexpr = BLOCKS // SPLITS
    if PARALLEL:
        split = tl.program_id(2)
        acc = range_sum(
            w, x, ws, xs, wm, rn, split * count, count, K, STRIDE, BLOCKS, LINES, TILE_M, TILE_N, KIND, SCALED
        )
        plane = rows.to(tl.int64) * N
        tl.store(part + split * plane + at, acc, mask=live)
        tl.debug_barrier()  # all stores of this program stand before its arrival
        counter = arrived + tile * tl.num_programs(1) + span
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros((TILE_M, TILE_N), tl.float32)
            for other in range(SPLITS):
                total += tl.load(part + other * plane + at, mask=live, other=0.0, cache_modifier=".cg")
            tl.store(out + at, total.to(out.dtype.element_ty), mask=live)
            tl.store(counter, 0)
    else:
        total = tl.zeros((TILE_M, TILE_N), tl.float32)
        for split in range(SPLITS):
            total += range_sum(
                w, x, ws, xs, wm, rn, split * count, count, K, STRIDE, BLOCKS, LINES, TILE_M, TILE_N, KIND, SCALED
            )  # fmt: skip
        tl.store(out + at, total.to(out.dtype.element_ty), mask=live)


@dataclass(frozen=True)
class Shape:
    """How a product is launched for some row count; changes no bit."""

    tile_m: int
    tile_n: int
    warps: int
    stages: int
    parallel: bool


def shape_for(kind: str, n: int, splits: int, rows: int, target: Target) -> Shape:
    """Tile and distribution by row count; the numbers are measured ones of an H200.

    Rows are tiled as wide as leaves every multiprocessor two programs. Ranges of K run side
    by side while tiles are few; one program for all ranges holds two sums, hence its narrower tile.
    """
    if kind == "f32":
        tile, stages = min(32, max(16, launch.pow2(rows))), 2
    else:
        tile = min(128 if kind != "bf16" and target.name == "sm_90" else 64, max(16, launch.pow2(rows)))
        stages = 4 if tile == 128 else 3 if kind == "bf16" and tile == 64 else 5
    tiles_m = cdiv(n, TILE_M)
    if splits > 1:
        while tile > 16 and tiles_m * cdiv(rows, tile) * splits < WIDE_ENOUGH:
            tile //= 2
    parallel = splits > 1 and tiles_m * cdiv(rows, tile) < WIDE_ENOUGH // 2
    if splits > 1 and not parallel:
        tile = min(tile, 32 if target.name == "sm_100" else 64)
    if target.backend == "hip":
        return Shape(TILE_M, min(tile, 64), 4, 2, parallel)
    if kind == "fp8" and splits == 1 and tile == 16:
        return Shape(128, 16, 8, 5, False)
    return Shape(TILE_M, tile, 4, stages, parallel)


class Scratch:
    """Counters of arrivals on one device; every kernel leaves them at zero."""

    def __init__(self, device: torch.device):
        self.arrived = torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def product(
    x: Tensor,
    xs: Tensor | None,
    w: Weight,
    kind: str,
    dtype: torch.dtype,
    scratch: Scratch,
    target: Target,
    *,
    groups: int = 1,
    shape: Shape | None = None,
) -> Tensor:
    """x [R, groups * K] (prepared for ``kind``) times w^T: [R, n] of ``dtype``.

    With ``groups`` each n/groups outputs see their own K columns of x; n/groups is then a multiple of 64.
    """
    (n, k), rows = w.shape, x.shape[0]
    out = torch.empty(rows, n, dtype=dtype, device=x.device)
    if rows == 0:
        return out
    splits = w.splits
    shape = shape or shape_for(kind, n, splits, rows, target)
    tiles = (cdiv(n, shape.tile_m), cdiv(rows, shape.tile_n))
    part = out
    if shape.parallel:
        assert tiles[0] * tiles[1] <= COUNTERS, "more tiles than counters"
        part = torch.empty(splits, rows, n, dtype=torch.float32, device=x.device)
    unused = scratch.arrived
    options: dict[str, Any] = {"num_warps": shape.warps, "num_stages": shape.stages, **target.options}
    linear_kernel[(*tiles, splits) if shape.parallel else tiles](
        w.data, unused if w.scale is None else w.scale, x, unused if xs is None else xs, out, part,
        scratch.arrived, rows, N=n, K=k, STRIDE=x.shape[1], BLOCKS=cdiv(k, GROUP), LINES=w.lines_of,
        GROUP_N=n // groups, SPLITS=splits, PARALLEL=shape.parallel, TILE_M=shape.tile_m,
        TILE_N=shape.tile_n, KIND=kind, SCALED=w.scale is not None, **options,
    )  # fmt: skip
    return out


# ---- offline compilation ------------------------------------------------------------------
def _linear_spec(name: str, kind: str, n: int, k: int, tile_n: int, parallel: bool) -> Spec:
    data = {"fp8": "*fp8", "bf16": "*bf16", "f32": "*fp32"}[kind]
    blocks, scaled = k // GROUP, kind == "fp8"
    return Spec(
        name=name,
        fn=linear_kernel,
        signature={
            "w": data, "ws": "*fp32", "x": data, "xs": "*fp32", "out": "*bf16", "part": "*fp32",
            "arrived": "*i32", "rows": "i32",
        },
        constexprs={
            "N": n, "K": k, "STRIDE": k, "BLOCKS": blocks, "LINES": 128, "GROUP_N": n, "SPLITS": 4,
            "PARALLEL": parallel, "TILE_M": TILE_M, "TILE_N": tile_n, "KIND": kind, "SCALED": scaled,
        },
        options={"num_warps": 4, "num_stages": 4},
        targets=("sm_90",) if tile_n == 128 else tuple(t for t in TARGETS if t != "sm_100" or tile_n < 64 or parallel),
        overrides={t: {"num_stages": 2, "matrix_instr_nonkdim": 16} for t in ("gfx950", "gfx942")},
    )  # fmt: skip


KERNELS: list[Spec] = [
    Spec(
        name="quantise",
        fn=quantise_kernel,
        signature={"x": "*bf16", "q": "*fp8", "scale": "*fp32", "rows": "i32", "width": "i32"},
        constexprs={"PADDED": 4096, "GROUPS": 32, "STEP": 8, "FNUZ": False, "GRID": False},
        options={"num_warps": 4},
        overrides={"gfx942": {"FNUZ": True}},
    ),
    *(
        _linear_spec(f"linear-{kind}-{tile_n}{'-split' if parallel else ''}", kind, 4096, 8192, tile_n, parallel)
        for kind, tile_n, parallel in (
            ("fp8", 16, True), ("fp8", 64, True), ("fp8", 128, True), ("fp8", 32, False), ("fp8", 64, False),
            ("bf16", 16, True), ("bf16", 64, False), ("f32", 16, True),
        )
    ),
]  # fmt: skip
