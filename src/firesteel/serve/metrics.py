"""Prometheus metrics, named as this ecosystem's dashboards expect, with the prefix ``firesteel:``.

Counters of the engine arrive as totals since its start; what is added here is
their growth, so a restarted engine never makes a counter fall.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from firesteel.serve.messages import ModelInfo, Piece
from firesteel.serve.tracing import Trace

log = logging.getLogger("firesteel.serve")

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1, 2.5, 10)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 500000, 1000000)
ALARM_AFTER = 200  # verified drafts from which an acceptance of exactly 0 or 1 is suspicious
SAME_TOKEN = 64  # repetitions of one token id that count as degenerate output
ALARM_SHOWN = 300.0  # seconds for which the page tells of a degenerate output
DEPARTS = 1.3  # measured over predicted time, either way
OFF = "no speculative config"
UNDRAFTED = ("no drafts to verify", "speculation off")  # the reason is why the step before did not draft


def why_inactive(step: Mapping[str, Any], drafted_before: str, gamma: int) -> str:
    """Why a step verified no drafts: what the budget says or, if there were none, why there were none."""
    if not gamma:
        return OFF
    reason = str(step["reason"])
    return drafted_before or "first step" if reason in UNDRAFTED else reason


class Metrics:
    """One server's metrics; ``text`` is what ``/metrics`` shows."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self._totals: dict[str, float] = {}
        self._alarms: dict[str, str] = {}
        self._repeated: deque[tuple[float, str]] = deque(maxlen=3)
        self._window = [0, 0]  # verified, accepted since the alarm looked last
        self._gamma = 0
        self._draft_reason = ""  # why the step before drafted as it did
        self._engine_metrics()
        self._request_metrics()
        self._speculation_metrics()

    # ---- definitions -----------------------------------------------------------
    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"firesteel:{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"firesteel:{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"firesteel:{name}", text, buckets=buckets, registry=self.registry)

    def _engine_metrics(self) -> None:
        self.up = self._gauge("engine_up", "1 while the engine answers requests")
        self.restarts = self._gauge("engine_restarts", "Times the engine died and was started again")
        self.model_info = self._gauge("model_info", "Always 1", "model_name", "max_model_len", "draft_tokens")
        self.running = self._gauge("num_requests_running", "Samples in a slot")
        self.waiting = self._gauge("num_requests_waiting", "Samples that wait for a slot")
        self.usage = self._gauge("kv_cache_usage_perc", "Share of history pages that running requests hold")
        self.pages = self._gauge("kv_cache_pages", "History pages", "state")
        self.queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache")
        self.hits = self._counter("prefix_cache_hits", "Prompt tokens taken from the prefix cache")
        self.preemptions = self._counter("num_preemptions", "Samples moved out to make room")
        self.recomputes = self._counter("num_recomputes", "Preempted samples whose state was given up")
        self.steps = self._counter("engine_steps", "Steps run")
        self.rows = self._counter("engine_rows", "Rows run", "kind")
        self.iteration = self._histogram("iteration_tokens_total", "Rows of a step", TOKENS)
        self.step_time = self._histogram("step_time_seconds", "From launching a step to its result", SECONDS)
        self.host_time = self._histogram("step_host_time_seconds", "Planning and committing a step", SECONDS)

    def _request_metrics(self) -> None:
        self.http = self._counter("http_requests", "HTTP requests answered", "route", "status")
        self.finished = self._counter("request_success", "Samples that ended", "finished_reason")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests")
        self.generation_tokens = self._counter("generation_tokens", "Tokens sent to clients")
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", SECONDS)
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Between tokens; those of one step share its time", TOKEN_SECONDS
        )
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "First token to last, per token", TOKEN_SECONDS
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token", SECONDS)
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to a slot", SECONDS)
        self.request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens", TOKENS)
        self.request_generation = self._histogram("request_generation_tokens", "Generated tokens", TOKENS)
        self.degenerate = self._counter(
            "degenerate_outputs", f"Samples that repeated one token id {SAME_TOKEN} times or more"
        )

    def _speculation_metrics(self) -> None:
        self.drafts = self._counter("spec_decode_num_drafts", "Verify groups with at least one draft")
        self.proposed = self._counter("spec_decode_num_proposed_tokens", "Drafts proposed")
        self.proposed_at = self._counter(
            "spec_decode_num_proposed_tokens_per_pos", "Drafts proposed, by place in the block", "position"
        )
        self.verified = self._counter("spec_decode_num_draft_tokens", "Drafts verified")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Drafts accepted")
        self.verified_at = self._counter(
            "spec_decode_num_draft_tokens_per_pos", "Drafts verified, by place in the block", "position"
        )
        self.accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by place in the block", "position"
        )
        self.budget = self._counter("spec_decode_budget", "Draft rows that steps were given")
        self.expected = self._counter("spec_decode_expected_tokens", "Tokens the budget choice expected")
        self.emitted = self._counter("spec_decode_emitted_tokens", "Tokens those steps really emitted")
        self.predicted = self._counter(
            "step_predicted_seconds", "Predicted time of steps that had a prediction"
        )
        self.measured = self._counter("step_measured_seconds", "Measured time of the same steps")
        self.departures = self._counter(
            "step_departures", f"Steps off their predicted time by more than {DEPARTS}x", "direction"
        )
        for direction in ("slower", "faster"):
            self.departures.labels(direction)
        self.quality = {
            name: self._gauge(f"spec_decode_survival_{name}", text, "position")
            for name, text in (
                ("ece", "Expected calibration error of predicted acceptance"),
                ("brier", "Brier score of predicted acceptance"),
                ("auc", "How well predicted acceptance ranks drafts"),
            )
        }
        self.active = self._gauge("spec_decode_active", "1 if the newest decoding step verified drafts")
        self.inactive = self._counter(
            "spec_decode_inactive_steps", "Decoding steps that verified no draft, by reason", "reason"
        )
        self.acceptance_alarm = self._gauge(
            "spec_decode_acceptance_alarm",
            f"1 while the acceptance of the last {ALARM_AFTER} verified drafts is exactly 0 or 1",
            "rate",
        )
        for rate in ("0.000", "1.000"):
            self.acceptance_alarm.labels(rate).set(0)

    # ---- from the engine -------------------------------------------------------
    def ready(self, info: ModelInfo) -> None:
        """A (new) engine: its counters start from nothing."""
        self._totals.clear()
        self.running.set(0)
        self.waiting.set(0)
        self._gamma = info.gamma
        self.model_info.clear()
        self.model_info.labels(self._model, str(info.max_model_len), str(info.gamma)).set(1)

    def _grow(self, counter: Counter, name: str, total: float) -> None:
        """Add what ``total`` has grown by."""
        before = self._totals.get(name, 0.0)
        self._totals[name] = total
        if total > before:
            counter.inc(total - before)

    def stats(self, message: Mapping[str, Any]) -> None:
        """Take a "stats" message."""
        now = message["counters"]
        self.running.set(now["running"])
        self.waiting.set(now["waiting"])
        pages, free, cached = now["pages"], now["pages_free"], now["pages_cached"]
        for state, count in (("all", pages), ("free", free), ("cached", cached)):
            self.pages.labels(state).set(count)
        self.usage.set(max(pages - free - cached, 0) / max(pages, 1))
        self._grow(self.preemptions, "preemptions", now["preemptions"])
        self._grow(self.recomputes, "recomputes", now["recomputes"])
        self._grow(self.queries, "queries", now["prefix"].get("prompt_tokens", 0))
        self._grow(self.hits, "hits", now["prefix"].get("hit_tokens", 0))
        self._grow(self.drafts, "drafts", next(iter(message["depth"]["verified_at"]), 0))
        for name, counter in (("verified_at", self.verified_at), ("accepted_at", self.accepted_at)):
            for at, total in enumerate(message["depth"][name]):
                self._grow(counter.labels(str(at)), f"{name}{at}", total)
        for line in message.get("quality", ()):
            for name, gauge in self.quality.items():
                gauge.labels(str(line["depth"] - 1)).set(line[name])
        for step in message["steps"]:
            self._step(step)

    def _step(self, step: Mapping[str, Any]) -> None:
        self.steps.inc()
        self.rows.labels("prompt").inc(step["prompt_rows"])
        self.rows.labels("anchor").inc(step["decodes"])
        self.rows.labels("draft").inc(step["drafts"])
        self.iteration.observe(step["rows"])
        self.step_time.observe(step["measured_ms"] / 1e3)
        self.host_time.observe(step["host_ms"] / 1e3)
        if step["predicted_ms"] > 0:
            self.predicted.inc(step["predicted_ms"] / 1e3)
            self.measured.inc(step["measured_ms"] / 1e3)
            self._departure(step["measured_ms"] / step["predicted_ms"])
        if step["decodes"]:
            self._speculation(step)
        self._draft_reason = step["draft_reason"]
        self.proposed.inc(step["drafting"] * step["draft_width"])
        for at in range(step["draft_width"]):
            self.proposed_at.labels(str(at)).inc(step["drafting"])

    def _departure(self, ratio: float) -> None:
        if ratio > DEPARTS:
            self.departures.labels("slower").inc()
        elif ratio < 1 / DEPARTS:
            self.departures.labels("faster").inc()

    def _speculation(self, step: Mapping[str, Any]) -> None:
        verified, accepted = step["verified"], step["accepted"]
        self.active.set(1 if step["drafts"] else 0)
        if not step["drafts"]:
            self.inactive.labels(why_inactive(step, self._draft_reason, self._gamma)).inc()
            return
        self.budget.inc(step["drafts"])
        self.verified.inc(verified)
        self.accepted.inc(accepted)
        self.expected.inc(max(step["expected_tokens"], 0.0))
        self.emitted.inc(step["emitted"])
        self._window[0] += verified
        self._window[1] += accepted
        if self._window[0] >= ALARM_AFTER:
            self._look_at_acceptance()

    def _look_at_acceptance(self) -> None:
        verified, accepted = self._window
        self._window = [0, 0]
        for rate, alarm in (("0.000", accepted == 0), ("1.000", accepted == verified)):
            self.acceptance_alarm.labels(rate).set(1 if alarm else 0)
            self._alarms.pop(rate, None)
            if alarm:
                self._alarms[rate] = f"acceptance is exactly {rate} over {verified} verified drafts"
                log.warning("%s", self._alarms[rate])

    def alarms(self) -> list[str]:
        """What somebody should look at, in words."""
        return [
            *self._alarms.values(),
            *(text for at, text in self._repeated if time.monotonic() - at < ALARM_SHOWN),
        ]

    def repeated(self, token: int) -> None:
        """A sample repeated one token id too often."""
        self.degenerate.inc()
        text = f"degenerate output: token id {token} came {SAME_TOKEN} times in a row"
        log.warning("%s", text)
        self._repeated.append((time.monotonic(), text))

    def text(self, up: bool, restarts: int) -> bytes:
        """The exposition format; of a dead engine nothing runs."""
        self.up.set(1 if up else 0)
        self.restarts.set(restarts)
        if not up:
            self.running.set(0)
            self.waiting.set(0)
        return generate_latest(self.registry)


@dataclass
class _Sample:
    """What is measured of one sample."""

    first: float | None = None
    last: float = 0.0
    token: int = -1
    run: int = 0


@dataclass
class RequestTimer:
    """Measures one HTTP request's samples as their pieces pass; ``expected`` of them."""

    metrics: Metrics
    expected: int
    trace: Trace = field(default_factory=Trace)
    arrived: float = field(default_factory=time.perf_counter)
    samples: dict[tuple[int, int], _Sample] = field(default_factory=dict)

    def note(self, prompt: int, piece: Piece) -> None:
        """A piece has come."""
        m, now = self.metrics, time.perf_counter()
        self.trace.note(prompt, piece)
        sample = self.samples.setdefault((prompt, piece.index), _Sample())
        count = len(piece.token_ids)
        if count:
            m.generation_tokens.inc(count)
            if sample.first is None:
                sample.first = now
                m.ttft.observe(now - self.arrived)
            else:
                for _ in range(count):
                    m.itl.observe((now - sample.last) / count)
            sample.last = now
            self._repetition(sample, piece.token_ids)
        if piece.end is not None:
            self._end(sample, piece, now)

    def close(self) -> None:
        """Nothing more will be sent: samples that have not ended were left by their client, or lost."""
        if self.expected > 0:
            self.metrics.finished.labels("abort").inc(self.expected)
        self.expected = 0
        self.trace.end()

    def _repetition(self, sample: _Sample, ids: list[int]) -> None:
        for token in ids:
            sample.run = sample.run + 1 if token == sample.token else 1
            sample.token = token
            if sample.run == SAME_TOKEN:
                self.metrics.repeated(token)

    def _end(self, sample: _Sample, piece: Piece, now: float) -> None:
        m, end = self.metrics, piece.end
        assert end is not None, "checked by the caller"
        self.expected -= 1
        m.finished.labels(end.finish_reason).inc()
        made = end.usage["completion_tokens"]
        if piece.index == 0:
            m.prompt_tokens.inc(end.usage["prompt_tokens"])
            m.request_prompt.observe(end.usage["prompt_tokens"])
        m.request_generation.observe(made)
        m.e2e.observe(now - self.arrived)
        m.queue_time.observe(end.stats["queue_seconds"])
        if sample.first is not None and made > 1:
            m.tpot.observe((sample.last - sample.first) / (made - 1))
