"""Device memory of the target's layers: window rings, raw rings, history pages.

Sizes follow from the widest step: rejected rows may stand up to 3*(gamma+1)
rows past what is needed, because the host orders copies two steps late.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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

    def rings(self) -> Iterator[Tensor]:
        """Every ring of the layer, each with the slot as its first dim."""
        yield self.window
        for part in (self.entries, self.index):
            if part is not None:
                yield part.raw


@dataclass(frozen=True)
class SnapshotPart:
    """What a snapshot keeps of one ring: the last ``rows`` rows, ``width`` of their columns.

    ``raw``: a compressor's ring, float32 whatever the arena holds.
    """

    rows: int
    width: int
    raw: bool = False
    ring: Tensor = field(default_factory=lambda: torch.empty(0))
    columns: Tensor = field(default_factory=lambda: torch.empty(0))


def window_ring(config: V4Config, gamma: int) -> int:
    """Rows of a K=V ring."""
    return config.sliding_window + 3 * (gamma + 1)


def raw_ring(ratio: int, gamma: int) -> int:
    """Rows of a compressor's raw ring: CSA pools two windows of 4, HCA one."""
    return 2 * ratio + 3 * (gamma + 1) if ratio == 4 else ratio + gamma + 1


def _entry_dims(config: V4Config) -> list[tuple[int, int]]:
    """(ratio, dim) of every kind of entry in a page, in layer order."""
    out = []
    for i, ratio in enumerate(config.compress_ratios):
        if ratio:
            out.append((ratio, config.head_dim))
        if config.kind(i) is LayerKind.CSA:
            out.append((ratio, config.index_head_dim))
    return out


def page_floats(config: V4Config) -> int:
    """Values that one page of all layers holds."""
    return sum(config.page_size // ratio * dim for ratio, dim in _entry_dims(config))


def allocate(
    config: V4Config, slots: int, arena: Tensor, gamma: int, device: torch.device
) -> list[LayerMemory]:
    """Memory of every target layer, zeroed; entries are views into the arena's page lines.

    The last slot and page 0 are scratch. K=V rings have the arena's dtype, raw rings are float32.
    """
    offset = 0

    def ring(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(slots, rows, width, dtype=dtype, device=device)

    def entries(ratio: int, dim: int) -> Tensor:
        nonlocal offset
        size = config.page_size // ratio * dim
        view = arena[:, offset : offset + size].unflatten(1, (config.page_size // ratio, dim))
        offset += size
        return view

    out = []
    for i, ratio in enumerate(config.compress_ratios):
        memory = LayerMemory(ring(window_ring(config, gamma), config.head_dim, arena.dtype))
        if ratio:
            halves = 2 if config.kind(i) is LayerKind.CSA else 1
            raw = ring(raw_ring(ratio, gamma), 2 * halves * config.head_dim)
            memory.entries = CompressorMemory(raw, entries(ratio, config.head_dim))
        if config.kind(i) is LayerKind.CSA:
            raw = ring(raw_ring(ratio, gamma), 4 * config.index_head_dim)
            memory.index = CompressorMemory(raw, entries(ratio, config.index_head_dim))
        out.append(memory)
    return out


def allocate_stages(
    config: V4Config,
    slots: int,
    stages: int,
    gamma: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> list[LayerMemory]:
    """Context rings of the drafter's stages; the last slot is scratch."""
    rows = window_ring(config, gamma)
    shape = (slots, rows, config.head_dim)
    return [LayerMemory(torch.zeros(shape, dtype=dtype, device=device)) for _ in range(stages)]


def stage_parts(
    config: V4Config, stages: int, memory: Sequence[LayerMemory] | None = None
) -> list[SnapshotPart]:
    """What a snapshot keeps of the drafter: a whole window of context rows per stage."""
    rings = [m.window for m in memory] if memory is not None else [None] * stages
    return [_part(config.sliding_window, config.head_dim, 1, ring) for ring in rings]


def snapshot_parts(
    config: V4Config, boundary: int, layers: Sequence[LayerMemory] | None = None
) -> list[SnapshotPart]:
    """What must be kept to go on at ``boundary``, a multiple of the page size.

    Per layer the window less the row that the next query no longer sees; of a
    CSA compressor the A halves of the window before; of an HCA compressor
    nothing, since every window is complete. Without ``layers`` only the sizes
    are filled in.
    """
    assert boundary % config.page_size == 0 or layers is None, "snapshots stand at page boundaries"
    out = []
    for i in range(config.num_hidden_layers):
        memory = layers[i] if layers is not None else None
        rows = config.sliding_window - 1
        out.append(_part(rows, config.head_dim, 1, memory.window if memory else None))
        if config.kind(i) is LayerKind.CSA:
            out.append(
                _part(4, config.head_dim, 4, memory.entries.raw if memory and memory.entries else None)
            )
            out.append(
                _part(4, config.index_head_dim, 4, memory.index.raw if memory and memory.index else None)
            )
    return out


def _part(rows: int, dim: int, quarters: int, ring: Tensor | None) -> SnapshotPart:
    """All columns, or of a CSA raw row (value A, value B, score A, score B) the two A quarters."""
    width = dim if quarters == 1 else 2 * dim
    if ring is None:
        return SnapshotPart(rows, width, quarters == 4)
    columns = torch.arange(dim, device=ring.device)
    if quarters == 4:
        columns = torch.cat((columns, columns + 2 * dim))
    return SnapshotPart(rows, width, quarters == 4, ring, columns)
