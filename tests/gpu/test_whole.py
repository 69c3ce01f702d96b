"""The bundled model on a GPU: one text for every way of running it, and memory that does not grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from firesteel import LLM, SamplingParams

pytestmark = pytest.mark.gpu
PROMPTS = [[3 + (7 * i + j * j) % 250 for i in range(2 + 5 * j)] for j in range(16)]
Texts = list[tuple[int, ...]]


DEVICE = "cuda"
LONG = [[3 + (7 * i + j * j) % 250 for i in range(j)] for j in (240, 250, 300, 253)]  # a page holds 256


def texts(seqs: int, copies: int = 1, k: int = 0, **changes: Any) -> Texts:
    """Answers to ``copies`` of all prompts (the seeds repeat), ``seqs`` at once, of an engine with ``changes``."""
    return answers(engine(seqs, k, **changes), PROMPTS, copies)


def answers(llm: LLM, prompts: list[list[int]], copies: int = 1) -> Texts:
    """Token ids, every other one greedy."""
    params = [
        SamplingParams(max_tokens=32, temperature=float(i % 2), seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    return [tuple(c.token_ids) for c in llm.generate(prompts * copies, params * copies)]


def engine(seqs: int, k: int, adaptive: bool = False, **changes: Any) -> LLM:
    """The bundled model with ``k`` drafts."""
    spec = {"num_speculative_tokens": k, "enable_adaptive_verification": adaptive} if k else None
    settings = {"max_num_batched_tokens": 512, "max_model_len": 512, "speculative": spec, **changes}
    return LLM(None, device=DEVICE, max_num_seqs=seqs, **settings)


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
    assert texts(seqs, copies, 7, adaptive=True) == alone * copies


@pytest.mark.parametrize("rows", [16, 37, 200])
def test_chunks_change_no_text(alone: Texts, rows: int) -> None:
    assert texts(8, k=5, max_num_batched_tokens=rows) == alone


def test_preemption_changes_no_text() -> None:
    few = engine(4, 5, num_pages=6, prefix_caching=False)
    assert answers(few, LONG) == answers(engine(1, 0), LONG)
    assert few.engine.scheduler.stats.preemptions > 0


def test_a_cached_prefix_changes_no_text() -> None:
    cached = engine(4, 5, prefix_caching=True)
    assert answers(cached, LONG) == answers(cached, LONG) == answers(engine(1, 0), LONG)
    assert cached.engine.cache is not None and cached.engine.cache.holds(), "a page and its window are kept"


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
