"""The tail's kernels on a device, at the widths of the real head: bits over row counts, values, truncation."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from firesteel.ops.reference.tail import ReferenceOps
from firesteel.ops.testing import slot_state
from firesteel.ops.types import Linear, MarkovHead, Numerics, SlotState

pytestmark = pytest.mark.gpu
VOCAB, HIDDEN, RANK = 129280, 4096, 256
ROWS = (1, 2, 7, 16, 17, 31, 64, 65, 128, 129, 300, 512)
SLOTS = 300


@pytest.fixture(scope="module")
def ops() -> ReferenceOps:
    from firesteel.ops.triton import TritonOps

    return TritonOps(Numerics(True))


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=g, device="cuda") * scale


@pytest.fixture(scope="module")
def head() -> Linear:
    data = draw(VOCAB, HIDDEN, scale=3 * HIDDEN**-0.5).bfloat16()
    return Linear(data, VOCAB, HIDDEN, False)


@pytest.fixture(scope="module")
def state() -> SlotState:
    g = torch.Generator().manual_seed(1)
    plain = slot_state(
        SLOTS,
        VOCAB,
        600,
        7,
        temperature=torch.where(torch.arange(SLOTS) % 3 == 0, 0.0, 1.0),
        seed_lo=torch.randint(0, 2**32, (SLOTS,), generator=g),
        seed_hi=torch.randint(0, 2**32, (SLOTS,), generator=g),
        cursor=torch.randint(0, 500, (SLOTS,), generator=g),
        anchor=torch.randint(0, VOCAB, (SLOTS,), generator=g),
    )
    there = {f.name: getattr(plain, f.name) for f in fields(SlotState)}
    return SlotState(**{k: None if t is None else t.cuda() for k, t in there.items()})


def test_head_rows_have_the_same_bits_in_every_count(
    ops: ReferenceOps, head: Linear, state: SlotState
) -> None:
    most = max(ROWS)
    x = draw(most, HIDDEN, seed=2).bfloat16()
    slots = torch.arange(most, device="cuda") % SLOTS
    positions = torch.arange(most, device="cuda") % 590 + 1
    logits = ops.logits(x, head)
    tokens, finite = ops.sample(logits, slots, positions, state)
    assert bool(finite.all())
    exact = x[:64].double() @ head.data.double().t()
    assert float((logits[:64] - exact).norm() / exact.norm()) < 1e-5
    greedy = state.temperature[slots] == 0
    assert torch.equal(tokens[greedy], logits[greedy].argmax(-1))
    for n in ROWS:
        for start in (0, most - n):
            part = slice(start, start + n)
            assert torch.equal(ops.logits(x[part], head), logits[part]), f"logits of {n} rows"
            got, _ = ops.head_sample(x[part], head, slots[part], positions[part], state)
            assert torch.equal(got, tokens[part]), f"fused sampling of {n} rows"


def test_walk_has_the_same_bits_in_every_count(ops: ReferenceOps, state: SlotState) -> None:
    most, depth = 260, 5
    w2 = draw(VOCAB, RANK, seed=3, scale=RANK**-0.5).bfloat16()
    confidence = draw(1, HIDDEN + RANK, seed=4, scale=HIDDEN**-0.5).bfloat16()
    w1 = draw(VOCAB, RANK, seed=5).bfloat16().float()
    markov = MarkovHead(w1, Linear(w2, VOCAB, RANK, False), Linear(confidence, 1, HIDDEN + RANK, False))
    base, z = draw(most, depth, VOCAB, seed=6), draw(most, depth, HIDDEN, seed=7).bfloat16()
    slots = torch.arange(most, device="cuda")

    def walk(part: slice) -> tuple[Tensor, ...]:
        p = ops.markov_walk(
            base[part], z[part], markov, slots[part], state, shaped=False, rejection=False, keep_logits=False
        )
        assert p.confidence is not None
        return p.tokens, p.margin, p.confidence

    whole = walk(slice(0, most))
    for n in (1, 4, 16, 33, 64, 130):
        for got, want in zip(walk(slice(most - n, most)), whole, strict=True):
            assert torch.equal(got, want[most - n :]), f"{n} groups"
    previous, first = state.anchor[slots], whole[0][:, 0]
    logits = base[:, 0].double() + w1[previous].double() @ w2.double().t()
    greedy = state.temperature[slots] == 0
    gap = logits.gather(1, first.unsqueeze(1)).squeeze(1) - logits.amax(1)
    assert float(gap[greedy].min()) > -1e-4, "a greedy draft is the best one"


def test_truncation_keeps_what_the_reference_keeps(ops: ReferenceOps, state: SlotState) -> None:
    n = 12
    logits = (3 * draw(n, VOCAB, seed=8)).round() / 4  # many ties
    slots = torch.arange(n, device="cuda")
    for name, values in {
        "temperature": [1.0, 0.7, 1.5],
        "top_k": [0, 40, 1000],
        "top_p": [0.9, 1.0, 0.5],
        "min_p": [0.0, 0.05, 0.0, 0.0],
    }.items():
        table = getattr(state, name)
        table[:n] = torch.tensor(values, device="cuda").repeat(n)[:n].to(table.dtype)
    plain = ReferenceOps(Numerics(True))
    got, want = (o.shape(logits, slots, slots + 5, state) for o in (ops, plain))
    off = (torch.isfinite(got) != torch.isfinite(want)).sum(1)
    assert int(off.max()) <= 2, "cumulative sums in float32 may put one token on the other side"
    alone = torch.cat(
        [ops.shape(logits[i : i + 1], slots[i : i + 1], slots[i : i + 1] + 5, state) for i in range(n)]
    )
    assert torch.equal(alone, got)
