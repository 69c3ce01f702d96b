"""Builds the target's weights from a checkpoint, one module at a time.

Names are the official ones; each tensor is read exactly once and prepared by
the backend in its checkpoint format, so no second copy of the model exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from firesteel.checkpoint.codecs import QTensor
from firesteel.models.deepseek_v4.config import LayerKind, V4Config
from firesteel.models.deepseek_v4.model import (
    AttentionWeights,
    IndexerWeights,
    LayerWeights,
    TargetWeights,
)
from firesteel.ops.interface import Ops
from firesteel.ops.types import Compressor, Experts, Hyper, HyperHead, Linear, Norm, Router


class Source(Protocol):
    """Where named tensors come from: a checkpoint, or a test's dictionary."""

    def qtensor(self, prefix: str) -> QTensor:
        """Weight of module ``prefix`` with its scale."""

    def tensor(self, name: str) -> Tensor:
        """One tensor by its full name."""


class Builder:
    """Reads modules by official prefix and prepares them with ``ops``."""

    def __init__(self, source: Source, config: V4Config, ops: Ops, device: torch.device):
        self.source, self.config, self.ops, self.device = source, config, ops, device

    def f32(self, name: str) -> Tensor:
        """A tensor as float32 on the device."""
        return self.source.tensor(name).to(self.device, torch.float32)

    def table(self, name: str) -> Tensor:
        """A tensor that rows are copied from: bfloat16 where the backend's rows are, else float32."""
        tensor = self.source.tensor(name)
        return tensor.to(self.device, tensor.dtype if tensor.dtype == self.ops.cache else torch.float32)

    def linear(self, prefix: str) -> Linear:
        """A prepared [N, K] weight."""
        return self.ops.linear_weight(self.source.qtensor(prefix))

    def norm(self, name: str) -> Norm:
        """An RMS norm."""
        return Norm(self.f32(f"{name}.weight"), self.config.rms_norm_eps)

    def hyper(self, prefix: str) -> Hyper:
        """mHC coefficients, e.g. ``layers.0.hc_attn``."""
        c = self.config
        fn = self.ops.linear_weight(QTensor.dense(self.f32(f"{prefix}_fn")))
        return Hyper(
            fn,
            self.f32(f"{prefix}_base"),
            self.f32(f"{prefix}_scale"),
            c.hc_sinkhorn_iters,
            c.hc_eps,
            c.rms_norm_eps,
        )

    def hyper_head(self, prefix: str) -> HyperHead:
        """The final collapse; ``prefix`` is "" or a draft stage with its dot."""
        fn = self.ops.linear_weight(QTensor.dense(self.f32(f"{prefix}hc_head_fn")))
        c = self.config
        return HyperHead(
            fn,
            self.f32(f"{prefix}hc_head_base"),
            self.f32(f"{prefix}hc_head_scale"),
            c.hc_eps,
            c.rms_norm_eps,
        )

    def stacked(self, *prefixes: str) -> Linear:
        """Weights of one input stacked along N into one product."""
        return self.ops.stacked_weight([self.source.qtensor(p) for p in prefixes])

    def compressor(self, prefix: str, ratio: int, dim: int, index: bool) -> Compressor:
        """Value and gate projections share one product."""
        return Compressor(
            project=self.stacked(f"{prefix}.wkv", f"{prefix}.wgate"),
            ape=self.f32(f"{prefix}.ape"),
            norm=self.norm(f"{prefix}.norm"),
            ratio=ratio,
            dim=dim,
            overlap=ratio == 4,
            rope_dim=self.config.qk_rope_head_dim,
            index=index,
        )

    def grouped(self, prefix: str, groups: int) -> tuple[Linear, ...]:
        """wo_a by group; official numerics run it in bf16, dequantised once."""
        weight = self.source.qtensor(prefix).dequant().to(self.device)
        if self.ops.numerics.official:
            weight = weight.to(torch.bfloat16).to(torch.float32)
        return tuple(
            self.ops.linear_weight(QTensor.dense(part.contiguous())) for part in weight.chunk(groups)
        )

    def attention(self, prefix: str, ratio: int, kind: LayerKind) -> AttentionWeights:
        """One attention sublayer with what its kind adds."""
        c = self.config
        indexer = None
        if kind is LayerKind.CSA:
            indexer = IndexerWeights(
                wq_b=self.linear(f"{prefix}.indexer.wq_b"),
                weights=self.linear(f"{prefix}.indexer.weights_proj"),
                compressor=self.compressor(f"{prefix}.indexer.compressor", ratio, c.index_head_dim, True),
                heads=c.index_n_heads,
                top_k=c.index_topk,
            )
        made = AttentionWeights(
            wq_a=self.linear(f"{prefix}.wq_a"),
            q_norm=self.norm(f"{prefix}.q_norm"),
            wq_b=self.linear(f"{prefix}.wq_b"),
            wkv=self.linear(f"{prefix}.wkv"),
            kv_norm=self.norm(f"{prefix}.kv_norm"),
            sinks=self.f32(f"{prefix}.attn_sink"),
            wo_a=self.grouped(f"{prefix}.wo_a", c.o_groups),
            wo_b=self.linear(f"{prefix}.wo_b"),
            compressor=self.compressor(f"{prefix}.compressor", ratio, c.head_dim, False) if ratio else None,
            indexer=indexer,
            table="compress" if ratio else "main",
            heads=c.num_attention_heads,
        )
        self._share(made)
        return made

    def _share(self, w: AttentionWeights) -> None:
        """Products of the sublayer's input, and those of the low-rank query."""
        hidden, queries = [(w.wq_a, False), (w.wkv, False)], [(w.wq_b, False)]
        if w.compressor is not None:
            hidden.append((w.compressor.project, True))
        if w.indexer is not None:
            hidden += [(w.indexer.compressor.project, True), (w.indexer.weights, False)]
            queries.append((w.indexer.wq_b, False))
        self.ops.share_input(hidden)
        self.ops.share_input(queries)

    def router(self, prefix: str, hashed: bool) -> Router:
        """Gate with its bias, or with the token id table of a hash layer."""
        c = self.config
        gate = self.ops.linear_weight(QTensor.dense(self.f32(f"{prefix}.weight")))
        table = self.source.tensor(f"{prefix}.tid2eid").to(self.device, torch.int64) if hashed else None
        bias = None if hashed else self.f32(f"{prefix}.bias")
        return Router(gate, bias, table, c.num_experts_per_tok, c.routed_scaling_factor)

    def experts(self, prefix: str) -> Experts:
        """All routed experts of a layer."""
        parts = [
            [self.source.qtensor(f"{prefix}.{e}.{w}") for e in range(self.config.n_routed_experts)]
            for w in ("w1", "w2", "w3")
        ]
        return self.ops.expert_weights(*parts)

    def shared(self, prefix: str) -> tuple[Linear, Linear]:
        """The shared expert; w1 and w3 become one product."""
        return self.stacked(f"{prefix}.w1", f"{prefix}.w3"), self.linear(f"{prefix}.w2")

    def layer(self, prefix: str, ratio: int, kind: LayerKind, hashed: bool) -> LayerWeights:
        """One block, of the target or of the drafter."""
        made = LayerWeights(
            attn_hyper=self.hyper(f"{prefix}.hc_attn"),
            attn_norm=self.norm(f"{prefix}.attn_norm"),
            attention=self.attention(f"{prefix}.attn", ratio, kind),
            ffn_hyper=self.hyper(f"{prefix}.hc_ffn"),
            ffn_norm=self.norm(f"{prefix}.ffn_norm"),
            router=self.router(f"{prefix}.ffn.gate", hashed),
            experts=self.experts(f"{prefix}.ffn.experts"),
            shared=(self.shared(f"{prefix}.ffn.shared_experts"),) if self.config.n_shared_experts else (),
        )
        self.ops.share_input([(made.router.gate, True), *((w13, False) for w13, _ in made.shared)])
        return made


def build_target(
    source: Source,
    config: V4Config,
    ops: Ops,
    device: torch.device,
    progress: Callable[[str], None] = lambda _: None,
) -> TargetWeights:
    """Read and prepare the whole target; ``progress`` hears each module's prefix."""
    b = Builder(source, config, ops, device)
    progress("embed")
    embed = b.table("embed.weight")
    layers = []
    for i, ratio in enumerate(config.compress_ratios):
        progress(f"layers.{i}")
        layers.append(b.layer(f"layers.{i}", ratio, config.kind(i), config.is_hash_layer(i)))
    progress("head")
    return TargetWeights(embed, tuple(layers), b.hyper_head(""), b.norm("norm"), b.linear("head"))
