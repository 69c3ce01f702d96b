"""``python -m firesteel.bench.structured``: JSON schemas, thinking budgets and speculation together.

Bounded schemas (enums, lengths, integer ranges) with thinking on and a budget
for it, K drafts per step. Every answer is checked by a reader of its own, not
by the grammar's library: the reasoning keeps its budget, the rest is JSON of
the schema. The same requests then run without speculation: the token ids must
be the same.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from firesteel.bench.report import environment, write_json
from firesteel.bench.toys import script
from firesteel.config import ParameterError, SamplingParams
from firesteel.engine.llm import LLM
from firesteel.engine.output import Completion
from firesteel.models.deepseek_v4 import chat_strings
from firesteel.models.deepseek_v4.random_init import tiny_config, write_random
from firesteel.tokenizer import byte_tokenizer

ROOM = 320  # tokens that any answer of ``random_schema`` fits in, its reasoning aside
WORDS = ("red", "green", "blue", "north", "west", "München", "a/b", 'say "hi"', "x", "xy")


# ---- requests ------------------------------------------------------------------------
def random_schema(rng: random.Random) -> dict[str, Any]:
    """An object of a few bounded properties; the last one may be left out."""
    leaves: dict[str, Any] = {f"k{i}": random_leaf(rng) for i in range(rng.randint(1, 3))}
    leaves["list"] = {"type": "array", "items": random_leaf(rng), "minItems": 1, "maxItems": 2}
    required = list(leaves)[: len(leaves) - rng.randint(0, 1)]
    return {"type": "object", "properties": leaves, "required": required, "additionalProperties": False}


def random_leaf(rng: random.Random) -> dict[str, Any]:
    """An enum, a short text, an integer in a range or a truth value."""
    kind = rng.randrange(4)
    if kind == 0:
        return {"enum": rng.sample(WORDS, 3)}
    if kind == 1:
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
    low = rng.randint(-200, 200)
    return (
        {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 900)}
        if kind == 2
        else {"type": "boolean"}
    )


def requests_of(
    llm: LLM, count: int, seed: int, budget: int
) -> tuple[list[list[int]], list[SamplingParams], list[dict[str, Any]]]:
    """(prompts as token ids, parameters, schemas): chats that think, each with its own seed."""
    rng = random.Random(seed)
    assert llm.tokenizer is not None, "checked by the caller"
    prompts, params, schemas = [], [], []
    for i in range(count):
        schema = random_schema(rng)
        messages = [{"role": "user", "content": f"Fill in form {rng.randrange(10**6)}."}]
        prompts.append(llm.tokenizer.encode(llm.prompt_of(messages, True, "low")))
        params.append(
            SamplingParams(
                max_tokens=budget + 1 + ROOM,
                temperature=rng.choice((0.0, 0.7, 1.0)),
                seed=1000 * seed + i,
                structured_outputs={"json": schema, "disable_any_whitespace": True},  # type: ignore[arg-type]
                thinking_token_budget=budget,
            )
        )
        schemas.append(schema)
    return prompts, params, schemas


# ---- checks --------------------------------------------------------------------------
def fault(value: Any, schema: Mapping[str, Any]) -> str:
    """Why a JSON value is not of a schema made here; empty if it is."""
    if "enum" in schema:
        return "" if value in schema["enum"] else f"{value!r} is no choice"
    kind = schema["type"]
    names = {"object": "dict", "array": "list", "string": "str", "integer": "int", "boolean": "bool"}
    if type(value).__name__ != names[kind]:
        return f"{value!r} is no {kind}"
    size = value if kind == "integer" else len(value) if kind in ("string", "array") else 0
    bounds = {"integer": ("minimum", "maximum"), "string": ("minLength", "maxLength")}
    low, high = bounds.get(kind, ("minItems", "maxItems"))
    if not schema.get(low, size) <= size <= schema.get(high, size):
        return f"{value!r} is out of bounds"
    if kind == "array":
        return next(filter(None, (fault(v, schema["items"]) for v in value)), "")
    if kind == "object":
        wrong = set(value) - set(schema["properties"]) or set(schema["required"]) - set(value)
        parts = (fault(v, schema["properties"][k]) for k, v in value.items() if k in schema["properties"])
        return f"wrong keys {sorted(wrong)}" if wrong else next(filter(None, parts), "")
    return ""


def answer_fault(done: Completion, schema: Mapping[str, Any], close: int, budget: int) -> str:
    """Why an answer is not [reasoning within the budget, its end, JSON of the schema]; empty if it is."""
    if done.finish_reason != "stop":
        return f"ended by {done.finish_reason} {done.error}"
    if close not in done.token_ids:
        return "the reasoning has no end"
    if done.token_ids.index(close) > budget:
        return f"{done.token_ids.index(close)} tokens of reasoning"
    try:
        value = json.loads(done.text.partition(chat_strings.END_THINK)[2])
    except ValueError as err:
        return f"not JSON ({err})"
    return fault(value, schema)


# ---- the program ---------------------------------------------------------------------
def run(
    model: Path | None, count: int, budget: int, k: int, seed: int, wrong: float, backend: str
) -> dict[str, Any]:
    """All requests without speculation, with the model's drafter at fixed and adaptive widths, and with
    drafts that know the answers."""
    settings: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "backend": backend}
    plain = LLM(model, max_model_len=1024, **settings)
    if plain.tokenizer is None or not plain.tokenizer.has(chat_strings.END_THINK):
        raise SystemExit("structured: the checkpoint needs a tokenizer.json with think tags")
    close = plain.tokenizer.id_of(chat_strings.END_THINK)
    prompts, params, schemas = requests_of(plain, count, seed, budget)
    rows: list[dict[str, Any]] = []
    reference: list[Completion] = []
    for arm in ("no speculation", f"drafter, K={k}", f"drafter, adaptive, K={k}", f"told drafts, K={k}"):
        llm = plain
        spec = {"num_speculative_tokens": k, "enable_adaptive_verification": "adaptive" in arm}
        if reference:
            try:
                llm = LLM(model, max_model_len=1024, speculative=spec, **settings)
            except ParameterError as err:
                rows.append({"arm": arm, "skipped": str(err).replace(str(plain.path), "this checkpoint")})
                continue
        if arm.startswith("told"):
            script(llm, prompts, params, reference, wrong)
        start = time.perf_counter()
        done = llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        reference = reference or done
        faults = [answer_fault(d, s, close, budget) for d, s in zip(done, schemas, strict=True)]
        rows.append(
            {
                "arm": arm,
                "requests": count,
                "valid": faults.count(""),
                "identical": sum(a.token_ids == b.token_ids for a, b in zip(done, reference, strict=True)),
                "tokens": sum(len(d.token_ids) for d in done),
                "steps": len(llm.engine.records),
                "verified": sum(d.stats["verified"] for d in done),
                "accepted": sum(d.stats["accepted"] for d in done),
                "seconds": round(seconds, 2),
                "faults": [f for f in faults if f][:5],
            }
        )
    return {"budget": budget, "k": k, "seed": seed, "wrong_drafts": wrong, "arms": rows}


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit status is 1 if an answer is invalid or differs."""
    p = argparse.ArgumentParser(description="JSON schemas with thinking budgets and speculation")
    p.add_argument(
        "--model", type=Path, default=None, help="checkpoint folder (default: a tiny random model)"
    )
    p.add_argument("--bundled", action="store_true", help="use the bundled model")
    p.add_argument("--both", action="store_true", help="a tiny random model, then the bundled one")
    p.add_argument("--requests", type=int, default=200)
    p.add_argument("--budget", type=int, default=32, help="tokens of reasoning")
    p.add_argument("--k", type=int, default=7, help="drafts per step")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--wrong", type=float, default=0.2, help="share of told drafts that are spoilt")
    p.add_argument("--agreement", type=float, default=0.9, help="of the random model's drafter")
    p.add_argument("--backend", default="auto")
    p.add_argument("--json", default=None, help="write the result here")
    args = p.parse_args(argv)
    torch.set_num_threads(1)
    names = ["bundled"] if args.bundled else [args.model.name] if args.model else ["random"]
    results, console = [], Console()
    for name in ["random", "bundled"] if args.both else names:
        with tempfile.TemporaryDirectory() as temp:
            model = None if name == "bundled" else args.model
            if name == "random" and args.model is None:
                config = tiny_config()
                model = write_random(Path(temp) / "tiny", config, args.seed, agreement=args.agreement)
                byte_tokenizer(config.vocab_size).save(model)
            result = run(model, args.requests, args.budget, args.k, args.seed, args.wrong, args.backend)
        results.append({"model": name, **result})
        for row in result["arms"]:
            console.print(name, row, highlight=False)
        write_json({"environment": environment(), "models": results}, args.json)
    ran = [row for result in results for row in result["arms"] if "skipped" not in row]
    return 0 if all(row["valid"] == row["identical"] == row["requests"] for row in ran) else 1


if __name__ == "__main__":
    sys.exit(main())
