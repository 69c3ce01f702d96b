"""The indexer: queries rounded as its keys are, scores per entry, exact top-k in ascending order.

Selection is a radix search for the score of the k-th best entry, eight bits a
pass over the row's scores, then one ordered pass that keeps everything above it
and the lowest indices at it. Integers only: no order of additions can show.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firesteel.ops.triton.compress import INDEX_GROUP, hadamard_signs
from firesteel.ops.triton.launch import begin, cdiv, dense, kernel, pow2
from firesteel.ops.triton.norms import angles, types
from firesteel.ops.triton.rounding import e2m1_groups, on_grid, operand, rotation
from firesteel.ops.triton.spec import Spec
from firesteel.ops.triton.target import Target, of_device
from firesteel.ops.types import PassContext

TILE = 64  # the width of a selection is a multiple of this unless top_k cuts it
SCORE_KEYS = 128  # entries of one scoring program
SELECT_KEYS, SELECT_KEYS_AMD = 4096, 2048  # scores of one step of the search, see ``search_of``
SCORE_BYTES = 1 << 29  # scores held at once; longer passes go in pieces of rows


@kernel("row0", "top_k")
def round_queries(
    q_ptr,
    cos_ptr,
    sin_ptr,
    position_ptr,
    out_ptr,
    row0,
    top_k,
    H: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    RATIO: tl.constexpr,
    GROUP: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    begin()
    line = tl.program_id(0).to(tl.int64)
    row = line + row0
    if (tl.load(position_ptr + row) + 1) // RATIO <= top_k:
        return
    head = tl.arange(0, BH)
    lane = tl.arange(0, BD)
    flat: tl.constexpr = D - 2 * HALF
    inside = (head < H)[:, None] & (lane < D)[None, :]
    at = head[:, None] * D
    x = tl.load(q_ptr + row * H * D + at + lane[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(
        q_ptr + row * H * D + at + (lane ^ 1)[None, :], mask=inside & (lane >= flat)[None, :], other=0.0
    ).to(tl.float32)
    cos, sin = rotation(cos_ptr, sin_ptr, row * HALF, lane, flat, D)
    y = on_grid(x * cos[None, :] + partner * sin[None, :], OFFICIAL)
    if OFFICIAL:
        y = tl.dot(y.to(tl.bfloat16), hadamard_signs(BD).to(tl.bfloat16)) * (D**-0.5)
        y = tl.reshape(
            e2m1_groups(tl.reshape(on_grid(y, OFFICIAL), [BH * BD]), BH * BD // GROUP, GROUP), [BH, BD]
        )
    tl.store(out_ptr + line * H * D + at + lane[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)


@kernel("row0", "top_k", "columns", "width")
def score_entries(
    q_ptr,
    weight_ptr,
    key_ptr,
    page_ptr,
    position_ptr,
    slot_ptr,
    score_ptr,
    row0,
    top_k,
    columns,
    width,
    page_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    RATIO: tl.constexpr,
    PER_PAGE: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    """score [R, width]: sum over heads of weight * max(0, q . key) for the visible entries."""
    begin()
    line = tl.program_id(0).to(tl.int64)
    row = line + row0
    visible = (tl.load(position_ptr + row) + 1) // RATIO
    lo = tl.program_id(1) * BE
    if (visible <= top_k) | (lo >= visible):
        return
    entry = lo + tl.arange(0, BE)
    live = entry < visible
    head = tl.arange(0, BH)
    lane = tl.arange(0, BD)
    slot = tl.load(slot_ptr + row)
    page = tl.load(page_ptr + slot * columns + entry // PER_PAGE, mask=live, other=0)
    pointer = key_ptr + page * page_stride + (entry % PER_PAGE) * D
    keys = tl.load(pointer[:, None] + lane[None, :], mask=live[:, None] & (lane < D)[None, :], other=0.0)
    inside = (head < H)[:, None] & (lane < D)[None, :]
    q = tl.load(q_ptr + line * H * D + head[:, None] * D + lane[None, :], mask=inside, other=0.0)
    dots = tl.dot(operand(q, OFFICIAL), tl.trans(operand(keys, OFFICIAL)), input_precision="ieee")
    weight = tl.load(weight_ptr + row * H + head, mask=head < H, other=0.0).to(tl.float32)
    score = on_grid(tl.sum(tl.maximum(dots, 0.0) * weight[:, None], axis=0), OFFICIAL)
    tl.store(score_ptr + line * width + entry, score.to(score_ptr.dtype.element_ty), mask=live)


@triton.jit
def _rank(score, BITS: tl.constexpr):
    """Scores as unsigned integers of the same order, held in int64; NaN ranks highest, -0 ties with 0."""
    x = score.to(tl.float32) + 0.0
    bits = x.to(tl.uint32, bitcast=True)
    up = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    up = tl.where(x != x, 0xFFFFFFFF, up.to(tl.int64))
    return up >> (32 - BITS)


@kernel("row0", "top_k", "width", "columns")
def select_entries(
    score_ptr,
    position_ptr,
    out_ptr,
    row0,
    top_k,
    width,
    columns,
    RATIO: tl.constexpr,
    BLOCK: tl.constexpr,
    BITS: tl.constexpr,
):
    """out int64 [R, columns]: the best ``top_k`` entries ascending; all of a row that sees no more, padded with -1."""
    begin()
    line = tl.program_id(0).to(tl.int64)
    row = line + row0
    visible = ((tl.load(position_ptr + row) + 1) // RATIO).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    if visible <= top_k:
        for lo in range(0, columns, BLOCK):
            i = lo + lane
            tl.store(out_ptr + row * columns + i, tl.where(i < visible, i, -1).to(tl.int64), mask=i < columns)
        return
    scores = score_ptr + line * width
    threshold = tl.zeros([1], tl.int64)
    need = tl.zeros([1], tl.int32) + top_k
    digit = tl.arange(0, 256)
    for step in tl.static_range(BITS // 8):
        shift = BITS - 8 * (step + 1)
        counts = tl.zeros([256], tl.int32)
        for lo in range(0, visible, BLOCK):
            live = lo + lane < visible
            rank = _rank(tl.load(scores + lo + lane, mask=live, other=0.0), BITS)
            live = live & ((rank >> (shift + 8)) == (threshold >> (shift + 8)))
            counts += tl.histogram(((rank >> shift) & 255).to(tl.int32), 256, mask=live)
        above = tl.sum(counts) - tl.cumsum(counts)
        found = (above < need) & (above + counts >= need)
        threshold += tl.sum(tl.where(found, digit, 0)).to(tl.int64) << shift
        need -= tl.sum(tl.where(found, above, 0))
    taken = tl.zeros([1], tl.int32)
    ties = tl.zeros([1], tl.int32)
    for lo in range(0, visible, BLOCK):
        live = lo + lane < visible
        rank = _rank(tl.load(scores + lo + lane, mask=live, other=0.0), BITS)
        tie = (live & (rank == threshold)).to(tl.int32)
        keep = (live & (rank > threshold)) | ((tie != 0) & (ties + tl.cumsum(tie) - tie < need))
        keep = keep.to(tl.int32)
        at = taken + tl.cumsum(keep) - keep
        tl.store(out_ptr + row * columns + at, (lo + lane).to(tl.int64), mask=keep != 0)
        taken += tl.sum(keep)
        ties += tl.sum(tie)


def search_of(width: int, target: Target) -> tuple[int, int]:
    """(scores of a step, warps) of the search through ``width`` scores; the selection is the same for any.

    AMD keeps a mask of every element of a thread in scalar registers: those of eight elements spill,
    those of two do not, hence the smaller step and the sixteen waves.
    """
    amd = target.backend == "hip"
    step = min(SELECT_KEYS_AMD if amd else SELECT_KEYS, max(1024, pow2(width)))
    return step, (4 if step == 1024 else 16 if amd else 8)


def index_select(
    q: Tensor,
    head_weights: Tensor,
    keys: Tensor,
    ratio: int,
    top_k: int,
    table: str,
    ctx: PassContext,
    official: bool,
) -> Tensor:
    """int64 [R, n] of ``Ops.index_select``; ``ratio`` tokens an entry."""
    rows = q.shape[0]
    r, device = ctx.rows, q.device
    most = (r.max_position + 1) // ratio
    columns = cdiv(most, TILE) * TILE
    columns = columns if most <= top_k else min(columns, top_k)
    out = torch.empty(rows, columns, dtype=torch.int64, device=device)
    if rows == 0 or columns == 0:
        return out
    kind = torch.bfloat16 if official else torch.float32
    width = most if most > top_k else 0
    block = rows if width == 0 else max(1, min(rows, SCORE_BYTES // (width * kind.itemsize)))
    for row0 in range(0, rows, block):
        n = min(block, rows - row0)
        scores = torch.empty(n, width, dtype=kind, device=device)
        if width:
            _score(q, head_weights, keys, ratio, top_k, table, ctx, official, row0, scores)
        step, warps = search_of(max(width, columns), of_device(device))
        select_entries[(n,)](
            scores,
            r.positions,
            out,
            row0,
            top_k,
            width,
            columns,
            ratio,
            step,
            16 if official else 32,
            num_warps=warps,
        )
    return out


def _score(
    q: Tensor,
    head_weights: Tensor,
    keys: Tensor,
    ratio: int,
    top_k: int,
    table: str,
    ctx: PassContext,
    official: bool,
    row0: int,
    scores: Tensor,
) -> None:
    """Fill scores [n, width] of the rows from ``row0`` on."""
    (n, width), (_, heads, d), r = scores.shape, q.shape, ctx.rows
    assert keys.stride()[1:] == (d, 1)
    cos, sin = angles(table, ctx)
    bh, bd = max(16, pow2(heads)), max(16, pow2(d))
    assert not official or bd == d, f"Hadamard needs a power of two of at least 16, got {d}"
    turned = torch.empty(n, heads, d, dtype=scores.dtype, device=q.device)
    round_queries[(n,)](
        dense(q),
        cos,
        sin,
        r.positions,
        turned,
        row0,
        top_k,
        heads,
        d,
        cos.shape[1],
        bh,
        bd,
        ratio,
        min(INDEX_GROUP, bd),
        official,
        num_warps=4,
    )
    score_entries[(n, cdiv(width, SCORE_KEYS))](
        turned,
        dense(head_weights),
        keys,
        dense(ctx.page_table),
        r.positions,
        r.slots,
        scores,
        row0,
        top_k,
        ctx.page_table.shape[1],
        width,
        keys.stride(0),
        heads,
        d,
        bh,
        bd,
        SCORE_KEYS,
        ratio,
        ctx.page_size // ratio,
        official,
        num_warps=4,
    )


def _specs() -> list[Spec]:
    heads = {"H": 64, "D": 128, "BH": 64, "BD": 128, "RATIO": 4, "OFFICIAL": True}
    return [
        Spec(
            "index_queries",
            round_queries,
            types(bf16="q_ptr out_ptr", f32="cos_ptr sin_ptr", i64="position_ptr", int="row0 top_k"),
            {**heads, "HALF": 32, "GROUP": INDEX_GROUP},
            {"num_warps": 4},
        ),
        Spec(
            "index_scores",
            score_entries,
            types(
                bf16="q_ptr weight_ptr key_ptr score_ptr",
                i64="page_ptr position_ptr slot_ptr",
                int="row0 top_k columns width page_stride",
            ),
            {**heads, "BE": SCORE_KEYS, "PER_PAGE": 64},
            {"num_warps": 4},
            aligned=("page_stride",),
        ),
        Spec(
            "index_select",
            select_entries,
            types(bf16="score_ptr", i64="position_ptr out_ptr", int="row0 top_k width columns"),
            {"RATIO": 4, "BLOCK": SELECT_KEYS, "BITS": 16},
            {"num_warps": 8},
            overrides={t: {"BLOCK": SELECT_KEYS_AMD, "num_warps": 16} for t in ("gfx950", "gfx942")},
        ),
    ]


KERNELS = _specs()
