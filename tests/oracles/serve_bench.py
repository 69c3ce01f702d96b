"""A server over an engine that says what a test wants."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from firesteel.config import ParameterError
from firesteel.serve.app import ServeOptions, Server, create_app
from firesteel.serve.client import EngineClient, EngineState
from firesteel.serve.messages import ModelInfo, params_of
from firesteel.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


@dataclass
class Script:
    """What the engine does with the next requests."""

    parts: list[str] = field(default_factory=lambda: ["Hi ", "there"])  # one per step
    finish: str = "stop"
    refuse: tuple[str, str] | None = None
    die: bool = False  # after the first part


class ScriptedEngine(EngineClient):
    """Checks parameters as the engine does, then recites."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.script, self.added, self.cancelled = Script(), [], []  # type: ignore[var-annotated]
        self._path = path

    async def start(self) -> None:
        self._become_ready(ModelInfo(str(self._path), 512, 4096, 0, (1,), True, 5, 4, 100, 256))

    async def stop(self) -> None:
        pass

    def _send(self, message: Mapping[str, Any]) -> None:
        if message["op"] == "cancel":
            self.cancelled.append(message["id"])
            return
        self.added.append(message)
        asyncio.get_running_loop().call_soon(self._play, message)

    def _play(self, message: Mapping[str, Any]) -> None:
        call, s = message["id"], self.script
        try:
            params = params_of(message["params"])
            if not message["prompt"] or any(not 0 <= t < 512 for t in message["prompt"]):
                raise ParameterError("prompt: token ids outside 0..511")
        except ParameterError as err:
            self._receive({"op": "refused", "id": call, "kind": "parameter", "error": str(err)})
            return
        if s.refuse is not None:
            self._receive({"op": "refused", "id": call, "kind": s.refuse[0], "error": s.refuse[1]})
            return
        self._receive({"op": "accepted", "id": call})
        for sample in range(params.n):
            self._recite(call, sample, message, params)

    def _recite(self, call: int, sample: int, message: Mapping[str, Any], params: Any) -> None:
        made = 0
        for at, text in enumerate(self.script.parts):
            ids, end = TOKENIZER.encode(text), None
            made += len(ids)
            if at == len(self.script.parts) - 1:
                usage = {
                    "prompt_tokens": len(message["prompt"]),
                    "completion_tokens": made,
                    "cached_tokens": 2,
                }
                end = {"finish_reason": self.script.finish, "seed": params.seed, "usage": usage}
                end |= {"stats": {"queue_seconds": 0.0, "accepted": 3}, "error": "logits"}
            scores = [[-0.5, 0, [[i, -0.5]]] for i in ids] if params.logprobs is not None else []
            origins = [[at, i > 0, 3] for i in range(len(ids))] if message["origins"] else []
            self._receive({"op": "pieces", "pieces": [[call, [sample, text, ids, scores, end, origins]]]})
            if self.script.die:
                self._become(EngineState.DEAD, "the engine has died")
                return


@dataclass
class Bench:
    http: TestClient
    engine: ScriptedEngine
    server: Server

    @property
    def prompt(self) -> str:
        """Text of the newest request's prompt."""
        return TOKENIZER.decode(self.engine.added[-1]["prompt"], skip_special=False)

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream."""
        reply = self.http.post(path, json={**body, "stream": True})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.text.split("\n\n") if line]
        assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
        return [json.loads(line[6:]) for line in lines[:-1]]


def bench_of(path: Path, options: ServeOptions) -> Iterator[Bench]:
    engine, servers = ScriptedEngine(path), []  # type: ignore[var-annotated]
    with TestClient(create_app(engine, options, servers.append)) as http:
        yield Bench(http, engine, servers[0])
