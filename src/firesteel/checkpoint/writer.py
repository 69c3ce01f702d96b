"""Writer of checkpoint folders in the official layout: shards, index, config, tokenizer files.

Shards are written one at a time, so memory holds one shard. File names need the number of shards,
which is known beforehand for the official grouping and settled by renaming otherwise. The index and
the config come last: a folder without them was not finished.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from firesteel.checkpoint.codecs import QTensor
from firesteel.checkpoint.reader import INDEX_NAME, SINGLE_NAME
from firesteel.checkpoint.spec import CheckpointError

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}


def stored_tensors(name: str, value: QTensor | torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """(file name of the tensor, tensor in its file dtype) pairs of one weight.

    A quantised weight named ``X.weight`` brings ``X.scale``; FP4 bytes are I8, E8M0 bytes F8_E8M0.
    """
    if isinstance(value, torch.Tensor):
        return [(name, value)]
    if value.scale is None:
        return [(name, value.data)]
    if not name.endswith(".weight"):
        raise CheckpointError(f"tensor '{name}': expected a name ending in '.weight' for a quantised weight")
    data = value.data.view(torch.int8) if value.format == "fp4" else value.data
    scale = value.scale.view(torch.float8_e8m0fnu) if value.scale.element_size() == 1 else value.scale
    return [(name, data), (name.removesuffix("weight") + "scale", scale)]


def write_file(path: Path, tensors: Sequence[tuple[str, torch.Tensor]]) -> int:
    """Write one safetensors file, tensors in the given order; returns the bytes of data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{path.name}: tensor '{name}': cannot store dtype {tensor.dtype}")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts 8-byte aligned
    with path.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little"))
        handle.write(text)
        for _, tensor in tensors:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            handle.write(flat.view(torch.uint8).numpy().data)
    return at


@dataclass
class ShardWriter:
    """Collects tensors of the current shard and writes it when the next one begins."""

    folder: Path
    weight_map: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    total: int = 0
    pending: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    pending_bytes: int = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.weight_map:
            raise CheckpointError(f"tensor '{name}': given twice; expected every tensor once")
        self.weight_map[name] = ""
        self.pending.append((name, tensor))
        self.pending_bytes += tensor.numel() * tensor.element_size()

    def flush(self) -> None:
        if not self.pending:
            return
        # widest dtypes first keeps every tensor aligned to its own element size
        self.pending.sort(key=lambda item: -item[1].element_size())
        file = f"part-{len(self.files) + 1:05d}.safetensors.tmp"
        self.total += write_file(self.folder / file, self.pending)
        self.weight_map.update((name, file) for name, _ in self.pending)
        self.files.append(file)
        self.pending, self.pending_bytes = [], 0

    def close(self, single: bool) -> None:
        """Give the shards their final names and write the index (none for a single file)."""
        self.flush()
        if not self.files:
            raise CheckpointError(f"{self.folder}: no tensors to write")
        count = len(self.files)
        final = {
            old: SINGLE_NAME if single else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            for i, old in enumerate(self.files)
        }
        for old, new in final.items():
            (self.folder / old).replace(self.folder / new)
        if single:
            return
        table = {name: final[file] for name, file in sorted(self.weight_map.items())}
        index = {"metadata": {"total_size": self.total}, "weight_map": table}
        (self.folder / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")


def write_checkpoint(
    path: str | Path,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, QTensor | torch.Tensor]],
    *,
    shard_of: Callable[[str], int] | None = None,
    shard_bytes: int | None = None,
    extra_files: Sequence[str | Path] = (),
) -> Path:
    """Write a checkpoint folder and return it.

    ``shard_of`` maps a tensor name to its file number; tensors must come grouped by it (a number that
    returns is an error). ``shard_bytes`` begins a new file when the next tensor would exceed it. With
    neither, one ``model.safetensors``. ``config`` becomes config.json; ``extra_files`` (tokenizer.json,
    generation_config.json, ...) are copied. Raises CheckpointError if the folder already holds weights.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    present = sorted(p.name for p in folder.glob("*.safetensors*"))
    if present:
        raise CheckpointError(f"{folder}: already holds {present[0]}; choose an empty folder")
    writer = ShardWriter(folder)
    done: set[int] = set()
    current: int | None = None
    for name, value in tensors:
        shard = shard_of(name) if shard_of else None
        if shard != current:
            if shard in done:
                raise CheckpointError(
                    f"tensor '{name}': comes after its file {shard} was closed; group by file"
                )
            writer.flush()
            done.add(shard if shard is not None else -1)
            current = shard
        items = stored_tensors(name, value)
        size = sum(t.numel() * t.element_size() for _, t in items)
        if shard_bytes is not None and writer.pending and writer.pending_bytes + size > shard_bytes:
            writer.flush()
        for stored_name, tensor in items:
            writer.add(stored_name, tensor)
    writer.close(single=shard_of is None and shard_bytes is None)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for file in extra_files:
        shutil.copyfile(file, folder / Path(file).name)
    return folder
