"""From pieces to choices: what one sample looks like in a response and in a stream's chunks.

A choice takes pieces and says what to send; put together, what it sends in a
stream is what its ``final`` holds.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from firesteel.serve.chat import ChatPrompt
from firesteel.serve.logprobs import TokenTable, chat_entries, prompt_entries
from firesteel.serve.messages import End, Piece, Score
from firesteel.serve.parsing import Delta, Message
from firesteel.serve.protocol import Asked, ChatRequest, CompletionRequest
from firesteel.tokenizer import Tokenizer


class TokenSplitter:
    """Cuts pieces of several tokens into pieces of one, each with the text that is certain by then."""

    def __init__(self, tokenizer: Tokenizer | None, lead: int) -> None:
        self._text = tokenizer.detokenizer() if tokenizer is not None else None
        self._ends = lead  # characters up to the newest token; ``lead`` of an echoed prompt
        self._shown = 0
        self._waiting = ""

    def split(self, piece: Piece) -> list[Piece]:
        """At least one piece; the last carries what remains."""
        self._waiting += piece.text
        out = []
        for at, token in enumerate(piece.token_ids):
            if self._text is not None:
                self._ends += len(self._text.push([token]))
            text = self._cut(self._ends)
            one = slice(at, at + 1)
            out.append(Piece(piece.index, text, [token], piece.scores[one], origins=piece.origins[one]))
        if not out:
            out.append(Piece(piece.index, self._cut(self._ends), [], []))
        if piece.end is not None:
            out[-1] = replace(out[-1], text=out[-1].text + self._cut(None), end=piece.end)
        return out

    def _cut(self, end: int | None) -> str:
        size = len(self._waiting) if end is None else max(end - self._shown, 0)
        text, self._waiting = self._waiting[:size], self._waiting[size:]
        self._shown += len(text)
        return text


class Choice(ABC):
    """What both kinds of choices share."""

    def __init__(self, index: int, prompt: Sequence[int], asked: Asked, tokenizer: Tokenizer | None) -> None:
        self.index, self.prompt, self.asked, self.tokenizer = index, prompt, asked, tokenizer
        self.ids: list[int] = []
        self.end: End | None = None
        self._splitter: TokenSplitter | None = None
        if asked.one_token_per_chunk:
            self._splitter = TokenSplitter(tokenizer, self._lead())
        self._told: list[dict[str, Any]] = []  # of each token, if that was asked for
        self._text = tokenizer.detokenizer() if tokenizer is not None and asked.tells_tokens else None

    def _lead(self) -> int:
        return 0

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        """The choice objects of the chunks that this piece makes."""
        pieces = self._splitter.split(piece) if self._splitter is not None else [piece]
        return [choice for part in pieces for choice in self._take(part)]

    @abstractmethod
    def _take(self, piece: Piece) -> list[dict[str, Any]]:
        """The choice objects of one part of a piece."""

    def _note(self, piece: Piece) -> None:
        self.ids.extend(piece.token_ids)
        if self.asked.tells_tokens:
            self._told.extend(map(self._tell, piece.token_ids, piece.origins))
        if piece.end is not None:
            self.end = piece.end

    def _tell(self, token: int, origin: list[int]) -> dict[str, Any]:
        """``text``: what the token added; empty where it leaves a character unfinished."""
        step, drafted, verified = origin
        text = self._text.push([token]) if self._text is not None else None
        return {"id": token, "text": text, "step": step, "drafted": bool(drafted), "verified": verified}

    def _chunk_extras(self, piece: Piece) -> dict[str, Any]:
        """What a chunk says of its tokens."""
        out: dict[str, Any] = {}
        if self.asked.return_token_ids:
            out["token_ids"] = piece.token_ids
        if self.asked.tells_tokens:
            out["firesteel"] = {"tokens": self._told[len(self._told) - len(piece.token_ids) :]}
        return out

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word for how it ended; None while it runs."""
        return self.end.finish_reason if self.end is not None else None

    def _extras(self) -> dict[str, Any]:
        """What stands beside the finish reason; the seed is always told."""
        assert self.end is not None, "the sample has not ended"
        out: dict[str, Any] = {"stop_reason": self.end.stop_reason, "seed": self.end.seed}
        if self.asked.return_stats:
            out["stats"] = self.end.stats
        return out

    def _final_extras(self) -> dict[str, Any]:
        """``_extras`` and, in a response that is no stream, everything asked for about tokens."""
        assert self.end is not None, "the sample has not ended"
        out = self._extras()
        if self.asked.return_token_ids:
            out["token_ids"], out["prompt_token_ids"] = self.ids, list(self.prompt)
        if self.asked.tells_tokens:
            out["firesteel"] = {"tokens": self._told}
        if self.asked.prompt_logprobs is not None and self.end.prompt_scores is not None:
            out["prompt_logprobs"] = prompt_entries(self.tokenizer, self.prompt, self.end.prompt_scores)
        return out


class CompletionChoice(Choice):
    """A choice of ``/v1/completions``."""

    asked: CompletionRequest

    def __init__(
        self, index: int, prompt: Sequence[int], asked: CompletionRequest, tokenizer: Tokenizer | None
    ) -> None:
        super().__init__(index, prompt, asked, tokenizer)
        self.text = ""
        self._scores: list[Score] = []
        self._table = TokenTable(tokenizer)

    def _lead(self) -> int:
        shown = self.asked.echo and self.tokenizer is not None
        return len(self.tokenizer.decode(self.prompt)) if shown and self.tokenizer is not None else 0

    def _take(self, piece: Piece) -> list[dict[str, Any]]:
        self._note(piece)
        self.text += piece.text
        self._scores += piece.scores
        if not (piece.text or piece.token_ids or piece.end):
            return []
        out: dict[str, Any] = {"index": self.index, "text": piece.text, "logprobs": None}
        if self.asked.logprobs is not None and self.asked.stream:
            out["logprobs"] = self._table.take(piece.token_ids, piece.scores)
        out["finish_reason"] = self.finish_reason
        out |= self._chunk_extras(piece)
        return [{**out, **(self._extras() if piece.end is not None else {})}]

    def final(self) -> dict[str, Any]:
        """The whole choice."""
        assert self.end is not None, "the sample has not ended"
        logprobs = None
        if self.asked.logprobs is not None:
            if self.asked.echo and self.end.prompt_scores is not None:
                self._table.take(self.prompt, self.end.prompt_scores)
            self._table.take(self.ids, self._scores)
            logprobs = self._table.table
        head = {"index": self.index, "text": self.text, "logprobs": logprobs}
        return {**head, "finish_reason": self.finish_reason, **self._final_extras()}


class ChatChoice(Choice):
    """A choice of ``/v1/chat/completions``."""

    asked: ChatRequest

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        asked: ChatRequest,
        tokenizer: Tokenizer | None,
        chat: ChatPrompt,
    ) -> None:
        super().__init__(index, prompt, asked, tokenizer)
        self._parser = chat.parser()
        self.message = Message()
        self.call_ids: list[str] = []
        self._scores: list[Score] = []
        self._opened = False

    @property
    def finish_reason(self) -> str | None:
        """``tool_calls`` if it called and was not cut off."""
        reason = super().finish_reason
        return "tool_calls" if reason == "stop" and self.message.calls else reason

    def _take(self, piece: Piece) -> list[dict[str, Any]]:
        self._note(piece)
        deltas = self._parser.feed(piece.text)
        if piece.end is not None:
            deltas += self._parser.finish(truncated=piece.end.finish_reason != "stop")
        self.message.take(deltas)
        if not self.asked.stream:
            self._scores += piece.scores
            return []
        return self._chunks(piece, [p for d in deltas if (p := self._part(d)) is not None])

    def _chunks(self, piece: Piece, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The first carries the role, log-probabilities and ids; the last how it ended."""
        if not self._opened:
            parts = [{"role": "assistant", "content": ""}, *parts]
            self._opened = True
        asked = self.asked
        carries = asked.logprobs or asked.return_token_ids or asked.one_token_per_chunk or asked.tells_tokens
        if piece.end is not None or (carries and piece.token_ids and not parts):
            parts.append({})
        out: list[dict[str, Any]] = [
            {"index": self.index, "delta": part, "logprobs": None, "finish_reason": None} for part in parts
        ]
        if out and piece.token_ids:
            if self.asked.logprobs:
                out[0]["logprobs"] = {"content": chat_entries(self.tokenizer, piece.token_ids, piece.scores)}
            out[0] |= self._chunk_extras(piece)
        if piece.end is not None:
            out[-1].update(finish_reason=self.finish_reason, **self._extras())
        return out

    def _part(self, delta: Delta) -> dict[str, Any] | None:
        """A delta in OpenAI's words."""
        if delta.kind == "reasoning":
            return {"reasoning": delta.text} if self.asked.include_reasoning is not False else None
        if delta.kind == "content":
            return {"content": delta.text}
        if delta.kind == "call":
            call = self._call(delta.index, delta.text, "")
            return {"tool_calls": [{"index": delta.index, **call}]}
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}

    def _call(self, at: int, name: str, arguments: str) -> dict[str, Any]:
        while len(self.call_ids) <= at:
            self.call_ids.append(f"call_{secrets.token_hex(12)}")
        function = {"name": name, "arguments": arguments}
        return {"id": self.call_ids[at], "type": "function", "function": function}

    def final(self) -> dict[str, Any]:
        """The whole choice."""
        m = self.message
        calls = [self._call(at, name, arguments) for at, (name, arguments) in enumerate(m.calls)]
        message: dict[str, Any] = {"role": "assistant", "content": m.content or (None if calls else "")}
        if m.reasoning and self.asked.include_reasoning is not False:
            message["reasoning"] = m.reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = None
        if self.asked.logprobs:
            logprobs = {"content": chat_entries(self.tokenizer, self.ids, self._scores)}
        return {
            "index": self.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
            **self._final_extras(),
        }

    def reasoning_tokens(self, end_think: int | None, thinking: bool) -> int:
        """Tokens up to the end of the reasoning, its tag included."""
        if not thinking:
            return 0
        return self.ids.index(end_think) + 1 if end_think in self.ids else len(self.ids)


def usage_of(
    choices: Sequence[Choice], samples: int, end_think: int | None, thinking: bool
) -> dict[str, Any]:
    """Usage so far: each prompt counts once, whatever its number of ``samples``."""
    prompts = [c for c in choices if c.index % samples == 0]
    prompt = sum(len(c.prompt) for c in prompts)
    made = sum(len(c.ids) for c in choices)
    cached = sum(c.end.usage["cached_tokens"] for c in prompts if c.end is not None)
    reasoning = sum(c.reasoning_tokens(end_think, thinking) for c in choices if isinstance(c, ChatChoice))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
