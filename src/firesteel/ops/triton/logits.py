"""Logits of many rows on Hopper by the pipelined products: tiles of rows between the widths of the other forms.

K ascends through the one chain of matrix instructions that ``head_rows`` has, so the bits are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firesteel.ops.triton import piped
from firesteel.ops.triton.launch import cdiv
from firesteel.ops.triton.piped import Pipe
from firesteel.ops.triton.target import Target

# rows of a tile: how, and microseconds of one of the Flash head on an H200
TILES = {160: (Pipe(128, 128, 32, stages=7), 280), 192: (Pipe(128, 128, 64, stages=6), 308)}
PLAIN, WIDE = 235, 423  # of 128 rows by ``head_rows``, of 256 by ``head_wide``


def pipe_for(rows: int, vocab: int, k: int, wide: bool, target: Target) -> Pipe | None:
    """As measured; None where ``head_rows``, or ``head_wide`` if it takes the row count, is as quick."""
    if target.name != "sm_90" or rows <= 128 or k % 512 or vocab % 128:
        return None
    least = WIDE * cdiv(rows, 256) if wide else PLAIN * cdiv(rows, 128)
    cost, tile = min((us * cdiv(rows, tile), tile) for tile, (_, us) in TILES.items())
    return TILES[tile][0] if cost < least else None


def stored(x: Tensor, w: Tensor, out: Tensor, wide: bool, target: Target) -> bool:
    """Fill out float32 [R, V] with x [R, K] times w [V, K] transposed, both bfloat16, if ``pipe_for`` has a form."""
    vocab, k = w.shape
    pipe = pipe_for(x.shape[0], vocab, k, wide, target)
    if pipe is None or not out.is_contiguous():
        return False
    unused = torch.empty(1, dtype=torch.int32, device=x.device)
    piped.launch(None, (w, x), out, unused, pipe, splits=(1, 1))
    return True


KERNELS = [
    piped.spec(f"logits_piped_{rows}", 0, 129280, 4096, 1, pipe, out="*fp32")
    for rows, (pipe, _) in TILES.items()
]
