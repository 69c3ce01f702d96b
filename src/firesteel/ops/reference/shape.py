"""What happens to logits between the head and the noise, and log-probabilities.

Order: bias, allowed ids, bad words, minimum length, penalties, then (at a
temperature above 0) min-p, top-k, top-p on softmax(logits / T). The noise is
added to what is left, so truncation only removes candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firesteel.core import Logprobs
from firesteel.ops.reference.attention import ReferenceAttention
from firesteel.ops.types import SlotState

NEVER = float("-inf")


def banned_by_words(history: Tensor, positions: Tensor, words: Tensor) -> Tensor:
    """Last ids of the bad words whose other ids stand right before ``positions``; -1 elsewhere.

    history [R, L], positions [R], words [R, nw, lw] right-aligned: [R, nw].
    """
    reach = words.shape[-1] - 1
    if reach == 0:
        return words[..., -1]
    at = positions.unsqueeze(-1) - torch.arange(reach, 0, -1, device=history.device)
    before = torch.where(at >= 0, history.gather(1, at.clamp_min(0)), -1)  # [R, reach]
    want = words[..., :-1]
    fits = ((want == before.unsqueeze(1)) | (want < 0)).all(-1)
    return torch.where(fits, words[..., -1], -1)


def ban(logits: Tensor, ids: Tensor) -> Tensor:
    """-inf at ``ids`` [R, n]; ids below 0 ban nothing."""
    hit = torch.zeros(logits.shape[0], logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
    hit.scatter_(1, torch.where(ids >= 0, ids, logits.shape[1]), True)
    return logits.masked_fill(hit[:, :-1], NEVER)


def token_counts(history: Tensor, low: Tensor, high: Tensor, vocab: int) -> Tensor:
    """How often each id stands at positions low <= p < high of its row's history: int64 [R, V]."""
    place = torch.arange(history.shape[1], device=history.device)
    inside = (place >= low.unsqueeze(-1)) & (place < high.unsqueeze(-1))
    counts = torch.zeros(history.shape[0], vocab + 1, dtype=torch.int64, device=history.device)
    counts.scatter_add_(1, torch.where(inside, history, vocab), inside.to(torch.int64))
    return counts[:, :-1]


def truncate(logits: Tensor, heat: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """-inf outside min-p, then top-k, then top-p; [R, V] and [R] each; rows with T = 0 stay whole."""
    vocab = logits.shape[1]
    greedy = (heat == 0).unsqueeze(-1)
    scaled = logits / torch.where(heat == 0, 1.0, heat).unsqueeze(-1)
    floor = scaled.amax(-1, keepdim=True) + torch.log(min_p).unsqueeze(-1)  # log 0 = -inf keeps all
    scaled = scaled.masked_fill(scaled < floor, NEVER)
    value, order = torch.sort(scaled, dim=-1, descending=True, stable=True)  # ties: lowest id first
    keep = torch.where(top_k > 0, top_k, vocab).unsqueeze(-1)
    value = value.masked_fill(torch.arange(vocab, device=logits.device) >= keep, NEVER)
    share = torch.softmax(value, dim=-1)
    before = torch.cumsum(share, dim=-1) - share
    drop = (value == NEVER) | ((before >= top_p.unsqueeze(-1)) & (top_p < 1.0).unsqueeze(-1))
    drop[:, 0] = False
    gone = torch.zeros_like(drop).scatter_(1, order, drop)
    return logits.masked_fill(gone & ~greedy, NEVER)


class ReferenceShape(ReferenceAttention):
    """Logit shaping of whole rows; a row with neutral settings keeps its bits."""

    def shape(self, logits: Tensor, slots: Tensor, positions: Tensor, state: SlotState) -> Tensor:
        vocab = logits.shape[1]
        ids, values = state.bias_ids[slots], state.bias_values[slots]
        if ids.shape[1]:
            bias = torch.zeros(logits.shape[0], vocab + 1, device=logits.device)
            bias.scatter_(1, torch.where(ids >= 0, ids, vocab), values)
            logits = logits + bias[:, :-1]
        if state.allowed is not None:
            logits = logits.masked_fill(~state.allowed[slots], NEVER)
        history = state.history[slots]
        if state.bad_words.shape[1]:
            logits = ban(logits, banned_by_words(history, positions, state.bad_words[slots]))
        early = (positions < state.stop_from[slots]).unsqueeze(-1)
        logits = ban(logits, torch.where(early, state.stop_ids[slots], -1))
        logits = self._penalise(logits, history, slots, positions, state)
        return truncate(
            logits, state.temperature[slots], state.min_p[slots], state.top_k[slots], state.top_p[slots]
        )

    @staticmethod
    def _penalise(
        logits: Tensor, history: Tensor, slots: Tensor, positions: Tensor, state: SlotState
    ) -> Tensor:
        vocab, prompt = logits.shape[1], state.prompt_len[slots]
        answered = token_counts(history, prompt, positions, vocab)
        seen = (token_counts(history, torch.zeros_like(prompt), prompt, vocab) + answered) > 0
        rate = state.repetition[slots].unsqueeze(-1)
        logits = torch.where(seen, torch.where(logits > 0, logits / rate, logits * rate), logits)
        logits = logits - state.frequency[slots].unsqueeze(-1) * answered
        return logits - state.presence[slots].unsqueeze(-1) * (answered > 0)

    def restrict(self, logits: Tensor, rows: Tensor, words: Tensor) -> Tensor:
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        clear = ((words.unsqueeze(-1) >> bits) & 1).flatten(1)[:, : logits.shape[1]] == 0
        out = logits.clone()
        out[rows] = logits[rows].masked_fill(clear, NEVER)
        return out

    def logprobs(self, logits: Tensor, tokens: Tensor, n: int) -> Logprobs:
        total = torch.logsumexp(logits, dim=-1, keepdim=True)
        chosen = logits.gather(1, tokens.unsqueeze(-1))
        rank = (logits > chosen).sum(-1)
        value, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        return Logprobs((chosen - total).squeeze(-1), rank, order[:, :n], value[:, :n] - total)
