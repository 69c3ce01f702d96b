"""Counters that only grow, alarms that go on and off, and times of requests."""

from __future__ import annotations

from typing import Any

import pytest

from firesteel.serve.messages import End, ModelInfo, Piece
from firesteel.serve.metrics import ALARM_AFTER, Metrics, RequestTimer

INFO = ModelInfo("p", 512, 4096, 0, (1,), True, 5, 4, 100, 256)


def step(**changes: Any) -> dict[str, Any]:
    base = {
        "prompt_rows": 0, "decodes": 2, "drafts": 10, "reason": "fixed width", "expected_tokens": 4.0, "rows": 12,
        "emitted": 6, "verified": 10, "accepted": 4, "predicted_ms": 2.0, "measured_ms": 3.0, "host_ms": 1.0,
        "draft_reason": "drafting pays", "drafting": 2, "draft_width": 3,
    }  # fmt: skip
    return {**base, **changes}


def stats(
    *steps: dict[str, Any], depth: dict[str, list[int]] | None = None, **counters: Any
) -> dict[str, Any]:
    base = {
        "running": 1, "waiting": 2, "pages": 100, "pages_free": 60, "pages_cached": 10, "preemptions": 0,
        "recomputes": 0, "prefix": {"prompt_tokens": 50, "hit_tokens": 20},
    }  # fmt: skip
    depth = depth or {"verified_at": [], "accepted_at": []}
    return {"counters": {**base, **counters}, "depth": depth, "steps": list(steps)}


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics("v4")
    made.ready(INFO)
    return made


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(f"firesteel:{name}", labels)
    assert found is not None, name
    return found


def test_a_step_is_counted(metrics: Metrics) -> None:
    metrics.stats(stats(step(), preemptions=3, depth={"verified_at": [2, 1], "accepted_at": [2, 0]}))
    assert value(metrics, "num_requests_waiting") == 2
    assert value(metrics, "kv_cache_usage_perc") == pytest.approx(0.3)
    assert value(metrics, "num_preemptions_total") == 3
    assert value(metrics, "prefix_cache_hits_total") == 20
    assert value(metrics, "spec_decode_num_draft_tokens_total") == 10
    assert value(metrics, "spec_decode_num_accepted_tokens_total") == 4
    assert value(metrics, "spec_decode_num_drafts_total") == 2
    assert value(metrics, "spec_decode_num_accepted_tokens_per_pos_total", position="0") == 2
    assert value(metrics, "step_time_seconds_sum") == pytest.approx(0.003)
    assert value(metrics, "spec_decode_active") == 1


def test_reliability(metrics: Metrics) -> None:
    metrics.stats({**stats(), "quality": [{"depth": 1, "ece": 0.02, "brier": 0.1, "auc": 0.8}]})
    assert value(metrics, "spec_decode_survival_ece", position="0") == 0.02


def test_totals_grow_and_survive_a_new_engine(metrics: Metrics) -> None:
    metrics.stats(stats(preemptions=3))
    metrics.stats(stats(preemptions=5))
    assert value(metrics, "num_preemptions_total") == 5
    metrics.ready(INFO)
    metrics.stats(stats(preemptions=1))
    assert value(metrics, "num_preemptions_total") == 6


def test_why_nothing_is_drafted(metrics: Metrics) -> None:
    metrics.stats(stats(step(drafts=0, verified=0, accepted=0, reason="does not pay")))
    assert value(metrics, "spec_decode_inactive_steps_total", reason="does not pay") == 1
    assert value(metrics, "spec_decode_active") == 0
    metrics.stats(stats(step(drafts=0, verified=0, decodes=0, prompt_rows=5)))
    assert value(metrics, "spec_decode_inactive_steps_total", reason="does not pay") == 1, "a prompt alone"
    metrics.ready(ModelInfo("p", 512, 4096, 0, (1,), True, 0, 4, 100, 256))
    metrics.stats(stats(step(drafts=0, verified=0)))
    assert value(metrics, "spec_decode_inactive_steps_total", reason="no speculative config") == 1


def test_no_drafts_because_the_step_before_made_none(metrics: Metrics) -> None:
    metrics.stats(
        stats(step(draft_reason="drafting does not pay"), step(drafts=0, reason="no drafts to verify"))
    )
    assert value(metrics, "spec_decode_inactive_steps_total", reason="drafting does not pay") == 1


def test_proposed_by_place(metrics: Metrics) -> None:
    metrics.stats(stats(step(drafting=4, draft_width=2), step(drafting=1, draft_width=1)))
    assert value(metrics, "spec_decode_num_proposed_tokens_total") == 9
    assert value(metrics, "spec_decode_num_proposed_tokens_per_pos_total", position="0") == 5
    assert value(metrics, "spec_decode_num_proposed_tokens_per_pos_total", position="1") == 4


def test_departures(metrics: Metrics) -> None:
    times = (2.0, 2.5, 2.7, 1.4, 1.6)
    metrics.stats(stats(*(step(predicted_ms=2.0, measured_ms=ms) for ms in times)))
    metrics.stats(stats(step(predicted_ms=0.0, measured_ms=9.0)))
    assert value(metrics, "step_departures_total", direction="slower") == 1
    assert value(metrics, "step_departures_total", direction="faster") == 1


@pytest.mark.parametrize(("accepted", "rate"), [(0, "0.000"), (10, "1.000")])
def test_acceptance_alarm(metrics: Metrics, accepted: int, rate: str) -> None:
    steps = [step(accepted=accepted)] * (ALARM_AFTER // 10)
    metrics.stats(stats(*steps[1:]))
    assert value(metrics, "spec_decode_acceptance_alarm", rate=rate) == 0, "too few to tell"
    metrics.stats(stats(steps[0]))
    assert value(metrics, "spec_decode_acceptance_alarm", rate=rate) == 1
    metrics.stats(stats(*steps[1:], step(accepted=5)))
    assert value(metrics, "spec_decode_acceptance_alarm", rate=rate) == 0


def end(tokens: int) -> End:
    usage = {"prompt_tokens": 7, "completion_tokens": tokens, "cached_tokens": 0}
    return End("length", 1, usage, {"queue_seconds": 0.25})


def test_degenerate_output(metrics: Metrics) -> None:
    timer = RequestTimer(metrics, 1)
    for ids, count in (([5] * 63, 0), ([6], 0), ([5] * 40, 0), ([5] * 24, 1), ([5] * 100, 1)):
        timer.note(0, Piece(0, "", ids, []))
        assert value(metrics, "degenerate_outputs_total") == count


def test_times_of_a_request(metrics: Metrics) -> None:
    timer = RequestTimer(metrics, 3)
    for sample in (0, 1):
        timer.note(0, Piece(sample, "a", [1], []))
        timer.note(0, Piece(sample, "b", [2, 3], [], end(3)))
    assert value(metrics, "time_to_first_token_seconds_count") == 2
    assert value(metrics, "inter_token_latency_seconds_count") == 4
    assert value(metrics, "request_time_per_output_token_seconds_count") == 2
    assert value(metrics, "request_queue_time_seconds_sum") == 0.5
    assert value(metrics, "prompt_tokens_total") == 7, "once per prompt"
    assert value(metrics, "generation_tokens_total") == 6
    assert value(metrics, "request_success_total", finished_reason="length") == 2
    timer.close()
    timer.close()
    assert value(metrics, "request_success_total", finished_reason="abort") == 1, "the third never ended"
    assert b"firesteel:e2e_request_latency_seconds_bucket" in metrics.text(True, 0)
