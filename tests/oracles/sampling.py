"""Sampling in plain Python, written from the descriptions of the parameters alone.

Numbers are Python floats (64 bits). Where a decision hangs on less than a float32 can tell, the oracle
says so (``close``) and the caller picks another case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from firesteel.config import SamplingParams

NEVER = -math.inf
CLOSE = 1e-5  # relative distance that float32 arithmetic may not tell


@dataclass(frozen=True)
class Shaped:
    """Logits after shaping; ``close``: a bound was met too nearly to compare."""

    logits: list[float]
    close: bool


def shape(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    answer: Sequence[int],
    stop_ids: Sequence[int] = (),
) -> Shaped:
    """What ``params`` do to the logits of the token behind ``prompt`` and ``answer``.

    ``stop_ids`` are all ids that end the answer, the end token included. Order: bias, allowed ids, bad
    words, minimum length, penalties, then min-p, top-k, top-p of softmax(logits / T) where T > 0.
    """
    x = [float(v) + params.logit_bias.get(i, 0.0) for i, v in enumerate(logits)]
    if params.allowed_token_ids is not None:
        x = [v if i in params.allowed_token_ids else NEVER for i, v in enumerate(x)]
    text = [*prompt, *answer]
    for word in params.bad_word_ids:
        before = list(word[:-1])
        if not before or text[-len(before) :] == before:
            x[word[-1]] = NEVER
    if len(answer) < params.min_tokens:
        for i in stop_ids:
            x[i] = NEVER
    x = penalise(x, params, prompt, answer)
    if params.temperature == 0:
        return Shaped(x, False)
    return truncate(x, params)


def penalise(
    x: list[float], params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]
) -> list[float]:
    """Repetition looks at prompt and answer; presence and frequency at the answer."""
    seen, out = {*prompt, *answer}, []
    for i, v in enumerate(x):
        if i in seen and v != NEVER:
            v = v / params.repetition_penalty if v > 0 else v * params.repetition_penalty
        count = list(answer).count(i)
        if count:
            v -= params.frequency_penalty * count + params.presence_penalty
        out.append(v)
    return out


def truncate(x: list[float], params: SamplingParams) -> Shaped:
    """Each step looks at what the one before has left, best first, ties to the lowest id."""
    close = False
    order = sorted((i for i, v in enumerate(x) if v != NEVER), key=lambda i: (-x[i], i))
    best = x[order[0]] / params.temperature
    if params.min_p > 0:
        ratio = {i: math.exp(x[i] / params.temperature - best) / params.min_p for i in order}
        close |= any(r != 1 and abs(r - 1) < CLOSE for r in ratio.values())
        order = [i for i in order if ratio[i] >= 1]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        weight = [math.exp(x[i] / params.temperature - best) for i in order]
        total, kept, mass = sum(weight), [], 0.0
        for i, w in zip(order, weight, strict=True):
            if mass >= params.top_p:
                break
            kept.append(i)
            mass += w / total
            close |= abs(mass - params.top_p) < CLOSE
        order = kept
    chosen = set(order)
    return Shaped([v if i in chosen else NEVER for i, v in enumerate(x)], close)


def probabilities(shaped: Sequence[float], temperature: float) -> list[float]:
    """Of each token at a temperature above 0."""
    best = max(shaped)
    weight = [math.exp((v - best) / temperature) if v != NEVER else 0.0 for v in shaped]
    total = sum(weight)
    return [w / total for w in weight]


# ---- noise --------------------------------------------------------------------------
def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """All four words of Philox4x32-10 (Salmon et al., 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 % 2**32, (p0 >> 32) ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def gumbel_of(bits: int) -> float:
    """-log(-log(1 - v)) of v = (bits + 1/2) / 2^32 as a float32 below 1."""
    v = min(float(np.float32((bits + 0.5) / 2**32)), 1 - 2.0**-24)
    return -math.log(-math.log1p(-v))


def gumbel(token: int, position: int, seed: int, sample: int) -> float:
    """Noise of one token id sampled at ``position``: the target's stream is 0, four ids share a call."""
    bits = philox4x32((token // 4, position, 0, seed >> 32), (seed % 2**32, sample))[token % 4]
    return gumbel_of(bits)


def draw(
    shaped: Sequence[float], temperature: float, position: int, seed: int, sample: int
) -> tuple[int, float]:
    """(token, gap to the second best): argmax of logits + T * noise, ties to the lowest id."""
    score = [
        v + (temperature * gumbel(i, position, seed, sample) if temperature and v != NEVER else 0.0)
        for i, v in enumerate(shaped)
    ]
    best = max(range(len(score)), key=lambda i: (score[i], -i))
    rest = max((v for i, v in enumerate(score) if i != best), default=NEVER)
    return best, score[best] - rest
