"""Text as the target itself writes it, without a cache: a drafter must predict the target, not the world.

A pass runs whole rows and compares every answer with what the target would have sampled; the first
unequal token of each answer is replaced, and what stands behind it is the guess of the next pass.
All tokens up to that place are the target's own. Worked solutions are good guesses: a few passes
settle most answers. With padding as the guess every pass yields one token, which is plain decoding.

Noise is the engine's form, ``argmax(logits + T * g)``, with ``g`` a function of (seed, row, position).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from firesteel.train import gsm
from firesteel.train.data import BOS, EOS, PAD
from firesteel.train.drafter import documents
from firesteel.train.model import V4Train

CHUNK = 4  # rows whose logits exist at once


@dataclass
class Rows:
    """Packed rows on the device: ``tokens`` int64 [B, S], ``classes`` uint8 [B, S], ``blocks`` int32
    [B, S/align]. ``heat``: temperature of every row; ``seed`` keys the noise. ``own`` bool [B, S]: tokens
    that the target wrote itself."""

    tokens: Tensor
    classes: Tensor
    blocks: Tensor
    long_rows: int
    heat: Sequence[float]
    seed: int
    own: Tensor

    @classmethod
    def of(cls, batch: dict[str, Tensor], long_rows: int, device: torch.device) -> Rows:
        """From a loader's batch: greedy, nothing of it the target's own."""
        tokens = batch["tokens"].to(device, non_blocking=True).long()
        classes, blocks = (batch[k].to(device, non_blocking=True) for k in ("classes", "blocks"))
        own = torch.zeros_like(tokens, dtype=torch.bool)
        return cls(tokens, classes, blocks, long_rows, [0.0] * len(tokens), 0, own)


def noise(seed: int, row: int, length: int, vocab: int, device: torch.device) -> Tensor:
    """Gumbel noise float32 [S, V] of a row; line t belongs to the token at position t."""
    gen = torch.Generator(device).manual_seed((seed << 20) + row)
    draw = torch.empty(length, vocab, device=device).exponential_(generator=gen)
    return draw.clamp_(min=1e-30).log_().neg_()


@torch.no_grad()
def sampled(model: V4Train, hidden: Tensor, rows: Rows) -> Tensor:
    """int64 [B, S]: the token that the target samples at every position, given all before it."""
    want = rows.tokens.clone()
    length = hidden.shape[1]
    for at in range(0, len(hidden), CHUNK):
        logits = model.logits(hidden[at : at + CHUNK, :-1])
        for i, line in enumerate(logits):
            heat = rows.heat[at + i]
            if heat > 0:
                line += heat * noise(rows.seed, at + i, length, line.shape[-1], line.device)[1:]
        want[at : at + CHUNK, 1:] = logits.argmax(-1)
    return want


def answers(rows: Rows) -> tuple[Tensor, Tensor]:
    """(bool [B, S] tokens that stand in an answer to a question, int64 [B, S] where their segment starts).

    A text that starts its document is no answer: there the target never chose a first token.
    """
    answer = rows.classes == gsm.ANSWER
    place = torch.arange(answer.shape[1], device=answer.device)
    start = answer.clone()
    start[:, 1:] &= ~answer[:, :-1]
    before = torch.full_like(rows.tokens, BOS)
    before[:, 1:] = rows.tokens[:, :-1]
    code = torch.where(start, 2 * place + (before != BOS).long(), 0).cummax(1).values
    return answer & (code % 2 == 1), code // 2


def counted(flag: Tensor, start: Tensor) -> Tensor:
    """int64 [B, S]: how many flags stand from position ``start`` [B, S] up to and with this one."""
    total = flag.long().cumsum(1)
    return total - (total - flag.long()).gather(1, start)


def document_starts(blocks: Tensor, align: int) -> Tensor:
    """int64 [B, S]: position of the first token of each token's document."""
    doc = documents(blocks, align)
    place = torch.arange(doc.shape[1], device=doc.device).expand_as(doc)
    new = torch.ones_like(doc, dtype=torch.bool)
    new[:, 1:] = doc[:, 1:] != doc[:, :-1]
    return torch.where(new, place, 0).cummax(1).values


@torch.no_grad()
def correct(model: V4Train, rows: Rows) -> Tensor:
    """One pass, in place; bool [B, S], where a token was replaced.

    An answer that ends earlier or later than its guess loses what stood behind it in the document:
    that becomes padding.
    """
    hidden = model(rows.tokens, rows.blocks, rows.long_rows).hidden
    want = sampled(model, hidden, rows)
    mine, start = answers(rows)
    differs = mine & (want != rows.tokens)
    seen = counted(differs, start)
    first = differs & (seen == 1)
    ended = first & ((want == EOS) | (rows.tokens == EOS))
    rows.tokens = torch.where(first, want, rows.tokens)
    over = counted(ended, document_starts(rows.blocks, model.align)) - ended.long() > 0
    rows.tokens = torch.where(over, PAD, rows.tokens)
    rows.classes = torch.where(over, gsm.SCAFFOLD, rows.classes)
    rows.own = mine & ((seen == 0) | first) & ~over
    return first


def rewrite(model: V4Train, rows: Rows, passes: int, until_settled: bool = False) -> int:
    """Up to ``passes`` corrections of all answers; how many were run.

    ``until_settled`` stops when nothing changes any more (it waits for the device after each pass).
    """
    for done in range(passes):
        changed = correct(model, rows)
        if until_settled and not bool(changed.any()):
            return done + 1
    return passes


def single_rows(
    prompts: Sequence[Sequence[int]],
    guesses: Sequence[Sequence[int]],
    room: int,
    align: int,
    heat: float,
    seed: int,
    device: torch.device,
) -> Rows:
    """One document per row: a prompt, its guess, and ``room`` padding tokens to go on into."""
    size = max(len(p) + len(g) for p, g in zip(prompts, guesses, strict=True)) + room
    size = -(-size // align) * align
    tokens = torch.full((len(prompts), size), PAD)
    classes = torch.full((len(prompts), size), gsm.SCAFFOLD, dtype=torch.uint8)
    for i, (prompt, guess) in enumerate(zip(prompts, guesses, strict=True)):
        end = len(prompt) + len(guess) + room
        tokens[i, : len(prompt) + len(guess)] = torch.tensor([*prompt, *guess])
        classes[i, len(prompt) : end] = gsm.ANSWER
    blocks = torch.zeros(len(prompts), size // align, dtype=torch.int32)
    tokens, classes, blocks = (t.to(device) for t in (tokens, classes, blocks))
    own = torch.zeros_like(tokens, dtype=torch.bool)
    return Rows(tokens, classes, blocks, len(prompts), [heat] * len(prompts), seed, own)
