"""The tensors of a checkpoint, dequantised, by official name; shares no code with the engine's loader."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from firesteel.checkpoint.reader import Checkpoint


@dataclass(frozen=True)
class Tensors:
    """``raw``: config.json. ``values``: float32 (or int64) by official name, scales folded in.
    ``quantised``: prefixes whose weight is FP8 or FP4 in the file."""

    raw: dict[str, Any]
    values: dict[str, torch.Tensor]
    quantised: frozenset[str]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.values[name]


def load(path: str | Path) -> Tensors:
    """Read everything; the target only, since oracles have no drafter."""
    raw = json.loads((Path(path) / "config.json").read_text())
    values: dict[str, torch.Tensor] = {}
    quantised = set()
    with Checkpoint.open(path) as checkpoint:
        for name in checkpoint.tensors:
            if name.endswith(".scale") or name.startswith("mtp."):
                continue
            prefix = name.removesuffix(".weight")
            q = checkpoint.qtensor(prefix)
            values[name] = q.data.to(torch.int64) if q.format == "i64" else q.dequant()
            if q.scale is not None:
                quantised.add(prefix)
    return Tensors(raw, values, frozenset(quantised))
