"""History pages, slots, rings, snapshots and swap: the only owner of their arithmetic.

One arena holds everything that is shared or outlives a slot, in units of
pages. A page is page-major: the entries of its 256 tokens for every layer lie
in one line of the arena, so a page is one copy. A snapshot of a window is a
flat vector in whole pages of the same arena: pages and snapshots share one
budget and one account.

Page 0 and the last slot are scratch: padding rows write there, nobody reads it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.config import ParameterError
from firesteel.engine.sync import upload
from firesteel.models.deepseek_v4.config import V4Config
from firesteel.models.deepseek_v4.state import (
    LayerMemory,
    SnapshotPart,
    allocate,
    allocate_stages,
    page_floats,
    snapshot_parts,
    stage_parts,
)


class PagePool:
    """Host account of pages: a page is free or has holders."""

    def __init__(self, count: int):
        self.count = count
        self._free: deque[int] = deque(range(1, count + 1))
        self._holders = [0] * (count + 1)

    @property
    def free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def free_pages(self) -> list[int]:
        """The free pages themselves."""
        return list(self._free)

    def take(self, n: int) -> list[int] | None:
        """``n`` fresh pages with one holder each, or None if there are not as many."""
        if n > len(self._free):
            return None
        pages = [self._free.popleft() for _ in range(n)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, pages: list[int]) -> None:
        """One more holder for each page."""
        for page in pages:
            assert self._holders[page] > 0, "only a held page can be shared"
            self._holders[page] += 1

    def drop(self, pages: list[int]) -> None:
        """One holder fewer; a page without holders is free."""
        for page in pages:
            self._holders[page] -= 1
            assert self._holders[page] >= 0, "a page was dropped twice"
            if self._holders[page] == 0:
                self._free.append(page)

    def check(self, held: list[int]) -> None:
        """``held`` lists every hold there should be; raises AssertionError on a leak or a double."""
        expected = [0] * (self.count + 1)
        for page in held:
            expected[page] += 1
        assert expected == self._holders, "page holders differ from their owners' lists"
        assert sorted(self._free) == [p for p in range(1, self.count + 1) if not expected[p]], "a page leaked"


@dataclass
class Saved:
    """A preempted request's device state: whole rings of its slot and its pages."""

    rings: list[Tensor]
    pages: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that the copy takes."""
        return sum(t.numel() * t.element_size() for t in (*self.rings, self.pages))


class Memory:
    """Device memory of all layers and the host's account of it."""

    def __init__(
        self,
        config: V4Config,
        slots: int,
        max_model_len: int,
        num_pages: int,
        gamma: int,
        device: torch.device,
        stages: int = 0,
        dtype: torch.dtype = torch.float32,
    ):
        """``dtype``: of K=V rows and entries; raw compressor rows are float32 always."""
        self.config, self.page_size, self.device = config, config.page_size, device
        self.columns = -(-max_model_len // self.page_size)
        self.slots, self.num_pages, self.gamma = slots, num_pages, gamma
        snapshot = [*snapshot_parts(config, 1), *stage_parts(config, stages)]
        self._raw_units = 4 // dtype.itemsize  # a float32 in units of the arena
        self.snapshot_floats = sum(self._units(p) for p in snapshot)
        line = max(page_floats(config), -(-self.snapshot_floats // 8), 1)
        self.snapshot_pages = -(-self.snapshot_floats // line)
        try:
            self.arena = torch.zeros(num_pages + 1, line, dtype=dtype, device=device)
        except (RuntimeError, OverflowError) as err:
            gib = (num_pages + 1) * line * dtype.itemsize / 2**30
            raise ParameterError(
                f"num_pages={num_pages}: {gib:.1f} GiB cannot be allocated; lower it"
            ) from err
        self.layers: list[LayerMemory] = allocate(config, slots + 1, self.arena, gamma, device)
        self.stages = allocate_stages(config, slots + 1, stages, gamma, device, dtype)
        self.page_table = torch.zeros(slots + 1, self.columns, dtype=torch.int64, device=device)
        self.pool = PagePool(num_pages)
        self._free_slots: deque[int] = deque(range(slots))
        self._pages: dict[int, list[int]] = {}  # by slot
        self._dirty: set[int] = set()
        self.left: set[int] = set()  # slots given back; the runner takes them off when it owes them nothing

    # ---- account -----------------------------------------------------------
    @property
    def free_slots(self) -> int:
        """Slots nobody holds."""
        return len(self._free_slots)

    def live_slots(self) -> set[int]:
        """Slots that somebody holds."""
        return set(self._pages)

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` positions need."""
        return -(-tokens // self.page_size)

    def pages_of(self, slot: int) -> list[int]:
        """Pages of a slot, in order of position."""
        return self._pages[slot]

    def open_slot(self, pages: list[int]) -> int | None:
        """A free slot that takes over the hold on ``pages``, or None."""
        if not self._free_slots:
            return None
        slot = self._free_slots.popleft()
        self._pages[slot] = list(pages)
        self._dirty.add(slot)
        return slot

    def take_slot(self, tokens: int) -> int | None:
        """A free slot with fresh pages for ``tokens`` positions, or None if either is short."""
        pages = self.pool.take(self.pages_for(tokens)) if self._free_slots else None
        return None if pages is None else self.open_slot(pages)

    def grow(self, slot: int, tokens: int) -> bool:
        """Let a slot cover ``tokens`` positions; False if pages are short."""
        need = self.pages_for(tokens)
        assert need <= self.columns, "longer than the model length: refused on entry"
        more = need - len(self._pages[slot])
        if more <= 0:
            return True
        pages = self.pool.take(more)
        if pages is None:
            return False
        self._pages[slot].extend(pages)
        self._dirty.add(slot)
        return True

    def release(self, slot: int) -> None:
        """Give a slot and its holds back; its last rows must have been launched."""
        self.pool.drop(self._pages.pop(slot))
        self._free_slots.append(slot)
        self._dirty.discard(slot)
        self.left.add(slot)

    def check(self, cached: list[int] | None = None) -> None:
        """Conservation of slots and pages; ``cached`` are the prefix cache's holds."""
        self.pool.check([*(p for pages in self._pages.values() for p in pages), *(cached or [])])
        assert sorted([*self._pages, *self._free_slots]) == list(range(self.slots)), (
            "a slot was lost or doubled"
        )

    def ring_bytes(self) -> int:
        """Bytes of one slot's rings."""
        return sum(r[0].numel() * r.element_size() for r in self._rings())

    def page_bytes(self) -> int:
        """Bytes of one arena page."""
        return self.arena.shape[1] * self.arena.element_size()

    # ---- other ranks ----------------------------------------------------------
    def changes(self) -> dict[int, tuple[int, ...]]:
        """Pages of the slots whose page table lines the next ``push`` writes."""
        return {slot: tuple(self._pages[slot]) for slot in sorted(self._dirty)}

    def adopt(self, changes: dict[int, tuple[int, ...]]) -> None:
        """Take over rank 0's lines; a rank that follows keeps no account of its own."""
        for slot, pages in changes.items():
            self._pages[slot] = list(pages)
            self._dirty.add(slot)

    # ---- device, in launch order ----------------------------------------------
    def push(self) -> None:
        """Copy changed page table lines to the device, all in one."""
        if not self._dirty:
            return
        changed = sorted(self._dirty)
        lines = torch.zeros(len(changed), self.columns, dtype=torch.int64)
        for line, slot in zip(lines, changed, strict=True):
            pages = self._pages[slot]
            line[: len(pages)] = torch.tensor(pages, dtype=torch.int64)
        self.page_table.index_copy_(0, self._at(changed), upload(lines, self.device))
        self._dirty.clear()

    def _at(self, pages: list[int]) -> Tensor:
        """Pages as an index on the device; a list would be copied with a wait."""
        return upload(torch.tensor(pages, dtype=torch.int64), self.device)

    def _rings(self) -> list[Tensor]:
        return [ring for layer in (*self.layers, *self.stages) for ring in layer.rings()]

    def all_rings(self) -> list[Tensor]:
        """Every ring of every layer and stage, for profiling."""
        return self._rings()

    def _units(self, part: SnapshotPart) -> int:
        """Arena elements that a part of a snapshot takes."""
        return part.rows * part.width * (self._raw_units if part.raw else 1)

    def _parts(self, boundary: int) -> list[SnapshotPart]:
        target = snapshot_parts(self.config, boundary, self.layers)
        return [*target, *stage_parts(self.config, len(self.stages), self.stages)]

    def save(self, slot: int, pages: list[int]) -> Saved:
        """Copy a slot's rings and pages out of the way of their next owners."""
        return Saved([ring[slot].clone() for ring in self._rings()], self.arena[self._at(pages)])

    def restore(self, saved: Saved, slot: int, pages: list[int]) -> None:
        """Put a saved request into another slot and other pages."""
        for ring, copy in zip(self._rings(), saved.rings, strict=True):
            ring[slot] = copy
        self.arena[self._at(pages[: saved.pages.shape[0]])] = saved.pages

    def write_snapshot(self, slot: int, boundary: int, pages: list[int]) -> None:
        """Store the window that ends before position ``boundary`` of a slot."""
        parts = [
            p.ring[slot, torch.arange(boundary - p.rows, boundary, device=self.device) % p.ring.shape[1]]
            .index_select(-1, p.columns)
            .flatten()
            .view(self.arena.dtype)  # the bits of float32 rows
            for p in self._parts(boundary)
        ]
        flat = torch.cat(parts)
        flat = torch.nn.functional.pad(flat, (0, len(pages) * self.arena.shape[1] - flat.shape[0]))
        self.arena[self._at(pages)] = flat.view(len(pages), -1)

    def read_snapshot(self, pages: list[int], slot: int, boundary: int) -> None:
        """Fill a slot's rings with a stored window, as if the rows before ``boundary`` had just run."""
        flat, at = self.arena[self._at(pages)].flatten(), 0
        for p in self._parts(boundary):
            data = flat[at : at + self._units(p)].view(p.ring.dtype).view(p.rows, p.width)
            where = torch.arange(boundary - p.rows, boundary, device=self.device) % p.ring.shape[1]
            p.ring[slot, where[:, None], p.columns] = data
            at += self._units(p)
