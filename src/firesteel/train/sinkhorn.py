"""Sinkhorn normalisation of the 4x4 stream mixers: plain torch, and one fused kernel on GPUs.

Rule: softmax over the destination axis, + eps; divide by (sum over sources + eps);
then ``iters - 1`` times [divide by (sum over destinations + eps), then by (sum over sources + eps)].
A division ``c' = c / (s + eps)`` is reversible given ``s``, so backward keeps only the sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:  # absent on machines without a GPU
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def sinkhorn_plain(c: Tensor, iters: int, eps: float) -> Tensor:
    """``c``: logits [..., 4, 4] (source, destination), float32; returns the mixer of the same shape."""
    c = torch.softmax(c, -1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


if triton is not None:

    @triton.jit
    def _forward_kernel(  # type: ignore[no-untyped-def]
        x_ptr, y_ptr, s_ptr, n, eps, ITERS: tl.constexpr, BLOCK: tl.constexpr
    ):
        rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        four = tl.arange(0, 4)
        live = rows < n
        at = rows[:, None, None] * 16 + four[None, :, None] * 4 + four[None, None, :]
        c = tl.load(x_ptr + at, mask=live[:, None, None], other=0.0)
        c = tl.exp(c - tl.max(c, 2)[:, :, None])
        c = c / tl.sum(c, 2)[:, :, None] + eps
        base = rows[:, None].to(tl.int64) * 4 + four[None, :]
        stride = n.to(tl.int64) * 4
        for i in tl.static_range(2 * ITERS - 1):
            if i % 2 == 0:
                s = tl.sum(c, 1) + eps
                c = c / s[:, None, :]
            else:
                s = tl.sum(c, 2) + eps
                c = c / s[:, :, None]
            tl.store(s_ptr + i * stride + base, s, mask=live[:, None])
        tl.store(y_ptr + at, c, mask=live[:, None, None])

    @triton.jit
    def _backward_kernel(  # type: ignore[no-untyped-def]
        g_ptr, y_ptr, s_ptr, dx_ptr, n, eps, ITERS: tl.constexpr, BLOCK: tl.constexpr
    ):
        rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        four = tl.arange(0, 4)
        live = rows < n
        at = rows[:, None, None] * 16 + four[None, :, None] * 4 + four[None, None, :]
        c = tl.load(y_ptr + at, mask=live[:, None, None], other=0.0)
        g = tl.load(g_ptr + at, mask=live[:, None, None], other=0.0)
        base = rows[:, None].to(tl.int64) * 4 + four[None, :]
        stride = n.to(tl.int64) * 4
        for r in tl.static_range(2 * ITERS - 1):
            i = 2 * ITERS - 2 - r
            s = tl.load(s_ptr + i * stride + base, mask=live[:, None], other=1.0)
            if i % 2 == 0:
                g = (g - tl.sum(g * c, 1)[:, None, :]) / s[:, None, :]
                c = c * s[:, None, :]
            else:
                g = (g - tl.sum(g * c, 2)[:, :, None]) / s[:, :, None]
                c = c * s[:, :, None]
        p = c - eps  # the softmax output
        g = p * (g - tl.sum(g * p, 2)[:, :, None])
        tl.store(dx_ptr + at, g, mask=live[:, None, None])


@torch.library.custom_op("firesteel_train::sinkhorn", mutates_args=())
def _sinkhorn_op(c: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor]:
    n = c.numel() // 16
    y = torch.empty_like(c)
    sums = c.new_empty(2 * iters - 1, n, 4)
    _forward_kernel[(triton.cdiv(n, 128),)](c, y, sums, n, eps, iters, 128, num_warps=4)
    return y, sums


@_sinkhorn_op.register_fake
def _(c: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(c), c.new_empty(2 * iters - 1, c.numel() // 16, 4)


@torch.library.custom_op("firesteel_train::sinkhorn_grad", mutates_args=())
def _sinkhorn_grad(g: Tensor, y: Tensor, sums: Tensor, iters: int, eps: float) -> Tensor:
    n = y.numel() // 16
    dx = torch.empty_like(y)
    _backward_kernel[(triton.cdiv(n, 128),)](g.contiguous(), y, sums, dx, n, eps, iters, 128, num_warps=4)
    return dx


@_sinkhorn_grad.register_fake
def _(g: Tensor, y: Tensor, sums: Tensor, iters: int, eps: float) -> Tensor:
    return torch.empty_like(y)


def _setup(ctx: Any, inputs: tuple[Tensor, int, float], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output)
    ctx.iters, ctx.eps = inputs[1], inputs[2]


def _backward(ctx: Any, g: Tensor, _g_sums: Tensor) -> tuple[Tensor, None, None]:
    y, sums = ctx.saved_tensors
    return torch.ops.firesteel_train.sinkhorn_grad(g, y, sums, ctx.iters, ctx.eps), None, None


_sinkhorn_op.register_autograd(_backward, setup_context=_setup)


def sinkhorn(c: Tensor, iters: int, eps: float) -> Tensor:
    """Mixer [..., 4, 4] from logits [..., 4, 4] (float32); fused where a GPU kernel exists."""
    if c.is_cuda and triton is not None:
        return torch.ops.firesteel_train.sinkhorn(c.contiguous(), iters, eps)[0]
    return sinkhorn_plain(c, iters, eps)


def check_kernel(device: torch.device) -> float:
    """Largest difference of the fused kernel from plain torch, value and gradient (relative to 1)."""
    gen = torch.Generator().manual_seed(0)
    a = (2 * torch.randn(1000, 4, 4, generator=gen)).to(device).requires_grad_()
    b = a.detach().clone().requires_grad_()
    w = torch.randn(1000, 4, 4, generator=gen).to(device)
    ya, yb = sinkhorn(a, 20, 1e-6), sinkhorn_plain(b, 20, 1e-6)
    (ya * w).sum().backward()
    (yb * w).sum().backward()
    assert a.grad is not None and b.grad is not None
    return max((ya - yb).abs().max().item(), (a.grad - b.grad).abs().max().item())
