"""What one request may write next: reasoning with a budget, then a grammar.

    REASONING --</think>--> ANSWER        both may hold rules, each is checked per row

A guide follows the committed tokens of its request. For a step it also walks
along the drafts, because every verify row needs the rule that holds behind
the draft before it; what the target did not accept is taken back at the next
step. Plain host values: no library, no device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from firesteel.config import EngineConfig, ParameterError

Words = NDArray[np.uint32]  # [ceil(V / 32)], bit i % 32 of word i // 32: token i may be sampled


class Matcher(Protocol):
    """A grammar's state; the only thing the engine knows of a grammar library."""

    def mask(self) -> Words:
        """The tokens that may come next; end tokens exactly where the text may end."""

    def take(self, token: int) -> bool:
        """Advance by a token that is no end token; False, and no change, if it may not come next."""

    def rollback(self, count: int) -> None:
        """Take back the newest ``count`` tokens."""

    @property
    def error(self) -> str:
        """Why it can no longer tell; empty while it can."""


def _holds(mask: Words | None, token: int) -> bool:
    """Whether a mask lets a token through; a grammar may know more spellings than its mask offers."""
    return mask is None or bool(int(mask[token // 32]) >> token % 32 & 1)


class Vocabulary:
    """Builds masks over ``size`` tokens."""

    def __init__(self, size: int):
        self.size, self.words = size, -(-size // 32)

    def only(self, ids: Iterable[int]) -> Words:
        """Just these."""
        words = np.zeros(self.words, dtype=np.uint32)
        for i in ids:
            words[i // 32] |= np.uint32(1 << i % 32)
        return words

    def all_but(self, ids: Iterable[int]) -> Words:
        """Everything else."""
        return ~self.only(ids)


@dataclass(frozen=True)
class Thinking:
    """The reasoning part of an answer.

    ``inside``: the answer begins in it. ``budget``: tokens it may have, None
    for any number; then ``close`` is the only token. ``banned`` cannot be
    sampled in it (what would end or derail an answer that a grammar awaits).
    """

    open: int  # id of <think>, -1 if there is none
    close: int  # id of </think>
    inside: bool
    budget: int | None = None
    banned: tuple[int, ...] = ()


class Guide:
    """The rules of one request and where it stands in them.

    ``start`` is the position of the answer's first token; ``ends`` are the ids
    that end the answer: behind one nothing counts. ``on_lost`` hears why it was
    given up.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        start: int,
        thinking: Thinking | None,
        matcher: Matcher | None,
        ends: Iterable[int],
        on_lost: Callable[[str], None] | None = None,
    ):
        self.thinking, self.matcher, self.ends = thinking, matcher, frozenset(ends)
        self.position = start  # of the first token it has not seen committed
        self.vocabulary, self._failure = vocabulary, ""
        self._lost, self._on_lost = "", on_lost
        self.cut = 0  # drafts that no rule allowed
        self._reasons = thinking is not None and thinking.inside
        self._spent = 0  # tokens of reasoning
        self._ahead: list[int] = []  # drafts it has walked along
        self._before: list[tuple[bool, int, bool]] = []  # state before each: reasons, spent, matcher moved
        self._close: Words | None = None
        self._quiet: Words | None = None
        if thinking is not None:
            self._close = vocabulary.only((thinking.close,))
            self._quiet = vocabulary.all_but(thinking.banned) if thinking.banned else None

    @property
    def error(self) -> str:
        """Why it cannot go on; empty if it can."""
        if self._lost:
            return self._lost  # a thread may still be inside the matcher
        return self._failure or (self.matcher.error if self.matcher is not None else "")

    @property
    def lost(self) -> bool:
        """Whether it was given up."""
        return bool(self._lost)

    def lose(self, why: str) -> None:
        """Give it up: its request fails, and it is never walked again."""
        self._lost = why
        if self._on_lost is not None:
            self._on_lost(why)

    def nothing(self) -> list[Words | None]:
        """The mask under which no token can be sampled, as ``rows`` would give it."""
        return [self.vocabulary.only(())]

    def rows(self, committed: Sequence[int], drafts: Sequence[int]) -> list[Words | None]:
        """Masks of the rows [newest token, draft, draft, ...]; None where everything is allowed.

        ``committed``: tokens since the last call. The list ends behind the
        last draft that is allowed: the row of that draft cannot sample the
        next one, so no later row can count.
        """
        self._settle(committed)
        masks = [self.mask()]
        for draft in drafts:
            if draft in self.ends or not _holds(masks[-1], draft) or not self._step(draft):
                break
            self._ahead.append(draft)
            masks.append(self.mask())
        self.cut += len(drafts) + 1 - len(masks)
        return masks

    def mask(self) -> Words | None:
        """What may come next; None: anything. Nothing may if it has lost its place: the request then fails."""
        if self._failure:
            return self.vocabulary.only(())
        if self._reasons:
            return self._close if self._exhausted() else self._quiet
        return self.matcher.mask() if self.matcher is not None else None

    # ---- inside ----------------------------------------------------------------
    def _exhausted(self) -> bool:
        budget = self.thinking.budget if self.thinking is not None else None
        return budget is not None and self._spent >= budget

    def _settle(self, committed: Sequence[int]) -> None:
        """Stand behind ``committed``: keep what was walked along rightly, take the rest back."""
        same = 0
        for walked, token in zip(self._ahead, committed, strict=False):
            if walked != token:
                break
            same += 1
        self._rollback(len(self._ahead) - same)
        for token in committed[same:]:
            if not self._step(token) and not self.error:
                self._failure = f"token {token} was sampled against its mask"  # others may not suffer
        self.position += len(committed)
        self._ahead.clear()
        self._before.clear()

    def _step(self, token: int) -> bool:
        """Advance by one token; False, and no change, if no rule allows it."""
        before = (self._reasons, self._spent, False)
        if self._reasons:
            assert self.thinking is not None, "only a thinking request reasons"
            if token == self.thinking.close:
                self._reasons = False
            elif self._exhausted() or token in self.thinking.banned:
                return False
            else:
                self._spent += 1
        elif self.matcher is not None:
            if not self.matcher.take(token):
                return False
            before = (False, self._spent, True)
        elif self.thinking is not None and token == self.thinking.open:
            self._reasons = True  # the budget goes on where it was
        self._before.append(before)
        return True

    def _rollback(self, count: int) -> None:
        moved = 0
        for _ in range(count):
            self._ahead.pop()
            self._reasons, self._spent, in_matcher = self._before.pop()
            moved += in_matcher
        if moved:
            assert self.matcher is not None, "it has moved"
            self.matcher.rollback(moved)


Factory = Callable[[Iterable[int]], Guide]  # takes the ids that end the answer


def check_guided(config: EngineConfig) -> None:
    """Raise ParameterError if this engine's acceptance rule leaves no room for masks."""
    spec = config.speculative
    if spec is None:
        return
    name = "structured_outputs, thinking_token_budget"
    if spec.rejection:
        raise ParameterError(f"{name}: not under acceptance='rejection'; start with acceptance='coupled'")
    if spec.simulated_acceptance is not None:
        raise ParameterError(
            f"{name}: not under simulated_acceptance, whose tokens mean nothing; leave it out"
        )
