"""``TritonOps``: the GPU backend, put together from its three parts."""

from __future__ import annotations

import torch
from torch import Tensor

from firesteel.ops.triton import launch, target
from firesteel.ops.triton.linear import Scratch, fresh
from firesteel.ops.triton.matrix import MatrixOps
from firesteel.ops.triton.sparse import SparseOps
from firesteel.ops.triton.tail import TailOps
from firesteel.ops.types import Hyper, Norm, Numerics


class TritonOps(SparseOps, TailOps, MatrixOps):
    """Every op on a CUDA or ROCm device, or on the CPU under Triton's interpreter.

    ``device``: where weights and activations live. ``store``: dtype of
    activations between ops, bfloat16 in official numerics, else float32; every
    op takes either. ``target``: constants of the device.
    """

    name = "triton"

    def __init__(self, numerics: Numerics, device: torch.device | None = None):
        super().__init__(numerics)
        self.device = device or torch.device("cpu" if launch.INTERPRETED else "cuda")
        self.target = target.of_device(self.device)
        self.scratch = Scratch(self.device)
        self.store = torch.bfloat16 if numerics.official else torch.float32

    # several products share what these give: it is quantised once, in the same kernel where that can be
    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return _fresh(super().norm(x, norm))

    def hyper_pre(self, h: Tensor, w: Hyper, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
        x, post, comb = super().hyper_pre(h, w, norm)
        return _fresh(x), post, comb

    def hyper_step(
        self, f: Tensor, h: Tensor, post: Tensor, comb: Tensor, w: Hyper, norm: Norm
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h, x, post, comb = super().hyper_step(f, h, post, comb, w, norm)
        return h, _fresh(x), post, comb


def _fresh(x: Tensor) -> Tensor:
    return x if hasattr(x, "quantised_forms") else fresh(x)
