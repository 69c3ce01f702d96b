"""The streamed and fed forms of the experts' products have the bits of the plain one, whatever tile and rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the 'gpu' extra is not installed")

from firesteel.ops.triton import fed, folded, fp4, launch, moe, why_not
from firesteel.ops.triton.folded import Part, Shape
from firesteel.ops.triton.linear import Scratch, quantise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(launch.INTERPRETED, reason="kernels run under the interpreter in this process"),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.skipif(not launch.usable(), reason="an NVIDIA device of capability 9 is needed"),
]

EXPERTS, TOP, POOL = 12, 3, 700
HOW = moe.Arithmetic("fp8", 4, 4, asm=True)


def random_weights(m: int, k: int, rng: torch.Generator) -> folded.Weights:
    lines, device = EXPERTS * m // 128, rng.device
    planes = torch.randint(
        0, 256, (lines, k // 128, 2, 128, 32), dtype=torch.uint8, device=device, generator=rng
    )
    byte = torch.randint(116, 122, (lines, k // 128, 128, 4), dtype=torch.uint8, device=device, generator=rng)
    data, words, base, exact = fp4.fold_blocks(planes, byte.view(torch.int32).squeeze(-1))
    assert bool(exact)
    return folded.Weights(data, words, base, m, k)


@pytest.mark.parametrize("wide", [(1024, 512, 1024), (512, 512, 200)], ids=["even", "odd"])
def test_streamed_products_have_the_bits_of_plain_ones(wide: tuple[int, int, int]) -> None:
    hidden, inner, width = wide
    rng = torch.Generator("cuda").manual_seed(0)
    w13 = random_weights(2 * inner, hidden, rng)
    w2 = random_weights(-(-width // 256) * 256, inner, rng)
    x = torch.randn(POOL, hidden, device="cuda", generator=rng).bfloat16()
    q, scales = quantise(x, hidden, torch.float8_e4m3fn)
    ids = torch.rand(POOL, EXPERTS, device="cuda", generator=rng).topk(TOP).indices.sort(-1).values
    share = torch.rand(POOL, TOP, device="cuda", generator=rng)
    scratch = Scratch(torch.device("cuda"))

    def parts(rows: Tensor, tile: int, shape: Shape, valid: Tensor | None = None) -> Tensor:
        xs = scales[rows].contiguous()
        tiles = moe.plan(ids[rows].contiguous(), EXPERTS, tile, valid, xs)
        h, hs = moe.up(
            w13, HOW, q[rows].contiguous(), xs, share[rows].contiguous(), tiles, TOP, 9.0, scratch,
            official=True, round_h=True, shape=shape,
        )  # fmt: skip
        out = torch.full((len(rows) * TOP, width), float("nan"), device="cuda")
        return moe.down(w2, HOW, h, hs, tiles, out, scratch, None, shape).view(len(rows), TOP, width)

    every = torch.arange(POOL, device="cuda")
    want = parts(every, 16, Shape(Part(1, 4, 3), Part(1, 4, 4)))
    assert not want.isnan().any()
    forms = [
        (tile, folded.streamed_shape(tile, slots)) for tile in (16, 32, 64) for slots in (4, 10, 100, 350)
    ]
    forms += [
        (tile, Shape(*(Part(1, 4, 4, feed=fed.Feed(stages)),) * 2)) for tile, stages in ((16, 5), (32, 3))
    ]
    for tile, shape in forms:
        for count in (POOL, 1, 17, 150):
            rows = torch.randperm(POOL, device="cuda", generator=rng)[:count]
            assert torch.equal(parts(rows, tile, shape), want[rows]), (tile, shape, count)
        valid = torch.rand(POOL, device="cuda", generator=rng) < 0.5
        some = parts(every, tile, shape, valid)
        assert torch.equal(some[valid], want[valid]) and some[~valid].isnan().all()
