"""Products at the widths of V4-Flash on a real device: equal bits at every row count, values near float64's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the 'gpu' extra is not installed")

from firesteel.ops import Numerics
from firesteel.ops.testing import same_bits
from firesteel.ops.triton import launch, piped, together, why_not
from firesteel.ops.triton.backend import TritonOps
from firesteel.ops.triton.linear import Weight, fresh, product, quantise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(launch.INTERPRETED, reason="kernels run under the interpreter in this process"),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]

ROWS = (
    1, 7, 16, 17, 32, 33, 64, 65, 100, 128, 129, 200, 256, 257, 320, 384, 385, 449, 512, 700, 1000, 1792, 2048,
)  # fmt: skip
LOST = {"fp8": 5e-4, "bf16": 1e-5}  # of a sum of thousands, whose last bits a tensor core cuts off
WIDTHS = {  # name: format, outputs, inputs, groups
    "wq_a": ("fp8", 1024, 4096, 1),
    "wq_b": ("fp8", 32768, 1024, 1),
    "wo_a": ("bf16", 8192, 4096, 8),
    "wo_b": ("fp8", 4096, 8192, 1),
    "w2": ("fp8", 4096, 2048, 1),
    "w13": ("fp8", 4096, 4096, 1),
    "main_proj": ("fp8", 4096, 12288, 1),
    "compressor": ("bf16", 2048, 4096, 1),
    "gate": ("bf16", 256, 4096, 1),
    "router": ("bf16", 256, 4096, 1),  # with the ranges that it has beside the shared expert
    "odd": ("fp8", 200, 1152, 1),
}


@pytest.fixture(scope="module")
def ops() -> TritonOps:
    return TritonOps(Numerics(True))


def random_weight(kind: str, n: int, k: int, ops: TritonOps, seed: int) -> Weight:
    rng = torch.Generator(ops.device).manual_seed(seed)
    dense = torch.randn(n, k, device=ops.device, generator=rng)
    if kind == "bf16":
        return Weight(dense.bfloat16(), None, 1)
    codes = torch.randint(-8, 0, (-(-n // 128), -(-k // 128)), device=ops.device, generator=rng)
    # the least scale is 2^-8 and an e4m3 value below 448: no product of the two leaves float32
    ranges = piped.ranges_for(n, k) if ops.target.name == "sm_90" else None
    return Weight(
        (dense * 60).clamp(-448, 448).to(ops.target.fp8), torch.exp2(codes.float()), 128, ranges=ranges
    )


def in_float64(x: Tensor, w: Weight, groups: int) -> Tensor:
    n, k = w.shape
    data = w.data.double()
    if w.scale is not None:
        data *= w.scale.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return torch.cat([a @ b.T for a, b in zip(x.chunk(groups, 1), data.chunk(groups), strict=True)], 1)


@pytest.mark.parametrize("name", WIDTHS)
def test_bits_at_every_row_count(name: str, ops: TritonOps) -> None:
    kind, n, k, groups = WIDTHS[name]
    w = random_weight(kind, n, k, ops, 1)
    w.ranges = 4 if name == "router" else w.ranges
    rng = torch.Generator(ops.device).manual_seed(2)
    spread = torch.logspace(-2, 2, ROWS[-1], device=ops.device)[torch.randperm(ROWS[-1], device=ops.device)]
    x = (torch.randn(ROWS[-1], groups * k, device=ops.device, generator=rng) * spread[:, None]).bfloat16()
    q, step = quantise(x, k, ops.target.fp8) if kind == "fp8" else (x, None)

    def run(pick: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        steps = None if step is None else step[pick].contiguous()
        return product(q[pick].contiguous(), steps, w, kind, dtype, ops.scratch, ops.target, groups=groups)

    known = run(torch.arange(ROWS[-1], device=ops.device))
    for rows in ROWS:
        pick = torch.randperm(ROWS[-1], device=ops.device)[:rows]
        bad = (run(pick) != known[pick]).any(1)
        assert not bool(bad.any()), (
            f"{int(bad.sum())} of {rows} rows differ from their bits at {ROWS[-1]} rows"
        )
        assert same_bits(run(pick, torch.bfloat16), known[pick].bfloat16()), rows  # stored in another way
    values = (
        x.double()
        if step is None
        else (q.double().unflatten(1, (-1, 128)) * step.double()[..., None]).flatten(1)
    )
    want = in_float64(values[:64], w, groups)
    assert float((known[:64].double() - want).norm() / want.norm()) < LOST[kind]
    assert int(ops.scratch.arrived.sum()) == 0


INPUTS: dict[str, list[tuple[str, int, bool]]] = {  # of a layer: the bfloat16 weights beside wq_a and wkv
    "csa": [("bf16", 2048, True), ("bf16", 512, True), ("bf16", 64, False)],
    "hca": [("bf16", 1024, True)],
    "window": [],
}


@pytest.mark.parametrize("layer", INPUTS)
@pytest.mark.parametrize(
    "rows", (1, 16, 17, 32, 33, 64, 65, 128, 129, 200, 256, 320, 384, 449, 512, 1000, 1100)
)
def test_products_of_one_input(rows: int, layer: str, ops: TritonOps) -> None:
    """The weights of a layer's input, of both formats, in one launch or two."""
    parts = [("fp8", 1024, False), ("fp8", 512, False), *INPUTS[layer]]
    weights = [(random_weight(kind, n, 4096, ops, n), wide) for kind, n, wide in parts]
    assert together.group_of(weights) is not None
    x = fresh(torch.randn(rows, 4096, device=ops.device).bfloat16())
    form = quantise(x, 4096, ops.target.fp8)
    if together.manner_for(weights[0][0].group, rows, ops.target) is None:
        pytest.skip("every product has a launch of its own at this row count")
    found = together.products(x, form, weights[0][0].group, torch.bfloat16, ops.scratch, ops.target)
    for (w, wide), got in zip(weights[0][0].group.members, found, strict=True):
        data, steps, kind = (x, None, "bf16") if w.scale is None else (*form, "fp8")
        dtype = torch.float32 if wide else torch.bfloat16
        want = product(data, steps, w, kind, dtype, ops.scratch, ops.target)
        assert got.dtype == want.dtype and same_bits(got, want)
    assert int(ops.scratch.arrived.sum()) == 0
