"""``firesteel simulate --check``: what a simulation predicts, against the real engine on this machine.

A machine that others use, too, changes its speed for seconds at a time. A
profile taken before a run is then of another machine than the run. So all of
it goes on in turns of a slice: the measuring of prices, every arm at every
concurrency on an engine of its own, and the engine without a model, whose host
time goes into the prediction. All see the same machine in the mean, and means
are compared: seconds of whole runs with the sum of mean prices.

On a GPU nobody else uses, there is one engine, and they run one behind the other.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from firesteel.bench.geometry import load
from firesteel.bench.hollow import hollow_engine
from firesteel.bench.loops import Stopwatch, in_turns
from firesteel.bench.simulate import Outcome, Request, Setup, pass_through, run_arm
from firesteel.core import StepPlan
from firesteel.engine.build import make_runner
from firesteel.engine.heap import settle
from firesteel.engine.loop import Engine
from firesteel.engine.profile import Case, Profiler
from firesteel.engine.runner import Handle
from firesteel.speculation.cost import CostModel, CostTable
from firesteel.speculation.policy import Adaptive, FixedWidth

SLICE = (
    0.2  # seconds of a turn: long against what its first step finds colder, short against changes of speed
)
PROFILE, HOST = 4.0, 0.2  # shares of the time of one point
SWEEPS = 30  # of ``level``; it converges in fewer
Key = TypeVar("Key", bound=Hashable)


def level(samples: Sequence[tuple[int, Key, float]]) -> dict[Key, float]:
    """The price of each key from (slice, key, milliseconds), where slices differ in speed.

    A time is taken to be a price times the slowness of its slice; both by alternating ratios of sums. Prices
    are at the mean speed: what all samples take together is the sum of their prices.
    """
    slowness: dict[int, float] = defaultdict(lambda: 1.0)
    price: dict[Key, float] = {}
    for _ in range(SWEEPS):
        took: dict[Key, float] = defaultdict(float)
        work: dict[Key, float] = defaultdict(float)
        for at, key, ms in samples:
            took[key] += ms
            work[key] += slowness[at]
        price = {key: ms / work[key] for key, ms in took.items()}
        spent: dict[int, float] = defaultdict(float)
        priced: dict[int, float] = defaultdict(float)
        for at, key, ms in samples:
            spent[at] += ms
            priced[at] += price[key]
        usual = sum(spent.values()) / sum(priced.values())
        slowness = {at: ms / priced[at] / usual for at, ms in spent.items()}
    return {key: ms * usual for key, ms in price.items()}


@dataclass
class Part:
    """One of those that take turns: it repeats what it does until all have had their time."""

    again: Callable[[Stopwatch], Iterator[None]]  # a whole run; pauses wherever another one may go on
    seconds: float
    watch: Stopwatch = field(default_factory=Stopwatch)
    least: int = 1  # runs
    others: Sequence[Part] = ()  # for whose ends it waits
    runs: int = 0
    whole: float = 0.0  # seconds of these
    _run: Iterator[None] | None = None

    @property
    def progress(self) -> float:
        """Share of its time so far, in which it did something."""
        return self.watch.worked / self.seconds

    @property
    def enough(self) -> bool:
        """Whether whole runs have filled its time, and are enough of them."""
        return self.runs >= self.least and self.whole >= self.seconds

    @property
    def done(self) -> bool:
        """Only when all have had enough: a machine that is slow for one alone would tell them apart."""
        return self.enough and all(p.enough for p in self.others)

    def turn(self) -> None:
        """On to the next pause."""
        if self._run is None:
            self._run = self.again(self.watch)
        if next(self._run, self) is self:
            self._run, self.runs, self.whole = None, self.runs + 1, self.watch.worked


@dataclass
class Point:
    """Whole runs of one arm at one concurrency."""

    outcomes: list[Outcome] = field(default_factory=list)
    warm: bool = False  # whether it has run at all
    host: list[tuple[float, int]] = field(default_factory=list)  # of a run without a model: seconds, steps

    @property
    def tokens_per_second(self) -> float:
        """Over all runs."""
        return sum(o.tokens for o in self.outcomes) / sum(o.seconds for o in self.outcomes)

    @property
    def host_ms(self) -> float:
        """Of a step."""
        return 1e3 * sum(s for s, _ in self.host) / sum(n for _, n in self.host)


class Check:
    """Everything that takes turns in one check of one model."""

    def __init__(
        self,
        model: str | None,
        setup: Setup,
        arms: Sequence[str],
        levels: Sequence[int],
        work: Callable[[int], Sequence[Request]],
        seconds: float,
        say: Callable[[str], None],
    ):
        """``seconds``: of each point, at least; ``say`` hears of progress. Raises ParameterError."""
        for arm in arms:
            setup.policy(arm)  # raises on what is none, before anything is loaded
        self.work, self.seconds, self.say = work, seconds, say
        values = setup.values
        values["speculative"] |= {"enable_adaptive_verification": True}  # else a GPU records one width only
        self.llm = load(model, progress=say, **values)
        self.on_cpu = self.llm.engine.runner.device.type == "cpu"
        self.rows = setup.rows
        policy = self.llm.engine.policy
        assert isinstance(policy, Adaptive), "asked for"
        self.setup = replace(setup, table=policy.cost.table)  # what adaptive starts from, as in service
        self.profiler, self.order = self._profiler(setup.gamma), random.Random(0)
        self.samples: list[tuple[int, Case, float]] = []
        self.points = {(arm, c): Point() for c in levels for arm in arms}
        self._planning = self._plan_on(min(levels))

    def run(self) -> dict[str, Any]:
        """Measure, predict, compare; plain values."""
        profile = Part(self._prices, PROFILE * self.seconds)
        parts = [profile]
        for (arm, c), point in self.points.items():
            real = Part(partial(self._real, self._engine(), arm, c, point), self.seconds)
            real.least = 1 if self.on_cpu else 2  # the first is a warm-up
            parts.append(real)
            engine = hollow_engine(self.setup.settings())
            parts.append(Part(partial(self._host, engine, arm, c, point), HOST * self.seconds))
        if self.on_cpu:
            for part in parts:
                part.others = parts
        settle()
        self.say(f"{len(parts)} in turns, about {sum(p.seconds for p in parts):.0f} s")
        in_turns([(p, p.watch) for p in parts], SLICE if self.on_cpu else float("inf"))
        table = self.profiler.table_of(level(self.samples))
        return {
            "seconds_per_point": self.seconds,
            "passes_of_the_profile": profile.runs,
            "table_at_start": self.setup.table.to_json(),
            "table": table.to_json(),
            "points": [self._compare(arm, c, point, table) for (arm, c), point in self.points.items()],
        }

    def _engine(self) -> Engine:
        """Over the weights of all; on a CPU with pages and slots of its own."""
        base = self.llm.engine
        if not self.on_cpu:
            return base
        old = base.runner
        runner = make_runner(
            self.llm.frontend.config, base.config, old.target, old.drafter, base.max_model_len
        )
        return replace(base, memory=runner.memory, runner=runner, records=deque(maxlen=base.records.maxlen))

    def _profiler(self, gamma: int) -> Profiler:
        engine = self._engine()
        return Profiler(engine.runner, gamma, self.rows, engine.max_model_len)

    def _prices(self, watch: Stopwatch) -> Iterator[None]:
        """A pass of the profile; before each step another one is planned, as in service."""
        with closing(self.profiler.pass_over(self.order, self._planning.__next__)) as cases:
            for case, ms in cases:
                self.samples.append((watch.starts, case, ms))
                yield

    def _plan_on(self, c: int) -> Iterator[None]:
        """Endless steps of an engine without a model."""
        engine = hollow_engine(self.setup.settings())
        while True:
            yield from pass_through(engine, FixedWidth(0), "none", self.work(c), c, Stopwatch())

    def _real(self, engine: Engine, arm: str, c: int, point: Point, watch: Stopwatch) -> Iterator[None]:
        """All requests of one point through the engine."""
        out = yield from pass_through(engine, self.setup.policy(arm), arm, self.work(c), c, watch)
        if self.on_cpu or point.warm:
            point.outcomes.append(out)
        point.warm = True  # on a GPU the first run may have compiled kernels

    def _host(self, engine: Engine, arm: str, c: int, point: Point, watch: Stopwatch) -> Iterator[None]:
        """The same without a model; what is not spent in the steps themselves is the host's."""
        launch, inside, begun = type(engine.runner).launch, Stopwatch(), watch.worked

        def timed(plan: StepPlan) -> Handle:
            inside.go()
            handle = launch(engine.runner, plan)
            inside.stop()
            return handle

        engine.runner.virtual = CostModel(
            self.setup.table
        )  # else adaptive would think that steps cost nothing
        engine.runner.launch = timed  # type: ignore[method-assign]
        out = yield from pass_through(engine, self.setup.policy(arm), arm, self.work(c), c, watch)
        point.host.append((watch.worked - begun - inside(), out.steps))

    def _compare(self, arm: str, c: int, point: Point, table: CostTable) -> dict[str, Any]:
        host_ms = point.host_ms if self.on_cpu else 0.0  # a GPU works meanwhile
        engine = hollow_engine(self.setup.settings())
        guess = run_arm(engine, self.setup.policy(arm), arm, self.work(c), c, table, host_ms)
        runs = point.outcomes
        return {
            "arm": arm,
            "concurrency": c,
            "predicted": round(guess.tokens_per_second, 1),
            "measured": round(point.tokens_per_second, 1),
            "ratio": round(guess.tokens_per_second / point.tokens_per_second, 4),
            "per_user_predicted": round(guess.per_user, 2),
            "per_user_measured": round(sum(o.per_user for o in runs) / len(runs), 2),
            "steps_predicted": guess.steps,
            "steps_measured": round(sum(o.steps for o in runs) / len(runs), 1),
            "host_ms_per_step": round(host_ms, 4),
            "runs": len(runs),
        }
