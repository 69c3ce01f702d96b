"""Where an answer ends inside a block: text, ids, log-probabilities, usage and reason are plain decoding's.

The drafter is told the answer, so blocks are full and the cut falls on every depth of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firesteel.bench.exact import fastest
from firesteel.bench.toys import script, toy_config
from firesteel.config import SamplingParams
from firesteel.engine.llm import LLM
from firesteel.engine.output import Completion
from firesteel.models.deepseek_v4.random_init import write_random
from firesteel.tokenizer import FIRST_BYTE, byte_tokenizer

K, LENGTH, CUTS = 4, 24, 11  # the first anchor, then two whole blocks of K + 1
PROMPT = "To be"
LETTERS = tuple(FIRST_BYTE + b for b in range(32, 127))
SAME = ("text", "token_ids", "finish_reason", "stop_reason", "logprobs", "usage", "error")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_random(tmp_path_factory.mktemp("truncation") / "model", toy_config(vocab_size=512), 5)
    byte_tokenizer(512).save(path)
    return path


def engine(folder: Path, k: int = 0, **settings: Any) -> LLM:
    common: dict[str, Any] = {
        "numerics": "float32",
        "backend": fastest(),
        "max_model_len": 128,
        "max_num_seqs": 64,
        "debug_poison": bool(k),
    }
    return LLM(folder, speculative={"num_speculative_tokens": k} if k else None, **(common | settings))


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return engine(folder)


def base(seed: int, **changes: Any) -> SamplingParams:
    """Printable text at temperature 1."""
    values: dict[str, Any] = {
        "max_tokens": LENGTH,
        "temperature": 1.0,
        "seed": seed,
        "allowed_token_ids": LETTERS,
        "logprobs": 2,
        "ignore_eos": True,
    }
    return SamplingParams(**(values | changes))


@pytest.fixture(scope="module")
def answer(plain: LLM) -> Completion:
    """An answer whose tokens up to the last cut, and pairs of them, occur nowhere before."""
    for seed in range(200):
        found = plain.generate(PROMPT, base(seed))[0]
        if len(set(found.token_ids[: CUTS + 1])) == CUTS + 1:
            return found
    raise AssertionError("no seed with distinct tokens: the test needs another checkpoint")


def told(llm: LLM, answer: Completion, wrong: float = 0.0) -> LLM:
    """``llm`` with a drafter that knows the answer."""
    prompt = llm.frontend.encode(PROMPT)
    script(llm, [prompt], [base(answer.seed)], [answer], wrong)
    return llm


def both(
    plain: LLM, quick: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams]
) -> list[tuple[Completion, Completion]]:
    """(plain, speculative) answers, equal in everything that a caller sees."""
    pairs = list(
        zip(
            plain.generate(list(prompts), list(params)),
            quick.generate(list(prompts), list(params)),
            strict=True,
        )
    )
    for (a, b), p in zip(pairs, params, strict=True):
        for name in SAME:
            assert getattr(a, name) == getattr(b, name), (name, p)
        assert b.logprobs is not None and len(b.logprobs) == len(b.token_ids)
        assert b.usage["completion_tokens"] == len(b.token_ids)
    return pairs


def variants(kind: str, answer: Completion) -> list[SamplingParams]:
    """One request per index at which the answer is cut."""
    ids, text = answer.token_ids, answer.text
    make = {
        "stop id": lambda i: {"stop_token_ids": (ids[i],)},
        "stop string": lambda i: {"stop": (text[max(i - 1, 0) : i + 1],)},
        "stop string kept": lambda i: {
            "stop": (text[max(i - 2, 0) : i + 1],),
            "include_stop_str_in_output": True,
        },
        "max tokens": lambda i: {"max_tokens": i + 1},
        "all at once": lambda i: {"stop_token_ids": (ids[i],), "stop": (text[i],), "max_tokens": i + 1},
    }[kind]
    return [base(answer.seed, **make(i)) for i in range(CUTS)]


REASONS = {"max tokens": "length"}


@pytest.mark.parametrize("kind", ("stop id", "stop string", "stop string kept", "max tokens", "all at once"))
def test_every_index(kind: str, folder: Path, plain: LLM, answer: Completion) -> None:
    quick = told(engine(folder, K), answer)
    params = variants(kind, answer)
    for i, (_, b) in enumerate(both(plain, quick, [PROMPT] * CUTS, params)):
        assert len(b.token_ids) == i + 1
        assert b.finish_reason == REASONS.get(kind, "stop")
        assert b.stats["steps"] <= 1 + -(-i // (K + 1)) + 2  # blocks were full; stop strings end late
    quick.engine.scheduler.check()


def test_eos_at_every_index(folder: Path, plain: LLM, answer: Completion) -> None:
    """The model's own end token, which is not reported as a stop reason; and ignored if asked for."""
    quick = told(engine(folder, K), answer)
    usual = plain.engine.eos_ids
    try:
        for i in range(CUTS):
            plain.engine.eos_ids = quick.engine.eos_ids = (answer.token_ids[i],)
            params = [base(answer.seed, ignore_eos=False), base(answer.seed)]
            (_, ended), (_, ignored) = both(plain, quick, [PROMPT] * 2, params)
            assert (len(ended.token_ids), ended.finish_reason, ended.stop_reason) == (i + 1, "stop", None)
            assert ignored.token_ids == answer.token_ids
    finally:
        plain.engine.eos_ids = usual


def test_model_length_at_every_index(folder: Path, answer: Completion) -> None:
    """The last position of the model falls on every depth of a block."""
    length = len(PROMPT) + CUTS
    short, quick = (engine(folder, k, max_model_len=length) for k in (0, K))
    told(quick, answer)
    prompt = list(short.frontend.encode(PROMPT))
    prompts = [[*prompt, *answer.token_ids[:i]] for i in range(CUTS)]
    for i, (_, b) in enumerate(both(short, quick, prompts, [base(answer.seed)] * CUTS)):
        assert (len(b.token_ids), b.finish_reason) == (CUTS - i, "length")
        assert b.token_ids == answer.token_ids[i:CUTS]


@pytest.mark.parametrize("wrong", (0.0, 0.3))
def test_continuing_from_a_cut(folder: Path, plain: LLM, answer: Completion, wrong: float) -> None:
    """Prompt plus partial output under the same seed goes on as the longer run did."""
    quick = told(engine(folder, K), answer, wrong)
    prompt = list(plain.frontend.encode(PROMPT))
    cuts = range(1, CUTS + 1)
    prompts = [[*prompt, *answer.token_ids[:i]] for i in cuts]
    params = [base(answer.seed, max_tokens=LENGTH - i) for i in cuts]
    for i, (_, b) in zip(cuts, both(plain, quick, prompts, params), strict=True):
        assert b.token_ids == answer.token_ids[i:]
        assert answer.logprobs is not None and b.logprobs == answer.logprobs[i:]
        assert answer.text[:i] + b.text == answer.text


def test_minimum_length_bans_early_stops(folder: Path, plain: LLM, answer: Completion) -> None:
    """Below ``min_tokens`` stop ids are banned and stop strings are not looked for, in blocks too."""
    quick = told(engine(folder, K), answer)
    ids, text = answer.token_ids, answer.text
    params = [base(answer.seed, min_tokens=i, stop_token_ids=(ids[3], ids[6])) for i in range(CUTS)]
    params += [base(answer.seed, min_tokens=i, stop=(text[3], text[6])) for i in range(CUTS)]
    lengths = {len(b.token_ids) for _, b in both(plain, quick, [PROMPT] * len(params), params)}
    assert {4, 7} <= lengths and max(lengths) > 8


def test_stop_strings_at_other_widths(folder: Path, plain: LLM, answer: Completion) -> None:
    """A stop string that begins in one block and ends in the next, and others, at K = 1, 2, 3 and 7."""
    params = variants("stop string kept", answer)
    for k in (1, 2, 3, 7):
        both(plain, told(engine(folder, k), answer), [PROMPT] * CUTS, params)


def test_streamed_text_is_the_text(folder: Path, plain: LLM, answer: Completion) -> None:
    """Pieces of a stream never take anything back, whatever a block brings."""
    quick = told(engine(folder, K), answer)
    for i in (2, 5, 9):
        params = base(answer.seed, stop=(answer.text[i - 1 : i + 1],))
        *pieces, done = quick.stream(PROMPT, params)
        assert isinstance(done, Completion)
        assert "".join(str(p) for p in pieces) == done.text == plain.generate(PROMPT, params)[0].text


@pytest.mark.parametrize("proposal", ("dense", "one_hot"))
def test_rejection_at_zero_temperature(folder: Path, plain: LLM, proposal: str) -> None:
    """The classical rule cuts at the same places."""
    greedy = replace(base(1), temperature=0.0)
    whole = plain.generate(PROMPT, greedy)[0]
    spec = {"num_speculative_tokens": K, "acceptance": "rejection", "proposal": proposal}
    quick = LLM(folder, numerics="float32", backend=fastest(), max_model_len=128, speculative=spec)
    script(quick, [quick.frontend.encode(PROMPT)], [greedy], [whole])
    params = [replace(greedy, stop_token_ids=(t,)) for t in dict.fromkeys(whole.token_ids[:CUTS])]
    params += [replace(greedy, max_tokens=i + 1) for i in range(CUTS)]
    both(plain, quick, [PROMPT] * len(params), params)


def test_drafts_of_an_ended_request_stay_with_it(folder: Path, plain: LLM, answer: Completion) -> None:
    """The next owner of a slot, admitted in the step after, sees nothing of its last block."""
    quick = told(engine(folder, K, max_num_seqs=2), answer)
    params = [base(answer.seed, stop_token_ids=(answer.token_ids[i],)) for i in (1, 3, 2, 6, 0, 4)]
    both(plain, quick, [PROMPT, "x", PROMPT, "yz", PROMPT, PROMPT], params)
    quick.engine.scheduler.check()
