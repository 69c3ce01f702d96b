"""Bits per byte, repetition counts, and excerpts of unseen texts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from firesteel.config import ParameterError
from firesteel.engine.llm import LLM
from firesteel.engine.runner import TokenScore
from firesteel.eval import texts
from firesteel.train import excerpts

pytestmark = pytest.mark.cpu


class Letters:
    """One token per byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode()


class Dice:
    """A model whose every token costs two bits, and 'z' eight."""

    tokenizer = Letters()

    class config:
        bos_token_id = 0

    class engine:
        max_model_len = 64

    def generate(self, prompts: list[list[int]], params: Any) -> list[Any]:
        def score(i: int) -> TokenScore:
            return TokenScore(math.log(2**-8 if i == ord("z") else 2**-2), 0, ())

        class Answer:
            def __init__(self, ids: list[int]):
                self.prompt_logprobs = (None, *map(score, ids[1:]))

        assert params.max_tokens == 0 and params.prompt_logprobs == 0
        return [Answer(p) for p in prompts]


def test_bits_per_byte_weighs_bytes_and_skips_bos() -> None:
    dice = cast(LLM, Dice())
    assert texts.bits_per_byte(dice, ["abab", "b"]) == (2.0, 0.0)
    mean, error = texts.bits_per_byte(dice, ["aaa", "z"])
    assert mean == pytest.approx((3 * 2 + 8) / 4)
    assert error == pytest.approx(math.sqrt((6 - 3 * 3.5) ** 2 + (8 - 3.5) ** 2) / 4)
    long, _ = texts.bits_per_byte(dice, ["a" * 63 + "zzzz"])
    assert long == pytest.approx(2.0), "only what fits is counted, in bits and bytes alike"


def test_the_bundled_model_predicts_better_than_bytes_at_random() -> None:
    llm = LLM()
    code = texts.read_texts(texts.DATA / "code.jsonl")[:2]
    bits, _ = texts.bits_per_byte(llm, [t[:300] for t in code])
    noise = bytes(Random(1).choices(range(33, 126), k=200)).decode()
    worse, _ = texts.bits_per_byte(llm, [noise])
    assert 0.3 < bits < 3.0 < worse


def test_repeated_lines_are_counted_without_braces_and_blanks() -> None:
    assert texts.most_repeated("a = 1\n}\n}\n}\n\n\n b\na = 1 \n  a = 1") == 3
    assert texts.most_repeated("}\n}\n") == 0


def test_shipped_texts_are_whole_and_distinct() -> None:
    for domain in texts.DOMAINS:
        found = texts.read_texts(texts.DATA / f"{domain}.jsonl")
        assert len(found) == 64 == len({t[:200] for t in found})
        assert all(t.endswith("\n") and 300 < len(t) <= 1600 for t in found)


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"none\.jsonl cannot be read"):
        texts.read_texts(tmp_path / "none.jsonl")
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"prompt": "y"}\n')
    with pytest.raises(ParameterError, match="line 2: expected an object with text"):
        texts.read_texts(tmp_path / "bad.jsonl")


def test_excerpts_repeat_and_keep_to_borders(tmp_path: Path) -> None:
    body = "".join(f"\n\ndef f{i}():\n    return {'x' * (i % 7)}\n" for i in range(200))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.py").write_text(body)
    argv = ["--out", str(tmp_path), "--source", f"code={tmp_path / 'in'}", "--count", "5", "--chars", "120"]
    excerpts.main(argv)
    first = (tmp_path / "code.jsonl").read_text()
    found = [json.loads(line)["text"] for line in first.splitlines()]
    assert len(set(found)) == 5
    for text in found:
        assert text.startswith("def f") and text.endswith("\n") and text in body and len(text) <= 120
    excerpts.main(argv)
    assert (tmp_path / "code.jsonl").read_text() == first
    with pytest.raises(SystemExit, match="gives only"):
        excerpts.main([*argv[:-3], "5000", "--chars", "120"])
