"""A second stream for work that nobody waits for yet.

While one stream runs launches too small to fill the device, the other one fills
it. Inside a recording the two become branches of one graph.

What the second stream makes may be freed as soon as the first has used it: its
memory is given out again on the second stream alone, and every fork waits for
the first. What the first made and the second reads must not be freed before
``join``, since the first would give its memory out again at once: ``hold`` keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from firesteel.ops.triton.linear import Scratch


class Owner(Protocol):
    """Who launches; its kernels count their arrivals in ``scratch``."""

    scratch: Scratch


class Aside:
    """The second stream of one backend object, and its counters."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.scratch = Scratch(device)
        self.held: list[Tensor] = []  # read by the second stream, until ``join``

    @contextmanager
    def fork(self, owner: Owner) -> Iterator[None]:
        """Launches inside go to the second stream, behind all that was queued so far."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        first = owner.scratch
        owner.scratch = self.scratch
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            owner.scratch = first

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Keep what the first stream made until the second has read it."""
        self.held.extend(tensors)

    def join(self) -> None:
        """The first stream waits for the second."""
        self.held.clear()
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
