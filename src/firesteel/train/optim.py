"""Optimisers: Muon for matrices, AdamW for the rest; a schedule over the fraction of time spent."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

NS = (3.4445, -4.7750, 2.0315)  # Newton-Schulz quintic of the Muon method


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Approximate nearest orthogonal matrices of a stack [n, a, b], bfloat16 inside."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    a, b, c = NS
    for _ in range(steps):
        s = x @ x.transpose(-1, -2)
        x = a * x + (b * s + c * s @ s) @ x
    return x.transpose(-1, -2) if tall else x


class Muon:
    """Orthogonalised Nesterov momentum; matrices of one shape are updated as one stack.

    A step changes every matrix by about ``lr`` of the root mean square that its initial
    values have (``0.2 * sqrt(max(a, b))`` scaling), with decoupled weight decay.
    """

    def __init__(self, params: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.02):
        self.momentum, self.decay = momentum, decay
        self.groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for p in params:
            self.groups[(p.shape[-2], p.shape[-1])].append(p)
        self.state: dict[tuple[int, int], Tensor] = {}

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for shape, params in self.groups.items():
            stack = [p.view(-1, *shape) for p in params]
            grad = torch.cat([p.grad.view(-1, *shape) for p in params if p.grad is not None])
            if shape not in self.state:
                self.state[shape] = torch.zeros_like(grad)
            moment = self.state[shape].lerp_(grad, 1 - self.momentum)
            update = orthogonalise(grad.lerp(moment, self.momentum)).float()
            update *= 0.2 * max(shape) ** 0.5
            at = 0
            for p in stack:
                p.mul_(1 - lr * self.decay).sub_(update[at : at + len(p)], alpha=lr)
                at += len(p)


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """(matrices for Muon, tables and routers for AdamW, small vectors and mixers for AdamW)."""
    big = ("embed.weight", "head.weight", "gate.weight", "markov_w1.weight", "markov_w2.weight")
    matrices, tables, small = [], [], []
    for name, p in model.named_parameters():
        if name.endswith(big):
            tables.append(p)
        elif p.ndim < 2 or len(p) == 1 or "hc_" in name or name.endswith("ape"):
            small.append(p)
        else:
            matrices.append(p)
    return matrices, tables, small


class Optimiser:
    """All parameters of a target or drafter. ``step(scale)`` applies peak rates times ``scale``."""

    def __init__(self, model: nn.Module, muon: float = 0.008, tables: float = 0.003, small: float = 0.002):
        matrices, big, little = split_parameters(model)
        self.muon, self.muon_lr = Muon(matrices), muon
        fused = next(model.parameters()).is_cuda
        self.adam = torch.optim.AdamW(
            [{"params": big, "lr": tables}, {"params": little, "lr": small}],
            betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=fused,
        )  # fmt: skip
        self.peaks = (tables, small)
        self.params = [*matrices, *big, *little]

    def step(self, scale: float) -> Tensor:
        """Clip to norm 1, update, clear; returns the gradient norm (on the device)."""
        norm = torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        for group, peak in zip(self.adam.param_groups, self.peaks, strict=True):
            group["lr"] = peak * scale
        self.adam.step()
        self.muon.step(self.muon_lr * scale)
        for p in self.params:
            p.grad = None
        return norm


def schedule(done: float, step: int, warmup: int = 200, hold: float = 0.45) -> float:
    """Rate factor: linear warm-up in steps, flat until ``hold`` of the time, then linear to 0.01."""
    warm = min(1.0, (step + 1) / warmup)
    if done <= hold:
        return warm
    return warm * max(0.01, 1.0 - 0.99 * (done - hold) / (1 - hold))
