"""Work that may take only so long: who is told what, and who gets the thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

import pytest

from firesteel.engine import limited
from firesteel.engine.limited import Background, Foreground, TooMany

PATIENCE = 20.0  # seconds after which a test counts as hanging
SHORT = 0.2


class Late(Exception):
    """What a caller hears of overdue work."""


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Stuck work waits for it; opened at the end, so that no thread is left."""
    event = threading.Event()
    yield event
    event.set()


def stuck(gate: threading.Event) -> str:
    assert gate.wait(PATIENCE), "nobody opened the gate"
    return "late"


def test_results_and_errors_reach_their_future() -> None:
    work = Background(PATIENCE, 2, "test")
    good, bad = work.begin(lambda: 5, Late), work.begin(lambda: 1 // 0, Late)
    assert good.result(PATIENCE) == 5
    with pytest.raises(ZeroDivisionError):
        bad.result(PATIENCE)
    assert work.pending == work.overdue == 0


def test_overdue_work_fails_alone_and_gives_its_turn_back(gate: threading.Event) -> None:
    work, ended = Background(SHORT, 1, "test"), threading.Event()
    slow = work.begin(partial(stuck, gate), Late)
    behind = work.begin(lambda: "on time", Late)  # waits for longer than it may take: that does not count
    with pytest.raises(Late):
        slow.result(PATIENCE)
    assert behind.result(PATIENCE) == "on time"
    assert (work.pending, work.overdue) == (0, 1)
    gate.set()
    work.begin(ended.set, Late).result(PATIENCE)
    for _ in range(2000):
        if not work.overdue:
            break
        threading.Event().wait(0.01)
    assert work.overdue == 0 and isinstance(slow.exception(), Late)


def test_too_much_overdue_work_stops_new_work(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "MAX_OVERDUE", 2)
    work = Background(SHORT, 1, "test")
    slow: list[Future[str]] = [work.begin(partial(stuck, gate), Late) for _ in range(2)]
    for one in slow:
        assert isinstance(one.exception(PATIENCE), Late)
    with pytest.raises(TooMany, match="2 jobs beyond their"):
        work.begin(lambda: 5, Late)


@pytest.mark.parametrize("threads", (1, 3))
def test_a_step_waits_for_all_but_the_overdue(gate: threading.Event, threads: int) -> None:
    work = Foreground(SHORT, threads, "test")
    jobs = [partial(str, i) for i in range(8)]
    assert work.run(jobs) == [str(i) for i in range(8)]
    jobs[2] = jobs[5] = partial(stuck, gate)
    assert work.run(jobs) == [None if i in (2, 5) else str(i) for i in range(8)]
    assert work.run(jobs[:2]) == ["0", "1"], "fresh threads do the next step"
    assert work.run([]) == []


def test_an_error_is_the_steps() -> None:
    with pytest.raises(ZeroDivisionError):
        Foreground(PATIENCE, 1, "test").run([lambda: 1, lambda: 1 // 0])
