"""The books of stretches with drafts and without: what they distrust, what they cost, and that they forgive."""

from __future__ import annotations

import math
import random

import pytest

from firesteel.speculation.ledger import APART, BURST, HEALS, SETTLED, Ledger

pytestmark = pytest.mark.unit


def feed(books: Ledger, drafted_ms: float, plain_ms: float, cycles: int = 40, after_ms: float = 0.0) -> None:
    """Cycles of two drafting steps and eight plain ones, all priced at 1 ms; ``after_ms``: on the first plain ones."""
    for _ in range(cycles):
        for _ in range(2):
            books.note(False, 1.0, drafted_ms)
        for i in range(8):
            books.note(True, 1.0, plain_ms + (after_ms if i < SETTLED else 0.0))


def test_nothing_is_distrusted_before_both_ways_were_seen() -> None:
    books = Ledger()
    for _ in range(500):
        books.note(False, 1.0, 9.0)
    assert books.trust == 1.0


def test_drafting_that_takes_longer_than_its_prices_say_is_distrusted() -> None:
    books = Ledger()
    feed(books, 1.25, 1.0)
    # 2 drafting steps and the 3 behind them belong to drafting: 5 ms of prices in 2 * 1.25 + 3
    assert books.trust == pytest.approx(5.0 / 5.5, rel=0.02)


def test_what_drafting_leaves_behind_is_its_own() -> None:
    books = Ledger()
    feed(books, 1.0, 1.0, after_ms=0.2)
    assert books.trust == pytest.approx(5.0 / 5.6, rel=0.02)


def test_prices_that_are_wrong_for_both_are_no_reason() -> None:
    books = Ledger()
    feed(books, 1.4, 1.4)
    assert books.trust == 1.0
    feed(books, 0.5, 1.0)
    assert books.trust == 1.0, "faster than promised: no more than the promise"


def test_a_machine_that_was_slow_while_drafts_were_made_is_no_reason() -> None:
    books = Ledger()
    for _ in range(20):  # the pace changes inside the stretches, not between them
        for plain in (False, True):
            for step in range(200):
                books.note(plain, 1.0, 1.5 if plain == (step < 40) else 1.0)
    assert books.trust > 0.97


def test_noise_is_no_reason_and_what_it_hides_is_found() -> None:
    draw, even, dearer = random.Random(1), Ledger(), Ledger()
    for _ in range(60):
        for kind in (False, True):
            for _ in range(16):
                slow = math.exp(draw.gauss(0.0, 0.1))
                even.note(kind, 1.0, slow)
                dearer.note(kind, 1.0, slow * (1.0 if kind else 1.2))
    assert even.trust > 0.97 and dearer.trust < 0.9


def test_a_promise_within_its_doubt_is_tested_soon() -> None:
    sure, unsure = Ledger(), Ledger()
    for _ in range(10 * BURST):
        sure.burst(1.5, 0.02)
        unsure.burst(1.05, 0.1)
    assert sure.bursts == 0 and unsure.bursts >= 3


def test_steps_with_prompts_interrupt() -> None:
    books = Ledger()
    for _ in range(100):
        books.note(True, 1.0, 1.0)
        books.interrupt()
    assert books.pairs.count == 0


def test_distrust_heals_while_nothing_drafts() -> None:
    books = Ledger()
    feed(books, 1.5, 1.0)
    before = 1.0 - books.trust
    for _ in range(int(HEALS) + SETTLED):
        books.note(True, 1.0, 1.0)
    assert 1.0 - books.trust == pytest.approx(before / 2, rel=0.05)


@pytest.mark.parametrize("promise", [1.05, 1.5, 4.0])
def test_bursts_cost_their_share_at_most(promise: float) -> None:
    books, steps = Ledger(0.002), 40_000
    plain = sum(books.burst(promise) for _ in range(steps))
    lost = plain * (1.0 - 1.0 / promise)
    assert plain == BURST * books.bursts > 0 and lost / steps <= 0.002
    assert plain / steps <= BURST / APART
