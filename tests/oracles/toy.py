"""Covering arrays, and speculation on a toy vocabulary without any model.

``pairwise`` builds the cases of the equality tests. ``Toy`` feeds logits that it makes up through the
real ops (drafts, rows, sampling, commit), so that whole distributions of emitted tokens can be counted
and compared with what the target alone would emit.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firesteel.checkpoint.codecs import QTensor
from firesteel.engine.slots import slot_state
from firesteel.ops.interface import Ops
from firesteel.ops.types import MarkovHead, PromptRows, SlotState

CPU = torch.device("cpu")


# ---- covering arrays -----------------------------------------------------------------------------
def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Rows in which every pair of values of every two factors occurs; greedy, a function of the seed."""
    names, rng = list(factors), random.Random(seed)
    sizes = [len(factors[n]) for n in names]
    open_pairs = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(names)), 2)
        for a in range(sizes[i])
        for b in range(sizes[j])
    }
    rows = []
    while open_pairs:
        best: tuple[int, list[int]] = (-1, [])
        for _ in range(8):
            row = _row(open_pairs, sizes, rng)
            best = max(best, (_news(open_pairs, row), row), key=lambda item: item[0])
        row = best[1]
        open_pairs -= {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}
        rows.append({n: factors[n][at] for n, at in zip(names, row, strict=True)})
    return rows


def _news(open_pairs: set[tuple[int, int, int, int]], row: Sequence[int]) -> int:
    return sum((i, row[i], j, row[j]) in open_pairs for i, j in itertools.combinations(range(len(row)), 2))


def _row(open_pairs: set[tuple[int, int, int, int]], sizes: Sequence[int], rng: random.Random) -> list[int]:
    """One row that starts from an open pair and fills the other factors for most new pairs."""
    i, a, j, b = rng.choice(sorted(open_pairs)[:50])
    row = {i: a, j: b}
    rest = [k for k in range(len(sizes)) if k not in row]
    rng.shuffle(rest)
    for k in rest:
        values = list(range(sizes[k]))
        rng.shuffle(values)
        row[k] = max(
            values,
            key=lambda v: sum(((m, row[m], k, v) if m < k else (k, v, m, row[m])) in open_pairs for m in row),
        )
    return [row[k] for k in range(len(sizes))]


# ---- a toy without a model -----------------------------------------------------------------------
@dataclass(frozen=True)
class Tables:
    """Logits of a target and a drafter that both look at the newest token and the place only.

    ``target`` [depth, V, V]: logits at a place behind a token. ``base`` [depth, V] and ``markov``
    [V, V] make the drafter's, as in its own head.
    """

    target: Tensor
    base: Tensor
    markov: Tensor

    @classmethod
    def random(cls, vocab: int, depth: int, seed: int, distance: float = 1.0) -> Tables:
        """A drafter that lies ``distance`` (a standard deviation of logits) from its target."""
        g = torch.Generator().manual_seed(seed)
        base, markov = torch.randn(depth, vocab, generator=g), torch.randn(vocab, vocab, generator=g)
        drafts = base.unsqueeze(1) + markov
        return cls(drafts + distance * torch.randn(drafts.shape, generator=g), base, markov)

    def drafts(self) -> Tensor:
        """The drafter's logits [depth, V, V]."""
        return self.base.unsqueeze(1) + self.markov


def shaped(logits: Tensor, heat: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Probabilities after temperature, top-k and top-p, written down plainly; float64."""
    p = torch.softmax(logits.double() / heat, -1)
    order = p.argsort(dim=-1, descending=True, stable=True)
    ranked = p.gather(-1, order)
    keep = torch.arange(p.shape[-1]).expand_as(p) < (top_k or p.shape[-1])
    ranked = torch.where(keep, ranked, 0.0)
    ranked = ranked / ranked.sum(-1, keepdim=True)
    before = ranked.cumsum(-1) - ranked
    if top_p < 1:
        ranked = torch.where(before < top_p, ranked, 0.0)
    out = torch.zeros_like(p).scatter(-1, order, ranked)
    return out / out.sum(-1, keepdim=True)


START = 3  # position of the first anchor


class Toy:
    """``draws`` requests that speculate side by side over the same tables, each with its own seed.

    ``rule``: "coupled", "dense" or "one_hot". ``spoil`` may change the state after drafting, which is
    how the tests plant wrong rules.
    """

    def __init__(
        self,
        ops: Ops,
        tables: Tables,
        rule: str,
        heat: float,
        draws: int,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        greedy_drafts: bool = False,
        spoil: Callable[[SlotState], None] | None = None,
    ):
        self.ops, self.tables, self.rule, self.draws = ops, tables, rule, draws
        self.heat, self.greedy_drafts, self.spoil = heat, greedy_drafts, spoil
        self.depth, self.vocab = tables.base.shape
        self.shaped = top_k > 0 or top_p < 1
        self.state = s = slot_state(draws + 1, self.vocab, START + self.depth + 4, self.depth, CPU)
        s.cursor[:], s.alive[:], s.max_len[:], s.draft_cap[:] = START, 1, 1 << 40, self.depth
        s.temperature[:], s.top_k[:], s.top_p[:] = heat, top_k, top_p
        s.seed_lo[:] = torch.arange(draws + 1) + (seed << 20)
        s.prompt_len[:] = s.stop_from[:] = START
        if rule == "dense":
            s.draft_logits = torch.zeros(draws + 1, self.depth, self.vocab)
        one = QTensor.dense(torch.eye(self.vocab))
        self.head = MarkovHead(tables.markov.clone(), ops.linear_weight(one), None)

    def draft(self, slots: Tensor, width: int) -> None:
        """One drafting pass for ``slots``, as the runner does it."""
        s, ops = self.state, self.ops
        heat = s.temperature.clone()
        if self.greedy_drafts:
            s.temperature[:] = 0.0
        at = (s.cursor[slots] - START).unsqueeze(-1) + torch.arange(width)
        proposal = ops.markov_walk(
            self.tables.base[at.clamp_max(self.depth - 1)],
            torch.zeros(len(slots), width, 1),
            self.head,
            slots,
            s,
            shaped=self.shaped,
            rejection=self.rule != "coupled",
            keep_logits=self.rule == "dense",
        )
        s.temperature[:] = heat
        s.passes[slots] += 1
        s.draft_len[slots], s.drafts[slots, :width] = width, proposal.tokens
        s.survival[slots, :width] = 1.0
        if s.draft_logits is not None:
            assert proposal.logits is not None
            s.draft_logits[slots, :width] = proposal.logits
        if self.spoil is not None:
            self.spoil(s)

    def verify(self, slots: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """One target step with ``width`` drafts each: (tokens [G, width+1], count [G], accepted [G])."""
        s, ops, none = self.state, self.ops, torch.zeros(0, dtype=torch.int64)
        widths = ops.admit(slots, width * len(slots), s)
        rows, samples = ops.build_rows(
            s, PromptRows(none, none, none, none, none, none), slots, widths, int(widths.sum()), 0
        )
        at = (rows.positions - START).clamp(0, self.depth - 1)
        logits = self.tables.target[at, rows.tokens]
        positions = rows.positions[samples.rows] + 1
        owner = rows.slots[samples.rows]
        if self.shaped:
            logits = ops.shape(logits, owner, positions, s)
        if self.rule == "coupled":
            tokens, finite = ops.sample(logits, owner, positions, s)
        else:
            tokens, finite = ops.sample_rejection(logits, samples, positions, s)
        verdict = ops.commit(tokens, finite, rows, samples, s, width + 1)
        assert int(verdict.finished.sum()) == 0
        s.draft_len[slots] = 0
        return verdict.tokens, verdict.count, verdict.accepted

    def blocks(self, length: int, width: int) -> Tensor:
        """The first ``length`` emitted tokens of every request [G, length], over as many steps as it takes.

        ``first_drafts`` [G, width] and ``first_accepted`` [G] keep what happened in the first step.
        """
        out = torch.full((self.draws, length + width + 1), -1)
        have = torch.zeros(self.draws, dtype=torch.int64)
        slots = torch.arange(self.draws)
        while len(slots):
            self.draft(slots, width)
            drafts = self.state.drafts[slots, :width].clone()
            tokens, count, accepted = self.verify(slots, width)
            if len(slots) == self.draws:
                self.first_drafts, self.first_accepted = drafts, accepted
            for j in range(width + 1):
                line = slots[j < count]
                out[line, have[line]] = tokens[j < count, j]
                have[line] += 1
            slots = slots[have[slots] < length]
        return out[:, :length]


def joint(probabilities: Tensor, length: int, first: int = 0) -> Tensor:
    """Probability of every block [V^length] of an autoregressive target; p [depth, V, V]."""
    total = probabilities[0, first]
    for d in range(1, length):
        total = total.unsqueeze(-1) * probabilities[d]
    return total.flatten()


def counts(blocks: Tensor, vocab: int) -> Tensor:
    """How often each block [V^length] occurs."""
    code = torch.zeros(blocks.shape[0], dtype=torch.int64)
    for j in range(blocks.shape[1]):
        code = code * vocab + blocks[:, j]
    return torch.bincount(code, minlength=vocab ** blocks.shape[1])


def chi_square(observed: Tensor, p: Tensor) -> float:
    """p-value of Pearson's test; cells that expect fewer than 5 are merged; an impossible cell gives 0."""
    n = observed.sum()
    if int(observed[p == 0].sum()):
        return 0.0
    expected = p * n
    big = expected >= 5
    cells = [(observed[big].double(), expected[big])]
    if (~big).any() and float(expected[~big].sum()) > 0:
        cells.append((observed[~big].double().sum().view(1), expected[~big].sum().view(1)))
    o, e = (torch.cat(parts) for parts in zip(*cells, strict=True))
    if len(o) == 1:
        return 1.0  # a single possible block
    statistic = ((o - e) ** 2 / e).sum()
    return float(torch.special.gammaincc(torch.tensor((len(o) - 1) / 2.0).double(), statistic / 2))


def coupled_acceptance(p: Tensor, q: Tensor) -> float:
    """P(argmax(log p + g) = argmax(log q + g)) for shared Gumbel noise g: float64 [V] each."""
    both = (p > 0) & (q > 0)
    total = 0.0
    for i in torch.nonzero(both).flatten().tolist():
        total += 1.0 / float(torch.maximum(p / p[i], q / q[i]).sum())
    return total
