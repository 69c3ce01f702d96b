"""``AsyncEngine``: the same loop in its own thread, answers as asynchronous streams.

One thread owns the engine. Requests and cancellations reach it through a
queue; what changes comes back to each caller's event loop as small messages.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firesteel.config import EngineConfig, SamplingParams
from firesteel.core import FinishReason
from firesteel.engine.build import build_engine
from firesteel.engine.frontend import Frontend, Prepared, Prompt
from firesteel.engine.output import Answer, Completion
from firesteel.engine.runner import TokenScore


class EngineDead(RuntimeError):
    """The engine's thread has ended; every open request fails with this."""


@dataclass(frozen=True)
class Piece:
    """What one step added to one sample of a request."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    scores: tuple[TokenScore, ...]
    completion: Completion | None = None  # set on the last piece of the sample


@dataclass
class _Call:
    """One request on its way through the thread."""

    prompt: Prompt
    params: SamplingParams
    loop: asyncio.AbstractEventLoop
    pieces: asyncio.Queue[Piece | Exception] = field(default_factory=asyncio.Queue)
    prepared: Prepared | None = None
    answers: list[Answer] = field(default_factory=list)
    sent: dict[int, int] = field(default_factory=dict)  # request id -> tokens handed out
    cancelled: bool = False

    def post(self, item: Piece | Exception) -> bool:
        """Hand something to the caller's loop; False if that is gone."""
        try:
            self.loop.call_soon_threadsafe(self.pieces.put_nowait, item)
        except RuntimeError:  # the loop is closed, maybe since a moment ago
            return False
        return True


class AsyncEngine:
    """A model that answers many callers of one or several event loops.

    Settings are those of ``EngineConfig``. Leaving ``generate`` early (break,
    cancellation) ends the request.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        progress: Callable[[str], None] = lambda _: None,
        **settings: Any,
    ):
        self.settings = EngineConfig.of(**settings)
        self.frontend = Frontend(build_engine(model, self.settings, progress))
        self._inbox: queue.Queue[_Call | None] = queue.Queue()
        self._calls: dict[int, _Call] = {}  # by request id
        self._compiling: dict[int, _Call] = {}  # by id(): their grammars are compiled beside the loop
        self._failure: BaseException | None = None
        self._ended = False  # set before the inbox is emptied for the last time
        self._thread = threading.Thread(target=self._main, name="firesteel-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether requests can still be answered."""
        return self._thread.is_alive() and not self._ended

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[Piece]:
        """Pieces of all samples as they come; raises ParameterError, QueueFull or EngineDead."""
        call = _Call(prompt, params or SamplingParams(), asyncio.get_running_loop())
        self._require_alive()
        self._inbox.put(call)
        self._require_alive()  # the thread may have ended in between
        left = call.params.n
        try:
            while left:
                item = await call.pieces.get()
                if isinstance(item, Exception):
                    raise item
                left -= item.completion is not None
                yield item
        finally:
            if left:
                call.cancelled = True
                self._inbox.put(call)

    async def complete(self, prompt: Prompt, params: SamplingParams | None = None) -> list[Completion]:
        """All samples of a request, when they have ended."""
        done = [p.completion async for p in self.generate(prompt, params) if p.completion is not None]
        return sorted(done, key=lambda c: c.index)

    def shutdown(self) -> None:
        """End every open request and the thread."""
        self._inbox.put(None)
        self._thread.join()

    def _require_alive(self) -> None:
        if not self.alive:
            raise EngineDead(f"the engine has ended: {self._failure or 'it was shut down'}; start a new one")

    # ---- the thread ---------------------------------------------------------------
    def _main(self) -> None:
        try:
            while self._receive():
                for answer in self.frontend.step():
                    self._report(answer)
        except BaseException as err:
            self._failure = err
            raise
        finally:
            self._ended = True
            self._fail_all(EngineDead(f"the engine has ended: {self._failure or 'it was shut down'}"))

    def _receive(self) -> bool:
        """Take everything that has arrived, waiting only if there is nothing to run; False ends the thread."""
        while True:
            try:
                call = self._inbox.get(block=not self.frontend.engine.busy)
            except queue.Empty:
                return True
            if call is None:
                return False
            if call.cancelled:
                self._cancel(call)
            else:
                self._enter(call)

    def _enter(self, call: _Call) -> None:
        try:
            if call.prepared is None:
                call.prepared = self.frontend.prepare(call.prompt, call.params)
                if not call.prepared.ready:  # it comes through the inbox once more
                    self._compiling[id(call)] = call
                    call.prepared.then(lambda: self._inbox.put(call))
                    return
            elif self._compiling.pop(id(call), None) is None:
                return  # cancelled meanwhile
            call.answers = self.frontend.admit(call.prepared)
        except Exception as err:  # a bad request fails alone
            call.post(err)
            return
        for answer in call.answers:
            self._calls[answer.request_id] = call
            call.sent[answer.request_id] = 0

    def _cancel(self, call: _Call) -> None:
        self._compiling.pop(id(call), None)
        for answer in call.answers:
            if self._calls.pop(answer.request_id, None) is not None:
                self.frontend.drop(answer, FinishReason.ABORT)

    def _report(self, answer: Answer) -> None:
        call = self._calls.get(answer.request_id)
        if call is None:
            return
        sent = call.sent[answer.request_id]
        call.sent[answer.request_id] = len(answer.ids)
        done = answer.completion() if answer.finish is not None else None
        if done is not None:
            del self._calls[answer.request_id]
        piece = Piece(
            answer.seq.sample, answer.delta(), tuple(answer.ids[sent:]), tuple(answer.scores[sent:]), done
        )
        if not call.post(piece):
            self._cancel(call)

    def _fail_all(self, err: EngineDead) -> None:
        waiting = {id(c): c for c in (*self._calls.values(), *self._compiling.values())}
        self._calls.clear()
        self._compiling.clear()
        while not self._inbox.empty():
            call = self._inbox.get_nowait()
            if call is not None and not call.cancelled:
                waiting[id(call)] = call
        for call in waiting.values():
            call.post(err)
