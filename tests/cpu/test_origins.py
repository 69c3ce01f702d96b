"""Where each token comes from: the engine's word agrees with its counters, the server passes it on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from firesteel import LLM, SamplingParams
from firesteel.config import EngineConfig
from firesteel.core import Origin
from firesteel.engine.build import build_engine
from firesteel.engine.frontend import Frontend
from firesteel.engine.output import Answer
from firesteel.models.deepseek_v4.random_init import tiny_config, write_random
from firesteel.serve.app import ServeOptions, create_app
from firesteel.serve.client import ThreadEngine
from firesteel.tokenizer import byte_tokenizer

pytestmark = pytest.mark.cpu

K = 3
SETTINGS = {
    "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "threads": 1,
    "speculative": {"method": "dspark", "num_speculative_tokens": K},
}  # fmt: skip
# letters only, so that every token has a text of its own
PLAIN = {"allowed_token_ids": list(range(3 + ord("a"), 3 + ord("z") + 1)), "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("origins") / "tiny"
    config = tiny_config(compress_ratios=(0, 4, 16), n_routed_experts=4)
    write_random(path, config, 11, agreement=0.9)
    byte_tokenizer(config.vocab_size).save(path)
    return path


def origins(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[Origin]]:
    """Of every answer, in order of the prompts."""
    seen: dict[int, Answer] = {}
    llm.generate(prompts, params, on_token=lambda a: seen.setdefault(a.request_id, a) and None)
    for answer in seen.values():
        assert len(answer.origins) == len(answer.ids)
    return [seen[rid].origins for rid in sorted(seen)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_origins_agree_with_the_counters(folder: Path, temperature: float) -> None:
    llm = LLM(folder, **SETTINGS)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    prompts = [[3, 70 + i, 75] for i in range(6)]
    answers: dict[int, Answer] = {}
    done = llm.generate(prompts, params, on_token=lambda a: answers.setdefault(a.request_id, a) and None)
    drafted_some = 0
    for answer, completion in zip((answers[r] for r in sorted(answers)), done, strict=True):
        groups = [list(g) for _, g in groupby(answer.origins, key=lambda o: o.step)]
        assert len(groups) == completion.stats["steps"]
        for group in groups:
            kinds = [o.drafted for o in group]
            assert kinds == sorted(kinds, reverse=True), "drafts come first"
            assert kinds.count(False) <= 1 and kinds.count(True) <= group[0].verified <= K
        # only the last step may have accepted more than it emitted: the length cut it
        drafted = sum(o.drafted for o in answer.origins)
        assert completion.stats["accepted"] - K <= drafted <= completion.stats["accepted"]
        drafted_some += drafted
        assert [g[0].step for g in groups] == sorted(g[0].step for g in groups)
    assert drafted_some > 0


def test_without_drafts_everything_is_sampled(folder: Path) -> None:
    llm = LLM(folder, **{**SETTINGS, "speculative": None})
    for told in origins(llm, [[3, 70], [3, 80]], SamplingParams(max_tokens=10, ignore_eos=True)):
        assert all(not o.drafted and o.verified == 0 for o in told)
        assert len({o.step for o in told}) == 10


def test_a_stop_string_cuts_them_too(folder: Path) -> None:
    llm = LLM(folder, **SETTINGS)
    params = SamplingParams(max_tokens=60, seed=1, stop=("a", "e", "i", "o"), temperature=1.0, **PLAIN)
    for told in origins(llm, [[3, 70 + i] for i in range(4)], params):
        assert told


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[TestClient]:
    config = EngineConfig.of(**SETTINGS)
    engine = ThreadEngine(lambda progress: Frontend(build_engine(folder, config, progress)))
    with TestClient(create_app(engine, ServeOptions(names=("tiny",)))) as client:
        while client.get("/ready").status_code != 200:
            pass
        yield client


def events(http: TestClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = http.post(path, json={**body, "stream": True})
    lines = [line for line in reply.text.split("\n\n") if line]
    return [json.loads(line[6:]) for line in lines[:-1]]


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_tells_what_the_response_tells(http: TestClient, path: str, one: bool) -> None:
    body: dict[str, Any] = {
        "max_tokens": 24,
        "seed": 5,
        "temperature": 1.0,
        "firesteel": {"tokens": True},
        **PLAIN,
    }
    body |= (
        {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    )
    body["one_token_per_chunk"] = one
    if "messages" in body:
        body["chat_template_kwargs"] = {"thinking": False}
    whole = http.post(path, json=body).json()["choices"][0]
    told = whole["firesteel"]["tokens"]
    text = whole["text"] if path == "/v1/completions" else whole["message"]["content"]
    assert len(told) == 24 and "".join(t["text"] for t in told) == text
    assert any(t["drafted"] for t in told) and not all(t["drafted"] for t in told)
    chunks = [c for e in events(http, path, body) for c in e["choices"]]
    streamed = [t for c in chunks for t in c.get("firesteel", {}).get("tokens", [])]
    for name in ("id", "text"):  # the steps of two runs differ in number
        assert [t[name] for t in streamed] == [t[name] for t in told]
    if one:
        assert all(len(c.get("firesteel", {}).get("tokens", [])) <= 1 for c in chunks)


def test_nothing_unless_asked(http: TestClient) -> None:
    body = {"prompt": "hi", "max_tokens": 4, **PLAIN}
    assert "firesteel" not in http.post("/v1/completions", json=body).json()["choices"][0]
    assert all("firesteel" not in c for e in events(http, "/v1/completions", body) for c in e["choices"])
    refused = http.post("/v1/completions", json={**body, "firesteel": {"tokenz": True}})
    assert refused.status_code == 400 and "firesteel" in refused.json()["error"]["message"]


def test_times_of_a_request(http: TestClient) -> None:
    body = {"prompt": "hi", "max_tokens": 4, "return_stats": True, **PLAIN}
    stats = http.post("/v1/completions", json=body).json()["choices"][0]["stats"]
    assert 0 <= stats["queue_seconds"] < stats["first_token_seconds"] <= stats["seconds"]
