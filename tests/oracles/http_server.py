"""A server in a thread on a real socket, over an engine in another thread that tests may look into and break."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import uvicorn

from firesteel.config import EngineConfig
from firesteel.engine.build import build_engine
from firesteel.engine.frontend import Frontend
from firesteel.serve.app import ServeOptions, create_app
from firesteel.serve.client import ThreadEngine


@dataclass
class ThreadServer:
    """Where it listens, and its insides."""

    url: str
    engine: ThreadEngine
    http: httpx2.Client

    @property
    def frontend(self) -> Frontend:
        """The engine's; its thread may be turning it."""
        assert self.engine.worker is not None
        return self.engine.worker.frontend

    def counter(self, name: str) -> float:
        """A sample of ``/metrics``; 0 if it is not there."""
        lines = self.http.get("/metrics").text.splitlines()
        found = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"firesteel:{name} ")]
        return found[0] if found else 0.0

    def settle(self, seconds: float = 20.0) -> None:
        """Wait until nothing runs; then nothing may be lost."""
        inner = self.frontend.engine
        deadline = time.monotonic() + seconds
        while inner.busy or self.engine.open_requests:
            assert time.monotonic() < deadline, f"still running: {inner.stats()}"
            time.sleep(0.01)
        assert inner.memory.free_slots == inner.memory.slots
        inner.scheduler.check()


@contextlib.contextmanager
def thread_server(
    model: Path, settings: dict[str, Any], prepare: Callable[[Frontend], None] = lambda _: None
) -> Iterator[ThreadServer]:
    """A server of ``model`` under the name "tiny"; ``prepare`` sees the engine before its first step."""
    config = EngineConfig.of(**settings)

    def make(progress: Callable[[str], None]) -> Frontend:
        frontend = Frontend(build_engine(model, config, progress))
        prepare(frontend)
        return frontend

    engine = ThreadEngine(make)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        app = create_app(engine, ServeOptions(names=("tiny",)))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        while not (server.started and engine.info):
            assert thread.is_alive() and engine.failure is None, engine.failure
            time.sleep(0.02)
        url = f"http://127.0.0.1:{port}"
        with httpx2.Client(base_url=url, timeout=60) as http:
            yield ThreadServer(url, engine, http)
        server.should_exit = True
        thread.join(20)
