"""The library's products stand for ours: same operands, same results up to bfloat16."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from firesteel.bench import library

pytestmark = pytest.mark.unit


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().float()


def test_products() -> None:
    x, w = draw(5, 64), draw(32, 64)
    run = library._product(x, SimpleNamespace(data=w))
    assert run is not None
    torch.testing.assert_close(run().float(), x @ w.t(), rtol=0.02, atol=0.1)
    assert library._product(x, SimpleNamespace(data=draw(32, 48))) is None, "another K"
    assert library._product(x, None) is None, "a weight in blocks of FP4 has no such product"


def test_grouped_products() -> None:
    x, parts = draw(5, 128), [draw(16, 64), 2 * draw(16, 64)]
    run = library._groups(x, parts)
    assert run is not None
    got = run().float()  # [groups, R, N]
    for g, w in enumerate(parts):
        torch.testing.assert_close(got[g], x[:, 64 * g : 64 * (g + 1)] @ w.t(), rtol=0.02, atol=0.2)


def test_what_the_library_has_not() -> None:
    x = draw(5, 64)
    assert library.same_products("moe", (x,)) is None
    assert library.same_products("linear", (x, SimpleNamespace(data=None))) is None, (
        "nothing to compare on a CPU"
    )
