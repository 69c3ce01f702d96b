"""Looking up drawn tokens and drafts (``speculation.simulated``): benchmarks pay for it in every step."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from firesteel.ops.triton.launch import begin, cdiv, dense, kernel
from firesteel.ops.triton.spec import Spec

LANES = 128


@kernel("count", "length", "width")
def draft_lines(
    slots, cursor, token, margin, confidence, out_token, out_margin, out_confidence, count, length, width,
    DEPTHS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """What lies behind the anchors of ``slots``: lines [count / width, width] of tables [S, length, DEPTHS]."""
    begin()
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = i < count
    slot = tl.load(slots + i // width, mask=live, other=0)
    place = tl.minimum(tl.load(cursor + slot, mask=live, other=0), length - 1)
    at = (slot * length + place) * DEPTHS + i % width
    tl.store(out_token + i, tl.load(token + at, mask=live, other=0), mask=live)
    tl.store(out_margin + i, tl.load(margin + at, mask=live, other=0.0), mask=live)
    tl.store(out_confidence + i, tl.load(confidence + at, mask=live, other=0.0), mask=live)


@kernel("count", "length")
def row_tokens(slots, positions, token, out, count, length, LANES: tl.constexpr):
    """token [S, length] of rows."""
    begin()
    i = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = i < count
    slot = tl.load(slots + i, mask=live, other=0)
    place = tl.minimum(tl.load(positions + i, mask=live, other=0), length - 1)
    tl.store(out + i, tl.load(token + slot * length + place, mask=live, other=0), mask=live)


def drafts(
    slots: Tensor, cursor: Tensor, tables: tuple[Tensor, Tensor, Tensor], width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens int64, margins, confidences float32) [G, width] of slots [G], out of tables [S, L, K]."""
    groups, (_, length, depths) = slots.shape[0], tables[0].shape
    out = tuple(torch.empty(groups, width, dtype=t.dtype, device=t.device) for t in tables)
    if groups:
        draft_lines[(cdiv(groups * width, LANES),)](
            dense(slots), cursor, *tables, *out, groups * width, length, width, DEPTHS=depths, LANES=LANES,
            num_warps=4,
        )  # fmt: skip
    return out[0], out[1], out[2]


def tokens(slots: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    """int64 [R] of table [S, L]."""
    out = torch.empty_like(slots, memory_format=torch.contiguous_format)
    if out.shape[0]:
        row_tokens[(cdiv(out.shape[0], LANES),)](
            dense(slots), dense(positions), table, out, out.shape[0], table.shape[1], LANES=LANES, num_warps=4
        )
    return out


_TABLES = {"slots": "*i64", "token": "*i64", "count": "i32", "length": "i32"}
KERNELS = [
    Spec(
        "drawn-drafts",
        draft_lines,
        {
            **_TABLES, "cursor": "*i64", "out_token": "*i64", "width": "i32",
            **dict.fromkeys(("margin", "confidence", "out_margin", "out_confidence"), "*fp32"),
        },
        {"DEPTHS": 7, "LANES": LANES},
        {"num_warps": 4},
    ),
    Spec(
        "drawn-tokens",
        row_tokens,
        {**_TABLES, "positions": "*i64", "out": "*i64"},
        {"LANES": LANES},
        {"num_warps": 4},
    ),
]  # fmt: skip
