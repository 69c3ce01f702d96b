"""Whether the native backend can be used here: it compiles, loads and computes right."""

from __future__ import annotations

import functools

import torch

from firesteel.checkpoint.codecs import QTensor
from firesteel.ops.native.build import BuildError
from firesteel.ops.native.library import Packed, pack

ROWS = (1, 2, 3, 5, 8, 13)
SHAPES = ((100, 96), (24, 160))  # [N, K]; N is no whole number of tiles
LIMIT = 2e-5  # of the sum of magnitudes


@functools.cache
def why_not() -> str | None:
    """Why this machine cannot use the backend, or None if it can; asked once per process."""
    try:
        return self_test()
    except BuildError as err:
        return str(err)


def self_test() -> str | None:
    """Products of every weight layout: right, and the same bits for any row count. None if so."""
    generator = torch.Generator().manual_seed(1)
    for n, k in SHAPES:
        weight = torch.randn(n, k, generator=generator)
        x = torch.randn(max(ROWS), k, generator=generator)
        for q in (
            QTensor.dense(weight),
            QTensor.dense(weight.bfloat16()),
            QTensor.fp4(weight),
            QTensor.fp8(weight),
        ):
            fault = _fault(pack([[q]], False), q.dequant(), x)
            if fault:
                return f"self-test failed for a {q.format} weight [{n}, {k}]: {fault}"
    return None


def _fault(packed: Packed, weight: torch.Tensor, x: torch.Tensor) -> str | None:
    whole = packed.product(x)
    exact = x.double() @ weight.double().T
    if float(((whole - exact).abs() / (x.double().abs() @ weight.double().abs().T)).max()) > LIMIT:
        return "a product is wrong"
    for rows in ROWS:
        if not torch.equal(packed.product(x[-rows:]), whole[-rows:]):
            return f"{rows} rows give other bits than {max(ROWS)}"
    return None
