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
AGE = 8  # such steps for which an answer stands
TAKEN, WORTH = "drafts would take the place of prompts", "drafting pays beside prompts"


class Answer(NamedTuple):
    """How to draft in such steps."""

    width: int  # of every request; 0: nobody drafts
    least: float  # expected gain of a draft that is worth a row
    requests: int  # that it was found for


def full(load: Load) -> bool:
    """Whether prompts fill this step, and more of them wait."""
    return load.room <= 0 < load.limit and load.others > 0


class Beside:
    """The policy's part for such steps."""

    def __init__(self, cost: CostModel, book: Book, widths: Sequence[int]):
        self.cost, self.book, self.widths = cost, book, widths
        self._answer: Answer | None = None
        self._age = 0

    def width(
        self, candidates: Sequence[Candidate], able: Sequence[Candidate], value: float, load: Load
    ) -> int:
        """Drafts that each of the ``able`` ones is to make; 0: none."""
        answer, self._age = self._answer, self._age + 1
        if answer is None or self._age >= AGE or abs(len(able) - answer.requests) > answer.requests // AGE:
            cases = self.book.scenarios(able) * self.book.weights(able)[:, None]
            price: StepCost = lambda rows: self.cost.step_ms(rows, load.context)  # noqa: E731
            answer = beside_prompts(
                cases, value, len(candidates), load, price, self.cost.draft_ms, self.widths
            )
            self._answer, self._age = answer, 0
        return answer.width

    def budget(self, gains: Floats, value: float, load: Load) -> Budget | None:
        """Of a step that prompts fill: drafts that are worth a row; None of another one. gains: [n], best first."""
        if self._answer is None or not load.rows >= load.limit > 0:
            return None
        drafts = min(int(np.count_nonzero(gains >= self._answer.least)), load.room)
        ms = self.cost.row_ms(load.limit, load.context)
        return Budget(drafts, value + float(gains[:drafts].sum()), ms, WORTH if drafts else TAKEN)


def beside_prompts(
    cases: Floats,
    value: float,
    anchors: int,
    load: Load,
    step_ms: StepCost,
    draft_ms: Callable[[int, int], float],
    widths: Sequence[int],
) -> Answer:
    """The width at which drafts bring most beyond what their time would bring later.

    cases: [S, R, K] expected gains of the drafts that the next blocks of R requests may have; anchors: requests that
    sample, R of which may draft; value: what these anchors bring; ``load.others`` requests wait for their prompts.
    """
    requests, total = cases.shape[1], anchors + load.others
    more, later = total / anchors, 0.0
    kept = []
    for k in (0, *widths):
        gains = average_gains(cases[:, :, :k].reshape(len(cases), -1)) if k else np.zeros(0)
        kept.append(gains)
        tokens = more * np.concatenate(([value], gains)).cumsum()
        rows = np.rint(more * (anchors + np.arange(len(tokens)))).astype(np.int64)
        fits = max(int(np.searchsorted(rows, load.limit, side="right")), 1)
        ms = step_ms(rows[:fits]) + draft_ms(total, k)
        later = max(later, float((tokens[:fits] / np.maximum(ms, 1e-6)).max()))
    least = later * float(step_ms(np.array([load.limit]))[0]) / load.limit
    width, best = 0, 0.0
    for k, gains in zip(widths, kept[1:], strict=True):
        surplus = float(np.maximum(gains - least, 0.0).sum()) - later * draft_ms(requests, k)
        if surplus > best:
            width, best = k, surplus
    return Answer(width, least, requests)
