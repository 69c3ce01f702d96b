"""Matrix products whose rows do not depend on each other.

A BLAS picks another summation order for another row count, so every product
here runs in blocks of exactly eight rows: one call shape per weight, hence one
order. N = 1 is written as a sum of products; other narrow weights get zero
rows, since below four outputs a BLAS treats the rows of one block differently.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from firesteel.checkpoint.codecs import QTensor
from firesteel.ops.interface import Ops
from firesteel.ops.reference import numeric
from firesteel.ops.types import Experts, Hyper, HyperHead, Linear, Norm, Router

BLOCK = 8
NARROW = 8  # outputs a product has at least
ACT_GROUP = 128  # channels per activation scale


def matmul_rows(x: Tensor, w: Tensor) -> Tensor:
    """x [R, K] times w [N, K] transposed: float32 [R, N], eight rows at a time."""
    if w.shape[0] == 1:
        return (x * w).sum(-1, keepdim=True)
    rows, wide = x.shape[0], w.shape[0]
    if wide < NARROW:
        w = functional.pad(w, (0, 0, 0, NARROW - wide))
    out = x.new_empty(rows, wide)
    for lo in range(0, rows, BLOCK):
        block = x[lo : lo + BLOCK]
        n = block.shape[0]
        if n < BLOCK:
            block = functional.pad(block, (0, 0, 0, BLOCK - n))
        out[lo : lo + n] = functional.linear(block.contiguous(), w)[:n, :wide]
    return out


def is_quantised(weight: QTensor) -> bool:
    """Whether official numerics quantise the activations in front of this weight."""
    return weight.format in ("fp4", "fp8")


class ReferenceMatrix(Ops):
    """Linears, embeddings, residual streams and experts."""

    def linear_weight(self, weight: QTensor) -> Linear:
        n, k = weight.shape
        return Linear(weight.dequant(), n, k, is_quantised(weight))

    def stacked_weight(self, weights: Sequence[QTensor]) -> Linear:
        data = torch.cat([w.dequant() for w in weights])
        return Linear(data, data.shape[0], data.shape[1], is_quantised(weights[0]))

    def expert_weights(self, w1: Sequence[QTensor], w2: Sequence[QTensor], w3: Sequence[QTensor]) -> Experts:
        w13 = torch.stack([torch.cat((a.dequant(), b.dequant())) for a, b in zip(w1, w3, strict=True)])
        down = torch.stack([w.dequant() for w in w2])
        return Experts(w13, down, len(w1), w1[0].shape[0], is_quantised(w1[0]))

    def act(self, x: Tensor) -> Tensor:
        """Put a result on the activation grid of the numerics."""
        return numeric.bf16(x) if self.numerics.official else x

    def _input(self, x: Tensor, quantised: bool) -> Tensor:
        if self.numerics.official and quantised:
            return numeric.e4m3_groups(x, ACT_GROUP)
        return x

    def embed(self, table: Tensor, tokens: Tensor, streams: int) -> Tensor:
        return self.act(table[tokens]).unsqueeze(1).repeat(1, streams, 1)

    def linear(self, x: Tensor, w: Linear) -> Tensor:
        return self.act(matmul_rows(self._input(x, w.quantised), w.data))

    def linear_f32(self, x: Tensor, w: Linear) -> Tensor:
        return matmul_rows(x, w.data)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        y = numeric.rms(x, norm.eps)
        return self.act(y if norm.weight is None else y * norm.weight)

    # ---- residual streams -------------------------------------------------
    def hyper_pre(self, h: Tensor, w: Hyper, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
        hc = h.shape[1]
        flat = h.flatten(1)
        mix = matmul_rows(flat, w.fn.data) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + w.rms_eps)
        pre = numeric.sigmoid(mix[:, :hc] * w.scale[0] + w.base[:hc]) + w.eps
        post = 2.0 * numeric.sigmoid(mix[:, hc : 2 * hc] * w.scale[1] + w.base[hc : 2 * hc])
        comb = (mix[:, 2 * hc :] * w.scale[2] + w.base[2 * hc :]).unflatten(-1, (hc, hc))
        comb = torch.softmax(comb, dim=-1) + w.eps
        comb = comb / (comb.sum(-2, keepdim=True) + w.eps)
        for _ in range(w.iters - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + w.eps)
            comb = comb / (comb.sum(-2, keepdim=True) + w.eps)
        y = self.act((pre.unsqueeze(-1) * h).sum(1))
        return self.norm(y, norm), post, comb

    def hyper_post(self, f: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        out = post.unsqueeze(-1) * f.unsqueeze(1)
        for j in range(h.shape[1]):  # ascending source stream: a fixed order of additions
            out = out + comb[:, j].unsqueeze(-1) * h[:, j : j + 1]
        return self.act(out)

    def hyper_head(self, h: Tensor, w: HyperHead, norm: Norm) -> tuple[Tensor, Tensor]:
        flat = h.flatten(1)
        mix = matmul_rows(flat, w.fn.data) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + w.rms_eps)
        weight = numeric.sigmoid(mix * w.scale + w.base) + w.eps
        z = self.act((weight.unsqueeze(-1) * h).sum(1))
        return z, self.norm(z, norm)

    def tap(self, h: Tensor) -> Tensor:
        return self.act(h.mean(1))

    # ---- experts ----------------------------------------------------------
    def route(self, x: Tensor, w: Router, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sqrt(numeric.softplus(matmul_rows(x, w.gate.data)))
        if w.table is not None:
            ids = w.table[tokens]
        else:
            assert w.bias is not None, "a router has a bias or a table"
            ids = torch.sort(scores + w.bias, dim=-1, descending=True, stable=True).indices[:, : w.top_k]
        ids = torch.sort(ids, dim=-1).values
        chosen = scores.gather(1, ids)
        return ids, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * w.scale

    def moe(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: Experts,
        shared: Sequence[tuple[Linear, Linear]],
        limit: float,
        valid: Tensor | None = None,
        begun: Sequence[Tensor] | None = None,
        whole: bool = True,
    ) -> Tensor:
        rows, k = ids.shape
        xq = self._input(x, experts.quantised)
        parts = x.new_zeros(rows, k, x.shape[1])
        for e in range(experts.count):
            row, place = torch.nonzero(ids == e, as_tuple=True)
            if row.numel() == 0:
                continue
            inner = (
                self._swiglu(self.act(matmul_rows(xq[row], experts.w13[e])), limit)
                * weights[row, place, None]
            )
            inner = self._input(self.act(inner), experts.quantised)
            parts[row, place] = self.act(matmul_rows(inner, experts.w2[e]))
        out = parts[:, 0]
        for j in range(1, k):  # ids ascend, so experts are added in ascending id
            out = out + parts[:, j]
        for w13, w2 in shared:
            out = out + self.linear(self.act(self._swiglu(self.linear(x, w13), limit)), w2)
        return self.act(out)

    @staticmethod
    def _swiglu(gate_up: Tensor, limit: float) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return numeric.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)

    def logits(self, x: Tensor, head: Linear) -> Tensor:
        return matmul_rows(x, head.data)
