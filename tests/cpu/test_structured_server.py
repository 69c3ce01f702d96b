"""Forms of answers over HTTP: response_format, structured_outputs, forced calls, thinking budgets."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from firesteel.config import EngineConfig, SamplingParams
from firesteel.engine.build import build_engine
from firesteel.engine.frontend import Frontend
from firesteel.models.deepseek_v4.random_init import tiny_config, write_random
from firesteel.serve.app import ServeOptions, create_app
from firesteel.serve.client import ThreadEngine
from firesteel.serve.messages import params_of, plain_params
from firesteel.serve.parsing import Message, Verbatim
from firesteel.tokenizer import byte_tokenizer

pytest.importorskip("llguidance")
SETTINGS = {
    "max_num_seqs": 8,
    "max_model_len": 2048,
    "threads": 1,
    "speculative": {"num_speculative_tokens": 7},
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 20}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {
            "city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"]}}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]  # fmt: skip
OFF = {"thinking": False}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("forms") / "tiny"
    config = tiny_config(compress_ratios=(0, 4, 16), n_routed_experts=4, max_position_embeddings=2048)
    write_random(path, config, 12, agreement=0.9)
    byte_tokenizer(config.vocab_size).save(path)
    return path


def client_of(folder: Path) -> Iterator[TestClient]:
    config = EngineConfig.of(**SETTINGS)
    engine = ThreadEngine(lambda progress: Frontend(build_engine(folder, config, progress)))
    with TestClient(create_app(engine, ServeOptions(names=("tiny",)))) as client:
        deadline = time.monotonic() + 60
        while client.get("/ready").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield client


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[TestClient]:
    yield from client_of(folder)


def post(http: TestClient, path: str, **body: Any) -> dict[str, Any]:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def message(http: TestClient, **body: Any) -> dict[str, Any]:
    choice = post(http, CHAT, **{"messages": HELLO, "max_tokens": 300, "seed": 1, **body})["choices"][0]
    return {**choice["message"], "finish_reason": choice["finish_reason"], "stats": choice.get("stats")}


def streamed(http: TestClient, **body: Any) -> Message:
    """A stream's deltas put together."""
    body = {"messages": HELLO, "max_tokens": 300, "seed": 1, "stream": True, **body}
    out = Message()
    for line in http.post(CHAT, json=body).text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            out.content += delta.get("content") or ""
            out.reasoning += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", ()):
                if call["function"].get("name"):
                    out.calls.append((call["function"]["name"], ""))
                name, arguments = out.calls[call["index"]]
                out.calls[call["index"]] = (name, arguments + call["function"]["arguments"])
    return out


def check_pet(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"kind", "age"} and value["kind"] in ("cat", "dog") and 0 <= value["age"] <= 20


@pytest.mark.parametrize("budget", (0, 12))
def test_json_schema_with_thinking(http: TestClient, budget: int) -> None:
    body = {"response_format": FORM, "thinking_token_budget": budget, "return_stats": True}
    said = message(http, **body)
    check_pet(said["content"])
    assert said["finish_reason"] == "stop" and said["stats"]["verified"] > 0
    assert message(http, **body, speculative=False)["content"] == said["content"]
    stream = streamed(http, **body)
    assert (stream.content, stream.reasoning) == (said["content"], said.get("reasoning", ""))
    usage = post(http, CHAT, messages=HELLO, max_tokens=300, seed=1, **body)["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == budget + 1


def test_the_schema_is_shown_to_the_model(http: TestClient) -> None:
    def count(**body: Any) -> int:
        return int(post(http, "/tokenize", messages=HELLO, **OFF, **body)["count"])

    assert count(response_format=FORM) > count() + len(json.dumps(SCHEMA))
    assert count(response_format={"type": "json_object"}) == count()


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, ("yes", "no")),
        ({"guided_choice": ["yes", "no"]}, ("yes", "no")),
        ({"guided_regex": "y|n"}, ("y", "n")),
        ({"structured_outputs": {"grammar": 'start: "y" | "n"'}}, ("y", "n")),
    ],
)
def test_other_forms_on_both_routes(http: TestClient, form: dict[str, Any], texts: tuple[str, ...]) -> None:
    assert message(http, **form, **OFF)["content"] in texts
    assert post(http, COMPLETIONS, prompt="a", seed=2, **form)["choices"][0]["text"] in texts


def test_json_forms_on_completions(http: TestClient) -> None:
    for form in (
        {"response_format": FORM},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    ):
        check_pet(post(http, COMPLETIONS, prompt="a", seed=3, max_tokens=200, **form)["choices"][0]["text"])
    text = post(http, COMPLETIONS, prompt="a", max_tokens=40, seed=3, response_format={"type": "json_object"})
    assert text["choices"][0]["text"].startswith("{")


# ---- calls --------------------------------------------------------------------------------
CALL = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 1200}


@pytest.mark.parametrize("thinking", (False, True))
def test_a_call_is_forced(http: TestClient, thinking: bool) -> None:
    body = {**CALL, "thinking": thinking, "parallel_tool_calls": False, "thinking_token_budget": 10}
    said = message(http, **body)
    assert said["content"] is None and len(said["tool_calls"]) == 1 and said["finish_reason"] == "tool_calls"
    function = said["tool_calls"][0]["function"]
    values = json.loads(function["arguments"])
    assert function["name"] in ("get_weather", "now")
    if function["name"] == "get_weather":
        assert len(values["city"]) <= 6 and 1 <= values["days"] <= 9
    assert streamed(http, **body).calls == [(function["name"], function["arguments"])]
    assert message(http, **body, speculative=False)["tool_calls"][0]["function"] == function


@pytest.mark.parametrize("name", ("get_weather", "now"))
def test_a_named_call(http: TestClient, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    said = message(http, **{**CALL, "tool_choice": choice}, **OFF)
    assert [c["function"]["name"] for c in said["tool_calls"]] == [name]
    assert set(json.loads(said["tool_calls"][0]["function"]["arguments"])) == (
        {"city", "days"} if name == "get_weather" else set()
    )


def test_a_cut_call_ends_by_length(http: TestClient) -> None:
    said = message(http, **{**CALL, "max_tokens": 100}, **OFF)
    assert said["finish_reason"] == "length"


def test_a_form_or_a_call(http: TestClient) -> None:
    """Tools that may be called, and a form for what is said instead."""
    for seed in range(4):
        said = message(http, tools=TOOLS, response_format=FORM, seed=seed, **{**OFF, "max_tokens": 1200})
        if said.get("tool_calls"):
            assert said["content"] is None
        else:
            check_pet(said["content"])


# ---- thinking -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "budget", ({"thinking_token_budget": 5}, {"thinking": {"type": "enabled", "budget_tokens": 5}})
)
def test_a_budget_for_thinking(http: TestClient, budget: dict[str, Any]) -> None:
    body = {"messages": HELLO, "seed": 4, "max_tokens": 30, "ignore_eos": True, **budget}
    reply = post(http, CHAT, **body)
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 6
    free = post(http, CHAT, **{**body, "thinking_token_budget": None, "thinking": True})
    assert free["usage"]["completion_tokens_details"]["reasoning_tokens"] == 30


# ---- errors -------------------------------------------------------------------------------
UNIQUE = {"type": "array", "uniqueItems": True}
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "schema": ({"response_format": {"type": "json_schema", "json_schema": {"schema": UNIQUE}}},
               "response_format", "uniqueItems"),
    "guided": ({"guided_json": UNIQUE}, "guided_json", "uniqueItems"),
    "regex": ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed"),
    "field": ({"structured_outputs": {"json": {}, "x": 1}}, "structured_outputs", "unknown field"),
    "tag": ({"response_format": {"type": "structural_tag"}}, "response_format", "structural_tag"),
    "name": ({**CALL, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "get_weather"),
    "both": ({**CALL, "guided_regex": "a"}, "guided_regex", "tool_choice"),
    "continued": ({"guided_regex": "a", "continue_final_message": True,
                   "messages": [*HELLO, {"role": "assistant", "content": "x"}]}, "guided_regex", "middle"),
    "budget": ({"thinking_token_budget": 3, "thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking",
               "differs"),
    "budget type": ({"thinking": {"type": "enabled", "budget_tokens": "5"}}, "thinking_token_budget", "integer"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_field(http: TestClient, name: str) -> None:
    body, param, word = BAD[name]
    reply = http.post(CHAT, json={"messages": HELLO, **body})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param and word in error["message"]


def test_a_missing_library_is_a_400_that_names_the_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for http in client_of(folder):
        reply = http.post(CHAT, json={"messages": HELLO, "response_format": FORM})
        assert reply.status_code == 400 and "firesteel[structured]" in reply.json()["error"]["message"]
        assert reply.json()["error"]["param"] == "response_format"
        assert message(http, thinking_token_budget=3, max_tokens=10)["finish_reason"] in ("stop", "length")


def test_wishes_survive_the_way_to_the_engine() -> None:
    for wish in ({"json": SCHEMA}, {"choice": ["a", "b"]}, {"regex": "a", "source": "guided_regex"}):
        params = SamplingParams(structured_outputs=wish, thinking_token_budget=3, thinking=False)  # type: ignore[arg-type]
        again = params_of(json.loads(json.dumps(plain_params(params))))
        assert again == params and again.structured_outputs is not None
        assert again.structured_outputs.source == wish.get("source", "structured_outputs")


# ---- reading ------------------------------------------------------------------------------
def test_a_form_is_read_verbatim_however_it_is_cut() -> None:
    text = 'a<think>b</thin</think>{"x": "<think></think><｜DSML｜tool_calls>"}'
    for cut in range(len(text) + 1):
        for second in range(cut, len(text) + 1):
            parser, found = Verbatim(thinking=True), Message()
            for part in (text[:cut], text[cut:second], text[second:]):
                found.take(parser.feed(part))
            found.take(parser.finish())
            assert (found.reasoning, found.content) == ("ab</thin", text.partition("</think>")[2])
    parser, found = Verbatim(thinking=True), Message()
    found.take([*parser.feed("ab</th"), *parser.finish(truncated=True)])
    assert (found.reasoning, found.content) == ("ab</th", "")
