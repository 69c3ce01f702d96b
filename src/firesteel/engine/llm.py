"""``LLM``: offline generation over the engine's loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from firesteel.config import EngineConfig, ParameterError, SamplingParams
from firesteel.core import FinishReason
from firesteel.engine.build import Built, build_engine
from firesteel.engine.frontend import Frontend, Prompt
from firesteel.engine.output import Answer, Completion


class LLM:
    """A model ready to answer.

    ``model``: checkpoint folder, or None for the bundled one. Keyword settings
    are those of ``EngineConfig``; an unknown one is an error. ``build`` makes
    the engine in another way, e.g. from weights that were never in a file.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        progress: Callable[[str], None] = lambda _: None,
        build: Callable[[str | Path | None, EngineConfig, Callable[[str], None]], Built] = build_engine,
        **settings: Any,
    ):
        self.settings = EngineConfig.of(**settings)
        self.frontend = Frontend(build(model, self.settings, progress))
        self._entry, self._owner = threading.Lock(), 0
        self.engine, self.config = self.frontend.engine, self.frontend.config
        self.tokenizer, self.path, self.notes = (
            self.frontend.tokenizer,
            self.frontend.path,
            self.frontend.notes,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_token: Callable[[Answer], None] | None = None,
    ) -> list[Completion]:
        """Complete texts or lists of token ids; all run together, results in order (n per prompt).

        ``on_token`` hears every change of an answer; if it raises, that answer
        ends with finish reason "error" and the others go on.
        """
        many = _as_list(prompts)
        each = _per_prompt(params, len(many))
        answers: list[Answer] = []
        try:
            with self._entry:
                self._claim()
                ready = [self.frontend.prepare(prompt, p) for prompt, p in zip(many, each, strict=True)]
                for one in ready:
                    answers.extend(self.frontend.admit(one))
            for changed in self._run(answers):
                if on_token is not None:
                    self._tell(changed, on_token)
        finally:
            self._leave(answers)
        return [a.completion() for a in answers]

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
        """Text pieces as they are committed, then the Completion (n = 1)."""
        params = params or SamplingParams()
        if params.n != 1:
            raise ParameterError(f"n={params.n}: a stream has one answer; use generate or set n=1")
        with self._entry:
            self._claim()
            answers = self.frontend.add(prompt, params)
        try:
            for _ in self._run(answers):
                piece = answers[0].delta()
                if piece:
                    yield piece
        finally:
            self._leave(answers)
        yield answers[0].completion()

    def prompt_of(
        self,
        messages: Sequence[Mapping[str, Any]],
        thinking: bool = False,
        reasoning_effort: str | None = None,
        **encoding: Any,
    ) -> str:
        """The conversation as V4 sees it; raises ChatError."""
        return self.frontend.prompt_of(messages, thinking, reasoning_effort, **encoding)

    # ---- inside ----------------------------------------------------------------
    def _claim(self) -> None:
        """One thread at a time turns the loop; another one gets an error instead of lost updates."""
        me = threading.get_ident()
        if self.frontend.open and self._owner != me:
            raise ParameterError("LLM: another thread is generating; use AsyncEngine for concurrent callers")
        self._owner = me

    def _run(self, answers: list[Answer]) -> Iterator[list[Answer]]:
        """Turn the loop until the answers are done; yields what each turn changed."""
        while any(a.finish is None for a in answers):
            yield self.frontend.step()

    def _tell(self, changed: list[Answer], listener: Callable[[Answer], None]) -> None:
        for answer in changed:
            try:
                listener(answer)
            except Exception as err:  # the caller's own code may raise anything
                answer.finish = None
                self.frontend.drop(answer, FinishReason.ERROR, f"on_token raised {type(err).__name__}: {err}")

    def _leave(self, answers: list[Answer]) -> None:
        """Whatever still runs has lost its caller; rows in flight land before the next call."""
        for answer in answers:
            if answer.finish is None:
                self.frontend.drop(answer, FinishReason.ABORT)
        if not self.frontend.open:
            self.engine.drain()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | bytes | bytearray):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise ParameterError(
            f"prompts: expected text, token ids or a list of prompts, found {type(prompts).__name__}"
        )
    ids = [p for p in prompts if isinstance(p, int)]
    if ids and len(ids) < len(prompts):
        raise ParameterError(
            "prompts: token ids beside whole prompts; give one list of ids or a list of prompts"
        )
    return [ids] if ids else [p for p in prompts if not isinstance(p, int)]


def _per_prompt(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ParameterError(f"params: {len(params)} for {count} prompts; give one, or one each")
    return list(params)
