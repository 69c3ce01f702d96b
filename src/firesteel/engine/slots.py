"""The per-slot lines on the device: written on admission, copied on preemption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from firesteel.config import MAX_STOP_IDS
from firesteel.core import Admission
from firesteel.engine.sync import upload
from firesteel.ops.types import SlotState

INTS = (
    "cursor", "anchor", "alive", "draft_len", "draft_cap", "passes", "max_len",
    "seed_lo", "seed_hi", "sample", "top_k", "stop_from", "prompt_len",
)  # fmt: skip
FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")


def number_tables(slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(INTS int64, FLOATS float32) [names, slots]: one line per field, each beginning at 16 bytes."""
    wide = -(-slots // 4) * 4
    whole = torch.zeros(len(INTS), wide, dtype=torch.int64, device=device)
    return whole[:, :slots], torch.zeros(len(FLOATS), wide, device=device)[:, :slots]


def slot_state(
    slots: int,
    vocab_size: int,
    max_model_len: int,
    gamma: int,
    device: torch.device,
    numbers: tuple[Tensor, Tensor] | None = None,
) -> SlotState:
    """Fresh per-slot state; ``slots`` counts the scratch slot. Fields of one number are lines of ``numbers``."""

    def ints(*shape: int) -> Tensor:
        return torch.zeros(slots, *shape, dtype=torch.int64, device=device)

    def floats(*shape: int) -> Tensor:
        return torch.zeros(slots, *shape, device=device)

    whole, real = numbers or number_tables(slots, device)
    state = SlotState(
        **dict(zip(INTS, whole.unbind(), strict=True)),
        **dict(zip(FLOATS, real.unbind(), strict=True)),
        stop_ids=ints(MAX_STOP_IDS) - 1,
        history=ints(max_model_len + gamma + 1),
        drafts=ints(max(gamma, 1)),
        margin=floats(max(gamma, 1)),
        confidence=floats(max(gamma, 1)),
        survival=floats(max(gamma, 1)),
        bias_ids=ints(0) - 1,
        bias_values=floats(0),
        bad_words=torch.zeros(slots, 0, 1, dtype=torch.int64, device=device) - 1,
    )
    state.top_p.fill_(1.0)
    state.repetition.fill_(1.0)
    return state


def _numbers(a: Admission) -> tuple[list[int], list[float]]:
    """Values of INTS and FLOATS."""
    p = a.shaping
    ints = [
        a.start, 0, 1, 0, a.draft_cap, 0, a.max_len,
        a.seed & 0xFFFFFFFF, a.seed >> 32, a.sample, max(p.top_k, 0), p.stop_from, p.prompt_len,
    ]  # fmt: skip
    return ints, [a.temperature, p.top_p, p.min_p, p.repetition, p.presence, p.frequency]


@dataclass(frozen=True)
class Line:
    """A copy of one slot's line, by field name."""

    values: dict[str, Tensor]


class Slots:
    """Writes, copies and restores lines; widens the tables that few requests need."""

    def __init__(self, slots: int, vocab_size: int, max_model_len: int, gamma: int, device: torch.device):
        self.vocab_size, self.device = vocab_size, device
        self._numbers = number_tables(slots, device)
        self.state = slot_state(slots, vocab_size, max_model_len, gamma, device, self._numbers)

    def ints(self, values: Any) -> Tensor:
        """int64 on the device, copied without waiting."""
        return upload(torch.tensor(values, dtype=torch.int64), self.device)

    def floats(self, values: Any) -> Tensor:
        """float32 on the device, copied without waiting."""
        return upload(torch.tensor(values, dtype=torch.float32), self.device)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Write the slots' lines: a handful of copies for any number of requests, and no wait."""
        if not admissions:
            return
        s, at = self.state, self.ints([a.slot for a in admissions])
        numbers = [_numbers(a) for a in admissions]
        whole = self.ints([list(column) for column in zip(*(i for i, _ in numbers), strict=True)])
        real = self.floats([list(column) for column in zip(*(f for _, f in numbers), strict=True)])
        for table, values in zip(self._numbers, (whole, real), strict=True):
            table.index_copy_(1, at, values)
        stops = [[*a.stop_ids, *[-1] * (MAX_STOP_IDS - len(a.stop_ids))] for a in admissions]
        assert all(len(line) == MAX_STOP_IDS for line in stops), "checked when the request was accepted"
        s.stop_ids.index_copy_(0, at, self.ints(stops))
        for a in admissions:
            if a.prefix:
                s.history[a.slot, : a.start] = self.ints(a.prefix)
            self._tables(a)

    def _tables(self, a: Admission) -> None:
        """Bias, allowed ids and bad words; their tables grow to the widest request so far."""
        s, slot, shaping = self.state, a.slot, a.shaping
        self._widen_bias(len(shaping.bias))
        s.bias_ids[slot].fill_(-1)  # storing a number by index would be a copy that waits
        s.bias_values[slot].zero_()
        if shaping.bias:
            n = len(shaping.bias)
            s.bias_ids[slot, :n] = self.ints([i for i, _ in shaping.bias])
            s.bias_values[slot, :n] = self.floats([v for _, v in shaping.bias])
        self._widen_words(len(shaping.bad_words), max((len(w) for w in shaping.bad_words), default=1))
        s.bad_words[slot].fill_(-1)
        for i, word in enumerate(shaping.bad_words):
            s.bad_words[slot, i, -len(word) :] = self.ints(word)
        if shaping.allowed is not None and s.allowed is None:
            s.allowed = torch.ones(s.cursor.shape[0], self.vocab_size, dtype=torch.bool, device=self.device)
        if s.allowed is not None:
            s.allowed[slot].fill_(shaping.allowed is None)
            if shaping.allowed is not None:
                s.allowed[slot].index_fill_(0, self.ints(shaping.allowed), True)

    def _widen_bias(self, need: int) -> None:
        s, have = self.state, self.state.bias_ids.shape[1]
        if need > have:
            width = 1 << (need - 1).bit_length()
            s.bias_ids = torch.nn.functional.pad(s.bias_ids, (0, width - have), value=-1)
            s.bias_values = torch.nn.functional.pad(s.bias_values, (0, width - have))

    def _widen_words(self, count: int, length: int) -> None:
        s = self.state
        _, have, long = s.bad_words.shape
        if count > have or length > long:
            more, wider = max(count - have, 0), max(length - long, 0)
            s.bad_words = torch.nn.functional.pad(s.bad_words, (wider, 0, 0, more), value=-1)

    def keep_draft_logits(self) -> None:
        """Room for the drafts' logits, which dense rejection weighs them by."""
        slots, width = self.state.drafts.shape
        self.state.draft_logits = torch.zeros(slots, width, self.vocab_size, device=self.device)

    def copy(self, slot: int) -> Line:
        """A slot's line, out of the way of the next owner."""
        values = {f.name: getattr(self.state, f.name) for f in fields(SlotState)}
        return Line({name: t[slot].clone() for name, t in values.items() if t is not None})

    def restore(self, line: Line, slot: int) -> None:
        """Put a copied line into a slot; tables may have become wider meanwhile."""
        for name, value in line.values.items():
            table = getattr(self.state, name)
            if table[slot].shape != value.shape:
                table[slot].fill_(-1 if name in ("bias_ids", "bad_words") else 0)
            if name == "bad_words":
                table[slot, : value.shape[0], table.shape[2] - value.shape[1] :] = value
            elif value.ndim == 1:
                table[slot, : value.shape[0]] = value
            else:
                table[slot] = value
        if "allowed" not in line.values and self.state.allowed is not None:
            self.state.allowed[slot].fill_(True)
