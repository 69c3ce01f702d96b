"""Recorded steps on a real device: the same text as eager steps, no unnamed wait, nothing left over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from firesteel import LLM, SamplingParams

pytestmark = pytest.mark.gpu
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "max_num_seqs": 6,
    "max_num_batched_tokens": 96,
    "max_model_len": 512,
    "speculative": {"method": "dspark", "num_speculative_tokens": 5},
}
PROMPTS = [[3 + i % 200 for i in range(n)] for n in (5, 150, 1, 40, 8, 90, 33, 2)]


def texts(**changes: Any) -> list[tuple[int, ...]]:
    """Answers of the bundled model to all prompts, greedy and sampled, in one engine."""
    llm = LLM(None, **{**SETTINGS, **changes})
    params = [
        SamplingParams(max_tokens=40, temperature=float(i % 2), seed=i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    out = [tuple(c.token_ids) for c in llm.generate(PROMPTS, params)]
    graphs = llm.engine.runner.graphs
    assert (graphs is None) == (changes.get("graphs") is False)
    if graphs is not None:
        assert all(graphs.replays[part] > 0 for part in ("forward", "tail", "draft")), graphs.replays
    return out


@pytest.fixture(scope="module")
def eager() -> list[tuple[int, ...]]:
    return texts(graphs=False)


def test_recorded_steps_write_the_eager_text(eager: list[tuple[int, ...]]) -> None:
    assert texts() == eager
    assert texts() == eager, "and again"


def test_no_unnamed_wait(eager: list[tuple[int, ...]]) -> None:
    assert texts(debug_sync=True) == eager


def test_speculation_changes_no_text(eager: list[tuple[int, ...]]) -> None:
    assert texts(speculative=None, graphs=False) == eager, "plain decoding"
    adaptive = {**SETTINGS["speculative"], "enable_adaptive_verification": True}
    assert texts(speculative=adaptive) == eager


def test_memory_does_not_grow() -> None:
    llm = LLM(None, **SETTINGS)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=1, ignore_eos=True)
    used = []
    for _ in range(4):
        llm.generate(PROMPTS, [params] * len(PROMPTS))
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert used[-1] == used[1], used
