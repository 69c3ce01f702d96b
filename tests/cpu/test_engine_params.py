"""Every sampling parameter on toy logits, against plain Python; the same for each backend."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel.checkpoint.codecs import QTensor
from firesteel.config import SamplingParams
from firesteel.engine import sequence
from firesteel.engine.slots import Slots
from firesteel.ops import BackendError, Numerics, Ops, select
from oracles import sampling

CPU = torch.device("cpu")
VOCAB = 24
LENGTH = 32
EOS = 1


@pytest.fixture(params=["reference", "native"], scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    try:
        return select(request.param, Numerics(False)).ops
    except BackendError as err:
        pytest.skip(str(err))


@dataclass(frozen=True)
class Case:
    """A request in the middle of its answer, and the logits of its next token."""

    logits: tuple[float, ...]
    params: SamplingParams
    prompt: tuple[int, ...] = (3, 4, 5)
    answer: tuple[int, ...] = ()
    seed: int = 0
    sample: int = 0

    @property
    def position(self) -> int:
        """Of the token to be sampled."""
        return len(self.prompt) + len(self.answer)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        ends = {*self.params.stop_token_ids, *(() if self.params.ignore_eos else (EOS,))}
        return tuple(sorted(ends))

    def wanted(self) -> sampling.Shaped:
        return sampling.shape(self.logits, self.params, self.prompt, self.answer, self.stop_ids)


def admitted(cases: Sequence[Case]) -> Slots:
    """One slot per case, filled as the engine does it."""
    slots = Slots(len(cases) + 1, VOCAB, LENGTH, 0, CPU)
    for i, c in enumerate(cases):
        words = c.params.bad_word_ids
        request = sequence.Sequence(
            i, c.prompt, c.params, c.seed, LENGTH, c.stop_ids, c.sample, words, slot=i
        )
        slots.admit([request.admission(())])
        slots.state.history[i, : c.position] = torch.tensor((*c.prompt, *c.answer))
        # what stands behind is another request's, or a rejected draft
        rest = slots.state.history[i, c.position :]
        rest.copy_(torch.arange(rest.shape[0]) % VOCAB)
    return slots


def shaped(ops: Ops, cases: Sequence[Case]) -> tuple[Tensor, tuple[Any, ...]]:
    """(logits after shaping, what else ``sample`` takes)."""
    slots = admitted(cases)
    where = (torch.arange(len(cases)), torch.tensor([c.position for c in cases]), slots.state)
    return ops.shape(torch.tensor([c.logits for c in cases]), *where), where


def check(ops: Ops, cases: Sequence[Case]) -> int:
    """Compare a batch of cases; how many could be compared."""
    got, where = shaped(ops, cases)
    drawn, finite = ops.sample(got, *where)
    compared = 0
    for i, case in enumerate(cases):
        want = case.wanted()
        if want.close:
            continue
        line = torch.tensor(want.logits)
        assert torch.equal(got[i] == sampling.NEVER, line == sampling.NEVER), (case, got[i], line)
        kept = line != sampling.NEVER
        assert torch.allclose(got[i][kept], line[kept], rtol=2e-6, atol=1e-6), case
        assert bool(finite[i]) == bool(kept.any())
        token, gap = sampling.draw(
            want.logits, case.params.temperature, case.position, case.seed, case.sample
        )
        if kept.any() and (gap > 1e-4 or case.params.temperature == 0):
            assert int(drawn[i]) == token, case
            compared += 1
    return compared


# best first: 10, 4, 23, 7, 3; 5 and 6 tie, the rest follow far behind
LOGITS = tuple(
    {10: 4.0, 4: 3.5, 23: 3.0, 7: 2.0, 3: 1.5, 5: 1.0, 6: 1.0}.get(i, -i / 8) for i in range(VOCAB)
)

SINGLE: list[tuple[dict[str, Any], tuple[int, ...]]] = [  # parameters, the ids that are left
    ({"top_k": 1}, (10,)),
    ({"top_k": 3}, (4, 10, 23)),
    ({"top_k": 6}, (3, 4, 5, 7, 10, 23)),  # of the tie the lower id
    ({"top_k": 10**9}, tuple(range(VOCAB))),
    ({"top_k": -1}, tuple(range(VOCAB))),
    ({"top_p": 0.01}, (10,)),
    ({"top_p": 0.45}, (4, 10)),
    ({"top_p": 0.85}, (4, 7, 10, 23)),
    ({"min_p": 1.0}, (10,)),
    ({"min_p": 0.3}, (4, 10, 23)),
    ({"min_p": 0.04}, (3, 4, 5, 6, 7, 10, 23)),
    ({"allowed_token_ids": (7, 20)}, (7, 20)),
    ({"allowed_token_ids": (7, 20), "top_k": 1}, (7,)),
    ({"bad_word_ids": ((10,), (23,))}, tuple(i for i in range(VOCAB) if i not in (10, 23))),
    ({"bad_word_ids": ((9, 10), (23, 9, 4))}, tuple(i for i in range(VOCAB) if i not in (10, 4))),
    ({"bad_word_ids": ((9, 9, 10), (5, 23, 9, 7))}, tuple(i for i in range(VOCAB) if i != 7)),
    ({"bad_word_ids": ((3, 4, 5, 23, 9, 11),)}, tuple(i for i in range(VOCAB) if i != 11)),
    ({"bad_word_ids": ((0, 3, 4, 5, 23, 9, 11),)}, tuple(range(VOCAB))),  # longer than all there is
    ({"min_tokens": 3}, tuple(i for i in range(VOCAB) if i != EOS)),
    ({"min_tokens": 3, "stop_token_ids": (4, 10)}, tuple(i for i in range(VOCAB) if i not in (1, 4, 10))),
    ({"min_tokens": 3, "ignore_eos": True}, tuple(range(VOCAB))),
    ({"min_tokens": 2}, tuple(range(VOCAB))),  # two are there already
]


@pytest.mark.parametrize(("values", "left"), SINGLE, ids=lambda v: str(v)[:60])
def test_what_is_left(ops: Ops, values: dict[str, Any], left: tuple[int, ...]) -> None:
    case = Case(LOGITS, SamplingParams(**values), answer=(23, 9))
    got, _ = shaped(ops, [case])
    assert tuple(torch.nonzero(got[0] > sampling.NEVER).flatten().tolist()) == left
    assert torch.equal(got[0][list(left)], torch.tensor(LOGITS)[list(left)])
    check(ops, [case])


PENALTIES: list[tuple[dict[str, Any], dict[int, float]]] = [  # parameters, the ids that change
    # 3 and 4 stand in the prompt, 10 twice and 23 once in the answer
    ({"repetition_penalty": 2.0}, {3: 0.75, 4: 1.75, 10: 2.0, 23: 1.5, 20: -5.0}),
    ({"repetition_penalty": 0.5}, {3: 3.0, 4: 7.0, 10: 8.0, 23: 6.0, 20: -1.25}),
    ({"presence_penalty": 1.5}, {10: 2.5, 23: 1.5}),
    ({"presence_penalty": -1.0}, {10: 5.0, 23: 4.0}),
    ({"frequency_penalty": 0.5}, {10: 3.0, 23: 2.5}),
    ({"frequency_penalty": -2.0}, {10: 8.0, 23: 5.0}),
    ({"logit_bias": {0: 7.0, 23: -100.0}}, {0: 7.0, 23: -97.0}),
    # the bias comes first: 1.5 - 3 = -1.5 is weakened by multiplying
    ({"logit_bias": {3: -3.0}, "repetition_penalty": 2.0}, {3: -3.0, 4: 1.75, 10: 2.0, 23: 1.5, 20: -5.0}),
    # repetition before the subtractions
    (
        {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {3: 0.75, 4: 1.75, 10: 0.0, 23: 0.0, 20: -5.0},
    ),
]


@pytest.mark.parametrize(("values", "changed"), PENALTIES, ids=lambda v: str(v)[:60])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_what_changes(
    ops: Ops, temperature: float, values: dict[str, Any], changed: dict[int, float]
) -> None:
    params = SamplingParams(**values, temperature=temperature)
    case = Case(LOGITS, params, prompt=(3, 4, 20), answer=(10, 23, 10))
    got, _ = shaped(ops, [case])
    want = torch.tensor([changed.get(i, v) for i, v in enumerate(LOGITS)])
    assert torch.equal(got[0], want)
    check(ops, [case])


def test_truncation_follows_the_penalties_and_the_bans(ops: Ops) -> None:
    """Token 10 is best until it is penalised; top-k then counts without it, and without the banned 4."""
    params = SamplingParams(
        top_k=2, frequency_penalty=2.0, bad_word_ids=((4,),), min_tokens=5, logit_bias={1: 50.0}
    )
    got, _ = shaped(ops, [Case(LOGITS, params, answer=(10, 10))])
    assert torch.nonzero(got[0] > sampling.NEVER).flatten().tolist() == [7, 23]


def test_top_p_is_of_what_top_k_and_min_p_leave(ops: Ops) -> None:
    """Two tokens are left with shares of .62 and .38: a top-p of .6 keeps one, of .65 both."""
    for top_p, left in ((0.6, [10]), (0.65, [4, 10])):
        got, _ = shaped(ops, [Case(LOGITS, SamplingParams(top_k=2, top_p=top_p))])
        assert torch.nonzero(got[0] > sampling.NEVER).flatten().tolist() == left


def test_temperature_comes_before_truncation(ops: Ops) -> None:
    """Hot flattens, so more tokens carry the same mass."""
    counts = []
    for heat in (0.2, 1.0, 5.0):
        got, _ = shaped(ops, [Case(LOGITS, SamplingParams(temperature=heat, top_p=0.8))])
        counts.append(int((got[0] > sampling.NEVER).sum()))
    assert counts[0] == 1 and counts[0] < counts[1] < counts[2]


# ---- all together --------------------------------------------------------------------------------
def random_case(rng: random.Random) -> Case:
    """Any mix; logits on a coarse grid tie often."""

    def some(most: int, least: int = 0) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(rng.randint(least, most)))

    def maybe(value: Any, default: Any) -> Any:
        return value if rng.random() < 0.35 else default

    prompt, answer = some(8, 1), some(8)
    text = (*prompt, *answer)
    words = [some(3, 1) for _ in range(rng.randint(0, 2))]
    words += [(*text[-rng.randint(1, 3) :], rng.randrange(VOCAB)) for _ in range(rng.randint(0, 2))]
    params = SamplingParams(
        temperature=rng.choice((0.0, 0.5, 1.0, 1.7)),
        top_k=maybe(rng.randint(1, VOCAB), 0),
        top_p=maybe(rng.uniform(0.05, 1), 1.0),
        min_p=maybe(rng.uniform(0, 0.5), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe({t: rng.uniform(-5, 5) for t in some(5)}, {}),
        allowed_token_ids=maybe(some(12, 1), None),
        bad_word_ids=maybe(tuple(words), ()),
        min_tokens=maybe(rng.randint(0, 10), 0),
        stop_token_ids=maybe(some(4), ()),
        ignore_eos=rng.random() < 0.3,
    )
    grid = rng.choice((0.25, 1e-3))
    logits = tuple(round(rng.gauss(0, 2) / grid) * grid for _ in range(VOCAB))
    return Case(logits, params, prompt, answer, rng.randrange(2**64), rng.randrange(4))


def test_any_mix_equals_plain_python(ops: Ops) -> None:
    """All in one call: requests with and without parameters side by side."""
    rng = random.Random(1)
    cases = [random_case(rng) for _ in range(600)]
    assert check(ops, cases) > 450


def test_a_request_without_parameters_keeps_its_bits(ops: Ops) -> None:
    rng = random.Random(2)
    plain = [replace(random_case(rng), params=SamplingParams(temperature=t)) for t in (0.0, 0.7, 1.0)]
    mixed = [c for p in plain for c in (random_case(rng), p)]
    got, _ = shaped(ops, mixed)
    assert torch.equal(got[1::2], torch.tensor([p.logits for p in plain]))


def test_other_requests_change_nothing(ops: Ops) -> None:
    """A row alone and among others: the tables of bias and bad words become wider, its bits do not change."""
    rng = random.Random(3)
    cases = [random_case(rng) for _ in range(40)]
    together, _ = shaped(ops, cases)
    for i, case in enumerate(cases):
        alone, _ = shaped(ops, [case])
        assert torch.equal(alone[0], together[i])


# ---- drawing ------------------------------------------------------------------------------------------
def test_draws_follow_the_distribution(ops: Ops) -> None:
    """Chi-square of 40,000 draws of one request at consecutive positions."""
    params = SamplingParams(
        temperature=0.8, top_k=9, top_p=0.97, min_p=0.01, logit_bias={20: 4.0, 4: -1.0}, bad_word_ids=((23,),)
    )
    case = Case(LOGITS, params, seed=5)
    got, (slots, _, state) = shaped(ops, [case])
    want = case.wanted()
    p = torch.tensor(sampling.probabilities(want.logits, params.temperature), dtype=torch.float64)
    assert not want.close and 5 < int((p > 0).sum()) <= 9
    n, block = 40_000, 4000
    counts = torch.zeros(VOCAB, dtype=torch.int64)
    for low in range(0, n, block):
        rows = got.expand(block, -1).contiguous()
        drawn, _ = ops.sample(rows, slots.expand(block), torch.arange(low, low + block), state)
        counts += torch.bincount(drawn, minlength=VOCAB)
    assert int(counts[p == 0].sum()) == 0
    expected = p[p > 0] * n
    chi = float(((counts[p > 0] - expected) ** 2 / expected).sum())
    freedom = int((p > 0).sum()) - 1
    assert chi < freedom + 4 * (2 * freedom) ** 0.5  # about p = 0.001


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_fused_head_gives_the_same_bits(ops: Ops, temperature: float) -> None:
    """Also where logits tie: every weight row stands in the head three times."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(100, 32, generator=generator).to(torch.bfloat16).repeat(3, 1)
    head = ops.linear_weight(QTensor.dense(weight))
    x = torch.randn(64, 32, generator=generator)
    slots = Slots(65, 300, 8, 0, CPU)
    state, where = slots.state, torch.arange(64)
    state.temperature[:64] = temperature
    state.seed_lo[:64], state.sample[:64] = torch.arange(64) * 7, torch.arange(64) % 3
    positions = torch.arange(64) % 50
    fused = ops.head_sample(x, head, where, positions, state)
    plain = ops.sample(ops.logits(x, head), where, positions, state)
    assert torch.equal(fused[0], plain[0]) and torch.equal(fused[1], plain[1])
    assert len(set(fused[0].tolist())) > 30
    if temperature == 0:
        assert int(fused[0].max()) < 100  # ties go to the lowest id
    else:
        assert int(fused[0].max()) >= 200  # noise belongs to ids, not to logits


def test_broken_logits_are_seen_and_masked_ones_are_not(ops: Ops) -> None:
    """NaN, +inf, and nothing to choose from; -inf alone is a mask."""
    never = sampling.NEVER
    lines = torch.zeros(5, VOCAB)
    lines[0, 3], lines[1, 3] = float("nan"), float("inf")
    lines[2] = never
    lines[3, 1:] = never
    slots = admitted([Case(tuple([0.0] * VOCAB), SamplingParams(temperature=t)) for t in (1, 0, 1, 0, 1)])
    _, finite = ops.sample(lines, torch.arange(5), torch.full((5,), 3), slots.state)
    assert finite.tolist() == [False, False, False, True, True]


def test_log_probabilities_are_of_the_raw_logits(ops: Ops) -> None:
    """Value, rank and the best ones; ties to the lowest id."""
    rng = random.Random(4)
    lines = [[round(rng.gauss(0, 3)) / 2 for _ in range(VOCAB)] for _ in range(20)]
    tokens = [rng.randrange(VOCAB) for _ in lines]
    got = ops.logprobs(torch.tensor(lines), torch.tensor(tokens), 5)
    for i, (line, token) in enumerate(zip(lines, tokens, strict=True)):
        p = [sampling.math.log(v) for v in sampling.probabilities(line, 1.0)]
        best = sorted(range(VOCAB), key=lambda t: (-line[t], t))[:5]
        assert got.chosen[i].item() == pytest.approx(p[token], abs=1e-5)
        assert int(got.rank[i]) == sum(v > line[token] for v in line)
        assert got.ids[i].tolist() == best
        assert got.values[i].tolist() == pytest.approx([p[t] for t in best], abs=1e-5)
