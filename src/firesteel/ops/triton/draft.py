"""The drafter's walk: K dependent steps over base logits that are written once.

    begin -> K x [ head step (W1[x] W2^T + base + noise, tile winners) -> pick ] -> confidences

A step reads W2 once for all requests and its own slice of the base logits;
nothing of [G, V] is written unless someone asks for the logits.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from firesteel.ops.triton.head import Walk, run_head, weight_of
from firesteel.ops.triton.launch import aligned_lines, begin, cdiv, dense, kernel
from firesteel.ops.triton.sample import Partials, score_stored
from firesteel.ops.triton.spec import Spec
from firesteel.ops.triton.target import Target
from firesteel.ops.types import MarkovHead, SlotState

LANES = 128  # (step, group) pairs per program of ``walk_begin``
CHUNK = 1024  # terms of the confidence product that are summed lane by lane


@kernel("groups", "depth", "history_row", "line")
def walk_begin(  # type: ignore[no-untyped-def]
    slots, cursor, anchor, history, tokens, places, groups, depth, history_row, line, LANES: tl.constexpr
):
    """Positions [depth + 1, groups] of anchor and drafts, and the anchors, noted in the history.

    ``tokens`` and ``places`` have lines of ``line``; the anchors are the first of ``tokens``.
    """
    begin()
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    ok = lane < groups * (depth + 1)
    step, group = lane // groups, lane % groups
    slot = tl.load(slots + group, mask=ok, other=0)
    place = tl.minimum(tl.load(cursor + slot, mask=ok, other=0) + step, history_row - 1)
    tl.store(places + step * line + group, place, mask=ok)
    token = tl.load(anchor + slot, mask=ok, other=0)
    first = ok & (step == 0)
    tl.store(tokens + group, token, mask=first)
    tl.store(history + slot * history_row + place, token, mask=first)


@kernel("depth", "line")
def walk_confidence(  # type: ignore[no-untyped-def]
    z, w1, weight, tokens, out, depth, line, D: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr
):
    """w . [z_j ; W1[previous]] of one (group, step), float32, lane sums then one reduction."""
    begin()
    row = tl.program_id(0)
    group, step = row // depth, row % depth
    previous = tl.load(tokens + step * line + group)
    lane = tl.arange(0, CHUNK)
    acc = tl.zeros((CHUNK,), tl.float32)
    for k in range(0, D, CHUNK):
        a = tl.load(z + row.to(tl.int64) * D + k + lane, mask=k + lane < D, other=0.0).to(tl.float32)
        b = tl.load(weight + k + lane, mask=k + lane < D, other=0.0).to(tl.float32)
        acc = tl.fma(a, b, acc)
    for k in range(0, RANK, CHUNK):
        a = tl.load(w1 + previous * RANK + k + lane, mask=k + lane < RANK, other=0.0).to(tl.float32)
        b = tl.load(weight + D + k + lane, mask=k + lane < RANK, other=0.0).to(tl.float32)
        acc = tl.fma(a, b, acc)
    tl.store(out + row, tl.sum(acc, axis=0))


class WalkBuffers:
    """What one walk of G groups and K steps leaves, step by step.

    ``tokens`` and ``places`` int64 [K + 1, G] of the anchors and the drafts, ``margin`` float32 [K, G].
    """

    def __init__(self, slots: Tensor, depth: int, state: SlotState):
        groups, device = slots.shape[0], slots.device
        self.slots, self.depth, self.state = slots, depth, state
        self.tokens = aligned_lines(depth + 1, groups, torch.int64, device)
        self.places = aligned_lines(depth + 1, groups, torch.int64, device)
        self.margin = aligned_lines(depth, groups, torch.float32, device)
        self.finite = torch.empty(groups, dtype=torch.bool, device=device)
        lanes = groups * (depth + 1)
        walk_begin[(cdiv(lanes, LANES),)](
            slots,
            state.cursor,
            state.anchor,
            state.history,
            self.tokens,
            self.places,
            groups,
            depth,
            state.history.shape[1],
            self.tokens.stride(0),
            LANES=LANES,
            num_warps=4,
        )

    def finish(self, parts: Partials, step: int) -> None:
        """Choose draft ``step`` of every group and note it in the history."""
        parts.reduce(
            self.slots,
            self.places[step + 1],
            self.state,
            self.tokens[step + 1],
            self.finite,
            self.margin[step],
            self.state.history,
        )


def walk_plain(
    buffers: WalkBuffers,
    base: Tensor,
    head: MarkovHead,
    target: Target,
    *,
    narrow: bool,
    rejection: bool,
    kept: Tensor | None,
) -> None:
    """All steps, head and choice fused; ``kept`` float32 [G, K, V] receives the logits if given."""
    w2 = weight_of(head.w2)
    for step in range(buffers.depth):
        parts = run_head(
            head.w1,
            w2,
            target,
            narrow=narrow,
            rows=base.shape[0],
            store=None if kept is None else kept[:, step],
            sampling=(buffers.slots, buffers.places[step + 1], buffers.state),
            walk=Walk(base[:, step], buffers.tokens[step], rejection),
        )
        assert parts is not None, "a walk samples"
        buffers.finish(parts, step)


def step_logits(
    buffers: WalkBuffers, base: Tensor, head: MarkovHead, target: Target, step: int, narrow: bool, out: Tensor
) -> None:
    """Logits float32 [G, V] of one step into ``out`` (its rows may lie apart), for shaping."""
    walk = Walk(base[:, step], buffers.tokens[step], False)
    run_head(head.w1, weight_of(head.w2), target, narrow=narrow, rows=base.shape[0], store=out, walk=walk)


def choose_stored(buffers: WalkBuffers, logits: Tensor, step: int, rejection: bool) -> None:
    """Choose draft ``step`` from shaped logits [G, V]."""
    places = buffers.places[step + 1]
    parts = score_stored(logits, buffers.slots, places, buffers.state, second=True, rejection=rejection)
    buffers.finish(parts, step)


def confidences(buffers: WalkBuffers, z: Tensor, head: MarkovHead) -> Tensor | None:
    """Logits float32 [G, K] of the confidence head, or None without one; z [G, K, D]."""
    if head.confidence is None:
        return None
    groups, depth, d = z.shape
    out = torch.empty(groups, depth, dtype=torch.float32, device=z.device)
    walk_confidence[(groups * depth,)](
        dense(z),
        head.w1,
        weight_of(head.confidence),
        buffers.tokens,
        out,
        depth,
        buffers.tokens.stride(0),
        D=d,
        RANK=head.w2.k,
        CHUNK=CHUNK,
        num_warps=4,
    )
    return out


def _specs() -> list[Spec]:
    begin = {
        **dict.fromkeys(("slots", "cursor", "anchor", "history", "tokens", "places"), "*i64"),
        **dict.fromkeys(("groups", "depth", "history_row", "line"), "i32"),
    }
    arrays = {"z": "*bf16", "w1": "*fp32", "weight": "*bf16", "tokens": "*i64", "out": "*fp32"}
    confidence = {**arrays, "depth": "i32", "line": "i32"}
    shape = {"D": 4096, "RANK": 256, "CHUNK": CHUNK}
    return [
        Spec("walk_begin", walk_begin, begin, {"LANES": LANES}, {"num_warps": 4}),
        Spec("walk_confidence", walk_confidence, confidence, shape, {"num_warps": 4}),
    ]


KERNELS = _specs()
