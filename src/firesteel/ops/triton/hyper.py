"""Residual streams (mHC): coefficients, Sinkhorn, mixing and norm.

The coefficient product [hc*D] -> [(2+hc)hc] runs in fixed chunks of K; a second
kernel adds the chunks in order and does the rest of the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firesteel.ops.triton.launch import cdiv, dense, kernel, pow2
from firesteel.ops.triton.norms import COPY_TILE, types, warps
from firesteel.ops.triton.rounding import on_grid, sigmoid
from firesteel.ops.triton.spec import Spec
from firesteel.ops.triton.target import of_device
from firesteel.ops.types import Norm

ROWS = 16  # rows of one product tile, whatever the pass holds
CHUNK = 512  # input channels of one partial sum
STEP = 128
STAGES, STAGES_SM100 = 3, 2  # of the product; a third stage spills 16 bytes on sm_100


@kernel("rows")
def coefficient_parts(
    h_ptr,
    fn_ptr,
    part_ptr,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    NP: tl.constexpr,
    BR: tl.constexpr,
    SIZE: tl.constexpr,
    BK: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    """part [chunk, R, NP]: products of a chunk of K; column N holds the sum of squares."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    out = tl.arange(0, NP)
    base = tl.program_id(1) * SIZE
    at = row.to(tl.int64)[:, None] * K
    acc = tl.zeros([BR, NP], tl.float32)
    squares = tl.zeros([BR], tl.float32)
    for step in range(0, SIZE, BK):
        k = base + step + tl.arange(0, BK)
        x = tl.load(h_ptr + at + k[None, :], mask=(row < rows)[:, None] & (k < K)[None, :], other=0.0)
        w = tl.load(
            fn_ptr + out[:, None] * K + k[None, :], mask=(out < N)[:, None] & (k < K)[None, :], other=0.0
        )
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
        if OFFICIAL:  # x is exact as bf16, w as three bf16 pieces: all products are exact
            x = x.to(tl.bfloat16)
            high = w.to(tl.bfloat16)
            rest = w - high.to(tl.float32)
            middle = rest.to(tl.bfloat16)
            low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(x, tl.trans(low), acc)
            acc = tl.dot(x, tl.trans(middle), acc)
            acc = tl.dot(x, tl.trans(high), acc)
        else:
            acc = tl.dot(wide, tl.trans(w), acc, input_precision="ieee")
    acc = tl.where((out == N)[None, :], squares[:, None], acc)
    to = (tl.program_id(1).to(tl.int64) * rows + row)[:, None] * NP + out[None, :]
    tl.store(part_ptr + to, acc, mask=(row < rows)[:, None])


@triton.jit
def _coefficients(part_ptr, row, rows, column, CHUNKS: tl.constexpr, CP: tl.constexpr, NP: tl.constexpr):
    """Columns of a row's product: chunks added in a fixed tree."""
    chunk = tl.arange(0, CP)
    at = (chunk.to(tl.int64) * rows + row)[:, None] * NP + column[None, :]
    return tl.sum(tl.load(part_ptr + at, mask=(chunk < CHUNKS)[:, None], other=0.0), axis=0)


@triton.jit
def _mix(h_ptr, weights, row, lane, inside, D: tl.constexpr, HC: tl.constexpr, OFFICIAL: tl.constexpr):
    """sum_j weights[j] * h_j as an activation; weights [HC]."""
    stream = tl.arange(0, HC)
    y = tl.zeros_like(lane).to(tl.float32)
    for j in tl.static_range(HC):
        w = tl.sum(tl.where(stream == j, weights, 0.0))
        y += w * tl.load(h_ptr + (row * HC + j) * D + lane, mask=inside, other=0.0).to(tl.float32)
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
    """c [source, destination]: softmax over destinations, then alternate normalisation."""
    c = tl.exp(c - tl.max(c, axis=1)[:, None])
    c = c / tl.sum(c, axis=1)[:, None] + eps
    c = c / (tl.sum(c, axis=0)[None, :] + eps)
    for _ in range(ITERS - 1):
        c = c / (tl.sum(c, axis=1)[:, None] + eps)
        c = c / (tl.sum(c, axis=0)[None, :] + eps)
    return c


@kernel("rows")
def finish_pre(
    h_ptr,
    part_ptr,
    base_ptr,
    scale_ptr,
    weight_ptr,
    x_ptr,
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
    WEIGHTED: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    """Program 0 of a row mixes and norms, program 1 makes the post and comb coefficients."""
    row = tl.program_id(0).to(tl.int64)
    last = N + tl.arange(0, 1)
    squares = tl.sum(_coefficients(part_ptr, row, rows, last, CHUNKS, CP, NP))
    rms = tl.rsqrt(squares / (HC * D) + rms_eps)
    stream = tl.arange(0, HC)
    if tl.program_id(1) == 0:
        pre = _coefficients(part_ptr, row, rows, stream, CHUNKS, CP, NP) * rms
        pre = sigmoid(pre * tl.load(scale_ptr) + tl.load(base_ptr + stream)) + eps
        lane = tl.arange(0, BD)
        y = _mix(h_ptr, pre, row, lane, lane < D, D, HC, OFFICIAL)
        x = _normed(y, weight_ptr, lane, lane < D, norm_eps, D, WEIGHTED, OFFICIAL)
        tl.store(x_ptr + row * D + lane, x.to(x_ptr.dtype.element_ty), mask=lane < D)
    else:
        post = _coefficients(part_ptr, row, rows, HC + stream, CHUNKS, CP, NP) * rms
        post = 2.0 * sigmoid(post * tl.load(scale_ptr + 1) + tl.load(base_ptr + HC + stream))
        tl.store(post_ptr + row * HC + stream, post)
        cell = tl.arange(0, HC * HC)
        c = _coefficients(part_ptr, row, rows, 2 * HC + cell, CHUNKS, CP, NP) * rms
        c = c * tl.load(scale_ptr + 2) + tl.load(base_ptr + 2 * HC + cell)
        c = _sinkhorn(tl.reshape(c, [HC, HC]), eps, ITERS)
        tl.store(comb_ptr + row * HC * HC + cell, tl.reshape(c, [HC * HC]))


@kernel("rows")
def finish_head(
    h_ptr,
    part_ptr,
    base_ptr,
    scale_ptr,
    weight_ptr,
    z_ptr,
    x_ptr,
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
    WEIGHTED: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    last = N + tl.arange(0, 1)
    squares = tl.sum(_coefficients(part_ptr, row, rows, last, CHUNKS, CP, NP))
    stream = tl.arange(0, HC)
    mix = _coefficients(part_ptr, row, rows, stream, CHUNKS, CP, NP) * tl.rsqrt(squares / (HC * D) + rms_eps)
    mix = sigmoid(mix * tl.load(scale_ptr) + tl.load(base_ptr + stream)) + eps
    lane = tl.arange(0, BD)
    z = _mix(h_ptr, mix, row, lane, lane < D, D, HC, OFFICIAL)
    tl.store(z_ptr + row * D + lane, z.to(z_ptr.dtype.element_ty), mask=lane < D)
    x = _normed(z, weight_ptr, lane, lane < D, norm_eps, D, WEIGHTED, OFFICIAL)
    tl.store(x_ptr + row * D + lane, x.to(x_ptr.dtype.element_ty), mask=lane < D)


@kernel()
def post_rows(
    f_ptr,
    h_ptr,
    post_ptr,
    comb_ptr,
    out_ptr,
    D: tl.constexpr,
    HC: tl.constexpr,
    BLOCK: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < D
    stream = tl.arange(0, HC)
    f = tl.load(f_ptr + row * D + lane, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(post_ptr + row * HC + stream)[:, None] * f[None, :]  # [destination, lane]
    for j in tl.static_range(HC):  # ascending source stream
        h = tl.load(h_ptr + (row * HC + j) * D + lane, mask=inside, other=0.0).to(tl.float32)
        y += tl.load(comb_ptr + (row * HC + j) * HC + stream)[:, None] * h[None, :]
    at = (row * HC + stream)[:, None] * D + lane[None, :]
    tl.store(out_ptr + at, on_grid(y, OFFICIAL).to(out_ptr.dtype.element_ty), mask=inside[None, :])


def _parts(h: Tensor, fn: Tensor, official: bool) -> Tensor:
    """Partial coefficient products float32 [chunks, R, NP] of streams h [R, hc, D]; fn float32 [N, hc*D]."""
    rows, n, k = h.shape[0], fn.shape[0], fn.shape[1]
    assert fn.dtype == torch.float32 and fn.is_contiguous() and h[0].numel() == k
    width, chunks = pow2(max(16, n + 1)), cdiv(k, CHUNK)
    part = torch.empty(chunks, rows, width, dtype=torch.float32, device=h.device)
    stages = STAGES_SM100 if of_device(h.device).name == "sm_100" else STAGES
    coefficient_parts[(cdiv(rows, ROWS), chunks)](
        h, fn, part, rows, n, k, width, ROWS, CHUNK, STEP, official, num_warps=4, num_stages=stages
    )
    return part


def pre(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    iters: int,
    eps: float,
    rms_eps: float,
    norm: Norm,
    store: torch.dtype,
    official: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(x [R, D], post [R, hc], comb [R, hc, hc]) of streams h [R, hc, D]; see ``Ops.hyper_pre``."""
    h = dense(h)
    rows, hc, d = h.shape
    x = torch.empty(rows, d, dtype=store, device=h.device)
    post = torch.empty(rows, hc, dtype=torch.float32, device=h.device)
    comb = torch.empty(rows, hc, hc, dtype=torch.float32, device=h.device)
    if rows:
        part, block = _parts(h, fn, official), pow2(d)
        weight = norm.weight
        finish_pre[(rows, 2)](
            h,
            part,
            base,
            scale,
            h if weight is None else dense(weight),
            x,
            post,
            comb,
            rows,
            eps,
            rms_eps,
            norm.eps,
            fn.shape[0],
            d,
            hc,
            part.shape[2],
            part.shape[0],
            pow2(part.shape[0]),
            block,
            iters,
            weight is not None,
            official,
            num_warps=warps(block),
        )
    return x, post, comb


def head(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    eps: float,
    rms_eps: float,
    norm: Norm,
    store: torch.dtype,
    official: bool,
) -> tuple[Tensor, Tensor]:
    """(z, x) [R, D]: the collapsed streams before and after the norm."""
    h = dense(h)
    rows, hc, d = h.shape
    z, x = (torch.empty(rows, d, dtype=store, device=h.device) for _ in range(2))
    if rows:
        part, block = _parts(h, fn, official), pow2(d)
        weight = norm.weight
        finish_head[(rows,)](
            h,
            part,
            base,
            scale,
            h if weight is None else dense(weight),
            z,
            x,
            rows,
            eps,
            rms_eps,
            norm.eps,
            fn.shape[0],
            d,
            hc,
            part.shape[2],
            part.shape[0],
            pow2(part.shape[0]),
            block,
            weight is not None,
            official,
            num_warps=warps(block),
        )
    return z, x


def post(f: Tensor, h: Tensor, post: Tensor, comb: Tensor, store: torch.dtype, official: bool) -> Tensor:
    """New streams [R, hc, D]; see ``Ops.hyper_post``."""
    rows, hc, d = h.shape
    out = torch.empty(rows, hc, d, dtype=store, device=h.device)
    if rows:
        block = min(COPY_TILE, pow2(d))
        post_rows[(rows, cdiv(d, block))](
            dense(f), dense(h), dense(post), dense(comb), out, d, hc, block, official, num_warps=4
        )
    return out


def _specs() -> list[Spec]:
    out = []
    for official, t in ((True, "bf16"), (False, "f32")):
        name, o = "official" if official else "float32", {"OFFICIAL": official}
        shape = {"D": 4096, "HC": 4, "CHUNKS": 32, "CP": 32, "BD": 4096, "WEIGHTED": True, **o}
        before = types(f32="part_ptr base_ptr scale_ptr weight_ptr", int="rows", float="eps rms_eps norm_eps")
        out += [
            Spec(
                f"hyper_parts_{name}",
                coefficient_parts,
                {**types(f32="fn_ptr part_ptr", int="rows"), **types(**{t: "h_ptr"})},
                {"N": 24, "K": 16384, "NP": 32, "BR": ROWS, "SIZE": CHUNK, "BK": STEP, **o},
                {"num_warps": 4, "num_stages": STAGES},
                overrides={"sm_100": {"num_stages": STAGES_SM100}},
            ),
            Spec(
                f"hyper_pre_{name}",
                finish_pre,
                {**before, **types(f32="post_ptr comb_ptr"), **types(**{t: "h_ptr x_ptr"})},
                {**shape, "N": 24, "NP": 32, "ITERS": 20},
                {"num_warps": 8},
            ),
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
                {**types(f32="post_ptr comb_ptr"), **types(**{t: "f_ptr h_ptr out_ptr"})},
                {"D": 4096, "HC": 4, "BLOCK": 1024, **o},
                {"num_warps": 4},
            ),
        ]
    return out


KERNELS = _specs()
