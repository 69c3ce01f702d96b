"""``python -m firesteel.eval.texts``: how well a checkpoint knows code and prose it has never seen.

Bits per byte of the excerpts in ``eval/data`` (each conditioned on BOS alone), and samples at T=1 that
continue their beginnings, with a count of those in which one line occurs three times.

    python -m firesteel.eval.texts --json texts.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from firesteel.bench.report import environment, write_json
from firesteel.config import ParameterError, SamplingParams
from firesteel.engine.llm import LLM
from firesteel.errors import user_errors
from firesteel.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
DOMAINS = ("code", "prose")
OPENING = 40  # tokens of an excerpt that a sample continues


def read_texts(path: Path) -> list[str]:
    """The ``text`` of every line; raises ParameterError naming the line."""
    out = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as err:
        raise ParameterError(
            f"texts: {path} cannot be read ({err.strerror}); give a JSONL file with text"
        ) from err
    for i, line in enumerate(lines, 1):
        try:
            out.append(str(json.loads(line)["text"]))
        except (json.JSONDecodeError, KeyError, TypeError) as err:
            raise ParameterError(f"texts: {path}, line {i}: expected an object with text ({err!r})") from err
    return out


def _tokenizer(llm: LLM) -> Tokenizer:
    if llm.tokenizer is None:
        raise ParameterError("texts: the checkpoint has no tokenizer.json; put it into its folder")
    return llm.tokenizer


def bits_per_byte(llm: LLM, texts: Sequence[str]) -> tuple[float, float]:
    """Mean over all bytes, and its standard error over texts (ratio estimator)."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    room = llm.engine.max_model_len - 1
    tokenizer = _tokenizer(llm)
    ids = [[llm.config.bos_token_id, *tokenizer.encode(t)][:room] for t in texts]
    answers = llm.generate([list(i) for i in ids], params)
    bits, sizes = [], []
    for tokens, answer in zip(ids, answers, strict=True):
        assert answer.prompt_logprobs is not None, "asked for"
        bits.append(-sum(s.logprob for s in answer.prompt_logprobs if s is not None) / math.log(2))
        sizes.append(len(tokenizer.decode(tokens[1:]).encode()))
    mean = sum(bits) / sum(sizes)
    spread = sum((b - mean * n) ** 2 for b, n in zip(bits, sizes, strict=True))
    return mean, math.sqrt(spread) / sum(sizes)


def most_repeated(text: str) -> int:
    """How often the most frequent line that holds a letter or digit occurs."""
    lines = [line.strip() for line in text.splitlines()]
    counts = Counter(line for line in lines if any(c.isalnum() for c in line))
    return max(counts.values(), default=0)


def samples(
    llm: LLM, texts: Sequence[str], count: int, tokens: int, penalty: float = 0.0
) -> list[dict[str, Any]]:
    """``count`` continuations of ``tokens`` tokens at T=1: prompt, text, most_repeated."""
    tokenizer = _tokenizer(llm)
    prompts = [[llm.config.bos_token_id, *tokenizer.encode(t)[:OPENING]] for t in texts[:count]]
    params = [
        SamplingParams(max_tokens=tokens, temperature=1.0, seed=i, ignore_eos=True, frequency_penalty=penalty)
        for i in range(len(prompts))
    ]
    answers = llm.generate([list(p) for p in prompts], params)
    return [
        {
            "prompt": tokenizer.decode(p[1:]),
            "text": a.text,
            "tokens": len(a.token_ids),
            "most_repeated": most_repeated(a.text),
        }
        for p, a in zip(prompts, answers, strict=True)
    ]


def measure(llm: LLM, count: int = 20, tokens: int = 100, penalty: float = 0.3) -> dict[str, Any]:
    """Everything, by domain; samples plain and with ``frequency_penalty``."""
    out: dict[str, Any] = {"environment": environment(), "domains": {}}
    for domain in DOMAINS:
        texts = read_texts(DATA / f"{domain}.jsonl")
        bits, error = bits_per_byte(llm, texts)
        made = samples(llm, texts, count, tokens)
        calmer = samples(llm, texts, count, tokens, penalty)
        out["domains"][domain] = {
            "texts": len(texts),
            "bits_per_byte": bits,
            "standard_error": error,
            "samples": made,
            "repeating": sum(s["most_repeated"] >= 3 for s in made),
            "frequency_penalty": penalty,
            "repeating_with_penalty": sum(s["most_repeated"] >= 3 for s in calmer),
        }
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    args = argparse.ArgumentParser(prog="python -m firesteel.eval.texts", description=__doc__)
    args.add_argument("--model", default=None, help="checkpoint folder; default: the bundled one")
    args.add_argument("--samples", type=int, default=20)
    args.add_argument("--tokens", type=int, default=100)
    args.add_argument(
        "--frequency-penalty", type=float, default=0.3, help="of a second set of samples (default 0.3)"
    )
    args.add_argument("--json", default=None)
    opt = args.parse_args(argv)
    try:
        result = measure(LLM(opt.model), opt.samples, opt.tokens, opt.frequency_penalty)
    except user_errors() as err:
        print(f"texts: {err}", file=sys.stderr)
        return 2
    heads = ("domain", "texts", "bits per byte", "samples", "with a line three times", "with penalty")
    table = Table(*heads)
    for name, d in result["domains"].items():
        shown = f"{d['bits_per_byte']:.3f} ± {d['standard_error']:.3f}"
        table.add_row(
            name,
            str(d["texts"]),
            shown,
            str(len(d["samples"])),
            str(d["repeating"]),
            str(d["repeating_with_penalty"]),
        )
    Console().print(table)
    write_json(result, opt.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
