"""``firesteel serve`` as people run it: two processes, either of which may be killed; signals; no such model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from firesteel.models.deepseek_v4.random_init import tiny_config, write_random
from firesteel.tokenizer import byte_tokenizer

SRC = Path(__file__).parents[2] / "src"
ENDLESS = {"prompt": "x", "max_tokens": 480, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("process") / "tiny"
    config = tiny_config(compress_ratios=(0, 4, 16), n_routed_experts=4, dspark=None)
    write_random(path, config, 11, drafter=False)
    byte_tokenizer(config.vocab_size).save(path)
    return path


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "firesteel.cli", "serve", "--port", "0", "--threads", "1", *flags]


@dataclass
class Running:
    """A server process, its log, and a client."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    http: httpx2.Client = field(default_factory=httpx2.Client)

    def read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)

    def wait_for(self, pattern: str, seconds: float = 60.0) -> re.Match[str]:
        """The first line of the log that matches."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in self.lines:
                if (found := re.search(pattern, line)) is not None:
                    return found
            assert self.process.poll() is None, "".join(self.lines)
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in\n" + "".join(self.lines))

    def wait_until_ready(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while self.http.get("/ready").status_code != 200:
            assert time.monotonic() < deadline, "".join(self.lines)
            time.sleep(0.05)

    @property
    def engine_pid(self) -> int:
        """The newest engine's process id."""
        found = [m.group(1) for line in self.lines if (m := re.search(r"engine process (\d+)", line))]
        return int(found[-1])


@contextlib.contextmanager
def running(folder: Path, *flags: str) -> Iterator[Running]:
    env = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(str(folder), *flags), stderr=subprocess.PIPE, text=True, env=env)
    server = Running(process)
    reader = threading.Thread(target=server.read_log, daemon=True)
    reader.start()
    try:
        url = server.wait_for(r"listening on (http://\S+)").group(1)
        with httpx2.Client(base_url=url, timeout=30) as server.http:
            yield server
    finally:
        process.kill()
        process.wait()
        reader.join(5)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(folder, "--max-model-len", "512", "--max-num-seqs", "4", "--drain-seconds", "20") as started:
        yield started


def test_loading_is_not_dead_and_not_ready(server: Running) -> None:
    health = server.http.get("/health")
    assert health.status_code == 200
    if health.json()["status"] == "starting":
        assert server.http.get("/ready").status_code == 503
        assert server.http.post("/v1/completions", json={"prompt": "x"}).headers["retry-after"]
    server.wait_until_ready()


def ask(server: Running, body: dict[str, Any], out: list[tuple[float, Any]]) -> None:
    """One request; notes when it ended and with what."""
    reply = server.http.post("/v1/completions", json=body)
    if body.get("stream"):
        lines = [line for line in reply.text.split("\n\n") if line]
        out.append((time.monotonic(), json.loads(lines[-2][6:])))
    else:
        out.append((time.monotonic(), reply.json()))


def test_killed_engine(server: Running) -> None:
    """Health turns, clients get errors within two seconds, another engine answers as the first did."""
    server.wait_until_ready()
    body = {"prompt": "before and after", "max_tokens": 8, "seed": 5}
    before = server.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    ended: list[tuple[float, Any]] = []
    bodies = [{**ENDLESS, "stream": i % 2 == 0} for i in range(6)]
    threads = [threading.Thread(target=ask, args=(server, b, ended)) for b in bodies]
    for thread in threads:
        thread.start()
    while "num_requests_running 4.0" not in server.http.get("/metrics").text:
        time.sleep(0.01)
    killed = time.monotonic()
    os.kill(server.engine_pid, signal.SIGKILL)
    while server.http.get("/health").status_code == 200:
        assert time.monotonic() - killed < 2.0, "health did not turn"
    for thread in threads:
        thread.join(10)
    assert len(ended) == 6 and all(at - killed < 2.0 for at, _ in ended)
    assert all("the engine has died" in what["error"]["message"] for _, what in ended)
    server.wait_until_ready()
    assert server.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == before
    assert "firesteel:engine_restarts 1.0" in server.http.get("/metrics").text


def test_sigterm_lets_requests_end(server: Running) -> None:
    """A stream that runs is finished, new requests are refused, nothing is left behind."""
    server.wait_until_ready()
    engine = server.engine_pid
    with server.http.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining")
        refused = server.http.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert server.http.get("/ready").status_code == 503
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert server.process.wait(15) == 0
    assert gone(engine)


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process ends in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_no_engine_without_its_api(folder: Path) -> None:
    """However the API ends, the engine leaves the device."""
    with running(folder, "--max-model-len", "512") as started:
        started.wait_until_ready()
        engine = started.engine_pid
        started.process.kill()
        assert gone(engine)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(
        command(str(tmp_path / "none")), capture_output=True, text=True, env=env, timeout=60
    )
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("firesteel: ") and "none" in last and "Traceback" not in done.stderr
