"""Requests to guides: compiles grammars with llguidance, which is an optional extra.

Everything that knows the library is here. Tokens are matched by their bytes;
protocol tokens (think tags, roles, DSML) match no text, a grammar names them
by id as ``<[id]>``.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import numpy as np

from firesteel.config import ParameterError, SamplingParams
from firesteel.engine.guide import Factory, Guide, Matcher, Thinking, Vocabulary, Words
from firesteel.engine.limited import Background
from firesteel.models.deepseek_v4 import chat_strings as strings
from firesteel.structured import StructuredOutputs, lark_text
from firesteel.tokenizer import Tokenizer

KEPT = 64  # compiled grammars
COMPILING = 2  # grammars compiled at once
REFUSED_SECONDS = 60.0  # for which a grammar whose masks took too long is not tried again
EXTRA = "pip install 'firesteel[structured]'"


class Grammars:
    """Compiles and keeps grammars over one tokenizer; raises ParameterError for what cannot be compiled.

    Safe from any thread: compiling and masks let go of the interpreter.
    """

    def __init__(self, library: Any, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]):
        self._library, self._words = library, -(-vocab_size // 32)
        wrapped = library.TokenizerWrapper(_Bytes(tokenizer, vocab_size, end_ids))
        self._tokens = library.LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=list(end_ids))
        # errors reach clients: no dump of the parser's inside
        self._limits = library.LLParserLimits(verbose_errors=False)
        self._kept: OrderedDict[StructuredOutputs, Future[Any]] = OrderedDict()
        self._refused: dict[StructuredOutputs, tuple[float, str]] = {}  # until when, and why
        self._lock = threading.Lock()

    def matcher(self, wish: StructuredOutputs) -> Matcher:
        """A fresh matcher at the beginning of the answer."""
        return _Matcher(self._compiled(wish).deep_copy(), self._words)

    def ready(self, wish: StructuredOutputs) -> bool:
        """Whether a matcher can be had without compiling, or is refused at once."""
        with self._lock:
            kept = self._kept.get(wish)
            return self._refusal(wish) != "" or (kept is not None and kept.done())

    def _refusal(self, wish: StructuredOutputs) -> str:
        until, why = self._refused.get(wish, (0.0, ""))
        return why if time.monotonic() < until else ""

    def refuse(self, wish: StructuredOutputs, why: str) -> None:
        """Take no more requests with this grammar for ``REFUSED_SECONDS``."""
        now = time.monotonic()
        with self._lock:
            self._refused = {w: known for w, known in self._refused.items() if known[0] > now}
            self._refused[wish] = (now + REFUSED_SECONDS, why)

    def _compiled(self, wish: StructuredOutputs) -> Any:
        """Compiled once, by whoever comes first; the others wait for that."""
        with self._lock:
            if why := self._refusal(wish):
                raise wish.wrong(wish.kind, why)
            kept = self._kept.get(wish)
            first = kept is None
            if kept is None:
                kept = self._kept[wish] = Future()
            self._kept.move_to_end(wish)
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        if first:
            try:
                kept.set_result(self._compile(wish))
            except BaseException as err:
                kept.set_exception(err)
                with self._lock:
                    self._kept.pop(wish, None)
        return kept.result()

    def _compile(self, wish: StructuredOutputs) -> Any:
        make = self._library.LLMatcher
        try:
            if wish.kind == "regex":
                source = make.grammar_from_regex(wish.regex)
            elif wish.kind == "choice":
                source = make.grammar_from_lark("start: " + " | ".join(map(lark_text, wish.choice)))
            elif wish.kind == "grammar":
                source = make.grammar_from_lark(wish.grammar)
            else:
                schema = wish.json if wish.kind == "json" else '{"type": "object"}'
                source = make.grammar_from_json_schema(schema, overrides=wish.json_options)
        except ValueError as err:
            raise wish.wrong(wish.kind, str(err)) from err
        compiled = make(self._tokens, source, log_level=0, limits=self._limits)
        if not compiled.is_error():
            compiled.compute_bitmask()  # the first is the slowest by far; copies inherit what it found
        if compiled.is_error():
            raise wish.wrong(wish.kind, _first_lines(compiled.get_error()))
        return compiled


def _first_lines(error: str) -> str:
    return " ".join(error.split())[:500]


class _Bytes:
    """What the library wants to know of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]):
        self.eos_token_id, self.bos_token_id = end_ids[0], None
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        # a token without bytes can spell nothing: never allowed
        empty = (i for i, spelling in enumerate(self.tokens) if not spelling)
        self.special_token_ids = sorted({*tokenizer.added_ids, *end_ids, *empty})
        self._tokenizer = tokenizer
        added = {self.tokens[i].decode("utf-8", "replace") for i in tokenizer.added_ids if i < vocab_size}
        self._names = re.compile(
            "|".join(re.escape(name) for name in sorted(added) if len(name) > 1) or "(?!)"
        )

    def __call__(self, text: bytes | str) -> list[int]:
        """Ids of text that a grammar forces; a protocol token's name in it stays text, so it is cut."""
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        cuts = [0, *(m.start() + 1 for m in self._names.finditer(text)), len(text)]
        return [i for a, b in pairwise(cuts) for i in self._piece(text[a:b])]

    def _piece(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text)
        if self._tokenizer.added_ids.isdisjoint(ids):
            return ids
        return [i for char in text for i in self._tokenizer.encode(char)]  # names that overlap


class _Matcher:
    """``Matcher`` over the library's."""

    def __init__(self, inner: Any, words: int):
        self._inner, self._words = inner, words
        self._error = ""

    def mask(self) -> Words:
        words = np.frombuffer(self._inner.compute_bitmask(), dtype=np.uint32)[: self._words]
        if not self._healthy():  # its state is lost: nothing may be sampled, which fails the request
            return np.zeros(self._words, dtype=np.uint32)
        return words

    def take(self, token: int) -> bool:
        taken: int = self._inner.try_consume_tokens([token])
        return self._healthy() and taken == 1

    def rollback(self, count: int) -> None:
        self._inner.rollback(count)
        self._healthy()

    def _healthy(self) -> bool:
        if not self._error and self._inner.is_error():
            self._error = _first_lines(self._inner.get_error()) or "the grammar's matcher failed"
        return not self._error

    @property
    def error(self) -> str:
        return self._error


class Guides:
    """Makes the guides of one engine's requests.

    compile_seconds: what a grammar may take to compile and to give its first mask.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        end_ids: Sequence[int],
        where: object,
        compile_seconds: float = 10.0,
    ):
        self.tokenizer, self.end_ids, self.where = tokenizer, tuple(end_ids), where
        self.compiling = Background(compile_seconds, COMPILING, "firesteel-grammars")
        self.vocabulary = Vocabulary(vocab_size)
        self.grammars: Grammars | None = None
        self._open = self._close = self._dsml = -1
        if tokenizer is None:
            self.note = "structured output: not available: no tokenizer.json"
            return
        ids = [tokenizer.id_of(t) if tokenizer.has(t) else -1 for t in (strings.THINK, strings.END_THINK)]
        self._open, self._close = ids
        self._dsml = tokenizer.id_of(strings.DSML) if tokenizer.has(strings.DSML) else -1
        try:
            import llguidance
        except ModuleNotFoundError:
            self.note = f"structured output: not available: llguidance is not installed; {EXTRA}"
            return
        self.grammars = Grammars(llguidance, tokenizer, vocab_size, end_ids)
        self.note = f"structured output: llguidance {llguidance.__version__}"

    def begin(self, prompt: Sequence[int], params: SamplingParams) -> Future[Factory] | None:
        """What will make a guide per sample, compiled beside the loop; None if the request needs none.

        The future raises ParameterError for a grammar that cannot be compiled,
        or not in time. Raises ParameterError for all else that is wrong, and
        TooMany while overdue grammars still run.
        """
        wish = params.structured_outputs
        if wish is None and params.thinking_token_budget is None:
            return None
        self._thinking(prompt, params)  # what is wrong without compiling is refused now
        if wish is not None and not self._grammars(wish).ready(wish):
            return self.compiling.begin(lambda: self._made(prompt, params), lambda: self._late(wish))
        done: Future[Factory] = Future()
        try:
            done.set_result(self._made(prompt, params))
        except ParameterError as err:
            done.set_exception(err)
        return done

    def factory(self, prompt: Sequence[int], params: SamplingParams) -> Factory | None:
        """The same, waited for."""
        made = self.begin(prompt, params)
        return None if made is None else made.result()

    def _late(self, wish: StructuredOutputs) -> ParameterError:
        limit = f"structured_compile_seconds={self.compiling.seconds:g}"
        return wish.wrong(wish.kind, f"compiling took longer than {limit}; simplify it or raise the limit")

    def _made(self, prompt: Sequence[int], params: SamplingParams) -> Factory:
        wish, thinking, start = params.structured_outputs, self._thinking(prompt, params), len(prompt)
        if wish is None:
            return lambda ends: Guide(self.vocabulary, start, thinking, None, ends)
        grammars = self._grammars(wish)
        fresh = [grammars.matcher(wish) for _ in range(params.n)]

        def make(ends: Iterable[int]) -> Guide:
            """One per sample."""
            return Guide(
                self.vocabulary, start, thinking, fresh.pop(), ends, lambda why: grammars.refuse(wish, why)
            )

        return make

    def _grammars(self, wish: StructuredOutputs) -> Grammars:
        if self.tokenizer is None:
            raise wish.wrong("", f"{self.where} has no tokenizer.json; leave it out")
        if self.grammars is None:
            raise wish.wrong("", f"llguidance is not installed; {EXTRA}")
        return self.grammars

    def _thinking(self, prompt: Sequence[int], params: SamplingParams) -> Thinking | None:
        """The reasoning part, if this model and request have one."""
        budget, inside = params.thinking_token_budget, params.thinking
        if self._close < 0:
            if budget is not None or inside:
                name = "thinking_token_budget" if budget is not None else "thinking"
                raise ParameterError(f"{name}: {self.where} has no token {strings.END_THINK}; leave it out")
            return None
        if inside is None:
            newest = next((t for t in reversed(prompt) if t in (self._open, self._close)), self._close)
            inside = newest == self._open
        allowed = params.allowed_token_ids
        if budget is not None and allowed is not None and self._close not in allowed:
            raise ParameterError(
                f"thinking_token_budget: allowed_token_ids lacks {strings.END_THINK} ({self._close}); add it"
            )
        banned: tuple[int, ...] = ()
        if params.structured_outputs is not None:
            banned = tuple(sorted({*self.end_ids, *({self._dsml} - {-1})}))
        return Thinking(self._open, self._close, inside, budget, banned)
