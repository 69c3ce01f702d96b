"""Every op of every CPU backend: rows are invariant, and the compiled one computes what plain torch does."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel.checkpoint.codecs import QTensor
from firesteel.ops import BackendError, Numerics, Ops, build
from firesteel.ops.reference import linear as reference_linear
from firesteel.ops.reference import numeric
from firesteel.ops.reference.noise import gumbel, uniform, words
from firesteel.ops.testing import Geometry, World, assert_close, assert_row_invariant, same_bits, slot_state
from firesteel.ops.types import Compressor, Hyper, HyperHead, MarkovHead, Norm, Router

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


def normal(*shape: int, seed: int = 0) -> Tensor:
    """bf16 values as float32."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()


def weight(kind: str, n: int, k: int, seed: int = 1) -> QTensor:
    dense = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * k**-0.5
    if kind == "fp4":
        return QTensor.fp4(dense)
    if kind in ("fp8", "fp8_f32"):
        return QTensor.fp8(dense, "e8m0" if kind == "fp8" else "f32")
    return QTensor.dense(dense if kind == "f32" else dense.bfloat16())


@dataclass
class Case:
    """One op on rows: ``run(ops, rows)`` gives line i of row i; ``world`` draws the batches."""

    name: str
    run: Callable[[Ops, list[Any]], Any]
    rows: list[Any]
    world: World | None = None
    exact: bool = False  # bits equal the oracle's: only copies and roundings
    ids: tuple[int, ...] = ()  # outputs that must be equal


POOL = 80


def linear_case(kind: str, n: int, k: int, unrounded: bool = False) -> Case:
    x = normal(POOL, k)
    w = weight(kind, n, k)

    def run(ops: Ops, rows: list[int]) -> Tensor:
        prepared = cached(ops, f"{kind}{n}x{k}", lambda: ops.linear_weight(w))
        return ops.linear_f32(x[rows], prepared) if unrounded else ops.linear(x[rows], prepared)

    return Case(f"linear{'_f32' if unrounded else ''}-{kind}-{n}x{k}", run, list(range(POOL)))


def cached(ops: Ops, name: str, make: Callable[[], Any]) -> Any:
    """Prepared weights live with the backend object."""
    store = ops.__dict__.setdefault("test_weights", {})
    if name not in store:
        store[name] = make()
    return store[name]


def row_cases() -> list[Case]:
    d, hc, k = 96, 4, 3
    h, f, x = normal(POOL, hc, d), normal(POOL, d, seed=2), normal(POOL, d, seed=3)
    every = list(range(POOL))
    norm = Norm(1 + 0.1 * normal(d), 1e-6)
    table, tokens = normal(64, d), torch.randint(0, 64, (POOL,), generator=torch.Generator().manual_seed(4))
    post, comb = torch.rand(POOL, hc), torch.rand(POOL, hc, hc) / hc

    def hyper(ops: Ops, n: int, iters: int) -> Any:
        fn = cached(ops, f"fn{n}", lambda: ops.linear_weight(weight("f32", n, hc * d)))
        base, scale = normal(n, seed=5), torch.tensor([0.5, 0.4, 0.3])
        if iters:
            return Hyper(fn, base, scale, iters, 1e-6, 1e-6)
        return HyperHead(fn, base, scale[:1], 1e-6, 1e-6)

    def router(ops: Ops, hashed: bool) -> Router:
        gate = cached(ops, "gate", lambda: ops.linear_weight(weight("f32", 12, d)))
        rng = torch.Generator().manual_seed(6)
        ids = torch.stack([torch.randperm(12, generator=rng)[:k] for _ in range(64)])
        return Router(gate, None if hashed else 0.1 * normal(12, seed=7), ids if hashed else None, k, 1.5)

    def experts(ops: Ops) -> Any:
        def make() -> Any:
            up = [[weight("fp4", 64, d, seed=10 * i + e) for e in range(12)] for i in (1, 2)]
            down = [weight("fp4", d, 64, seed=30 + e) for e in range(12)]
            pair = (ops.stacked_weight([weight("fp8", 64, d, s) for s in (8, 9)]), ops.linear_weight(weight("fp8", d, 64)))
            return ops.expert_weights(up[0], down, up[1]), (pair,)

        return cached(ops, "experts", make)

    def moe(ops: Ops, rows: list[int]) -> Tensor:
        routed, shared = experts(ops)
        ids, weights = ops.route(x[rows], router(ops, False), tokens[rows])
        return ops.moe(2 * x[rows], ids, weights, routed, shared, 1.5)

    groups = normal(POOL, 8, 48, seed=8)

    def output(ops: Ops, rows: list[int]) -> Tensor:
        low = cached(ops, "wo_a", lambda: tuple(ops.linear_weight(weight("bf16", 32, 192, s)) for s in (1, 2)))
        last = cached(ops, "wo_b", lambda: ops.linear_weight(weight("fp8", d, 64)))
        return ops.output(groups[rows], low, last)

    def stacked(ops: Ops, rows: list[int]) -> Tensor:
        w = cached(ops, "stacked", lambda: ops.stacked_weight([weight("bf16", 40, d), weight("f32", 41, d)]))
        return ops.linear_f32(x[rows], w)

    logits, places = 3 * normal(POOL, 300, seed=11), torch.arange(POOL) % 5
    state = slot_state(
        6,
        300,
        40,
        temperature=torch.tensor([0.0, 0.7, 1.3, 0.0, 1.0, 0.0]),
        seed_lo=torch.arange(6) * 2**29,
        seed_hi=torch.arange(6) + 2**31,
        sample=torch.arange(6) % 2,
        top_k=torch.tensor([0, 9, 0, 5, 0, 0]),
        top_p=torch.tensor([1.0, 1.0, 0.8, 1.0, 1.0, 1.0]),
        min_p=torch.tensor([0.0, 0.1, 0.0, 0.0, 0.0, 0.0]),
        frequency=torch.tensor([0.0, 0.0, 0.5, 0.0, 0.0, 0.0]),
        history=torch.randint(0, 300, (6, 40), generator=torch.Generator().manual_seed(12)),
    )

    def head_sample(ops: Ops, rows: list[int]) -> Any:
        head = cached(ops, "head", lambda: ops.linear_weight(weight("bf16", 300, d)))
        return ops.head_sample(x[rows], head, places[rows], places[rows] + 7, state)

    def logprobs(ops: Ops, rows: list[int]) -> tuple[Tensor, ...]:
        got = ops.logprobs(logits[rows], tokens[rows], 5)
        return got.chosen, got.rank, got.ids, got.values

    return [
        Case("sample", lambda o, r: o.sample(logits[r], places[r], places[r] + 7, state), every, ids=(0, 1)),
        Case("head_sample", head_sample, every, ids=(0, 1)),
        Case("shape", lambda o, r: o.shape(logits[r], places[r], places[r] + 7, state), every, exact=True),
        Case("logprobs", logprobs, every, exact=True),
        Case("embed", lambda o, r: o.embed(table, tokens[r], hc), every, exact=True),
        Case("norm", lambda o, r: o.norm(x[r], norm), every),
        Case("norm_plain", lambda o, r: o.norm(x[r][:, :77], Norm(None, 1e-6)), every),
        Case("hyper_pre", lambda o, r: o.hyper_pre(h[r], hyper(o, 24, 20), norm), every),
        Case("hyper_pre_2", lambda o, r: o.hyper_pre(h[r].view(-1, 2, 2 * d), hyper(o, 8, 3), Norm(normal(192), 1e-6)), every),
        Case("hyper_post", lambda o, r: o.hyper_post(f[r], h[r], post[r], comb[r]), every),
        Case("hyper_post_2", lambda o, r: o.hyper_post(f[r], h[r][:, :2], post[r][:, :2], comb[r][:, :2, :2]), every),
        Case("hyper_head", lambda o, r: o.hyper_head(h[r], hyper(o, 4, 0), norm), every),
        Case("tap", lambda o, r: o.tap(h[r]), every),
        Case("route", lambda o, r: o.route(x[r], router(o, False), tokens[r]), every, ids=(0,)),
        Case("route_table", lambda o, r: o.route(x[r], router(o, True), tokens[r]), every, ids=(0,)),
        Case("moe", moe, every),
        Case("output", output, every),
        Case("stacked", stacked, every),
    ]


def matrix_cases() -> list[Case]:
    shapes = [("fp4", 100, 96), ("fp4", 64, 160), ("fp8", 130, 200), ("fp8_f32", 33, 72), ("bf16", 24, 77), ("f32", 12, 45)]
    cases = [linear_case(*shape) for shape in shapes]
    return [*cases, linear_case("f32", 1, 96, True), linear_case("bf16", 2, 96, True), linear_case("fp4", 200, 32, True)]


# ---- ops with a history -----------------------------------------------------------
GEOMETRIES = {
    "csa": Geometry(),
    "hca16": Geometry(ratio=16, raw_ring=19, dim=48, heads=3, span=128, ring=134),
    "hca128": Geometry(ratio=128, raw_ring=131, heads=20, rope=64, length=420, slots=3),
    "hca8": Geometry(ratio=8, raw_ring=11, dim=128, heads=4, rope=32),
}


def compressor(ops: Ops, g: Geometry, index: bool) -> Compressor:
    overlap, dim = g.ratio == 4, g.index_dim if index else g.dim
    width = dim * (2 if overlap else 1)

    def make() -> Compressor:
        project = ops.stacked_weight([weight("bf16", width, g.hidden, s) for s in (1, 2)])
        norm = Norm(1 + 0.1 * normal(dim), 1e-6)
        return Compressor(project, normal(g.ratio, width), norm, g.ratio, dim, overlap, g.rope, index)

    return cached(ops, f"compressor{g.ratio}{index}", make)


def world_cases(key: str) -> list[Case]:
    g = GEOMETRIES[key]
    world = World(g)
    norm, sinks = Norm(1 + 0.1 * normal(g.dim), 1e-6), normal(g.heads)
    pool = [(s, p) for s in range(g.slots) for p in range(g.length)]
    rng = random.Random(0)

    def attention(ops: Ops, rows: list[Any], entries: bool, top: int) -> Tensor:
        ctx, pick = world.context(ops, rows), world.pick
        pages = world.paged(world.entries, rows, after=True) if entries else None
        chosen = world.chosen(rng, rows, top) if top else None
        ring = world.ring(world.kv, g.ring, rows)
        q, kv = pick(world.q, rows), pick(world.kv, rows)
        return ops.attention(q, kv, ring, g.span, sinks, pages, g.ratio, chosen, "compress", ctx)

    def compress(ops: Ops, rows: list[Any], index: bool) -> tuple[Tensor, ...]:
        ctx, w = world.context(ops, rows), compressor(ops, g, index)
        raw = cached(ops, f"raw{key}{index}", lambda: world.raw_history(ops, w))
        memory = world.memory(raw, world.keys if index else world.entries, rows)
        ops.compress(world.pick(world.x, rows), w, memory, ctx)
        return world.closed(memory, rows)

    def select(ops: Ops, rows: list[Any], top_k: int) -> Tensor:
        ctx = world.context(ops, rows)
        keys = world.paged(world.keys, rows, after=True)
        if ops.numerics.official:
            keys = numeric.e2m1_groups(keys, 32)
        q, w = world.pick(world.index_q, rows), world.pick(world.index_weights, rows)
        got = ops.index_select(q, w, keys, g.ratio, top_k, g.rope, "compress", ctx)[:, :top_k]
        return torch.nn.functional.pad(got, (0, top_k - got.shape[1]), value=-1)

    def turned(ops: Ops, rows: list[Any]) -> tuple[Tensor, ...]:
        ctx = world.context(ops, rows)
        kv = ops.key_value(world.pick(world.kv, rows), norm, "main", ctx)
        return ops.query(world.pick(world.q, rows).flatten(1), g.heads, 1e-6, "compress", ctx), kv

    cases = [
        Case("turned", turned, pool, world),
        Case("attention", lambda o, r: attention(o, r, False, 0), pool, world),
        Case("attention_all", lambda o, r: attention(o, r, True, 0), pool, world),
        Case("attention_chosen", lambda o, r: attention(o, r, True, 9), pool, world),
        Case("compress", lambda o, r: compress(o, r, False), pool, world),
    ]
    if g.ratio == 4:
        cases += [
            Case("compress_index", lambda o, r: compress(o, r, True), pool, world),
            Case("select_some", lambda o, r: select(o, r, 9), pool, world, ids=(0,)),
            Case("select_all", lambda o, r: select(o, r, 80), pool, world, exact=True),
        ]
    return cases


WORLD_CASES = {f"{key}-{case.name}": case for key in GEOMETRIES for case in world_cases(key)}
ROW_CASES = {case.name: case for case in [*matrix_cases(), *row_cases()]}
ALL = {**ROW_CASES, **WORLD_CASES}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ALL)
def test_rows_are_invariant(name: str, backend: str, official: bool, threads: int) -> None:
    case, ops = ALL[name], make_ops(backend, official)
    sizes, alone = ((2, 3, 5, 7, 8, 9, 16, 17, 33, 64), 20) if backend == "native" else ((2, 9, 33), 6)
    if threads > 1:
        sizes, alone = sizes[2::3] or sizes, 6
    batches = case.world.batch if case.world else None
    assert_row_invariant(
        lambda r: case.run(ops, r), lambda r: r, case.rows, batches=batches, sizes=sizes, alone=alone
    )
    if threads > 1:  # and the number of threads changes no bit
        rows = batches(40, random.Random(9)) if batches else case.rows[:40]
        many = _tuple(case.run(ops, rows))
        torch.set_num_threads(1)
        for a, b in zip(many, _tuple(case.run(ops, rows)), strict=True):
            assert same_bits(*(t[[row is not None for row in rows]] for t in (a, b)))


# ---- the compiled backend against plain torch ---------------------------------------
def matmul64(x: Tensor, w: Tensor) -> Tensor:
    return (x.double() @ w.double().T).float()


@pytest.mark.parametrize("name", ALL)
def test_native_computes_what_reference_does(name: str, official: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case, ops, oracle = ALL[name], make_ops("native", official), make_ops("reference", official)
    rng = random.Random(5)
    rows = case.world.batch(64, rng) if case.world else case.rows
    got, want = _tuple(case.run(ops, rows)), _tuple(case.run(oracle, rows))
    with monkeypatch.context() as patch:
        for module in (reference_linear, _attention_module()):
            if hasattr(module, "matmul_rows"):
                patch.setattr(module, "matmul_rows", matmul64)
            if hasattr(module, "bmm_rows"):
                patch.setattr(module, "bmm_rows", lambda a, b: torch.bmm(a.double(), b.double()).float())
        exact = _tuple(case.run(oracle, rows))
    real = torch.tensor([row is not None for row in rows])
    for i, (g, w, e) in enumerate(zip(got, want, exact, strict=True)):
        g, w, e = g[real], w[real], e[real]
        if case.exact:
            assert same_bits(g, w)
        elif i in case.ids:
            differ = (g != w).flatten(1).any(-1)
            assert float(differ.double().mean()) <= (0.03 if official else 0.0), f"{int(differ.sum())} rows"
        else:
            assert_close(g, w, e, grid=official)


def _attention_module() -> Any:
    from firesteel.ops.reference import attention

    return attention


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


# ---- noise and sampling ---------------------------------------------------------------
@pytest.fixture
def native() -> Any:
    make_ops("native", False)  # skips where the library cannot be built
    from firesteel.ops.native import library

    return library


def test_philox_words_equal_the_reference(native: Any) -> None:
    lo, hi, sample, position, stream, n = 0xDEADBEEF, 0x8BADF00D, 3, 77777, 2, 200
    state = slot_state(1, 8, 4, seed_lo=torch.tensor([lo]), seed_hi=torch.tensor([hi]), sample=torch.tensor([sample]))
    ids = torch.arange(1000, 1000 + n)
    want = words(ids, torch.tensor([position]), torch.tensor([0]), state, stream)[0]
    got = torch.empty(n, dtype=torch.int32)
    key = struct.pack("5I", lo, sample, position, stream, hi)
    raw = native.library().fs_philox
    raw.argtypes, raw.restype = [ctypes.c_char_p], None
    raw(key + struct.pack("Iqq", 1000, n, got.data_ptr()))
    assert torch.equal(got.to(torch.int64) & 0xFFFFFFFF, want)


def test_gumbel_is_finite_and_right(native: Any) -> None:
    edge = torch.tensor([0, 1, 2, 2**31 - 1, 2**31, 2**32 - 2**8, 2**32 - 2, 2**32 - 1])
    bits = torch.cat((edge, torch.randint(0, 2**32, (200_000,), generator=torch.Generator().manual_seed(0))))
    got = torch.empty(bits.shape[0])
    raw = native.library().fs_gumbel
    raw.argtypes, raw.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p], None
    packed = bits.to(torch.int32)
    raw(packed.data_ptr(), bits.shape[0], got.data_ptr())
    v = uniform(bits).double()
    exact = -torch.log(-torch.log1p(-v))
    assert bool(torch.isfinite(got).all())
    assert float((got - exact).abs().max()) <= 2 * max(float((gumbel(bits) - exact).abs().max()), 1e-7)


def test_sample_ties_masks_and_faults(native: Any) -> None:
    for official in (False, True):
        ops, oracle = make_ops("native", official), make_ops("reference", official)
        logits = normal(8, 700)
        logits[0, 40] = logits[0, 600] = logits[0].max() + 1  # a tie goes to the lowest id
        logits[1, 3:] = -torch.inf
        logits[2] = -torch.inf
        logits[3, 650], logits[4, 10], logits[5, 699] = NAN, torch.inf, -NAN
        state = slot_state(2, 700, 4, temperature=torch.tensor([0.0, 0.9]), seed_lo=torch.tensor([5, 6]))
        for slot in (0, 1):
            slots, at = torch.full((8,), slot), torch.arange(8)
            token, finite = ops.sample(logits, slots, at, state)
            want, good = oracle.sample(logits, slots, at, state)
            assert finite.tolist() == good.tolist() == [True, True, False, False, False, False, True, True]
            assert torch.equal(token[good], want[good])
        assert int(ops.sample(logits, torch.zeros(8, dtype=torch.int64), torch.arange(8), state)[0][0]) == 40


# ---- roundings, memory --------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "group"), [(0, 128), (0, 64), (1, 32), (2, 0)])
def test_roundings_equal_the_reference(native: Any, kind: int, group: int) -> None:
    n = 200 if kind == 0 else 128
    x = torch.randn(400, n, generator=torch.Generator().manual_seed(kind)) * torch.logspace(-9, 9, 400).unsqueeze(-1)
    x[5], x[6, :100], x[7] = 0.0, -0.0, x[7].bfloat16().float()
    grid = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])  # E2M1 ties
    x[8, : 8 * (n // 8)] = grid.repeat(n // 8)
    x[9] = 2.0 ** -torch.arange(n).clamp_max(30)  # down into e4m3's subnormals
    want = (lambda: numeric.e4m3_groups(x, group), lambda: numeric.e2m1_groups(x, group), lambda: numeric.hadamard(x))
    got = x.clone()
    native.function("round", "5q")(got.data_ptr(), 400, n, group, kind)
    assert torch.equal(got, want[kind]())


@pytest.mark.parametrize("key", ["csa", "hca16", "hca128"])
def test_rings_hold_the_same_rows(key: str, official: bool) -> None:
    g = GEOMETRIES[key]
    world, rng = World(g), random.Random(3)
    ops, oracle = make_ops("native", official), make_ops("reference", official)
    for _ in range(4):
        rows = world.batch(150, rng)  # longer chunks than the ring has rows
        kv = world.pick(world.kv, rows)
        rings = [world.ring(world.kv, g.ring, rows) for _ in range(2)]
        for backend, ring in zip((ops, oracle), rings, strict=True):
            backend.store_window(ring, kv, world.context(backend, rows))
        assert same_bits(rings[0][:-1], rings[1][:-1])
        w = compressor(ops, g, False)
        raw = cached(ops, f"raw{key}False", lambda w=w: world.raw_history(ops, w))
        memory = world.memory(raw, world.entries, rows)
        ops.compress(world.pick(world.x, rows), w, memory, world.context(ops, rows))
        after = [(row[0], row[1] + 1) for row, nxt in zip(rows, [*rows[1:], None], strict=True) if row and (not nxt or nxt[0] != row[0])]
        assert same_bits(memory.raw[[s for s, _ in after]], world.ring(raw, g.raw_ring, after)[[s for s, _ in after]])


# ---- the drafter's ops ------------------------------------------------------------------------
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


@pytest.mark.parametrize("rejection", [False, True])
def test_markov_walk(rejection: bool, official: bool) -> None:
    groups, depth, vocab, rank, d = 5, 4, 600, 24, 40
    base, z = 2 * normal(groups, depth, vocab), normal(groups, depth, d, seed=1)
    w1, slots = normal(vocab, rank, seed=2), torch.tensor([3, 0, 4, 1, 2])
    results = []
    for backend in ("native", "reference"):
        ops = make_ops(backend, official)
        head = MarkovHead(w1, ops.linear_weight(weight("bf16", vocab, rank)), ops.linear_weight(weight("bf16", 1, d + rank)))
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
        walk = ops.markov_walk(base, z, head, slots, state, shaped=False, rejection=rejection, keep_logits=True)
        if backend == "native":  # shaping changes nothing where nobody asks for it, nor do batch-mates
            again = ops.markov_walk(base, z, head, slots, state, shaped=True, rejection=rejection, keep_logits=False)
            assert torch.equal(again.tokens, walk.tokens) and again.logits is None
            one = ops.markov_walk(
                base[2:3], z[2:3], head, slots[2:3], state, shaped=False, rejection=rejection, keep_logits=True
            )
            for name in ("tokens", "margin", "confidence", "logits"):
                assert same_bits(getattr(one, name)[0], getattr(walk, name)[2])
        results.append((walk, state.history))
    (got, history), (want, expected) = results
    assert torch.equal(got.tokens, want.tokens) and torch.equal(history, expected)
    for name in ("margin", "confidence", "logits"):
        assert torch.allclose(getattr(got, name), getattr(want, name), rtol=1e-5, atol=2e-5), name


# ---- the library itself ---------------------------------------------------------------------
def test_a_bad_row_spoils_only_itself(native: Any, official: bool) -> None:
    ops = make_ops("native", official)
    for name in ("linear-fp4-100x96", "linear-fp8-130x200", "moe", "hyper_pre", "output"):
        case = ROW_CASES[name]
        good = _tuple(case.run(ops, [1, 2, 3]))
        assert all(bool(torch.isfinite(t).all()) for t in good)
    w = ops.linear_weight(weight("fp8", 64, 160))
    x = normal(9, 160)
    clean = ops.linear(x, w)
    x[4, 100] = NAN
    got = ops.linear(x, w)
    others = [i for i in range(9) if i != 4]
    assert same_bits(got[others], clean[others]) and bool(torch.isnan(got[4]).all())


def test_no_second_copy_and_small_layouts(native: Any) -> None:
    ops = make_ops("native", True)
    kinds = {"fp4": native.FP4, "fp8": native.BF16, "fp8_f32": native.F32, "bf16": native.BF16, "f32": native.F32}
    for name, kind in kinds.items():
        packed = ops.linear_weight(weight(name, 64, 128)).data
        assert packed.kind == kind
        assert packed.nbytes <= 64 * 128 * {native.FP4: 0.54, native.BF16: 2, native.F32: 4}[kind]
    assert torch.equal(
        torch.nn.functional.linear(normal(3, 128), packed), ops.linear_f32(normal(3, 128), ops.linear_weight(weight("f32", 64, 128)))
    )


def test_reasons_are_plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from firesteel.ops.native import build as native_build

    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(native_build.BuildError, match="no-such-compiler.*set CXX"):
        native_build.library_path()
    fake = tmp_path / "cxx"
    fake.write_text("#!/bin/sh\necho 'error: cannot do that'; exit 3\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("FIRESTEEL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(native_build.BuildError, match="status 3:\n  error: cannot do that"):
        native_build.library_path()
    assert not list((tmp_path / "cache" / "native").iterdir())  # nothing half-made is left


def test_wrong_arithmetic_is_refused(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from firesteel.ops.native import check

    assert check.self_test() is None
    true_product = native.Packed.product

    def drifting(self: Any, x: Tensor, threads: int = 1) -> Tensor:
        return true_product(self, x, threads) * (1 + 1e-7 * x.shape[0])

    monkeypatch.setattr(native.Packed, "product", drifting)
    assert "other bits" in str(check.self_test())
    monkeypatch.setattr(native.Packed, "product", lambda self, x, threads=1: true_product(self, x, threads) + 1)
    assert "wrong" in str(check.self_test())
