"""A clock for a machine that others use too: it counts what the machine gets done, not seconds.

A core whose neighbours work may take twice as long for the same thing, for
seconds or minutes. A profile and what it predicts are then of two machines. So
a fixed step of the same model runs now and then, off the clock: what it takes,
against what it took at first, is how slow the machine is at that moment.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from firesteel.config import ParameterError
from firesteel.engine.build import make_runner
from firesteel.engine.llm import LLM
from firesteel.engine.profile import Profiler

EVERY = 0.3  # seconds between looks at the machine's speed: the step behind each finds colder caches
FIRST = 25  # runs that say what is usual
RUNS = 3  # of a look: the middle one counts, since a single one may be interrupted
ROWS, CONTEXT = 4, 64  # of the fixed step


class Steady:
    """Seconds at the speed that was usual when it was made; ``now`` may run the gauge, which takes no time on it."""

    def __init__(
        self,
        gauge: Callable[[], float],
        every: float = EVERY,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """``gauge``: does always the same and returns how long it took by ``clock``."""
        self._gauge, self._every, self._clock = gauge, every, clock
        gauge()  # warms up
        self._usual = statistics.median(gauge() for _ in range(FIRST))
        self._sum, self._wall, self.looks = 0.0, 0.0, 0
        self._slow = 1.0
        self._since = self._looked = clock()

    def now(self) -> float:
        """Seconds so far."""
        at = self._clock()
        self._sum += (at - self._since) / self._slow
        self._wall += at - self._since
        self._since = at
        if at - self._looked > self._every:
            took = statistics.median(self._gauge() for _ in range(RUNS))
            self._slow, self.looks = took / self._usual, self.looks + 1
            self._since = self._looked = self._clock()
        return self._sum

    @property
    def slowness(self) -> float:
        """Wall-clock seconds, the gauge's left out, over seconds of this clock; 1 while there are none."""
        return self._wall / self._sum if self._sum > 0.0 else 1.0

    def wait(self, until: float) -> None:
        """Raises ParameterError: a trace with arrivals needs real time."""
        raise ParameterError(f"trace: arrivals ({until:.3f} s) need real time; use --clock wall")


def gauge_of(llm: LLM, gamma: int) -> Callable[[], float]:
    """A step of a few rows of this model, on pages and slots of its own."""
    engine = llm.engine
    runner = make_runner(
        llm.frontend.config, engine.config, engine.runner.target, engine.runner.drafter, engine.max_model_len
    )
    context = min(CONTEXT, engine.max_model_len - gamma - 2)
    step = Profiler(runner, gamma, ROWS, engine.max_model_len).fixed_step(ROWS, context)

    def gauge() -> float:
        begun = time.perf_counter()
        step()
        return time.perf_counter() - begun

    return gauge
