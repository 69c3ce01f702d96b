"""Measures what steps cost by running real ones: whole steps of the runner, head and commit included.

Requests stand at a given context with random tokens, so experts are hit as in
service; several row counts, several contexts, drafting passes by width.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from firesteel.core import Budget, Decode, StepPlan
from firesteel.engine.runner import Runner
from firesteel.speculation.cost import CostTable, from_samples

REPEATS = 3
TURNS, SMALL_STEP = 6, 64  # on a CPU, and up to how many rows; larger steps are long enough for fewer
WARM = 16  # rows up to which what a step finds in the caches decides what it takes
HEAD_START = 3_000_000  # device cycles, above 1.5 ms: what the host needs to queue a recorded step, and more
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


def fingerprint(runner: Runner, gamma: int) -> str:
    """What a cost table depends on: geometry, numerics, backend, threads, processor, K."""
    config = runner.target.config
    geometry = hashlib.blake2b(
        json.dumps(config.summary(), sort_keys=True).encode(), digest_size=6
    ).hexdigest()
    ops = runner.target.ops
    return (
        f"v4 {geometry}, {ops.numerics.name}, ops {ops.name}, {_processor(runner.device)}, "
        f"{torch.get_num_threads()} threads, K={gamma}"
    )


def _processor(device: torch.device) -> str:
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown cpu"
    return next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), "unknown cpu")


@dataclass(frozen=True)
class Case:
    """A step that is priced: ``count`` rows that are verified, or ``count`` requests that draft."""

    kind: str  # "verify" or "draft"
    context: int
    count: int
    width: int = 0  # of drafting; 0 of kind "draft": the same step without
    verified: int = 0  # width of what a drafting step verifies

    @property
    def short(self) -> bool:
        """Whether what it finds in the caches of a CPU decides what it takes."""
        return self.count <= (WARM if self.kind == "verify" else WARM // 4)


class Profiler:
    """Occupies free slots of an idle engine and times steps on them."""

    def __init__(self, runner: Runner, gamma: int, max_rows: int, max_len: int):
        self.runner, self.gamma, self.max_len = runner, gamma, max_len
        self.max_rows = max_rows
        self._gen = torch.Generator().manual_seed(0)
        self.slots: list[int] = []
        self._usual: list[float] = []  # what a step of this machine usually takes over the fastest alike

    def run(self, progress: Callable[[str], None] = lambda _: None) -> CostTable:
        """All measurements; the engine is idle again afterwards.

        One thread on a CPU counts its own time: what other programs take from it has no place in a table.
        A clock that somebody has chosen for this engine stays.
        """
        clock = self.runner.timer
        if clock is time.perf_counter and self.runner.device.type == "cpu" and torch.get_num_threads() == 1:
            self.runner.timer = time.thread_time
        try:
            return self._measure(progress)
        finally:
            self.runner.timer = clock

    def pass_over(
        self, order: random.Random, between: Callable[[], object] = lambda: None
    ) -> Generator[tuple[Case, float], None, None]:
        """(case, milliseconds) of every step that a table needs, once each, in any ``order``.

        For who has other things to run meanwhile; ``table_of`` makes the table. A small step runs twice on a
        CPU, and the second counts, as in ``run``; ``between`` is called before it, outside of its time, and does
        what a server does there: planning takes room in the caches. The slots are free again when the pass has ended.
        """
        cpu, done = self.runner.device.type == "cpu", 0
        for context in reversed(self._contexts()):
            self._occupy(context)
            try:
                plans = {Case("verify", context, r): p for r, p in self._verify_plans(context).items()}
                if self.runner.drafter is not None:
                    drafts = self._draft_plans(context, done)
                    done = max((n for n, _, _ in drafts), default=done)
                    plans |= {Case("draft", context, *key): p for key, p in drafts.items()}
                cases = list(plans)
                order.shuffle(cases)
                for case in cases:
                    if cpu and case.short:
                        self._once(plans[case], context)
                    between()
                    yield case, self._once(plans[case], context)
            finally:
                self._leave()

    def table_of(self, price: Mapping[Case, float]) -> CostTable:
        """The table of what the cases of ``pass_over`` take, in milliseconds."""
        steps = [(c.count, c.context, ms) for c, ms in price.items() if c.kind == "verify"]
        drafts = [
            (c.count, c.width, max(ms - price[replace(c, width=0)], 1e-3))
            for c, ms in price.items()
            if c.kind == "draft" and c.width
        ]
        return self._table(steps, drafts)

    def _measure(self, progress: Callable[[str], None]) -> CostTable:
        steps: list[tuple[int, int, float]] = []
        drafts: list[tuple[int, int, float]] = []
        for context in reversed(
            self._contexts()
        ):  # drafting is priced at the longest that so many requests fit in
            self._occupy(context)
            try:
                steps += [(rows, context, ms) for rows, ms in self._steps(context, progress)]
                if self.runner.drafter is not None:
                    drafts += self._drafts(context, max((n for n, _, _ in drafts), default=0), progress)
            finally:
                self._leave()
        usual = statistics.median(self._usual) if self._usual else 1.0
        steps = [(rows, context, usual * ms) for rows, context, ms in steps]
        drafts = [(n, width, usual * ms) for n, width, ms in drafts]
        return self._table(steps, drafts)

    def _table(
        self, steps: Sequence[tuple[int, int, float]], drafts: Sequence[tuple[int, int, float]]
    ) -> CostTable:
        staircase = (
            self.runner.graphs is not None
        )  # a step between two recorded sizes is padded to the larger
        return from_samples(fingerprint(self.runner, self.gamma), steps, drafts, staircase)

    def _contexts(self) -> list[int]:
        return sorted({min(c, self.max_len - self.gamma - 2) for c in (64, 1024)})

    def _grid(self) -> list[int]:
        most, graphs = min(self.max_rows, len(self.slots) * (1 + self.gamma)), self.runner.graphs
        return [r for r in (ROWS if graphs is None else graphs.plan.rows) if r < most] + [most]

    def _occupy(self, context: int) -> None:
        memory = self.runner.memory
        while (slot := memory.take_slot(context + self.gamma + 2)) is not None:
            self.slots.append(slot)
        memory.push()
        at = self.runner.slots.ints(self.slots)
        for ring in memory.all_rings():
            noise = torch.randn(len(self.slots), *ring.shape[1:], generator=self._gen)
            ring[at] = noise.to(ring.device, ring.dtype)

    def _leave(self) -> None:
        for slot in self.slots:
            self.runner.memory.release(slot)
            self.runner.slots.state.alive[slot] = 0
        self.slots = []

    def _reset(self, context: int) -> None:
        state = self.runner.slots.state
        vocab = self.runner.target.config.vocab_size
        at, device = self.runner.slots.ints(self.slots), state.cursor.device
        state.cursor[at], state.alive[at] = context, 1
        state.max_len[at], state.draft_len[at], state.draft_cap[at] = self.max_len, self.gamma, self.gamma
        state.temperature[at], state.survival[at] = 1.0, 1.0
        shape = (len(self.slots), state.drafts.shape[1])
        state.anchor[at] = torch.randint(0, vocab, shape[:1], generator=self._gen).to(device)
        state.drafts[at] = torch.randint(0, vocab, shape, generator=self._gen).to(device)
        state.stop_ids[at] = -1

    def _once(self, plan: StepPlan, context: int) -> float:
        """Milliseconds of one step, launched as in an engine that is one step ahead."""
        self._reset(context)
        if self.runner.graphs is not None and self.runner.device.type == "cuda":  # HIP, too
            torch.cuda._sleep(HEAD_START)  # the device is busy until all of the step is queued
        return self.runner.launch(plan).read().ms

    def _steps(self, context: int, progress: Callable[[str], None]) -> list[tuple[int, float]]:
        """(rows, milliseconds) of verify steps; the first run of each warms up.

        On a CPU the sizes run in turns and of each the fastest counts, as for drafting: what other programs
        add for a while would make one size dear, or steps dear and drafting cheap. What they usually add
        is put on all prices alike. Small ones run twice in a row, and the second counts: caches then hold
        what steps of this kind leave in them.
        """
        plans = self._verify_plans(context)
        times: dict[int, list[float]] = {rows: [] for rows in plans}
        if self.runner.device.type != "cpu":
            for rows, plan in plans.items():
                progress(f"profile: {rows} rows at context {context}")
                times[rows] = [self._once(plan, context) for _ in range(REPEATS + 1)][1:]
            return [(rows, statistics.median(ms)) for rows, ms in times.items()]
        for turn in range(TURNS + 1):
            progress(f"profile: turn {turn + 1} of {TURNS + 1} at context {context}")
            for rows, plan in plans.items():
                if rows <= SMALL_STEP or turn <= REPEATS:
                    if rows <= WARM:
                        self._once(plan, context)
                    times[rows].append(self._once(plan, context))
        self._usual.append(
            statistics.median(statistics.median(ms[1:]) / min(ms[1:]) for ms in times.values())
        )
        return [(rows, min(ms[1:])) for rows, ms in times.items()]

    def _plan(self, requests: int, drafts: int, width: int, drafting: int, context: int) -> StepPlan:
        decodes = tuple(Decode(-1 - i, slot) for i, slot in enumerate(self.slots[:requests]))
        return StepPlan(
            step=0,
            chunks=(),
            decodes=decodes,
            budget=Budget(drafts),
            max_position=context + self.gamma,
            drafting=decodes[:drafting],
            draft_width=width,
            draft_depth=self.gamma if drafts else 0,
        )

    def _verify(self, rows: int, context: int) -> StepPlan:
        """A verify step: half-wide groups, as a binding budget makes them."""
        requests = min(len(self.slots), max(1, round(rows / (1 + self.gamma / 2))), rows)
        requests = max(requests, -(-rows // (1 + self.gamma)))
        return self._plan(requests, rows - requests, 0, 0, context)

    def _verify_plans(self, context: int) -> dict[int, StepPlan]:
        """By rows."""
        return {rows: self._verify(rows, context) for rows in self._grid()}

    def _draft_plans(self, context: int, done: int) -> dict[tuple[int, int, int], StepPlan]:
        """By requests (more than ``done``), width of drafting (0: the same step without) and of what is verified."""
        graphs, most = self.runner.graphs, len(self.slots)
        counts = [n for n in (ROWS if graphs is None else graphs.plan.requests) if n < most] + [most]
        widths, cpu = sorted({1, (self.gamma + 1) // 2, self.gamma}), self.runner.device.type == "cpu"
        plans = {}
        for n in (n for n in counts if n > done):
            for w in widths:
                v = w if cpu and n <= WARM // 4 and n * (1 + w) <= self.max_rows else 0
                plans[n, w, v] = self._plan(n, n * v, w, n, context)
                plans[n, 0, v] = self._plan(n, n * v, 0, 0, context)
        return plans

    def _drafts(
        self, context: int, done: int, progress: Callable[[str], None]
    ) -> list[tuple[int, int, float]]:
        """Price of a drafting pass for more than ``done`` requests: a step with it less the same step without.

        In turns, and of each the fastest; the first run of each warms up. On a CPU a small step verifies as many
        drafts as are made: what drafting and verifying push out of each other's caches belongs to the price.
        """
        plans, cpu = self._draft_plans(context, done), self.runner.device.type == "cpu"
        best = dict.fromkeys(plans, math.inf)
        for turn in range(TURNS):  # the difference is small against what other programs add to a step
            progress(f"profile: drafting, turn {turn + 1} of {TURNS} at context {context}")
            for key, plan in plans.items():
                if key[0] * max(key[1:]) <= SMALL_STEP or turn <= REPEATS:
                    if cpu and key[0] <= WARM // 4:
                        self._once(plan, context)
                    best[key] = min(best[key], self._once(plan, context)) if turn else math.inf
        return [(n, w, max(ms - best[n, 0, v], 1e-3)) for (n, w, v), ms in best.items() if w]
