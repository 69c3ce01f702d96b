"""Residual streams (mHC): coefficients, Sinkhorn, mixing and norm.

The coefficient product [hc*D] -> [(2+hc)hc] runs in fixed chunks of channels, by the
kernel that also makes the streams; a second kernel adds the chunks in a fixed tree
and does the rest of the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from firesteel.ops.triton.launch import begin, cdiv, dense, kernel, pow2
from firesteel.ops.triton.norms import COPY_TILE, form_of, remember, types, warps
from firesteel.ops.triton.rounding import on_grid, operand, sigmoid, store_form
from firesteel.ops.triton.spec import Spec
from firesteel.ops.types import Norm

CHANNELS = 64  # of every stream, in one partial sum
ROW_TILES = (16, 32)  # the N side of a product: free to follow the row count
PRODUCT_WARPS = 4
FEW = 128  # rows that do not fill the device
MIXED = (1, 4)  # rows whose mixing matrices one program makes: of few rows and of many


@triton.jit
def _new_stream(f, old, post_ptr, comb_ptr, row, live, i: tl.constexpr, HC: tl.constexpr, OFFICIAL: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """Stream i after a sublayer: post_i * f + sum_j comb[j, i] * old_j, j ascending; [rows, channels]."""
    y = tl.load(post_ptr + row * HC + i, mask=live, other=0.0)[:, None] * f
    for j in tl.static_range(HC):  # fused by hand: the compiler may fuse either product with a sum of two
        c = tl.load(comb_ptr + (row * HC + j) * HC + i, mask=live, other=0.0)
        y = tl.fma(tl.broadcast_to(c[:, None], y.shape), old[j], y)
    return on_grid(y, OFFICIAL)


@triton.jit
def _weights(w_ptr, lane, inside, N: tl.constexpr, K: tl.constexpr, NP: tl.constexpr, LINES: tl.constexpr):
    """[LINES, channels] of float32 [N, K] (LINES = NP), or of its three bf16 pieces, NP lines each (LINES = 4 NP)."""
    line = tl.arange(0, LINES)
    n = line % NP
    live = n < N
    if LINES > NP:
        live = live & (line < 3 * NP)
    at = (line // NP * N + n)[:, None] * K + lane[None, :]
    return tl.load(w_ptr + at, mask=live[:, None] & inside[None, :], other=0.0)


@kernel("rows")
def post_parts(
    f_ptr,
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
    OFFICIAL: tl.constexpr,
):
    """Channels of all streams of some rows: new streams (POST), and part [chunk, R, NP], their products with fn.

    Column N of ``part`` holds the sum of squares, those behind it nothing. Weights are the M
    operand: their lines are many and rows may be few. y is exact as bf16 and fn as three
    pieces, so that all products are exact.
    """
    begin()
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    lane = tl.program_id(1) * BC + tl.arange(0, BC)
    live = row < rows
    inside = live[:, None] & (lane < D)[None, :]
    wide = row.to(tl.int64)
    at = wide[:, None] * (HC * D) + lane[None, :]
    acc = tl.zeros([LINES, BR], tl.float32)
    squares = tl.zeros([BR], tl.float32)
    old = ()
    for j in tl.static_range(HC):
        old += (tl.load(h_ptr + at + j * D, mask=inside, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    if POST:
        f = tl.load(f_ptr + wide[:, None] * D + lane[None, :], mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(HC):
        w = _weights(fn_ptr, i * D + lane, lane < D, N, HC * D, NP, LINES)
        if POST:
            y = _new_stream(f, old, post_ptr, comb_ptr, wide, live, i, HC, OFFICIAL)
            tl.store(out_ptr + at + i * D, y.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            y = old[i]
        squares += tl.sum(y * y, axis=1)
        acc = tl.dot(w, tl.trans(operand(y, OFFICIAL)), acc, input_precision="ieee")
    if LINES > NP:
        acc = tl.sum(tl.reshape(acc, [LINES // NP, NP, BR]), axis=0)
    out = tl.arange(0, NP)
    acc = tl.where((out == N)[None, :], squares[:, None], tl.trans(acc))
    to = (tl.program_id(1).to(tl.int64) * rows + row)[:, None] * NP + out[None, :]
    tl.store(part_ptr + to, acc, mask=live[:, None] & (out <= N)[None, :])


@triton.jit
def _row_sums(part_ptr, row, rows, N: tl.constexpr, NP: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr):
    """(sums over the chunks in a fixed tree, numbers of their columns), [NP] of a row."""
    chunk = tl.arange(0, CP)
    column = tl.arange(0, NP)
    at = (chunk.to(tl.int64) * rows + row)[:, None] * NP + column[None, :]
    live = (chunk < CHUNKS)[:, None] & (column <= N)[None, :]
    return tl.sum(tl.load(part_ptr + at, mask=live, other=0.0), axis=0), column


@triton.jit
def _scaled(values, column, N: tl.constexpr, K: tl.constexpr, rms_eps):
    """A row's coefficients over the root mean square of its K channels."""
    return values * tl.rsqrt(tl.sum(tl.where(column == N, values, 0.0)) / K + rms_eps)


@triton.jit
def _streams(h_ptr, row, lane, D: tl.constexpr, HC: tl.constexpr):
    """A row's streams as they lie in memory."""
    out = ()
    for j in tl.static_range(HC):
        out += (tl.load(h_ptr + (row * HC + j) * D + lane, mask=lane < D, other=0.0),)  # type: ignore[assignment]
    return out


@triton.jit
def _mix(old, values, column, scale_ptr, base_ptr, eps, HC: tl.constexpr, OFFICIAL: tl.constexpr):
    """The streams weighted with sigmoids of the first HC coefficients, as an activation."""
    scale = tl.load(scale_ptr)
    y = tl.zeros_like(old[0]).to(tl.float32)
    for j in tl.static_range(HC):
        pre = tl.sum(tl.where(column == j, values, 0.0))
        y += (sigmoid(pre * scale + tl.load(base_ptr + j)) + eps) * old[j].to(tl.float32)
    return on_grid(y, OFFICIAL)


@triton.jit
def _normed(
    y, weight_ptr, lane, inside, eps, D: tl.constexpr, WEIGHTED: tl.constexpr, OFFICIAL: tl.constexpr
):
    y = y * tl.rsqrt(tl.sum(y * y) / D + eps)
    if WEIGHTED:
        y = y * tl.load(weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    return on_grid(y, OFFICIAL)


@triton.jit
def _sinkhorn(c, eps, ITERS: tl.constexpr):
    """c [rows, source, destination]: softmax over destinations, then alternate normalisation."""
    c = tl.exp(c - tl.max(c, axis=2)[:, :, None])
    c = c / tl.sum(c, axis=2)[:, :, None] + eps
    c = c / (tl.sum(c, axis=1)[:, None, :] + eps)
    for _ in range(ITERS - 1):
        c = c / (tl.sum(c, axis=2)[:, :, None] + eps)
        c = c / (tl.sum(c, axis=1)[:, None, :] + eps)
    return c


@triton.jit
def _pick(values, column, at: tl.constexpr, COUNT: tl.constexpr):
    """values[:, at], values[:, at + 1], ... [rows, COUNT]."""
    wanted = column[None, None, :] == at + tl.arange(0, COUNT)[None, :, None]
    return tl.sum(tl.where(wanted, values[:, None, :], 0.0), axis=2)


@triton.jit
def _mixing(
    part_ptr,
    base_ptr,
    scale_ptr,
    post_ptr,
    comb_ptr,
    row,
    rows,
    eps,
    rms_eps,
    N: tl.constexpr,
    K: tl.constexpr,
    HC: tl.constexpr,
    NP: tl.constexpr,
    CHUNKS: tl.constexpr,
    CP: tl.constexpr,
    ITERS: tl.constexpr,
):
    """The post and comb coefficients of rows ``row`` [SR]."""
    chunk = tl.arange(0, CP)
    column = tl.arange(0, NP)
    ok = row < rows
    at = (chunk.to(tl.int64)[:, None] * rows + row[None, :])[:, :, None] * NP + column[None, None, :]
    live = (chunk < CHUNKS)[:, None, None] & ok[None, :, None] & (column <= N)[None, None, :]
    values = tl.sum(tl.load(part_ptr + at, mask=live, other=0.0), axis=0)
    squares = tl.sum(tl.where((column == N)[None, :], values, 0.0), axis=1)
    values = values * tl.rsqrt(squares / K + rms_eps)[:, None]
    stream = tl.arange(0, HC)
    post = _pick(values, column, HC, HC) * tl.load(scale_ptr + 1) + tl.load(base_ptr + HC + stream)[None, :]
    tl.store(post_ptr + row[:, None] * HC + stream[None, :], 2.0 * sigmoid(post), mask=ok[:, None])
    cell = tl.arange(0, HC * HC)
    c = _pick(values, column, 2 * HC, HC * HC) * tl.load(scale_ptr + 2)
    c = c + tl.load(base_ptr + 2 * HC + cell)[None, :]
    c = _sinkhorn(tl.reshape(c, [row.shape[0], HC, HC]), eps, ITERS)
    c = tl.reshape(c, [row.shape[0], HC * HC])
    tl.store(comb_ptr + row[:, None] * (HC * HC) + cell[None, :], c, mask=ok[:, None])


@kernel("rows")
def finish_pre(
    h_ptr,
    part_ptr,
    base_ptr,
    scale_ptr,
    weight_ptr,
    x_ptr,
    q_ptr,
    step_ptr,
    post_ptr,
    comb_ptr,
    rows,
    eps,
    rms_eps,
    norm_eps,
    N: tl.constexpr,
    D: tl.constexpr,
    HC: tl.constexpr,
    NP: tl.constexpr,
    CHUNKS: tl.constexpr,
    CP: tl.constexpr,
    BD: tl.constexpr,
    ITERS: tl.constexpr,
    SR: tl.constexpr,
    WEIGHTED: tl.constexpr,
    FORM: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    """Of SR + 1 programs the first makes post and comb of SR rows, the others mix, norm and quantise a row each.

    Side by side, because the first wait for their own results and the others for memory.
    """
    begin()
    place = tl.program_id(0) % (SR + 1)
    first = tl.program_id(0) // (SR + 1) * SR
    row = (first + place - 1).to(tl.int64)
    if (place > 0) & (row >= rows):
        return
    if place > 0:
        lane = tl.arange(0, BD)
        old = _streams(h_ptr, row, lane, D, HC)  # under way while the coefficients are added up
        values, column = _row_sums(part_ptr, row, rows, N, NP, CHUNKS, CP)
        values = _scaled(values, column, N, HC * D, rms_eps)
        y = _mix(old, values, column, scale_ptr, base_ptr, eps, HC, OFFICIAL)
        x = _normed(y, weight_ptr, lane, lane < D, norm_eps, D, WEIGHTED, OFFICIAL)
        tl.store(x_ptr + row * D + lane, x.to(x_ptr.dtype.element_ty), mask=lane < D)
        if FORM:
            store_form(x, q_ptr, step_ptr, row, D, BD, FORM)
    else:
        some = first.to(tl.int64) + tl.arange(0, SR)
        _mixing(
            part_ptr, base_ptr, scale_ptr, post_ptr, comb_ptr, some, rows, eps, rms_eps,
            N, HC * D, HC, NP, CHUNKS, CP, ITERS,
        )  # fmt: skip


@kernel("rows")
def finish_head(  # type: ignore[no-untyped-def]
    h_ptr, part_ptr, base_ptr, scale_ptr, weight_ptr, z_ptr, x_ptr, rows, eps, rms_eps, norm_eps,
    N: tl.constexpr, D: tl.constexpr, HC: tl.constexpr, NP: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr,
    BD: tl.constexpr, WEIGHTED: tl.constexpr, OFFICIAL: tl.constexpr,
):  # fmt: skip
    begin()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BD)
    old = _streams(h_ptr, row, lane, D, HC)
    values, column = _row_sums(part_ptr, row, rows, N, NP, CHUNKS, CP)
    values = _scaled(values, column, N, HC * D, rms_eps)
    z = _mix(old, values, column, scale_ptr, base_ptr, eps, HC, OFFICIAL)
    tl.store(z_ptr + row * D + lane, z.to(z_ptr.dtype.element_ty), mask=lane < D)
    x = _normed(z, weight_ptr, lane, lane < D, norm_eps, D, WEIGHTED, OFFICIAL)
    tl.store(x_ptr + row * D + lane, x.to(x_ptr.dtype.element_ty), mask=lane < D)


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
    old = ()
    for j in tl.static_range(HC):
        old += (tl.load(h_ptr + at + j * D, mask=inside, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    f = tl.load(f_ptr + row[:, None] * D + lane[None, :], mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(HC):
        y = _new_stream(f, old, post_ptr, comb_ptr, row, row < rows, i, HC, OFFICIAL)
        tl.store(out_ptr + at + i * D, y.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class Mixer:
    """What mixes the streams in front of a sublayer or of the head.

    ``fn`` float32 [N, hc*D], ``base`` [N] and ``scale`` make the coefficients, ``iters`` Sinkhorn
    steps the mixing matrix; ``norm`` follows. Results are kept in ``store``, and quantised in
    ``form`` beside it.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
    iters: int
    eps: float
    rms_eps: float
    norm: Norm
    store: torch.dtype
    official: bool
    form: torch.dtype | None


def row_tile(rows: int, official: bool) -> int:
    """Rows of one program; float32 products run on scalar units, where a wide tile only fills the registers."""
    return next((t for t in ROW_TILES if rows <= t or not official), ROW_TILES[-1])


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


def _parts(h: Tensor, m: Mixer, before: tuple[Tensor, Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """(streams, partial coefficient products float32 [chunks, R, NP]) of streams h [R, hc, D].

    ``before``: (f [R, D], post, comb) of the sublayer that the streams go through first.
    """
    (rows, hc, d), n = h.shape, m.fn.shape[0]
    assert m.fn.dtype == torch.float32 and m.fn.is_contiguous() and m.fn.shape[1] == hc * d
    width, chunks, tile = pow2(max(16, n + 1)), cdiv(d, CHANNELS), row_tile(rows, m.official)
    lines, fn = (4 * width, pieces(m.fn)) if m.official else (width, m.fn)
    part = torch.empty(chunks, rows, width, dtype=torch.float32, device=h.device)
    out = h if before is None else torch.empty(rows, hc, d, dtype=m.store, device=h.device)
    f, post, comb = (h, m.fn, m.fn) if before is None else (dense(t) for t in before)
    post_parts[(cdiv(rows, tile), chunks)](
        f, h, post, comb, out, fn, part, rows, n, d, hc, width, lines, tile, CHANNELS, before is not None,
        m.official, num_warps=PRODUCT_WARPS,
    )  # fmt: skip
    return out, part


def _finished(h: Tensor, part: Tensor, m: Mixer) -> tuple[Tensor, Tensor, Tensor]:
    """(x, post, comb) of ``pre``."""
    rows, hc, d = h.shape
    x = torch.empty(rows, d, dtype=m.store, device=h.device)
    post = torch.empty(rows, hc, dtype=torch.float32, device=h.device)
    comb = torch.empty(rows, hc, hc, dtype=torch.float32, device=h.device)
    form, weight, block = form_of(x, m.form), m.norm.weight, pow2(d)
    mixed = MIXED[rows > FEW]
    finish_pre[(cdiv(rows, mixed) * (mixed + 1),)](
        h, part, m.base, m.scale, h if weight is None else dense(weight), x, form.q, form.step, post, comb, rows,
        m.eps, m.rms_eps, m.norm.eps, m.fn.shape[0], d, hc, part.shape[2], part.shape[0], pow2(part.shape[0]), block,
        m.iters, mixed, weight is not None, form.kind, m.official, num_warps=max(1, warps(block) // 2),
    )  # fmt: skip
    return remember(x, form), post, comb


def _nothing(h: Tensor, store: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """``pre`` of no rows."""
    _, hc, d = h.shape
    post, comb = h.new_empty(0, hc, dtype=torch.float32), h.new_empty(0, hc, hc, dtype=torch.float32)
    return h.new_empty(0, d, dtype=store), post, comb


def pre(h: Tensor, m: Mixer) -> tuple[Tensor, Tensor, Tensor]:
    """(x [R, D], post [R, hc], comb [R, hc, hc]) of streams h [R, hc, D]; see ``Ops.hyper_pre``."""
    if not h.shape[0]:
        return _nothing(h, m.store)
    h = dense(h)
    return _finished(h, _parts(h, m)[1], m)


def step(f: Tensor, h: Tensor, post: Tensor, comb: Tensor, m: Mixer) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(streams, x, post, comb) of ``Ops.hyper_step``, with the bits of ``post`` and ``pre``."""
    if not h.shape[0]:
        return h.new_empty(h.shape, dtype=m.store), *_nothing(h, m.store)
    out, part = _parts(dense(h), m, (f, post, comb))
    return out, *_finished(out, part, m)


def head(h: Tensor, m: Mixer) -> tuple[Tensor, Tensor]:
    """(z, x) [R, D]: the collapsed streams before and after the norm."""
    h = dense(h)
    rows, hc, d = h.shape
    z, x = (torch.empty(rows, d, dtype=m.store, device=h.device) for _ in range(2))
    if rows:
        part, block, weight = _parts(h, m)[1], pow2(d), m.norm.weight
        finish_head[(rows,)](
            h, part, m.base, m.scale, h if weight is None else dense(weight), z, x, rows, m.eps, m.rms_eps,
            m.norm.eps, m.fn.shape[0], d, hc, part.shape[2], part.shape[0], pow2(part.shape[0]), block,
            weight is not None, m.official, num_warps=warps(block),
        )  # fmt: skip
    return z, x


def post(f: Tensor, h: Tensor, post: Tensor, comb: Tensor, store: torch.dtype, official: bool) -> Tensor:
    """New streams [R, hc, D]; see ``Ops.hyper_post``."""
    rows, hc, d = h.shape
    out = torch.empty(rows, hc, d, dtype=store, device=h.device)
    if rows:
        block = min(COPY_TILE, pow2(d))
        post_rows[(rows, cdiv(d, block))](
            dense(f), dense(h), dense(post), dense(comb), out, rows, d, hc, block, official, num_warps=4
        )
    return out


def _specs() -> list[Spec]:
    out = []
    for official, t in ((True, "bf16"), (False, "f32")):
        name, o = "official" if official else "float32", {"OFFICIAL": official}
        chunks = 4096 // CHANNELS
        shape = {"D": 4096, "HC": 4, "CHUNKS": chunks, "CP": chunks, "BD": 4096, "WEIGHTED": True, **o}
        before = types(f32="part_ptr base_ptr scale_ptr weight_ptr", int="rows", float="eps rms_eps norm_eps")
        streams = types(**{t: "f_ptr h_ptr out_ptr"})
        tile = {"D": 4096, "HC": 4, "NP": 32, "LINES": 128 if official else 32, "BC": CHANNELS, **o}
        arrays = types(f32="post_ptr comb_ptr part_ptr", int="rows")
        out += [
            Spec(
                f"hyper_{kind}_{rows}_{name}",
                post_parts,
                {**arrays, **streams, **types(**{t: "fn_ptr"})},
                {**tile, "BR": rows, "N": 24, "POST": kind == "step"},
                {"num_warps": PRODUCT_WARPS},
            )
            for kind in ("parts", "step")
            for rows in (ROW_TILES if official else ROW_TILES[:1])
        ]
        finished = {**before, **types(f32="step_ptr post_ptr comb_ptr"), **types(**{t: "h_ptr x_ptr"})}
        out += [
            Spec(
                f"hyper_pre_{mixed}_{name}",
                finish_pre,
                {**finished, "q_ptr": "*fp8" if official else "*fp32"},
                {**shape, "N": 24, "NP": 32, "ITERS": 20, "SR": mixed, "FORM": int(official)},
                {"num_warps": 4},
                overrides={"gfx942": {"FORM": 0}},
            )
            for mixed in MIXED
        ]
        out += [
            Spec(
                f"hyper_head_{name}",
                finish_head,
                {**before, **types(**{t: "h_ptr z_ptr x_ptr"})},
                {**shape, "N": 4, "NP": 16},
                {"num_warps": 8},
            ),
            Spec(
                f"hyper_post_{name}",
                post_rows,
                {**types(f32="post_ptr comb_ptr", int="rows"), **streams},
                {"D": 4096, "HC": 4, "BLOCK": 1024, **o},
                {"num_warps": 4},
            ),
        ]
    return out


KERNELS = _specs()
