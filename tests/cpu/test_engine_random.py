"""Random traffic, and preemption at every step: each text is the one of the request run alone.

FIRESTEEL_OPERATIONS=2000 runs the long form; ``python -m oracles.traffic`` is the same by hand.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from firesteel import LLM, SamplingParams
from firesteel.engine.scheduler import Scheduler
from oracles.traffic import VOCAB, Alone, Request, essence, page_size, run_traffic, write_model

OPERATIONS = int(os.environ.get("FIRESTEEL_OPERATIONS", "320"))
PAGE = 16


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("random") / "model")


@pytest.fixture
def short_pages() -> Iterator[None]:
    """Pages of 16 tokens: a boundary every few steps."""
    with page_size(PAGE):
        yield


def tokens(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(n)]


# ---- random traffic ----------------------------------------------------------------------------
@pytest.mark.parametrize("numerics", ["float32", "official"])
def test_random_traffic_changes_no_text(folder: Path, short_pages: None, numerics: str) -> None:
    share = OPERATIONS * 3 // 4 if numerics == "float32" else OPERATIONS // 4
    report = run_traffic(folder, 1, share, page=PAGE, episode=60, requests=12, numerics=numerics)
    assert report.total == share
    assert report.compared > share // 8
    if numerics == "float32":  # the longer part was under every pressure
        assert report.cached_tokens and report.aborted
        assert report.preemptions > report.recomputes > 0


def test_random_traffic_on_real_pages(folder: Path) -> None:
    """Prompts around 255, 256, 257, 511, 512 and 513 tokens, pages of 256."""
    share = max(OPERATIONS // 16, 20)
    report = run_traffic(
        folder,
        5,
        share,
        page=256,
        episode=share,
        requests=6,
        longest=8,
        debug=0.0,
        max_num_batched_tokens=300,
    )
    assert report.compared


# ---- preemption at every step --------------------------------------------------------------------
class Preempting:
    """Copies a request out at chosen steps of its own life."""

    def __init__(self, llm: LLM, request_id: int, at: set[int]):
        self.scheduler: Scheduler = llm.engine.scheduler
        self.request_id, self.at = request_id, at
        self.step = 0
        self._plan = self.scheduler._plan_decodes
        self.scheduler._plan_decodes = self.plan  # type: ignore[method-assign]

    def plan(self, board: Any) -> None:
        victim = next((s for s in self.scheduler.running if s.request_id == self.request_id), None)
        if victim is not None and victim.slot >= 0 and board.movable(victim):
            if self.step in self.at:
                self.scheduler._preempt(victim, board)
            self.step += 1
        self._plan(board)


REQUEST = Request(
    tuple(tokens(37)),
    SamplingParams(
        max_tokens=14,
        temperature=0.9,
        seed=3,
        ignore_eos=True,
        logprobs=2,
        repetition_penalty=1.2,
        top_p=0.95,
    ),
)
OTHER = Request(tuple(tokens(19, 1)), SamplingParams(max_tokens=25, temperature=0.0, seed=1, ignore_eos=True))


@pytest.mark.parametrize("swap_gib", [1.0, 0.0], ids=["copied", "recomputed"])
def test_preemption_at_every_step(folder: Path, short_pages: None, swap_gib: float) -> None:
    """A prompt of four chunks and an answer over a page boundary, stopped once at each of its steps."""
    settings = {"numerics": "float32", "max_model_len": 96}
    alone = Alone(folder, **settings)
    want = [essence(alone(r)[0]) for r in (REQUEST, OTHER)]
    step, reached = 0, True
    while reached:
        llm = LLM(
            folder, max_num_seqs=2, max_num_batched_tokens=12, swap_gib=swap_gib, debug_poison=step % 4 == 0,
            **settings,
        )  # fmt: skip
        hook = Preempting(llm, 0, {step})
        done = llm.generate([list(r.prompt) for r in (REQUEST, OTHER)], [REQUEST.params, OTHER.params])
        assert [essence(d) for d in done] == want, f"stopped at step {step}"
        reached = hook.step > step
        assert done[0].stats["preemptions"] == reached
        assert llm.engine.stats()["recomputes"] == (reached and swap_gib == 0)
        llm.engine.scheduler.check()
        step += 1
    assert step > 17  # four chunks and thirteen more tokens


@pytest.mark.parametrize("swap_gib", [1.0, 0.0], ids=["copied", "recomputed"])
def test_preemption_at_many_steps(folder: Path, short_pages: None, swap_gib: float) -> None:
    """Again and again: every second step, every third, the first ten."""
    settings = {"numerics": "float32", "max_model_len": 96}
    want = essence(Alone(folder, **settings)(REQUEST)[0])
    for at in (set(range(0, 60, 2)), set(range(0, 60, 3)), set(range(4, 10))):
        llm = LLM(folder, max_num_seqs=2, max_num_batched_tokens=12, swap_gib=swap_gib, **settings)
        Preempting(llm, 0, at)
        done = llm.generate([list(REQUEST.prompt)], REQUEST.params)[0]
        assert essence(done) == want
        assert done.stats["preemptions"] >= 5
        # whatever it stored on its way serves others
        longer = Request((*REQUEST.prompt, *done.token_ids, *tokens(3, 9)), OTHER.params)
        again = llm.generate([list(longer.prompt)], longer.params)[0]
        assert essence(again) == essence(Alone(folder, **settings)(longer)[0])


# ---- snapshots -----------------------------------------------------------------------------------
def test_a_window_is_stored_in_time_or_not_at_all(folder: Path, short_pages: None) -> None:
    """An answer crosses a boundary that is stored already; later the store is emptied. The rings have moved on."""
    settings = {"numerics": "float32", "max_model_len": 96}
    stem = tokens(PAGE)
    llm = LLM(folder, max_num_seqs=2, **settings)
    llm.generate([[*stem, 5, 6]], SamplingParams(max_tokens=1))
    assert llm.engine.cache is not None and llm.engine.cache.holds()
    begun = llm.frontend.add(stem, SamplingParams(max_tokens=14, temperature=0.0, seed=1, ignore_eos=True))[0]
    while len(begun.ids) < 6:
        llm.frontend.step()
    llm.engine.cache.clear()
    while begun.finish is None:
        llm.frontend.step()
    llm.engine.drain()
    late = Request((*stem, *tokens(9, 2)), SamplingParams(max_tokens=4, temperature=0.0, seed=1, logprobs=1))
    got = llm.generate([list(late.prompt)], late.params)[0]
    assert essence(got) == essence(Alone(folder, **settings)(late)[0])


def test_two_prompts_of_one_stem_at_once(folder: Path, short_pages: None) -> None:
    """The second waits for the first one's window and skips the stem; the third parts from both earlier."""
    settings = {"numerics": "float32", "max_model_len": 96}
    alone = Alone(folder, **settings)
    stem = tokens(3 * PAGE)
    greedy = SamplingParams(max_tokens=4, temperature=0.0, seed=1, ignore_eos=True, logprobs=0)
    requests = [
        Request((*stem, 5, 6, 7), greedy),
        Request((*stem, 9), greedy),
        Request((*stem[:PAGE], *tokens(20, 3)), greedy),
        Request((*stem[:PAGE], *tokens(20, 4)), greedy),
    ]
    llm = LLM(folder, max_num_seqs=4, max_num_batched_tokens=20, **settings)
    done = llm.generate([list(r.prompt) for r in requests], greedy)
    assert [essence(d) for d in done] == [essence(alone(r)[0]) for r in requests]
    assert done[1].usage["cached_tokens"] == 3 * PAGE
    again = llm.generate([list(r.prompt) for r in requests], greedy)
    assert [d.usage["cached_tokens"] for d in again] == [3 * PAGE, 3 * PAGE, 2 * PAGE, 2 * PAGE]
    assert [d.token_ids for d in again] == [d.token_ids for d in done]
