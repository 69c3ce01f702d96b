"""How good a trained drafter is, at the training model's level: acceptance, confidence, calibration.

Texts are the target's own continuations of held-out prompts. At every token of an answer the drafter
proposes a block with the same noise that the target sampled with; leading equal tokens are accepted,
as in coupled acceptance. Nothing of the serving engine is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from firesteel.train import data, gsm
from firesteel.train.calibrate import Blocks
from firesteel.train.drafter import Anchors, DrafterTrain
from firesteel.train.model import V4Train
from firesteel.train.rollout import Rows, noise, rewrite, single_rows

GROUP = 64  # prompts that the target answers at once
ROWS = 8  # answers whose blocks exist at once


@dataclass(frozen=True)
class Prompts:
    """Prompts of one domain; ``guesses`` may be empty lists. ``limit``: tokens to write behind the guess."""

    name: str
    ids: list[list[int]]
    guesses: list[list[int]]
    limit: int


def problem_prompts(tok: Tokenizer, problems: Sequence[gsm.Problem]) -> Prompts:
    """Word problems, in chat and thinking mode in turn."""

    def ids(text: str) -> list[int]:
        return list(tok.encode(text, add_special_tokens=False).ids)

    heads, guesses = [], []
    for i, p in enumerate(problems):
        thinking = i % 2 == 1
        tag = gsm.THINK if thinking else gsm.END_THINK
        heads.append(ids(gsm.prompt(p.question, thinking)))
        guesses.append([*ids(gsm.reply(p, thinking).removeprefix(tag)), data.EOS])
    return Prompts("problems", heads, guesses, 16)


def text_prompts(name: str, stream: np.ndarray, count: int, length: int = 96, limit: int = 96) -> Prompts:
    """Random places of a held-out token stream."""
    rng = Random(f"held-{name}")
    length = min(length, len(stream) // 2)
    places = [rng.randrange(max(1, len(stream) - length)) for _ in range(count)]
    ids = [[data.BOS, *stream[at : at + length - 1].tolist()] for at in places]
    return Prompts(name, ids, [[] for _ in ids], limit)


def held_out_prompts(folder: Path, tok: Tokenizer, problems: int, texts: int, seed: int) -> list[Prompts]:
    """The three domains from the evaluation problems and the unseen ends of the text streams."""
    out = [problem_prompts(tok, gsm.evaluation_set(seed, problems))] if problems else []
    for name in ("code", "prose"):
        if texts:
            held = data.split_stream(np.load(folder / f"{name}.npz")["ids"])[1]
            out.append(text_prompts(name, held, texts))
    return out


# ---- drafting over whole answers -------------------------------------------------------------------
@dataclass(frozen=True)
class Proposals:
    """Blocks at every position of one row, [S, K]: drafts, perturbed margins in units of T (raw at T = 0),
    confidence logits (None without a head)."""

    tokens: Tensor
    margin: Tensor
    head: Tensor | None


def everywhere(tokens: Tensor, window: int, slots: int) -> Anchors:
    """A full block at every position."""
    place = torch.arange(tokens.shape[1], device=tokens.device).view(1, -1, window)
    at = place.expand(len(tokens), -1, -1).contiguous()
    return Anchors(at, torch.full_like(at, slots), torch.ones_like(at, dtype=torch.bool))


def walk(
    drafter: DrafterTrain, x: Tensor, z: Tensor, head: Tensor, tokens: Tensor, heat: float, gumbel: Tensor
) -> Proposals:
    """The Markov walk at every position of a row: ``x``, ``z`` [S, K, D], ``tokens`` [S], ``gumbel`` [S, V]."""
    previous, lines = tokens, []
    padded = F.pad(gumbel, (0, 0, 0, x.shape[1] + 1))
    for j in range(x.shape[1]):
        logits, embedded = drafter.logits(x[:, j], head, previous)
        score = logits + heat * padded[1 + j : 1 + j + len(tokens)] if heat > 0 else logits
        best = score.topk(2, -1).values
        previous = score.argmax(-1)
        margin = (best[:, 0] - best[:, 1]) / (heat if heat > 0 else 1.0)
        said = drafter.confidence(z[:, j], embedded) if drafter.draft.confidence_head else None
        lines.append((previous, margin, said))
    drafts, margins, heads = zip(*lines, strict=True)
    given = [h for h in heads if h is not None]
    return Proposals(
        torch.stack(drafts, 1), torch.stack(margins, 1), torch.stack(given, 1) if given else None
    )


def part(rows: Rows, lo: int, hi: int) -> Rows:
    """Some of single-document rows; noise keys are kept by passing ``lo`` on."""
    return Rows(
        rows.tokens[lo:hi], rows.classes[lo:hi], rows.blocks[lo:hi], hi - lo, rows.heat[lo:hi], rows.seed,
        rows.own[lo:hi],
    )  # fmt: skip


@torch.no_grad()
def propose(target: V4Train, drafter: DrafterTrain, rows: Rows, at: int) -> list[Proposals]:
    """Blocks at every position of rows that stand at index ``at`` of their set."""
    ids = drafter.draft.target_layer_ids
    seen = target(rows.tokens, rows.blocks, rows.long_rows, taps=ids)
    assert seen.taps is not None
    anchors = everywhere(rows.tokens, drafter.cfg.sliding_window, drafter.draft.block_size)
    out = drafter(rows.tokens, seen.taps, target.embed.weight, anchors, rows.blocks, target.align)
    head, length = target.head.weight, rows.tokens.shape[1]
    result = []
    for i in range(len(rows.tokens)):
        gumbel = head.new_zeros(1, 1)
        if rows.heat[i] > 0:
            gumbel = noise(rows.seed, at + i, length, len(head), head.device)
        result.append(walk(drafter, out.x[i], out.z[i], head, rows.tokens[i], rows.heat[i], gumbel))
    return result


@dataclass(frozen=True)
class Tally:
    """One domain at one temperature: its blocks, and decoding simulated from them."""

    name: str
    heat: float
    blocks: Blocks
    tokens: int
    steps: int

    @property
    def tokens_per_step(self) -> float:
        """Tokens per verify step with whole blocks."""
        return self.tokens / max(1, self.steps)

    def to_json(self) -> dict[str, Any]:
        """Conditional acceptance by position and tokens per step."""
        b = self.blocks
        reached = [(b.known > j) & (b.accepted >= j) for j in range(b.depths)]
        rates = [float((b.accepted[r] > j).mean()) if r.any() else None for j, r in enumerate(reached)]
        return {
            "domain": self.name, "temperature": self.heat, "blocks": len(b), "tokens": self.tokens,
            "steps": self.steps, "tokens_per_step": self.tokens_per_step, "acceptance": rates,
        }  # fmt: skip


def judge(
    proposals: Proposals, tokens: Tensor, own: Tensor, heat: float, group: int
) -> tuple[Blocks, int, int]:
    """(blocks of one row, tokens, steps): ``own`` bool [S] marks the answer, which the target wrote.

    Simulated decoding starts behind the first token, which the prompt's own step samples.
    """
    slots = proposals.tokens.shape[1]
    place = torch.nonzero(own)[:, 0].tolist()
    begin, end = place[0], place[-1] + 1
    assert len(place) == end - begin, "an answer is one piece"
    anchor = torch.arange(begin, end - 1, device=tokens.device)
    depth = torch.arange(slots, device=tokens.device)
    behind = anchor[:, None] + 1 + depth
    inside = behind < end
    equal = (proposals.tokens[anchor] == tokens[behind.clamp_max(len(tokens) - 1)]) & inside
    accepted = equal.long().cumprod(1).sum(1).cpu().numpy()
    head = None if proposals.head is None else proposals.head[anchor].double().cpu().numpy()
    count = len(accepted)
    blocks = Blocks(
        head,
        proposals.margin[anchor].double().cpu().numpy(),
        accepted,
        inside.sum(1).cpu().numpy(),
        np.full(count, int(heat > 0)),
        np.full(count, group),
    )
    at = steps = 0
    while at < count:
        at += int(accepted[at]) + 1
        steps += 1
    return blocks, count, steps


def until_end(own: Tensor, tokens: Tensor) -> Tensor:
    """bool [B, S]: the answers ``own`` up to and with their first EOS; what follows is nobody's text."""
    ends = (own & (tokens == data.EOS)).long()
    return own & (ends.cumsum(1) - ends == 0)


@torch.no_grad()
def measure(
    target: V4Train, drafter: DrafterTrain, prompts: Prompts, heat: float, seed: int, passes: int = 200
) -> Tally:
    """Let the target write, let the drafter guess; ``GROUP`` prompts at a time."""
    device = target.head.weight.device
    found, tokens, steps = [], 0, 0
    for begin in range(0, len(prompts.ids), GROUP):
        ids, guesses = (x[begin : begin + GROUP] for x in (prompts.ids, prompts.guesses))
        rows = single_rows(ids, guesses, prompts.limit, target.align, heat, seed * 4096 + begin, device)
        rewrite(target, rows, passes, until_settled=True)
        rows.own = until_end(rows.own, rows.tokens)
        for lo in range(0, len(ids), ROWS):
            few = part(rows, lo, min(lo + ROWS, len(ids)))
            for i, proposals in enumerate(propose(target, drafter, few, lo)):
                if int(few.own[i].sum()) < 2:
                    continue
                blocks, n, s = judge(proposals, few.tokens[i], few.own[i], heat, begin + lo + i)
                found.append(blocks)
                tokens, steps = tokens + n, steps + s
    assert found, "prompts without answers"
    return Tally(prompts.name, heat, Blocks.joined(found), tokens, steps)
