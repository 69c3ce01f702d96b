"""Acceptance that is drawn instead of computed: scheduling benchmarks on weights without a trained drafter.

Everything runs as always, and then the chosen tokens are replaced. The token
at position p of a request is y(p), a function of its key and p alone, so all
arms write the same (meaningless) text. A draft for p at depth j of its block
is y(p) if u(p) < rate_j and another token otherwise, u(p) drawn from the same
key: arms that draft the same position are paired, and given that all before
it were accepted, a draft is accepted with probability rate_j.

The drafter's signals follow the outcome A, again by position. A score
s ~ N(+d/2 or -d/2, 1) has the log-likelihood ratio d * s and an AUC of
Phi(d / sqrt 2). Two independent ones, for the head and for the margin:

    head   = logit(rate_j) + d_h * s_h        log1p(margin) = CENTRE + WIDTH * s_m

so sigmoid(head) is calibrated as it stands, and so is the logistic model of
``speculation.survival`` with the coefficients of ``coefficients``.
All of it is torch ops on the device of the state, without a host value.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from firesteel.config import SimulatedAcceptance
from firesteel.ops.reference import noise
from firesteel.ops.types import Proposal, SlotState
from firesteel.speculation.survival import CLASSES, Coefficients

STREAM = 5  # behind those of ops.reference.noise
WORDS = range(5)  # the "token ids" of the words of one position
TOKEN, ACCEPT, HEAD, MARGIN, EASE = WORDS
CENTRE, WIDTH = 1.2, 0.45  # where log1p(margin) lies
EDGE = 1e-6  # rates of 0 and 1 keep finite log-odds
MOST_BYTES = 1 << 29  # of tables: 8 for every place of a request and 16 for every depth of it


def separation(auc: float) -> float:
    """d of two unit normals whose AUC is ``auc``."""
    return math.sqrt(2.0) * float(torch.special.ndtri(torch.tensor(auc, dtype=torch.float64)))


def coefficients(
    simulated: SimulatedAcceptance, depths: int, uses_head: bool = True, uses_margin: bool = True
) -> Coefficients:
    """The survival model that is exactly right for these draws (without the head: at spread 0 and no trace)."""
    slope = separation(simulated.margin_auc) / WIDTH if uses_margin else 0.0
    rates = np.clip(np.array(simulated.rates, dtype=np.float64), EDGE, 1 - EDGE)
    known = np.log(rates / (1 - rates))[np.minimum(np.arange(depths), len(rates) - 1)]
    depth = (0.0 if uses_head else known) - slope * CENTRE
    return Coefficients(
        depth=np.tile(np.broadcast_to(depth, (depths,)), (CLASSES, 1)),
        head=np.full(CLASSES, 1.0 if uses_head else 0.0),
        margin=np.full(CLASSES, slope),
        uses_head=uses_head,
        uses_margin=uses_margin,
        usual=_usual(simulated, depths),
    )


def _usual(simulated: SimulatedAcceptance, depths: int) -> tuple[float, ...]:
    """Mean conditional acceptance by depth."""
    rows = simulated.trace or (simulated.rates,)
    return tuple(sum(r[min(j, len(r) - 1)] for r in rows) / len(rows) for j in range(depths))


@dataclass
class Drawn:
    """What ``Simulator`` draws, by place: tokens and uniforms [...], scores [..., head and margin]."""

    token: Tensor  # int64
    accept: Tensor  # float64, below the rate: the draft is right
    normal: Tensor  # float64 [..., 2]


@dataclass
class Tables:
    """All draws of the requests in S slots, made when they come: y(p) int64 [S, L], and by the anchor's
    position [S, L, K] the drafts behind it (int64) with their signals (float32)."""

    token: Tensor
    draft: Tensor
    margin: Tensor
    confidence: Tensor


class Simulator:
    """Draws tokens, drafts and signals for the slots of one engine.

    ``vocab_size`` V >= 2; tensors live on ``device``. With ``tables`` (slots, positions) a request's draws are
    made once, when it gets its slot (``prepare``), and a step only looks them up: on a GPU each of the
    generator's hundred small operations would be a launch of its own.
    """

    def __init__(
        self,
        simulated: SimulatedAcceptance,
        depths: int,
        vocab_size: int,
        device: torch.device,
        tables: tuple[int, int] | None = None,
    ):
        assert vocab_size >= 2, "a wrong draft needs another token"
        self.vocab_size, self.spread = vocab_size, simulated.spread
        rows = simulated.trace or (simulated.rates,)
        table = [[row[min(j, len(row) - 1)] for j in range(depths)] for row in rows]
        rates = torch.tensor(table, dtype=torch.float64, device=device)
        self.odds = torch.logit(rates, eps=EDGE)  # [n, K]
        self.head_gap, self.margin_gap = separation(simulated.head_auc), separation(simulated.margin_auc)
        self._tables: Tables | None = None
        if tables is not None and tables[0] * tables[1] * (8 + 16 * depths) <= MOST_BYTES:
            token = torch.zeros(tables, dtype=torch.int64, device=device)
            draft = torch.zeros(*tables, depths, dtype=torch.int64, device=device)
            margin, confidence = (torch.zeros_like(draft, dtype=torch.float32) for _ in range(2))
            self._tables = Tables(token, draft, margin, confidence)
        self._kernels: ModuleType | None = None  # that look up in one launch, on a GPU
        if device.type == "cuda" and self._tables is not None:
            self._kernels = importlib.import_module("firesteel.ops.triton.drawn")

    def prepare(self, slots: Tensor, state: SlotState) -> None:
        """Draw for requests that have just got their slots int64 [n], if there are tables."""
        if self._tables is None or not slots.numel():
            return
        (places, depths), n = self._tables.draft.shape[1:], slots.shape[0]
        place = torch.arange(places, device=slots.device)
        owner = slots.unsqueeze(-1).expand(-1, places).reshape(-1).contiguous()
        drawn = self._draw(owner, place.repeat(n), state)
        behind = (place.unsqueeze(-1) + 1 + torch.arange(depths, device=slots.device)).flatten()
        at = behind.clamp_max(places - 1)
        drafted = Drawn(
            drawn.token.view(n, places)[:, at].flatten(),
            drawn.accept.view(n, places)[:, at].flatten(),
            drawn.normal.view(n, places, 2)[:, at].flatten(0, 1),
        )
        odds = self._odds(owner, behind.view(places, depths).repeat(n, 1), state).flatten()
        self._tables.token[slots] = drawn.token.view(n, places)
        for table, part in zip(
            (self._tables.draft, self._tables.margin, self._tables.confidence),
            self._outcome(drafted, odds),
            strict=True,
        ):
            table[slots] = part.view(n, places, depths)

    def tokens(self, slots: Tensor, positions: Tensor, state: SlotState) -> Tensor:
        """y(p) int64 [R] for the tokens sampled at ``positions`` [R]."""
        if self._tables is not None:
            if self._kernels is not None:
                found: Tensor = self._kernels.tokens(slots, positions, self._tables.token)
                return found
            return self._tables.token[slots, positions.clamp_max(self._tables.token.shape[1] - 1)]
        word = noise.words(WORDS[:1], positions, slots, state, STREAM)[:, 0]
        return word % self.vocab_size

    def proposal(self, real: Proposal, slots: Tensor, state: SlotState) -> Proposal:
        """The drawn drafts, margins and confidences in place of the ``real`` ones, same shapes."""
        groups, width = real.tokens.shape
        if self._tables is not None:
            drafts, margins, heads = self._known(slots, width, state)
            return replace(
                real,
                tokens=drafts,
                margin=margins,
                confidence=None if real.confidence is None else heads,
            )
        depth = torch.arange(width, device=slots.device)
        position = state.cursor[slots].unsqueeze(-1) + 1 + depth
        owner = slots.unsqueeze(-1).expand(-1, width).reshape(-1).contiguous()
        odds = self._odds(slots, position, state).flatten()
        draft, margin, head = self._outcome(self._draw(owner, position.flatten(), state), odds)
        return replace(
            real,
            tokens=draft.view(groups, width),
            margin=margin.view(groups, width),
            confidence=None if real.confidence is None else head.view(groups, width),
        )

    def _known(self, slots: Tensor, width: int, state: SlotState) -> tuple[Tensor, Tensor, Tensor]:
        """Drafts, margins and confidences [G, width] out of the tables."""
        assert self._tables is not None
        tables = (self._tables.draft, self._tables.margin, self._tables.confidence)
        if self._kernels is not None:
            found: tuple[Tensor, Tensor, Tensor] = self._kernels.drafts(slots, state.cursor, tables, width)
            return found
        at = (slots, state.cursor[slots].clamp_max(tables[0].shape[1] - 1))
        return tables[0][:, :, :width][at], tables[1][:, :, :width][at], tables[2][:, :, :width][at]

    def _outcome(self, drawn: Drawn, odds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(draft, margin, confidence) [n] of draws [n] whose rates have the log-odds float64 [n]."""
        accepted = drawn.accept < torch.sigmoid(odds)
        draft = torch.where(accepted, drawn.token, (drawn.token + 1) % self.vocab_size)
        sign = accepted.to(torch.float64) - 0.5
        head = odds + self.head_gap * (sign * self.head_gap + drawn.normal[:, 0])
        score = sign * self.margin_gap + drawn.normal[:, 1]
        margin = torch.expm1((CENTRE + WIDTH * score).clamp(0.0, 3.9))
        return draft, margin.to(torch.float32), head.to(torch.float32)

    def _draw(self, owner: Tensor, position: Tensor, state: SlotState) -> Drawn:
        """The draws of requests in the slots ``owner`` [n] at ``position`` [n]."""
        words = noise.words(WORDS, position, owner, state, STREAM)
        u = noise.uniform(words).to(torch.float64)
        normal = torch.special.ndtri(u[:, HEAD : MARGIN + 1])
        return Drawn(words[:, TOKEN] % self.vocab_size, u[:, ACCEPT], normal)

    def _draw_ease(self, slots: Tensor, state: SlotState) -> Tensor:
        """How easy each request is, in standard deviations: float64 [n]."""
        zero = torch.zeros_like(slots)
        ease = noise.uniform(noise.words(WORDS[EASE:], zero, slots, state, STREAM))[:, 0]
        scores: Tensor = torch.special.ndtri(ease.to(torch.float64))
        return scores

    def _odds(self, slots: Tensor, positions: Tensor, state: SlotState) -> Tensor:
        """Log-odds [G, K] of the rates that hold for these requests and positions."""
        row = (positions + state.seed_lo[slots].unsqueeze(-1)) % self.odds.shape[0]
        odds = self.odds[row, torch.arange(positions.shape[1], device=slots.device)]
        if self.spread:
            odds = odds + self.spread * self._draw_ease(slots, state).unsqueeze(-1)
        return odds
