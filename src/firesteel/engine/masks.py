"""Masks of verify rows: the drafts come to the host, guides walk along them, masks go back.

    rows built -> ask: a copy of the newest tokens and drafts is queued
    forward    -> answer: wait for that copy (never for the forward), compute masks, send them
    sample

Only steps that hold guided requests do any of it. Called by the runner. A
request whose masks take longer than a limit in one step fails; the others go
on. The drafts arrive when their rows are built, so those that a grammar forbids
are verified all the same; they do not count as the drafter's errors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from firesteel.core import RowBatch, SampleRows, StepPlan
from firesteel.engine.guide import Guide, Words
from firesteel.engine.limited import Foreground
from firesteel.engine.sync import SyncGuard, to_host, upload
from firesteel.ops.types import SlotState

MAX_WORKERS = 16


@dataclass
class Question:
    """Tokens on their way to the host.

    ``packet`` int64 [G, 3 + 2γ + 1] per guided group: position of its first
    sampling row, its place among the sampling rows, its width (0: the request
    has ended), then the tokens from γ positions before that row to γ behind.
    ``allowed``, once answered: drafts of each request before the first that its
    rules forbid.
    """

    request_ids: tuple[int, ...]
    packet: Tensor
    arrived: torch.cuda.Event | None
    allowed: dict[int, int] = field(default_factory=dict)


class Masks:
    """The guides of all open requests, by request id; each lives as long as its request."""

    def __init__(self, gamma: int, guard: SyncGuard, device: torch.device, seconds: float = 1.0):
        self.gamma, self.guard, self.device = gamma, guard, device
        self.guides: WeakValueDictionary[int, Guide] = WeakValueDictionary()
        cores = len(os.sched_getaffinity(0)) - 1  # one turns the loop
        self.threads = Foreground(seconds, max(1, min(cores, MAX_WORKERS)), "firesteel-masks")

    def ask(self, plan: StepPlan, rows: RowBatch, samples: SampleRows, state: SlotState) -> Question:
        """Queue the copy; right behind ``build_rows``, which writes anchors and drafts into the history."""
        wanted = set(plan.guided)
        groups = [g for g, (rid, _) in enumerate(plan.sampling) if rid in wanted]
        ids = tuple(plan.sampling[g][0] for g in groups)
        g = upload(torch.tensor(groups, dtype=torch.int64), self.device)
        offset = samples.offset[g]
        row = samples.rows[offset.clamp_max(samples.rows.shape[0] - 1)]
        position = rows.positions[row]
        reach = torch.arange(-self.gamma, self.gamma + 1, device=self.device)
        place = (position.unsqueeze(-1) + reach).clamp(0, state.history.shape[1] - 1)
        tokens = state.history[samples.slots[g].unsqueeze(-1), place]
        head = torch.stack((position, offset, samples.width[g]), -1)
        packet = to_host(torch.cat((head, tokens), -1))
        arrived = None
        if self.device.type != "cpu":
            arrived = torch.cuda.Event()
            arrived.record()
        return Question(ids, packet, arrived)

    def answer(self, question: Question) -> tuple[Tensor, Tensor] | None:
        """(sampling rows int64 [n], their masks int32 [n, ceil(V / 32)]), or None if nothing is restricted.

        The synchronisation "grammar drafts".
        """
        with self.guard.named("grammar drafts"):
            if question.arrived is not None:
                question.arrived.synchronize()
            lines = question.packet.tolist()
        where: list[int] = []
        masks: list[Words] = []
        live = [(rid, line) for rid, line in zip(question.request_ids, lines, strict=True) if line[2]]
        for (rid, line), found in zip(live, self._walk(live), strict=True):
            question.allowed[rid] = len(found) - 1
            for depth, mask in enumerate(found):
                if mask is not None:
                    where.append(line[1] + depth)
                    masks.append(mask)
        if not where:
            return None
        words = torch.from_numpy(np.stack(masks).view(np.int32))
        rows = torch.tensor(where, dtype=torch.int64)
        return upload(rows, self.device), upload(words, self.device)

    def _walk(self, live: list[tuple[int, list[int]]]) -> list[list[Words | None]]:
        """Masks by group; a grammar's in threads: it may take too long, and lets go of the interpreter."""
        out: list[list[Words | None]] = [[] for _ in live]
        grammars = []
        for i, (rid, line) in enumerate(live):
            guide = self.guides[rid]
            if guide.lost:
                out[i] = guide.nothing()
            elif guide.matcher is None:
                out[i] = self._rows(guide, line)
            else:
                grammars.append((i, guide, line))
        found = self.threads.run([partial(self._rows, guide, line) for _, guide, line in grammars])
        for (i, guide, _), masks in zip(grammars, found, strict=True):
            if masks is None:
                limit = f"structured_mask_seconds={self.threads.seconds:g}"
                guide.lose(f"a mask took longer than {limit}; simplify the grammar or raise the limit")
            out[i] = masks if masks is not None else guide.nothing()
        return out

    def _rows(self, guide: Guide, line: list[int]) -> list[Words | None]:
        """Masks of one group, from its line of the packet."""
        position, _, width, *tokens = line
        fresh = position + 1 - guide.position
        assert 0 <= fresh <= self.gamma + 1, "a step commits at most all drafts and one more"
        newest = self.gamma + 1
        return guide.rows(tokens[newest - fresh : newest], tokens[newest : newest + width - 1])
