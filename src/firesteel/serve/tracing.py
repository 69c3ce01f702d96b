"""OpenTelemetry traces of requests, sent by OTLP over HTTP; off unless an endpoint is given.

One server span per request for text, child of the client's ``traceparent`` if
it sent one. Attributes follow the GenAI conventions; ``firesteel.*`` tells what
speculation did. Each sample adds events: queued, admitted, first token, ended.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from firesteel.config import ParameterError
from firesteel.serve.messages import Piece

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

TRACES = "/v1/traces"  # where collectors take them
SHOWN = 16  # samples of a request that add events


class Trace:
    """One request's trace; this one tells nobody."""

    def note(self, prompt: int, piece: Piece) -> None:
        """A piece of an answer has come."""

    def fail(self, err: BaseException) -> None:
        """The request failed with ``err``."""

    def end(self) -> None:
        """Nothing more will be sent; may be called again."""


class Tracer(Protocol):
    """Begins a trace per request."""

    def begin(self, name: str, headers: Mapping[str, str], facts: Mapping[str, Any]) -> Trace:
        """``name`` of the operation, the request's ``headers``, and attributes known from the start."""

    def close(self) -> None:
        """Send what has not been sent."""


class NoTracer:
    """Traces nothing."""

    def begin(self, name: str, headers: Mapping[str, str], facts: Mapping[str, Any]) -> Trace:
        """A trace that tells nobody."""
        return Trace()

    def close(self) -> None:
        """There is nothing to send."""


class SpanTrace(Trace):
    """A span that grows while the answer comes."""

    def __init__(self, span: Span) -> None:
        self._span, self._begun = span, time.time_ns()
        self._open = True
        self._samples = 0
        self._prompt_tokens = self._made = 0
        self._reasons: list[str] = []
        self._sums = {"steps": 0, "drafted": 0, "verified": 0, "accepted": 0, "preemptions": 0}

    def note(self, prompt: int, piece: Piece) -> None:
        """Only the end of a sample tells something: all its times come with it."""
        if piece.end is None:
            return
        stats, usage = piece.end.stats, piece.end.usage
        self._prompt_tokens += usage["prompt_tokens"] if piece.index == 0 else 0
        self._made += usage["completion_tokens"]
        self._reasons.append(piece.end.finish_reason)
        for name in self._sums:
            self._sums[name] += int(stats.get(name, 0))
        self._samples += 1
        if self._samples > SHOWN:
            return
        which = {"prompt": prompt, "sample": piece.index}
        # the engine's clock begins when it takes the request: a message later than this span
        for name, key in (("admitted", "queue_seconds"), ("first token", "first_token_seconds")):
            if key in stats:
                at = self._begun + int(stats[key] * 1e9)
                self._span.add_event(name, {**which, "seconds": stats[key]}, timestamp=at)
        self._span.add_event("ended", {**which, "finish_reason": piece.end.finish_reason})

    def fail(self, err: BaseException) -> None:
        """An error status, with the message that the client gets."""
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", type(err).__name__)
        self._span.set_status(Status(StatusCode.ERROR, str(err)))

    def end(self) -> None:
        """Close the span with its sums."""
        if not self._open:
            return
        self._open = False
        self._span.set_attribute("gen_ai.response.finish_reasons", self._reasons)
        self._span.set_attribute("gen_ai.usage.input_tokens", self._prompt_tokens)
        self._span.set_attribute("gen_ai.usage.output_tokens", self._made)
        for name, value in self._sums.items():
            self._span.set_attribute(f"firesteel.{name}", value)
        self._span.end()


class OtlpTracer:
    """Spans through an OpenTelemetry provider."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("firesteel.serve")

    def begin(self, name: str, headers: Mapping[str, str], facts: Mapping[str, Any]) -> Trace:
        """A span, child of the client's if ``headers`` hold a traceparent."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(carrier=dict(headers))
        told = {k: v for k, v in facts.items() if v is not None}
        span = self._tracer.start_span(name, context=parent, kind=SpanKind.SERVER, attributes=told)
        span.add_event("queued")
        return SpanTrace(span)

    def close(self) -> None:
        """Send what has not been sent, for seconds at most."""
        self._provider.shutdown()


def open_tracer(endpoint: str | None, version: str) -> Tracer:
    """A tracer that sends to an OTLP collector, e.g. http://127.0.0.1:4318; None: no traces.

    Raises ParameterError for what is no URL, and if the extra ``otel`` is not installed.
    """
    if endpoint is None:
        return NoTracer()
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ParameterError(f"--otlp-endpoint: {endpoint!r}: expected http://HOST:4318 or https://...")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as err:
        raise ParameterError(
            f"--otlp-endpoint: traces need {err.name}; pip install 'firesteel[otel]' or leave it out"
        ) from err
    url = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + TRACES
    resource = Resource.create({"service.name": "firesteel", "service.version": version})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return OtlpTracer(provider)
