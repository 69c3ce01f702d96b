"""The drafter's ops on the CPU: what the compiled backend does in one call against the plain composition."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel.checkpoint.codecs import QTensor
from firesteel.ops import BackendError, Numerics, Ops, build
from firesteel.ops.testing import World, assert_close, assert_row_invariant, same_bits, slot_state
from firesteel.ops.testing_cases import GEOMETRIES, cached, normal, weight
from firesteel.ops.types import (
    Calibration,
    ContextWeights,
    DraftStage,
    Hyper,
    Linear,
    MarkovHead,
    Norm,
    Proposal,
    Router,
)
from oracles.cases import CASES
from oracles.drive import Drive, load_target, row_batch
from oracles.slots import both_backends, random_state

BACKENDS = ("reference", "native")
NAN = float("nan")


def make_ops(backend: str, official: bool) -> Ops:
    try:
        return build(backend, Numerics(official))
    except BackendError as err:
        pytest.skip(str(err))


@pytest.fixture(params=(1, 2), ids=("1thread", "2threads"))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(params=(False, True), ids=("float32", "official"))
def official(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def native() -> None:
    make_ops("native", False)  # skips where the library cannot be built


# ---- context rows, attention and the walk ---------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
def test_block_attention(backend: str, official: bool, threads: int) -> None:
    g, width = GEOMETRIES["csa"], 5
    world, sinks = World(g), normal(g.heads)
    ops, oracle = make_ops(backend, official), make_ops("reference", official)

    def run(of: Ops, starts: list[tuple[int, int]]) -> Tensor:
        rows = [(slot, at + i) for slot, at in starts for i in range(width)]
        ctx = replace(world.context(of, rows), block=width)
        ring = world.ring(world.kv, g.ring, rows)
        q, kv = world.pick(world.q, rows), world.pick(world.kv, rows)
        return of.block_attention(q, kv, ring, g.span, sinks, "main", ctx)

    starts = [(2, 0), (0, 7), (1, 250), (3, 100)]
    got = run(ops, starts)
    for i, start in enumerate(starts):
        assert same_bits(run(ops, [start]), got[i * width : (i + 1) * width])
    want = run(oracle, starts)
    assert_close(got, want, want, grid=official, flips=0.05)


class Context:
    """Tapped streams of every row of a world and weights for them; ``kinds`` of the stages' wkv."""

    KEY, HC = "csa", {2: 4, 3: 2}  # streams by taps

    def __init__(self, taps: int, kinds: tuple[str, ...]):
        self.g = g = GEOMETRIES[self.KEY]
        self.world, self.kinds, self.taps = World(g), kinds, taps
        self.h = self.world.normal(taps, g.slots, g.length, self.HC[taps], g.hidden)

    def weights(self, ops: Ops) -> ContextWeights:
        g = self.g

        def wkv(kind: str, seed: int) -> tuple[Linear, Norm]:
            return ops.linear_weight(weight(kind, g.dim, g.hidden, seed)), Norm(1 + 0.1 * normal(g.dim), 1e-6)

        def make() -> ContextWeights:
            project = ops.linear_weight(weight("fp8", g.hidden, self.taps * g.hidden))
            norm = Norm(1 + 0.1 * normal(g.hidden), 1e-5)
            return ContextWeights(project, norm, tuple(wkv(k, s) for s, k in enumerate(self.kinds)), "main")

        return cached(ops, f"context{self.taps}{self.kinds}", make)  # many rings meet the same weights

    def run(
        self, ops: Ops, batches: list[list[Any]], sizes: list[int], plain: bool = False, first: Any = None
    ) -> list[Tensor]:
        """Rings after passes over ``batches``; a pass sees its rows' streams shifted by its number."""
        rings = [torch.full((self.g.slots + 1, n, self.g.dim), NAN) for n in sizes]
        passes = [
            ([self.world.pick(h, rows) + i for h in self.h], self.world.context(ops, rows))
            for i, rows in enumerate(batches)
        ]
        given = (passes, self.weights(ops), rings, first)
        Ops.context_rows(ops, *given) if plain else ops.context_rows(*given)
        return rings


@pytest.mark.parametrize("kinds", [("fp8", "fp8", "fp8"), ("bf16",), ("fp8", "f32", "fp4")])
@pytest.mark.parametrize("taps", [2, 3])
def test_context_rows_equal_the_plain_composition(
    native: Any, taps: int, kinds: tuple[str, ...], official: bool, threads: int
) -> None:
    ops, rng, context = make_ops("native", official), random.Random(1), Context(taps, kinds)
    for size, ring in ((1, 22), (7, 22), (40, 22), (150, 22), (60, 300)):
        rows, sizes = context.world.batch(size, rng), [ring + i for i in range(len(kinds))]
        got, want = (context.run(ops, [rows], sizes, plain) for plain in (False, True))
        for a, b in zip(got, want, strict=True):
            assert same_bits(a[:-1], b[:-1])
            real = len({row for row in rows if row is not None})
            assert 0 < int((~torch.isnan(a[:-1, :, 0])).sum()) <= real
        assert all(bool(torch.isnan(a[-1]).all()) for a in got)  # padding costs nothing
    padding = context.run(ops, [[None, None]], sizes)
    assert all(bool(torch.isnan(a).all()) for a in padding)
    for _ in range(4):  # several passes, of which later ones run positions again
        batches = [context.world.batch(9, rng) for _ in range(3)]
        batches.insert(2, batches[0][:3])
        got, want = (context.run(ops, batches, sizes, plain) for plain in (False, True))
        assert all(same_bits(a[:-1], b[:-1]) for a, b in zip(got, want, strict=True))


def test_context_rows_of_some_slots_from_some_pass_on(native: Any, official: bool, threads: int) -> None:
    ops, rng, context = make_ops("native", official), random.Random(2), Context(2, ("fp8", "bf16"))
    slots, written = context.g.slots, 0
    for size in (22, 300):  # rings of one size: what a later pass overwrites is not computed
        for _ in range(4):
            batches = [context.world.batch(9, rng) for _ in range(4)]
            first = torch.tensor([rng.randint(0, 5) for _ in range(slots)] + [4])
            got, want = (context.run(ops, batches, [size] * 2, plain, first) for plain in (False, True))
            assert all(same_bits(a[:-1], b[:-1]) for a, b in zip(got, want, strict=True))
            for slot in range(slots):
                rows = [
                    r for i, b in enumerate(batches) for r in b if r and r[0] == slot and i >= first[slot]
                ]
                assert bool(torch.isnan(got[0][slot]).all()) == (not rows)
                written += bool(rows)
    assert written > 4


@pytest.mark.parametrize("backend", BACKENDS)
def test_context_rows_are_invariant(backend: str, official: bool, threads: int) -> None:
    ops, context = make_ops(backend, official), Context(3, ("fp8", "bf16"))

    def stored(rows: list[Any]) -> tuple[Tensor, ...]:  # rings that keep every row
        rings = context.run(ops, [rows], [context.g.length] * 2)
        return tuple(context.world.pick(ring, rows) for ring in rings)

    pool = [(s, p) for s in range(context.g.slots) for p in range(context.g.length)]
    sizes = (2, 5, 8, 9, 16, 33, 64) if backend == "native" else (2, 9, 33)
    assert_row_invariant(stored, lambda r: r, pool, batches=context.world.batch, sizes=sizes, alone=8)


def random_stage(ops: Ops, hashed: bool, hc: int) -> DraftStage:
    """A stage of the csa world's widths; ``hashed`` routing, two shared experts or none."""
    g, experts, inner = GEOMETRIES["csa"], 6, 64
    d, wide = g.hidden, g.heads * g.dim

    def linear(kind: str, n: int, k: int, seed: int) -> Linear:
        return ops.linear_weight(weight(kind, n, k, seed))

    def hyper(seed: int) -> Hyper:
        n = (2 + hc) * hc
        scale = torch.tensor([0.5, 0.4, 0.3])
        return Hyper(linear("f32", n, hc * d, seed), normal(n, seed=seed), scale, 5, 1e-6, 1e-6)

    def norm(n: int) -> Norm:
        return Norm(1 + 0.1 * normal(n), 1e-6)

    def each(n: int, k: int, seed: int) -> list[QTensor]:
        return [weight("fp4", n, k, seed + e) for e in range(experts)]

    table = torch.randint(0, experts, (64, 1), generator=torch.Generator().manual_seed(1))
    bias = None if hashed else 0.1 * normal(experts)
    shared = (ops.stacked_weight([weight("fp8", inner, d, s) for s in (8, 9)]), linear("fp8", d, inner, 7))
    return DraftStage(
        attn_hyper=hyper(1),
        attn_norm=norm(d),
        wq_a=linear("fp8", 40, d, 1),
        q_norm=norm(40),
        wq_b=linear("fp8", wide, 40, 2),
        wkv=linear("fp8", g.dim, d, 3),
        kv_norm=norm(g.dim),
        sinks=normal(g.heads),
        wo_a=(linear("bf16", 24, wide // 2, 4), linear("bf16", 24, wide // 2, 5)),
        wo_b=linear("fp8", d, 48, 6),
        ffn_hyper=hyper(2),
        ffn_norm=norm(d),
        router=Router(linear("f32", experts, d, 7), bias, table if hashed else None, 1 if hashed else 3, 1.5),
        experts=ops.expert_weights(each(inner, d, 10), each(d, inner, 30), each(inner, d, 20)),
        shared=() if hashed else (shared, shared),
        heads=g.heads,
        span=g.span,
        eps=1e-6,
        limit=7.0,
        table="main",
    )


@pytest.mark.parametrize(("hashed", "hc"), [(False, 4), (True, 2)])
def test_draft_stage_equals_the_plain_composition(
    native: Any, hashed: bool, hc: int, official: bool, threads: int
) -> None:
    g, width, ops = GEOMETRIES["csa"], 5, make_ops("native", official)
    world, stage = World(g), random_stage(ops, hashed, hc)
    for starts in ([(2, 0)], [(0, 7), (1, 250), (3, 100), (2, 255)]):
        rows = [(slot, at + i) for slot, at in starts for i in range(width)]
        h = world.normal(len(rows), hc, g.hidden)
        ring, before = world.ring(world.kv, g.ring, rows), h.clone()
        passes = [replace(world.context(ops, rows), block=width) for _ in range(2)]
        got = ops.draft_stage(h, stage, ring, passes[0])
        assert same_bits(got, Ops.draft_stage(ops, h, stage, ring, passes[1]))
        assert bool(torch.isfinite(got).all()) and torch.equal(h, before)


@pytest.mark.parametrize("rejection", [False, True])
def test_markov_walk(rejection: bool, official: bool) -> None:
    groups, depth, vocab, rank, d = 5, 4, 600, 24, 40
    base, z = 2 * normal(groups, depth, vocab), normal(groups, depth, d, seed=1)
    w1, slots = normal(vocab, rank, seed=2), torch.tensor([3, 0, 4, 1, 2])
    results = []
    for backend in ("native", "reference"):
        ops = make_ops(backend, official)
        w2, confidence = weight("bf16", vocab, rank), weight("bf16", 1, d + rank)
        head = MarkovHead(w1, ops.linear_weight(w2), ops.linear_weight(confidence))
        state = slot_state(
            6,
            vocab,
            30,
            temperature=torch.tensor([0.0, 0.8, 1.0, 0.0, 2.0, 0.0]),
            cursor=torch.tensor([3, 9, 27, 11, 5, 0]),
            anchor=torch.tensor([1, 2, 3, 4, 599, 0]),
            seed_lo=torch.arange(6),
            passes=torch.arange(6),
        )
        walk = ops.markov_walk(
            base, z, head, slots, state, shaped=False, rejection=rejection, keep_logits=True
        )
        if backend == "native":  # shaping changes nothing where nobody asks for it, nor do batch-mates
            again = ops.markov_walk(
                base, z, head, slots, state, shaped=True, rejection=rejection, keep_logits=False
            )
            assert torch.equal(again.tokens, walk.tokens) and again.logits is None
            one = ops.markov_walk(
                base[2:3],
                z[2:3],
                head,
                slots[2:3],
                state,
                shaped=False,
                rejection=rejection,
                keep_logits=True,
            )
            for name in ("tokens", "margin", "confidence", "logits"):
                assert same_bits(getattr(one, name)[0], getattr(walk, name)[2])
        results.append((walk, state.history))
    (got, history), (want, expected) = results
    assert torch.equal(got.tokens, want.tokens) and torch.equal(history, expected)
    for name in ("margin", "confidence", "logits"):
        assert torch.allclose(getattr(got, name), getattr(want, name), rtol=1e-5, atol=2e-5), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_tapped_streams_are_left_alone(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The streams that a pass hands to the drafter at its end are those that its layers gave."""
    make_ops(backend, False)  # skips where it cannot be built
    case = CASES["mixed"]
    target = load_target(case.folder(), "official", backend)
    drive, tokens, given = Drive(target, 2, 64), case.tokens(), list[Tensor]()
    post = type(target.ops).hyper_post

    def kept(ops: Ops, *given_to: Tensor) -> Tensor:
        out = post(ops, *given_to)
        given.append(out.clone())
        return out

    monkeypatch.setattr(type(target.ops), "hyper_post", kept)
    taps = list(range(target.config.num_hidden_layers))[::-1]
    with torch.inference_mode():
        for at in range(0, 20, 10):
            given.clear()
            ctx = target.begin(row_batch([(1, at, tokens[at : at + 10])], 2, 2, 0), drive.memory.page_table)
            h, streams = target.forward(ctx, drive.memory.layers, taps)
            target.collapse(h)
            assert len(streams) == len(taps)
            for i, stream in zip(taps, streams, strict=True):
                assert same_bits(stream, given[2 * i + 1])  # the second sublayer's


# ---- rows, signals and admission --------------------------------------------------------------
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_drafts_are_noted_and_admitted_as_the_reference_does(native: Any, head: bool, known: bool) -> None:
    rng, gamma, slots, dice = random.Random(4), 5, 12, torch.Generator().manual_seed(4)
    for trial in range(30):
        state = random_state(rng, slots, gamma)
        state.max_len += torch.randint(0, 5, state.max_len.shape, generator=dice)
        state.draft_cap += torch.randint(0, gamma + 1, state.draft_cap.shape, generator=dice)
        state.temperature += torch.rand(slots + 1, generator=dice).round()
        chosen = torch.tensor(rng.sample(range(slots), rng.randint(1, slots)))
        shape = (len(chosen), rng.randint(1, gamma))
        margin = torch.randint(0, 3, shape, generator=dice) * 2.0  # ties between requests
        margin[0, 0] = (NAN, torch.inf, 1.0)[trial % 3]
        confidence = torch.randint(-1, 2, shape, generator=dice).float() if head else None
        if confidence is not None:
            confidence[-1, -1] = (1.0, NAN, -torch.inf)[trial % 3]
        tokens = torch.randint(0, 50, shape, generator=dice)
        depths = torch.randn(2, gamma, generator=dice)
        depths[0] = torch.inf
        table = Calibration(depths, torch.tensor([0.4, 0.8]), torch.tensor([1.1, 0.7])) if known else None
        noted, widths = [], []
        for ops, own in both_backends(state):
            given = (Proposal(tokens, margin, confidence, None), chosen, own, table)
            out = ops.note_drafts(*given)
            assert same_bits(out, ops.survival(*given))
            noted.append([out, *(t for t in vars(own).values() if isinstance(t, Tensor))])
            own.survival.copy_((own.survival * 8).round() / 8)  # both judge the same values, with ties
            for drafts in (0, 1, 3, 10, 99):
                widths.append(ops.admit(chosen, drafts, own))
        for got, want in zip(*noted, strict=True):
            torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-7, equal_nan=True)
        for got, want in zip(widths[:5], widths[5:], strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("groups", [0, 1, 12])
def test_block_rows_equal_the_reference(native: Any, groups: int) -> None:
    slots = torch.randperm(12, generator=torch.Generator().manual_seed(2))[:groups]
    ((a, mine), (b, theirs)) = both_backends(random_state(random.Random(7), 12, 4))
    got, want = a.block_rows(slots, 5, 49, mine), b.block_rows(slots, 5, 49, theirs)
    for name, value in vars(want).items():
        assert torch.equal(getattr(got, name), value) if isinstance(value, Tensor) else name == "max_position"
