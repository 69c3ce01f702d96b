"""Activations as FP8 products take them: e4m3 with a power-of-two scale per 128 channels."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from firesteel.ops.triton import launch
from firesteel.ops.triton.launch import begin, cdiv, kernel

GROUP = 128  # channels per activation scale and per step of K


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
    begin()
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
    """Mark a tensor that nobody will write to again: its quantised form is then made once.

    Forms that its producer wrote beside it stay known.
    """
    if not hasattr(x, "quantised_forms"):
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
