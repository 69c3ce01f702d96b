"""Grammars over real token bytes: masks against brute force, rollback, wishes that cannot be served, calls."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firesteel.config import ParameterError, SamplingParams
from firesteel.engine.grammar import Grammars, Guides
from firesteel.engine.guide import Matcher
from firesteel.models.deepseek_v4 import chat_strings
from firesteel.models.deepseek_v4.chat import ChatError, encode_messages
from firesteel.models.deepseek_v4.tool_grammar import call_grammar
from firesteel.serve.parsing import Message, Parser
from firesteel.structured import StructuredOutputs
from firesteel.tokenizer import FIRST_BYTE, Tokenizer, byte_tokenizer

llguidance = pytest.importorskip("llguidance")
EOS = 1
BYTES = byte_tokenizer(300)
DSML, THINK, END_THINK = (
    BYTES.id_of(t) for t in (chat_strings.DSML, chat_strings.THINK, chat_strings.END_THINK)
)
MODEL_VOCAB = 310  # a model may have more rows than its tokenizer tokens
GRAMMARS = Grammars(llguidance, BYTES, MODEL_VOCAB, (EOS,))


class Pieces:
    """A vocabulary of single bytes, or also of tokens of several, halves of characters; two end tokens."""

    added_ids = frozenset({0, 1, 2})

    def __init__(self, *longer: bytes):
        self.spellings = (b"", b"", b"", *(bytes([b]) for b in b'abc{}":,1 \xc3\xbc'), *longer, b"")
        self.grammars = Grammars(llguidance, self, len(self.spellings), (1, 2))  # type: ignore[arg-type]

    def token_bytes(self, index: int) -> bytes:
        return self.spellings[index] if index < len(self.spellings) else b""

    def encode(self, text: str) -> list[int]:
        """Bytes: what is forced is then written in single bytes."""
        return [self.spellings.index(bytes([b])) for b in text.encode()]

    def brute(self, text: bytes, texts: set[bytes]) -> set[int]:
        """Tokens that leave some text possible; every end token where one is complete."""
        out = {1, 2} if text in texts else set()
        for i, spelling in enumerate(self.spellings):
            if spelling and any(t.startswith(text + spelling) for t in texts):
                out.add(i)
        return out


SINGLE = Pieces()
LONGER = Pieces(b"ab", b"bc", b"abc", b'{"', b'":', b"a\xc3", b"\xbcb", "ü".encode(), b"11", b'"}')
# a wish and all its texts
FINITE: dict[str, tuple[dict[str, Any], set[str]]] = {
    "regex": ({"regex": "a(b|bc)?"}, {"a", "ab", "abc"}),
    "choice": ({"choice": ["ab", "abc", "ü", "aü", "abü"]}, {"ab", "abc", "ü", "aü", "abü"}),
    "grammar": ({"grammar": 'start: x "c" | x x\nx: "a" | "ab"'}, {"ac", "abc", "aa", "aab", "aba", "abab"}),
    "object": (
        {"json": {"type": "object", "properties": {"a": {"enum": [1, 11, "ü"]}}, "required": ["a"],
                  "additionalProperties": False}, "disable_any_whitespace": True},
        {'{"a":1}', '{"a":11}', '{"a":"ü"}'},
    ),
    "nested": (
        {"json": {"type": "object", "properties": {"a": {"const": 1}, "b": {"maxLength": 1, "pattern": "^a?$",
                  "type": "string"}}, "additionalProperties": False}, "whitespace_pattern": " "},
        {f'{{{x}{y}{z}}}' for x in ("", " ") for z in ("", " ") for y in (
            *(f'"a"{c}1' for c in (":", ": ", " :", " : ")),
            *(f'"b"{c}"{v}"' for c in (":", ": ", " :", " : ") for v in ("a", "")),
            *(f'"a"{c}1{k}"b"{d}"{v}"' for c in (":", ": ", " :", " : ") for d in (":", ": ", " :", " : ")
              for k in (",", ", ", " ,", " , ") for v in ("a", "")))} | {"{}", "{ }"},
    ),
}  # fmt: skip


def ids(matcher: Matcher, size: int) -> set[int]:
    words = matcher.mask()
    assert words.shape == (-(-size // 32),)
    return {i for i in range(size) if int(words[i // 32]) >> i % 32 & 1}


@pytest.mark.parametrize("name", FINITE)
@pytest.mark.parametrize("vocabulary", (SINGLE, LONGER), ids=("single", "longer"))
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_masks_equal_brute_force(name: str, vocabulary: Pieces, seed: int) -> None:
    """A random walk with steps back; wrong tokens change nothing.

    Forced bytes may only be written as the tokenizer would: with longer tokens
    the mask can be smaller, but depends on nothing but the tokens so far.
    """
    wish, size = StructuredOutputs(**FINITE[name][0]), len(vocabulary.spellings)
    texts, rng = {t.encode() for t in FINITE[name][1]}, random.Random(seed)
    matcher, walked = vocabulary.grammars.matcher(wish), list[int]()
    for _ in range(25):
        text = b"".join(vocabulary.spellings[i] for i in walked)
        want, found = vocabulary.brute(text, texts), ids(matcher, size)
        if vocabulary is SINGLE:
            assert found == want, text
        fresh = vocabulary.grammars.matcher(wish)
        assert all(fresh.take(t) for t in walked)
        assert found <= want and bool(found) == bool(want) and found == ids(fresh, size)
        token = rng.randrange(3, size) if rng.random() < 0.3 else rng.choice(sorted(found))
        if token > 2:
            assert matcher.take(token) <= (token in want)
            walked += [token] if token in found else []
        if token not in found and token in want and not matcher.error:
            matcher, walked = (
                vocabulary.grammars.matcher(wish),
                [],
            )  # a spelling no mask would have let through
        if walked and rng.random() < 0.3:
            back = rng.randint(1, len(walked))
            matcher.rollback(back)
            del walked[-back:]
    assert matcher.error == ""


def test_matchers_of_one_wish_do_not_share_their_place() -> None:
    wish = StructuredOutputs(choice=("ab", "ba"))
    first, second = LONGER.grammars.matcher(wish), LONGER.grammars.matcher(wish)
    assert first.take(LONGER.encode("a")[0])
    assert ids(first, len(LONGER.spellings)) != ids(second, len(LONGER.spellings))


def test_protocol_tokens_spell_nothing() -> None:
    """A JSON string holds their characters only as ordinary bytes; rows beyond the tokenizer never come."""
    matcher = GRAMMARS.matcher(StructuredOutputs(json={"type": "string"}))
    assert matcher.take(FIRST_BYTE + ord('"'))
    can = ids(matcher, MODEL_VOCAB)
    assert can <= set(range(FIRST_BYTE, FIRST_BYTE + 256)) and FIRST_BYTE + ord("<") in can


@settings(max_examples=50)
@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=5))
def test_any_choice_can_be_written(texts: list[str]) -> None:
    wish = StructuredOutputs(choice=tuple(texts))
    for text in texts:
        matcher = GRAMMARS.matcher(wish)
        for token in text.encode():
            assert matcher.take(FIRST_BYTE + token)
        assert EOS in ids(matcher, MODEL_VOCAB)


def test_names_of_protocol_tokens_inside_a_text_stay_text() -> None:
    """What a grammar forces is written as the tokenizer would, but never as a protocol token."""
    text = "<<think>a</think>｜DSML｜" + chat_strings.USER
    matcher, spelt = GRAMMARS.matcher(StructuredOutputs(choice=(text,))), list[int]()
    while EOS not in (can := ids(matcher, MODEL_VOCAB)):
        spelt.append(min(can))
        assert matcher.take(spelt[-1])
    assert BYTES.added_ids.isdisjoint(spelt) and BYTES.decode(spelt) == text


def accepts(wish: StructuredOutputs, tokens: Sequence[int]) -> bool:
    matcher = GRAMMARS.matcher(wish)
    return all(matcher.take(t) for t in tokens) and EOS in ids(matcher, MODEL_VOCAB)


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ('{"a":1,"b":[true]}', True),
        ('{"a": 1, "b": [true, false]}', True),
        ('{\n  "a": 1,\n  "b": [\n    true\n  ]\n}', True),
        ('{  "a":1,"b":[true]}', False),
        ('{"a":1,"b":[true]} ', False),
        (' {"a":1,"b":[true]}', False),
        ('{"a":1}', False),
    ],
)
def test_whitespace_is_what_people_write_and_bounded(text: str, ok: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "boolean"}}},
        "required": ["a", "b"],
    }
    assert accepts(StructuredOutputs(json=schema), BYTES.encode(text)) == ok


# ---- wishes that cannot be served -------------------------------------------------------
@pytest.mark.parametrize(
    ("wish", "match"),
    [
        ({"regex": "a("}, "structured_outputs.regex: .*unclosed"),
        ({"json": {"type": "array", "uniqueItems": True}}, "structured_outputs.json: .*uniqueItems"),
        ({"json": {"type": "integer", "minimum": 2, "maximum": 1}}, "structured_outputs.json: Unsatisfiable"),
        ({"grammar": "start: nobody"}, "structured_outputs.grammar: .*nobody"),
        ({"grammar": "x: /a/"}, "structured_outputs.grammar: .*start"),
        ({"json": {"type": "strin"}, "source": "response_format"}, "^response_format: .*strin"),
    ],
)
def test_wrong_grammars_are_refused_by_name(wish: dict[str, Any], match: str) -> None:
    with pytest.raises(ParameterError, match=match):
        GRAMMARS.matcher(StructuredOutputs(**wish))


def guides(tokenizer: Tokenizer | None = BYTES) -> Guides:
    return Guides(tokenizer, MODEL_VOCAB, (EOS,), "folder")


def test_a_missing_library_is_named_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    without = guides()
    assert "not available: llguidance is not installed" in without.note
    with pytest.raises(ParameterError, match=r"structured_outputs: .*pip install 'firesteel\[structured\]'"):
        without.factory([5], SamplingParams(structured_outputs=StructuredOutputs(regex="a")))
    budget = without.factory([THINK], SamplingParams(thinking_token_budget=0))
    assert budget is not None and ids_of(budget([EOS]).mask()) == {END_THINK}  # needs no library
    assert without.factory([5], SamplingParams()) is None


def ids_of(words: Any) -> set[int]:
    return {i for i in range(MODEL_VOCAB) if int(words[i // 32]) >> i % 32 & 1}


def test_no_tokenizer_no_structure() -> None:
    for params, name in (
        (SamplingParams(structured_outputs=StructuredOutputs(regex="a")), "structured_outputs"),
        (SamplingParams(thinking_token_budget=3), "thinking_token_budget"),
    ):
        with pytest.raises(ParameterError, match=name):
            guides(None).factory([5], params)


@pytest.mark.parametrize(
    ("prompt", "said", "inside"),
    [
        ([THINK], None, True),
        ([THINK, 7], None, True),
        ([THINK, END_THINK, 7], None, False),
        ([7], None, False),
        ([7], True, True),
        ([THINK], False, False),
    ],
)
def test_where_the_answer_begins(prompt: list[int], said: bool | None, inside: bool) -> None:
    params = SamplingParams(thinking_token_budget=0, thinking=said)
    factory = guides().factory(prompt, params)
    assert factory is not None
    assert (factory([EOS]).mask() is not None) == inside


def test_reasoning_before_a_grammar_cannot_end_the_answer_or_call() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    factory = guides().factory([THINK], params)
    assert factory is not None
    assert set(range(MODEL_VOCAB)) - ids_of(factory([EOS]).mask()) == {EOS, DSML}


def test_a_budget_needs_its_end_token_allowed() -> None:
    with pytest.raises(ParameterError, match="thinking_token_budget: allowed_token_ids"):
        guides().factory([THINK], SamplingParams(thinking_token_budget=3, allowed_token_ids=(5,)))


# ---- calls --------------------------------------------------------------------------------
LOC = {"type": "object", "properties": {"lat": {"type": "integer", "minimum": -90, "maximum": 90}},
       "required": ["lat"], "additionalProperties": False}  # fmt: skip
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "$defs": {"Loc": LOC, "Name": {"type": "string", "maxLength": 5}},
        "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 12},
            "unit": {"type": "string", "enum": ["C", "F", "it's </b>"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "code": {"anyOf": [{"type": "string", "pattern": "^[a-c]{2}/x$"}, {"type": "null"}]},
            "place": {"$ref": "#/$defs/Loc"},
            "nick": {"$ref": "#/$defs/Name"},
            "mixed": {"type": ["string", "integer"], "maxLength": 3, "minimum": 0, "maximum": 9},
        },
        "required": ["city", "unit"],
    },
}  # fmt: skip
OPTIONAL = {"name": "opt", "parameters": {"type": "object", "properties": {
    "a": {"type": "boolean"}, "ü": {"const": "x"}, "c": {"enum": ["y", 3, None]}}}}  # fmt: skip
FUNCTIONS = [
    WEATHER,
    OPTIONAL,
    {"name": "now", "parameters": {"type": "object", "properties": {}}},
    {"name": "bare"},
]


def calls(**options: Any) -> StructuredOutputs:
    options_of_json = StructuredOutputs(json_object=True).json_options
    return StructuredOutputs(grammar=call_grammar(FUNCTIONS, DSML, options_of_json, **options))


def markup(*made: tuple[str, dict[str, Any]]) -> str:
    """What the official encoding writes for these calls, without its end token."""
    said = [{"function": {"name": name, "arguments": arguments}} for name, arguments in made]
    whole = encode_messages(
        [{"role": "user", "content": ""}, {"role": "assistant", "tool_calls": said}], False
    )
    return whole.partition(chat_strings.END_THINK)[2].removesuffix(chat_strings.EOS)


CITY = {"city": "Köln </x>\n2", "unit": "it's </b>"}
CALLS: list[tuple[str, list[tuple[str, dict[str, Any]]], bool]] = [
    ("required only", [("get_weather", CITY)], True),
    ("all", [("get_weather", {**CITY, "days": 14, "code": "ab/x", "place": {"lat": -9}, "nick": "", "mixed": "abc"})],
     True),
    ("other forms", [("get_weather", {**CITY, "code": None, "mixed": 7})], True),
    ("nothing", [("now", {}), ("bare", {}), ("opt", {})], True),
    ("some", [("opt", {"c": 3}), ("opt", {"a": True, "c": "y"}), ("opt", {"ü": "x", "c": None})], True),
    ("too long", [("get_weather", {**CITY, "city": "a" * 13})], False),
    ("too short", [("get_weather", {**CITY, "city": ""})], False),
    ("missing", [("get_weather", {"city": "a"})], False),
    ("no such unit", [("get_weather", {**CITY, "unit": "K"})], False),
    ("out of range", [("get_weather", {**CITY, "days": 15})], False),
    ("no such pattern", [("get_weather", {**CITY, "code": "ab/xx"})], False),
    ("wrong place", [("get_weather", {**CITY, "place": {"lat": 91}})], False),
    ("long nick", [("get_weather", {**CITY, "nick": "abcdef"})], False),
    ("no such constant", [("opt", {"ü": "y"})], False),
    ("no such function", [("nobody", {})], False),
]  # fmt: skip


@pytest.mark.parametrize(("made", "ok"), [c[1:] for c in CALLS], ids=[c[0] for c in CALLS])
def test_calls_as_the_encoding_writes_them(made: list[tuple[str, dict[str, Any]]], ok: bool) -> None:
    assert accepts(calls(), BYTES.encode(markup(*made))) == ok


def test_how_many_calls_and_which() -> None:
    one, two, other = markup(("now", {})), markup(("now", {}), ("opt", {})), markup(("opt", {}))
    for wish, want in (
        (calls(), (True, True, True)),
        (calls(parallel=False), (True, False, True)),
        (calls(only="now"), (True, False, False)),
    ):
        assert tuple(accepts(wish, BYTES.encode(text)) for text in (one, two, other)) == want
    either = calls(content={"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
    assert accepts(either, BYTES.encode(two)) and accepts(either, BYTES.encode('{"x": 5}'))
    assert not accepts(either, BYTES.encode('{"x": "y"}')) and not accepts(calls(), BYTES.encode('{"x": 5}'))


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_whatever_the_grammar_lets_through_is_read_as_calls(seed: int) -> None:
    """Random tokens under the mask: the parser finds arguments of the schema, and nothing else."""
    rng, matcher, tokens = random.Random(seed), GRAMMARS.matcher(calls()), list[int]()
    printable = {FIRST_BYTE + b for b in range(32, 127)}
    while len(tokens) < 3000:
        can = ids(matcher, MODEL_VOCAB)
        if EOS in can:
            break
        token = rng.choice(sorted((can & printable) or can))
        assert matcher.take(token)
        tokens.append(token)
    message, parser = Message(), Parser(properties={})
    message.take([*parser.feed(BYTES.decode(tokens)), *parser.finish()])
    assert message.content == "" and message.calls
    for name, arguments in message.calls:
        values = json.loads(arguments)
        assert name in {f["name"] for f in FUNCTIONS}
        if name == "get_weather":
            assert 1 <= len(values["city"]) <= 12 and values["unit"] in ("C", "F", "it's </b>")
            assert 1 <= values.get("days", 1) <= 14 and -90 <= values.get("place", {"lat": 0})["lat"] <= 90
            assert len(values.get("nick", "")) <= 5


NAMES = ("type", "properties", "required", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "items",
         "pattern", "minLength", "maxLength", "minimum", "a", "additionalProperties")  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(
        ("string", "object", "integer", "array", "null", "a", "#/$defs/a", "^a+$", "(", "x/y")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=150)
@given(JSON, JSON)
def test_any_schema_is_served_or_refused(schema: Any, more: Any) -> None:
    """Nonsense in a tool's parameters is an error that names something, never another exception."""
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": more}
    for given_parameters in (parameters, schema):
        try:
            grammar = call_grammar([{"name": "f", "parameters": given_parameters}], DSML, {})
            GRAMMARS.matcher(StructuredOutputs(grammar=grammar))
        except (ChatError, ParameterError) as err:
            assert str(err)


@pytest.mark.parametrize(
    ("functions", "options", "field"),
    [
        (FUNCTIONS, {"only": "nobody"}, "tool_choice"),
        ([{"name": "f", "parameters": {"type": "array"}}], {}, "tools"),
        ([{"name": "f", "parameters": {"type": "object", "properties": {'a"b': {}}}}], {}, "tools"),
        ([{"name": "f", "parameters": {"type": "object", "required": ["x"]}}], {}, "tools"),
    ],
)
def test_tools_that_cannot_be_forced(functions: list[Any], options: dict[str, Any], field: str) -> None:
    with pytest.raises(ChatError) as error:
        call_grammar(functions, DSML, {}, **options)
    assert error.value.field == field
