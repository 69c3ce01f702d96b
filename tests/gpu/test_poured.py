"""Forms for many rows on Hopper that one warp feeds: new streams, logits and codes have the bits of the plain forms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the 'gpu' extra is not installed")

from firesteel.ops.testing import same_bits
from firesteel.ops.triton import head, launch, linear, logits, piped, poured, streams, why_not
from firesteel.ops.triton.target import of_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(launch.INTERPRETED, reason="kernels run under the interpreter in this process"),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.skipif(not launch.usable(), reason="an NVIDIA device of capability 9 is needed"),
]


def normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=rng)


@pytest.mark.parametrize("top", (0, 6))
@pytest.mark.parametrize(
    ("rows", "d", "shared"), ((1, 4096, 1), (33, 512, 2), (700, 4096, 1), (1024, 4096, 1))
)
def test_streams(top: int, rows: int, d: int, shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hc, n, rng = 4, 24, torch.Generator("cuda").manual_seed(rows)
    h, fn = normal(rng, rows, hc, d).bfloat16(), normal(rng, n, hc * d) / 128
    post, comb = torch.rand(rows, hc, device="cuda"), torch.rand(rows, hc, hc, device="cuda") / 4
    f = normal(rng, rows * max(1, top), d).bfloat16()
    given = f
    if top:
        valid = torch.arange(rows, device="cuda") != rows // 2
        f[rows // 2 * top] = float("nan")  # of a row that is not there
        more = list(normal(rng, shared, rows, d).bfloat16())
        given = streams.Unsummed(f, more, valid).tensor(rows)
    found = []
    for least in (1 << 30, 1):
        monkeypatch.setattr(poured, "LEAST", least)
        found.append(streams.parts(h, fn, torch.bfloat16, True, (given, post, comb)))
    (out, part), (new, sums) = found
    assert same_bits(out, new) and same_bits(part[..., : n + 1], sums[..., : n + 1])
    assert bool(torch.isfinite(new.float()).all())


@pytest.mark.parametrize("rows", (129, 160, 161, 192, 320, 384, 640))
def test_logits(rows: int) -> None:
    vocab, k, rng = 8192, 1024, torch.Generator("cuda").manual_seed(rows)
    x, w = normal(rng, rows, k).bfloat16(), (normal(rng, vocab, k) / 32).bfloat16()
    target = of_device(x.device)
    want, got = (
        torch.empty(rows, vocab, device="cuda"),
        torch.full((rows, vocab), float("nan"), device="cuda"),
    )
    head.run_rows(x, w, target, True, rows, want, None, None)
    assert logits.stored(x, w, got, False, target)
    assert same_bits(want, got)


@pytest.mark.parametrize("rows", (1, 130, 700))
def test_codes(rows: int) -> None:
    n, k, groups, rng = 2048, 1024, 4, torch.Generator("cuda").manual_seed(rows)
    x, w = normal(rng, rows, groups * k).bfloat16(), normal(rng, n, k).bfloat16()
    x[0, 5] = float("nan")
    pipe, unused = piped.MANY, torch.zeros(1, dtype=torch.int32, device="cuda")
    low = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
    piped.launch(None, (w, x), low, unused, pipe, splits=(1, 1), groups=groups)
    want = linear.quantise(low, n, torch.float8_e4m3fn)
    q, step = torch.empty_like(want[0]), torch.empty_like(want[1])
    piped.launch(None, (w, x), q, unused, pipe, splits=(1, 1), groups=groups, exact=step)
    assert same_bits(want[0].view(torch.uint8), q.view(torch.uint8)) and same_bits(want[1], step)
