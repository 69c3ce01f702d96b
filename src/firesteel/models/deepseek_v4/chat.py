"""Conversations to DeepSeek-V4 prompts.

V4 ships no chat template; its prompt is built by rules: BOS, then every
message in order, nothing in between. A user or developer message opens the
answer that follows it (assistant token, then ``<think>`` or ``</think>``), so
an assistant message never writes its own opening. Tool results travel inside
user messages. The result is one string to be tokenised *without* adding
special tokens.

Three passes: ``_read`` checks messages and turns them into ``_Turn`` records,
``_merge``/``_order_results``/``_drop`` rearrange them, ``_render`` writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from firesteel.models.deepseek_v4 import chat_strings as s

Message = Mapping[str, Any]

ROLES = ("system", "user", "developer", "assistant", "tool", "latest_reminder")
API_EFFORTS = {
    "minimal": "low",
    "low": "low",
    "medium": "low",
    "high": "high",
    "xhigh": "high",
    "max": "max",
}


class ChatError(ValueError):
    """A conversation that cannot be encoded.

    ``index`` is the message at fault (None: the request as a whole), ``field``
    the place inside it, e.g. ``tool_calls[0].function.arguments``.
    """

    def __init__(self, index: int | None, field: str, problem: str) -> None:
        self.index = index
        self.field = field
        at = field if index is None else f"messages[{index}].{field}" if field else f"messages[{index}]"
        super().__init__(f"{at}: {problem}")


@dataclass(frozen=True)
class ChatMode:
    """Whether the model thinks, and how hard (low, high or max)."""

    thinking: bool
    effort: str


def resolve_mode(
    thinking: bool | None = None,
    enable_thinking: bool | None = None,
    reasoning_effort: str | None = None,
) -> ChatMode:
    """What the three request fields that clients use mean together.

    The model thinks unless the flags say otherwise; ``reasoning_effort``
    "none" switches thinking off whatever the flags say. An absent effort is
    "high" when thinking; minimal, low and medium are "low"; xhigh is "high".
    Raises ChatError for a value that is none of these.
    """
    for name, flag in (("thinking", thinking), ("enable_thinking", enable_thinking)):
        if flag is not None and not isinstance(flag, bool):
            raise ChatError(None, name, f"expected true or false, found {flag!r}")
    on = (thinking is None and enable_thinking is None) or bool(thinking) or bool(enable_thinking)
    if reasoning_effort is None:
        return ChatMode(on, "high" if on else "low")
    if reasoning_effort == "none":
        return ChatMode(False, "low")
    if not isinstance(reasoning_effort, str) or reasoning_effort not in API_EFFORTS:
        wanted = ", ".join(["none", *API_EFFORTS])
        raise ChatError(None, "reasoning_effort", f"{reasoning_effort!r} is none of {wanted}")
    return ChatMode(on, API_EFFORTS[reasoning_effort])


def encode_messages(
    messages: Sequence[Message],
    thinking: bool,
    reasoning_effort: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    response_format: Any = None,
    drop_thinking: bool = True,
    *,
    add_bos: bool = True,
    allow_images: bool = False,
) -> str:
    """The prompt of a conversation, ready for ``Tokenizer.encode``.

    messages: OpenAI-style dicts. Roles: system, user, developer, assistant,
        tool, latest_reminder. ``content`` is text or a list of blocks.
        Assistants may carry ``tool_calls`` and ``reasoning`` (or
        ``reasoning_content``); ``wo_eos`` leaves an assistant message open, to
        be continued. ``task`` asks for one of the classification tasks.
        System and developer messages may carry ``tools`` and
        ``response_format`` themselves.
    thinking, reasoning_effort: the mode; effort low (also None), high or max
        counts only when thinking. ``resolve_mode`` makes them from API fields.
    tools, response_format: of the whole request; they go to the first system
        message, or to an empty one that is put first. ``response_format`` is
        the JSON value to show (the schema, not the API's wrapper of it).
    drop_thinking: remove the reasoning of finished turns, and developer
        messages before the last user turn. Without effect when not thinking
        or when any message has tools.
    add_bos: False when the text continues a prompt.
    allow_images: write the image placeholder for image blocks instead of
        refusing them.

    Raises ChatError naming the message and the field.
    """
    effort = "low" if reasoning_effort is None else reasoning_effort
    if effort not in s.EFFORT_TEXTS:
        raise ChatError(None, "reasoning_effort", f"{effort!r} is none of {', '.join(s.EFFORT_TEXTS)}")
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ChatError(None, "messages", "expected a list of messages")
    if not messages:
        raise ChatError(None, "messages", "the list is empty; send at least one message")
    turns = [_read(index, message, allow_images) for index, message in enumerate(messages)]
    turns = _attach(turns, tools, response_format)
    has_tools = any(turn.tools for turn in turns)
    turns = _order_results(_merge(turns))
    drop = drop_thinking and not has_tools
    if thinking and drop:
        turns = _drop(turns)
    head = s.BOS if add_bos else ""
    if thinking:
        head += s.EFFORT_TEXTS[effort]
    last_user = _last_user(turns)
    body = (_render(turns, at, thinking, drop, last_user) for at in range(len(turns)))
    return head + "".join(body)


# ---- reading -------------------------------------------------------------
@dataclass(frozen=True)
class _Part:
    text: str
    result_of: str | None = None  # id of the call whose result this is; None: plain text


@dataclass(frozen=True)
class _Turn:
    index: int  # in the request's messages; of the first one when several were merged
    role: str
    parts: tuple[_Part, ...]
    reasoning: str = ""
    calls: str = ""  # the rendered call block
    call_ids: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()  # one JSON text per tool
    schema: str = ""
    task: str | None = None
    open_end: bool = False

    @property
    def text(self) -> str:
        return "\n\n".join(part.text for part in self.parts)


@dataclass(frozen=True)
class _Reader:
    """One message with its index, so that every complaint names its place."""

    index: int | None
    message: Message = field(repr=False)

    def fail(self, field: str, problem: str) -> NoReturn:
        raise ChatError(self.index, field, problem)

    def json(self, field: str, value: Any) -> str:
        """JSON the way the model saw it in training: non-ASCII kept, ', ' and ': '."""
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as err:
            self.fail(field, f"not a JSON value ({err})")

    def text(self, field: str) -> str:
        """A text field; absent and null are empty."""
        value = self.message.get(field)
        if value is None:
            return ""
        if not isinstance(value, str):
            self.fail(field, f"expected text, found {_kind(value)}")
        return value

    def tools(self, value: Any, field: str = "tools") -> tuple[str, ...]:
        """OpenAI tool descriptions; only the inner ``function`` objects are shown to the model."""
        if not value:
            return ()
        if not isinstance(value, Sequence) or isinstance(value, str):
            self.fail(field, f"expected a list of tools, found {_kind(value)}")
        texts: list[str] = []
        places: dict[str, int] = {}
        for at, tool in enumerate(value):
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping):
                self.fail(
                    f"{field}[{at}].function", 'missing; a tool is {"type": "function", "function": {...}}'
                )
            if not isinstance(function.get("name"), str) or not function["name"]:
                self.fail(f"{field}[{at}].function.name", "missing; give the function a name")
            first = places.setdefault(function["name"], at)
            if first != at:
                self.fail(
                    f"{field}[{at}].function.name", f"the name of {field}[{first}]; calls name one function"
                )
            texts.append(self.json(f"{field}[{at}].function", function))
        return tuple(texts)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _read(index: int, message: Message, allow_images: bool) -> _Turn:
    if not isinstance(message, Mapping):
        raise ChatError(index, "", f"expected an object with a role, found {_kind(message)}")
    read = _Reader(index, message)
    role = message.get("role")
    if role not in ROLES:
        read.fail("role", f"{role!r} is none of {', '.join(ROLES)}")
    carries = role in ("system", "developer")
    for name in ("tools", "response_format"):
        if message.get(name) and not carries:
            read.fail(name, f"a {role} message cannot carry it; put it into the request or a system message")
    task = message.get("task")
    if task is not None and (not isinstance(task, str) or task not in s.TASKS or role == "tool"):
        read.fail(
            "task", f"{task!r} on a {role} message; tasks are {', '.join(s.TASKS)}, on any role but tool"
        )
    if role == "tool":
        return _Turn(index, "user", (_result(read),))
    schema = message.get("response_format")
    calls, ids = _calls(read) if role == "assistant" else ("", ())
    return _Turn(
        index=index,
        role=str(role),
        parts=(_Part(_content(read, str(role), allow_images)),),
        reasoning=(read.text("reasoning") or read.text("reasoning_content")) if role == "assistant" else "",
        calls=calls,
        call_ids=ids,
        tools=read.tools(message.get("tools")),
        schema=read.json("response_format", schema) if schema else "",
        task=task,
        open_end=bool(message.get("wo_eos")),
    )


def _content(read: _Reader, role: str, allow_images: bool) -> str:
    """Text of a message; blocks are joined by a blank line."""
    value = read.message.get("content")
    if value is None and role in ("system", "assistant"):
        return ""
    if isinstance(value, list | tuple):
        blocks = [_block(read, f"content[{at}]", block, allow_images) for at, block in enumerate(value)]
        value = "\n\n".join(blocks)
    if not isinstance(value, str):
        read.fail("content", f"expected text or a list of blocks, found {_kind(value)}")
    if role == "developer" and not value:
        read.fail("content", "a developer message must not be empty; leave it out or write its text")
    return value


def _block(read: _Reader, field: str, block: Any, allow_images: bool) -> str:
    if isinstance(block, str):
        return block
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "text":
        text = block.get("text", "")
        if not isinstance(text, str):
            read.fail(f"{field}.text", f"expected text, found {_kind(text)}")
        return text
    if kind in ("image", "image_url"):
        if not allow_images:
            read.fail(field, "images cannot be served; send text blocks only")
        return s.IMAGE
    read.fail(f"{field}.type", f"{kind!r} is not supported; send text blocks")


def _result(read: _Reader) -> _Part:
    """A tool message as a part of a user message."""
    value = read.message.get("content", "")
    if isinstance(value, list | tuple):
        texts = []
        for at, block in enumerate(value):
            if isinstance(block, Mapping) and block.get("type") != "text":
                texts.append(f"[Unsupported {block.get('type')}]")  # the model was trained to read this
            else:
                texts.append(_block(read, f"content[{at}]", block, False))
        value = "\n\n".join(texts)
    if not isinstance(value, str):
        read.fail("content", f"expected the tool's answer as text, found {_kind(value)}")
    call_id = read.message.get("tool_call_id") or ""
    if not isinstance(call_id, str):
        read.fail("tool_call_id", f"expected text, found {_kind(call_id)}")
    return _Part(s.TOOL_RESULT + value + s.END_TOOL_RESULT, call_id)


def _calls(read: _Reader) -> tuple[str, tuple[str, ...]]:
    """(call block, call ids) of an assistant message; ids may be empty strings."""
    calls = read.message.get("tool_calls")
    if not calls:
        return "", ()
    if not isinstance(calls, list | tuple):
        read.fail("tool_calls", f"expected a list, found {_kind(calls)}")
    blocks, ids = [], []
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            read.fail(f"tool_calls[{at}].function", 'missing; expected {"name": ..., "arguments": ...}')
        name = function.get("name")
        if not isinstance(name, str) or not name:
            read.fail(f"tool_calls[{at}].function.name", "missing; give the name of the called function")
        place = f"tool_calls[{at}].function.arguments"
        lines = [
            _parameter(read, place, key, value) for key, value in _arguments(read, place, function).items()
        ]
        blocks.append("\n".join([s.INVOKE % name, "\n".join(lines), s.END_INVOKE]))
        ids.append(str(call.get("id") or function.get("id") or ""))
    return "\n".join([s.TOOL_CALLS, *blocks, s.END_TOOL_CALLS]), tuple(ids)


def _arguments(read: _Reader, place: str, function: Mapping[str, Any]) -> Mapping[str, Any]:
    value = function.get("arguments")
    if value is None or value == "":  # how many clients send a call without arguments
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as err:
            read.fail(place, f"not valid JSON ({err}); send a JSON object as text")
    if not isinstance(value, Mapping):
        read.fail(place, f"expected a JSON object, found {_kind(value)}")
    return value


def _parameter(read: _Reader, place: str, key: str, value: Any) -> str:
    """Strings raw, everything else as JSON; nothing is escaped."""
    is_text = isinstance(value, str)
    text = value if is_text else read.json(f"{place}.{key}", value)
    return s.PARAMETER % (key, "true" if is_text else "false") + text + s.END_PARAMETER


# ---- rearranging -----------------------------------------------------------
def _attach(turns: list[_Turn], tools: Any, response_format: Any) -> list[_Turn]:
    """Give the request's tools and schema to the first system message."""
    read = _Reader(None, {})
    texts = read.tools(tools)
    schema = read.json("response_format", response_format) if response_format else ""
    if not texts and not schema:
        return turns
    at = next((i for i, turn in enumerate(turns) if turn.role == "system"), None)
    if at is None:
        turns, at = [_Turn(0, "system", (_Part(""),)), *turns], 0
    turn = turns[at]
    for name, mine, theirs in (("tools", texts, turn.tools), ("response_format", schema, turn.schema)):
        if mine and theirs:
            raise ChatError(turn.index, name, "given here and in the request; keep one of them")
    full = replace(turn, tools=texts or turn.tools, schema=schema or turn.schema)
    return [*turns[:at], full, *turns[at + 1 :]]


def _merge(turns: list[_Turn]) -> list[_Turn]:
    """Join neighbouring user turns and tool results; text never joins a turn that carries a task."""
    merged: list[_Turn] = []
    for turn in turns:
        before = merged[-1] if merged else None
        is_result = turn.parts[0].result_of is not None
        joins = (
            before is not None and before.role == "user" == turn.role and (is_result or before.task is None)
        )
        if before is None or not joins:
            merged.append(turn)
            continue
        if turn.task is not None:
            problem = "this message joins the user message or tool result before it, where a task is lost"
            raise ChatError(turn.index, "task", f"{problem}; put an assistant message between them")
        merged[-1] = replace(before, parts=before.parts + turn.parts)
    return merged


def _order_results(turns: list[_Turn]) -> list[_Turn]:
    """Sort the tool results of a turn as the preceding calls stand; other parts keep their places."""
    order: dict[str, int] = {}
    ordered = []
    for turn in turns:
        if turn.calls:
            order = {call_id: at for at, call_id in enumerate(turn.call_ids) if call_id}
        results = [part for part in turn.parts if part.result_of is not None]
        if len(results) > 1 and order:
            # an unknown id counts as the first call
            queue = iter(sorted(results, key=lambda part: order.get(part.result_of or "", 0)))
            turn = replace(turn, parts=tuple(p if p.result_of is None else next(queue) for p in turn.parts))
        ordered.append(turn)
    return ordered


def _last_user(turns: list[_Turn]) -> int:
    """Index of the last user or developer turn, -1 if there is none."""
    return max((at for at, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)


def _drop(turns: list[_Turn]) -> list[_Turn]:
    """Remove what thinking mode forgets: developer turns before the last user turn.

    The old reasoning itself is left out when assistants are written.
    """
    last = _last_user(turns)
    return [turn for at, turn in enumerate(turns) if at >= last or turn.role != "developer"]


# ---- writing ---------------------------------------------------------------
def _render(turns: list[_Turn], at: int, thinking: bool, drop: bool, last_user: int) -> str:
    """Text of one turn and, where an answer follows, the opening of that answer."""
    turn = turns[at]
    if turn.role == "assistant":
        after_task = at > 0 and turns[at - 1].task is not None
        reasons = thinking and not after_task and (not drop or at > last_user)
        text = turn.reasoning + s.END_THINK if reasons else ""
        text += turn.text + ("\n\n" + turn.calls if turn.calls else "")
        text += "" if turn.open_end else s.EOS
    else:
        marks = {"system": "", "user": s.USER, "developer": s.USER, "latest_reminder": s.LATEST_REMINDER}
        text = marks[turn.role] + turn.text + _sections(turn)
    return text + _opening(turns, at, thinking, drop, last_user)


def _sections(turn: _Turn) -> str:
    text = ""
    if turn.tools:
        text += "\n\n" + s.TOOLS_HEAD + "\n".join(turn.tools) + s.TOOLS_TAIL
    if turn.schema:
        text += "\n\n" + s.RESPONSE_FORMAT_TEXT + turn.schema
    return text


def _opening(turns: list[_Turn], at: int, thinking: bool, drop: bool, last_user: int) -> str:
    """Assistant token and think tag, or a task token, or nothing."""
    turn = turns[at]
    last = at == len(turns) - 1
    if not last and turns[at + 1].role not in ("assistant", "latest_reminder"):
        return ""
    if turn.task is not None:
        action = s.ASSISTANT + (s.THINK if thinking else s.END_THINK) if turn.task == "action" else ""
        return action + s.TASKS[turn.task]
    opens = turn.role in ("user", "developer")
    if turn.role == "system":
        opens = last or turns[at + 1].role == "assistant"
    if not opens:
        return ""
    thinks = thinking and (not drop or at >= last_user)
    return s.ASSISTANT + (s.THINK if thinks else s.END_THINK)
