"""A bad request ends alone: broken state, a callback that raises, a stray synchronisation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from firesteel import LLM, SamplingParams
from firesteel.core import FinishReason
from firesteel.engine.memory import Memory
from firesteel.engine.output import Answer
from firesteel.engine.sync import HiddenSync, SyncGuard
from oracles.traffic import VOCAB, Alone, Request, essence, page_size, write_model

PAGE = 16
SETTINGS: dict[str, Any] = {"numerics": "float32", "max_model_len": 128}
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, seed=0, ignore_eos=True, logprobs=1)
HOT = replace(GREEDY, temperature=1.0, seed=5)
NAN = float("nan")


@pytest.fixture(scope="module", autouse=True)
def short_pages() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with page_size(PAGE):
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("faults") / "model")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    return Alone(folder, **SETTINGS)


def tokens(n: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, VOCAB) for _ in range(n))


VICTIM = Request(tokens(40), HOT)
OTHERS = [Request(tokens(n, n), p) for n, p in ((7, GREEDY), (33, HOT), (50, replace(HOT, top_k=20)))]


def break_state(llm: LLM, slot: int) -> None:
    """What a broken kernel or a flipped bit may leave: NaN in one slot's rings."""
    for layer in llm.engine.memory.layers:
        for ring in layer.rings():
            ring[slot] = NAN


def run_until(llm: LLM, answers: list[Answer]) -> None:
    while any(a.finish is None for a in answers):
        llm.frontend.step()
    llm.engine.drain()
    llm.engine.scheduler.check()


# ---- broken state --------------------------------------------------------------------------------
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 9, 15])
@pytest.mark.parametrize("caching", [True, False])
def test_broken_state_ends_one_request(folder: Path, alone: Alone, steps: int, caching: bool) -> None:
    """In the prompt or in the answer, mixed with three others; then everybody comes again."""
    llm = LLM(folder, max_num_seqs=4, max_num_batched_tokens=20, prefix_caching=caching, **SETTINGS)
    victim = llm.frontend.add(list(VICTIM.prompt), VICTIM.params)[0]
    others = [llm.frontend.add(list(r.prompt), r.params)[0] for r in OTHERS]
    for _ in range(steps):
        llm.frontend.step()
    break_state(llm, victim.seq.slot)
    run_until(llm, [victim, *others])
    broken = victim.completion()
    assert broken.finish_reason == "error" and "finite" in broken.error
    want = alone(VICTIM)[0]
    assert broken.token_ids == want.token_ids[: len(broken.token_ids)]
    assert len(broken.token_ids) < len(want.token_ids)
    assert broken.logprobs is not None and len(broken.logprobs) == len(broken.token_ids)
    assert broken.usage["completion_tokens"] == len(broken.token_ids)
    for request, answer in zip(OTHERS, others, strict=True):
        assert essence(answer.completion()) == essence(alone(request)[0])
    for request in (VICTIM, *OTHERS, VICTIM):  # nothing of it is left in slots, pages or cache
        again = llm.generate([list(request.prompt)], request.params)[0]
        assert essence(again) == essence(alone(request)[0])


def test_a_broken_window_that_was_stored_is_dropped_at_the_first_error(folder: Path, alone: Alone) -> None:
    """The request that stored it is gone before it samples; whoever reuses it fails once, nobody after."""
    llm = LLM(folder, max_num_seqs=2, max_num_batched_tokens=20, **SETTINGS)
    victim = llm.frontend.add(list(VICTIM.prompt), VICTIM.params)[0]
    llm.frontend.step()
    break_state(llm, victim.seq.slot)
    llm.frontend.step()
    assert llm.engine.cache is not None and llm.engine.cache.holds()
    llm.frontend.drop(victim, FinishReason.ABORT)
    llm.engine.drain()
    first = llm.generate([list(VICTIM.prompt)], VICTIM.params)[0]
    assert first.finish_reason == "error" or essence(first) == essence(alone(VICTIM)[0])
    for _ in range(2):
        again = llm.generate([list(VICTIM.prompt)], VICTIM.params)[0]
        assert essence(again) == essence(alone(VICTIM)[0])


def test_a_broken_sample_does_not_take_its_siblings_along(folder: Path, alone: Alone) -> None:
    """n = 3: one sample's state breaks."""
    request = Request(VICTIM.prompt, replace(HOT, n=3))
    llm = LLM(folder, max_num_seqs=3, **SETTINGS)
    answers = llm.frontend.add(list(request.prompt), request.params)
    while any(len(a.ids) < 4 for a in answers):
        llm.frontend.step()
    break_state(llm, answers[1].seq.slot)
    run_until(llm, answers)
    assert [a.completion().finish_reason for a in answers] == ["length", "error", "length"]
    for i in (0, 2):
        assert essence(answers[i].completion()) == essence(alone(request)[i])


def test_a_broken_copy_of_a_preempted_request(folder: Path, alone: Alone) -> None:
    """NaN in the host copy: the request ends when it resumes, its neighbour does not notice."""
    requests = [Request(tokens(40, 8), HOT), Request(tokens(44, 9), HOT)]
    llm = LLM(folder, max_num_seqs=2, num_pages=6, prefix_caching=False, **SETTINGS)
    answers = [llm.frontend.add(list(r.prompt), r.params)[0] for r in requests]
    while not llm.engine.runner._saved:
        llm.frontend.step()
    (request_id, (_, saved)), *_ = llm.engine.runner._saved.items()
    with torch.inference_mode():
        for ring in saved.rings:
            ring.fill_(NAN)
    run_until(llm, answers)
    for request, answer in zip(requests, answers, strict=True):
        if answer.request_id == request_id:
            assert answer.completion().finish_reason == "error"
        else:
            assert essence(answer.completion()) == essence(alone(request)[0])


# ---- a callback that raises ------------------------------------------------------------------------
@pytest.mark.parametrize("after", [1, 2, 11, 20])
def test_a_callback_that_raises_ends_its_own_answer(folder: Path, alone: Alone, after: int) -> None:
    llm = LLM(folder, max_num_seqs=4, max_num_batched_tokens=30, **SETTINGS)
    requests = [VICTIM, *OTHERS]

    def listener(answer: Answer) -> None:
        if answer.seq.prompt == VICTIM.prompt and len(answer.ids) >= after:
            raise ValueError("no more room")

    done = llm.generate([list(r.prompt) for r in requests], [r.params for r in requests], listener)
    assert (done[0].finish_reason, len(done[0].token_ids)) == ("error", after)
    assert "ValueError: no more room" in done[0].error
    assert done[0].token_ids == alone(VICTIM)[0].token_ids[:after]
    for request, found in zip(OTHERS, done[1:], strict=True):
        assert essence(found) == essence(alone(request)[0])
    assert not llm.engine.busy and llm.engine.memory.free_slots == 4
    again = llm.generate([list(VICTIM.prompt)], VICTIM.params)[0]
    assert essence(again) == essence(alone(VICTIM)[0])


def test_a_callback_hears_every_token_once(folder: Path) -> None:
    llm = LLM(folder, max_num_seqs=4, **SETTINGS)
    heard: dict[int, list[int]] = {}
    texts: dict[int, str] = {}

    def listener(answer: Answer) -> None:
        heard.setdefault(answer.request_id, []).append(len(answer.ids))
        texts[answer.request_id] = texts.get(answer.request_id, "") + answer.delta()

    done = llm.generate([list(r.prompt) for r in OTHERS], [r.params for r in OTHERS], listener)
    assert list(texts.values()) == [c.text for c in done]
    for lengths, found in zip(heard.values(), done, strict=True):
        assert lengths == sorted(lengths) and lengths[-1] == len(found.token_ids)


def test_an_interrupted_call_leaves_nothing_behind(folder: Path, alone: Alone) -> None:
    """KeyboardInterrupt out of a callback: the call ends, the engine is clean."""
    llm = LLM(folder, max_num_seqs=2, **SETTINGS)

    def listener(answer: Answer) -> None:
        if len(answer.ids) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.generate([list(r.prompt) for r in OTHERS], [r.params for r in OTHERS], listener)
    assert not llm.engine.busy and not llm.frontend.open and llm.engine.memory.free_slots == 2
    llm.engine.scheduler.check()
    again = llm.generate([list(VICTIM.prompt)], VICTIM.params)[0]
    assert essence(again) == essence(alone(VICTIM)[0])


# ---- synchronisations ----------------------------------------------------------------------------
def test_a_stray_synchronisation_is_an_error_in_debug_mode(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody reads a device value while a snapshot is written."""
    store = Memory.write_snapshot

    def peeking(self: Memory, slot: int, boundary: int, pages: list[int]) -> None:
        store(self, slot, boundary, pages)
        self.arena[pages[0], 0].item()

    monkeypatch.setattr(Memory, "write_snapshot", peeking)
    prompt, params = list(VICTIM.prompt), VICTIM.params
    assert LLM(folder, **SETTINGS).generate([prompt], params)[0].finish_reason == "length"
    with pytest.raises(HiddenSync, match=r"engine/sync\.py"):
        LLM(folder, debug_sync=True, **SETTINGS).generate([prompt], params)


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t[0].item(),
        lambda t: bool(t.any()),
        lambda t: t[t > 0],
        lambda t: torch.nonzero(t),
        lambda t: torch.equal(t, t),
        lambda t: torch.unique(t),
        lambda t: int(t.max()),
    ],
)
def test_what_counts_as_a_synchronisation(read: Any) -> None:
    guard, value = SyncGuard(True, torch.device("cpu")), torch.arange(3)
    with pytest.raises(HiddenSync), guard.step():
        read(value)
    with guard.step(), guard.named("meant"):
        read(value)
    with SyncGuard(False, torch.device("cpu")).step():
        read(value)
    assert guard.counts == {"meant": 1}


def test_every_step_waits_exactly_once(folder: Path) -> None:
    llm = LLM(folder, max_num_seqs=2, debug_sync=True, **SETTINGS)
    llm.generate([list(r.prompt) for r in OTHERS], [r.params for r in OTHERS])
    assert llm.engine.stats()["syncs"] == {"verdict": len(llm.engine.records)}
