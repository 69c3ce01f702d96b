"""What the Triton backend does in other launches than the ops it stands for: context rows, shared experts."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the 'gpu' extra is not installed")

from firesteel.ops import Numerics
from firesteel.ops.interface import Ops
from firesteel.ops.testing import Geometry, World, same_bits
from firesteel.ops.testing_cases import normal, weight
from firesteel.ops.triton import context
from firesteel.ops.triton.backend import TritonOps
from firesteel.ops.triton.linear import Scratch
from firesteel.ops.types import ContextWeights, Norm, Router

pytestmark = pytest.mark.cpu


# ---- context rows ----------------------------------------------------------------------
def context_weights(
    ops: TritonOps, dim: int, hidden: int, taps: int, kinds: tuple[str, ...]
) -> ContextWeights:
    project = ops.linear_weight(weight("fp8", hidden, taps * hidden))
    stages = tuple(
        (ops.linear_weight(weight(kind, dim, hidden, s)), Norm(1 + 0.1 * normal(dim), 1e-6))
        for s, kind in enumerate(kinds)
    )
    return ContextWeights(project, Norm(1 + 0.1 * normal(hidden), 1e-5), stages, "main")


@pytest.mark.parametrize(
    "hidden, dim, taps, kinds, joined",
    [
        (256, 128, 3, ("fp8", "fp8", "fp8"), True),
        (256, 128, 2, ("fp8", "fp8"), True),
        (96, 128, 2, ("fp8", "fp8"), True),  # no whole blocks: taps one by one
        (256, 128, 2, ("fp8", "bf16"), False),
        (256, 96, 2, ("fp8", "fp8"), False),
    ],
)
def test_context_rows_have_the_bits_of_the_ops(
    hidden: int, dim: int, taps: int, kinds: tuple[str, ...], joined: bool
) -> None:
    g = Geometry(hidden=hidden, dim=dim, rope=32)
    ops, world, rng = TritonOps(Numerics(True)), World(g), random.Random(5)
    w = context_weights(ops, dim, hidden, taps, kinds)
    assert (context.Joined.of(w) is not None) == joined
    h = world.normal(taps, g.slots, g.length, 4, hidden)
    for size, ring in ((1, 22), (9, 22), (40, 12)):
        rows = world.batch(size, rng)
        ctx = world.context(ops, rows)
        streams = [world.pick(part, rows).to(ops.store) for part in h]
        got, want = ([torch.zeros(g.slots + 1, ring, dim, dtype=ops.store) for _ in kinds] for _ in range(2))
        ops.context_rows([(streams, ctx)], w, got)
        Ops.context_rows(ops, [(streams, ctx)], w, want)
        assert all(same_bits(a[:-1], b[:-1]) for a, b in zip(got, want, strict=True))
        assert float(got[0][:-1].abs().max()) > 0


# ---- shared experts on a second stream ---------------------------------------------------
class Recorded:
    """As ``Aside``, without a device: notes the order of things."""

    def __init__(self) -> None:
        self.scratch, self.seen = Scratch(torch.device("cpu")), []  # type: ignore[var-annotated]
        self.held: list[Tensor] = []

    @contextmanager
    def fork(self, owner: Any) -> Iterator[None]:
        first, owner.scratch = owner.scratch, self.scratch
        self.seen.append("fork")
        yield
        owner.scratch = first
        self.seen.append("back")

    def hold(self, tensors: Iterable[Tensor]) -> None:
        self.held.extend(tensors)

    def join(self) -> None:
        self.held.clear()
        self.seen.append("join")


def run(ops: TritonOps, rows: int, stacked: bool, seen: list[str]) -> Tensor:
    """Router, routed and shared experts; notes the products and with whose counters they count."""
    top, experts, hidden, inner = 2, 5, 256, 128
    up = [[weight("fp4", inner, hidden, seed=10 * i + e) for e in range(experts)] for i in (1, 2)]
    w = ops.expert_weights(up[0], [weight("fp4", hidden, inner, seed=30 + e) for e in range(experts)], up[1])
    gate = ops.linear_weight(weight("bf16", 64, hidden))
    shared = [
        tuple(ops.linear_weight(weight("fp8", n, k, 7)) for n, k in ((2 * inner, hidden), (hidden, inner)))
    ]
    if stacked:
        ops.share_input([(gate, True), (shared[0][0], False)])
    x = ops.norm(normal(rows, hidden).to(ops.store), Norm(None, 1e-6))
    router = Router(gate=gate, bias=torch.zeros(64), table=None, top_k=top, scale=1.0)
    linear, main = type(ops).linear, ops.scratch

    def noted(given: Tensor, of: Any) -> Tensor:
        seen.append("main" if ops.scratch is main else "aside")
        return linear(ops, given, of)

    ops.linear = noted  # type: ignore[method-assign]
    begun = ops.begin_shared(x, router, shared, 1.5)
    if isinstance(ops.aside, Recorded):  # what the first stream made lives until the second has read it
        assert len(ops.aside.held) == (stacked and rows <= 32)
    ids, share = ops.route(x, router, torch.zeros(rows, dtype=torch.int64))
    out = ops.moe(x, ids % experts, share, w, shared, 1.5, None, begun)
    assert ops.scratch is main
    assert not isinstance(ops.aside, Recorded) or not ops.aside.held
    return out


@pytest.mark.parametrize("stacked", (False, True))
@pytest.mark.parametrize("rows", (3, 40))
def test_shared_experts_beside_the_router_have_the_same_bits(rows: int, stacked: bool) -> None:
    plain = run(TritonOps(Numerics(True)), rows, stacked, [])
    ops, noted = TritonOps(Numerics(True)), Recorded()
    ops.aside = noted  # type: ignore[assignment]
    got = run(ops, rows, stacked, noted.seen)
    assert same_bits(got, plain)
    order = [s for s in noted.seen if s != "main"]
    # one launch with the gate leaves the second product alone for the second stream
    assert order == ["fork", *["aside"] * (1 if stacked and rows <= 32 else 2), "back", "join"]
    assert "main" not in noted.seen[noted.seen.index("back") :], (
        "nothing of the shared experts is left for later"
    )


def test_who_starts_nothing_says_so() -> None:
    ops = TritonOps(Numerics(True))
    assert ops.aside is None, "the interpreter has one stream"
    assert ops.begin_shared(normal(2, 256), None, [], 1.0) is None  # type: ignore[arg-type]


def test_a_shared_product_that_the_second_stream_reads_is_held() -> None:
    """Its memory would be given out again on the first stream while it is read."""
    ops, noted = TritonOps(Numerics(True)), Recorded()
    ops.aside = noted  # type: ignore[assignment]
    one, two = (ops.linear_weight(weight("fp8", 128, 256, s)) for s in (1, 2))
    ops.share_input([(one, False), (two, False)])
    x = ops.norm(normal(3, 256).to(ops.store), Norm(None, 1e-6))
    ops.linear(x, one)
    with ops.beside():
        made = ops.linear(x, two)
    assert [t is made for t in noted.held] == [True]
    ops.join()
    assert not noted.held
