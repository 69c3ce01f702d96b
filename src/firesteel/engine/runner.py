"""Issues all device work of a step, and nothing else does.

    saves, restores, admissions, page table
    -> admit drafts, build rows -> target, context rows -> sample -> commit -> draft -> snapshots

Nothing here reads a device value: what a step decided stays on the device
until ``Handle.read``, the one synchronisation of a step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from firesteel.config import SpeculativeConfig
from firesteel.core import Chunk, Logprobs, RowBatch, SampleRows, StepPlan, Verdict
from firesteel.engine.memory import Memory, Saved
from firesteel.engine.poison import poison
from firesteel.engine.slots import Line, Slots
from firesteel.engine.sync import SyncGuard
from firesteel.models.deepseek_v4.dspark import Drafter
from firesteel.models.deepseek_v4.model import Target
from firesteel.ops.types import Calibration, PromptRows, Proposal
from firesteel.speculation.cost import CostModel

SCORE_BLOCK = 64  # prompt rows whose logits exist at once


@dataclass(frozen=True)
class TokenScore:
    """Log-probability of one token, its rank (0 is best) and the best alternatives."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class GroupResult:
    """One sampling group of a finished step, on the host."""

    request_id: int
    tokens: tuple[int, ...]
    accepted: int
    verified: int
    finished: int
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True)
class PromptScores:
    """Scores of consecutive prompt tokens from position ``start`` on."""

    request_id: int
    start: int
    scores: tuple[TokenScore, ...]


@dataclass(frozen=True)
class DraftReport:
    """What the drafting pass said of one request, one value per depth."""

    request_id: int
    head: tuple[float, ...]  # empty without a confidence head
    margin: tuple[float, ...]
    survival: tuple[float, ...]


@dataclass(frozen=True)
class StepResult:
    """Everything a finished step says; ``ms`` is what it took on the device."""

    groups: tuple[GroupResult, ...]
    prompts: tuple[PromptScores, ...]
    drafts: tuple[DraftReport, ...] = ()
    ms: float = 0.0


@dataclass
class Handle:
    """A step in flight."""

    plan: StepPlan
    guard: SyncGuard
    started: float
    verdict: Verdict | None = None
    samples: SampleRows | None = None
    logprobs: Logprobs | None = None
    scored: list[tuple[Chunk, list[Logprobs]]] = field(default_factory=list)
    proposal: Proposal | None = None
    survival: Tensor | None = None
    ended: float = 0.0  # on the CPU a step has run when its launch returns
    virtual_ms: float | None = None  # taken from a cost table instead of a clock

    def read(self) -> StepResult:
        """Wait for the step and copy what it decided: the synchronisation "verdict"."""
        with self.guard.named("verdict"):
            prompts = tuple(
                PromptScores(c.request_id, c.start + 1, tuple(s for part in parts for s in _scores(part)))
                for c, parts in self.scored
            )
            ms = self.virtual_ms
            if ms is None:
                ms = ((self.ended or time.perf_counter()) - self.started) * 1e3
            return StepResult(self._groups(), prompts, self._drafts(), ms)

    def _drafts(self) -> tuple[DraftReport, ...]:
        if self.proposal is None or self.survival is None:
            return ()
        p = self.proposal
        head = p.confidence.tolist() if p.confidence is not None else [()] * len(self.plan.drafting)
        margin, survival = p.margin.tolist(), self.survival.tolist()
        return tuple(
            DraftReport(d.request_id, tuple(head[g]), tuple(margin[g]), tuple(survival[g]))
            for g, d in enumerate(self.plan.drafting)
        )

    def _groups(self) -> tuple[GroupResult, ...]:
        if self.verdict is None or self.samples is None:
            return ()
        v = self.verdict
        tokens, count = v.tokens.tolist(), v.count.tolist()
        accepted, verified, finished = v.accepted.tolist(), v.verified.tolist(), v.finished.tolist()
        scores = _scores(self.logprobs) if self.logprobs is not None else None
        offset = self.samples.offset.tolist()
        return tuple(
            GroupResult(
                rid,
                tuple(tokens[g][: count[g]]),
                accepted[g],
                verified[g],
                finished[g],
                tuple(scores[offset[g] : offset[g] + count[g]]) if scores is not None else (),
            )
            for g, (rid, _) in enumerate(self.plan.sampling)
        )


def _scores(lp: Logprobs) -> list[TokenScore]:
    chosen, rank, ids, values = lp.chosen.tolist(), lp.rank.tolist(), lp.ids.tolist(), lp.values.tolist()
    return [
        TokenScore(chosen[i], rank[i], tuple(zip(ids[i], values[i], strict=True))) for i in range(len(chosen))
    ]


class Runner:
    """Runs steps of one target over one memory."""

    def __init__(
        self,
        target: Target,
        memory: Memory,
        slots: Slots,
        guard: SyncGuard,
        drafter: Drafter | None = None,
        speculative: SpeculativeConfig | None = None,
        debug_poison: bool = False,
    ):
        self.memory, self.slots, self.guard = memory, slots, guard
        self.target = Target(target.config, target.weights, guard.wrap(target.ops))
        self.drafter = Drafter(drafter.config, drafter.weights, self.target) if drafter is not None else None
        self.rejection = speculative is not None and speculative.rejection
        self.device, self.poison = slots.device, debug_poison
        if speculative is not None and speculative.rejection and speculative.proposal == "dense":
            slots.keep_draft_logits()
        self._saved: dict[int, tuple[Line, Saved]] = {}
        self._calibration: Calibration | None = None
        self.virtual: CostModel | None = None  # a virtual clock, for benchmarks and tests only

    @property
    def saved_bytes(self) -> int:
        """Host memory that preempted requests take."""
        return sum(saved.nbytes for _, saved in self._saved.values())

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Handle:
        """Queue one step; returns without waiting for it."""
        handle = Handle(plan, self.guard, time.perf_counter())
        with self.guard.step():
            self._move(plan)
            if plan.rows:
                self._run(plan, handle)
            for order in plan.snapshots:
                self.memory.write_snapshot(order.slot, order.boundary, list(order.pages))
            if self.poison:
                with self.guard.named("debug: poison"):
                    poison(self.memory, self.slots.state)
        if self.virtual is not None:
            handle.virtual_ms = self.virtual.price(
                plan.rows, plan.context, len(plan.drafting), plan.draft_width
            )
        if self.device.type == "cpu":
            handle.ended = time.perf_counter()
        return handle

    def _move(self, plan: StepPlan) -> None:
        """Requests leave and enter slots, in an order in which nothing is overwritten too early."""
        if plan.calibration is not None:
            self._calibration = Calibration(*(self.slots.floats(part) for part in plan.calibration))
        for rid in plan.forget:
            self._saved.pop(rid, None)
        for save in plan.saves:
            copy = self.memory.save(save.slot, list(save.pages))
            self._saved[save.request_id] = (self.slots.copy(save.slot), copy)
        for admission in plan.admissions:  # reads snapshots whose pages a restore may take over
            self.slots.admit(admission)
            if admission.snapshot:
                self.memory.read_snapshot(list(admission.snapshot), admission.slot, admission.start)
        for restore in plan.restores:
            line, copy = self._saved.pop(restore.request_id)
            self.slots.restore(line, restore.slot)
            self.memory.restore(copy, restore.slot, list(restore.pages))
        self.memory.push()

    def _run(self, plan: StepPlan, handle: Handle) -> None:
        ops, state = self.target.ops, self.slots.state
        decodes = self.slots.ints([d.slot for d in plan.decodes])
        widths = ops.admit(decodes, plan.budget.drafts, state)
        rows, samples = ops.build_rows(
            state, self._prompt_rows(plan), decodes, widths, plan.decode_rows, plan.max_position
        )
        ctx = self.target.begin(rows, self.memory.page_table)
        h, taps = self.target.forward(ctx, self.memory.layers, self.drafter.taps if self.drafter else ())
        if self.drafter is not None and taps is not None:  # also in steps that do not draft: no holes
            self.drafter.write_context(taps, ctx, self.memory.stages)
        for chunk in plan.chunks:
            state.cursor[chunk.slot] = chunk.end
        if plan.sampling:
            handle.samples = samples
            handle.verdict = self._sample(h, rows, samples, plan, handle)
            state.draft_len[samples.slots] = 0
        if plan.drafting:
            self._draft(plan, handle)
        self._score_prompts(h, plan, handle)

    def _draft(self, plan: StepPlan, handle: Handle) -> None:
        """New drafts behind the new anchors; a request that just ended gets some too, and nobody looks."""
        assert self.drafter is not None, "the scheduler drafts only where there is a drafter"
        ops, state, width = self.target.ops, self.slots.state, plan.draft_width
        slots = self.slots.ints([d.slot for d in plan.drafting])
        proposal = self.drafter.propose(
            slots,
            width,
            state,
            self.memory.stages,
            self.memory.page_table,
            shaped=plan.shaped,
            rejection=self.rejection,
            keep_logits=state.draft_logits is not None,
        )
        state.passes[slots] += 1
        state.draft_len[slots] = width
        state.drafts[slots, :width] = proposal.tokens
        state.margin[slots, :width] = proposal.margin
        if proposal.confidence is not None:
            state.confidence[slots, :width] = proposal.confidence
        survival = ops.survival(proposal, slots, state, self._calibration)
        state.survival[slots, :width] = survival
        if plan.report_drafts:
            handle.proposal, handle.survival = proposal, survival
        if state.draft_logits is not None and proposal.logits is not None:
            state.draft_logits[slots, :width] = proposal.logits

    def _sample(
        self, h: Tensor, rows: RowBatch, samples: SampleRows, plan: StepPlan, handle: Handle
    ) -> Verdict:
        ops, state = self.target.ops, self.slots.state
        _, x = self.target.collapse(h[samples.rows])
        slots, positions = rows.slots[samples.rows], rows.positions[samples.rows] + 1
        if self.rejection or plan.shaped or plan.logprobs >= 0:
            raw = self.target.logits(x)
            logits = ops.shape(raw, slots, positions, state) if plan.shaped else raw
            if self.rejection:
                tokens, finite = ops.sample_rejection(logits, samples, positions, state)
            else:
                tokens, finite = ops.sample(logits, slots, positions, state)
            if plan.logprobs >= 0:
                handle.logprobs = ops.logprobs(raw, tokens, plan.logprobs)
        else:
            tokens, finite = ops.head_sample(x, self.target.weights.head, slots, positions, state)
        return ops.commit(tokens, finite, rows, samples, state, self._widest(plan))

    @staticmethod
    def _widest(plan: StepPlan) -> int:
        """Rows of the widest group there can be."""
        return 1 + min(plan.budget.drafts, plan.draft_depth)

    def _score_prompts(self, h: Tensor, plan: StepPlan, handle: Handle) -> None:
        """Log-probabilities of prompt tokens: the row before a token gives its logits."""
        at = 0
        for chunk in plan.chunks:
            targets = [*chunk.tokens[1:], *([chunk.following] if chunk.following >= 0 else [])]
            if chunk.scored and targets:
                parts = []
                for lo in range(0, len(targets), SCORE_BLOCK):
                    wanted = self.slots.ints(targets[lo : lo + SCORE_BLOCK])
                    _, x = self.target.collapse(h[at + lo : at + lo + wanted.shape[0]])
                    parts.append(
                        self.target.ops.logprobs(self.target.logits(x), wanted, max(plan.logprobs, 0))
                    )
                handle.scored.append((chunk, parts))
            at += len(chunk.tokens)

    def _prompt_rows(self, plan: StepPlan) -> PromptRows:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        first: list[int] = []
        last: list[int] = []
        sampling: list[int] = []
        for chunk in plan.chunks:
            at, n = len(tokens), len(chunk.tokens)
            tokens.extend(chunk.tokens)
            positions.extend(range(chunk.start, chunk.end))
            slots.extend([chunk.slot] * n)
            first.extend([at] * n)
            last.extend([at + n - 1] * n)
            if chunk.last:
                sampling.append(at + n - 1)
        return PromptRows(*(self.slots.ints(v) for v in (tokens, positions, slots, first, last, sampling)))
