"""``python -m firesteel.bench.exact``: speculation changes no token.

Every case sends a batch of requests through an engine that drafts, and asks
for the answers (ids, log-probabilities, why they ended) of each request run
alone without speculation. ``FACTORS`` span the product of what must not
matter; it is sampled at random without repetition for as long as there is
time. A case is a function of its number and ``--seed`` alone.

    python -m firesteel.bench.exact --minutes 10 --json exact.json
    python -m firesteel.bench.exact --case 123456 --seed 0     # one case again

Exit code 1 if any answer differs.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from firesteel.bench.report import environment, write_json
from firesteel.bench.toys import KINDS, TARGETS, Erratic, Toys, script
from firesteel.config import SamplingParams
from firesteel.engine.llm import LLM
from firesteel.engine.output import Completion
from firesteel.ops import BackendError, build
from firesteel.ops.types import Numerics

FACTORS: dict[str, tuple[Any, ...]] = {
    "k": (1, 2, 3, 4, 5, 6, 7, 8),
    "batch": (1, 2, 3, 4, 5, 6, 7, 8, 9),
    "lengths": ("few", "window", "page"),  # a few tokens, around the window, around a page border
    "offset": (0, 1, 2, 3),  # where the first block starts, modulo the CSA ratio
    "temperature": (0.0, 0.6, 1.0),
    "shaping": ("plain", "top_p", "top_k", "min_p", "penalties", "bans"),
    "rows": (20, 64, 1024),  # of a step: how prompts are cut, and whether all drafts fit
    "prefix": (False, True),  # the batch shares a page that an earlier request left behind
    "memory": ("ample", "swap", "recompute"),  # the last two: too few pages, so requests are preempted
    "slots": ("one each", "half", "reversed"),  # half: slots change hands; reversed: last comes first
    "drafter": tuple(KINDS),
    "caps": ("all", "mixed"),  # mixed: some requests cap their drafts or want none
    "widths": ("fixed", "erratic"),  # erratic: random budgets, random drafters, random block widths
    "poison": (False, True),  # everything rejected becomes NaN after each step
    "numerics": ("float32", "official"),
}
SHAPING: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 9},
    "min_p": {"min_p": 0.08},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    "bans": {
        "logit_bias": {5: 3.0, 9: -100.0, 17: 2.5, 40: 1.0},
        "bad_word_ids": ((7,), (17, 5), (5, 17), (40, 5, 17)),
        "min_tokens": 3,
        "stop_token_ids": (17, 60),
    },
}
MODEL_LEN, PAGE, ANSWER = 640, 256, 14


def product_size() -> int:
    """Number of cases in the full product."""
    return math.prod(len(values) for values in FACTORS.values())


def choose(number: int) -> dict[str, Any]:
    """The factor values of case ``number`` of the product."""
    out: dict[str, Any] = {}
    for name, values in FACTORS.items():
        number, at = divmod(number, len(values))
        out[name] = values[at]
    assert number == 0, "beyond the product"
    return out


def number_of(values: Mapping[str, Any]) -> int:
    """The inverse of ``choose``."""
    number = 0
    for name in reversed(FACTORS):
        number = number * len(FACTORS[name]) + FACTORS[name].index(values[name])
    return number


@dataclass(frozen=True)
class Case:
    """One batch: factor values, its requests, and a prompt that runs before them (may be empty)."""

    values: Mapping[str, Any]
    prompts: tuple[tuple[int, ...], ...]
    params: tuple[SamplingParams, ...]
    warm: tuple[int, ...]

    def __str__(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.values.items())


def make_case(values: Mapping[str, Any], seed: int, vocab: int, answer: int = ANSWER) -> Case:
    """The requests of a case; a function of the factor values and ``seed``."""
    rng = random.Random(f"{seed}/{number_of(values)}")
    shared = tuple(random.Random(seed).randrange(3, vocab) for _ in range(PAGE)) if values["prefix"] else ()
    prompts, params = [], []
    for i in range(values["batch"]):
        n = _length(values, i, rng)
        prompts.append(shared + tuple(rng.randrange(3, vocab) for _ in range(n)))
        params.append(_params(values, i, rng, answer))
    warm = shared + tuple(rng.randrange(3, vocab) for _ in range(2)) if shared else ()
    return Case(values, tuple(prompts), tuple(params), warm)


def _length(values: Mapping[str, Any], i: int, rng: random.Random) -> int:
    """Own tokens of prompt ``i``: the first has the case's offset, the others any."""
    low = {"few": 1, "window": 12, "page": PAGE - 14}[values["lengths"]]
    if values["memory"] != "ample":  # answers must cross a page border to run short of pages
        low = PAGE - 14
    n = low + rng.randrange(16)
    return n - n % 4 + (values["offset"] or 4) if i == 0 else n


def _params(values: Mapping[str, Any], i: int, rng: random.Random, answer: int) -> SamplingParams:
    """The first request has the case's temperature and shaping; of the others one in three any."""
    heat, kind = values["temperature"], values["shaping"]
    if i and rng.random() < 1 / 3:
        heat, kind = rng.choice(FACTORS["temperature"]), rng.choice(FACTORS["shaping"])
    extra: dict[str, Any] = {}
    if values["caps"] == "mixed" and rng.random() < 0.5:
        extra = rng.choice([{"speculative": False}, {"max_draft_tokens": rng.randrange(values["k"] + 1)}])
    return SamplingParams(
        max_tokens=answer + rng.randrange(5),
        temperature=heat,
        seed=rng.randrange(2**64),
        logprobs=rng.choice([None, None, 0, 3]),
        priority=-i if values["slots"] == "reversed" else 0,
        **SHAPING[kind],
        **extra,
    )


@dataclass
class Outcome:
    """What a case showed: differing requests, and what happened on the way."""

    mismatches: list[dict[str, Any]] = field(default_factory=list)
    requests: int = 0
    tokens: int = 0
    preemptions: int = 0
    recomputes: int = 0
    hits: int = 0
    midblock: int = 0  # requests that were preempted and had drafts accepted
    verified: int = 0
    accepted: int = 0


class Prover:
    """Runs cases on one backend; keeps the engines without speculation and their answers."""

    def __init__(self, toys: Toys, backend: str, seed: int = 0):
        self.toys, self.backend, self.seed = toys, backend, seed
        self._plain: dict[tuple[str, str], LLM] = {}

    def alone(
        self, target: str, numerics: str, prompt: tuple[int, ...], params: SamplingParams
    ) -> Completion:
        """The answer of a request by itself, without speculation, cache or cuts."""
        key = (target, numerics)
        if key not in self._plain:
            self._plain[key] = LLM(
                self.toys.folder(TARGETS[target]),
                numerics=numerics,
                backend=self.backend,
                max_model_len=MODEL_LEN,
                max_num_seqs=1,
                max_num_batched_tokens=MODEL_LEN,
                prefix_caching=False,
            )
        return self._plain[key].generate([list(prompt)], params)[0]

    def engine(self, values: Mapping[str, Any], case: Case) -> LLM:
        """The engine under test, as the factors want it."""
        slots = max(1, values["batch"] // 2) if values["slots"] == "half" else values["batch"]
        pages = None
        if values["memory"] != "ample":
            most = max(len(p) + q.max_tokens for p, q in zip(case.prompts, case.params, strict=True))
            need = -(-most // PAGE)
            pages = max(need, (need - 1) * min(slots, values["rows"])) + (3 if values["prefix"] else 0)
        llm = LLM(
            self.toys.folder(values["drafter"]),
            numerics=values["numerics"],
            backend=self.backend,
            max_model_len=MODEL_LEN,
            max_num_seqs=slots,
            max_num_batched_tokens=values["rows"],
            num_pages=pages,
            prefix_caching=values["prefix"],
            swap_gib=0.0 if values["memory"] == "recompute" else 4.0,
            debug_sync=True,
            debug_poison=values["poison"],
            speculative={"num_speculative_tokens": values["k"]},
        )
        if values["widths"] == "erratic":
            llm.engine.scheduler.policy = Erratic(values["k"], self.seed)
        return llm

    def run(self, values: Mapping[str, Any], answer: int = ANSWER) -> Outcome:
        """One case; every difference is a line in ``mismatches``."""
        case = make_case(values, self.seed, self.toys.vocab, answer)
        target = KINDS[values["drafter"]].target
        want = [
            self.alone(target, values["numerics"], p, q)
            for p, q in zip(case.prompts, case.params, strict=True)
        ]
        llm = self.engine(values, case)
        if KINDS[values["drafter"]].scripted:
            script(llm, case.prompts, case.params, want, KINDS[values["drafter"]].wrong)
        if case.warm:
            llm.generate([list(case.warm)], SamplingParams(max_tokens=2, temperature=0.0, seed=0))
        got = llm.generate([list(p) for p in case.prompts], list(case.params))
        llm.engine.scheduler.check()
        return self._compare(values, case, want, got, llm)

    def failure(self, values: Mapping[str, Any], err: Exception) -> dict[str, Any]:
        """A case that raised, in the form of a mismatch."""
        return {
            "case": number_of(values),
            "seed": self.seed,
            "factors": dict(values),
            "request": None,
            "differs": [f"raised {err!r}"],
        }

    def _compare(
        self,
        values: Mapping[str, Any],
        case: Case,
        want: Sequence[Completion],
        got: Sequence[Completion],
        llm: LLM,
    ) -> Outcome:
        stats = llm.engine.stats()
        out = Outcome(preemptions=stats["preemptions"], recomputes=stats["recomputes"])
        out.hits = stats["prefix"].get("hits", 0)
        for i, (a, b) in enumerate(zip(want, got, strict=True)):
            out.requests += 1
            out.tokens += len(b.token_ids)
            out.verified += b.stats["verified"]
            out.accepted += b.stats["accepted"]
            out.midblock += bool(b.stats["preemptions"] and b.stats["accepted"])
            differs = [name for name in SAME if getattr(a, name) != getattr(b, name)]
            if differs:
                out.mismatches.append(
                    {
                        "case": number_of(values),
                        "seed": self.seed,
                        "factors": dict(values),
                        "request": i,
                        "prompt_tokens": len(case.prompts[i]),
                        "differs": differs,
                        "want": list(a.token_ids),
                        "got": list(b.token_ids),
                    }
                )
        return out


SAME = ("token_ids", "finish_reason", "stop_reason", "logprobs", "text", "error")


def fastest() -> str:
    """ "native" where it runs, else "reference"."""
    try:
        build("native", Numerics(official=False))
    except BackendError:
        return "reference"
    return "native"


def numbers(seed: int) -> Iterator[int]:
    """Case numbers in random order without repetition, as many as the product has."""
    rng, size, seen = random.Random(seed), product_size(), set[int]()
    while len(seen) < size:
        number = rng.randrange(size)
        if number not in seen:
            seen.add(number)
            yield number


def sweep(prover: Prover, minutes: float, console: Console) -> dict[str, Any]:
    """Cases until the time is over: counts and every mismatch."""
    ends, total, cases = time.monotonic() + 60 * minutes, Counter[str](), 0
    mismatches: list[dict[str, Any]] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting")
        for number in numbers(prover.seed):
            try:
                outcome = prover.run(choose(number))
            except KeyboardInterrupt:  # what has been run still counts
                break
            except Exception as err:  # a case that raises is a failed case; the others go on
                outcome = Outcome([prover.failure(choose(number), err)])
            cases += 1
            mismatches += outcome.mismatches
            total.update({k: v for k, v in asdict(outcome).items() if isinstance(v, int)})
            progress.update(
                task,
                description=f"{cases} cases, {total['tokens']} tokens, {total['preemptions']} preemptions, "
                f"{len(mismatches)} mismatches",
            )
            if time.monotonic() > ends:
                break
    return {"cases": cases, **total, "mismatches": mismatches}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 1 on a mismatch."""
    parser = argparse.ArgumentParser(
        prog="python -m firesteel.bench.exact", description="Speculation is exact."
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="time to spend (default 5)")
    parser.add_argument("--seed", type=int, default=None, help="of prompts and order (default: drawn)")
    parser.add_argument("--backend", default=None, help="ops backend (default: the fastest that runs here)")
    parser.add_argument("--case", type=int, default=None, help="run this case of the product alone")
    parser.add_argument("--json", default=None, metavar="PATH", help="write the result there")
    args = parser.parse_args(argv)
    console = Console(stderr=True)
    torch.set_num_threads(1)
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(2**31)
    with tempfile.TemporaryDirectory() as folder:
        prover = Prover(Toys(Path(folder)), args.backend or fastest(), seed)
        if args.case is not None:
            outcome = prover.run(choose(args.case))
            found = {"cases": 1, **asdict(outcome)}
        else:
            found = sweep(prover, args.minutes, console)
    result = {
        "bench": "exact",
        "seed": seed,
        "backend": prover.backend,
        "product": product_size(),
        **found,
        "environment": environment(),
    }
    write_json(result, args.json)
    report(result, Console())
    return 1 if result["mismatches"] else 0


def report(result: Mapping[str, Any], console: Console) -> None:
    """The result in words; every mismatch with the command that repeats it."""
    console.print(
        f"{result['cases']} of {result['product']} cases (seed {result['seed']}, {result['backend']} ops): "
        f"{result['requests']} requests, {result['tokens']} tokens, {result['accepted']} of "
        f"{result['verified']} drafts accepted, {result['preemptions']} preemptions "
        f"({result['recomputes']} recomputed), {result['hits']} prefix hits",
        highlight=False,
    )
    for miss in result["mismatches"][:20]:
        console.print(
            f"[red]differs[/red] ({', '.join(miss['differs'])}): request {miss['request']} of --case "
            f"{miss['case']} --seed {miss['seed']}: {miss['factors']}",
            highlight=False,
        )
    verdict = "[red]NOT EXACT[/red]" if result["mismatches"] else "[green]every answer equal[/green]"
    env = result["environment"]
    console.print(f"{verdict}  ({env['cpu']}, commit {env['commit']}, {env['date']})", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
