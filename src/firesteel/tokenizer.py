"""Text to token ids and back, for byte-level BPE tokenizers such as DeepSeek-V4's.

Every token of such a tokenizer stands for a fixed run of bytes, so decoding is
a table look-up and streaming needs no second pass over the text: a token's
bytes are appended, whole characters come out, an unfinished one waits.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Inner
from tokenizers import models as inner_models

from firesteel.models.deepseek_v4 import chat_strings as strings

FIRST_BYTE = 3  # id of byte 0 in ``byte_tokenizer``; the ids before it are BOS, EOS and pad


class TokenizerError(ValueError):
    """A tokenizer that cannot be used, or text that it cannot encode; says what to change."""


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in a byte-level vocabulary, as character -> byte.

    Visible Latin-1 characters stand for themselves; the other 68 bytes get the
    characters from U+0100 on, in order.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(b): b for b in shown} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


ALPHABET = _byte_alphabet()


class Tokenizer:
    """A checkpoint's ``tokenizer.json``, without any template or hidden token.

    ``encode`` adds nothing: the encoded chat holds its own BOS. ``stop_token_ids``
    are the ids that end an answer by default; ``special_ids`` those that
    ``skip_special`` hides (BOS, EOS, pad and placeholders in V4; the think tags,
    DSML and role tokens are text that a parser reads).
    """

    def __init__(self, inner: Inner, stop_token_ids: Sequence[int] = (), where: str = "tokenizer") -> None:
        if not isinstance(inner.decoder, decoders.ByteLevel):
            raise TokenizerError(
                f"{where}: not a byte-level tokenizer; use the tokenizer.json of a V4 checkpoint"
            )
        self._inner = inner
        self._where = where
        added = inner.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._bytes: dict[int, bytes] = {}
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        shrinks = 4 if inner.normalizer is not None else 1  # composed characters
        self._longest = shrinks * max(map(len, inner.get_vocab(with_added_tokens=True)))
        self.size = max(inner.get_vocab(with_added_tokens=True).values()) + 1
        self.stop_token_ids = tuple(dict.fromkeys(stop_token_ids))

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a checkpoint folder, or a ``tokenizer.json`` and what lies beside it.

        Stop ids are the ``eos_token_id`` (one or several) of
        ``generation_config.json`` and of ``config.json``. Raises TokenizerError.
        """
        path = Path(path)
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise TokenizerError(f"{file}: no such file; point at a folder that holds tokenizer.json")
        try:
            inner = Inner.from_file(str(file))
        except Exception as err:  # the Rust library raises bare Exception
            raise TokenizerError(f"{file}: not a tokenizer.json ({err}); copy it again") from err
        stops: list[int] = []
        for name in ("generation_config.json", "config.json"):
            stops += _eos_ids(file.parent / name)
        return cls(inner, stops, str(file))

    def save(self, path: str | Path) -> None:
        """Write ``tokenizer.json`` into an existing folder."""
        self._inner.save(str(Path(path) / "tokenizer.json"))

    # ---- text -> ids ------------------------------------------------------
    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; protocol tokens written in it become their ids. Adds nothing."""
        try:  # the batch call, because only it lets other threads run meanwhile
            ids: list[int] = self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except (UnicodeEncodeError, TypeError) as err:
            raise TokenizerError(f"not encodable text ({err}); send text without lone surrogates") from err
        except BaseException as err:
            if type(err).__name__ != "PanicException":  # the library's own, which is no Exception
                raise
            raise TokenizerError(f"the tokenizer gave up on this text ({err}); send a shorter one") from err
        return ids

    @property
    def longest(self) -> int:
        """Characters that one token can stand for at most."""
        return self._longest

    def id_of(self, token: str) -> int:
        """Id of a token by its exact string, e.g. ``<think>``; raises TokenizerError if it is no token."""
        index: int | None = self._inner.token_to_id(token)
        if index is None:
            raise TokenizerError(f"{self._where}: no token {token!r}; use the tokenizer of a V4 checkpoint")
        return index

    def has(self, token: str) -> bool:
        """Whether this exact string is one token."""
        return self._inner.token_to_id(token) is not None

    @property
    def added_ids(self) -> frozenset[int]:
        """Tokens outside the byte-level vocabulary: BOS, EOS, think tags, roles, placeholders, ..."""
        return self._added

    # ---- ids -> text ------------------------------------------------------
    def token_bytes(self, index: int) -> bytes:
        """Bytes a token stands for; empty for ids beyond the vocabulary (padding rows of a model)."""
        known = self._bytes.get(index)
        if known is None:
            token = self._inner.id_to_token(index) if 0 <= index < self.size else None
            known = self._bytes[index] = self._spell(index, token)
        return known

    def _spell(self, index: int, token: str | None) -> bytes:
        if token is None:
            return b""
        if index in self._added or any(char not in ALPHABET for char in token):
            return token.encode()
        return bytes(ALPHABET[char] for char in token)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ``ids``; bytes that form no character become U+FFFD."""
        hidden = self.special_ids if skip_special else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in hidden).decode("utf-8", "replace")

    def detokenizer(self, skip_special: bool = True) -> Detokenizer:
        """A fresh incremental decoder for one stream of ids."""
        return Detokenizer(self, skip_special)

    # ---- fit --------------------------------------------------------------
    def check(
        self, vocab_size: int, bos_token_id: int | None = None, eos_token_id: int | None = None
    ) -> None:
        """Raise TokenizerError unless a model with these numbers can be driven by this tokenizer."""
        if self.size > vocab_size:
            raise TokenizerError(
                f"{self._where}: ids go up to {self.size - 1}, the model's vocab_size is {vocab_size}; "
                "tokenizer and weights are of different models"
            )
        for index in self.stop_token_ids:
            if not 0 <= index < vocab_size:
                raise TokenizerError(
                    f"{self._where}: stop id {index} is outside the vocabulary of {vocab_size}; "
                    "correct eos_token_id in config.json or generation_config.json"
                )
        for field, found, token in (
            ("bos_token_id", bos_token_id, strings.BOS),
            ("eos_token_id", eos_token_id, strings.EOS),
        ):
            if found is not None and self.has(token) and self.id_of(token) != found:
                raise TokenizerError(
                    f"{self._where}: {token} has id {self.id_of(token)}, config.json says {field}={found}; "
                    "tokenizer and config are of different models"
                )


class Detokenizer:
    """Text of a growing list of ids, piece by piece.

    The pieces joined equal ``Tokenizer.decode`` of all ids: a character whose
    bytes are not complete yet is held back until they are, or until
    ``finish`` shows what is left as U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """Take the next ids; returns the text that became certain (may be empty)."""
        data = b"".join(self._tokenizer.token_bytes(i) for i in ids if i not in self._hidden)
        return self._decoder.decode(data)

    @property
    def held(self) -> int:
        """Bytes of the unfinished character at the end, 0 to 3."""
        return len(self._decoder.getstate()[0])

    def finish(self) -> str:
        """The rest at the end of the stream; the object can then take a new stream."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def _eos_ids(file: Path) -> list[int]:
    """``eos_token_id`` of a JSON file as a list; an absent file, field or null gives none."""
    if not file.is_file():
        return []
    try:
        raw: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as err:
        raise TokenizerError(f"{file}: not valid JSON ({err}); copy it again") from err
    value = raw.get("eos_token_id") if isinstance(raw, dict) else None
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise TokenizerError(f"{file}: eos_token_id={value!r}; expected one id >= 0 or a list of them")
    return ids


# ---- a tokenizer without training, for random checkpoints --------------------
def protocol_tokens() -> tuple[str, ...]:
    """V4's protocol tokens other than BOS, EOS and pad, in the order of their official ids."""
    return (
        strings.SYSTEM,
        strings.FIM_HOLE,
        strings.FIM_BEGIN,
        strings.FIM_END,
        strings.USER,
        strings.ASSISTANT,
        strings.THINK,
        strings.END_THINK,
        strings.DSML,
        strings.LATEST_REMINDER,
        *strings.TASKS.values(),
    )


def byte_tokenizer(vocab_size: int = 512) -> Tokenizer:
    """One token per byte, V4's protocol tokens, and placeholders up to ``vocab_size``.

    Ids: BOS 0, EOS 1, pad 2, byte b at 3 + b, then ``protocol_tokens()`` from
    259 on (the drafter's noise token ``<｜System｜>`` first), then placeholders.
    Needs no training and no file, and every text round-trips: what a random
    checkpoint is driven with.
    """
    tokens = [strings.BOS, strings.EOS, strings.PAD]
    bytes_at = len(tokens)
    assert bytes_at == FIRST_BYTE
    of_byte = {byte: char for char, byte in ALPHABET.items()}
    tokens += [of_byte[byte] for byte in range(256)]
    extra_at = len(tokens)
    tokens += protocol_tokens()
    spare_at = len(tokens)
    if vocab_size < spare_at:
        raise TokenizerError(f"vocab_size={vocab_size}: a byte tokenizer needs at least {spare_at}")
    tokens += [f"<｜place▁holder▁no▁{i}｜>" for i in range(vocab_size - spare_at)]
    inner = Inner(inner_models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    hidden, shown = tokens[:bytes_at] + tokens[spare_at:], tokens[extra_at:spare_at]
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in hidden])
    inner.add_tokens([AddedToken(token, normalized=False, special=False) for token in shown])
    return Tokenizer(inner, stop_token_ids=(1,), where="byte tokenizer")
