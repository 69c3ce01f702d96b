"""The head and the drafter's walk on Hopper, for many rows: tensor descriptors, and lanes that keep their own best.

    head_wide: tile of W [V, K] x rows^T by descriptors -> stored
    walk_rows: W1[previous] of up to TILE_R rows, bf16, once -> tiles of W2 one ahead -> + base, noise
               -> best, its id, second best of every lane -> one winner per row and program

The products are those of ``head_rows``: K ascends through one chain of matrix instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from firesteel.ops.triton.launch import begin, kernel
from firesteel.ops.triton.sample import NO_ID, perturb, row_key

LANE = tl.constexpr(4)  # neighbouring ids that one lane compares first


@triton.jit
def lane_best(logit, score, ids, inside, WHOLE: tl.constexpr, SECOND: tl.constexpr, V: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """(best, lowest id, second best) of every LANE neighbouring ids: [V / LANE, N]; a NaN or +inf is a best +inf."""
    score = tl.where(logit < float("inf"), score, float("inf"))
    if not WHOLE:
        score = tl.where(inside[:, None], score, float("-inf"))
    score = tl.reshape(score, (V // LANE, LANE, N))
    name = tl.reshape(ids, (V // LANE, LANE))[:, :, None]
    best = tl.max(score, axis=1)
    found = tl.min(tl.where(score == best[:, None, :], name, NO_ID), axis=1)
    if SECOND:
        second = tl.max(tl.where(name == found[:, None, :], float("-inf"), score), axis=1)
    else:
        second = best
    return best, found, second


@triton.jit
def zipped(a, b, V: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns of a and b in turn: [V, N]."""
    return tl.reshape(tl.join(a, b), (V, N))


@triton.jit
def lane_bests(logit, start, step, place, key, rows, hot, WHOLE: tl.constexpr, SECOND: tl.constexpr, REJECTION: tl.constexpr, V: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    """``lane_best`` of logits [V, N] of the rows start, start + step, ...; CHUNK rows' noise exists at once."""
    if N > CHUNK:
        even, odd = tl.split(tl.reshape(logit, (V, N // 2, 2)))
        a = lane_bests(even, start, 2 * step, place, key, rows, hot, WHOLE, SECOND, REJECTION, V, N // 2, CHUNK)  # fmt: skip  # noqa: E501
        b = lane_bests(odd, start + step, 2 * step, place, key, rows, hot, WHOLE, SECOND, REJECTION, V, N // 2, CHUNK)  # fmt: skip  # noqa: E501
        best, found = zipped(a[0], b[0], V // LANE, N), zipped(a[1], b[1], V // LANE, N)
        if SECOND:
            second = zipped(a[2], b[2], V // LANE, N)
        else:
            second = best
        return best, found, second
    else:
        ids, inside, first = place
        slots, positions, passes, seed_lo, seed_hi, sample, temperature = key
        row = start + step * tl.arange(0, N)
        ok = row < rows
        score = logit
        if hot:  # all greedy: the noise is multiplied by 0
            heat, where, stream, high, low, index = row_key(
                slots, positions, passes, seed_lo, seed_hi, sample, temperature, row, ok, REJECTION
            )
            words = (where[None, :], stream[None, :], high[None, :], low[None, :], index[None, :])
            score = perturb(logit, heat[None, :], first, words)
        return lane_best(logit, score, ids, inside, WHOLE, SECOND, V, N)


@triton.jit
def winners(best, found, second, to, ok, values, chosen, seconds, SECOND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reduce lanes [*, N] to one (value, id or -1, second) per row and store them at ``to``."""
    top = tl.max(best, axis=0)
    name = tl.min(tl.where(best == top[None, :], found, NO_ID), axis=0)
    tl.store(values + to, top, mask=ok)
    tl.store(chosen + to, tl.where(top == float("inf"), -1, name), mask=ok)
    if SECOND:
        rest = tl.max(tl.where(found == name[None, :], second, best), axis=0)
        tl.store(seconds + to, rest, mask=ok)


@triton.jit
def any_hot(slots, temperature, row, ok):  # type: ignore[no-untyped-def]
    """Whether one of the rows draws noise."""
    heat = tl.load(temperature + tl.load(slots + row, mask=ok, other=0), mask=ok, other=0.0)
    return tl.max(heat, axis=0) > 0.0


@kernel("rows", "base_units", "out_units", "programs")
def walk_rows(  # type: ignore[no-untyped-def]
    x,
    w,
    base,
    previous,
    slots,
    positions,
    passes,
    seed_lo,
    seed_hi,
    sample,
    temperature,
    out,
    values,
    chosen,
    seconds,
    rows,
    base_units,
    out_units,
    programs,
    VOCAB: tl.constexpr,
    K: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_R: tl.constexpr,
    STORE: tl.constexpr,
    PICK: tl.constexpr,
    REJECTION: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Vocabulary tiles pid, pid + programs, ... of TILE_R rows; row r of ``x`` float32 is at ``previous[r]``.

    w: a descriptor of W2 [VOCAB, K] bf16 in blocks [TILE_V, K]. Strides are given in units of UNIT elements.
    """
    begin()
    own, start = tl.program_id(0), tl.program_id(1) * TILE_R
    base_stride, out_stride = base_units.to(tl.int64) * UNIT, out_units.to(tl.int64) * UNIT
    row = start + tl.arange(0, TILE_R)
    ok = row < rows
    at = tl.load(previous + row, mask=ok, other=0)
    b = tl.load(x + at[None, :] * K + tl.arange(0, K)[:, None], mask=ok[None, :], other=0.0).to(tl.bfloat16)
    WHOLE: tl.constexpr = VOCAB % TILE_V == 0
    if PICK:
        hot = any_hot(slots, temperature, row, ok)
        key = (slots, positions, passes, seed_lo, seed_hi, sample, temperature)
        best = tl.full((TILE_V // LANE, TILE_R), float("-inf"), tl.float32)
        found = tl.full((TILE_V // LANE, TILE_R), NO_ID, tl.int32)
        second = best
    for tile in range(own, (VOCAB + TILE_V - 1) // TILE_V, programs):
        ids = tile * TILE_V + tl.arange(0, TILE_V)
        inside = tl.full((TILE_V,), 1, tl.int1) if WHOLE else ids < VOCAB
        both = inside[:, None] & ok[None, :]
        old = tl.load(base + (row.to(tl.int64) * base_stride)[None, :] + ids[:, None], mask=both, other=0.0)
        acc = tl.dot(w.load([tile * TILE_V, 0]), b)
        logit = tl.fma(acc, tl.full((TILE_V, TILE_R), 1.0, tl.float32), old)  # a sum, and not the dot's start
        if STORE:
            tl.store(out + (row.to(tl.int64) * out_stride)[None, :] + ids[:, None], logit, mask=both)
        if PICK:
            v, i, s = lane_bests(logit, start, 1, (ids, inside, tile * TILE_V), key, rows, hot, WHOLE, True, REJECTION, TILE_V, TILE_R, CHUNK)  # fmt: skip  # noqa: E501
            second = tl.maximum(tl.maximum(second, s), tl.minimum(best, v))
            found = tl.where(v > best, i, found)  # ids ascend: the first of equals stays
            best = tl.maximum(best, v)
    if PICK:
        winners(best, found, second, row * programs + own, ok, values, chosen, seconds, True)


@kernel("rows", "row_tiles", "out_units")
def head_wide(  # type: ignore[no-untyped-def]
    x,
    w,
    out,
    rows,
    row_tiles,
    out_units,
    VOCAB: tl.constexpr,
    K: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_K: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One vocabulary tile of TILE_R rows: descriptors w of blocks [TILE_V, TILE_K] and x of [TILE_R, TILE_K], bf16."""
    begin()
    pid = tl.program_id(0)
    tile = pid // row_tiles
    start = (pid % row_tiles) * TILE_R
    acc = tl.zeros((TILE_V, TILE_R), tl.float32)
    for k in range(0, K, TILE_K):
        acc = tl.dot(w.load([tile * TILE_V, k]), x.load([start, k]).T, acc)
    row = start + tl.arange(0, TILE_R)
    ok = row < rows
    ids = tile * TILE_V + tl.arange(0, TILE_V)
    WHOLE: tl.constexpr = VOCAB % TILE_V == 0
    inside = tl.full((TILE_V,), 1, tl.int1) if WHOLE else ids < VOCAB
    at = (row.to(tl.int64) * (out_units.to(tl.int64) * UNIT))[None, :] + ids[:, None]
    tl.store(out + at, acc, mask=inside[:, None] & ok[None, :])
