"""Which rows a step runs: admission of drafts by survival, and the flat list of rows."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from firesteel.core import RowBatch, SampleRows
from firesteel.ops.triton.launch import aligned_lines, begin, cdiv, kernel, pow2
from firesteel.ops.triton.spec import Spec
from firesteel.ops.types import PromptRows, SlotState

LANES = 16  # rows per program of ``list_rows``: each is compared with all groups
BLOCK_LANES = 128
FAR = tl.constexpr(2**30)


@kernel("groups", "wide", "drafts")
def admit_drafts(  # type: ignore[no-untyped-def]
    decodes,
    alive,
    cursor,
    max_len,
    draft_len,
    draft_cap,
    survival,
    widths,
    groups,
    wide,
    drafts,
    DEPTH: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The ``drafts`` best survivals of all groups; ties go to the shallower draft, then to the earlier group.

    Positive floats order like their bits, so the last value admitted is found bit by bit.
    """
    begin()
    lane = tl.arange(0, DEPTH * GROUPS)  # depth-major
    depth, group = lane // GROUPS, lane % GROUPS
    there = group < groups
    slot = tl.load(decodes + group, mask=there, other=0)
    lives = tl.load(alive + slot, mask=there, other=0)
    room = tl.load(max_len + slot, mask=there, other=0) - 2 - tl.load(cursor + slot, mask=there, other=0)
    most = tl.minimum(
        tl.load(draft_len + slot, mask=there, other=0), tl.load(draft_cap + slot, mask=there, other=0)
    )
    exists = there & (depth < tl.minimum(most, room)) & (depth < wide) & (lives > 0)
    value = tl.load(survival + slot * wide + depth, mask=exists, other=0.0)
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    bits = tl.where(exists, bits, -1)
    last = tl.zeros((), tl.int32)  # largest value that at least ``drafts`` candidates reach
    for step in tl.static_range(31):
        more = last | (1 << (30 - step))
        last = tl.where(tl.sum((bits >= more).to(tl.int32), axis=0) >= drafts, more, last)
    above = bits > last
    level = bits == last
    left = drafts - tl.sum(above.to(tl.int32), axis=0)
    before = tl.cumsum(level.to(tl.int32), axis=0)
    taken = (above | (level & (before <= left))).to(tl.int64)
    total = tl.sum(tl.reshape(taken, (DEPTH, GROUPS)), axis=0)
    at = tl.arange(0, GROUPS)
    own = tl.load(decodes + at, mask=at < groups, other=0)
    tl.store(widths + at, tl.load(alive + own, mask=at < groups, other=0) + total, mask=at < groups)


def admit(decodes: Tensor, drafts: int, state: SlotState) -> Tensor:
    """Verify widths int64 [G] as of ``Ops.admit``."""
    groups, wide = decodes.shape[0], state.drafts.shape[1]
    widths = torch.empty(groups, dtype=torch.int64, device=decodes.device)
    if groups == 0:
        return widths
    admit_drafts[(1,)](
        decodes,
        state.alive,
        state.cursor,
        state.max_len,
        state.draft_len,
        state.draft_cap,
        state.survival,
        widths,
        groups,
        wide,
        drafts,
        DEPTH=pow2(wide),
        GROUPS=max(16, pow2(groups)),
        num_warps=4 if wide * groups <= 4096 else 16,
    )
    return widths


@kernel("prompt_rows", "finals", "groups", "decode_rows", "scratch", "wide", "length")
def list_rows(  # type: ignore[no-untyped-def]
    prompt_tokens,
    prompt_positions,
    prompt_slots,
    prompt_first,
    prompt_last,
    sampling,
    decodes,
    widths,
    cursor,
    anchor,
    drafts,
    history,
    tokens,
    positions,
    slots,
    first,
    last,
    valid,
    sample_rows,
    sample_group,
    offset,
    width,
    sample_slots,
    prompt_rows,
    finals,
    groups,
    decode_rows,
    scratch,
    wide,
    length,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Prompt rows are copied, decode rows follow from the widths; the first program writes the groups' table."""
    begin()
    lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
    at = tl.arange(0, GROUPS)
    mine = tl.load(widths + at, mask=at < groups, other=0).to(tl.int32)
    ends = tl.cumsum(mine, axis=0)
    # rows of prompts
    is_prompt = lane < prompt_rows
    token = tl.load(prompt_tokens + lane, mask=is_prompt, other=0)
    position = tl.load(prompt_positions + lane, mask=is_prompt, other=0)
    slot = tl.load(prompt_slots + lane, mask=is_prompt, other=0)
    head_row = tl.load(prompt_first + lane, mask=is_prompt, other=0)
    end = tl.load(prompt_last + lane, mask=is_prompt, other=0)
    # rows of decodes: the group is the number of groups that end at or before the row
    row = lane - prompt_rows
    is_decode = (row >= 0) & (row < decode_rows)
    past = (ends[None, :] <= row[:, None]) & (at < groups)[None, :]
    group = tl.sum(past.to(tl.int32), axis=1)
    real = is_decode & (group < groups)
    start = tl.max(tl.where(past, ends[None, :], 0), axis=1)
    stop = tl.min(tl.where(past | (at >= groups)[None, :], FAR, ends[None, :]), axis=1)
    own = tl.load(decodes + group, mask=real, other=0)
    depth = row - start
    proposal = tl.load(drafts + own * wide + depth - 1, mask=real & (depth > 0), other=0)
    token = tl.where(real, tl.where(depth == 0, tl.load(anchor + own, mask=real, other=0), proposal), token)
    position = tl.where(real, tl.load(cursor + own, mask=real, other=0) + depth, position)
    slot = tl.where(real, own, tl.where(is_decode, scratch, slot))
    head_row = tl.where(real, prompt_rows + start, tl.where(is_decode, lane, head_row))
    end = tl.where(real, prompt_rows + stop - 1, tl.where(is_decode, lane, end))
    some = is_prompt | is_decode
    tl.store(tokens + lane, token, mask=some)
    tl.store(positions + lane, position, mask=some)
    tl.store(slots + lane, slot, mask=some)
    tl.store(first + lane, head_row, mask=some)
    tl.store(last + lane, end, mask=some)
    tl.store(valid + lane, (is_prompt | real).to(tl.int8), mask=some)
    tl.store(history + slot * length + position, token, mask=(is_prompt | real) & (position < length))
    # rows that sample
    tl.store(sample_rows + finals + row, lane.to(tl.int64), mask=is_decode)
    tl.store(sample_group + finals + row, (finals + group).to(tl.int64), mask=is_decode)
    is_final = lane < finals
    final = tl.load(sampling + lane, mask=is_final, other=0)
    tl.store(sample_rows + lane, final, mask=is_final)
    tl.store(sample_group + lane, lane.to(tl.int64), mask=is_final)
    tl.store(offset + lane, lane.to(tl.int64), mask=is_final)
    tl.store(width + lane, tl.zeros((LANES,), tl.int64) + 1, mask=is_final)
    tl.store(sample_slots + lane, tl.load(prompt_slots + final, mask=is_final, other=0), mask=is_final)
    if tl.program_id(0) == 0:
        is_group = at < groups
        tl.store(offset + finals + at, (finals + ends - mine).to(tl.int64), mask=is_group)
        tl.store(width + finals + at, mine.to(tl.int64), mask=is_group)
        tl.store(sample_slots + finals + at, tl.load(decodes + at, mask=is_group, other=0), mask=is_group)


def build_rows(
    state: SlotState, prompt: PromptRows, decodes: Tensor, widths: Tensor, decode_rows: int, max_position: int
) -> tuple[RowBatch, SampleRows]:
    """Rows and sampling rows as of ``Ops.build_rows``; each table is one block of memory."""
    device, groups = decodes.device, decodes.shape[0]
    assert groups or decode_rows == 0, "draft rows need a request"
    base, finals = prompt.tokens.shape[0], prompt.sampling.shape[0]
    lines = aligned_lines(5, base + decode_rows, torch.int64, device)
    tokens, positions, slots, first, last = lines.unbind()
    valid = torch.empty(base + decode_rows, dtype=torch.bool, device=device)
    rows = RowBatch(tokens, positions, slots, first, last, valid, max_position)
    sampled = aligned_lines(2, finals + decode_rows, torch.int64, device)
    by_group = aligned_lines(3, finals + groups, torch.int64, device)
    samples = SampleRows(*sampled.unbind(), *by_group.unbind())
    if rows.count == 0 and groups == 0:
        return rows, samples
    list_rows[(max(1, cdiv(rows.count, LANES)),)](
        *(prompt.tokens, prompt.positions, prompt.slots, prompt.first, prompt.last, prompt.sampling),
        *(decodes, widths, state.cursor, state.anchor, state.drafts, state.history),
        *(rows.tokens, rows.positions, rows.slots, rows.first, rows.last, valid.view(torch.int8)),
        *(samples.rows, samples.group, samples.offset, samples.width, samples.slots),
        base,
        finals,
        groups,
        decode_rows,
        state.cursor.shape[0] - 1,
        state.drafts.shape[1],
        state.history.shape[1],
        GROUPS=max(16, pow2(groups)),
        LANES=LANES,
        num_warps=4,
    )
    return rows, samples


@kernel("count", "width", "noise_token")
def list_blocks(  # type: ignore[no-untyped-def]
    given, cursor, anchor, tokens, positions, slots, first, last, valid, count, width, noise_token,
    LANES: tl.constexpr,
):  # fmt: skip
    """Rows of draft blocks: the anchor and ``width`` - 1 noise tokens of every given slot."""
    begin()
    row = tl.program_id(0) * LANES + tl.arange(0, LANES)
    ok = row < count
    place, start = row % width, row // width * width
    slot = tl.load(given + row // width, mask=ok, other=0)
    token = tl.load(anchor + slot, mask=ok, other=0)
    tl.store(tokens + row, tl.where(place == 0, token, noise_token), mask=ok)
    tl.store(positions + row, tl.load(cursor + slot, mask=ok, other=0) + place, mask=ok)
    tl.store(slots + row, slot, mask=ok)
    tl.store(first + row, start.to(tl.int64), mask=ok)
    tl.store(last + row, (start + width - 1).to(tl.int64), mask=ok)
    tl.store(valid + row, tl.zeros((LANES,), tl.int8) + 1, mask=ok)


def block_rows(slots: Tensor, width: int, noise_token: int, state: SlotState) -> RowBatch:
    """Rows as of ``Ops.block_rows``."""
    count, device = slots.shape[0] * width, slots.device
    tokens, positions, owner, first, last = aligned_lines(5, count, torch.int64, device).unbind()
    valid = torch.empty(count, dtype=torch.bool, device=device)
    if count:
        list_blocks[(cdiv(count, BLOCK_LANES),)](
            *(
                slots,
                state.cursor,
                state.anchor,
                tokens,
                positions,
                owner,
                first,
                last,
                valid.view(torch.int8),
            ),
            count,
            width,
            noise_token,
            LANES=BLOCK_LANES,
            num_warps=1,
        )
    return RowBatch(tokens, positions, owner, first, last, valid, 0)


def _specs() -> list[Spec]:
    names = {"admit_drafts": admit_drafts, "list_rows": list_rows}
    special = {"survival": "*fp32", "valid": "*i8"}
    whole = {"groups", "wide", "drafts", "prompt_rows", "finals", "decode_rows", "scratch", "length"}
    out = []
    for name, fn in names.items():
        constants = {"GROUPS": 256, **({"DEPTH": 8} if fn is admit_drafts else {"LANES": LANES})}
        signature = {}
        for arg in fn.arg_names:
            if arg not in constants:
                is_count = arg in whole and not (arg == "drafts" and fn is list_rows)
                signature[arg] = "i32" if is_count else special.get(arg, "*i64")
        out.append(Spec(name, fn, signature, constants, {"num_warps": 4}))
    blocks = {a: "*i64" for a in list_blocks.arg_names if a != "LANES"}
    blocks |= {"valid": "*i8", **dict.fromkeys(("count", "width", "noise_token"), "i32")}
    out.append(Spec("list_blocks", list_blocks, blocks, {"LANES": BLOCK_LANES}, {"num_warps": 1}))
    return out


KERNELS = _specs()
