"""Forms of the dense products for many rows, under the interpreter: they add what the form for few rows adds."""

from __future__ import annotations

import os
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from firesteel.ops.testing import same_bits
from firesteel.ops.triton import crossed, logits, piped, together
from firesteel.ops.triton.linear import Scratch, Shape, Weight, product, quantise, shape_for
from firesteel.ops.triton.target import INTERPRETER, TARGETS
from firesteel.ops.triton.together import Manner, group_of, manner_for, products, ranges_of

pytestmark = pytest.mark.cpu

E4M3 = torch.float8_e4m3fn
CPU = torch.device("cpu")


def whole(*shape: int, seed: int, most: int = 4) -> Tensor:
    """Small integers: their sums are exact in any order, so that only what is added can differ."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=rng).float()


def held(kind: str, n: int, k: int) -> Weight:
    if kind == "bf16":
        return Weight(whole(n, k, seed=n).bfloat16(), None, 1)
    scale = torch.exp2(whole(-(-n // 128), k // 128, seed=n + 1, most=2))
    return Weight(whole(n, k, seed=n).to(E4M3), scale, 128)


@pytest.mark.parametrize("rows", (5, 70))
@pytest.mark.parametrize("ranges", (1, 2))
def test_forms_for_many_rows(rows: int, ranges: int) -> None:
    w, scratch = held("fp8", 256, 512), Scratch(CPU)
    w.ranges = ranges
    q, steps = quantise(torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows)), 512, E4M3)

    def run(shape: Shape) -> Tensor:
        return product(q, steps, w, "fp8", torch.float32, scratch, INTERPRETER, shape=shape)

    want = run(Shape(64, 16, 4, 2))
    side = ranges > 1
    forms = [
        Shape(64, 32, 4, 2, side, at_once=ranges),
        Shape(64, 64, 4, 3, side, wide=True, at_once=ranges),
        Shape(64, 64, 4, 3, wide=True),
        *([] if side else [Shape(128, 64, 4, 3, pair=True)]),
    ]
    for form in forms:
        assert same_bits(run(form), want), form
    assert int(scratch.arrived.abs().sum()) == 0


@pytest.mark.parametrize("parts", ("both", "fp8", "bf16"))
def test_products_of_one_input_for_many_rows(parts: str) -> None:
    kinds = [("fp8", 256, False), ("fp8", 128, True), ("bf16", 64, False), ("bf16", 192, True)]
    some = [(held(kind, n, 512), wide) for kind, n, wide in kinds if parts in (kind, "both")]
    group, scratch = group_of(some), Scratch(CPU)
    assert group is not None
    for w in (group.fp8, group.bf16, *(w for w, _ in group.members)):
        if w is not None:
            w.ranges = 2
    for rows in (3, 70):
        x = whole(rows, 512, seed=rows).bfloat16()
        q, steps = quantise(x, 512, E4M3)
        form = (q, steps) if group.fp8 is not None else (x, group.table)
        want = products(x, form, group, torch.bfloat16, scratch, INTERPRETER, Manner(16, 2))
        manners = [Manner(64, 3, True, (True, True), 2), Manner(128, 3, True, (False, False))]
        for manner in [*manners, Manner(64, 3, True, (False, True)), Manner(32, 2, at_once=2)]:
            got = products(x, form, group, torch.bfloat16, scratch, INTERPRETER, manner)
            assert all(same_bits(a, b) for a, b in zip(got, want, strict=True)), manner
        for (w, _), made in zip(group.members, want, strict=True):
            exact = (
                w.data.float()
                if w.scale is None
                else w.data.float() * w.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            )
            assert torch.equal(made.float(), (x.float() @ exact.T).to(made.dtype).float())
        assert int(scratch.arrived.abs().sum()) == 0


def test_ranges_depend_on_the_group_alone() -> None:
    """Those of V4-Flash: the input of CSA, HCA and window layers, router and shared expert, the queries."""
    assert [ranges_of(t, 32) for t in ((24, 41), (24, 16), (24, 0), (64, 4))] == [2, 4, 4, 4]
    assert ranges_of((640, 0), 8) == 1


def test_which_groups_share_a_launch_at_which_row_count() -> None:
    target = TARGETS["sm_90"]
    hidden, mixed = [("fp8", 1536), ("bf16", 1024)], [("bf16", 256), ("fp8", 4096)]
    for kinds, limit in ((hidden, 2048), (mixed, together.SOME)):
        group = group_of([(held(kind, n, 128), False) for kind, n in kinds])
        assert group is not None
        for rows in (1, 32, 33, 64, 65, 256, 2048):
            manner = manner_for(group, rows, target)
            assert (manner is not None) == (rows <= limit), rows
            assert manner is None or manner.wide == (rows > together.FEW)
        assert manner_for(group, 33, TARGETS["gfx950"]) is None  # no tensor descriptors there


def test_a_third_sum_is_refused() -> None:
    w = held("fp8", 128, 512)
    w.ranges = 2
    q, steps = quantise(torch.randn(3, 512), 512, E4M3)
    with pytest.raises(AssertionError, match="third sum"):
        product(
            q,
            steps,
            w,
            "fp8",
            torch.float32,
            Scratch(CPU),
            INTERPRETER,
            shape=Shape(128, 64, 4, 3, pair=True),
        )


@pytest.mark.parametrize("n, k", ((32768, 1024), (4096, 8192), (4096, 2048), (1024, 4096), (512, 4096)))
def test_the_order_of_additions_is_the_weight_s(n: int, k: int) -> None:
    """Whatever form serves a row count, it keeps the ranges of K."""
    w = Weight(torch.empty(n, k, dtype=E4M3, device="meta"), None, 128)
    for rows in (1, 16, 33, 64, 65, 128, 129, 256, 300, 512, 1024, 2048):
        shape = shape_for("fp8", w, rows, TARGETS["sm_90"])
        assert not shape.pair or w.splits == 1
        assert w.splits % shape.at_once == 0
    assert replace(w, ranges=2).splits == 2


def room(pipe: piped.Pipe, copied: bool) -> int:
    """Bytes of shared memory for the blocks and for the results of a warp group."""
    out = pipe.groups * 128 * (pipe.n // 2 if pipe.m == 64 and pipe.groups == 2 else pipe.n)
    out += pipe.groups * 128 * pipe.more if pipe.more < pipe.n else 0
    return (pipe.stages - (not copied)) * 128 * (pipe.m + pipe.n + pipe.more) + out * copied


@pytest.mark.parametrize(
    "kind, n, k, groups",
    (
        ("fp8", 4096, 8192, 1),
        ("fp8", 4096, 4096, 1),
        ("fp8", 4096, 2048, 1),
        ("bf16", 8192, 4096, 8),
    ),
)
def test_pipelined_forms_fit_every_row_count(kind: str, n: int, k: int, groups: int) -> None:
    splits = (piped.ranges_for(n, k) if kind == "fp8" else None) or 1
    found = [piped.pipe_for(kind, n, k, splits, rows, groups) for rows in range(1, 2049)]
    assert all(found[:192]) == (kind == "fp8") and any(found)
    for pipe in {p for p in found if p is not None}:
        assert piped.fits(k, splits, pipe) and splits % pipe.side == 0 and n // groups % pipe.m == 0
        assert room(pipe, True) <= 226 * 1024 and (pipe.more == 0 or pipe.m == 128)
    assert piped.pipe_for(kind, n, k, 8, 128, groups) is None  # ranges that another form chose


def crossed_room(form: crossed.Cross, copied: bool, members: bool = False) -> int:
    """As ``room``: blocks of FP8, and results on their way out or turned in groups of 64 rows by 128 outputs."""
    ring = (form.stages + form.spare(copied)) * 128 * (128 + form.rows)
    return ring + form.groups * 64 * 128 * (2 if copied or members else 0)


@pytest.mark.parametrize(
    "kind, n, k, groups, least",
    (
        ("fp8", 32768, 1024, 1, 129),
        ("fp8", 4096, 8192, 1, 193),
        ("fp8", 4096, 12288, 1, 193),
        ("fp8", 4096, 4096, 1, 193),
        ("bf16", 8192, 4096, 8, 321),
    ),
)
def test_forms_with_rows_in_front_fit(kind: str, n: int, k: int, groups: int, least: int) -> None:
    splits = (piped.ranges_for(n, k) if kind == "fp8" else None) or 1
    found = [crossed.cross_for(kind, n, k, splits, rows, groups) for rows in range(1, 2049)]
    assert next(i for i, form in enumerate(found) if form) == least - 1
    assert all(found[least - 1 :]) == (kind == "fp8")
    for form in {form for form in found if form is not None}:
        assert splits % form.side == 0 and crossed_room(form, kind == "fp8") <= 226 * 1024
    assert crossed.cross_for(kind, n + 64, k, splits, 512, groups) is None  # not whole tiles
    assert crossed.cross_for("fp8", n, k, 8, 512) is None  # ranges that another form chose


def test_groups_with_rows_in_front_fit() -> None:
    for sizes, splits in (((1536, 2624), (2, 2)), ((1536, 1024), (4, 4)), ((1536, 0), (4, 1))):
        found = [crossed.cross_for_group(sizes, 4096, splits, rows) for rows in range(1, 2049)]
        assert any(found) == (splits[0] == 4) and not any(found[:384])
        for form in {form for form in found if form is not None}:
            assert splits[0] % form.side == 0 and crossed_room(form, False, True) <= 226 * 1024
    group = group_of([(held("fp8", 1024, 4096), False), (held("fp8", 512, 4096), False)])
    assert group is not None
    manner = manner_for(group, 512, TARGETS["sm_90"])
    assert manner is not None and manner.cross is not None and manner.pipe is None


def test_a_router_and_logits_have_forms_that_fit() -> None:
    target = TARGETS["sm_90"]
    found = [piped.pipe_for("bf16", 256, 4096, 4, rows) for rows in range(1, 2049)]
    stored = [logits.pipe_for(rows, 129280, 4096, rows > 128, target) for rows in range(1, 2049)]
    assert stored[127] is None and stored[319] is not None and found[0] is None and found[383] is not None
    for pipe in {p for p in (*found, *stored) if p is not None}:
        assert piped.fits(4096, 4 if pipe.side > 1 else 1, pipe) and room(pipe, False) <= 226 * 1024
    assert logits.pipe_for(320, 129280, 4096, True, INTERPRETER) is None
    assert logits.pipe_for(320, 1000, 4096, True, target) is None  # not whole tiles


def test_pipelined_groups_fit() -> None:
    for sizes, splits in (((1536, 2624), (2, 2)), ((1536, 1024), (4, 4)), ((1536, 0), (4, 1))):
        found = [piped.pipe_for_group(sizes, 4096, splits, rows) for rows in range(1, 2049)]
        assert found[127] is not None and found[0] is None and (found[-1] is None) == (sizes[1] < 2048)
        for pipe in {p for p in found if p is not None}:
            assert all(cut % min(pipe.side, cut) == 0 for cut in splits) and pipe.m < 256
            assert room(pipe, False) <= 200 * 1024  # float32 results are turned beside it
    # the shared expert's own ranges stay its own beside the router
    up, gate = held("fp8", 4096, 1024), held("bf16", 256, 1024)
    up.ranges = piped.ranges_for(4096, 1024)
    group = group_of([(gate, True), (up, False)])
    assert group is not None and group.fp8 is not None and group.fp8.splits == up.splits == 1
    assert manner_for(group, 8, TARGETS["sm_90"]) is None and gate.splits == ranges_of((64, 4), 8)
