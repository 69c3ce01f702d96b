"""What V4 writes, taken apart: the same however the text was cut, and never a tag in the result."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firesteel.models.deepseek_v4.chat import encode_messages
from firesteel.serve.parsing import Message, Parser

OPEN, CLOSE = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"
WEATHER = {"get_weather": frozenset({"city", "days", "unit"})}


def invoke(name: str, *parameters: str) -> str:
    return "\n".join([f'<｜DSML｜invoke name="{name}">', *parameters, "</｜DSML｜invoke>"])


def parameter(name: str, value: str, string: str | None = "true") -> str:
    mark = f' string="{string}"' if string is not None else ""
    return f'<｜DSML｜parameter name="{name}"{mark}>{value}</｜DSML｜parameter>'


def block(*calls: str) -> str:
    return "\n".join([OPEN, *calls, CLOSE])


def parse(pieces: list[str], thinking: bool = False, truncated: bool = False, **options: object) -> Message:
    parser, message = Parser(thinking, **options), Message()  # type: ignore[arg-type]
    for piece in pieces:
        message.take(parser.feed(piece))
    message.take(parser.finish(truncated))
    return message


PARIS = invoke("get_weather", parameter("city", "Paris"), parameter("days", "3", "false"))
PARIS_ARGS = '{"city": "Paris", "days": 3}'

# text, starts thinking, (reasoning, content, calls)
CASES: dict[str, tuple[str, bool, tuple[str, str, list[tuple[str, str]]]]] = {
    "content": ("Hello <b>you</b> & </th", False, ("", "Hello <b>you</b> & </th", [])),
    "reasoning": ("why</think>42\n\n", True, ("why", "42\n\n", [])),
    "no end of reasoning": ("why", True, ("why", "", [])),
    "second think": ("a<think>b</think>c", True, ("ab", "c", [])),
    "lone end": ("a</think>b", False, ("", "ab", [])),
    "think in content": ("a\n<think>r</think>b", False, ("r", "a\nb", [])),
    "call": (
        "Look.\n\n" + block(PARIS),
        False,
        ("", "Look.", [("get_weather", PARIS_ARGS)]),
    ),
    "call at once": (block(PARIS), False, ("", "", [("get_weather", PARIS_ARGS)])),
    "two calls": (
        "r</think>\n\n" + block(PARIS, invoke("now")) + "tail",
        True,
        ("r", "", [("get_weather", PARIS_ARGS), ("now", "{}")]),
    ),
    "block ends reasoning": ("r\n" + block(PARIS), True, ("r\n", "", [("get_weather", PARIS_ARGS)])),
    "bare invoke": ("A\n" + PARIS + "\nB", False, ("", "A", [("get_weather", PARIS_ARGS)])),
    "other spellings": (
        "<｜DSML｜toolcalls>" + PARIS + "</｜DSML｜toolcalls>",
        False,
        ("", "", [("get_weather", PARIS_ARGS)]),
    ),
    "shortest spelling": ("<｜DSML｜tool>" + PARIS, False, ("", "", [("get_weather", PARIS_ARGS)])),
    "no closing tags": (
        OPEN + '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">x\n'
        '<｜DSML｜parameter name="b" string="false">[1]\n</｜DSML｜invoke>\n<｜DSML｜invoke name="g">',
        False,
        ("", "", [("f", '{"a": "x", "b": [1]}'), ("g", "{}")]),
    ),
    "string attribute absent": (
        block(invoke("f", parameter("a", "1", None), parameter("b", "one", None))),
        False,
        ("", "", [("f", '{"a": 1, "b": "one"}')]),
    ),
    "no JSON": (
        block(invoke("f", parameter("a", "{x", "false"), parameter("b", "NaN", "false"))),
        False,
        ("", "", [("f", '{"a": "{x", "b": "NaN"}')]),
    ),
    "text is kept": (
        block(invoke("f", parameter("a", 'say "hi"\n<think>\\</think> ünï\n'))),
        False,
        ("", "", [("f", '{"a": "say \\"hi\\"\\n<think>\\\\</think> ünï\\n"}')]),
    ),
    "numbers stay as written": (
        block(invoke("f", parameter("a", " 1.00 ", "false"))),
        False,
        ("", "", [("f", '{"a": 1.00}')]),
    ),
    "wrapped": (
        block(invoke("get_weather", parameter("arguments", '{"city": "Rome"}', "false"))),
        False,
        ("", "", [("get_weather", '{"city": "Rome"}')]),
    ),
    "wrapped as text": (
        block(invoke("get_weather", parameter("input", '{"city": "Rome"}'))),
        False,
        ("", "", [("get_weather", '{"city": "Rome"}')]),
    ),
    "wrapped with a stranger": (
        block(invoke("get_weather", parameter("input", '{"town": "Rome"}', "false"))),
        False,
        ("", "", [("get_weather", '{"input": {"town": "Rome"}}')]),
    ),
    "wrapper beside another": (
        block(invoke("get_weather", parameter("input", "x"), parameter("city", "Rome"))),
        False,
        ("", "", [("get_weather", '{"input": "x", "city": "Rome"}')]),
    ),
    "unknown tool keeps its wrapper": (
        block(invoke("other", parameter("input", '{"city": "Rome"}', "false"))),
        False,
        ("", "", [("other", '{"input": {"city": "Rome"}}')]),
    ),
    "twice the same name": (
        block(invoke("f", parameter("a", "1"), parameter("a", "2"))),
        False,
        ("", "", [("f", '{"a": "1"}')]),
    ),
    "stray tags": (
        "a</｜DSML｜invoke>b<｜DSML｜what>c｜DSML｜d<｜DSML｜\ne",
        False,
        ("", "abcd\ne", []),
    ),
    "ends inside a call": (
        OPEN + '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">x',
        False,
        ("", "", [("f", '{"a": "x"}')]),
    ),
    "ends inside a tag": ("abc<｜DSML｜inv", False, ("", "abc", [])),
}


@pytest.mark.parametrize("name", CASES)
def test_whole_and_by_character(name: str) -> None:
    text, thinking, (reasoning, content, calls) = CASES[name]
    for pieces in ([text], list(text)):
        got = parse(pieces, thinking, properties=WEATHER)
        assert (got.reasoning, got.content, got.calls) == (reasoning, content, calls)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("truncated", [False, True])
def test_every_cut_in_three(name: str, truncated: bool) -> None:
    text, thinking, _ = CASES[name]
    whole = parse([text], thinking, truncated, properties=WEATHER)
    for i in range(len(text) + 1):
        pieces = [text[:i], text[i : i + 3], text[i + 3 :]]
        assert parse(pieces, thinking, truncated, properties=WEATHER) == whole, pieces


@pytest.mark.parametrize("name", CASES)
def test_truncation_anywhere_leaks_nothing(name: str) -> None:
    """Cut off anywhere: no markup, and arguments are the beginning of the JSON text they would have become."""
    text, thinking, _ = CASES[name]
    for end in range(len(text) + 1):
        got = parse([text[:end]], thinking, truncated=True, properties=WEATHER)
        assert not marked(got)
        closed = parse([text[:end]], thinking, properties=WEATHER)
        for (_, part), (_, full) in zip(got.calls, closed.calls, strict=True):
            json.loads(full)
            assert full.startswith(part)


def marked(message: Message) -> bool:
    shown = message.reasoning + message.content + "".join(n + a for n, a in message.calls)
    return any(tag in shown for tag in ("<｜DSML", "</｜DSML", "｜DSML｜"))


FRAGMENTS = st.sampled_from(
    [
        "<think>", "</think>", OPEN, CLOSE, '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>", "<｜DSML｜",
        '<｜DSML｜parameter name="arguments" string="false">', '<｜DSML｜parameter name="a" string="true">',
        "</｜DSML｜parameter>", '<｜DSML｜invoke name="g', '">', "<", "</", ">", '"', "\n", "\n\n", "x", '{"a": 1}',
        "é", "🔥", "<｜DSML｜tool>", "<｜DSML｜invoke>", "<think", "｜", " ", "\\",
    ]
)  # fmt: skip


@given(st.lists(FRAGMENTS, max_size=14), st.booleans(), st.booleans(), st.lists(st.integers(0, 200)))
def test_any_text_any_cut(fragments: list[str], thinking: bool, truncated: bool, cuts: list[int]) -> None:
    text = "".join(fragments)
    at = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    pieces = [text[i:j] for i, j in pairwise(at)]
    known = {"f": frozenset({"a"})}
    whole = parse([text], thinking, truncated, properties=known)
    assert parse(pieces, thinking, truncated, properties=known) == whole
    assert parse(list(text), thinking, truncated, properties=known) == whole
    if not truncated:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole.calls)
    assert not marked(whole) or "｜" in fragments


def test_a_tag_inside_a_name_never_shows() -> None:
    got = parse(['<｜DSML｜invoke name="g<｜DSML｜tool_calls>">'], False)
    assert not marked(got) and got == parse(list('<｜DSML｜invoke name="g<｜DSML｜tool_calls>">'), False)


def test_a_call_survives_the_chat_encoding() -> None:
    """What the encoder writes for an assistant's calls is what the parser reads."""
    arguments = {"city": 'A "quoted" \n</think> city', "days": [1, {"x": None}], "unit": "", "flag": True}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "reasoning": "because", "content": "I look.", "tool_calls": [call, call]},
    ]
    text = encode_messages(messages, True).partition("<think>")[2].removesuffix("<｜end▁of▁sentence｜>")
    got = parse([text], thinking=True)
    assert (got.reasoning, got.content) == ("because", "I look.")
    assert [(n, json.loads(a)) for n, a in got.calls] == [("f", arguments)] * 2


def test_strings_stream_and_other_values_wait() -> None:
    parser = Parser()
    parser.feed(OPEN + '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">')
    assert [d.text for d in parser.feed("Par")] == ["Par"]
    assert [d.text for d in parser.feed("is\n")] == ["is"], "the newline may be a separator"
    assert [d.text for d in parser.feed("</｜DSML｜parameter>")] == ['\\n"']
    parser.feed('<｜DSML｜parameter name="b" string="false">')
    assert parser.feed("[1, 2") == []
    assert [d.text for d in parser.feed("]</｜DSML｜parameter>")] == ["[1, 2]"]


def test_calls_beyond_the_limit_vanish() -> None:
    text = "x\n\n" + block(PARIS, PARIS)
    assert parse([text], max_calls=1).calls == [("get_weather", PARIS_ARGS)]
    assert parse([text], max_calls=0) == Message(content="x")


def test_a_long_head_is_no_tag() -> None:
    text = '<｜DSML｜invoke name="' + "n" * 2000 + '">rest'
    whole = parse([text])
    assert whole.calls == [] and whole == parse(list(text))
