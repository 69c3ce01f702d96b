"""What is refused before any work is spent on it: one huge request must not hold up the others."""

from __future__ import annotations

from typing import Any

from firesteel.serve.errors import bad
from firesteel.serve.messages import ModelInfo
from firesteel.tokenizer import Tokenizer

MAX_SAMPLES = 4096  # prompts times n of one request


def check_ids(field: str, value: Any, info: ModelInfo) -> None:
    """Raise a 400 if a body's list of prompts or token ids is longer than any that can be served.

    Looks at lengths only; what the entries are is checked later, in time that grows with them.
    """
    if not isinstance(value, list):
        return
    rows = [value] if value and isinstance(value[0], int) else [v for v in value if isinstance(v, list)]
    longest = max(map(len, rows), default=0)
    if longest > info.max_model_len:
        raise bad(field, f"{longest} token ids; the model takes {info.max_model_len}, raise --max-model-len")
    if rows != [value] and len(value) > MAX_SAMPLES:
        raise bad(field, f"{len(value)} prompts; at most {MAX_SAMPLES} per request")


def check_text(field: str, text: str, tokenizer: Tokenizer, info: ModelInfo) -> None:
    """Raise a 400 for a text that is too long however it is tokenised."""
    most = info.max_model_len * tokenizer.longest
    if len(text) > most:
        problem = f"{len(text)} characters cannot be {info.max_model_len} tokens or fewer"
        raise bad(field, f"{problem}; shorten it or raise --max-model-len")
