"""Row invariance: the bits of a row's logits, whatever else runs beside it and wherever its state lies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from oracles.drive import Drive, Group, Target, random_sizes

GAMMA = 7  # rings as for the deepest draft, so that rejected rows can be written


def picker(seed: int) -> torch.Generator:
    """A generator of a seed."""
    return torch.Generator().manual_seed(seed)


def below(n: int, generator: torch.Generator) -> int:
    """A random integer in 0..n-1."""
    return int(torch.randint(n, (1,), generator=generator))


def same_bits(got: Tensor, want: Tensor) -> int:
    """How many rows differ in any bit."""
    return int((got.view(torch.int32) != want.view(torch.int32)).any(-1).sum())


def alone(target: Target, tokens: Sequence[int], first: int = 0) -> Tensor:
    """The yardstick: logits [n, V] of every token run as the only row of its pass.

    To save time the ``first`` tokens of a long prompt may share one pass.
    """
    sizes = [first] * bool(first) + [1] * (len(tokens) - first)
    return Drive(target, 1, len(tokens), GAMMA).chunks(0, tokens, sizes)


def random_chunkings(n: int, count: int, seed: int, most: int | None = None) -> list[list[int]]:
    """Random chunk sizes that add up to n."""
    generator = picker(seed)
    return [random_sizes(n, most or n, lambda m: below(m, generator)) for _ in range(count)]


def chunkings(target: Target, tokens: Sequence[int], want: Tensor, sizes: Iterable[Sequence[int]]) -> int:
    """Rows that differ over these chunkings, run one after the other in a slot that is never cleaned."""
    drive, wrong = Drive(target, 2, len(tokens), GAMMA), 0
    for part in sizes:
        wrong += same_bits(drive.chunks(1, tokens, part), want)
    return wrong


def two_chunks(target: Target, tokens: Sequence[int], want: Tensor) -> int:
    """Rows that differ over every split into two chunks; the splits share their passes."""
    n = len(tokens)
    drive = Drive(target, n - 1, n, GAMMA)
    first = drive.step([(k - 1, 0, tokens[:k]) for k in range(1, n)])
    second = drive.step([(k - 1, k, tokens[k:]) for k in range(1, n)])
    return sum(same_bits(torch.cat(pair), want) for pair in zip(first, second, strict=True))


def company(
    target: Target, tokens: Sequence[int], want: Tensor, seed: int, rounds: int, most: int = 64
) -> int:
    """Rows that differ beside rows of other requests.

    Each round runs the sequence in random chunks in a random slot on shuffled physical pages. Every
    pass holds up to ``most`` rows of five other requests, in random order, and padding rows.
    """
    generator, others, wrong = picker(seed), 5, 0
    for _ in range(rounds):
        drive = Drive(target, others + 1, len(tokens) + most, GAMMA)
        order = (torch.randperm(drive.memory.num_pages, generator=generator) + 1).tolist()
        for slot in range(others + 1):
            drive.remap(slot, order[slot * drive.columns : (slot + 1) * drive.columns])
        mine = below(others + 1, generator)
        at = dict.fromkeys(range(others + 1), 0)
        out = []
        while at[mine] < len(tokens):
            n = min(len(tokens) - at[mine], 1 + below(most // 2, generator))
            groups = [(mine, at[mine], tokens[at[mine] : at[mine] + n])]
            groups += guests(at, mine, most - n, len(tokens) + most, generator)
            groups = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
            logits = drive.step(groups, padding=below(4, generator), slack=below(40, generator))
            out.append(logits[[slot for slot, _, _ in groups].index(mine)])
            for slot, start, part in groups:
                at[slot] = start + len(part)
        wrong += same_bits(torch.cat(out), want)
    return wrong


def guests(
    at: dict[int, int], mine: int, room: int, longest: int, generator: torch.Generator, exact: bool = False
) -> list[Group]:
    """Rows of other slots from their positions ``at`` on: up to ``room`` rows, or ``exact``ly so many."""
    groups: list[Group] = []
    others = [slot for slot in at if slot != mine]
    for slot in others:
        n = below(room + 1, generator) // (1 if exact else 2)
        n = min(room if exact and slot == others[-1] else n, longest - at[slot])
        if n > 0:
            groups.append((slot, at[slot], torch.randint(512, (n,), generator=generator).tolist()))
            room -= n
    return groups


def rejected(target: Target, tokens: Sequence[int], want: Tensor, blocks: Iterable[tuple[int, int]]) -> int:
    """Rows that differ if drafts are verified and rejected all the way.

    A block (good, bad) runs the next ``good`` true tokens and ``bad`` wrong ones behind them; the
    cursor then moves to the first wrong one. ``blocks`` must last for the whole sequence.
    """
    generator, drive = picker(0), Drive(target, 1, len(tokens) + GAMMA + 1, GAMMA)
    at, wrong, supply = 0, 0, iter(blocks)
    while at < len(tokens):
        good, bad = next(supply)
        assert good >= 1 and good + bad <= GAMMA + 1
        good = min(good, len(tokens) - at)
        junk = torch.randint(512, (bad,), generator=generator).tolist()
        logits = drive.step([(0, at, [*tokens[at : at + good], *junk])])[0]
        wrong += same_bits(logits[:good], want[at : at + good])
        at += good
    return wrong


def random_blocks(seed: int) -> Iterator[tuple[int, int]]:
    """Blocks of 1 to GAMMA + 1 rows without end."""
    generator = picker(seed)
    while True:
        good = 1 + below(GAMMA + 1, generator)
        yield good, below(GAMMA + 2 - good, generator)
