"""``firesteel bench ops``: where the time of a step goes, op by op, against the floor of each.

A real verify step (and a drafting pass) is run once with every op call noted.
Then the calls of one op, over all layers, are repeated with the very inputs
they had: on a GPU as one recorded graph, so that no launch is waited for, on a
CPU in a loop. Layers follow each other, so weights come from memory unless all
of an op's weights fit in a cache. The sum is compared with the whole step, and products with those of the
vendor's library (``library.py``).

    firesteel bench ops --json ops.json
    firesteel bench ops --model flash-8L --set device=cuda --rows 1,8,64,512,2048
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from firesteel.bench.cli import engine_settings, integers
from firesteel.bench.floors import Load, Rates, floor, verify_work
from firesteel.bench.geometry import load
from firesteel.bench.library import same_products
from firesteel.bench.report import environment, write_json
from firesteel.bench.steps import Stepper, drafting_work, measure_rates, writes_context
from firesteel.core import StepPlan
from firesteel.engine.llm import LLM
from firesteel.errors import user_errors

# our op -> the floor's ops that it covers
FLOORS = {
    "attention": ("attention",),
    "block_attention": ("attention",),
    "compress": ("compressor",),
    "context_rows": ("draft context",),
    "draft_stage": (
        "wq_a",
        "wq_b",
        "wkv",
        "attention",
        "wo_a",
        "wo_b",
        "router",
        "experts",
        "shared expert",
        "hyper",
    ),
    "head_sample": ("LM head",),
    "logits": ("LM head",),
    "hyper_step": ("hyper",),
    "index_select": ("indexer scores",),
    "markov_walk": ("base logits", "Markov walk"),
    "moe": ("experts", "shared expert"),
    "output": ("wo_a", "wo_b"),
    "route": ("router",),
    "embed": ("embed",),
}
# change state that a repetition would change again, or are measured inside others
LEFT_OUT = {"commit", "begin_pass", "build_rows", "admit", "restrict"}
REPLAYS = 20


@dataclass(frozen=True)
class Call:
    """One op call of a step; ``library``: the vendor's products in its place, if it has them."""

    label: str
    run: Callable[[], Any]
    library: list[Callable[[], Any]] | None = None


class _Noting:
    """Ops that run as always and note their calls; weights are called by name."""

    def __init__(self, ops: Any, names: dict[int, str], calls: list[Call]):
        self._ops, self._names, self._calls = ops, names, calls

    def begin_shared(self, *_: Any) -> None:
        """Nothing: an op that is timed by itself leaves nothing running."""

    def beside(self) -> AbstractContextManager[None]:
        """Nothing runs beside what is timed."""
        return nullcontext()

    def join(self) -> None:
        """There is nothing to wait for."""

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)
        if not callable(op) or name in LEFT_OUT:
            return op

        def noted(*args: Any, **kwargs: Any) -> Any:
            label = name
            if name in ("linear", "linear_f32"):
                label = self._names.get(id(args[1]), "other linear")
            with torch.inference_mode():
                theirs = same_products(name, args)
            self._calls.append(Call(label, lambda: op(*args, **kwargs), theirs))
            return op(*args, **kwargs)

        return noted


def weight_names(llm: LLM) -> dict[int, str]:
    """Names of the products that ``linear`` computes, by identity of their prepared weight."""
    runner = llm.engine.runner
    out: dict[int, str] = {}
    blocks = list(runner.target.weights.layers)
    if runner.drafter is not None:
        out[id(runner.drafter.weights.main_proj)] = "draft context"
        blocks += list(runner.drafter.weights.stages)
    for block in blocks:
        a = block.attention
        out |= {id(a.wq_a): "wq_a", id(a.wq_b): "wq_b", id(a.wkv): "wkv"}
        if a.indexer is not None:
            out |= {id(a.indexer.wq_b): "indexer.wq_b", id(a.indexer.weights): "indexer.weights_proj"}
    return out


class Dissector(Stepper):
    """Notes the op calls of real steps and times them by label."""

    def __init__(self, llm: LLM, repeats: int):
        super().__init__(llm, repeats)
        self.llm, self.names = llm, weight_names(llm)

    def calls(self, plan: StepPlan, context: int) -> list[Call]:
        """Every op call of one eager run of a plan."""
        noted: list[Call] = []
        with self.through(lambda ops: _Noting(ops, self.names, noted)):
            self._reset(context)
            self.runner.launch(plan).read()
        return noted

    def by_label(self, calls: Sequence[Call], context: int) -> dict[str, dict[str, Any]]:
        """label -> ms of all its calls together, their number, and how they were timed."""
        out: dict[str, dict[str, Any]] = {}
        for label in dict.fromkeys(c.label for c in calls):
            mine = [c.run for c in calls if c.label == label]
            self._reset(context)
            with torch.inference_mode():
                ms, how = self._together(mine)
            out[label] = {"ms": ms, "calls": len(mine), "timed": how}
            theirs = [c.library for c in calls if c.label == label]
            if (parts := [run for some in theirs for run in some or ()]) and None not in theirs:
                out[label] |= self._library(parts)
        return out

    def _library(self, runs: Sequence[Callable[[], Any]]) -> dict[str, Any]:
        """What the vendor's library takes for the same products, or why it does not run."""
        try:
            with torch.inference_mode():
                ms, how = self._together(runs)
        except RuntimeError as err:
            return {"why_no_library": str(err).splitlines()[0]}
        return {"library_ms": ms, "library_timed": how}

    def _together(self, runs: Sequence[Callable[[], Any]]) -> tuple[float, str]:
        """Median milliseconds of calling all of ``runs`` once."""
        if self.runner.device.type == "cpu":
            times = []
            for _ in range(self.repeats + 1):
                begun = time.perf_counter()
                for run in runs:
                    run()
                times.append(1e3 * (time.perf_counter() - begun))
            return statistics.median(times[1:]), "loop"
        try:
            return self._replayed(runs), "graph"
        except RuntimeError as err:
            return self._eager(runs), f"eager, launches included: {str(err).splitlines()[0]}"

    def _replayed(self, runs: Sequence[Callable[[], Any]]) -> float:
        for run in runs:  # compiles and fills caches
            run()
        torch.cuda.synchronize(self.runner.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for run in runs:
                run()
        return self._events(graph.replay)

    def _eager(self, runs: Sequence[Callable[[], Any]]) -> float:
        def all_of_them() -> None:
            for run in runs:
                run()

        return self._events(all_of_them)

    def _events(self, run: Callable[[], Any]) -> float:
        """Median milliseconds between events around ``run``."""
        times = []
        for _ in range(max(self.repeats, REPLAYS)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        return statistics.median(times)


def measure(
    llm: LLM,
    rows: Sequence[int],
    context: int,
    requests: Sequence[int],
    rates: Rates,
    repeats: int = 9,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """One entry per step: its parts with ms and floor, their sum, and the whole step."""
    step, config, out = Dissector(llm, repeats), llm.config, []
    drafts = step.runner.drafter is not None
    step.occupy(context)
    try:
        most = min(step.max_rows, len(step.slots) * (1 + step.gamma))
        for r in (r for r in rows if r <= most):
            progress(f"{r} rows")
            n = step.requests_for(r)
            plan = step.verify_plan(r, n, context)
            whole, hit = step.verify(r, n, context)
            work = verify_work(config, Load(r, n, context, experts=hit), writes_context(step))
            least = floor(work, rates)
            parts = step.by_label(step.calls(plan, context), context)
            out.append({"step": "verify", "rows": r, "requests": n} | _parts(parts, least.by_op, whole))
        for n in (n for n in requests if drafts and n <= len(step.slots)):
            progress(f"drafting for {n} requests")
            whole, hit = step.draft(n, step.gamma, context)
            least = floor(drafting_work(step, config, n, context, hit), rates)
            plain = len(step.calls(step.verify_plan(n, n, context), context))
            calls = step.calls(step.draft_plan(n, step.gamma, context), context)[plain:]
            parts = step.by_label(calls, context)
            out.append(
                {"step": "draft", "rows": n * step.gamma, "requests": n} | _parts(parts, least.by_op, whole)
            )
    finally:
        step.leave()
    return out


def _parts(parts: dict[str, dict[str, Any]], floors: dict[str, float], whole: float) -> dict[str, Any]:
    """Ops in order of time; ``unexplained_ms``: of the step, but of no op (launches, small copies, the tail)."""
    lines = []
    for label, said in sorted(parts.items(), key=lambda kv: -kv[1]["ms"]):
        known = [floors[name] for name in FLOORS.get(label, (label,)) if name in floors]
        least = sum(known) if known else None
        ratio = said["ms"] / least if least else None
        lines.append({"op": label, **said, "floor_ms": least, "times_floor": ratio})
    total = sum(line["ms"] for line in lines)
    return {"ops": lines, "sum_ms": total, "step_ms": whole, "unexplained_ms": whole - total}


def tables(result: dict[str, Any]) -> list[Table]:
    """One table per step."""
    out = []
    for entry in result["steps"]:
        said = f"{entry['step']}, {entry['rows']} rows of {entry['requests']} requests: {entry['step_ms']:.3f} ms"
        table = Table(title=f"{said}, {entry['sum_ms']:.3f} in ops", title_justify="left")
        for column in ("op", "calls", "ms", "floor ms", "x floor", "library ms", "share"):
            table.add_column(column, justify="left" if column == "op" else "right")
        for line in entry["ops"]:
            least, ratio = line["floor_ms"], line["times_floor"]
            table.add_row(
                line["op"],
                str(line["calls"]),
                f"{line['ms']:.4f}",
                "-" if least is None else f"{least:.4f}",
                "-" if ratio is None else f"{ratio:.2f}",
                f"{line['library_ms']:.4f}" if "library_ms" in line else "-",
                f"{100 * line['ms'] / max(entry['sum_ms'], 1e-9):.0f} %",
            )
        out.append(table)
    return out


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="firesteel bench ops", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--model", default=None, help="checkpoint folder, flash-8L or tiny (random weights)")
    p.add_argument("--rows", default="1,8,64")
    p.add_argument("--requests", default="1,16", help="requests of a drafting pass")
    p.add_argument("--context", type=int, default=1024, help="tokens that every request stands at")
    p.add_argument("--k", type=int, default=7, help="drafts per request; 0 for no drafter")
    p.add_argument("--max-num-seqs", type=int, default=256)
    p.add_argument("--repeats", type=int, default=9, help="the median of so many runs")
    p.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="an EngineConfig field")
    p.add_argument("--json", default=None, metavar="FILE", help="write the result here")
    return p


def run(args: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """The whole result of one command line."""
    rows, longest = integers("--rows", args.rows), args.context + args.k + 2
    settings: dict[str, Any] = {
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": max(*rows, args.max_num_seqs),
        "max_model_len": longest,
        "num_pages": -(-longest // 256) * args.max_num_seqs,
        "prefix_caching": False,
        "speculative": {"num_speculative_tokens": args.k} if args.k else None,
    } | engine_settings(args.set)
    llm = load(args.model, progress, **settings)
    progress("measuring the machine")
    rates = measure_rates(llm.engine.runner.device)
    requests = integers("--requests", args.requests)
    return {
        "bench": "ops",
        "model": Path(args.model).name if args.model else "bundled",
        "settings": settings | {"rows": rows, "context": args.context, "repeats": args.repeats},
        "notes": list(llm.notes),
        "rates": rates.to_json(),
        "steps": measure(llm, rows, args.context, requests, rates, args.repeats, progress),
        "environment": environment(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 2 on a user's error."""
    args = _parser().parse_args(argv)
    try:
        with Console(stderr=True).status("loading") as status:
            result = run(args, status.update)
    except user_errors() as err:
        print(f"ops: {err}", file=sys.stderr)
        return 2
    write_json(result, args.json)
    for table in tables(result):
        Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
