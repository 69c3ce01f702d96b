"""``TritonOps``: the GPU backend, put together from its three parts."""

from __future__ import annotations

import torch

from firesteel.ops.triton import launch, target
from firesteel.ops.triton.linear import Scratch
from firesteel.ops.triton.matrix import MatrixOps
from firesteel.ops.triton.sparse import SparseOps
from firesteel.ops.triton.tail import TailOps
from firesteel.ops.types import Numerics


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
