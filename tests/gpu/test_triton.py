"""Every op of the Triton backend on a real device: what plain torch computes, and rows that do not meet."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel.ops import Numerics, Ops, build
from firesteel.ops.reference import attention as reference_attention
from firesteel.ops.reference import linear as reference_linear
from firesteel.ops.testing import Geometry, World, assert_close, assert_row_invariant, same_bits
from firesteel.ops.testing_cases import ALL_CASES, Case, normal
from firesteel.ops.types import PassContext

pytest.importorskip("triton", reason="the 'gpu' extra is not installed")

from firesteel.ops.triton import launch, why_not
from firesteel.ops.triton.backend import TritonOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(launch.INTERPRETED, reason="kernels run under the interpreter in this process"),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


def moved(value: Any, device: torch.device, seen: dict[int, tuple[Tensor, Tensor]]) -> Any:
    """``value`` with every tensor inside on the device; ``seen`` remembers the copies by origin."""
    if isinstance(value, Tensor):
        if value.device == device:
            return value
        if id(value) not in seen:
            seen[id(value)] = (value, value.to(device))
        return seen[id(value)][1]
    if isinstance(value, PassContext):  # made by the backend: on the device already
        return value
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: moved(getattr(value, f.name), device, seen) for f in fields(value) if f.init}
        return type(value)(**parts)
    if isinstance(value, (list, tuple)):
        return type(value)(moved(v, device, seen) for v in value)
    if isinstance(value, dict):
        return {k: moved(v, device, seen) for k, v in value.items()}
    return value


class OnDevice:
    """A backend called with CPU tensors: arguments go over, results and what was written in place come back."""

    def __init__(self, ops: Ops):
        self.ops, self.numerics = ops, ops.numerics

    def __getattr__(self, name: str) -> Any:
        op = getattr(self.ops, name)
        if name.endswith(("_weight", "_weights")):
            return op
        device = torch.device("cuda", torch.cuda.current_device())

        def call(*args: Any, **named: Any) -> Any:
            seen: dict[int, tuple[Tensor, Tensor]] = {}
            out = op(*moved(args, device, seen), **moved(named, device, seen))
            for origin, copy in seen.values():
                if not same_bits(origin, copy.cpu()):
                    origin.copy_(copy)
            if isinstance(out, Tensor):
                return out.cpu()
            if is_dataclass(out) and not isinstance(out, PassContext):
                back = {f.name: getattr(out, f.name) for f in fields(out)}
                return type(out)(**{k: v.cpu() if isinstance(v, Tensor) else v for k, v in back.items()})
            return tuple(v.cpu() for v in out) if isinstance(out, tuple) else out

        return call


# Probabilities are rounded to bf16 relative to the largest score so far, which depends on the width of a tile.
# A rounding is off by 1/sqrt(12) of a step, the difference of two by sqrt(2) of that, and so is a sum of many
# random terms relative to its own size: it crosses an edge of its grid in sqrt(2/pi) * 0.41 = 0.33 of the cases.
FLIPS = 0.35
# FP8 tensor cores keep about 14 bits below the largest term: a sum is off by 1.2e-4 of its typical size (measured,
# docs/gpu.md), a bf16 step is 2^-7.5 of a value on average, and values smaller than the typical one, whose steps are
# finer, double to triple the share that crosses an edge: 1e-4 * 2^7.5 * 2.5 = 0.045.
FP8_FLIPS = 0.07
BACKENDS: dict[bool, Any] = {}


@pytest.fixture(params=(True, False), ids=("official", "float32"))
def ops(request: pytest.FixtureRequest) -> Any:
    official = bool(request.param)
    if official not in BACKENDS:
        BACKENDS[official] = OnDevice(TritonOps(Numerics(official)))
    return BACKENDS[official]


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def in_double(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    """The oracle with products summed in float64."""
    with monkeypatch.context() as patch:
        patch.setattr(reference_linear, "matmul_rows", lambda x, w: (x.double() @ w.double().T).float())
        patch.setattr(reference_attention, "bmm_rows", lambda a, b: torch.bmm(a.double(), b.double()).float())
        return run()


@pytest.mark.parametrize("name", ALL_CASES)
def test_computes_what_reference_does(name: str, ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case, oracle = ALL_CASES[name], build("reference", ops.numerics)
    rng = random.Random(5)
    rows = case.world.batch(64, rng) if case.world else case.rows
    compare(case, ops, oracle, rows, monkeypatch)


def in_noise(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any], seed: int) -> Any:
    """``run`` with the error of FP8 tensor cores on every product of the plain backend.

    They align the terms of a sum to the largest and keep about 13 bits below it. A block of 128 inputs takes 4
    instructions of 33 terms, so 132 truncations: 3.3 units of 2^-13 in the square mean; uniform +-2^-10 has 4.6.
    """
    dice = torch.Generator().manual_seed(seed)

    def product(x: Tensor, w: Tensor) -> Tensor:
        a, b = x.double(), w.double()
        largest = (a.abs()[:, None] * b.abs()[None]).amax(-1)
        off = 2 * torch.rand(largest.shape, generator=dice, dtype=torch.float64) - 1
        return (a @ b.T + 2.0**-10 * largest * off).float()

    with monkeypatch.context() as patch:
        patch.setattr(reference_linear, "matmul_rows", product)
        return run()


def within_noise(got: Tensor, exact: Tensor, noisy: list[Tensor]) -> None:
    """No further from the truth than products with the tensor cores' error, in the square mean and at most.

    Experts round between two products to e4m3: an edge that a sum crosses moves every output by a whole step,
    which the few bits of ``assert_close`` do not allow for.
    """

    def gaps(value: Tensor) -> tuple[float, float]:
        gap = value.double() - exact.double()
        return float(gap.square().mean().sqrt()), float(gap.abs().max())

    assert not bool(got.isnan().any()), "NaN in a result"
    mean, most = (max(values) for values in zip(*map(gaps, noisy), strict=True))
    found = gaps(got)
    assert found[0] <= 1.5 * mean and found[1] <= 2 * most, f"off by {found}, noise {(mean, most)}"


def flips_of(name: str) -> float:
    """Share of an op's last bits that may differ."""
    return FLIPS if "attention" in name else FP8_FLIPS if "fp8" in name else 0.03


def compare(case: Case, ops: Any, oracle: Ops, rows: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    got, want = as_tuple(case.run(ops, rows)), as_tuple(case.run(oracle, rows))
    exact = as_tuple(in_double(monkeypatch, lambda: case.run(oracle, rows)))
    real = torch.tensor([row is not None for row in rows])
    for i, (g, w, e) in enumerate(zip(got, want, exact, strict=True)):
        g, w, e = g[real], w[real], e[real]
        if case.name == "logprobs" and g.is_floating_point():  # a sum of exponentials, in another order
            torch.testing.assert_close(g, w, rtol=2e-6, atol=4e-6)
        elif case.name == "moe" and ops.numerics.official:
            within_noise(
                g, e, [in_noise(monkeypatch, lambda: case.run(oracle, rows), seed)[real] for seed in range(4)]
            )
        elif case.exact:
            assert same_bits(g, w)
        elif i in case.ids:
            differ = (g != w).reshape(len(g), -1).any(-1)
            assert float(differ.double().mean()) <= 0.03, f"{int(differ.sum())} rows"
        else:
            assert_close(g, w, e, grid=ops.numerics.official, flips=flips_of(case.name))


@pytest.mark.parametrize("name", ALL_CASES)
def test_rows_are_invariant(name: str, ops: Any) -> None:
    case = ALL_CASES[name]
    batches = case.world.batch if case.world else None
    sizes = (2, 3, 5, 7, 8, 9, 16, 17, 33, 64)
    assert_row_invariant(
        lambda r: case.run(ops, r), lambda r: r, case.rows, batches=batches, sizes=sizes, alone=20
    )


# ---- real widths --------------------------------------------------------------------
FLASH = {
    "csa": Geometry(
        heads=64,
        dim=512,
        rope=64,
        span=128,
        ring=152,
        ratio=4,
        length=4400,
        slots=2,
        index_heads=64,
        index_dim=128,
    ),
    "hca": Geometry(heads=64, dim=512, rope=64, span=128, ring=152, ratio=128, length=700, slots=3),
}


def attention_case(key: str) -> Case:
    g = FLASH[key]
    world, sinks, rng = World(g), normal(g.heads), random.Random(0)

    def run(ops: Ops, rows: list[Any]) -> Tensor:
        ctx, pick = world.context(ops, rows), world.pick
        pages = world.paged(world.entries, rows, after=True)
        chosen = world.chosen(rng, rows, 512) if key == "csa" else None
        ring, q, kv = world.ring(world.kv, g.ring, rows), pick(world.q, rows), pick(world.kv, rows)
        if isinstance(ops, OnDevice):  # as the engine keeps them: tiles of float32 keys would not fit
            ring, kv, pages = (t.to(ops.ops.cache) for t in (ring, kv, pages))  # type: ignore[attr-defined]
        return ops.attention(q, kv, ring, g.span, sinks, pages, g.ratio, chosen, "compress", ctx)

    return Case(f"attention-{key}", run, [(s, p) for s in range(g.slots) for p in range(g.length)], world)


@pytest.mark.parametrize("key", FLASH)
def test_attention_at_real_widths(key: str, ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = attention_case(key)
    assert case.world is not None
    rows = case.world.batch(40, random.Random(3))
    compare(case, ops, build("reference", ops.numerics), rows, monkeypatch)
    assert_row_invariant(
        lambda r: case.run(ops, r),
        lambda r: r,
        case.rows,
        batches=case.world.batch,
        sizes=(3, 17, 64, 200),
        alone=8,
    )
