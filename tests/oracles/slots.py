"""Random requests in their slots, and a copy of them for every backend."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from firesteel.ops import Numerics, Ops, build
from firesteel.ops.testing import slot_state
from firesteel.ops.types import SlotState


def random_state(rng: random.Random, slots: int, gamma: int) -> SlotState:
    """Running requests at all sorts of places; few token ids, so that drafts hit and stops happen."""

    def ints(high: int, *shape: int) -> Tensor:
        return torch.randint(
            0, high, (slots + 1, *shape), generator=torch.Generator().manual_seed(rng.randrange(2**31))
        )

    cursor = ints(30) + 3
    return slot_state(
        slots + 1,
        50,
        60,
        gamma,
        cursor=cursor,
        anchor=ints(6),
        alive=ints(2),
        max_len=cursor + 1 + ints(6),
        stop_ids=torch.where(ints(3, 4) == 0, ints(9, 4), -1),
        drafts=ints(4, gamma),
    )


def both_backends(state: SlotState) -> Iterator[tuple[Ops, SlotState]]:
    """The compiled ops and the plain ones, each with its own copy of the slots."""
    for backend in ("native", "reference"):
        copies = {k: v.clone() for k, v in vars(state).items() if isinstance(v, Tensor)}
        yield build(backend, Numerics(False)), replace(state, **copies)
