"""The bundled model on a GPU: one text for every way of running it, and memory that does not grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from firesteel import LLM, SamplingParams

pytestmark = pytest.mark.gpu
PROMPTS = [[3 + (7 * i + j * j) % 250 for i in range(2 + 5 * j)] for j in range(16)]
Texts = list[tuple[int, ...]]


def texts(seqs: int, copies: int = 1, k: int = 0, **speculative: Any) -> Texts:
    """Answers to ``copies`` of all prompts (the seeds repeat), ``seqs`` at once."""
    spec = {"num_speculative_tokens": k, **speculative} if k else None
    llm = LLM(
        None,
        device="cuda",
        max_num_seqs=seqs,
        max_num_batched_tokens=512,
        max_model_len=512,
        speculative=spec,
    )
    params = [
        SamplingParams(max_tokens=32, temperature=float(i % 2), seed=i, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    return [tuple(c.token_ids) for c in llm.generate(PROMPTS * copies, params * copies)]


@pytest.fixture(scope="module")
def alone() -> Texts:
    return texts(1)


@pytest.mark.parametrize("seqs,copies", [(4, 1), (16, 1), (64, 4), (256, 16)])
@pytest.mark.parametrize("k", [0, 7])
def test_batch_changes_no_text(alone: Texts, seqs: int, copies: int, k: int) -> None:
    assert texts(seqs, copies, k) == alone * copies


@pytest.mark.parametrize("k", range(1, 8))
def test_drafts_change_no_text(alone: Texts, k: int) -> None:
    assert texts(8, k=k) == alone


@pytest.mark.parametrize("seqs", [1, 16, 256])
def test_adaptive_changes_no_text(alone: Texts, seqs: int) -> None:
    copies = max(1, seqs // 16)
    assert texts(seqs, copies, 7, enable_adaptive_verification=True) == alone * copies


def test_memory_stays_over_ten_thousand_steps() -> None:
    llm = LLM(
        None,
        device="cuda",
        max_num_seqs=8,
        max_num_batched_tokens=128,
        max_model_len=512,
        speculative={"num_speculative_tokens": 5, "enable_adaptive_verification": True},
    )
    used, steps, turn = [], 0, 0
    while steps < 10_000:
        params = [
            SamplingParams(
                max_tokens=20 + (7 * i + turn) % 120, temperature=float(i % 2), seed=turn, ignore_eos=True
            )
            for i in range(len(PROMPTS))
        ]
        llm.generate(PROMPTS, params)
        steps, turn = llm.engine.records[-1].step, turn + 1
        torch.cuda.synchronize()
        used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    quarter = used[len(used) // 4 :]
    assert len({a for a, _ in quarter}) == 1, "allocated bytes between runs"
    assert quarter[-1][1] == quarter[0][1], "reserved bytes"
