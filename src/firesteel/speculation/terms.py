"""What the scheduler and its policy say to each other; plain values, so a plan can be sent to other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from firesteel.core import Budget
from firesteel.speculation.survival import Coefficients

Floats = NDArray[np.float64]


class Candidate(NamedTuple):  # one per request and step: tuples are made three times as fast
    """A running request as the policy sees it."""

    request_id: int
    ready: int  # drafts that exist and that it lets be verified
    cap: int  # drafts it lets be verified at most
    kind: int = 1  # temperature class: 0 greedy, 1 sampled
    weight: float = 1.0  # what one of its tokens counts
    floor: float = 0.0  # tokens per second it asks for; 0: none


class Load(NamedTuple):
    """What a step runs besides drafts."""

    rows: int  # prompt rows and anchors
    sampling: float  # weighted requests that will sample
    context: float  # mean tokens of context per row
    room: int  # rows left for drafts
    others: int = 0  # requests whose prompts have still to run
    limit: int = 0  # rows that a step may have; 0: not said


@dataclass(frozen=True)
class Drafting:
    """Which requests draft at the end of the step, and how wide.

    ``weights``: what a request's drafts count in the ranking on the device, if not all the same.
    ``rest``: for how many steps behind this one the policy need not be asked, while the same requests
    decode, none of them has drafts and no prompt runs.
    """

    request_ids: frozenset[int]
    width: int
    reason: str
    weights: Mapping[int, float] = field(default_factory=dict)
    rest: int = 0


class Proposed(NamedTuple):
    """What a drafting pass said of one request: one value per depth."""

    request_id: int
    kind: int  # temperature class: 0 greedy, 1 sampled
    head: tuple[float, ...]  # empty without a confidence head
    margin: tuple[float, ...]
    survival: tuple[float, ...]


class DraftBlocks(Sequence[Proposed]):
    """What one drafting pass said, as columns: G blocks of one width w.

    request_ids, kinds: G of each; head float64 [G, w], or None without a confidence head;
    margin, survival: float64 [G, w]. Looked at one by one it is a sequence of ``Proposed``.
    """

    def __init__(
        self,
        request_ids: Sequence[int],
        kinds: Sequence[int],
        head: Floats | None,
        margin: Floats,
        survival: Floats,
    ):
        self.request_ids, self.kinds = request_ids, kinds
        self.head, self.margin, self.survival = head, margin, survival

    @classmethod
    def of(cls, proposed: Sequence[Proposed]) -> DraftBlocks:
        """From blocks of one width."""
        if isinstance(proposed, DraftBlocks):
            return proposed
        has_head = bool(proposed) and bool(proposed[0].head)
        return cls(
            [p.request_id for p in proposed],
            [p.kind for p in proposed],
            np.array([p.head for p in proposed], dtype=np.float64) if has_head else None,
            np.array([p.margin for p in proposed], dtype=np.float64),
            np.array([p.survival for p in proposed], dtype=np.float64),
        )

    def __len__(self) -> int:
        return len(self.request_ids)

    @overload
    def __getitem__(self, at: int) -> Proposed: ...
    @overload
    def __getitem__(self, at: slice) -> list[Proposed]: ...
    def __getitem__(self, at: int | slice) -> Proposed | list[Proposed]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return Proposed(
            self.request_ids[at],
            self.kinds[at],
            () if self.head is None else tuple(self.head[at].tolist()),
            tuple(self.margin[at].tolist()),
            tuple(self.survival[at].tolist()),
        )


class Verified(NamedTuple):
    """What became of one request's drafts in a committed step.

    Drafts from the first on that a grammar forbids are left out of ``verified``:
    that they lost says nothing of the drafter.
    """

    request_id: int
    verified: int
    accepted: int
    ended: bool


class Timing(NamedTuple):
    """What a committed step was predicted to cost and cost."""

    rows: int
    predicted_ms: float
    measured_ms: float
    drafting: int = 0  # requests that drafted in it, each ``width``
    width: int = 0
    entered: int = 0  # of those that had not drafted in the step before
    prompt_rows: int = 0
    context: float = -1.0  # mean tokens per row; below 0: unknown
    tokens: int = 0  # of all answers since the step that was shown before
    ends: int = 0  # answers that ended by a token of theirs among these


class Policy(Protocol):
    """The scheduler's partner."""

    learns: bool  # wants confidences, margins and survivals of new drafts, and ``learn`` called

    def budget(self, candidates: Sequence[Candidate], load: Load) -> Budget:
        """How many drafts this step verifies."""

    def drafting(self, candidates: Sequence[Candidate], load: Load) -> Drafting:
        """Who gets new drafts at the end of this step."""

    def predict(self, rows: int, context: float, drafting: Drafting) -> float:
        """Milliseconds that a step will take, its drafting included; 0 if nobody knows."""

    def rested(self, steps: int) -> None:
        """So many steps have been planned without asking."""

    def calibration(self) -> Coefficients | None:
        """New coefficients for the device, if they changed since the last call."""

    def learn(self, proposed: Sequence[Proposed], verified: Sequence[Verified], timing: Timing) -> None:
        """Take what a committed step says."""

    def forget(self, request_id: int, tokens: int = 0) -> None:
        """A request has ended."""
