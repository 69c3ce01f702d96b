"""Accept drafts, cut at stops and limits, move cursors; and the survival of new drafts."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from firesteel.core import RowBatch, SampleRows, Verdict
from firesteel.ops.reference.draft import MAX_MARGIN
from firesteel.ops.triton.launch import aligned_lines, begin, cdiv, dense, kernel, pow2
from firesteel.ops.triton.spec import Spec
from firesteel.ops.types import Calibration, Proposal, SlotState

LANES = 64
MOST_MARGIN = tl.constexpr(MAX_MARGIN)


@kernel("samples", "widest", "wide", "stops")
def commit_groups(  # type: ignore[no-untyped-def]
    tokens,
    finite,
    positions,
    rows,
    offset,
    width,
    slots,
    cursor,
    anchor,
    alive,
    max_len,
    stop_ids,
    drafts,
    out,
    count,
    accepted,
    verified,
    finished,
    samples,
    widest,
    wide,
    stops,
    WIDE: tl.constexpr,
    STOPS: tl.constexpr,
):
    """One sampling group: its leading hits, the first broken row, the first stop, the length limit."""
    begin()
    group = tl.program_id(0)
    step = tl.arange(0, WIDE)
    here = step < widest
    slot, own, top = tl.load(slots + group), tl.load(width + group), tl.load(offset + group)
    at = tl.minimum(top + step, samples - 1)
    token = tl.load(tokens + at, mask=here, other=0)
    good = tl.load(finite + at, mask=here, other=1) != 0
    tl.store(out + group * widest + step, token, mask=here)
    compared = (step < widest - 1) & (step + 1 < own)
    draft = tl.load(drafts + slot * wide + step, mask=compared, other=-1)
    hits = tl.min(tl.where(compared & (token == draft), WIDE, step), axis=0).to(tl.int64)
    keep = tl.where(own > 0, hits + 1, 0)
    end = keep * 0
    bad = tl.min(tl.where(here & (good == 0), step, WIDE), axis=0).to(tl.int64)
    end = tl.where(bad < keep, 3, end)
    keep = tl.minimum(keep, bad)
    column = tl.arange(0, STOPS)
    ids = tl.load(stop_ids + slot * stops + column, mask=column < stops, other=-1)
    is_stop = tl.max((token[:, None] == ids[None, :]).to(tl.int32), axis=1) > 0
    stop = tl.min(tl.where(here & is_stop, step, WIDE), axis=0).to(tl.int64)
    end = tl.where(stop < keep, 1, end)
    keep = tl.minimum(keep, stop + 1)
    base = tl.load(positions + tl.load(rows + tl.minimum(top, samples - 1))) + 1
    room = tl.load(max_len + slot) - base
    end = tl.where((room < keep) | ((room == keep) & (end == 0)), 2, end)
    keep = tl.minimum(keep, tl.maximum(room, 0))
    end = tl.where(own > 0, end, 0)
    newest = tl.sum(tl.where(step == keep - 1, token, 0), axis=0)
    moved = (own > 0) & (keep > 0)
    tl.store(cursor + slot, base + keep - 1, mask=moved)
    tl.store(anchor + slot, newest, mask=moved)
    tl.store(alive + slot, (end == 0).to(tl.int64), mask=own > 0)
    tl.store(count + group, keep)
    tl.store(accepted + group, tl.minimum(hits, keep))
    tl.store(verified + group, tl.maximum(own - 1, 0))
    tl.store(finished + group, end)


def commit(
    tokens: Tensor, finite: Tensor, rows: RowBatch, samples: SampleRows, state: SlotState, widest: int
) -> Verdict:
    """Verdict as of ``Ops.commit``; the scratch slot of padding groups is left alone (width 0)."""
    groups, device = samples.slots.shape[0], tokens.device
    out = torch.empty(groups, widest, dtype=torch.int64, device=device)
    count, accepted, verified, finished = aligned_lines(4, groups, torch.int64, device).unbind()
    verdict = Verdict(out, count, accepted, verified, finished)
    if groups == 0:
        return verdict
    given = (rows.positions, samples.rows, samples.offset, samples.width, samples.slots)
    commit_groups[(groups,)](
        dense(tokens),
        dense(finite).view(torch.int8),
        *(dense(t) for t in given),
        *(state.cursor, state.anchor, state.alive, state.max_len, state.stop_ids, state.drafts),
        *(out, count, accepted, verified, finished),
        tokens.shape[0],
        widest,
        state.drafts.shape[1],
        state.stop_ids.shape[1],
        WIDE=pow2(widest),
        STOPS=max(2, pow2(state.stop_ids.shape[1])),
        num_warps=1,
    )
    return verdict


@kernel("groups", "depth", "depths", "wide")
def survive(  # type: ignore[no-untyped-def]
    slots, temperature, token, margin, confidence, by_depth, by_head, by_margin, out,
    passes, draft_len, drafts, margins, confidences, survivals, groups, depth, depths, wide,
    HEAD: tl.constexpr, KNOWN: tl.constexpr, NOTE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Running product of calibrated probabilities, one group per lane, in order of depth; 1 unless KNOWN.

    NOTE: all that is known of the drafts goes into the lines of their slots.
    """
    begin()
    group = tl.program_id(0) * LANES + tl.arange(0, LANES)
    ok = group < groups
    slot = tl.load(slots + group, mask=ok, other=0)
    alive = tl.zeros((LANES,), tl.float32) + 1.0
    slope = alive * 0.0
    weight = slope
    kind = (tl.load(temperature + slot, mask=ok, other=0.0) > 0.0).to(tl.int64)
    if KNOWN:
        slope, weight = tl.load(by_margin + kind), tl.load(by_head + kind)
    if NOTE:
        tl.store(passes + slot, tl.load(passes + slot, mask=ok, other=0) + 1, mask=ok)
        tl.store(draft_len + slot, tl.zeros((LANES,), tl.int64) + depth, mask=ok)
    for j in range(depth):
        at, line = group * depth + j, slot * wide + j
        given = tl.load(margin + at, mask=ok, other=0.0)
        if NOTE:
            tl.store(drafts + line, tl.load(token + at, mask=ok, other=0), mask=ok)
            tl.store(margins + line, given, mask=ok)
        if HEAD:
            raw = tl.load(confidence + at, mask=ok, other=0.0)
            if NOTE:
                tl.store(confidences + line, raw, mask=ok)
        if KNOWN:
            m = tl.where(given == given, tl.minimum(tl.maximum(given, 0.0), MOST_MARGIN), 0.0)
            u = 1.0 + m
            rest = tl.where(u == 1.0, 1.0, u - 1.0)
            log1p = tl.where(u == 1.0, m, tl.log(u) * (m / rest))
            logit = tl.load(by_depth + kind * depths + j) + slope * log1p
            if HEAD:
                c = tl.where(raw == raw, tl.minimum(tl.maximum(raw, -3.0e38), 3.0e38), 0.0)
                logit = logit + weight * c
            alive = alive * (1.0 / (1.0 + tl.exp(-logit)))
        tl.store(out + at, alive, mask=ok)
        if NOTE:
            tl.store(survivals + line, alive, mask=ok)


def survival(
    proposal: Proposal, slots: Tensor, state: SlotState, calibration: Calibration | None, note: bool = False
) -> Tensor:
    """Survival float32 [G, K] as of ``Ops.survival``; ``note``: written down as of ``Ops.note_drafts``."""
    margin, head, known = dense(proposal.margin), proposal.confidence, calibration is not None
    groups, depth = margin.shape
    out = torch.empty_like(margin)
    tables = (
        (margin,) * 3 if calibration is None else (calibration.depth, calibration.head, calibration.margin)
    )
    survive[(cdiv(max(groups, 1), LANES),)](
        dense(slots),
        state.temperature,
        dense(proposal.tokens),
        margin,
        margin if head is None else dense(head),
        *(dense(t) for t in tables),
        out,
        *(state.passes, state.draft_len, state.drafts, state.margin, state.confidence, state.survival),
        groups,
        depth,
        tables[0].shape[1],
        state.drafts.shape[1],
        HEAD=head is not None,
        KNOWN=known,
        NOTE=note,
        LANES=LANES,
        num_warps=2,
    )
    return out


def _specs() -> list[Spec]:
    floats = (
        "temperature",
        "margin",
        "confidence",
        "by_depth",
        "by_head",
        "by_margin",
        "margins",
        "confidences",
        "survivals",
    )
    whole = ("samples", "widest", "wide", "stops", "groups", "depth", "depths")

    def spec(
        name: str, fn: object, constants: dict[str, int | bool], warps: int, extra: dict[str, str]
    ) -> Spec:
        names = [a for a in fn.arg_names if a not in constants]  # type: ignore[attr-defined]
        kinds = {**dict.fromkeys(floats, "*fp32"), **dict.fromkeys(whole, "i32"), "finite": "*i8", **extra}
        return Spec(name, fn, {a: kinds.get(a, "*i64") for a in names}, constants, {"num_warps": warps})

    return [
        spec("commit_groups", commit_groups, {"WIDE": 8, "STOPS": 16}, 1, {}),
        spec(
            "survive",
            survive,
            {"HEAD": True, "KNOWN": True, "NOTE": True, "LANES": LANES},
            2,
            {"out": "*fp32"},
        ),
    ]


KERNELS = _specs()
