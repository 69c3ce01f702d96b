"""Requests to messages and back: the API's side of the engine.

``EngineClient`` keeps the open requests; its subclasses carry messages to a
thread (here) or a process (``supervisor``).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from firesteel.config import SamplingParams
from firesteel.serve.errors import ApiError, of_parameter, unavailable
from firesteel.serve.messages import LENGTH, ModelInfo, Piece, pack, plain_params

if TYPE_CHECKING:
    from firesteel.engine.frontend import Frontend
    from firesteel.serve.worker import Worker

log = logging.getLogger("firesteel.serve")


class EngineState(Enum):
    """What can be expected of the engine."""

    STARTING = "starting"  # loading for the first time
    READY = "ready"
    DEAD = "dead"  # it died; a supervisor may be starting another
    FAILED = "failed"  # it cannot start, and trying again would not help
    STOPPED = "stopped"


class _Call:
    """One prompt's samples on their way."""

    def __init__(self, samples: int) -> None:
        self.samples = self.left = samples
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.put: Callable[[Piece | ApiError], None] = lambda _: None

    def fail(self, error: ApiError) -> None:
        """Nothing more will come."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
        else:
            self.put(error)


class EngineClient(ABC):
    """Open requests of one engine. All methods belong to the event loop's thread."""

    def __init__(self) -> None:
        self.state = EngineState.STARTING
        self.info: ModelInfo | None = None
        self.reason = "the engine is still loading"
        self.failure: str | None = None  # why it can never start
        self.restarts = 0
        self.on_stats: Callable[[Mapping[str, Any]], None] = lambda _: None
        self.on_progress: Callable[[str], None] = lambda _: None
        self.on_ready: Callable[[ModelInfo], None] = lambda _: None
        self._ids = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._settled = asyncio.Event()  # it is ready, or will never be

    # ---- carried by subclasses -------------------------------------------------
    @abstractmethod
    async def start(self) -> None:
        """Begin loading; returns at once."""

    @abstractmethod
    async def stop(self) -> None:
        """End the engine; open requests fail."""

    @abstractmethod
    def _send(self, message: Mapping[str, Any]) -> None:
        """Hand a message to the engine."""

    # ---- requests --------------------------------------------------------------
    @property
    def open_requests(self) -> int:
        """Prompts that have not been answered in full."""
        return len(self._calls)

    def require_ready(self) -> ModelInfo:
        """The model's numbers; raises a 503 if nothing can be answered now."""
        if self.state is not EngineState.READY or self.info is None:
            raise unavailable(self.reason)
        return self.info

    async def settled(self) -> ModelInfo | None:
        """Wait until the engine is ready for the first time; None if it never will be."""
        await self._settled.wait()
        return self.info if self.state is not EngineState.FAILED else None

    @contextlib.asynccontextmanager
    async def open(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], origins: bool = False
    ) -> AsyncIterator[AsyncIterator[tuple[int, Piece]]]:
        """Queue prompts together; gives (prompt's number, piece) until every sample has ended.

        origins: pieces tell of each token whether it was drafted, and in which step.

        Raises ApiError if any is refused: then none runs. Leaving the context
        ends what still runs. The iterator raises ApiError if the engine dies.
        """
        self.require_ready()
        pieces: asyncio.Queue[tuple[int, Piece | ApiError]] = asyncio.Queue()
        mine: list[tuple[int, _Call]] = []
        for at, (prompt, p) in enumerate(zip(prompts, params, strict=True)):
            call = _Call(p.n)
            call.put = lambda item, at=at: pieces.put_nowait((at, item))  # type: ignore[misc]
            call_id = next(self._ids)
            self._calls[call_id] = call
            mine.append((call_id, call))
            message = {"id": call_id, "prompt": list(prompt), "params": plain_params(p), "origins": origins}
            self._send({"op": "add", **message})
        try:
            results = await asyncio.gather(*(c.accepted for _, c in mine), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            yield self._pieces(pieces, mine)
        finally:
            self._close(mine)

    @staticmethod
    async def _pieces(
        pieces: asyncio.Queue[tuple[int, Piece | ApiError]], mine: list[tuple[int, _Call]]
    ) -> AsyncIterator[tuple[int, Piece]]:
        left = sum(call.samples for _, call in mine)
        while left:
            at, item = await pieces.get()
            if isinstance(item, ApiError):
                raise item
            left -= item.end is not None
            yield at, item

    def _close(self, mine: list[tuple[int, _Call]]) -> None:
        for call_id, call in mine:
            if self._calls.pop(call_id, None) is not None and self.state is EngineState.READY:
                self._send({"op": "cancel", "id": call_id})
            if call.accepted.done() and not call.accepted.cancelled():
                call.accepted.exception()  # looked at: nobody else will

    # ---- messages --------------------------------------------------------------
    def _receive(self, message: Mapping[str, Any]) -> None:
        op = message["op"]
        if op == "pieces":
            for call_id, piece in message["pieces"]:
                self._deliver(call_id, Piece.of(piece))
        elif op == "accepted":
            call = self._calls.get(message["id"])
            if call is not None and not call.accepted.done():
                call.accepted.set_result(None)
        elif op == "refused":
            call = self._calls.pop(message["id"], None)
            if call is not None:
                call.fail(_refusal(message["kind"], message["error"]))
        elif op == "stats":
            self.on_stats(message)
        elif op == "progress":
            self.on_progress(message["part"])
        elif op == "ready":
            self._become_ready(ModelInfo.of(message["info"]))
        elif op == "fatal":
            self.failure = message["error"]
            self._become(EngineState.FAILED, message["error"])
            self._settled.set()

    def _become_ready(self, info: ModelInfo) -> None:
        self.info = info
        self._become(EngineState.READY, "")
        self._settled.set()
        self.on_ready(info)

    def _become(self, state: EngineState, reason: str) -> None:
        """A new state; unless it is "ready", every open request fails with the reason."""
        self.state, self.reason = state, reason
        if state is EngineState.READY:
            return
        calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.fail(unavailable(reason))

    def _deliver(self, call_id: int, piece: Piece) -> None:
        call = self._calls.get(call_id)
        if call is None:
            return  # cancelled a moment ago
        if piece.end is not None:
            call.left -= 1
            if call.left == 0:
                del self._calls[call_id]
        call.put(piece)


def _refusal(kind: str, error: str) -> ApiError:
    if kind == "full":
        return ApiError(429, error, code="queue_full", retry_after=1)
    if kind == "parameter":
        return of_parameter(error)
    return ApiError(500, f"the engine failed on this request: {error}", code="internal_error")


class ThreadEngine(EngineClient):
    """The engine as a thread of this process: for tests and debugging."""

    def __init__(self, make: Callable[[Callable[[str], None]], Frontend]) -> None:
        super().__init__()
        self._make = make
        self._thread = threading.Thread(target=self._main, name="firesteel-engine", daemon=True)
        self.worker: Worker | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self.kill)
        self._become(EngineState.STOPPED, "the server is shutting down")

    def kill(self) -> None:
        """Ask the thread to end and wait for it."""
        if self.worker is not None:
            self.worker.inbox.put({"op": "stop"})
        self._thread.join()

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self.worker is not None, "nothing is sent before it is ready"
        self.worker.inbox.put(_copied(message))

    def _post(self, handle: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(handle, *args)

    def _main(self) -> None:
        from firesteel.errors import user_errors
        from firesteel.serve.worker import Worker

        def send(message: Mapping[str, Any]) -> None:
            self._post(self._receive, _copied(message))

        try:
            frontend = self._make(lambda part: send({"op": "progress", "part": part}))
        except user_errors() as err:
            send({"op": "fatal", "error": str(err)})
            return
        self.worker = Worker(frontend, send)
        try:
            self.worker.run()
        except Exception as err:
            log.exception("the engine has died")
            self._post(self._become, EngineState.DEAD, f"the engine has died: {type(err).__name__}: {err}")
            return
        self._post(self._become, EngineState.STOPPED, "the engine was stopped")


def _copied(message: Mapping[str, Any]) -> Any:
    """As the other process would read it."""
    return json.loads(pack(message)[LENGTH.size :])
