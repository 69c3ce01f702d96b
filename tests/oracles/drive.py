"""Runs a target pass by pass: any batch of rows in, logits of every row out.

No scheduler and no sampling: a test says which rows run together, in which slot, and which physical
pages a slot has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firesteel.core import RowBatch
from firesteel.engine.memory import Memory
from firesteel.models.deepseek_v4.config import V4Config
from firesteel.models.deepseek_v4.layout import open_checkpoint
from firesteel.models.deepseek_v4.model import Target
from firesteel.models.deepseek_v4.weights import build_target
from firesteel.ops import Numerics, select

Group = tuple[int, int, Sequence[int]]  # slot, position of the first token, tokens
CPU = torch.device("cpu")


def load_target(path: str | Path, numerics: str, backend: str = "reference") -> Target:
    """The target of a checkpoint folder; reads it once."""
    config = V4Config.load(path)
    ops = select(backend, Numerics(numerics == "official")).ops
    with open_checkpoint(path, config, drafter=False) as checkpoint:
        return Target(config, build_target(checkpoint, config, ops, CPU), ops)


class Drive:
    """A target over fresh memory with ``slots`` slots of ``length`` positions.

    Slot s owns the pages that follow those of slot s-1 unless ``remap`` says otherwise. ``gamma``
    sizes the rings, as the deepest draft does in the engine.
    """

    def __init__(self, target: Target, slots: int, length: int, gamma: int = 0):
        self.target, self.slots = target, slots
        config = target.config
        self.columns = -(-length // config.page_size)
        self.memory = Memory(config, slots, length, slots * self.columns, gamma=gamma, device=CPU)
        for slot in range(slots):
            self.remap(slot, range(1 + slot * self.columns, 1 + (slot + 1) * self.columns))

    def remap(self, slot: int, pages: Sequence[int]) -> None:
        """Give a slot these physical pages."""
        self.memory.page_table[slot] = torch.tensor(list(pages))

    def tensors(self) -> list[Tensor]:
        """Every tensor of the memory: rings [S, ...] and pages [P, ...]."""
        return [t for _, t in self.rings()] + [t for _, t in self.pages()]

    def rings(self) -> list[tuple[str, Tensor]]:
        """(name, ring [S, n, width]) of all layers; the last slot is scratch."""
        out = []
        for i, layer in enumerate(self.memory.layers):
            out.append((f"{i}.window", layer.window))
            for name, memory in (("entries", layer.entries), ("index", layer.index)):
                if memory is not None:
                    out.append((f"{i}.{name}", memory.raw))
        return out

    def pages(self) -> list[tuple[str, Tensor]]:
        """(name, entries [P, n, width]) of all layers; page 0 is scratch."""
        out = []
        for i, layer in enumerate(self.memory.layers):
            for name, memory in (("entries", layer.entries), ("index", layer.index)):
                if memory is not None:
                    out.append((f"{i}.{name}", memory.entries))
        return out

    @torch.inference_mode()
    def step(self, groups: Sequence[Group], padding: int = 0, slack: int = 0) -> list[Tensor]:
        """One pass over all ``groups``; float32 logits [n, V] of each.

        ``padding`` rows are added, and ``slack`` to the bound of the positions.
        """
        rows = row_batch(groups, padding, self.slots, slack)
        ctx = self.target.begin(rows, self.memory.page_table)
        h, _ = self.target.forward(ctx, self.memory.layers)
        logits = self.target.logits(self.target.collapse(h)[1])
        sizes = [len(tokens) for _, _, tokens in groups]
        return list(logits[: sum(sizes)].split(sizes))

    def chunks(self, slot: int, tokens: Sequence[int], sizes: Sequence[int], **step: Any) -> Tensor:
        """A whole sequence in chunks of ``sizes`` tokens: logits [n, V]."""
        assert sum(sizes) == len(tokens)
        out, at = [], 0
        for size in sizes:
            out += self.step([(slot, at, tokens[at : at + size])], **step)
            at += size
        return torch.cat(out)

    def greedy(self, slot: int, prompt: Sequence[int], count: int) -> list[int]:
        """``count`` tokens, each the argmax after the one before."""
        logits, out = self.step([(slot, 0, prompt)])[0], []
        for i in range(count):
            out.append(int(logits[-1].argmax()))
            if i + 1 < count:
                logits = self.step([(slot, len(prompt) + i, out[-1:])])[0]
        return out


def row_batch(groups: Sequence[Group], padding: int, scratch: int, slack: int) -> RowBatch:
    """The rows of ``groups``, then padding rows in the scratch slot."""
    lines: list[tuple[int, int, int, int, int, bool]] = []
    for slot, start, tokens in groups:
        at, end = len(lines), len(lines) + len(tokens) - 1
        lines += [(token, start + i, slot, at, end, True) for i, token in enumerate(tokens)]
    top = max(line[1] for line in lines)
    for _ in range(padding):
        lines.append((0, 0, scratch, len(lines), len(lines), False))
    columns = [torch.tensor(column) for column in zip(*lines, strict=True)]
    return RowBatch(*columns, max_position=top + slack)


def random_sizes(n: int, most: int, pick: Callable[[int], int]) -> list[int]:
    """Chunk sizes 1..``most`` that add up to ``n``; ``pick(m)`` gives a random integer below m."""
    out = []
    while n:
        out.append(min(n, 1 + pick(most)))
        n -= out[-1]
    return out
