"""Drafts beside prompts that fill the step: what they take, prompts do not get.

Such a step takes as long whatever its budget. A draft costs the place of a prompt row, and with the others the drafting
pass. It brings tokens that would be made later anyway, once the prompts are done, by all requests together: drafts have
to be cheaper than that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from firesteel.core import Budget
from firesteel.speculation.book import Book
from firesteel.speculation.budget import StepCost, average_gains
from firesteel.speculation.cost import CostModel
from firesteel.speculation.terms import Candidate, Load

Floats = NDArray[np.float64]
AGE = 8  # steps for which an answer stands
TAKEN, WORTH = "drafts would take the place of prompts", "drafting pays beside prompts"


class Answer(NamedTuple):
    """How to draft in such steps."""

    width: int  # of every request; 0: nobody drafts
    least: float  # expected gain of a draft that is worth a row
    requests: int  # that it was found for
    others: int  # that waited for their prompts


def full(load: Load) -> bool:
    """Whether prompts fill this step, and more of them wait (``others``)."""
    return load.room <= 0 < load.limit and load.others > 0


class Beside:
    """The policy's part for such steps."""

    def __init__(self, cost: CostModel, book: Book, widths: Sequence[int]):
        self.cost, self.book, self.widths = cost, book, widths
        self.answer: Answer | None = None
        self._age = 0

    def age(self) -> None:
        """A step more, of whatever kind."""
        self._age += 1
        if self._age >= AGE:
            self.answer = None

    def width(
        self,
        candidates: Sequence[Candidate],
        able: Sequence[Candidate],
        load: Load,
        trust: float,
        draft_ms: Callable[[int, int], float],
    ) -> int:
        """Drafts that each of the ``able`` ones is to make; 0: none. ``trust``: what gains are worth of what they say.

        draft_ms: price of a drafting pass now. Later all tokens count alike: as one of these requests usually does.
        """
        answer = self.answer
        if (
            answer is None
            or abs(len(able) - answer.requests) > answer.requests // 8
            or abs(load.others - answer.others) > answer.others // 2
        ):
            cases = self.book.scenarios(able) * trust
            usual = sum(c.weight for c in candidates) / len(candidates)
            price: StepCost = lambda rows: self.cost.step_ms(rows, load.context)  # noqa: E731
            later = later_rate(cases, len(candidates), load, price, self.cost.draft_ms, self.widths) * usual
            row = self.cost.row_ms(load.limit, load.context) / load.limit
            weighted = cases * self.book.weights(able)[:, None]
            self.answer = beside_prompts(weighted, later, row, load.others, draft_ms, self.widths)
            self._age = 0
        assert self.answer is not None, "just found"
        return self.answer.width

    def budget(self, gains: Sequence[float] | Floats, value: float, load: Load) -> Budget | None:
        """Of a step that prompts fill: drafts that are worth a row; None of another one. gains: [n], best first."""
        if self.answer is None or not load.rows >= load.limit > 0:
            return None
        ranked = np.asarray(gains)
        drafts = min(int(np.count_nonzero(ranked >= self.answer.least)), load.room)
        ms = self.cost.row_ms(load.limit, load.context)
        return Budget(drafts, value + float(ranked[:drafts].sum()), ms, WORTH if drafts else TAKEN)


def later_rate(
    cases: Floats,
    anchors: int,
    load: Load,
    step_ms: StepCost,
    draft_ms: Callable[[int, int], float],
    widths: Sequence[int],
) -> float:
    """Tokens per millisecond at best once no prompt is left and all requests decode like these.

    cases: [S, R, K] chances of the drafts that the next blocks of R requests may have; anchors: requests that sample,
    R of which may draft; ``load.others`` requests wait for their prompts.
    """
    total = anchors + load.others
    more, best = total / anchors, 0.0
    for k in (0, *widths):
        gains = average_gains(cases[:, :, :k].reshape(len(cases), -1)) if k else np.zeros(0)
        tokens = more * np.concatenate(([float(anchors)], gains)).cumsum()
        rows = np.rint(more * (anchors + np.arange(len(tokens)))).astype(np.int64)
        fits = max(int(np.searchsorted(rows, load.limit, side="right")), 1)
        ms = step_ms(rows[:fits]) + draft_ms(total, k)
        best = max(best, float((tokens[:fits] / np.maximum(ms, 1e-6)).max()))
    return best


def beside_prompts(
    cases: Floats,
    later: float,
    row_ms: float,
    others: int,
    draft_ms: Callable[[int, int], float],
    widths: Sequence[int],
) -> Answer:
    """The width at which drafts bring most beyond what their time would bring later.

    cases: [S, R, K] expected gains of the drafts that the next blocks of R requests may have; later: gain per
    millisecond once the prompts are done; row_ms: what the place of a prompt row costs.
    """
    requests, least = cases.shape[1], later * row_ms
    width, best = 0, 0.0
    for k in widths:
        gains = average_gains(cases[:, :, :k].reshape(len(cases), -1))
        surplus = float(np.maximum(gains - least, 0.0).sum()) - later * draft_ms(requests, k)
        if surplus > best:
            width, best = k, surplus
    return Answer(width, least, requests, others)
