"""The engine as a process that may die: started, watched, started again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firesteel.serve.client import EngineClient, EngineState
from firesteel.serve.messages import LENGTH, body_length, pack

log = logging.getLogger("firesteel.serve")

STEADY = 60.0  # an engine that lived so long starts again without a pause
MAX_PAUSE = 30.0
STOP_WAIT = 10.0  # seconds a stopping engine has before it is killed
WATCHDOG = 300.0  # seconds without a step, while requests are open, after which an engine counts as hung


class EngineProcess(EngineClient):
    """Runs ``firesteel.serve.worker`` in a process of its own.

    When it dies, open requests fail and health turns at once; another one is
    started, after pauses that double as long as none lives for a minute. One
    that lives but makes no step for ``watchdog`` seconds (0: however long)
    while requests are open is killed, and then it is the same.
    settings: keywords of ``EngineConfig``, plain values.
    """

    def __init__(self, model: str | None, settings: Mapping[str, Any], watchdog: float = WATCHDOG) -> None:
        super().__init__()
        self._first = {"model": model, "settings": dict(settings)}
        self._watchdog, self._still = watchdog, 0.0
        self._hung: str | None = None  # why it was killed
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the running engine."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._supervise())

    async def stop(self) -> None:
        was_ready = self.state is EngineState.READY
        self._become(EngineState.STOPPED, "the server is shutting down")
        self._settled.set()
        if self._task is None:
            return
        if not was_ready:
            self._task.cancel()  # it loads, or waits for its next life: nobody reads messages
        elif self._writer is not None:
            self._send({"op": "stop"})
        _, pending = await asyncio.wait([self._task], timeout=STOP_WAIT)
        if pending:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._writer is not None:
            self._writer.write(pack(message))

    # ---- lives -----------------------------------------------------------------
    async def _supervise(self) -> None:
        pause = 0.0
        while self.state not in (EngineState.STOPPED, EngineState.FAILED):
            born = time.monotonic()
            code = await self._live()
            if self.state in (EngineState.STOPPED, EngineState.FAILED):
                return
            reason = f"{self._hung or f'the engine has died (exit code {code})'} and is being started again"
            log.error("%s", reason)
            self._become(EngineState.DEAD, reason)
            self.restarts += 1
            pause = 0.0 if time.monotonic() - born > STEADY else min(max(2 * pause, 0.5), MAX_PAUSE)
            await asyncio.sleep(pause)

    async def _live(self) -> int:
        """One life of the engine; its exit code."""
        ours, theirs = socket.socketpair()
        try:
            self._process = _spawn(theirs)
        finally:
            theirs.close()  # so that its death is the end of our stream
        process = self._process
        log.info("engine process %d", process.pid)
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        self._hung, self._still = None, 0.0
        watch = asyncio.create_task(self._watch(process))
        try:
            self._send(self._first)
            await self._listen(reader)
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            watch.cancel()
            writer, self._writer = self._writer, None
            if self.state is EngineState.READY:  # before anything that takes time
                self._become(EngineState.DEAD, "the engine has died")
            writer.close()
        return await asyncio.to_thread(_reap, process)

    def _receive(self, message: Mapping[str, Any]) -> None:
        if message["op"] != "stats" or message["steps"]:
            self._still = 0.0
        super()._receive(message)

    async def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Kill an engine that has requests and makes no step.

        The time is what this loop has slept, not the clock's: while the whole
        server stands still, the engine is not late.
        """
        while self._watchdog:
            pause = min(self._watchdog / 5, 1.0)
            await asyncio.sleep(pause)
            waits = self.state is EngineState.READY and self.open_requests
            self._still = self._still + pause if waits else 0.0
            if self._still > self._watchdog:
                self._hung = f"the engine made no step for {self._watchdog:g} s (--watchdog-timeout)"
                self._become(EngineState.DEAD, self._hung)
                process.kill()
                return

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readexactly(LENGTH.size)
                self._receive(json.loads(await reader.readexactly(body_length(head))))


def _spawn(link: socket.socket) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    return subprocess.Popen(
        [sys.executable, "-m", "firesteel.serve.worker", str(link.fileno())],
        pass_fds=[link.fileno()],
        start_new_session=True,  # Ctrl-C is for the API, which decides; here it would end an import
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )


def _reap(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(STOP_WAIT)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
