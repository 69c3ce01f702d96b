"""Issues all device work of a step, and nothing else does.

    saves, restores, admissions, page table
    -> admit drafts, build rows -> target, context rows -> sample -> commit -> draft -> snapshots

Nothing here reads a device value: what a step decided stays on the device
until ``Handle.read``, the one synchronisation of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firesteel.config import SpeculativeConfig
from firesteel.core import Chunk, Logprobs, RowBatch, SampleRows, StepPlan, Verdict
from firesteel.engine.graphs import Graphs
from firesteel.engine.masks import Masks, Question
from firesteel.engine.memory import Memory, Saved
from firesteel.engine.owed import Owed
from firesteel.engine.poison import poison
from firesteel.engine.slots import Line, Slots
from firesteel.engine.sync import Clock, SyncGuard, to_host, upload
from firesteel.models.deepseek_v4.dspark import Drafter
from firesteel.models.deepseek_v4.model import Target
from firesteel.ops.types import Calibration, PromptRows, Proposal
from firesteel.parallel import ALONE, Group
from firesteel.speculation.cost import CostModel
from firesteel.speculation.simulated import Simulator

SCORE_BLOCK = 64  # prompt rows whose logits exist at once


@dataclass(frozen=True)
class TokenScore:
    """Log-probability of one token, its rank (0 is best) and the best alternatives."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class GroupResult:
    """One sampling group of a finished step, on the host.

    ``allowed``: its verified drafts up to the first that a grammar forbids; what
    is behind says nothing of the drafter.
    """

    request_id: int
    tokens: tuple[int, ...]
    accepted: int
    verified: int
    finished: int
    allowed: int
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True)
class PromptScores:
    """Scores of consecutive prompt tokens from position ``start`` on."""

    request_id: int
    start: int
    scores: tuple[TokenScore, ...]


@dataclass(frozen=True)
class DraftReport:
    """What the drafting pass said: float64 [G, width], a line per group of ``StepPlan.drafting``."""

    head: NDArray[np.float64] | None  # None without a confidence head
    margin: NDArray[np.float64]
    survival: NDArray[np.float64]


@dataclass(frozen=True)
class StepResult:
    """Everything a finished step says; ``ms`` is what it took on the device."""

    groups: tuple[GroupResult, ...]
    prompts: tuple[PromptScores, ...]
    drafts: DraftReport | None = None
    ms: float = 0.0


@dataclass
class Handle:
    """A step in flight."""

    plan: StepPlan
    guard: SyncGuard
    started: float
    verdict: Verdict | None = None
    samples: SampleRows | None = None
    question: Question | None = None  # about the drafts of guided requests
    logprobs: Logprobs | None = None
    scored: list[tuple[Chunk, list[Logprobs]]] = field(default_factory=list)
    proposal: Proposal | None = None
    survival: Tensor | None = None
    ended: float = 0.0  # on the CPU a step has run when its launch returns
    clock: Clock | None = None  # on a GPU
    virtual_ms: float | None = None  # taken from a cost table instead of a clock

    def read(self) -> StepResult:
        """Wait for the step and copy what it decided: the synchronisation "verdict"."""
        with self.guard.named("verdict"):
            if self.clock is not None:
                self.clock.wait()
            prompts = tuple(
                PromptScores(c.request_id, c.start + 1, tuple(s for part in parts for s in _scores(part)))
                for c, parts in self.scored
            )
            ms = self.virtual_ms
            if ms is None:
                ms = ((self.ended or time.perf_counter()) - self.started) * 1e3
                if self.clock is not None:
                    ms = self.clock.ms
            return StepResult(self._groups(), prompts, self._drafts(), ms)

    def land(self, copy: Callable[[Tensor], Tensor]) -> None:
        """Replace all that ``read`` looks at by copies: the next step overwrites what recordings return."""
        if self.verdict is not None and self.samples is not None:
            v = self.verdict
            columns = torch.stack((v.count, v.accepted, v.verified, v.finished), 1)
            table = copy(torch.cat((v.tokens, columns), 1))  # one copy for all of it
            wide = v.tokens.shape[1]
            self.verdict = Verdict(table[:, :wide], *table[:, wide:].unbind(1))
        if self.logprobs is not None and self.samples is not None:
            self.logprobs = _landed(self.logprobs, copy)
            self.samples = replace(self.samples, offset=copy(self.samples.offset))
        self.scored = [(c, [_landed(part, copy) for part in parts]) for c, parts in self.scored]
        if self.proposal is not None and self.survival is not None:
            head = self.proposal.confidence
            self.proposal = replace(
                self.proposal,
                margin=copy(self.proposal.margin),
                confidence=None if head is None else copy(head),
            )
            self.survival = copy(self.survival)

    def _drafts(self) -> DraftReport | None:
        if self.proposal is None or self.survival is None:
            return None
        p, n = self.proposal, len(self.plan.drafting)

        def column(values: Tensor) -> NDArray[np.float64]:  # a copy: the next pass may reuse the memory
            return values[:n].numpy().astype(np.float64)

        head = None if p.confidence is None else column(p.confidence)
        return DraftReport(head, column(p.margin), column(self.survival))

    def _groups(self) -> tuple[GroupResult, ...]:
        if self.verdict is None or self.samples is None:
            return ()
        v = self.verdict
        tokens, count = v.tokens.tolist(), v.count.tolist()
        accepted, verified, finished = v.accepted.tolist(), v.verified.tolist(), v.finished.tolist()
        scores = _scores(self.logprobs) if self.logprobs is not None else None
        allowed = self.question.allowed if self.question is not None else {}
        offset = self.samples.offset.tolist() if scores is not None else []
        return tuple(
            GroupResult(
                rid,
                tuple(tokens[g][: count[g]]),
                accepted[g],
                verified[g],
                finished[g],
                max(min(verified[g], allowed.get(rid, verified[g])), accepted[g]),
                tuple(scores[offset[g] : offset[g] + count[g]]) if scores is not None else (),
            )
            for g, (rid, _) in enumerate(self.plan.sampling)
        )


def _landed(lp: Logprobs, copy: Callable[[Tensor], Tensor]) -> Logprobs:
    return Logprobs(copy(lp.chosen), copy(lp.rank), copy(lp.ids), copy(lp.values))


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
        self.owed = None if self.drafter is None else Owed(self.drafter, memory.stages, memory.slots + 1)
        self.masks = Masks(memory.gamma, guard, self.device)
        self._calibration: Calibration | None = None
        self.virtual: CostModel | None = None  # a virtual clock, for benchmarks and tests only
        self.timer: Callable[[], float] = (
            time.perf_counter
        )  # of the CPU; benchmarks may count its own time only
        self.group: Group = ALONE
        self.graphs: Graphs | None = None
        self._no_prompt = PromptRows(*(slots.ints(()) for _ in range(6)))
        self.simulator: Simulator | None = None
        if speculative is not None and speculative.simulated_acceptance is not None:
            self.simulator = Simulator(
                speculative.simulated_acceptance,
                speculative.num_speculative_tokens,
                target.config.vocab_size,
                self.device,
                None
                if self.device.type == "cpu"
                else (slots.state.history.shape[0], slots.state.history.shape[1]),
            )

    @property
    def saved_bytes(self) -> int:
        """Host memory that preempted requests take."""
        return sum(saved.nbytes for _, saved in self._saved.values())

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Handle:
        """Queue one step; returns without waiting for it."""
        if self.group.size > 1 and self.group.leads:
            self.group.share((plan, self.memory.changes()))
        handle = Handle(plan, self.guard, self.timer())
        on_gpu = self.device.type != "cpu"
        with self.guard.step():
            if on_gpu:
                handle.clock = Clock()
            self._move(plan)
            if plan.rows:
                self._run(plan, handle)
            if on_gpu or self.graphs is not None:
                handle.land(to_host)
            if handle.clock is not None:
                handle.clock.stop()
            self._write_owed([order.slot for order in plan.snapshots])
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
            handle.ended = self.timer()
        return handle

    def _move(self, plan: StepPlan) -> None:
        """Requests leave and enter slots, in an order in which nothing is overwritten too early."""
        if plan.calibration is not None:
            self._calibrate(Calibration(*(self.slots.floats(part) for part in plan.calibration)))
        for rid in plan.forget:
            self._saved.pop(rid, None)
        self._write_owed([save.slot for save in plan.saves])
        for save in plan.saves:
            copy = self.memory.save(save.slot, list(save.pages))
            self._saved[save.request_id] = (self.slots.copy(save.slot), copy)
        self.slots.admit(plan.admissions)
        for admission in plan.admissions:  # reads snapshots whose pages a restore may take over
            if admission.snapshot:
                self.memory.read_snapshot(list(admission.snapshot), admission.slot, admission.start)
        for restore in plan.restores:
            line, copy = self._saved.pop(restore.request_id)
            self.slots.restore(line, restore.slot)
            self.memory.restore(copy, restore.slot, list(restore.pages))
        taken = [a.slot for a in plan.admissions] + [r.slot for r in plan.restores]
        if self.owed is not None and (taken or self.memory.left):
            self.owed.change(taken, self.memory.left, {order.slot for order in plan.snapshots})
        if self.simulator is not None and taken:
            self.simulator.prepare(self.slots.ints(taken), self.slots.state)
        self.memory.push()

    def fix_addresses(self) -> None:
        """Make everything that a recording reads: a survival model that says 1 until another one comes."""
        width = self.slots.state.drafts.shape[1]
        if self.drafter is not None and self._calibration is None:
            sure = [[float("inf")] * width] * 2
            self._calibration = Calibration(*(self.slots.floats(v) for v in (sure, [0.0] * 2, [0.0] * 2)))

    def _calibrate(self, new: Calibration) -> None:
        """Take a new survival model; in place, since recordings hold its address."""
        old = self._calibration
        if old is None or old.depth.shape != new.depth.shape:
            assert self.graphs is None, "recordings have the shape of the engine's K"
            self._calibration = new
            return
        for name in ("depth", "head", "margin"):
            getattr(old, name).copy_(getattr(new, name))

    def _run(self, plan: StepPlan, handle: Handle) -> None:
        ops, state, graphs = self.target.ops, self.slots.state, self.graphs
        rows_wanted, tail, idle = plan.rows, None, 0
        if graphs is not None:  # pad to a recorded size
            finals = len(plan.sampling) - len(plan.decodes)
            sampled, groups = finals + plan.decode_rows, len(plan.sampling)
            shape = graphs.shape(plan.rows, sampled, groups, self._plain(plan), plan.max_position)
            rows_wanted, tail, idle = shape.rows, shape.samples, shape.groups - len(plan.sampling)
        scratch = [state.cursor.shape[0] - 1] * idle
        decodes = self.slots.ints([*(d.slot for d in plan.decodes), *scratch])
        widths = self.group.agree(ops.admit(decodes, plan.budget.drafts, state))
        decode_rows = rows_wanted - plan.prompt_rows
        if not decodes.shape[0] and decode_rows:  # nobody decodes: padding needs an owner
            decodes = self.slots.ints([state.cursor.shape[0] - 1])
            widths = torch.zeros_like(decodes)
        rows, samples = ops.build_rows(
            state, self._prompt_rows(plan), decodes, widths, decode_rows, plan.max_position
        )
        if plan.guided and self.group.leads:  # the others take its tokens
            handle.question = self.masks.ask(plan, rows, samples, state)
        if graphs is not None:
            h = graphs.forward(rows) if graphs.has(rows) else self.forward_rows(rows)
        else:
            owners = [*(c.slot for c in plan.chunks), *(d.slot for d in plan.decodes)]
            h = self.forward_rows(rows, owners if self.device.type == "cpu" else ())
        if plan.chunks:
            at, ends = self.slots.ints([[c.slot for c in plan.chunks], [c.end for c in plan.chunks]]).unbind()
            state.cursor.index_copy_(0, at, ends)
        if plan.sampling:
            handle.samples = samples
            if graphs is not None and tail is not None:
                handle.verdict = graphs.tail(samples, tail)
            else:
                handle.verdict = self._sample(h, rows, samples, plan, handle)
        if plan.drafting:
            self._write_owed([d.slot for d in plan.drafting])
            self._draft(plan, handle)
        self._score_prompts(h, plan, handle)

    def _plain(self, plan: StepPlan) -> bool:
        """Whether the tail only samples and commits."""
        return not (self.rejection or plan.shaped or plan.guided or plan.logprobs >= 0)

    # ---- what can be recorded -----------------------------------------------------
    def forward_rows(self, rows: RowBatch, late: Sequence[int] = ()) -> Tensor:
        """The target's layers over ``rows``: streams [R, hc, D].

        Context rows are written, too, unless they may wait: those of the slots ``late``, which are then all.
        """
        ctx = self.target.begin(rows, self.memory.page_table)
        h, tapped = self.target.forward(ctx, self.memory.layers, self.drafter.taps if self.drafter else ())
        if self.owed is not None:
            self.owed.add(tapped, ctx, late)
            if not late or self.owed.full:
                self.owed.write()
        return h

    def _write_owed(self, slots: list[int]) -> None:
        """Context rows of these slots are about to be read."""
        if self.owed is not None and slots:
            self.owed.write(slots)

    def sample_rows(self, hidden: Tensor, rows: RowBatch, samples: SampleRows, widest: int) -> Verdict:
        """Sample and commit rows whose logits nobody changes or wants to see."""
        ops, state = self.target.ops, self.slots.state
        _, x = self.target.collapse(hidden[samples.rows])
        slots, positions = rows.slots[samples.rows], rows.positions[samples.rows] + 1
        tokens, finite = ops.head_sample(x, self.target.weights.head, slots, positions, state)
        return self._commit(tokens, finite, rows, samples, widest)

    def draft_slots(self, slots: Tensor, width: int, shaped: bool = False) -> tuple[Proposal, Tensor]:
        """(proposal, survival [G, width]) behind the anchors of ``slots``, noted in their lines."""
        assert self.drafter is not None, "the scheduler drafts only where there is a drafter"
        ops, state = self.target.ops, self.slots.state
        proposal = self.drafter.propose(
            slots,
            width,
            state,
            self.memory.stages,
            self.memory.page_table,
            shaped=shaped,
            rejection=self.rejection,
            keep_logits=state.draft_logits is not None,
        )
        if self.simulator is not None:
            proposal = self.simulator.proposal(proposal, slots, state)
        proposal = replace(proposal, tokens=self.group.agree(proposal.tokens))
        survival = ops.note_drafts(proposal, slots, state, self._calibration)
        if state.draft_logits is not None and proposal.logits is not None:
            state.draft_logits[slots, : proposal.logits.shape[1]] = proposal.logits
        return proposal, survival

    def _draft(self, plan: StepPlan, handle: Handle) -> None:
        """New drafts behind the new anchors; a request that just ended gets some too, and nobody looks."""
        width, wanted = plan.draft_width, [d.slot for d in plan.drafting]
        size = None
        if self.graphs is not None and not self.rejection and not plan.shaped:
            size = self.graphs.draft_size(len(wanted), width)
        state = self.slots.state
        if self.graphs is not None and size is not None:
            padded = [*wanted, *[state.cursor.shape[0] - 1] * (size - len(wanted))]
            proposal, survival = self.graphs.draft(self.slots.ints(padded), width)
        else:
            proposal, survival = self.draft_slots(self.slots.ints(wanted), width, plan.shaped)
        if plan.draft_weights:  # the budget goes to the most valuable drafts
            state.survival[self.slots.ints(wanted), :width] *= self.slots.floats(
                plan.draft_weights
            ).unsqueeze(-1)
        if plan.report_drafts:
            handle.proposal, handle.survival = proposal, survival

    def _sample(
        self, h: Tensor, rows: RowBatch, samples: SampleRows, plan: StepPlan, handle: Handle
    ) -> Verdict:
        ops, state = self.target.ops, self.slots.state
        if self._plain(plan):
            return self.sample_rows(h, rows, samples, self._widest(plan))
        _, x = self.target.collapse(h[samples.rows])
        slots, positions = rows.slots[samples.rows], rows.positions[samples.rows] + 1
        raw = self.target.logits(x)
        masks = self.masks.answer(handle.question) if handle.question is not None else None
        logits = ops.restrict(raw, *masks) if masks is not None else raw
        logits = ops.shape(logits, slots, positions, state) if plan.shaped else logits
        if self.rejection:
            tokens, finite = ops.sample_rejection(logits, samples, positions, state)
        else:
            tokens, finite = ops.sample(logits, slots, positions, state)
        if plan.logprobs >= 0:
            handle.logprobs = ops.logprobs(raw, tokens, plan.logprobs)
        return self._commit(tokens, finite, rows, samples, self._widest(plan))

    def _commit(
        self, tokens: Tensor, finite: Tensor, rows: RowBatch, samples: SampleRows, widest: int
    ) -> Verdict:
        ops, state = self.target.ops, self.slots.state
        if self.simulator is not None:
            at = samples.rows
            tokens = self.simulator.tokens(rows.slots[at], rows.positions[at] + 1, state)
        tokens, finite = self.group.agree(tokens), self.group.agree(finite)
        verdict = ops.commit(tokens, finite, rows, samples, state, widest)
        state.draft_len.index_fill_(0, samples.slots, 0)
        return verdict

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
        if not plan.chunks:
            return self._no_prompt
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
        table = torch.tensor([tokens, positions, slots, first, last], dtype=torch.int64)
        one, two, three, four, five = upload(table, self.device).unbind()
        return PromptRows(one, two, three, four, five, self.slots.ints(sampling))
