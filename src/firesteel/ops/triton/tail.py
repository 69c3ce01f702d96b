"""Head, sampling, the drafting walk, rows and commit."""

from __future__ import annotations

import torch
from torch import Tensor

from firesteel.core import Logprobs, RowBatch, SampleRows, Verdict
from firesteel.ops.reference.tail import ReferenceOps
from firesteel.ops.triton import commit, draft, rows, shape
from firesteel.ops.triton.head import head_logits, run_head, weight_of
from firesteel.ops.triton.launch import dense
from firesteel.ops.triton.sample import Partials, score_stored
from firesteel.ops.triton.target import Target
from firesteel.ops.types import Calibration, Linear, MarkovHead, PromptRows, Proposal, SlotState


class TailOps(ReferenceOps):
    """Ops of the tail as Triton kernels.

    Two stay plain torch on the device, rare, without a host value and with bits
    that no other row can change: ``restrict`` works element by element;
    ``sample_rejection`` draws by element, ``argmax`` and a softmax per row, and
    its one sum is only compared with 0.
    """

    target: Target

    def _narrow(self, w: Tensor) -> bool:
        """Whether products run in bf16: official numerics, whose activations lie on that grid, and a bf16 weight."""
        return self.numerics.official and w.dtype == torch.bfloat16

    # ---- head and sampling --------------------------------------------------
    def logits(self, x: Tensor, head: Linear) -> Tensor:
        w = weight_of(head)
        return head_logits(x, w, self.target, self._narrow(w))

    def head_sample(
        self, x: Tensor, head: Linear, slots: Tensor, positions: Tensor, state: SlotState
    ) -> tuple[Tensor, Tensor]:
        w, slots, positions = weight_of(head), dense(slots), dense(positions)
        parts = run_head(
            dense(x),
            w,
            self.target,
            narrow=self._narrow(w),
            rows=x.shape[0],
            sampling=(slots, positions, state),
        )
        assert parts is not None, "asked for"
        return self._reduce(parts, slots, positions, state)

    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, state: SlotState
    ) -> tuple[Tensor, Tensor]:
        slots, positions = dense(slots), dense(positions)
        parts = score_stored(dense(logits), slots, positions, state, second=False, rejection=False)
        return self._reduce(parts, slots, positions, state)

    def shape(self, logits: Tensor, slots: Tensor, positions: Tensor, state: SlotState) -> Tensor:
        return shape.shape_rows(logits, slots, positions, state)

    def logprobs(self, logits: Tensor, tokens: Tensor, n: int) -> Logprobs:
        return shape.logprobs(logits, tokens, n)

    @staticmethod
    def _reduce(parts: Partials, slots: Tensor, positions: Tensor, state: SlotState) -> tuple[Tensor, Tensor]:
        tokens = torch.empty(parts.rows, dtype=torch.int64, device=slots.device)
        finite = torch.empty(parts.rows, dtype=torch.bool, device=slots.device)
        parts.reduce(slots, positions, state, tokens, finite)
        return tokens, finite

    # ---- drafter ------------------------------------------------------------
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
        groups, depth, vocab = base.shape
        base, slots = dense(base), dense(slots)
        narrow = self._narrow(weight_of(head.w2))
        buffers = draft.WalkBuffers(slots, depth, state)
        kept = base.new_empty(groups, depth, vocab) if keep_logits else None
        if shaped:
            for step in range(depth):
                raw = base.new_empty(groups, vocab)
                draft.step_logits(buffers, base, head, self.target, step, narrow, raw)
                shaped_logits = self.shape(raw, slots, buffers.places[step + 1], state)
                if kept is not None:
                    kept[:, step] = shaped_logits
                draft.choose_stored(buffers, shaped_logits, step, rejection)
        else:
            draft.walk_plain(buffers, base, head, self.target, narrow=narrow, rejection=rejection, kept=kept)
        confidence = draft.confidences(buffers, z, head)
        return Proposal(
            buffers.tokens[1:].t().contiguous(), buffers.margin.t().contiguous(), confidence, kept
        )

    def survival(
        self, proposal: Proposal, slots: Tensor, state: SlotState, calibration: Calibration | None
    ) -> Tensor:
        return commit.survival(proposal, slots, state, calibration)

    def note_drafts(
        self, proposal: Proposal, slots: Tensor, state: SlotState, calibration: Calibration | None
    ) -> Tensor:
        return commit.survival(proposal, slots, state, calibration, note=True)

    def block_rows(self, slots: Tensor, width: int, noise_token: int, state: SlotState) -> RowBatch:
        return rows.block_rows(dense(slots), width, noise_token, state)

    # ---- rows and commit ------------------------------------------------------
    def admit(self, decodes: Tensor, drafts: int, state: SlotState) -> Tensor:
        return rows.admit(dense(decodes), drafts, state)

    def build_rows(
        self,
        state: SlotState,
        prompt: PromptRows,
        decodes: Tensor,
        widths: Tensor,
        decode_rows: int,
        max_position: int,
    ) -> tuple[RowBatch, SampleRows]:
        return rows.build_rows(state, prompt, dense(decodes), dense(widths), decode_rows, max_position)

    def commit(
        self,
        tokens: Tensor,
        finite: Tensor,
        rows: RowBatch,
        samples: SampleRows,
        state: SlotState,
        widest: int,
    ) -> Verdict:
        return commit.commit(tokens, finite, rows, samples, state, widest)
