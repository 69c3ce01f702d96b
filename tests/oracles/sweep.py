"""Wide sweeps over random geometries; the tests run a few, this module any number.

PYTHONPATH=src:tests python -m oracles.sweep hf --count 100
PYTHONPATH=src:tests python -m oracles.sweep rows --count 100 --backend native
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from oracles import compare, rows
from oracles.cases import random_case
from oracles.drive import load_target


@dataclass(frozen=True)
class Line:
    """One geometry of a sweep; ``detail`` says what it was."""

    name: str
    distance: float
    bound: float
    detail: str


def sweep_hf(count: int, seed: int = 0, backend: str = "reference") -> Iterator[Line]:
    """Whole prompts and random chunkings of random geometries against Hugging Face."""
    for i in range(seed, seed + count):
        case = random_case(i)
        b = compare.bench(case, backend)
        distance = max(compare.whole(b), compare.many_chunks(b, 1, most=1 + len(b.tokens) // 3))
        yield Line(case.name, distance, b.bound, f"{case.prompt} tokens, {case.changes}")


def sweep_rows(count: int, seed: int = 0, backend: str = "reference") -> Iterator[Line]:
    """Row invariance of random geometries: ``distance`` counts rows whose bits differ."""
    for i in range(seed, seed + count):
        case = random_case(i)
        for numerics in ("float32", "official"):
            target = load_target(case.folder(), numerics, backend)
            tokens = case.tokens()
            want = rows.alone(target, tokens)
            wrong = rows.chunkings(target, tokens, want, rows.random_chunkings(len(tokens), 2, i))
            wrong += rows.company(target, tokens, want, seed=i, rounds=3)
            yield Line(case.name, float(wrong), 0.0, f"{numerics}, {case.prompt} tokens, {case.changes}")


def main() -> int:
    """Print a line per geometry; the exit status says whether all passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("hf", "rows"))
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="reference")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bad = 0
    for line in (sweep_hf if args.what == "hf" else sweep_rows)(args.count, args.seed, args.backend):
        ok = line.distance <= line.bound
        bad += not ok
        result = f"{line.distance:.2e} of {line.bound:.2e}"
        print("ok " if ok else "BAD", f"{line.name}: {result}  {line.detail}", flush=True)
    print(f"{args.count} geometries, {bad} bad")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
