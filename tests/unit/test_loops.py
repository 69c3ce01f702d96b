"""Loops in turns: each on a clock of its own, all at about the same token at any moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from firesteel.bench.loops import Job, Loop, Stopwatch, in_turns
from firesteel.config import SamplingParams
from firesteel.core import FinishReason


@dataclass
class Machine:
    """A clock that work moves on; ``pace`` times as slow as usual."""

    now: float = 0.0
    pace: float = 1.0
    changes: list[tuple[float, float]] = field(default_factory=list)  # from when on, pace

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        while self.changes and self.now >= self.changes[0][0]:
            self.pace = self.changes.pop(0)[1]
        self.now += seconds * self.pace


@dataclass
class Answer:
    request_id: int
    ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str = ""


class Frontend:
    """Steps of ``cost`` seconds that give every open request ``each`` tokens."""

    def __init__(self, machine: Machine, cost: float, each: int, trace: list[int], name: int):
        self.machine, self.cost, self.each = machine, cost, each
        self.trace, self.name = trace, name
        self.open: dict[int, tuple[Answer, int]] = {}
        self.count = self.most = 0

    def add(self, _: Any, params: SamplingParams) -> list[Answer]:
        answer = Answer(self.count)
        self.count += 1
        self.open[answer.request_id] = (answer, params.max_tokens)
        self.most = max(self.most, len(self.open))
        return [answer]

    def step(self) -> list[Answer]:
        self.machine.work(self.cost)
        self.trace.append(self.name)
        changed = [answer for answer, _ in self.open.values()]
        for answer, most in list(self.open.values()):
            answer.ids += [1] * min(self.each, most - len(answer.ids))
            if len(answer.ids) == most:
                answer.finish = FinishReason.LENGTH
                del self.open[answer.request_id]
        return changed


def jobs(n: int, tokens: int) -> list[Job]:
    return [Job([1], SamplingParams(max_tokens=tokens)) for _ in range(n)]


def both(machine: Machine, seconds: float, tokens: int = 999) -> tuple[list[Loop], list[int], list[Frontend]]:
    """A plain arm (1 token in 0.1 s) and one of 3 tokens in 0.2 s, two requests at once, four in all."""
    trace: list[int] = []
    ends = [Frontend(machine, 0.1, 1, trace, 0), Frontend(machine, 0.2, 3, trace, 1)]
    loops = []
    for end in ends:
        watch = Stopwatch(machine)
        loops.append((Loop(end, jobs(4, tokens), 2, watch), watch))  # type: ignore[arg-type]
    in_turns(loops, seconds)
    return [loop for loop, _ in loops], trace, ends


def test_each_loop_counts_its_own_time_only() -> None:
    loops, trace, ends = both(Machine(), 1.0)
    assert [loop.seen for loop in loops] == [3996, 3996] and all(loop.done for loop in loops)
    assert loops[0].seconds == pytest.approx(199.8) and loops[1].seconds == pytest.approx(2 * 333 * 0.2)
    assert trace.count(0) == 1998 and trace.count(1) == 666 and [end.most for end in ends] == [2, 2]
    assert loops[0].window.tokens / loops[0].window.seconds == pytest.approx(20.0)


def test_they_stay_beside_one_another() -> None:
    """Neither is ever ahead by more than what a turn brings."""
    _, trace, _ = both(Machine(), 1.0)
    tokens, most = [0, 0], 0
    for name in trace:
        tokens[name] += 2 if name == 0 else 6
        most = max(most, abs(tokens[0] - tokens[1]))
    assert most <= 36  # one second of the faster one and a step


def test_a_machine_that_changes_its_speed_changes_no_ratio() -> None:
    slow = [(10.0 * i, 2.0 if i % 2 else 1.0) for i in range(100)]
    loops, _, _ = both(Machine(changes=list(slow)), 0.5)
    ratio = loops[0].seconds / loops[1].seconds
    assert ratio == pytest.approx(1.5, rel=0.03)
    # one behind the other the same machine shows another ratio
    machine = Machine(changes=[(0.0, 1.0), (100.0, 2.0)])
    whole, _, _ = both(machine, 1e9)
    assert whole[0].seconds / whole[1].seconds == pytest.approx((100 + 2 * 99.8) / (2 * 133.2), rel=0.01)


def test_jobs_know_their_times_on_that_clock() -> None:
    machine, work = Machine(now=50.0), jobs(3, 4)
    watch = Stopwatch(machine)
    loop = Loop(Frontend(machine, 0.5, 2, [], 0), work, 2, watch)  # type: ignore[arg-type]
    in_turns([(loop, watch)], 0.1)
    assert [j.first for j in work] == pytest.approx([0.5, 0.5, 1.5])
    assert [j.last for j in work] == pytest.approx([1.0, 1.0, 2.0]) and loop.seconds == pytest.approx(2.0)
    machine.work(7.0)
    assert watch() == pytest.approx(2.0), "stopped"


def test_an_answer_that_fails_is_an_error() -> None:
    machine = Machine()
    end = Frontend(machine, 0.1, 1, [], 0)
    loop = Loop(end, jobs(1, 5), 1, machine)  # type: ignore[arg-type]
    loop.turn()
    for answer, _ in end.open.values():
        answer.finish, answer.error = FinishReason.ERROR, "poisoned"
    with pytest.raises(RuntimeError, match="poisoned"):
        loop.turn()


def test_no_window_where_an_answer_ends_before_all_decode() -> None:
    machine = Machine()
    for lengths, tokens in (((9, 9), 16), ((1, 9), 0)):  # the second one's place is taken by a prompt
        work = [Job([1], SamplingParams(max_tokens=n)) for n in (*lengths, 5)]
        loop = Loop(Frontend(machine, 0.1, 1, [], 0), work, 2, machine)  # type: ignore[arg-type]
        while not loop.done:
            loop.turn()
        assert loop.window.tokens == tokens


def test_a_stopwatch_that_waits_makes_nobody_wait() -> None:
    machine = Machine(now=10.0)
    watch = Stopwatch(machine)
    watch.go()
    machine.work(1.0)
    watch.wait(5.0)
    assert watch() == pytest.approx(5.0) and machine() == pytest.approx(11.0)
    assert watch.worked == pytest.approx(1.0)
    watch.wait(2.0)  # that is over
    watch.stop()
    machine.work(3.0)
    watch.go()
    assert watch() == pytest.approx(5.0) and watch.starts == 2
