"""What an answer must look like, as a request states it; checked on entry, compiled by the engine.

Field names are those of vLLM's ``structured_outputs``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from firesteel.config import ParameterError, SamplingParams

MAX_TEXT = 2**20  # characters of a schema or grammar
MAX_CHOICES = 1024
SOURCE = "structured_outputs"
WHITESPACE = r" |\r?\n[ \t]{0,32}"  # bounded: a model in doubt would else write blanks for ever
KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class StructuredOutputs:
    """One of ``json``, ``json_object``, ``regex``, ``choice`` and ``grammar``.

    json: a JSON schema, as a mapping or as its text (kept as text).
    json_object: any JSON object.
    regex: a regular expression for the whole answer (Rust syntax, no look-around).
    choice: the answer is one of these texts.
    grammar: a context-free grammar in Lark's syntax, beginning at ``start``.
    whitespace_pattern: for JSON, what may stand between two tokens, as a regular
        expression; None: a blank, or a line end with an indentation (``WHITESPACE``).
    disable_any_whitespace: for JSON, nothing may.
    source: the field of the client's request that said so, for error messages.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    source: str = field(default=SOURCE, compare=False)

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise self.wrong(name, "expected true or false")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and 0 < len(value) <= MAX_TEXT):
                raise self.wrong(name, f"expected a text of 1 to {MAX_TEXT} characters")
        if self.json is not None:
            object.__setattr__(self, "json", schema_text(self.json, self.wrong))
        self._check_choice()
        given = [name for name in KINDS if getattr(self, name) not in (None, False, ())]
        if len(given) != 1:
            found = f"found {' and '.join(given)}" if given else "found none"
            raise self.wrong("", f"expected exactly one of {', '.join(KINDS)}; {found}")
        whitespace = self.whitespace_pattern is not None or self.disable_any_whitespace
        if whitespace and not given[0].startswith("json"):
            raise self.wrong("whitespace_pattern", f"only JSON has whitespace to choose, not {given[0]}")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise self.wrong("whitespace_pattern", "contradicts disable_any_whitespace; give one of them")

    def wrong(self, name: str, problem: str) -> ParameterError:
        """An error that names the field: this object's ``name``, or what the client said instead."""
        place = f"{SOURCE}.{name}" if name and self.source == SOURCE else self.source
        return ParameterError(f"{place}: {problem}")

    def _check_choice(self) -> None:
        value = self.choice
        if isinstance(value, str) or not isinstance(value, list | tuple):
            raise self.wrong("choice", "expected a list of texts")
        if not all(isinstance(text, str) and text for text in value) or len(value) > MAX_CHOICES:
            raise self.wrong("choice", f"expected up to {MAX_CHOICES} texts, none of them empty")
        object.__setattr__(self, "choice", tuple(value))

    @property
    def kind(self) -> str:
        """Which of the five it is."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False, ()))

    @property
    def json_options(self) -> dict[str, Any]:
        """llguidance's options for JSON; ``oneOf`` is read as ``anyOf``."""
        if self.disable_any_whitespace:
            return {"whitespace_flexible": False, "coerce_one_of": True}
        return {"whitespace_pattern": self.whitespace_pattern or WHITESPACE, "coerce_one_of": True}

    @classmethod
    def of(cls, value: Any) -> StructuredOutputs | None:
        """From None, an instance or a mapping whose absent fields may be null; raises ParameterError."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ParameterError(f"{SOURCE}: expected an object with one of {', '.join(KINDS)}")
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(map(str, value)) - set(known))
        if unknown:
            raise ParameterError(f"{SOURCE}: unknown field {unknown[0]!r}; known: {', '.join(known)}")
        return cls(**{name: v for name, v in value.items() if v is not None})


def checked(params: SamplingParams) -> StructuredOutputs | None:
    """A request's wish; raises ParameterError for it and for what contradicts it."""
    if not (params.thinking is None or isinstance(params.thinking, bool)):
        raise ParameterError(f"thinking={params.thinking!r}: expected true, false or null")
    wish = StructuredOutputs.of(params.structured_outputs)
    for name in ("ignore_eos", "min_tokens"):
        if wish is not None and getattr(params, name):
            raise ParameterError(f"{name}: the answer ends where structured_outputs says; leave it out")
    return wish


def schema_text(value: Any, wrong: Callable[[str, str], ParameterError]) -> str:
    """A JSON schema as text, from a mapping, a boolean or its text; raises what ``wrong`` makes."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as err:
            raise wrong("json", f"not JSON ({err}); send a JSON schema") from err
    if not isinstance(value, Mapping | bool):
        raise wrong("json", f"expected a JSON schema (an object), found {type(value).__name__}")
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as err:
        raise wrong("json", f"not a JSON schema ({err})") from err
    if len(text) > MAX_TEXT:
        raise wrong("json", f"{len(text)} characters; at most {MAX_TEXT}")
    return text


def lark_text(text: str) -> str:
    """A text as a literal of Lark's syntax; control characters are escaped."""
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub("[\x7f-\x9f\u2028\u2029]", lambda m: f"\\u{ord(m[0]):04x}", quoted)
