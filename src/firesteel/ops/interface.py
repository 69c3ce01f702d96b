"""The signatures every backend implements.

An op is row-wise: a row's result has the same bits whatever other rows share
the call. ``assert_row_invariant`` in ``ops.testing`` checks that for each.
Activations are float32 tensors on the CPU (their values on the bf16 grid in
official numerics); a GPU backend may store them as bf16.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from firesteel.checkpoint.codecs import QTensor
from firesteel.core import Logprobs, RowBatch, SampleRows, Verdict
from firesteel.ops.types import (
    Calibration,
    Compressor,
    CompressorMemory,
    ContextWeights,
    DraftStage,
    Experts,
    Hyper,
    HyperHead,
    Linear,
    MarkovHead,
    Norm,
    Numerics,
    PassContext,
    PromptRows,
    Proposal,
    Rope,
    Router,
    SlotState,
)


class Ops(ABC):
    """One backend: prepares weights and runs every op of a step."""

    name: str
    numerics: Numerics
    cache: torch.dtype = torch.float32  # of K=V rings and entries, as the backend wants them

    # ---- weights ----------------------------------------------------------
    @abstractmethod
    def linear_weight(self, weight: QTensor) -> Linear:
        """Prepare a weight [N, K] in its checkpoint format."""

    @abstractmethod
    def stacked_weight(self, weights: Sequence[QTensor]) -> Linear:
        """Prepare several weights of one input as one [sum of N, K]."""

    @abstractmethod
    def expert_weights(self, w1: Sequence[QTensor], w2: Sequence[QTensor], w3: Sequence[QTensor]) -> Experts:
        """Prepare routed experts; lists are indexed by expert."""

    def share_input(self, weights: Sequence[tuple[Linear, bool]]) -> None:  # noqa: B027 -- nothing to do is right
        """Declare weights that always multiply the same input, the first of them before the others.

        True marks those used by ``linear_f32``. A backend may then multiply by all at once.
        """

    # ---- order ------------------------------------------------------------
    def beside(self) -> AbstractContextManager[None]:
        """What is done inside may run beside all that follows until ``join``; nobody reads its results before.

        Its inputs must live until then.
        """
        return nullcontext()

    def join(self) -> None:  # noqa: B027 -- nothing to do is right
        """Wait for what runs beside."""

    # ---- one pass ---------------------------------------------------------
    @abstractmethod
    def begin_pass(
        self,
        rows: RowBatch,
        page_table: Tensor,
        page_size: int,
        ropes: Mapping[str, Rope],
        ratios: Sequence[int],
    ) -> PassContext:
        """Share what all layers of a pass need (rotations of rows and entries)."""

    @abstractmethod
    def embed(self, table: Tensor, tokens: Tensor, streams: int) -> Tensor:
        """Token embeddings copied into all residual streams: [R, hc, D]."""

    @abstractmethod
    def linear(self, x: Tensor, w: Linear) -> Tensor:
        """x [R, K] times w^T: [R, N] as an activation."""

    @abstractmethod
    def linear_f32(self, x: Tensor, w: Linear) -> Tensor:
        """x [R, K] times an unquantised w^T, float32 result without rounding."""

    @abstractmethod
    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """RMS norm over the last dim, as an activation."""

    @abstractmethod
    def hyper_pre(self, h: Tensor, w: Hyper, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
        """Streams h [R, hc, D] to the normed sublayer input.

        Returns (x [R, D], post [R, hc], comb [R, hc, hc]); comb[j, k] carries
        source stream j into destination stream k.
        """

    @abstractmethod
    def hyper_post(self, f: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """New streams post_k * f + sum_j comb[j, k] * h_j: [R, hc, D]."""

    def hyper_step(
        self, f: Tensor, h: Tensor, post: Tensor, comb: Tensor, w: Hyper, norm: Norm
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """From one sublayer to the next: ``hyper_post``, and ``hyper_pre`` of its streams (h, x, post, comb)."""
        h = self.hyper_post(f, h, post, comb)
        return (h, *self.hyper_pre(h, w, norm))

    @abstractmethod
    def hyper_head(self, h: Tensor, w: HyperHead, norm: Norm) -> tuple[Tensor, Tensor]:
        """Collapse streams: (z [R, D] before the norm, x [R, D] after it)."""

    @abstractmethod
    def tap(self, h: Tensor) -> Tensor:
        """Mean over the streams, as an activation: [R, D]."""

    @abstractmethod
    def query(self, q: Tensor, heads: int, eps: float, table: str, ctx: PassContext) -> Tensor:
        """Split [R, H*d] into heads, unweighted RMS norm, rotate: [R, H, d]."""

    def queries(self, q: Tensor, heads: int, eps: float, table: str, ctx: PassContext) -> Tensor:
        """What ``attention`` and ``block_attention`` take as q [R, H, d]: ``query``,
        or raw heads where they norm and turn those themselves.
        """
        return self.query(q, heads, eps, table, ctx)

    @abstractmethod
    def key_value(self, kv: Tensor, norm: Norm, table: str, ctx: PassContext) -> Tensor:
        """The shared K=V row in its stored form: norm, rotate, quantise: [R, d]."""

    @abstractmethod
    def compress(self, x: Tensor, w: Compressor, memory: CompressorMemory, ctx: PassContext) -> None:
        """Store raw rows and write every entry that a row of this pass closes."""

    @abstractmethod
    def index_select(
        self,
        q: Tensor,
        head_weights: Tensor,
        keys: Tensor,
        ratio: int,
        top_k: int,
        rope_dim: int,
        table: str,
        ctx: PassContext,
    ) -> Tensor:
        """Choose entries per row.

        q [R, h, di] not yet rotated, head_weights [R, h], keys [P, page/ratio, di].
        Returns int64 [R, n] entry indices in ascending order padded with -1;
        ties go to the lowest index. n <= top_k covers the pass's longest row.
        """

    @abstractmethod
    def attention(
        self,
        q: Tensor,
        kv: Tensor,
        window: Tensor,
        span: int,
        sinks: Tensor,
        entries: Tensor | None,
        ratio: int,
        selection: Tensor | None,
        table: str,
        ctx: PassContext,
    ) -> Tensor:
        """Attend to the last ``span`` rows and to entries; one softmax with a sink.

        q [R, H, d]; kv [R, d] are the rows of this pass; window [S, ring, d]
        holds older ones; entries [P, page/ratio, d] by page, all visible ones
        when ``selection`` is None. The result [R, H, d] has its rotated dims
        turned back by the row's own position.
        """

    @abstractmethod
    def output(self, o: Tensor, wo_a: Sequence[Linear], wo_b: Linear) -> Tensor:
        """Grouped output projection of [R, H, d]: [R, D]."""

    @abstractmethod
    def store_window(self, window: Tensor, kv: Tensor, ctx: PassContext) -> None:
        """Write this pass's K=V rows into their rings (the last ``ring`` of each slot)."""

    @abstractmethod
    def route(self, x: Tensor, w: Router, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(ids int64 [R, k] ascending, weights float32 [R, k])."""

    @abstractmethod
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
        """Routed experts in ascending id plus the shared ones (w13, w2): [R, D].

        ``valid`` bool [R]: the others are padding, whose results nobody looks at (finite, if anything).
        ``begun``: what ``begin_shared`` gave for these rows. Without ``whole`` the result may be one that
        nobody can read but ``hyper_step`` and ``hyper_post``, which then add it up themselves.
        """

    def begin_shared(
        self, x: Tensor, router: Router, shared: Sequence[tuple[Linear, Linear]], limit: float
    ) -> Sequence[Tensor] | None:
        """Start the shared experts before ``route`` chooses the others; ``moe`` waits for them.

        None: nothing has been started, ``moe`` runs them in their turn. The bits are the same.
        """
        return None

    # ---- drafter ----------------------------------------------------------
    def context_rows(
        self,
        passes: Sequence[tuple[Sequence[Tensor], PassContext]],
        w: ContextWeights,
        windows: Sequence[Tensor],
        first: Tensor | None = None,
    ) -> None:
        """Store every stage's context row of all rows of ``passes``, the earliest first.

        A pass gives its ``streams`` [R, hc, D], outputs of the tapped layers in
        the order of ``w.project``'s columns; ``windows`` [S, ring, d]: one ring
        per stage; ``first`` int64 [S]: the pass from which on a slot's rows are wanted, if not
        all are. The bits are those of the ops below.
        """
        for i, (streams, ctx) in enumerate(passes):
            if first is not None:
                valid = ctx.rows.valid & (first[ctx.rows.slots] <= i)
                ctx = replace(ctx, rows=replace(ctx.rows, valid=valid), scratch={})
            x = self.norm(self.linear(torch.cat([self.tap(h) for h in streams], dim=-1), w.project), w.norm)
            for (wkv, norm), window in zip(w.stages, windows, strict=True):
                self.store_window(window, self.key_value(self.linear(x, wkv), norm, w.table, ctx), ctx)

    def draft_stage(self, h: Tensor, w: DraftStage, window: Tensor, ctx: PassContext) -> Tensor:
        """Streams h [R, hc, D] of a draft block through one stage; ``window`` [S, ring, d] holds its context.

        The bits are those of the ops it consists of.
        """
        x, post, comb = self.hyper_pre(h, w.attn_hyper, w.attn_norm)
        qa = self.norm(self.linear(x, w.wq_a), w.q_norm)
        q = self.queries(self.linear(qa, w.wq_b), w.heads, w.eps, w.table, ctx)
        kv = self.key_value(self.linear(x, w.wkv), w.kv_norm, w.table, ctx)
        o = self.block_attention(q, kv, window, w.span, w.sinks, w.table, ctx)
        f = self.output(o, w.wo_a, w.wo_b)
        h, x, post, comb = self.hyper_step(f, h, post, comb, w.ffn_hyper, w.ffn_norm)
        begun = self.begin_shared(x, w.router, w.shared, w.limit)
        ids, weights = self.route(x, w.router, ctx.rows.tokens)
        f = self.moe(x, ids, weights, w.experts, w.shared, w.limit, None, begun, whole=False)
        return self.hyper_post(f, h, post, comb)

    @abstractmethod
    def block_attention(
        self, q: Tensor, kv: Tensor, window: Tensor, span: int, sinks: Tensor, table: str, ctx: PassContext
    ) -> Tensor:
        """Attention of a draft block: every row sees the same keys.

        Those are the ``span`` stored rows before the group's first position
        (window [S, ring, d]) and all rows of its own group (kv [R, d]).
        Result as of ``attention``.
        """

    @abstractmethod
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
        """Sample K drafts per group one after the other.

        base float32 [G, K, V], z [G, K, D]; the first previous token is the
        slot's anchor, draft j stands at position cursor + 1 + j. Coupled
        drafts share the target's noise; ``rejection`` uses the drafter's own.
        Writes anchor and drafts into the history.
        """

    @abstractmethod
    def survival(
        self, proposal: Proposal, slots: Tensor, state: SlotState, calibration: Calibration | None
    ) -> Tensor:
        """Survival float32 [G, K]: running product of calibrated probabilities; ones without a calibration."""

    def note_drafts(
        self, proposal: Proposal, slots: Tensor, state: SlotState, calibration: Calibration | None
    ) -> Tensor:
        """Write new drafts, their signals and their number into the lines of ``slots``; returns ``survival``."""
        width = proposal.tokens.shape[1]
        state.passes[slots] += 1
        state.draft_len.index_fill_(0, slots, width)
        state.drafts[slots, :width] = proposal.tokens
        state.margin[slots, :width] = proposal.margin
        if proposal.confidence is not None:
            state.confidence[slots, :width] = proposal.confidence
        survival = self.survival(proposal, slots, state, calibration)
        state.survival[slots, :width] = survival
        return survival

    def block_rows(self, slots: Tensor, width: int, noise_token: int, state: SlotState) -> RowBatch:
        """[anchor, noise, ...] of every slot [G] at its cursor: G groups of ``width`` rows."""
        place = torch.arange(width, device=slots.device)
        row = torch.arange(slots.shape[0] * width, device=slots.device)
        tokens = torch.where(place == 0, state.anchor[slots].unsqueeze(-1), noise_token)
        first = row // width * width
        return RowBatch(
            tokens=tokens.flatten(),
            positions=(state.cursor[slots].unsqueeze(-1) + place).flatten(),
            slots=slots.unsqueeze(-1).expand(-1, width).contiguous().flatten(),  # of one slot: no view
            first=first,
            last=first + width - 1,
            valid=torch.ones_like(row, dtype=torch.bool),
            max_position=0,
        )

    @abstractmethod
    def admit(self, decodes: Tensor, drafts: int, state: SlotState) -> Tensor:
        """Verify widths int64 [G]: the ``drafts`` best proposals by survival, as prefixes.

        Ties go to the shallower draft, then to the earlier group. A request
        that has ended gets 0, any other at least 1 and no row past its limit.
        """

    # ---- tail -------------------------------------------------------------
    @abstractmethod
    def build_rows(
        self,
        state: SlotState,
        prompt: PromptRows,
        decodes: Tensor,
        widths: Tensor,
        decode_rows: int,
        max_position: int,
    ) -> tuple[RowBatch, SampleRows]:
        """Rows of a step: prompt rows, then ``decode_rows`` rows of the slots ``decodes``.

        ``widths`` int64 [G] rows per decode (0 for a request that has ended);
        rows beyond their sum are padding.
        """

    @abstractmethod
    def logits(self, x: Tensor, head: Linear) -> Tensor:
        """float32 [R, V]."""

    @abstractmethod
    def shape(self, logits: Tensor, slots: Tensor, positions: Tensor, state: SlotState) -> Tensor:
        """Apply bias, bans, penalties and truncation of each row's slot: float32 [R, V].

        Banned and truncated tokens become -inf. A row whose slot asks for
        nothing keeps its bits.
        """

    @abstractmethod
    def restrict(self, logits: Tensor, rows: Tensor, words: Tensor) -> Tensor:
        """-inf for every token of ``rows`` int64 [n] whose bit is clear; other rows keep their bits.

        words int32 [n, ceil(V / 32)]: bit i % 32 of word i // 32 stands for token i.
        """

    @abstractmethod
    def logprobs(self, logits: Tensor, tokens: Tensor, n: int) -> Logprobs:
        """Log-probabilities of ``tokens`` [R] and of the ``n`` best under softmax(logits)."""

    @abstractmethod
    def head_sample(
        self, x: Tensor, head: Linear, slots: Tensor, positions: Tensor, state: SlotState
    ) -> tuple[Tensor, Tensor]:
        """``sample(logits(x))`` with the same bits; a backend may never write the logits."""

    @abstractmethod
    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, state: SlotState
    ) -> tuple[Tensor, Tensor]:
        """Token of each row: argmax(logits + T*noise), ties to the lowest id.

        ``positions`` int64 [R] are those of the token being sampled. Returns
        (tokens int64 [R], finite bool [R]).
        """

    @abstractmethod
    def sample_rejection(
        self, logits: Tensor, samples: SampleRows, positions: Tensor, state: SlotState
    ) -> tuple[Tensor, Tensor]:
        """``sample`` by classical rejection: a row whose draft is accepted returns the draft,
        the first that is not a draw from the residual, the last one a fresh draw."""

    @abstractmethod
    def commit(
        self,
        tokens: Tensor,
        finite: Tensor,
        rows: RowBatch,
        samples: SampleRows,
        state: SlotState,
        widest: int,
    ) -> Verdict:
        """Accept, truncate at stops and limits, move cursors and anchors."""
