"""The prefix cache against a brute-force model, and what must never be shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from firesteel.engine.memory import PagePool
from firesteel.engine.prefix import PrefixCache

SIZE = 4  # tokens per page
PAGES = 40
EXAMPLES = 50
SNAPSHOT = 2  # pages of one snapshot
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=4 * SIZE + 1)
SALTS = st.sampled_from(("", "other"))


@dataclass
class Stored:
    """One snapshot of the model: the text below it, its salt, its pages."""

    text: tuple[int, ...]
    salt: str
    window: tuple[int, ...]
    key: bytes


class Cache(RuleBasedStateMachine):
    """The model is a list of snapshots, oldest first, and the pages that each text's pages live in."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES)
        self.cache = PrefixCache(self.pool, SIZE, "numerics")
        self.stored: list[Stored] = []
        self.home: dict[tuple[tuple[int, ...], str], int] = {}  # (text up to a page's end, salt) -> page

    # ---- the model ---------------------------------------------------------------
    def below(self, text: Sequence[int]) -> list[tuple[int, ...]]:
        """The text up to the end of each of its whole pages."""
        return [tuple(text[:end]) for end in range(SIZE, len(text) + 1, SIZE)]

    def prune(self) -> None:
        """Pages that no snapshot needs are not kept."""
        needed = {(part, s.salt) for s in self.stored for part in self.below(s.text)}
        self.home = {k: page for k, page in self.home.items() if k in needed}

    def usable(self, text: Sequence[int], salt: str) -> list[Stored]:
        """Snapshots before the last token of ``text``, deepest first."""
        hits = [
            s
            for s in self.stored
            if s.salt == salt and len(s.text) < len(text) and tuple(text[: len(s.text)]) == s.text
        ]
        return sorted(hits, key=lambda s: -len(s.text))

    # ---- rules ---------------------------------------------------------------------
    @rule(text=TEXTS, salt=SALTS)
    def store(self, text: list[int], salt: str) -> None:
        """A request has run ``text`` with reused and fresh pages; its deepest boundary gets a window."""
        whole = tuple(text[: len(text) // SIZE * SIZE])
        chain = self.cache.chain(whole, salt)
        if not chain or self.cache.has_snapshot(chain[-1]):
            return
        pages = []
        for part in self.below(whole):
            page = self.home.get((part, salt))
            fresh = self.pool.take(1) if page is None else None
            if page is not None:
                self.pool.hold([page])
            elif fresh is None:  # no room: the request would wait
                self.pool.drop(pages)
                return
            pages.append(page if page is not None else fresh[0])
        window = self.pool.take(SNAPSHOT)
        if window is not None:
            key = self.cache.insert(text, chain, pages, window)
            self.stored.append(Stored(whole, salt, tuple(window), key))
            for part, page in zip(self.below(whole), pages, strict=True):
                self.home.setdefault((part, salt), page)
        self.pool.drop(pages)  # the request ends

    @rule(text=TEXTS, salt=SALTS, count=st.booleans())
    def match(self, text: list[int], salt: str, count: bool) -> None:
        found = self.cache.match(text, self.cache.chain(text, salt), count=count)
        hits = self.usable(text, salt)
        inside = [p for p in self.below(text) if len(p) < len(text)]
        cached = [p for p in inside if (p, salt) in self.home]
        assert cached == inside[: len(cached)], "the model keeps whole chains"
        depth = len(hits[0].text) if hits else 0
        assert found.tokens == depth
        assert found.pages == tuple(self.home[part, salt] for part in self.below(text[:depth]))
        assert found.snapshot == (hits[0].window if hits else ())
        deepest = len(cached) * SIZE
        assert found.junction == (deepest if deepest > depth else 0)
        if hits and count:  # the newest is evicted last
            self.stored.remove(hits[0])
            self.stored.append(hits[0])

    @precondition(lambda self: self.stored)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(range(len(self.stored))))
        self.cache.forget(self.stored.pop(victim).key)
        self.prune()

    @rule(pages=st.integers(0, PAGES))
    def evict(self, pages: int) -> None:
        enough = self.cache.evict(pages)
        while self.free() < pages and self.stored:
            self.stored.pop(0)
            self.prune()
        assert enough and self.pool.free >= pages

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.stored, self.home = [], {}

    # ---- always ------------------------------------------------------------------------
    def free(self) -> int:
        return PAGES - len(self.home) - SNAPSHOT * len(self.stored)

    @invariant()
    def conserved(self) -> None:
        self.pool.check(self.cache.holds())
        held = sorted([*self.home.values(), *(p for s in self.stored for p in s.window)])
        assert sorted(self.cache.holds()) == held
        assert self.pool.free == self.free()


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=EXAMPLES, stateful_step_count=40)


def stored(cache: PrefixCache, text: Sequence[int], salt: str = "") -> bytes:
    """Store a window at the end of ``text``; the request's own holds end."""
    pages, window = cache.pool.take(len(text) // SIZE), cache.pool.take(SNAPSHOT)
    assert pages is not None and window is not None
    key = cache.insert(text, cache.chain(text, salt), pages, window)
    cache.pool.drop(pages)
    return key


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(PagePool(PAGES), SIZE, "float32 reference")


def hit(cache: PrefixCache, text: Sequence[int], salt: str = "") -> int:
    return cache.match(text, cache.chain(text, salt)).tokens


def test_salts_and_fingerprints_do_not_share(cache: PrefixCache):
    text = list(range(SIZE)) * 2
    stored(cache, text, "tenant")
    assert hit(cache, [*text, 9], "tenant") == 2 * SIZE
    assert hit(cache, [*text, 9]) == 0
    other = PrefixCache(cache.pool, SIZE, "official reference")
    assert not set(other.chain(text, "tenant")) & set(cache.chain(text, "tenant"))


def test_a_salt_cannot_imitate_a_fingerprint():
    pool = PagePool(2)
    a, b = PrefixCache(pool, SIZE, "x"), PrefixCache(pool, SIZE, "x\0y")
    text = list(range(SIZE))
    assert a.chain(text, "y") != b.chain(text, "")


def test_keys_hold_everything_from_the_first_token(cache: PrefixCache):
    text = list(range(3 * SIZE))
    other = [99, *text[1:]]
    assert not set(cache.chain(text, "")) & set(cache.chain(other, ""))
    assert cache.chain(text, "")[:2] == cache.chain(text[: 2 * SIZE + 1], "")


def test_equal_keys_of_other_tokens_are_not_a_hit(cache: PrefixCache):
    text, other = [1] * (2 * SIZE), [2] * (2 * SIZE)
    stored(cache, text)
    forged = cache.chain(text, "")  # as if the hash had collided
    assert cache.match([*text, 0], forged).tokens == 2 * SIZE
    assert cache.match([*other, 0], forged).tokens == 0
    half = [1] * SIZE + [2] * SIZE
    assert cache.match([*half, 0], forged).tokens == 0


def test_a_hit_leaves_the_last_token_to_run(cache: PrefixCache):
    text = [1] * (2 * SIZE)
    stored(cache, text)
    assert hit(cache, text) == 0
    assert hit(cache, [*text, 1]) == 2 * SIZE


def test_looking_without_counting_neither_counts_nor_keeps_alive(cache: PrefixCache):
    old, new = [1] * SIZE, [2] * SIZE
    stored(cache, old)
    stored(cache, new)
    cache.match([*old, 0], cache.chain(old, ""), count=False)
    assert cache.stats.queries == cache.stats.hits == 0
    assert cache.evict(cache.pool.free + 1)
    assert (hit(cache, [*old, 0]), hit(cache, [*new, 0])) == (0, SIZE)


def test_forgetting_an_unknown_key_does_nothing(cache: PrefixCache):
    key = stored(cache, [1] * SIZE)
    cache.forget(b"nobody")
    cache.forget(key)
    cache.forget(key)
    assert not cache.holds() and cache.pool.free == PAGES


def test_eviction_that_cannot_reach_its_goal_says_so(cache: PrefixCache):
    kept = cache.pool.take(5)
    stored(cache, [1] * SIZE)
    assert kept is not None and not cache.evict(PAGES)
    assert cache.pool.free == PAGES - len(kept)
