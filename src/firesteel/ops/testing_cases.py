"""One case per op that maps rows to rows, for the tests of any backend.

``ALL_CASES`` maps a name to a case whose ``run(ops, rows)`` gives line i of row i.
Weights are prepared once per backend object.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firesteel.checkpoint.codecs import QTensor
from firesteel.ops.interface import Ops
from firesteel.ops.reference import numeric
from firesteel.ops.testing import Geometry, World, slot_state
from firesteel.ops.types import Compressor, Hyper, HyperHead, Norm, Router


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


WIDTH = 96  # hidden size of the row cases


def row_inputs() -> tuple[Tensor, Tensor, list[int]]:
    """Activations [POOL, WIDTH], token ids [POOL], all rows."""
    tokens = torch.randint(0, 64, (POOL,), generator=torch.Generator().manual_seed(4))
    return normal(POOL, WIDTH, seed=3), tokens, list(range(POOL))


def row_cases() -> list[Case]:
    d, hc = WIDTH, 4
    h, f = normal(POOL, hc, d), normal(POOL, d, seed=2)
    x, tokens, every = row_inputs()
    norm, wide = Norm(1 + 0.1 * normal(d), 1e-6), Norm(normal(2 * d), 1e-6)
    table = normal(64, d)
    post, comb = torch.rand(POOL, hc), torch.rand(POOL, hc, hc) / hc
    comb2 = comb[:, :2, :2]

    def hyper(ops: Ops, n: int, iters: int) -> Any:
        fn = cached(ops, f"fn{n}", lambda: ops.linear_weight(weight("f32", n, hc * d)))
        base, scale = normal(n, seed=5), torch.tensor([0.5, 0.4, 0.3])
        if iters:
            return Hyper(fn, base, scale, iters, 1e-6, 1e-6)
        return HyperHead(fn, base, scale[:1], 1e-6, 1e-6)

    groups = normal(POOL, 8, 48, seed=8)

    def output(ops: Ops, rows: list[int]) -> Tensor:
        low = cached(
            ops, "wo_a", lambda: tuple(ops.linear_weight(weight("bf16", 32, 192, s)) for s in (1, 2))
        )
        last = cached(ops, "wo_b", lambda: ops.linear_weight(weight("fp8", d, 64)))
        return ops.output(groups[rows], low, last)

    def stacked(ops: Ops, rows: list[int]) -> Tensor:
        w = cached(ops, "stacked", lambda: ops.stacked_weight([weight("bf16", 40, d), weight("f32", 41, d)]))
        return ops.linear_f32(x[rows], w)

    return [
        Case("embed", lambda o, r: o.embed(table, tokens[r], hc), every, exact=True),
        Case("norm", lambda o, r: o.norm(x[r], norm), every),
        Case("norm_plain", lambda o, r: o.norm(x[r][:, :77], Norm(None, 1e-6)), every),
        Case("hyper_pre", lambda o, r: o.hyper_pre(h[r], hyper(o, 24, 20), norm), every),
        Case("hyper_pre_2", lambda o, r: o.hyper_pre(h[r].view(-1, 2, 2 * d), hyper(o, 8, 3), wide), every),
        Case("hyper_post", lambda o, r: o.hyper_post(f[r], h[r], post[r], comb[r]), every),
        Case("hyper_post_2", lambda o, r: o.hyper_post(f[r], h[r][:, :2], post[r][:, :2], comb2[r]), every),
        Case("hyper_head", lambda o, r: o.hyper_head(h[r], hyper(o, 4, 0), norm), every),
        Case("tap", lambda o, r: o.tap(h[r]), every),
        Case("output", output, every),
        Case("stacked", stacked, every),
    ]


def expert_cases() -> list[Case]:
    d, k = WIDTH, 3
    x, tokens, every = row_inputs()

    def router(ops: Ops, hashed: bool) -> Router:
        gate = cached(ops, "gate", lambda: ops.linear_weight(weight("f32", 12, d)))
        rng = torch.Generator().manual_seed(6)
        ids = torch.stack([torch.randperm(12, generator=rng)[:k] for _ in range(64)])
        return Router(gate, None if hashed else 0.1 * normal(12, seed=7), ids if hashed else None, k, 1.5)

    def experts(ops: Ops) -> Any:
        def make() -> Any:
            up = [[weight("fp4", 64, d, seed=10 * i + e) for e in range(12)] for i in (1, 2)]
            down = [weight("fp4", d, 64, seed=30 + e) for e in range(12)]
            gate_up = ops.stacked_weight([weight("fp8", 64, d, s) for s in (8, 9)])
            shared = ((gate_up, ops.linear_weight(weight("fp8", d, 64))),)
            return ops.expert_weights(up[0], down, up[1]), shared

        return cached(ops, "experts", make)

    def moe(ops: Ops, rows: list[int]) -> Tensor:
        routed, shared = experts(ops)
        ids, weights = ops.route(x[rows], router(ops, False), tokens[rows])
        return ops.moe(2 * x[rows], ids, weights, routed, shared, 1.5)

    return [
        Case("route", lambda o, r: o.route(x[r], router(o, False), tokens[r]), every, ids=(0,)),
        Case("route_table", lambda o, r: o.route(x[r], router(o, True), tokens[r]), every, ids=(0,)),
        Case("moe", moe, every),
    ]


def tail_cases() -> list[Case]:
    """Head, shaping, sampling and log-probabilities."""
    d = WIDTH
    x, tokens, every = row_inputs()
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
    ]


def matrix_cases() -> list[Case]:
    cases = [linear_case("fp4", n, k) for n, k in ((100, 96), (64, 160))]
    cases += [linear_case("fp8", 130, 200), linear_case("fp8_f32", 33, 72)]
    cases += [linear_case("bf16", 24, 77), linear_case("f32", 12, 45)]
    return [
        *cases,
        linear_case("f32", 1, 96, True),
        linear_case("bf16", 2, 96, True),
        linear_case("fp4", 200, 32, True),
    ]


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

    def compress(ops: Ops, rows: list[Any], index: bool) -> Tensor:
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
ROW_CASES = {case.name: case for case in [*matrix_cases(), *row_cases(), *expert_cases(), *tail_cases()]}
ALL_CASES = {**ROW_CASES, **WORLD_CASES}
