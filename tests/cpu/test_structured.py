"""Structured output and thinking budgets with speculation: valid, and the text of plain decoding.

Random models and drafters: the grammar alone keeps them on the rails.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from firesteel import LLM, SamplingParams
from firesteel.bench import structured as bench
from firesteel.bench.toys import script
from firesteel.config import ParameterError
from firesteel.engine.guide import Guide
from firesteel.models.deepseek_v4 import chat_strings
from firesteel.tokenizer import FIRST_BYTE, byte_tokenizer
from oracles.traffic import VOCAB, Alone, Episode, Report, Request, page_size, write_model

pytest.importorskip("llguidance")
EOS, K = 1, 7
THINK, END_THINK = (byte_tokenizer(VOCAB).id_of(t) for t in (chat_strings.THINK, chat_strings.END_THINK))
SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green"]},
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["color", "name", "age"],
    "additionalProperties": False,
}
TIGHT = {"json": SCHEMA, "disable_any_whitespace": True}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("structured") / "model", seed=4, agreement=0.9)


def engine(folder: Path, k: int = 0, **settings: Any) -> LLM:
    spec = {"num_speculative_tokens": k} if k else None
    return LLM(folder, max_model_len=512, speculative=spec, **{"debug_sync": True, **settings})


def ask(seed: int = 0, **values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120, "temperature": 1.0, "seed": seed, **values})


PROMPT = [5, 9, 33, THINK]


# ---- valid, and the same text ---------------------------------------------------------------
@pytest.mark.parametrize("settings", [{}, {"enable_adaptive_verification": True}], ids=("fixed", "adaptive"))
def test_twenty_schemas_with_thinking(folder: Path, settings: dict[str, Any]) -> None:
    plain = engine(folder, max_num_seqs=20)
    prompts, params, schemas = bench.requests_of(plain, 20, seed=2, budget=32)
    want = plain.generate(prompts, params)
    faults = [bench.answer_fault(d, s, END_THINK, 32) for d, s in zip(want, schemas, strict=True)]
    assert faults == [""] * 20
    spec = {"num_speculative_tokens": K, **settings}
    llm = LLM(folder, max_model_len=512, max_num_seqs=20, speculative=spec)
    llm.engine.runner.masks.threads.threads = 3  # threads walk the guides; the order of rows may not notice
    found = llm.generate(prompts, params)
    assert [d.token_ids for d in found] == [d.token_ids for d in want]
    assert [d.text for d in found] == [d.text for d in want]
    if not settings:
        assert sum(d.stats["accepted"] for d in found) > 0
        assert all(d.stats["verified"] for d in found), "speculation stays on"


@pytest.mark.parametrize("wrong", (0.0, 0.3))
def test_boundaries_inside_blocks(folder: Path, wrong: float) -> None:
    """Drafts that know the answer: the budget's end and the grammar's beginning fall into blocks, at any place."""
    params = [ask(i, structured_outputs=TIGHT, thinking_token_budget=i) for i in range(12)]
    prompts = [PROMPT] * len(params)
    want = engine(folder).generate(prompts, params)
    assert [d.token_ids.index(END_THINK) for d in want] == list(range(12))
    told = engine(folder, K, max_num_seqs=12)
    script(told, prompts, params, want, wrong)
    found = told.generate(prompts, params)
    assert [d.token_ids for d in found] == [d.token_ids for d in want]
    if not wrong:
        tokens = max(len(d.token_ids) for d in want)
        assert len(told.engine.records) <= tokens // (K + 1) + 4, "blocks are accepted whole"
    assert all(d.finish_reason == "stop" and d.token_ids[-1] == EOS for d in found)


def wishes() -> list[dict[str, Any]]:
    """Every kind of rule, next to requests without one."""
    return [
        {},
        {"structured_outputs": TIGHT},
        {"structured_outputs": {"regex": "[a-f]{3,40}"}, "thinking_token_budget": 3},
        {"structured_outputs": {"choice": ["red", "redder", "green"]}, "logprobs": 2},
        {"structured_outputs": {"grammar": 'start: ("ab" | "ba")+ "."'}, "thinking": False, "max_tokens": 30},
        {"structured_outputs": {"json_object": True}, "max_tokens": 25, "temperature": 0.7},
        {"thinking_token_budget": 5, "ignore_eos": True, "max_tokens": 40},
        {"thinking_token_budget": 0, "temperature": 0.0, "max_tokens": 12},
        {"structured_outputs": TIGHT, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2, "thinking": False},
        {"structured_outputs": TIGHT, "thinking_token_budget": 9, "n": 2, "temperature": 1.3},
    ]


def test_traffic_changes_no_text(folder: Path) -> None:
    """Random traffic: preemption, recomputation, chunks, prefix hits, aborts; each answer as when run alone."""
    report, page = Report(), 32
    with page_size(page):
        rng = random.Random(7)
        pool = []
        stem = [rng.randrange(FIRST_BYTE, VOCAB) for _ in range(3 * page)]
        for i, wish in enumerate(wishes() * 2):
            prompt = [*stem[: rng.choice((3, page - 1, page, 2 * page + 1))], 40 + i, THINK]
            pool.append(Request(tuple(prompt), ask(i, **wish)))
        alone = Alone(folder, max_model_len=512)
        for number, swap in enumerate((4.0, 0.0, 4.0)):
            settings: dict[str, Any] = {
                "max_model_len": 512,
                "num_pages": 12,
                "swap_gib": swap,
                "max_num_seqs": 6,
            }
            settings |= {"debug_poison": number == 2, "debug_sync": number == 2}
            settings |= {"max_num_batched_tokens": (40, 64, 17)[number]}
            settings |= {"speculative": {"num_speculative_tokens": (7, 3, 5)[number]}}
            episode = Episode(folder, random.Random(number), pool, report, **settings)
            for _ in range(90):
                episode.operate()
            episode.finish(alone)
            episode.ended.clear()  # whose answers hold their sequences
            assert not episode.llm.engine.runner.masks.guides, "a guide leaked"
    assert report.compared > 30 and report.aborted > 0
    assert report.preemptions > report.recomputes > 0
    assert report.cached_tokens > 0 and report.accepted > 0


def test_masks_act_before_truncation_and_logprobs_do_not_see_them(folder: Path) -> None:
    """top_k=1 keeps the best allowed token; log-probabilities are the model's own."""
    params = ask(structured_outputs={"choice": ["red", "green"]}, thinking=False, top_k=1, logprobs=1)
    done = engine(folder, 3).generate([[7, 8]], params)[0]
    assert done.text in ("red", "green") and done.logprobs is not None
    assert any(score.rank > 0 for score in done.logprobs)


# ---- where answers end -----------------------------------------------------------------------
@pytest.mark.parametrize("k", (0, K))
@pytest.mark.parametrize("tokens", (1, 4, 5, 12, 20))
def test_cut_off_by_the_limit(folder: Path, k: int, tokens: int) -> None:
    params = ask(3, structured_outputs=TIGHT, thinking_token_budget=4)
    whole, cut = (
        engine(folder, k).generate([PROMPT], SamplingParams(**{**vars(params), "max_tokens": n}))[0]
        for n in (120, tokens)
    )
    assert whole.finish_reason == "stop" and cut.finish_reason == "length"
    assert cut.token_ids == whole.token_ids[:tokens]


def test_a_final_state_allows_the_end_only(folder: Path) -> None:
    done = engine(folder, K).generate([[5]], [ask(i, structured_outputs={"regex": "abc"}) for i in range(1)])[
        0
    ]
    assert done.token_ids == (*(FIRST_BYTE + b for b in b"abc"), EOS) and done.text == "abc"


def test_the_model_may_think_less_than_its_budget(folder: Path) -> None:
    params = ask(1, thinking_token_budget=20, logit_bias={END_THINK: 12.0}, max_tokens=30)
    done = engine(folder, K).generate([PROMPT], params)[0]
    assert done.token_ids.index(END_THINK) < 20


def test_a_matcher_that_gives_up_fails_its_request_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engine(folder, 3)
    made = llm.frontend.guides.grammars
    assert made is not None
    original = made.matcher

    class Broken:
        error = ""

        def __init__(self, inner: Any):
            self.inner, self.left = inner, 6

        def mask(self) -> Any:
            self.left -= 1
            if self.left < 0:
                self.error = "too complex"
            return self.inner.mask() * (not self.error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    monkeypatch.setattr(
        made, "matcher", lambda wish: Broken(original(wish)) if wish.regex else original(wish)
    )
    params = [ask(1, structured_outputs={"regex": "[a-z]{50}"}), ask(2, structured_outputs=TIGHT), ask(3)]
    failed, good, free = llm.generate([[5, 6]] * 3, params)
    assert failed.finish_reason == "error" and failed.error == "structured_outputs: too complex"
    assert json.loads(good.text)["age"] <= 120 and free.finish_reason in ("stop", "length")


# ---- entry -----------------------------------------------------------------------------------
def test_rejection_refuses_by_name(folder: Path) -> None:
    llm = LLM(folder, max_model_len=512, speculative={"num_speculative_tokens": 3, "acceptance": "rejection"})
    for values in ({"structured_outputs": TIGHT}, {"thinking_token_budget": 3}):
        with pytest.raises(ParameterError, match=r"structured_outputs, thinking_token_budget: .*rejection"):
            llm.generate([PROMPT], ask(**values))
    assert llm.generate([PROMPT], ask(max_tokens=3))[0].token_ids
    llm.engine.scheduler.check()


def test_one_named_synchronisation_and_only_where_it_is_needed(folder: Path) -> None:
    llm = engine(folder, 3)
    llm.generate([[5, 6]], ask(max_tokens=6))
    assert "grammar drafts" not in llm.engine.stats()["syncs"]
    llm.generate([[5, 6]], ask(max_tokens=6, structured_outputs=TIGHT))
    assert 0 < llm.engine.stats()["syncs"]["grammar drafts"] <= 8


# ---- the tests can fail ----------------------------------------------------------------------
def test_a_guide_that_is_not_taken_back_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Guide, count: int) -> None:
        for _ in range(count):
            self._ahead.pop()
            self._before.pop()

    params = [ask(i, structured_outputs=TIGHT, thinking_token_budget=4) for i in range(4)]
    want = engine(folder).generate([PROMPT] * 4, params)
    monkeypatch.setattr(Guide, "_rollback", forgetful)
    told = engine(folder, K)
    script(told, [PROMPT] * 4, params, want, 0.3)
    found = told.generate([PROMPT] * 4, params)
    assert [d.token_ids for d in found] != [d.token_ids for d in want]
    assert any("sampled against its mask" in d.error for d in found)
