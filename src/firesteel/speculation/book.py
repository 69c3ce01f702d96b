"""What is known of each request's drafts: its newest blocks, and those of all requests together.

A block is kept by its signals (confidence logit, margin), so that a new
calibration prices it anew. Depths that a block does not reach are filled with
what drafts at that depth are usually worth. Everything is arrays over
requests: at 256 of them a Python loop would cost more than a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firesteel.speculation.survival import CLASSES, Coefficients
from firesteel.speculation.terms import Candidate, Proposed

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CASES = 32  # newest blocks of a request
POOL = 256  # newest blocks of a temperature class
SHRINK = 8.0  # blocks at which a request's own count as much as everybody's, until that is known
COMPARE = 16  # drafting passes between looks at how much requests differ
LIVES = 64  # ended requests that tell how much requests differ
GUESS = 8.0  # blocks that the guess about an unknown drafter stands for
FILED = 64.0  # the same if a calibration file says what is usual
MEMORY = 1024  # first drafts that the guess remembers
FIRST, SAMPLE = 4, 8  # of a request the pool takes the first blocks, then every eighth: requests count alike
SCENARIOS = 256  # requests times scenarios of one decision
UNKNOWN = 0.7  # conditional acceptance of a first draft of which nothing is known
FADE = 0.96  # per step
FEW = 2.0  # how many blocks a depth's neighbour stands for


class Book:
    """Blocks by request and by temperature class; ``depths`` is K."""

    # one line per request
    _head: Floats  # [N, CASES, K] signals of its newest blocks, a ring
    _margin: Floats
    _survival: Floats
    _width: Ints  # [N, CASES] depths that a block reaches
    _seen: Ints  # [N] blocks so far
    _trust: Floats  # [N] blocks, fading while none are made
    _kind: Ints
    _speed: Floats  # [N, 2] fading sums: tokens, milliseconds
    _boost: Floats  # weight that a wish for speed adds
    _floor: Floats  # tokens per second it asks for

    def __init__(self, depths: int, coefficients: Coefficients, proven: bool = False):
        """``proven``: the coefficients come from a file, so the drafter is known to be worth a try."""
        usual = coefficients.usual
        self.depths, self.coefficients, self._proven = depths, coefficients, proven
        self._row: dict[int, int] = {}
        self._free: list[int] = []
        self._size = 0
        self._alloc(16)
        shape = (CLASSES, POOL, depths)
        self._pool_head, self._pool_margin = np.zeros(shape), np.zeros(shape)
        self._pool_survival = np.zeros(shape)
        self._pool_width = np.zeros((CLASSES, POOL), dtype=np.int64)
        self._pool_count = [0] * CLASSES
        self._worth, self._worth_count = np.zeros((CLASSES, depths)), np.zeros((CLASSES, depths))
        self.shrink = SHRINK
        self.version = 0  # of everything that ``scenarios`` depends on
        self._scenes: tuple[object, Floats] | None = None  # the last ones and what they were made of
        self.wishes = False  # whether any request ever had one
        self._lives: deque[tuple[float, float, int]] = deque(maxlen=LIVES)
        self._takes = 0
        self._prior = FILED if usual else GUESS
        self._start = _guess(usual, depths)
        self._guess, self._fates = self._start, np.zeros((2, depths))  # accepted, tried
        self._usual = self._fill()

    @property
    def unproven(self) -> bool:
        """Whether next to nothing is known of the drafter."""
        return not self._proven and sum(self._pool_count) < self._prior == GUESS

    def _alloc(self, size: int) -> None:
        def grown(name: str, fresh: NDArray[Any]) -> None:
            old = getattr(self, name, None)
            if old is not None:
                fresh[: len(old)] = old
            setattr(self, name, fresh)

        k = self.depths
        for name in ("_head", "_margin", "_survival"):
            grown(name, np.zeros((size, CASES, k)))
        grown("_width", np.zeros((size, CASES), dtype=np.int64))
        grown("_seen", np.zeros(size, dtype=np.int64))
        grown("_trust", np.zeros(size))
        grown("_kind", np.ones(size, dtype=np.int64))
        grown("_speed", np.zeros((size, 2)))
        grown("_boost", np.ones(size))
        grown("_floor", np.zeros(size))
        self._free.extend(range(size - 1, self._size - 1, -1))
        self._size = size

    # ---- rows ----------------------------------------------------------------------
    def rows(self, request_ids: Sequence[int]) -> Ints:
        """Row of each request; a new one gets a fresh row."""
        out = np.empty(len(request_ids), dtype=np.int64)
        for i, rid in enumerate(request_ids):
            row = self._row.get(rid)
            out[i] = self._open(rid) if row is None else row
        return out

    def _open(self, request_id: int) -> int:
        if not self._free:
            self._alloc(2 * self._size)
        row = self._free.pop()
        self._row[request_id] = row
        self._seen[row], self._kind[row], self._trust[row] = 0, 1, 0.0
        self._speed[row], self._boost[row], self._floor[row] = 0.0, 1.0, 0.0
        return row

    def forget(self, request_id: int) -> None:
        """A request has ended."""
        row = self._row.pop(request_id, None)
        if row is not None:
            self.version += 1
            self._free.append(row)
            n = int(min(self._seen[row], CASES))
            if n > 1:
                worth = self._survival[row, :n].sum(1)
                self._lives.append((float(worth.mean()), float(worth.var(ddof=1)), n))

    def _compare(self) -> None:
        """How many own blocks are worth everybody's: variance inside requests over that between them."""
        rows = np.array(sorted(self._row.values()), dtype=np.int64)
        rows = rows[self._seen[rows] > 1]
        n = np.minimum(self._seen[rows], CASES)
        exists = np.arange(CASES) < n[:, None]
        worth = np.where(exists, self._survival[rows].sum(2), 0.0)
        mean = worth.sum(1) / n
        inside = (np.where(exists, worth - mean[:, None], 0.0) ** 2).sum(1) / (n - 1)
        ended = np.array(self._lives).reshape(-1, 3)
        mean, inside, n = (
            np.concatenate(p).astype(np.float64) for p in zip((mean, inside, n), ended.T, strict=True)
        )
        if len(n) < 3:
            return
        within = float(np.average(inside, weights=n - 1))
        between = float(mean.var(ddof=1)) - within * float((1.0 / n).mean())
        found = np.clip(within / max(between, within / 64.0, 1e-9), 1.0, 64.0)
        share = len(n) / (len(n) + 8.0)
        self.shrink = float(SHRINK ** (1 - share) * found**share)

    # ---- blocks ----------------------------------------------------------------------
    def take(self, proposed: Sequence[Proposed]) -> None:
        """New blocks, oldest first."""
        self.version += 1
        by_width: dict[int, list[Proposed]] = {}
        for p in proposed:
            by_width.setdefault(len(p.margin), []).append(p)
        for width, same in by_width.items():
            if width:
                self._take(same, width)

    def _take(self, proposed: list[Proposed], width: int) -> None:
        rows = self.rows([p.request_id for p in proposed])
        kind = np.array([p.kind for p in proposed], dtype=np.int64)
        margin = np.array([p.margin for p in proposed], dtype=np.float64)
        head = np.zeros_like(margin)
        if proposed[0].head:
            head = np.array([p.head for p in proposed], dtype=np.float64)
        conditional = self._conditional(head, margin, kind)
        for k in range(CLASSES):
            mine = kind == k
            if mine.any():
                self._weigh(k, conditional[mine])
        self._usual = self._fill()
        survival = self._product(conditional, kind)
        number = np.empty_like(rows)  # which block of its request each one is
        for i, row in enumerate(rows.tolist()):
            number[i] = self._seen[row]
            self._seen[row] += 1
            self._trust[row] += 1.0
        at = number % CASES
        self._head[rows, at, :width], self._margin[rows, at, :width] = head, margin
        self._survival[rows, at], self._width[rows, at] = survival, width
        self._kind[rows] = kind
        self._takes += 1
        if self._takes % COMPARE == 0:
            self._compare()
        fresh = (number < FIRST) | (number % SAMPLE == 0)
        if fresh.any():
            self._pool(kind[fresh], head[fresh], margin[fresh], survival[fresh], width)

    def _pool(self, kind: Ints, head: Floats, margin: Floats, survival: Floats, width: int) -> None:
        for k in range(CLASSES):
            mine = np.flatnonzero(kind == k)[:POOL]
            at = (self._pool_count[k] + np.arange(len(mine))) % POOL
            self._pool_head[k, at, :width], self._pool_margin[k, at, :width] = head[mine], margin[mine]
            self._pool_survival[k, at], self._pool_width[k, at] = survival[mine], width
            self._pool_count[k] += len(mine)

    def _conditional(self, head: Floats, margin: Floats, kind: Ints) -> Floats:
        """[n, w] conditional probabilities under the present coefficients."""
        depth = np.broadcast_to(np.arange(margin.shape[-1]), margin.shape)
        kinds = np.broadcast_to(kind.reshape(-1, *[1] * (margin.ndim - 1)), margin.shape)
        return self.coefficients.probability(head, margin, depth, kinds)

    def _product(self, conditional: Floats, kind: Ints) -> Floats:
        """[n, K] survivals; behind the block's width each depth is worth what it usually is."""
        full = self._usual[kind].copy()
        full[:, : conditional.shape[1]] = conditional
        out: Floats = np.asarray(np.cumprod(full, axis=1), dtype=np.float64)
        return out

    def _weigh(self, kind: int, conditional: Floats) -> None:
        """Fading mean of what drafts at each depth are worth."""
        n, width = conditional.shape
        count = self._worth_count[kind, :width]
        rate = np.maximum(n / (count + n), min(n / POOL, 1.0))
        self._worth[kind, :width] += rate * (conditional.mean(0) - self._worth[kind, :width])
        count += n

    def _fill(self) -> Floats:
        """[classes, K] usual conditional probability; an unknown depth is worth what the one before it is."""
        guess, out = self._guess.tolist(), []
        for worth, count in zip(self._worth.tolist(), self._worth_count.tolist(), strict=True):
            before, line = guess[0], []
            for j in range(self.depths):
                before *= guess[j] / guess[max(j - 1, 0)]
                before = (count[j] * worth[j] + FEW * before) / (count[j] + FEW)
                line.append(before)
            out.append(line)
        return np.array(out)

    def reprice(self, coefficients: Coefficients) -> None:
        """New coefficients: every block is priced again."""
        self.coefficients = coefficients
        self.version += 1
        depth = np.arange(self.depths)
        for k in range(CLASSES):
            n = min(self._pool_count[k], POOL)
            known = depth < self._pool_width[k, :n, None]
            p = self._conditional(self._pool_head[k, :n], self._pool_margin[k, :n], np.full(n, k))
            reach = known.sum(0)
            mean = np.where(known, p, 0.0).sum(0) / np.maximum(reach, 1)
            self._worth[k] = np.where(reach > 0, mean, self._worth[k])
        self._usual = self._fill()
        for k in range(CLASSES):
            n = min(self._pool_count[k], POOL)
            known = depth < self._pool_width[k, :n, None]
            p = self._conditional(self._pool_head[k, :n], self._pool_margin[k, :n], np.full(n, k))
            self._pool_survival[k, :n] = np.cumprod(np.where(known, p, self._usual[k]), axis=1)
        rows = np.array(sorted(self._row.values()), dtype=np.int64)
        known = depth < self._width[rows, :, None]
        p = self._conditional(self._head[rows], self._margin[rows], self._kind[rows])
        usual = self._usual[self._kind[rows]][:, None, :]
        self._survival[rows] = np.cumprod(np.where(known, p, usual), axis=2)

    # ---- outcomes ---------------------------------------------------------------------
    def judge(self, depth: Ints, accepted: Floats) -> None:
        """The guess about requests of which nothing is known follows what became of drafts."""
        self.version += 1
        self._fates[0] += np.bincount(depth, accepted, minlength=self.depths)[: self.depths]
        self._fates[1] += np.bincount(depth, minlength=self.depths)[: self.depths]
        if self._fates[1, 0] > MEMORY:
            self._fates *= 0.5
        hits, tries = self._fates.tolist()
        start, out = self._start.tolist(), []
        before = start[0]
        for j in range(self.depths):
            before *= start[j] / start[max(j - 1, 0)]
            before = (self._prior * before + hits[j]) / (self._prior + tries[j])
            out.append(before)
        self._guess = np.array(out)

    # ---- what may come -------------------------------------------------------------------
    def usual(self, candidates: Sequence[Candidate]) -> Floats:
        """[R, K] mean survival that each request's next block may have; 0 behind its cap."""
        out: Floats = self.scenarios(candidates).mean(0)
        return out

    def scenarios(self, candidates: Sequence[Candidate]) -> Floats:
        """[S, R, K] survivals that the next blocks may turn out to have, S equally likely cases.

        One block says little of the next, so a request's next one is any of
        its own newest or, the fewer those are, any of its class. 0 behind its cap.
        """
        key = (self.version, [(c.request_id, c.cap, c.kind) for c in candidates])
        if self._scenes is None or self._scenes[0] != key:
            self._scenes = (key, self._make_scenes(candidates))
        return self._scenes[1]

    def _make_scenes(self, candidates: Sequence[Candidate]) -> Floats:
        r = len(candidates)
        s = min(max(SCENARIOS // max(r, 1), 2), 64)
        rows = self.rows([c.request_id for c in candidates])
        kind = np.array([c.kind for c in candidates], dtype=np.int64)
        case, column = np.arange(s)[:, None], np.arange(r)
        # strata instead of draws: a decision for few requests must not be a lottery
        trust = np.minimum(self._trust[rows], CASES)
        own = (case + 0.5) / s < trust / (trust + self.shrink)
        mine = self._survival[rows, (case + 5 * column) % np.clip(self._seen[rows], 1, CASES)]
        have = np.array([min(n, POOL) for n in self._pool_count])[kind]
        other = self._pool_survival[kind, (case * 37 + 11 * column) % np.maximum(have, 1)]
        # a second stratification, out of step with the first
        pooled = ((case * 13) % s + 0.5) / s < have / (have + self._prior)
        other = np.where(pooled[..., None], other, np.cumprod(self._guess))
        cap = np.array([c.cap for c in candidates])
        out: Floats = np.where(own[..., None], mine, other)
        return np.where(np.arange(self.depths) < cap[:, None], out, 0.0)

    def fade(self, request_ids: Sequence[int]) -> None:
        """What is known of requests that do not draft grows old."""
        self.version += 1
        rows = self.rows(request_ids)
        self._trust[rows] *= FADE

    # ---- wishes for speed ------------------------------------------------------------------
    def ask(self, candidates: Sequence[Candidate]) -> None:
        """Note the wishes of requests."""
        for c in candidates:
            if c.floor > 0:
                self.wishes = True
                row = self.rows([c.request_id])[0]
                self._floor[row] = c.floor

    def clock(self, request_ids: Sequence[int], tokens: Ints, ms: float) -> None:
        """Tokens that a step of ``ms`` gave; a request short of its wish gains weight, one beyond it loses it."""
        rows = self.rows(request_ids)
        self._speed[rows] *= 0.95
        self._speed[rows, 0] += tokens
        self._speed[rows, 1] += ms
        wish = self._floor[rows]
        if (wish > 0).any():
            have = 1e3 * self._speed[rows, 0] / np.maximum(self._speed[rows, 1], 1e-9)
            short = np.log(np.where(wish > 0, wish, 1.0) / np.maximum(have, 1e-3))
            step = np.exp(0.1 * np.clip(short, -1.0, 1.0))
            self._boost[rows] = np.where(wish > 0, np.clip(self._boost[rows] * step, 1.0, 64.0), 1.0)

    def weights(self, candidates: Sequence[Candidate]) -> Floats:
        """[R] what a token of each request counts: its priority's weight times what its wish adds."""
        own = np.array([c.weight for c in candidates], dtype=np.float64)
        if not self.wishes:
            return own
        rows = self.rows([c.request_id for c in candidates])  # first: it may make the arrays longer
        return own * self._boost[rows]


def _guess(usual: Sequence[float], depths: int) -> Floats:
    """[K] conditional probabilities to start from: a file's, or one for all depths."""
    known = np.array(usual or (UNKNOWN,), dtype=np.float64).clip(1e-3, 1.0)
    out: Floats = known[np.minimum(np.arange(depths), len(known) - 1)]
    return out
