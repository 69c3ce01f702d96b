"""Measures what steps cost by running real ones: whole steps of the runner, head and commit included.

Requests stand at a given context with random tokens, so experts are hit as in
service; several row counts, several contexts, drafting passes by width.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from firesteel.core import Budget, Decode, StepPlan
from firesteel.engine.runner import Runner
from firesteel.speculation.cost import CostTable, from_samples

REPEATS = 3
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


class Profiler:
    """Occupies free slots of an idle engine and times steps on them."""

    def __init__(self, runner: Runner, gamma: int, max_rows: int, max_len: int):
        self.runner, self.gamma, self.max_len = runner, gamma, max_len
        self.max_rows = max_rows
        self._gen = torch.Generator().manual_seed(0)
        self.slots: list[int] = []

    def run(self, progress: Callable[[str], None] = lambda _: None) -> CostTable:
        """All measurements; the engine is idle again afterwards.

        One thread on a CPU counts its own time: what other programs take from it has no place in a table.
        """
        clock = self.runner.timer
        if self.runner.device.type == "cpu" and torch.get_num_threads() == 1:
            self.runner.timer = time.thread_time
        try:
            return self._measure(progress)
        finally:
            self.runner.timer = clock

    def _measure(self, progress: Callable[[str], None]) -> CostTable:
        contexts = sorted({min(c, self.max_len - self.gamma - 2) for c in (64, 1024)})
        steps: list[tuple[int, int, float]] = []
        drafts: list[tuple[int, int, float]] = []
        for context in reversed(contexts):  # drafting is priced at the longest that so many requests fit in
            self._occupy(context)
            try:
                for rows in self._grid():
                    progress(f"profile: {rows} rows at context {context}")
                    steps.append((rows, context, self._step(rows, context)))
                if self.runner.drafter is not None:
                    drafts += self._drafts(context, max((n for n, _, _ in drafts), default=0), progress)
            finally:
                self._leave()
        staircase = (
            self.runner.graphs is not None
        )  # a step between two recorded sizes is padded to the larger
        return from_samples(fingerprint(self.runner, self.gamma), steps, drafts, staircase)

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

    def _time(self, plan: StepPlan, context: int) -> float:
        """Median milliseconds; the first run warms up."""
        return statistics.median([self._once(plan, context) for _ in range(REPEATS + 1)][1:])

    def _surplus(self, plan: StepPlan, less: StepPlan, context: int) -> float:
        """What ``plan`` takes longer than ``less``: in turns, and of each the fastest.

        The difference is small against what other programs on the machine add to a step.
        """
        times = [(self._once(plan, context), self._once(less, context)) for _ in range(REPEATS + 2)][1:]
        return max(min(t for t, _ in times) - min(t for _, t in times), 1e-3)

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

    def _step(self, rows: int, context: int) -> float:
        """A verify step: half-wide groups, as a binding budget makes them."""
        requests = min(len(self.slots), max(1, round(rows / (1 + self.gamma / 2))), rows)
        requests = max(requests, -(-rows // (1 + self.gamma)))
        return self._time(self._plan(requests, rows - requests, 0, 0, context), context)

    def _drafts(
        self, context: int, done: int, progress: Callable[[str], None]
    ) -> list[tuple[int, int, float]]:
        """Price of a drafting pass for more than ``done`` requests: a step with it less the same step without."""
        out = []
        graphs, most = self.runner.graphs, len(self.slots)
        counts = [n for n in (ROWS if graphs is None else graphs.plan.requests) if n < most] + [most]
        for n in (n for n in counts if n > done):
            base = self._plan(n, 0, 0, 0, context)
            for width in sorted({1, (self.gamma + 1) // 2, self.gamma}):
                progress(f"profile: drafting {width} for {n} requests")
                out.append((n, width, self._surplus(self._plan(n, 0, width, n, context), base, context)))
        return out
