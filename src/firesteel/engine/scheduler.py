"""Decides on the host which requests run and how many prompt rows each gets.

It plans one step ahead: the tokens of the step in flight are unknown, so it
keeps upper bounds and learns the truth at commit. Running requests come
before prompts, prompts in chunks, smaller priority numbers first. When pages
are short, cached prefixes go first, then the least urgent request is copied
out and resumes later where it stood. How many drafts a request verifies is
never decided here.
"""

from __future__ import annotations

from bisect import insort

from firesteel.config import EngineConfig
from firesteel.core import Chunk, Decode, FinishReason, Restore, Save, SnapshotOrder, StepPlan
from firesteel.engine.draftboard import Draftboard, Rest, SchedulerStats, candidate, load_of
from firesteel.engine.memory import Memory
from firesteel.engine.prefix import Match, PrefixCache
from firesteel.engine.runner import StepResult
from firesteel.engine.sequence import Sequence
from firesteel.speculation.policy import (
    Candidate,
    DraftBlocks,
    Drafting,
    FixedWidth,
    Load,
    Policy,
    Timing,
    Verified,
)

NO_DRAFTING = Drafting(frozenset(), 0, "speculation off")
STOPPED = 1  # by a token
FINISH = {STOPPED: FinishReason.STOP, 2: FinishReason.LENGTH, 3: FinishReason.ERROR}


class Scheduler:
    """Waiting and running requests, and the next plan."""

    def __init__(
        self, config: EngineConfig, memory: Memory, cache: PrefixCache | None, policy: Policy | None = None
    ):
        self.config, self.memory, self.cache, self.gamma = config, memory, cache, config.gamma
        self._policy: Policy = policy or FixedWidth(config.gamma)
        self.waiting: list[Sequence] = []  # by (priority, arrival)
        self.running: list[Sequence] = []  # by (priority, arrival)
        self.stats = SchedulerStats()
        self._by_id: dict[int, Sequence] = {}
        self._forget: list[int] = []
        self._step, self._paced = 0, False  # whether any request has asked for a speed
        self._said = [0, 0]  # tokens of answers, and answers that a token ended, since the policy was told
        self._rest: Rest | None = None
        self._swapped = 0  # bytes of saved copies
        self._slot_bytes = memory.ring_bytes()
        self._page_bytes = memory.page_bytes()

    # ---- requests --------------------------------------------------------------
    def add(self, seq: Sequence) -> None:
        """Queue a request."""
        insort(self.waiting, seq, key=lambda s: s.order)
        self._by_id[seq.request_id] = seq
        self._paced |= seq.params.min_tokens_per_second > 0

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running or self._forget)

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """End a request from the host (stop string, abort, error); rows in flight are dropped."""
        if seq.finish is None:
            seq.finish = reason
        if reason is not FinishReason.STOP:
            seq.want = 0
        if seq in self.waiting and seq.in_flight == 0:
            self._leave_queue(seq)

    def _leave_queue(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        if seq.saved_pages:
            self._forget.append(seq.request_id)
            self._swapped -= self._copy_bytes(seq.saved_pages)
        self.policy.forget(seq.request_id, len(seq.output))  # it may have run before
        del self._by_id[seq.request_id]

    @property
    def policy(self) -> Policy:
        """Who decides on drafts."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        """Another one begins: what the one before was not told yet is not for it."""
        self._end_rest()
        self._policy, self._said = policy, [0, 0]

    # ---- plan --------------------------------------------------------------------
    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run now."""
        board = Draftboard(room=self.config.max_num_batched_tokens)
        self.sweep()  # before new orders: a slot whose window is ordered now is free from the next plan on
        self._answer_snapshots(board)
        self._plan_decodes(board)
        self._plan_drafts(board)
        self._plan_chunks(board)
        if not board.preempted:
            self._admit(board)
        if not (board.chunks or board.decodes or board.snapshots or board.saves or self._forget):
            assert not board.admissions, "an admitted request has rows to run"
            self._end_rest()
            return None
        return self._finish_plan(board)

    def _finish_plan(self, board: Draftboard) -> StepPlan:
        sampling, bounds = [*board.firsts, *board.decodes], board.all_bounds()
        far = max(bounds[len(board.firsts) :], default=1 - self.gamma) - 1 + self.gamma
        top = max(far, max([c.end - 1 for c in board.chunks], default=0))
        rows = sum(len(c.tokens) for c in board.chunks) + len(board.decodes) + board.budget.drafts
        others = self._behind() if board.chunks and board.room <= 0 else 0
        limit = self.config.max_num_batched_tokens
        load = load_of(bounds, rows - board.budget.drafts, board.room, others, limit)
        rest = self._rest if self._rest is not None and self._rest.goes_on(board) else None
        if rest is not None:
            draft, ms = rest.drafting, rest.predicted_ms
            rest.steps += 1
        else:
            draft, ms = self._ask(board, load, rows)
        decodes = [Decode(s.request_id, s.slot) for s in board.decodes]
        drafting = [*(Decode(s.request_id, s.slot) for s in board.firsts), *decodes]
        if len(draft.request_ids) < len(sampling):
            drafting = [d for d in drafting if d.request_id in draft.request_ids]
        calibration = self.policy.calibration()
        drafts_all = len(drafting) == len(sampling)
        for seq in sampling:
            seq.in_flight += 1
            seq.ready = draft.width if drafts_all or seq.request_id in draft.request_ids else 0
        scored = [self._by_id[c.request_id].params for c in board.chunks if c.scored]
        reports = [s.params.logprobs for s in sampling] + [p.prompt_logprobs for p in scored]
        forget, self._forget = tuple(self._forget), []
        for seq, order in board.snapshots:  # usable from the next plan on: the copy ends this step
            self._register(seq, order)
        self._step += 1
        weights = tuple(draft.weights.get(d.request_id, 1.0) for d in drafting) if draft.weights else ()
        return StepPlan(
            step=self._step,
            chunks=tuple(board.chunks),
            decodes=tuple(decodes),
            budget=board.budget,
            max_position=top,
            admissions=tuple(board.admissions),
            saves=tuple(board.saves),
            restores=tuple(board.restores),
            snapshots=tuple(order for _, order in board.snapshots),
            drafting=tuple(drafting),
            draft_width=draft.width if drafting else 0,
            draft_reason=draft.reason,
            draft_weights=weights,
            draft_depth=self.gamma if board.budget.drafts else 0,
            report_drafts=self.policy.learns and rest is None,
            calibration=None if calibration is None else calibration.plain(),
            context=load.context,
            predicted_ms=ms,
            forget=forget,
            shaped=any(s.shaped for s in sampling),
            guided=tuple(s.request_id for s in sampling if s.guide is not None),
            logprobs=max((r for r in reports if r is not None), default=-1),
        )

    def _plan_decodes(self, board: Draftboard) -> None:
        for seq in list(self.running):
            if seq.slot < 0 or seq.finish is not None or not seq.prefilled or seq.exhausted:
                continue
            bound = seq.bound
            ahead = min(bound + 2 * (self.gamma + 1), seq.max_len)
            if board.room > 0 and self._grow(seq, ahead, board):
                board.decodes.append(seq)
                board.bounds.append(bound)
                board.room -= 1

    def _plan_drafts(self, board: Draftboard) -> None:
        """Rows for drafts; prompts that wait keep a quarter of the step."""
        pending = sum(len(s.base) - s.planned for s in self.running if s.finish is None and not s.prefilled)
        pending += sum(len(s.base) for s in self.waiting[: self.memory.free_slots])
        if self._rest is not None and not pending and self._rest.goes_on(board):
            board.budget = self._rest.budget
        elif self.gamma and board.decodes:
            board.candidates = [self._offer(s, b) for s, b in zip(board.decodes, board.bounds, strict=True)]
            rows = len(board.decodes) + min(pending, board.room)
            limit = self.config.max_num_batched_tokens
            load = load_of(board.bounds, rows, board.room - min(limit // 4, pending), 0, limit)
            board.budget = self.policy.budget(board.candidates, load)
            board.room -= board.budget.drafts

    def _ask(self, board: Draftboard, load: Load, rows: int) -> tuple[Drafting, float]:
        """Who drafts, and what the step of ``rows`` will take; a rest may begin."""
        draft, more = NO_DRAFTING, list[Candidate]()
        if self.gamma and (board.firsts or board.decodes):
            self._end_rest()
            have = board.candidates  # nothing that they say has changed since
            more = [candidate(s) for s in board.decodes[len(have) :]]
            firsts = [candidate(s) for s in board.firsts]
            draft = self.policy.drafting([*firsts, *have, *more] if firsts or more else have, load)
        ms = self.policy.predict(rows, load.context, draft)
        if draft.rest and not (board.chunks or board.budget.drafts or more):
            self._rest = Rest(draft, board.budget, list(board.decodes), ms)
        return draft, ms

    def _end_rest(self) -> None:
        if self._rest is not None:
            self.policy.rested(self._rest.steps)
            self._rest = None

    def _behind(self) -> int:
        """Requests with a slot, or one to be had, whose prompts have still to run."""
        soon = self.waiting[: self.memory.free_slots]
        new = sum(s.finish is None and not s.saved_pages for s in soon)
        return new + sum(s.finish is None and not s.prefilled for s in self.running)

    def _offer(self, seq: Sequence, bound: int) -> Candidate:
        """``candidate``, as it was in the step before while it is the same and its length limit is far."""
        if bound + self.gamma + 1 >= seq.max_len:
            return candidate(seq)
        if seq.offer is None or seq.offer[0] != seq.ready:
            seq.offer = seq.ready, candidate(seq)
        return seq.offer[1]

    def _plan_chunks(self, board: Draftboard) -> None:
        prompts = [s for s in self.running if s.finish is None and not s.prefilled]
        for i, seq in enumerate(prompts):
            if seq.slot >= 0:  # an earlier turn of this loop may have preempted it
                self._plan_chunk(seq, board, alone=i == len(prompts) - 1)

    def _plan_chunk(self, seq: Sequence, board: Draftboard, alone: bool) -> None:
        """Rows of one prompt: up to the next wanted boundary; a quarter of the room is left to those behind."""
        room = board.room if alone else max(board.room * 3 // 4, 1)
        start = seq.planned
        ends = [b for b in seq.boundaries if b > start]
        end = min([start + min(room, board.room), len(seq.base), *ends])
        if end <= start or not self._grow(seq, end, board):
            return
        seq.planned = end
        scored = seq.params.prompt_logprobs is not None and start < len(seq.prompt)
        following = seq.base[end] if scored and end < len(seq.base) else -1
        board.chunks.append(
            Chunk(seq.request_id, seq.slot, start, seq.base[start:end], seq.prefilled, scored, following)
        )
        board.room -= end - start
        if seq.prefilled:
            board.firsts.append(seq)
        if end in seq.boundaries:
            self._order_snapshot(seq, end, board)

    # ---- admission -------------------------------------------------------------------
    def _admit(self, board: Draftboard) -> None:
        pending = self._pending_keys()
        for seq in list(self.waiting):
            if board.room <= 0 or self.memory.free_slots == 0:
                return
            if seq.finish is not None or (seq.restart and seq.in_flight):
                continue  # its last step has not landed yet
            if seq.saved_pages:
                if not self._resume(seq, board):
                    return
            elif self._waits_for_prefix(seq, pending):
                self.stats.deferred += 1
                continue
            elif not self._enter(seq, board):
                return
            self.waiting.remove(seq)
            insort(self.running, seq, key=lambda s: s.order)
            if seq.prefilled and not seq.exhausted and seq.finish is None:
                board.decodes.append(seq)
                board.room -= 1
            elif seq.finish is None:
                self._plan_chunk(seq, board, alone=False)
                pending |= self._own_keys(seq)

    def _enter(self, seq: Sequence, board: Draftboard) -> bool:
        """A new request, or one whose state was given up, takes a slot."""
        if seq.restart:
            seq.base, seq.planned, seq.restart, seq.ready = seq.tokens, 0, False, 0
        match = self._match(seq)
        shared = list(match.pages)
        first = min(len(seq.base), match.tokens + self.config.max_num_batched_tokens)
        fresh = self.memory.pages_for(first) - len(shared)
        self.memory.pool.hold(shared)  # before anything is evicted
        if not self._free(fresh):
            self.memory.pool.drop(shared)
            return False
        pages = self.memory.pool.take(fresh)
        assert pages is not None, "just made free"
        slot = self.memory.open_slot([*shared, *pages])
        assert slot is not None, "checked by the caller"
        seq.slot, seq.planned, seq.snapped = slot, match.tokens, match.tokens
        seq.reused += match.tokens
        seq.boundaries = self._wanted(seq, match)
        board.admissions.append(seq.admission(match.snapshot))
        return True

    def _resume(self, seq: Sequence, board: Draftboard) -> bool:
        """A preempted request goes on where it stood, in any slot and pages."""
        ahead = min(seq.bound + 2 * (self.gamma + 1), seq.max_len)
        if not seq.prefilled:
            ahead = min(len(seq.base), seq.planned + self.config.max_num_batched_tokens)
        need = max(seq.saved_pages, self.memory.pages_for(ahead))
        if not self._free(need):
            return False
        pages = self.memory.pool.take(need)
        assert pages is not None, "just made free"
        slot = self.memory.open_slot(pages)
        assert slot is not None, "checked by the caller"
        seq.slot = slot
        board.restores.append(Restore(seq.request_id, slot, tuple(pages[: seq.saved_pages])))
        self._swapped -= self._copy_bytes(seq.saved_pages)
        seq.saved_pages = 0
        return True

    def _match(self, seq: Sequence) -> Match:
        if self.cache is None or seq.params.prompt_logprobs is not None:
            return Match()
        return self.cache.match(seq.base, self._chain(seq, len(seq.base)))

    def _wanted(self, seq: Sequence, match: Match) -> list[int]:
        """Boundaries inside the prompt that get a snapshot: its end, and where others part from it."""
        if self.cache is None:
            return []
        size = self.memory.page_size
        ends = {(len(seq.base) - 1) // size * size, match.junction}
        return sorted(b for b in ends if b > match.tokens)

    def _chain(self, seq: Sequence, tokens: int) -> list[bytes]:
        """Page keys of a request's first ``tokens`` tokens; computed once per page."""
        assert self.cache is not None
        pages = tokens // self.memory.page_size
        if len(seq.chain) < pages:
            seq.chain = self.cache.chain(seq.tokens[: pages * self.memory.page_size], seq.params.cache_salt)
        return seq.chain[:pages]

    def _own_keys(self, seq: Sequence) -> set[bytes]:
        """Keys of the boundaries its prompt has still to store."""
        if self.cache is None:
            return set()
        return {self._chain(seq, b)[-1] for b in seq.boundaries if b > seq.planned}

    def _pending_keys(self) -> set[bytes]:
        """Boundaries that running prompts are about to store."""
        out: set[bytes] = set()
        for seq in self.running:
            if seq.finish is None and not seq.prefilled:
                out |= self._own_keys(seq)
        return out

    def _waits_for_prefix(self, seq: Sequence, pending: set[bytes]) -> bool:
        """Whether a running prompt will soon offer a deeper hit than there is now."""
        if not pending or self.cache is None or seq.params.prompt_logprobs is not None:
            return False
        size = self.memory.page_size
        chain = self._chain(seq, len(seq.base))[: (len(seq.base) - 1) // size]
        have = self.cache.match(seq.base, chain, count=False).tokens // size
        return any(key in pending for key in chain[have:])

    # ---- snapshots -----------------------------------------------------------------------
    def _answer_snapshots(self, board: Draftboard) -> None:
        """Boundaries that answers have crossed; at most two steps late, which the rings allow."""
        for seq in self.running:
            if seq.want and seq.slot >= 0:
                self._order_snapshot(seq, seq.want, board)
            seq.want = 0

    def _order_snapshot(self, seq: Sequence, boundary: int, board: Draftboard) -> None:
        if self.cache is None:
            return
        key = self._chain(seq, boundary)[-1]
        taken = any(self._chain(s, o.boundary)[-1] == key for s, o in board.snapshots)
        if taken or self.cache.has_snapshot(key):
            return
        if not self.cache.evict(self.memory.snapshot_pages):
            return
        pages = self.memory.pool.take(self.memory.snapshot_pages)
        assert pages is not None, "just made free"
        board.snapshots.append((seq, SnapshotOrder(seq.slot, boundary, tuple(pages))))

    def _register(self, seq: Sequence, order: SnapshotOrder) -> None:
        assert self.cache is not None
        pages = self.memory.pages_of(order.slot)
        key = self.cache.insert(seq.tokens, self._chain(seq, order.boundary), pages, list(order.pages))
        seq.keys.append(key)
        seq.snapped = max(seq.snapped, order.boundary)
        if order.boundary > len(seq.base):  # inside the answer: only the deepest is worth keeping
            if seq.answer_key is not None:
                self.cache.forget(seq.answer_key)
            seq.answer_key = key

    # ---- room ------------------------------------------------------------------------------
    def _free(self, pages: int) -> bool:
        """Make ``pages`` free by dropping cached prefixes; False if that is not enough."""
        if self.memory.pool.free >= pages:
            return True
        return self.cache is not None and self.cache.evict(pages)

    def _grow(self, seq: Sequence, tokens: int, board: Draftboard) -> bool:
        """Pages for ``tokens`` positions, if need be at the cost of less urgent requests."""
        while not self.memory.grow(seq.slot, tokens):
            if self._free(self.memory.pages_for(tokens) - len(self.memory.pages_of(seq.slot))):
                continue
            victim = next((s for s in reversed(self.running) if s.slot >= 0 and board.movable(s)), None)
            if victim is None:
                return False
            self._preempt(victim, board)
            if victim is seq:
                return False
        return True

    def _copy_bytes(self, pages: int) -> int:
        return self._slot_bytes + pages * self._page_bytes

    def _preempt(self, seq: Sequence, board: Draftboard) -> None:
        """Copy a request out; the tokens of its step in flight still count."""
        pages = tuple(self.memory.pages_of(seq.slot))
        self.stats.preemptions += 1
        seq.preemptions += 1
        if self._swapped + self._copy_bytes(len(pages)) <= self.config.swap_gib * 2**30:
            board.saves.append(Save(seq.request_id, seq.slot, pages))
            seq.saved_pages = len(pages)
            self._swapped += self._copy_bytes(len(pages))
        else:
            self.stats.recomputes += 1
            seq.restart = True
        self.memory.release(seq.slot)
        seq.slot, seq.want = -1, 0
        self.running.remove(seq)
        insort(self.waiting, seq, key=lambda s: s.order)
        board.preempted = True

    # ---- commit ------------------------------------------------------------------------------
    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Take a finished step's tokens, scores and drafts."""
        for decode in plan.drafting:
            self._by_id[decode.request_id].drafted += plan.draft_width
        if plan.report_drafts:
            self._learn(plan, result)
        for prompt in result.prompts:
            owner = self._by_id.get(prompt.request_id)
            if owner is not None:
                for i, score in enumerate(prompt.scores):
                    owner.prompt_scores[prompt.start + i] = score
        for group in result.groups:
            seq = self._by_id[group.request_id]
            seq.in_flight -= 1
            if seq.finish is None:
                seq.steps += bool(group.tokens)
                seq.count(plan.step, len(group.tokens), group.verified, group.accepted)
                before = seq.known
                seq.output.extend(group.tokens)
                seq.scores.extend(group.scores)
                self._said[0] += len(group.tokens)
                if group.finished:
                    self._said[1] += group.finished == STOPPED
                    self._finish(seq, FINISH[group.finished])
                self._want_snapshot(seq, before)
            if seq.finish is not None and seq in self.waiting and seq.in_flight == 0:
                self._leave_queue(seq)

    def _learn(self, plan: StepPlan, result: StepResult) -> None:
        """Show the policy what became of its choices; plain steps tell nothing but times, unless speeds are kept."""
        said = result.drafts
        proposed: DraftBlocks | tuple[()] = ()
        if said is not None:
            ids = [d.request_id for d in plan.drafting]
            kinds = [int(self._by_id[i].params.temperature > 0) for i in ids]
            proposed = DraftBlocks(ids, kinds, said.head, said.margin, said.survival)
        groups = result.groups if plan.budget.drafts or self._paced else ()
        drafted = len(plan.drafting), plan.draft_width
        self.policy.learn(
            proposed,
            [Verified(g.request_id, g.allowed, g.accepted, g.finished != 0) for g in groups],
            Timing(
                plan.rows,
                plan.predicted_ms,
                result.ms,
                *drafted,
                0,
                plan.prompt_rows,
                plan.context,
                *self._said,
            ),
        )

        self._said = [0, 0]

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finish = reason
        if reason is FinishReason.ERROR:
            seq.error = seq.failure
            if seq.guide is not None and seq.guide.error:
                return  # its logits were sound: others may go on hitting its prefix
            for key in (*seq.keys, *seq.chain):  # what it stored or reused may be broken: nobody may hit it
                if self.cache is not None:
                    self.cache.forget(key)

    def _want_snapshot(self, seq: Sequence, before: int) -> None:
        """A page boundary that the answer has just crossed: later the rings no longer hold its window."""
        size = self.memory.page_size
        boundary = (seq.known - 1) // size * size
        if (
            seq.slot >= 0
            and seq.finish is not FinishReason.ERROR
            and before <= boundary
            and boundary > max(seq.snapped, len(seq.base) - 1)
        ):
            seq.want = boundary

    def sweep(self) -> None:
        """Free ended requests whose last step has landed and whose window is stored or unwanted."""
        for seq in [s for s in self.running if s.finish is not None and s.in_flight == 0 and not s.want]:
            self.running.remove(seq)
            self.memory.release(seq.slot)
            self.policy.forget(seq.request_id, len(seq.output))
            del self._by_id[seq.request_id]

    def check(self) -> None:
        """Conservation of pages, slots and requests; raises AssertionError."""
        self.memory.check(self.cache.holds() if self.cache is not None else [])
        assert {s.request_id for s in (*self.waiting, *self.running)} == set(self._by_id), (
            "a request was lost"
        )
