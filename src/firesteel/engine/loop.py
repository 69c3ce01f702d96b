"""What overlaps what: the engine runs one step ahead of its own knowledge.

    plan n+1 -> launch n+1 -> read n -> commit n -> plan n+2 ...

While step n+1 runs on the device, the host turns step n into text. The same
loop serves ``LLM`` and, later, the asynchronous engine.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from firesteel.config import EngineConfig, ParameterError, SamplingParams
from firesteel.core import FinishReason, StepRecord
from firesteel.engine.memory import Memory
from firesteel.engine.runner import MAX_STOP_IDS, Handle, Runner
from firesteel.engine.scheduler import Scheduler, Sequence


@dataclass(frozen=True)
class Update:
    """New tokens of one request after a commit."""

    request_id: int
    tokens: tuple[int, ...]
    finish: FinishReason | None


@dataclass
class Progress:
    """What the loop has handed out of one request."""

    seq: Sequence
    sent: int = 0


@dataclass
class Engine:
    """Requests in, updates out; owns scheduler, memory and runner."""

    config: EngineConfig
    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    memory: Memory
    runner: Runner
    records: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=65536))

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, self.memory)
        self._flight: deque[Handle] = deque()
        self._progress: dict[int, Progress] = {}
        self._next_id = 0

    # ---- requests ------------------------------------------------------------
    def add(self, prompt: tuple[int, ...], params: SamplingParams, seed: int, sample: int = 0) -> int:
        """Check and queue a request; returns its id. Raises ParameterError."""
        if not prompt:
            raise ParameterError("prompt: empty; give at least one token")
        bad = next((t for t in prompt if not 0 <= t < self.vocab_size), None)
        if bad is not None:
            raise ParameterError(f"prompt: token id {bad} is outside 0..{self.vocab_size - 1}")
        if len(prompt) >= self.max_model_len:
            raise ParameterError(
                f"prompt: {len(prompt)} tokens leave no room below max_model_len={self.max_model_len}; "
                "shorten it or raise max_model_len"
            )
        stop_ids = tuple(sorted({*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids)}))
        if len(stop_ids) > MAX_STOP_IDS:
            raise ParameterError(f"stop_token_ids: {len(stop_ids)} with the end token; at most {MAX_STOP_IDS}")
        max_len = min(len(prompt) + params.max_tokens, self.max_model_len)
        if self.memory.pages_for(max_len) > self.memory.num_pages:
            raise ParameterError(
                f"max_tokens: {max_len} tokens need {self.memory.pages_for(max_len)} pages of "
                f"{self.memory.num_pages}; lower max_tokens or raise num_pages"
            )
        seq = Sequence(self._next_id, prompt, params, seed, max_len, stop_ids, sample)
        self._next_id += 1
        self._progress[seq.request_id] = Progress(seq)
        if params.max_tokens == 0:
            seq.finish = FinishReason.LENGTH
        else:
            self.scheduler.add(seq)
        return seq.request_id

    def end(self, request_id: int, reason: FinishReason) -> None:
        """End a request now; tokens of steps in flight are dropped."""
        progress = self._progress.pop(request_id, None)
        if progress is not None and progress.seq.finish is None:
            self.scheduler.end(progress.seq, reason)

    @property
    def busy(self) -> bool:
        """Whether a call of ``step`` can still bring something."""
        return bool(self._progress or self._flight or self.scheduler.busy)

    def steps_of(self, request_id: int) -> int:
        """Committed steps that sampled for a request."""
        return self._progress[request_id].seq.steps

    # ---- one turn --------------------------------------------------------------
    def step(self) -> list[Update]:
        """Launch the next step, commit the one before it, return what is new."""
        begun = time.perf_counter()
        plan = self.scheduler.plan()
        host = time.perf_counter() - begun
        if plan is not None:
            self._flight.append(self.runner.launch(plan))
        if self._flight and (plan is None or len(self._flight) > 1):
            self._commit(self._flight.popleft(), host)
        return self._updates()

    def _commit(self, handle: Handle, host_s: float) -> None:
        results = handle.read()
        begun = time.perf_counter()
        self.scheduler.commit(results)
        self.scheduler.sweep()
        plan, now = handle.plan, time.perf_counter()
        self.records.append(
            StepRecord(
                step=plan.step,
                prompt_rows=plan.prompt_rows,
                decodes=len(plan.decodes),
                budget=plan.budget,
                rows=plan.rows,
                emitted=sum(len(r.tokens) for r in results),
                verified=sum(r.verified for r in results),
                accepted=sum(r.accepted for r in results),
                predicted_ms=plan.budget.predicted_ms,
                measured_ms=(begun - handle.started) * 1e3,
                host_ms=(host_s + now - begun) * 1e3,
            )
        )

    def _updates(self) -> list[Update]:
        out = []
        for rid, progress in list(self._progress.items()):
            seq = progress.seq
            if len(seq.output) > progress.sent or seq.finish is not None:
                out.append(Update(rid, tuple(seq.output[progress.sent :]), seq.finish))
                progress.sent = len(seq.output)
            if seq.finish is not None:
                del self._progress[rid]
        return out
