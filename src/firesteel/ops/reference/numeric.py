"""Rounding, norms and rotations in plain torch; every function works row by row."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
AMAX_FLOOR = 1e-4  # of the official activation quantiser


def bf16(x: Tensor) -> Tensor:
    """Round float32 values to the bf16 grid (nearest even), kept as float32."""
    return x.to(torch.bfloat16).to(torch.float32)


def pow2_scale(amax: Tensor, top: float) -> Tensor:
    """2^ceil(log2(amax / top)), exact: frexp gives amax/top = m * 2^e, m in [0.5, 1)."""
    mantissa, exponent = torch.frexp(amax / top)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(amax), exponent)


def e4m3_groups(x: Tensor, group: int) -> Tensor:
    """Round the last dim to e4m3 with one power-of-two scale per ``group`` values.

    A last group may be shorter. Values stay float32.
    """
    n = x.shape[-1]
    pad = -n % group
    padded = torch.nn.functional.pad(x, (0, pad)) if pad else x
    blocks = padded.unflatten(-1, (-1, group))
    scale = pow2_scale(blocks.abs().amax(-1, keepdim=True).clamp_min(AMAX_FLOOR), E4M3_MAX)
    q = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    return (q * scale).flatten(-2)[..., :n]


def e2m1(x: Tensor) -> Tensor:
    """Round to the E2M1 grid (0, .5, 1, 1.5, 2, 3, 4, 6), ties to the even code."""
    a = x.abs().clamp_max(E2M1_MAX)
    step = torch.where(a < 2.0, 0.5, torch.where(a < 4.0, 1.0, 2.0))
    return torch.copysign(torch.round(a / step) * step, x)


def e2m1_groups(x: Tensor, group: int = 32) -> Tensor:
    """Round the last dim to E2M1 with one power-of-two scale per ``group`` values."""
    n = x.shape[-1]
    pad = -n % group
    padded = torch.nn.functional.pad(x, (0, pad)) if pad else x
    blocks = padded.unflatten(-1, (-1, group))
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-126)
    scale = pow2_scale(amax, E2M1_MAX)
    return (e2m1(blocks / scale) * scale).flatten(-2)[..., :n]


def hadamard(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform of the last dim (a power of two), scaled by n^-0.5."""
    n = x.shape[-1]
    assert n & (n - 1) == 0, f"Hadamard needs a power of two, got {n}"
    shape, y, h = x.shape, x, 1
    while h < n:
        y = y.reshape(*shape[:-1], n // (2 * h), 2, h)
        y = torch.stack((y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]), dim=-2)
        h *= 2
    return y.reshape(shape) * n**-0.5


def rms(x: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) over the last dim, float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotate the last 2*n dims of x as interleaved pairs; cos, sin [..., n] broadcast."""
    n = cos.shape[-1]
    flat, turn = x[..., : -2 * n], x[..., -2 * n :]
    even, odd = turn[..., 0::2], turn[..., 1::2]
    if inverse:
        sin = -sin
    pair = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((flat, pair.flatten(-2)), dim=-1)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x). ``torch.sigmoid`` rounds the last elements of a tensor differently from the
    others, so that a row's bits would depend on the number of rows; ``torch.exp`` does not."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), written so that it does not overflow and, like ``sigmoid``, not as torch has it."""
    return x.clamp_min(0.0) + torch.log1p(torch.exp(-x.abs()))
