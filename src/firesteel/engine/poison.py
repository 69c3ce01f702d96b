"""Debug mode: everything that no longer counts becomes NaN after each step.

If any of it were read, NaN would reach the text. Rejected rows, unfinished
entries, free pages, free slots and the scratch places are covered.
"""

from __future__ import annotations

import torch

from firesteel.engine.memory import Memory
from firesteel.ops.types import SlotState

NAN = float("nan")


def poison(memory: Memory, state: SlotState) -> None:
    """Overwrite dead state; reads device values, so it is for tests only."""
    live = memory.live_slots()
    for page in [0, *memory.pool.free_pages()]:
        memory.arena[page] = NAN
    for slot in range(memory.slots + 1):
        for layer in (*memory.layers, *memory.stages):
            for ring in layer.rings():
                if slot not in live:
                    ring[slot] = NAN
                else:
                    _poison_ring(ring[slot], int(state.cursor[slot]), memory.gamma)
        if slot in live:
            _poison_entries(memory, slot, int(state.cursor[slot]))
            state.history[slot, int(state.cursor[slot]) :] = 0


def _poison_ring(ring: torch.Tensor, cursor: int, gamma: int) -> None:
    """Rows at and behind the cursor were rejected or never written."""
    for step in range(gamma + 1):
        ring[(cursor + step) % ring.shape[0]] = NAN


def _poison_entries(memory: Memory, slot: int, cursor: int) -> None:
    pages = memory.pages_of(slot)
    for layer in memory.layers:
        for part in (layer.entries, layer.index):
            if part is None:
                continue
            per_page = part.entries.shape[1]
            done = cursor // (memory.page_size // per_page)
            for column, page in enumerate(pages):
                first = max(done - column * per_page, 0)
                if first < per_page:
                    part.entries[page, first:] = NAN
