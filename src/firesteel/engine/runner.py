"""Issues all device work of a step, and nothing else does.

    admissions, page table -> build rows -> target -> sample -> commit

Nothing here reads a device value: the verdict stays on the device until
``Handle.read``, the one synchronisation of a step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.core import Admission, StepPlan, Verdict
from firesteel.engine.memory import Memory
from firesteel.models.deepseek_v4.model import Target
from firesteel.ops.types import PromptRows, SlotState

MAX_STOP_IDS = 16


@dataclass(frozen=True)
class GroupResult:
    """One sampling group of a finished step, on the host."""

    request_id: int
    tokens: tuple[int, ...]
    accepted: int
    verified: int
    finished: int


@dataclass
class Handle:
    """A step in flight."""

    plan: StepPlan
    verdict: Verdict | None
    started: float

    def read(self) -> list[GroupResult]:
        """Wait for the step and copy its verdict: the named synchronisation "verdict"."""
        if self.verdict is None:
            return []
        v = self.verdict
        tokens, count = v.tokens.tolist(), v.count.tolist()
        accepted, verified, finished = v.accepted.tolist(), v.verified.tolist(), v.finished.tolist()
        return [
            GroupResult(rid, tuple(tokens[g][: count[g]]), accepted[g], verified[g], finished[g])
            for g, (rid, _) in enumerate(self.plan.sampling)
        ]


def slot_state(slots: int, gamma: int, device: torch.device) -> SlotState:
    """Fresh per-slot state; ``slots`` counts the scratch slot."""

    def ints(*shape: int) -> Tensor:
        return torch.zeros(slots, *shape, dtype=torch.int64, device=device)

    return SlotState(
        cursor=ints(),
        anchor=ints(),
        alive=ints(),
        max_len=ints(),
        seed_lo=ints(),
        seed_hi=ints(),
        sample=ints(),
        temperature=torch.zeros(slots, device=device),
        stop_ids=ints(MAX_STOP_IDS) - 1,
        drafts=ints(max(gamma, 1)),
        draft_len=ints(),
    )


class Runner:
    """Runs steps of one target over one memory."""

    def __init__(self, target: Target, memory: Memory, gamma: int, device: torch.device):
        self.target, self.memory, self.device = target, memory, device
        self.state = slot_state(memory.slots + 1, gamma, device)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Handle:
        """Queue one step; returns without waiting for it."""
        started, ops, state = time.perf_counter(), self.target.ops, self.state
        for admission in plan.admissions:
            self._admit(admission)
        self.memory.push()
        decodes = self._ints([d.slot for d in plan.decodes])
        widths = state.alive[decodes]
        rows, samples = ops.build_rows(
            state, self._prompt_rows(plan), decodes, widths, plan.decode_rows, plan.max_position
        )
        ctx = self.target.begin(rows, self.memory.page_table)
        h, _ = self.target.forward(ctx, self.memory.layers)
        for chunk in plan.chunks:
            state.cursor[chunk.slot] = chunk.end
        if not plan.sampling:
            return Handle(plan, None, started)
        _, x = self.target.collapse(h[samples.rows])
        slots = rows.slots[samples.rows]
        tokens, finite = ops.sample(self.target.logits(x), slots, rows.positions[samples.rows] + 1, state)
        return Handle(plan, ops.commit(tokens, finite, rows, samples, state, widest=1), started)

    def _ints(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)

    def _admit(self, a: Admission) -> None:
        """Write a slot's line."""
        s, slot = self.state, a.slot
        s.cursor[slot], s.anchor[slot], s.alive[slot], s.draft_len[slot] = 0, 0, 1, 0
        s.max_len[slot] = a.max_len
        s.seed_lo[slot], s.seed_hi[slot], s.sample[slot] = a.seed & 0xFFFFFFFF, a.seed >> 32, a.sample
        s.temperature[slot] = a.temperature
        assert len(a.stop_ids) <= MAX_STOP_IDS, "checked when the request was accepted"
        s.stop_ids[slot] = self._ints([*a.stop_ids, *[-1] * (MAX_STOP_IDS - len(a.stop_ids))])

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
        return PromptRows(*(self._ints(v) for v in (tokens, positions, slots, first, last, sampling)))
