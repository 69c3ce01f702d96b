"""Sampling parameters and engine settings: every bound at both ends, and every contradiction named."""

from __future__ import annotations

import math
from typing import Any

import pytest

from firesteel import EngineConfig, SamplingParams
from firesteel.config import MAX_BIAS, MAX_LOGPROBS, MAX_N, ParameterError

# field -> (values that must pass, values that must not)
BOUNDS: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "max_tokens": ((0, 1, 10**9), (-1, 1.0, None, True, "5")),
    "min_tokens": ((0, 1, 256), (-1, 1.5, None, False)),
    "temperature": ((0, 0.0, 1e-9, 1, 100), (-1e-9, 100.1, math.nan, math.inf, None, "1", True)),
    "top_k": ((-1, 0, 1, 10**9), (-2, 1.0, None, True)),
    "top_p": ((1e-9, 0.5, 1, 1.0), (0, 0.0, -0.1, 1.0001, math.nan, None, True)),
    "min_p": ((0, 0.5, 1), (-1e-9, 1.0001, math.inf, None)),
    "repetition_penalty": ((0.01, 1, 100), (0, 0.009, 1e-300, -1, 100.1, math.nan, None)),
    "presence_penalty": ((-2, 0, 2), (-2.1, 2.1, math.nan, None)),
    "frequency_penalty": ((-2, 0.0, 2), (-2.1, 2.1, math.inf, None)),
    "logit_bias": (
        ({}, {0: -100}, {5: 100.0}, dict.fromkeys(range(MAX_BIAS), 1.0)),
        ({0: 100.1}, {0: -100.1}, {-1: 1.0}, {0: math.nan}, {"0": 1.0}, [(0, 1.0)], None,
         dict.fromkeys(range(MAX_BIAS + 1), 1.0), {0: None}, {True: 1.0}),
    ),
    "allowed_token_ids": ((None, (0,), [3, 1, 3]), ((), (-1,), (1.0,), ("a",), (True,))),
    "bad_words": (((), "word", ("a", "b"), ["c"]), (("",), (3,), "")),
    "bad_word_ids": (((), ((1,),), [[1, 2], [3]]), (((),), ((-1,),), ((1.5,),))),
    "stop": (((), "END", ("a", "b"), ["c"]), (("",), (1,), "")),
    "stop_token_ids": (((), (0, 5), [7]), ((-1,), (1.0,), ("x",))),
    "include_stop_str_in_output": ((True, False), (1, None, "yes")),
    "ignore_eos": ((True, False), (0, None)),
    "seed": ((None, 0, 1, 2**64 - 1), (-1, 2**64, 1.0, "7", True)),
    "n": ((1, 2, MAX_N), (0, -1, MAX_N + 1, 1.0, None)),
    "logprobs": ((None, 0, 1, MAX_LOGPROBS), (-1, MAX_LOGPROBS + 1, 1.0, True)),
    "prompt_logprobs": ((None, 0, MAX_LOGPROBS), (-1, MAX_LOGPROBS + 1, 0.5, False)),
    "echo": ((True, False), (1, "true")),
    "speculative": ((True, False), (1, None)),
    "max_draft_tokens": ((None, 0, 1, 64), (-1, 1.0, True)),
    "cache_salt": (("", "tenant"), (None, 5, b"x")),
    "priority": ((-(10**6), 0, 5), (1.0, None, True)),
    "min_tokens_per_second": ((0, 0.5, 1e6), (-1, 1e7, math.nan, math.inf, None, "5", True)),
    "structured_outputs": (
        (None, {"json": {"type": "object"}}, {"json": "{}"}, {"json_object": True}, {"regex": "a+"},
         {"choice": ["a", "b"]}, {"grammar": "start: /a/"}, {"json": {}, "disable_any_whitespace": True},
         {"json": {}, "regex": None, "whitespace_pattern": " "}),
        ({}, {"json": "{"}, {"json": 5}, {"json_object": 1}, {"regex": ""}, {"choice": "ab"}, {"choice": [""]},
         {"json": {}, "regex": "a"}, {"regex": "a", "whitespace_pattern": " "}, {"structural_tag": "x"}, "json",
         {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}),
    ),
    "thinking_token_budget": ((None, 0, 32, 10**9), (-1, 1.0, True, "32")),
    "thinking": ((None, True, False), (0, 1, "on")),
}  # fmt: skip

GOOD = [(name, value) for name, (good, _) in BOUNDS.items() for value in good]
BAD = [(name, value) for name, (_, bad) in BOUNDS.items() for value in bad]


def short(value: Any) -> str:
    return repr(value)[:30]


def test_every_parameter_has_its_bounds_here():
    assert set(BOUNDS) == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize(("name", "value"), GOOD, ids=lambda v: short(v))
def test_values_inside_the_bounds_pass(name: str, value: Any):
    SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: short(v))
def test_values_outside_are_errors_that_name_the_parameter(name: str, value: Any):
    with pytest.raises(ParameterError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"min_tokens": 6, "max_tokens": 5}, ("min_tokens", "max_tokens")),
        ({"n": 2, "temperature": 0.0}, ("n", "temperature")),
        ({"ignore_eos": True, "structured_outputs": {"regex": "a"}}, ("ignore_eos", "structured_outputs")),
        ({"min_tokens": 3, "structured_outputs": {"regex": "a"}}, ("min_tokens", "structured_outputs")),
    ],
)
def test_contradictions_name_both(values: dict[str, Any], names: tuple[str, ...]):
    with pytest.raises(ParameterError) as error:
        SamplingParams(**values)
    assert all(name in str(error.value) for name in names)


def test_unknown_parameters_list_the_known():
    with pytest.raises(ParameterError, match=r"best_of.*known.*temperature"):
        SamplingParams.of(temperature=1.0, best_of=3)
    assert SamplingParams.of(top_k=5).top_k == 5


@pytest.mark.parametrize(
    "values",
    [
        {"logit_bias": {512: 1.0}},
        {"allowed_token_ids": (3, 512)},
        {"stop_token_ids": (512,)},
        {"bad_word_ids": ((1, 2), (3, 600))},
    ],
)
def test_ids_outside_the_vocabulary_name_the_parameter(values: dict[str, Any]):
    params = SamplingParams(**values)
    params.check_vocab(601)
    with pytest.raises(ParameterError, match=next(iter(values))):
        params.check_vocab(512)


def test_sequences_are_stored_as_tuples():
    p = SamplingParams(stop="END", bad_word_ids=[[1, 2]], allowed_token_ids=[5, 3, 5], stop_token_ids=[9])
    assert (p.stop, p.bad_word_ids, p.allowed_token_ids, p.stop_token_ids) == (
        ("END",),
        ((1, 2),),
        (3, 5),
        (9,),
    )


def test_the_bias_cannot_be_changed_from_outside():
    mine = {1: 2.0}
    params = SamplingParams(logit_bias=mine)
    mine[1] = 50.0
    assert params.logit_bias == {1: 2.0}


ENGINE: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "numerics": (("official", "float32"), ("bf16", None, 32)),
    "max_num_seqs": ((1, 4096), (0, -1, 1.5, None, True)),
    "max_num_batched_tokens": ((1, 8192), (0, 2.0, None)),
    "max_model_len": ((None, 1, 10**6), (0, -5, 1.0)),
    "num_pages": ((None, 1), (0, "8")),
    "max_waiting": ((1,), (0, None)),
    "prefix_caching": ((True, False), (1, None)),
    "swap_gib": ((0, 0.5), (-1, math.nan, None)),
    "threads": ((None, 1), (0, 1.0)),
    "default_model_len": ((1,), (0, None)),
    "debug_sync": ((True,), (1,)),
    "debug_poison": ((True,), ("yes",)),
    "structured_compile_seconds": ((0.1, 60), (0, -1, math.inf, None)),
    "structured_mask_seconds": ((0.1, 60), (0, "1", math.nan)),
}


@pytest.mark.parametrize("name", ENGINE)
def test_engine_settings(name: str):
    good, bad = ENGINE[name]
    for value in good:
        EngineConfig(**{name: value})
    for value in bad:
        with pytest.raises(ParameterError, match=name):
            EngineConfig(**{name: value})


def test_unknown_engine_settings_list_the_known():
    with pytest.raises(ParameterError, match=r"gpu_memory.*known.*max_num_seqs"):
        EngineConfig.of(gpu_memory=0.9)


def test_slots_are_bounded_by_the_rows_of_a_step():
    assert EngineConfig(max_num_seqs=16, max_num_batched_tokens=4).slots == 4
