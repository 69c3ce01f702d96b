"""``AsyncEngine``: streams, cancellation, many callers, and what callers see when it ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from firesteel import LLM, AsyncEngine, SamplingParams
from firesteel.config import ParameterError
from firesteel.engine.asynchronous import EngineDead, Piece, _Call
from firesteel.engine.loop import QueueFull
from oracles.traffic import essence, write_model

T = TypeVar("T")
SETTINGS: dict[str, Any] = {
    "numerics": "float32",
    "max_model_len": 300,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 40,
}
HOT = SamplingParams(max_tokens=12, temperature=1.0, seed=7, logprobs=1)
LONG = SamplingParams(max_tokens=250, temperature=1.0, seed=7, ignore_eos=True)
PROMPTS = [[5 + i, *range(10, 10 + 3 * i)] for i in range(8)]
PATIENCE = 30.0  # seconds after which a test counts as hanging


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("async") / "model")


@pytest.fixture
def engine(folder: Path) -> Iterator[AsyncEngine]:
    one = AsyncEngine(folder, **SETTINGS)
    yield one
    one.shutdown()


def run(main: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result; a hang is a failure."""

    async def limited() -> T:
        return await asyncio.wait_for(main, PATIENCE)

    return asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something the engine's thread does."""
    while not condition():
        await asyncio.sleep(0.002)


def idle(engine: AsyncEngine) -> bool:
    """Nothing runs and every slot is free."""
    inner = engine.frontend.engine
    return not inner.busy and not engine.frontend.open and inner.memory.free_slots == inner.memory.slots


async def collect(engine: AsyncEngine, prompt: Any, params: SamplingParams) -> list[Piece]:
    return [piece async for piece in engine.generate(prompt, params)]


# ---- answers -------------------------------------------------------------------------------------
def test_pieces_join_to_the_completion(engine: AsyncEngine) -> None:
    params = replace(HOT, n=3, stop=("e",))
    pieces = run(collect(engine, PROMPTS[3], params))
    for index in range(3):
        mine = [p for p in pieces if p.index == index]
        assert [p.completion is not None for p in mine] == [False] * (len(mine) - 1) + [True]
        done = mine[-1].completion
        assert done is not None and done.index == index and done.logprobs is not None
        assert "".join(p.text for p in mine) == done.text
        assert sum((p.token_ids for p in mine), ()) == done.token_ids
        assert [s.logprob for p in mine for s in p.scores] == [s.logprob for s in done.logprobs]
        assert done.usage["completion_tokens"] == len(done.token_ids)
    assert len([p for p in pieces if p.index == 0]) > 2  # it was a stream


def test_many_callers_get_what_they_get_offline(folder: Path, engine: AsyncEngine) -> None:
    """Twenty-four at once on three slots; strings and ids, n > 1, greedy and sampled."""
    jobs: list[tuple[Any, SamplingParams]] = []
    for i in range(24):
        prompt = "some words, some numbers" if i % 5 == 0 else PROMPTS[i % 8]
        jobs.append((prompt, replace(HOT, seed=i, n=1 + (i % 4 == 1), temperature=1.0 if i % 2 else 0.0)))
    jobs = [(p, replace(s, n=1) if s.temperature == 0 else s) for p, s in jobs]

    async def all_at_once() -> Any:
        return await asyncio.gather(*(engine.complete(p, s) for p, s in jobs))

    found = [essence(c) for answer in run(all_at_once()) for c in answer]
    want = LLM(folder, **SETTINGS).generate([p for p, _ in jobs], [s for _, s in jobs])
    assert found == [essence(c) for c in want]
    run(until(lambda: idle(engine)))


def test_callers_of_two_loops(engine: AsyncEngine) -> None:
    """Two threads with an event loop each."""
    out: dict[int, Any] = {}

    def caller(i: int) -> None:
        out[i] = run(engine.complete(PROMPTS[2], HOT))

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(PATIENCE)
    assert essence(out[0][0]) == essence(out[1][0])


# ---- leaving early -------------------------------------------------------------------------------
def test_leaving_the_loop_ends_the_request(engine: AsyncEngine) -> None:
    async def leave() -> int:
        seen = 0
        stream = engine.generate(PROMPTS[1], LONG)
        async for piece in stream:
            seen += len(piece.token_ids)
            if seen >= 3:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: idle(engine))
        return seen

    assert run(leave()) < LONG.max_tokens
    assert len(run(engine.complete(PROMPTS[1], HOT))) == 1


def test_a_cancelled_task_frees_its_slot_and_the_queue_moves_on(engine: AsyncEngine) -> None:
    """Three long requests fill the slots; the fourth runs as soon as one is cancelled."""

    async def scene() -> None:
        long = [asyncio.create_task(engine.complete(PROMPTS[i], LONG)) for i in range(3)]
        await until(lambda: engine.frontend.engine.memory.free_slots == 0)
        fourth = asyncio.create_task(engine.complete(PROMPTS[4], replace(HOT, max_tokens=2)))
        long[1].cancel()
        done = await fourth
        assert len(done[0].token_ids) == 2
        assert not long[0].done() and not long[2].done()
        for task in (long[0], long[2]):
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)
        await until(lambda: idle(engine))

    run(scene())


def test_cancelled_before_it_is_queued(engine: AsyncEngine) -> None:
    async def scene() -> None:
        tasks = [asyncio.create_task(engine.complete(PROMPTS[0], LONG)) for _ in range(5)]
        await asyncio.sleep(0)  # they have sent their requests, no more
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: idle(engine) and engine._inbox.empty())
        assert not engine._calls

    run(scene())


# ---- errors --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("prompt", "params", "name"),
    [
        ([], HOT, "prompt"),
        ([5, 10**6], HOT, "prompt"),
        ([5] * 300, HOT, "prompt"),
        ([5], replace(HOT, stop_token_ids=(10**6,)), "stop_token_ids"),
    ],
)
def test_a_refused_request_fails_alone(
    engine: AsyncEngine, prompt: Any, params: SamplingParams, name: str
) -> None:
    async def scene() -> Any:
        good = asyncio.create_task(engine.complete(PROMPTS[2], HOT))
        with pytest.raises(ParameterError, match=f"^{name}"):
            await engine.complete(prompt, params)
        return await good

    assert run(scene())[0].finish_reason in ("length", "stop")
    assert engine.alive


def test_a_full_queue_is_an_error_of_its_own(folder: Path) -> None:
    engine = AsyncEngine(folder, **{**SETTINGS, "max_num_seqs": 1, "max_waiting": 2})

    async def scene() -> list[Any]:
        jobs = [engine.complete(PROMPTS[i], replace(LONG, max_tokens=30)) for i in range(8)]
        return await asyncio.gather(*jobs, return_exceptions=True)

    found = run(scene())
    engine.shutdown()
    refused = [f for f in found if isinstance(f, QueueFull)]
    assert refused and "max_waiting" in str(refused[0])
    assert [f for f in found if isinstance(f, list)]
    assert len(refused) + sum(isinstance(f, list) for f in found) == 8


# ---- the end -------------------------------------------------------------------------------------
async def outcome(job: Awaitable[Any]) -> Any:
    try:
        return await job
    except EngineDead as err:
        return err


def test_shutdown_fails_who_still_waits(folder: Path) -> None:
    engine = AsyncEngine(folder, **SETTINGS)

    async def scene() -> list[Any]:
        jobs = [asyncio.create_task(outcome(engine.complete(p, LONG))) for p in PROMPTS]
        await until(lambda: engine.frontend.engine.memory.free_slots == 0)
        engine.shutdown()
        return await asyncio.gather(*jobs)

    assert all(isinstance(o, EngineDead) and "shut down" in str(o) for o in run(scene()))
    assert not engine.alive
    with pytest.raises(EngineDead, match=r"shut down.*new one"):
        run(engine.complete(PROMPTS[0], HOT))
    engine.shutdown()  # twice is no harm


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_step_fails_everybody_with_its_reason(folder: Path) -> None:
    engine = AsyncEngine(folder, **SETTINGS)
    inner, step, calls = engine.frontend.engine, engine.frontend.engine.step, 0

    def broken() -> Any:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise RuntimeError("device lost")
        return step()

    inner.step = broken  # type: ignore[method-assign]

    async def scene() -> list[Any]:
        return await asyncio.gather(*(outcome(engine.complete(p, LONG)) for p in PROMPTS))

    found = run(scene())
    assert all(isinstance(o, EngineDead) and "device lost" in str(o) for o in found)
    assert not engine.alive
    with pytest.raises(EngineDead, match="device lost"):
        run(engine.complete(PROMPTS[0], HOT))
    engine.shutdown()


def test_a_request_that_arrives_while_the_thread_ends_does_not_hang(folder: Path) -> None:
    engine = AsyncEngine(folder, **SETTINGS)
    put = engine._inbox.put

    def late(item: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(item, _Call):  # the engine was alive when it was asked
            put(None)
            engine._thread.join(PATIENCE)
        put(item, *args, **kwargs)

    engine._inbox.put = late  # type: ignore[method-assign]
    with pytest.raises(EngineDead):
        run(engine.complete(PROMPTS[0], HOT))


def test_a_caller_whose_loop_is_gone_harms_nobody(engine: AsyncEngine) -> None:
    """Its event loop closes in the middle of a stream: the request ends, the engine goes on."""
    loop = asyncio.new_event_loop()
    stream = engine.generate(PROMPTS[1], replace(LONG, max_tokens=60))
    loop.run_until_complete(anext(stream))
    loop.close()
    begun = time.monotonic()
    assert len(run(engine.complete(PROMPTS[2], HOT))) == 1
    while not idle(engine) and time.monotonic() - begun < PATIENCE:
        time.sleep(0.005)
    assert idle(engine) and engine.alive
