"""The server against its own OpenAPI description, and against bytes that are no request: never a 5xx."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import schemathesis
import schemathesis.specs.openapi.checks as openapi_checks
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from firesteel.models.deepseek_v4.random_init import tiny_config, write_random
from firesteel.serve.openapi import describe
from firesteel.tokenizer import byte_tokenizer
from oracles.http_server import ThreadServer, thread_server

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 512, "threads": 1, "max_waiting": 64,
    "speculative": {"method": "dspark", "num_speculative_tokens": 2},
}  # fmt: skip
POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
MODEST = settings(
    max_examples=6, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadServer]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("contract") / "tiny"
    config = tiny_config(compress_ratios=(0, 4), n_routed_experts=4)
    write_random(path, config, 11, agreement=0.9)
    byte_tokenizer(config.vocab_size).save(path)
    with thread_server(path, SETTINGS) as server:
        yield server
    torch.set_num_threads(before)


described = schemathesis.openapi.from_dict(describe())


@described.parametrize()
@MODEST
def test_answers_are_as_described(case: Any, served: ThreadServer) -> None:
    """Documented statuses, content types and bodies for whatever the description allows; short answers only."""
    if (
        isinstance(case.body, dict)
        and case.path.endswith("completions")
        and case.body.get("max_tokens") is None
    ):
        case.body["max_tokens"] = 3
    case.call_and_validate(
        base_url=served.url,
        timeout=60,
        checks=[
            schemathesis.checks.not_a_server_error,
            openapi_checks.status_code_conformance,
            openapi_checks.content_type_conformance,
            openapi_checks.response_schema_conformance,
        ],
    )


def test_the_description_names_every_path(served: ThreadServer) -> None:
    paths = served.http.get("/openapi.json").json()["paths"]
    assert set(POSTS) <= set(paths)
    for path in ("/health", "/ready", "/version", "/metrics", "/v1/models", "/v1/models/{name}"):
        assert path in paths
        assert served.http.get(path.replace("{name}", "tiny")).status_code == 200


# ---- bytes that are no request -------------------------------------------------------------------
WHOLE: dict[str, Any] = {
    "/v1/completions": {"prompt": ["a", "ü"], "max_tokens": 2, "stop": ["x"], "logit_bias": {"5": 1}, "stream": True},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "ü"}]}], "max_tokens": 2, "top_p": 0.5,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}],
    },
    "/tokenize": {"prompt": "ü\n\u0000", "return_token_strs": True},
    "/detokenize": {"tokens": [0, 5, 511]},
}  # fmt: skip
SPLICES = [
    b"",
    b"\xff",
    b"\x00",
    b"{",
    b"[[",
    b'"',
    b"\\ud800",
    b"1e999",
    b"NaN",
    b"-",
    b"null",
    b"9" * 5000,
    b",",
]


def damaged(body: dict[str, Any], seed: int) -> bytes:
    """A body's bytes with pieces cut, doubled or replaced."""
    dice = random.Random(seed)
    data = json.dumps(body, ensure_ascii=dice.random() < 0.5).encode()
    for _ in range(dice.randrange(1, 4)):
        begin = dice.randrange(len(data) + 1)
        end = min(begin + dice.choice((0, 0, 1, 3, 20)), len(data))
        data = data[:begin] + dice.choice([*SPLICES, data[begin:end] * 2]) + data[end:]
    return data


@given(st.sampled_from(POSTS), st.integers(0, 2**32))
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_damaged_bodies(served: ThreadServer, path: str, seed: int) -> None:
    reply = served.http.post(path, content=damaged(WHOLE[path], seed))
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        assert reply.json()["error"]["message"]


def test_bodies_that_are_not_what_their_headers_say(served: ThreadServer) -> None:
    body = json.dumps(WHOLE["/v1/completions"]).encode()
    for headers in (
        {"content-type": "text/plain"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-encoding": "gzip"},
        {"accept": "application/xml"},
        {"content-type": "application/json; charset=utf-16"},
    ):
        assert served.http.post("/v1/completions", content=body, headers=headers).status_code in (
            200,
            400,
            415,
        )
    assert served.http.post("/v1/completions", content=body.decode().encode("utf-16")).status_code in (
        200,
        400,
    )


def test_everything_still_works(served: ThreadServer) -> None:
    """After all of the above: no request is left, and the next is answered."""
    served.settle()
    reply = httpx2.post(f"{served.url}/v1/completions", json={"prompt": "x", "max_tokens": 3}, timeout=30)
    assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] <= 3
