"""Decides, step by step, how many drafts are verified and which requests draft.

``FixedWidth`` is a setting; ``Adaptive`` searches all of them. Both answer the
scheduler's two questions with plain values, and both learn only from what a
committed step says, so a plan can be sent to other ranks as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from firesteel.core import Budget
from firesteel.speculation.budget import DraftPlan, choose, choose_width, fixed
from firesteel.speculation.cost import CostModel
from firesteel.speculation.survival import Calibrator, Coefficients, Outcome

Floats = NDArray[np.float64]
CASES = 8  # latest blocks of a request that stand for its next one
SHRINK = 8.0  # drafting passes at which a request counts as much as all requests
FADE = 0.02  # per step


@dataclass(frozen=True)
class Candidate:
    """A running request as the policy sees it."""

    request_id: int
    ready: int  # drafts that exist and that it lets be verified
    cap: int  # drafts it lets be verified at most
    kind: int = 1  # temperature class: 0 greedy, 1 sampled
    weight: float = 1.0


@dataclass(frozen=True)
class Load:
    """What a step runs besides drafts."""

    rows: int  # prompt rows and anchors
    sampling: float  # weighted requests that will sample
    context: float  # mean tokens of context per row
    room: int  # rows left for drafts


@dataclass(frozen=True)
class Drafting:
    """Which requests draft at the end of the step, and how wide."""

    request_ids: frozenset[int]
    width: int
    reason: str


@dataclass(frozen=True)
class Proposed:
    """What a drafting pass said of one request: one value per depth."""

    request_id: int
    kind: int  # temperature class: 0 greedy, 1 sampled
    head: tuple[float, ...]  # empty without a confidence head
    margin: tuple[float, ...]
    survival: tuple[float, ...]


@dataclass(frozen=True)
class Verified:
    """What became of one request's drafts in a committed step."""

    request_id: int
    verified: int
    accepted: int
    ended: bool


@dataclass(frozen=True)
class Timing:
    """What a committed step was predicted to cost and cost."""

    rows: int
    predicted_ms: float
    measured_ms: float


class Policy(Protocol):
    """The scheduler's partner."""

    learns: bool  # wants confidences, margins and survivals of new drafts, and ``learn`` called

    def budget(self, candidates: Sequence[Candidate], load: Load) -> Budget:
        """How many drafts this step verifies."""

    def drafting(self, candidates: Sequence[Candidate], load: Load) -> Drafting:
        """Who gets new drafts at the end of this step."""

    def predict(self, rows: int, context: float, drafting: Drafting) -> float:
        """Milliseconds that a step will take, its drafting included; 0 if nobody knows."""

    def calibration(self) -> Coefficients | None:
        """New coefficients for the device, if they changed since the last call."""

    def learn(self, proposed: Sequence[Proposed], verified: Sequence[Verified], timing: Timing) -> None:
        """Take what a committed step says."""

    def forget(self, request_id: int) -> None:
        """A request has ended."""


class FixedWidth:
    """Every request verifies and drafts ``gamma`` tokens, as far as it lets itself and rows last."""

    learns = False

    def __init__(self, gamma: int):
        self.gamma = gamma

    def budget(self, candidates: Sequence[Candidate], load: Load) -> Budget:
        """All drafts that exist."""
        return fixed([c.ready for c in candidates], load.room)

    def drafting(self, candidates: Sequence[Candidate], load: Load) -> Drafting:
        """Everybody who wants drafts."""
        ids = frozenset(c.request_id for c in candidates if c.cap)
        return Drafting(ids, self.gamma if ids else 0, "fixed width" if ids else "speculation off")

    def predict(self, rows: int, context: float, drafting: Drafting) -> float:
        """Fixed widths need no prices."""
        return 0.0

    def calibration(self) -> Coefficients | None:
        """Survival stays 1."""
        return None

    def learn(self, proposed: Sequence[Proposed], verified: Sequence[Verified], timing: Timing) -> None:
        """Nothing to learn."""

    def forget(self, request_id: int) -> None:
        """Nothing is kept."""


@dataclass
class _Profile:
    """What is known of one request's drafts."""

    usual: Floats  # survival by depth, averaged over its recent drafting passes
    blocks: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=CASES))
    pending: Proposed | None = None  # drafts whose fate is not known yet
    last: Proposed | None = None
    seen: int = 0


@dataclass
class Adaptive:
    """Searches budget, width and who drafts for the most tokens per millisecond.

    Survivals are those of the newest committed drafting pass, one generation
    older than the drafts they stand for; the device ranks by the live ones.
    """

    gamma: int
    cost: CostModel
    calibrator: Calibrator
    probe_share: float = 0.01  # of step time, spent on looking again where drafting does not pay
    period: int = 8  # steps between searches for who drafts and how wide
    learning: int = 128  # outcomes of a class to see before its calibration is trusted; 0 with a file
    rejection: bool = False
    learns: bool = True
    profiles: dict[int, _Profile] = field(default_factory=dict)
    widths: tuple[int, ...] = ()
    probes: int = 0
    changed: bool = True  # the coefficients are newer than the device's

    def __post_init__(self) -> None:
        self.widths = self.widths or tuple(
            sorted(
                {1, 2, 3, (self.gamma + 1) // 2, self.gamma - 1, self.gamma} & set(range(1, self.gamma + 1))
            )
        )
        self._mean = np.cumprod(np.full(self.gamma, 0.75))  # of all requests; a new one starts from it
        self._plan: DraftPlan | None = None
        self._age, self._planned_for = 0, -1
        self._credit = 0.0
        self._turn = 0

    # ---- questions ---------------------------------------------------------------
    def budget(self, candidates: Sequence[Candidate], load: Load) -> Budget:
        """The best B over all drafts that exist."""
        if any(self._learns(c) for c in candidates):
            return replace(fixed([c.ready for c in candidates], load.room), reason="learning how drafts fare")
        cases = [c.weight * self._blocks(c)[:, : c.ready] for c in candidates if c.ready]
        flat = np.concatenate(cases, axis=1) if cases else np.zeros(0)
        return choose(
            flat, load.rows, load.sampling, lambda rows: self.cost.step_ms(rows, load.context), 0.0, load.room
        )

    def _learns(self, c: Candidate) -> bool:
        """Whether too little is known of its temperature class to trust any prediction."""
        return self.calibrator.seen[c.kind] < self.learning

    def _blocks(self, c: Candidate) -> Floats:
        """[CASES, K] survivals that its next block may turn out to have: those of its latest blocks.

        One block says little of the next one, so the budget is sized on
        several; the device ranks by the live ones.
        """
        profile = self.profiles.get(c.request_id)
        blocks = [self._filled(b) for b in profile.blocks] if profile is not None else []
        blocks += [self._mean] * (CASES - len(blocks))
        return np.stack(blocks)

    def drafting(self, candidates: Sequence[Candidate], load: Load) -> Drafting:
        """The best cycle of draft and verify; where none pays, a probe now and then."""
        able = [c for c in candidates if c.cap > 0]
        if not able:
            return Drafting(frozenset(), 0, "no request wants drafts")
        new = frozenset(c.request_id for c in able if self._learns(c))
        if new:
            return Drafting(new, self.gamma, "learning how drafts fare")
        for c in able:  # what is known of a request that does not draft fades
            profile = self.profiles.get(c.request_id)
            if profile is not None and not c.ready:
                profile.usual += FADE * (self._mean - profile.usual)
        order = sorted(able, key=lambda c: (-c.weight * float(self._usual(c).sum()), c.request_id))
        self._age += 1
        if self._plan is None or self._age >= self.period or len(able) != self._planned_for:
            self._plan = self._search(order, load)
            self._age, self._planned_for = 0, len(able)
        plan = self._plan
        if plan.pays:
            ids = frozenset(c.request_id for c in order[: plan.requests])
            reason = (
                "drafting pays" if plan.requests == len(able) else "drafting pays for the most predictable"
            )
            return Drafting(ids, plan.width, reason)
        return self._probe(able, load)

    def _usual(self, c: Candidate) -> Floats:
        profile = self.profiles.get(c.request_id)
        usual: Floats = self._mean.copy()
        if profile is not None:  # its own drafts count the more of them there are
            usual += profile.seen / (profile.seen + SHRINK) * (profile.usual - usual)
        usual[c.cap :] = 0.0
        return usual

    def _search(self, order: list[Candidate], load: Load) -> DraftPlan:
        rows = np.stack([c.weight * self._usual(c) for c in order])
        others = max(load.rows - len(order), 0)
        return choose_width(
            rows,
            others,
            max(load.sampling - len(order), 0.0),
            lambda r: self.cost.step_ms(r, load.context),
            self.cost.draft_ms,
            self.widths,
            load.room + len(order) * self.gamma,
        )

    def _probe(self, able: list[Candidate], load: Load) -> Drafting:
        """One request at a time, as often as its price stays within ``probe_share`` of the step time."""
        here, more = self.cost.step_ms(np.array([load.rows, load.rows + self.gamma]), load.context)
        self._credit += self.probe_share * float(here)
        price = float(more - here) + self.cost.draft_ms(1, self.gamma)
        if self._credit < price:
            return Drafting(frozenset(), 0, "drafting does not pay")
        self._credit, self._turn, self.probes = 0.0, self._turn + 1, self.probes + 1
        chosen = able[self._turn % len(able)]
        return Drafting(frozenset({chosen.request_id}), self.gamma, "probe: drafting did not pay")

    def predict(self, rows: int, context: float, drafting: Drafting) -> float:
        """The price of the step and of its drafting pass."""
        return self.cost.price(rows, context, len(drafting.request_ids), drafting.width)

    def calibration(self) -> Coefficients | None:
        """The coefficients, once after every change."""
        fresh, self.changed = self.changed, False
        return self.calibrator.coefficients if fresh else None

    # ---- learning -------------------------------------------------------------------
    def learn(self, proposed: Sequence[Proposed], verified: Sequence[Verified], timing: Timing) -> None:
        """Outcomes first: they belong to the drafts of the pass before."""
        outcomes: list[Outcome] = []
        for v in verified:
            profile = self.profiles.get(v.request_id)
            if profile is None or profile.pending is None:
                continue
            if v.verified and not v.ended:
                outcomes.extend(self._outcomes(profile.pending, v))
            profile.pending = None
        if self.calibrator.add(outcomes):
            self._recalibrate()
        for p in proposed:
            self._take(p)
        self.cost.observe(timing.rows, timing.predicted_ms, timing.measured_ms)

    def _recalibrate(self) -> None:
        """New coefficients: what was predicted with the old ones is predicted again."""
        self.changed, self._plan = True, None
        self._mean = self.calibrator.usual(self.gamma)
        for profile in self.profiles.values():
            profile.blocks.clear()
            profile.seen = 0
            if profile.last is not None:
                profile.blocks.append(self._survival(profile.last))
                profile.usual, profile.seen = self._filled(profile.blocks[0]), 1

    def _survival(self, p: Proposed) -> tuple[float, ...]:
        """Survival of a block under the present coefficients."""
        n = len(p.margin)
        conditional = self.calibrator.coefficients.probability(
            np.asarray(p.head or (0.0,) * n), np.asarray(p.margin), np.arange(n), np.full(n, p.kind)
        )
        return tuple(float(v) for v in np.cumprod(conditional))

    def _filled(self, survival: Sequence[float]) -> Floats:
        """Survival at all depths; a shorter pass says nothing of deeper drafts than what is usual."""
        full = np.zeros(self.gamma)
        values = np.nan_to_num(np.asarray(survival, dtype=np.float64), nan=0.0).clip(0.0, 1.0)
        full[: len(values)] = values
        for j in range(len(values), self.gamma):
            full[j] = full[j - 1] * self._mean[j] / max(self._mean[j - 1], 1e-6) if j else 0.0
        return full

    @staticmethod
    def _outcomes(p: Proposed, v: Verified) -> list[Outcome]:
        last = min(v.accepted + 1, v.verified, len(p.margin))
        head = p.head or (0.0,) * len(p.margin)
        return [Outcome(head[j], p.margin[j], j, p.kind, j < v.accepted) for j in range(last)]

    def _take(self, p: Proposed) -> None:
        full = self._filled(p.survival)
        profile = self.profiles.setdefault(p.request_id, _Profile(full.copy()))
        profile.usual += max(1.0 / (profile.seen + 1), 0.1) * (full - profile.usual)
        profile.blocks.append(tuple(float(v) for v in full[: len(p.survival)]))
        profile.pending, profile.last = p, p
        profile.seen += 1

    def forget(self, request_id: int) -> None:
        """A request has ended."""
        self.profiles.pop(request_id, None)
