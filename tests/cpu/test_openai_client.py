"""The ``openai`` package as people use it: chats, streams, tools, schemas, log-probabilities, its exceptions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from openai import AsyncOpenAI, OpenAI

from firesteel.models.deepseek_v4.random_init import tiny_config, write_random
from firesteel.tokenizer import byte_tokenizer
from oracles.http_server import ThreadServer, thread_server

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 128, "max_model_len": 4096, "threads": 1,
    "speculative": {"method": "dspark", "num_speculative_tokens": 3},
}  # fmt: skip
HELLO: Any = [{"role": "user", "content": "Hello"}]
OFF = {"chat_template_kwargs": {"thinking": False}}
ASK: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "seed": 4}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "blue"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 12},
    },
    "required": ["colour", "size"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "paint", "description": "Paint it", "parameters": SCHEMA}}
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadServer]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("openai") / "tiny"
    config = tiny_config(compress_ratios=(0, 4, 16), n_routed_experts=4, max_position_embeddings=4096)
    write_random(path, config, 11, agreement=0.9)
    byte_tokenizer(config.vocab_size).save(path)
    with thread_server(path, SETTINGS) as server:
        yield server
    torch.set_num_threads(before)


@pytest.fixture
def client(served: ThreadServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client: OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"


def test_chat_streamed_and_whole_are_the_same(client: OpenAI) -> None:
    whole = client.chat.completions.create(**ASK, logprobs=True, top_logprobs=2, extra_body=OFF)
    choice = whole.choices[0]
    assert whole.usage is not None and choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == whole.usage.completion_tokens <= 12
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    options: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(**ASK, stream=True, stream_options=options, extra_body=OFF))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content and chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == choice.finish_reason


def test_reasoning_comes_through(client: OpenAI) -> None:
    """A field that the package does not know."""
    message = client.chat.completions.create(**ASK).choices[0].message
    assert message.model_extra is not None
    assert message.model_extra["reasoning"] and not message.content, "a random model never ends its reasoning"
    chunks = [c.choices[0].delta for c in client.chat.completions.create(**ASK, stream=True) if c.choices]
    parts = [(d.model_extra or {}).get("reasoning") or "" for d in chunks]
    assert "".join(parts) == message.model_extra["reasoning"]


def test_samples_seed_and_stop(client: OpenAI) -> None:
    many = client.chat.completions.create(**{**ASK, "n": 3}, extra_body=OFF)
    assert [c.index for c in many.choices] == [0, 1, 2]
    assert len({c.message.content for c in many.choices}) > 1, "samples differ"
    first = many.choices[0].message.content or ""
    again = client.chat.completions.create(**ASK, extra_body=OFF).choices[0]
    assert again.message.content == first, "the first of several is the one asked for alone"
    ids = client.completions.create(
        model="tiny", prompt=[5, 6, 7], max_tokens=4, seed=1, extra_body={"return_token_ids": True}
    )
    extra = ids.choices[0].model_extra or {}
    assert extra["prompt_token_ids"] == [5, 6, 7] and len(extra["token_ids"]) <= 4
    stopped = client.completions.create(
        model="tiny", prompt="x", max_tokens=200, seed=2, stop=["e"],
        extra_body={"allowed_token_ids": list(range(100, 125)), "ignore_eos": True},
    ).choices[0]  # fmt: skip
    assert stopped.finish_reason == "stop" and "e" not in stopped.text


def test_completions_echo_and_scores(client: OpenAI) -> None:
    done = client.completions.create(
        model="tiny", prompt=["ab", "c"], max_tokens=2, echo=True, logprobs=1, seed=1
    )
    for prompt, choice in zip(("ab", "c"), done.choices, strict=True):
        assert (
            prompt in choice.text
            and choice.logprobs is not None
            and choice.logprobs.token_logprobs is not None
        )
        assert choice.logprobs.token_logprobs[0] is None, "nothing predicts the first token"
        assert all(value <= 0 for value in choice.logprobs.token_logprobs[1:])


def test_json_schema(client: OpenAI) -> None:
    pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")
    form: Any = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        ask = {**ASK, "seed": seed, "max_tokens": 200, "response_format": form}
        choice = client.chat.completions.create(**ask, extra_body=OFF).choices[0]
        made = json.loads(choice.message.content or "")
        assert choice.finish_reason == "stop"
        assert (
            set(made) == {"colour", "size"} and made["colour"] in ("red", "blue") and 1 <= made["size"] <= 12
        )


def test_tools(client: OpenAI) -> None:
    """A forced call, whole and streamed; then its result goes back in."""
    pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")
    ask = {**ASK, "max_tokens": 400, "tools": TOOLS, "tool_choice": "required"}
    choice = client.chat.completions.create(**ask, extra_body=OFF).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
    call: Any = choice.message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "paint" and arguments["colour"] in ("red", "blue")
    parts = client.chat.completions.create(**ask, stream=True, extra_body=OFF)
    deltas = [t for c in parts if c.choices for t in c.choices[0].delta.tool_calls or [] if t.index == 0]
    assert json.loads("".join(t.function.arguments or "" for t in deltas if t.function)) == arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    more: Any = [*HELLO, choice.message.model_dump(exclude_none=True), result]
    after = client.chat.completions.create(**{**ASK, "messages": more}, tools=TOOLS, extra_body=OFF)
    assert after.usage is not None and after.usage.completion_tokens > 0


def test_async_client_leaves(served: ThreadServer) -> None:
    """Breaking out of a stream ends the request on the server."""

    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            ask = {**ASK, "max_tokens": 900, "stream": True}
            stream = await client.chat.completions.create(**ask, extra_body={**OFF, "ignore_eos": True})
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(run())
    served.settle(5)


def test_errors_are_the_packages_own(client: OpenAI, served: ThreadServer) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(**ASK, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(**{**ASK, "model": "gpt"})
    with pytest.raises(openai.BadRequestError, match="frobnicate"):
        client.chat.completions.create(**ASK, extra_body={"frobnicate": 1})
