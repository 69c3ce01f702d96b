"""What clients may ask for: the request bodies, checked, as prompts and sampling parameters.

Field names are OpenAI's and, for what OpenAI lacks, those of the servers
people come from. A field that would change the answer and is not served is
an error that names it; ``HARMLESS`` ones are ignored.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from firesteel.config import ParameterError, SamplingParams
from firesteel.serve.errors import ApiError, bad, of_parameter

Body = TypeVar("Body", bound=BaseModel)

HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "request_id", "prediction", "spaces_between_special_tokens",
    }
)  # fmt: skip
# fields that are accepted where they ask for what happens anyway
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "detokenize": (True,),
    "modalities": (["text"],),
    "logits_processors": ([],),
    "functions": ([],),
    "function_call": ("none",),
    "documents": ([],),
    "add_generation_prompt": (True,),
}
HINTS = {
    "functions": "deprecated; use tools",
    "function_call": "deprecated; use tool_choice",
    "guided_decoding_backend": "there is one; leave it out",
    "guided_whitespace_pattern": "use structured_outputs with whitespace_pattern",
    "use_beam_search": "there is no beam search; use n",
    "best_of": "answers are not ranked; use n",
    "suffix": "there is no infilling; leave it out",
    "audio": "there is no audio; leave it out",
    "truncate_prompt_tokens": "prompts are not shortened; send a shorter one",
}
# earlier names of the fields of structured_outputs
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_PARAMS = (
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "allowed_token_ids", "bad_words", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "seed", "n", "prompt_logprobs", "speculative", "max_draft_tokens", "cache_salt", "priority",
    "thinking_token_budget", "min_tokens_per_second",
)  # fmt: skip


class Extras(BaseModel):
    """``firesteel``: what this server tells beside the answer."""

    model_config = ConfigDict(strict=True, extra="forbid")
    tokens: bool | None = Field(None, description="of each token: text, step, drafted or sampled")


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Asked(BaseModel):
    """Fields that chats and completions share."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None, description="one of json, json_object, regex, choice, grammar (Lark)"
    )
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    thinking_token_budget: int | None = Field(None, description="tokens before the reasoning is ended")
    # this server's own
    speculative: bool | None = Field(None, description="false: verify no drafts for this request")
    max_draft_tokens: int | None = Field(None, description="drafts per step at most")
    cache_salt: str | None = Field(None, description="share prefixes only with an equal salt")
    priority: int | None = Field(None, description="smaller runs first")
    min_tokens_per_second: float | None = Field(
        None, description="a wish that adaptive verification spends drafts on; 0: none"
    )
    return_stats: bool | None = Field(None, description="add what speculation did to each choice")
    return_token_ids: bool | None = Field(None, description="add token ids to each choice")
    firesteel: Extras | None = Field(None, description="{tokens: true}: where each token comes from")
    one_token_per_chunk: bool | None = Field(None, description="a stream's chunks hold one token each")

    def check_extra(self) -> None:
        """Raise a 400 for the first field that is neither served, harmless nor asks for the usual."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in HARMLESS:
                continue
            if name in NEUTRAL and any(value == usual for usual in NEUTRAL[name]):
                continue
            problem = HINTS.get(name, "not a field that is served here; leave it out")
            raise bad(name, problem, "unsupported_field")
        if self.stream and self.prompt_logprobs is not None:
            raise bad("prompt_logprobs", "cannot be streamed; set stream=false")
        if self.stream_options is not None and not self.stream:
            raise bad("stream_options", "only with stream=true")

    def sampling(self, rest: int, default: int | None, **more: Any) -> SamplingParams:
        """Sampling parameters. ``rest``: tokens that fit behind the prompt; ``default`` max_tokens (None: rest)."""
        values: dict[str, Any] = {name: getattr(self, name) for name in _PARAMS}
        values["max_tokens"] = self._max_tokens()
        if values["max_tokens"] is None:
            values["max_tokens"] = rest if default is None else min(default, rest)
        values["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        values["logit_bias"] = self._bias()
        values.update(more)
        try:
            params = SamplingParams.of(**{k: v for k, v in values.items() if v is not None})
        except ParameterError as err:
            raise of_parameter(str(err)) from err
        # 53 bits: every client can read it back
        return params if params.seed is not None else params.with_seed(secrets.randbits(53))

    def _max_tokens(self) -> int | None:
        return self.max_tokens

    def _bias(self) -> dict[int, float]:
        try:
            return {int(k): v for k, v in (self.logit_bias or {}).items()}
        except ValueError as err:
            raise bad("logit_bias", f"keys must be token ids ({err})") from err

    @property
    def tells_tokens(self) -> bool:
        """Where each token comes from."""
        return bool(self.firesteel and self.firesteel.tokens)

    @property
    def usage_wanted(self) -> bool:
        """A last chunk with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def usage_always(self) -> bool:
        """The usage so far in every chunk."""
        return bool(self.usage_wanted and self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(Asked):
    """Body of ``/v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """Each prompt as text or token ids; raises a 400 for an empty list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise bad("prompt", "empty; give text, token ids or a list of them")
        if all(isinstance(p, int) for p in self.prompt):
            return [[p for p in self.prompt if isinstance(p, int)]]
        return [p for p in self.prompt if not isinstance(p, int)]

    def check(self) -> None:
        """Raise a 400 for what contradicts itself."""
        self.check_extra()
        if self.stream and self.echo and self.logprobs is not None:
            raise bad("echo", "log-probabilities of an echoed prompt cannot be streamed; set stream=false")


class ChatRequest(Asked):
    """Body of ``/v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    thinking: bool | dict[str, Any] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        """Raise a 400 for what contradicts itself or is not available."""
        if self.continue_final_message and (self.model_extra or {}).get("add_generation_prompt") is False:
            assert self.model_extra is not None
            del self.model_extra["add_generation_prompt"]  # the usual pair of the two
        self.check_extra()
        if self.top_logprobs is not None and not self.logprobs:
            raise bad("top_logprobs", "only with logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise bad("max_tokens", "differs from max_completion_tokens; send one of them")
        self._check_tool_choice()

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        if choice in (None, "none"):
            return
        if isinstance(choice, dict):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            if choice.get("type") != "function" or not isinstance(name, str):
                raise bad("tool_choice", 'expected {"type": "function", "function": {"name": ...}}')
        elif choice not in ("auto", "required"):
            raise bad("tool_choice", f"{choice!r} is unknown; expected auto, none, required or a function")
        if not self.tools:
            raise bad("tool_choice", "there are no tools; send tools")

    def thinking_budget(self) -> Any:
        """Tokens of reasoning, from either of two fields; raises a 400 if they differ."""
        inner = self.thinking.get("budget_tokens") if isinstance(self.thinking, dict) else None
        if inner is not None and self.thinking_token_budget not in (None, inner):
            raise bad("thinking", "budget_tokens differs from thinking_token_budget; send one of them")
        return self.thinking_token_budget if inner is None else inner

    def _max_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def score_count(self) -> int | None:
        """Alternatives per position, None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(BaseModel):
    """Body of ``/tokenize``: ``prompt``, or ``messages`` with the fields of a chat."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """Body of ``/detokenize``."""

    model_config = ConfigDict(strict=True, extra="ignore")
    model: str | None = None
    tokens: list[int]


def read(kind: type[Body], raw: Mapping[str, Any]) -> Body:
    """A checked body; raises a 400 that names the field."""
    try:
        return kind.model_validate(raw)
    except ValidationError as err:
        first = err.errors(include_url=False, include_input=False)[0]
        place = [str(p) for p in first["loc"]]
        name = place[0] if place else None
        # pydantic adds these behind a field of several types
        kinds = ("list[", "str", "int", "dict[", "bool")
        where = ".".join([*place[:1], *(p for p in place[1:] if not p.startswith(kinds))])
        raise ApiError(400, f"{where}: {first['msg']}", param=name, code="invalid_value") from err
