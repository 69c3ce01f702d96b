"""Inputs that once took the engine, or other requests, down."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from firesteel import LLM, ParameterError, SamplingParams
from firesteel.cli import main
from firesteel.eval.gsm import read_problems
from firesteel.models.deepseek_v4.random_init import tiny_config, write_random


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(num_hidden_layers=2, compress_ratios=(0, 4))
    return write_random(tmp_path_factory.mktemp("hard") / "m", config, 1)


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(folder, numerics="float32", max_model_len=128, max_num_seqs=4)


def test_integers_beyond_the_device_are_harmless(llm: LLM) -> None:
    """A huge top_k keeps everything; huge lengths end at the model's."""
    want = llm.generate([[5, 6]], SamplingParams(max_tokens=6, seed=3, ignore_eos=True))[0].token_ids
    for huge in (2**31, 2**63, 2**90):
        got = llm.generate([[5, 6]], SamplingParams(max_tokens=6, seed=3, top_k=huge, ignore_eos=True))[0]
        assert got.token_ids == want
    done = llm.generate([[5, 6]], SamplingParams(max_tokens=2**80, min_tokens=2**79, seed=3))[0]
    assert done.finish_reason == "length" and len(done.token_ids) == 126
    llm.engine.scheduler.check()


def test_nothing_left_to_sample_is_refused(llm: LLM) -> None:
    for params in (
        SamplingParams(allowed_token_ids=(9,), bad_word_ids=((9,),)),
        SamplingParams(allowed_token_ids=(1,), min_tokens=4),
    ):
        with pytest.raises(ParameterError, match="allowed_token_ids"):
            llm.generate([[5]], params)


@pytest.mark.parametrize(
    "values",
    [
        {"stop": None}, {"stop": 3}, {"stop_token_ids": None}, {"stop_token_ids": 5}, {"bad_words": None},
        {"bad_word_ids": (5, 6)}, {"logit_bias": None}, {"temperature": 10**400}, {"repetition_penalty": 1e-300},
        {"allowed_token_ids": 7},
    ],
)  # fmt: skip
def test_wrong_types_name_the_parameter(values: dict) -> None:
    with pytest.raises(ParameterError, match=next(iter(values))):
        SamplingParams(**values)


@pytest.mark.parametrize("prompts", [None, 3, b"ab", [True], [[True, 4]]])
def test_prompts_of_wrong_types(prompts: object, llm: LLM) -> None:
    with pytest.raises(ParameterError, match="prompt"):
        llm.generate(prompts)  # type: ignore[arg-type]


def test_another_thread_gets_an_error_not_a_hang(llm: LLM) -> None:
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
    llm.generate([[9]], SamplingParams(max_tokens=2, seed=1))  # the same thread may interleave
    seen: list[BaseException] = []
    llm.frontend.add([8], SamplingParams(max_tokens=3, seed=1))

    def other() -> None:
        try:
            llm.generate([[9]], SamplingParams(max_tokens=2, seed=1))
        except ParameterError as err:
            seen.append(err)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and "another thread" in str(seen[0])
    stream.close()


def test_limits_of_settings(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="threads"):
        LLM(folder, threads=10**6)
    with pytest.raises(ParameterError, match="num_pages"):
        LLM(folder, numerics="float32", num_pages=10**13)
    empty = tmp_path / "none.jsonl"
    empty.write_text("\n")
    with pytest.raises(ParameterError, match="holds none"):
        read_problems(empty)
    with pytest.raises(ParameterError, match="limit"):
        read_problems(Path(__file__).parents[2] / "src/firesteel/eval/data/gsm_symbolic.jsonl", 0)
    for flag, value in (
        ("--gpu-gib", "nan"),
        ("--gpu-gib", "1e400"),
        ("--max-model-len", "-3"),
        ("--tp", "0"),
    ):
        assert main(["inspect", str(folder), "--plan", flag, value]) == 2
