"""A deterministic test bed for scheduling: the real engine, time from a cost table.

Every arm runs the same closed loop: C requests at a time, a new one as soon as
one ends. A step takes what the table says, so a result depends on nothing but
acceptance, the table and the decisions. Acceptance is the model's own, or
drawn (``speculation.simulated``), with or without a model behind it.

    python -m firesteel.bench.virtual --json bench/results/virtual.json
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from firesteel.bench.cli import integers
from firesteel.bench.hollow import hollow_engine
from firesteel.bench.report import environment, write_json
from firesteel.config import EngineConfig, ParameterError, SamplingParams, SimulatedAcceptance
from firesteel.core import StepRecord
from firesteel.engine.build import FILE_TRUST
from firesteel.engine.llm import LLM
from firesteel.engine.loop import Engine
from firesteel.eval.gsm import PROBLEMS, read_problems
from firesteel.speculation import simulated
from firesteel.speculation.cost import CostModel, CostTable
from firesteel.speculation.policy import Adaptive, FixedWidth, Policy
from firesteel.speculation.survival import Calibrator, Coefficients

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FIXED = (0, 1, 3, 5, 7)
MODEL = "model"
TRUST = FILE_TRUST  # of a calibration that is known to be right
Job = tuple[tuple[int, ...], SamplingParams]


def tables(gamma: int) -> dict[str, CostTable]:
    """Shapes of hardware: a GPU's staircase, a linear CPU, and one where rows are free."""

    def made(
        name: str, step: Sequence[float], draft_base: float, draft_unit: float, stairs: bool
    ) -> CostTable:
        widths = sorted({1, (gamma + 1) // 2, gamma})
        draft = {w: tuple(draft_base + draft_unit * n * w for n in REQUESTS) for w in widths}
        return CostTable(name, ROWS, tuple(step), 64, 0.0, REQUESTS, draft, stairs)

    stairs = (1.5, 1.8, 2.3, 3.0, 3.9, 4.8, 6.5, 7.9, 9.3, 10.6, 13.4, 22.9)
    return {
        "staircase": made("staircase", stairs, 1.2, 0.007, True),
        "linear": made("linear", [2.0 + 0.9 * r for r in ROWS], 0.6, 0.25, False),
        "flat": made("flat", [8.0] * len(ROWS), 0.8, 0.0, False),
    }


def card(gamma: int) -> CostTable:
    """One H200 with recordings of 36 sizes: the profile in bench/results/sweep_gpu.json, rounded."""
    small = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96)
    large = (112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
    low = (
        1.51,
        1.75,
        1.84,
        1.89,
        2.22,
        2.45,
        2.91,
        3.36,
        3.81,
        4.14,
        4.4,
        4.69,
        5.44,
        5.77,
        6.1,
        6.37,
        6.94,
        7.27,
    )
    high = (
        7.5,
        7.6,
        8.63,
        8.77,
        8.88,
        9.0,
        9.75,
        9.96,
        11.0,
        11.1,
        12.8,
        13.6,
        14.9,
        15.7,
        20.7,
        24.1,
        26.6,
        28.7,
    )
    requests = (1, 16, 64, 256)
    measured = {1: (0.7, 0.9, 1.16, 2.14), 4: (0.89, 1.22, 2.27, 6.32), 7: (0.95, 1.47, 3.68, 10.4)}
    widths = sorted({1, (gamma + 1) // 2, gamma})
    draft = {
        w: tuple(float(np.interp(w, list(measured), by)) for by in zip(*measured.values(), strict=True))
        for w in widths
    }
    return CostTable("card", small + large, low + high, 64, 0.0, requests, draft, True)


class Limited(CostModel):
    """A clock for ``card`` at its power limit, which no table of single steps knows.

    The pace follows the load of the last 100 ms, so a narrow step behind wide ones runs at the clock of these;
    once a second the card is slower by up to a third for 150 ms; sizes are off the table by some per cent,
    drafting by some more, both drawn from ``seed``; and a step has 0.7 % of noise.
    """

    def __init__(self, table: CostTable, seed: int):
        super().__init__(table)
        self._draw = random.Random(seed)
        off = [self._draw.gauss(0.0, 0.04) for _ in table.rows]
        beside = [off[i - 1] + off[(i + 1) % len(off)] for i in range(len(off))]
        self.off = [math.exp(0.7 * x + 0.4 * y) for x, y in zip(off, beside, strict=True)]
        self.drafts_off = math.exp(self._draw.gauss(0.0, 0.15))
        self.now, self.heat = 1000.0 * self._draw.random(), 0.0  # milliseconds, load of the last 100 of them

    def price(self, rows: int, context: float, requests: int, width: int) -> float:
        """Milliseconds of the next step."""
        if not rows:
            return 0.0
        known = self.table.rows
        at = min(bisect_left(known, rows), len(known) - 1)
        alone = self.row_ms(rows, context) * self.off[at] + self.draft_ms(requests, width) * self.drafts_off
        stall = max(1.0 - abs(self.now % 1000.0 - 75.0) / 75.0, 0.0)
        ms = alone * (1.0 + 0.16 * self.heat) * (1.0 + 0.3 * stall) * math.exp(self._draw.gauss(0.0, 0.007))
        self.heat += (min(max(known[at], rows) / 768.0, 1.0) - self.heat) * -math.expm1(-ms / 100.0)
        self.now += ms
        return ms


@dataclass(frozen=True)
class Point:
    """One arm at one concurrency; ``ms`` is virtual time."""

    table: str
    arm: str
    concurrency: int
    tokens: int
    ms: float
    steps: int
    drafts_per_step: float
    accepted: int

    @property
    def rate(self) -> float:
        """Tokens per virtual second, all requests together."""
        return 1e3 * self.tokens / max(self.ms, 1e-9)


def arm_name(width: int) -> str:
    """none, K=1, ..."""
    return f"K={width}" if width else "none"


def jobs(
    n: int,
    tokens: int,
    seed: int = 0,
    vocab: int = 250,
    temperatures: Sequence[float] = (1.0,),
    prompt: tuple[int, int] = (4, 20),
    varied: float = 0.0,
) -> list[Job]:
    """Random prompts of ``prompt[0]`` to ``prompt[1]`` - 1 tokens, answers of ``tokens`` that do not end early.

    ``varied``: answers differ by up to this share. Requests of one length that begin together stay in step
    without drafts: all prompts in one step, then steps of few rows; that is an order that few servers see.
    """
    r, lengths = random.Random(seed), random.Random(seed + 1)
    return [
        (
            tuple(r.randrange(3, vocab) for _ in range(r.randrange(*prompt))),
            SamplingParams(
                max_tokens=max(round(tokens * lengths.uniform(1.0 - varied, 1.0 + varied)), 1),
                temperature=temperatures[i % len(temperatures)],
                seed=(seed << 20) + i,
                ignore_eos=True,
            ),
        )
        for i in range(n)
    ]


class Bed:
    """One idle engine for all arms: only its policy and its clock change.

    ``start`` makes the calibrator that every adaptive run begins with.
    """

    def __init__(self, engine: Engine, start: Callable[[], Calibrator]):
        self.engine, self.start = engine, start
        assert engine.config.gamma > 0, "the bed drafts"

    def adaptive(self, table: CostTable) -> Adaptive:
        """A fresh adaptive policy that believes ``table``."""
        return Adaptive(self.engine.config.gamma, CostModel(table), self.start())

    def fixed(
        self, width: int, work: Sequence[Job], concurrency: int, warmup: int = 0, whole: bool = True
    ) -> list[StepRecord]:
        """Steps of a fixed width (0: plain decoding), which no prices influence."""
        return self.run(FixedWidth(width), None, work, concurrency, warmup, whole)

    def run(
        self,
        policy: Policy,
        clock: CostTable | CostModel | None,
        work: Sequence[Job],
        concurrency: int,
        warmup: int = 0,
        whole: bool = True,
    ) -> list[StepRecord]:
        """The closed loop; steps of all but the first ``warmup`` requests.

        With ``whole`` False also without what comes after the last request has
        begun: with few waves the rundown, at ever lower load, weighs more than
        any decision.
        """
        engine = self.engine
        engine.drain()
        engine.runner.virtual = CostModel(clock) if isinstance(clock, CostTable) else clock
        engine.scheduler.policy = policy
        engine.runner._calibration = None
        self._loop(work[:warmup], concurrency)
        engine.records.clear()
        full = self._loop(work[warmup:], concurrency)
        return list(engine.records)[: None if whole else full or None]

    def _loop(self, work: Sequence[Job], concurrency: int) -> int:
        """Steps that were committed when the last request began."""
        engine, queue, open_, full = self.engine, list(reversed(work)), 0, 0
        while queue or open_:
            while queue and open_ < concurrency:
                prompt, params = queue.pop()
                assert params.seed is not None, "paired arms share their seeds"
                engine.add(prompt, params, params.seed)
                open_ += 1
                full = len(engine.records)
            open_ -= sum(u.finish is not None for u in engine.step())
        engine.drain()
        return full


def priced(records: Iterable[StepRecord], table: CostTable, arm: str, concurrency: int) -> Point:
    """What steps cost by a table."""
    cost, steps = CostModel(table), list(records)
    return Point(
        table=table.fingerprint,
        arm=arm,
        concurrency=concurrency,
        tokens=sum(r.emitted for r in steps),
        ms=sum(cost.price(r.rows, r.context, r.drafting, r.draft_width) for r in steps),
        steps=len(steps),
        drafts_per_step=sum(r.budget.drafts for r in steps) / max(len(steps), 1),
        accepted=sum(r.accepted for r in steps),
    )


def compare(
    bed: Bed,
    prices: Sequence[CostTable],
    concurrencies: Sequence[int],
    work: Callable[[int], Sequence[Job]],
    widths: Sequence[int] = FIXED,
    warmup: Callable[[int], int] = lambda c: 0,
    whole: bool = True,
) -> Iterator[list[Point]]:
    """All arms at each point of (table, concurrency), fixed ones first, adaptive last.

    Fixed arms decide nothing by prices, so they run once and are priced by every table.
    """
    for c in concurrencies:
        todo = work(c)
        fixed = {w: bed.fixed(w, todo, c, warmup(c), whole) for w in widths}
        for table in prices:
            points = [priced(records, table, arm_name(w), c) for w, records in fixed.items()]
            records = bed.run(bed.adaptive(table), table, todo, c, warmup(c), whole)
            yield [*points, priced(records, table, "adaptive", c)]


def race(
    bed: Bed,
    table: CostTable,
    clock: Callable[[], CostModel],
    arms: Mapping[str, Policy],
    work: Sequence[Job],
    concurrency: int,
    warmup: int = 0,
) -> list[Point]:
    """Arms on a clock that remembers, adaptive last: it believes ``table``, and steps take what the clock says."""
    out = []
    for arm, policy in {**arms, "adaptive": bed.adaptive(table)}.items():
        steps = bed.run(policy, clock(), work, concurrency, warmup, whole=False)
        ms = sum(r.measured_ms for r in steps)
        out.append(replace(priced(steps, table, arm, concurrency), ms=ms))
    return out


def ratio(points: Sequence[Point]) -> float:
    """Rate of adaptive over that of the best fixed arm."""
    return points[-1].rate / max(p.rate for p in points[:-1])


def simulated_bed(
    acceptance: SimulatedAcceptance, gamma: int, slots: int, length: int, start: str = "calibrated"
) -> Bed:
    """A bed without a model. ``start``: "calibrated" (as with a calibration file) or "prior" (knows nothing)."""
    settings = EngineConfig.of(
        max_num_seqs=slots,
        max_num_batched_tokens=max(slots * (gamma + 2), 64),
        max_model_len=length,
        prefix_caching=False,
        speculative={"num_speculative_tokens": gamma, "simulated_acceptance": acceptance},
    )

    def calibrator() -> Calibrator:
        if start == "prior":
            return Calibrator(Coefficients.prior(gamma, True, True))
        return Calibrator(simulated.coefficients(acceptance, gamma), trust=TRUST)

    return Bed(hollow_engine(settings), calibrator)


def model_bed(gamma: int, slots: int, model: str | Path | None = None) -> tuple[Bed, LLM]:
    """A bed on a model's own acceptance, from its calibration file or, without one, from the prior."""
    llm = LLM(
        model,
        max_num_seqs=slots,
        max_num_batched_tokens=max(slots * (gamma + 2), 128),
        max_model_len=640,
        prefix_caching=False,
        speculative={"num_speculative_tokens": gamma},
    )
    drafter = llm.engine.runner.drafter
    assert drafter is not None, "speculation needs a drafter"
    head, file = drafter.weights.markov.confidence is not None, llm.path / "calibration.json"

    def start() -> Calibrator:
        if file.is_file():
            return Calibrator(Coefficients.load(file).fitted_to(gamma, head, True), trust=FILE_TRUST)
        return Calibrator(Coefficients.prior(gamma, head, True))

    return Bed(llm.engine, start), llm


def problem_jobs(llm: LLM, n: int, tokens: int) -> list[Job]:
    """Shipped word problems in chat encoding, sampled at T=1; answers end where the model ends them."""
    assert llm.tokenizer is not None, "problems are text"
    out = []
    for (_, params), problem in zip(jobs(n, tokens), read_problems(PROBLEMS, n)):
        prompt = llm.prompt_of([{"role": "user", "content": problem.question}])
        out.append(
            (
                tuple(llm.tokenizer.encode(prompt)) if isinstance(prompt, str) else tuple(prompt),
                replace(params, ignore_eos=False),
            )
        )
    return out


SCENES: dict[str, SimulatedAcceptance] = {
    "measured": SimulatedAcceptance(),  # rates of a trained drafter
    "mixed": SimulatedAcceptance(spread=1.0),  # requests differ
    "phases": SimulatedAcceptance(trace=(*[(0.95,)] * 24, *[(0.45,)] * 12)),  # easy and hard passages
    # the bundled model's own at T=1 and K=7 (bench/results/acceptance.json): arithmetic, code, prose
    "domains": SimulatedAcceptance(
        trace=(
            *[(0.99,) * 7] * 48,
            *[(0.53, 0.48, 0.51, 0.53, 0.45, 0.45, 0.45)] * 48,
            *[(0.45, 0.44, 0.43, 0.36, 0.4, 0.4, 0.4)] * 48,
        )
    ),
    "poor": SimulatedAcceptance(rates=(0.35, 0.25, 0.2)),
    "never": SimulatedAcceptance(rates=(0.0,)),
    "nearly always": SimulatedAcceptance(rates=(0.99,)),
    "blind": SimulatedAcceptance(head_auc=0.5, margin_auc=0.5),  # signals say nothing
}


def _names(option: str, text: str, known: Iterable[str]) -> list[str]:
    """The names in ``text``; raises ParameterError for one that is not ``known``."""
    names, known = [n.strip() for n in text.split(",")], list(known)
    wrong = next((n for n in names if n not in known), None)
    if wrong is not None:
        raise ParameterError(f"{option}: {wrong!r} is none of {', '.join(known)}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Every scene on every table, calibrated and from the prior."""
    p = argparse.ArgumentParser(prog="firesteel bench virtual", description=main.__doc__)
    p.add_argument("--concurrency", default=",".join(map(str, CONCURRENCY)))
    p.add_argument("--scenes", default=",".join(SCENES), help=f"drawn acceptance, or {MODEL}: a model's own")
    p.add_argument(
        "--model", default=None, help="checkpoint folder of the scene 'model' (default: the bundled one)"
    )
    p.add_argument("--tables", default="staircase,linear,flat")
    p.add_argument("--starts", default="calibrated,prior")
    p.add_argument("--gamma", type=int, default=7)
    p.add_argument("--tokens", type=int, default=128, help="tokens of one answer")
    p.add_argument(
        "--varied", type=float, default=0.0, help="answers of drawn scenes differ by up to this share"
    )
    p.add_argument(
        "--prompt", default="4,20", help="prompts of drawn scenes: tokens at least, and fewer than"
    )
    p.add_argument("--requests", type=int, default=3, help="requests per concurrent one")
    p.add_argument("--least", type=int, default=24, help="but at least as many requests")
    p.add_argument("--warmups", type=int, default=0, help="requests that come first and are not counted")
    p.add_argument("--full-load", action="store_true", help="leave the rundown out, see Bed.run")
    p.add_argument("--json", default=None, metavar="FILE")
    args = p.parse_args(argv)
    levels = integers("--concurrency", args.concurrency)
    longest = math.ceil(args.tokens * (1.0 + args.varied))
    low, high = (*integers("--prompt", args.prompt), 0)[:2]
    if high <= low:
        raise ParameterError(
            f"--prompt {args.prompt!r}: expected two numbers of tokens, the second larger, as in 60,140"
        )
    if not 0.0 <= args.varied < 1.0:
        raise ParameterError(f"--varied {args.varied}: expected a share from 0 up and below 1")
    shapes = tables(args.gamma) | {"card": card(args.gamma)}
    prices = [shapes[t] for t in _names("--tables", args.tables, shapes)]
    scenes = _names("--scenes", args.scenes, (*SCENES, MODEL))
    _names("--starts", args.starts, ("calibrated", "prior"))
    out: list[dict[str, Any]] = []
    console = Console()
    for scene in scenes:
        starts = ["its own"] if scene == MODEL else args.starts.split(",")
        for start in starts:
            if scene == MODEL:
                bed, llm = model_bed(args.gamma, max(levels), args.model)
            else:
                bed = simulated_bed(SCENES[scene], args.gamma, max(levels), longest + high + 12, start)
            shown = Table(
                "table", "C", *map(arm_name, FIXED), "adaptive", "adaptive / best", title=f"{scene}, {start}"
            )

            def work(c: int) -> list[Job]:
                n = max(args.requests * c, args.least)
                if scene == MODEL:  # noqa: B023
                    return problem_jobs(llm, n, args.tokens)  # noqa: B023
                return jobs(n, args.tokens, prompt=(low, high), varied=args.varied)

            for points in compare(
                bed, prices, levels, work, warmup=lambda _: args.warmups, whole=not args.full_load
            ):
                r = ratio(points)
                rates = [f"{q.rate:,.0f}" for q in points]
                shown.add_row(points[0].table, str(points[0].concurrency), *rates, f"{r:.3f}")
                out.append(
                    {
                        "scene": scene,
                        "start": start,
                        "ratio": round(r, 4),
                        "points": [{**asdict(q), "rate": round(q.rate, 1)} for q in points],
                    }
                )
            console.print(shown)
    worst = {
        s: min(o["ratio"] for o in out if o["start"] == s) for s in dict.fromkeys(o["start"] for o in out)
    }
    console.print(f"adaptive / best, worst point: {worst}")
    drawn = {name: asdict(SCENES[name]) for name in scenes if name != MODEL}
    result = {
        "simulated": bool(drawn),
        "environment": environment(),
        "settings": vars(args),
        "scenes": drawn,
    }
    write_json({**result, "worst": worst, "results": out}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
