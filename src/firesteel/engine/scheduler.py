"""Decides on the host which requests run and how many prompt rows each gets.

It plans one step ahead: the tokens of the step in flight are unknown, so it
keeps upper bounds and learns the truth at commit. How many drafts a request
verifies is never decided here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from firesteel.config import EngineConfig, SamplingParams
from firesteel.core import NO_DRAFTS, Admission, Chunk, Decode, FinishReason, StepPlan
from firesteel.engine.memory import Memory
from firesteel.engine.runner import GroupResult


@dataclass
class Sequence:
    """One request inside the engine."""

    request_id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_len: int
    stop_ids: tuple[int, ...]
    sample: int = 0
    slot: int = -1
    planned: int = 0  # prompt rows already planned
    output: list[int] = field(default_factory=list)
    in_flight: int = 0  # steps not yet committed that hold rows of this request
    steps: int = 0  # steps that sampled for it
    finish: FinishReason | None = None

    @property
    def prefilled(self) -> bool:
        """Whether the whole prompt has been planned."""
        return self.planned == len(self.prompt)

    @property
    def bound(self) -> int:
        """Highest position any row of it may have in the next step."""
        return min(len(self.prompt) + len(self.output) + self.in_flight, self.max_len)


class Scheduler:
    """First come, first served; running requests before prompts, prompts in chunks."""

    def __init__(self, config: EngineConfig, memory: Memory):
        self.config, self.memory = config, memory
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._by_id: dict[int, Sequence] = {}
        self._step = 0

    def add(self, seq: Sequence) -> None:
        """Queue a request."""
        self.waiting.append(seq)
        self._by_id[seq.request_id] = seq

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run now."""
        admissions = self._admit()
        live = [s for s in self.running if s.finish is None]
        decodes = [s for s in live if s.prefilled and len(s.prompt) + len(s.output) < s.max_len]
        decodes = [s for s in decodes if len(s.output) + s.in_flight < s.max_len - len(s.prompt)]
        room = self.config.max_num_batched_tokens - len(decodes)
        chunks, sampled = self._chunks(live, room)
        if not chunks and not decodes:
            assert not admissions, "an admitted request has prompt rows to run"
            return None
        for seq in (*decodes, *sampled):
            seq.in_flight += 1
        top = max([c.end - 1 for c in chunks] + [s.bound - 1 for s in decodes])
        self._step += 1
        return StepPlan(
            step=self._step,
            chunks=tuple(chunks),
            decodes=tuple(Decode(s.request_id, s.slot) for s in decodes),
            budget=NO_DRAFTS,
            max_position=top,
            admissions=tuple(admissions),
        )

    def _chunks(self, live: list[Sequence], room: int) -> tuple[list[Chunk], list[Sequence]]:
        chunks, sampled = [], []
        for seq in live:
            if seq.prefilled or room <= 0:
                continue
            start = seq.planned
            tokens = seq.prompt[start : start + room]
            seq.planned += len(tokens)
            room -= len(tokens)
            chunks.append(Chunk(seq.request_id, seq.slot, start, tokens, seq.prefilled))
            if seq.prefilled:
                sampled.append(seq)
        return chunks, sampled

    def _admit(self) -> list[Admission]:
        out = []
        room = self.config.max_num_batched_tokens - len(self.running)
        while self.waiting and room > 0:
            seq = self.waiting[0]
            slot = self.memory.take_slot(seq.max_len)
            if slot is None:
                break
            self.waiting.popleft()
            seq.slot = slot
            self.running.append(seq)
            room -= len(seq.prompt)
            p = seq.params
            out.append(
                Admission(seq.request_id, slot, seq.seed, seq.sample, p.temperature, seq.max_len, seq.stop_ids)
            )
        return out

    def commit(self, results: list[GroupResult]) -> list[Sequence]:
        """Take a finished step's tokens; returns the requests it touched."""
        touched = []
        for result in results:
            seq = self._by_id[result.request_id]
            seq.in_flight -= 1
            if seq.finish is not None:
                continue
            seq.steps += 1
            seq.output.extend(result.tokens)
            if result.finished:
                seq.finish = {1: FinishReason.STOP, 2: FinishReason.LENGTH, 3: FinishReason.ERROR}[result.finished]
            touched.append(seq)
        return touched

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """End a request from the host (stop string, abort); rows in flight are dropped."""
        seq.finish = reason
        if seq.slot < 0 and seq in self.waiting:
            self.waiting.remove(seq)
            del self._by_id[seq.request_id]

    def sweep(self) -> None:
        """Free ended requests whose last step has landed."""
        for seq in [s for s in self.running if s.finish is not None and s.in_flight == 0]:
            self.running.remove(seq)
            self.memory.release(seq.slot)
            del self._by_id[seq.request_id]
