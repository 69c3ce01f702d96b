"""``python -m firesteel.bench.host``: what the host costs per step, and what prefix reuse saves.

Host time is planning plus committing (``StepRecord.host_ms``), at several
numbers of requests that decode together. The model is a tiny random one, so
the share of the step is an upper bound: a real model's steps are longer, the
host's work is the same. Adaptive verification is set against no speculation and a fixed width on
the engine without a model (``bench.hollow``), drawn acceptance and a virtual
clock, in turns of the same run. The last table runs 16 requests that share prefixes,
with the prefix cache and without it, and compares the texts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from firesteel.bench.report import environment, write_json
from firesteel.bench.virtual import SCENES, jobs, simulated_bed, tables
from firesteel.config import SamplingParams
from firesteel.engine.llm import LLM
from firesteel.engine.output import Completion
from firesteel.models.deepseek_v4.random_init import tiny_config, write_random
from firesteel.speculation.cost import CostModel
from firesteel.speculation.policy import FixedWidth, Policy

REQUESTS = (1, 8, 64)
PROMPT = 12  # tokens of each prompt when decoding is measured
ROWS = 512  # rows of a step at least
WIDTH = 7  # drafts per request of the fixed arm
SETTLE = 60  # steps at first, which are told apart: adaptive verification learns more often then
POLICIES = ("none", "fixed", "adaptive")
STEMS, USERS = 4, 4  # the mix: system prompts, requests of each


def random_tokens(rng: random.Random, vocab: int, count: int) -> list[int]:
    """Token ids that are no special ones."""
    return [rng.randrange(3, vocab) for _ in range(count)]


def host_cost(model: Path, requests: int, steps: int, backend: str) -> dict[str, Any]:
    """Host time of steps in which all ``requests`` decode."""
    rows, new = max(ROWS, requests), steps + requests * PROMPT // ROWS + 8
    llm = LLM(
        model,
        max_num_seqs=requests,
        max_num_batched_tokens=rows,
        max_model_len=PROMPT + new,
        backend=backend,
    )
    rng = random.Random(requests)
    params = SamplingParams(max_tokens=new, temperature=1.0, seed=1, ignore_eos=True)
    answers = []
    for _ in range(requests):
        answers += llm.frontend.add(random_tokens(rng, llm.config.vocab_size, PROMPT), params)
    while any(not a.ids for a in answers):
        llm.frontend.step()
    first = len(llm.engine.records)
    turns: list[float] = []
    while len(turns) < steps and not any(a.finish for a in answers):
        begun = time.perf_counter()
        llm.frontend.step()
        turns.append((time.perf_counter() - begun) * 1e3)
    host = [r.host_ms for r in list(llm.engine.records)[first:] if r.decodes == requests]
    return {
        "requests": requests,
        "steps": len(host),
        "host_ms_median": statistics.median(host),
        "host_ms_p95": statistics.quantiles(host, n=20)[-1],
        "step_ms_median": statistics.median(turns),
        "share": statistics.median(host) / statistics.median(turns),
    }


def policy_cost(requests: int, steps: int, table: str) -> dict[str, Any]:
    """Host time (CPU time of its thread) of no speculation, a fixed width and adaptive verification, in turns.

    All have the same requests; the table of prices decides whether drafting pays, so both kinds of
    decision are seen. The plain engine knows no drafts at all, as one without a drafter. ``start``:
    the first steps, in which adaptive verification learns more often.
    """
    prices = tables(WIDTH)[table]
    length = 8 * (steps + SETTLE) + 64
    beds = {name: simulated_bed(SCENES["measured"], WIDTH, requests, length) for name in POLICIES}
    policies: dict[str, Policy] = {
        "none": FixedWidth(0),
        "fixed": FixedWidth(WIDTH),
        "adaptive": beds["adaptive"].adaptive(prices),
    }
    for name, bed in beds.items():
        engine = bed.engine
        engine.scheduler.policy, engine.runner.virtual = policies[name], CostModel(prices)
        engine.runner.timer = time.thread_time
        engine.scheduler.gamma = WIDTH if name != "none" else 0
        for prompt, params in jobs(requests, length - 32):
            engine.add(prompt, params, params.seed or 0)
        for _ in range(2 + requests * 20 // ROWS):  # the prompts
            engine.step()
        engine.records.clear()
    for _ in range(SETTLE + steps):
        for bed in beds.values():
            bed.engine.step()
    out: dict[str, Any] = {"requests": requests, "prices": table, "steps": steps}
    for name, bed in beds.items():
        host = [r.host_ms for r in bed.engine.records if r.decodes == requests]
        out[f"{name}_ms_start"] = statistics.fmean(host[:SETTLE])
        out[f"{name}_ms_median"] = statistics.median(host[SETTLE:])
        out[f"{name}_ms_mean"] = statistics.fmean(host[SETTLE:])
    out["over_none_ms"] = out["adaptive_ms_mean"] - out["none_ms_mean"]
    return out


def mix(vocab: int, stem: int) -> list[list[int]]:
    """16 prompts: four system prompts of ``stem`` tokens, four requests of each, shuffled."""
    rng = random.Random(0)
    stems = [random_tokens(rng, vocab, stem) for _ in range(STEMS)]
    prompts = [
        [*head, *random_tokens(rng, vocab, rng.randint(5, 60))] for head in stems for _ in range(USERS)
    ]
    rng.shuffle(prompts)
    return prompts


def reuse(model: Path, stem: int, new: int, backend: str) -> dict[str, Any]:
    """The mix without the cache, with an empty one, and once more with what that left."""
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    runs: dict[str, tuple[float, int, list[Completion]]] = {}
    for caching in (False, True):
        llm = LLM(
            model,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_model_len=stem + 64 + new,
            prefix_caching=caching,
            backend=backend,
        )
        prompts = mix(llm.config.vocab_size, stem)
        for name in ("empty cache", "again") if caching else ("no reuse",):
            before, begun = sum(r.prompt_rows for r in llm.engine.records), time.perf_counter()
            done = llm.generate(prompts, params)
            seconds = time.perf_counter() - begun
            runs[name] = seconds, sum(r.prompt_rows for r in llm.engine.records) - before, done
    base_s, base_rows, base = runs["no reuse"]
    rows = [
        {
            "run": name,
            "seconds": seconds,
            "prompt_rows": computed,
            "rows_saved": 1 - computed / base_rows,
            "speedup": base_s / seconds,
            "cached_tokens": sum(c.usage["cached_tokens"] for c in done),
            "same_texts": [c.token_ids for c in done] == [c.token_ids for c in base],
        }
        for name, (seconds, computed, done) in runs.items()
    ]
    return {"requests": len(base), "stem": stem, "new_tokens": new, "runs": rows}


def show(result: dict[str, Any], console: Console) -> None:
    """Both tables."""
    table = Table(title=f"host time per step (plan + commit), {result['backend']}")
    for column in ("requests", "host ms", "p95 ms", "step ms", "share of the step"):
        table.add_column(column, justify="right")
    for r in result["host"]:
        table.add_row(
            str(r["requests"]),
            f"{r['host_ms_median']:.2f}",
            f"{r['host_ms_p95']:.2f}",
            f"{r['step_ms_median']:.1f}",
            f"{r['share']:.1%}",
        )
    console.print(table)
    table = Table(
        title=f"host ms per step, no model: none, fixed width {WIDTH}, adaptive (start: {SETTLE} steps)"
    )
    for column in (
        "requests",
        "prices",
        *(f"{p} {f}" for p in POLICIES for f in ("start", "mean", "median")),
    ):
        table.add_column(column, justify="right")
    table.add_column("adaptive - none, mean", justify="right")
    for r in result["adaptive"]:
        figures = [f"{p}_ms_{f}" for p in POLICIES for f in ("start", "mean", "median")]
        table.add_row(str(r["requests"]), r["prices"], *(f"{r[f]:.3f}" for f in (*figures, "over_none_ms")))
    console.print(table)
    m = result["reuse"]
    table = Table(title=f"{m['requests']} requests, {STEMS} shared prefixes of {m['stem']} tokens")
    for column in ("run", "prompt rows", "saved", "seconds", "speed", "same texts"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for r in m["runs"]:
        table.add_row(
            r["run"],
            str(r["prompt_rows"]),
            f"{r['rows_saved']:.0%}",
            f"{r['seconds']:.2f}",
            f"{r['speedup']:.2f}x",
            "yes" if r["same_texts"] else "NO",
        )
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit status is 1 if reuse changed a text."""
    p = argparse.ArgumentParser(description="host time per step, and prefix reuse")
    p.add_argument(
        "--model", type=Path, default=None, help="checkpoint folder (default: a tiny random model)"
    )
    p.add_argument("--requests", type=int, nargs="+", default=list(REQUESTS), help="numbers of requests")
    p.add_argument("--steps", type=int, default=120, help="steps measured for each number")
    p.add_argument("--stem", type=int, default=700, help="tokens of each shared prefix")
    p.add_argument("--tokens", type=int, default=16, help="tokens per request of the mix")
    p.add_argument("--backend", default="auto")
    p.add_argument("--json", default=None, help="write the result here")
    args = p.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temp:
        model = args.model
        if model is None:
            model = write_random(Path(temp) / "tiny", tiny_config(), 0)
        host = [host_cost(model, n, args.steps, args.backend) for n in args.requests]
        policy = [policy_cost(n, args.steps, t) for n in args.requests for t in ("staircase", "linear")]
        saved = reuse(model, args.stem, args.tokens, args.backend)
        backend = LLM(model, backend=args.backend, max_model_len=512).notes[0]
    result = {
        "environment": environment(),
        "backend": backend,
        "host": host,
        "adaptive": policy,
        "reuse": saved,
    }
    show(result, Console())
    write_json(result, args.json)
    return 0 if all(r["same_texts"] for r in saved["runs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
