"""What the API process and the engine's process say to each other: JSON objects in frames.

To the engine: ``add`` (id, prompt, params, origins: whether each token tells its own), ``cancel`` (id), ``stop``.
From it, in the order of a life: ``progress`` (part), ``ready`` (info), then per
request ``accepted`` or ``refused`` (kind, error), ``pieces`` (one list per step),
``stats`` (counters and the steps since the last ones), and ``fatal`` (error) if
it cannot start for a reason that a restart does not mend.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from firesteel.config import SamplingParams

MAX_FRAME = 2**30
LENGTH = struct.Struct(">I")

Score = tuple[float, int, list[tuple[int, float]]]  # log-probability, rank, best (id, log-probability)


class MessageError(RuntimeError):
    """Bytes that are no message: the other side is not ours, or broken."""


def pack(message: Mapping[str, Any]) -> bytes:
    """One frame: length (4 bytes, big-endian) and JSON."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME:
        raise MessageError(f"a message of {len(body)} bytes; the limit is {MAX_FRAME}")
    return LENGTH.pack(len(body)) + body


def body_length(head: bytes) -> int:
    """Bytes that follow a frame's head; raises MessageError."""
    (size,) = LENGTH.unpack(head)
    if size > MAX_FRAME:
        raise MessageError(f"a frame of {size} bytes; the limit is {MAX_FRAME}")
    return int(size)


@dataclass(frozen=True)
class ModelInfo:
    """What the API needs to know of the engine's model."""

    path: str
    vocab_size: int
    max_model_len: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    has_tokenizer: bool
    gamma: int  # drafts per request and step at most; 0: no speculation
    slots: int
    pages: int
    page_size: int
    adaptive: bool = False  # the budget is chosen step by step
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> ModelInfo:
        """Back from JSON."""
        values: dict[str, Any] = dict(plain)
        for name in ("eos_token_ids", "notes"):
            values[name] = tuple(values[name])
        return cls(**values)


@dataclass(frozen=True)
class Piece:
    """What one step added to sample ``index`` of a request.

    ``text`` may lag behind ``token_ids``: a stop string or a character may be
    unfinished. ``scores`` belong to ``token_ids``, and so do ``origins`` (step,
    1 if drafted, drafts verified), which come if they were asked for.
    ``end`` comes with the last piece.
    """

    index: int
    text: str
    token_ids: list[int]
    scores: list[Score]
    end: End | None = None
    origins: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, plain: list[Any]) -> Piece:
        """From ``[index, text, ids, scores, end, origins]``."""
        index, text, ids, scores, end, origins = plain
        return cls(index, text, ids, scores, End(**end) if end is not None else None, origins)


@dataclass(frozen=True)
class End:
    """How a sample ended. ``finish_reason``: stop, length, abort or error."""

    finish_reason: str
    seed: int
    usage: dict[str, int]
    stats: dict[str, Any]
    stop_reason: str | int | None = None
    prompt_scores: list[Score | None] | None = None
    error: str = ""


_DEFAULTS = {f.name: getattr(SamplingParams(), f.name) for f in fields(SamplingParams)}


def plain_params(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    return {k: v for k, v in asdict(params).items() if v != _DEFAULTS[k]}


def params_of(plain: Mapping[str, Any]) -> SamplingParams:
    """Back from JSON, whose objects have text keys; raises ParameterError."""
    values = dict(plain)
    if "logit_bias" in values:
        values["logit_bias"] = {int(k): v for k, v in values["logit_bias"].items()}
    return SamplingParams.of(**values)
