"""The server over a real engine: what it answers is what the engine writes offline, streamed or not.

One model, one server, requests of every kind; the clients leave and the slots come back.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import BadRequestError, OpenAI
from starlette.testclient import TestClient

from firesteel import LLM, SamplingParams
from firesteel.config import EngineConfig
from firesteel.engine.build import build_engine
from firesteel.engine.frontend import Frontend
from firesteel.models.deepseek_v4.chat import encode_messages
from firesteel.models.deepseek_v4.random_init import tiny_config, write_random
from firesteel.serve.app import ServeOptions, create_app
from firesteel.serve.client import ThreadEngine
from firesteel.serve.parsing import Message, Parser
from firesteel.tokenizer import byte_tokenizer

SETTINGS = {
    "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 512, "threads": 1,
    "speculative": {"method": "dspark", "num_speculative_tokens": 3},
}  # fmt: skip
HELLO = [{"role": "user", "content": "Hello"}]
OFF = {"chat_template_kwargs": {"thinking": False}}
LETTERS = list(range(3 + ord("a"), 3 + ord("z") + 1))
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# letters only, so that every token has a text of its own
PLAIN = {"allowed_token_ids": LETTERS, "ignore_eos": True}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("server") / "tiny"
    config = tiny_config(compress_ratios=(0, 4, 16), n_routed_experts=4)
    write_random(path, config, 11, agreement=0.9)
    byte_tokenizer(config.vocab_size).save(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    """Offline, without speculation: what the server must agree with."""
    return LLM(folder, **{**SETTINGS, "speculative": None})


@dataclass
class Served:
    url: str
    engine: ThreadEngine
    http: TestClient

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = self.http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json())

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        reply = self.http.post(path, json={**body, "stream": True})
        assert reply.status_code == 200, reply.text
        lines = [line for line in reply.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]

    def settle(self, seconds: float = 20.0) -> None:
        """Wait until nothing runs; then nothing may be lost."""
        assert self.engine.worker is not None
        inner = self.engine.worker.engine
        deadline = time.monotonic() + seconds
        while inner.busy or self.engine.open_requests:
            assert time.monotonic() < deadline, f"still running: {inner.stats()}"
            time.sleep(0.01)
        assert inner.memory.free_slots == inner.memory.slots
        inner.scheduler.check()


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    """A real socket and, beside it, a client of the same application."""
    config = EngineConfig.of(**SETTINGS)
    engine = ThreadEngine(lambda progress: Frontend(build_engine(folder, config, progress)))
    app = create_app(engine, ServeOptions(names=("tiny",)))
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not (server.started and engine.info):
        assert thread.is_alive()
        time.sleep(0.02)
    url = f"http://127.0.0.1:{port}"
    import httpx2

    with httpx2.Client(base_url=url, timeout=60) as http:
        yield Served(url, engine, http)  # type: ignore[arg-type]
    server.should_exit = True
    thread.join(20)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def merged(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Completion chunks put together, by choice."""
    out: dict[int, dict[str, Any]] = {}
    for choice in (c for e in events for c in e["choices"]):
        whole = out.setdefault(
            choice["index"], {"text": "", "token_ids": [], "finish_reason": None, "tokens": []}
        )
        whole["text"] += choice["text"]
        whole["token_ids"] += choice["token_ids"]
        whole["finish_reason"] = choice["finish_reason"]
        whole["tokens"] += (choice["logprobs"] or {"tokens": []})["tokens"]
    return out


# ---- equal to offline -------------------------------------------------------------
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 20},
    "sampled": {"temperature": 0.9, "seed": 5, "max_tokens": 20},
    "top-p, penalties": {"top_p": 0.8, "frequency_penalty": 0.5, "seed": 6, "max_tokens": 16, **PLAIN},
    "stop string": {"stop": ["e", "zz"], "seed": 8, "max_tokens": 60, "logprobs": 0, **PLAIN},
    "stop string kept": {
        "stop": ["e"],
        "include_stop_str_in_output": True,
        "seed": 8,
        "max_tokens": 60,
        **PLAIN,
    },
    "three samples": {"n": 3, "seed": 9, "max_tokens": 12, "logprobs": 2},
    "one token per chunk": {"seed": 10, "max_tokens": 12, "one_token_per_chunk": True},
    "echo": {"seed": 11, "max_tokens": 5, "echo": True},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("speculative", [True, False])
def test_completions_equal_offline(served: Served, llm: LLM, name: str, speculative: bool) -> None:
    body = {**CASES[name], "speculative": speculative}
    params = SamplingParams.of(**{k: v for k, v in body.items() if k != "one_token_per_chunk"})
    assert llm.tokenizer is not None
    offline = llm.generate([[0, *llm.tokenizer.encode("Some prompt, ü")]], replace(params, n=1))[0]
    asked = {**body, "prompt": "Some prompt, ü", "return_token_ids": True, "return_stats": True}
    whole = served.post(COMPLETIONS, asked)
    first = whole["choices"][0]
    assert first["text"] == offline.text
    assert (
        tuple(first["token_ids"])
        == offline.token_ids[len(first["prompt_token_ids"]) if "echo" in body else 0 :]
    )
    assert first["finish_reason"] == offline.finish_reason and first["stop_reason"] == offline.stop_reason
    assert whole["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in whole["choices"])
    assert (first["stats"]["verified"] > 0) is speculative
    streamed = merged(served.events(COMPLETIONS, asked))
    for choice in whole["choices"]:
        got = streamed[choice["index"]]
        assert got["text"] == choice["text"] and got["token_ids"] == choice["token_ids"]
        assert got["finish_reason"] == choice["finish_reason"]
        if choice["logprobs"]:
            assert got["tokens"] == choice["logprobs"]["tokens"]
            assert len(got["tokens"]) == len(choice["token_ids"])
    served.settle()


def test_stop_string_ends_text_ids_scores_and_usage_together(served: Served) -> None:
    body = {**CASES["stop string"], "prompt": "Some prompt, ü", "return_token_ids": True}
    whole = served.post(COMPLETIONS, body)
    choice = whole["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] in ("e", "zz")
    count = len(choice["text"] + choice["stop_reason"])
    assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == count
    assert whole["usage"]["completion_tokens"] == count


@pytest.mark.parametrize("thinking", [True, False])
def test_chats_equal_offline(served: Served, llm: LLM, thinking: bool) -> None:
    more = {"seed": 3, "max_tokens": 24, "logit_bias": {str(i): 2.0 for i in LETTERS}}
    params = SamplingParams(seed=3, max_tokens=24, logit_bias=dict.fromkeys(LETTERS, 2.0))
    offline = llm.generate([encode_messages(HELLO, thinking, "low")], params)[0]
    parser, message = Parser(thinking), Message()
    message.take([*parser.feed(offline.text), *parser.finish(offline.finish_reason == "length")])
    mode = {"chat_template_kwargs": {"thinking": thinking}, "reasoning_effort": "low"}
    choice = served.post(CHAT, {"messages": HELLO, **more, **mode})["choices"][0]
    assert choice["message"]["content"] == message.content
    assert choice["message"].get("reasoning", "") == message.reasoning
    deltas = [
        c["delta"] for e in served.events(CHAT, {"messages": HELLO, **more, **mode}) for c in e["choices"]
    ]
    assert "".join(d.get("content") or "" for d in deltas) == message.content
    assert "".join(d.get("reasoning") or "" for d in deltas) == message.reasoning


def test_an_unasked_seed_is_told_and_repeats(served: Served) -> None:
    first = served.post(COMPLETIONS, {"prompt": "x", "max_tokens": 12})["choices"][0]
    again = served.post(COMPLETIONS, {"prompt": "x", "max_tokens": 12, "seed": first["seed"]})["choices"][0]
    other = served.post(COMPLETIONS, {"prompt": "x", "max_tokens": 12})["choices"][0]
    assert first["text"] == again["text"] and first["seed"] != other["seed"]


def test_loglikelihood_as_an_evaluation_harness_asks(served: Served, llm: LLM) -> None:
    """Token-id prompts, echo, one best alternative, one token too many."""
    prompts = [[0, 70, 80, 90, 100], [0, 75, 71]]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    choices = served.post(COMPLETIONS, body)["choices"]
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    for prompt, choice, offline in zip(prompts, choices, llm.generate(prompts, params), strict=True):
        table = choice["logprobs"]
        assert {len(column) for column in table.values()} == {len(prompt) + 1}
        assert table["token_logprobs"][0] is None and table["top_logprobs"][0] is None
        assert offline.prompt_logprobs is not None
        want = [s.logprob for s in offline.prompt_logprobs if s is not None]
        assert table["token_logprobs"][1:-1] == pytest.approx(want, abs=1e-6)
        best = [s.top[0][0] for s in offline.prompt_logprobs if s is not None]
        greedy = [b == t for b, t in zip(best, prompt[1:], strict=True)]
        tops = list(zip(table["tokens"], table["token_logprobs"], table["top_logprobs"], strict=True))[1:-1]
        assert [token == max(top, key=top.get) for token, _, top in tops] == greedy, "by text"
        assert [own == max(top.values()) for _, own, top in tops] == greedy, "by value"
        assert choice["text"].startswith("".join(t for t in table["tokens"][1:-1]))
        assert [
            choice["text"][o:].startswith(t)
            for t, o in zip(table["tokens"][1:-1], table["text_offset"][1:-1])
        ]
    alone = served.post(COMPLETIONS, {**body, "max_tokens": 0})["choices"][0]["logprobs"]
    assert alone["token_logprobs"] == choices[0]["logprobs"]["token_logprobs"][:-1]


def test_limits(served: Served) -> None:
    long = served.http.post(COMPLETIONS, json={"prompt": [5] * 600})
    assert long.status_code == 400 and long.json()["error"]["param"] == "prompt"
    most = [{"role": "user", "content": "x" * 480}]
    body = served.post(CHAT, {"messages": most, **OFF, "seed": 1, "ignore_eos": True})
    assert body["usage"]["total_tokens"] == 512, "without a limit it goes to the model's length"
    assert body["choices"][0]["finish_reason"] == "length"


def test_metrics_of_real_requests(served: Served) -> None:
    served.post(COMPLETIONS, {"prompt": "x", "max_tokens": 30, "ignore_eos": True})
    served.settle()
    time.sleep(0.3)
    text = served.http.get("/metrics").text
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line[0] != "#"
    }
    for name in (
        "generation_tokens_total", "prompt_tokens_total", "engine_steps_total", "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total", "time_to_first_token_seconds_count", "step_time_seconds_count",
        'spec_decode_num_draft_tokens_per_pos_total{position="0"}', 'request_success_total{finished_reason="length"}',
        'http_requests_total{route="/v1/completions",status="200"}', "request_queue_time_seconds_count",
    ):  # fmt: skip
        assert values[f"firesteel:{name}"] > 0, name
    assert values["firesteel:num_requests_running"] == 0 == values["firesteel:num_requests_waiting"]


# ---- clients ---------------------------------------------------------------------------
def test_openai_client(served: Served) -> None:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        assert [m.id for m in client.models.list()] == ["tiny"]
        ask: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 10, "seed": 4}
        whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2, extra_body=OFF)
        assert whole.usage is not None and whole.usage.completion_tokens <= 10
        assert whole.choices[0].logprobs is not None and whole.choices[0].logprobs.content
        parts = client.chat.completions.create(
            **ask, stream=True, stream_options={"include_usage": True}, extra_body=OFF
        )
        chunks = list(parts)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        done = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=4, n=2)
        assert len(done.choices) == 4
        form = {"name": "said", "schema": {"enum": ["yes", "no"]}, "strict": True}
        said = client.chat.completions.create(
            **ask, response_format={"type": "json_schema", "json_schema": form}, extra_body=OFF
        )
        assert json.loads(said.choices[0].message.content or "") in ("yes", "no")
        with pytest.raises(BadRequestError, match="response_format"):
            client.chat.completions.create(**ask, response_format={"type": "yaml"})


async def raw(url: str, path: str, body: dict[str, Any], read: int) -> bytes:
    """Send a request, read some bytes (-1: all) and leave."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    got = await (reader.read(-1) if read < 0 else reader.readexactly(read))
    writer.close()
    return got


ENDLESS = {"prompt": "x", "max_tokens": 480, "ignore_eos": True, "seed": 1}


def test_clients_that_leave_free_their_slots(served: Served) -> None:
    async def leave() -> None:
        streams = [raw(served.url, COMPLETIONS, {**ENDLESS, "stream": True}, 300) for _ in range(4)]
        whole = [raw(served.url, COMPLETIONS, {**ENDLESS, "n": 2}, 0) for _ in range(2)]
        await asyncio.gather(*streams, *whole)

    begun = time.monotonic()
    asyncio.run(leave())
    served.settle(5.0)
    assert time.monotonic() - begun < 5.0
    assert served.http.get("/health").status_code == 200


def test_many_streams_with_random_disconnects(served: Served, llm: LLM) -> None:
    """Every kept stream is the offline text, whoever else leaves."""
    dice = random.Random(1)
    bodies = [
        {
            "prompt": f"stream {i % 6}",
            "seed": i % 6,
            "max_tokens": 16,
            "stream": True,
            "return_token_ids": True,
        }
        for i in range(16)
    ]
    kept = [dice.random() < 0.6 for _ in bodies]

    async def run() -> list[bytes]:
        return await asyncio.gather(
            *(
                raw(served.url, COMPLETIONS, body, -1 if keep else dice.randrange(200, 900))
                for body, keep in zip(bodies, kept, strict=True)
            )
        )

    replies = asyncio.run(run())
    assert llm.tokenizer is not None
    want = [
        llm.generate([[0, *llm.tokenizer.encode(f"stream {i}")]], SamplingParams(seed=i, max_tokens=16))[0]
        for i in range(6)
    ]
    for i, (reply, keep) in enumerate(zip(replies, kept, strict=True)):
        if keep:
            lines = [line for line in reply.decode().splitlines() if line.startswith("data: {")]
            ids = [t for line in lines for t in json.loads(line[6:])["choices"][0]["token_ids"]]
            assert tuple(ids) == want[i % 6].token_ids
    served.settle()


def test_full_queue_and_a_dead_thread(folder: Path) -> None:
    config = EngineConfig.of(**{**SETTINGS, "max_num_seqs": 1, "max_waiting": 1, "speculative": None})
    engine = ThreadEngine(lambda progress: Frontend(build_engine(folder, config, progress)))
    with TestClient(create_app(engine)) as http:
        while engine.info is None:
            time.sleep(0.02)
        reply = http.post(
            COMPLETIONS, json={"prompt": ["a", "b", "c", "d"], "max_tokens": 300, "ignore_eos": True}
        )
        assert reply.status_code == 429 and reply.headers["retry-after"]
        assert http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 2}).status_code == 200
        assert engine.worker is not None
        engine.worker.inbox.put({"op": "nonsense"})  # a bug of ours ends the loop
        engine._thread.join(10)
        assert http.get("/health").status_code == 503


FIELDS = st.fixed_dictionaries(
    {"prompt": st.just("x") | st.lists(st.integers(-2, 520), max_size=3), "max_tokens": st.integers(-1, 3)},
    optional={
        "n": st.integers(0, 3), "temperature": st.floats() | st.sampled_from([0, 1]), "seed": st.integers(-1, 2**65),
        "stop": st.sampled_from(["a", "", ["b"], 5]), "logprobs": st.integers(-1, 22), "echo": st.booleans(),
        "top_p": st.floats(0, 1.1), "logit_bias": st.sampled_from([{"5": 1}, {"600": 1}, {"a": 1}, {"-1": 1}]),
        "max_draft_tokens": st.integers(-1, 9), "stop_token_ids": st.lists(st.integers(-1, 600), max_size=20),
        "prompt_logprobs": st.integers(-1, 3), "allowed_token_ids": st.lists(st.integers(0, 520), max_size=2),
        "min_tokens": st.integers(0, 4), "stream": st.booleans(), "priority": st.integers(-3, 3),
        "bad_words": st.sampled_from([["x"], [""], []]), "cache_salt": st.sampled_from(["", "a", 3]),
    },
)  # fmt: skip


@given(FIELDS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fuzz_of_parameters_never_a_server_error(served: Served, body: dict[str, Any]) -> None:
    reply = served.http.post(COMPLETIONS, content=json.dumps(body))
    assert reply.status_code in (200, 400), reply.text
    assert "error" not in reply.text or reply.status_code == 400, reply.text
