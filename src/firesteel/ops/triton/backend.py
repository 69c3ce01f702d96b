"""``TritonOps``: the GPU backend, put together from its three parts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from firesteel.ops.triton import context, launch, norms, target
from firesteel.ops.triton.aside import Aside
from firesteel.ops.triton.linear import Scratch, fresh
from firesteel.ops.triton.matrix import MatrixOps
from firesteel.ops.triton.sparse import SparseOps
from firesteel.ops.triton.tail import TailOps
from firesteel.ops.types import ContextWeights, Hyper, Norm, Numerics, PassContext


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
        self.aside = Aside(self.device) if self.target.beside else None
        self._joined_stages: dict[int, tuple[ContextWeights, context.Joined | None]] = {}
        self.store = torch.bfloat16 if numerics.official else torch.float32

    def beside(self) -> AbstractContextManager[None]:
        return nullcontext() if self.aside is None else self.aside.fork(self)

    def join(self) -> None:
        if self.aside is not None:
            self.aside.join()

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

    def context_rows(
        self,
        passes: Sequence[tuple[Sequence[Tensor], PassContext]],
        w: ContextWeights,
        windows: Sequence[Tensor],
        first: Tensor | None = None,
    ) -> None:
        """In few launches where the stages' weights can be stacked."""
        if id(w) not in self._joined_stages:
            self._joined_stages[id(w)] = (w, context.Joined.of(w) if self.numerics.official else None)
        joined = self._joined_stages[id(w)][1]
        if joined is None or first is not None:
            return super().context_rows(passes, w, windows, first)
        for streams, ctx in passes:
            taps = context.taps(streams, self.store, True, self.target.fp8)
            if taps is None:
                super().context_rows([(streams, ctx)], w, windows)
                continue
            kv = self.linear(self.norm(self.linear(taps, w.project), w.norm), joined.weight)
            angles = norms.angles(w.table, ctx)
            for i, ((_, norm), window) in enumerate(zip(w.stages, windows, strict=True)):
                context.store(kv, i, norm, angles, window, ctx.rows, True)


def _fresh(x: Tensor) -> Tensor:
    return x if hasattr(x, "quantised_forms") else fresh(x)
