"""The DSpark drafter: a few V4 blocks inside the target's checkpoint.

    taps of the target -> main_x -> context rows of every stage (one per accepted token)
    [anchor, noise, noise, ...] -> stages (all block rows see each other) -> z, base logits
    base logits + Markov bias of the previous draft -> draft, one after the other

Weights and forward only; how many drafts are worth verifying is decided in
``speculation``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.core import RowBatch
from firesteel.models.deepseek_v4.config import DSparkConfig, LayerKind, V4Config
from firesteel.models.deepseek_v4.model import LayerWeights, Target
from firesteel.models.deepseek_v4.state import LayerMemory
from firesteel.models.deepseek_v4.weights import Builder, Source
from firesteel.ops.interface import Ops
from firesteel.ops.types import HyperHead, Linear, MarkovHead, Norm, PassContext, Proposal, SlotState


@dataclass(frozen=True)
class DrafterWeights:
    """Everything the drafter owns; embedding and head are the target's."""

    main_proj: Linear
    main_norm: Norm
    stages: tuple[LayerWeights, ...]
    collapse: HyperHead
    norm: Norm
    markov: MarkovHead


def build_drafter(
    source: Source, config: V4Config, ops: Ops, device: torch.device, confidence: bool
) -> DrafterWeights:
    """Read the stages ``mtp.0 ..`` and the heads of the last one, by official name.

    ``confidence``: whether the checkpoint holds the confidence head.
    """
    assert config.dspark is not None, "checked when speculation was asked for"
    b, last = Builder(source, config, ops, device), f"mtp.{config.dspark.stages - 1}"
    stages = tuple(b.layer(f"mtp.{i}", 0, LayerKind.WINDOW, False) for i in range(config.dspark.stages))
    markov = MarkovHead(
        w1=b.f32(f"{last}.markov_head.markov_w1.weight"),
        w2=b.linear(f"{last}.markov_head.markov_w2"),
        confidence=b.linear(f"{last}.confidence_head.proj") if confidence else None,
    )
    return DrafterWeights(
        main_proj=b.linear("mtp.0.main_proj"),
        main_norm=b.norm("mtp.0.main_norm"),
        stages=stages,
        collapse=b.hyper_head(f"{last}."),
        norm=b.norm(f"{last}.norm"),
        markov=markov,
    )


class Drafter:
    """Runs the drafter's context and block passes; holds weights, no state."""

    def __init__(self, config: V4Config, weights: DrafterWeights, target: Target):
        assert config.dspark is not None, "checked when speculation was asked for"
        self.config, self.weights, self.target, self.ops = config, weights, target, target.ops
        self.dspark: DSparkConfig = config.dspark

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs it reads."""
        return self.dspark.target_layer_ids

    def write_context(self, taps: Tensor, ctx: PassContext, memory: Sequence[LayerMemory]) -> None:
        """Store the context row of every row of a target pass, at the row's own position.

        Rows of rejected drafts are written too: a later pass runs their
        positions again before anything can see them.
        """
        ops, w = self.ops, self.weights
        x = ops.norm(ops.linear(taps, w.main_proj), w.main_norm)
        for stage, state in zip(w.stages, memory, strict=True):
            a = stage.attention
            row = ops.key_value(ops.linear(x, a.wkv), a.kv_norm, a.table, ctx)
            ops.store_window(state.window, row, ctx)

    def block_rows(self, slots: Tensor, width: int, state: SlotState) -> RowBatch:
        """[anchor, noise, ...] of every slot at its cursor: G groups of ``width`` rows."""
        groups = slots.shape[0]
        place = torch.arange(width, device=slots.device)
        row = torch.arange(groups * width, device=slots.device)
        tokens = torch.where(place == 0, state.anchor[slots].unsqueeze(-1), self.dspark.noise_token_id)
        first = row // width * width
        return RowBatch(
            tokens=tokens.flatten(),
            positions=(state.cursor[slots].unsqueeze(-1) + place).flatten(),
            slots=slots.unsqueeze(-1).expand(-1, width).flatten(),
            first=first,
            last=first + width - 1,
            valid=torch.ones_like(row, dtype=torch.bool),
            max_position=0,
        )

    def propose(
        self,
        slots: Tensor,
        width: int,
        state: SlotState,
        memory: Sequence[LayerMemory],
        page_table: Tensor,
        *,
        shaped: bool = False,
        rejection: bool = False,
        keep_logits: bool = False,
    ) -> Proposal:
        """One drafting pass: ``width`` drafts for every slot of ``slots`` int64 [G]."""
        ops, w, c = self.ops, self.weights, self.config
        rows = self.block_rows(slots, width, state)
        ctx = ops.begin_pass(rows, page_table, c.page_size, self.target.ropes, ())
        ctx.block = width
        h = ops.embed(self.target.weights.embed, rows.tokens, c.hc_mult)
        for stage, layer_memory in zip(w.stages, memory, strict=True):
            h = self._stage(h, stage, layer_memory, ctx)
        z, x = ops.hyper_head(h, w.collapse, w.norm)
        base = self.target.logits(x).unflatten(0, (-1, width))
        return ops.markov_walk(
            base,
            z.unflatten(0, (-1, width)),
            w.markov,
            slots,
            state,
            shaped=shaped,
            rejection=rejection,
            keep_logits=keep_logits,
        )

    def _stage(self, h: Tensor, w: LayerWeights, memory: LayerMemory, ctx: PassContext) -> Tensor:
        ops, c, a = self.ops, self.config, w.attention
        x, post, comb = ops.hyper_pre(h, w.attn_hyper, w.attn_norm)
        qa = ops.norm(ops.linear(x, a.wq_a), a.q_norm)
        q = ops.query(ops.linear(qa, a.wq_b), a.heads, c.rms_norm_eps, a.table, ctx)
        kv = ops.key_value(ops.linear(x, a.wkv), a.kv_norm, a.table, ctx)
        o = ops.block_attention(q, kv, memory.window, c.sliding_window, a.sinks, a.table, ctx)
        h = ops.hyper_post(ops.output(o, a.wo_a, a.wo_b), h, post, comb)
        x, post, comb = ops.hyper_pre(h, w.ffn_hyper, w.ffn_norm)
        ids, weights = ops.route(x, w.router, ctx.rows.tokens)
        return ops.hyper_post(ops.moe(x, ids, weights, w.experts, w.shared, c.swiglu_limit), h, post, comb)
