"""``firesteel bench steps``: milliseconds of real steps against the floor of the machine.

A verify step by rows and context, a drafting pass by requests, through the
runner that serves: admission, forward, sampling, commit. Requests stand at the
given context with random rings and pages; rows of a step belong to half-wide
groups, as a binding budget makes them. The floor counts the distinct experts
that the very step hits (``floors.py``). Weights that fit a CPU's caches are read faster than the
memory's bandwidth, so the floor means something for models larger than those.

    firesteel bench steps --json steps.json
    firesteel bench steps --model flash-8L --set device=cuda --rows 1,8,64,512,2048 --contexts 1024,8192,65536
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from firesteel.bench.cli import engine_settings, integers
from firesteel.bench.floors import Load, Rates, Work, context_work, draft_work, floor, verify_work
from firesteel.bench.geometry import load
from firesteel.bench.report import environment, write_json
from firesteel.config import ParameterError
from firesteel.core import StepPlan
from firesteel.engine.llm import LLM
from firesteel.engine.profile import Profiler
from firesteel.errors import user_errors
from firesteel.models.deepseek_v4.config import V4Config
from firesteel.ops.interface import Ops

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
REQUESTS = (1, 4, 16, 64, 256)


# ---- the machine ---------------------------------------------------------------------
def measure_rates(device: torch.device, size: int | None = None) -> Rates:
    """Read bandwidth and operations per second, seen in plain kernels; best of several runs.

    ``size``: bytes of the array that is read (default 2 GiB on a GPU, 256 MiB on a CPU).
    """
    gpu = device.type != "cpu"
    read = _read_rate(size or (1 << 31 if gpu else 1 << 28), device)
    n = 8192 if gpu else 1024
    dtype = torch.bfloat16 if gpu else torch.float32
    a = torch.randn(n, n, device=device).to(dtype)
    dense = 2 * n**3 / _fastest(lambda: a @ a, device)
    fp8 = _fp8_rate(a, device) if gpu else None
    flop = {"bf16": dense, "fp8": fp8 or dense, "fp4": fp8 or dense}
    said = "measured: sum of a large array, " + ("bf16 and fp8 products" if fp8 else f"{dtype} products")
    return Rates(read, flop, said)


def _read_rate(size: int, device: torch.device) -> float:
    """Bytes per second."""
    data = torch.ones(size // 4, device=device)
    return size / _fastest(lambda: data.sum(), device)


def _fp8_rate(a: Tensor, device: torch.device) -> float | None:
    """None where this torch or card has no FP8 product."""
    n = a.shape[0]
    one = torch.ones((), device=device)
    left, right = a.to(torch.float8_e4m3fn), a.to(torch.float8_e4m3fn).t()

    def product() -> Tensor:
        return torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    try:
        return 2 * n**3 / _fastest(product, device)
    except RuntimeError:
        return None


def _fastest(run: Callable[[], Any], device: torch.device, times: int = 7) -> float:
    """Seconds of the fastest of several runs."""
    best = float("inf")
    for _ in range(times):
        _wait(device)
        begun = time.perf_counter()
        run()
        _wait(device)
        best = min(best, time.perf_counter() - begun)
    return best


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# ---- steps -----------------------------------------------------------------------------
class Stepper(Profiler):
    """The start-up profiler with its own repeats, contexts and shapes, and a look at the experts."""

    def __init__(self, llm: LLM, repeats: int):
        engine = llm.engine
        super().__init__(
            engine.runner, engine.config.gamma, engine.config.max_num_batched_tokens, engine.max_model_len
        )
        self.repeats = repeats

    def _time(self, plan: StepPlan, context: int) -> float:
        return statistics.median([self._once(plan, context) for _ in range(self.repeats + 2)][2:])

    def occupy(self, context: int) -> None:
        """All slots at ``context``, rings and pages full of random values."""
        self._occupy(context)
        arena = self.runner.memory.arena
        for lo in range(0, arena.shape[0], 256):
            part = arena[lo : lo + 256]
            if part.is_floating_point():
                part.copy_(torch.randn(part.shape, device=part.device).to(part.dtype))
            else:  # packed rows: any byte that is neither a NaN nor a huge scale
                part.random_(0, 120)

    def leave(self) -> None:
        """Free the slots again."""
        self._leave()

    def requests_for(self, rows: int) -> int:
        """Requests whose groups are half as wide as they may be, or what fits."""
        requests = min(len(self.slots), max(1, round(rows / (1 + self.gamma / 2))), rows)
        return max(requests, -(-rows // (1 + self.gamma)))

    def verify_plan(self, rows: int, requests: int, context: int) -> StepPlan:
        """A step of ``rows`` rows of so many requests, without drafting."""
        return self._plan(requests, rows - requests, 0, 0, context)

    def draft_plan(self, requests: int, width: int, context: int) -> StepPlan:
        """A step of one row per request that drafts for all of them."""
        return self._plan(requests, 0, width, requests, context)

    def verify(self, rows: int, requests: int, context: int) -> tuple[float, tuple[float, ...] | None]:
        """(median ms, distinct experts by target layer) of a verify step without drafting."""
        plan = self.verify_plan(rows, requests, context)
        ms = self._time(plan, context)
        with self._watched() as hits:
            self._reset(context)
            self.runner.launch(plan).read()
        layers = len(self.runner.target.weights.layers)
        return ms, tuple(hits[:layers]) if len(hits) >= layers else None

    def draft(self, requests: int, width: int, context: int) -> tuple[float, tuple[float, ...] | None]:
        """(ms, distinct experts by stage) of a drafting pass: a step with it less the same step without."""
        assert self.runner.drafter is not None, "the caller checks"
        plain = self.verify_plan(requests, requests, context)
        whole = self.draft_plan(requests, width, context)
        base, both = self._time(plain, context), self._time(whole, context)
        with self._watched() as hits:
            self._reset(context)
            self.runner.launch(whole).read()
        stages = len(self.runner.drafter.weights.stages)
        layers = len(self.runner.target.weights.layers)
        return max(both - base, 0.0), tuple(hits[layers:]) if len(hits) == layers + stages else None

    @contextmanager
    def _watched(self) -> Iterator[list[float]]:
        """Counts of distinct experts, one per routing, in order."""
        hits: list[float] = []
        with self.through(lambda ops: _Watching(ops, hits)):
            yield hits

    @contextmanager
    def through(self, wrap: Callable[[Any], Any]) -> Iterator[None]:
        """Runs steps eagerly, target and drafter over wrapped ops."""
        held: list[Any] = [self.runner.target]
        if self.runner.drafter is not None:
            held.append(self.runner.drafter)
        before, graphs = [h.ops for h in held], self.runner.graphs
        self.runner.graphs = None
        for owner in held:
            owner.ops = wrap(owner.ops)
        try:
            yield
        finally:
            self.runner.graphs = graphs
            for owner, ops in zip(held, before, strict=True):
                owner.ops = ops


class _Watching:
    """Ops that count the experts of every ``route``."""

    def __init__(self, ops: Any, hits: list[float]):
        self._ops, self._hits = ops, hits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def draft_stage(self, *args: Any) -> Tensor:
        """As the op; where it consists of other ops, of these here."""
        own = type(self._ops).draft_stage
        stage: Tensor = Ops.draft_stage(self, *args) if own is Ops.draft_stage else own(self._ops, *args)  # type: ignore[arg-type]
        return stage

    def route(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As the op, and note how many distinct experts it chose."""
        ids, weights = self._ops.route(*args, **kwargs)
        self._hits.append(float(ids.unique().numel()))
        return ids, weights


def measure(
    llm: LLM,
    rows: Sequence[int],
    contexts: Sequence[int],
    requests: Sequence[int],
    rates: Rates,
    repeats: int = 9,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """``verify``, ``shapes`` and ``draft`` lines: ms, floor, and how many times the floor it is."""
    step, config = Stepper(llm, repeats), llm.config
    drafts = step.runner.drafter is not None
    out: dict[str, Any] = {"verify": [], "shapes": [], "draft": []}
    for context in contexts:
        if context + step.gamma + 2 > llm.engine.max_model_len:
            raise ParameterError(
                f"context {context}: does not fit in max_model_len={llm.engine.max_model_len}; raise it"
            )
        step.occupy(context)
        try:
            if not step.slots:
                raise ParameterError(f"context {context}: no request fits in the pages; raise num_pages")
            most = min(step.max_rows, len(step.slots) * (1 + step.gamma))
            for r in (r for r in rows if r <= most):
                progress(f"{r} rows at context {context}")
                n = step.requests_for(r)
                ms, hit = step.verify(r, n, context)
                least = floor(
                    verify_work(config, Load(r, n, context, experts=hit), writes_context(step)), rates
                )
                line = {"rows": r, "requests": n, "context": context}
                out["verify"].append(line | _against(ms, least, hit))
            out["shapes"] += _shapes(step, llm, context, rates)
            if drafts:
                for n in (n for n in requests if n <= len(step.slots)):
                    progress(f"drafting for {n} requests at context {context}")
                    ms, hit = step.draft(n, step.gamma, context)
                    least = floor(drafting_work(step, config, n, context, hit), rates)
                    line = {"requests": n, "width": step.gamma, "context": context}
                    out["draft"].append(line | _against(ms, least, hit))
        finally:
            step.leave()
    return out


def writes_context(step: Stepper) -> bool:
    """Whether a verify step writes the context rows of its rows; on a CPU they wait for a drafting pass."""
    return step.runner.drafter is not None and step.runner.device.type != "cpu"


def drafting_work(
    step: Stepper, config: V4Config, requests: int, context: int, experts: Sequence[float] | None
) -> list[Work]:
    """Of a drafting pass of the full width, with the context rows that waited for it."""
    own = draft_work(config, requests, step.gamma, context, experts)
    return own if writes_context(step) else [*own, *context_work(config, requests)]


def _shapes(step: Stepper, llm: LLM, context: int, rates: Rates) -> list[dict[str, Any]]:
    """Equal rows of few and of many requests: what shared reads of one request's keys are worth."""
    wide = 1 + step.gamma
    if step.gamma == 0 or len(step.slots) < wide:
        return []
    out = []
    rows = min(len(step.slots) // wide, 8) * wide
    for n in (rows // wide, rows):
        ms, hit = step.verify(rows, n, context)
        least = floor(
            verify_work(llm.config, Load(rows, n, context, experts=hit), writes_context(step)), rates
        )
        out.append({"rows": rows, "requests": n, "context": context} | _against(ms, least, hit))
    return out


def _against(ms: float, least: Any, hit: tuple[float, ...] | None) -> dict[str, Any]:
    return {
        "ms": ms,
        "floor_ms": least.step_ms,
        "serial_floor_ms": least.serial_ms,
        "times_floor": ms / least.step_ms,
        "experts": "expected for uniform choices" if hit is None else "counted in this step",
        "distinct_experts": None if hit is None else sum(hit) / len(hit),
        "by_op_ms": least.by_op,
    }


# ---- command ------------------------------------------------------------------------------
def table(title: str, lines: Sequence[dict[str, Any]], columns: Sequence[str]) -> Table:
    """Lines of one kind."""
    out = Table(title=title, title_justify="left")
    for column in (*columns, "ms", "floor ms", "x floor", "distinct experts"):
        out.add_column(column, justify="right")
    for line in lines:
        hit = line["distinct_experts"]
        out.add_row(
            *(str(line[c]) for c in columns),
            f"{line['ms']:.3f}",
            f"{line['floor_ms']:.3f}",
            f"{line['times_floor']:.2f}",
            "uniform" if hit is None else f"{hit:.1f}",
        )
    return out


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="firesteel bench steps", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--model", default=None, help="checkpoint folder, flash-8L or tiny (random weights)")
    p.add_argument("--rows", default=",".join(map(str, ROWS)))
    p.add_argument("--contexts", default="1024", help="tokens that every request stands at")
    p.add_argument("--requests", default=",".join(map(str, REQUESTS)), help="requests of a drafting pass")
    p.add_argument("--k", type=int, default=7, help="drafts per request; 0 for no drafter")
    p.add_argument("--max-num-seqs", type=int, default=256)
    p.add_argument(
        "--num-pages", type=int, default=None, help="history pages (default: all requests at the context)"
    )
    p.add_argument("--repeats", type=int, default=9, help="the median of so many steps")
    p.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="an EngineConfig field")
    p.add_argument("--json", default=None, metavar="FILE", help="write the result here")
    p.add_argument("--plots", default=None, metavar="FOLDER", help="write plots and report.html there")
    return p


def run(args: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """The whole result of one command line."""
    rows, contexts = integers("--rows", args.rows), integers("--contexts", args.contexts)
    most = max(rows)
    longest = max(contexts) + args.k + 2
    settings: dict[str, Any] = {
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": max(most, args.max_num_seqs),
        "max_model_len": longest,
        "num_pages": args.num_pages or -(-longest // 256) * args.max_num_seqs,
        "prefix_caching": False,
        "speculative": {"num_speculative_tokens": args.k} if args.k else None,
    } | engine_settings(args.set)
    llm = load(args.model, progress, **settings)
    progress("measuring the machine")
    rates = measure_rates(llm.engine.runner.device)
    lines = measure(llm, rows, contexts, integers("--requests", args.requests), rates, args.repeats, progress)
    return {
        "bench": "steps",
        "model": Path(args.model).name if args.model else "bundled",
        "settings": settings | {"rows": rows, "contexts": contexts, "repeats": args.repeats},
        "notes": list(llm.notes),
        "rates": rates.to_json(),
        **lines,
        "environment": environment(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 2 on a user's error."""
    args = _parser().parse_args(argv)
    try:
        with Console(stderr=True).status("loading") as status:
            result = run(args, status.update)
    except user_errors() as err:
        print(f"steps: {err}", file=sys.stderr)
        return 2
    write_json(result, args.json)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 110)
    rates = result["rates"]
    flops = ", ".join(f"{k} {v / 1e12:.2f}" for k, v in rates["flop_per_s"].items())
    console.print(f"{rates['read_bytes_per_s'] / 1e12:.3f} TB/s read; Tflop/s: {flops}", highlight=False)
    for title, lines, columns in (
        ("verify step", result["verify"], ("context", "rows", "requests")),
        ("equal rows, few and many requests", result["shapes"], ("context", "rows", "requests")),
        ("drafting pass", result["draft"], ("context", "requests", "width")),
    ):
        if lines:
            console.print(table(title, lines, columns))
    if args.plots:
        from firesteel.bench.plots import write_report

        console.print(f"wrote {write_report(result, args.plots)}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
