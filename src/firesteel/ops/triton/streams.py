"""New residual streams (mHC) and their products with the weights that make coefficients.

The coefficient product [hc*D] -> [(2+hc)hc] runs in fixed chunks of channels, by the kernel
that also makes the streams: those are read and written once. A program keeps the weights of
its chunk and walks over tiles of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from firesteel.ops.triton import poured
from firesteel.ops.triton.launch import begin, cdiv, dense, kernel, pow2
from firesteel.ops.triton.rounding import operand, stored
from firesteel.ops.triton.spec import Spec

CHANNELS = 64  # of every stream, in one partial sum
ROW_TILES = (16, 32)  # the N side of a product: free to follow the row count
WALKERS = 4  # programs per chunk that share out the row tiles: two a multiprocessor on an H200
WARPS = 4


@triton.jit
def new_stream(f, old, post, comb, i: tl.constexpr, HC: tl.constexpr, OFFICIAL: tl.constexpr):
    """Stream i after a sublayer: post_i * f + sum_j comb[j, i] * old_j, j ascending; [rows, channels], as stored.

    ``post`` HC and ``comb`` HC * HC tuples of [rows].
    """
    y = post[i][:, None] * f.to(tl.float32)
    for j in tl.static_range(HC):  # fused by hand: the compiler may fuse either product with a sum of two
        c = tl.broadcast_to(comb[j * HC + i][:, None], y.shape)
        y = tl.fma(c, old[j].to(tl.float32), y)
    return stored(y, OFFICIAL)


@triton.jit
def coefficients(post_ptr, comb_ptr, row, live, HC: tl.constexpr):
    """(post_i, ...), (comb_ji, ...) of rows [rows]."""
    post = ()
    comb = ()
    for i in tl.static_range(HC):
        post += (tl.load(post_ptr + row * HC + i, mask=live, other=0.0),)  # type: ignore[assignment]
    for i in tl.static_range(HC * HC):
        comb += (tl.load(comb_ptr + row * (HC * HC) + i, mask=live, other=0.0),)  # type: ignore[assignment]
    return post, comb


@triton.jit
def streams_of(h_ptr, at, inside, D: tl.constexpr, HC: tl.constexpr):
    """A tile of every stream as it lies in memory."""
    out = ()
    for j in tl.static_range(HC):
        out += (tl.load(h_ptr + at + j * D, mask=inside, other=0.0),)  # type: ignore[assignment]
    return out


@triton.jit
def what_ran(
    f_ptr, shared_ptr, valid_ptr, row, live, lane, rows,
    D: tl.constexpr, TOP: tl.constexpr, SHARED: tl.constexpr, MASKED: tl.constexpr, OFFICIAL: tl.constexpr,
):  # fmt: skip
    """A tile of f [rows, D], or with TOP of the sums that ``moe.combine_kernel`` makes of f [rows, TOP, D]."""
    inside = live[:, None] & (lane < D)[None, :]
    if TOP == 0:
        f = tl.load(f_ptr + row[:, None] * D + lane[None, :], mask=inside, other=0.0)
    else:
        if MASKED:
            inside = inside & (tl.load(valid_ptr + row, mask=live, other=0) != 0)[:, None]
        at = row[:, None] * (TOP * D) + lane[None, :]
        acc = tl.load(f_ptr + at, mask=inside, other=0.0).to(tl.float32)
        for j in tl.static_range(1, TOP):
            acc += tl.load(f_ptr + at + j * D, mask=inside, other=0.0).to(tl.float32)
        for j in tl.static_range(SHARED):
            to = (j * rows.to(tl.int64) + row)[:, None] * D + lane[None, :]
            acc += tl.load(shared_ptr + to, mask=inside, other=0.0).to(tl.float32)
        f = stored(acc, OFFICIAL)
    return f


@triton.jit
def _weights(w_ptr, lane, inside, N: tl.constexpr, K: tl.constexpr, NP: tl.constexpr, LINES: tl.constexpr):
    """[LINES, channels] of float32 [N, K] (LINES = NP), or of its three bf16 pieces (LINES = 4 NP).

    The lines of the pieces of one output lie where one thread holds their sums: a fourth piece is nothing.
    """
    line = tl.arange(0, LINES)
    piece, n = line * 0, line
    if LINES > NP:
        piece = line // (2 * NP) * 2 + line // 8 % 2
        n = line % (2 * NP) // 16 * 8 + line % 8
    live = (n < N) & (piece < 3)
    at = (piece * N + n)[:, None] * K + lane[None, :]
    return tl.load(w_ptr + at, mask=live[:, None] & inside[None, :], other=0.0)


@kernel("rows")
def post_parts(
    f_ptr,
    shared_ptr,
    valid_ptr,
    h_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    fn_ptr,
    part_ptr,
    rows,
    N: tl.constexpr,
    D: tl.constexpr,
    HC: tl.constexpr,
    NP: tl.constexpr,
    LINES: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    POST: tl.constexpr,
    TOP: tl.constexpr,
    SHARED: tl.constexpr,
    MASKED: tl.constexpr,
    AHEAD: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    """Channels of all streams of some rows: new streams (POST), and part [chunk, R, NP], their products with fn.

    Column N of ``part`` holds the sum of squares, those behind it nothing. Weights are the M
    operand: their lines are many and rows may be few. y is exact as bf16 and fn as three
    pieces, so that all products are exact. AHEAD: the next tile is read while this one is worked on.
    """
    lane = tl.program_id(1) * BC + tl.arange(0, BC)
    w = ()
    for i in tl.static_range(HC):  # nobody writes weights: they may be read before ``begin``
        w += (_weights(fn_ptr, i * D + lane, lane < D, N, HC * D, NP, LINES),)  # type: ignore[assignment]
    begin()
    first, step = tl.program_id(0) * BR, tl.num_programs(0) * BR
    if AHEAD:
        top = first + tl.arange(0, BR)
        real = (top < rows)[:, None] & (lane < D)[None, :]
        old = streams_of(h_ptr, top.to(tl.int64)[:, None] * (HC * D) + lane[None, :], real, D, HC)
        if POST and TOP == 0:
            f = what_ran(
                f_ptr, shared_ptr, valid_ptr, top.to(tl.int64), top < rows, lane, rows, D, 0, 0, False, True
            )
    for start in range(first, rows, step):
        row = start + tl.arange(0, BR)
        live = row < rows
        inside = live[:, None] & (lane < D)[None, :]
        wide = row.to(tl.int64)
        at = wide[:, None] * (HC * D) + lane[None, :]
        if POST:
            post, comb = coefficients(post_ptr, comb_ptr, wide, live, HC)
            if TOP > 0 or not AHEAD:
                f = what_ran(
                    f_ptr, shared_ptr, valid_ptr, wide, live, lane, rows, D, TOP, SHARED, MASKED, OFFICIAL
                )
        if AHEAD:
            soon, later = row + step < rows, wide + step
            there = soon[:, None] & (lane < D)[None, :]
            ahead = streams_of(h_ptr, later[:, None] * (HC * D) + lane[None, :], there, D, HC)
            if POST and TOP == 0:
                g = what_ran(f_ptr, shared_ptr, valid_ptr, later, soon, lane, rows, D, 0, 0, False, True)
        else:
            old = streams_of(h_ptr, at, inside, D, HC)
        acc = tl.zeros([LINES, BR], tl.float32)
        squares = tl.zeros([BR, BC], tl.float32)
        for i in tl.static_range(HC):
            if POST:
                y = new_stream(f, old, post, comb, i, HC, OFFICIAL)
                tl.store(out_ptr + at + i * D, y, mask=inside)
            else:
                y = operand(old[i], OFFICIAL)
            squares = tl.fma(y.to(tl.float32), y.to(tl.float32), squares)
            acc = tl.dot(w[i], tl.trans(y), acc, input_precision="ieee")
        if LINES > NP:
            acc = tl.sum(tl.reshape(acc, [2, NP // 8, 2, 8, BR]), axis=0)
            acc = tl.reshape(tl.sum(acc, axis=1), [NP, BR])
        out = tl.arange(0, NP)
        to = (tl.program_id(1).to(tl.int64) * rows + wide) * NP
        tl.store(part_ptr + to[None, :] + out[:, None], acc, mask=live[None, :] & (out != N)[:, None])
        tl.store(part_ptr + to + N, tl.sum(squares, axis=1), mask=live)
        if AHEAD:
            old = ahead
            if POST and TOP == 0:
                f = g


@kernel("rows")
def post_rows(
    f_ptr,
    h_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    rows,
    D: tl.constexpr,
    HC: tl.constexpr,
    BLOCK: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    """New streams of a row, where no coefficients of the next sublayer are wanted."""
    begin()
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (lane < D)[None, :]
    at = row[:, None] * (HC * D) + lane[None, :]
    old = streams_of(h_ptr, at, inside, D, HC)
    f = tl.load(f_ptr + row[:, None] * D + lane[None, :], mask=inside, other=0.0)
    post, comb = coefficients(post_ptr, comb_ptr, row, row < rows, HC)
    for i in tl.static_range(HC):
        tl.store(out_ptr + at + i * D, new_stream(f, old, post, comb, i, HC, OFFICIAL), mask=inside)


def row_tile(rows: int, official: bool) -> int:
    """Rows of one tile; float32 products run on scalar units, where a wide tile only fills the registers."""
    return ROW_TILES[official and rows > ROW_TILES[0] * WALKERS]


def pieces(fn: Tensor) -> Tensor:
    """float32 [N, K] as bf16 [3, N, K] that sum up to it; made once and kept beside it."""
    made: Tensor | None = getattr(fn, "bf16_pieces", None)
    if made is None:
        out, rest = [], fn
        for _ in range(3):
            out.append(rest.to(torch.bfloat16))
            rest = rest - out[-1].to(torch.float32)
        made = torch.stack(out)
        fn.bf16_pieces = made  # type: ignore[attr-defined]
    return made


@dataclass(frozen=True)
class Unsummed:
    """What experts gave to R rows: parts [R * k, D] and the shared experts' [R, D]; ``valid`` bool [R] or None."""

    parts: Tensor
    shared: Sequence[Tensor]
    valid: Tensor | None

    def tensor(self, rows: int) -> Tensor:
        """Stands for the sums [R, D]: nobody can read it, ``unsummed`` finds these in it."""
        f = torch.empty(rows, self.parts.shape[1], dtype=self.parts.dtype, device="meta")
        f.unsummed = self  # type: ignore[attr-defined]
        return f


def unsummed(f: Tensor) -> Unsummed | None:
    """What a sublayer's result is still to be added up from."""
    found: Unsummed | None = getattr(f, "unsummed", None)
    return found


def parts(
    h: Tensor,
    fn: Tensor,
    store: torch.dtype,
    official: bool,
    before: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(streams, partial products float32 [chunks, R, NP] with fn float32 [N, hc*D]) of streams h [R, hc, D].

    ``before``: (f [R, D], post, comb) of the sublayer that the streams go through first, to be kept in ``store``.
    """
    (rows, hc, d), n = h.shape, fn.shape[0]
    assert fn.dtype == torch.float32 and fn.is_contiguous() and fn.shape[1] == hc * d
    width, chunks, tile = pow2(max(16, n + 1)), cdiv(d, CHANNELS), row_tile(rows, official)
    lines, w = (4 * width, pieces(fn)) if official else (width, fn)
    part = torch.empty(chunks, rows, width, dtype=torch.float32, device=h.device)
    out, f, post, comb, top, shared, valid = h, h, fn, fn, 0, [], None
    if before is not None:
        post, comb = (dense(t) for t in before[1:])
        terms = unsummed(before[0])
        if terms is None:
            f = dense(before[0])
        else:
            f, shared, valid, top = terms.parts, list(terms.shared), terms.valid, terms.parts.shape[0] // rows
        if (
            official
            and h.dtype == f.dtype == store
            and poured.serves(rows, hc, d, n, max(1, top) + len(shared))
        ):
            return poured.pour(f, shared, valid, h, post, comb, w, part, top), part
        out = torch.empty(rows, hc, d, dtype=store, device=h.device)
    extra = f if not shared else dense(shared[0]) if len(shared) == 1 else torch.stack(shared)
    tiles = cdiv(rows, tile)
    post_parts[(min(tiles, WALKERS), chunks)](
        f, extra, f if valid is None else valid, h, post, comb, out, w, part, rows,
        n, d, hc, width, lines, tile, CHANNELS, before is not None, top, len(shared), valid is not None,
        official and tiles > WALKERS, official, num_warps=WARPS, num_stages=1,
    )  # fmt: skip
    return out, part


def specs(types: dict[str, str], official: bool) -> list[Spec]:
    """``post_parts`` for the offline table; ``types`` of its arguments."""
    tile = {
        "D": 4096,
        "HC": 4,
        "NP": 32,
        "LINES": 128 if official else 32,
        "BC": CHANNELS,
        "N": 24,
        "SHARED": 1,
        "MASKED": True,
        "OFFICIAL": official,
    }
    forms = (
        ((ROW_TILES[0], False), (ROW_TILES[1], False), (ROW_TILES[1], True))
        if official
        else ((ROW_TILES[0], False),)
    )
    return [
        Spec(
            f"hyper_{kind}_{rows}{'_ahead' if ahead else ''}_{'official' if official else 'float32'}",
            post_parts,
            types,
            {
                **tile,
                "BR": rows,
                "POST": kind != "parts",
                "TOP": 6 if kind == "experts" else 0,
                "AHEAD": ahead,
            },
            {"num_warps": WARPS, "num_stages": 1},
        )
        for kind in ("parts", "step", "experts")
        for rows, ahead in forms
    ]
