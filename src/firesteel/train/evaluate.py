"""Exact greedy decoding without a cache, and exact match on GSM-Symbolic.

Every pass runs whole rows and checks a guess of the continuation: tokens are
accepted while they equal the argmax, the first unequal one is replaced. The
worked solution serves as the first guess. The result is plain greedy decoding,
whatever the guess; a good guess only saves passes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import torch
from tokenizers import Tokenizer

from firesteel.train import gsm
from firesteel.train.model import V4Train

EOS, PAD = 1, 2


@dataclass
class Work:
    """One request: ``ids`` prompt and accepted tokens, ``guess`` what is believed to follow."""

    ids: list[int]
    prompt: int
    guess: list[int]
    done: bool = False
    output: list[int] = field(default_factory=list)


def check(work: Work, best: list[int], limit: int) -> None:
    """Accept the agreeing part of the guess; ``best[i]`` is the argmax after ``ids[: i + 1]``."""
    at = len(work.ids) - 1
    while not work.done:
        token = best[at]
        work.ids.append(token)
        agreed = bool(work.guess) and work.guess[0] == token
        work.guess = work.guess[1:]
        work.done = token == EOS or len(work.ids) - work.prompt >= limit
        if not agreed or at + 1 >= len(best):
            break
        at += 1
    work.output = work.ids[work.prompt :]


@torch.no_grad()
def greedy(
    model: V4Train, prompts: list[list[int]], guesses: list[list[int]], limit: int = 400, rows: int = 128
) -> list[list[int]]:
    """Greedy continuations (with EOS if reached) of at most ``limit`` tokens each."""
    was, device = model.training, model.head.weight.device
    model.eval()
    works = [Work(list(p), len(p), list(g)) for p, g in zip(prompts, guesses, strict=True)]
    while live := [w for w in works if not w.done]:
        live.sort(key=lambda w: len(w.ids) + len(w.guess))
        for at in range(0, len(live), rows):
            part = live[at : at + rows]
            width = max(len(w.ids) + len(w.guess) for w in part)
            table = torch.full((len(part), width), PAD)
            for i, w in enumerate(part):
                row = w.ids + w.guess
                table[i, : len(row)] = torch.tensor(row)
            best = model.logits(model(table.to(device)).hidden).argmax(-1).cpu()
            for i, w in enumerate(part):
                check(w, best[i, : len(w.ids) + len(w.guess)].tolist(), limit)
    model.train(was)
    return [w.output for w in works]


def answer_of(text: str) -> float | None:
    """The number behind the last ``####``; None if there is none."""
    found = re.findall(r"####\s*[$\u20ac\u00a3]?(-?\d[\d,]*(?:\.\d+)?)", text)
    return float(found[-1].replace(",", "")) if found else None


@dataclass(frozen=True)
class Score:
    """Exact matches among ``total``; ``texts`` are the outputs in order."""

    right: int
    total: int
    flags: list[bool]
    texts: list[str]

    @property
    def rate(self) -> float:
        return self.right / max(1, self.total)


def exact_match(model: V4Train, tok: Tokenizer, problems: list[gsm.Problem], thinking: bool) -> Score:
    """Greedy answers compared numerically (1e-4) with the gold answers."""

    def ids(text: str) -> list[int]:
        return list(tok.encode(text, add_special_tokens=False).ids)

    prompts = [ids(gsm.prompt(p.question, thinking)) for p in problems]
    tag = gsm.THINK if thinking else gsm.END_THINK
    guesses = [[*ids(gsm.reply(p, thinking).removeprefix(tag)), EOS] for p in problems]
    outputs = greedy(model, prompts, guesses)
    texts = tok.decode_batch(outputs, skip_special_tokens=False)
    flags = []
    for problem, text in zip(problems, texts, strict=True):
        got = answer_of(text)
        flags.append(got is not None and abs(got - float(problem.answer)) < 1e-4)
    return Score(sum(flags), len(flags), flags, texts)


def continue_text(model: V4Train, tok: Tokenizer, text: str, limit: int = 48) -> str:
    """Greedy continuation of plain text, for a look at the model."""
    ids = list(tok.encode(text, add_special_tokens=False).ids)
    return str(tok.decode(greedy(model, [ids], [[]], limit)[0], skip_special_tokens=False))
