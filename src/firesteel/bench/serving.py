"""A server process of our own on loopback, and the small HTTP client that programs here talk to it with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SRC = Path(__file__).parents[2]


class ServerFailed(RuntimeError):
    """The server did not do what the program needs; the message holds the end of its log."""


@dataclass
class ServerProcess:
    """``firesteel serve`` with its log (the newest 2000 lines)."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    engines: list[int] = field(default_factory=list)  # process ids, the newest last
    port: int = 0

    def _read_log(self) -> None:
        assert self.process.stderr is not None, "the log is piped"
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))
            del self.lines[:-2000]
            if (found := re.search(r"engine process (\d+)", line)) is not None:
                self.engines.append(int(found[1]))
            if (found := re.search(r"listening on \w+://[^ ]*:(\d+)", line)) is not None:
                self.port = int(found[1])

    def tail(self, count: int = 20) -> str:
        """The newest lines of the log."""
        return "\n".join(self.lines[-count:])

    def wait_for_port(self, seconds: float = 60.0) -> int:
        """The port it listens on; raises ServerFailed."""
        deadline = time.monotonic() + seconds
        while not self.port:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise ServerFailed(f"the server does not listen:\n{self.tail()}")
            time.sleep(0.02)
        return self.port

    def terminate(self, seconds: float = 60.0) -> int:
        """SIGTERM, then its exit code; raises ServerFailed if it stays."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired as err:
            raise ServerFailed(f"still running {seconds} s after SIGTERM:\n{self.tail()}") from err


@contextlib.contextmanager
def served(model: str | Path | None, *flags: str) -> Iterator[ServerProcess]:
    """A server on a free port of 127.0.0.1; it is gone when the context ends."""
    path = os.pathsep.join(p for p in (str(SRC), os.environ.get("PYTHONPATH", "")) if p)
    command = [sys.executable, "-m", "firesteel.cli", "serve", "--port", "0", *flags]
    process = subprocess.Popen(
        [*command, *([str(model)] if model is not None else [])],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C ends the program, which ends the server
    )
    server = ServerProcess(process)
    reader = threading.Thread(target=server._read_log, daemon=True)
    reader.start()
    try:
        server.wait_for_port()
        yield server
    finally:
        process.kill()  # the engine ends with it
        process.wait()
        reader.join(5)


@dataclass
class Reply:
    """An open response: status and headers are read, the body is not."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes; raises ConnectionError if it is cut short."""
        try:
            if self.headers.get("transfer-encoding") != "chunked":
                yield await self.reader.readexactly(int(self.headers.get("content-length", 0)))
                return
            while size := int((await self.reader.readuntil(b"\r\n")).strip(), 16):
                yield (await self.reader.readexactly(size + 2))[:-2]
        except asyncio.IncompleteReadError as err:
            raise ConnectionError("the response was cut short") from err

    async def body(self) -> bytes:
        """All of it."""
        return b"".join([part async for part in self.chunks()])

    async def events(self) -> AsyncIterator[dict[str, Any] | None]:
        """Server-sent events as JSON; None for the closing ``[DONE]``."""
        rest = b""
        async for part in self.chunks():
            *whole, rest = (rest + part).split(b"\n\n")
            for event in whole:
                data = event.removeprefix(b"data: ")
                yield None if data == b"[DONE]" else json.loads(data)
        if rest:
            raise ConnectionError(f"{len(rest)} bytes after the last event")


@contextlib.asynccontextmanager
async def request(
    port: int, method: str, path: str, body: Mapping[str, Any] | None = None
) -> AsyncIterator[Reply]:
    """One request on a connection of its own, which is dropped when the context ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        data = json.dumps(body).encode() if body is not None else b""
        head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
        yield Reply(int(lines[0].split()[1]), headers, reader)
    except asyncio.IncompleteReadError as err:
        raise ConnectionError("the response was cut short") from err
    finally:
        writer.transport.abort()


async def metrics(port: int) -> dict[str, float]:
    """``/metrics``: sample (name and labels, less the prefix) to value."""
    async with request(port, "GET", "/metrics") as reply:
        text = (await reply.body()).decode()
    pairs = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name.removeprefix("firesteel:"): float(value) for name, _, value in pairs}


async def wait_until_ready(server: ServerProcess, seconds: float = 120.0) -> None:
    """Until ``/ready`` says so; raises ServerFailed."""
    deadline = time.monotonic() + seconds
    while True:
        async with request(server.port, "GET", "/ready") as reply:
            if reply.status == 200:
                return
        if server.process.poll() is not None or time.monotonic() > deadline:
            raise ServerFailed(f"the server does not get ready:\n{server.tail()}")
        await asyncio.sleep(0.05)
