"""The library's part around the drafter's layers: block rows, the walk, survival, admission."""

from __future__ import annotations

import torch
from torch import Tensor

from firesteel.core import RowBatch
from firesteel.ops.native.library import dense, function
from firesteel.ops.native.tail import NativeTail
from firesteel.ops.reference.noise import DRAFT, PASS_SHIFT, TARGET
from firesteel.ops.types import Calibration, MarkovHead, Numerics, Proposal, SlotState

NO_TABLE = (0, 0, 0, 0)


class NativeDraft(NativeTail):
    """What only drafting needs, apart from its attention."""

    def __init__(self, numerics: Numerics):
        super().__init__(numerics)
        self._block_rows = function("block_rows", "12q")
        self._markov_walk = function("markov_walk", "25q")
        self._walk_logits = function("walk_logits", "9q")
        self._walk_pick = function("walk_pick", "17q")
        self._survival = function("survival", "11q")
        self._note_drafts = function("note_drafts", "19q")
        self._admit = function("admit", "11q")

    def block_rows(self, slots: Tensor, width: int, noise_token: int, state: SlotState) -> RowBatch:
        slots, groups = dense(slots), slots.shape[0]
        lines = torch.empty(5, groups * width, dtype=torch.int64)
        valid = torch.empty(groups * width, dtype=torch.bool)
        tokens, positions, owners, first, last = parts = lines.unbind()
        given = (
            slots.data_ptr(),
            state.cursor.data_ptr(),
            state.anchor.data_ptr(),
            groups,
            width,
            noise_token,
        )
        self._block_rows(*given, *(t.data_ptr() for t in parts), valid.data_ptr())
        return RowBatch(tokens, positions, owners, first, last, valid, 0)

    # ---- the walk -----------------------------------------------------------------
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
        base, z, slots = dense(base), dense(z), dense(slots)
        if shaped:
            return self._shaped_walk(base, z, head, slots, state, rejection, keep_logits)
        groups, depth, vocab = base.shape
        w1, judge, history = dense(head.w1), head.confidence, state.history
        assert history.is_contiguous(), "the history is written in place"
        tokens = torch.empty(groups, depth, dtype=torch.int64)
        margin = torch.empty(groups, depth)
        confidence = torch.empty(groups, depth) if judge is not None else None
        kept = torch.empty(groups, depth, vocab) if keep_logits else None
        lines = (slots, state.cursor, state.anchor, state.passes, state.seed_lo, state.seed_hi, state.sample)
        noise = (DRAFT, PASS_SHIFT) if rejection else (TARGET, -1)
        self._markov_walk(
            *(base.data_ptr(), z.data_ptr(), groups, depth, z.shape[-1]),
            *(w1.data_ptr(), head.w2.data.address, 0 if judge is None else judge.data.address),
            *(t.data_ptr() for t in lines),
            *(state.temperature.data_ptr(), history.data_ptr(), history.shape[1], *noise),
            *(tokens.data_ptr(), margin.data_ptr()),
            *(0 if t is None else t.data_ptr() for t in (confidence, kept)),
            self._flags(),
        )
        return Proposal(tokens, margin, confidence, kept)

    def _shaped_walk(
        self,
        base: Tensor,
        z: Tensor,
        head: MarkovHead,
        slots: Tensor,
        state: SlotState,
        rejection: bool,
        keep_logits: bool,
    ) -> Proposal:
        """The walk with the logits of every position shaped by plain torch."""
        groups, depth, vocab = base.shape
        w1, rank, limit = dense(head.w1), head.w2.k, state.history.shape[1] - 1
        start = state.cursor[slots]
        stream = torch.full_like(slots, TARGET)
        if rejection:
            stream = DRAFT + (state.passes[slots] << PASS_SHIFT)
        places = (start + torch.arange(depth + 1).unsqueeze(-1)).clamp_max(limit)  # [K + 1, G]
        tokens = torch.empty(depth + 1, groups, dtype=torch.int64)
        torch.index_select(state.anchor, 0, slots, out=tokens[0])
        state.history[slots, places[0]] = tokens[0]
        margin = torch.empty(depth, groups)
        embedded, logits = torch.empty(depth, groups, rank), torch.empty(depth, groups, vocab)
        flags, at = self._flags(), base.data_ptr()
        assert state.history.is_contiguous(), "the history is written in place"
        more = (stream.data_ptr(), state.history.data_ptr(), limit + 1)
        for j in range(depth):
            into = (embedded[j].data_ptr(), logits[j].data_ptr(), flags)
            weights = (w1.data_ptr(), tokens[j].data_ptr(), head.w2.data.address)
            self._walk_logits(*weights, at + 4 * j * vocab, depth * vocab, groups, *into)
            logits[j] = self.shape(logits[j], slots, places[j + 1], state)
            fields = self._sampling_fields(logits[j], vocab, slots, places[j + 1], state)
            self._walk_pick(*fields, tokens[j + 1].data_ptr(), 0, flags, *more, margin[j].data_ptr())
        confidence = None
        if head.confidence is not None:
            joined = torch.cat((z, embedded.transpose(0, 1)), -1)
            confidence = self.linear_f32(joined.flatten(0, 1), head.confidence).view(groups, depth)
        kept = logits.transpose(0, 1).contiguous() if keep_logits else None
        return Proposal(tokens[1:].t().contiguous(), margin.t().contiguous(), confidence, kept)

    # ---- survival and admission -----------------------------------------------------
    def survival(
        self, proposal: Proposal, slots: Tensor, state: SlotState, calibration: Calibration | None
    ) -> Tensor:
        slots = dense(slots)
        out, fields, _keep = self._signals(proposal, slots, state, calibration)
        self._survival(*fields)
        return out

    def note_drafts(
        self, proposal: Proposal, slots: Tensor, state: SlotState, calibration: Calibration | None
    ) -> Tensor:
        slots, tokens = dense(slots), dense(proposal.tokens)
        out, fields, _keep = self._signals(proposal, slots, state, calibration)
        tables = (state.drafts, state.margin, state.confidence, state.survival)
        assert all(t.is_contiguous() for t in tables), "slot state is one block"
        places = (tokens, state.passes, state.draft_len, *tables)
        self._note_drafts(*fields, *(t.data_ptr() for t in places), state.drafts.shape[1])
        return out

    @staticmethod
    def _signals(
        proposal: Proposal, slots: Tensor, state: SlotState, calibration: Calibration | None
    ) -> tuple[Tensor, tuple[int, ...], tuple[Tensor | None, ...]]:
        """(survival to be filled, fields of the call, what keeps their addresses alive)."""
        margin = dense(proposal.margin)
        head = None if proposal.confidence is None else dense(proposal.confidence)
        out = torch.empty(margin.shape)
        table = NO_TABLE
        if calibration is not None:
            depth, heads, margins = calibration.depth, calibration.head, calibration.margin
            assert depth.is_contiguous() and depth.shape[1] >= margin.shape[1], "one value per depth"
            table = (depth.data_ptr(), heads.data_ptr(), margins.data_ptr(), depth.shape[1])
        signals = (margin.data_ptr(), 0 if head is None else head.data_ptr(), slots.data_ptr())
        fields = (*signals, *margin.shape, state.temperature.data_ptr(), *table, out.data_ptr())
        return out, fields, (margin, head)

    def admit(self, decodes: Tensor, drafts: int, state: SlotState) -> Tensor:
        decodes, groups = dense(decodes), decodes.shape[0]
        out = torch.empty(groups, dtype=torch.int64)
        lines = (state.alive, state.cursor, state.max_len, state.draft_len, state.draft_cap, state.survival)
        assert state.survival.is_contiguous(), "slot state is one block"
        at = (t.data_ptr() for t in lines)
        self._admit(decodes.data_ptr(), groups, drafts, *at, state.survival.shape[1], out.data_ptr())
        return out
