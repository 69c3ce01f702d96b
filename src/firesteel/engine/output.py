"""Token ids to answers: detokenising, stop strings, scores, where an answer ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from firesteel.config import SamplingParams
from firesteel.core import FinishReason, Origin
from firesteel.engine.loop import Update
from firesteel.engine.runner import TokenScore
from firesteel.engine.sequence import Sequence
from firesteel.tokenizer import Detokenizer, Tokenizer


@dataclass(frozen=True)
class Completion:
    """One finished answer.

    ``logprobs`` belong to ``token_ids`` (without an echoed prompt),
    ``prompt_logprobs`` to prompt positions (None for the first).
    ``stop_reason`` is the stop string or stop id that ended it, if one did.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Mapping[str, int]
    seed: int
    stats: Mapping[str, Any]
    index: int = 0
    stop_reason: str | int | None = None
    logprobs: tuple[TokenScore, ...] | None = None
    prompt_logprobs: tuple[TokenScore | None, ...] | None = None
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values, as ``firesteel generate --json`` prints them; absent parts are left out."""
        out = asdict(self)
        return {k: v for k, v in out.items() if v is not None and (k != "error" or v)}


@dataclass
class TextStream:
    """Grows text from ids; ``ids`` and ``text`` always end at the same token.

    A stop string may begin in one token and end in another; text that could
    still turn out to be the start of one is not yet ``stable``.
    """

    tokenizer: Tokenizer
    params: SamplingParams
    ids: list[int] = field(default_factory=list)
    text: str = ""
    stopped: str | None = None

    def __post_init__(self) -> None:
        self._detokenizer: Detokenizer = self.tokenizer.detokenizer()
        self._longest = max((len(s) for s in self.params.stop), default=0)

    @property
    def stable(self) -> int:
        """Characters that no later token can take back."""
        return len(self.text) if self.stopped else max(len(self.text) - max(self._longest - 1, 0), 0)

    def push(self, tokens: tuple[int, ...]) -> int:
        """Take tokens one by one, dropping those behind a stop string; how many were kept."""
        for kept, token in enumerate(tokens):
            if self.stopped is not None:
                return kept
            self.ids.append(token)
            self._extend(self._detokenizer.push([token]))
        return len(tokens)

    def _extend(self, piece: str) -> None:
        before = len(self.text)
        self.text += piece
        if len(self.ids) < self.params.min_tokens or not piece:
            return
        # one that ended before this token was too early to count
        begins = [(max(before - len(s) + 1, 0), s) for s in self.params.stop]
        hits = [(at, s) for begin, s in begins if (at := self.text.find(s, begin)) >= 0]
        if hits:
            at, self.stopped = min(hits)
            end = at + len(self.stopped) if self.params.include_stop_str_in_output else at
            self.text = self.text[:end]

    def finish(self) -> None:
        """End of the request: an unfinished character becomes U+FFFD."""
        if self.stopped is None:
            rest = self._detokenizer.finish()
            self.text += rest


class Answer:
    """One sample of one request, from its first token to its Completion."""

    def __init__(
        self, seq: Sequence, tokenizer: Tokenizer | None, clock: Callable[[], float] = time.perf_counter
    ):
        self.seq, self.params, self._clock = seq, seq.params, clock
        self.stream = TextStream(tokenizer, seq.params) if tokenizer is not None else None
        self.prefix = tokenizer.decode(seq.prompt) if tokenizer is not None and seq.params.echo else ""
        self.ids: list[int] = []
        self.scores: list[TokenScore] = []
        self.origins: list[Origin] = []
        self.finish: FinishReason | None = None
        self.error = ""
        self.started = self.ended = clock()
        self.first_token: float | None = None
        self._sent = 0

    @property
    def request_id(self) -> int:
        """The engine's id of this sample."""
        return self.seq.request_id

    def take(self, update: Update) -> None:
        """Add what a commit brought; sets ``finish`` when the answer has ended, by whatever."""
        self.ended = self._clock()
        tokens = update.tokens if self.params.max_tokens else ()
        if tokens and self.first_token is None:
            self.first_token = self.ended
        kept = len(tokens)
        if self.stream is not None:
            kept = self.stream.push(tokens)
            if self.stream.stopped is not None:
                self.finish = FinishReason.STOP
        self.ids.extend(tokens[:kept])
        self.scores.extend(update.scores[:kept])
        self.origins.extend(update.origins[:kept])
        if self.finish is None:
            self.finish, self.error = update.finish, update.error
        if self.finish is FinishReason.STOP and not self.params.max_tokens:
            self.finish = FinishReason.LENGTH  # it was the token that scoring samples and drops
        if self.finish is not None and self.stream is not None:
            self.stream.finish()

    def delta(self) -> str:
        """Text that became certain since the last call."""
        if self.stream is None:
            return ""
        text = self.prefix + self.stream.text
        end = len(text) if self.finish is not None else len(self.prefix) + self.stream.stable
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def completion(self) -> Completion:
        """The finished answer."""
        assert self.finish is not None, "the answer has not ended"
        seq, p = self.seq, self.params
        seconds = max(self.ended - self.started, 1e-9)
        return Completion(
            text=self.prefix + (self.stream.text if self.stream is not None else ""),
            token_ids=(*(seq.prompt if p.echo else ()), *self.ids),
            finish_reason=self.finish.value,
            usage={
                "prompt_tokens": len(seq.prompt),
                "completion_tokens": len(self.ids),
                "total_tokens": len(seq.prompt) + len(self.ids),
                "cached_tokens": min(seq.reused, len(seq.prompt)),
            },
            seed=seq.seed,
            stats={
                "steps": seq.steps,
                "tokens_per_second": len(self.ids) / seconds,
                "seconds": seconds,
                "queue_seconds": (seq.admitted or self.ended) - seq.arrived,
                "first_token_seconds": (self.first_token or self.ended) - self.started,
                "preemptions": seq.preemptions,
                "drafted": seq.drafted,
                "verified": sum(seq.verified_at),
                "accepted": sum(seq.accepted_at),
                "drafts_cut": seq.guide.cut if seq.guide is not None else 0,
                "verified_at": list(seq.verified_at),
                "accepted_at": list(seq.accepted_at),
                "tokens_per_step": len(self.ids) / max(seq.steps, 1),
            },
            index=seq.sample,
            stop_reason=self._stop_reason(),
            logprobs=tuple(_cut(s, p.logprobs) for s in self.scores) if p.logprobs is not None else None,
            prompt_logprobs=self._prompt_scores(),
            error=self.error,
        )

    def _stop_reason(self) -> str | int | None:
        if self.stream is not None and self.stream.stopped is not None:
            return self.stream.stopped
        if self.finish is FinishReason.STOP and self.ids and self.ids[-1] in self.params.stop_token_ids:
            return self.ids[-1]
        return None

    def _prompt_scores(self) -> tuple[TokenScore | None, ...] | None:
        n = self.params.prompt_logprobs
        if n is None:
            return None
        found = self.seq.prompt_scores
        return tuple(_cut(found[p], n) if p in found else None for p in range(len(self.seq.prompt)))


def _cut(score: TokenScore, n: int) -> TokenScore:
    """The request's own number of alternatives; the step computed the most anyone asked for."""
    return TokenScore(score.logprob, score.rank, score.top[:n])
