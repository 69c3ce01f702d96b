"""Choices people make: sampling parameters and engine limits, checked on entry."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

NumericsName = Literal["official", "float32"]


class ParameterError(ValueError):
    """A request or engine setting that cannot be served; names the setting."""


def _require(ok: bool, name: str, value: object, want: str) -> None:
    if not ok:
        raise ParameterError(f"{name}={value!r}: expected {want}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled; every field is checked when it is built.

    ``seed`` (0 <= seed < 2**64) keys all noise of the request; ``None`` lets
    the engine draw one and report it. The text is a function of weights,
    prompt, these values and the seed alone.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(_is_int(self.max_tokens) and self.max_tokens >= 0, "max_tokens", self.max_tokens, "an integer >= 0")
        _require(
            _is_number(self.temperature) and 0.0 <= self.temperature <= 100.0,
            "temperature",
            self.temperature,
            "a number from 0 (greedy) to 100",
        )
        if self.seed is not None:
            _require(_is_int(self.seed) and 0 <= self.seed < 2**64, "seed", self.seed, "an integer in 0 .. 2**64-1")
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        _require(all(isinstance(s, str) and s for s in stops), "stop", self.stop, "non-empty strings")
        object.__setattr__(self, "stop", stops)
        ids = tuple(self.stop_token_ids)
        _require(all(_is_int(i) and i >= 0 for i in ids), "stop_token_ids", ids, "token ids >= 0")
        object.__setattr__(self, "stop_token_ids", ids)

    def with_seed(self, seed: int) -> SamplingParams:
        """The same parameters with the seed fixed."""
        return replace(self, seed=seed)


@dataclass(frozen=True)
class EngineConfig:
    """Limits and choices of one engine; checked when it is built."""

    numerics: NumericsName = "official"
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None  # None: what the checkpoint allows, at most `default_model_len`
    num_pages: int | None = None  # None: enough for every slot at full length
    backend: str = "auto"  # ops backend: auto, reference, native
    threads: int | None = None  # CPU threads of one op; None: leave as it is
    default_model_len: int = 4096

    def __post_init__(self) -> None:
        _require(self.numerics in ("official", "float32"), "numerics", self.numerics, "'official' or 'float32'")
        for name in ("max_num_seqs", "max_num_batched_tokens", "default_model_len"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 1, name, value, "an integer >= 1")
        for name in ("max_model_len", "num_pages", "threads"):
            value = getattr(self, name)
            _require(value is None or (_is_int(value) and value >= 1), name, value, "an integer >= 1 or None")

    @classmethod
    def of(cls, **changes: Any) -> EngineConfig:
        """Build from keyword settings; an unknown one is an error that lists the known."""
        known = set(cls.__dataclass_fields__)
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ParameterError(f"unknown engine setting {unknown[0]!r}; known: {', '.join(sorted(known))}")
        return cls(**changes)
