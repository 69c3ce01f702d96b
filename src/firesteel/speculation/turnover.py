"""What requests cost besides decoding: where answers are short, most of their time is not spent on it.

A plan compares steps that decode. A request also runs its prompt, and its
place is empty for a step before the next one begins: in these steps its drafts
gain nothing, while all steps take longer. With C places, answers of L tokens,
P prompt rows a request and E tokens a decode step of one request,

    life of a request, in steps   l = 2 + (L - 1) / E
    requests that begin           q = C / l
    requests that decode          d = C - 2 q
    tokens per millisecond        q L / T,  T = price(d (1 + drafts verified) + q P) + drafting of d + q requests

once for plain steps (E = 1) and once for those of the plan. Of one request at
a time, the prompt has a step of its own, and only behind drafts, whose end
nobody foresees, a step is run in vain.
"""

from __future__ import annotations

import math

from firesteel.speculation.budget import DraftPlan
from firesteel.speculation.cost import CostModel

LONG = 16.0  # tokens of the mean answer from which on nothing of this decides
OVERHEAD = 2.0  # steps of a request that do not decode: its prompt's, and one until the next has its place
ALONE = 1.5  # requests that get tokens in a step, in the mean: below it is one at a time
MEMORY, FEWEST = 64.0, 4.0  # ended answers that are looked back on: at most, at least
# how many begin in a step varies: sevenths of a normal law
SPREAD = (-1.47, -0.79, -0.37, 0.0, 0.37, 0.79, 1.47)
SURE = 0.95  # of a promise that speaks of means: an answer's last step gives fewer tokens, and plain ends are foreseen
POPULATION = 1.0 / 16  # weight of the newest step


class Turnover:
    """Hears of steps and of ended answers."""

    def __init__(self) -> None:
        self._ended, self._tokens, self._prompts = 0.0, 0.0, 0.0
        self._since = 0.0  # tokens since an answer ended
        self._sampling = 0.0  # requests that get tokens in a step, fading mean
        self._each = 1.0  # tokens that a decode step of the newest plan gives a request

    def step(self, sampling: int) -> None:
        """So many requests decode or end their prompts."""
        self._sampling += (sampling - self._sampling) * (POPULATION if self._sampling else 1.0)

    def hear(self, tokens: int, prompt_rows: int) -> None:
        """What committed steps brought. Tokens of answers that go on count, too: the short ones end first."""
        if self._ended > MEMORY:  # once a step: many may end in one
            self._ended, self._tokens, self._prompts = (
                0.5 * self._ended,
                0.5 * self._tokens,
                0.5 * self._prompts,
            )
        self._tokens += tokens
        self._since += tokens
        self._prompts += prompt_rows

    def end(self) -> None:
        """An answer has ended."""
        self._ended, self._since = self._ended + 1.0, 0.0

    def promise(
        self, plan: DraftPlan, requests: int, paid: bool, cost: CostModel, context: float
    ) -> float | None:
        """How many times the rate of plain steps ``plan``, made for ``requests``, brings where answers are short.

        None where they are not, or where too few have ended to say. ``paid``: requests draft at present.
        """
        now, self._each = self._each if paid else 1.0, plan.gain
        if self._ended < FEWEST or self._tokens > LONG * self._ended or plan.gain <= 0.0:
            return None
        if self._since > LONG * max(self._sampling, 1.0):
            return None  # those of now are long, whatever the ones before were
        length, rows = self._tokens / self._ended, self._prompts / self._ended
        if length <= 1.0:
            return 0.0  # nothing decodes
        verified = plan.drafts / requests

        def step_ms(rows: float) -> float:
            return cost.row_ms(max(round(rows), 1), context)

        if self._sampling < ALONE:
            draft = cost.draft_ms(1, plan.width)
            plain = step_ms(rows) + (length - 1.0) * step_ms(1)
            vain = step_ms(1)
            return plain / (
                step_ms(rows) + draft + vain + (length - 1.0) / plan.gain * (step_ms(1 + verified) + draft)
            )
        steps = (length - 1.0) / now
        places = self._sampling * (OVERHEAD + steps) / (1.0 + steps)

        def rate(each: float, verified: float, share: float) -> float:
            begin = places / (OVERHEAD + (length - 1.0) / each)
            decoding = places - OVERHEAD * begin
            at, off = decoding * (1.0 + verified) + begin * rows, math.sqrt(begin) * rows
            ms = sum(step_ms(at + z * off) for z in SPREAD) / len(SPREAD)
            if share:
                ms += cost.draft_ms(max(round(share * (decoding + begin)), 1), plan.width)
            return begin * length / ms

        return SURE * rate(plan.gain, verified, plan.requests / requests) / rate(1.0, 0.0, 0.0)
