"""``LLM``: offline generation over the engine's loop."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from firesteel.config import EngineConfig, ParameterError, SamplingParams
from firesteel.core import FinishReason
from firesteel.engine.build import build_engine
from firesteel.engine.output import TextStream
from firesteel.models.deepseek_v4.chat import encode_messages, resolve_mode

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """One finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Mapping[str, int]
    seed: int
    stats: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Plain values, as ``firesteel generate --json`` prints them."""
        return {**asdict(self), "token_ids": list(self.token_ids)}


@dataclass
class _Job:
    prompt_tokens: int
    stream: TextStream | None
    ids: list[int]
    seed: int
    started: float
    ended: float = 0.0
    steps: int = 0
    finish: FinishReason | None = None


class LLM:
    """A model ready to answer.

    ``model``: checkpoint folder, or None for the bundled one. Keyword settings
    are those of ``EngineConfig``; an unknown one is an error.
    """

    def __init__(
        self, model: str | Path | None = None, *, progress: Callable[[str], None] = lambda _: None, **settings: Any
    ):
        self.settings = EngineConfig.of(**settings)
        built = build_engine(model, self.settings, progress)
        self.engine, self.config, self.tokenizer = built.engine, built.model, built.tokenizer
        self.path, self.notes = built.path, built.notes

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Complete texts or lists of token ids; all run together, results in order."""
        many = _as_list(prompts)
        each = _per_prompt(params, len(many))
        jobs = [self._add(prompt, p) for prompt, p in zip(many, each, strict=True)]
        for _ in self._run(dict(jobs)):
            pass
        return [self._completion(job) for _, job in jobs]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        thinking: bool = False,
        reasoning_effort: str | None = None,
        **encoding: Any,
    ) -> Completion:
        """Answer a conversation in V4's own encoding."""
        return self.generate([self.prompt_of(messages, thinking, reasoning_effort, **encoding)], params)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str | Completion]:
        """Text pieces as they are committed, then the Completion."""
        rid, job = self._add(prompt, params or SamplingParams())
        sent = 0
        hold = max((len(s) for s in (params.stop if params else ())), default=1) - 1
        for _ in self._run({rid: job}):
            text = job.stream.text if job.stream else ""
            end = len(text) if job.finish else len(text) - hold
            if end > sent:
                yield text[sent:end]
                sent = end
        yield self._completion(job)

    def prompt_of(
        self,
        messages: Sequence[Mapping[str, Any]],
        thinking: bool = False,
        reasoning_effort: str | None = None,
        **encoding: Any,
    ) -> str:
        """The conversation as V4 sees it; raises ChatError."""
        mode = resolve_mode(thinking=thinking, reasoning_effort=reasoning_effort)
        return encode_messages(messages, mode.thinking, mode.effort, **encoding)

    # ---- inside ----------------------------------------------------------------
    def _add(self, prompt: Prompt, params: SamplingParams) -> tuple[int, _Job]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ParameterError(f"prompt: {self.path} has no tokenizer.json; give token ids")
            ids = tuple(self.tokenizer.encode(prompt))
        else:
            ids = tuple(int(i) for i in prompt)
        if params.stop and self.tokenizer is None:
            raise ParameterError(f"stop: {self.path} has no tokenizer.json; use stop_token_ids")
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        rid = self.engine.add(ids, params, seed)
        stream = TextStream(self.tokenizer, params.stop) if self.tokenizer else None
        return rid, _Job(len(ids), stream, [], seed, time.perf_counter())

    def _run(self, jobs: dict[int, _Job]) -> Iterator[None]:
        """Turn the loop until the jobs are done; yields after every commit."""
        left = dict(jobs)
        try:
            while left:
                for update in self.engine.step():
                    job = left.get(update.request_id)
                    if job is None:
                        continue
                    if update.tokens:
                        job.steps += 1
                    self._take(job, update.tokens, update.finish)
                    if job.finish is not None:
                        self.engine.end(update.request_id, job.finish)
                        del left[update.request_id]
                yield
        finally:
            for rid in left:  # the caller went away
                self.engine.end(rid, FinishReason.ABORT)

    @staticmethod
    def _take(job: _Job, tokens: tuple[int, ...], finish: FinishReason | None) -> None:
        job.finish, job.ended = finish, time.perf_counter()
        if job.stream is None:
            job.ids.extend(tokens)
            return
        job.stream.push(tokens)
        if job.stream.stopped:
            job.finish = FinishReason.STOP
        elif finish is not None:
            job.stream.finish()
        job.ids = job.stream.ids

    def _completion(self, job: _Job) -> Completion:
        assert job.finish is not None
        seconds = max(job.ended - job.started, 1e-9)
        return Completion(
            text=job.stream.text if job.stream else "",
            token_ids=tuple(job.ids),
            finish_reason=job.finish.value,
            usage={
                "prompt_tokens": job.prompt_tokens,
                "completion_tokens": len(job.ids),
                "total_tokens": job.prompt_tokens + len(job.ids),
            },
            seed=job.seed,
            stats={"steps": job.steps, "tokens_per_second": len(job.ids) / seconds, "seconds": seconds},
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(p, int) for p in prompts):
        return [[int(p) for p in prompts if isinstance(p, int)]]
    return [p for p in prompts if not isinstance(p, int)]


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ParameterError(f"params: {len(params)} for {count} prompts; give one, or one each")
    return list(params)
