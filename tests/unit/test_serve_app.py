"""The routes over an engine that says what the test wants: formats, errors, limits, never a 5xx for a bad body."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firesteel.models.deepseek_v4.chat import encode_messages
from firesteel.serve.app import ServeOptions
from firesteel.serve.client import EngineState
from firesteel.serve.messages import params_of
from oracles.serve_bench import TOKENIZER, Bench, Script, bench_of

INVOKE = (
    '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="city" string="true">Zürich</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">[1, 2]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
)
CALL = f"<｜DSML｜tool_calls>\n{INVOKE}</｜DSML｜tool_calls>"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"city": {}, "days": {}}}}}
HELLO = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save(path)
    return path


@pytest.fixture
def bench(folder: Path) -> Iterator[Bench]:
    yield from bench_of(folder, ServeOptions(names=("v4", "other"), max_request_bytes=100_000))


def merged(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A chat's chunks put together as a client does it."""
    out: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None, "roles": 0}
    for choice in (c for e in events for c in e["choices"] if c["index"] == index):
        delta = choice["delta"]
        out["roles"] += "role" in delta
        out["content"] += delta.get("content") or ""
        out["reasoning"] += delta.get("reasoning") or ""
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(out["calls"]):
                assert call["id"].startswith("call_") and call["type"] == "function"
                out["calls"].append([call["function"]["name"], ""])
            out["calls"][call["index"]][1] += call["function"]["arguments"]
        if choice["finish_reason"]:
            assert out["finish"] is None
            out["finish"] = choice["finish_reason"]
    return out


# ---- chats -----------------------------------------------------------------------
OFF = {"chat_template_kwargs": {"thinking": False}}
THINKS = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U1"},
    {"role": "assistant", "reasoning_content": "R1", "content": "A1"},
    {"role": "user", "content": [{"type": "text", "text": "U2"}]},
]
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
GOLDEN: dict[str, tuple[dict[str, Any], str]] = {
    "chat": ({"messages": HELLO, **OFF}, f"{BOS}<｜User｜>Hello<｜Assistant｜></think>"),
    "effort none": ({"messages": HELLO, "reasoning_effort": "none"}, f"{BOS}<｜User｜>Hello<｜Assistant｜></think>"),
    "thinking, low": ({"messages": HELLO, "reasoning_effort": "low"}, f"{BOS}<｜User｜>Hello<｜Assistant｜><think>"),
    "old reasoning dropped": (
        {"messages": THINKS, "reasoning_effort": "low"},
        f"{BOS}S<｜User｜>U1<｜Assistant｜></think>A1{EOS}<｜User｜>U2<｜Assistant｜><think>",
    ),
    "old reasoning kept": (
        {"messages": THINKS, "reasoning_effort": "low", "chat_template_kwargs": {"drop_thinking": False}},
        f"{BOS}S<｜User｜>U1<｜Assistant｜><think>R1</think>A1{EOS}<｜User｜>U2<｜Assistant｜><think>",
    ),
    "title task": (
        {"messages": [{"role": "user", "content": "q", "task": "title"}], **OFF},
        f"{BOS}<｜User｜>q<｜title｜>",
    ),
    "continued": (
        {"messages": [*HELLO, {"role": "assistant", "content": "Well"}], "continue_final_message": True,
         "add_generation_prompt": False, **OFF},
        f"{BOS}<｜User｜>Hello<｜Assistant｜></think>Well",
    ),
    "DeepSeek's switch": (
        {"messages": HELLO, "thinking": {"type": "disabled"}},
        f"{BOS}<｜User｜>Hello<｜Assistant｜></think>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_prompts(bench: Bench, name: str) -> None:
    body, prompt = GOLDEN[name]
    assert bench.http.post(CHAT, json=body).status_code == 200
    assert bench.prompt == prompt


def test_thinks_hard_by_default_and_shows_tools(bench: Bench) -> None:
    bench.http.post(CHAT, json={"messages": HELLO, "tools": [TOOL]})
    assert bench.prompt == encode_messages(HELLO, True, "high", [TOOL])
    bench.http.post(CHAT, json={"messages": HELLO, "tools": [TOOL], "tool_choice": "none"})
    assert bench.prompt == encode_messages(HELLO, True, "high")


def test_whole_answer(bench: Bench) -> None:
    bench.engine.script.parts = ["because", "</thi", "nk>Yes", "."]
    body = bench.http.post(CHAT, json={"messages": HELLO, "seed": 7, "return_stats": True}).json()
    choice = body["choices"][0]
    assert (
        body["object"] == "chat.completion" and body["model"] == "v4" and body["id"].startswith("chatcmpl-")
    )
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "reasoning": "because"}
    assert (choice["finish_reason"], choice["seed"], choice["stats"]["accepted"]) == ("stop", 7, 3)
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(bench.engine.added[-1]["prompt"])
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    hidden = bench.http.post(CHAT, json={"messages": HELLO, "include_reasoning": False}).json()
    assert "reasoning" not in hidden["choices"][0]["message"]


@pytest.mark.parametrize("cut", [1, 3, 7, 1000])
@pytest.mark.parametrize("more", [{}, {"one_token_per_chunk": True}, {"n": 2}])
def test_tool_calls_streamed_and_whole(bench: Bench, cut: int, more: dict[str, Any]) -> None:
    text = "why</think>Look.\n\n" + CALL
    bench.engine.script.parts = [text[i : i + cut] for i in range(0, len(text), cut)]
    body = {"messages": HELLO, "tools": [TOOL], **more}
    events = bench.events(CHAT, body)
    got = merged(events)
    arguments = '{"city": "Zürich", "days": [1, 2]}'
    assert got == {
        "content": "Look.", "reasoning": "why", "calls": [["f", arguments]], "finish": "tool_calls", "roles": 1,
    }  # fmt: skip
    assert "DSML" not in json.dumps(events, ensure_ascii=False)
    choice = bench.http.post(CHAT, json=body).json()["choices"][-1]
    message = choice["message"]
    assert (message["content"], message["reasoning"], choice["finish_reason"]) == (
        "Look.",
        "why",
        "tool_calls",
    )
    assert [c["function"] for c in message["tool_calls"]] == [{"name": "f", "arguments": arguments}]


def test_truncated_call_ends_by_length(bench: Bench) -> None:
    bench.engine.script = Script(["</think>" + CALL.partition("ch</")[0]], "length")
    choice = bench.http.post(CHAT, json={"messages": HELLO, "tools": [TOOL]}).json()["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"city": "Züri'}


def test_calls_that_are_not_wanted(bench: Bench) -> None:
    bench.engine.script.parts = ["</think>A\n\n" + CALL.replace(INVOKE, 2 * INVOKE)]
    for more, calls, finish in (
        ({}, 2, "tool_calls"),
        ({"parallel_tool_calls": False}, 1, "tool_calls"),
        ({"tool_choice": "none"}, 0, "stop"),
    ):
        choice = bench.http.post(CHAT, json={"messages": HELLO, "tools": [TOOL], **more}).json()["choices"][0]
        assert (len(choice["message"].get("tool_calls", ())), choice["finish_reason"]) == (calls, finish)


def test_usage_in_streams(bench: Bench) -> None:
    events = bench.events(CHAT, {"messages": HELLO, "stream_options": {"include_usage": True}})
    assert all("usage" not in e for e in events[:-1]) and events[-1]["choices"] == []
    whole = bench.http.post(CHAT, json={"messages": HELLO}).json()["usage"]
    assert events[-1]["usage"] == whole
    always = {"include_usage": True, "continuous_usage_stats": True}
    events = bench.events(CHAT, {"messages": HELLO, "stream_options": always})
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts) and counts[-1] == whole["completion_tokens"]


def test_chat_logprobs(bench: Bench) -> None:
    bench.engine.script.parts = ["é", "x"]
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 1, **OFF}
    whole = bench.http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    assert [e["bytes"] for e in whole] == [[0xC3], [0xA9], [ord("x")]]
    assert whole[2] == {
        "token": "x", "logprob": -0.5, "bytes": [120],
        "top_logprobs": [{"token": "x", "logprob": -0.5, "bytes": [120]}],
    }  # fmt: skip
    streamed = [c["logprobs"] for e in bench.events(CHAT, body) for c in e["choices"]]
    assert [entry for part in streamed if part for entry in part["content"]] == whole


def test_one_token_per_chunk(bench: Bench) -> None:
    bench.engine.script.parts = ["abé", "d"]
    more = {"one_token_per_chunk": True, "return_token_ids": True}
    chunks = [c for e in bench.events(CHAT, {"messages": HELLO, **OFF, **more}) for c in e["choices"]]
    assert [len(c["token_ids"]) for c in chunks if c.get("token_ids")] == [1] * 5
    chunks = [c for e in bench.events(COMPLETIONS, {"prompt": "p", **more}) for c in e["choices"]]
    assert [c["text"] for c in chunks] == ["a", "b", "", "é", "d"]
    assert [len(c["token_ids"]) for c in chunks] == [1] * 5


# ---- completions -------------------------------------------------------------------
def test_completion_prompts(bench: Bench) -> None:
    def sent(**body: Any) -> list[list[int]]:
        del bench.engine.added[:]
        assert bench.http.post(COMPLETIONS, json=body).status_code == 200
        return [m["prompt"] for m in bench.engine.added]

    hi = TOKENIZER.encode("hi")
    assert sent(prompt="hi") == [[0, *hi]] == sent(prompt=BOS + "hi")
    assert sent(prompt="hi", add_special_tokens=False) == [hi] == sent(prompt=hi)
    assert sent(prompt=["hi", "ho"], n=2) == [[0, *hi], [0, *TOKENIZER.encode("ho")]]
    assert sent(prompt=[[5, 6], [7]]) == [[5, 6], [7]]
    assert params_of(bench.engine.added[0]["params"]).max_tokens == 16


def test_completion_choices_are_numbered_by_prompt(bench: Bench) -> None:
    body = bench.http.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 2}).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    seeds = [c["seed"] for c in body["choices"]]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3], "a prompt's samples share a seed, prompts do not"
    assert body["usage"]["prompt_tokens"] == 4, "each prompt counts once"
    assert {c["text"] for c in body["choices"]} == {"Hi there"}


# ---- errors --------------------------------------------------------------------------
BAD: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "no messages": (CHAT, {}, "messages"),
    "empty messages": (CHAT, {"messages": []}, "messages"),
    "message is text": (CHAT, {"messages": ["x"]}, "messages"),
    "unknown role": (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages"),
    "image": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    "assistant last": (CHAT, {"messages": [*HELLO, {"role": "assistant", "content": "x"}]}, "messages"),
    "nothing to continue": (CHAT, {"messages": HELLO, "continue_final_message": True}, "continue_final_message"),
    "yaml mode": (CHAT, {"messages": HELLO, "response_format": {"type": "yaml"}}, "response_format"),
    "no schema": (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format"),
    "two forms": (CHAT, {"messages": HELLO, "guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    "form of a choice": (CHAT, {"messages": HELLO, "guided_choice": [""]}, "guided_choice"),
    "endless form": (COMPLETIONS, {"prompt": "x", "ignore_eos": True, "guided_regex": "a"}, "ignore_eos"),
    "forced call": (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
    "unknown call": (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": {
        "type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
    "named call": (CHAT, {"messages": HELLO, "tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    "auto without tools": (CHAT, {"messages": HELLO, "tool_choice": "auto"}, "tool_choice"),
    "tool without name": (CHAT, {"messages": HELLO, "tools": [{"function": {}}]}, "tools"),
    "old functions": (CHAT, {"messages": HELLO, "functions": [{"name": "f"}]}, "functions"),
    "effort": (CHAT, {"messages": HELLO, "reasoning_effort": "huge"}, "reasoning_effort"),
    "template key": (CHAT, {"messages": HELLO, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
    "unknown field": (CHAT, {"messages": HELLO, "temprature": 0.5}, "temprature"),
    "thinking budget": (CHAT, {"messages": HELLO, "thinking_token_budget": -5}, "thinking_token_budget"),
    "top without logprobs": (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    "options without stream": (CHAT, {"messages": HELLO, "stream_options": {}}, "stream_options"),
    "two limits": (CHAT, {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    "surrogate": (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    "temperature": (COMPLETIONS, {"prompt": "x", "temperature": -1}, "temperature"),
    "wrong type": (COMPLETIONS, {"prompt": "x", "temperature": "hot"}, "temperature"),
    "boolean number": (COMPLETIONS, {"prompt": "x", "max_tokens": True}, "max_tokens"),
    "greedy n": (COMPLETIONS, {"prompt": "x", "temperature": 0, "n": 2}, "n"),
    "samples": (COMPLETIONS, {"prompt": ["x"] * 40, "n": 128}, "prompt"),
    "logprobs": (COMPLETIONS, {"prompt": "x", "logprobs": 99}, "logprobs"),
    "bias key": (COMPLETIONS, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias"),
    "empty stop": (COMPLETIONS, {"prompt": "x", "stop": [""]}, "stop"),
    "seed": (COMPLETIONS, {"prompt": "x", "seed": -1}, "seed"),
    "empty prompt list": (COMPLETIONS, {"prompt": []}, "prompt"),
    "prompt of mixed kinds": (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
    "token out of range": (COMPLETIONS, {"prompt": [512]}, "prompt"),
    "suffix": (COMPLETIONS, {"prompt": "x", "suffix": "y"}, "suffix"),
    "streamed prompt scores": (COMPLETIONS, {"prompt": "x", "stream": True, "echo": True, "logprobs": 1}, "echo"),
    "tokenize both": ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
    "detokenize range": ("/detokenize", {"tokens": [-1]}, "tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_bodies_name_the_field(bench: Bench, name: str) -> None:
    path, body, param = BAD[name]
    reply = bench.http.post(path, content=json.dumps(body))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param and error["type"] == "invalid_request_error" and error["message"]


def test_harmless_fields_and_neutral_values_pass(bench: Bench) -> None:
    body = {
        "messages": HELLO, "user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "best_of": 1,
        "use_beam_search": False, "skip_special_tokens": True, "modalities": ["text"], "frobnicate": None,
        "response_format": {"type": "text"}, "model": "other", "stop": None, "logit_bias": None,
    }  # fmt: skip
    reply = bench.http.post(CHAT, json=body)
    assert reply.status_code == 200 and reply.json()["model"] == "other"


def test_parameters_reach_the_engine(bench: Bench) -> None:
    body = {
        "prompt": "x", "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "n": 2, "max_tokens": 9,
        "min_tokens": 2, "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "stop": "END",
        "stop_token_ids": [9], "logit_bias": {"5": -100}, "bad_words": ["no"], "ignore_eos": True, "cache_salt": "s",
        "priority": -2, "speculative": False, "max_draft_tokens": 2, "include_stop_str_in_output": True,
        "allowed_token_ids": [5, 6],
    }  # fmt: skip
    assert bench.http.post(COMPLETIONS, json=body).status_code == 200
    params = params_of(bench.engine.added[-1]["params"])
    same = {k: v for k, v in body.items() if k not in ("prompt", "stop", "logit_bias")}
    assert {k: getattr(params, k) for k in same} == {
        k: tuple(v) if isinstance(v, list) else v for k, v in same.items()
    }
    assert params.stop == ("END",) and params.logit_bias == {5: -100.0}


def test_not_json(bench: Bench) -> None:
    for content in (b"", b"[", b"[]", b"\xff", b"null", b'{"a":' + b"[" * 50_000, b"1" * 5000):
        for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
            assert bench.http.post(path, content=content).status_code == 400


def test_unknown_model_path_and_method(bench: Bench) -> None:
    for reply, status in (
        (bench.http.post(CHAT, json={"messages": HELLO, "model": "gpt"}), 404),
        (bench.http.get("/v1/models/gpt"), 404),
        (bench.http.get("/nowhere"), 404),
        (bench.http.get(CHAT), 405),
    ):
        assert reply.status_code == status and reply.json()["error"]["message"]


def test_size_limit(bench: Bench) -> None:
    big = {"prompt": "x" * 200_000}
    assert bench.http.post(COMPLETIONS, json=big).status_code == 413

    def parts() -> Iterator[bytes]:
        yield from [b" " * 10_000] * 20

    assert bench.http.post(COMPLETIONS, content=parts()).status_code == 413, "without a length, too"


def test_queue_full_and_internal_refusals(bench: Bench) -> None:
    bench.engine.script.refuse = ("full", "too many wait")
    for more in ({}, {"stream": True}):
        reply = bench.http.post(COMPLETIONS, json={"prompt": "x", **more})
        assert reply.status_code == 429 and int(reply.headers["retry-after"]) >= 1
    bench.engine.script.refuse = ("internal", "KeyError: 5")
    assert bench.http.post(COMPLETIONS, json={"prompt": "x"}).status_code == 500


def test_one_refused_prompt_ends_the_others(bench: Bench) -> None:
    reply = bench.http.post(COMPLETIONS, json={"prompt": [[5], [600]]})
    assert reply.status_code == 400 and bench.engine.open_requests == 0


def test_a_failed_sample(bench: Bench) -> None:
    bench.engine.script.finish = "error"
    reply = bench.http.post(CHAT, json={"messages": HELLO})
    assert reply.status_code == 500 and "logits" in reply.json()["error"]["message"]
    assert "chatcmpl-" in reply.json()["error"]["message"]
    assert "logits" in bench.events(CHAT, {"messages": HELLO})[-1]["error"]["message"]


def test_death_of_the_engine(bench: Bench) -> None:
    bench.engine.script.die = True
    events = bench.events(COMPLETIONS, {"prompt": "x"})
    assert events[0]["choices"][0]["text"] == "Hi " and events[-1]["error"]["code"] == "unavailable"
    for path in ("/health", "/ready"):
        assert bench.http.get(path).status_code == 503
    reply = bench.http.post(COMPLETIONS, json={"prompt": "x"})
    assert reply.status_code == 503 and "retry-after" in reply.headers
    assert "firesteel:engine_up 0.0" in bench.http.get("/metrics").text


def test_draining_and_starting(bench: Bench) -> None:
    assert bench.http.get("/ready").status_code == 200
    bench.server.draining = True
    assert bench.http.post(CHAT, json={"messages": HELLO}).status_code == 503
    assert bench.http.get("/ready").status_code == 503 and bench.http.get("/health").status_code == 200
    bench.server.draining = False
    bench.engine.state = EngineState.STARTING
    assert bench.http.get("/ready").status_code == 503 and bench.http.get("/health").status_code == 200


def test_keys(folder: Path) -> None:
    for bench in bench_of(folder, ServeOptions(api_keys=("one", "two"))):
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer three"}, 401),
            ({"authorization": "Basic one"}, 401),
            ({"authorization": "Bearer two"}, 200),
            ({"authorization": "bearer one"}, 200),
        ):
            reply = bench.http.get("/v1/models", headers=headers)
            assert reply.status_code == status
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert bench.http.get(path).status_code == 200, "probes carry no key"


def test_cors_is_off_unless_asked_for(bench: Bench, folder: Path) -> None:
    origin = {"origin": "https://a.example"}
    assert "access-control-allow-origin" not in bench.http.get("/v1/models", headers=origin).headers
    for open_bench in bench_of(folder, ServeOptions(cors_origins=("https://a.example",))):
        reply = open_bench.http.get("/v1/models", headers=origin)
        assert reply.headers["access-control-allow-origin"] == "https://a.example"


# ---- tokens, models, description --------------------------------------------------------
def test_tokenize_and_back(bench: Bench) -> None:
    body = bench.http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert (
        body["tokens"] == [0, *TOKENIZER.encode("hé")]
        and body["count"] == 4
        and body["max_model_len"] == 4096
    )
    assert body["token_strs"][:2] == [BOS, "h"]
    assert bench.http.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": BOS + "hé"}
    chat = bench.http.post("/tokenize", json={"messages": HELLO, **OFF}).json()
    assert TOKENIZER.decode(chat["tokens"], skip_special=False) == GOLDEN["chat"][1]
    info = bench.http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == (BOS, EOS)


def test_models_version_description(bench: Bench) -> None:
    models = bench.http.get("/v1/models").json()["data"]
    assert [m["id"] for m in models] == ["v4", "other"] and models[0]["max_model_len"] == 4096
    assert bench.http.get("/v1/models/other").json()["id"] == "other"
    assert bench.http.get("/version").json()["version"]
    paths = bench.http.get("/openapi.json").json()
    assert "max_draft_tokens" in paths["components"]["schemas"]["ChatRequest"]["properties"]


# ---- fuzz ---------------------------------------------------------------------------------
NAMES = st.sampled_from(
    ["messages", "prompt", "model", "tools", "stop", "n", "max_tokens", "temperature", "logit_bias", "stream", "seed",
     "stream_options", "response_format", "tool_choice", "chat_template_kwargs", "thinking", "reasoning", "logprobs",
     "top_logprobs", "echo", "tokens", "reasoning_effort", "role", "content", "type", "function", "name", "text",
     "tool_calls", "arguments", "properties", "task", "continue_final_message", "prompt_logprobs", "bad_words", "x"]
)  # fmt: skip
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "system", "tool", "text", "auto", "title", "\ud800", "v4"])
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=12,
)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool", "system"])}, optional={
    "content": VALUES, "tool_calls": VALUES, "tools": VALUES, "task": VALUES, "reasoning": VALUES, "prefix": VALUES,
})  # fmt: skip
BODIES = st.dictionaries(NAMES, VALUES, max_size=6)
START = st.sampled_from([{}, {"messages": HELLO}, {"prompt": "x"}, {"prompt": [5]}, {"tokens": [5]}])


@given(
    START,
    BODIES,
    st.lists(MESSAGE, max_size=3),
    st.sampled_from([CHAT, COMPLETIONS, "/tokenize", "/detokenize"]),
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fuzz_never_a_server_error(
    shared: Bench, start: dict[str, Any], body: dict[str, Any], messages: list[Any], path: str
) -> None:
    bench = shared
    whole = {**start, **({"messages": messages} if messages else {}), **body}
    reply = bench.http.post(path, content=json.dumps(whole))
    assert reply.status_code in (200, 400, 404), (reply.status_code, whole, reply.text)
    assert bench.engine.open_requests == 0


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Bench]:
    yield from bench_of(folder, ServeOptions(names=("v4",)))
