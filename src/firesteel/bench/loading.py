"""``firesteel bench loading``: how long a checkpoint takes to load, and what its weights take on the device.

Writes a checkpoint of random weights in the official layout (made on the device, as for the other
benchmarks of a geometry) unless the folder holds one, then loads it as the server does and compares
the bytes on the device with those in the files.

    firesteel bench loading --model tiny --folder F
    firesteel bench loading --model flash-8L --folder F --set device=cuda --json loading.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from firesteel.bench.cli import engine_settings
from firesteel.bench.geometry import RandomWeights, geometry, load
from firesteel.bench.report import environment, write_json
from firesteel.checkpoint.codecs import QTensor
from firesteel.errors import user_errors
from firesteel.models.deepseek_v4.config import V4Config
from firesteel.models.deepseek_v4.layout import Weight, weights_and_tensors, write_official


def tensors(config: V4Config, device: torch.device) -> Iterator[tuple[str, QTensor | torch.Tensor]]:
    """(official name, tensor on the host) of a geometry's random weights."""
    source = RandomWeights(config, 0, device)
    cpu = torch.device("cpu")
    for item in weights_and_tensors(config):
        if isinstance(item, Weight):
            w = source.qtensor(item.prefix)
            scale = None if w.scale is None else w.scale.to(cpu)
            yield f"{item.prefix}.weight", QTensor(w.format, w.data.to(cpu), scale, w.shape)
        else:
            yield item.name, source.tensor(item.name).to(cpu)


def run(args: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """The whole result of one command line."""
    folder, settings = Path(args.folder), engine_settings(args.set)
    on_gpu = torch.cuda.is_available() and settings.get("device", "auto") != "cpu"
    wrote = None
    if not (folder / "config.json").is_file():
        progress(f"writing {folder}")
        begun, config = time.perf_counter(), geometry(args.model)
        made = tensors(config, torch.device("cuda" if on_gpu else "cpu"))
        write_official(folder, config, made, raw_config=config.to_dict(), one_file_per_layer=True)
        wrote = time.perf_counter() - begun
        if on_gpu:
            torch.cuda.empty_cache()
    stored = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    before = torch.cuda.memory_allocated() if on_gpu else 0
    begun = time.perf_counter()
    weights: dict[str, float] = {}

    def said(what: str) -> None:
        if what.startswith(("graphs", "profile")) and not weights:
            weights["seconds"] = time.perf_counter() - begun
        progress(what)

    llm = load(
        str(folder),
        said,
        **{
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "max_model_len": 1024,
            "num_pages": 32,
            "speculative": {"num_speculative_tokens": 7},
            "graphs": False,
            **settings,
        },
    )
    whole = time.perf_counter() - begun
    device = torch.cuda.memory_allocated() - before if on_gpu else None
    memory = llm.engine.runner.memory
    state = memory.arena.numel() * memory.arena.element_size() + memory.ring_bytes() * (memory.slots + 1)
    return {
        "bench": "loading",
        "model": args.model,
        "settings": settings,
        "notes": list(llm.notes),
        "write_seconds": wrote,
        "load_seconds": weights.get("seconds", whole),
        "checkpoint_bytes": stored,
        "device_bytes": device,
        "state_bytes": state,  # pages and rings, among them
        "weights_over_checkpoint": None if device is None else (device - state) / stored,
        "environment": environment(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 2 on a user's error."""
    p = argparse.ArgumentParser(prog="firesteel bench loading", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--model", default="tiny", help="geometry to write: flash-8L or tiny")
    p.add_argument("--folder", required=True, help="checkpoint folder; written if there is none")
    p.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="an EngineConfig field")
    p.add_argument("--json", default=None, metavar="FILE", help="write the result here")
    args = p.parse_args(argv)
    try:
        with Console(stderr=True).status("loading") as status:
            result = run(args, status.update)
    except user_errors() as err:
        print(f"loading: {err}", file=sys.stderr)
        return 2
    write_json(result, args.json)
    gib, ratio = result["checkpoint_bytes"] / 2**30, result["weights_over_checkpoint"]
    said = f"{gib:.2f} GiB in {result['load_seconds']:.1f} s"
    if ratio is not None:
        said += f"; weights on the device {ratio:.3f} of the files"
    print(said)
    return 0


if __name__ == "__main__":
    sys.exit(main())
