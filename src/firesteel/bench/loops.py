"""Closed loops: the client of a sweep, alone or several in turns on one machine."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from firesteel.config import SamplingParams
from firesteel.core import FinishReason
from firesteel.engine.frontend import Frontend


@dataclass
class Job:
    """One request of a run and what the client saw of it (seconds since the run began)."""

    ids: list[int]
    params: SamplingParams
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    heard: int = 0  # tokens so far
    output: tuple[int, ...] = ()


@dataclass(frozen=True)
class Window:
    """What a closed loop did while all of its requests decoded and none had ended: no prompt, no run-down."""

    tokens: int = 0
    seconds: float = 0.0
    longest_turn: float = 0.0  # seconds of the longest turn of the loop in it: a stall shows here


class Stopwatch:
    """Seconds of a clock, less those for which it was stopped; stopped when made."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock, self._sum, self.starts = clock, 0.0, 0
        self._waited = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        """Seconds so far."""
        return self._sum + (self._clock() - self._since if self._since is not None else 0.0)

    def go(self) -> None:
        """Count from here on."""
        assert self._since is None, "it runs"
        self._since, self.starts = self._clock(), self.starts + 1

    def stop(self) -> None:
        """Count no further."""
        self._sum, self._since = self(), None

    def wait(self, until: float) -> None:
        """Let time pass without anybody waiting for it."""
        more = max(until - self(), 0.0)
        self._sum, self._waited = self._sum + more, self._waited + more

    @property
    def worked(self) -> float:
        """Seconds so far without those of ``wait``."""
        return self() - self._waited


class Loop:
    """``concurrency`` requests at a time, a new one as soon as one ends; ``turn`` by ``turn``."""

    def __init__(
        self,
        frontend: Frontend,
        jobs: Sequence[Job],
        concurrency: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._frontend, self._clock, self._concurrency = frontend, clock, concurrency
        self._queue: deque[Job] = deque(jobs)
        self._open: dict[int, Job] = {}
        self._full = min(concurrency, len(jobs))  # requests that have yet to begin before all decode
        self._from = (0, 0.0)  # tokens and time when the last of the first requests had begun
        self._longest = 0.0
        self._spoiled = False  # an answer ended before all had begun: a prompt takes its place
        self._begun = self._now = clock()
        self.seen = 0  # tokens
        self.window = Window()  # the first decode phase with all places taken

    @property
    def done(self) -> bool:
        """Whether every answer has ended."""
        return not (self._queue or self._open)

    @property
    def progress(self) -> float:
        """Tokens."""
        return self.seen

    @property
    def seconds(self) -> float:
        """Until the last answer ended."""
        return self._now - self._begun

    def turn(self) -> None:
        """Send what there is room for, and one step."""
        clock = self._clock
        while self._queue and len(self._open) < self._concurrency:
            job = self._queue.popleft()
            (answer,) = self._frontend.add(job.ids, job.params)
            self._open[answer.request_id] = job
            job.sent, job.first = clock() - self._begun, 0.0
        before = clock()
        updates = self._frontend.step()
        if self._from[1]:
            self._longest = max(self._longest, clock() - before)
        ended = False
        for answer in updates:
            self._now = now = clock()
            job = self._open[answer.request_id]
            self.seen += len(answer.ids) - job.heard
            job.heard = len(answer.ids)
            if answer.ids and not job.first:
                job.first = now - self._begun
                self._full -= 1
            if answer.finish is not None:
                if answer.finish not in (FinishReason.STOP, FinishReason.LENGTH):
                    raise RuntimeError(f"sweep: a request ended as {answer.finish.value}: {answer.error}")
                job.last, job.output = now - self._begun, tuple(answer.ids)
                del self._open[answer.request_id]
                ended = True
        self._spoiled |= ended and not self._from[1]
        if self._from[1] and ended and not self.window.seconds:  # with all that this step brought
            self.window = Window(self.seen - self._from[0], self._now - self._from[1], self._longest)
        if not (self._full or self._from[1] or self._spoiled):
            self._from = self.seen, self._now


class Turns(Protocol):
    """What can pause, so that another one goes on."""

    @property
    def done(self) -> bool:
        """Whether it wants no more turns."""

    @property
    def progress(self) -> float:
        """Who has least goes on next."""

    def turn(self) -> None:
        """On to the next pause."""


def in_turns(loops: Sequence[tuple[Turns, Stopwatch]], seconds: float) -> None:
    """Run all loops to their ends: the one with the least progress goes on for ``seconds``, and again.

    Each has a clock of its own, which stands still while others run. All get
    equally far at about the same moments (of a sweep: in tokens), so whatever
    slows the machine down for longer than a turn slows all of them down alike.
    """
    while rest := [(loop.progress, watch(), i) for i, (loop, watch) in enumerate(loops) if not loop.done]:
        loop, watch = loops[min(rest)[2]]
        watch.go()
        until = watch() + seconds
        while not loop.done:
            loop.turn()
            if watch() >= until:
                break
        watch.stop()
