"""``firesteel bench speed``: what speculation gives one request on this machine.

Greedy arithmetic, one request at a time, arms interleaved over rounds in one process: no speculation, every
width K, adaptive; all must write the same text. Two more arms run plain torch with no speculation, one with
rows that are invariant and one with ordinary products, whose row bits may depend on their neighbours: their
ratio is the price of invariance in plain torch.

    firesteel bench speed --json bench/results/speed.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from firesteel.bench.report import environment, write_json
from firesteel.config import SamplingParams
from firesteel.engine.llm import LLM
from firesteel.errors import user_errors
from firesteel.eval.gsm import PROBLEMS, read_problems
from firesteel.ops.reference import linear

FREE, PLAIN, NONE = "torch, free rows", "torch, invariant rows", "none"


@contextmanager
def free_rows() -> Iterator[None]:
    """Products of the plain torch backend in one call for all rows, as most engines do them."""

    def product(x: Tensor, w: Tensor) -> Tensor:
        return functional.linear(x, w)

    kept, linear.matmul_rows = linear.matmul_rows, product
    try:
        yield
    finally:
        linear.matmul_rows = kept


def speculation(arm: str) -> dict[str, Any] | None:
    """The engine's setting for an arm."""
    if arm.startswith("K="):
        return {"num_speculative_tokens": int(arm[2:])}
    if arm == "adaptive":
        return {"num_speculative_tokens": 7, "enable_adaptive_verification": True}
    return None


def answer_all(llm: LLM, prompts: Sequence[str], tokens: int) -> tuple[float, int, list[tuple[int, ...]]]:
    """Seconds, tokens and the answers, one request after the other."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    begun, answers = time.perf_counter(), []
    for prompt in prompts:
        answers.append(llm.generate([prompt], params)[0].token_ids)
    return time.perf_counter() - begun, sum(map(len, answers)), answers


def measure(
    model: str | None,
    widths: Sequence[int],
    problems: int,
    rounds: int,
    tokens: int,
    progress: Callable[[], None],
) -> dict[str, Any]:
    """All arms; ratios are medians over rounds of the same problems."""
    arms = [NONE, *(f"K={k}" for k in widths), "adaptive", PLAIN, FREE]
    built = {
        a: LLM(
            model,
            speculative=speculation(a),
            max_num_seqs=1,
            prefix_caching=False,
            backend="reference" if a in (PLAIN, FREE) else "auto",
        )
        for a in arms
    }
    asked = read_problems(PROBLEMS, problems)
    prompts = [built[NONE].prompt_of([{"role": "user", "content": p.question}]) for p in asked]
    rates: dict[str, list[float]] = {a: [] for a in arms}
    steps: dict[str, list[float]] = {a: [] for a in arms}
    texts: dict[str, list[tuple[int, ...]]] = {}
    for turn in range(rounds + 1):  # the first one warms up
        for i in range(len(arms)):
            arm = arms[(i + turn) % len(arms)]
            llm, few = built[arm], prompts[: 1 if turn == 0 else None]
            if arm in (PLAIN, FREE):
                few = few[: max(1, problems // 6)]  # slow, and only compared with each other
            before = len(llm.engine.records)
            if arm == FREE:
                with free_rows():
                    seconds, count, found = answer_all(llm, few, tokens)
            else:
                seconds, count, found = answer_all(llm, few, tokens)
            progress()
            if turn:
                rates[arm].append(count / seconds)
                made = [r for r in list(llm.engine.records)[before:] if r.rows <= 8]
                steps[arm].append(count / max(1, len(made)))
                texts.setdefault(arm, found)
    base, plain = rates[NONE], rates[PLAIN]
    return {
        "bench": "speed",
        "environment": environment(),
        "problems": problems,
        "rounds": rounds,
        "max_tokens": tokens,
        "arms": [
            {
                "arm": a,
                "tokens_per_second": statistics.median(rates[a]),
                "ratio": statistics.median(
                    x / y for x, y in zip(rates[a], plain if a in (PLAIN, FREE) else base, strict=True)
                ),
                "ratio_to": PLAIN if a in (PLAIN, FREE) else NONE,
                "tokens_per_step": statistics.median(steps[a]),
                "same_text": all(x == y for x, y in zip(texts[a], texts[NONE], strict=False)),
            }
            for a in arms
        ],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    args = argparse.ArgumentParser(
        prog="firesteel bench speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    args.add_argument(
        "--model", default=None, help="checkpoint folder with a drafter; default: the bundled one"
    )
    args.add_argument("--k", default="1,3,5,7", help="numbers of drafts")
    args.add_argument("--problems", type=int, default=12)
    args.add_argument("--rounds", type=int, default=5)
    args.add_argument("--max-tokens", type=int, default=200)
    args.add_argument("--json", default=None, metavar="FILE")
    opt = args.parse_args(argv)
    widths = [int(k) for k in opt.k.split(",")]
    try:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("speed", total=(opt.rounds + 1) * (len(widths) + 4))
            result = measure(
                opt.model, widths, opt.problems, opt.rounds, opt.max_tokens, lambda: bar.advance(task)
            )
    except user_errors() as err:
        print(f"speed: {err}", file=sys.stderr)
        return 2
    table = Table("arm", "tokens/s", "ratio", "to", "tokens per step", "same text")
    for a in result["arms"]:
        table.add_row(
            a["arm"],
            f"{a['tokens_per_second']:.1f}",
            f"{a['ratio']:.2f}",
            a["ratio_to"],
            f"{a['tokens_per_step']:.2f}",
            "yes" if a["same_text"] else "no",
        )
    Console().print(table)
    write_json(result, opt.json)
    wrong = [a["arm"] for a in result["arms"] if not a["same_text"] and a["arm"] not in (PLAIN, FREE)]
    if wrong:
        print(f"speed: {', '.join(wrong)} wrote other text than no speculation", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
