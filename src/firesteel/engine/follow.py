"""A rank that decides nothing: it runs the steps that rank 0 plans, until rank 0 stops.

It has no scheduler, no queue and no account of memory: plans come with the
page table lines they rely on. What its own device computes in floats is
never looked at; integers are those of rank 0 (``parallel.Group.agree``).
"""

from __future__ import annotations

from collections.abc import Callable

from firesteel.core import StepPlan
from firesteel.engine.runner import Runner


def follow(runner: Runner, hear: Callable[[StepPlan], None] = lambda _: None) -> int:
    """Run plans until rank 0 sends None; returns how many. ``hear`` is told of each after it ran."""
    assert not runner.group.leads, "rank 0 plans"
    steps = 0
    while (sent := runner.group.share(None)) is not None:
        plan, lines = sent
        runner.memory.adopt(lines)
        runner.launch(plan)
        steps += 1
        hear(plan)
    return steps


def stop(runner: Runner) -> None:
    """On rank 0: let the others return."""
    assert runner.group.leads, "only rank 0 says when it is over"
    runner.group.share(None)
