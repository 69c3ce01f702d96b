"""Traces: a span per request with its events and sums, the client's parent, errors; over HTTP to a collector."""

from __future__ import annotations

import asyncio
import builtins
import http.server
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from starlette.testclient import TestClient

from firesteel.config import ParameterError
from firesteel.serve.app import ServeOptions, create_app
from firesteel.serve.client import EngineClient
from firesteel.serve.messages import End, ModelInfo, Piece
from firesteel.serve.metrics import Metrics, RequestTimer
from firesteel.serve.tracing import SHOWN, NoTracer, OtlpTracer, open_tracer

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra otel is not installed")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

pytestmark = pytest.mark.unit


@pytest.fixture
def spans() -> Any:
    return memory.InMemorySpanExporter()


@pytest.fixture
def tracer(spans: Any) -> OtlpTracer:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return OtlpTracer(provider)


def end(reason: str = "stop", **stats: Any) -> End:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": 0}
    told = {"queue_seconds": 0.25, "first_token_seconds": 0.5, "steps": 2, "accepted": 1, "verified": 4}
    return End(reason, 1, usage, {**told, **stats})


def test_a_request_is_a_span(tracer: OtlpTracer, spans: Any) -> None:
    trace = tracer.begin("chat tiny", {}, {"gen_ai.request.model": "tiny", "gen_ai.request.seed": None})
    timer = RequestTimer(Metrics("tiny"), 2, trace)
    timer.note(0, Piece(0, "a", [1], []))
    for sample in (0, 1):
        timer.note(0, Piece(sample, "b", [2, 3], [], end()))
    assert not spans.get_finished_spans()
    timer.close()
    timer.close()
    (span,) = spans.get_finished_spans()
    assert span.name == "chat tiny" and span.parent is None
    told = dict(span.attributes)
    assert told["gen_ai.usage.input_tokens"] == 7, "once per prompt"
    assert told["gen_ai.usage.output_tokens"] == 6
    assert (
        told["firesteel.steps"] == 4 and told["firesteel.verified"] == 8 and told["firesteel.accepted"] == 2
    )
    assert told["gen_ai.response.finish_reasons"] == ("stop", "stop")
    assert "gen_ai.request.seed" not in told
    names = [e.name for e in span.events]
    assert names == ["queued", *(["admitted", "first token", "ended"] * 2)]
    at = {e.name: e.timestamp for e in span.events}
    assert at["first token"] - at["admitted"] == 250_000_000


def test_the_parent_is_the_clients(tracer: OtlpTracer, spans: Any) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    tracer.begin("chat", {"traceparent": parent}, {}).end()
    (span,) = spans.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"


def test_a_failure(tracer: OtlpTracer, spans: Any) -> None:
    trace = tracer.begin("chat", {}, {})
    trace.fail(ValueError("no room"))
    trace.end()
    (span,) = spans.get_finished_spans()
    assert not span.status.is_ok and span.status.description == "no room"
    assert span.attributes["error.type"] == "ValueError"


def test_many_samples_do_not_flood_a_span(tracer: OtlpTracer, spans: Any) -> None:
    trace = tracer.begin("chat", {}, {})
    for sample in range(SHOWN + 5):
        trace.note(0, Piece(sample, "", [], [], end()))
    trace.end()
    (span,) = spans.get_finished_spans()
    assert len(span.events) == 1 + 3 * SHOWN
    assert span.attributes["firesteel.steps"] == 2 * (SHOWN + 5)


# ---- over HTTP -------------------------------------------------------------------------
@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    got: list[tuple[str, bytes]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", got
    server.shutdown()
    server.server_close()


def test_a_collector_gets_it(collector: tuple[str, list[tuple[str, bytes]]]) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    url, got = collector
    tracer = open_tracer(url, "1.2.3")
    tracer.begin("chat tiny", {}, {}).end()
    tracer.close()
    assert [path for path, _ in got] == ["/v1/traces"]
    assert b"chat tiny" in got[0][1] or got[0][1][:2] == b"\x1f\x8b"


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://x:4317", "http://"])
def test_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(ParameterError, match="--otlp-endpoint"):
        open_tracer(endpoint, "1")


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert isinstance(open_tracer(None, "1"), NoTracer)
    with pytest.raises(ParameterError, match=r"firesteel\[otel\]"):
        open_tracer("http://127.0.0.1:4318", "1")


# ---- behind the routes ---------------------------------------------------------------------
class Reciting(EngineClient):
    """Answers two tokens, or refuses everything."""

    def __init__(self, full: bool) -> None:
        super().__init__()
        self.full = full

    async def start(self) -> None:
        self._become_ready(ModelInfo("none", 512, 256, 0, (1,), False, 0, 4, 8, 256))

    async def stop(self) -> None:
        pass

    def _send(self, message: Mapping[str, Any]) -> None:
        if message["op"] == "add":
            asyncio.get_running_loop().call_soon(self._play, message["id"])

    def _play(self, call: int) -> None:
        if self.full:
            self._receive({"op": "refused", "id": call, "kind": "full", "error": "5 wait"})
            return
        self._receive({"op": "accepted", "id": call})
        done = {"finish_reason": "length", "seed": 1, "usage": end().usage, "stats": end().stats}
        self._receive({"op": "pieces", "pieces": [[call, [0, "", [5, 6], [], done, []]]]})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_every_request_ends_its_span(tracer: OtlpTracer, spans: Any, stream: bool, full: bool) -> None:
    with TestClient(create_app(Reciting(full), ServeOptions(tracer=tracer))) as http:
        body = {"prompt": [1, 2, 3], "max_tokens": 2, "stream": stream}
        assert http.post("/v1/completions", json=body).status_code == (429 if full else 200)
        (span,) = spans.get_finished_spans()
    assert span.name == "text_completion firesteel"
    assert span.status.is_ok is not full
    assert span.attributes["gen_ai.usage.output_tokens"] == (0 if full else 3)
