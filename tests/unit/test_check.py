"""The parts of ``firesteel simulate --check``: prices on a machine that changes its speed, and who goes on when."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from firesteel.bench.check import Part, level
from firesteel.bench.loops import Stopwatch, in_turns

pytestmark = pytest.mark.unit
PRICES = {"small": 5.0, "middle": 20.0, "large": 110.0}


def samples(slowness: list[float], seed: int = 0, noise: float = 0.0) -> list[tuple[int, str, float]]:
    """Slices of seven steps each, drawn at random; a slice is slow by its factor."""
    r, out = random.Random(seed), []
    for at, slow in enumerate(slowness):
        for _ in range(7):
            name = r.choice(list(PRICES))
            out.append((at, name, PRICES[name] * slow * math.exp(r.gauss(0.0, noise))))
    return out


def test_prices_of_one_speed_are_means() -> None:
    got = level([(1, "a", 2.0), (1, "a", 4.0), (1, "b", 10.0)])
    assert got == pytest.approx({"a": 3.0, "b": 10.0})


def test_slices_that_are_slow_make_no_size_dear() -> None:
    """Ratios of prices come out exactly; their height is that of the mean machine."""
    taken = samples([1.0, 2.0, 1.0, 1.0, 2.0, 1.4, 1.0, 2.0])
    got = level(taken)
    for name, price in PRICES.items():
        assert got[name] / got["small"] == pytest.approx(price / PRICES["small"], rel=1e-6)
    assert sum(got[name] for _, name, _ in taken) == pytest.approx(sum(ms for _, _, ms in taken))
    plain = {n: [ms for _, name, ms in taken if name == n] for n in PRICES}
    means = {n: sum(v) / len(v) for n, v in plain.items()}
    assert abs(means["large"] / means["small"] / 22.0 - 1) > 0.02, "means alone would be off"


def test_prices_under_noise() -> None:
    r = random.Random(3)
    got = level(samples([r.choice((1.0, 2.0)) for _ in range(200)], noise=0.1))
    for name, price in PRICES.items():
        assert got[name] / got["middle"] == pytest.approx(price / PRICES["middle"], rel=0.03)


class Machine:
    """A clock that work moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_all_go_on_until_the_last_has_had_its_time() -> None:
    """Everybody sees the machine for the same time, for as long as one of them needs it."""
    machine = Machine()

    def run(step: float, steps: int) -> Iterator[None]:
        for _ in range(steps):
            machine.now += step
            yield

    parts = [
        Part(lambda _: run(0.1, 10), 4.0, Stopwatch(machine)),
        Part(lambda _: run(0.5, 40), 4.0, Stopwatch(machine)),  # a run of 20 seconds
        Part(lambda _: run(0.1, 3), 2.0, Stopwatch(machine)),
    ]
    for part in parts:
        part.others = parts
    in_turns([(p, p.watch) for p in parts], 0.2)
    assert parts[1].runs == 1 and all(p.enough for p in parts)
    assert [p.watch() for p in parts] == pytest.approx([20.0, 20.0, 10.0], abs=1.0)
    assert parts[0].runs == pytest.approx(20, abs=1) and parts[2].runs == pytest.approx(33, abs=3)


def test_alone_a_part_ends_when_it_has_had_its_time() -> None:
    machine, begun = Machine(), []

    def run(watch: Stopwatch) -> Iterator[None]:
        begun.append(watch())
        machine.now += 1.5
        yield
        machine.now += 1.5
        yield

    part = Part(run, 7.0, Stopwatch(machine))
    in_turns([(part, part.watch)], math.inf)
    assert part.runs == 3 and begun == pytest.approx([0.0, 3.0, 6.0])
    assert part.watch.starts == 1, "no other one to go on"
    more = Part(run, 7.0, Stopwatch(machine), least=5)
    in_turns([(more, more.watch)], math.inf)
    assert more.runs == 5
