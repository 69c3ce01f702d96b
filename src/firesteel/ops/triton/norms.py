"""Norms, rotated queries, stored K=V rows, embeddings and rings: one program per row or piece of a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from firesteel.core import RowBatch
from firesteel.ops.triton.launch import begin, cdiv, dense, kernel, pow2
from firesteel.ops.triton.rounding import e4m3_groups, on_grid, rotation, store_form
from firesteel.ops.triton.spec import Spec
from firesteel.ops.types import Norm, PassContext, Rope

KV_GROUP = 64  # dims per stored scale
HEAD_TILE = 4096  # values of the heads that one program of ``query`` turns
COPY_TILE = 1024


def types(**names: str) -> dict[str, str]:
    """A ``Spec`` signature: names of arguments by kind, as in ``types(bf16="x_ptr out_ptr", int="rows")``."""
    kinds = {"bf16": "*bf16", "f32": "*fp32", "i64": "*i64", "bool": "*i1", "int": "i32", "float": "fp32"}
    return {name: kinds[kind] for kind, listed in names.items() for name in listed.split()}


def warps(values: int) -> int:
    """Warps for a program that holds so many values: about 16 per thread."""
    return min(8, max(1, values // 512))


@kernel()
def norm_rows(
    x_ptr,
    weight_ptr,
    out_ptr,
    q_ptr,
    step_ptr,
    eps,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    FORM: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    begin()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < N
    x = tl.load(x_ptr + row * N + lane, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / N + eps)
    if WEIGHTED:
        y = y * tl.load(weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    y = on_grid(y, OFFICIAL)
    tl.store(out_ptr + row * N + lane, y.to(out_ptr.dtype.element_ty), mask=inside)
    if FORM:
        store_form(y, q_ptr, step_ptr, row, N, BLOCK, FORM)


@dataclass(frozen=True)
class Form:
    """Where a row's quantised form goes: e4m3 ``q`` [R, n] and float32 ``step`` [R, n/128].

    ``kind`` as ``store_form`` takes it; 0: nowhere.
    """

    q: Tensor
    step: Tensor
    kind: int


def form_of(x: Tensor, dtype: torch.dtype | None) -> Form:
    """The place of the form in ``dtype`` of a result x [R, n].

    There is none without a type, of odd widths, and in fnuz codes, into which Triton 3.6 cannot convert here.
    """
    rows, n = x.shape
    if dtype != torch.float8_e4m3fn or n % 128:
        return Form(x, x, 0)
    q = torch.empty(rows, n, dtype=dtype, device=x.device)
    return Form(q, torch.empty(rows, n // 128, dtype=torch.float32, device=x.device), 1)


def remember(x: Tensor, form: Form) -> Tensor:
    """x, which nobody will write to again, with its form for ``linear.quantised``."""
    if form.kind:
        x.quantised_forms = {(x.shape[1], form.q.dtype): (form.q, form.step)}  # type: ignore[attr-defined]
    return x


def norm(
    x: Tensor, weight: Norm, store: torch.dtype, official: bool, form: torch.dtype | None = None
) -> Tensor:
    """RMS norm of x [R, n] over its last dim, in ``store``; ``form``: the e4m3 type of a quantised form beside it."""
    x = dense(x)  # lines that begin at odd addresses would be another variant, with other bits
    rows, n = x.shape
    out = torch.empty(rows, n, dtype=store, device=x.device)
    block, w, also = pow2(n), weight.weight, form_of(out, form)
    if rows:
        norm_rows[(rows,)](
            x,
            x if w is None else dense(w),
            out,
            also.q,
            also.step,
            weight.eps,
            n,
            block,
            w is not None,
            also.kind,
            official,
            num_warps=warps(block),
        )
    return remember(out, also)


@kernel()
def turn_heads(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    begin()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BH + tl.arange(0, BH)
    lane = tl.arange(0, BD)
    flat: tl.constexpr = D - 2 * HALF
    at = row * H * D + head[:, None] * D
    inside = (head < H)[:, None] & (lane < D)[None, :]
    x = tl.load(x_ptr + at + lane[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    partner = tl.load(x_ptr + at + (lane ^ 1)[None, :], mask=inside & (lane >= flat)[None, :], other=0.0).to(
        tl.float32
    )
    cos, sin = rotation(cos_ptr, sin_ptr, row * HALF, lane, flat, D)
    y = on_grid(x * scale, OFFICIAL) * cos[None, :] + on_grid(partner * scale, OFFICIAL) * sin[None, :]
    tl.store(out_ptr + at + lane[None, :], on_grid(y, OFFICIAL).to(out_ptr.dtype.element_ty), mask=inside)


def query(
    q: Tensor, heads: int, eps: float, angles: tuple[Tensor, Tensor], store: torch.dtype, official: bool
) -> Tensor:
    """q [R, H*d] as heads [R, H, d]: unweighted norm and rotation by ``angles`` [R, rd/2]."""
    rows, d = q.shape[0], q.shape[1] // heads
    out = torch.empty(rows, heads, d, dtype=store, device=q.device)
    bd = pow2(d)
    bh = max(1, min(pow2(heads), HEAD_TILE // bd))
    cos, sin = angles
    if rows:
        turn_heads[(rows, cdiv(heads, bh))](
            dense(q), cos, sin, out, eps, heads, d, cos.shape[1], bh, bd, official, num_warps=warps(bh * bd)
        )
    return out


@triton.jit
def stored_form(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    row,
    lane,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BD: tl.constexpr,
    GROUP: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    """[BD] values of a K=V row that begins at ``x_ptr``: norm, rotation by the angles of ``row``, e4m3."""
    flat: tl.constexpr = D - 2 * HALF
    inside = lane < D
    x = tl.load(x_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / D + eps)
    turned = inside & (lane >= flat)
    partner = tl.load(x_ptr + (lane ^ 1), mask=turned, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + lane, mask=inside, other=0.0).to(tl.float32)
    weight2 = tl.load(weight_ptr + (lane ^ 1), mask=turned, other=0.0).to(tl.float32)
    cos, sin = rotation(cos_ptr, sin_ptr, row * HALF, lane, flat, D)
    y = on_grid(x * scale * weight, OFFICIAL) * cos + on_grid(partner * scale * weight2, OFFICIAL) * sin
    y = on_grid(y, OFFICIAL)
    if OFFICIAL:
        y = tl.where(lane < flat, e4m3_groups(tl.where(lane < flat, y, 0.0), BD // GROUP, GROUP), y)
    return y


@kernel()
def stored_rows(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    eps,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BD: tl.constexpr,
    GROUP: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    begin()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BD)
    y = stored_form(
        x_ptr + row * D, weight_ptr, cos_ptr, sin_ptr, row, lane, eps, D, HALF, BD, GROUP, OFFICIAL
    )
    tl.store(out_ptr + row * D + lane, y.to(out_ptr.dtype.element_ty), mask=lane < D)


def key_value(
    kv: Tensor, weight: Norm, angles: tuple[Tensor, Tensor], store: torch.dtype, official: bool
) -> Tensor:
    """The stored form of K=V rows kv [R, d]: norm, rotation, e4m3 of the dims that do not turn."""
    rows, d = kv.shape
    assert weight.weight is not None, "a K=V norm has a weight"
    out = torch.empty(rows, d, dtype=store, device=kv.device)
    cos, sin = angles
    bd = max(KV_GROUP, pow2(d))
    if rows:
        stored_rows[(rows,)](
            dense(kv),
            dense(weight.weight),
            cos,
            sin,
            out,
            weight.eps,
            d,
            cos.shape[1],
            bd,
            KV_GROUP,
            official,
            num_warps=warps(bd),
        )
    return out


@kernel()
def embed_rows(
    table_ptr,
    token_ptr,
    out_ptr,
    D: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    begin()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < D
    token = tl.load(token_ptr + row).to(tl.int64)
    x = on_grid(tl.load(table_ptr + token * D + lane, mask=inside, other=0.0).to(tl.float32), OFFICIAL)
    for s in tl.static_range(STREAMS):
        tl.store(out_ptr + (row * STREAMS + s) * D + lane, x.to(out_ptr.dtype.element_ty), mask=inside)


def embed(table: Tensor, tokens: Tensor, streams: int, store: torch.dtype, official: bool) -> Tensor:
    """Embeddings of ``tokens`` int64 [R] in all streams: [R, streams, D]."""
    rows, d = tokens.shape[0], table.shape[1]
    out = torch.empty(rows, streams, d, dtype=store, device=table.device)
    if rows:
        block = min(COPY_TILE, pow2(d))
        embed_rows[(rows, cdiv(d, block))](
            dense(table), dense(tokens), out, d, streams, block, official, num_warps=warps(block)
        )
    return out


@kernel()
def mean_streams(
    h_ptr, out_ptr, D: tl.constexpr, STREAMS: tl.constexpr, BLOCK: tl.constexpr, OFFICIAL: tl.constexpr
):
    begin()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < D
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(STREAMS):
        total += tl.load(h_ptr + (row * STREAMS + s) * D + lane, mask=inside, other=0.0).to(tl.float32)
    y = on_grid(total * (1.0 / STREAMS), OFFICIAL)
    tl.store(out_ptr + row * D + lane, y.to(out_ptr.dtype.element_ty), mask=inside)


def tap(h: Tensor, store: torch.dtype, official: bool) -> Tensor:
    """Mean over the streams of h [R, hc, D]."""
    rows, streams, d = h.shape
    out = torch.empty(rows, d, dtype=store, device=h.device)
    if rows:
        block = min(COPY_TILE, pow2(d))
        mean_streams[(rows, cdiv(d, block))](
            dense(h), out, d, streams, block, official, num_warps=warps(block)
        )
    return out


@kernel()
def ring_rows(
    data_ptr,
    ring_ptr,
    position_ptr,
    slot_ptr,
    last_ptr,
    valid_ptr,
    RING: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin()
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + row)
    newest = tl.load(position_ptr + tl.load(last_ptr + row))
    keep = (tl.load(valid_ptr + row) != 0) & (newest - position < RING)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (lane < N) & keep
    x = tl.load(data_ptr + row * N + lane, mask=inside, other=0.0)
    at = (tl.load(slot_ptr + row) * RING + position % RING) * N
    tl.store(ring_ptr + at + lane, x.to(ring_ptr.dtype.element_ty), mask=inside)


def store_ring(ring: Tensor, data: Tensor, rows: RowBatch) -> None:
    """Write the last ``n`` valid rows of every group into ring [S, n, w]; data [R, w]."""
    size, width = ring.shape[1:]
    block = min(COPY_TILE, pow2(width))
    assert ring.is_contiguous(), "a ring is written in place"
    if rows.count:
        ring_rows[(rows.count, cdiv(width, block))](
            dense(data),
            ring,
            rows.positions,
            rows.slots,
            rows.last,
            rows.valid,
            size,
            width,
            block,
            num_warps=warps(block),
        )


@triton.jit
def cos_sin(turn):
    """cos and sin of float32 angles, by Taylor series in float64 after reduction to a quarter turn.

    The library's functions keep an array in local memory for large angles; and
    these have the same bits on every target.
    """
    x = turn.to(tl.float64)
    k = tl.floor(x * 0.6366197723675814 + 0.5)
    r = x - k * 1.5707963267948966
    s = r * r
    sin = r * (1.0 + s * (-1.0 / 6 + s * (1.0 / 120 + s * (-1.0 / 5040 + s * (1.0 / 362880)))))
    cos = 1.0 + s * (-0.5 + s * (1.0 / 24 + s * (-1.0 / 720 + s * (1.0 / 40320 - s * (1.0 / 3628800)))))
    quarter = k.to(tl.int32) & 3
    odd = (quarter & 1) != 0
    c, d = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    c = tl.where((quarter == 1) | (quarter == 2), -c, c)
    d = tl.where(quarter >= 2, -d, d)
    return c.to(tl.float32), d.to(tl.float32)


@kernel()
def row_angles(
    position_ptr,
    freq_ptr,
    cos_ptr,
    sin_ptr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    RATIO: tl.constexpr,
):
    begin()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    position = tl.load(position_ptr + row)
    turn = (position // RATIO * RATIO).to(tl.float32) * tl.load(freq_ptr + lane, mask=lane < N, other=0.0)
    cos, sin = cos_sin(turn)
    tl.store(cos_ptr + row * N + lane, cos, mask=lane < N)
    tl.store(sin_ptr + row * N + lane, sin, mask=lane < N)


def rotary(rope: Rope, positions: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
    """cos and sin float32 [R, rd/2] at the multiples of ``ratio`` that the positions int64 [R] lie behind."""
    rows, n = positions.shape[0], rope.inv_freq.shape[0]
    cos, sin = (torch.empty(rows, n, dtype=torch.float32, device=positions.device) for _ in range(2))
    if rows:
        row_angles[(rows,)](positions, rope.inv_freq, cos, sin, n, pow2(n), ratio, num_warps=1)
    return cos, sin


def angles(table: str, ctx: PassContext) -> tuple[Tensor, Tensor]:
    """cos and sin [R, rd/2] of a table, elements in order."""
    cos, sin = ctx.rotary[table]
    return dense(cos), dense(sin)


def _specs() -> list[Spec]:
    out = []
    for official, t in ((True, "bf16"), (False, "f32")):
        name, o = "official" if official else "float32", {"OFFICIAL": official}

        def sig(store: str, t: str = t, **other: str) -> dict[str, str]:
            return {**types(**other), **types(**{t: store})}

        turned = sig("x_ptr out_ptr", f32="cos_ptr sin_ptr", float="eps")
        out += [
            Spec(
                f"norm_{name}",
                norm_rows,
                {**sig("x_ptr out_ptr", f32="weight_ptr step_ptr", float="eps"), "q_ptr": "*fp8"},
                {"N": 4096, "BLOCK": 4096, "WEIGHTED": True, "FORM": int(official), **o},
                {"num_warps": 8},
                overrides={"gfx942": {"FORM": 0}},
            ),
            Spec(
                f"query_{name}",
                turn_heads,
                turned,
                {"H": 64, "D": 512, "HALF": 32, "BH": 8, "BD": 512, **o},
                {"num_warps": 8},
            ),
            Spec(
                f"key_value_{name}",
                stored_rows,
                {**turned, "weight_ptr": "*fp32"},
                {"D": 512, "HALF": 32, "BD": 512, "GROUP": KV_GROUP, **o},
                {"num_warps": 1},
            ),
            Spec(
                f"embed_{name}",
                embed_rows,
                sig("table_ptr out_ptr", i64="token_ptr"),
                {"D": 4096, "STREAMS": 4, "BLOCK": 1024, **o},
                {"num_warps": 2},
            ),
            Spec(
                f"tap_{name}",
                mean_streams,
                sig("h_ptr out_ptr"),
                {"D": 4096, "STREAMS": 4, "BLOCK": 1024, **o},
                {"num_warps": 2},
            ),
            Spec(
                f"store_window_{name}",
                ring_rows,
                sig("data_ptr ring_ptr", i64="position_ptr slot_ptr last_ptr", bool="valid_ptr"),
                {"RING": 152, "N": 512, "BLOCK": 512},
                {"num_warps": 1},
            ),
        ]
    turn = types(i64="position_ptr", f32="freq_ptr cos_ptr sin_ptr")
    return [*out, Spec("angles", row_angles, turn, {"N": 32, "BLOCK": 32, "RATIO": 4}, {"num_warps": 1})]


KERNELS = _specs()
