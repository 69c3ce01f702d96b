"""``firesteel simulate``: throughput and per-user speed of a workload on hardware known by its cost table alone.

The engine runs without a model (``bench.hollow``): scheduler, policy and
admission are those of service, acceptance is drawn, time comes from the table
(``firesteel profile``). A trace of requests comes with its lengths and, if it
says so, its arrival times; otherwise C users send a new request as soon as
the last one ends.

``--check`` runs the real engine beside it, on this machine, and compares (``bench.check``).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from firesteel.bench.hollow import VOCAB, hollow_engine
from firesteel.bench.report import environment, write_json
from firesteel.bench.virtual import tables
from firesteel.config import EngineConfig, ParameterError, SamplingParams, SimulatedAcceptance
from firesteel.engine.build import FILE_TRUST
from firesteel.engine.loop import Engine
from firesteel.speculation import simulated
from firesteel.speculation.cost import CostModel, CostTable
from firesteel.speculation.policy import Adaptive, FixedWidth, Policy
from firesteel.speculation.survival import Calibrator

TRUST = FILE_TRUST


@dataclass(frozen=True)
class Request:
    """One line of a trace: lengths in tokens, arrival in seconds (None: when a user is free)."""

    prompt: int
    output: int
    arrival: float | None = None


@dataclass(frozen=True)
class Outcome:
    """One arm at one concurrency; times in seconds of the clock that was used."""

    arm: str
    concurrency: int
    tokens: int
    seconds: float
    tokens_per_second: float
    per_user: float  # mean over requests of output tokens / (last - first token time)
    first_token_s: float  # mean over requests, from arrival
    steps: int
    drafts_per_step: float
    preemptions: int


def read_trace(path: str | Path) -> list[Request]:
    """JSON lines with ``prompt``, ``output`` and perhaps ``arrival``; raises ParameterError naming the line."""
    out = []
    for i, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            arrival = raw.get("arrival")
            one = Request(int(raw["prompt"]), int(raw["output"]), None if arrival is None else float(arrival))
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise ParameterError(
                f"{path}, line {i}: expected an object with 'prompt' and 'output' token counts ({err})"
            ) from err
        if one.prompt < 1 or one.output < 1:
            raise ParameterError(f"{path}, line {i}: 'prompt' and 'output' must be at least 1")
        out.append(one)
    if not out:
        raise ParameterError(f"{path}: no requests; give JSON lines with 'prompt' and 'output'")
    if len({r.arrival is None for r in out}) > 1:
        raise ParameterError(f"{path}: some lines have an arrival and some have none; give all or none")
    return out


def synthetic(n: int, prompt: int, output: int, seed: int = 0) -> list[Request]:
    """Lengths spread evenly from half to one and a half times the given means."""
    r = random.Random(seed)
    return [
        Request(max(round(prompt * r.uniform(0.5, 1.5)), 1), max(round(output * r.uniform(0.5, 1.5)), 1))
        for _ in range(n)
    ]


class Clock(Protocol):
    """Seconds when called."""

    def __call__(self) -> float: ...

    def wait(self, until: float) -> None:
        """Let time pass."""


class Virtual:
    """The sum of what an engine's steps are said to cost, and ``host_ms`` for each."""

    def __init__(self, engine: Engine, host_ms: float):
        self.engine, self.host_ms = engine, host_ms
        self._time, self._step = 0.0, 0

    def __call__(self) -> float:
        """Seconds."""
        for record in reversed(self.engine.records):
            if record.step <= self._step:
                break
            self._time += (record.measured_ms + self.host_ms) / 1e3
        if self.engine.records:
            self._step = self.engine.records[-1].step
        return self._time

    def wait(self, until: float) -> None:
        """Let time pass."""
        self._time = max(self._time, until)


@dataclass
class _Span:
    """Times of one request."""

    arrived: float
    first: float = -1.0
    last: float = 0.0
    tokens: int = 0


def drive(
    engine: Engine, work: Sequence[Request], concurrency: int, clock: Clock, seed: int = 0
) -> Generator[None, None, tuple[list[_Span], float]]:
    """Run ``work``, at most ``concurrency`` requests at a time; pauses behind every step.

    Returns the times of the requests and the seconds in all.
    """
    rng, queue = random.Random(seed), list(reversed(work))
    spans: dict[int, _Span] = {}
    begun, open_ = clock(), 0
    while queue or open_:
        while queue and open_ < concurrency:
            due = queue[-1].arrival
            if due is not None and begun + due > clock():
                if open_:
                    break
                clock.wait(begun + due)
            one = queue.pop()
            prompt = tuple(rng.randrange(3, min(engine.vocab_size, VOCAB) - 6) for _ in range(one.prompt))
            params = SamplingParams(max_tokens=one.output, seed=len(spans), ignore_eos=True)
            sequence = engine.add(prompt, params, len(spans))
            spans[sequence.request_id] = _Span(clock() if due is None else begun + due)
            open_ += 1
        for update in engine.step():
            span, span_now = spans[update.request_id], clock()
            if update.tokens and span.first < 0:
                span.first = span_now
            span.last, span.tokens = span_now, span.tokens + len(update.tokens)
            open_ -= update.finish is not None
        yield
    return list(spans.values()), clock() - begun


def pass_through(
    engine: Engine, policy: Policy, arm: str, work: Sequence[Request], concurrency: int, clock: Clock
) -> Generator[None, None, Outcome]:
    """One arm on an idle engine; pauses behind every step."""
    engine.drain()
    engine.records.clear()
    engine.scheduler.policy = policy
    before = engine.scheduler.stats.preemptions
    clock()  # what was before does not count
    spans, took = yield from drive(engine, work, concurrency, clock)
    steps, tokens = list(engine.records), sum(s.tokens for s in spans)
    speed = [(s.tokens - 1) / max(s.last - s.first, 1e-9) for s in spans if s.tokens > 1 and s.last > s.first]
    return Outcome(
        arm=arm,
        concurrency=concurrency,
        tokens=tokens,
        seconds=took,
        tokens_per_second=tokens / max(took, 1e-9),
        per_user=sum(speed) / max(len(speed), 1),
        first_token_s=sum(s.first - s.arrived for s in spans) / max(len(spans), 1),
        steps=len(steps),
        drafts_per_step=sum(r.budget.drafts for r in steps) / max(len(steps), 1),
        preemptions=engine.scheduler.stats.preemptions - before,
    )


def run_arm(
    engine: Engine,
    policy: Policy,
    arm: str,
    work: Sequence[Request],
    concurrency: int,
    table: CostTable,
    host_ms: float = 0.0,
) -> Outcome:
    """One arm on an idle engine whose steps take what ``table`` says, and ``host_ms`` more."""
    engine.runner.virtual = CostModel(table)
    run = pass_through(engine, policy, arm, work, concurrency, Virtual(engine, host_ms))
    while True:
        try:
            next(run)
        except StopIteration as end:
            out: Outcome = end.value
            return out


@dataclass(frozen=True)
class Setup:
    """What is simulated."""

    table: CostTable
    acceptance: SimulatedAcceptance
    gamma: int
    slots: int
    rows: int  # of one step
    length: int  # tokens of one request at most

    @property
    def values(self) -> dict[str, Any]:
        """Settings of the engine by name, with or without a model."""
        return {
            "max_num_seqs": self.slots,
            "max_num_batched_tokens": self.rows,
            "max_model_len": self.length,
            "prefix_caching": False,
            "speculative": {
                "num_speculative_tokens": self.gamma,
                "simulated_acceptance": self.acceptance,
            },
        }

    def settings(self) -> EngineConfig:
        """Of the engine."""
        return EngineConfig.of(**self.values)

    def policy(self, arm: str) -> Policy:
        """none, K=n or adaptive."""
        if arm == "adaptive":
            start = simulated.coefficients(self.acceptance, self.gamma)
            return Adaptive(self.gamma, CostModel(self.table), Calibrator(start, trust=TRUST))
        width = 0 if arm == "none" else _width(arm)
        if width > self.gamma:
            raise ParameterError(f"--arms {arm}: wider than --k {self.gamma}; raise --k")
        return FixedWidth(width)


def _width(arm: str) -> int:
    try:
        return int(arm.removeprefix("K="))
    except ValueError as err:
        raise ParameterError(f"--arms: {arm!r} is none of none, K=1, K=2, ..., adaptive") from err


def predict(
    setup: Setup,
    arms: Sequence[str],
    levels: Sequence[int],
    work: Callable[[int], Sequence[Request]],
    host_ms: float = 0.0,
) -> list[Outcome]:
    """Every arm at every concurrency."""
    engine = hollow_engine(setup.settings())
    return [
        run_arm(engine, setup.policy(arm), arm, work(c), c, setup.table, host_ms)
        for c in levels
        for arm in arms
    ]


def load_table(name: str, gamma: int) -> CostTable:
    """A file of ``firesteel profile``, of any machine, or a built-in shape by name."""
    shapes = tables(gamma)
    if name in shapes:
        return shapes[name]
    try:
        raw = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ParameterError(
            f"--table {name}: neither a readable cost table ({err}) nor one of {', '.join(shapes)}"
        ) from err
    return CostTable.from_json(raw.get("table", raw) if isinstance(raw, dict) else raw)


# ---- command ----------------------------------------------------------------------------------
def parser() -> argparse.ArgumentParser:
    """Options of ``firesteel simulate``."""
    p = argparse.ArgumentParser(
        prog="firesteel simulate", description="Predict throughput from a cost table; nothing is loaded."
    )
    p.add_argument(
        "--table", default="staircase", help="file of firesteel profile, or staircase, linear, flat"
    )
    p.add_argument("--k", type=int, default=7, help="drafts per request at most")
    p.add_argument("--arms", default="none,K=1,K=3,K=5,K=7,adaptive")
    p.add_argument("--concurrency", default="1,4,16,64,256")
    p.add_argument(
        "--trace", default=None, metavar="FILE", help="JSON lines with prompt, output and perhaps arrival"
    )
    p.add_argument("--requests", type=int, default=2, help="without a trace: requests per concurrent one")
    p.add_argument("--prompt", type=int, default=64, help="their mean prompt, tokens")
    p.add_argument("--output", type=int, default=128, help="their mean answer, tokens")
    p.add_argument("--acceptance", default="{}", metavar="JSON", help="fields of SimulatedAcceptance")
    p.add_argument("--max-num-batched-tokens", type=int, default=None, help="rows of one step")
    p.add_argument("--host-ms", type=float, default=0.0, help="host time a step that nothing hides")
    p.add_argument("--check", action="store_true", help="run the real engine here too, and compare")
    p.add_argument(
        "--model",
        default=None,
        help="with --check: checkpoint folder or geometry (default: the bundled model)",
    )
    p.add_argument("--seconds", type=float, default=30.0, help="with --check: of each point, at least")
    p.add_argument("--json", default=None, metavar="FILE", help="write the result here")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """``firesteel simulate``."""
    args = parser().parse_args(argv)
    levels = _levels(args.concurrency)
    arms = [a.strip() for a in args.arms.split(",")]
    try:
        acceptance = SimulatedAcceptance.of(json.loads(args.acceptance)) or SimulatedAcceptance()
    except ValueError as err:
        raise ParameterError(f"--acceptance: {err}") from err
    for name in ("requests", "prompt", "output"):
        if getattr(args, name) < 1:
            raise ParameterError(f"--{name}: {getattr(args, name)}: expected an integer from 1 up")
    if not 0 < args.seconds < float("inf"):
        raise ParameterError(f"--seconds: {args.seconds}: expected seconds above 0")
    if not 0 <= args.host_ms < float("inf"):
        raise ParameterError(f"--host-ms: {args.host_ms}: expected milliseconds from 0 up")
    try:
        trace = read_trace(args.trace) if args.trace is not None else None
    except OSError as err:
        raise ParameterError(f"--trace: {args.trace} cannot be read ({err.strerror})") from err

    def work(c: int) -> list[Request]:
        return trace if trace is not None else synthetic(args.requests * c, args.prompt, args.output)

    longest = max(r.prompt + r.output for r in work(max(levels)))
    rows = args.max_num_batched_tokens or max(max(levels) * (args.k + 2), 256)
    setup = Setup(load_table(args.table, args.k), acceptance, args.k, max(levels), rows, longest + args.k + 2)
    result: dict[str, Any] = {
        "simulated": True,
        "environment": environment(),
        "settings": {k: v for k, v in vars(args).items() if k != "json"},
    }
    console = Console()
    if args.check:
        from firesteel.bench.check import Check

        result |= Check(args.model, setup, arms, levels, work, args.seconds, console.log).run()
        shown = Table("arm", "C", "predicted tok/s", "measured tok/s", "ratio", "steps")
        for p in result["points"]:
            shown.add_row(
                p["arm"], str(p["concurrency"]), f"{p['predicted']:,.0f}", f"{p['measured']:,.0f}",
                f"{p['ratio']:.3f}", f"{p['steps_predicted']} / {p['steps_measured']}",
            )  # fmt: skip
    else:
        result["points"] = [asdict(o) for o in predict(setup, arms, levels, work, args.host_ms)]
        shown = Table(
            "C", "arm", "tok/s", "tok/s per user", "first token s", "drafts a step", title="SIMULATED"
        )
        for o in result["points"]:
            shown.add_row(
                str(o["concurrency"]), o["arm"], f"{o['tokens_per_second']:,.0f}", f"{o['per_user']:,.1f}",
                f"{o['first_token_s']:.3f}", f"{o['drafts_per_step']:.1f}",
            )  # fmt: skip
    console.print(shown)
    write_json(result, args.json)
    return 0


def _levels(text: str) -> list[int]:
    try:
        levels = [int(c) for c in text.split(",")]
    except ValueError as err:
        raise ParameterError(f"--concurrency {text!r}: expected integers, e.g. 1,4,16") from err
    if min(levels) < 1:
        raise ParameterError(f"--concurrency {text!r}: at least 1")
    return levels


if __name__ == "__main__":
    sys.exit(main())
