"""What the scheduler counts, and a plan in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

from firesteel.core import NO_DRAFTS, Admission, Budget, Chunk, Restore, Save, SnapshotOrder
from firesteel.engine.sequence import Sequence
from firesteel.speculation.policy import Candidate, Drafting, Load


@dataclass
class SchedulerStats:
    """Counters since start."""

    preemptions: int = 0
    recomputes: int = 0
    deferred: int = 0  # admissions that waited for a prefix being computed


@dataclass
class Draftboard:
    """A plan in the making."""

    room: int
    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    bounds: list[int] = field(default_factory=list)  # of the first ``decodes``
    candidates: list[Candidate] = field(default_factory=list)  # likewise
    firsts: list[Sequence] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    restores: list[Restore] = field(default_factory=list)
    snapshots: list[tuple[Sequence, SnapshotOrder]] = field(default_factory=list)
    budget: Budget = NO_DRAFTS
    preempted: bool = False

    def all_bounds(self) -> list[int]:
        """Of all requests that sample."""
        late = self.decodes[len(self.bounds) :]
        return [*(s.bound for s in self.firsts), *self.bounds, *(s.bound for s in late)]

    def movable(self, seq: Sequence) -> bool:
        """Whether it is not part of this plan already, and does not wait to be swept."""
        in_plan = seq in self.decodes or any(c.request_id == seq.request_id for c in self.chunks)
        stored = any(s is seq for s, _ in self.snapshots)
        return seq.finish is None and not in_plan and not stored


@dataclass
class Rest:
    """Steps for which the policy is not asked: nobody drafts, and nothing that it looks at changes."""

    drafting: Drafting
    budget: Budget
    decodes: list[Sequence]
    predicted_ms: float
    steps: int = 0  # planned so far

    def goes_on(self, board: Draftboard) -> bool:
        """Whether the plan on the board is one more of them."""
        same = not board.chunks and board.decodes == self.decodes
        return same and self.steps < self.drafting.rest


def load_of(bounds: list[int], rows: int, room: int, others: int, limit: int) -> Load:
    """A step of ``rows`` of requests with these bounds, with ``room`` for drafts; ``others`` wait for prompts."""
    return Load(rows, float(len(bounds)), sum(bounds) / max(len(bounds), 1), max(room, 0), others, limit)


def candidate(seq: Sequence) -> Candidate:
    """It as the policy sees it; drafts that its length limit rules out do not exist."""
    params, ready, cap = seq.params, seq.ready, seq.draft_cap
    room = seq.max_len - seq.known - seq.in_flight - 1  # every step in flight gives a token
    if room <= max(ready, cap):
        ready, cap = min(ready, max(room, 0)), min(cap, max(room - 1, 0))
    weight = 2.0 ** -min(max(params.priority, -6), 6) if params.priority else 1.0
    kind = 1 if params.temperature > 0 else 0
    return Candidate(
        seq.request_id, min(ready, seq.draft_cap), cap, kind, weight, params.min_tokens_per_second
    )
