"""Prefix reuse: chained page keys, snapshots, and who is evicted first.

A hit needs a window, so only boundaries that hold a snapshot can be hit. The
cache is therefore a set of snapshots, each with the chain of pages below it;
pages behind the deepest snapshot are not kept. Where two requests part between
snapshots (a junction), the next one that passes stores a snapshot there.

    key(page k) = H(key(page k-1), the page's token ids); key(-1) = H(numerics, salt)
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from firesteel.engine.memory import PagePool


@dataclass
class Node:
    """One cached page; ``depth`` counts pages from the root, this one included."""

    key: bytes
    parent: Node | None
    tokens: bytes
    page: int
    depth: int
    children: int = 0
    snapshot: list[int] | None = None  # arena pages of the window that ends here


@dataclass(frozen=True)
class Match:
    """What the cache knows of a prompt.

    ``tokens`` positions can be skipped (0: a miss) with ``pages`` and
    ``snapshot``; ``junction`` is a deeper page boundary that another request
    shares and that has no snapshot yet (0: none).
    """

    tokens: int = 0
    pages: tuple[int, ...] = ()
    snapshot: tuple[int, ...] = ()
    junction: int = 0


@dataclass
class PrefixStats:
    """Counters since start."""

    queries: int = 0
    hits: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    snapshots: int = 0
    evicted: int = 0


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes, four each."""
    return array("I", tokens).tobytes()


class PrefixCache:
    """Finds, stores and evicts; holds its pages in the shared pool."""

    def __init__(self, pool: PagePool, page_size: int, fingerprint: str):
        self.pool, self.page_size = pool, page_size
        self.fingerprint = fingerprint
        self.stats = PrefixStats()
        self._nodes: dict[bytes, Node] = {}
        self._recent: OrderedDict[bytes, Node] = OrderedDict()  # nodes with a snapshot, oldest first

    # ---- look up -------------------------------------------------------------
    def _root(self, salt: str) -> bytes:
        return hashlib.blake2b(f"{self.fingerprint}\0{salt}".encode(), digest_size=16).digest()

    def chain(self, tokens: Sequence[int], salt: str) -> list[bytes]:
        """Keys of all whole pages of ``tokens``."""
        key, out = self._root(salt), []
        for lo in range(0, len(tokens) - self.page_size + 1, self.page_size):
            key = hashlib.blake2b(key + pack(tokens[lo : lo + self.page_size]), digest_size=16).digest()
            out.append(key)
        return out

    def _walk(self, tokens: Sequence[int], chain: Sequence[bytes]) -> list[Node]:
        """Cached nodes along ``chain``, as far as they go; ids are compared."""
        out = []
        for k, key in enumerate(chain):
            node = self._nodes.get(key)
            if node is None or node.tokens != pack(tokens[k * self.page_size : (k + 1) * self.page_size]):
                break
            out.append(node)
        return out

    def match(self, tokens: Sequence[int], chain: Sequence[bytes], count: bool = True) -> Match:
        """The deepest usable boundary before the last of ``tokens``; marks it as used."""
        path = self._walk(tokens, chain[: (len(tokens) - 1) // self.page_size])
        hit = next((n for n in reversed(path) if n.snapshot is not None), None)
        if count:
            self.stats.queries += 1
            self.stats.prompt_tokens += len(tokens)
        deepest = path[-1].depth if path else 0
        junction = deepest * self.page_size if deepest > (hit.depth if hit else 0) else 0
        if hit is None:
            return Match(junction=junction)
        if count:
            self._recent.move_to_end(hit.key)
            self.stats.hits += 1
            self.stats.hit_tokens += hit.depth * self.page_size
        assert hit.snapshot is not None
        pages = tuple(n.page for n in path[: hit.depth])
        return Match(hit.depth * self.page_size, pages, tuple(hit.snapshot), junction)

    # ---- store ---------------------------------------------------------------
    def has_snapshot(self, key: bytes) -> bool:
        """Whether the boundary with this key can already be hit."""
        return key in self._recent

    def insert(
        self, tokens: Sequence[int], chain: Sequence[bytes], pages: Sequence[int], snapshot: list[int]
    ) -> bytes:
        """Keep a window at the end of ``chain`` with the pages below it.

        ``pages`` are the request's own; the cache adds its hold to those that
        no earlier request has stored, and takes over the hold on
        ``snapshot``. Returns the key for ``forget``.
        """
        parent: Node | None = None
        for k, key in enumerate(chain):
            node = self._nodes.get(key)
            if node is None:
                self.pool.hold([pages[k]])
                data = pack(tokens[k * self.page_size : (k + 1) * self.page_size])
                node = Node(key, parent, data, pages[k], k + 1)
                self._nodes[key] = node
                if parent is not None:
                    parent.children += 1
            parent = node
        assert parent is not None and parent.snapshot is None, "a new snapshot at a page boundary"
        parent.snapshot = snapshot
        self._recent[parent.key] = parent
        self.stats.snapshots += 1
        return parent.key

    # ---- evict ---------------------------------------------------------------
    def forget(self, key: bytes) -> None:
        """Drop one snapshot and the pages that only it needed."""
        node = self._recent.pop(key, None)
        if node is None:
            return
        assert node.snapshot is not None
        self.pool.drop(node.snapshot)
        node.snapshot = None
        self.stats.evicted += 1
        at: Node | None = node
        while at is not None and at.children == 0 and at.snapshot is None:
            del self._nodes[at.key]
            self.pool.drop([at.page])
            if at.parent is not None:
                at.parent.children -= 1
            at = at.parent

    def evict(self, pages: int) -> bool:
        """Drop the least recently used snapshots until ``pages`` are free; False if it cannot be."""
        while self.pool.free < pages and self._recent:
            self.forget(next(iter(self._recent)))
        return self.pool.free >= pages

    def clear(self) -> None:
        """Drop everything, e.g. after the weights have changed."""
        for key in list(self._recent):
            self.forget(key)

    def holds(self) -> list[int]:
        """Every page the cache holds, for the conservation check."""
        return [n.page for n in self._nodes.values()] + [
            p for n in self._recent.values() for p in (n.snapshot or [])
        ]

    @property
    def pages(self) -> int:
        """Pages that the cache holds, snapshots included."""
        return len(self.holds())
