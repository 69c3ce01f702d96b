"""Products of rows with weights that stay in their checkpoint formats: what is held, prepared and launched.

The kernels, and the order of additions that all of them keep, are in ``products``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from firesteel.checkpoint.codecs import FP8_BLOCK, QTensor, scale_to_float
from firesteel.ops.triton import crossed, piped
from firesteel.ops.triton.activations import GROUP as GROUP
from firesteel.ops.triton.activations import fresh as fresh
from firesteel.ops.triton.activations import quantise as quantise
from firesteel.ops.triton.activations import quantise_kernel as quantise_kernel
from firesteel.ops.triton.activations import quantised as quantised
from firesteel.ops.triton.launch import cdiv, pow2
from firesteel.ops.triton.products import linear_kernel as linear_kernel
from firesteel.ops.triton.products import pair_kernel, wide_kernel
from firesteel.ops.triton.products import range_sum as range_sum
from firesteel.ops.triton.spec import Spec
from firesteel.ops.triton.target import Target

TILE_M = 64  # outputs of one program: the least that a Hopper warp group multiplies
WANTED = 192  # programs that a short weight is cut into ...
ENOUGH = 128  # ... if its tiles are fewer than these
WIDE_ENOUGH = 256  # programs that keep a device busy
COUNTERS = 1 << 16


# ---- weights --------------------------------------------------------------------------
@dataclass
class Weight:
    """A weight [n, k] on the device: ``data`` float8, bfloat16 or float32 [n, k].

    ``scale`` float32 [lines, ceil(k/128)] of FP8, one line per ``lines_of`` outputs; fnuz codes
    mean half and have theirs doubled. ``exact``: a float32 weight whose values are all bfloat16's.
    ``joined``: the first of several groups' weights knows all of them as one. ``ranges``: of K, if not by
    the shape. ``group``: what shares a launch with this weight (see ``together``).
    """

    data: Tensor
    scale: Tensor | None
    lines_of: int
    exact: bool = False
    joined: Weight | None = None
    ranges: int | None = None
    group: Any = None

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
        if self.ranges is not None:
            return self.ranges
        tiles, blocks, s = cdiv(self.shape[0], TILE_M), cdiv(self.shape[1], GROUP), 1
        while tiles < ENOUGH and tiles * s < WANTED and blocks % (2 * s) == 0 and blocks // (2 * s) >= 2:
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
    ranges = piped.ranges_for(*data.shape) if target.name == "sm_90" and aligned else None
    return Weight(data.contiguous(), scale, FP8_BLOCK if aligned else 1, ranges=ranges)


def dense_parts(weights: Sequence[QTensor], device: torch.device) -> Weight:
    """Stacked unquantised weights, bfloat16 if all of them are."""
    parts = [w.data.to(device) for w in weights]
    if all(p.dtype == torch.bfloat16 for p in parts):
        return Weight(torch.cat(parts).contiguous(), None, 1)
    data = torch.cat([p.to(torch.float32) for p in parts]).contiguous()
    return Weight(data, None, 1, exact=bool((data == data.to(torch.bfloat16).to(torch.float32)).all()))


# ---- one product ------------------------------------------------------------------------
@dataclass(frozen=True)
class Shape:
    """How a product is launched for some row count; changes no bit.

    ``parallel``: ranges of K by programs of their own, whose sums are read ``at_once`` at a time. ``wide``:
    by tensor descriptors, in steps of ``step`` channels; ``pair``: two sums of 64 outputs in a program;
    ``pipe``, ``cross``: in the form of ``piped`` or of ``crossed``, which the rest then only repeats.
    """

    tile_m: int
    tile_n: int
    warps: int
    stages: int
    parallel: bool = False
    wide: bool = False
    step: int = GROUP
    pair: bool = False
    at_once: int = 1
    pipe: piped.Pipe | None = None
    cross: crossed.Cross | None = None


def wide_shape(kind: str, w: Weight, rows: int) -> Shape | None:
    """For many rows on Hopper; three programs of FP8 share a multiprocessor and cover each other's waits."""
    (n, k), flat = w.shape, w.lines_of == GROUP or kind == "bf16"
    if rows <= 64 or k % GROUP or not flat:
        return None
    if kind == "fp8":
        pairs = cdiv(n, GROUP) * cdiv(rows, 128)
        if w.splits == 1 and pairs >= WIDE_ENOUGH:
            return Shape(GROUP, 128, 4, 3, pair=True)
        tiles = cdiv(n, TILE_M) * cdiv(rows, 128)
        return Shape(TILE_M, 128, 4, 3, w.splits > 1 and tiles < WIDE_ENOUGH // 2, wide=True)
    if kind == "bf16" and w.splits == 1 and rows > 128:
        return Shape(128, 256 if rows > 256 else 128, 8, 4, wide=True, step=64)
    return None


def shape_for(kind: str, w: Weight, rows: int, target: Target, groups: int = 1) -> Shape:
    """Tile and distribution by row count; the numbers are measured ones of an H200.

    Rows are tiled as wide as leaves every multiprocessor two programs. Ranges of K run side
    by side while tiles are few; one program for all ranges holds two sums, hence its narrower tile.
    """
    if target.name == "sm_90":
        flat = kind == "bf16" or (kind == "fp8" and w.lines_of == GROUP)
        if flat and (cross := crossed.cross_for(kind, *w.shape, w.splits, rows, groups)) is not None:
            return Shape(GROUP, cross.rows, 4, cross.stages, cross.side > 1, cross=cross)
        if flat and (pipe := piped.pipe_for(kind, *w.shape, w.splits, rows, groups)) is not None:
            return Shape(pipe.m, pipe.n + pipe.more, 4, pipe.stages, pipe.side > 1, pipe=pipe)
        if (shape := wide_shape(kind, w, rows)) is not None:
            return shape
    splits, tiles = w.splits, cdiv(w.shape[0], TILE_M)
    if kind == "f32":
        tile, stages = 16, 2  # wider tiles of fused multiply-adds do not fit the registers
    else:
        tile = min(64, max(16, pow2(rows)))
        stages = 3 if kind == "bf16" and tile == 64 else 5
    if splits > 1:
        while tile > 16 and tiles * cdiv(rows, tile) * splits < WIDE_ENOUGH:
            tile //= 2
    parallel = splits > 1 and tiles * cdiv(rows, tile) < WIDE_ENOUGH // 2
    if splits > 1 and not parallel and target.name == "sm_100":
        tile = min(tile, 32)
    if target.backend == "hip":
        return Shape(TILE_M, tile, 4, 2, parallel)
    if kind == "fp8" and splits == 1 and tile == 16:
        return Shape(128, 16, 8, 5)
    return Shape(TILE_M, tile, 4, stages, parallel)


class Scratch:
    """Counters of arrivals on one device; every kernel leaves them at zero."""

    def __init__(self, device: torch.device):
        self.arrived = torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def codes(
    x: Tensor, w: Weight, kind: str, scratch: Scratch, target: Target, groups: int
) -> tuple[Tensor, Tensor] | None:
    """``quantised`` of ``product`` in bfloat16, made by the product itself; None where its form cannot."""
    rows, (n, _) = x.shape[0], w.shape
    if kind != "bf16" or rows == 0 or target.fp8 != torch.float8_e4m3fn:
        return None
    shape = shape_for(kind, w, rows, target, groups)
    pipe, cross = shape.pipe, shape.cross
    if cross is None and (pipe is None or pipe.m != 256 or pipe.more or w.splits > 1):
        return None
    q = torch.empty(rows, n, dtype=target.fp8, device=x.device)
    scale = torch.empty(rows, n // GROUP, dtype=torch.float32, device=x.device)
    if cross is not None:
        crossed.launch(w.data, None, x, None, q, scratch.arrived, cross, w.splits, groups=groups, exact=scale)
        return q, scale
    assert pipe is not None
    piped.launch(None, (w.data, x), q, scratch.arrived, pipe, splits=(1, 1), groups=groups, exact=scale)
    return q, scale


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
    shape = shape or shape_for(kind, w, rows, target, groups)
    if shape.cross is not None:
        assert kind != "f32", "float32 has no matrix instruction"
        crossed.launch(w.data, w.scale, x, xs, out, scratch.arrived, shape.cross, w.splits, groups=groups)
        return out
    if shape.pipe is not None:
        assert kind != "f32", "float32 has no matrix instruction"
        piped.launch(
            None if xs is None or w.scale is None else (w.data, w.scale, x, xs), (w.data, x) if xs is None else None,
            out, scratch.arrived, shape.pipe, splits=(w.splits, w.splits), groups=groups,
        )  # fmt: skip
        return out
    tiles = (cdiv(n, shape.tile_m), cdiv(rows, shape.tile_n))
    options: dict[str, Any] = {"num_warps": shape.warps, "num_stages": shape.stages, **target.options}
    unused = scratch.arrived
    scale, steps = unused if w.scale is None else w.scale, unused if xs is None else xs
    part, splits = out, w.splits if shape.parallel else 1
    if shape.parallel:
        assert tiles[0] * tiles[1] <= COUNTERS, "more tiles than counters"
        part = torch.empty(splits, rows, n, dtype=torch.float32, device=x.device)
    if shape.pair:
        assert kind == "fp8" and groups == 1 and w.splits == 1, "no room for a third sum"
        pair_kernel[(tiles[0] * tiles[1],)](
            TensorDescriptor.from_tensor(w.data, [64, GROUP]), scale,
            TensorDescriptor.from_tensor(x, [shape.tile_n, GROUP]), steps, out, rows, tiles[1], N=n, K=k,
            TILE_N=shape.tile_n, **options,
        )  # fmt: skip
        return out
    if shape.wide:
        wide_kernel[(tiles[0] * tiles[1], splits)](
            TensorDescriptor.from_tensor(w.data, [shape.tile_m, shape.step]), scale,
            TensorDescriptor.from_tensor(x, [shape.tile_n, shape.step]), steps, out, part, scratch.arrived,
            rows, tiles[0], N=n, K=k, GROUP_N=n // groups, SPLITS=w.splits, PARALLEL=shape.parallel,
            TILE_M=shape.tile_m, TILE_N=shape.tile_n, STEP=shape.step, KIND=kind,
            AT_ONCE=shape.at_once, **options,
        )  # fmt: skip
        return out
    linear_kernel[(*tiles, splits) if shape.parallel else tiles](
        w.data, scale, x, steps, out, part, scratch.arrived, rows, N=n, K=k, STRIDE=x.shape[1],
        BLOCKS=cdiv(k, GROUP), LINES=w.lines_of, GROUP_N=n // groups, SPLITS=w.splits,
        PARALLEL=shape.parallel, TILE_M=shape.tile_m, TILE_N=shape.tile_n, KIND=kind,
        SCALED=w.scale is not None, AT_ONCE=shape.at_once, **options,
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
            "AT_ONCE": 1,
        },
        options={"num_warps": 4, "num_stages": 4},
        overrides={t: {"num_stages": 2, "matrix_instr_nonkdim": 16} for t in ("gfx950", "gfx942")},
    )  # fmt: skip


def _wide_spec(
    kind: str, shape: tuple[int, int, int], warps: int, stages: int, splits: int, parallel: bool
) -> Spec:
    tile_m, tile_n, step = shape
    element = {"fp8": "fp8e4nv", "bf16": "bf16"}[kind]
    return Spec(
        name=f"linear-{kind}-wide{f'-{splits}' if splits > 1 else ''}{'-split' if parallel else ''}",
        fn=wide_kernel,
        signature={
            "w": f"tensordesc<{element}[{tile_m}, {step}]>", "ws": "*fp32",
            "x": f"tensordesc<{element}[{tile_n}, {step}]>", "xs": "*fp32", "out": "*bf16", "part": "*fp32",
            "arrived": "*i32", "rows": "i32", "tiles": "i32",
        },
        constexprs={
            "N": 4096, "K": 8192, "GROUP_N": 4096, "SPLITS": splits, "PARALLEL": parallel, "TILE_M": tile_m,
            "TILE_N": tile_n, "STEP": step, "KIND": kind, "AT_ONCE": 1,
        },
        options={"num_warps": warps, "num_stages": stages},
        targets=("sm_90",),
    )  # fmt: skip


def _pair_spec() -> Spec:
    return Spec(
        name="linear-fp8-pair",
        fn=pair_kernel,
        signature={
            "w": "tensordesc<fp8e4nv[64, 128]>", "ws": "*fp32", "x": "tensordesc<fp8e4nv[128, 128]>", "xs": "*fp32",
            "out": "*bf16", "rows": "i32", "spans": "i32",
        },
        constexprs={"N": 32768, "K": 1024, "TILE_N": 128},
        options={"num_warps": 4, "num_stages": 3},
        targets=("sm_90",),
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
            ("fp8", 16, True), ("fp8", 64, True), ("fp8", 32, False), ("bf16", 16, True), ("bf16", 64, True),
            ("bf16", 32, False), ("f32", 16, True),
        )
    ),
    _wide_spec("fp8", (64, 128, 128), 4, 3, 1, False),
    _wide_spec("fp8", (64, 128, 128), 4, 3, 4, False),
    _wide_spec("fp8", (64, 128, 128), 4, 3, 4, True),
    _wide_spec("bf16", (128, 256, 64), 8, 4, 1, False),
    _pair_spec(),
    *piped.KERNELS,
    *crossed.KERNELS,
    piped.spec("linear-bf16-piped-codes", 0, 8192, 4096, 1, piped.MANY, 8, out="*fp8"),
    piped.spec("linear-bf16-piped-router-512", 0, 256, 4096, 4, piped.Pipe(64, 64, stages=12, side=4), out="*fp32"),
    piped.spec("linear-bf16-piped-router-more", 0, 256, 4096, 4, piped.Pipe(64, 128, stages=8, side=2), out="*fp32"),
]  # fmt: skip
