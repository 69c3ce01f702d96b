"""The OpenAPI description: bodies from the request models themselves, answers as clients may rely on them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from firesteel import __version__
from firesteel.serve.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_ERRORS = {
    "400": "a field is wrong or not served; error.param names it",
    "401": "no valid API key",
    "404": "no such model",
    "413": "the body is too large",
    "429": "too many requests wait; see Retry-After",
    "500": "this request failed, the message holds its id; others go on",
    "503": "loading, dead or shutting down; see Retry-After",
}
_POST: dict[str, tuple[type[BaseModel], str, str]] = {
    "/v1/completions": (CompletionRequest, "Completion", "Continue prompts"),
    "/v1/chat/completions": (ChatRequest, "ChatCompletion", "Answer a conversation"),
    "/tokenize": (TokenizeRequest, "Tokens", "Text or a conversation to token ids"),
    "/detokenize": (DetokenizeRequest, "Text", "Token ids to text"),
}
_GET: dict[str, tuple[str | None, str, tuple[str, ...]]] = {
    "/health": ("Status", "200 unless the engine is dead", ("503",)),
    "/ready": ("Status", "200 if a request sent now would be answered", ("503",)),
    "/version": ("Version", "The server's version", ()),
    "/tokenizer_info": ("TokenizerInfo", "Names of special tokens", ("400", "401", "503")),
    "/metrics": (None, "Prometheus metrics", ()),
    "/v1/models": ("Models", "The served model under all its names", ("401",)),
    "/firesteel/stats": ("Stats", "The numbers of the page: seconds after `since`", ("400", "401")),
    "/v1/models/{name}": ("Model", "The served model by name", ("401", "404")),
}
_PARAMETERS = {
    "/v1/models/{name}": {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}},
    "/firesteel/stats": {"name": "since", "in": "query", "schema": {"type": "number"}},
}


# ---- schemas of answers -----------------------------------------------------------
def _object(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "required": sorted(required), "properties": {**required, **optional}}


def _maybe(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _const(value: str) -> dict[str, Any]:
    return {"const": value}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
_FINISH = {"enum": ["stop", "length", "tool_calls", "abort"]}
_USAGE = _object(
    {
        "prompt_tokens": COUNT,
        "completion_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": _object({"cached_tokens": COUNT}),
        "completion_tokens_details": _object({"reasoning_tokens": COUNT}),
    }
)
_CALL = _object(
    {"id": TEXT, "type": _const("function"), "function": _object({"name": TEXT, "arguments": TEXT})}
)
_MESSAGE = _object(
    {"role": _const("assistant"), "content": _maybe(TEXT)}, reasoning=TEXT, tool_calls=_list(_CALL)
)
_COMMON = {"index": COUNT, "finish_reason": _FINISH, "seed": COUNT}


def _answer(kind: str, **choice: Any) -> dict[str, Any]:
    more = {"logprobs": _maybe({"type": "object"})}
    head: dict[str, Any] = {"id": TEXT, "object": _const(kind), "created": COUNT, "model": TEXT}
    return _object({**head, "choices": _list(_object({**_COMMON, **choice, **more})), "usage": _USAGE})


_MODEL = _object({"id": TEXT, "object": _const("model"), "created": COUNT, "owned_by": TEXT})
_ANSWERS: dict[str, Any] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": TEXT,
                    "type": TEXT,
                    "param": _maybe(TEXT),
                    "code": {"anyOf": [TEXT, {"type": "integer"}]},
                }
            )
        }
    ),
    "Status": _object({"status": TEXT}, reason=TEXT),
    "Version": _object({"version": TEXT}),
    "TokenizerInfo": _object({"tokenizer_class": TEXT, "bos_token": TEXT, "eos_token": _maybe(TEXT)}),
    "Model": _MODEL,
    "Models": _object({"object": _const("list"), "data": _list(_MODEL)}),
    "Completion": _answer("text_completion", text=TEXT),
    "ChatCompletion": _answer("chat.completion", message=_MESSAGE),
    "Tokens": _object(
        {"count": COUNT, "max_model_len": COUNT, "tokens": _list(COUNT)}, token_strs=_list(TEXT)
    ),
    "Stats": {"type": "object"},
    "Text": _object({"prompt": TEXT}),
}


# ---- the document -----------------------------------------------------------------------
def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": _reference(name)}}


def _responses(answer: str | None, codes: tuple[str, ...], streams: bool = False) -> dict[str, Any]:
    content = _content(answer) if answer is not None else {"text/plain": {"schema": TEXT}}
    if streams:
        content["text/event-stream"] = {"schema": {"description": "chunks as JSON, then [DONE]"}}
    out: dict[str, Any] = {"200": {"description": "the answer", "content": content}}
    for code in codes:
        out[code] = {"description": _ERRORS[code], "content": _content("Error")}
    return out


def _message_schema() -> dict[str, Any]:
    """What the handler of a chat checks itself: roles and contents."""
    part = _object({"type": _const("text"), "text": TEXT})
    content = {"anyOf": [TEXT, _list(part), {"type": "null"}]}
    roles = {"enum": ["system", "developer", "user", "assistant", "tool"]}
    return _object({"role": roles, "content": content}, reasoning_content=_maybe(TEXT))


def describe() -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    schemas: dict[str, Any] = dict(_ANSWERS)
    paths: dict[str, Any] = {}
    for path, (answer, summary, codes) in _GET.items():
        paths[path] = {"get": {"summary": summary, "responses": _responses(answer, codes)}}
        if path in _PARAMETERS:
            paths[path]["get"]["parameters"] = [_PARAMETERS[path]]
    for path, (model, answer, summary) in _POST.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": _content(model.__name__)},
                "responses": _responses(answer, tuple(_ERRORS), model in (CompletionRequest, ChatRequest)),
            }
        }
    messages = schemas["ChatRequest"]["properties"]["messages"]
    messages.update(items=_message_schema(), minItems=1)
    info = {"title": "Firesteel", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}
