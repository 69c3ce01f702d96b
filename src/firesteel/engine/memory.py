"""History pages, slots and rings: the only owner of their arithmetic.

Pages are counted in tokens of all layers at once: a page id addresses the
entries of its 256 tokens in every compressed layer. Page 0 and the last slot
are scratch: padding rows write there and nobody reads it.
"""

from __future__ import annotations

from collections import deque

import torch

from firesteel.models.deepseek_v4.config import V4Config
from firesteel.models.deepseek_v4.state import LayerMemory, allocate


class Memory:
    """Device memory of all layers and the host's account of it."""

    def __init__(
        self, config: V4Config, slots: int, max_model_len: int, num_pages: int, gamma: int, device: torch.device
    ):
        self.page_size = config.page_size
        self.columns = -(-max_model_len // self.page_size)
        self.slots, self.num_pages, self.device = slots, num_pages, device
        self.layers: list[LayerMemory] = allocate(config, slots + 1, num_pages + 1, gamma, device)
        self.page_table = torch.zeros(slots + 1, self.columns, dtype=torch.int64, device=device)
        self._free_pages: deque[int] = deque(range(1, num_pages + 1))
        self._free_slots: deque[int] = deque(range(slots))
        self._owned: dict[int, list[int]] = {}
        self._dirty: dict[int, list[int]] = {}

    # ---- account -----------------------------------------------------------
    @property
    def free_pages(self) -> int:
        """Pages nobody holds."""
        return len(self._free_pages)

    @property
    def free_slots(self) -> int:
        """Slots nobody holds."""
        return len(self._free_slots)

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` positions need."""
        return -(-tokens // self.page_size)

    def take_slot(self, tokens: int) -> int | None:
        """A slot with pages for ``tokens`` positions, or None if either is short."""
        need = self.pages_for(tokens)
        assert need <= self.columns, "longer than the model length: refused at admission"
        if not self._free_slots or need > len(self._free_pages):
            return None
        slot = self._free_slots.popleft()
        self._owned[slot] = [self._free_pages.popleft() for _ in range(need)]
        self._dirty[slot] = self._owned[slot]
        return slot

    def release(self, slot: int) -> None:
        """Give a slot and its pages back; its last step must have been committed."""
        self._free_pages.extend(self._owned.pop(slot))
        self._free_slots.append(slot)
        self._dirty.pop(slot, None)

    def check(self) -> None:
        """Every page is free or owned once; raises AssertionError otherwise."""
        held = [p for pages in self._owned.values() for p in pages]
        assert sorted([*held, *self._free_pages]) == list(range(1, self.num_pages + 1)), "a page was lost or doubled"
        assert sorted([*self._owned, *self._free_slots]) == list(range(self.slots)), "a slot was lost or doubled"

    # ---- device ------------------------------------------------------------
    def push(self) -> None:
        """Copy changed page table lines to the device."""
        for slot, pages in self._dirty.items():
            line = torch.zeros(self.columns, dtype=torch.int64)
            line[: len(pages)] = torch.tensor(pages, dtype=torch.int64)
            self.page_table[slot] = line.to(self.device, non_blocking=True)
        self._dirty.clear()
