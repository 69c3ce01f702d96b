"""Logit shaping and log-probabilities over whole rows, exact and the same in every batch.

Truncation needs no sort: floats order like integers, so the last value kept by
top-k or top-p is found two bits per pass over the row. Probability masses are
summed as integers (units of 2^-40 of the best token's), which no order of
addition changes; ties at the last value go to the lowest ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from firesteel.core import Logprobs
from firesteel.ops.triton.launch import cdiv, dense, kernel, pow2
from firesteel.ops.triton.spec import Spec
from firesteel.ops.types import SlotState

TILE = 2048  # ids per pass step
SEEN = tl.constexpr(1 << 30)  # flag beside the count: the prompt holds the token
UNIT = tl.constexpr(float(2**40))
NEVER = tl.constexpr(float("-inf"))
LAST = tl.constexpr(2**31 - 1)


# ---- bias, bans, penalties --------------------------------------------------------------
@kernel("vocab", "biases", "words", "length", "stops", "history_row")
def edit_ids(
    out,
    slots,
    positions,
    bias_ids,
    bias_values,
    bad_words,
    stop_ids,
    stop_from,
    history,
    vocab,
    biases,
    words,
    length,
    stops,
    history_row,
    BIASES: tl.constexpr,
    WORDS: tl.constexpr,
    STOPS: tl.constexpr,
):
    """Add biases, then ban what a bad word or too early an end forbids; few ids of one row."""
    row = tl.program_id(0)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    line = out + row.to(tl.int64) * vocab
    at = tl.arange(0, BIASES)
    token = tl.load(bias_ids + slot * biases + at, mask=at < biases, other=-1)
    value = tl.load(bias_values + slot * biases + at, mask=at < biases, other=0.0)
    tl.store(line + token, tl.load(line + token, mask=token >= 0, other=0.0) + value, mask=token >= 0)
    tl.debug_barrier()  # a biased id may be banned
    word = tl.arange(0, WORDS)
    there = word < words
    fits = there
    base = bad_words + (slot * words + word) * length
    for i in range(length - 1):
        want = tl.load(base + i, mask=there, other=-1)
        back = position - (length - 1) + i
        have = tl.load(history + slot * history_row + back, mask=back >= 0, other=-1)
        fits = fits & ((want < 0) | (want == have))
    token = tl.load(base + length - 1, mask=fits, other=-1)
    tl.store(line + token, NEVER, mask=token >= 0)
    at = tl.arange(0, STOPS)
    early = position < tl.load(stop_from + slot)
    token = tl.load(stop_ids + slot * stops + at, mask=(at < stops) & early, other=-1)
    tl.store(line + token, NEVER, mask=token >= 0)


@kernel("vocab", "history_row")
def count_tokens(
    counts, slots, positions, prompt_len, history, repetition, presence, frequency, vocab, history_row,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """counts[row, id]: how often the answer holds it, and SEEN if the prompt does; rows without penalties stay 0."""
    row = tl.program_id(0)
    slot, position = tl.load(slots + row), tl.load(positions + row)
    plain = (tl.load(repetition + slot) == 1.0) & (tl.load(presence + slot) == 0.0)
    if (plain & (tl.load(frequency + slot) == 0.0)) == 0:
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        prompt = tl.load(prompt_len + slot)
        token = tl.load(history + slot * history_row + at, mask=at < history_row, other=0)
        line = counts + row.to(tl.int64) * vocab + token
        tl.atomic_add(line, tl.full((BLOCK,), 1, tl.int32), mask=(at >= prompt) & (at < position))
        tl.atomic_or(line, tl.full((BLOCK,), SEEN, tl.int32), mask=(at < prompt) & (at < history_row))


@kernel("vocab")
def penalise(out, counts, slots, repetition, presence, frequency, vocab, TILE: tl.constexpr):
    """Repetition on all seen ids, frequency and presence on those of the answer."""
    row = tl.program_id(1)
    slot = tl.load(slots + row)
    rate, once, each = tl.load(repetition + slot), tl.load(presence + slot), tl.load(frequency + slot)
    if (rate != 1.0) | (once != 0.0) | (each != 0.0):
        at = tl.program_id(0) * TILE + tl.arange(0, TILE)
        inside = at < vocab
        line = row.to(tl.int64) * vocab + at
        count = tl.load(counts + line, mask=inside, other=0)
        logit = tl.load(out + line, mask=inside, other=0.0)
        answered = (count & (SEEN - 1)).to(tl.float32)
        scaled = tl.where(logit > 0, tl.div_rn(logit, rate + tl.zeros_like(logit)), logit * rate)
        logit = tl.where(count > 0, scaled, logit)
        logit = logit - each * answered
        tl.store(out + line, logit - tl.where(answered > 0, once, 0.0), mask=inside)


# ---- truncation ----------------------------------------------------------------------------
@triton.jit
def order_of(value):
    """uint32 that orders like the float; -0 counts as 0."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def scaled_tile(line, at, vocab, heat):
    """(logit, logit / T) of one tile; lanes past the vocabulary are -inf."""
    logit = tl.load(line + at, mask=at < vocab, other=NEVER)
    return logit, tl.div_rn(logit, heat + tl.zeros_like(logit))


@triton.jit
def weigh(scaled, top, floor, MASS: tl.constexpr):
    """int64 weight of each token that min-p leaves: its mass, or 1."""
    if MASS:
        weight = (tl.exp(scaled - top) * UNIT).to(tl.int64)
    else:
        weight = tl.full(scaled.shape, 1, tl.int64)
    return tl.where((scaled >= floor) & (scaled > NEVER), weight, 0)


@triton.jit
def last_kept(line, vocab, heat, top, floor, goal, MASS: tl.constexpr, TILE: tl.constexpr):
    """Largest order value that tokens of at least ``goal`` weight reach; two bits per pass."""
    found = tl.zeros((), tl.uint32)
    lane = tl.arange(0, TILE)
    unit = tl.full((), 1 << 30, tl.uint32)
    for _digit in range(16):  # not `_`: the inner loop assigns a tile to it, and a variable has one type
        one, two, three = found + unit, found + 2 * unit, found + 3 * unit
        sum1 = tl.zeros((TILE,), tl.int64)
        sum2 = tl.zeros((TILE,), tl.int64)
        sum3 = tl.zeros((TILE,), tl.int64)
        for start in range(0, vocab, TILE):
            _, scaled = scaled_tile(line, start + lane, vocab, heat)
            weight = weigh(scaled, top, floor, MASS)
            key = order_of(scaled)
            sum1 += tl.where(key >= one, weight, 0)
            sum2 += tl.where(key >= two, weight, 0)
            sum3 += tl.where(key >= three, weight, 0)
        found = tl.where(tl.sum(sum1, axis=0) >= goal, one, found)
        found = tl.where(tl.sum(sum2, axis=0) >= goal, two, found)
        found = tl.where(tl.sum(sum3, axis=0) >= goal, three, found)
        unit = unit >> 2
    return found


@triton.jit
def weight_above(line, vocab, heat, top, floor, last, MASS: tl.constexpr, TILE: tl.constexpr):
    """(weight of all tokens beyond ``last``, weight of one token at it)."""
    lane = tl.arange(0, TILE)
    above = tl.zeros((TILE,), tl.int64)
    level = tl.zeros((TILE,), tl.int64)
    for start in range(0, vocab, TILE):
        _, scaled = scaled_tile(line, start + lane, vocab, heat)
        weight = weigh(scaled, top, floor, MASS)
        key = order_of(scaled)
        above += tl.where(key > last, weight, 0)
        level = tl.where(key == last, weight, level)
    return tl.sum(above, axis=0), tl.max(level, axis=0)


@triton.jit
def cut_row(line, vocab, heat, floor, last, above, one, room, TILE: tl.constexpr):
    """-inf below ``last``; ties there stay in ascending id while above + ties * one < room."""
    lane = tl.arange(0, TILE)
    ties = tl.zeros((), tl.int64)
    for start in range(0, vocab, TILE):
        at = start + lane
        logit, scaled = scaled_tile(line, at, vocab, heat)
        key = order_of(scaled)
        tie = (key == last).to(tl.int64)
        before = above + (ties + tl.cumsum(tie, axis=0) - tie) * one
        keep = (scaled >= floor) & ((key > last) | ((tie > 0) & (before < room)))
        tl.store(line + at, tl.where(keep, logit, NEVER), mask=at < vocab)
        ties += tl.sum(tie, axis=0)


@kernel("vocab")
def truncate(out, slots, temperature, min_p, top_k, top_p, vocab, TILE: tl.constexpr):
    """One row in place: min-p, then top-k, then top-p on softmax(logits / T); T = 0 stays whole."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    heat, least = tl.load(temperature + slot), tl.load(min_p + slot)
    most, share = tl.load(top_k + slot), tl.load(top_p + slot)
    line = out + row.to(tl.int64) * vocab
    if (heat > 0.0) & ((least > 0.0) | (most > 0) | (share < 1.0)):
        lane = tl.arange(0, TILE)
        highest = tl.full((TILE,), NEVER, tl.float32)
        for start in range(0, vocab, TILE):
            _, scaled = scaled_tile(line, start + lane, vocab, heat)
            highest = tl.maximum(highest, scaled)
        top = tl.max(highest, axis=0)
        floor = tl.where(least > 0.0, top + tl.log(tl.where(least > 0.0, least, 1.0)), NEVER)
        if (most > 0) & (most < vocab):
            last = last_kept(line, vocab, heat, top, floor, most, False, TILE)
            above, one = weight_above(line, vocab, heat, top, floor, last, False, TILE)
            cut_row(line, vocab, heat, floor, last, above, one, most, TILE)
            tl.debug_barrier()  # the next pass reads what this one wrote
        elif least > 0.0:
            zero = tl.zeros((), tl.int64)
            cut_row(line, vocab, heat, floor, order_of(floor), zero, zero, zero + 1, TILE)
            tl.debug_barrier()
        if share < 1.0:
            nothing = tl.zeros((), tl.uint32)
            total, _ = weight_above(line, vocab, heat, top, floor, nothing, True, TILE)
            goal = tl.maximum(tl.ceil(share.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
            last = last_kept(line, vocab, heat, top, floor, goal, True, TILE)
            above, one = weight_above(line, vocab, heat, top, floor, last, True, TILE)
            cut_row(line, vocab, heat, floor, last, above, one, goal, TILE)


def shape_rows(logits: Tensor, slots: Tensor, positions: Tensor, state: SlotState) -> Tensor:
    """Shaped logits float32 [R, V] as of ``Ops.shape``."""
    rows, vocab = logits.shape
    slots, positions = dense(slots), dense(positions)
    if state.allowed is not None:
        out = logits.masked_fill(~state.allowed[slots], float("-inf"))
    else:
        out = logits.clone(memory_format=torch.contiguous_format)
    if rows == 0:
        return out
    biases, (_, words, length) = state.bias_ids.shape[1], state.bad_words.shape
    stops, history = state.stop_ids.shape[1], state.history.shape[1]
    edit_ids[(rows,)](
        *(out, slots, positions, state.bias_ids, state.bias_values, state.bad_words),
        *(state.stop_ids, state.stop_from, state.history),
        *(vocab, biases, words, length, stops, history),
        BIASES=max(2, pow2(biases)),
        WORDS=max(2, pow2(words)),
        STOPS=max(2, pow2(stops)),
        num_warps=1,
    )
    counts = torch.zeros(rows, vocab, dtype=torch.int32, device=out.device)
    penalties = (state.repetition, state.presence, state.frequency)
    count_tokens[(rows, cdiv(history, TILE))](
        *(counts, slots, positions, state.prompt_len, state.history, *penalties, vocab, history),
        BLOCK=TILE,
        num_warps=4,
    )
    penalise[(cdiv(vocab, TILE), rows)](out, counts, slots, *penalties, vocab, TILE=TILE, num_warps=4)
    limits = (state.temperature, state.min_p, state.top_k, state.top_p)
    truncate[(rows,)](out, slots, *limits, vocab, TILE=TILE, num_warps=8)
    return out


# ---- log-probabilities ------------------------------------------------------------------------
@kernel("vocab", "n")
def score_row(logits, tokens, chosen, rank, ids, values, vocab, n, TILE: tl.constexpr):
    """log softmax of one token, how many are better, and the ``n`` best in order; lanes, then one reduction."""
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * vocab
    lane = tl.arange(0, TILE)
    own = tl.load(line + tl.load(tokens + row))
    highest = tl.full((TILE,), NEVER, tl.float32)
    for start in range(0, vocab, TILE):
        highest = tl.maximum(highest, tl.load(line + start + lane, mask=start + lane < vocab, other=NEVER))
    top = tl.max(highest, axis=0)
    total = tl.zeros((TILE,), tl.float32)
    better = tl.zeros((TILE,), tl.int64)
    for start in range(0, vocab, TILE):
        logit = tl.load(line + start + lane, mask=start + lane < vocab, other=NEVER)
        total += tl.exp(logit - top)
        better += (logit > own).to(tl.int64)
    norm = top + tl.log(tl.sum(total, axis=0))
    tl.store(chosen + row, own - norm)
    tl.store(rank + row, tl.sum(better, axis=0))
    bound = tl.full((), float("inf"), tl.float32)
    last = tl.full((), -1, tl.int32)
    for i in range(n):  # the best of those behind (bound, last)
        best = tl.full((TILE,), NEVER, tl.float32)
        where = tl.full((TILE,), LAST, tl.int32)
        for start in range(0, vocab, TILE):
            at = start + lane
            logit = tl.load(line + at, mask=at < vocab, other=NEVER)
            behind = (at < vocab) & ((logit < bound) | ((logit == bound) & (at > last)))
            wins = behind & ((logit > best) | (where == LAST))
            best, where = tl.where(wins, logit, best), tl.where(wins, at, where)
        bound = tl.max(tl.where(where == LAST, NEVER, best), axis=0)
        last = tl.min(tl.where((best == bound) & (where != LAST), where, LAST), axis=0)
        tl.store(ids + row * n + i, last.to(tl.int64))
        tl.store(values + row * n + i, bound - norm)


def logprobs(logits: Tensor, tokens: Tensor, n: int) -> Logprobs:
    """As of ``Ops.logprobs``; ``n`` passes over a row instead of a sort."""
    logits = dense(logits)
    rows, vocab = logits.shape
    device = logits.device
    chosen = torch.empty(rows, dtype=torch.float32, device=device)
    rank = torch.empty(rows, dtype=torch.int64, device=device)
    ids = torch.empty(rows, n, dtype=torch.int64, device=device)
    values = torch.empty(rows, n, dtype=torch.float32, device=device)
    if rows:
        given = (logits, dense(tokens), chosen, rank, ids, values, vocab, n)
        score_row[(rows,)](*given, TILE=TILE, num_warps=8)
    return Logprobs(chosen, rank, ids, values)


def _specs() -> list[Spec]:
    floats = ("out", "bias_values", "repetition", "presence", "frequency", "temperature", "min_p", "top_p")
    kinds = {**dict.fromkeys((*floats, "logits", "chosen", "values"), "*fp32"), "counts": "*i32"}
    whole = ("vocab", "biases", "words", "length", "stops", "history_row", "n")
    kinds |= dict.fromkeys(whole, "i32")

    def spec(name: str, fn: object, warps: int, **constants: int) -> Spec:
        arguments = [a for a in fn.arg_names if a not in constants]  # type: ignore[attr-defined]
        return Spec(name, fn, {a: kinds.get(a, "*i64") for a in arguments}, constants, {"num_warps": warps})

    return [
        spec("edit_ids", edit_ids, 1, BIASES=16, WORDS=16, STOPS=16),
        spec("count_tokens", count_tokens, 4, BLOCK=TILE),
        spec("penalise", penalise, 4, TILE=TILE),
        spec("truncate", truncate, 8, TILE=TILE),
        spec("score_row", score_row, 8, TILE=TILE),
    ]


KERNELS = _specs()
