"""Tokenizer and text corpus, built once on a CPU from declared, licence-clean folders.

    python -m firesteel.train.corpus --out DIR --source code=FOLDER --source prose=FOLDER ...

Writes ``tokenizer.json`` and one uint16 ``<name>.npz`` per source name. A file that
mentions a GNU licence is dropped, whatever folder it stands in.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from firesteel.models.deepseek_v4 import chat_strings as cs
from firesteel.train import gsm

SPECIALS = (
    cs.BOS, cs.EOS, cs.PAD, cs.SYSTEM, cs.USER, cs.ASSISTANT, cs.THINK, cs.END_THINK, cs.DSML,
    cs.LATEST_REMINDER, cs.FIM_HOLE, cs.FIM_BEGIN, cs.FIM_END, *cs.TASKS.values(),
)  # fmt: skip
HIDDEN = 3  # BOS, EOS and padding are "special" (not decoded); the rest are not, as in V4's tokenizer
WORDS = r"[^\r\n\p{L}\p{N}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GNU = re.compile(r"GNU (Lesser |Library |Affero )?General Public|\bL?GPL\b")


def clean(text: str, path: Path) -> str | None:
    """Text as trained on, or None to drop the file."""
    if GNU.search(text) or len(text) < 200:
        return None
    text = text.replace("\r\n", "\n").replace("\t", "    ")
    if path.suffix == ".txt":
        text = re.sub(r"\n{3,}", "\n\n", text)
    if max(map(len, text.splitlines()), default=0) > 3000 and path.suffix == ".py":
        return None
    digits = sum(c.isdigit() for c in text)
    return None if digits > 0.2 * len(text) else text.strip() + "\n"


def texts(folder: Path) -> Iterator[str]:
    """Cleaned files under ``folder`` in name order; folders of tests and vendored code are skipped."""
    skip = {"test", "tests", "site-packages", "_vendor", "__pycache__", "vendor", "pip", "idle_test"}
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".txt") and path.is_file() and not skip & set(path.parts):
            text = clean(path.read_text(encoding="utf-8", errors="ignore"), path)
            if text:
                yield text


def problems(count: int) -> Iterator[str]:
    """Rendered problems, for the tokenizer's training only."""
    rng = Random(5)
    kept = tuple(t for t in gsm.TEMPLATES if t not in gsm.held_out())
    draw = gsm.stream((1 << 20) - 1, frozenset(), kept)
    for _ in range(count):
        problem = draw()
        yield f"{problem.question}{gsm.SUFFIX}\n{problem.steps}\n#### {problem.answer}\n"
        if rng.random() < 0.3:
            yield " = ".join(gsm.drill(rng))


def train_tokenizer(sample: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE with single-digit numbers and V4's special tokens at the lowest ids."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(SPECIALS), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), max_token_length=24,
    )  # fmt: skip
    tok.train_from_iterator(sample, trainer)
    raw: dict[str, Any] = json.loads(tok.to_str())
    for token in raw["added_tokens"]:
        token["special"] = token["id"] < HIDDEN
    return Tokenizer.from_str(json.dumps(raw))


def encode(tok: Tokenizer, files: list[str]) -> np.ndarray:
    """uint16 stream: every file followed by EOS."""
    out = []
    for at in range(0, len(files), 64):
        for item in tok.encode_batch(files[at : at + 64], add_special_tokens=False):
            out.append(np.array([*item.ids, 1], dtype=np.uint16))
    return np.concatenate(out)


def main(argv: Sequence[str] | None = None) -> None:
    """Write tokenizer and token streams of the named sources."""
    args = argparse.ArgumentParser(prog="firesteel train corpus", description="tokenizer and text corpus")
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--vocab", type=int, default=3072)
    args.add_argument("--source", action="append", required=True, help="NAME=FOLDER, repeatable")
    opt = args.parse_args(argv)
    opt.out.mkdir(parents=True, exist_ok=True)
    groups: dict[str, list[str]] = {}
    for source in opt.source:
        name, folder = source.split("=", 1)
        groups.setdefault(name, []).extend(texts(Path(folder)))
    rng = Random(1)
    sample = list(problems(9000))
    for files in groups.values():
        rng.shuffle(files)
        size = 0
        for text in files:
            sample.append(text[:60000])
            size += min(len(text), 60000)
            if size > 5_000_000:
                break
    tok = train_tokenizer(sample, opt.vocab)
    assert tok.get_vocab_size() == opt.vocab, tok.get_vocab_size()
    tok.save(str(opt.out / "tokenizer.json"))
    for name, files in groups.items():
        ids = encode(tok, files)
        np.savez_compressed(opt.out / f"{name}.npz", ids=ids)
        chars = sum(map(len, files))
        print(
            f"{name}: {len(files)} files, {chars} characters, {len(ids)} tokens, {chars / len(ids):.2f} chars/token"
        )


if __name__ == "__main__":
    main()
