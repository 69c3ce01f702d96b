"""Device memory of the target's layers: window rings, raw rings, history pages.

Sizes follow from the widest step: rejected rows may stand up to 3*(gamma+1)
rows past what is needed, because the host orders copies two steps late.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.models.deepseek_v4.config import LayerKind, V4Config
from firesteel.ops.types import CompressorMemory


@dataclass
class LayerMemory:
    """One layer's memory; ``window`` [S, ring, d]."""

    window: Tensor
    entries: CompressorMemory | None = None
    index: CompressorMemory | None = None


def window_ring(config: V4Config, gamma: int) -> int:
    """Rows of a K=V ring."""
    return config.sliding_window + 3 * (gamma + 1)


def raw_ring(ratio: int, gamma: int) -> int:
    """Rows of a compressor's raw ring: CSA pools two windows of 4, HCA one."""
    return 2 * ratio + 3 * (gamma + 1) if ratio == 4 else ratio + gamma + 1


def allocate(config: V4Config, slots: int, pages: int, gamma: int, device: torch.device) -> list[LayerMemory]:
    """Memory of every target layer, zeroed; the last slot and page 0 are scratch."""

    def ring(rows: int, width: int) -> Tensor:
        return torch.zeros(slots, rows, width, device=device)

    def entries(ratio: int, dim: int) -> Tensor:
        return torch.zeros(pages, config.page_size // ratio, dim, device=device)

    out = []
    for i, ratio in enumerate(config.compress_ratios):
        memory = LayerMemory(ring(window_ring(config, gamma), config.head_dim))
        if ratio:
            halves = 2 if config.kind(i) is LayerKind.CSA else 1
            raw = ring(raw_ring(ratio, gamma), 2 * halves * config.head_dim)
            memory.entries = CompressorMemory(raw, entries(ratio, config.head_dim))
        if config.kind(i) is LayerKind.CSA:
            raw = ring(raw_ring(ratio, gamma), 4 * config.index_head_dim)
            memory.index = CompressorMemory(raw, entries(ratio, config.index_head_dim))
        out.append(memory)
    return out
