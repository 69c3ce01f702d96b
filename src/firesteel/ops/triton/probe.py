"""A kernel that only reads, for measuring the read bandwidth of a device."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from firesteel.ops.triton.launch import kernel

CHUNK, CHUNKS = 8192, 16


@kernel()
def read_kernel(data, out, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Sum CHUNKS * CHUNK consecutive int32 into one."""
    base = tl.program_id(0).to(tl.int64) * CHUNK * CHUNKS
    lane = tl.arange(0, CHUNK)
    total = tl.zeros((CHUNK,), tl.int32)
    for i in range(CHUNKS):
        total += tl.load(data + base + i * CHUNK + lane)
    tl.store(out + tl.program_id(0), tl.sum(total, axis=0))


def programs(count: int) -> int:
    """Programs that read ``count`` values; a remainder is left out."""
    return count // (CHUNK * CHUNKS)


def read_all(data: Tensor, out: Tensor) -> None:
    """Read int32 ``data`` once; ``out`` int32 [programs]."""
    read_kernel[(programs(data.numel()),)](data, out, CHUNK=CHUNK, CHUNKS=CHUNKS, num_warps=8)
