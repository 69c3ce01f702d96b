"""The noise: the generator's published vectors, the tail it must have, independence of its keys."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from torch import Tensor

from firesteel.engine.slots import slot_state
from firesteel.ops.reference import noise as reference
from firesteel.ops.reference.noise import gumbel, noise, philox
from firesteel.ops.types import SlotState
from oracles.sampling import gumbel as gumbel_oracle
from oracles.sampling import gumbel_of, philox4x32

ONES = 0xFFFFFFFF
PI = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
VECTORS = [  # of the Random123 distribution: counter, key, all four words
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (*PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]
# 2^26 counters take half a minute; FIRESTEEL_NOISE_LOG2=26 runs them
COUNTERS_LOG2 = int(os.environ.get("FIRESTEEL_NOISE_LOG2", "22"))


def words(*values: int) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([v]) for v in values)


@pytest.mark.parametrize(("counter", "key", "want"), VECTORS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], want: tuple[int, ...]):
    assert philox4x32(counter, key) == want  # type: ignore[arg-type]
    assert tuple(w.item() for w in philox(words(*counter), words(*key))) == want  # type: ignore[arg-type]


def test_the_generator_equals_plain_integers_everywhere():
    rng = np.random.default_rng(0)
    lines = rng.integers(0, 2**32, (500, 6), dtype=np.int64)
    lines[rng.random(lines.shape) < 0.2] = ONES
    lines[rng.random(lines.shape) < 0.2] = 0
    columns = torch.from_numpy(lines).unbind(1)
    found = torch.stack(philox(columns[:4], columns[4:]), 1)  # type: ignore[arg-type]
    for line, drawn in zip(lines.tolist(), found.tolist(), strict=True):
        assert list(philox4x32(tuple(line[:4]), tuple(line[4:]))) == drawn


def test_gumbel_is_the_formula_at_both_ends():
    bits = [0, 1, 2, 3, 1000, 2**31 - 1, 2**31, ONES - 300, ONES - 1, ONES]
    found = gumbel(torch.tensor(bits))
    assert found.dtype == torch.float32 and bool(torch.isfinite(found).all())
    for b, g in zip(bits, found.tolist(), strict=True):
        assert g == pytest.approx(gumbel_of(b), rel=1e-6, abs=1e-6)
    # the largest values, which decide who wins, do not tie: 2^-33, 3 * 2^-33, 5 * 2^-33 from the top
    top = gumbel(torch.arange(4))
    assert bool((top[:-1] > top[1:]).all())
    assert top[0].item() == pytest.approx(33 * math.log(2), rel=1e-6)


def tail_counts(log2: int, low: int, high: int, chunk_log2: int = 20) -> list[int]:
    """How many of 2^log2 words, a quarter of them from each place of a call, give noise of at least low, .. high."""
    counts = torch.zeros(high - low + 1, dtype=torch.int64)
    state, slot, size = keyed([123456789], [0]), torch.tensor([0]), 1 << min(log2, chunk_log2)
    for chunk in range(1 << max(log2 - chunk_log2, 0)):
        g = noise(range(size), torch.tensor([chunk]), slot, state)[0]
        bucket = g.floor().clamp(low - 1, high).to(torch.int64) - (low - 1)
        counts += torch.bincount(bucket, minlength=high - low + 2)[1:]
    return counts.flip(0).cumsum(0).flip(0).tolist()


def test_tail_probability_is_the_formula():
    """P(g > t) = 1 - exp(-exp(-t)), also where a generator of 24 bits has no values left."""
    n = 2.0**COUNTERS_LOG2
    reach = int(COUNTERS_LOG2 * math.log(2)) - 2  # some tens of counters stay above
    counts = tail_counts(COUNTERS_LOG2, -2, reach)
    assert counts[-1] > 0
    for bound, count in enumerate(counts, -2):
        p = -math.expm1(-math.exp(-bound))
        sigma = math.sqrt(n * p * (1 - p))
        assert abs(count - n * p) < 4 * sigma, f"t={bound}: {count} of {n:.0f}, expected {n * p:.1f}"


def keyed(seeds: list[int], samples: list[int]) -> SlotState:
    """Slots at temperature 1 with these seeds and sample indices."""
    state = slot_state(len(seeds), 16, 8, 0, torch.device("cpu"))
    state.seed_lo = torch.tensor([s % 2**32 for s in seeds])
    state.seed_hi = torch.tensor([s >> 32 for s in seeds])
    state.sample, state.temperature = torch.tensor(samples), torch.ones(len(seeds))
    return state


DRAWS = 100_000
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, 0.0, -0.5, -1.0, -3.0])
PLACES = torch.arange(DRAWS)
PAIRS = {  # (seed, sample, offset of the position) of two streams that must be independent
    "seeds": ((7, 0, 0), (8, 0, 0)),
    "seeds that differ in their high word": ((7, 0, 0), (7 + 2**32, 0, 0)),
    "sample indices": ((7, 0, 0), (7, 1, 0)),
    "seed and sample index swapped": ((7, 3, 0), (3, 7, 0)),
    "positions": ((7, 0, 0), (7, 0, 1)),
    "distant positions": ((7, 0, 0), (7, 0, DRAWS)),
}


def tokens(seed: int, sample: int, offset: int) -> Tensor:
    slots = torch.zeros(DRAWS, dtype=torch.int64)
    g = noise(torch.arange(LOGITS.shape[0]), PLACES + offset, slots, keyed([seed], [sample]))
    return (LOGITS + g).argmax(-1)


@pytest.mark.parametrize("pair", PAIRS)
def test_two_streams_agree_as_often_as_chance(pair: str):
    a, b = (tokens(*stream) for stream in PAIRS[pair])
    p = torch.softmax(LOGITS.double(), -1)
    chance = float((p * p).sum())
    sigma = math.sqrt(chance * (1 - chance) / DRAWS)
    assert abs(float((a == b).double().mean()) - chance) < 3 * sigma


def test_draws_have_the_distribution():
    drawn = torch.bincount(tokens(11, 0, 0), minlength=LOGITS.shape[0]).double()
    want = torch.softmax(LOGITS.double(), -1) * DRAWS
    chi = float(((drawn - want) ** 2 / want).sum())
    assert chi < 24.3  # 7 degrees of freedom, p = 0.001


def test_noise_is_a_function_of_key_position_and_token_alone():
    state = keyed([5, 6, 2**64 - 1], [0, 2, 1])
    ids, places = torch.arange(16), torch.tensor([9, 3, 9, 2**20])
    slots = torch.tensor([2, 0, 1, 2])
    whole = noise(ids, places, slots, state)
    for row in range(4):
        alone = noise(ids[5:], places[row : row + 1], slots[row : row + 1], state)
        assert torch.equal(alone[0], whole[row, 5:])
    seeds, samples = [5, 6, 2**64 - 1], [0, 2, 1]
    for row, (place, slot) in enumerate(zip(places.tolist(), slots.tolist(), strict=True)):
        seed = seeds[slot]
        for token in range(16):
            want = gumbel_oracle(token, place, seed, samples[slot])
            assert whole[row, token].item() == pytest.approx(want, rel=1e-6, abs=1e-6)


def test_a_word_does_not_depend_on_how_ids_are_asked_for():
    state, places, slots = keyed([5, 2**40 + 6], [0, 2]), torch.tensor([9, 3, 2**20]), torch.tensor([1, 0, 1])
    streams = torch.tensor([0, 3, 2**31])
    whole = reference.words(range(41), places, slots, state, streams)
    for first in range(9):
        for last in (first + 1, first + 2, first + 7, 41):
            some = reference.words(range(first, last), places, slots, state, streams)
            assert torch.equal(some, whole[:, first:last])
    mixed = torch.tensor([7, 40, 0, 7, 22, 13])
    assert torch.equal(reference.words(mixed, places, slots, state, streams), whole[:, mixed])
    for row in range(3):
        alone = reference.words(
            range(41), places[row : row + 1], slots[row : row + 1], state, int(streams[row])
        )
        assert torch.equal(alone[0], whole[row])


def test_the_word_of_an_id_is_a_word_of_the_call_that_four_ids_share():
    """Published vectors by token id: seed and sample all ones, position, stream and the seed's upper half too."""
    counter, key, want = VECTORS[1]
    state = keyed([2**64 - 1], [ONES])
    ids = torch.arange(4) + 4 * counter[0]
    found = reference.words(ids, torch.tensor([ONES]), torch.tensor([0]), state, ONES)
    assert tuple(found[0].tolist()) == want and key == (ONES, ONES)


def test_words_of_one_call_are_independent():
    """Every pair of places in a call: all combinations of their two top bits are equally frequent."""
    state, slot = keyed([21], [0]), torch.tensor([0])
    drawn = reference.words(range(4 * DRAWS), torch.tensor([77]), slot, state, 0).view(DRAWS, 4)
    top = drawn >> 30
    for a in range(4):
        for b in range(a):
            table = torch.bincount(4 * top[:, a] + top[:, b], minlength=16).double()
            chi = float(((table - DRAWS / 16) ** 2 / (DRAWS / 16)).sum())
            assert chi < 37.7  # 15 degrees of freedom, p = 0.001
