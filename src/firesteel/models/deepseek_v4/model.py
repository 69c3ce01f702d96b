"""The DeepSeek-V4 target: what one pass over a flat batch of rows computes.

    embed -> 4 streams -> [ mHC -> attention -> mHC -> experts ] x L -> collapse -> norm -> head

A layer attends to a window of raw K=V rows and, where its ratio is not 0, to
compressed entries. All state is addressed by absolute position.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.core import RowBatch
from firesteel.models.deepseek_v4.config import LayerKind, V4Config, yarn_bounds
from firesteel.models.deepseek_v4.state import LayerMemory
from firesteel.ops.interface import Ops
from firesteel.ops.types import (
    Compressor,
    Experts,
    Hyper,
    HyperHead,
    Linear,
    Norm,
    PassContext,
    Rope,
    Router,
)


@dataclass(frozen=True)
class IndexerWeights:
    """Chooses compressed entries of a CSA layer."""

    wq_b: Linear
    weights: Linear
    compressor: Compressor
    heads: int
    top_k: int


@dataclass(frozen=True)
class AttentionWeights:
    """One attention sublayer; ``table`` names its rotary table."""

    wq_a: Linear
    q_norm: Norm
    wq_b: Linear
    wkv: Linear
    kv_norm: Norm
    sinks: Tensor
    wo_a: tuple[Linear, ...]
    wo_b: Linear
    compressor: Compressor | None
    indexer: IndexerWeights | None
    table: str
    heads: int


@dataclass(frozen=True)
class LayerWeights:
    """One block: two mHC sublayers."""

    attn_hyper: Hyper
    attn_norm: Norm
    attention: AttentionWeights
    ffn_hyper: Hyper
    ffn_norm: Norm
    router: Router
    experts: Experts
    shared: tuple[tuple[Linear, Linear], ...]


@dataclass(frozen=True)
class TargetWeights:
    """Everything the target owns."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    collapse: HyperHead
    norm: Norm
    head: Linear


def ropes(config: V4Config, device: torch.device) -> dict[str, Rope]:
    """The two rotary tables: "main" (window layers, drafter) and "compress" (YaRN)."""
    dim = config.qk_rope_head_dim
    power = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    main = 1.0 / config.rope_theta**power
    compress = 1.0 / config.compress_rope_theta**power
    if config.yarn is not None:
        lo, hi = yarn_bounds(dim, config.compress_rope_theta, config.yarn)
        ramp = ((torch.arange(dim // 2, device=device) - lo) / max(hi - lo, 0.001)).clamp(0, 1)
        compress = compress * (1 - ramp) + compress / config.yarn.factor * ramp
    return {"main": Rope(main, dim), "compress": Rope(compress, dim)}


class Target:
    """Runs the target's layers over rows; holds weights, no state."""

    def __init__(self, config: V4Config, weights: TargetWeights, ops: Ops):
        self.config, self.weights, self.ops = config, weights, ops
        self.ropes = ropes(config, weights.embed.device)
        self.ratios = tuple(sorted({r for r in config.compress_ratios if r}))

    def begin(self, rows: RowBatch, page_table: Tensor) -> PassContext:
        """Prepare what all layers of a pass share."""
        return self.ops.begin_pass(rows, page_table, self.config.page_size, self.ropes, self.ratios)

    def forward(
        self, ctx: PassContext, memory: Sequence[LayerMemory], taps: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Streams [R, hc, D] after the last layer, and those after each layer of ``taps``, in that order.

        The drafter reads the latter; no layer writes into what it was given.
        """
        ops, layers = self.ops, self.weights.layers
        h = ops.embed(self.weights.embed, ctx.rows.tokens, self.config.hc_mult)
        x, post, comb = ops.hyper_pre(h, layers[0].attn_hyper, layers[0].attn_norm)
        found: dict[int, Tensor] = {}
        for i, (layer, state) in enumerate(zip(layers, memory, strict=True)):
            f = self._attention(x, layer.attention, state, ctx)
            h, x, post, comb = ops.hyper_step(f, h, post, comb, layer.ffn_hyper, layer.ffn_norm)
            f = self._experts(x, layer, ctx)
            if i + 1 < len(layers):
                after = layers[i + 1]
                h, x, post, comb = ops.hyper_step(f, h, post, comb, after.attn_hyper, after.attn_norm)
            else:
                h = ops.hyper_post(f, h, post, comb)
            if i in taps:
                found[i] = h
        return h, [found[i] for i in taps]

    def _experts(self, x: Tensor, layer: LayerWeights, ctx: PassContext) -> Tensor:
        ops, limit, valid = self.ops, self.config.swiglu_limit, ctx.rows.valid
        begun = ops.begin_shared(x, layer.router, layer.shared, limit)
        ids, weights = ops.route(x, layer.router, ctx.rows.tokens)
        return ops.moe(x, ids, weights, layer.experts, layer.shared, limit, valid, begun, whole=False)

    def _attention(self, x: Tensor, w: AttentionWeights, state: LayerMemory, ctx: PassContext) -> Tensor:
        ops, c = self.ops, self.config
        qa = ops.norm(ops.linear(x, w.wq_a), w.q_norm)
        with ops.beside() if w.compressor is not None else nullcontext():
            entries, ratio = self._compress(x, w, state, ctx)
        q = ops.queries(ops.linear(qa, w.wq_b), w.heads, c.rms_norm_eps, w.table, ctx)
        kv = ops.key_value(ops.linear(x, w.wkv), w.kv_norm, w.table, ctx)
        if w.compressor is not None:
            ops.join()
        selection = None
        if w.indexer is not None:
            selection = self._select(x, qa, w.indexer, w.table, state, ctx)
        o = ops.attention(
            q, kv, state.window, c.sliding_window, w.sinks, entries, ratio, selection, w.table, ctx
        )
        ops.store_window(state.window, kv, ctx)  # after the layer's last read
        return ops.output(o, w.wo_a, w.wo_b)

    def _compress(
        self, x: Tensor, w: AttentionWeights, state: LayerMemory, ctx: PassContext
    ) -> tuple[Tensor | None, int]:
        """Bring the layer's entries, and those its indexer looks at, up to date: (entries, ratio) or (None, 0)."""
        if w.compressor is None:
            return None, 0
        assert state.entries is not None
        self.ops.compress(x, w.compressor, state.entries, ctx)
        if w.indexer is not None:
            assert state.index is not None
            self.ops.compress(x, w.indexer.compressor, state.index, ctx)
        return state.entries.entries, w.compressor.ratio

    def _select(
        self, x: Tensor, qa: Tensor, w: IndexerWeights, table: str, state: LayerMemory, ctx: PassContext
    ) -> Tensor:
        assert state.index is not None
        ops, c = self.ops, self.config
        q = ops.linear(qa, w.wq_b).unflatten(-1, (w.heads, -1))
        scale = c.index_head_dim**-0.5 * w.heads**-0.5
        head_weights = ops.linear(x, w.weights) * scale
        return ops.index_select(
            q, head_weights, state.index.entries, w.compressor.ratio, w.top_k, c.qk_rope_head_dim, table, ctx
        )

    def collapse(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """(z, x): the collapsed streams before and after the final norm."""
        return self.ops.hyper_head(h, self.weights.collapse, self.weights.norm)

    def logits(self, x: Tensor) -> Tensor:
        """float32 [R, V]."""
        return self.ops.logits(x, self.weights.head)


def kinds(config: V4Config) -> tuple[LayerKind, ...]:
    """Kind of every target layer."""
    return tuple(config.kind(i) for i in range(config.num_hidden_layers))
