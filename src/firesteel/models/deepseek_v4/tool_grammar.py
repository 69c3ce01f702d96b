"""Tools to a grammar of V4's call markup, in Lark's syntax as llguidance reads it.

    "\\n\\n" block;  block: one or more invokes;  invoke: its parameters in the order of its schema

A parameter whose schema says "string" stands raw between its tags, any other
as JSON; which of the two it is, its tag says. The DSML token is named by id,
so it cannot be spelled, and no value can hold it. What JSON Schema says of a
raw string is kept as far as it is ``enum``, ``const``, ``pattern``,
``minLength`` and ``maxLength``; ``format`` is an annotation there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from firesteel.models.deepseek_v4 import chat_strings as s
from firesteel.models.deepseek_v4.chat import ChatError
from firesteel.structured import lark_text

Schema = Mapping[str, Any]
MAX_DEPTH = 8  # of references and alternatives inside one parameter
_DEFINITIONS = ("$defs", "definitions")


def call_grammar(
    functions: Sequence[Schema],
    dsml_id: int,
    options: Mapping[str, Any],
    *,
    only: str | None = None,
    parallel: bool = True,
    content: Schema | None = None,
) -> str:
    """Lark text of an answer that calls.

    functions: the ``function`` objects of the tools. ``options``: llguidance's
    for JSON. ``only``: the one function that is called, once.
    ``parallel``: more than one call may be made. ``content``: a JSON schema
    that the answer may follow instead of calling. Raises ChatError.
    """
    chosen = [f for f in functions if only is None or f.get("name") == only]
    if not chosen:
        names = ", ".join(str(f.get("name")) for f in functions)
        raise ChatError(None, "tool_choice", f"no tool is called {only!r}; there are: {names or 'none'}")
    return _Writer(dsml_id, options).answer(chosen, parallel and only is None, content)


class _Writer:
    """Collects rules and terminals."""

    def __init__(self, dsml_id: int, options: Mapping[str, Any]):
        self._dsml, self._options = f"<[{dsml_id}]>", options
        self._lines: list[str] = []
        self._count = 0

    def answer(self, functions: Sequence[Schema], parallel: bool, content: Schema | None) -> str:
        calls = [self._invoke(f) for f in functions]
        call = self._rule(" | ".join(calls))
        block = [
            lark_text("\n\n"),
            self._markup(s.TOOL_CALLS),
            lark_text("\n"),
            f"{call}{'+' if parallel else ''}",
        ]
        rules = [" ".join([*block, self._markup(s.END_TOOL_CALLS)])]
        if content is not None:
            rules.append(self._json(content, {}))
        start = " | ".join(self._rule(r) for r in rules)
        return "\n".join([f"start: {start}", *self._lines, f"UNMARKED: ~/(?s:.*){s.DSML}(?s:.*)/", ""])

    # ---- a call ---------------------------------------------------------------
    def _invoke(self, function: Schema) -> str:
        name = str(function.get("name"))
        parameters = function.get("parameters") or {}
        kind = parameters.get("type", "object") if isinstance(parameters, Mapping) else None
        properties = parameters.get("properties") or {} if isinstance(parameters, Mapping) else None
        if kind != "object" or not isinstance(properties, Mapping):
            raise ChatError(
                None, "tools", f"{name}: to force a call its parameters must be an object's schema"
            )
        required = parameters.get("required") or []
        if not isinstance(required, list):
            raise ChatError(None, "tools", f"{name}: required is no list of names")
        missing = [key for key in required if key not in properties]
        if missing:
            raise ChatError(None, "tools", f"{name}: {missing[0]!r} is required but has no schema")
        for label in (name, *properties):
            if any(c in label for c in '"\n<>') or s.DSML in label:
                raise ChatError(None, "tools", f"{name}: the markup cannot hold the name {label!r}")
        items = [
            (self._rule(self._parameter(key, schema, parameters)), key in required)
            for key, schema in properties.items()
        ]
        head, tail = self._markup(s.INVOKE % name), self._markup(s.END_INVOKE)
        return self._rule(f"{head} {lark_text(chr(10))} {self._sequence(items)} {tail} {lark_text(chr(10))}")

    def _sequence(self, items: Sequence[tuple[str, bool]]) -> str:
        """Parameters in order, the optional ones or not; without any an empty line."""
        if any(required for _, required in items):
            return " ".join(item if required else f"{item}?" for item, required in items)
        options = []
        for at, (item, _) in enumerate(items):
            options.append(" ".join([item, *(f"{later}?" for later, _ in items[at + 1 :])]))
        return self._rule(" | ".join([*options, lark_text("\n")]))

    def _parameter(self, key: str, schema: Any, root: Schema) -> str:
        raw, rest = _split(schema, root, MAX_DEPTH)
        end = [self._dsml, lark_text(_after(s.END_PARAMETER) + "\n")]
        forms = []
        if raw:
            value = self._terminal(" | ".join(f"({self._raw(r)})" for r in raw))
            forms.append([self._markup(s.PARAMETER % (key, "true")), value, *end])
        if rest is not None:
            value = f"{self._json(rest, root)} {lark_text('</')}"
            forms.append([self._markup(s.PARAMETER % (key, "false")), value, *end])
        return " | ".join(self._rule(" ".join(form)) for form in forms)

    def _raw(self, schema: Schema) -> str:
        """A string as it stands between its tags, up to the "</" of the closing one."""
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            body = "(" + " | ".join(lark_text(v) for v in values if isinstance(v, str)) + ")"
        else:
            low, high = schema.get("minLength", 0), schema.get("maxLength", "")
            if not all(n == "" or (isinstance(n, int) and 0 <= n < 2**31) for n in (low, high)):
                raise ChatError(None, "tools", f"minLength={low!r}, maxLength={high!r}: expected lengths")
            body = f"/(?s:.{{{low},{high}}})/" if low or high != "" else "/(?s:.*)/"
            if "pattern" in schema:
                body += f" & /{_whole(str(schema['pattern']))}/"
            body = f"({body} & UNMARKED)"
        return f"{body} {lark_text('</')}"

    # ---- pieces -----------------------------------------------------------------
    def _json(self, schema: Any, root: Schema) -> str:
        if not isinstance(schema, Mapping):
            schema = {} if schema is True else {"not": {}}
        own = {k: root[k] for k in _DEFINITIONS if k in root}
        text = json.dumps({**own, **schema, "x-guidance": dict(self._options)}, ensure_ascii=False)
        return self._rule(f"%json {text}")

    def _markup(self, tag: str) -> str:
        """A tag: text around the DSML token."""
        before, after = tag.split(s.DSML)
        return f"{lark_text(before)} {self._dsml} {lark_text(after)}"

    def _rule(self, body: str) -> str:
        self._count += 1
        self._lines.append(f"r{self._count}: {body}")
        return f"r{self._count}"

    def _terminal(self, body: str) -> str:
        self._count += 1
        self._lines.append(f"T{self._count}: {body}")
        return f"T{self._count}"


def _after(tag: str) -> str:
    return tag.split(s.DSML)[1]


def _whole(pattern: str) -> str:
    """A JSON Schema pattern, which is searched for, as one that must match everything."""
    left = "" if pattern.startswith("^") else "(?s:.*)"
    right = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
    inner = pattern.removeprefix("^")
    inner = inner[:-1] if not right else inner
    return f"{left}(?:{inner}){right}".replace("/", "\\/")


def _split(schema: Any, root: Schema, depth: int) -> tuple[list[Schema], Any]:
    """(schemas of raw strings, schema of what is written as JSON or None)."""
    if schema is True or schema == {}:
        return [{}], {"type": ["number", "boolean", "null", "array", "object"]}
    if not isinstance(schema, Mapping) or depth == 0:
        return [], schema
    target = _resolve(schema, root)
    if target is not None:
        raw, rest = _split(target, root, depth - 1)
        return (raw, None) if raw and rest is None else ([], schema)
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list) and not {"type", "enum", "const", "allOf"} & set(schema):
            parts = [_split(part, root, depth - 1) for part in schema[name]]
            raws = [r for raw, _ in parts for r in raw]
            rests = [rest for _, rest in parts if rest is not None]
            return raws, {"anyOf": rests} if rests else None
    if isinstance(schema.get("enum", []), list) and {"enum", "const"} & set(schema):
        values = schema.get("enum", [schema.get("const")])
        others = [v for v in values if not isinstance(v, str)]
        texts = [v for v in values if isinstance(v, str)]
        return [{"enum": texts}] if texts else [], {"enum": others} if others else None
    kinds = schema.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or "string" not in kinds or "allOf" in schema:
        return [], schema
    others = [k for k in kinds if k != "string"]
    return [schema], {**schema, "type": others} if others else None


def _resolve(schema: Schema, root: Schema) -> Any:
    """What a local ``$ref`` points at; None if there is none."""
    parts = str(schema.get("$ref", "")).split("/")
    if len(parts) != 3 or parts[0] != "#" or parts[1] not in _DEFINITIONS:
        return None
    definitions = root.get(parts[1])
    return definitions.get(parts[2]) if isinstance(definitions, Mapping) else None
