"""Counter-based noise: every draw is a pure function of a request's key and a place.

The word of token id v is word v % 4 of Philox4x32-10 with key (seed low word,
sample index) and counter (v // 4, position, stream, seed high word): four
neighbouring ids share a call. Coupled acceptance needs one stream; classical
rejection has its own four, and keys the drafter's by the drafting pass as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firesteel.ops.types import SlotState

PHILOX_M = (0xD2511F53, 0xCD9E8D57)
PHILOX_W = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
BELOW_ONE = 1.0 - 2.0**-24

WORDS = 4  # of a call: as many neighbouring ids share one

TARGET, DRAFT, ACCEPT, RESIDUAL, BONUS = 0, 1, 2, 3, 4
PASS_SHIFT = 3  # the stream word holds the drafting pass above the stream


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All words of Philox4x32-10 (Salmon et al., 2011); int64 tensors of uint32 values that broadcast.

    A 32x32 product wraps in int64 with the right 64 bits, so both halves come out of shifts and masks.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * PHILOX_M[0], c2 * PHILOX_M[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & MASK) ^ c1 ^ k0,
            p1 & MASK,
            ((p0 >> 32) & MASK) ^ c3 ^ k1,
            p0 & MASK,
        )
        k0, k1 = (k0 + PHILOX_W[0]) & MASK, (k1 + PHILOX_W[1]) & MASK
    return c0, c1, c2, c3


def uniform(bits: Tensor) -> Tensor:
    """(bits + 1/2) * 2^-32 as float32, below 1."""
    return ((bits.to(torch.float64) + 0.5) * 2.0**-32).to(torch.float32).clamp_max(BELOW_ONE)


def gumbel(bits: Tensor) -> Tensor:
    """-log(-log1p(-v)) float32 of v = ``uniform(bits)``: fine-grained in the upper tail."""
    return -torch.log(-torch.log1p(-uniform(bits)))


Ids = Tensor | range  # token ids: int64 [n], or one after another


def words(ids: Ids, positions: Tensor, slots: Tensor, state: SlotState, stream: Tensor | int) -> Tensor:
    """Random words int64 [R, n] of n token ids at ``positions`` [R]; stream a number or [R].

    A range makes no word that it does not hold, but for those of its first and last call.
    """
    device = positions.device
    if isinstance(ids, range):
        assert ids.step == 1, "ids one after another"
        first = ids.start // WORDS
        calls = torch.arange(first, -(-ids.stop // WORDS), device=device)
    else:
        calls = ids // WORDS
    if not isinstance(stream, Tensor):
        stream = torch.full((1,), stream, dtype=torch.int64, device=device)
    high = state.seed_hi[slots].unsqueeze(-1)
    counter = (calls.unsqueeze(0), positions.unsqueeze(-1), stream.unsqueeze(-1), high)
    key = (state.seed_lo[slots].unsqueeze(-1), state.sample[slots].unsqueeze(-1))
    drawn = torch.stack(torch.broadcast_tensors(*philox(counter, key)), -1)  # [R, calls, WORDS]
    if isinstance(ids, range):
        return drawn.flatten(1)[:, ids.start - WORDS * first : ids.stop - WORDS * first]
    place = (ids % WORDS).view(1, -1, 1).expand(drawn.shape[0], -1, 1)
    return drawn.gather(2, place).squeeze(2)


def noise(
    ids: Ids, positions: Tensor, slots: Tensor, state: SlotState, stream: Tensor | int = TARGET
) -> Tensor:
    """Gumbel noise float32 [R, n] of n token ids for tokens sampled at ``positions`` [R]."""
    return gumbel(words(ids, positions, slots, state, stream))
