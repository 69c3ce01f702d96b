"""Entries pooled by many rows at once have the bits of the same entries pooled in smaller passes, at two threads."""

from __future__ import annotations

import pytest
import torch

from firesteel.checkpoint import QTensor
from firesteel.core import RowBatch
from firesteel.ops import BackendError, Numerics, build
from firesteel.ops.types import Compressor, CompressorMemory, Norm, Rope

DIM, HIDDEN = 48, 32


def entries(ops, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """One slot, its rows in passes of ``sizes``."""
    gen = torch.Generator().manual_seed(1)
    weight = torch.randn(4 * DIM, HIDDEN, generator=gen) * 0.4
    w = Compressor(
        project=ops.linear_weight(QTensor.dense(weight)),
        ape=torch.randn(4, 2 * DIM, generator=gen),
        norm=Norm(torch.ones(DIM), 1e-6),
        ratio=4,
        dim=DIM,
        overlap=True,
        rope_dim=16,
    )
    memory = CompressorMemory(torch.zeros(2, 11, 4 * DIM), torch.zeros(4, 64, DIM))
    table = torch.tensor([[1, 2, 3], [0, 0, 0]])
    ropes = {name: Rope(1.0 / 10000 ** (torch.arange(0, 16, 2) / 16), 16) for name in ("main", "compress")}
    at = 0
    for n in sizes:
        place = torch.arange(at, at + n)
        first = torch.zeros(n, dtype=torch.int64)
        rows = RowBatch(
            place, place, first, first, first + n - 1, torch.ones(n, dtype=torch.bool), at + n - 1
        )
        ops.compress(x[at : at + n], w, memory, ops.begin_pass(rows, table, 256, ropes, (4,)))
        at += n
    return memory.entries[1:].flatten(0, 1)[: at // 4]


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("rows", [36, 132, 516])
def test_odd_numbers_of_entries(backend: str, rows: int) -> None:
    try:
        ops = build(backend, Numerics(False))
    except BackendError as err:
        pytest.skip(str(err))
    x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        whole = entries(ops, x, [rows])
        for size in (4, 12, 20, 28):
            parts = [size] * (rows // size) + ([rows % size] if rows % size else [])
            assert torch.equal(whole, entries(ops, x, parts)), f"passes of {size}"
    finally:
        torch.set_num_threads(threads)
