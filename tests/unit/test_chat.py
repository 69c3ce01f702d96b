"""V4 prompts, byte for byte. The long texts are pinned by length and hash, everything else is spelled out."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

import pytest

from firesteel.models.deepseek_v4 import chat_strings as s
from firesteel.models.deepseek_v4.chat import ChatError, ChatMode, encode_messages, resolve_mode

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
U, A = "<｜User｜>", "<｜Assistant｜>"
CALLS = "<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>"


def user(content: Any = "q", **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def system(content: Any = "S", **more: Any) -> dict[str, Any]:
    return {"role": "system", "content": content, **more}


def answer(content: Any = "A1", reasoning: str | None = "R1", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "reasoning": reasoning, **more}


def call(name: str = "f", arguments: Any = None, call_id: str = "c0") -> dict[str, Any]:
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(content: Any = "T1", call_id: str = "c0") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def invoke(name: str, *parameters: str) -> str:
    return f'<｜DSML｜invoke name="{name}">\n' + "\n".join(parameters) + "\n</｜DSML｜invoke>"


def tools_section(*schemas: str) -> str:
    """The rendered section; its fixed text is pinned by test_protocol_texts."""
    return "\n\n" + s.TOOLS_HEAD + "\n".join(schemas) + s.TOOLS_TAIL


# ---- the fixed texts --------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "length", "digest"),
    [
        (s.EFFORT_TEXTS["high"], 476, "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7"),
        (s.EFFORT_TEXTS["max"], 526, "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c"),
        (
            s.TOOLS_HEAD + s.TOOLS_TAIL,
            953,
            "c7d3159308f7d076bee8974ece110fda1f92f6e577306e602ba2b466b4dcd904",
        ),
        (
            s.RESPONSE_FORMAT_TEXT + "{schema}",
            88,
            "012f31fcc1338bdfe25b132eaf56ab020ee75ab8e649f37b30b8e5f544fb17a5",
        ),
    ],
)
def test_protocol_texts(text: str, length: int, digest: str) -> None:
    assert len(text) == length
    assert hashlib.sha256(text.encode()).hexdigest() == digest


def test_protocol_tokens_use_the_wide_bar() -> None:
    tokens = [s.BOS, s.EOS, s.USER, s.ASSISTANT, s.SYSTEM, s.LATEST_REMINDER, s.DSML, *s.TASKS.values()]
    assert all("\uff5c" in token and "|" not in token for token in tokens)
    assert s.BOS.count("\u2581") == 2
    assert s.EFFORT_TEXTS["low"] == ""


# ---- plain conversations ------------------------------------------------------
TWO_TURNS = [system(), user("U1"), answer(), user("U2")]


@pytest.mark.parametrize(
    ("messages", "thinking", "drop", "want"),
    [
        ([user("Hello")], False, True, f"{BOS}{U}Hello{A}</think>"),
        ([user("Hello")], True, True, f"{BOS}{U}Hello{A}<think>"),
        (TWO_TURNS, True, True, f"{BOS}S{U}U1{A}</think>A1{EOS}{U}U2{A}<think>"),
        (TWO_TURNS, True, False, f"{BOS}S{U}U1{A}<think>R1</think>A1{EOS}{U}U2{A}<think>"),
        (TWO_TURNS, False, True, f"{BOS}S{U}U1{A}</think>A1{EOS}{U}U2{A}</think>"),
        (TWO_TURNS, False, False, f"{BOS}S{U}U1{A}</think>A1{EOS}{U}U2{A}</think>"),
        ([user(task="title")], False, True, f"{BOS}{U}q<｜title｜>"),
        ([user(task="action")], True, True, f"{BOS}{U}q{A}<think><｜action｜>"),
        ([user(task="action")], False, True, f"{BOS}{U}q{A}</think><｜action｜>"),
        (
            [user(), {"role": "latest_reminder", "content": "LR"}],
            False,
            True,
            f"{BOS}{U}q{A}</think><｜latest_reminder｜>LR",
        ),
        # a finished answer after the last user turn keeps its reasoning
        ([user(), answer()], True, True, f"{BOS}{U}q{A}<think>R1</think>A1{EOS}"),
        ([user(), answer(reasoning=None)], True, True, f"{BOS}{U}q{A}<think></think>A1{EOS}"),
        ([user(), answer(wo_eos=True)], True, True, f"{BOS}{U}q{A}<think>R1</think>A1"),
        # system messages: alone, last, before an answer, before a user
        ([system()], False, True, f"{BOS}S{A}</think>"),
        ([system()], True, True, f"{BOS}S{A}<think>"),
        ([system(), answer(), user()], True, True, f"{BOS}S{A}</think>A1{EOS}{U}q{A}<think>"),
        ([user(), system()], True, True, f"{BOS}{U}qS{A}<think>"),
        (
            [system(), {"role": "latest_reminder", "content": "L"}, user()],
            False,
            True,
            f"{BOS}S<｜latest_reminder｜>L{U}q{A}</think>",
        ),
        ([{"role": "system"}, user()], False, True, f"{BOS}{U}q{A}</think>"),
        ([answer()], True, True, f"{BOS}R1</think>A1{EOS}"),
        # neighbouring user messages are one turn
        ([user("a"), user("b")], False, True, f"{BOS}{U}a\n\nb{A}</think>"),
    ],
)
def test_conversations(messages: list[dict[str, Any]], thinking: bool, drop: bool, want: str) -> None:
    assert encode_messages(messages, thinking, drop_thinking=drop) == want


def test_bos_can_be_left_out() -> None:
    assert encode_messages([user()], False, add_bos=False) == f"{U}q{A}</think>"


def test_reasoning_content_is_the_same_field() -> None:
    other = {"role": "assistant", "content": "A1", "reasoning_content": "R1"}
    assert encode_messages([user(), other], True) == encode_messages([user(), answer()], True)


@pytest.mark.parametrize("effort", ["low", "high", "max"])
def test_effort_text_stands_after_bos_only_when_thinking(effort: str) -> None:
    text = {"low": "", "high": s.EFFORT_TEXTS["high"], "max": s.EFFORT_TEXTS["max"]}[effort]
    assert encode_messages([system(), user()], True, effort) == f"{BOS}{text}S{U}q{A}<think>"
    assert encode_messages([system(), user()], False, effort) == f"{BOS}S{U}q{A}</think>"


# ---- dropping ---------------------------------------------------------------------
def test_dropping_removes_old_developer_messages_and_reasoning_only() -> None:
    messages = [
        system(),
        {"role": "developer", "content": "D"},
        answer("A0", "R0"),
        user("U1"),
        answer(),
        {"role": "latest_reminder", "content": "L"},
        user("U2"),
        answer("A2", "R2"),
    ]
    old = f"A0{EOS}{U}U1{A}</think>A1{EOS}<｜latest_reminder｜>L"
    assert encode_messages(messages, True) == f"{BOS}S{A}</think>{old}{U}U2{A}<think>R2</think>A2{EOS}"
    kept = encode_messages(messages, True, drop_thinking=False)
    assert f"{U}D{A}<think>R0</think>A0{EOS}" in kept and "<think>R1</think>" in kept
    chat = encode_messages(messages, False)  # nothing to drop in chat mode
    assert f"{U}D{A}</think>A0" in chat and "R0" not in chat and "R2" not in chat


def test_last_developer_message_counts_as_a_user_turn() -> None:
    messages = [user("U1"), answer(), {"role": "developer", "content": "D"}]
    assert encode_messages(messages, True) == f"{BOS}{U}U1{A}</think>A1{EOS}{U}D{A}<think>"


@pytest.mark.parametrize("where", ["request", "system", "developer"])
def test_tools_anywhere_keep_all_reasoning(where: str) -> None:
    messages: list[dict[str, Any]] = [system(), *TWO_TURNS[1:]]
    request = [tool()] if where == "request" else None
    if where == "system":
        messages[0] = system(tools=[tool()])
    if where == "developer":
        messages.insert(1, {"role": "developer", "content": "D", "tools": [tool()]})
    prompt = encode_messages(messages, True, tools=request)
    assert f"{A}<think>R1</think>A1{EOS}{U}U2{A}<think>" in prompt
    assert prompt.count("## Tools") == 1


# ---- tools ----------------------------------------------------------------------
def test_tools_go_to_the_first_system_message() -> None:
    schema = tool("wetter_für", parameters={"type": "object", "properties": {"ort": {"type": "string"}}})
    text = (
        '{"name": "wetter_für", "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}}}'
    )
    section = tools_section(text, '{"name": "g"}')
    tools = [{**schema, "strict": True}, tool("g")]
    tail = f"{U}q{A}</think>"
    assert encode_messages([system(), user()], False, tools=tools) == f"{BOS}S{section}{tail}"
    assert encode_messages([user()], False, tools=tools) == f"{BOS}{section}{tail}"
    late = encode_messages([user("a"), system(), user()], False, tools=tools)
    assert late == f"{BOS}{U}aS{section}{tail}"
    effort = encode_messages([user()], True, "high", tools=tools)
    assert effort == f"{BOS}{s.EFFORT_TEXTS['high']}{section}{U}q{A}<think>"


def test_response_format_follows_the_tools() -> None:
    schema = {"type": "object", "title": "größe"}
    heading = (
        "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
        '{"type": "object", "title": "größe"}'
    )
    section = tools_section('{"name": "f"}')
    tail = f"{U}q{A}</think>"
    both = encode_messages([system(), user()], False, tools=[tool()], response_format=schema)
    assert both == f"{BOS}S{section}{heading}{tail}"
    assert encode_messages([user()], False, response_format=schema) == f"{BOS}{heading}{tail}"
    developer = {"role": "developer", "content": "D", "tools": [tool()], "response_format": schema}
    assert encode_messages([developer], False) == f"{BOS}{U}D{section}{heading}{A}</think>"


def test_tool_turn() -> None:
    messages = [system(), user(), answer("", "R1", tool_calls=[call()]), result()]
    block = CALLS[0] + invoke("f") + CALLS[1]
    tail = f"{A}<think>R1</think>\n\n{block}{EOS}{U}<tool_result>T1</tool_result>{A}<think>"
    assert encode_messages(messages, True, tools=[tool()]).endswith(f"{U}q{tail}")
    # without tools in the request the result is the last user turn, so R1 goes
    dropped = encode_messages(messages, True)
    assert dropped == f"{BOS}S{U}q{A}</think>\n\n{block}{EOS}{U}<tool_result>T1</tool_result>{A}<think>"


def test_call_arguments() -> None:
    arguments = {
        "text": 'a "b" </c>\n%s {x}',
        "n": 1.5,
        "on": True,
        "none": None,
        "list": [1, "ä"],
        "map": {"k": []},
    }
    parameters = [
        '<｜DSML｜parameter name="text" string="true">a "b" </c>\n%s {x}</｜DSML｜parameter>',
        '<｜DSML｜parameter name="n" string="false">1.5</｜DSML｜parameter>',
        '<｜DSML｜parameter name="on" string="false">true</｜DSML｜parameter>',
        '<｜DSML｜parameter name="none" string="false">null</｜DSML｜parameter>',
        '<｜DSML｜parameter name="list" string="false">[1, "ä"]</｜DSML｜parameter>',
        '<｜DSML｜parameter name="map" string="false">{"k": []}</｜DSML｜parameter>',
    ]
    block = CALLS[0] + invoke("f", *parameters) + "\n" + invoke("g", parameters[1]) + CALLS[1]
    want = f"{BOS}{U}q{A}</think>Looking.\n\n{block}{EOS}"
    for as_text in (False, True):
        calls = [call("f", json.dumps(arguments) if as_text else arguments), call("g", {"n": 1.5}, "c1")]
        assert encode_messages([user(), answer("Looking.", tool_calls=calls)], False) == want


@pytest.mark.parametrize("empty", ["", "{}", {}, None])
def test_a_call_without_arguments(empty: Any) -> None:
    one = {"id": "c", "type": "function", "function": {"name": "f", "arguments": empty}}
    prompt = encode_messages([user(), answer(None, tool_calls=[one])], False)
    assert prompt == f"{BOS}{U}q{A}</think>\n\n{CALLS[0]}{invoke('f')}{CALLS[1]}{EOS}"


def results_of(messages: list[dict[str, Any]]) -> str:
    return encode_messages(messages, False).split(U)[-1].removesuffix(f"{A}</think>")


def test_results_are_sorted_as_the_calls_stand() -> None:
    calls = answer("", tool_calls=[call(call_id="a"), call(call_id="b"), call(call_id="c")])
    messages = [user(), calls, result("C", "c"), result("A", "a"), user("note"), result("B", "b")]
    want = [f"<tool_result>{x}</tool_result>" for x in "ABC"]
    # results change places among themselves, the text stays third
    assert results_of(messages) == "\n\n".join([want[0], want[1], "note", want[2]])


def test_results_of_unknown_calls_come_with_the_first() -> None:
    calls = answer("", tool_calls=[call(call_id="a"), call(call_id="b")])
    messages = [user(), calls, result("B", "b"), result("X", "?"), result("A", "a")]
    assert results_of(messages) == "\n\n".join(f"<tool_result>{x}</tool_result>" for x in "XAB")


def test_results_without_call_ids_keep_their_order() -> None:
    calls = answer("", tool_calls=[call(call_id=""), call(call_id="")])
    messages = [user(), calls, result("2", "x"), result("1", "y")]
    assert results_of(messages) == "<tool_result>2</tool_result>\n\n<tool_result>1</tool_result>"


def test_result_blocks() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "image_url"}, "b"]
    assert results_of([user(), answer(), result(blocks)]) == (
        "<tool_result>a\n\n[Unsupported image_url]\n\nb</tool_result>"
    )


# ---- tasks, blocks -----------------------------------------------------------------
def test_no_reasoning_after_a_task() -> None:
    messages = [user(task="query"), answer("A1", "R1"), user("U2")]
    prompt = encode_messages(messages, True, drop_thinking=False)
    assert prompt == f"{BOS}{U}q<｜query｜>A1{EOS}{U}U2{A}<think>"


@pytest.mark.parametrize("task", ["query", "authority", "domain", "title", "read_url"])
def test_plain_tasks(task: str) -> None:
    for thinking in (False, True):
        assert encode_messages([user(task=task)], thinking) == f"{BOS}{U}q<｜{task}｜>"


def test_a_user_message_with_a_task_is_not_extended() -> None:
    # the task token shows only where an answer or the end follows
    prompt = encode_messages([user("a", task="title"), user("b")], False)
    assert prompt == f"{BOS}{U}a{U}b{A}</think>"


def test_blocks_are_joined_by_a_blank_line() -> None:
    blocks = [{"type": "text", "text": "a"}, "b", {"type": "image_url", "image_url": {"url": "x"}}]
    image = "<｜deepseek_image｜>"
    for make in (user, system):
        prompt = encode_messages([make(blocks)], False, allow_images=True)
        assert f"a\n\nb\n\n{image}{A}" in prompt
    with pytest.raises(ChatError, match=r"messages\[0\]\.content\[2\]: images cannot be served"):
        encode_messages([user(blocks)], False)


def test_the_request_is_not_changed() -> None:
    messages = [
        system(),
        user(),
        answer(tool_calls=[call("f", '{"a": 1}', "a"), call(call_id="b")]),
        result("B", "b"),
        result("A", "a"),
    ]
    tools = [tool()]
    before = copy.deepcopy((messages, tools))
    first = encode_messages(messages, True, tools=tools, response_format={"type": "object"})
    assert (messages, tools) == before
    assert encode_messages(messages, True, tools=tools, response_format={"type": "object"}) == first


# ---- errors ------------------------------------------------------------------------
def bad_arguments(arguments: Any) -> list[Any]:
    return [user(), answer(tool_calls=[call(), call("g", arguments)])]


@pytest.mark.parametrize(
    ("messages", "index", "field"),
    [
        ([], None, "messages"),
        ("hello", None, "messages"),
        ({"role": "user"}, None, "messages"),
        (["hello"], 0, ""),
        ([user(), {"content": "x"}], 1, "role"),
        ([{"role": "robot", "content": "x"}], 0, "role"),
        ([user(None)], 0, "content"),
        ([user(5)], 0, "content"),
        ([{"role": "user"}], 0, "content"),
        ([{"role": "latest_reminder"}], 0, "content"),
        ([user(), {"role": "developer", "content": ""}], 1, "content"),
        ([user(), {"role": "developer"}], 1, "content"),
        ([user(), answer(), result(None)], 2, "content"),
        ([user(), answer(), result({"a": 1})], 2, "content"),
        ([user(), answer(), result("x", 5)], 2, "tool_call_id"),  # type: ignore[arg-type]
        ([user(["a", {"type": "audio"}])], 0, "content[1].type"),
        ([user([{"type": "text", "text": None}])], 0, "content[0].text"),
        ([user(), answer(reasoning=5)], 1, "reasoning"),  # type: ignore[arg-type]
        ([user(), answer(tool_calls="f()")], 1, "tool_calls"),
        ([user(), answer(tool_calls=[call(), {"name": "f"}])], 1, "tool_calls[1].function"),
        ([user(), answer(tool_calls=[call("")])], 1, "tool_calls[0].function.name"),
        (bad_arguments("{bad"), 1, "tool_calls[1].function.arguments"),
        (bad_arguments("[1]"), 1, "tool_calls[1].function.arguments"),
        (bad_arguments({"x": object()}), 1, "tool_calls[1].function.arguments.x"),
        ([user(task="dance")], 0, "task"),
        ([user(), answer(), {**result(), "task": "title"}], 2, "task"),
        ([user("a"), user("b", task="title")], 1, "task"),
        ([user(tools=[tool()])], 0, "tools"),
        ([user(response_format={"type": "object"})], 0, "response_format"),
        ([system(tools=[tool(), {"name": "f"}])], 0, "tools[1].function"),
        ([system(tools=[tool("")])], 0, "tools[0].function.name"),
        ([system(tools="f")], 0, "tools"),
        ([system(tools=[tool(), tool()])], 0, "tools[1].function.name"),
    ],
)
def test_errors_name_message_and_field(messages: Any, index: int | None, field: str) -> None:
    with pytest.raises(ChatError) as caught:
        encode_messages(messages, True)
    assert (caught.value.index, caught.value.field) == (index, field)
    text = str(caught.value)
    assert text.startswith(field if index is None else f"messages[{index}]")
    assert field in text


def test_request_errors() -> None:
    with pytest.raises(ChatError, match=r"^tools\[0\]\.function: missing"):
        encode_messages([user()], True, tools=[{"name": "f"}])
    with pytest.raises(ChatError, match=r"^messages\[1\]\.tools: given here and in the request"):
        encode_messages([user(), system(tools=[tool()])], True, tools=[tool()])
    with pytest.raises(ChatError, match=r"^response_format: not a JSON value"):
        encode_messages([user()], True, response_format={"x": object()})
    with pytest.raises(ChatError, match="reasoning_effort: 'medium' is none of low, high, max"):
        encode_messages([user()], True, "medium")


# ---- request fields -> mode --------------------------------------------------------
@pytest.mark.parametrize(
    ("thinking", "enable", "effort", "want"),
    [
        (None, None, None, ChatMode(True, "high")),
        (True, None, None, ChatMode(True, "high")),
        (None, True, "max", ChatMode(True, "max")),
        (False, None, None, ChatMode(False, "low")),
        (None, False, "high", ChatMode(False, "high")),
        (False, True, None, ChatMode(True, "high")),
        (None, None, "none", ChatMode(False, "low")),
        (True, None, "none", ChatMode(False, "low")),
        (None, None, "minimal", ChatMode(True, "low")),
        (None, None, "low", ChatMode(True, "low")),
        (None, None, "medium", ChatMode(True, "low")),
        (None, None, "xhigh", ChatMode(True, "high")),
        (None, None, "high", ChatMode(True, "high")),
    ],
)
def test_resolve_mode(thinking: bool | None, enable: bool | None, effort: str | None, want: ChatMode) -> None:
    assert resolve_mode(thinking, enable, effort) == want


@pytest.mark.parametrize(
    ("field", "value"), [("thinking", "yes"), ("enable_thinking", 1), ("reasoning_effort", "hi")]
)
def test_resolve_mode_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(ChatError, match=f"^{field}: "):
        resolve_mode(**{field: value})
