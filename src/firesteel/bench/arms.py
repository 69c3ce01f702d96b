"""Arms of a sweep: one model in memory and one engine per arm over it, loaded one by one or in turns.

Weights and the measured cost table exist once, page arena and slots too, unless
arms run in turns: then each has its own. An engine object is host state only
(queue, plan, policy), so every arm gets a fresh one at every point; the arm
without speculation runs on a runner without a drafter and thus pays nothing for
taps or context rows. No two steps ever run at the same time.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from firesteel.bench.acceptance import Tally
from firesteel.bench.geometry import load
from firesteel.bench.loops import Job, Loop, Stopwatch, Window, in_turns
from firesteel.config import ParameterError
from firesteel.core import StepPlan, StepRecord
from firesteel.engine.build import Built, make_runner
from firesteel.engine.frontend import Frontend
from firesteel.engine.heap import settle
from firesteel.engine.loop import Engine
from firesteel.engine.prefix import PrefixCache
from firesteel.engine.rehearsal import record_graphs
from firesteel.engine.runner import Runner, StepResult
from firesteel.speculation.policy import Adaptive, FixedWidth, Policy

NONE, ADAPTIVE = "none", "adaptive"


@dataclass(frozen=True)
class Arm:
    """A way to speculate: ``width`` drafts per request and step at most, 0 for none."""

    name: str
    width: int
    adaptive: bool = False


def parse_arms(text: str, most: int | None = None) -> tuple[Arm, ...]:
    """``none,1,3,5,7,adaptive``; adaptive may draft up to the widest fixed arm, or ``most``."""
    words = [w.strip() for w in text.split(",") if w.strip()]
    widths = [int(w) for w in words if w.isdigit()]
    unknown = next((w for w in words if not w.isdigit() and w not in (NONE, ADAPTIVE)), None)
    if unknown is not None or 0 in widths or len(set(words)) < len(words) or not words:
        raise ParameterError(f"arms={text!r}: expected distinct ones of none, 1, 2, ... and adaptive")
    gamma = most if most is not None else max(widths, default=0)
    if gamma < max(widths, default=0) or (ADAPTIVE in words and gamma < 1):
        raise ParameterError(
            f"arms={text!r}: most drafts {gamma} is below an arm's width; raise the number of drafts"
        )
    made = {NONE: Arm(NONE, 0), ADAPTIVE: Arm(ADAPTIVE, gamma, True)}
    return tuple(made.get(w) or Arm(f"K={w}", int(w)) for w in words)


@dataclass(frozen=True)
class Run:
    """One closed loop of one arm, as client and server saw it."""

    arm: str
    concurrency: int
    requests: int
    tokens: int  # counted by the client
    server_tokens: int  # counted by the engine's steps
    seconds: float
    decode_tokens: int  # tokens behind each request's first
    decode_seconds: float  # from first to last token, summed over requests
    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    steps: int
    drafts: int  # budget, summed over steps
    decodes: int
    verified: int
    accepted: int
    busy_ms: float  # of all steps
    host_ms: float  # planning and committing them
    priced_ms: float  # of the steps that had a prediction
    predicted_ms: float  # what was predicted for those
    departures: int  # steps more than 1.3x from their prediction
    preemptions: int
    reasons: dict[str, int]
    draft_reasons: dict[str, int]  # why steps drafted as they did
    longest_host_ms: float  # of one step's planning and committing
    full_collections: int  # of Python's garbage
    digest: str  # of all answers' token ids, in request order
    window: Window  # the decode phase alone

    def rate(self, phase: str = "all") -> float:
        """Tokens per second of the whole loop, or of its ``decode`` phase."""
        if phase == "decode":
            return self.window.tokens / self.window.seconds if self.window.seconds else 0.0
        return self.tokens / max(self.seconds, 1e-9)


class Rig:
    """One model, an engine per arm; ``start`` begins a point, ``run`` loads one arm."""

    def __init__(
        self,
        model: str | None,
        arms: Sequence[Arm],
        speculative: dict[str, Any] | None = None,
        apart: bool = False,
        **settings: Any,
    ):
        """``model``: as for ``geometry.load``; ``speculative``: further fields of SpeculativeConfig;
        ``apart``: pages and slots for every arm, which ``in_turns`` needs; ``settings``: of EngineConfig.
        Raises ParameterError for ``apart`` on a GPU."""
        apart_on_gpu = "slice: arms in turns need a memory each; leave it out on a GPU"
        if apart and settings.get("device") == "cuda":  # before weights are loaded
            raise ParameterError(apart_on_gpu)
        self.arms = tuple(arms)
        gamma = max(a.width for a in arms)
        spec: dict[str, Any] = dict(speculative or {})
        if gamma:
            adaptive = any(a.adaptive for a in arms)
            spec |= {"num_speculative_tokens": gamma, "enable_adaptive_verification": adaptive}
        self.llm = load(model, speculative=spec if gamma else None, **settings)
        engine = self.llm.engine
        self.pristine = copy.deepcopy(engine.policy)
        self.homes: dict[str, tuple[Runner, PrefixCache | None]] = {}
        if apart and engine.runner.device.type != "cpu":
            raise ParameterError(apart_on_gpu)
        plain = engine.runner
        if not apart and gamma and any(a.width == 0 for a in arms):
            plain = without_drafter(engine)
        for arm in arms:
            runner = engine.runner if arm.width else plain
            self.homes[arm.name] = self._own(arm.width > 0) if apart else (runner, engine.cache)
        self.frontends: dict[str, Frontend] = {}
        self.start()

    @property
    def cost_table(self) -> dict[str, Any] | None:
        """The prices that every adaptive point starts from."""
        return self.pristine.cost.table.to_json() if isinstance(self.pristine, Adaptive) else None

    def start(self) -> None:
        """A new point: no cached prefix, nothing learned, all counters at zero."""
        self._clear()
        self.frontends = {arm.name: self._frontend(arm) for arm in self.arms}
        settle()  # as a server does: a full collection would fall to one arm of a round

    def _own(self, drafts: bool) -> tuple[Runner, PrefixCache | None]:
        """Pages, slots and prefix cache of an arm's own, over the weights of all."""
        base, cache = self.llm.engine, None
        old = base.runner
        drafter = old.drafter if drafts else None
        runner = make_runner(self.llm.frontend.config, base.config, old.target, drafter, base.max_model_len)
        if base.cache is not None:
            cache = PrefixCache(runner.memory.pool, runner.memory.page_size, "sweep")
        return runner, cache

    def _clear(self, keep_prefixes: bool = False) -> None:
        for frontend in self.frontends.values():
            frontend.engine.drain()
            if frontend.engine.cache is not None and not keep_prefixes:
                frontend.engine.cache.clear()

    def _frontend(self, arm: Arm) -> Frontend:
        f, base = self.llm.frontend, self.llm.engine
        spec = base.config.speculative
        policy: Policy | None = None
        if arm.adaptive:
            policy = copy.deepcopy(self.pristine)
        elif arm.width:
            policy = FixedWidth(arm.width)
        if spec is not None:
            spec = replace(
                spec,
                num_speculative_tokens=max(arm.width, 1),
                enable_adaptive_verification=arm.adaptive,
                cost_table=spec.cost_table if arm.adaptive else None,
                calibration=spec.calibration if arm.adaptive else None,
            )
        runner, cache = self.homes[arm.name]
        engine = replace(
            base,
            config=replace(base.config, speculative=spec if arm.width else None, trace=None),
            memory=runner.memory,
            runner=runner,
            cache=cache,
            policy=policy,
            records=deque(),
        )
        return Frontend(Built(engine, f.config, f.tokenizer, f.path, f.notes))

    def policy(self, arm: str) -> Policy:
        """The policy of an arm, with what it has learned at this point."""
        return self.frontends[arm].engine.scheduler.policy

    def run(
        self,
        arm: Arm,
        jobs: Sequence[Job],
        concurrency: int,
        hear: Tally | None = None,
        clock: Callable[[], float] = time.perf_counter,
        keep_prefixes: bool = False,
    ) -> Run:
        """One closed loop, on a cold prefix cache unless ``keep_prefixes``. ``hear``: a tally of acceptance
        (costs host time)."""
        self._clear(keep_prefixes)
        frontend, counts = self._begin(arm)
        engine = frontend.engine
        if hear is not None:
            _listen(engine, hear)
        loop = Loop(frontend, jobs, concurrency, clock)
        while not loop.done:
            loop.turn()
        engine.drain()
        if hear is not None:
            del engine.scheduler.commit  # type: ignore[method-assign]
        return self._end(arm, jobs, concurrency, loop, counts)

    def in_turns(
        self,
        work: Sequence[tuple[Arm, Sequence[Job]]],
        concurrency: int,
        slice_: float,
        clock: Callable[[], float] = time.perf_counter,
        keep_prefixes: bool = False,
    ) -> list[Run]:
        """Closed loops of several arms, ``slice_`` seconds at a time each: see ``loops.in_turns``."""
        self._clear(keep_prefixes)
        begun, loops = [self._begin(arm) for arm, _ in work], []
        for (_, jobs), (frontend, _) in zip(work, begun, strict=True):
            watch = Stopwatch(clock)
            loops.append((Loop(frontend, jobs, concurrency, watch), watch))
        in_turns(loops, slice_)
        out = []
        for (arm, jobs), (frontend, counts), (loop, _) in zip(work, begun, loops, strict=True):
            frontend.engine.drain()
            out.append(self._end(arm, jobs, concurrency, loop, counts))
        return out

    def _begin(self, arm: Arm) -> tuple[Frontend, tuple[int, int]]:
        """The engine of an arm, ready for a run, and what it has counted so far."""
        frontend = self.frontends[arm.name]
        engine = frontend.engine
        if engine.runner.graphs is None:  # a fixed arm must not pay for another arm's survival model
            engine.runner._calibration = None
        if isinstance(engine.scheduler.policy, Adaptive):
            engine.scheduler.policy.changed = True
        engine.records.clear()
        return frontend, (engine.scheduler.stats.preemptions, _full_collections())

    def _end(
        self, arm: Arm, jobs: Sequence[Job], concurrency: int, loop: Loop, counts: tuple[int, int]
    ) -> Run:
        engine = self.frontends[arm.name].engine
        return _summary(
            arm.name,
            jobs,
            concurrency,
            loop.seconds,
            loop.window,
            list(engine.records),
            engine.scheduler.stats.preemptions - counts[0],
            _full_collections() - counts[1],
        )


def without_drafter(engine: Engine) -> Runner:
    """A runner over the same weights, memory and slots that takes no taps and writes no context rows.

    Where the engine replays recorded graphs, the twin records its own.
    """
    twin = copy.copy(engine.runner)
    twin.drafter, twin.owed, twin._saved, twin.graphs = None, None, {}, None
    if engine.runner.graphs is not None:
        record_graphs(twin, replace(engine.config, speculative=None), engine.max_model_len)
    return twin


def _full_collections() -> int:
    """Full collections of Python's garbage since the process began."""
    return int(gc.get_stats()[-1]["collections"])


def _listen(engine: Engine, tally: Tally) -> None:
    """Have ``tally`` hear every verify step of ``engine``."""
    commit = engine.scheduler.commit

    def heard(plan: StepPlan, result: StepResult) -> None:
        for group in result.groups:
            if group.verified and group.tokens:
                tally.take(len(group.tokens), group.verified, group.accepted)
        commit(plan, result)

    engine.scheduler.commit = heard  # type: ignore[method-assign]


def _summary(
    arm: str,
    jobs: Sequence[Job],
    concurrency: int,
    seconds: float,
    window: Window,
    records: list[StepRecord],
    preemptions: int,
    collections: int,
) -> Run:
    long = [j for j in jobs if len(j.output) > 1]
    texts = hashlib.sha256("\n".join(" ".join(map(str, j.output)) for j in jobs).encode())
    priced = [r for r in records if r.predicted_ms > 0]
    return Run(
        arm=arm,
        concurrency=concurrency,
        requests=len(jobs),
        tokens=sum(len(j.output) for j in jobs),
        server_tokens=sum(r.emitted for r in records),
        seconds=seconds,
        decode_tokens=sum(len(j.output) - 1 for j in long),
        decode_seconds=sum(j.last - j.first for j in long),
        ttft_ms=tuple(1e3 * (j.first - j.sent) for j in jobs),
        tpot_ms=tuple(1e3 * (j.last - j.first) / (len(j.output) - 1) for j in long),
        steps=len(records),
        drafts=sum(r.budget.drafts for r in records),
        decodes=sum(r.decodes for r in records),
        verified=sum(r.verified for r in records),
        accepted=sum(r.accepted for r in records),
        busy_ms=sum(r.measured_ms for r in records),
        host_ms=sum(r.host_ms for r in records),
        priced_ms=sum(r.measured_ms for r in priced),
        predicted_ms=sum(r.predicted_ms for r in priced),
        departures=sum(not 1 / 1.3 <= r.measured_ms / r.predicted_ms <= 1.3 for r in priced),
        preemptions=preemptions,
        reasons=dict(Counter(r.budget.reason for r in records).most_common(6)),
        draft_reasons=dict(Counter(r.draft_reason for r in records).most_common(6)),
        longest_host_ms=max((r.host_ms for r in records), default=0.0),
        full_collections=collections,
        digest=texts.hexdigest()[:16],
        window=window,
    )
