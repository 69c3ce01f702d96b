"""``python -m firesteel.bench.acceptance``: how many tokens a verify step brings.

By domain (arithmetic, code, prose), temperature and acceptance rule, for every
number of drafts K: mean tokens per step, and how often a draft was accepted
given that all before it were, by position. Runs on any checkpoint with a
drafter; without a tokenizer the prompts' bytes serve as token ids.

    python -m firesteel.bench.acceptance
    python -m firesteel.bench.acceptance --model PATH --k 1,3,5 --json acceptance.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from firesteel.bench.report import environment, write_json
from firesteel.config import ParameterError, SamplingParams
from firesteel.core import StepPlan
from firesteel.engine.llm import LLM
from firesteel.engine.runner import StepResult
from firesteel.errors import user_errors
from firesteel.eval.gsm import PROBLEMS, read_problems

RULES: dict[str, dict[str, str]] = {
    "coupled": {},
    "rejection-dense": {"acceptance": "rejection", "proposal": "dense"},
    "rejection-one-hot": {"acceptance": "rejection", "proposal": "one_hot"},
}
TEMPERATURES = (0.0, 0.6, 1.0)
DOMAINS = ("arithmetic", "code", "prose")
CODE = (
    "def mean(values):\n    ",
    "def is_prime(n):\n    ",
    "class Stack:\n    def __init__(self):\n        ",
    "import json\n\ndef load(path):\n    with open(path) as file:\n        ",
    "for i in range(10):\n    if i % 2 == 0:\n        ",
    "def fibonacci(n):\n    a, b = 0, 1\n    ",
    "SELECT name, count(*) FROM orders ",
    "try:\n    value = int(text)\nexcept ValueError:\n    ",
)
PROSE = (
    "The first rule of good writing is",
    "It was late in the evening when the train",
    "Once upon a time there was a small village",
    "The history of the steam engine begins",
    "In the morning the market was full of",
    "My grandmother used to say that",
    "The river rises in the mountains and",
    "Most people think that bees",
)


@dataclass
class Tally:
    """What the steps of one cell decided."""

    steps: int = 0
    tokens: int = 0
    reached: list[int] = field(default_factory=list)  # drafts judged, by position
    accepted: list[int] = field(default_factory=list)

    def take(self, tokens: int, verified: int, accepted: int) -> None:
        """One request's step; drafts behind the last token it emitted were not judged."""
        self.steps += 1
        self.tokens += tokens
        for depth in range(min(verified, tokens)):
            if depth == len(self.reached):
                self.reached.append(0)
                self.accepted.append(0)
            self.reached[depth] += 1
            self.accepted[depth] += depth < accepted

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a step that verified drafts."""
        return self.tokens / max(self.steps, 1)

    @property
    def conditional(self) -> list[float]:
        """P(accepted | verified and all before it accepted), by position."""
        return [a / r for a, r in zip(self.accepted, self.reached, strict=True)]


def watch(llm: LLM) -> list[Tally]:
    """A list whose last tally hears every verify step of ``llm`` from now on."""
    tallies = [Tally()]
    commit = llm.engine.scheduler.commit

    def heard(plan: StepPlan, result: StepResult) -> None:
        for group in result.groups:
            if group.verified and group.tokens:
                tallies[-1].take(len(group.tokens), group.verified, group.accepted)
        commit(plan, result)

    llm.engine.scheduler.commit = heard  # type: ignore[method-assign]
    return tallies


def prompts(llm: LLM, domain: str, count: int) -> list[list[int]]:
    """Token ids of a domain's first ``count`` prompts."""
    if domain == "arithmetic":
        texts = [p.question for p in read_problems(PROBLEMS, count)]
    else:
        texts = list((CODE if domain == "code" else PROSE)[:count])
    if llm.tokenizer is None:
        low, vocab = 3, llm.config.vocab_size
        return [[low + b % (vocab - low) for b in text.encode()] for text in texts]
    if domain == "arithmetic":
        chats = [llm.prompt_of([{"role": "user", "content": text}]) for text in texts]
        return [llm.tokenizer.encode(chat) for chat in chats]
    return [[llm.config.bos_token_id, *llm.tokenizer.encode(text)] for text in texts]


def measure(
    model: str | None, rule: str, k: int, count: int, max_tokens: int, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """Every domain and temperature of one engine."""
    llm = LLM(model, speculative={"num_speculative_tokens": k, **RULES[rule]}, **settings)
    tallies, out = watch(llm), []
    for domain in DOMAINS:
        asked = prompts(llm, domain, count)
        for heat in TEMPERATURES:
            tallies.append(Tally())
            params = [
                SamplingParams(max_tokens=max_tokens, temperature=heat, seed=1000 + i)
                for i in range(len(asked))
            ]
            done = llm.generate(asked, params)
            tally = tallies[-1]
            assert sum(a.stats["accepted"] for a in done) == sum(tally.accepted), "a step was not heard"
            out.append(
                {
                    "domain": domain,
                    "temperature": heat,
                    "rule": rule,
                    "k": k,
                    "tokens_per_step": tally.tokens_per_step,
                    "conditional": tally.conditional,
                    "judged": tally.reached,
                    "steps": tally.steps,
                    "tokens": sum(len(a.token_ids) for a in done),
                }
            )
    return out


def table(cells: Sequence[dict[str, Any]], domain: str, heat: float) -> Table:
    """K by rule: tokens per step, then the conditional acceptance in percent."""
    out = Table(
        title=f"{domain}, T = {heat:g}: tokens per step | % accepted by position", title_justify="left"
    )
    out.add_column("K", justify="right")
    rules = [r for r in RULES if any(c["rule"] == r for c in cells)]
    for rule in rules:
        out.add_column(rule, no_wrap=True)
    here = {(c["k"], c["rule"]): c for c in cells if c["domain"] == domain and c["temperature"] == heat}
    for k in sorted({k for k, _ in here}):
        found = [here[k, rule] for rule in rules]
        shares = [" ".join(f"{100 * c:.0f}" for c in cell["conditional"]) for cell in found]
        out.add_row(
            str(k), *(f"{c['tokens_per_step']:.2f} | {s}" for c, s in zip(found, shares, strict=True))
        )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 2 on a user's error."""
    parser = argparse.ArgumentParser(prog="python -m firesteel.bench.acceptance", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", default=None, help="checkpoint folder (default: the bundled model)")
    parser.add_argument("--k", default="1,2,3,4,5,6,7", help="numbers of drafts (default 1 to 7)")
    parser.add_argument("--rules", default=",".join(RULES), help=f"of {', '.join(RULES)} (default all)")
    parser.add_argument("--prompts", type=int, default=8, help="per domain, 8 at most for code and prose")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of an answer at most")
    parser.add_argument("--max-model-len", type=int, default=None, help="tokens of one request in all")
    parser.add_argument("--numerics", default="official", choices=("official", "float32"))
    parser.add_argument("--backend", default="auto", help="ops backend")
    parser.add_argument("--json", default=None, metavar="PATH", help="write the result there")
    args = parser.parse_args(argv)
    settings = {"numerics": args.numerics, "backend": args.backend, "max_model_len": args.max_model_len}
    try:
        ks, rules = _numbers(args.k), _rules(args.rules)
        cells: list[dict[str, Any]] = []
        with Progress(console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("acceptance", total=len(ks) * len(rules))
            for rule in rules:
                for k in ks:
                    progress.update(task, description=f"{rule}, K = {k}")
                    cells += measure(args.model, rule, k, args.prompts, args.max_tokens, settings)
                    progress.advance(task)
    except user_errors() as err:
        print(f"acceptance: {err}", file=sys.stderr)
        return 2
    env = environment()
    write_json(
        {
            "bench": "acceptance",
            "model": Path(args.model).name if args.model else "bundled",
            "numerics": args.numerics,
            "prompts": args.prompts,
            "max_tokens": args.max_tokens,
            "cells": cells,
            "environment": env,
        },
        args.json,
    )
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 110)
    for domain in DOMAINS:
        for heat in TEMPERATURES:
            console.print(table(cells, domain, heat))
    console.print(f"{env['cpu']}, commit {env['commit']}, {env['date']}", highlight=False)
    return 0


def _numbers(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError as err:
        raise ParameterError(f"--k={text!r}: expected numbers, e.g. 1,3,5") from err


def _rules(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    unknown = [part for part in parts if part not in RULES]
    if unknown:
        raise ParameterError(f"--rules: unknown rule {unknown[0]!r}; known: {', '.join(RULES)}")
    return parts


if __name__ == "__main__":
    sys.exit(main())
