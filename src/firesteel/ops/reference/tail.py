"""Rows of a step, noise, sampling and commit in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from firesteel.core import RowBatch, SampleRows, Verdict
from firesteel.ops.reference.draft import ReferenceDraft
from firesteel.ops.reference.noise import noise
from firesteel.ops.types import Linear, Numerics, PromptRows, SlotState


class ReferenceTail(ReferenceDraft):
    """What runs before and after the model in a step."""

    def build_rows(
        self,
        state: SlotState,
        prompt: PromptRows,
        decodes: Tensor,
        widths: Tensor,
        decode_rows: int,
        max_position: int,
    ) -> tuple[RowBatch, SampleRows]:
        device, base = decodes.device, prompt.tokens.shape[0]
        ends = torch.cumsum(widths, 0)
        row = torch.arange(decode_rows, device=device)
        group = torch.searchsorted(ends, row, right=True)
        valid = group < decodes.shape[0]
        g = group.clamp_max(max(decodes.shape[0] - 1, 0))
        scratch = state.cursor.shape[0] - 1
        if decodes.shape[0]:
            start = ends[g] - widths[g]
            slot = torch.where(valid, decodes[g], scratch)
            first = torch.where(valid, base + start, base + row)
            last = torch.where(valid, base + ends[g] - 1, base + row)
        else:
            assert decode_rows == 0, "draft rows need a request"
            start, slot, first, last = row, row, row, row
        depth = row - start
        draft = state.drafts[slot, (depth - 1).clamp(0, state.drafts.shape[1] - 1)]
        token = torch.where(depth == 0, state.anchor[slot], draft)
        token = torch.where(valid, token, 0)
        position = torch.where(valid, state.cursor[slot] + depth, 0)
        rows = RowBatch(
            tokens=torch.cat((prompt.tokens, token)),
            positions=torch.cat((prompt.positions, position)),
            slots=torch.cat((prompt.slots, slot)),
            first=torch.cat((prompt.first, first)),
            last=torch.cat((prompt.last, last)),
            valid=torch.cat((torch.ones_like(prompt.tokens, dtype=torch.bool), valid)),
            max_position=max_position,
        )
        state.history[torch.where(rows.valid, rows.slots, scratch), rows.positions] = rows.tokens
        return rows, self._sample_rows(prompt, decodes, widths, ends, group, base + row)

    @staticmethod
    def _sample_rows(
        prompt: PromptRows, decodes: Tensor, widths: Tensor, ends: Tensor, group: Tensor, row: Tensor
    ) -> SampleRows:
        finals = prompt.sampling.shape[0]
        one = torch.arange(finals, device=decodes.device)
        return SampleRows(
            rows=torch.cat((prompt.sampling, row)),
            group=torch.cat((one, finals + group)),
            offset=torch.cat((one, finals + ends - widths)),
            width=torch.cat((torch.ones_like(one), widths)),
            slots=torch.cat((prompt.slots[prompt.sampling], decodes)),
        )

    def head_sample(
        self, x: Tensor, head: Linear, slots: Tensor, positions: Tensor, state: SlotState
    ) -> tuple[Tensor, Tensor]:
        return self.sample(self.logits(x, head), slots, positions, state)

    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, state: SlotState
    ) -> tuple[Tensor, Tensor]:
        # a masked row holds -inf; a broken one NaN, +inf, or nothing to choose from
        finite = torch.isfinite(logits.amax(-1))
        heat = state.temperature[slots].unsqueeze(-1)
        score = logits
        if bool((state.temperature > 0).any()):  # T = 0 everywhere: the noise is multiplied by 0
            score = logits + heat * noise(range(logits.shape[1]), positions, slots, state)
        return torch.argmax(score, dim=-1), finite

    def commit(
        self,
        tokens: Tensor,
        finite: Tensor,
        rows: RowBatch,
        samples: SampleRows,
        state: SlotState,
        widest: int,
    ) -> Verdict:
        device, slots, width = tokens.device, samples.slots, samples.width
        step = torch.arange(widest, device=device)
        at = (samples.offset.unsqueeze(-1) + step).clamp_max(tokens.shape[0] - 1)
        token, good = tokens[at], finite[at]
        if widest > 1:
            # a first anchor has no drafts: its group is one row wide
            hit = (token[:, :-1] == state.drafts[slots, : widest - 1]) & (step[1:] < width.unsqueeze(-1))
            accepted = torch.cumprod(hit.to(torch.int64), -1).sum(-1)
        else:
            accepted = torch.zeros_like(width)
        count = torch.where(width > 0, accepted + 1, 0)
        count, finished = self._truncate(token, good, count, samples, rows, state)
        runs = width > 0
        base = rows.positions[samples.rows[samples.offset.clamp_max(tokens.shape[0] - 1)]] + 1
        anchor = token.gather(1, (count - 1).clamp_min(0).unsqueeze(-1)).squeeze(-1)
        moved = runs & (count > 0)
        state.cursor[slots] = torch.where(moved, base + count - 1, state.cursor[slots])
        state.anchor[slots] = torch.where(moved, anchor, state.anchor[slots])
        state.alive[slots] = torch.where(runs, (finished == 0).to(torch.int64), state.alive[slots])
        return Verdict(token, count, torch.minimum(accepted, count), (width - 1).clamp_min(0), finished)

    @staticmethod
    def _truncate(
        token: Tensor, good: Tensor, count: Tensor, samples: SampleRows, rows: RowBatch, state: SlotState
    ) -> tuple[Tensor, Tensor]:
        """Cut (tokens [G, W], count [G]) at the first bad row, stop id or length limit."""
        widest = token.shape[1]
        step = torch.arange(widest, device=token.device)

        def first(where: Tensor) -> Tensor:
            return torch.where(where, step, widest).amin(-1)

        finished = torch.zeros_like(count)
        bad = first(~good)
        finished = torch.where(bad < count, 3, finished)
        count = torch.minimum(count, bad)
        stop = first((token.unsqueeze(-1) == state.stop_ids[samples.slots].unsqueeze(1)).any(-1))
        finished = torch.where(stop < count, 1, finished)
        count = torch.minimum(count, stop + 1)
        base = rows.positions[samples.rows[samples.offset.clamp_max(samples.rows.shape[0] - 1)]] + 1
        room = state.max_len[samples.slots] - base
        finished = torch.where((room < count) | ((room == count) & (finished == 0)), 2, finished)
        count = torch.minimum(count, room.clamp_min(0))
        return count, torch.where(samples.width > 0, finished, 0)


class ReferenceOps(ReferenceTail):
    """The plain torch backend: oracle of the others, and complete by itself."""

    name = "reference"

    def __init__(self, numerics: Numerics):
        self.numerics = numerics
