"""Hostile grammars: they compile beside the loop, take only so long, and fail alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

from firesteel import LLM, AsyncEngine, SamplingParams
from firesteel.bench.toys import script
from firesteel.config import EngineConfig, ParameterError
from firesteel.engine import grammar
from firesteel.engine.asynchronous import EngineDead
from firesteel.engine.build import build_engine
from firesteel.engine.frontend import Frontend
from firesteel.engine.grammar import Grammars
from firesteel.engine.guide import Guide
from firesteel.engine.loop import QueueFull
from firesteel.serve.app import ServeOptions, create_app
from firesteel.serve.client import ThreadEngine
from firesteel.speculation.policy import FixedWidth, Proposed, Timing, Verified
from oracles.traffic import write_model

pytest.importorskip("llguidance")
PATIENCE = 60.0  # seconds after which a test counts as hanging
SETTINGS: dict[str, Any] = {"max_model_len": 600, "max_num_seqs": 4, "threads": 1}
FREE = SamplingParams(max_tokens=300, temperature=1.0, seed=7, ignore_eos=True)


def hostile(size: int) -> dict[str, Any]:
    """A schema of many alternatives of many ranges; 30 take about a second to compile."""

    def one(count: int) -> dict[str, Any]:
        numbers = {f"k{j}": {"type": "integer", "minimum": j, "maximum": 10**9 + j} for j in range(count)}
        return {"type": "object", "properties": numbers}

    return {"anyOf": [one(i + 30) for i in range(size)]}


def ask(wish: dict[str, Any], **values: Any) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 60, "temperature": 1.0, "seed": 3, "structured_outputs": wish, **values}
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("time") / "model", seed=4, agreement=0.9)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Stuck grammars wait for it; opened at the end, so that no thread is left."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def stuck(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Regular expressions beginning with "s" compile only when the gate is open."""
    compile_ = Grammars._compile

    def slow(self: Grammars, wish: Any) -> Any:
        if wish.regex is not None and wish.regex.startswith("s"):
            assert gate.wait(PATIENCE)
        return compile_(self, wish)

    monkeypatch.setattr(Grammars, "_compile", slow)
    return gate


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.002)


class Free:
    """A request that runs on while others do what they do."""

    def __init__(self, engine: AsyncEngine):
        self._stream = engine.generate([5, 6], FREE)
        self.ids: list[int] = []
        self._task = asyncio.create_task(self._read(self._stream))

    async def _read(self, stream: AsyncIterator[Any]) -> None:
        async for piece in stream:
            self.ids.extend(piece.token_ids)

    async def end(self, reference: LLM) -> None:
        """To its end; its text is that of running alone."""
        async with asyncio.timeout(PATIENCE):
            await self._task
        assert tuple(self.ids) == reference.generate([[5, 6]], FREE)[0].token_ids


# ---- compiling -------------------------------------------------------------------------------
def test_steps_go_on_while_a_grammar_compiles(folder: Path, stuck: threading.Event) -> None:
    """It is let through only after others have made 50 steps: on the loop it would wait for ever."""

    async def main() -> None:
        engine = AsyncEngine(folder, **SETTINGS)
        free = Free(engine)
        await until(lambda: len(free.ids) > 3)
        slow = asyncio.create_task(engine.complete([5], ask({"regex": "s[ab]{3}"})))
        await until(lambda: engine.frontend.guides.compiling.pending == 1)
        quick = await engine.complete([5], ask({"regex": "[ab]{3}"}))  # does not wait for the slow one
        assert len(quick[0].text) == 3
        seen = len(free.ids)
        await until(lambda: len(free.ids) >= seen + 50)
        assert not slow.done()
        stuck.set()
        assert (await slow)[0].text[0] == "s"
        await free.end(LLM(folder, **SETTINGS))
        engine.shutdown()

    asyncio.run(main())


def test_a_hostile_schema_fails_alone_at_its_deadline(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one, while others run: the library must let go of the interpreter for their steps."""
    compile_, steps = Grammars._compile, list[int]()

    async def main() -> None:
        engine = AsyncEngine(folder, structured_compile_seconds=0.2, **SETTINGS)

        def counted(self: Grammars, wish: Any) -> Any:
            before = len(engine.frontend.engine.records)
            try:
                return compile_(self, wish)
            finally:
                steps.append(len(engine.frontend.engine.records) - before)

        monkeypatch.setattr(Grammars, "_compile", counted)
        free = Free(engine)
        await until(lambda: len(free.ids) > 3)
        with pytest.raises(
            ParameterError, match=r"structured_outputs\.json: .*structured_compile_seconds=0\.2"
        ):
            await engine.complete([5], ask({"json": hostile(30)}))
        await until(lambda: bool(steps))
        assert steps[0] > 10, "others stood still while it compiled"
        await free.end(LLM(folder, **SETTINGS))
        engine.shutdown()

    asyncio.run(main())


def test_offline_callers_get_the_deadline_too(folder: Path, stuck: threading.Event) -> None:
    llm = LLM(folder, structured_compile_seconds=0.2, **SETTINGS)
    with pytest.raises(ParameterError, match=r"structured_outputs\.regex: .*structured_compile_seconds=0\.2"):
        llm.generate([[5], [6]], [FREE, ask({"regex": "sb"})])
    assert llm.generate([[5]], ask({"regex": "ab"}))[0].text == "ab"
    llm.engine.scheduler.check()
    stuck.set()
    deadline = time.monotonic() + PATIENCE
    while llm.frontend.guides.compiling.overdue:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert llm.generate([[5]], ask({"regex": "sb"}))[0].text == "sb", (
        "compiled after all: the next may use it"
    )


def test_leaving_and_ending_while_a_grammar_compiles(folder: Path, stuck: threading.Event) -> None:
    async def main() -> None:
        engine = AsyncEngine(folder, max_waiting=2, **SETTINGS)
        calls = [asyncio.create_task(engine.complete([5], ask({"regex": f"s{i}"}))) for i in range(2)]
        await until(lambda: engine.frontend.guides.compiling.pending == 2)
        with pytest.raises(QueueFull, match="max_waiting"):
            await engine.complete([5], ask({"regex": "s2"}))
        calls[0].cancel()
        await until(lambda: len(engine._compiling) == 1)
        await asyncio.to_thread(engine.shutdown)
        with pytest.raises(EngineDead):
            await calls[1]
        stuck.set()

    asyncio.run(main())


# ---- masks -----------------------------------------------------------------------------------
class Slow(grammar._Matcher):
    """Its fifth mask waits for the gate."""

    gate = threading.Event()
    left = 4

    def mask(self) -> Any:
        self.left -= 1
        if self.left < 0:
            assert self.gate.wait(PATIENCE)
        return super().mask()


def test_a_failing_grammar_does_not_empty_the_prefix_cache(folder: Path) -> None:
    """Whoever shares a prompt with it still finds what it stored."""
    llm, prompt = LLM(folder, **SETTINGS), [5, *range(10, 110), *range(10, 110), *range(10, 110)]
    cache = llm.engine.cache
    assert cache is not None
    llm.generate([prompt], SamplingParams(max_tokens=2, seed=1))
    guide_rows, kept = Guide.rows, cache.pages

    def lost(self: Guide, committed: Any, drafts: Any) -> Any:
        self.lose("given up")
        return guide_rows(self, committed, drafts) and self.nothing()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guide, "rows", lost)
        done = llm.generate([prompt], ask({"regex": "a{9}"}))[0]
    assert done.error == "structured_outputs: given up" and done.usage["cached_tokens"] > 0
    again = llm.generate([prompt], SamplingParams(max_tokens=2, seed=1))[0]
    assert again.usage["cached_tokens"] == done.usage["cached_tokens"] and cache.pages >= kept > 0


@pytest.mark.parametrize("k", (0, 3))
def test_a_slow_mask_fails_its_request_alone(
    folder: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    matcher = Grammars.matcher

    def made(self: Grammars, wish: Any) -> Any:
        fresh = matcher(self, wish)
        if wish.regex == "[a-z]{50}":
            assert isinstance(fresh, grammar._Matcher)
            fresh.__class__ = Slow
        return fresh

    monkeypatch.setattr(Slow, "gate", gate)
    monkeypatch.setattr(Grammars, "matcher", made)
    slow = {"structured_outputs": {"regex": "[a-z]{50}"}}
    others = [ask({"regex": "[a-f]{30}"}, seed=1), SamplingParams(max_tokens=40, seed=2, ignore_eos=True)]
    spec = {"num_speculative_tokens": k} if k else None
    llm = LLM(folder, structured_mask_seconds=0.4, speculative=spec, **SETTINGS)
    want = [LLM(folder, **SETTINGS).generate([[5, 6]], p)[0].token_ids for p in others]
    failed, *rest = llm.generate([[5, 6]] * 3, [ask(slow["structured_outputs"]), *others])
    assert failed.finish_reason == "error"
    assert failed.error.startswith("structured_outputs: a mask took longer than structured_mask_seconds=0.4")
    assert [d.token_ids for d in rest] == want
    with pytest.raises(ParameterError, match=r"structured_outputs\.regex: a mask took longer than"):
        llm.generate([[5]], ask(slow["structured_outputs"]))
    monkeypatch.setattr(grammar.time, "monotonic", lambda: 1e9)  # a minute later
    gate.set()
    assert len(llm.generate([[5]], ask(slow["structured_outputs"]))[0].text) == 50
    llm.engine.scheduler.check()


# ---- over HTTP -------------------------------------------------------------------------------
def test_over_http_it_is_a_400_that_names_field_and_setting(folder: Path, stuck: threading.Event) -> None:
    config = EngineConfig.of(structured_compile_seconds=0.2, **SETTINGS)
    engine = ThreadEngine(lambda progress: Frontend(build_engine(folder, config, progress)))
    with TestClient(create_app(engine, ServeOptions(names=("tiny",)))) as http:
        deadline = time.monotonic() + PATIENCE
        while http.get("/ready").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        body = {"prompt": [5], "max_tokens": 20, "seed": 1}
        reply = http.post("/v1/completions", json={**body, "guided_regex": "s[ab]{4}"})
        assert (
            reply.status_code == 400 and "structured_compile_seconds=0.2" in reply.json()["error"]["message"]
        )
        assert reply.json()["error"]["param"] == "guided_regex"
        reply = http.post("/v1/completions", json={**body, "guided_regex": "[ab]{4}"})
        assert len(reply.json()["choices"][0]["text"]) == 4
        stuck.set()
    assert engine.worker is not None and not engine.worker._compiling


# ---- what a drafter learns ---------------------------------------------------------------------
class Listening(FixedWidth):
    """Fixed widths that keep what they are told."""

    learns = True

    def __init__(self, gamma: int):
        super().__init__(gamma)
        self.heard: list[Verified] = []

    def learn(self, proposed: Any, verified: Any, timing: Timing) -> None:
        self.heard.extend(verified)
        assert all(isinstance(p, Proposed) for p in proposed)


def test_forbidden_drafts_are_no_rejections(folder: Path) -> None:
    """Every spoilt draft is one that the grammar forbids, every other is right: nothing was rejected."""
    prompts, params = [[5, 6]] * 4, [ask({"regex": "(ab){20}"}, seed=i) for i in range(4)]
    want = LLM(folder, **SETTINGS).generate(prompts, params)
    llm = LLM(folder, speculative={"num_speculative_tokens": 5}, **SETTINGS)
    policy = llm.engine.scheduler.policy = Listening(5)
    script(llm, prompts, params, want, wrong=0.3)
    done = llm.generate(prompts, params)
    assert [d.token_ids for d in done] == [d.token_ids for d in want]
    heard = [v for v in policy.heard if not v.ended]
    assert sum(d.stats["verified"] - d.stats["accepted"] for d in done) > 10, "drafts were cut"
    # a block's first draft stands behind a sampled token, which no script told it
    assert sum(v.verified for v in heard) > 20 and all(v.verified == v.accepted for v in heard)
