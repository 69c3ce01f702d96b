"""From a chat request to the prompt the model sees and to how its answer is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firesteel.models.deepseek_v4.chat import ChatError, ChatMode, encode_messages, resolve_mode
from firesteel.serve.errors import ApiError, bad
from firesteel.serve.parsing import Parser, Verbatim
from firesteel.serve.protocol import ChatRequest
from firesteel.serve.structured import shown_schema, verbatim

_SWITCHES = ("thinking", "enable_thinking", "reasoning_effort", "drop_thinking")


@dataclass(frozen=True)
class ChatPrompt:
    """The encoded conversation and what its answer's parser must know."""

    text: str
    thinking: bool  # the answer starts inside the reasoning
    properties: Mapping[str, frozenset[str]]  # parameter names by function
    max_calls: int | None
    verbatim: bool = False  # a grammar says what stands behind the reasoning: no markup to take apart

    def parser(self) -> Parser | Verbatim:
        """A fresh parser for one sample."""
        if self.verbatim:
            return Verbatim(self.thinking)
        return Parser(self.thinking, self.properties, self.max_calls)


def chat_prompt(asked: ChatRequest) -> ChatPrompt:
    """Raises a 400 that names the message and the field."""
    mode, drop = _mode(asked)
    tools = asked.tools if asked.tool_choice != "none" else None
    messages = _last_message(asked)
    try:
        text = encode_messages(
            messages, mode.thinking, mode.effort, tools, shown_schema(asked), drop_thinking=drop
        )
    except ChatError as err:
        param = "messages" if err.index is not None else err.field.partition("[")[0]
        raise ApiError(400, str(err), param=param or None) from err
    last = messages[-1]
    thinking = mode.thinking and last.get("role") != "assistant" and not last.get("task")
    limit = 1 if asked.parallel_tool_calls is False else None
    calls = 0 if asked.tool_choice == "none" else limit
    return ChatPrompt(text, thinking, _properties(asked), calls, verbatim(asked))


def _mode(asked: ChatRequest) -> tuple[ChatMode, bool]:
    """Thinking and effort from all the places where clients put them; and whether old reasoning is dropped."""
    extra = dict(asked.chat_template_kwargs or {})
    unknown = sorted(set(extra) - set(_SWITCHES))
    if unknown:
        known = ", ".join(_SWITCHES)
        raise bad("chat_template_kwargs", f"unknown key {unknown[0]!r}; known: {known}", "unsupported_field")
    thinking: Any = asked.thinking
    if isinstance(thinking, dict):
        kind = thinking.get("type")
        if kind not in ("enabled", "disabled"):
            raise bad("thinking", f"type {kind!r} is unknown; expected enabled or disabled")
        thinking = kind == "enabled"
    given = {
        "thinking": thinking,
        "enable_thinking": asked.enable_thinking,
        "reasoning_effort": asked.reasoning_effort or (asked.reasoning or {}).get("effort"),
    }
    for name in given:
        given[name] = given[name] if given[name] is not None else extra.get(name)
    drop = extra.get("drop_thinking", True)
    if not isinstance(drop, bool):
        raise bad("chat_template_kwargs", f"drop_thinking={drop!r}: expected true or false")
    try:
        return resolve_mode(**given), drop
    except ChatError as err:
        raise ApiError(400, str(err), param=err.field) from err


def _last_message(asked: ChatRequest) -> list[dict[str, Any]]:
    """An assistant message at the end is continued if the request says so."""
    messages = asked.messages
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        if asked.continue_final_message:
            raise bad("continue_final_message", "the last message is not the assistant's; leave it out")
        return messages
    if last.get("task"):
        return messages
    if not (asked.continue_final_message or last.get("prefix") is True or last.get("wo_eos") is True):
        raise bad(
            "messages",
            "the last one is the assistant's; set continue_final_message=true to have it continued, "
            "or end with a user message",
        )
    if last.get("tool_calls"):
        raise bad("messages", "a message with tool_calls cannot be continued; send the tools' results")
    return [*messages[:-1], {**last, "wo_eos": True}]


def _properties(asked: ChatRequest) -> dict[str, frozenset[str]]:
    """Parameter names of the tools of the request and of its messages; the encoder has checked the tools."""
    out: dict[str, frozenset[str]] = {}
    carried = [m.get("tools") for m in asked.messages if m.get("role") in ("system", "developer")]
    for tool in [*(asked.tools or []), *(t for tools in carried if isinstance(tools, list) for t in tools)]:
        function = tool.get("function") if isinstance(tool, dict) else None
        parameters = function.get("parameters") if isinstance(function, dict) else None
        names = parameters.get("properties") if isinstance(parameters, dict) else None
        if isinstance(function, dict) and isinstance(names, dict):
            out[str(function.get("name"))] = frozenset(map(str, names))
    return out
