"""Log-probabilities in OpenAI's two forms: lists (completions) and entries (chats)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from firesteel.serve.messages import Score
from firesteel.tokenizer import Detokenizer, Tokenizer

LOWEST = -9999.0  # JSON has no -infinity


def _value(logprob: float) -> float:
    return max(logprob, LOWEST)


def _bytes(tokenizer: Tokenizer | None, token: int) -> bytes:
    return tokenizer.token_bytes(token) if tokenizer is not None else f"token_id:{token}".encode()


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """A token as a key: its text, or ``bytes:\\xe2...`` if it is no text alone, so that none collide."""
    data = _bytes(tokenizer, token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def _entry(tokenizer: Tokenizer | None, token: int, logprob: float) -> dict[str, Any]:
    data = _bytes(tokenizer, token)
    return {"token": data.decode("utf-8", "replace"), "logprob": _value(logprob), "bytes": list(data)}


def chat_entries(
    tokenizer: Tokenizer | None, ids: Sequence[int], scores: Sequence[Score]
) -> list[dict[str, Any]]:
    """``logprobs.content`` of a chat: one entry per token, reasoning and markup included."""
    return [
        {
            **_entry(tokenizer, token, score[0]),
            "top_logprobs": [_entry(tokenizer, i, p) for i, p in score[2]],
        }
        for token, score in zip(ids, scores, strict=True)
    ]


@dataclass
class TokenTable:
    """``logprobs`` of a completion, growing. ``take`` returns the new part alone."""

    tokenizer: Tokenizer | None
    offset: int = 0  # characters before the next token
    table: dict[str, list[Any]] = field(
        default_factory=lambda: {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    )

    def __post_init__(self) -> None:
        self._text: Detokenizer | None = self.tokenizer.detokenizer() if self.tokenizer is not None else None

    def take(self, ids: Sequence[int], scores: Sequence[Score | None]) -> dict[str, list[Any]]:
        """Add tokens; a score of None is the first token of a prompt."""
        new: dict[str, list[Any]] = {name: [] for name in self.table}
        for token, score in zip(ids, scores, strict=True):
            new["tokens"].append(token_text(self.tokenizer, token))
            new["token_logprobs"].append(_value(score[0]) if score is not None else None)
            new["top_logprobs"].append(self._top(token, score) if score is not None else None)
            new["text_offset"].append(self.offset)
            if self._text is not None:
                self.offset += len(self._text.push([token]))
        for name, values in new.items():
            self.table[name].extend(values)
        return new

    def _top(self, token: int, score: Score) -> dict[str, float]:
        """The best by their text, and the token itself."""
        top = {token_text(self.tokenizer, i): _value(p) for i, p in score[2]}
        top.setdefault(token_text(self.tokenizer, token), _value(score[0]))
        return top


def prompt_entries(
    tokenizer: Tokenizer | None, ids: Sequence[int], scores: Sequence[Score | None]
) -> list[dict[str, Any] | None]:
    """``prompt_logprobs``: per position a map from token id to its log-probability, rank and text."""
    out: list[dict[str, Any] | None] = []
    for token, score in zip(ids, scores, strict=True):
        if score is None:
            out.append(None)
            continue
        ranked = [(i, p, rank) for rank, (i, p) in enumerate(score[2], start=1)]
        if all(i != token for i, _, _ in ranked):
            ranked.append((token, score[0], score[1] + 1))
        out.append(
            {
                str(i): {"logprob": _value(p), "rank": rank, "decoded_token": token_text(tokenizer, i)}
                for i, p, rank in ranked
            }
        )
    return out
