"""The engine's process: messages in, steps, messages out.

The loop owns the engine. It runs as the main thread of its own process
(``python -m firesteel.serve.worker``, over an inherited socket) or, for tests
and debugging, as a thread beside the API.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from firesteel.config import EngineConfig, SamplingParams
from firesteel.core import FinishReason
from firesteel.engine.build import build_engine
from firesteel.engine.frontend import Frontend, Prepared
from firesteel.engine.heap import settle
from firesteel.engine.loop import QueueFull
from firesteel.engine.output import Answer
from firesteel.engine.runner import TokenScore
from firesteel.errors import user_errors
from firesteel.serve.messages import LENGTH, ModelInfo, body_length, pack, params_of
from firesteel.speculation.policy import Adaptive

STATS_EVERY = 0.2  # seconds between two "stats" messages while there is work
QUALITY_EVERY = 5.0  # seconds between two looks at how good the survivals are, which take milliseconds
Send = Callable[[Mapping[str, Any]], None]


@dataclass
class _Call:
    """One request of the API: an answer per sample."""

    id: int
    params: SamplingParams
    answers: list[Answer]
    left: int
    origins: bool = False  # its pieces say where each token comes from
    sent: dict[int, int] = field(default_factory=dict)  # request id of the engine -> tokens sent


class Worker:
    """Turns the engine's loop and speaks for it."""

    def __init__(self, frontend: Frontend, send: Send, clock: Callable[[], float] = time.perf_counter):
        self.frontend, self.engine = frontend, frontend.engine
        self._send, self._clock = send, clock
        self.inbox: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._calls: dict[int, _Call] = {}
        self._compiling: dict[int, tuple[Mapping[str, Any], Prepared]] = {}  # by id, with their messages
        self._owner: dict[int, tuple[_Call, Answer]] = {}  # by request id of the engine
        self._steps_sent = 0
        self._stats_at = self._quality_at = 0.0
        self._depth: dict[str, list[int]] = {"verified_at": [], "accepted_at": []}

    def info(self) -> ModelInfo:
        """What "ready" says."""
        engine, config = self.engine, self.frontend.config
        return ModelInfo(
            path=str(self.frontend.path),
            vocab_size=engine.vocab_size,
            max_model_len=engine.max_model_len,
            bos_token_id=config.bos_token_id,
            eos_token_ids=engine.eos_ids,
            has_tokenizer=self.frontend.tokenizer is not None,
            gamma=engine.config.gamma,
            slots=engine.config.slots,
            pages=engine.memory.num_pages,
            page_size=engine.memory.page_size,
            adaptive=isinstance(engine.scheduler.policy, Adaptive),
            notes=self.frontend.notes,
        )

    def run(self) -> None:
        """Until "stop"; an exception is the engine's death."""
        self._send({"op": "ready", "info": vars(self.info())})
        while self._receive():
            changed = self.frontend.step()
            if changed:
                self._send({"op": "pieces", "pieces": [self._piece(answer) for answer in changed]})
            now = self._clock()
            if now - self._stats_at >= STATS_EVERY or not self.engine.busy:
                self._stats_at = now
                self._send(self._stats())

    # ---- messages in ---------------------------------------------------------
    def _receive(self) -> bool:
        """Take what has arrived, waiting only if there is nothing to run; False ends the loop."""
        while True:
            try:
                message = self.inbox.get(block=not self.engine.busy)
            except queue.Empty:
                return True
            if message["op"] == "stop":
                return False
            if message["op"] == "cancel":
                self._cancel(message["id"])
            elif message["op"] == "compiled":
                self._compiled(message["id"])
            else:
                self._add(message)

    def _add(self, message: Mapping[str, Any]) -> None:
        call_id = message["id"]
        try:
            prepared = self.frontend.prepare(message["prompt"], params_of(message["params"]))
        except Exception as err:  # whatever one request does, the others go on
            self._refuse(call_id, err)
            return
        if prepared.ready:
            self._admit(message, prepared)
            return
        self._compiling[call_id] = (message, prepared)
        prepared.then(lambda: self.inbox.put({"op": "compiled", "id": call_id}))

    def _compiled(self, call_id: int) -> None:
        waiting = self._compiling.pop(call_id, None)  # none: cancelled meanwhile
        if waiting is not None:
            self._admit(*waiting)

    def _refuse(self, call_id: int, err: Exception) -> None:
        kind, error = "internal", f"{type(err).__name__}: {err}"
        if isinstance(err, QueueFull):
            kind, error = "full", str(err)
        elif isinstance(err, user_errors()):
            kind, error = "parameter", str(err)
        self._send({"op": "refused", "id": call_id, "kind": kind, "error": error})

    def _admit(self, message: Mapping[str, Any], prepared: Prepared) -> None:
        call_id = message["id"]
        try:
            answers = self.frontend.admit(prepared)
        except Exception as err:
            self._refuse(call_id, err)
            return
        call = _Call(call_id, prepared.params, answers, len(answers), bool(message.get("origins")))
        self._calls[call_id] = call
        for answer in answers:
            self._owner[answer.request_id] = (call, answer)
            call.sent[answer.request_id] = 0
        self._send({"op": "accepted", "id": call_id})

    def _cancel(self, call_id: int) -> None:
        self._compiling.pop(call_id, None)
        call = self._calls.pop(call_id, None)
        for answer in call.answers if call is not None else ():
            if self._owner.pop(answer.request_id, None) is not None:
                self._add_depths(self._depth, answer)
                self.frontend.drop(answer, FinishReason.ABORT)

    # ---- messages out --------------------------------------------------------
    def _piece(self, answer: Answer) -> list[Any]:
        rid = answer.request_id
        call, _ = self._owner[rid]
        sent, call.sent[rid] = call.sent[rid], len(answer.ids)
        text, end = answer.delta(), None
        if answer.finish is not None:
            end = self._end(call, answer)
        n = call.params.logprobs
        scores = [_score(s, n) for s in answer.scores[sent:]] if n is not None else []
        origins = [list(map(int, o)) for o in answer.origins[sent:]] if call.origins else []
        return [call.id, [answer.seq.sample, text, answer.ids[sent:], scores, end, origins]]

    def _end(self, call: _Call, answer: Answer) -> dict[str, Any]:
        rid = answer.request_id
        del self._owner[rid]
        call.left -= 1
        if call.left == 0:
            self._calls.pop(call.id, None)
        self._add_depths(self._depth, answer)
        done = answer.completion()
        n = call.params.prompt_logprobs
        prompt = None
        if done.prompt_logprobs is not None and n is not None:
            prompt = [_score(s, n) if s is not None else None for s in done.prompt_logprobs]
        return {
            "finish_reason": done.finish_reason,
            "seed": done.seed,
            "usage": dict(done.usage),
            "stats": dict(done.stats),
            "stop_reason": done.stop_reason,
            "prompt_scores": prompt,
            "error": done.error,
        }

    @staticmethod
    def _add_depths(totals: dict[str, list[int]], answer: Answer) -> None:
        for name, total in totals.items():
            counts = getattr(answer.seq, name)
            total.extend([0] * (len(counts) - len(total)))
            for depth, count in enumerate(counts):
                total[depth] += count

    def _stats(self) -> dict[str, Any]:
        """Counters, and a line per step since the last message."""
        records = []
        for record in reversed(self.engine.records):
            if record.step <= self._steps_sent:
                break
            records.append(
                {
                    "prompt_rows": record.prompt_rows,
                    "decodes": record.decodes,
                    "drafts": record.budget.drafts,
                    "reason": record.budget.reason,
                    "draft_reason": record.draft_reason,
                    "drafting": record.drafting,
                    "draft_width": record.draft_width,
                    "expected_tokens": record.budget.expected_tokens,
                    "rows": record.rows,
                    "emitted": record.emitted,
                    "verified": record.verified,
                    "accepted": record.accepted,
                    "predicted_ms": record.predicted_ms,
                    "measured_ms": record.measured_ms,
                    "host_ms": record.host_ms,
                }
            )
        if records:
            self._steps_sent = self.engine.records[-1].step
        said = {"counters": self.engine.stats(), "depth": self._depths(), "steps": records[::-1]}
        return {"op": "stats", **said, **self._quality()}

    def _quality(self) -> dict[str, Any]:
        """Reliability of survivals and the cost curve, now and then; nothing if widths are fixed."""
        policy, now = self.engine.scheduler.policy, self._clock()
        wait = QUALITY_EVERY if self.engine.busy else 1.0  # the last look of a burst stays for long
        if not isinstance(policy, Adaptive) or now - self._quality_at < wait:
            return {}
        seen = policy.calibrator
        quality = seen.quality()
        if quality:  # until there is something to see, look again each time: it costs nothing
            self._quality_at = now
        return {"quality": quality, "reliability": seen.reliability(), "curve": policy.cost.curve()}

    def _depths(self) -> dict[str, list[int]]:
        """Drafts verified and accepted by depth, of ended and open samples."""
        out = {name: list(total) for name, total in self._depth.items()}
        for _, answer in self._owner.values():
            self._add_depths(out, answer)
        return out


def _score(score: TokenScore, top: int) -> list[Any]:
    return [score.logprob, score.rank, list(score.top[:top])]


# ---- a process of its own ---------------------------------------------------------
def _read_frames(stream: BinaryIO, inbox: queue.SimpleQueue[Mapping[str, Any]]) -> None:
    """Frames to the inbox; the end of the stream is a "stop": nobody is left to serve."""
    while len(head := stream.read(LENGTH.size)) == LENGTH.size:
        inbox.put(json.loads(stream.read(body_length(head))))
    inbox.put({"op": "stop"})


def _die_with_parent() -> None:
    """A killed API takes its engine along even if that hangs, or the device would stay taken."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, int(signal.SIGKILL))


def main(link_fd: int) -> int:
    """Serve one API process over the socket ``link_fd``. The first frame holds model and settings."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # service managers signal every process; the API decides
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent()
    link = socket.socket(fileno=link_fd)

    def send(message: Mapping[str, Any]) -> None:
        link.sendall(pack(message))

    stream = link.makefile("rb")
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return 0  # the API went while this process was starting
    first = json.loads(stream.read(body_length(head)))
    try:
        settings = EngineConfig.of(**first["settings"])
        built = build_engine(first["model"], settings, lambda part: send({"op": "progress", "part": part}))
    except user_errors() as err:
        send({"op": "fatal", "error": str(err)})
        return 2
    worker = Worker(Frontend(built), send)
    settle()
    reader = threading.Thread(target=_read_frames, args=(stream, worker.inbox), daemon=True)
    reader.start()
    try:
        worker.run()
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the API is gone
    return 0


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stdout.flush()
    os._exit(code)  # the reader may still block on the socket
