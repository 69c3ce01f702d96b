"""The nouns of the engine, shared by models, speculation, engine and programs.

Host nouns are immutable and hold plain values. Device nouns hold tensors and
say so. Nothing here computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class FinishReason(Enum):
    """Why a request ended; ``None`` in outputs while it runs."""

    STOP = "stop"  # end token, stop id or stop string
    LENGTH = "length"  # max_tokens or the model's length
    ABORT = "abort"  # the client went away
    ERROR = "error"  # this request failed; the others go on


@dataclass(frozen=True)
class Shaping:
    """What changes a request's logits before they are sampled (host values).

    ``stop_from`` is the position of the first token that may end the answer;
    ``prompt_len`` separates prompt from answer in the penalties.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_from: int = 0
    prompt_len: int = 0

    @property
    def neutral(self) -> bool:
        """Whether it changes nothing."""
        return self == Shaping(stop_from=self.prompt_len, prompt_len=self.prompt_len)


@dataclass(frozen=True)
class Admission:
    """A request takes a slot: what the device must know of it (host values).

    ``start`` is the position of its first row: behind the reused prefix.
    """

    request_id: int
    slot: int
    seed: int
    sample: int  # index among the samples of one request
    temperature: float
    max_len: int  # total tokens, prompt included
    stop_ids: tuple[int, ...]
    draft_cap: int = 0  # drafts it verifies per step at most
    shaping: Shaping = Shaping()
    prefix: tuple[int, ...] = ()  # reused prompt tokens, which no row will carry
    snapshot: tuple[int, ...] = ()  # arena pages to fill the window from

    @property
    def start(self) -> int:
        """Position of the first row."""
        return len(self.prefix)


@dataclass(frozen=True)
class Save:
    """Copy a request's device state out of its slot (preemption)."""

    request_id: int
    slot: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Restore:
    """Put a saved request into a slot and fresh pages."""

    request_id: int
    slot: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class SnapshotOrder:
    """After the step, store the window before ``boundary`` of a slot in ``pages``."""

    slot: int
    boundary: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Chunk:
    """Consecutive prompt rows of one request in one step (host values)."""

    request_id: int
    slot: int
    start: int  # absolute position of the first row
    tokens: tuple[int, ...]
    last: bool  # ends the prompt: its last row samples the first anchor
    scored: bool = False  # report the log-probabilities of its tokens
    following: int = -1  # prompt token behind the chunk, if it is scored and not last

    @property
    def end(self) -> int:
        """Absolute position after the last row."""
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class Budget:
    """How many draft rows a step verifies over all requests, and why.

    ``drafts`` 0 is plain decoding. ``expected_tokens`` and ``predicted_ms``
    are what the choice was based on.
    """

    drafts: int
    expected_tokens: float = 0.0
    predicted_ms: float = 0.0
    reason: str = "speculation off"


NO_DRAFTS = Budget(drafts=0)


class Decode(NamedTuple):
    """One running request that has an anchor (host values)."""

    request_id: int
    slot: int


@dataclass(frozen=True)
class StepPlan:
    """What one step runs, decided on the host one step ahead.

    The rows of ``chunks`` come first, in order, then those of ``decodes``.
    How the budget is split between the decodes is decided on the device.
    ``max_position`` bounds every row's position from above.
    """

    step: int
    chunks: tuple[Chunk, ...]
    decodes: tuple[Decode, ...]
    budget: Budget
    max_position: int
    admissions: tuple[Admission, ...] = ()
    saves: tuple[Save, ...] = ()
    restores: tuple[Restore, ...] = ()
    snapshots: tuple[SnapshotOrder, ...] = ()
    drafting: tuple[Decode, ...] = ()  # sampling groups that get new drafts at the end of the step
    draft_width: int = 0
    draft_reason: str = "speculation off"
    draft_weights: tuple[float, ...] = ()  # of the groups in ``drafting``; empty: all count the same
    draft_depth: int = 0  # the most drafts of one request that this step can verify
    report_drafts: bool = False  # copy confidences, margins and survivals of new drafts to the host
    calibration: tuple[tuple[tuple[float, ...], ...], tuple[float, ...], tuple[float, ...]] | None = None
    context: float = 0.0  # mean tokens of context of the sampling requests
    predicted_ms: float = 0.0  # the whole step, drafting included
    forget: tuple[int, ...] = ()  # saved requests that ended
    shaped: bool = False  # some sampling row has its logits changed
    guided: tuple[int, ...] = ()  # sampling requests whose rows get masks (grammar, thinking budget)
    logprobs: int = -1  # the most that any sampling or scored row reports; -1: none

    @property
    def prompt_rows(self) -> int:
        """Rows that come from prompts."""
        return sum(len(c.tokens) for c in self.chunks)

    @property
    def decode_rows(self) -> int:
        """Anchor rows plus the budget's draft rows."""
        return len(self.decodes) + self.budget.drafts

    @property
    def rows(self) -> int:
        """All rows of the step, those that turn out to be padding included."""
        return self.prompt_rows + self.decode_rows

    @property
    def sampling(self) -> tuple[tuple[int, int], ...]:
        """(request id, slot) of every group that samples, in device order."""
        first = tuple((c.request_id, c.slot) for c in self.chunks if c.last)
        return first + tuple((d.request_id, d.slot) for d in self.decodes)


@dataclass(frozen=True)
class RowBatch:
    """The flat rows of one pass, on the device.

    ``tokens, positions, slots, first, last`` are int64 [R], ``valid`` bool
    [R]. Rows of one request are consecutive with ascending positions;
    ``first`` and ``last`` are the row indices of a row's own group. A padding
    row sits in the scratch slot at position 0, alone in its group.
    ``max_position`` is the host's upper bound.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    first: Tensor
    last: Tensor
    valid: Tensor
    max_position: int

    @property
    def count(self) -> int:
        """R."""
        return int(self.tokens.shape[0])


@dataclass(frozen=True)
class SampleRows:
    """Which rows sample, on the device; S rows in G groups.

    ``rows`` int64 [S] indexes the pass; ``group`` int64 [S] is the group of a
    sampling row (G for padding); ``offset`` and ``width`` int64 [G] place each
    group inside the S rows (width 0: the request had already ended);
    ``slots`` int64 [G].
    """

    rows: Tensor
    group: Tensor
    offset: Tensor
    width: Tensor
    slots: Tensor


@dataclass(frozen=True)
class Draft:
    """Proposals of one drafting pass, on the device, one line per slot.

    ``tokens`` int64 [slots, K]; ``length`` int64 [slots] proposals that exist;
    ``survival`` float32 [slots, K], 0 where nothing was proposed.
    """

    tokens: Tensor
    length: Tensor
    survival: Tensor


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of rows, on the device.

    ``chosen`` float32 [R] of the sampled (or given) token; ``rank`` int64 [R]
    how many tokens are better; ``ids`` int64 and ``values`` float32 [R, n] the
    best ones, ties to the lowest id.
    """

    chosen: Tensor
    rank: Tensor
    ids: Tensor
    values: Tensor


@dataclass(frozen=True)
class Verdict:
    """What a step decided, on the device, one line per sampling group.

    ``tokens`` int64 [G, W] emitted ids (W = the widest group), ``count``
    int64 [G] how many of them count, ``accepted`` int64 [G] drafts that were
    accepted, ``verified`` int64 [G], ``finished`` int64 [G]
    (0 runs, 1 stop, 2 length, 3 the logits were not finite).
    """

    tokens: Tensor
    count: Tensor
    accepted: Tensor
    verified: Tensor
    finished: Tensor


class Origin(NamedTuple):
    """How a token came to be: an accepted draft, or sampled behind those of its step."""

    step: int
    drafted: bool
    verified: int  # drafts of this request that the step verified


@dataclass
class StepRecord:
    """What one step did and cost; a line of the trace and of the metrics."""

    step: int
    prompt_rows: int
    decodes: int
    budget: Budget
    rows: int
    draft_reason: str = ""  # why the step drafts as it does
    drafting: int = 0  # requests that got new drafts at its end, each ``draft_width``
    draft_width: int = 0
    context: float = 0.0  # mean tokens of context of the sampling requests
    emitted: int = 0
    verified: int = 0
    accepted: int = 0
    predicted_ms: float = 0.0
    measured_ms: float = 0.0
    host_ms: float = 0.0
    notes: list[str] = field(default_factory=list)
