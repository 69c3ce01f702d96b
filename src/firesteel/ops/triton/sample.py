"""Keyed noise and argmax: the noise of ``reference/noise.py`` on the GPU, and the two-stage choice.

A first kernel leaves one (value, id) per row and vocabulary tile, ``pick``
reduces them. Whatever produces scores (head, stored logits, the drafter's
walk) uses the same ``perturb`` and ``tile_best``, so all forms agree bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from firesteel.ops.reference.noise import BELOW_ONE, DRAFT, PASS_SHIFT, TARGET
from firesteel.ops.reference.noise import WORDS as WORDS_OF_A_CALL
from firesteel.ops.triton.launch import begin, cdiv, kernel, pow2
from firesteel.ops.triton.spec import Spec
from firesteel.ops.types import SlotState

SAMPLE_TILE = 1024  # ids per program where logits are stored

MULTIPLY_A = tl.constexpr(0xD2511F53)
MULTIPLY_B = tl.constexpr(0xCD9E8D57)
WEYL_A = tl.constexpr(0x9E3779B9)
WEYL_B = tl.constexpr(0xBB67AE85)
MINUS_LOG_2 = tl.constexpr(-0.6931471805599453)
ALMOST_ONE = tl.constexpr(BELOW_ONE)
TARGET_STREAM = tl.constexpr(TARGET)
DRAFT_STREAM = tl.constexpr(DRAFT)
SHIFT = tl.constexpr(PASS_SHIFT)
WORDS = tl.constexpr(WORDS_OF_A_CALL)
NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def philox(calls, position, stream, high, low, sample, PAIRS: tl.constexpr = True):  # type: ignore[no-untyped-def]
    """All words of Philox4x32-10 (Salmon et al., 2011); uint32 operands that broadcast as rounds mix them.

    PAIRS: both halves of a product by one wide instruction, which is quicker on NVIDIA but takes pairs of registers.
    """
    c0, c1, c2, c3 = calls, position, stream, high
    k0, k1 = low, sample
    for _ in tl.static_range(10):
        if PAIRS:
            a = c0.to(tl.uint64) * MULTIPLY_A
            b = c2.to(tl.uint64) * MULTIPLY_B
            high_a, low_a = (a >> 32).to(tl.uint32), a.to(tl.uint32)
            high_b, low_b = (b >> 32).to(tl.uint32), b.to(tl.uint32)
        else:
            high_a, low_a = tl.umulhi(c0, tl.full((), MULTIPLY_A, tl.uint32)), c0 * MULTIPLY_A
            high_b, low_b = tl.umulhi(c2, tl.full((), MULTIPLY_B, tl.uint32)), c2 * MULTIPLY_B
        c0, c1 = high_b ^ c1 ^ k0, low_b
        c2, c3 = high_a ^ c3 ^ k1, low_a
        k0 += WEYL_A
        k1 += WEYL_B
    return c0, c1, c2, c3


@triton.jit
def words_of(first, key, N: tl.constexpr, PAIRS: tl.constexpr = True):  # type: ignore[no-untyped-def]
    """Noise words uint32 of the N ids first ..., both multiples of 4: [N], or [N, rows] of a key [1, rows]."""
    place, stream, high, low, index = key
    calls = (tl.arange(0, N // WORDS) + first // WORDS).to(tl.uint32)
    if len(place.shape) == 2:
        calls = calls[:, None]
    a, b, c, d = philox(calls, place, stream, high, low, index, PAIRS)
    drawn = tl.join(tl.join(a, c), tl.join(b, d))  # [..., half, odd]: id v has word v % 4
    if len(place.shape) == 2:
        drawn = tl.reshape(tl.permute(drawn, (0, 2, 3, 1)), (N, drawn.shape[1]))
    else:
        drawn = tl.reshape(drawn, (N,))
    return drawn


@triton.jit
def uniform(bits):  # type: ignore[no-untyped-def]
    """(bits + 1/2) * 2^-32 rounded to float32, below one: two exact parts, so one rounding.

    The lower part, a byte, goes into the mantissa of 2^-9: conversions run on a slow unit.
    """
    upper = (bits >> 8).to(tl.int32).to(tl.float32)
    if cuda_capability_geq(8, 0):  # in one instruction
        code: tl.constexpr = "prmt.b32 $0, $1, 0x3B000000, 0x7540;"
        byte = tl.inline_asm_elementwise(code, "=r,r", [bits], dtype=tl.uint32, is_pure=True, pack=1)
    else:
        byte = (bits & 255) | 0x3B000000
    lower = byte.to(tl.float32, bitcast=True) - 0.00195312488358467817
    return tl.minimum(upper * 5.9604644775390625e-08 + lower, ALMOST_ONE)


@triton.jit
def quick_log2(x):  # type: ignore[no-untyped-def]
    """log2 of |x|, a normal number: off by 2^-22, or by one part in 2^22 beyond [0.5, 2]."""
    if cuda_capability_geq(8, 0):
        code: tl.constexpr = "{.reg .f32 t; abs.f32 t, $1; lg2.approx.ftz.f32 $0, t;}"
        y = tl.inline_asm_elementwise(code, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.log2(tl.abs(x))
    return y


@triton.jit
def waiting(bits):  # type: ignore[no-untyped-def]
    """log2 of -log2(1 - v): Gumbel noise is that times -log 2, and a constant that no comparison sees.

    Below 1/4, where the rounding of 1 - v would show, log2(1 - v) / v is the polynomial of degree 5 whose
    largest relative error is least (4e-8).
    """
    v = uniform(bits)
    near = v * -0.49022430181503296 - 0.20762552320957184
    near = near * v - 0.371925950050354
    near = near * v - 0.48021063208580017
    near = near * v - 0.7213626503944397
    near = near * v - 1.4426950216293335
    return quick_log2(tl.where(v < 0.25, v * near, quick_log2(1.0 - v)))


@triton.jit
def gumbel(bits):  # type: ignore[no-untyped-def]
    """-log(-log1p(-v)) of v = ``uniform(bits)``."""
    return waiting(bits) * MINUS_LOG_2 + 0.36651292058166435


@triton.jit
def row_key(slots, positions, passes, seed_lo, seed_hi, sample, temperature, at, ok, REJECTION: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip
    """(heat, position, stream, high, low, sample) of the rows ``at``."""
    slot = tl.load(slots + at, mask=ok, other=0)
    place = tl.load(positions + at, mask=ok, other=0).to(tl.uint32)
    if REJECTION:
        stream = ((tl.load(passes + slot, mask=ok, other=0) << SHIFT) + DRAFT_STREAM).to(tl.uint32)
    else:
        stream = place ^ place  # TARGET_STREAM
    high = tl.load(seed_hi + slot, mask=ok, other=0).to(tl.uint32)
    low = tl.load(seed_lo + slot, mask=ok, other=0).to(tl.uint32)
    index = tl.load(sample + slot, mask=ok, other=0).to(tl.uint32)
    heat = tl.load(temperature + slot, mask=ok, other=0.0)
    return heat, place, stream, high, low, index


@triton.jit
def perturb(logit, heat, first, key, PAIRS: tl.constexpr = True):  # type: ignore[no-untyped-def]
    """logit + heat * g of the ids first ..., less a constant of the row: the only place where noise meets logits."""
    noise = waiting(words_of(first, key, logit.shape[0], PAIRS))
    return tl.fma(noise, heat * MINUS_LOG_2 + tl.zeros_like(noise), logit)


@triton.jit
def tile_best(logit, score, ids, inside, AXIS: tl.constexpr, SECOND: tl.constexpr):  # type: ignore[no-untyped-def]
    """(best score, its lowest id or -1 if a logit is NaN or +inf, second best) along ``AXIS``."""
    broken = inside & ((logit != logit) | (logit == float("inf")))
    usable = inside & (score == score)
    score = tl.where(usable, score, float("-inf"))
    best = tl.max(score, axis=AXIS)
    found = tl.where(score == tl.expand_dims(best, AXIS), ids, NO_ID)
    chosen = tl.min(tl.where(broken, -1, found), axis=AXIS)
    if SECOND:
        rest = tl.where(ids == tl.expand_dims(chosen, AXIS), float("-inf"), score)
        second = tl.max(rest, axis=AXIS)
    else:
        second = best
    return best, chosen, second


@kernel("vocab", "stride", "tiles")
def sample_tiles(  # type: ignore[no-untyped-def]
    logits,
    slots,
    positions,
    passes,
    seed_lo,
    seed_hi,
    sample,
    temperature,
    values,
    chosen,
    seconds,
    vocab,
    stride,
    tiles,
    TILE: tl.constexpr,
    SECOND: tl.constexpr,
    REJECTION: tl.constexpr,
):
    """One row and one vocabulary tile of stored logits."""
    begin()
    row = tl.program_id(1)
    tile = tl.program_id(0)
    one = tl.zeros((1,), tl.int32) + row
    key = row_key(slots, positions, passes, seed_lo, seed_hi, sample, temperature, one, one >= 0, REJECTION)
    heat, place, stream, high, low, index = key
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    logit = tl.load(logits + row.to(tl.int64) * stride + ids, mask=inside, other=float("-inf"))
    score = logit
    if tl.max(heat, axis=0) > 0.0:  # T = 0: the noise is multiplied by 0
        score = perturb(logit, heat, tile * TILE, (place, stream, high, low, index))
    best, found, second = tile_best(logit, score, ids, inside, 0, SECOND)
    out = row * tiles + tile
    tl.store(values + out, best)
    tl.store(chosen + out, found)
    if SECOND:
        tl.store(seconds + out, second)


@kernel("tiles", "limit")
def pick(  # type: ignore[no-untyped-def]
    values,
    chosen,
    seconds,
    slots,
    positions,
    temperature,
    tokens,
    finite,
    margins,
    history,
    tiles,
    limit,
    TILES: tl.constexpr,
    SECOND: tl.constexpr,
    HISTORY: tl.constexpr,
):
    """Reduce a row's tiles: the token, whether its logits were sound, and the margin to the second best."""
    begin()
    row = tl.program_id(0)
    at = tl.arange(0, TILES)
    inside = at < tiles
    value = tl.load(values + row * tiles + at, mask=inside, other=float("-inf"))
    found = tl.load(chosen + row * tiles + at, mask=inside, other=NO_ID)
    best = tl.max(value, axis=0)
    odd = tl.min(found, axis=0) < 0
    token = tl.min(tl.where((value == best) & (found >= 0), found, NO_ID), axis=0)
    token = tl.where(token == NO_ID, 0, token)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(finite + row, ((best > float("-inf")) & (odd == 0)).to(tl.int8))
    slot = tl.load(slots + row)
    if SECOND:
        second = tl.load(seconds + row * tiles + at, mask=inside, other=float("-inf"))
        next_best = tl.max(tl.where(found == token, second, value), axis=0)
        heat = tl.load(temperature + slot)
        tl.store(margins + row, (best - next_best) / tl.where(heat > 0.0, heat, 1.0))
    if HISTORY:
        tl.store(history + slot * limit + tl.load(positions + row), token.to(tl.int64))


class Partials:
    """Per-tile winners of R rows: ``values`` float32, ``ids`` int32, ``seconds`` float32, each [R, tiles]."""

    def __init__(self, rows: int, tiles: int, device: torch.device, second: bool):
        self.rows, self.tiles, self.second = rows, tiles, second
        self.values = torch.empty(rows, tiles, dtype=torch.float32, device=device)
        self.ids = torch.empty(rows, tiles, dtype=torch.int32, device=device)
        self.seconds = torch.empty_like(self.values) if second else self.values

    def reduce(
        self,
        slots: Tensor,
        positions: Tensor,
        state: SlotState,
        tokens: Tensor,
        finite: Tensor,
        margins: Tensor | None = None,
        history: Tensor | None = None,
    ) -> None:
        """Write each row's ``tokens`` [R], ``finite`` and what else is given."""
        pick[(self.rows,)](
            self.values,
            self.ids,
            self.seconds,
            slots,
            positions,
            state.temperature,
            tokens,
            finite.view(torch.int8),
            self.values if margins is None else margins,
            state.history,
            self.tiles,
            state.history.shape[1],
            TILES=pow2(self.tiles),
            SECOND=margins is not None,
            HISTORY=history is not None,
            num_warps=4,
        )


def seeds(state: SlotState) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The noise key's fields as the kernels take them."""
    return state.passes, state.seed_lo, state.seed_hi, state.sample, state.temperature


def score_stored(
    logits: Tensor, slots: Tensor, positions: Tensor, state: SlotState, *, second: bool, rejection: bool
) -> Partials:
    """Tile winners of stored logits [R, V] (rows may lie apart)."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, "a row's logits lie one after another"
    parts = Partials(rows, cdiv(vocab, SAMPLE_TILE), logits.device, second)
    sample_tiles[(parts.tiles, rows)](
        logits,
        slots,
        positions,
        *seeds(state),
        parts.values,
        parts.ids,
        parts.seconds,
        vocab,
        logits.stride(0),
        parts.tiles,
        TILE=SAMPLE_TILE,
        SECOND=second,
        REJECTION=rejection,
        num_warps=4,
    )
    return parts


KEY: dict[str, str] = {
    **dict.fromkeys(("slots", "positions", "passes", "seed_lo", "seed_hi", "sample"), "*i64"),
    "temperature": "*fp32",
}
PARTS: dict[str, str] = {"values": "*fp32", "chosen": "*i32", "seconds": "*fp32"}


def _specs() -> list[Spec]:
    score: dict[str, Any] = {
        "logits": "*fp32",
        **KEY,
        **PARTS,
        **dict.fromkeys(("vocab", "stride", "tiles"), "i32"),
    }
    outputs = {"tokens": "*i64", "finite": "*i8", "margins": "*fp32", "history": "*i64"}
    own = {k: KEY[k] for k in ("slots", "positions", "temperature")}
    counts = dict.fromkeys(("tiles", "limit"), "i32")
    chosen = {**PARTS, **own, **outputs, **counts}
    out = []
    for second in (False, True):
        flags = {"TILE": SAMPLE_TILE, "SECOND": second, "REJECTION": second}
        out.append(Spec(f"sample_tiles{'_margin' * second}", sample_tiles, score, flags, {"num_warps": 4}))
        flags = {"TILES": 1024, "SECOND": second, "HISTORY": second}
        out.append(Spec(f"pick{'_margin' * second}", pick, chosen, flags, {"num_warps": 4}))
    return out


KERNELS = _specs()
