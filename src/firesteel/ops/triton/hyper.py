"""Residual streams (mHC): coefficients, Sinkhorn, mixing and norm.

A first kernel makes the streams and their coefficient products in chunks of channels
(``streams``); a second one adds the chunks in a fixed tree and does the rest of the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from firesteel.ops.triton import poured
from firesteel.ops.triton.launch import begin, cdiv, dense, kernel, pow2
from firesteel.ops.triton.moe import combine
from firesteel.ops.triton.norms import COPY_TILE, form_of, remember, types, warps
from firesteel.ops.triton.rounding import over, sigmoid, store_form, stored
from firesteel.ops.triton.spec import Spec
from firesteel.ops.triton.streams import CHANNELS, parts, post_rows, specs, unsummed
from firesteel.ops.types import Norm

FEW = 64  # rows that do not fill the device
MIXED = (1, 4)  # rows whose mixing matrices one program makes: of few rows and of many
BACK = True  # whether the last rows come first: the L2 still has them from the kernel that wrote the streams


@triton.jit
def _row_sums(part_ptr, row, rows, NP: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr):
    """(sums over the chunks in a fixed tree, numbers of their columns), [NP] of a row; nothing behind column N."""
    chunk = tl.arange(0, CP)
    column = tl.arange(0, NP)
    at = (chunk.to(tl.int64) * rows + row)[:, None] * NP + column[None, :]
    live = (chunk < CHUNKS)[:, None]  # of all columns, though some hold nothing: wide loads
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
    return stored(y, OFFICIAL)


@triton.jit
def _normed(
    y, weight_ptr, lane, inside, eps, D: tl.constexpr, WEIGHTED: tl.constexpr, OFFICIAL: tl.constexpr
):
    y = y.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y) / D + eps)
    if WEIGHTED:
        y = y * tl.load(weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    return stored(y, OFFICIAL)


@triton.jit
def _sinkhorn(c, eps, ITERS: tl.constexpr):
    """c [rows, source, destination]: softmax over destinations, then alternate normalisation."""
    c = tl.exp(c - tl.max(c, axis=2)[:, :, None])
    c = over(c, tl.broadcast_to(tl.sum(c, axis=2)[:, :, None], c.shape)) + eps
    c = over(c, tl.broadcast_to((tl.sum(c, axis=1) + eps)[:, None, :], c.shape))
    for _ in range(ITERS - 1):
        c = over(c, tl.broadcast_to((tl.sum(c, axis=2) + eps)[:, :, None], c.shape))
        c = over(c, tl.broadcast_to((tl.sum(c, axis=1) + eps)[:, None, :], c.shape))
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
    live = (chunk < CHUNKS)[:, None, None] & ok[None, :, None]
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
    BACK: tl.constexpr = False,
):
    """Of SR + 1 programs the first makes post and comb of SR rows, the others mix, norm and quantise a row each.

    Side by side, because the first wait for their own results and the others for memory.
    """
    begin()
    at = tl.program_id(0)
    if BACK:
        at = tl.num_programs(0) - 1 - at
    place, first = at % (SR + 1), at // (SR + 1) * SR
    row = (first + place - 1).to(tl.int64)
    if (place > 0) & (row >= rows):
        return
    if place > 0:
        lane = tl.arange(0, BD)
        old = _streams(h_ptr, row, lane, D, HC)  # under way while the coefficients are added up
        values, column = _row_sums(part_ptr, row, rows, NP, CHUNKS, CP)
        values = _scaled(values, column, N, HC * D, rms_eps)
        y = _mix(old, values, column, scale_ptr, base_ptr, eps, HC, OFFICIAL)
        x = _normed(y, weight_ptr, lane, lane < D, norm_eps, D, WEIGHTED, OFFICIAL)
        tl.store(x_ptr + row * D + lane, x, mask=lane < D)
        if FORM:
            store_form(x.to(tl.float32), q_ptr, step_ptr, row, D, BD, FORM)
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
    values, column = _row_sums(part_ptr, row, rows, NP, CHUNKS, CP)
    values = _scaled(values, column, N, HC * D, rms_eps)
    z = _mix(old, values, column, scale_ptr, base_ptr, eps, HC, OFFICIAL)
    tl.store(z_ptr + row * D + lane, z, mask=lane < D)
    x = _normed(z, weight_ptr, lane, lane < D, norm_eps, D, WEIGHTED, OFFICIAL)
    tl.store(x_ptr + row * D + lane, x, mask=lane < D)


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


def _parts(h: Tensor, m: Mixer, before: tuple[Tensor, Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """``streams.parts`` for a mixer."""
    return parts(h, m.fn, m.store, m.official, before)


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
        m.iters, mixed, weight is not None, form.kind, m.official, BACK, num_warps=max(1, warps(block) // 2),
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
    terms = unsummed(f)
    if terms is not None:
        f = combine(terms.parts, terms.shared, rows, store, terms.valid)
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
        arrays = types(f32="post_ptr comb_ptr part_ptr", bool="valid_ptr", int="rows")
        out += specs({**arrays, **streams, **types(**{t: "fn_ptr shared_ptr"})}, official)
        finished = {**before, **types(f32="step_ptr post_ptr comb_ptr"), **types(**{t: "h_ptr x_ptr"})}
        out += [
            Spec(
                f"hyper_pre_{mixed}_{name}",
                finish_pre,
                {**finished, "q_ptr": "*fp8" if official else "*fp32"},
                {**shape, "N": 24, "NP": 32, "ITERS": 20, "SR": mixed, "FORM": int(official), "BACK": BACK},
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


KERNELS = [*_specs(), *poured.KERNELS]
