"""Triton's matrix kernels under the interpreter against the plain torch backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from firesteel.ops import build, select
from firesteel.ops.reference import linear as reference_linear
from firesteel.ops.reference import numeric
from firesteel.ops.reference.tail import ReferenceOps
from firesteel.ops.testing import assert_close, assert_row_invariant, same_bits
from firesteel.ops.testing_cases import ROW_CASES, Case, normal, weight
from firesteel.ops.triton import target as targets
from firesteel.ops.triton import together
from firesteel.ops.triton.backend import TritonOps
from firesteel.ops.triton.compile import Made, judge, merged, page, read_runs, specs, write_runs
from firesteel.ops.triton.linear import Shape, fresh, product, quantise, quantised, to_fnuz
from firesteel.ops.triton.spec import Spec
from firesteel.ops.triton.target import INTERPRETER, TARGETS
from firesteel.ops.types import Linear, Numerics, Router

pytestmark = pytest.mark.cpu

NAMES = [n for n in ROW_CASES if n.startswith(("linear", "stacked", "output", "route", "moe"))]


def outputs(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


@pytest.fixture(params=(False, True), ids=("float32", "official"))
def official(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def matmul64(x: Tensor, w: Tensor) -> Tensor:
    return (x.double() @ w.double().T).float()


@pytest.mark.parametrize("name", NAMES)
def test_computes_what_reference_does(name: str, official: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case: Case = ROW_CASES[name]
    ops, oracle = TritonOps(Numerics(official)), ReferenceOps(Numerics(official))
    rows = case.rows[:33]
    got, want = outputs(case.run(ops, rows)), outputs(case.run(oracle, rows))
    with monkeypatch.context() as patch:
        patch.setattr(reference_linear, "matmul_rows", matmul64)
        exact = outputs(case.run(oracle, rows))
    for i, (g, w, e) in enumerate(zip(got, want, exact, strict=True)):
        if i in case.ids:
            assert torch.equal(g, w)
        else:
            assert_close(g, w, e, grid=official)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_invariant(name: str, official: bool) -> None:
    case, ops = ROW_CASES[name], TritonOps(Numerics(official))
    assert_row_invariant(lambda r: case.run(ops, r), lambda r: r, case.rows, sizes=(3, 18), alone=2)


# ---- other targets' forms, by the interpreter ---------------------------------------------
def like(official: bool = True, **changes: Any) -> TritonOps:
    """Ops that prepare weights and choose kernels as another target does."""
    ops = TritonOps(Numerics(official))
    ops.target = replace(INTERPRETER, **changes)
    return ops


@pytest.mark.parametrize("form", ["pairs", "fnuz", "rows-fp8", "rows-bf16", "rows-f32"])
def test_experts_of_every_form_agree(form: str) -> None:
    """Block-scaled instructions, fnuz codes and row-major experts compute the same as FP4 planes or torch."""
    changes = {"pairs": {"scaled_mma": True}, "fnuz": {"fp8": torch.float8_e4m3fnuz}}.get(form, {})
    ops, oracle = like(**changes), ReferenceOps(Numerics(True))
    kind = form.removeprefix("rows-") if form.startswith("rows") else "fp4"
    x, experts, top = normal(7, 96), 5, 2
    ids = torch.stack([torch.arange(i, i + top) % experts for i in range(7)]).sort(-1).values
    share = torch.rand(7, top, generator=torch.Generator().manual_seed(1))
    up = [[weight(kind, 64, 96, seed=10 * i + e) for e in range(experts)] for i in (1, 2)]
    down = [weight(kind, 96, 64, seed=30 + e) for e in range(experts)]
    got, want = (
        of.moe(2 * x, ids, share, of.expert_weights(up[0], down, up[1]), (), 1.5) for of in (ops, oracle)
    )
    assert_close(got, want, want, grid=True, flips=0.02)


def test_fp8_weights_become_fnuz_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    made = to_fnuz(codes)
    old, new = codes.float(), made.float() * 2
    assert torch.equal(torch.isnan(new), torch.isnan(old)) and made.view(torch.uint8)[0x80] == 0
    assert made.view(torch.uint8)[0x7F] == 0x80 and made.view(torch.uint8)[0xFF] == 0x80
    real = ~torch.isnan(old)
    assert torch.equal(new[real], old[real])
    w, x = weight("fp8", 130, 200), normal(5, 200)
    fn, fnuz = like(), like(fp8=torch.float8_e4m3fnuz)
    prepared = fnuz.linear_weight(w)
    assert prepared.data.data.dtype == torch.float8_e4m3fnuz
    assert same_bits(fnuz.linear(x, prepared), fn.linear(x, fn.linear_weight(w)))


# ---- shapes of a launch change no bit --------------------------------------------------------
@pytest.mark.parametrize("kind", ["fp8", "bf16", "f32"])
def test_tiles_and_ranges_change_no_bit(kind: str) -> None:
    """Also tensor descriptors, which devices without them never see."""
    ops, x = TritonOps(Numerics(True)), normal(21, 1024)
    w = ops.linear_weight(weight(kind, 100, 1024)).data
    assert w.splits == 4
    q, scale = quantise(x, 1024, torch.float8_e4m3fn) if kind == "fp8" else (x.to(w.data.dtype), None)
    shapes = [Shape(64, 16, 4, 2), Shape(128, 32, 4, 2), Shape(64, 16, 4, 2, True)]
    if kind != "f32":
        shapes += [Shape(64, 32, 4, 2, wide=True), Shape(64, 16, 4, 2, True, wide=True)]
    results = [
        product(q, scale, w, kind, torch.float32, ops.scratch, ops.target, shape=shape) for shape in shapes
    ]
    assert all(same_bits(r, results[0]) for r in results) and int(ops.scratch.arrived.sum()) == 0


# ---- activations, memory, faults ----------------------------------------------------------------
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.bfloat16])
def test_quantise_is_the_official_rule(fp8: torch.dtype) -> None:
    x = torch.randn(40, 200, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 9, 40)[:, None]
    x[0], x[1, 0], x[2, 0] = 0.0, 448.0, torch.nextafter(torch.tensor(448.0), torch.tensor(500.0))
    x[3] = 2.0 ** -torch.arange(200.0).clamp_max(30)
    x = x.bfloat16().float() if fp8 == torch.bfloat16 else x
    q, scale = quantise(x, 256, fp8)
    got = q.float()
    if fp8 != torch.bfloat16:
        got = (got.unflatten(1, (2, 128)) * scale[..., None]).flatten(1)
    assert torch.equal(got[:, :200], numeric.e4m3_groups(x, 128)) and not got[:, 200:].any()


def test_no_second_copy() -> None:
    """Weights take no more than 1.03 x the checkpoint's bytes."""
    ops = TritonOps(Numerics(True))
    for kind in ("fp8", "bf16", "f32"):
        w = weight(kind, 256, 512)
        assert ops.linear_weight(w).data.nbytes <= 1.03 * w.nbytes
    parts = [[weight("fp4", 256, 512, 3 * i + e) for e in range(3)] for i in range(2)]
    down = [weight("fp4", 512, 256, 20 + e) for e in range(3)]
    made = ops.expert_weights(parts[0], down, parts[1])
    stored = sum(w.nbytes for w in (*parts[0], *parts[1], *down))
    assert made.w13.nbytes + made.w2.nbytes <= 1.03 * stored


def test_a_bad_row_spoils_only_itself() -> None:
    ops = TritonOps(Numerics(True))
    x, w = normal(5, 256), ops.linear_weight(weight("fp8", 64, 256))
    clean = ops.linear(x, w)
    x[2, 130] = float("nan")
    got = ops.linear(x, w)
    others = [0, 1, 3, 4]
    assert same_bits(got[others], clean[others]) and bool(torch.isnan(got[2].float()).all())
    gate = Router(ops.linear_weight(weight("f32", 12, 256)), torch.zeros(12), None, 3, 1.0)
    ids, share = ops.route(x, gate, torch.zeros(5, dtype=torch.int64))
    assert bool(((ids >= 0) & (ids < 12)).all()) and all(len(set(row)) == 3 for row in ids.tolist())
    assert bool(torch.isfinite(share[others]).all()) and bool(torch.isnan(share[2]).any())


def test_fresh_rows_are_quantised_once() -> None:
    x = normal(3, 128)
    assert quantised(x, 128, torch.float8_e4m3fn)[0] is not quantised(x, 128, torch.float8_e4m3fn)[0]
    fresh(x)
    assert quantised(x, 128, torch.float8_e4m3fn)[0] is quantised(x, 128, torch.float8_e4m3fn)[0]


# ---- products of one input -----------------------------------------------------------------------
def shared_weights(ops: TritonOps) -> list[tuple[Linear, bool]]:
    """Weights of one input in the order they are asked for, of both formats and both kinds of result."""
    kinds = [
        ("bf16", 64, True),
        ("fp8", 256, False),
        ("fp8", 128, False),
        ("bf16", 128, True),
        ("bf16", 64, False),
    ]
    return [(ops.linear_weight(weight(kind, n, 512, n + i)), wide) for i, (kind, n, wide) in enumerate(kinds)]


@pytest.mark.parametrize("rows", (1, 19))
def test_products_of_one_input_share_a_launch(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same bits as one by one, made when the first is asked for and handed out once."""
    ops = TritonOps(Numerics(True))
    weights = shared_weights(ops)
    ops.share_input(weights)
    x = fresh(normal(rows, 512).bfloat16())
    plain = x.clone()  # remembers nothing
    calls = {True: ops.linear_f32, False: ops.linear}
    want = [calls[wide](plain, w) for w, wide in weights]
    made: list[int] = []
    monkeypatch.setattr(together, "products", lambda *a, f=together.products: made.append(1) or f(*a))
    got = [calls[wide](x, w) for w, wide in weights]
    assert made == [1] and all(same_bits(g, w) and g.dtype == w.dtype for g, w in zip(got, want, strict=True))
    assert same_bits(ops.linear(x, weights[2][0]), want[2])  # a second time: on its own


def test_weights_that_cannot_share_stay_alone() -> None:
    ops = TritonOps(Numerics(True))
    for other in (weight("fp8", 128, 256), weight("fp8", 100, 512), weight("f32", 64, 512)):
        pair = [ops.linear_weight(weight("fp8", 128, 512)), ops.linear_weight(other)]
        ops.share_input([(w, False) for w in pair])
        assert pair[0].data.group is None
    alone = TritonOps(Numerics(False))
    weights = shared_weights(alone)
    alone.share_input(weights)
    assert weights[0][0].data.group is None  # float32 numerics


def test_another_member_first_makes_only_itself() -> None:
    """Drafting stages use one member of a group with another input."""
    ops = TritonOps(Numerics(True))
    weights = shared_weights(ops)
    ops.share_input(weights)
    x = fresh(normal(3, 512).bfloat16())
    got = ops.linear(x, weights[2][0])
    assert same_bits(got, ops.linear(x.clone(), weights[2][0]))
    assert set(x.quantised_forms) == {(512, torch.float8_e4m3fn)}  # type: ignore[attr-defined]


def test_nothing_is_interpreted_by_accident() -> None:
    """'auto' never lands on interpreted kernels; by name they can be had."""
    choice = select("auto", Numerics(False))
    assert choice.ops.name != "triton" and "interpreted" in choice.reasons["triton"]
    assert build("triton", Numerics(False)).name == "triton"


# ---- offline compilation ----------------------------------------------------------------------------
def test_kernels_compile_without_a_device(tmp_path: Path) -> None:
    """A sample for every target; ``make kernels`` does all."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    result = tmp_path / "kernels.json"
    command = [sys.executable, "-m", "firesteel.ops.triton.compile", "--jobs", "1", "--json", str(result)]
    command += [
        "--only",
        "linear-fp8-16-split",
        "experts-down-planes-fp8-16-split",
        "experts-down-pairs-fp8-16-split",
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    (kernels,) = json.loads(result.read_text())["triton"].values()
    made = {(m["kernel"], m["target"]): m for m in kernels}
    assert {t for _, t in made} == set(TARGETS)
    for (kernel, target), m in made.items():
        assert m["registers"] > 0 and m["local"] > 0 and m["matrix"], (kernel, target)
    native = made["experts-down-pairs-fp8-16-split", "gfx950"]["matrix"]
    assert any(name.startswith("v_mfma_scale") for name in native)


def test_faults_are_named() -> None:
    """Spills, too much local memory and a missing instruction fail the compilation check."""
    spec = Spec("k", None, {}, {}, scaled=True)
    made = Made("k", "gfx950", local=200 * 1024, spills=3)
    judge(spec, TARGETS["gfx950"], made, "")
    assert len(made.faults) == 3 and "v_mfma_scale" in made.faults[2] and "spilled" in made.faults[1]
    good = Made("k", "gfx950", local=1024, matrix={"v_mfma_scale_f32_16x16x128_f8f6f4": 4})
    judge(spec, TARGETS["gfx950"], good, "tt.dot_scaled")
    assert not good.faults
    emulated = Made("k", "gfx942")
    judge(spec, TARGETS["gfx942"], emulated, "tt.dot_scaled")
    assert emulated.faults
    assert "| k | 0 | 200.0 | 3;" in page({"3.8.0": [made]})


def test_a_run_replaces_its_own_figures_only(tmp_path: Path) -> None:
    """Figures of other versions and of kernels that were not compiled this time stay; those of no kernel go."""
    name, other = (spec.name for spec in specs()[:2])
    old = {
        "3.6.0": [Made(name, "sm_90", registers=1)],
        "3.8.0": [Made(name, "sm_90", 2), Made(other, "sm_90", 3), Made("gone", "sm_90", 4)],
    }
    runs = merged(old, "3.8.0", [Made(name, "sm_90", 5, matrix={"wgmma": 2})])
    assert [m.registers for m in runs["3.8.0"]] == [5, 3] and runs["3.6.0"] == old["3.6.0"]
    write_runs(tmp_path / "kernels.json", runs)
    assert read_runs(tmp_path / "kernels.json") == runs and read_runs(tmp_path / "none.json") == {}


@pytest.mark.parametrize("version,fits", [("3.6.0", False), ("3.8.0", True), ("3.10.1", True)])
def test_a_device_that_this_triton_cannot_compile_for_is_named(
    monkeypatch: pytest.MonkeyPatch, version: str, fits: bool
) -> None:
    props = type("Props", (), {"major": 10, "minor": 0, "name": "B200"})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: props)
    monkeypatch.setattr(targets.triton, "__version__", version)
    find = targets.of_device.__wrapped__
    if fits:
        assert find(torch.device("cuda")).name == "sm_100"
    else:
        with pytest.raises(targets.TargetError, match=r"Triton 3\.6\.0 .* 3\.8 or newer"):
            find(torch.device("cuda"))
    props.major = 7
    with pytest.raises(targets.TargetError, match="no kernels for B200"):
        find(torch.device("cuda"))
