"""What a request's fields say of the form of its answer, as one grammar for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firesteel.config import ParameterError
from firesteel.models.deepseek_v4 import chat_strings
from firesteel.models.deepseek_v4.chat import ChatError
from firesteel.models.deepseek_v4.tool_grammar import call_grammar
from firesteel.serve.errors import ApiError, bad, of_parameter
from firesteel.serve.protocol import GUIDED, Asked, ChatRequest
from firesteel.structured import StructuredOutputs
from firesteel.tokenizer import Tokenizer

JSON_OBJECT = {"type": "object"}
OPTIONS = StructuredOutputs(json_object=True).json_options  # for arguments of calls


def wish_of(asked: Asked) -> StructuredOutputs | None:
    """From ``response_format``, ``structured_outputs`` or a ``guided_*`` field; raises a 400."""
    given: dict[str, dict[str, Any]] = {}
    schema = schema_of(asked)
    if schema is not None:
        form = {"json_object": True} if schema is JSON_OBJECT else {"json": schema}
        given["response_format"] = {**form, "source": "response_format"}
    if asked.structured_outputs is not None:
        if "source" in asked.structured_outputs:
            raise bad("structured_outputs", "unknown field 'source'")
        given["structured_outputs"] = asked.structured_outputs
    for name, field in GUIDED.items():
        value = getattr(asked, name)
        if value is not None:
            given[name] = {field: value, "source": name}
    if len(given) > 1:
        first, second = list(given)[:2]
        raise bad(second, f"beside {first}; send one of them")
    try:
        return StructuredOutputs.of(next(iter(given.values()), None))
    except ParameterError as err:
        raise of_parameter(str(err)) from err


def schema_of(asked: Asked) -> Mapping[str, Any] | None:
    """The JSON schema that ``response_format`` asks for, None for text; raises a 400."""
    form = asked.response_format or {"type": "text"}
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return JSON_OBJECT
    if kind != "json_schema":
        raise bad(
            "response_format", f"type {kind!r} is not served; expected text, json_object or json_schema"
        )
    inner = form.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise bad("response_format", "json_schema needs {name, schema}, schema being an object")
    return schema


def shown_schema(asked: Asked) -> Mapping[str, Any] | None:
    """The schema that the prompt tells the model; of any JSON object there is nothing to tell."""
    schema = schema_of(asked)
    return None if schema is JSON_OBJECT else schema


def chat_wish(asked: ChatRequest, tokenizer: Tokenizer) -> StructuredOutputs | None:
    """The grammar of a chat's answer: a form, forced calls, or a form that calls may take the place of."""
    wish, choice = wish_of(asked), asked.tool_choice
    forced = choice not in (None, "auto", "none")
    if wish is not None and asked.continue_final_message:
        raise bad(wish.source, "cannot begin in the middle of an answer; leave out continue_final_message")
    offered = bool(asked.tools) and choice != "none"
    if not (forced or (offered and asked.response_format is not None and wish is not None)):
        return wish
    if wish is not None and wish.source != "response_format":
        raise bad(wish.source, "contradicts tool_choice; leave one of them out")
    if not tokenizer.has(chat_strings.DSML):
        raise bad("tool_choice", f"the tokenizer has no {chat_strings.DSML} token; use auto")
    try:
        grammar = call_grammar(
            [tool["function"] for tool in asked.tools or []],
            tokenizer.id_of(chat_strings.DSML),
            OPTIONS,
            only=choice["function"]["name"] if isinstance(choice, dict) else None,
            parallel=asked.parallel_tool_calls is not False,
            content=None if forced else schema_of(asked),
        )
    except ChatError as err:
        raise ApiError(400, str(err), param=err.field) from err
    return StructuredOutputs(grammar=grammar, source="tool_choice" if forced else "response_format")


def verbatim(asked: ChatRequest) -> bool:
    """Whether the answer behind its reasoning is not markup but exactly what the grammar says."""
    calls = bool(asked.tools) and asked.tool_choice != "none" and asked.response_format is not None
    return wish_of(asked) is not None and not calls and asked.tool_choice in (None, "auto", "none")
