"""What overlaps what: the engine runs one step ahead of its own knowledge.

    plan n+1 -> launch n+1 -> read n -> commit n -> plan n+2 ...

While step n+1 runs on the device, the host turns step n into text. ``LLM`` and
``AsyncEngine`` turn the same loop.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from firesteel.config import MAX_STOP_IDS, EngineConfig, ParameterError, SamplingParams
from firesteel.core import FinishReason, Origin, StepRecord
from firesteel.engine.guide import Factory, check_guided
from firesteel.engine.memory import Memory
from firesteel.engine.prefix import PrefixCache
from firesteel.engine.runner import Handle, Runner, TokenScore
from firesteel.engine.scheduler import Scheduler
from firesteel.engine.sequence import Sequence
from firesteel.speculation.policy import Adaptive, Policy

log = logging.getLogger(__name__)


def open_trace(path: str) -> TextIO:
    """A file of step records, one JSON object a line; raises ParameterError if it cannot be written."""
    try:
        return open(path, "a", buffering=1, encoding="utf-8")
    except OSError as err:
        raise ParameterError(f"trace={path!r}: cannot be written ({err}); choose another file") from err


class QueueFull(RuntimeError):
    """Too many requests wait; come back later."""


def _check_choice(
    params: SamplingParams, words: tuple[tuple[int, ...], ...], stop_ids: tuple[int, ...]
) -> None:
    """Raise ParameterError if the parameters leave no token to sample."""
    if params.allowed_token_ids is None:
        return
    left = set(params.allowed_token_ids) - {w[0] for w in words if len(w) == 1}
    if not left:
        raise ParameterError("allowed_token_ids: every one of them is a bad word; allow another token")
    if params.min_tokens and left <= set(stop_ids):
        raise ParameterError(
            "allowed_token_ids: nothing but end tokens, which min_tokens forbids; "
            "allow another token or set min_tokens=0"
        )


@dataclass(frozen=True)
class Update:
    """What a commit brought for one request."""

    request_id: int
    tokens: tuple[int, ...]
    scores: tuple[TokenScore, ...]
    finish: FinishReason | None
    error: str = ""
    origins: tuple[Origin, ...] = ()  # of ``tokens``


@dataclass
class Engine:
    """Requests in, updates out; owns scheduler, memory and runner."""

    config: EngineConfig
    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    memory: Memory
    runner: Runner
    cache: PrefixCache | None = None
    policy: Policy | None = None
    records: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=65536))

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, self.memory, self.cache, self.policy)
        self.runner.masks.threads.seconds = self.config.structured_mask_seconds
        self._flight: deque[Handle] = deque()
        self._open: dict[int, tuple[Sequence, int]] = {}  # request -> (sequence, tokens handed out)
        self._next_id = 0
        self._host_s = 0.0
        self._failure: BaseException | None = None
        self._trace: TextIO | None = open_trace(self.config.trace) if self.config.trace is not None else None

    # ---- requests ------------------------------------------------------------
    def add(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams,
        seed: int,
        sample: int = 0,
        bad_words: tuple[tuple[int, ...], ...] = (),
        guide: Factory | None = None,
    ) -> Sequence:
        """Check and queue a request. Raises ParameterError or QueueFull."""
        max_len = self._check(prompt, params)
        stop_ids = tuple(sorted({*params.stop_token_ids, *(() if params.ignore_eos else self.eos_ids)}))
        if len(stop_ids) > MAX_STOP_IDS:
            raise ParameterError(
                f"stop_token_ids: {len(stop_ids)} with the end token; at most {MAX_STOP_IDS}"
            )
        if len(self.scheduler.waiting) >= self.config.max_waiting:
            raise QueueFull(
                f"{self.config.max_waiting} requests wait already; retry later or raise max_waiting"
            )
        if params.min_tokens_per_second > 0 and not isinstance(self.scheduler.policy, Adaptive):
            raise ParameterError(
                "min_tokens_per_second: only adaptive verification can favour a request; "
                "set enable_adaptive_verification in the speculative config"
            )
        words = (*params.bad_word_ids, *bad_words)
        _check_choice(params, words, stop_ids)
        seq = Sequence(self._next_id, prompt, params, seed, max_len, stop_ids, sample, words)
        if guide is not None:
            check_guided(self.config)
            seq.guide = self.runner.masks.guides[seq.request_id] = guide(stop_ids)
        if params.speculative:
            gamma = self.config.gamma
            seq.draft_cap = gamma if params.max_draft_tokens is None else min(params.max_draft_tokens, gamma)
        self._next_id += 1
        self._open[seq.request_id] = (seq, 0)
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            seq.finish = FinishReason.LENGTH
        else:
            self.scheduler.add(seq)
        return seq

    def _check(self, prompt: tuple[int, ...], params: SamplingParams) -> int:
        """Total tokens the request may have; raises ParameterError if it cannot be served."""
        if not prompt:
            raise ParameterError("prompt: empty; give at least one token")
        bad = next((t for t in prompt if not 0 <= t < self.vocab_size), None)
        if bad is not None:
            raise ParameterError(f"prompt: token id {bad} is outside 0..{self.vocab_size - 1}")
        params.check_vocab(self.vocab_size)
        if len(prompt) >= self.max_model_len:
            raise ParameterError(
                f"prompt: {len(prompt)} tokens leave no room below max_model_len={self.max_model_len}; "
                "shorten it or raise max_model_len"
            )
        # scoring alone still samples one token, which is dropped
        max_len = min(len(prompt) + max(params.max_tokens, 1), self.max_model_len)
        need = self.memory.pages_for(max_len)
        if need > self.memory.num_pages:
            raise ParameterError(
                f"max_tokens: {max_len} tokens need {need} pages of {self.memory.num_pages}; "
                "lower max_tokens or raise num_pages"
            )
        return max_len

    def end(self, request_id: int, reason: FinishReason, error: str = "") -> None:
        """End a request now; tokens of steps in flight are dropped."""
        entry = self._open.pop(request_id, None)
        if entry is not None and entry[0].finish is None:
            entry[0].error = error
            self.scheduler.end(entry[0], reason)

    @property
    def busy(self) -> bool:
        """Whether a call of ``step`` can still bring something."""
        return bool(self._open or self._flight or self.scheduler.busy)

    # ---- one turn --------------------------------------------------------------
    def step(self) -> list[Update]:
        """Launch the next step, commit the one before it, return what is new.

        Whatever a step raises ends the engine: what the device holds is unknown from then on.
        """
        if self._failure is not None:
            raise RuntimeError(
                f"an earlier step failed: {self._failure!r}; make a new engine"
            ) from self._failure
        try:
            self._turn()
        except BaseException as err:  # an interrupt in mid-step, too
            self._failure = err
            raise
        return self._updates()

    def _turn(self) -> None:
        begun = self.runner.timer()
        plan = self.scheduler.plan()
        self._host_s += self.runner.timer() - begun
        if plan is not None:
            self._flight.append(self.runner.launch(plan))
        if self._flight and (plan is None or len(self._flight) > 1):
            self._commit(self._flight.popleft())

    def _commit(self, handle: Handle) -> None:
        result = handle.read()
        begun = self.runner.timer()
        self.scheduler.commit(handle.plan, result)
        self.scheduler.sweep()
        plan, now = handle.plan, self.runner.timer()
        self._record(
            plan.report_drafts,
            StepRecord(
                step=plan.step,
                prompt_rows=plan.prompt_rows,
                decodes=len(plan.decodes),
                budget=plan.budget,
                rows=plan.rows,
                draft_reason=plan.draft_reason,
                drafting=len(plan.drafting),
                draft_width=plan.draft_width,
                context=plan.context,
                emitted=sum(len(g.tokens) for g in result.groups),
                verified=sum(g.verified for g in result.groups),
                accepted=sum(g.accepted for g in result.groups),
                predicted_ms=plan.predicted_ms,
                measured_ms=result.ms,
                host_ms=(self._host_s + now - begun) * 1e3,
            ),
        )
        self._host_s = 0.0

    def _record(self, asked: bool, record: StepRecord) -> None:
        """Keep a step's record, with what the policy has to say, and trace it; ``asked``: it was not at rest."""
        policy = self.scheduler.policy
        if isinstance(policy, Adaptive):
            spent = record.measured_ms
            if self.runner.device.type == "cpu" and self.runner.virtual is None:
                spent += record.host_ms  # nothing runs meanwhile
            if asked:
                for name, text in policy.watch.news():
                    record.notes.append(f"{name}: {text}")
                    log.warning("%s: %s", name, text)
                plain = not (record.budget.drafts or record.drafting)
                policy.account(record.prompt_rows == 0, plain, record.predicted_ms, spent)
            else:
                policy.slept.add(record.rows, record.context, record.measured_ms, spent)
        self.records.append(record)
        if self._trace is not None:
            self._trace.write(json.dumps(asdict(record)) + "\n")

    def close(self) -> None:
        """Write out the trace, if there is one."""
        if self._trace is not None:
            self._trace.close()
            self._trace = None

    def _updates(self) -> list[Update]:
        out = []
        for rid, (seq, sent) in list(self._open.items()):
            count = len(seq.output)
            if count > sent or seq.finish is not None:
                scores = tuple(seq.scores[sent:count])
                origins = tuple(seq.origins[sent:count])
                out.append(Update(rid, tuple(seq.output[sent:count]), scores, seq.finish, seq.error, origins))
                self._open[rid] = (seq, count)
            if seq.finish is not None:
                del self._open[rid]
        return out

    def drain(self) -> None:
        """Turn the loop until nothing is left in flight (ended requests included), or a step has failed."""
        while self._failure is None and (self._flight or self.scheduler.busy):
            self.step()

    def _adaptive(self) -> dict[str, Any]:
        """What the adaptive policy knows of itself; empty for fixed widths."""
        policy = self.scheduler.policy
        if not isinstance(policy, Adaptive):
            return {}
        cost, seen = policy.cost, policy.calibrator
        return {
            "departures": cost.departures,  # steps off their prediction by more than 1.3x
            "measured": cost.measured,
            "probes": policy.probes,
            "refits": seen.refits,
            "alarms": dict(policy.watch.alarms),
            "alarms_raised": dict(policy.watch.raised),
        }

    def stats(self) -> dict[str, Any]:
        """Counters for metrics: queue, memory, prefix cache, preemptions, synchronisations."""
        s, cache, graphs = self.scheduler, self.cache, self.runner.graphs
        return {
            "waiting": len(s.waiting),
            "running": len(s.running),
            "pages": self.memory.num_pages,
            "pages_free": self.memory.pool.free,
            "pages_cached": cache.pages if cache is not None else 0,
            "prefix": vars(cache.stats) if cache is not None else {},
            "preemptions": s.stats.preemptions,
            "recomputes": s.stats.recomputes,
            "deferred": s.stats.deferred,
            "syncs": dict(self.runner.guard.counts),
            "graphs": {"replayed": graphs.replays, "eager": graphs.eager} if graphs is not None else {},
            "simulated": self.runner.simulator is not None,
            "adaptive": self._adaptive(),
        }
