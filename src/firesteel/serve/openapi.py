"""The OpenAPI description, from the request models themselves."""

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
    "503": "loading, dead or shutting down; see Retry-After",
}
_POST: dict[str, tuple[type[BaseModel], str]] = {
    "/v1/completions": (CompletionRequest, "Continue prompts"),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation"),
    "/tokenize": (TokenizeRequest, "Text or a conversation to token ids"),
    "/detokenize": (DetokenizeRequest, "Token ids to text"),
}
_GET = {
    "/health": ("200 unless the engine is dead", ("503",)),
    "/ready": ("200 if a request sent now would be answered", ("503",)),
    "/version": ("The server's version", ()),
    "/tokenizer_info": ("Names of special tokens", ("401", "503")),
    "/metrics": ("Prometheus metrics", ()),
    "/v1/models": ("The served model", ("401",)),
}


def _responses(codes: tuple[str, ...]) -> dict[str, Any]:
    out: dict[str, Any] = {"200": {"description": "the answer"}}
    schema = {"$ref": "#/components/schemas/Error"}
    for code in codes:
        content = {"application/json": {"schema": schema}}
        out[code] = {"description": _ERRORS[code], "content": content}
    return out


def describe() -> dict[str, Any]:
    """An OpenAPI 3.1 document."""
    schemas: dict[str, Any] = {"Error": {"type": "object", "required": ["error"]}}
    paths: dict[str, Any] = {}
    for path, (summary, codes) in _GET.items():
        paths[path] = {"get": {"summary": summary, "responses": _responses(codes)}}
    for path, (model, summary) in _POST.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[model.__name__] = schema
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
        paths[path] = {
            "post": {
                "summary": summary,
                "requestBody": {"required": True, "content": content},
                "responses": _responses(tuple(_ERRORS)),
            }
        }
    info = {"title": "Firesteel", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}
