"""Straight-through fake quantisation that matches the deployed formats.

Forward returns exactly the value the served checkpoint would hold or the
kernel would see; backward is the identity. All scales are powers of two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
_AMAX_FLOOR = 1e-4  # of activations; the official kernels use the same floor


def pow2_ceil(x: Tensor) -> Tensor:
    """Smallest power of two >= ``x`` (float32, positive, normal), exactly, from the bits."""
    bits = x.float().contiguous().view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def straight_through(x: Tensor, q: Tensor) -> Tensor:
    """Value of ``q``, gradient of ``x``. ``x - x`` is an exact zero, so ``q`` is not disturbed."""
    return q.detach() + (x - x.detach())


def round_e4m3(x: Tensor) -> Tensor:
    """Round float32 values within +-448 to the e4m3fn grid (ties to even)."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def round_e2m1(x: Tensor) -> Tensor:
    """Round float32 values to {0, .5, 1, 1.5, 2, 3, 4, 6} with sign (ties to the even code)."""
    a = x.abs().clamp(max=E2M1_MAX)
    step = torch.where(a < 2.0, 0.5, torch.where(a < 4.0, 1.0, 2.0))
    return torch.sign(x) * torch.round(a / step) * step


def fake_act(x: Tensor, group: int = 128) -> Tensor:
    """Activation rule: e4m3 with one power-of-two scale per ``group`` trailing channels.

    ``x``: [..., C]; the last group may be narrower.
    """
    with torch.no_grad():
        channels = x.shape[-1]
        size = min(group, channels)
        g = F.pad(x.float(), (0, -channels % size)).unflatten(-1, (-1, size))
        scale = pow2_ceil(g.abs().amax(-1, keepdim=True).clamp(min=_AMAX_FLOOR) / E4M3_MAX)
        q = (round_e4m3(g / scale) * scale).flatten(-2)[..., :channels].to(x.dtype)
    return straight_through(x, q)


def fake_fp4_act(x: Tensor) -> Tensor:
    """Indexer rule: e2m1 with one power-of-two scale per 32 trailing channels."""
    with torch.no_grad():
        g = x.float().unflatten(-1, (-1, 32))
        scale = pow2_ceil(g.abs().amax(-1, keepdim=True).clamp(min=_AMAX_FLOOR) / E2M1_MAX)
        q = (round_e2m1(g / scale) * scale).flatten(-2).to(x.dtype)
    return straight_through(x, q)


def quantise_fp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """(e2m1 values, scales) of weights [..., K], one scale per 32 of K; product is the deployed weight."""
    g = w.float().unflatten(-1, (-1, 32))
    scale = pow2_ceil(g.abs().amax(-1, keepdim=True).clamp(min=1e-30) / E2M1_MAX)
    return round_e2m1(g / scale), scale


def fake_fp4_weight(w: Tensor) -> Tensor:
    """Deployed value of FP4 expert weights [..., K]; same shape and dtype."""
    with torch.no_grad():
        values, scale = quantise_fp4(w)
        q = (values * scale).flatten(-2).to(w.dtype)
    return straight_through(w, q)


def fake_fp8_weight(w: Tensor, block: int = 128) -> Tensor:
    """Deployed value of an FP8 linear [N, K]: e4m3 with one power-of-two scale per 128x128 tile."""
    with torch.no_grad():
        n, k = w.shape
        pad = F.pad(w.float(), (0, -k % block, 0, -n % block))
        rows, cols = pad.shape[0] // block, pad.shape[1] // block
        tiles = pad.view(rows, block, cols, block)
        amax = tiles.abs().amax((1, 3), keepdim=True).clamp(min=1e-30)
        scale = pow2_ceil(amax / E4M3_MAX)
        q = (round_e4m3(tiles / scale) * scale).view(pad.shape)[:n, :k].to(w.dtype)
    return straight_through(w, q)


def hadamard(size: int, device: torch.device | None = None) -> Tensor:
    """Sylvester Hadamard matrix [size, size] scaled by size**-0.5 (orthogonal, symmetric)."""
    assert size & (size - 1) == 0, f"Hadamard size {size} is not a power of two"
    h = torch.ones(1, 1, device=device)
    while h.shape[0] < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h * size**-0.5
