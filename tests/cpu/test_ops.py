"""Every op of every CPU backend: rows are invariant, and the compiled one computes what plain torch does."""

from __future__ import annotations

import ctypes
import random
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel.ops import BackendError, Numerics, Ops, build
from firesteel.ops.reference import linear as reference_linear
from firesteel.ops.reference import numeric
from firesteel.ops.reference.noise import gumbel, uniform, words
from firesteel.ops.testing import World, assert_close, assert_row_invariant, same_bits, slot_state
from firesteel.ops.testing_cases import ALL_CASES, GEOMETRIES, ROW_CASES, cached, compressor, normal, weight
from firesteel.ops.types import PromptRows
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ALL_CASES)
def test_rows_are_invariant(name: str, backend: str, official: bool, threads: int) -> None:
    case, ops = ALL_CASES[name], make_ops(backend, official)
    sizes, alone = ((2, 3, 5, 7, 8, 9, 16, 17, 33, 64), 20) if backend == "native" else ((2, 9, 33), 6)
    if threads > 1:
        sizes, alone = sizes[2::3] or sizes, 6
    batches = case.world.batch if case.world else None
    assert_row_invariant(
        lambda r: case.run(ops, r), lambda r: r, case.rows, batches=batches, sizes=sizes, alone=alone
    )
    if threads > 1 and backend == "native":  # and the number of threads changes no bit
        rows = batches(40, random.Random(9)) if batches else case.rows[:40]
        many = _tuple(case.run(ops, rows))
        torch.set_num_threads(1)
        for a, b in zip(many, _tuple(case.run(ops, rows)), strict=True):
            assert same_bits(*(t[[row is not None for row in rows]] for t in (a, b)))


# ---- the compiled backend against plain torch ---------------------------------------
def matmul64(x: Tensor, w: Tensor) -> Tensor:
    return (x.double() @ w.double().T).float()


@pytest.mark.parametrize("name", ALL_CASES)
def test_native_computes_what_reference_does(
    name: str, official: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, ops, oracle = ALL_CASES[name], make_ops("native", official), make_ops("reference", official)
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
            differ = (g != w).reshape(len(g), -1).any(-1)
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


@pytest.mark.parametrize("first", [0, 1000, 1001, 1002, 1003])
@pytest.mark.parametrize("n", [1, 3, 200, 256, 259, 515])
def test_philox_words_equal_the_reference(native: Any, first: int, n: int) -> None:
    lo, hi, sample, position, stream = 0xDEADBEEF, 0x8BADF00D, 3, 77777, 2
    state = slot_state(
        1, 8, 4, seed_lo=torch.tensor([lo]), seed_hi=torch.tensor([hi]), sample=torch.tensor([sample])
    )
    want = words(range(first, first + n), torch.tensor([position]), torch.tensor([0]), state, stream)[0]
    got = torch.full((n + 8,), 7, dtype=torch.int32)
    raw = native.library().fs_philox
    raw.argtypes, raw.restype = [ctypes.c_char_p], None
    raw(struct.pack("6Iqq", lo, sample, position, stream, hi, first, n, got.data_ptr()))
    assert torch.equal(got[:n].to(torch.int64) & 0xFFFFFFFF, want)
    assert bool((got[n:] == 7).all())


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


def all_noise(native: Any, seed: tuple[int, int, int], position: int, stream: int, n: int) -> Tensor:
    """The library's own noise for ids 0 .. n - 1."""
    lo, hi, sample = seed
    drawn, out = torch.empty(n, dtype=torch.int32), torch.empty(n)
    native.library().fs_philox(struct.pack("6Iqq", lo, sample, position, stream, hi, 0, n, drawn.data_ptr()))
    native.library().fs_gumbel(
        *(ctypes.c_void_p(drawn.data_ptr()), ctypes.c_int64(n)), ctypes.c_void_p(out.data_ptr())
    )
    return out


@pytest.mark.parametrize("vocab", [5, 256, 1003])
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 30.0, 1e4, 1e30])
def test_no_contender_is_passed_over(native: Any, vocab: int, scale: float) -> None:
    """Tokens that no noise can lift are skipped: the choice and its margin are those of all scores."""
    ops, rng = make_ops("native", True), torch.Generator().manual_seed(vocab)
    for heat in (1e-6, 0.3, 1.0, 50.0, 1e4):
        logits = (torch.randn(6, vocab, generator=rng) * scale - 40).bfloat16().float()
        logits[3, torch.rand(vocab, generator=rng) < 0.9] = -torch.inf
        logits[4, 2:] = -torch.inf
        seed_lo, seed_hi, sample = torch.randint(0, 2**32, (3, 6), generator=rng)
        state = slot_state(
            6, vocab, 20, temperature=torch.full((6,), heat), seed_lo=seed_lo, seed_hi=seed_hi, sample=sample
        )
        slots, at, streams = torch.arange(6), torch.arange(6) + 3, torch.arange(6) * 8
        token, _ = ops.sample(logits, slots, at, state)
        picked, margin = torch.zeros_like(token), torch.zeros(6)
        fields = ops._sampling_fields(logits, vocab, slots, at, state)  # type: ignore[attr-defined]
        more = (streams.data_ptr(), state.history.data_ptr(), 20, margin.data_ptr())
        ops._walk_pick(*fields, picked.data_ptr(), 0, ops._flags(), *more)  # type: ignore[attr-defined]
        for r in range(6):
            seed = (int(seed_lo[r]), int(seed_hi[r]), int(sample[r]))
            for stream, got in ((0, token), (8 * r, picked)):
                score = logits[r] + heat * all_noise(native, seed, int(at[r]), stream, vocab)
                assert int(got[r]) == int(torch.argmax(score))
            best = score.topk(2).values
            assert same_bits(margin[r], (best[0] - best[1]) / heat)
            assert int(state.history[r, at[r]]) == int(picked[r])


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
    x = torch.randn(400, n, generator=torch.Generator().manual_seed(kind)) * torch.logspace(
        -9, 9, 400
    ).unsqueeze(-1)
    x[5], x[6, :100], x[7] = 0.0, -0.0, x[7].bfloat16().float()
    grid = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])  # E2M1 ties
    x[8, : 8 * (n // 8)] = grid.repeat(n // 8)
    x[9] = 2.0 ** -torch.arange(n).clamp_max(30)  # down into e4m3's subnormals
    want = (
        lambda: numeric.e4m3_groups(x, group),
        lambda: numeric.e2m1_groups(x, group),
        lambda: numeric.hadamard(x),
    )
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
        after = list({row[0]: (row[0], row[1] + 1) for row in rows if row}.values())  # the next row of each
        slots = [slot for slot, _ in after]
        assert same_bits(memory.raw[slots], world.ring(raw, g.raw_ring, after)[slots])


# ---- rows of a step and its verdict ---------------------------------------------------------
@pytest.mark.parametrize("ratios", [(), (4, 128)])
def test_rotations_equal_the_reference(native: Any, ratios: tuple[int, ...]) -> None:
    world = World(GEOMETRIES["csa"])
    at = torch.tensor([0, 3, 4, 127, 255, 4095, 1_048_575])
    rows = replace(world.rows([(0, 0)]), tokens=at, positions=at)
    got, want = (
        make_ops(backend, False).begin_pass(rows, world.table, 256, world.ropes, ratios)
        for backend in ("native", "reference")
    )
    for mine, theirs in ((got.rotary, want.rotary), (got.entry_rotary, want.entry_rotary)):
        assert list(mine) == list(theirs)
        for key, pair in theirs.items():
            assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in zip(mine[key], pair, strict=True))


def test_rows_and_verdicts_equal_the_reference(native: Any) -> None:
    rng, gamma, slots = random.Random(0), 4, 7
    for _ in range(60):
        state = random_state(rng, slots, gamma)
        order = rng.sample(range(slots), rng.randint(0, slots))
        split = rng.randint(0, len(order))
        chunks = [(slot, rng.randint(0, 9), rng.randint(1, 5)) for slot in order[:split]]
        tokens = [rng.randrange(6) for _, _, n in chunks for _ in range(n)]
        firsts = [sum(n for _, _, n in chunks[:i]) for i in range(len(chunks))]
        prompt = PromptRows(
            torch.tensor(tokens, dtype=torch.int64),
            torch.tensor([at + i for _, at, n in chunks for i in range(n)], dtype=torch.int64),
            torch.tensor([slot for slot, _, n in chunks for _ in range(n)], dtype=torch.int64),
            torch.tensor(
                [f for f, (_, _, n) in zip(firsts, chunks, strict=True) for _ in range(n)], dtype=torch.int64
            ),
            torch.tensor(
                [f + n - 1 for f, (_, _, n) in zip(firsts, chunks, strict=True) for _ in range(n)],
                dtype=torch.int64,
            ),
            torch.tensor(
                [f + n - 1 for f, (_, _, n) in zip(firsts, chunks, strict=True) if rng.random() < 0.7],
                dtype=torch.int64,
            ),
        )
        decodes = torch.tensor(order[split:], dtype=torch.int64)
        widths = torch.tensor([rng.randint(0, gamma + 1) for _ in order[split:]], dtype=torch.int64)
        decode_rows = int(widths.sum()) + (rng.randint(0, 3) if len(order) > split else 0)
        results = []
        for ops, own in both_backends(state):
            rows, samples = ops.build_rows(own, prompt, decodes, widths, decode_rows, 59)
            out: list[Tensor] = [
                v for part in (rows, samples) for v in vars(part).values() if isinstance(v, Tensor)
            ]
            if samples.rows.shape[0]:
                dice = torch.Generator().manual_seed(1)
                sampled = torch.randint(0, 4, samples.rows.shape, generator=dice)
                finite = torch.rand(samples.rows.shape, generator=dice) < 0.9
                verdict = ops.commit(sampled, finite, rows, samples, own, gamma + 1)
                out += [v for v in vars(verdict).values() if isinstance(v, Tensor)]
                out += [own.cursor[:-1], own.anchor[:-1], own.alive[:-1]]
            results.append([*out, own.history[:-1]])
        for a, b in zip(*results, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


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
    kinds = {
        "fp4": native.FP4,
        "fp8": native.BF16,
        "fp8_f32": native.F32,
        "bf16": native.BF16,
        "f32": native.F32,
    }
    for name, kind in kinds.items():
        packed = ops.linear_weight(weight(name, 64, 128)).data
        assert packed.kind == kind
        assert packed.nbytes <= 64 * 128 * {native.FP4: 0.54, native.BF16: 2, native.F32: 4}[kind]
    x = normal(3, 128)  # plain torch code may use a packed weight
    assert torch.equal(torch.nn.functional.linear(x, packed), packed.product(x))


def test_reasons_are_plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from firesteel.ops.native import build as native_build

    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(native_build.BuildError, match=r"no-such-compiler.*set CXX"):
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
    monkeypatch.setattr(
        native.Packed, "product", lambda self, x, threads=1: true_product(self, x, threads) + 1
    )
    assert "wrong" in str(check.self_test())
