"""What committed steps teach: they wait, and are learned from together.

A step says little, and code that runs once a step runs cold: most steps are
only kept. How many wait depends on how new what they tell is. Where many
requests draft, some passes stand for all. So the work of a step is bounded,
whatever the load.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from firesteel.speculation.book import Book
from firesteel.speculation.cost import CostModel
from firesteel.speculation.recent import Recent
from firesteel.speculation.survival import Calibrator, Samples
from firesteel.speculation.terms import Candidate, DraftBlocks, Proposed, Timing, Verified
from firesteel.speculation.watch import Watch

Step = tuple[Sequence[Proposed], Sequence[Verified], Timing]
QUIET = 32  # steps that are learned from at once while nobody drafts
BATCH = 8  # steps, and blocks at least, that are learned from at once
EAGER = 4  # digests after which they come a step later each time, up to BATCH
LATELY = 128  # verified drafts that tell what share of them is usually accepted
ANSWERS = 4096.0  # tokens that tell how often answers end
SHORTEST = 256.0  # as if none had ended in so many before
MOST_ENDS = 0.25  # of the tokens
SURPRISE = 12.0  # drafts fewer accepted than were before, of few requests: reason to learn at once
YOUNG = 8  # first digests
ALIKE = 0.1  # of the tokens a step is expected to give: a new request that much off is another kind
LONE, PATIENCE = (
    4,
    16,
)  # so few requests: learned from soon after a new one, then after twice as many steps each time
CROWD, THINNED = (
    32,
    4,
)  # so many requests: one drafting pass in two is learned from, of twice as many one in ...
FATES, MOST_FATES = 96, 128  # blocks whose fate is known that the calibrator takes at once: at least, at most


class Lessons:
    """Hears of steps and tells book, prices, calibrator and watch."""

    def __init__(self, gamma: int, cost: CostModel, calibrator: Calibrator, book: Book, watch: Watch):
        self.gamma, self.cost, self.calibrator, self.book, self.watch = gamma, cost, calibrator, book, watch
        self.recent = Recent(gamma)
        self._steps: list[Step] = []  # not learned from yet
        self._blocks, self._few = 0, True  # in those, and whether their newest pass was of few requests
        self._digests, self._due, self._passes, self._requests = 0, 1, 0, 1
        self._totals = [0.0, 0.0]  # accepted and verified drafts lately
        self._share, self._surplus = (
            0.0,
            0.0,
        )  # of verified drafts accepted so far; those that should have been
        self._ends = [0.0, 0.0]  # answers that ended by a token of theirs, and tokens
        self._met = set[int]()  # requests that have drafted
        self._gone: list[int] = []  # ended requests that the book still holds
        # request -> number and survivals of its block whose fate is not known yet
        self._pending: dict[int, tuple[int, list[float]]] = {}
        self._truth: dict[
            int, tuple[float, float]
        ] = {}  # accepted and predicted drafts since the last digest
        self._booked = 0  # number of the first block that is not in the book
        self._fates: list[tuple[int, int, int]] = []  # block, its drafts whose fate is known, accepted ones
        self._clear_counts()
        calibrator.source = self._outcomes

    def _clear_counts(self) -> None:
        self._known, self._hits = (
            [0] * (self.gamma + 1),
            [0] * (self.gamma + 1),
        )  # fates since the last digest
        self._firsts: list[bool] = []  # whether first drafts were accepted, likewise

    def hear(self, step: Step) -> bool:
        """Keep a step; whether it is time to learn."""
        self._steps.append(step)
        blocks, verified, _ = step
        if blocks:
            self._blocks += len(blocks)
            self._requests = len(blocks)
            self._few = self._requests <= LONE
            if self._few:
                self._meet(DraftBlocks.of(blocks))
        if self._few:
            for v in verified:
                self._surplus += self._share * v.verified - v.accepted
        if self.book.wishes:
            self._clock(step)
        return self._surplus > SURPRISE or len(self._steps) >= self._wait() or self.book.unproven

    def _meet(self, blocks: DraftBlocks) -> None:
        """Few requests: who drafts for the first time is learned from soon, unless it looks as was expected."""
        for i, request_id in enumerate(blocks.request_ids):
            if request_id in self._met:
                continue
            self._met.add(request_id)
            shown, kind = self.book.lasting(blocks.survival[i].tolist()), blocks.kinds[i]
            expected = sum(self.book.expected(Candidate(request_id, len(shown), len(shown), kind)))
            off = abs(round(sum(shown), 2) - expected)  # not a device's last bits
            if self._digests < YOUNG or not off <= ALIKE * (1.0 + expected):
                self._due = (self._requests + 3) // 2  # the fewer there are, the more depends on each

    def _clock(self, step: Step) -> None:
        _, verified, timing = step
        if verified and math.isfinite(timing.measured_ms) and timing.measured_ms > 0:
            ids, tokens = [v.request_id for v in verified], np.array([v.accepted + 1 for v in verified])
            self.book.clock(ids, tokens, timing.measured_ms)

    def _wait(self) -> int:
        """Steps from one digest to the next: what is new says much at first and little later."""
        if self._few:
            return min(self._due, BATCH if self._requests > 1 else PATIENCE) if self._blocks else QUIET
        return min(1 + self._digests // EAGER, BATCH) if self._blocks >= BATCH else BATCH

    @property
    def young(self) -> bool:
        """Whether what the next digest tells may change everything."""
        if self._surplus > SURPRISE:
            return True
        return self._blocks > 0 and (self._due < BATCH if self._few else self._digests < YOUNG)

    def digest(self, whole: bool = False) -> bool:
        """Learn from the steps that wait; whether the calibration changed. ``whole``: no pass is left out."""
        recent, first = self.recent, self._booked
        self._count_accepted()
        for proposed, verified, timing in self._steps:  # outcomes first: they belong to the pass before
            if verified and self._pending:
                self._take_fates(verified)
            if proposed:
                self._note(DraftBlocks.of(proposed), whole)
            self.cost.observe(*timing[:8])
        self.watch.prices([t for _, _, t in self._steps])
        self._steps.clear()
        self._blocks, self._due, self._surplus = 0, min(2 * self._due, PATIENCE), 0.0
        if self._firsts:
            self.watch.outcomes(self._firsts)
            self.book.judge(_at_least(self._known), _at_least(self._hits))
            self.book.settle(self._truth)
            self._truth.clear()
            self._clear_counts()
        self._show_fates()
        changed = self.refit()
        if recent.count > first:
            self._digests += 1
            self._booked, at = recent.count, recent.lines(first)
            head, width = recent.head[at], recent.width[at]
            self.book.take(recent.owner[at].tolist(), recent.kind[at], width, head, recent.margin[at])
            if self.calibrator.coefficients.uses_head:
                self.watch.signals(head, width)
        for request_id in self._gone:
            self.book.forget(request_id)
            self._met.discard(request_id)
            self._pending.pop(request_id, None)
        self._gone.clear()
        return changed

    def _count_accepted(self) -> None:
        """Share of the drafts accepted that were verified lately, and how often answers end."""
        for _, verified, timing in self._steps:
            self._ends[0] += timing.ends
            self._ends[1] += timing.tokens
            for v in verified:
                self._totals[0] += v.accepted
                self._totals[1] += v.verified
        if self._totals[1]:
            self._share = self._totals[0] / self._totals[1]
        if self._totals[1] > LATELY:
            self._totals = [0.5 * v for v in self._totals]
        if self._ends[0]:
            self.book.ending(min(self._ends[0] / (self._ends[1] + SHORTEST), MOST_ENDS))
        if self._ends[1] > ANSWERS:
            self._ends = [0.5 * v for v in self._ends]

    def _note(self, blocks: DraftBlocks, whole: bool) -> None:
        """New blocks; where there are many, some passes stand for all."""
        ids = blocks.request_ids
        self._passes += 1
        if len(ids) >= CROWD and not whole and self._passes % min(len(ids) // CROWD + 1, THINNED):
            self._pending.clear()  # what becomes of this pass is not the fate of the one before
            return
        first = self.recent.add(blocks)
        numbers = range(first, first + len(ids))
        self._pending.update(zip(ids, zip(numbers, blocks.survival.tolist(), strict=True), strict=True))

    def _take_fates(self, verified: Sequence[Verified]) -> None:
        pending, truth, oldest = self._pending, self._truth, self.recent.oldest
        for request_id, drafts, accepted, ended in verified:
            waits = pending.pop(request_id, None)
            if waits is None or not drafts or ended or waits[0] < oldest:
                continue
            known = min(accepted + 1, drafts, self.gamma)
            hits = min(accepted, known)
            self._fates.append((waits[0], known, hits))
            self._known[known] += 1
            self._hits[hits] += 1
            self._firsts.append(hits > 0)
            got, predicted = truth.get(request_id, (0.0, 0.0))
            truth[request_id] = (
                got + accepted,
                predicted + round(sum(waits[1][:drafts]), 2),
            )  # not a device's last bits

    def _show_fates(self) -> None:
        """The calibrator takes fates when they are worth its time, or would be lost."""
        fates, recent = self._fates, self.recent
        if fates and (
            len(fates) >= FATES
            or sum(known for _, known, _ in fates) >= self.calibrator.missing
            or fates[0][0] < recent.count - recent.size // 2
        ):
            self.calibrator.collect(recent.outcomes(fates[:: 1 + len(fates) // MOST_FATES]))
            fates.clear()

    def refit(self) -> bool:
        """A part of a refit, if one is due: a whole one takes longer than a step should wait."""
        if not (self.calibrator.due and self.calibrator.work()):
            return False
        self.book.reprice(self.calibrator.coefficients)
        return True

    def _outcomes(self) -> Samples | None:
        """Fates that the calibrator has not been shown."""
        fates, self._fates = self._fates, []
        return self.recent.outcomes(fates) if fates else None

    def forget(self, request_id: int) -> None:
        """A request has ended; the book forgets it when it has its last blocks."""
        self._gone.append(request_id)


def _at_least(counts: Sequence[int]) -> list[float]:
    """[K] how many were above 0, 1, ..."""
    total, out = 0.0, []
    for n in reversed(counts[1:]):
        total += n
        out.append(total)
    return out[::-1]
