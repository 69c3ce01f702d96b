"""``python -m firesteel.bench.hf``: Firesteel against Hugging Face transformers.

Same machine, same run, same weights (dequantised), float32, one thread, equal
prompt lengths, greedy, a fixed number of tokens. Rounds alternate between the
two engines; the median round counts. The tokens are compared, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from firesteel.bench.report import environment, write_json
from firesteel.checkpoint import QTensor
from firesteel.config import ParameterError, SamplingParams
from firesteel.engine.build import BUNDLED
from firesteel.engine.llm import LLM
from firesteel.models.deepseek_v4.config import V4Config
from firesteel.models.deepseek_v4.config_parse import dump_converted
from firesteel.models.deepseek_v4.layout import open_checkpoint, write_official


def dense_copy(model: Path, folder: Path) -> None:
    """A float32 copy of a checkpoint's target in the form that transformers reads."""
    config = V4Config.load(model)
    with open_checkpoint(model, config, drafter=False) as checkpoint:
        assert checkpoint.layout is not None, "open_checkpoint checks a layout"
        specs = list(checkpoint.layout.specs)

        def tensors() -> Iterator[tuple[str, QTensor | torch.Tensor]]:
            for name in specs:
                if name.endswith(".scale"):
                    continue
                weight = checkpoint.qtensor(name.removesuffix(".weight"))
                data = weight.data if weight.format == "i64" else weight.dequant()
                yield name, QTensor.dense(data.contiguous())

        bare = V4Config.from_dict(
            {k: v for k, v in config.to_dict().items() if not k.startswith("dspark")}
            | {"compress_ratios": list(config.compress_ratios)}
        )
        write_official(folder, bare, tensors(), raw_config=dump_converted(bare))
    (folder / "config.json").write_text(json.dumps(dump_converted(bare)))


def median_of(rounds: int, run: Callable[[], float]) -> float:
    """Median of ``rounds`` calls."""
    return statistics.median(run() for _ in range(rounds))


class Ours:
    """Firesteel, float32."""

    def __init__(self, model: Path, requests: int, length: int, backend: str):
        self.llm = LLM(
            model,
            numerics="float32",
            max_num_seqs=requests,
            max_num_batched_tokens=512,
            max_model_len=length,
            prefix_caching=False,
            backend=backend,
        )

    def run(self, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
        """Seconds and tokens."""
        params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
        begun = time.perf_counter()
        done = self.llm.generate(prompts, params)
        return time.perf_counter() - begun, [list(c.token_ids) for c in done]


class Theirs:
    """transformers' ``DeepseekV4ForCausalLM``, float32, eager attention."""

    def __init__(self, folder: Path):
        try:
            from transformers import DeepseekV4ForCausalLM
        except ImportError as err:
            raise ParameterError(f"hf: it needs transformers ({err}); pip install 'firesteel[test]'") from err

        self.model = DeepseekV4ForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
        """Seconds and tokens of a plain greedy loop over the model's own cache (less overhead than generate())."""
        ids = torch.tensor(prompts)
        begun = time.perf_counter()
        out = self.model(ids, use_cache=True, logits_to_keep=1)
        tokens = [out.logits[:, -1].argmax(-1, keepdim=True)]
        for _ in range(new - 1):
            out = self.model(tokens[-1], past_key_values=out.past_key_values, use_cache=True)
            tokens.append(out.logits[:, -1].argmax(-1, keepdim=True))
        return time.perf_counter() - begun, torch.cat(tokens, 1).tolist()


def measure(model: Path, rounds: int, new: int, prompt: int, backend: str) -> dict[str, Any]:
    """All rows of the table."""
    torch.set_num_threads(1)
    vocab = V4Config.load(model).vocab_size
    gen = torch.Generator().manual_seed(0)
    cases = [
        ("decode, 1 request", 1, 32, new),
        ("decode, 16 requests", 16, 32, new),
        ("prompt", 1, prompt, 1),
    ]
    rows = []
    with tempfile.TemporaryDirectory() as temp:
        dense_copy(model, Path(temp) / "dense")
        theirs = Theirs(Path(temp) / "dense")
        for name, requests, length, tokens in cases:
            prompts = torch.randint(3, vocab, (requests, length), generator=gen).tolist()
            ours = Ours(model, requests, length + tokens + 1, backend)
            rows.append(_compare(name, ours, theirs, prompts, tokens, rounds))
    return {"environment": environment(), "backend": ours.llm.notes[0], "rounds": rounds, "rows": rows}


def _compare(
    name: str, ours: Ours, theirs: Theirs, prompts: list[list[int]], tokens: int, rounds: int
) -> dict[str, Any]:
    """Tokens/s of both; decoding alone is the difference between a long run and one of a single token."""
    ours.run(prompts, min(tokens, 4))
    theirs.run(prompts, min(tokens, 4))
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    same = 0
    for _ in range(rounds):
        results = {}
        for side, engine in (("ours", ours), ("theirs", theirs)):
            base = engine.run(prompts, 1)[0] if tokens > 1 else 0.0
            total, results[side] = engine.run(prompts, tokens)
            seconds[side].append(total - base)
        same += sum(a == b for a, b in zip(results["ours"], results["theirs"], strict=True))
    count = len(prompts) * (tokens - 1) if tokens > 1 else len(prompts) * len(prompts[0])
    a, b = (count / statistics.median(seconds[s]) for s in ("ours", "theirs"))
    return {
        "case": name,
        "requests": len(prompts),
        "firesteel_tokens_per_second": a,
        "transformers_tokens_per_second": b,
        "ratio": a / b,
        "identical_texts": f"{same}/{rounds * len(prompts)}",
    }


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    p = argparse.ArgumentParser(description="Firesteel against Hugging Face transformers on the CPU")
    p.add_argument(
        "--model", type=Path, default=BUNDLED, help="checkpoint folder (default: the bundled model)"
    )
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--tokens", type=int, default=64, help="tokens per request when decoding")
    p.add_argument("--prompt", type=int, default=512, help="tokens of the long prompt")
    p.add_argument("--backend", default="auto")
    p.add_argument("--json", default=None, help="write the result here")
    args = p.parse_args(argv)
    result = measure(args.model, args.rounds, args.tokens, args.prompt, args.backend)
    table = Table(title=f"float32, one thread; {result['backend']}; median of {args.rounds} rounds")
    for column in ("case", "Firesteel tokens/s", "transformers tokens/s", "ratio", "identical texts"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in result["rows"]:
        table.add_row(
            row["case"],
            f"{row['firesteel_tokens_per_second']:.1f}",
            f"{row['transformers_tokens_per_second']:.1f}",
            f"{row['ratio']:.2f}",
            row["identical_texts"],
        )
    Console().print(table)
    write_json(result, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
