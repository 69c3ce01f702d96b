"""What V4 writes, as reasoning, content and tool calls.

    REASONING  --</think>-->  CONTENT  --tool_calls-->  BLOCK  --invoke-->  CALL  --parameter-->  VALUE

A state machine over the lexer's events; what it has said after a text does
not depend on how the text was cut. It never raises on what a model writes.

- A tool block inside the reasoning ends the reasoning. ``<think>`` in content
  opens it again. A second ``<think>`` and a lone ``</think>`` are swallowed.
- An invoke may stand in the content without a block around it.
- Between and behind calls text is discarded; so is the blank line before a block.
- A value without its closing tag ends at the next tag of its call.
- No DSML tag ever gets into reasoning, content or arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from firesteel.models.deepseek_v4 import chat_strings
from firesteel.serve.lexing import Event, Lexer, Tag, Text, Think

BLOCKS = ("tool_calls", "toolcalls", "tool")  # the last two are seen from real models
WRAPPERS = ("arguments", "input")
Kind = Literal["reasoning", "content", "call", "arguments"]


@dataclass(frozen=True)
class Delta:
    """Something that became certain: text of a kind, or (``call``) the name of a new call ``index``."""

    kind: Kind
    text: str
    index: int = -1


@dataclass
class Message:
    """Deltas put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # (name, JSON text of the arguments)

    def take(self, deltas: Iterable[Delta]) -> None:
        """Add what a parser said."""
        for delta in deltas:
            if delta.kind == "reasoning":
                self.reasoning += delta.text
            elif delta.kind == "content":
                self.content += delta.text
            elif delta.kind == "call":
                self.calls.append((delta.text, ""))
            else:
                name, arguments = self.calls[delta.index]
                self.calls[delta.index] = (name, arguments + delta.text)


class _State(Enum):
    REASONING = 0
    CONTENT = 1
    BLOCK = 2  # inside or behind a block, outside a call
    CALL = 3  # inside a call, outside a value
    VALUE = 4


class Parser:
    """One answer's text.

    thinking: the answer starts inside the reasoning.
    properties: function name -> the names of its parameters; only needed to
        take apart arguments that came wrapped into one object.
    max_calls: calls beyond are discarded (None: no limit).
    """

    def __init__(
        self,
        thinking: bool = False,
        properties: Mapping[str, frozenset[str]] | None = None,
        max_calls: int | None = None,
    ) -> None:
        self._lexer = Lexer()
        self._state = _State.REASONING if thinking else _State.CONTENT
        self._properties = properties or {}
        self._max_calls = max_calls
        self._newlines = ""  # of the content, in case a block follows
        self._call: _Call | None = None
        self.calls = 0

    def feed(self, text: str) -> list[Delta]:
        """What the next text makes certain."""
        return _joined(d for event in self._lexer.feed(text) for d in self._take(event))

    def finish(self, truncated: bool = False) -> list[Delta]:
        """The end of the text. If it was cut off (``truncated``) an open call stays as it is: its
        arguments are the beginning of a JSON text. Otherwise it is closed."""
        return _joined(self._finish(truncated))

    def _finish(self, truncated: bool) -> Iterator[Delta]:
        if not (truncated and self._state is _State.VALUE):
            for event in self._lexer.finish():
                yield from self._take(event)
        if self._newlines:
            yield Delta("content", self._newlines)
            self._newlines = ""
        if not truncated:
            yield from self._end_call()

    # ---- events --------------------------------------------------------------
    def _take(self, event: Event) -> Iterator[Delta]:
        if isinstance(event, Text):
            yield from self._text(event.text)
        elif isinstance(event, Think):
            yield from self._think(event)
        elif event.name in BLOCKS:
            yield from self._block(event)
        elif event.name == "invoke":
            yield from self._invoke(event)
        elif event.name == "parameter":
            yield from self._parameter(event)

    def _text(self, text: str) -> Iterator[Delta]:
        if self._state is _State.REASONING:
            yield Delta("reasoning", text)
        elif self._state is _State.CONTENT:
            text = self._newlines + text
            held = min(len(text) - len(text.rstrip("\n")), 2)
            self._newlines = "\n" * held
            if len(text) > held:
                yield Delta("content", text[: len(text) - held])
        elif self._state is _State.VALUE and self._call is not None:
            yield from self._call.add(text)

    def _think(self, tag: Think) -> Iterator[Delta]:
        if self._state is _State.VALUE:
            yield from self._text(tag.raw)
        elif self._state is _State.REASONING and tag.close:
            self._state = _State.CONTENT
        elif self._state is _State.CONTENT and not tag.close:
            if self._newlines:
                yield Delta("content", self._newlines)
                self._newlines = ""
            self._state = _State.REASONING

    def _block(self, tag: Tag) -> Iterator[Delta]:
        opened = self._state in (_State.REASONING, _State.CONTENT) and not tag.close
        ended = self._state in (_State.CALL, _State.VALUE) and tag.close
        if opened or ended:
            self._newlines = ""
            yield from self._end_call()
            self._state = _State.BLOCK

    def _invoke(self, tag: Tag) -> Iterator[Delta]:
        if self._state is _State.REASONING or (self._state is _State.CONTENT and tag.close):
            return
        self._newlines = ""
        yield from self._end_call()
        self._state = _State.BLOCK
        name = tag.attributes.get("name")
        if tag.close or not name:
            return
        self._state = _State.CALL
        if self._max_calls is None or self.calls < self._max_calls:
            self._call = _Call(self.calls, self._properties.get(name, frozenset()))
            yield Delta("call", name, self.calls)
            self.calls += 1

    def _parameter(self, tag: Tag) -> Iterator[Delta]:
        if self._state not in (_State.CALL, _State.VALUE):
            return
        if self._state is _State.VALUE and self._call is not None:
            yield from self._call.end_value(closed=tag.close)
        self._state = _State.CALL if tag.close else _State.VALUE
        if not tag.close and self._call is not None:
            yield from self._call.begin_value(tag.attributes.get("name"), tag.attributes.get("string"))

    def _end_call(self) -> Iterator[Delta]:
        if self._call is not None:
            if self._state is _State.VALUE:
                yield from self._call.end_value(closed=False)
            yield from self._call.end()
        self._call = None


class Verbatim:
    """``Parser`` for an answer that a grammar writes: behind the reasoning nothing is markup.

    Think tags are taken out of the reasoning only.
    """

    calls = 0

    def __init__(self, thinking: bool = False) -> None:
        self._reasons, self._held = thinking, ""

    def feed(self, text: str) -> list[Delta]:
        """What the next text makes certain."""
        return _joined(self._feed(self._held + text))

    def _feed(self, text: str) -> Iterator[Delta]:
        self._held = ""
        if self._reasons:
            before, tag, behind = text.partition(chat_strings.END_THINK)
            self._reasons = not tag
            if not tag:
                keep = _started(before)
                before, self._held = before[: len(before) - keep], before[len(before) - keep :]
            yield Delta("reasoning", before.replace(chat_strings.THINK, ""))
            text = behind
        yield Delta("content", text)

    def finish(self, truncated: bool = False) -> list[Delta]:
        """The end of the text."""
        held, self._held = self._held, ""
        return _joined([Delta("reasoning", held)])


def _started(text: str) -> int:
    """Length of the longest end of ``text`` that may be the beginning of a think tag."""
    tags = (chat_strings.THINK, chat_strings.END_THINK)
    sizes = (n for n in range(len(chat_strings.END_THINK) - 1, 0, -1) if len(text) >= n)
    return next((n for n in sizes if any(t.startswith(text[-n:]) for t in tags)), 0)


class _Call:
    """Writes the JSON text of one call's arguments piece by piece.

    Strings are written as they come; any other value when it is complete,
    because only then it is known whether it is JSON.
    """

    def __init__(self, index: int, properties: frozenset[str]) -> None:
        self._index, self._properties = index, properties
        self._seen: set[str] = set()
        self._name: str | None = None  # of the open value; None: it is discarded
        self._streams = False  # the open value is a string that is written as it comes
        self._value = ""  # of the open value: all of it, or the newline held back
        self._string = False  # the open value is marked as a string
        self._wrapped: tuple[str, str, bool] | None = None  # first value, if it may hold all arguments

    def _say(self, text: str) -> Iterator[Delta]:
        if text:
            yield Delta("arguments", text, self._index)

    def _key(self, name: str) -> str:
        lead = ", " if self._seen else "{"
        self._seen.add(name)
        return f"{lead}{json.dumps(name, ensure_ascii=False)}: "

    def _may_wrap(self, name: str) -> bool:
        known = bool(self._properties) and name not in self._properties
        return known and not self._seen and name in WRAPPERS

    def begin_value(self, name: str | None, string: str | None) -> Iterator[Delta]:
        """A parameter opens; ``string`` is its attribute: "true", "false" or absent."""
        yield from self._release()
        self._name = name if name and name not in self._seen else None
        self._value, self._streams, self._string = "", False, string == "true"
        if self._name is None or self._may_wrap(self._name):
            return
        self._streams = self._string
        yield from self._say(self._key(self._name) + ('"' if self._streams else ""))

    def add(self, text: str) -> Iterator[Delta]:
        """Text of the open value."""
        self._value += text
        if self._name is not None and self._streams:
            held = self._value.endswith("\n")  # a separator, if the closing tag is missing
            ready = self._value[:-1] if held else self._value
            self._value = "\n" if held else ""
            yield from self._say(_escaped(ready))

    def end_value(self, closed: bool) -> Iterator[Delta]:
        """The value ends, with its closing tag or at the next tag."""
        if not closed:
            self._value = self._value.removesuffix("\n")
        name, self._name = self._name, None
        if name is None:
            return
        if self._streams:
            yield from self._say(_escaped(self._value) + '"')
        elif self._may_wrap(name):
            self._wrapped = (name, self._value, self._string)
        else:
            yield from self._say(_literal(self._value, False))

    def _release(self) -> Iterator[Delta]:
        """A value that was not alone is an argument like any other."""
        if self._wrapped is not None:
            (name, value, string), self._wrapped = self._wrapped, None
            yield from self._say(self._key(name) + _literal(value, string))

    def end(self) -> Iterator[Delta]:
        """The call is complete."""
        if self._wrapped is not None:
            value = _load(self._wrapped[1])
            if isinstance(value, dict) and value and self._properties.issuperset(value):
                yield from self._say(self._wrapped[1].strip())
                return
        yield from self._release()
        yield from self._say("}" if self._seen else "{}")


def _escaped(text: str) -> str:
    """``text`` as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _load(text: str) -> Any:
    """The JSON value, or None if it is none (or null)."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _literal(value: str, string: bool) -> str:
    """A value as JSON: as it stands if it is JSON and no string is wanted, else as a string."""
    bare = value.strip()
    if not string and (bare == "null" or _load(bare) is not None):
        return bare
    return f'"{_escaped(value)}"'


def _joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbours of one kind and call as one."""
    out: list[Delta] = []
    for delta in deltas:
        last = out[-1] if out else None
        if last and delta.kind != "call" and (last.kind, last.index) == (delta.kind, delta.index):
            out[-1] = Delta(delta.kind, last.text + delta.text, delta.index)
        elif delta.text:
            out.append(delta)
    return out
