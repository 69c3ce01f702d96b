"""The drafter's context rows in few launches: taps side by side, one product for all stages, rows straight into rings.

A value is made as the ops it stands for make it, so that the bits are theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from firesteel.core import RowBatch
from firesteel.ops.triton.launch import begin, dense, kernel, pow2
from firesteel.ops.triton.linear import GROUP, Weight
from firesteel.ops.triton.norms import KV_GROUP, form_of, remember, stored_form, types, warps
from firesteel.ops.triton.rounding import on_grid, store_form
from firesteel.ops.triton.spec import Spec
from firesteel.ops.types import ContextWeights, Linear, Norm

TAPS = 3  # tapped layers that one launch reads
TAP_TILE = 1024


@kernel()
def tap_rows(
    a_ptr,
    b_ptr,
    c_ptr,
    out_ptr,
    q_ptr,
    step_ptr,
    D: tl.constexpr,
    COUNT: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    FORM: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    """out [rows, COUNT * D]: means over the streams of a, b, c [rows, STREAMS, D] side by side; FORM: in e4m3, too."""
    begin()
    row, piece, which = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    h_ptr = a_ptr
    if which == 1:
        h_ptr = b_ptr
    if which == 2:
        h_ptr = c_ptr
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(STREAMS):
        total += tl.load(h_ptr + (row * STREAMS + s) * D + piece * BLOCK + lane).to(tl.float32)
    y = on_grid(total * (1.0 / STREAMS), OFFICIAL)
    at = (row * COUNT + which) * (D // BLOCK) + piece  # in pieces
    tl.store(out_ptr + at * BLOCK + lane, y.to(out_ptr.dtype.element_ty))
    if FORM:
        store_form(y, q_ptr, step_ptr, at, BLOCK, BLOCK, FORM)


@kernel("stride")
def ring_kv(
    x_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    ring_ptr,
    position_ptr,
    slot_ptr,
    last_ptr,
    valid_ptr,
    eps,
    stride,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BD: tl.constexpr,
    GROUP: tl.constexpr,
    RING: tl.constexpr,
    OFFICIAL: tl.constexpr,
):
    """``stored_rows`` of lines ``stride`` apart, written as ``ring_rows`` writes them: ring [S, RING, D]."""
    begin()
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(position_ptr + row)
    newest = tl.load(position_ptr + tl.load(last_ptr + row))
    keep = (tl.load(valid_ptr + row) != 0) & (newest - position < RING)
    lane = tl.arange(0, BD)
    y = stored_form(
        x_ptr + row * stride, weight_ptr, cos_ptr, sin_ptr, row, lane, eps, D, HALF, BD, GROUP, OFFICIAL
    )
    at = (tl.load(slot_ptr + row) * RING + position % RING) * D
    tl.store(ring_ptr + at + lane, y.to(ring_ptr.dtype.element_ty), mask=(lane < D) & keep)


@dataclass(frozen=True)
class Joined:
    """The stages' wkv as one weight [stages * d, D], cut along K as each of them is."""

    weight: Linear
    dim: int

    @classmethod
    def of(cls, w: ContextWeights) -> Joined | None:
        """None where the stages' formats or shapes forbid it."""
        parts = [stage.data for stage, _ in w.stages]
        if not all(isinstance(p, Weight) and p.scale is not None and p.lines_of == GROUP for p in parts):
            return None
        first: Weight = parts[0]
        if first.shape[0] % GROUP or any(p.shape != first.shape or p.splits != first.splits for p in parts):
            return None
        data = torch.cat([p.data for p in parts])
        scale = torch.cat([p.scale for p in parts])
        whole = Weight(data, scale, GROUP, ranges=first.splits)
        return cls(Linear(whole, data.shape[0], data.shape[1], True), first.shape[0])


def taps(
    streams: Sequence[Tensor], store: torch.dtype, official: bool, form: torch.dtype | None
) -> Tensor | None:
    """Taps of ``streams`` [R, hc, D] side by side: [R, taps * D] with its quantised form; None for odd shapes."""
    rows, count, d = streams[0].shape
    block = math.gcd(d, TAP_TILE)
    if len(streams) > TAPS or block < GROUP or rows == 0:
        return None
    out = torch.empty(rows, len(streams) * d, dtype=store, device=streams[0].device)
    also = form_of(out, form)
    three = [dense(h) for h in streams] + [streams[0]] * (TAPS - len(streams))
    tap_rows[(rows, d // block, len(streams))](
        *three,
        out,
        also.q,
        also.step,
        d,
        len(streams),
        count,
        block,
        also.kind,
        official,
        num_warps=warps(block),
    )
    return remember(out, also)


def store(
    kv: Tensor,
    stage: int,
    norm: Norm,
    angles: tuple[Tensor, Tensor],
    ring: Tensor,
    rows: RowBatch,
    official: bool,
) -> None:
    """Columns ``stage`` of kv [R, stages * d] as K=V rows into ring [S, n, d]."""
    size, d = ring.shape[1:]
    assert ring.is_contiguous() and kv.is_contiguous() and norm.weight is not None, (
        "rings and rows lie in order"
    )
    if not rows.count:
        return
    cos, sin = angles
    bd = max(KV_GROUP, pow2(d))
    ring_kv[(rows.count,)](
        kv[:, stage * d :], dense(norm.weight), cos, sin, ring, rows.positions, rows.slots, rows.last, rows.valid,
        norm.eps, kv.shape[1], d, cos.shape[1], bd, KV_GROUP, size, official, num_warps=warps(bd),
    )  # fmt: skip


def _specs() -> list[Spec]:
    angles = types(f32="weight_ptr cos_ptr sin_ptr", i64="position_ptr slot_ptr last_ptr", bool="valid_ptr")
    return [
        Spec(
            "context_taps",
            tap_rows,
            {**types(bf16="a_ptr b_ptr c_ptr out_ptr", f32="step_ptr"), "q_ptr": "*fp8"},
            {"D": 4096, "COUNT": 3, "STREAMS": 4, "BLOCK": 1024, "FORM": 1, "OFFICIAL": True},
            {"num_warps": 2},
            overrides={"gfx942": {"FORM": 0}},
        ),
        Spec(
            "context_store",
            ring_kv,
            {**types(bf16="x_ptr ring_ptr", float="eps", int="stride"), **angles},
            {"D": 512, "HALF": 32, "BD": 512, "GROUP": KV_GROUP, "RING": 152, "OFFICIAL": True},
            {"num_warps": 1},
        ),
    ]


KERNELS = _specs()
