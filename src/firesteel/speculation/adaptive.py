"""The policy that searches budget, width and who drafts for the most tokens per millisecond.

No setting is privileged: plain decoding, every fixed width and everything
between are points of one search over predicted gains and measured prices. Two
decisions, both linear in what is known:

    plan    every few steps: width k, the m requests that draft, the rate of the whole cycle
    budget  every step: B that maximises tokens - rate * milliseconds

There is no learning phase. What is unknown starts from a guess that a handful
of outcomes corrects, and where drafting does not pay, or shallower drafts pay
than could be made, a probe looks again for ``probe_share`` of the step time.
Where requests differ, a new one is looked at once: a drafting pass shows its
own signals, and the next plan decides on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from firesteel.core import Budget
from firesteel.speculation.book import SHRINK, Book
from firesteel.speculation.budget import DraftPlan, StepCost, average_gains, best_of, choose_width, fixed
from firesteel.speculation.cost import CostModel
from firesteel.speculation.survival import Calibrator, Coefficients, Samples
from firesteel.speculation.terms import Candidate, Drafting, Load, Proposed, Timing, Verified
from firesteel.speculation.watch import Watch

Floats = NDArray[np.float64]
BATCH = 8  # steps, and blocks at least, that are learned from at once
EAGER = 4  # digests after which they come a step later each time, up to BATCH
PERIOD = 8  # steps between plans while the load is the same
ALL_WIDTHS = 8  # K up to which every width is tried
TRIAL = 4  # requests that draft while nothing is known of the drafter


class Adaptive:
    """Never slower than the best fixed setting, as far as prices and survivals are right.

    Survivals are those of committed drafting passes, at least one generation
    older than the drafts they stand for, so no decision looks at the drafts
    that it decides on; the device ranks by the live ones. Tokens are weighted
    by their request's priority and wish for speed.
    """

    learns = True

    def __init__(
        self,
        gamma: int,
        cost: CostModel,
        calibrator: Calibrator,
        *,
        probe_share: float = 0.004,
        look_share: float = 0.004,
        rejection: bool = False,
    ):
        self.gamma, self.cost, self.calibrator = gamma, cost, calibrator
        self.probe_share, self.look_share, self.rejection = probe_share, look_share, rejection
        self.watch = Watch(cost)
        self.book = Book(gamma, calibrator.coefficients, calibrator.trust > 1.0)
        self.widths = draft_widths(gamma)
        self.changed = True  # the coefficients are newer than the device's
        self.probes = 0
        self._plan: DraftPlan | None = None
        self._age, self._planned_for = 0, -1
        self._credit, self._turn, self._here = 0.0, 0, 0.0
        self._probing: frozenset[int] = frozenset()
        self._looks, self._looked, self._looking = 0.0, set[int](), frozenset[int]()  # credit, ever, just now
        self._pending: dict[int, Proposed] = {}  # drafts whose fate is not known yet
        self._blocks: list[Proposed] = []  # not yet in the book
        self._fates: list[
            tuple[Proposed, int, int]
        ] = []  # a block, its drafts whose fate is known, accepted ones
        self._waited, self._digests = 0, 0
        self._gone: list[int] = []  # ended requests that the book still holds
        self._gains: tuple[object, Floats] | None = None  # the last gains and what they were made of
        self._decided: tuple[object, Budget] | None = None  # the last budget and what it was decided for

    # ---- questions ---------------------------------------------------------------
    def budget(self, candidates: Sequence[Candidate], load: Load) -> Budget:
        """The best B over all drafts that exist."""
        able = [c for c in candidates if c.ready]
        if able and {c.request_id for c in able} <= self._probing:
            return replace(fixed([c.ready for c in able], load.room), reason="probe: drafting did not pay")
        known = (
            tuple((c.request_id, c.ready) for c in candidates),
            load.rows,
            load.room,
            load.context // 128,
        )
        if self._decided is not None and self._decided[0] == known and not self.book.wishes:
            return self._decided[1]
        budget = self._budget(candidates, able, load)
        self._decided = (known, budget)
        return budget

    def _budget(self, candidates: Sequence[Candidate], able: list[Candidate], load: Load) -> Budget:
        weights = self.book.weights(candidates)
        gains = self._gains_of(candidates, able, weights)
        rate, extra = (None, 0.0) if self._plan is None else (self._plan.rate, 0.0)
        if rate is None:
            extra = self.cost.draft_ms(len(able), max((c.ready for c in able), default=0))
        value = float(weights.sum()) if len(weights) else load.sampling
        return best_of(gains, load.rows, value, self._prices(load), extra, load.room, rate)

    def _gains_of(self, candidates: Sequence[Candidate], able: list[Candidate], weights: Floats) -> Floats:
        """[n] expected gains of the drafts that exist, best first; as before while nothing was learned."""
        if not able:
            return np.zeros(0)
        key = (self.book.version, able)
        if self._gains is not None and self._gains[0] == key and not self.book.wishes:
            return self._gains[1]
        mine = np.array([c.ready > 0 for c in candidates])
        cases = self.book.scenarios(able) * weights[mine, None]
        exists = np.arange(self.gamma) < np.array([c.ready for c in able])[:, None]
        gains = average_gains(cases.reshape(len(cases), -1)[:, exists.ravel()])
        self._gains = (key, gains)
        return gains

    def _prices(self, load: Load) -> StepCost:
        return lambda rows: self.cost.step_ms(rows, load.context)

    def drafting(self, candidates: Sequence[Candidate], load: Load) -> Drafting:
        """The best cycle of draft and verify; where none pays, a probe now and then."""
        self._probing = frozenset()
        able = [c for c in candidates if c.cap > 0]
        if not able:
            return Drafting(frozenset(), 0, "no request wants drafts")
        self.book.ask(able)
        self._age += 1
        drift = abs(len(able) - self._planned_for) > self._planned_for // 8
        if self._plan is None or self._age >= PERIOD or drift:
            self._plan, self._decided = self._search(candidates, able, load), None
            self._here = self.cost.row_ms(load.rows, load.context)
            self._age, self._planned_for = 0, len(able)
        plan = self._plan
        self._credit += self.probe_share * self._here
        self._looks += self.look_share * self._here
        if not plan.pays:
            look = self._look(able)
            if look is not None:
                return look
            self.book.fade([c.request_id for c in able])
            return self._probe(able, load)
        most = plan.requests if plan.requests < self._planned_for else len(able)
        most = min(most, TRIAL) if self.book.unproven else most
        chosen = self._best(able)[:most] if most < len(able) else able
        ids = frozenset(c.request_id for c in chosen)
        width, why = plan.width, "drafting pays"
        if len(ids) < len(able):
            self.book.fade([c.request_id for c in able if c.request_id not in ids])
            why = (
                "trying an unknown drafter"
                if self.book.unproven
                else "drafting pays for the most predictable"
            )
        else:
            width, why = self._look_deeper(len(ids), width, why)
        if not self.book.wishes and all(c.weight == able[0].weight for c in able):
            return Drafting(ids, width, why)
        weights = self.book.weights(able).tolist()
        marked = dict(zip((c.request_id for c in able), weights, strict=True))
        return Drafting(ids, width, why, marked)

    def _best(self, able: Sequence[Candidate]) -> list[Candidate]:
        """Most promising first; equal ones by arrival."""
        usual = self.book.usual(able).sum(1) * self.book.weights(able)
        return [able[i] for i in sorted(range(len(able)), key=lambda i: (-usual[i], able[i].request_id))]

    def _search(self, candidates: Sequence[Candidate], able: Sequence[Candidate], load: Load) -> DraftPlan:
        """Plan of a step that runs anchors and drafts only: prompts are paid for whatever is decided."""
        cases = self.book.scenarios(able) * self.book.weights(able)[:, None]
        usual = cases.mean(0).sum(1)
        order = sorted(range(len(able)), key=lambda i: (-usual[i], able[i].request_id))
        return choose_width(
            cases[:, order],
            len(candidates),
            float(self.book.weights(candidates).sum()),
            self._prices(load),
            self.cost.draft_ms,
            self.widths,
            load.room + len(able) * self.gamma,
        )

    def _look(self, able: list[Candidate]) -> Drafting | None:
        """A new request drafts once where drafting does not pay: its own signals tell whether it is an exception.

        Only where requests have been found to differ, within ``look_share`` of the step time.
        """
        if self.book.shrink >= SHRINK or self._looks < self.cost.draft_ms(1, self.gamma):
            return None
        new = [c.request_id for c in able if c.request_id not in self._looked]
        count = len(new)
        while count and self.cost.draft_ms(count, self.gamma) > self._looks:
            count //= 2
        if not count:
            return None
        self._looks -= self.cost.draft_ms(count, self.gamma)
        self._looking = frozenset(new[:count])
        self._looked |= self._looking
        return Drafting(self._looking, self.gamma, "looking at a new request")

    def _probe(self, able: list[Candidate], load: Load) -> Drafting:
        """One request drafts and verifies, as often as its price stays within ``probe_share`` of the step time."""
        width = min(self.gamma, max(2, (self.gamma + 1) // 2))
        if self._credit < self.cost.draft_ms(1, width):
            return Drafting(frozenset(), 0, "drafting does not pay")
        here, more = (self.cost.row_ms(load.rows + n, load.context) for n in (0, width))
        price = more - here + self.cost.draft_ms(1, width)
        if self._credit < price:
            return Drafting(frozenset(), 0, "drafting does not pay")
        self._credit -= price
        self._turn, self.probes = self._turn + 1, self.probes + 1
        self._probing = frozenset({able[self._turn % len(able)].request_id})
        return Drafting(self._probing, width, "probe: drafting did not pay")

    def _look_deeper(self, requests: int, width: int, why: str) -> tuple[int, str]:
        """All K drafts now and then: what deeper ones are worth is known only if they are made."""
        if width >= self.gamma:
            return width, why
        price = self.cost.draft_ms(requests, self.gamma) - self.cost.draft_ms(requests, width)
        if self._credit < max(price, 0.0) or self._credit <= 0:
            return width, why
        self._credit -= max(price, 1.0 * self._credit)
        self.probes += 1
        return self.gamma, "probe: deeper drafts"

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
        for v in verified:
            p = self._pending.pop(v.request_id, None)
            if p is not None and v.verified and not v.ended:
                last = min(v.accepted + 1, v.verified, len(p.margin))
                self._fates.append((p, last, min(v.accepted, last)))
        for p in proposed:
            self._pending[p.request_id] = p
        self._blocks.extend(proposed)
        if self.book.wishes and verified:
            ids, tokens = [v.request_id for v in verified], np.array([v.accepted + 1 for v in verified])
            self.book.clock(ids, tokens, timing.measured_ms)
        self.cost.observe(timing.rows, timing.predicted_ms, timing.measured_ms)
        self.watch.price(timing.predicted_ms, timing.measured_ms)
        self._waited += 1
        if self._looking and any(p.request_id in self._looking for p in proposed):
            self._looking, self._plan = frozenset(), None
            self._digest()
            return
        # what is new says much at first and little later
        due = min(1 + self._digests // EAGER, BATCH) if len(self._blocks) >= BATCH else BATCH
        if self._waited >= due or self.book.unproven:
            self._digest()

    def _digest(self) -> None:
        """Learn from what has gathered: few requests do not pay for arrays in every step."""
        self._waited, self._decided = 0, None
        self._digests += bool(self._blocks)
        if self._fates:
            samples = _outcomes(self._fates)
            self._fates.clear()
            self.watch.outcomes(samples)
            self.book.judge(samples.depth, samples.accepted)
            if self.calibrator.add(samples):
                self.changed, self._plan = True, None
                self.book.reprice(self.calibrator.coefficients)
        if self._blocks:
            self.book.take(self._blocks)
            self.watch.signals(self._blocks)
            self._blocks.clear()
        for request_id in self._gone:
            self.book.forget(request_id)
        self._gone.clear()

    def forget(self, request_id: int) -> None:
        """A request has ended; the book forgets it when it has its last blocks."""
        self._pending.pop(request_id, None)
        self._looked.discard(request_id)
        self._gone.append(request_id)


def _outcomes(fates: Sequence[tuple[Proposed, int, int]]) -> Samples:
    """Blocks' drafts as columns."""
    head: list[float] = []
    margin: list[float] = []
    depth: list[int] = []
    kind: list[int] = []
    accepted: list[float] = []
    for p, last, hits in fates:
        head.extend(p.head[:last] or [0.0] * last)
        margin.extend(p.margin[:last])
        depth.extend(range(last))
        kind.extend([p.kind] * last)
        accepted.extend([1.0] * hits + [0.0] * (last - hits))
    return Samples(
        np.array(head, dtype=np.float64),
        np.array(margin, dtype=np.float64),
        np.array(depth, dtype=np.int64),
        np.array(kind, dtype=np.int64),
        np.array(accepted, dtype=np.float64),
    )


def draft_widths(gamma: int) -> tuple[int, ...]:
    """Widths worth trying: all of few, and a third fewer again and again of many."""
    if gamma <= ALL_WIDTHS:
        return tuple(range(1, gamma + 1))
    out, k = [], gamma
    while k > 4:
        out.append(k)
        k = k * 2 // 3
    return tuple(sorted({*out, *range(1, k + 1)}))
