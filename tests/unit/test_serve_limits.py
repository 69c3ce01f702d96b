"""Bounds of a request: what is refused, and that what lies just inside is not."""

from __future__ import annotations

from typing import Any

import pytest

from firesteel.config import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_STOPS,
    ParameterError,
    SamplingParams,
    check_bad_words,
)
from firesteel.serve.errors import ApiError
from firesteel.serve.limits import MAX_SAMPLES, check_ids, check_text
from firesteel.serve.messages import ModelInfo
from firesteel.tokenizer import Tokenizer, TokenizerError, byte_tokenizer

INFO = ModelInfo("nowhere", 512, 100, 0, (1,), True, 0, 4, 10, 256)
BYTES = byte_tokenizer()


@pytest.mark.parametrize(
    "value", ["text", None, 5, [], [5] * 100, [[5] * 100] * 3, ["a"] * MAX_SAMPLES, [[5], "a"], [None], [[]]]
)
def test_lists_that_may_pass(value: Any) -> None:
    check_ids("prompt", value, INFO)


@pytest.mark.parametrize(
    "value", [[5] * 101, [[1], [5] * 101], ["a"] * (MAX_SAMPLES + 1), [[5]] * (MAX_SAMPLES + 1)]
)
def test_lists_that_are_too_long(value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        check_ids("prompt", value, INFO)
    assert caught.value.status == 400 and caught.value.param == "prompt"


def test_a_text_is_too_long_only_if_no_tokens_could_hold_it() -> None:
    """The bound is the longest token of the vocabulary, as often as the model's length allows."""
    token = max(BYTES._inner.get_vocab(), key=len)
    assert BYTES.longest == len(token)
    most = token * 100
    check_text("messages", most, BYTES, INFO)
    assert len(BYTES.encode(most)) == 100, "it does fit"
    with pytest.raises(ApiError, match="cannot be 100 tokens"):
        check_text("messages", most + "x", BYTES, INFO)


def test_numbers_of_stops_and_bad_words() -> None:
    SamplingParams(stop=("x",) * MAX_STOPS, bad_words=("x",) * MAX_BAD_WORDS)
    for name, count in (("stop", MAX_STOPS), ("bad_words", MAX_BAD_WORDS)):
        with pytest.raises(ParameterError, match=f"{name}=.*at most {count}"):
            SamplingParams.of(**{name: ("x",) * (count + 1)})
    with pytest.raises(ParameterError, match="bad_word_ids"):
        SamplingParams(bad_word_ids=((5,),) * (MAX_BAD_WORDS + 1))
    check_bad_words([(5,) * MAX_BAD_WORD_LENGTH, (6,)], "bad_words")
    with pytest.raises(ParameterError, match="a word of 65 tokens"):
        SamplingParams(bad_word_ids=((5,) * (MAX_BAD_WORD_LENGTH + 1),))


class PanicException(BaseException):
    """As the tokenizer's library raises it: no Exception."""


def test_a_tokenizer_that_gives_up_is_an_error_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Inner:
        problem: BaseException = PanicException("retry-limit-in-match over")

        def encode_batch_fast(self, *_: Any, **__: Any) -> Any:
            raise self.problem

    tokenizer: Tokenizer = byte_tokenizer()
    monkeypatch.setattr(tokenizer, "_inner", Inner())
    with pytest.raises(TokenizerError, match="gave up"):
        tokenizer.encode(" ")
    monkeypatch.setattr(Inner, "problem", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode(" ")
