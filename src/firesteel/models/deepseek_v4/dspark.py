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

from firesteel.models.deepseek_v4.config import DSparkConfig, LayerKind, V4Config
from firesteel.models.deepseek_v4.model import LayerWeights, Target
from firesteel.models.deepseek_v4.state import LayerMemory
from firesteel.models.deepseek_v4.weights import Builder, Source
from firesteel.ops.interface import Ops
from firesteel.ops.types import (
    ContextWeights,
    DraftStage,
    HyperHead,
    Linear,
    MarkovHead,
    Norm,
    PassContext,
    Proposal,
    SlotState,
)


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
        self.stages = tuple(draft_stage(stage, config) for stage in weights.stages)
        kv = tuple((stage.wkv, stage.kv_norm) for stage in self.stages)
        self.context = ContextWeights(weights.main_proj, weights.main_norm, kv, self.stages[0].table)
        assert all(stage.table == self.context.table for stage in self.stages), "window layers share a table"

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs it reads."""
        return self.dspark.target_layer_ids

    def write_context(
        self,
        passes: Sequence[tuple[Sequence[Tensor], PassContext]],
        memory: Sequence[LayerMemory],
        first: Tensor | None = None,
    ) -> None:
        """Store the context row of every row of target passes, at the row's own position.

        A pass gives its streams [R, hc, D] behind the layers ``taps``; earlier
        passes come first. Rows of rejected drafts are written too: a later pass
        runs their positions again before anything can see them. ``first`` int64 [S]: the pass from which
        on a slot's rows are wanted.
        """
        self.ops.context_rows(passes, self.context, [m.window for m in memory], first)

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
        rows = ops.block_rows(slots, width, self.dspark.noise_token_id, state)
        ctx = ops.begin_pass(rows, page_table, c.page_size, self.target.ropes, ())
        ctx.block = width
        h = ops.embed(self.target.weights.embed, rows.tokens, c.hc_mult)
        for stage, layer_memory in zip(self.stages, memory, strict=True):
            h = ops.draft_stage(h, stage, layer_memory.window, ctx)
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


def draft_stage(w: LayerWeights, config: V4Config) -> DraftStage:
    """A stage's weights and constants as the op takes them."""
    a = w.attention
    return DraftStage(
        attn_hyper=w.attn_hyper,
        attn_norm=w.attn_norm,
        wq_a=a.wq_a,
        q_norm=a.q_norm,
        wq_b=a.wq_b,
        wkv=a.wkv,
        kv_norm=a.kv_norm,
        sinks=a.sinks,
        wo_a=a.wo_a,
        wo_b=a.wo_b,
        ffn_hyper=w.ffn_hyper,
        ffn_norm=w.ffn_norm,
        router=w.router,
        experts=w.experts,
        shared=w.shared,
        heads=a.heads,
        span=config.sliding_window,
        eps=config.rms_norm_eps,
        limit=config.swiglu_limit,
        table=a.table,
    )
