"""Prompts to sequences and updates to answers; shared by ``LLM`` and ``AsyncEngine``."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from firesteel.config import ParameterError, SamplingParams, check_bad_words
from firesteel.core import FinishReason
from firesteel.engine.build import Built
from firesteel.engine.grammar import Guides
from firesteel.engine.guide import Factory, check_guided
from firesteel.engine.limited import TooMany
from firesteel.engine.loop import QueueFull
from firesteel.engine.output import Answer
from firesteel.models.deepseek_v4.chat import encode_messages, resolve_mode

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Prepared:
    """A request that has been checked; its grammar may still be compiling."""

    ids: tuple[int, ...]
    params: SamplingParams
    words: tuple[tuple[int, ...], ...]
    guide: Future[Factory] | None

    @property
    def ready(self) -> bool:
        """Whether ``Frontend.admit`` returns at once."""
        return self.guide is None or self.guide.done()

    def then(self, call: Callable[[], None]) -> None:
        """Call when ready, from some thread; at once if it is."""
        if self.guide is None:
            call()
        else:
            self.guide.add_done_callback(lambda _: call())


class Frontend:
    """One engine with its tokenizer; not thread-safe, the owner of the loop calls it."""

    def __init__(self, built: Built):
        self.engine, self.config, self.tokenizer = built.engine, built.model, built.tokenizer
        limit = self.engine.config.structured_compile_seconds
        engine = self.engine
        self.guides = Guides(built.tokenizer, engine.vocab_size, engine.eos_ids, built.path, limit)
        self.path, self.notes = built.path, (*built.notes, self.guides.note)
        self.open: dict[int, Answer] = {}

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt; raises ParameterError without a tokenizer, and for what is no id."""
        if not isinstance(prompt, str):
            try:
                if isinstance(prompt, bytes | bytearray) or any(isinstance(i, bool) for i in prompt):
                    raise TypeError("bytes or booleans")
                return tuple(operator.index(i) for i in prompt)
            except TypeError as err:
                raise ParameterError(f"prompt: neither text nor a list of token ids ({err})") from err
        if self.tokenizer is None:
            raise ParameterError(f"prompt: {self.path} has no tokenizer.json; give token ids")
        return tuple(self.tokenizer.encode(prompt))

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

    def add(self, prompt: Prompt, params: SamplingParams) -> list[Answer]:
        """Queue a request: one answer per sample. Raises ParameterError or QueueFull; then nothing is queued.

        Waits for a grammar to compile: who turns the loop for others prepares and admits.
        """
        return self.admit(self.prepare(prompt, params))

    def prepare(self, prompt: Prompt, params: SamplingParams) -> Prepared:
        """Check a request and begin to compile its grammar. Raises ParameterError or QueueFull."""
        ids = self.encode(prompt)
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise ParameterError(f"stop, bad_words: {self.path} has no tokenizer.json; use token ids")
        words = tuple(w for text in params.bad_words for w in self._spellings(text))
        check_bad_words(words, "bad_words")
        return Prepared(ids, params, words, self._guide(ids, params))

    def _guide(self, ids: tuple[int, ...], params: SamplingParams) -> Future[Factory] | None:
        if params.structured_outputs is None and params.thinking_token_budget is None:
            return None
        check_guided(self.engine.config)
        most = self.engine.config.max_waiting
        if len(self.engine.scheduler.waiting) + self.guides.compiling.pending >= most:
            raise QueueFull(f"{most} requests wait already; retry later or raise max_waiting")
        try:
            return self.guides.begin(ids, params)
        except TooMany as err:
            raise QueueFull(f"structured_outputs: {err}; retry later") from err

    def admit(self, prepared: Prepared) -> list[Answer]:
        """Queue a prepared request, waiting for its grammar if that is not ready; raises as ``add``."""
        ids, params, words = prepared.ids, prepared.params, prepared.words
        guide = prepared.guide.result() if prepared.guide is not None else None
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        answers: list[Answer] = []
        try:
            for sample in range(params.n):
                seq = self.engine.add(ids, params, seed, sample, words, guide)
                answers.append(Answer(seq, self.tokenizer))
        except Exception:
            for answer in answers:
                self.engine.end(answer.request_id, FinishReason.ABORT)
            raise
        self.open.update((a.request_id, a) for a in answers)
        return answers

    def _spellings(self, text: str) -> list[tuple[int, ...]]:
        """A bad word stands at the start of a text or behind a space."""
        assert self.tokenizer is not None, "checked by the caller"
        both = {tuple(self.tokenizer.encode(t)) for t in (text, f" {text.lstrip()}")}
        return sorted(w for w in both if w)

    def step(self) -> list[Answer]:
        """One turn of the loop; the answers that changed."""
        changed = []
        for update in self.engine.step():
            answer = self.open.get(update.request_id)
            if answer is None:
                continue
            answer.take(update)
            changed.append(answer)
            if answer.finish is not None:
                self.drop(answer, answer.finish)
        return changed

    def drop(self, answer: Answer, reason: FinishReason, error: str = "") -> None:
        """Let go of an answer; a running request ends."""
        self.open.pop(answer.request_id, None)
        self.engine.end(answer.request_id, reason, error)
        if answer.finish is None:
            answer.finish, answer.error = reason, error
