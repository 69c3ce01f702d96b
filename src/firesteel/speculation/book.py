"""What is known of each request's drafts: its newest blocks, and those of all requests together.

A block is kept by its signals (confidence logit, margin), so that a new
calibration prices it anew. Depths that a block does not reach are filled with
what drafts at that depth are usually worth. Everything is arrays over
requests: at 256 of them a Python loop would cost more than a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firesteel.speculation.strata import strata_of
from firesteel.speculation.survival import CLASSES, Coefficients, logistic, margin_feature
from firesteel.speculation.terms import Candidate

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CASES = 32  # newest blocks of a request
POOL = 256  # newest blocks of a temperature class
SHRINK = 8.0  # blocks at which a request's own count as much as everybody's, until that is known
COMPARE = 16  # drafting passes between looks at how much requests differ
STAGES = 4  # takes between looks whether the first blocks of answers differ from later ones
LATER, APART_BY = 8, 3.0  # blocks that tell, of both; by how many standard errors
LIVES = 64  # ended requests that tell how much requests differ
GUESS = 8.0  # blocks that the guess about an unknown drafter stands for
FILED = 64.0  # the same if a calibration file says what is usual
JUDGED = 1.0  # the same if a calibration file does not say, but can tell by each draft's signals
APART = 6.0  # SHRINK with a calibration file: a block tells more
MEMORY = 1024  # first drafts that the guess remembers
FIRST, SAMPLE = 4, 6  # of a request the pool takes the first blocks, then every sixth: requests count alike
DOUBT, DOUBT_ALL = 8.0, 16.0  # accepted drafts at which outcomes weigh what predictions do: a request's, all
RECENT, RECENT_ALL = 32.0, 256.0  # accepted drafts that are remembered, likewise
SURE, LEAST_TRUTH = 0.95, 0.05  # outcomes that good are no reason for doubt; doubt goes as far as that
UNKNOWN = 0.7  # conditional acceptance of a first draft of which nothing is known
FADE = 0.96  # per step
FEW_ROWS = 16  # blocks that are quicker counted one by one
MATTERS = 0.01  # chance of an end within a block from which on it counts
FEW = 2.0  # how many blocks a depth's neighbour stands for


class Book:
    """Blocks by request and by temperature class; ``depths`` is K."""

    # one line per request
    _head: Floats  # [N, CASES, K] signals of its newest blocks, a ring
    _feature: Floats  # the margin's, see survival.py
    _survival: Floats
    _width: Ints  # [N, CASES] depths that a block reaches
    _seen: Ints  # [N] blocks so far
    _trust: Floats  # [N] blocks, fading while none are made
    _kind: Ints
    _truth: Floats  # [N, 2] fading sums: accepted drafts, and how many were predicted
    _speed: Floats  # [N, 2] fading sums: tokens, milliseconds
    _boost: Floats  # weight that a wish for speed adds
    _floor: Floats  # tokens per second it asks for

    def __init__(self, depths: int, coefficients: Coefficients, proven: bool = False):
        """``proven``: the coefficients come from a file, so the drafter is known to be worth a try."""
        usual = coefficients.usual
        self.depths, self.coefficients, self._proven = depths, coefficients, proven
        self._row: dict[int, int] = {}
        self._free: list[int] = []
        self._all_truth = [0.0, 0.0]
        self._size = 0
        self._alloc(16)
        shape = (CLASSES, POOL, depths)
        self._pool_head, self._pool_feature = np.zeros(shape), np.zeros(shape)
        self._pool_survival = np.zeros(shape)
        self._depth = np.arange(depths)
        self._pool_width = np.zeros((CLASSES, POOL), dtype=np.int64)
        self._pool_count = [0] * CLASSES
        self._pool_late = np.zeros((CLASSES, POOL), dtype=np.bool_)  # not among the first blocks of a request
        self._staged = [False] * CLASSES  # whether those differ from the first ones
        self._worth = [[0.0] * depths for _ in range(CLASSES)]  # of a draft whose forerunners were accepted
        self._worth_count = [[0.0] * depths for _ in range(CLASSES)]
        self._shrink = APART if proven else SHRINK
        self.shrink = self._shrink
        self.version = 0  # of everything that ``scenarios`` depends on
        self._scenes: tuple[object, Floats] | None = None  # the last ones and what they were made of
        self._single: tuple[object, list[float]] | None = None  # likewise
        self._stays: Floats | None = None  # [K] chance that an answer lasts until a draft; None: nearly 1
        self.wishes = False  # whether any request has one
        self._lives: deque[tuple[float, float, int]] = deque(maxlen=LIVES)
        self._takes = 0
        self._prior = FILED if usual else JUDGED if proven else GUESS
        self._start = _guess(usual, depths)
        self._tried, self._hits = [0.0] * depths, [0.0] * depths
        self._set_guess(self._start)
        self._usual = self._fill()

    @property
    def unproven(self) -> bool:
        """Whether next to nothing is known of the drafter."""
        return not self._proven and sum(self._pool_count) < self._prior == GUESS

    @property
    def blank(self) -> bool:
        """Whether nothing was seen of drafts whose signals the calibration can judge."""
        return self._prior == JUDGED and not any(self._pool_count)

    def _alloc(self, size: int) -> None:
        def grown(name: str, fresh: NDArray[Any]) -> None:
            old = getattr(self, name, None)
            if old is not None:
                fresh[: len(old)] = old
            setattr(self, name, fresh)

        k = self.depths
        for name in ("_head", "_feature", "_survival"):
            grown(name, np.zeros((size, CASES, k)))
        grown("_width", np.zeros((size, CASES), dtype=np.int64))
        grown("_seen", np.zeros(size, dtype=np.int64))
        grown("_trust", np.zeros(size))
        grown("_kind", np.ones(size, dtype=np.int64))
        grown("_truth", np.zeros((size, 2)))
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

    def has(self, request_id: int) -> bool:
        """Whether it is known."""
        return request_id in self._row

    def _open(self, request_id: int) -> int:
        if not self._free:
            self._alloc(2 * self._size)
        row = self._free.pop()
        self._row[request_id] = row
        self._seen[row], self._kind[row], self._trust[row] = 0, 1, 0.0
        self._truth[row] = 0.0
        self._speed[row], self._boost[row], self._floor[row] = 0.0, 1.0, 0.0
        return row

    def forget(self, request_id: int) -> None:
        """A request has ended."""
        row = self._row.pop(request_id, None)
        if row is not None:
            self.version += 1
            self._free.append(row)
            if self._floor[row] > 0:
                self._floor[row] = 0.0
                self.wishes = any(self._floor[r] > 0 for r in self._row.values())
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
        self.shrink = float(self._shrink ** (1 - share) * found**share)

    # ---- blocks ----------------------------------------------------------------------
    def take(self, request_ids: Sequence[int], kind: Ints, width: Ints, head: Floats, margin: Floats) -> None:
        """New blocks, oldest first: kind and width [n], head and margin [n, K] of which a block reaches ``width``."""
        self.version += 1
        rows, feature = self.rows(request_ids), margin_feature(margin)
        if not np.isfinite(head).all():
            head = np.nan_to_num(head)
        low, high = int(kind.min()), int(kind.max())
        p = self._conditional(head, feature, low if low == high else kind)
        known = self._depth < width[:, None]
        classes = range(low, high + 1)
        for k in classes:
            self._weigh(k, *((p, known) if low == high else (p[kind == k], known[kind == k])))
        self._usual = self._fill()
        survival = np.asarray(np.cumprod(np.where(known, p, self._usual[kind]), axis=1), np.float64)
        number = self._number(rows)
        at = number % CASES
        self._head[rows, at], self._feature[rows, at] = head, feature
        self._survival[rows, at], self._width[rows, at] = survival, width
        self._kind[rows] = kind
        self._takes += 1
        if self._takes % COMPARE == 0:
            self._compare()
        fresh = (number < FIRST) | (number % SAMPLE == 0)
        for k in classes:
            mine = np.flatnonzero(fresh if low == high else fresh & (kind == k))[:POOL]
            if len(mine):
                self._pool(k, head[mine], feature[mine], survival[mine], width[mine], number[mine] >= FIRST)
            if self._takes % STAGES == 0:
                self._compare_stages(k)

    def _number(self, rows: Ints) -> Ints:
        """Which block of its request each one is; counts them."""
        if len(rows) <= FEW_ROWS:
            numbers = []
            for row in rows.tolist():
                numbers.append(int(self._seen[row]))
                self._seen[row] += 1
                self._trust[row] += 1.0
            return np.array(numbers, dtype=np.int64)
        order = np.argsort(rows, kind="stable")
        same = rows[order]
        first = np.flatnonzero(np.concatenate(([True], same[1:] != same[:-1])))
        count = np.diff(np.append(first, len(rows)))
        behind = np.empty_like(rows)
        behind[order] = np.arange(len(rows)) - np.repeat(first, count)
        out: Ints = self._seen[rows] + behind
        self._seen[same[first]] += count
        self._trust[same[first]] += count
        return out

    def _compare_stages(self, k: int) -> None:
        """Whether answers go on as they begin; if not, a block stands for its own stage only."""
        n = min(self._pool_count[k], POOL)
        late, worth = self._pool_late[k, :n], self._pool_survival[k, :n].sum(1)
        first, later = worth[~late], worth[late]
        if min(len(first), len(later)) < LATER:
            self._staged[k] = False
            return
        error = math.sqrt(float(first.var()) / len(first) + float(later.var()) / len(later) + 1e-12)
        self._staged[k] = abs(float(first.mean() - later.mean())) > APART_BY * error

    def _own_first(self, kind: int, seen: int) -> int:
        """Where a request's own blocks begin that count: those of its beginning do not where that differs."""
        return FIRST if self._staged[kind] and 2 * FIRST <= seen < CASES else 0

    def _pooled(self, kind: int, seen: int) -> Ints:
        """Which blocks of the pool stand for the next one of a request that has ``seen``."""
        n = min(self._pool_count[kind], POOL)
        same = np.flatnonzero(self._pool_late[kind, :n] == (seen >= FIRST)) if self._staged[kind] else None
        return np.arange(n) if same is None or not len(same) else same

    def _pool(
        self, k: int, head: Floats, feature: Floats, survival: Floats, width: Ints, late: NDArray[np.bool_]
    ) -> None:
        at = (self._pool_count[k] + np.arange(len(width))) % POOL
        self._pool_head[k, at], self._pool_feature[k, at] = head, feature
        self._pool_survival[k, at], self._pool_width[k, at] = survival, width
        self._pool_late[k, at] = late
        self._pool_count[k] += len(width)

    def _conditional(self, head: Floats, feature: Floats, kind: Ints | int) -> Floats:
        """[..., K] conditional probabilities under the present coefficients; ``kind`` of the leading shape."""
        c = self.coefficients
        slope = c.margin[kind] if isinstance(kind, int) else c.margin[kind][..., None]
        logit = c.depth[kind] + slope * feature
        if c.uses_head:
            logit += (c.head[kind] if isinstance(kind, int) else c.head[kind][..., None]) * head
        return logistic(logit)

    def _weigh(self, kind: int, p: Floats, known: NDArray[np.bool_]) -> None:
        """Fading mean of what drafts at each depth are worth."""
        count, worth = self._worth_count[kind], self._worth[kind]
        reach, sums = known.sum(0).tolist(), np.where(known, p, 0.0).sum(0).tolist()
        for j, n in enumerate(reach):
            if n == 0:
                break  # no block reaches deeper
            rate = max(n / (count[j] + n), min(n / POOL, 1.0))
            worth[j] += rate * (sums[j] / n - worth[j])
            count[j] += n

    def _fill(self) -> Floats:
        """[classes, K] usual conditional probability; an unknown depth is worth what the one before it is."""
        guess, out = self._guess, []
        for worth, count in zip(self._worth, self._worth_count, strict=True):
            before, line = guess[0], []
            for j in range(self.depths):
                before *= guess[j] / guess[max(j - 1, 0)]
                before = (count[j] * worth[j] + FEW * before) / (count[j] + FEW)
                line.append(before)
            out.append(line)
        return np.array(out)

    def reprice(self, coefficients: Coefficients) -> None:
        """New coefficients: every block is priced again, and outcomes have judged others."""
        self.coefficients = coefficients
        self._truth *= 0.5
        self._all_truth = [0.5 * v for v in self._all_truth]
        self.version += 1
        priced = []
        for k in range(CLASSES):
            n = min(self._pool_count[k], POOL)
            known = self._depth < self._pool_width[k, :n, None]
            p = self._conditional(self._pool_head[k, :n], self._pool_feature[k, :n], k)
            priced.append((n, known, p))
            reach, sums = known.sum(0).tolist(), np.where(known, p, 0.0).sum(0).tolist()
            self._worth[k] = [
                v / c if c else old for v, c, old in zip(sums, reach, self._worth[k], strict=True)
            ]
        self._usual = self._fill()
        for k, (n, known, p) in enumerate(priced):
            self._pool_survival[k, :n] = np.cumprod(np.where(known, p, self._usual[k]), axis=1)
        rows = np.array(sorted(self._row.values()), dtype=np.int64)
        rows = rows[self._seen[rows] > 0]
        known = self._depth < self._width[rows, :, None]
        kind = np.broadcast_to(self._kind[rows, None], known.shape[:2])
        p = self._conditional(self._head[rows], self._feature[rows], kind)
        self._survival[rows] = np.cumprod(np.where(known, p, self._usual[kind]), axis=2)

    # ---- outcomes ---------------------------------------------------------------------
    def settle(self, outcomes: Mapping[int, tuple[float, float]]) -> None:
        """(accepted, predicted) drafts by request: a calibration may be wrong on the traffic of today."""
        self.version += 1
        for request_id, pair in outcomes.items():
            if request_id in self._row:
                line = self._truth[self._row[request_id]]
                line += pair
                if line[1] > RECENT:
                    line *= 0.5
            self._all_truth = [a + b for a, b in zip(self._all_truth, pair, strict=True)]
        if self._all_truth[1] > RECENT_ALL:
            self._all_truth = [0.5 * v for v in self._all_truth]

    def _factor(self, rows: Ints) -> Floats:
        """[n] what drafts of these requests are worth over what their signals say; 1 without outcomes."""
        got, predicted = self._all_truth
        everybody = (got + DOUBT_ALL) / (predicted + DOUBT_ALL)
        truth = self._truth[rows]
        found = (truth[:, 0] + DOUBT * everybody) / (truth[:, 1] + DOUBT)
        out: Floats = (found / SURE).clip(LEAST_TRUTH, 1.0)
        return out

    def judge(self, tried: Sequence[float], hits: Sequence[float]) -> None:
        """The guess about requests of which nothing is known follows what became of drafts, counted by depth."""
        self.version += 1
        self._tried = [a + b for a, b in zip(self._tried, tried, strict=True)]
        self._hits = [a + b for a, b in zip(self._hits, hits, strict=True)]
        if self._tried[0] > MEMORY:
            self._tried, self._hits = ([0.5 * v for v in line] for line in (self._tried, self._hits))
        out: list[float] = []
        before = self._start[0]
        for j, (start, n, good) in enumerate(zip(self._start, self._tried, self._hits, strict=True)):
            before *= start / self._start[max(j - 1, 0)]
            before = (self._prior * before + good) / (self._prior + n)
            out.append(before)
        self._set_guess(out)

    def _set_guess(self, guess: list[float]) -> None:
        self._guess, self._guessed = guess, np.cumprod(guess)

    def ending(self, hazard: float) -> None:
        """An answer ends at a token with this chance: a draft behind that one is accepted by nobody."""
        before = 0.0 if self._stays is None else 1.0 - float(self._stays[0])
        if max(hazard, before) * self.depths < MATTERS or abs(hazard - before) * 8 < hazard:
            return
        self._stays = np.power(1.0 - hazard, np.arange(1.0, self.depths + 1))
        self.version += 1

    def lasting(self, survival: list[float]) -> list[float]:
        """Survivals times the chance that the answer lasts as long."""
        if self._stays is None:
            return survival
        return [s * stays for s, stays in zip(survival, self._stays.tolist(), strict=False)]

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
        strata = strata_of(len(candidates))
        rows = self.rows([c.request_id for c in candidates])
        kinds = [c.kind for c in candidates]
        kind = np.array(kinds, dtype=np.int64)
        trust = np.minimum(self._trust[rows], CASES)
        own = strata.own < trust / (trust + self.shrink)
        seen = np.minimum(np.maximum(self._seen[rows], 1), CASES)
        have = np.array([min(self._pool_count[k], POOL) for k in kinds], dtype=np.int64)
        if any(self._staged):
            counts = self._seen[rows].tolist()
            first = np.array([self._own_first(k, n) for k, n in zip(kinds, counts, strict=True)])
            mine = self._survival[rows, first + strata.block % (seen - first)]
            at = np.empty_like(strata.other)
            for k, late in sorted({(k, n >= FIRST) for k, n in zip(kinds, counts, strict=True)}):
                which = (kind == k) & ((self._seen[rows] >= FIRST) == late)
                blocks = self._pooled(k, FIRST if late else 0)
                at[:, which] = blocks[strata.other[:, which] % len(blocks)] if len(blocks) else 0
        else:
            mine, at = self._survival[rows, strata.block % seen], strata.other % np.maximum(have, 1)
        other = self._pool_survival[kind, at]
        factor = self._factor(rows)
        if min(factor.tolist(), default=1.0) < 1.0:
            mine, other = (np.minimum(v * factor[:, None], 1.0) for v in (mine, other))
        pooled = strata.pooled < have / (have + self._prior)
        other = np.where(pooled[..., None], other, self._guessed)
        out: Floats = np.where(own[..., None], mine, other)
        if self._stays is not None:
            out *= self._stays
        caps = [c.cap for c in candidates]
        if min(caps, default=self.depths) >= self.depths:
            return out
        return np.where(self._depth < np.array(caps)[:, None], out, 0.0)

    def expected(self, c: Candidate) -> list[float]:
        """[cap] mean survival that one request's next block may have: what ``scenarios`` are drawn from."""
        key = (self.version, c.request_id, c.kind)
        if self._single is None or self._single[0] != key:
            at, have = self.rows([c.request_id]), min(self._pool_count[c.kind], POOL)
            row, factor = int(at[0]), float(self._factor(at)[0])
            out, n = self._guessed, int(min(self._seen[row], CASES))
            if have:
                blocks = self._pool_survival[c.kind]
                if self._staged[c.kind]:
                    blocks = blocks[self._pooled(c.kind, int(self._seen[row]))]
                else:
                    blocks = blocks[:have]
                pool = np.minimum(blocks.mean(0) * factor, 1.0)
                out = out + have / (have + self._prior) * (pool - out)
            if n:
                trust = min(float(self._trust[row]), CASES)
                mine = np.minimum(self._survival[row, self._own_first(c.kind, n) : n].mean(0) * factor, 1.0)
                out = out + trust / (trust + self.shrink) * (mine - out)
            self._single = (key, self.lasting(out.tolist()))
        return self._single[1][: c.cap]

    def fade(self, request_ids: Sequence[int], steps: int = 1) -> None:
        """What is known of requests that have not drafted for ``steps`` grows old."""
        share = FADE**steps
        rows = self.rows(request_ids)
        if len(rows) > FEW_ROWS:
            self._trust[rows] *= share
            self._truth[rows] *= share
            self.version += 1
            return
        for row in rows.tolist():
            if self._trust[row] > 0:  # no block, no outcome either
                self._trust[row] *= share
                self._truth[row] *= share
                self.version += 1

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


def _guess(usual: Sequence[float], depths: int) -> list[float]:
    """[K] conditional probabilities to start from: a file's, or one for all depths."""
    known = [min(max(float(v), 1e-3), 1.0) for v in (usual or (UNKNOWN,))]
    return [known[min(j, len(known) - 1)] for j in range(depths)]
