"""Hopper's form of attention has the plain one's values, and a row's bits do not depend on its company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the 'gpu' extra is not installed")

from firesteel.core import RowBatch
from firesteel.ops.triton import attention, gathered, launch, why_not
from firesteel.ops.triton.target import of_device
from firesteel.ops.types import PassContext

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(launch.INTERPRETED, reason="kernels run under the interpreter in this process"),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.skipif(not launch.usable(), reason="an NVIDIA device of capability 9 is needed"),
]

DIM, RING, SPAN, PAGE, ROWS, GROUP = 512, 152, 128, 256, 320, 8
KINDS = {  # ratio of entries, first position, heads
    "window": (0, 90, 64),
    "block": (0, 300, 64),
    "chosen": (4, 2500, 128),
    "seen": (4, 1000, 64),  # all that a row sees: from 4 tiles to 6
    "all": (128, 3000, 64),
    "parts": (128, 66000, 64),
}


class Pass:
    """Groups of eight rows of one request each; some windows are not full, some entries not chosen."""

    def __init__(self, kind: str) -> None:
        self.kind, (self.ratio, start, self.heads) = kind, KINDS[kind]
        rng = torch.Generator("cuda").manual_seed(3)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device="cuda", generator=rng).bfloat16()

        rows = torch.arange(ROWS, device="cuda")
        slots = rows // GROUP
        self.first, self.slots = slots * GROUP, slots
        self.positions = start + slots * 7 + rows % GROUP
        end = start + ROWS + GROUP
        requests, pages = ROWS // GROUP, end // PAGE + 1
        self.most = end
        self.pages = torch.randperm(requests * pages, device="cuda", generator=rng).view(requests, pages)
        self.q, self.kv = normal(ROWS, self.heads * DIM), normal(ROWS, DIM)
        self.ring = normal(requests, RING, DIM)
        self.entries = normal(requests * pages, PAGE // self.ratio, DIM) if self.ratio else None
        self.chosen: Tensor | None = None
        if kind == "chosen":
            order = torch.rand(ROWS, start // 4, device="cuda", generator=rng).argsort(-1)
            self.chosen = order[:, :512].sort(-1).values.contiguous()
            self.chosen[::3, -70:] = -1
        if kind == "seen":
            order = torch.arange(512, device="cuda").expand(ROWS, 512)
            self.chosen = torch.where(order < (self.positions[:, None] + 1) // 4, order, -1)
        angle = torch.rand(ROWS, 32, device="cuda", generator=rng)
        self.angles = angle.cos(), angle.sin()
        self.sinks = torch.randn(self.heads, device="cuda", generator=rng)

    def run(self, rows: Tensor) -> Tensor:
        """Output of whole groups ``rows``."""
        place = torch.arange(len(rows), device="cuda")
        batch = RowBatch(
            tokens=place, positions=self.positions[rows], slots=self.slots[rows], first=place // GROUP * GROUP,
            last=place // GROUP * GROUP + GROUP - 1, valid=torch.ones_like(place, dtype=torch.bool),
            max_position=self.most,
        )  # fmt: skip
        rotary = {"t": (self.angles[0][rows], self.angles[1][rows])}
        ctx = PassContext(batch, self.pages, PAGE, rotary, {}, GROUP if self.kind == "block" else 0)
        q = attention.unturned(self.q[rows], self.heads, 1e-6)
        chosen = None if self.chosen is None else self.chosen[rows]
        return attention.attention(
            q, self.kv[rows], self.ring, SPAN, self.sinks, self.entries, self.ratio, chosen, "t", ctx,
            torch.bfloat16, True, of_device(q.device),
        )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_gathered_keys(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "GATHERED", True)
    monkeypatch.setattr(attention, "RELAY_FROM", 1 << 30)
    world = Pass(kind)
    rows = torch.arange(ROWS, device="cuda")
    got = world.run(rows)
    groups = rows.view(-1, GROUP)
    for few in (1, 3, 8, 9, 20, 33):
        picked = groups[torch.randperm(len(groups), device="cuda")[:few]].flatten()
        assert torch.equal(world.run(picked), got[picked]), few
    for pieces in (1, 2, 4):
        monkeypatch.setattr(gathered, "pieces_of", lambda items, most, pieces=pieces: pieces)
        assert torch.equal(world.run(rows), got), pieces
    monkeypatch.setattr(attention, "RELAY_FROM", 1)  # no kernel of its own for rows of several parts
    for few in (1, 3, 8, 17, 33, len(groups)):  # programs with one row up to rows of several groups
        picked = groups[torch.randperm(len(groups), device="cuda")[:few]].flatten()
        assert torch.equal(world.run(picked), got[picked]), ("relay", few)
    monkeypatch.setattr(attention, "GATHERED", False)
    plain = world.run(rows)
    assert not torch.equal(got, plain), "both ran the same form"
    torch.testing.assert_close(got, plain, rtol=2e-2, atol=4e-3)
