"""Cuts generated text into plain text and protocol tags, however the text arrives.

A tag may arrive character by character. Whatever could still become one is
held back, so the sequence of events does not depend on where the text was
cut (adjacent text events aside).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from firesteel.models.deepseek_v4 import chat_strings as s

MAX_HEAD = 512  # characters between the DSML token and ">" of a tag
_STARTS = (s.THINK, s.END_THINK, f"<{s.DSML}", f"</{s.DSML}", s.DSML)
_START = re.compile("|".join(re.escape(t) for t in _STARTS))
_QUOTED = rf'(?:(?!{s.DSML})[^"\n])*'  # a value that holds a DSML token makes the tag malformed
_BODY = rf'(?:"{_QUOTED}"|[^<>"\n])*'
_HEAD = re.compile(rf"({_BODY})>")
_OPEN_HEAD = re.compile(rf'{_BODY}(?:"{_QUOTED})?\Z')
_NAME = re.compile(r"[A-Za-z_]{0,32}")
_ATTRIBUTE = re.compile(r'([A-Za-z_]+)="([^"\n]*)"')


@dataclass(frozen=True)
class Text:
    """Characters that are no tag."""

    text: str


@dataclass(frozen=True)
class Think:
    """``<think>``, or ``</think>`` if ``close``."""

    close: bool

    @property
    def raw(self) -> str:
        """The tag itself."""
        return s.END_THINK if self.close else s.THINK


@dataclass(frozen=True)
class Tag:
    """A DSML tag; name "" for one that is malformed or a DSML token outside a tag."""

    close: bool
    name: str
    attributes: dict[str, str] = field(default_factory=dict)


Event = Text | Think | Tag


class Lexer:
    """``feed`` text, ``finish`` once."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> Iterator[Event]:
        """Events that are certain; the rest waits."""
        buffer, at = self._rest + text, 0
        self._rest = ""
        while (found := _START.search(buffer, at)) is not None:
            if found.start() > at:
                yield Text(buffer[at : found.start()])
            at = found.end()
            if found.group() in (s.THINK, s.END_THINK):
                yield Think(found.group() == s.END_THINK)
            elif found.group() == s.DSML:
                yield Tag(False, "")
            else:
                tag = self._head(found.group().startswith("</"), buffer, at)
                if tag is None:
                    self._rest = buffer[found.start() :]
                    return
                yield tag[0]
                at = tag[1]
        keep = _unfinished(buffer, at)
        if len(buffer) - keep > at:
            yield Text(buffer[at : len(buffer) - keep])
        self._rest = buffer[len(buffer) - keep :]

    def finish(self) -> Iterator[Event]:
        """What was held back: the beginning of a DSML tag is dropped, anything else is text."""
        rest, self._rest = self._rest, ""
        if rest and not rest.startswith(("<｜", "</｜")):
            yield Text(rest)

    @staticmethod
    def _head(close: bool, buffer: str, at: int) -> tuple[Tag, int] | None:
        """The tag whose head starts at ``at`` and where it ends; None if more text is needed.

        Of a malformed one only the DSML token and the name behind it are taken.
        """
        head = _HEAD.match(buffer, at)
        if head is not None and len(head.group(1)) <= MAX_HEAD:
            name = _NAME.match(buffer, at)
            assert name is not None, "matches the empty string"
            return Tag(close, name.group(), dict(_ATTRIBUTE.findall(head.group(1)))), head.end()
        if head is None and len(buffer) - at <= MAX_HEAD and _OPEN_HEAD.match(buffer, at):
            return None
        name = _NAME.match(buffer, at)
        assert name is not None, "matches the empty string"
        return Tag(close, ""), name.end()


def _unfinished(buffer: str, at: int) -> int:
    """Length of the longest end of ``buffer[at:]`` that may be the beginning of a tag."""
    longest = min(max(map(len, _STARTS)) - 1, len(buffer) - at)
    for size in range(longest, 0, -1):
        end = buffer[len(buffer) - size :]
        if any(start.startswith(end) for start in _STARTS):
            return size
    return 0
