"""The library's part before and after the model: rows, sampling, commit."""

from __future__ import annotations

import torch
from torch import Tensor

from firesteel.core import RowBatch, SampleRows, Verdict
from firesteel.ops.native.library import dense, function
from firesteel.ops.reference.noise import TARGET
from firesteel.ops.reference.tail import ReferenceOps
from firesteel.ops.types import Linear, Numerics, PromptRows, SlotState


class NativeTail(ReferenceOps):
    """Everything but the model's own ops."""

    def __init__(self, numerics: Numerics):
        super().__init__(numerics)
        self._official = int(numerics.official)
        self._sample = function("sample", "13q")
        self._head_sample = function("head_sample", "14q")
        self._build_rows = function("build_rows", "30q")
        self._commit = function("commit", "23q")

    def _flags(self) -> int:
        """What every call is told: numerics and the number of threads."""
        return self._official | torch.get_num_threads() << 8

    # ---- rows of a step ---------------------------------------------------------
    def build_rows(
        self,
        state: SlotState,
        prompt: PromptRows,
        decodes: Tensor,
        widths: Tensor,
        decode_rows: int,
        max_position: int,
    ) -> tuple[RowBatch, SampleRows]:
        decodes, widths = dense(decodes), dense(widths)
        assert decodes.shape[0] or decode_rows == 0, "draft rows need a request"
        count, finals = prompt.tokens.shape[0] + decode_rows, prompt.sampling.shape[0]
        fields = (prompt.tokens, prompt.positions, prompt.slots, prompt.first, prompt.last, prompt.sampling)
        given = [dense(t) for t in fields]
        lines = torch.empty(5, count, dtype=torch.int64)
        valid = torch.empty(count, dtype=torch.bool)
        samples = torch.empty(2, finals + decode_rows, dtype=torch.int64)
        groups = torch.empty(3, finals + decodes.shape[0], dtype=torch.int64)
        tokens, positions, slots, first, last = lines.unbind()
        rows = RowBatch(tokens, positions, slots, first, last, valid, max_position)
        out = SampleRows(*samples.unbind(), *groups.unbind())
        into = [tokens, positions, slots, first, last, valid]
        into += [out.rows, out.group, out.offset, out.width, out.slots]
        shape = (prompt.tokens.shape[0], finals, decodes.data_ptr(), widths.data_ptr(), decodes.shape[0])
        history, drafts = state.history, state.drafts
        assert history.is_contiguous() and drafts.is_contiguous(), "slot state is one block"
        lines_of_slots = (
            *(decode_rows, state.cursor.shape[0] - 1, state.cursor.data_ptr(), state.anchor.data_ptr()),
            *(drafts.data_ptr(), drafts.shape[1], history.data_ptr(), history.shape[1]),
        )
        self._build_rows(
            *(t.data_ptr() for t in given), *shape, *lines_of_slots, *(t.data_ptr() for t in into)
        )
        return rows, out

    def commit(
        self,
        tokens: Tensor,
        finite: Tensor,
        rows: RowBatch,
        samples: SampleRows,
        state: SlotState,
        widest: int,
    ) -> Verdict:
        groups, tokens, finite = samples.slots.shape[0], dense(tokens), dense(finite)
        out = torch.empty(groups, widest, dtype=torch.int64)
        results = torch.empty(4, groups, dtype=torch.int64).unbind()
        places = (rows.positions, samples.rows, samples.offset, samples.width, samples.slots)
        where = [dense(t) for t in places]
        moved = (state.cursor, state.anchor, state.alive, state.max_len)
        assert state.stop_ids.is_contiguous() and state.drafts.is_contiguous(), "slot state is one block"
        self._commit(
            *(tokens.data_ptr(), finite.data_ptr(), tokens.shape[0]),
            *(t.data_ptr() for t in where),
            *(groups, widest),
            *(t.data_ptr() for t in moved),
            *(state.stop_ids.data_ptr(), state.stop_ids.shape[1]),
            *(state.drafts.data_ptr(), state.drafts.shape[1]),
            *(out.data_ptr(), *(t.data_ptr() for t in results)),
        )
        return Verdict(out, *results)

    # ---- sampling -------------------------------------------------------------
    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, state: SlotState
    ) -> tuple[Tensor, Tensor]:
        logits, slots, positions = dense(logits), dense(slots), dense(positions)
        out, fields = self._sampling(logits, logits.shape[1], slots, positions, state)
        self._sample(*fields)
        return out

    def head_sample(
        self, x: Tensor, head: Linear, slots: Tensor, positions: Tensor, state: SlotState
    ) -> tuple[Tensor, Tensor]:
        x, slots, positions = dense(x), dense(slots), dense(positions)
        out, fields = self._sampling(x, head.n, slots, positions, state)
        self._head_sample(*fields, head.data.address)
        return out

    def _sampling(
        self, x: Tensor, vocab: int, slots: Tensor, positions: Tensor, state: SlotState
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, ...]]:
        """((tokens, finite) to be filled, fields of the call); the caller keeps the dense tensors alive."""
        rows = x.shape[0]
        tokens, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
        fields = self._sampling_fields(x, vocab, slots, positions, state)
        return (tokens, finite), (*fields, tokens.data_ptr(), finite.data_ptr(), self._flags())

    @staticmethod
    def _sampling_fields(
        x: Tensor, vocab: int, slots: Tensor, positions: Tensor, state: SlotState
    ) -> tuple[int, ...]:
        """The fields of a sampling call up to its stream."""
        given = (x.data_ptr(), x.shape[0], vocab, slots.data_ptr(), positions.data_ptr())
        seed = (state.seed_lo.data_ptr(), state.seed_hi.data_ptr(), state.sample.data_ptr())
        return (*given, *seed, state.temperature.data_ptr(), TARGET)
