"""Both ends of attention: queries that are normed and turned as they are read, results that are turned back.

Tiles hold some heads of one row; dims come in pieces, so that only the piece with the rotated
dims pays for the rotation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from firesteel.ops.triton.launch import INTERPRETED  # noqa: F401 -- readies the interpreter
from firesteel.ops.triton.rounding import on_grid, operand


@triton.jit
def turned(
    y, cos_ptr, sin_ptr, row, FROM: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr
):
    """y [heads, dims FROM ...] of a row with the pairs among the last 2*HALF dims turned by its angles."""
    BP: tl.constexpr = y.shape[1]
    if FROM + BP > D - 2 * HALF:
        pair = FROM // 2 + tl.arange(0, BP // 2) - (D // 2 - HALF)
        inside = (pair >= 0) & (pair < HALF)
        cos = tl.load(cos_ptr + row * HALF + pair, mask=inside, other=1.0)[None, :]
        sin = tl.load(sin_ptr + row * HALF + pair, mask=inside, other=0.0)[None, :]
        if BACK:
            sin = -sin
        even, odd = tl.split(tl.reshape(y, [y.shape[0], BP // 2, 2]))
        y = tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), [y.shape[0], BP])
    return y


@triton.jit
def queries(
    q_ptr,
    cos_ptr,
    sin_ptr,
    row,
    head,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BD: tl.constexpr,
    PIECES: tl.constexpr,
    TURN: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    """The queries of some heads in pieces [BD / PIECES, heads] of dims; TURN: normed and turned here."""
    BP: tl.constexpr = BD // PIECES
    raw, out = (), ()
    squares = tl.zeros_like(head).to(tl.float32)
    for i in tl.static_range(PIECES):
        dim = i * BP + tl.arange(0, BP)
        inside = (head < H)[:, None]
        if BD > D:
            inside = inside & (dim < D)[None, :]
        x = tl.load(q_ptr + head[:, None] * D + dim[None, :], mask=inside, other=0.0)
        if TURN:
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
        raw += (x,)  # type: ignore[assignment]
    for i in tl.static_range(PIECES):
        x = raw[i]
        if TURN:
            x = on_grid(x.to(tl.float32) * tl.rsqrt(squares / D + eps)[:, None], OFFICIAL)
            x = on_grid(turned(x, cos_ptr, sin_ptr, row, i * BP, D, HALF, False), OFFICIAL)
        out += (tl.trans(operand(x, OFFICIAL)),)  # type: ignore[assignment]
    return out


@triton.jit
def finish(
    acc,
    total,
    cos_ptr,
    sin_ptr,
    out_ptr,
    row,
    head,
    dim,
    FROM: tl.constexpr,
    BP: tl.constexpr,
    BD: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    """Store dims ``dim`` [BP] of acc [BP, BH] / total, the last 2*HALF of all turned back by the row's angle."""
    inside = (head < H)[:, None]
    if BD > D:
        inside = inside & (dim < D)[None, :]
    y = tl.trans((acc / total[None, :]).to(out_ptr.dtype.element_ty))
    if FROM + BP > D - 2 * HALF:
        y = turned(y.to(tl.float32), cos_ptr, sin_ptr, row, FROM, D, HALF, True)
        y = on_grid(y, OFFICIAL).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * (H * D) + head[:, None] * D + dim[None, :], y, mask=inside)
