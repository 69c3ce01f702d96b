"""Float32 numerics against Hugging Face: chunkings, greedy tokens, and how close is close enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oracles.cases import Case, cuts
from oracles.drive import Drive, Target, load_target, random_sizes
from oracles.hf import Oracle
from oracles.official import Options, Straight

MULTIPLE = 4.0  # how many noise floors two float32 programs may lie apart


@dataclass
class Bench:
    """One case with everything that runs it.

    ``want``: Hugging Face's logits of the prompt. ``floor``: how far its float32 lies from float64,
    over the whole prompt: what the order of additions costs in this model.
    """

    case: Case
    target: Target
    oracle: Oracle
    tokens: list[int]
    want: Tensor
    floor: float

    @property
    def bound(self) -> float:
        """Largest difference between two logits that counts as equal."""
        return MULTIPLE * self.floor

    def far(self, got: Tensor, rows: slice = slice(None)) -> float:
        """Largest difference from Hugging Face over these rows."""
        return float((got - self.want[rows]).abs().max())


def bench(case: Case, backend: str = "reference") -> Bench:
    """Load a case and measure its floor."""
    path, tokens = case.folder(), case.tokens()
    oracle = Oracle(path)
    want = oracle.logits(tokens)
    exact = Straight(path, Options(official=False, dtype=torch.float64)).logits(tokens)
    floor = float((want.double() - exact).abs().max())
    assert 0 < floor < 1e-4, f"{case.name}: Hugging Face in float32 lies {floor:.1e} from float64"
    return Bench(case, load_target(path, "float32", backend), oracle, tokens, want, floor)


def whole(b: Bench) -> float:
    """Distance of the prompt in one chunk."""
    drive = Drive(b.target, 1, len(b.tokens))
    return b.far(drive.step([(0, 0, b.tokens)])[0])


def splits(b: Bench, at: Sequence[int] | None = None, together: int = 24) -> tuple[float, int]:
    """Largest distance over the splits into two chunks (default: the case's), and the worst split.

    Up to ``together`` splits run as requests of one batch.
    """
    at = cuts(b.case) if at is None else at
    worst = (0.0, 0)
    for lo in range(0, len(at), together):
        part = at[lo : lo + together]
        drive = Drive(b.target, len(part), len(b.tokens))
        first = drive.step([(s, 0, b.tokens[:k]) for s, k in enumerate(part)])
        second = drive.step([(s, k, b.tokens[k:]) for s, k in enumerate(part)])
        for k, x, y in zip(part, first, second, strict=True):
            worst = max(worst, (b.far(torch.cat((x, y))), k))
    return worst


def many_chunks(b: Bench, count: int, most: int = 9) -> float:
    """Largest distance over ``count`` random chunkings with chunks of 1 to ``most`` tokens."""
    generator = torch.Generator().manual_seed(b.case.seed)
    drive, worst = Drive(b.target, 1, len(b.tokens)), 0.0
    for _ in range(count):
        sizes = random_sizes(len(b.tokens), most, lambda m: int(torch.randint(m, (1,), generator=generator)))
        worst = max(worst, b.far(drive.chunks(0, b.tokens, sizes)))
    return worst


def greedy(b: Bench, prompt: Sequence[int], count: int) -> tuple[list[int], int, int]:
    """Greedy tokens of the engine against Hugging Face's, which sees the engine's text as a whole.

    Returns (tokens, places where Hugging Face prefers another token by more than the bound, places
    where its two best logits lie closer than the bound).
    """
    out = Drive(b.target, 1, len(prompt) + count).greedy(0, prompt, count)
    logits = b.oracle.logits([*prompt, *out[:-1]])[len(prompt) - 1 :]
    best = logits.topk(2, dim=-1)
    gap = best.values[:, 0] - best.values[:, 1]
    wrong = (best.indices[:, 0] != torch.tensor(out)) & (gap > b.bound)
    return out, int(wrong.sum()), int((gap <= b.bound).sum())
