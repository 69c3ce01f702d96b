"""Looking up simulated acceptance by kernels, under the interpreter."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated

import pytest
import torch

pytest.importorskip("triton")

from firesteel.config import SimulatedAcceptance
from firesteel.engine.slots import Slots
from firesteel.ops.triton import drawn
from firesteel.ops.types import Proposal
from firesteel.speculation.simulated import Simulator

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("width", [1, 3])
def test_kernels_find_what_indexing_finds(width: int) -> None:
    device, slots, lines = torch.device("cpu"), 4, 40
    state = Slots(slots, 97, lines, 3, device).state
    state.seed_lo[:] = torch.arange(5, 5 + state.seed_lo.shape[0])
    state.cursor[:] = 7
    state.cursor[:3] = torch.tensor([3, state.history.shape[1] - 1, 900])  # the last one lies past the end
    plain = Simulator(SimulatedAcceptance(rates=(0.8, 0.6)), 3, 97, device, tuple(state.history.shape))
    plain.prepare(torch.arange(3), state)
    some = torch.tensor([2, 0, 1, 2])
    real = Proposal(torch.zeros(4, width).long(), torch.zeros(4, width), torch.zeros(4, width), None)
    want, tokens = plain.proposal(real, some, state), plain.tokens(some, state.cursor[some], state)
    plain._kernels = drawn
    got = plain.proposal(real, some, state)
    for name in ("tokens", "margin", "confidence"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert torch.equal(plain.tokens(some, state.cursor[some], state), tokens)
    assert want.tokens.unique().numel() > 1
