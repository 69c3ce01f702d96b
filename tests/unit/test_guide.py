"""Guides and masks by themselves: brute force against a toy grammar, rollback, boundaries, budgets."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firesteel.config import EngineConfig, ParameterError
from firesteel.engine.guide import Guide, Thinking, Vocabulary, Words, check_guided
from firesteel.ops.reference.tail import ReferenceOps
from firesteel.ops.types import Numerics
from oracles.masks import EOS, LETTERS, VOCAB, VOCABULARY, Language, check_step

OPEN, CLOSE = 2, 3


def ids(words: Words | None) -> set[int]:
    """What a mask allows."""
    if words is None:
        return set(range(VOCAB))
    return {i for i in range(VOCAB) if int(words[i // 32]) >> i % 32 & 1}


def allowed(text: list[int], thinking: Thinking | None, strings: set[tuple[int, ...]] | None) -> set[int]:
    """The rules said once more, from the whole answer so far."""
    inside, spent, answer = bool(thinking and thinking.inside), 0, list[int]()
    for token in text:
        if inside and token == CLOSE:
            inside = False
        elif inside:
            spent += 1
        elif strings is None and thinking and token == OPEN:
            inside = True
        else:
            answer.append(token)
    if inside:
        assert thinking is not None
        if thinking.budget is not None and spent >= thinking.budget:
            return {CLOSE}
        return set(range(VOCAB)) - set(thinking.banned)
    return Language(strings).next(answer) if strings is not None else set(range(VOCAB))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Thinking | None, set[tuple[int, ...]] | None, int]:
    inside, budget = draw(st.booleans()), draw(st.sampled_from((None, 0, 1, 3, 5)))
    strings = draw(st.none() | st.sets(st.lists(st.sampled_from(LETTERS), min_size=1, max_size=6).map(tuple),
                                       min_size=1, max_size=6))  # fmt: skip
    banned = (EOS,) if strings is not None else ()
    thinking = draw(st.none() | st.just(Thinking(OPEN, CLOSE, inside, budget, banned)))
    return thinking, strings, draw(st.integers(0, 2**32))


@settings(max_examples=60)
@given(cases())
def test_masks_equal_the_rules_told_from_the_beginning(
    case: tuple[Thinking | None, set[tuple[int, ...]] | None, int],
) -> None:
    """Random decoding with random drafts: every row's mask, also behind rejected drafts."""
    thinking, strings, seed = case
    rng = random.Random(seed)
    guide = Guide(VOCABULARY, 7, thinking, Language(strings) if strings is not None else None, {EOS})
    text, fresh = list[int](), list[int]()
    for _ in range(12):
        drafts = list[int]()
        for _ in range(rng.randrange(5)):  # mostly what the rules allow
            right = sorted(allowed(text + drafts, thinking, strings))
            drafts.append(rng.choice(right) if right and rng.random() < 0.8 else rng.randrange(VOCAB))
        masks = guide.rows(fresh, drafts)
        assert guide.position == 7 + len(text)
        for depth, mask in enumerate(masks):
            assert ids(mask) == allowed(text + drafts[:depth], thinking, strings)
        if len(masks) <= len(drafts):  # it stopped where no later row can count
            cut = drafts[len(masks) - 1]
            assert cut == EOS or cut not in ids(masks[-1])
        fresh = []
        for depth, mask in enumerate(masks):  # sample as a target would that often agrees
            can = sorted(ids(mask))
            agrees = depth < len(drafts) and drafts[depth] in can and rng.random() < 0.7
            token = drafts[depth] if agrees else rng.choice(can)
            fresh.append(token)
            if token == EOS or depth >= len(drafts) or token != drafts[depth]:
                break
        text += fresh
        if EOS in fresh:
            return


def test_rejected_drafts_are_taken_back_and_accepted_ones_kept() -> None:
    """Accept 2 of 5: 3 steps back, nothing is walked twice."""
    text = tuple(LETTERS[i % 4] for i in range(9))
    matcher = Language({text, (*text[:3], LETTERS[1], *text[4:])})
    guide = Guide(VOCABULARY, 0, None, matcher, {EOS})
    assert len(guide.rows(text[:1], text[1:6])) == 6
    assert matcher.calls == {"take": 6, "rollback": 0}
    other = LETTERS[1]
    assert ids(guide.rows([*text[1:3], other], [])[0]) == {text[4]}
    assert matcher.calls == {"take": 7, "rollback": 3}
    assert matcher.text == [*text[:3], other]


@pytest.mark.parametrize("at", range(6))
def test_the_grammar_begins_inside_a_block(at: int) -> None:
    """``</think>`` at every place of a block of six."""
    word = LETTERS * 2
    guide = Guide(VOCABULARY, 3, Thinking(OPEN, CLOSE, True, None, (EOS,)), Language({word}), {EOS})
    drafts = [*[20] * at, CLOSE, *word[: 5 - at]]
    masks = guide.rows([], drafts)
    assert len(masks) == 7
    assert all(ids(m) == set(range(VOCAB)) - {EOS} for m in masks[: at + 1])
    assert [ids(m) for m in masks[at + 1 :]] == [{word[i]} for i in range(6 - at)]


@pytest.mark.parametrize("budget", range(7))
def test_a_budget_ends_inside_a_block(budget: int) -> None:
    guide = Guide(VOCABULARY, 0, Thinking(OPEN, CLOSE, True, budget), None, {EOS})
    masks = guide.rows([], [20] * 6)
    assert len(masks) == budget + 1 and ids(masks[-1]) == {CLOSE}
    assert guide.cut == 6 - budget
    assert [m is None for m in guide.rows([*[20] * budget, CLOSE], [5])] == [True, True]


def test_reasoning_that_opens_again_keeps_its_account() -> None:
    guide = Guide(VOCABULARY, 0, Thinking(OPEN, CLOSE, True, 3), None, {EOS})
    assert guide.rows([20, 21, CLOSE, 9, OPEN], [])[0] is None
    assert ids(guide.rows([22], [])[0]) == {CLOSE}


def test_drafts_behind_an_end_are_not_followed() -> None:
    word = LETTERS[:2]
    guide = Guide(VOCABULARY, 0, None, Language({word}), {EOS})
    masks = guide.rows([], [*word, EOS, 7, 7])
    assert [ids(m) for m in masks] == [{word[0]}, {word[1]}, {EOS}]


@pytest.mark.parametrize("size", (1, 31, 32, 33, 64, 300))
def test_vocabularies_of_every_size(size: int) -> None:
    vocabulary, chosen = Vocabulary(size), {0, size - 1}
    words = np.stack([vocabulary.only(chosen), vocabulary.all_but(chosen)]).view(np.int32)
    logits = torch.randn(3, size)
    out = ReferenceOps(Numerics(False)).restrict(logits, torch.tensor([2, 0]), torch.from_numpy(words))
    keep = torch.zeros(size, dtype=torch.bool)
    keep[list(chosen)] = True
    assert torch.equal(out[1], logits[1])
    assert torch.equal(torch.isfinite(out[2]), keep) and torch.equal(out[2][keep], logits[2][keep])
    assert torch.equal(torch.isfinite(out[0]), ~keep)


# ---- a step -------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", (1, 3))
def test_masks_find_their_rows(workers: int) -> None:
    check_step(ReferenceOps(Numerics(False)), torch.device("cpu"), workers)


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"acceptance": "rejection"}, "rejection"), ({"simulated_acceptance": {}}, "simulated_acceptance")],
)
def test_engines_that_cannot_mask_say_so(settings: dict[str, object], name: str) -> None:
    check_guided(EngineConfig.of(speculative={}))
    with pytest.raises(ParameterError, match=f"structured_outputs, thinking_token_budget: .*{name}"):
        check_guided(EngineConfig.of(speculative=settings))
