"""Token ids to text, one request: detokenising, stop strings, where an answer ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from firesteel.tokenizer import Detokenizer, Tokenizer


@dataclass
class TextStream:
    """Grows text from ids; ``ids`` and ``text`` always end at the same token.

    A stop string may begin in one token and end in another, so text that could
    still turn out to be the start of one is held back.
    """

    tokenizer: Tokenizer
    stop: tuple[str, ...] = ()
    ids: list[int] = field(default_factory=list)
    text: str = ""
    stopped: bool = False

    def __post_init__(self) -> None:
        self._detokenizer: Detokenizer = self.tokenizer.detokenizer()
        self._longest = max((len(s) for s in self.stop), default=0)

    def push(self, tokens: tuple[int, ...]) -> None:
        """Take tokens one by one; those behind a stop string are dropped."""
        for token in tokens:
            if self.stopped:
                return
            self.ids.append(token)
            piece = self._detokenizer.push([token])
            if piece:
                self._extend(piece)

    def _extend(self, piece: str) -> None:
        begin = max(len(self.text) - self._longest + 1, 0)
        self.text += piece
        hits = [at for s in self.stop if (at := self.text.find(s, begin)) >= 0]
        if hits:
            self.text, self.stopped = self.text[: min(hits)], True

    def finish(self) -> None:
        """End of the request: an unfinished character becomes U+FFFD."""
        if not self.stopped:
            rest = self._detokenizer.finish()
            if rest:
                self._extend(rest)
