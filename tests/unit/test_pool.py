"""The account of pages: holders, shortage, and detection of leaks and doubles."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from firesteel.engine.memory import PagePool

PAGES = 7
EXAMPLES = 40


class Pool(RuleBasedStateMachine):
    """Against a model: how many holds each page has."""

    held = Bundle("held")  # one hold on one page

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.model = PagePool(PAGES), Counter[int]()

    @rule(target=held, n=st.integers(0, PAGES + 1))
    def take(self, n: int):
        free = PAGES - len(self.model)
        pages = self.pool.take(n)
        if n > free:
            assert pages is None
            return multiple()
        assert pages is not None and len(set(pages)) == n
        assert not set(pages) & set(self.model), "a held page was handed out"
        self.model.update(pages)
        return multiple(*pages)

    @rule(target=held, page=held)
    def hold(self, page: int) -> int:
        self.pool.hold([page])
        self.model[page] += 1
        return page

    @rule(page=consumes(held))
    def drop(self, page: int) -> None:
        self.pool.drop([page])
        self.model[page] -= 1
        self.model += Counter()  # zero counts go

    @invariant()
    def conserved(self) -> None:
        holds = list(self.model.elements())
        self.pool.check(holds)
        assert self.pool.free == PAGES - len(self.model)
        assert sorted(self.pool.free_pages()) == [p for p in range(1, PAGES + 1) if p not in self.model]


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=EXAMPLES, stateful_step_count=40)


def test_page_zero_is_never_handed_out():
    pool = PagePool(4)
    assert sorted(pool.take(4) or []) == [1, 2, 3, 4]
    assert pool.take(1) is None


def test_a_free_page_cannot_be_shared_and_none_dropped_twice():
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="held page"):
        pool.hold([1])
    pages = pool.take(1)
    assert pages is not None
    pool.drop(pages)
    with pytest.raises(AssertionError, match="twice"):
        pool.drop(pages)


def test_check_sees_a_leak_a_double_and_a_foreign_hold():
    pool = PagePool(3)
    page = (pool.take(1) or [0])[0]
    pool.check([page])
    for wrong in ([], [page, page], [page % 3 + 1]):
        with pytest.raises(AssertionError):
            pool.check(wrong)


def test_a_request_that_fails_takes_nothing():
    pool = PagePool(3)
    assert pool.take(2) is not None and pool.take(2) is None
    assert pool.free == 1
