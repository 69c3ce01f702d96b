"""Endless packed training batches.

A row of ``length`` tokens holds documents that start at multiples of ``align``; see
``attention.Packing``. The first ``long_rows`` rows of a batch hold documents of up to the whole
row, the others documents of at most ``short`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from firesteel.train import gsm

BOS, EOS, PAD = 0, 1, 2
LOSS = np.array([0.0, 0.1, 1.0], dtype=np.float32)  # by loss class: scaffold, prompt, answer or text


HELD_OUT = 64  # the last 1/64 of every text stream is never trained on


def split_stream(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(for training, for evaluation) parts of a token stream."""
    cut = len(ids) - len(ids) // HELD_OUT
    return ids[:cut], ids[cut:]


@dataclass(frozen=True)
class Shape:
    """Sizes of one batch, in rows and tokens."""

    rows: int = 32
    long_rows: int = 8
    length: int = 2048
    short: int = 1024
    align: int = 128


@dataclass
class Document:
    """Token ids and the loss class of each id as a target, equal lengths."""

    ids: np.ndarray
    classes: np.ndarray


class Texts:
    """Random chunks of a uint16 token stream, starting behind a line end."""

    def __init__(self, ids: np.ndarray, line_end: np.ndarray):
        self.ids, self.line_end = ids, line_end

    def chunk(self, rng: Random, length: int) -> Document:
        """BOS and ``length - 1`` tokens of the stream."""
        at = rng.randrange(len(self.ids) - length - 256)
        ends = np.flatnonzero(self.line_end[self.ids[at : at + 256]])
        at += int(ends[0]) + 1 if len(ends) else 0
        ids = np.concatenate([np.array([BOS], dtype=np.uint16), self.ids[at : at + length - 1]])
        return Document(ids, np.full(length, gsm.ANSWER, dtype=np.uint8))


def line_ends(tok: Tokenizer) -> np.ndarray:
    """bool [V]: the token's text ends a line (or is EOS)."""
    texts = tok.decode_batch([[i] for i in range(tok.get_vocab_size())], skip_special_tokens=False)
    out = np.array([t.endswith("\n") for t in texts])
    out[EOS] = True
    return out


def encode(tok: Tokenizer, segments: list[gsm.Segment]) -> Document:
    """Tokenise each segment alone, so that loss classes follow token borders.

    Segments meet only at special tokens, where the joined text tokenises the same.
    """
    ids, classes = [], []
    for text, kind in segments:
        part = tok.encode(text, add_special_tokens=False).ids
        ids += part
        classes += [kind] * len(part)
    return Document(np.array(ids, dtype=np.uint16), np.array(classes, dtype=np.uint8))


class Mixer:
    """Draws documents and fills rows; one per worker."""

    def __init__(
        self, tok: Tokenizer, texts: dict[str, Texts], shape: Shape, seed: int, skip: frozenset[str]
    ):
        self.tok, self.texts, self.shape, self.rng = tok, texts, shape, Random(f"mix-{seed}")
        held = set(gsm.held_out())
        self.draw = gsm.stream(seed, skip, tuple(t for t in gsm.TEMPLATES if t not in held))

    def problem(self) -> gsm.Problem:
        return gsm.with_suffix(self.draw(), self.rng)

    def conversation(self, turns: int) -> Document:
        items = [self.problem() for _ in range(turns)]
        return encode(self.tok, gsm.chat(items, self.rng.random() < 0.5, self.rng))

    def short_document(self) -> Document:
        """A conversation, a drill, or a page of drills."""
        roll = self.rng.random()
        if roll < 0.06:
            return encode(self.tok, gsm.drill_chat(self.rng))
        if roll < 0.17:
            return encode(self.tok, gsm.drill_page(self.rng))
        return self.conversation(self.rng.choices((1, 2, 3), (70, 22, 8))[0])

    def text(self, length: int) -> Document:
        name = "code" if self.rng.random() < 0.5 else "prose"
        return self.texts[name].chunk(self.rng, length)

    def long_conversation(self) -> Document:
        """Visible-steps turns up to the length of a row."""
        ids: list[np.ndarray] = []
        classes: list[np.ndarray] = []
        left = self.shape.length
        while True:
            part = encode(self.tok, gsm.chat([self.problem()], False, Random(1))[1:])
            if len(part.ids) + 1 > left:
                break
            ids.append(part.ids)
            classes.append(part.classes)
            left -= len(part.ids)
        head = np.array([BOS], dtype=np.uint16), np.array([gsm.SCAFFOLD], dtype=np.uint8)
        return Document(np.concatenate([head[0], *ids]), np.concatenate([head[1], *classes]))

    def row(self, is_long: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids uint16 [S], loss class of each id as target uint8 [S], document numbers int32 [S/align])."""
        s = self.shape
        ids = np.full(s.length, PAD, dtype=np.uint16)
        classes = np.zeros(s.length, dtype=np.uint8)
        blocks = np.full(s.length // s.align, -1, dtype=np.int32)
        at = number = 0

        def put(doc: Document) -> None:
            nonlocal at, number
            end = at + len(doc.ids)
            ids[at:end], classes[at:end] = doc.ids, doc.classes
            classes[at] = gsm.SCAFFOLD  # nothing predicts the first token of a document
            stop = -(-end // s.align) * s.align
            blocks[at // s.align : stop // s.align] = number
            at, number = stop, number + 1

        if is_long:
            put(self.long_conversation() if self.rng.random() < 0.3 else self.text(s.length))
        elif self.rng.random() < 0.15:
            put(self.text(min(self.rng.choice((512, 1024)), s.short)))
        while at < s.length:
            doc = self.short_document()
            if len(doc.ids) > min(s.short, s.length - at):
                put(self.text(min(s.length - at, s.short)))
            else:
                put(doc)
        return ids, classes, blocks

    def batch(self) -> dict[str, torch.Tensor]:
        """``tokens`` int16 [B, S], ``classes`` uint8 [B, S], ``blocks`` int32 [B, S/align]."""
        rows = [self.row(i < self.shape.long_rows) for i in range(self.shape.rows)]
        return {
            "tokens": torch.from_numpy(np.stack([r[0] for r in rows]).astype(np.int16)),
            "classes": torch.from_numpy(np.stack([r[1] for r in rows])),
            "blocks": torch.from_numpy(np.stack([r[2] for r in rows])),
        }


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Endless batches; every worker has its own range of problem seeds."""

    def __init__(self, folder: Path, shape: Shape, seed: int, skip: frozenset[str]):
        super().__init__()
        self.folder, self.shape, self.seed, self.skip = folder, shape, seed, skip
        self.tok = Tokenizer.from_file(str(folder / "tokenizer.json"))
        ends = line_ends(self.tok)
        streams = {n: split_stream(np.load(folder / f"{n}.npz")["ids"])[0] for n in ("code", "prose")}
        self.texts = {n: Texts(ids, ends) for n, ids in streams.items()}

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        info = get_worker_info()
        mixer = Mixer(
            self.tok, self.texts, self.shape, self.seed * 1000 + (info.id if info else 0), self.skip
        )
        while True:
            yield mixer.batch()


def loader(folder: Path, shape: Shape, seed: int, skip: frozenset[str], workers: int) -> DataLoader[Any]:
    """Prefetching loader; ``skip`` are questions that must never be trained on."""
    extra: dict[str, Any] = {"prefetch_factor": 4, "persistent_workers": True} if workers else {}
    pin = torch.cuda.is_available()
    stream = Stream(folder, shape, seed, skip)
    return DataLoader(stream, batch_size=None, num_workers=workers, pin_memory=pin, **extra)


def evaluation_questions(sets: list[list[gsm.Problem]]) -> frozenset[str]:
    """Questions of evaluation problems without the suffix, for exclusion from training."""
    return frozenset(p.question.removesuffix(gsm.SUFFIX) for problems in sets for p in problems)
