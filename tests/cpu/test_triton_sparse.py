"""Triton kernels of attention, streams, compressors and indexer under the interpreter against plain torch."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the 'gpu' extra is not installed")

from firesteel.engine.memory import Memory
from firesteel.models.deepseek_v4.random_init import tiny_config
from firesteel.ops import Numerics, Ops, build
from firesteel.ops.reference import attention as reference_attention
from firesteel.ops.reference import linear as reference_linear
from firesteel.ops.testing import Geometry, World, assert_close, assert_row_invariant, same_bits
from firesteel.ops.testing_cases import ROW_CASES, WORLD_CASES, Case, normal, weight
from firesteel.ops.triton import attention as triton_attention
from firesteel.ops.triton import hyper as triton_hyper
from firesteel.ops.triton import moe
from firesteel.ops.triton import streams as triton_streams
from firesteel.ops.triton.backend import TritonOps
from firesteel.ops.triton.linear import quantise
from firesteel.ops.types import Hyper, Norm

pytestmark = pytest.mark.cpu

ROW_NAMES = (
    "embed",
    "norm",
    "norm_plain",
    "tap",
    "hyper_pre",
    "hyper_pre_2",
    "hyper_post",
    "hyper_post_2",
    "hyper_head",
)
# Probabilities are rounded to bf16 relative to the largest score so far, which depends on the width of a tile.
# A rounding is off by 1/sqrt(12) of a step, the difference of two by sqrt(2) of that, and so is a sum of many
# random terms relative to its own size: it crosses an edge of its grid in sqrt(2/pi) * 0.41 = 0.33 of the cases.
FLIPS = 0.35
CASES = {**{name: ROW_CASES[name] for name in ROW_NAMES}, **WORLD_CASES}


@pytest.fixture(params=(True, False), ids=("official", "float32"), scope="module")
def ops(request: pytest.FixtureRequest) -> TritonOps:
    return TritonOps(Numerics(bool(request.param)))


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def in_double(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    """The oracle with products summed in float64."""
    with monkeypatch.context() as patch:
        patch.setattr(reference_linear, "matmul_rows", lambda x, w: (x.double() @ w.double().T).float())
        patch.setattr(reference_attention, "bmm_rows", lambda a, b: torch.bmm(a.double(), b.double()).float())
        return run()


def compare(case: Case, ops: Ops, rows: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = build("reference", ops.numerics)
    got, want = as_tuple(case.run(ops, rows)), as_tuple(case.run(oracle, rows))
    exact = as_tuple(in_double(monkeypatch, lambda: case.run(oracle, rows)))
    real = torch.tensor([row is not None for row in rows])
    for i, (g, w, e) in enumerate(zip(got, want, exact, strict=True)):
        g, w, e = g[real], w[real], e[real]
        if case.exact:
            assert same_bits(g, w)
        elif i in case.ids:
            differ = (g != w).reshape(len(g), -1).any(-1)
            assert float(differ.double().mean()) <= (0.03 if ops.numerics.official else 0.0)
        else:
            assert_close(
                g, w, e, grid=ops.numerics.official, flips=FLIPS if "attention" in case.name else 0.03
            )


@pytest.mark.parametrize("name", CASES)
def test_computes_what_reference_does(name: str, ops: TritonOps, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    rows = case.world.batch(9, random.Random(5)) if case.world else case.rows[:17]
    compare(case, ops, rows, monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_invariant(name: str, ops: TritonOps) -> None:
    if not ops.numerics.official and name.startswith(("hca16", "hca128")):
        pytest.skip("the interpreter is slow; csa and hca8 run the same kernels")
    case = CASES[name]
    batches = case.world.batch if case.world else None
    assert_row_invariant(
        lambda r: case.run(ops, r), lambda r: r, case.rows, batches=batches, sizes=(7,), alone=3
    )


# ---- keys of several parts, and the drafter's block ----------------------------------
SMALL = Geometry(heads=3, dim=32, rope=16, span=16, ring=22, ratio=4, length=300)


def attention_case(world: World, chosen: int) -> Case:
    g, sinks, rng = world.g, normal(world.g.heads), random.Random(0)

    def run(ops: Ops, rows: list[Any]) -> Tensor:
        ctx, pick = world.context(ops, rows), world.pick
        pages = world.paged(world.entries, rows, after=True)
        selection = world.chosen(rng, rows, chosen) if chosen else None
        ring, q, kv = world.ring(world.kv, g.ring, rows), pick(world.q, rows), pick(world.kv, rows)
        return ops.attention(q, kv, ring, g.span, sinks, pages, g.ratio, selection, "compress", ctx)

    return Case("attention_parts", run, [(s, p) for s in range(g.slots) for p in range(g.length)], world)


@pytest.mark.parametrize("chosen", (0, 70), ids=("all", "chosen"))
def test_parts_of_a_row_are_merged(chosen: int, ops: TritonOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 entries a part, rows at positions past 255 have two parts and the others one."""
    monkeypatch.setattr(triton_attention, "PART", 64)
    case = attention_case(World(SMALL), chosen)
    rows = [(0, p) for p in (248, 249, 250)] + [(1, p) for p in range(255, 262)] + [(2, 299)]
    compare(case, ops, rows, monkeypatch)
    got = case.run(ops, rows)
    for row in (rows[2], rows[3], rows[-1]):  # also where the pass itself needs no more than one part
        assert same_bits(got[rows.index(row)], case.run(ops, [row])[0])


@pytest.mark.parametrize("start", (0, 5, 40))
def test_block_attention(start: int, ops: TritonOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of a block sees the rows before the block and all of the block."""
    world, width = World(SMALL), 5
    rows = [(slot, start + j) for slot in (2, 0) for j in range(width)]
    sinks = normal(SMALL.heads)

    def run(ops: Ops, drawn: list[Any]) -> Tensor:
        ctx, pick = world.context(ops, drawn), world.pick
        ctx.block = width
        ring = world.ring(world.kv, SMALL.ring, drawn)
        return ops.block_attention(
            pick(world.q, drawn), pick(world.kv, drawn), ring, SMALL.span, sinks, "main", ctx
        )

    case = Case("block_attention", run, rows, world)
    compare(case, ops, rows, monkeypatch)
    assert same_bits(run(ops, rows)[:width], run(ops, rows[:width]))


def test_attention_norms_and_turns_queries(ops: TritonOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """``queries`` and ``attention`` give what ``query`` and ``attention`` give, and the same bits in every batch."""
    world, sinks = World(SMALL), normal(SMALL.heads)

    def run(ops: Ops, rows: list[Any]) -> Tensor:
        ctx, pick = world.context(ops, rows), world.pick
        ring, q, kv = world.ring(world.kv, SMALL.ring, rows), pick(world.q, rows), pick(world.kv, rows)
        if isinstance(ops, TritonOps):
            q = ops.queries(q.flatten(1), SMALL.heads, 1e-6, "main", ctx)
        else:
            q = ops.query(q.flatten(1), SMALL.heads, 1e-6, "main", ctx)
        return ops.attention(q, kv, ring, SMALL.span, sinks, None, 0, None, "main", ctx)

    rows = [(0, p) for p in (3, 4)] + [(1, p) for p in range(40, 45)]
    compare(Case("attention_turned", run, rows, world), ops, rows, monkeypatch)
    assert same_bits(run(ops, rows)[:2], run(ops, rows[:2]))


# ---- one kernel for what two or three did ------------------------------------------------
def test_a_step_has_the_bits_of_its_parts(ops: TritonOps, monkeypatch: pytest.MonkeyPatch) -> None:
    """``hyper_step`` against ``hyper_post`` and ``hyper_pre``."""
    rows, d, hc = 21, 160, 4
    f, h, comb = normal(rows, d), normal(rows, hc, d, seed=2), torch.rand(rows, hc, hc) / hc
    if ops.numerics.official:
        f, h = f.bfloat16(), h.bfloat16()
    fn = ops.linear_weight(weight("f32", 24, hc * d))
    w = Hyper(fn, normal(24, seed=5), torch.tensor([0.5, 0.4, 0.3]), 20, 1e-6, 1e-6)
    norm, post = Norm(1 + 0.1 * normal(d), 1e-6), torch.rand(rows, hc)
    streams, *rest = ops.hyper_step(f, h, post, comb, w, norm)
    apart = ops.hyper_post(f, h, post, comb)
    assert same_bits(streams, apart)
    for got, want in zip(rest, ops.hyper_pre(apart, w, norm), strict=True):
        assert same_bits(got, want)
    monkeypatch.setattr(triton_hyper, "FEW", 0)  # a program makes the mixing matrices of several rows
    monkeypatch.setattr(triton_streams, "WALKERS", 1)  # a program walks over two tiles
    monkeypatch.setattr(triton_streams, "ROW_TILES", (16, 16))
    for got, want in zip(ops.hyper_step(f, h, post, comb, w, norm), (streams, *rest), strict=True):
        assert same_bits(got, want)
    empty = ops.hyper_step(f[:0], h[:0], post[:0], comb[:0], w, norm)
    assert [t.shape for t in empty] == [(0, hc, d), (0, d), (0, hc), (0, hc, hc)]


def test_quantised_forms_are_those_of_the_products(ops: TritonOps) -> None:
    """What a norm writes beside its result is what ``quantise`` would make of it; float32 numerics write none."""
    rows, n = 5, 256
    x = normal(rows, n) * torch.logspace(-4, 3, rows).unsqueeze(-1)
    got = ops.norm(x, Norm(normal(n, seed=2), 1e-6))
    forms = got.quantised_forms  # type: ignore[attr-defined]
    if not ops.numerics.official:
        assert not forms
        return
    q, step = forms[n, torch.float8_e4m3fn]
    want, steps = quantise(got, n, torch.float8_e4m3fn)
    assert same_bits(q.float(), want.float()) and same_bits(step, steps)


# ---- memory in the device's format ----------------------------------------------------
def test_a_snapshot_of_bf16_rings_keeps_every_bit() -> None:
    """Raw compressor rows are float32 in a bf16 arena and come back as they were."""
    config = tiny_config()
    memory = Memory(config, 2, 512, 40, 4, torch.device("cpu"), 1, torch.bfloat16)
    assert (
        memory.arena.dtype == memory.layers[0].window.dtype == memory.stages[0].window.dtype == torch.bfloat16
    )
    for ring in memory.all_rings():
        ring.copy_(torch.randn(ring.shape))
    before = [ring[0].clone() for ring in memory.all_rings()]
    pages = memory.pool.take(memory.snapshot_pages)
    assert pages is not None
    memory.write_snapshot(0, 256, pages)
    for ring in memory.all_rings():
        ring.zero_()
    memory.read_snapshot(pages, 1, 256)
    kept = 0
    for ring, old in zip(memory.all_rings(), before, strict=True):
        got = ring[1] != 0
        assert torch.equal(ring[1][got], old[got])
        kept += int(got.any())
    assert any(r.dtype == torch.float32 for r in memory.all_rings()) and kept >= 3


def test_a_step_adds_up_what_experts_gave(ops: TritonOps) -> None:
    """``hyper_step`` and ``hyper_post`` of sums that nobody has made yet."""
    rows, d, hc, top = 37, 160, 4, 3
    store = torch.bfloat16 if ops.numerics.official else torch.float32
    given, shared = normal(rows * top, d).to(store), [normal(rows, d, seed=3).to(store)]
    h, comb, post = normal(rows, hc, d, seed=2).to(store), torch.rand(rows, hc, hc) / hc, torch.rand(rows, hc)
    fn = ops.linear_weight(weight("f32", 24, hc * d))
    w = Hyper(fn, normal(24, seed=5), torch.tensor([0.5, 0.4, 0.3]), 20, 1e-6, 1e-6)
    norm = Norm(1 + 0.1 * normal(d), 1e-6)
    for valid in (None, torch.arange(rows) % 5 > 0):
        f = moe.combine(given, shared, rows, store, valid)
        late = triton_streams.Unsummed(given, shared, valid).tensor(rows)
        assert late.shape == f.shape and late.dtype == f.dtype
        for got, want in zip(
            ops.hyper_step(late, h, post, comb, w, norm),
            ops.hyper_step(f, h, post, comb, w, norm),
            strict=True,
        ):
            assert same_bits(got, want)
        assert same_bits(ops.hyper_post(late, h, post, comb), ops.hyper_post(f, h, post, comb))
