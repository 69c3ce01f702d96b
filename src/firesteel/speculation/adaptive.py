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

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from firesteel.core import Budget
from firesteel.speculation.beside import TAKEN, WORTH, Beside, full
from firesteel.speculation.book import SHRINK, Book
from firesteel.speculation.budget import (
    DraftPlan,
    StepCost,
    average_gains,
    best_of,
    best_of_few,
    choose_width,
    draft_widths,
    fixed,
    width_of_one,
)
from firesteel.speculation.cost import CostModel
from firesteel.speculation.ledger import Ledger
from firesteel.speculation.lessons import LONE, Lessons
from firesteel.speculation.slept import REST, Slept
from firesteel.speculation.survival import Calibrator, Coefficients
from firesteel.speculation.terms import Candidate, DraftBlocks, Drafting, Load, Proposed, Timing, Verified
from firesteel.speculation.turnover import Turnover
from firesteel.speculation.watch import Watch

Floats = NDArray[np.float64]
_NOBODY: frozenset[int] = frozenset()
PERIOD, PERIODS = 8, 16  # steps between plans while the load is the same; as long as that if they agree
RESTS = 64  # the same while drafting does not pay: looks and probes bring what is new, and then a plan
PASSING = 3  # steps from which on a change of the load counts where drafting does not pay
HOPE_FIRST, HOPE, LEAST_HOPE = 0.3, 0.8, 0.2  # a look costs some of it, a plan that pays brings it back
IDLE, OVERRATED = "drafting does not pay", "drafting brings less than it promises"
SHORT = "drafting does not pay for answers so short"
UNSURE = "drafting may pay, but by less than prices are off here"
SPREAD = 16  # steps that pay for what a request catches up with when it begins to draft
DARING = 0.005  # share of the step time that is put by for trials of what may pay
PER_PAIR = 6.0  # steps that a compared pair of stretches stands for
USUAL_RATE = 1.0 / 16  # weight of a plain step in what they usually take over their price
CROWD = 4  # requests more than twice those of the plan: it says nothing of them
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
        probe_share: float = 0.003,
        look_share: float = 0.007,
        rejection: bool = False,
    ):
        self.gamma, self.cost, self.calibrator = gamma, cost, calibrator
        self.probe_share, self.look_share, self.rejection = probe_share, look_share, rejection
        self.watch = Watch(cost)
        self.book = Book(gamma, calibrator.coefficients, calibrator.trust > 1.0)
        self.widths, self._probe_width = draft_widths(gamma), min(gamma, max(2, (gamma + 1) // 2))
        self.changed = True  # the coefficients are newer than the device's
        self.probes = 0
        self._plan: DraftPlan | None = None
        self._age, self._period, self._planned_for = 0, PERIOD, -1
        self._scale = 1.0  # of prices when it was made
        self._planned_ids: list[int] = []  # where each counts
        self._credit, self._turn, self._here = 0.0, 0, 0.0
        self._probing: frozenset[int] = frozenset()
        self._hope = HOPE_FIRST  # how much of ``look_share`` is spent
        self._looks, self._looked, self._looking = 0.0, set[int](), frozenset[int]()  # credit, ever, just now
        self.lessons = Lessons(gamma, cost, calibrator, self.book, self.watch)
        self.slept = Slept(cost, self.lessons, self.account)
        self.turnover = Turnover()
        self.ledger, self._refused = Ledger(), IDLE  # why the last plan does not draft
        self._paid, self._purse = False, math.inf  # whether the last plan drafts; ms put by for a trial
        self._usual = 0.0  # log of spent over priced of plain steps
        self._explored = False  # the last exploration was a look, not a probe
        self._drew = frozenset[int]()  # who drafted in the step that was committed last
        # what was asked last, and until which credit for probes and for looks
        self._answer: tuple[object, Drafting, float, float] | None = None
        self._idle: tuple[list[int], int] = ([], 0)  # requests that did not draft, for how many steps
        self._gains: tuple[object, Floats] | None = None  # the last gains and what they were made of
        self._decided: tuple[object, Budget] | None = None  # the last budget and what it was decided for
        self._beside = Beside(cost, self.book, self.widths)  # prompts that fill the step
        self._changed = 0  # steps since the load is another one than the plan was made for

    # ---- questions ---------------------------------------------------------------
    def budget(self, candidates: Sequence[Candidate], load: Load) -> Budget:
        """The best B over all drafts that exist."""
        if self._probing:
            drafts = [c.ready for c in candidates if c.ready]
            if drafts and all(c.request_id in self._probing for c in candidates if c.ready):
                return replace(fixed(drafts, load.room), reason="probe: drafting did not pay")
        if not any(c.ready for c in candidates) and not self.book.wishes:
            ms = self.cost.row_ms(load.rows, load.context)
            return Budget(0, self._value(candidates), ms, "no drafts to verify")
        known = (candidates, load.rows, load.room, load.context // 128, self._beside.answer)
        if self._decided is not None and self._decided[0] == known and not self.book.wishes:
            return self._decided[1]
        able = [c for c in candidates if c.ready]
        budget = self._budget(candidates, able, load)
        self._decided = (known, budget)
        return budget

    def _budget(self, candidates: Sequence[Candidate], able: list[Candidate], load: Load) -> Budget:
        rate, extra = (
            (None, 0.0) if self._plan is None else (self._plan.rate * self._scale / self.cost.scale, 0.0)
        )
        if rate is None:
            extra = self.cost.draft_ms(len(able), max((c.ready for c in able), default=0))
        if len(able) <= 1:
            value = self._value(candidates)
            few = self._gains_of_one(able[0]) if able else []
            beside = self._beside.budget(few, value, load)
            return beside or best_of_few(few, load.rows, value, self._row_price(load), extra, load.room, rate)
        weights = self.book.weights(candidates)
        gains = self._gains_of(candidates, able, weights)
        value = float(weights.sum())
        beside = self._beside.budget(gains, value, load)
        return beside or best_of(gains, load.rows, value, self._prices(load), extra, load.room, rate)

    def _value(self, candidates: Sequence[Candidate]) -> float:
        """What the tokens count that these requests get without drafts."""
        if self.book.wishes:
            return float(self.book.weights(candidates).sum())
        return sum(c.weight for c in candidates)

    def _gains_of_one(self, c: Candidate) -> list[float]:
        """Expected gains of the drafts of the only request that has any; survival falls with depth."""
        weight = c.weight if not self.book.wishes else float(self.book.weights([c])[0])
        gains = self.book.expected(c._replace(cap=c.ready))
        return gains if weight == 1.0 else [weight * g for g in gains]

    def _row_price(self, load: Load) -> Callable[[int], float]:
        return lambda rows: self.cost.row_ms(rows, load.context)

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
        price = self.cost.hopeful_ms if self._paid else self.cost.step_ms
        return lambda rows: price(rows, load.context)

    def drafting(self, candidates: Sequence[Candidate], load: Load) -> Drafting:
        """The best cycle of draft and verify; where none pays, a probe now and then."""
        self._probing = frozenset()
        self._age += 1
        self.turnover.step(len(candidates))
        self._beside.age()
        beside = full(load)
        if len(candidates) > 2 * self._planned_for + CROWD:
            self.ledger.stop()  # what the plan promised was for a few
        elif (
            not beside
            and self._promise > 1.0
            and not self.book.wishes
            and self.ledger.burst(self._promise, self._doubt)
        ):
            self._answer = None
            self._earn()
            return Drafting(frozenset(), 0, "a few plain steps, to compare")
        if self._answer is not None and self._age < self._period and not beside:
            asked, answer, price, look = self._answer
            poor = self._credit < price and self._looks < look
            same = asked == (candidates, self._plan)
            if poor and same and not self.book.wishes:
                self._earn()
                if answer.request_ids:
                    return answer
                self._idle = self._idle[0], self._idle[1] + 1
                return replace(answer, rest=self._rest_of(price, look))
        self._answer = None
        able = [c for c in candidates if c.cap > 0]
        if not able:
            return Drafting(frozenset(), 0, "no request wants drafts")
        self.book.ask(able)
        if self.book.blank:
            return self._first_look(able)
        if beside:  # the plan waits until they have run
            self._here = self.cost.row_ms(load.rows, load.context)
            self._earn()
            trust, draft_ms = self.ledger.trust, self._draft_price
            width = self._beside.width(candidates, able, load, trust, draft_ms)
            if width:
                return self._marked(able, able[: TRIAL if self.book.unproven else None], width, WORTH)
            probe = self._probe(able, load)
            return probe if probe.request_ids else replace(probe, reason=TAKEN)
        if self._plan is None or self._age >= self._period or self._drifted(able):
            self._replan(candidates, able, load)
        self._earn()
        plan = self._plan
        assert plan is not None, "just made"
        if not plan.pays:
            first = self._look(able)
            if first is not None:
                return first
            self._rest([c.request_id for c in able])
            answer = self._probe(able, load)
            if not answer.request_ids:
                price = self._probe_price(load)
                curious = self.book.shrink < SHRINK and bool(self._new(able))
                look = self._look_price(1) if curious else math.inf
                self._answer = (candidates, plan), answer, price, look
                return replace(answer, rest=self._rest_of(price, look))
            return answer
        answer = self._draft(able, plan)
        if len(answer.request_ids) == len(able):
            price = math.inf if answer.width == self.gamma else self._price_of_depth(len(able), answer.width)
            self._answer = ((candidates, plan), answer, price, math.inf) if price > 0 else None
        return answer

    def _rest_of(self, price: float, look: float) -> int:
        """Steps until a plan, a probe of ``price`` or a look is due."""
        if self.book.wishes:
            return 0
        here = max(self._here, 1e-6)
        probe = (price - self._credit) / here / max(self.probe_share, 1e-9)
        looked = (look - self._looks) / here / max(self.look_share * self._hope, 1e-9)
        return max(int(min(self._period - self._age - 1, REST, probe, looked)), 0)

    def rested(self, steps: int) -> None:
        """As if ``drafting`` had been asked and had answered the same."""
        self._age += steps
        self._idle = self._idle[0], self._idle[1] + steps
        for _ in range(steps):
            self._earn()

    @property
    def _promise(self) -> float:
        """How many times the rate of plain steps the plan expects; 1 if it does not draft."""
        plan = self._plan
        return plan.rate / plan.plain_rate if plan is not None and plan.pays and plan.plain_rate > 0 else 1.0

    @property
    def _doubt(self) -> float:
        """Relative standard error of what stretches with drafts cost against plain ones."""
        return self.cost.noise / math.sqrt(1.0 + PER_PAIR * self.ledger.pairs.count)

    def account(self, comparable: bool, plain: bool, priced_ms: float, spent_ms: float) -> None:
        """What a committed step was priced at and took, planning included; ``comparable``: no prompt in it."""
        if not (comparable and priced_ms > 0.0 and 0.0 < spent_ms < math.inf):
            self.ledger.interrupt()
            return
        self.ledger.note(plain, priced_ms, spent_ms)
        if plain:
            self._usual += USUAL_RATE * (math.log(spent_ms / priced_ms) - self._usual)
        elif not self._paid:
            over = min(max(spent_ms * math.exp(-self._usual) - priced_ms, -priced_ms), priced_ms)
            if self._explored:
                self._looks -= over
            else:
                self._credit -= over

    def _drifted(self, able: list[Candidate]) -> bool:
        """Whether the plan was made for others: so few requests that each counts, or another number of them."""
        off = abs(len(able) - self._planned_for)
        if not self._paid and self._plan is not None:
            # requests come and go, and what did not pay still does not; a look finds exceptions
            alone = min(len(able), self._planned_for) <= 1
            self._changed = self._changed + 1 if off > (0 if alone else max(self._planned_for // 4, 1)) else 0
            return self._changed >= (PASSING if alone else 1)  # one ends, and the next is not there yet
        if len(able) <= LONE:
            # what a newcomer is like shows in a step or two, and its first lesson brings a plan
            soon = PERIOD // 2 if off == 0 and len(able) > 1 else (len(able) + 1) // 2
            return self._age >= soon and [c.request_id for c in able] != self._planned_ids
        return off > self._planned_for // 8

    def _earn(self) -> None:
        """Each step earns its share for probes and looks."""
        self._credit += self.probe_share * self._here
        self._looks += self.look_share * self._hope * self._here
        if not self._paid:
            self._purse += DARING * self._here

    def _draft(self, able: list[Candidate], plan: DraftPlan) -> Drafting:
        """Who drafts by a plan that pays, and how wide."""
        most = plan.requests if plan.requests < self._planned_for else len(able)
        most = min(most, TRIAL) if self.book.unproven else most
        chosen = self._best(able)[:most] if most < len(able) else able
        ids = frozenset(c.request_id for c in chosen)
        width, why = plan.width, "drafting pays"
        if len(ids) < len(able):
            self._rest([c.request_id for c in able if c.request_id not in ids])
            why = (
                "trying an unknown drafter"
                if self.book.unproven
                else "drafting pays for the most predictable"
            )
        else:
            width, why = self._look_deeper(len(ids), width, why)
        return self._marked(able, chosen, width, why)

    def _marked(
        self, able: Sequence[Candidate], chosen: Sequence[Candidate], width: int, why: str
    ) -> Drafting:
        """``chosen`` ones draft; the device hears what their tokens count if they differ."""
        ids = frozenset(c.request_id for c in chosen)
        if not self.book.wishes and all(c.weight == able[0].weight for c in able):
            return Drafting(ids, width, why)
        weights = self.book.weights(able).tolist()
        marked = dict(zip((c.request_id for c in able), weights, strict=True))
        return Drafting(ids, width, why, marked)

    def _best(self, able: Sequence[Candidate]) -> list[Candidate]:
        """Most promising first; equal ones by arrival."""
        usual = self.book.usual(able).sum(1) * self.book.weights(able)
        return [able[i] for i in sorted(range(len(able)), key=lambda i: (-usual[i], able[i].request_id))]

    def _rest(self, request_ids: list[int]) -> None:
        """They do not draft in this step; the book hears of it before it is asked for a plan."""
        ids, steps = self._idle
        if ids != request_ids:
            self._tell_rest()
            ids, steps = request_ids, 0
        self._idle = (ids, steps + 1)

    def _tell_rest(self) -> None:
        ids, steps = self._idle
        if steps:
            self.book.fade([i for i in ids if self.book.has(i)], steps)
        self._idle = ([], 0)

    def _replan(self, candidates: Sequence[Candidate], able: Sequence[Candidate], load: Load) -> None:
        """A new plan; while plans agree they are made less often."""
        self._tell_rest()
        old, drift = self._plan, len(able) != self._planned_for
        plan = self._search(candidates, able, load)
        self._refused = IDLE
        if plan.pays:
            promise = self.turnover.promise(plan, len(candidates), self._paid, self.cost, load.context)
            rate = plan.rate if promise is None else promise * plan.plain_rate
            trusted = rate * self.ledger.trust
            if trusted <= plan.plain_rate:
                self._refused = OVERRATED if rate > plan.plain_rate else SHORT
            elif not self._paid and trusted <= plan.plain_rate * (1.0 + self._doubt) and not self._dare():
                self._refused = UNSURE  # who drafts already goes on while it pays at all
            if self._refused is not IDLE:
                plan = DraftPlan(0, 0, plan.plain_rate, plan.plain_rate)
        rests, self._paid = not (self._paid or plan.pays), plan.pays
        same = old is not None and (plan.width, plan.requests) == (old.width, old.requests) and not drift
        if plan.pays:
            self._hope = 1.0
        self._period = min(2 * self._period, PERIODS if plan.pays else RESTS) if same or rests else PERIOD
        self._plan, self._scale, self._decided = plan, self.cost.scale, None
        self._here = self.cost.row_ms(load.rows, load.context)
        self._age, self._planned_for, self._changed = 0, len(able), 0
        self._planned_ids = [c.request_id for c in able] if len(able) <= LONE else []

    def _dare(self) -> bool:
        """Whether to draft for a while though it may not pay: what that loses at most has been put by."""
        if self._purse < self._doubt * PERIOD * self._here:
            return False
        self._purse = 0.0
        return True

    def _search(self, candidates: Sequence[Candidate], able: Sequence[Candidate], load: Load) -> DraftPlan:
        """Plan of a step that runs anchors and drafts only: prompts are paid for whatever is decided."""
        base, value = len(candidates), self._value(candidates)
        room = load.room + len(able) * self.gamma
        if len(able) == 1:
            gains = self._gains_of_one(able[0]._replace(ready=able[0].cap))
            most = min(self.widths[-1], len(gains), room)
            prices = [self.cost.row_ms(base + b, load.context) for b in range(most + 1)]
            return width_of_one(gains, True, value, prices, self._draft_price, self.widths)
        cases = self.book.scenarios(able) * self.book.weights(able)[:, None]
        usual = cases.mean(0).sum(1)
        order = sorted(range(len(able)), key=lambda i: (-usual[i], able[i].request_id))
        return choose_width(
            cases[:, order], base, value, self._prices(load), self._draft_price, self.widths, room
        )

    def _draft_price(self, requests: int, width: int) -> float:
        """Of a drafting pass in a plan; who begins has to catch up first."""
        entry = 0.0 if self._paid else max(self.cost.entry_ms, 0.0) * requests / SPREAD
        return self.cost.draft_ms(requests, width) + entry

    def _look_price(self, requests: int) -> float:
        """Of a drafting pass of requests that have not drafted lately."""
        return self.cost.draft_ms(requests, self._probe_width) + max(self.cost.entry_ms, 0.0) * requests

    def _first_look(self, able: list[Candidate]) -> Drafting:
        """Nothing has been seen, but the calibration can tell by signals: one pass shows what to think."""
        if self._looking and self._age < PERIOD:  # who ends before a look is committed shows nothing
            return Drafting(frozenset(), 0, "waiting for a first look")
        self._age, self._looking = 0, frozenset(c.request_id for c in able[:TRIAL])
        return Drafting(self._looking, self.gamma, "a first look")

    def _look(self, able: list[Candidate]) -> Drafting | None:
        """A new request drafts once where drafting does not pay: its own signals tell whether it is an exception.

        Only where requests have been found to differ, within ``look_share`` of the step time,
        and the less often the more looks have found nothing.
        """
        width = self._probe_width
        if self.book.shrink >= SHRINK or self._looks < self._look_price(1):
            return None
        new = self._new(able)
        count = len(new)
        while count and self._look_price(count) > self._looks:
            count //= 2
        if not count:
            return None
        self._looks -= self._look_price(count)
        self._explored = True
        self._looking = frozenset(new[:count])
        self._looked |= self._looking
        self._hope = max(self._hope * HOPE, LEAST_HOPE)
        return Drafting(self._looking, width, "looking at a new request")

    def _new(self, able: list[Candidate]) -> list[int]:
        """Who was never looked at."""
        return [c.request_id for c in able if c.request_id not in self._looked]

    def _probe(self, able: list[Candidate], load: Load) -> Drafting:
        """One request drafts and verifies, as often as its price stays within ``probe_share`` of the step time."""
        price = self._probe_price(load)
        if self._credit < price:
            return Drafting(frozenset(), 0, self._refused)
        self._credit -= price
        self._explored = False
        self._turn, self.probes = self._turn + 1, self.probes + 1
        self._probing = frozenset({able[self._turn % len(able)].request_id})
        return Drafting(self._probing, self._probe_width, "probe: drafting did not pay")

    def _probe_price(self, load: Load) -> float:
        """Of drafts for one request, and of verifying them."""
        here, more = (self.cost.row_ms(load.rows + n, load.context) for n in (0, self._probe_width))
        return more - here + self._look_price(1)

    def _look_deeper(self, requests: int, width: int, why: str) -> tuple[int, str]:
        """All K drafts now and then: what deeper ones are worth is known only if they are made."""
        if width >= self.gamma:
            return width, why
        price = self._price_of_depth(requests, width)
        if self._credit < max(price, 0.0) or self._credit <= 0:
            return width, why
        self._credit -= max(price, 1.0 * self._credit)
        self.probes += 1
        return self.gamma, "probe: deeper drafts"

    def _price_of_depth(self, requests: int, width: int) -> float:
        """What all K drafts cost more than ``width`` of them."""
        return self.cost.draft_ms(requests, self.gamma) - self.cost.draft_ms(requests, width)

    def predict(self, rows: int, context: float, drafting: Drafting) -> float:
        """The price of the step and of its drafting pass."""
        return self.cost.price(rows, context, len(drafting.request_ids), drafting.width)

    def calibration(self) -> Coefficients | None:
        """The coefficients, once after every change."""
        fresh, self.changed = self.changed, False
        return self.calibrator.coefficients if fresh else None

    # ---- learning -------------------------------------------------------------------
    def learn(self, proposed: Sequence[Proposed], verified: Sequence[Verified], timing: Timing) -> None:
        """Steps wait until what they tell is worth the time."""
        if self.slept.steps:
            self.slept.wake()
        self.turnover.hear(timing.tokens, timing.prompt_rows)
        drew = frozenset(DraftBlocks.of(proposed).request_ids) if proposed else _NOBODY
        if drew:
            timing = timing._replace(entered=len(drew - self._drew))
        self._drew = drew
        ripe = self.lessons.hear((proposed, verified, timing))
        if self._looking and not self._looking.isdisjoint(drew):
            self._looking, self._plan = frozenset(), None
            self._digest(whole=True)
        elif ripe:
            self._digest()
        elif self.calibrator.due:
            self._taught(self.lessons.refit())

    def _digest(self, whole: bool = False) -> None:
        """Learn from the steps that wait."""
        self._decided = self._answer = None
        if self.lessons.young:
            self._plan = None
        self._taught(self.lessons.digest(whole))

    def _taught(self, changed: bool) -> None:
        if changed:
            self.changed, self._plan, self._decided = True, None, None

    def forget(self, request_id: int, tokens: int = 0) -> None:
        """A request has ended, with an answer of so many tokens."""
        if tokens:
            self.turnover.end()
        self._looked.discard(request_id)
        self.lessons.forget(request_id)
