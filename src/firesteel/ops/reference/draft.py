"""The drafter's own ops in plain torch: block attention, Markov walk, admission."""

from __future__ import annotations

import torch
from torch import Tensor

from firesteel.core import RowBatch, SampleRows
from firesteel.ops.reference import noise, numeric
from firesteel.ops.reference.attention import ROW_BLOCK, RunningSoftmax
from firesteel.ops.reference.shape import ReferenceShape
from firesteel.ops.types import Calibration, MarkovHead, PassContext, Proposal, SlotState

MAX_MARGIN = 50.0  # of speculation/survival.py


def gather_context(ring: Tensor, rows: RowBatch, pick: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """The ``span`` stored rows before the first position of each picked row's group."""
    start = rows.positions[rows.first[pick]].unsqueeze(-1)
    want = start - torch.arange(span, 0, -1, device=ring.device)
    valid = want >= 0
    got = ring[rows.slots[pick].unsqueeze(-1), want.clamp_min(0) % ring.shape[1]]
    return got.masked_fill(~valid.unsqueeze(-1), 0.0), valid


def gather_block(kv: Tensor, rows: RowBatch, pick: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """All rows of each picked row's group, ``width`` lanes."""
    index = rows.first[pick].unsqueeze(-1) + torch.arange(width, device=kv.device)
    valid = index <= rows.last[pick].unsqueeze(-1)
    got = kv[index.clamp_max(kv.shape[0] - 1)]
    return got.masked_fill(~valid.unsqueeze(-1), 0.0), valid


class ReferenceDraft(ReferenceShape):
    """What only drafting needs."""

    def block_attention(
        self, q: Tensor, kv: Tensor, window: Tensor, span: int, sinks: Tensor, table: str, ctx: PassContext
    ) -> Tensor:
        rows, out = ctx.rows, torch.empty_like(q)
        width = ctx.block
        assert width > 0, "a drafting pass states its block width"
        for at in range(0, rows.count, ROW_BLOCK):
            pick = torch.arange(at, min(at + ROW_BLOCK, rows.count), device=q.device)
            state = RunningSoftmax(q[pick], sinks, self)
            state.add(*gather_context(window, rows, pick, span))
            state.add(*gather_block(kv, rows, pick, width))
            out[pick] = state.result()
        cos, sin = ctx.rotary[table]
        return self.act(numeric.rotate(self.act(out), cos.unsqueeze(1), sin.unsqueeze(1), inverse=True))

    def markov_walk(
        self,
        base: Tensor,
        z: Tensor,
        head: MarkovHead,
        slots: Tensor,
        state: SlotState,
        *,
        shaped: bool,
        rejection: bool,
        keep_logits: bool,
    ) -> Proposal:
        previous, start = state.anchor[slots], state.cursor[slots]
        limit = state.history.shape[1] - 1
        heat = state.temperature[slots]
        stream = noise.DRAFT + (state.passes[slots] << noise.PASS_SHIFT) if rejection else noise.TARGET
        ids = range(base.shape[-1])
        tokens, margins, confidences, kept = [], [], [], []
        state.history[slots, start.clamp_max(limit)] = previous
        for j in range(base.shape[1]):
            embedded = head.w1[previous]
            logits = base[:, j] + self.linear_f32(embedded, head.w2)
            position = (start + 1 + j).clamp_max(limit)
            if shaped:
                logits = self.shape(logits, slots, position, state)
            score = logits + heat.unsqueeze(-1) * noise.noise(ids, position, slots, state, stream)
            best = score.topk(2, dim=-1).values
            previous = torch.argmax(score, dim=-1)
            state.history[slots, position] = previous
            tokens.append(previous)
            margins.append((best[:, 0] - best[:, 1]) / torch.where(heat > 0, heat, 1.0))
            if head.confidence is not None:
                confidences.append(self.linear_f32(torch.cat((z[:, j], embedded), -1), head.confidence)[:, 0])
            if keep_logits:
                kept.append(logits)
        return Proposal(
            torch.stack(tokens, 1),
            torch.stack(margins, 1),
            torch.stack(confidences, 1) if confidences else None,
            torch.stack(kept, 1) if kept else None,
        )

    def survival(
        self, proposal: Proposal, slots: Tensor, state: SlotState, calibration: Calibration | None
    ) -> Tensor:
        if calibration is None:
            return torch.ones_like(proposal.margin)
        kind = (state.temperature[slots] > 0).to(torch.int64)
        margin = torch.log1p(torch.nan_to_num(proposal.margin, nan=0.0).clamp(0.0, MAX_MARGIN))
        width = margin.shape[1]
        logit = calibration.depth[kind, :width] + calibration.margin[kind, None] * margin
        if proposal.confidence is not None:
            logit = logit + calibration.head[kind, None] * torch.nan_to_num(proposal.confidence, nan=0.0)
        return torch.cumprod(torch.sigmoid(logit), dim=-1)

    def admit(self, decodes: Tensor, drafts: int, state: SlotState) -> Tensor:
        alive = state.alive[decodes]
        if drafts == 0 or decodes.shape[0] == 0:
            return alive
        room = (state.max_len[decodes] - 1 - state.cursor[decodes] - 1).clamp_min(0)
        most = torch.minimum(torch.minimum(state.draft_len[decodes], state.draft_cap[decodes]), room) * alive
        depth = torch.arange(state.drafts.shape[1], device=decodes.device)
        exists = depth.unsqueeze(-1) < most  # [K, G]: depth first, so ties go to shallow drafts
        score = torch.where(exists, state.survival[decodes].t(), -1.0).flatten()
        order = torch.sort(score, descending=True, stable=True).indices[:drafts]
        taken = torch.zeros_like(score, dtype=torch.int64)
        taken[order] = 1
        return alive + (taken.view_as(exists) * exists).sum(0)

    # ---- classical rejection -----------------------------------------------
    def sample_rejection(
        self, logits: Tensor, samples: SampleRows, positions: Tensor, state: SlotState
    ) -> tuple[Tensor, Tensor]:
        finite = torch.isfinite(logits.amax(-1))
        last = samples.slots.shape[0] - 1
        group = samples.group.clamp_max(last)
        slots = torch.where(samples.group > last, state.cursor.shape[0] - 1, samples.slots[group])
        depth = torch.arange(logits.shape[0], device=logits.device) - samples.offset[group]
        drafted = (depth >= 0) & (depth < samples.width[group] - 1)
        place = depth.clamp(0, state.drafts.shape[1] - 1)
        draft = torch.where(drafted, state.drafts[slots, place], 0)
        heat = state.temperature[slots].unsqueeze(-1)
        warm = torch.where(heat > 0, heat, 1.0)
        p = torch.softmax(logits / warm, dim=-1)
        q = self._proposal(logits, slots, place, draft, state)
        ids = range(logits.shape[1])
        u = noise.uniform(noise.words(ids[:1], positions, slots, state, noise.ACCEPT)).squeeze(-1)
        p_draft, q_draft = (t.gather(1, draft.unsqueeze(-1)).squeeze(-1) for t in (p, q))
        left = (p - q).clamp_min(0.0)
        left = torch.where((left.sum(-1, keepdim=True) > 0), left, p)  # p = q: nothing was rejected
        second = torch.log(left) + noise.noise(ids, positions, slots, state, noise.RESIDUAL)
        fresh = logits + heat * noise.noise(ids, positions, slots, state, noise.BONUS)
        token = torch.where(u * q_draft < p_draft, draft, torch.argmax(second, dim=-1))
        token = torch.where(drafted, token, torch.argmax(fresh, dim=-1))
        return torch.where(heat.squeeze(-1) > 0, token, torch.argmax(logits, dim=-1)), finite

    @staticmethod
    def _proposal(logits: Tensor, slots: Tensor, place: Tensor, draft: Tensor, state: SlotState) -> Tensor:
        """q [R, V] that each row's draft was drawn from: its kept logits, or one-hot."""
        if state.draft_logits is None:
            return torch.zeros_like(logits).scatter_(1, draft.unsqueeze(-1), 1.0)
        heat = state.temperature[slots].unsqueeze(-1)
        return torch.softmax(state.draft_logits[slots, place] / torch.where(heat > 0, heat, 1.0), dim=-1)
