"""A clock that counts what a machine gets done."""

from __future__ import annotations

import pytest

from firesteel.bench.steady import FIRST, Steady
from firesteel.config import ParameterError


class Machine:
    """Work takes ``pace`` times as long; the fixed step takes 2 ms of work."""

    def __init__(self) -> None:
        self.now, self.pace, self.looks = 100.0, 1.0, 0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds * self.pace

    def gauge(self) -> float:
        begun = self.now
        self.work(0.002)
        self.looks += 1
        return self.now - begun


def test_the_gauge_takes_no_time_and_a_slow_machine_changes_no_reading() -> None:
    machine = Machine()
    clock = Steady(machine.gauge, 0.04, machine)
    assert machine.looks == FIRST + 1, "one warms up"
    begun = clock.now()
    for second in range(8):
        machine.pace = 2.0 if second % 2 else 1.0
        for _ in range(50):
            machine.work(0.02)
            clock.now()
    took = clock.now() - begun
    # a change is seen at the next look, at most 0.06 s later, now too early and now too late
    assert took == pytest.approx(8.0, abs=0.07)
    assert clock.slowness == pytest.approx(1.5, abs=0.02)
    assert clock.looks > 100 and machine.now - 100.0 > 12.0


def test_usual_is_what_it_takes_most_of_the_time_at_first() -> None:
    machine = Machine()
    count = iter(range(1000))

    def gauge() -> float:
        machine.pace = 5.0 if next(count) % 4 == 0 else 2.0  # the usual pace here is 2
        return machine.gauge()

    clock = Steady(gauge, 1e9, machine)
    machine.pace = 2.0
    machine.work(1.0)
    assert clock.now() == pytest.approx(2.0) and clock.slowness == pytest.approx(1.0)


def test_real_arrivals_need_real_time() -> None:
    machine = Machine()
    with pytest.raises(ParameterError, match="clock wall"):
        Steady(machine.gauge, 1.0, machine).wait(3.0)


def test_one_look_that_is_interrupted_counts_for_nothing() -> None:
    machine, count = Machine(), iter(range(10_000))

    def gauge() -> float:
        machine.pace = 20.0 if next(count) % 7 == 0 else 1.0
        took = machine.gauge()
        machine.pace = 1.0
        return took

    clock, begun = Steady(gauge, 0.04, machine), machine.now
    for _ in range(200):
        machine.work(0.02)
        clock.now()
    assert clock.now() == pytest.approx(4.0, abs=1e-6) and machine.now - begun > 4.5
