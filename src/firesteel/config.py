"""Choices people make: sampling parameters and engine limits, checked on entry."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from firesteel.structured import StructuredOutputs

NumericsName = Literal["official", "float32"]

MAX_LOGPROBS = 20
MAX_STOP_IDS = 16
MAX_BIAS = 1024
MAX_N = 128
MAX_STOPS = 64  # every one is searched for after every token
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 64  # tokens; the longest widens a table of all slots


class ParameterError(ValueError):
    """A request or engine setting that cannot be served; names the setting."""


def _require(ok: bool, name: str, value: object, want: str) -> None:
    if not ok:
        raise ParameterError(f"{name}={value!r}: expected {want}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _as_tuple(name: str, value: Any, want: str) -> tuple[Any, ...]:
    """A sequence as a tuple; anything else is an error that names the parameter."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise ParameterError(f"{name}={value!r}: expected {want}")
    return tuple(value)


def _between(low: float, high: float, *, open_low: bool = False) -> Callable[[object], bool]:
    def check(value: object) -> bool:
        if not isinstance(value, int | float) or not _is_number(value):
            return False
        return (low < value if open_low else low <= value) and value <= high

    return check


def check_bad_words(words: Iterable[tuple[int, ...]], name: str) -> None:
    """Raise ParameterError for a bad word of too many tokens."""
    longest = max(map(len, words), default=0)
    want = f"at most {MAX_BAD_WORD_LENGTH} tokens per word"
    _require(longest <= MAX_BAD_WORD_LENGTH, name, f"a word of {longest} tokens", want)


# name -> (check, what is expected); for plain numbers
_NUMBERS: dict[str, tuple[Callable[[object], bool], str]] = {
    "temperature": (_between(0, 100), "a number from 0 (greedy) to 100"),
    "top_p": (_between(0, 1, open_low=True), "a number above 0, at most 1"),
    "min_p": (_between(0, 1), "a number from 0 to 1"),
    "repetition_penalty": (_between(0.01, 100), "a number from 0.01 to 100"),
    "presence_penalty": (_between(-2, 2), "a number from -2 to 2"),
    "frequency_penalty": (_between(-2, 2), "a number from -2 to 2"),
    "min_tokens_per_second": (_between(0, 1e6), "a number of tokens from 0 (no wish) up"),
}

# name -> (lowest, highest or None, whether None is allowed)
_INTEGERS: dict[str, tuple[int, int | None, bool]] = {
    "max_tokens": (0, None, False),
    "min_tokens": (0, None, False),
    "n": (1, MAX_N, False),
    "seed": (0, 2**64 - 1, True),
    "logprobs": (0, MAX_LOGPROBS, True),
    "prompt_logprobs": (0, MAX_LOGPROBS, True),
    "max_draft_tokens": (0, None, True),
    "thinking_token_budget": (0, None, True),
}


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled; every field is checked when it is built.

    The text is a function of weights, prompt, these values and the seed alone.

    max_tokens, min_tokens: bounds of the answer's length; below the minimum no
        end token, stop id or stop string ends it.
    temperature: 0 is greedy.
    top_k: keep that many of the best tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of best tokens with that much probability.
    min_p: keep tokens with at least that share of the best one's probability.
    repetition_penalty: > 1 weakens tokens of the prompt and the answer.
    presence_penalty, frequency_penalty: subtracted once, or per occurrence in the answer.
    logit_bias: token id -> number added to its logit.
    allowed_token_ids: if given, nothing else can be sampled.
    bad_words: strings that cannot be completed (encoded by the tokenizer).
    bad_word_ids: the same as token id sequences.
    stop, stop_token_ids: end the answer; include_stop_str_in_output keeps the string.
    ignore_eos: go on behind the model's end token.
    seed: keys all noise (0 <= seed < 2**64); None lets the engine draw one and report it.
    n: samples of one prompt; they share the seed and differ in their sample index.
    logprobs: report that many best tokens per position (0: the sampled one only),
        log-probabilities of the model before any of the above.
    prompt_logprobs: the same for every prompt position but the first.
    echo: the prompt's text and ids in front of the answer's.
    speculative: False verifies no drafts for this request.
    max_draft_tokens: at most that many drafts per step for this request; None: the engine's K.
    cache_salt: requests share prefixes only with an equal salt.
    priority: smaller runs first, and its drafts count for more under adaptive verification.
    min_tokens_per_second: a wish; where drafts can help, adaptive verification spends them
        on requests that fall short of theirs. 0: none.
    structured_outputs: a grammar for the answer, behind its reasoning; fields as of
        ``StructuredOutputs``. Needs the extra "structured".
    thinking_token_budget: tokens the reasoning may have before its end is forced.
    thinking: whether the answer begins inside the reasoning; None: if the prompt's last
        think tag opens it.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    speculative: bool = True
    max_draft_tokens: int | None = None
    cache_salt: str = ""
    priority: int = 0
    min_tokens_per_second: float = 0.0
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: int | None = None
    thinking: bool | None = None

    def __post_init__(self) -> None:
        for name, (check, want) in _NUMBERS.items():
            _require(check(getattr(self, name)), name, getattr(self, name), want)
        for name, (low, high, optional) in _INTEGERS.items():
            value = getattr(self, name)
            if value is None and optional:
                continue
            ok = _is_int(value) and value >= low and (high is None or value <= high)
            _require(
                ok, name, value, f"an integer from {low}" + (f" to {high}" if high is not None else " up")
            )
        _require(
            _is_int(self.top_k) and self.top_k >= -1,
            "top_k",
            self.top_k,
            "an integer from 1 up, or 0 for all",
        )
        _require(_is_int(self.priority), "priority", self.priority, "an integer")
        _require(isinstance(self.cache_salt, str), "cache_salt", self.cache_salt, "a string")
        for name in ("include_stop_str_in_output", "ignore_eos", "echo", "speculative"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        self._check_lists()
        from firesteel.structured import checked  # which needs this module's errors

        object.__setattr__(self, "structured_outputs", checked(self))
        if self.min_tokens > self.max_tokens:
            raise ParameterError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; lower it"
            )
        if self.n > 1 and self.temperature == 0:
            raise ParameterError("n: greedy samples are all the same; raise temperature or set n=1")

    def _check_lists(self) -> None:
        def ids(value: Any) -> bool:
            return isinstance(value, tuple) and all(_is_int(i) and i >= 0 for i in value)

        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            value = (value,) if isinstance(value, str) else _as_tuple(name, value, "non-empty strings")
            _require(all(isinstance(s, str) and s for s in value), name, value, "non-empty strings")
            most = MAX_STOPS if name == "stop" else MAX_BAD_WORDS
            _require(len(value) <= most, name, f"{len(value)} strings", f"at most {most}")
            object.__setattr__(self, name, value)
        stops = _as_tuple("stop_token_ids", self.stop_token_ids, "token ids >= 0")
        object.__setattr__(self, "stop_token_ids", stops)
        _require(ids(self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "token ids >= 0")
        words = tuple(
            _as_tuple("bad_word_ids", w, "non-empty lists of token ids")
            for w in _as_tuple("bad_word_ids", self.bad_word_ids, "non-empty lists of token ids")
        )
        _require(all(w and ids(w) for w in words), "bad_word_ids", words, "non-empty lists of token ids")
        _require(len(words) <= MAX_BAD_WORDS, "bad_word_ids", len(words), f"at most {MAX_BAD_WORDS}")
        check_bad_words(words, "bad_word_ids")
        object.__setattr__(self, "bad_word_ids", words)
        if self.allowed_token_ids is not None:
            allowed = _as_tuple("allowed_token_ids", self.allowed_token_ids, "at least one token id")
            _require(bool(allowed) and ids(allowed), "allowed_token_ids", allowed, "at least one token id")
            object.__setattr__(self, "allowed_token_ids", tuple(sorted(set(allowed))))
        bias = self.logit_bias
        _require(isinstance(bias, Mapping), "logit_bias", bias, "a mapping from token ids to numbers")
        _require(len(bias) <= MAX_BIAS, "logit_bias", len(bias), f"at most {MAX_BIAS} entries")
        for token, value in bias.items():
            _require(_is_int(token) and token >= 0, "logit_bias", token, "token ids >= 0 as keys")
            _require(_between(-100, 100)(value), "logit_bias", value, "numbers from -100 to 100 as values")
        object.__setattr__(self, "logit_bias", dict(bias))

    def with_seed(self, seed: int) -> SamplingParams:
        """The same parameters with the seed fixed."""
        return replace(self, seed=seed)

    def check_vocab(self, vocab_size: int) -> None:
        """Raise ParameterError if any token id is outside 0..vocab_size-1."""
        groups: dict[str, tuple[int, ...]] = {
            "logit_bias": tuple(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids,
            "bad_word_ids": tuple(i for w in self.bad_word_ids for i in w),
        }
        for name, ids in groups.items():
            bad = next((i for i in ids if i >= vocab_size), None)
            if bad is not None:
                raise ParameterError(f"{name}: token id {bad} is outside 0..{vocab_size - 1}")

    @classmethod
    def of(cls, **values: Any) -> SamplingParams:
        """Build from keywords; an unknown one is an error that lists the known."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ParameterError(f"unknown sampling parameter {unknown[0]!r}; known: {', '.join(known)}")
        return cls(**values)


@dataclass(frozen=True)
class SimulatedAcceptance:
    """Acceptance that is drawn instead of computed, for benchmarks on weights without a trained drafter.

    rates: probability of each draft of a block, given that all before it were
        accepted; a depth behind the last takes the last.
    trace: rows of such rates, one row per token, starting at a row that the
        request's seed picks and going round; in place of ``rates``.
    spread: standard deviation of the requests' log-odds: some are easier than others.
    head_auc, margin_auc: how well the confidence logit and the margin alone
        tell accepted from rejected drafts; 0.5 is noise, 1 is not allowed.
    """

    rates: tuple[float, ...] = (0.85, 0.80, 0.76, 0.74, 0.72, 0.70, 0.69)
    trace: tuple[tuple[float, ...], ...] = ()
    spread: float = 0.0
    head_auc: float = 0.70
    margin_auc: float = 0.85

    def __post_init__(self) -> None:
        want = "probabilities from 0 to 1"
        rates = _as_tuple("simulated rates", self.rates, want)
        trace = _as_tuple("simulated trace", self.trace, "rows of " + want)
        trace = tuple(_as_tuple("simulated trace", row, want) for row in trace)
        for name, row in (("rates", rates), *(("trace", row) for row in trace)):
            _require(
                bool(row) and all(_between(0, 1)(r) for r in row), f"simulated_acceptance.{name}", row, want
            )
        for name in ("head_auc", "margin_auc"):
            value = getattr(self, name)
            ok = _between(0.5, 0.999)(value)
            _require(ok, f"simulated_acceptance.{name}", value, "a number from 0.5 to 0.999")
        _require(
            _between(0, 10)(self.spread), "simulated_acceptance.spread", self.spread, "a number from 0 to 10"
        )
        object.__setattr__(self, "rates", rates)
        object.__setattr__(self, "trace", trace)

    @classmethod
    def of(cls, value: Any) -> SimulatedAcceptance | None:
        """From None, an instance or a mapping; an unknown field is an error that lists the known."""
        if value is None or isinstance(value, cls):
            return value
        known = [f.name for f in fields(cls)]
        if not isinstance(value, Mapping) or set(map(str, value)) - set(known):
            raise ParameterError(
                f"simulated_acceptance={value!r}: expected an object with fields among {', '.join(known)}"
            )
        return cls(**value)


@dataclass(frozen=True)
class SpeculativeConfig:
    """Speculative decoding; the fields of ``--speculative-config``.

    method: "dspark", the drafter inside a V4 checkpoint.
    num_speculative_tokens: K, drafts per request and step at most; any K from 1.
    acceptance: "coupled" (a draft is accepted if it is the token the target
        samples; the text is that of plain decoding) or "rejection" (the
        classical rule, equal in distribution only).
    proposal: under rejection, "dense" (drafts are drawn and weighed by their
        probability) or "one_hot" (a draft counts as certain).
    enable_adaptive_verification: verify as many drafts as pay at the current
        load, and draft only where it pays.
    confidence: "auto" (the checkpoint's confidence head if it has one), "head"
        (an error without one) or "none" (margin and position only).
    cost_table: file of step prices made by ``firesteel profile``; None measures at start.
    calibration: file made by ``firesteel calibrate``; None: the checkpoint's own, or a prior.
    simulated_acceptance: for benchmarks only, see ``SimulatedAcceptance``; the text is then meaningless.
    """

    method: str = "dspark"
    num_speculative_tokens: int = 5
    acceptance: str = "coupled"
    proposal: str = "dense"
    enable_adaptive_verification: bool = False
    confidence: str = "auto"
    cost_table: str | None = None
    calibration: str | None = None
    simulated_acceptance: SimulatedAcceptance | None = None

    def __post_init__(self) -> None:
        simulated = SimulatedAcceptance.of(self.simulated_acceptance)
        object.__setattr__(self, "simulated_acceptance", simulated)
        if simulated is not None and self.acceptance != "coupled":
            raise ParameterError(
                "simulated_acceptance: draws coupled outcomes only; set acceptance='coupled'"
            )
        k = self.num_speculative_tokens
        _require(
            self.method == "dspark",
            "speculative method",
            self.method,
            "'dspark', the drafter of V4 checkpoints",
        )
        _require(_is_int(k) and 1 <= k <= 64, "num_speculative_tokens", k, "an integer from 1 to 64")
        _require(
            self.acceptance in ("coupled", "rejection"),
            "acceptance",
            self.acceptance,
            "'coupled' or 'rejection'",
        )
        _require(self.proposal in ("dense", "one_hot"), "proposal", self.proposal, "'dense' or 'one_hot'")
        adaptive = self.enable_adaptive_verification
        _require(isinstance(adaptive, bool), "enable_adaptive_verification", adaptive, "true or false")
        _require(
            self.confidence in ("auto", "head", "none"),
            "confidence",
            self.confidence,
            "'auto', 'head' or 'none'",
        )
        for name in ("cost_table", "calibration"):
            value = getattr(self, name)
            _require(
                value is None or (isinstance(value, str) and value != ""), name, value, "a file path or null"
            )
            if value is not None and not adaptive:
                raise ParameterError(
                    f"{name}: only adaptive verification uses it; set enable_adaptive_verification"
                )

    @property
    def rejection(self) -> bool:
        """Whether the classical rule decides."""
        return self.acceptance == "rejection"

    @classmethod
    def of(cls, value: Any) -> SpeculativeConfig | None:
        """From None, an instance, a mapping or its JSON text; an unknown field is an error that lists the known."""
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as err:
                raise ParameterError(
                    f"speculative config: not JSON ({err}); write "
                    """'{"method":"dspark","num_speculative_tokens":5}'"""
                ) from err
        if not isinstance(value, Mapping):
            raise ParameterError(
                f"speculative config: expected an object of fields, found {type(value).__name__}"
            )
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(map(str, value)) - set(known))
        if unknown:
            raise ParameterError(
                f"speculative config: unknown field {unknown[0]!r}; known: {', '.join(known)}"
            )
        return cls(**value)


@dataclass(frozen=True)
class EngineConfig:
    """Limits and choices of one engine; checked when it is built.

    max_num_seqs: requests that run at once (slots).
    max_num_batched_tokens: rows of one step.
    max_model_len: tokens of one request, prompt included; None: what the
        checkpoint allows, at most ``default_model_len``.
    num_pages: history pages of 256 tokens, shared by running requests and the
        prefix cache; None: enough for every slot at full length, and a quarter more.
    max_waiting: requests that may queue; more are refused.
    prefix_caching: reuse of common prefixes.
    speculative: speculative decoding, or None for none.
    threads: CPU threads of one op, for the whole process; None: one for small
        models, whose ops are too short to share, else torch's own choice.
    swap_gib: host memory for preempted requests; beyond it they are recomputed.
    debug_sync: any host/device synchronisation without a name is an error.
    debug_poison: after each step overwrite all state that no longer counts with NaN.
    trace: file that gets one JSON line per committed step (see ``core.StepRecord``); None: no file.
    device: "cuda" (CUDA or ROCm), "cpu", or "auto": a GPU if there is one the Triton ops know.
    graphs: on a GPU, record steps of up to 2048 rows at start and replay them.
    structured_compile_seconds: what a request's grammar may take to compile; others go on meanwhile.
    structured_mask_seconds: what a request's masks may take in a step; beyond it that request fails.
    """

    numerics: NumericsName = "official"
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    num_pages: int | None = None
    max_waiting: int = 4096
    prefix_caching: bool = True
    speculative: SpeculativeConfig | None = None
    swap_gib: float = 4.0
    backend: str = "auto"
    threads: int | None = None
    default_model_len: int = 4096
    debug_sync: bool = False
    debug_poison: bool = False
    trace: str | None = None
    device: str = "auto"
    graphs: bool = True
    structured_compile_seconds: float = 10.0
    structured_mask_seconds: float = 1.0

    def __post_init__(self) -> None:
        _require(
            self.numerics in ("official", "float32"), "numerics", self.numerics, "'official' or 'float32'"
        )
        for name in ("max_num_seqs", "max_num_batched_tokens", "default_model_len", "max_waiting"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 1, name, value, "an integer >= 1")
        few = self.threads is None or (_is_int(self.threads) and self.threads <= 256)
        _require(few, "threads", self.threads, "at most 256")
        for name in ("max_model_len", "num_pages", "threads"):
            value = getattr(self, name)
            _require(value is None or (_is_int(value) and value >= 1), name, value, "an integer >= 1 or None")
        is_path = self.trace is None or (isinstance(self.trace, str) and self.trace != "")
        _require(is_path, "trace", self.trace, "a file path or None")
        _require(_between(0, 1e6)(self.swap_gib), "swap_gib", self.swap_gib, "a number of GiB >= 0")
        for name in ("structured_compile_seconds", "structured_mask_seconds"):
            value = getattr(self, name)
            _require(_between(0, 3600, open_low=True)(value), name, value, "seconds above 0, at most 3600")
        object.__setattr__(self, "speculative", SpeculativeConfig.of(self.speculative))
        for name in ("prefix_caching", "debug_sync", "debug_poison", "graphs"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        _require(
            self.device in ("auto", "cuda", "cpu"),
            "device",
            self.device,
            "'auto', 'cuda' (CUDA or ROCm) or 'cpu'",
        )

    @property
    def slots(self) -> int:
        """Requests that really run at once: each needs a row of the step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def gamma(self) -> int:
        """Drafts per request at most; 0 without speculation."""
        return self.speculative.num_speculative_tokens if self.speculative is not None else 0

    @classmethod
    def of(cls, **changes: Any) -> EngineConfig:
        """Build from keyword settings; an unknown one is an error that lists the known."""
        known = set(cls.__dataclass_fields__)
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ParameterError(f"unknown engine setting {unknown[0]!r}; known: {', '.join(sorted(known))}")
        return cls(**changes)
