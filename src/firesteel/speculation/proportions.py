"""What one size of a step costs over another, and drafting over both, whatever the pace of the machine.

    log(measured / table) = pace(t) + size[rows] + drafting, weighted by their shares of the step

The pace wanders, and where a card is at its power limit it jumps by a third for
a few steps: while steps are all alike, what they take tells of the pace only. It
is a change of size, or of drafting, that tells one from another, by the steps
just before and after. A Kalman filter over the pace (a random walk), the sizes
(near ones alike) and drafting says how much of a surprise belongs to which.
Steps wait and are taken in together: a batch of runs of equal steps is one
update, with the covariance of the random walk between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Shares = Sequence[tuple[int, float]]
ALIKE, EACH = 0.08, 0.03  # how far sizes are expected off the table: near ones together, each on its own
DRAFTS = 0.15  # the same for drafting, which is measured as a difference
OFF = 1.0  # and for the whole table
WANDERS = 0.1  # variance that the pace gains in a step, over that of a step
JUMP = 2.0  # equal steps that differ by more than so many standard deviations: the pace has moved
LOAD = 0.03  # the clock of a card follows its load: standard deviation of the pace where rows change e-fold
CALM = 0.03  # weight of one difference in the noise
CLIP = 2.5  # how many times the usual one a difference counts at most
ODD = 3.0  # a run further off than that counts less
FORGETS = 4000.0  # steps after which what was learned has grown old
MOST = 0.01  # of what a step counts in the usual walk of the pace
HOPE = 0.25  # standard deviations that a size which does not run is hoped to be cheaper by
NEAR = 0.6  # if it is so near or nearer to the one that runs
LEAST_NOISE = 0.004  # relative standard deviation of a step


@dataclass(slots=True)
class Run:
    """Equal steps one after the other."""

    rows: int
    context: float  # below 0: unknown
    drafting: int
    width: int
    steps: int
    logs: float  # sum of the log milliseconds, or of the log of measured over priced where the context is unknown
    walked: float  # variance of the pace since the last update, in the middle of the run
    weight: float  # of a step; below 1 for steps with prompts


class Proportions:
    """The filter. ``sizes``, ``requests``: those of the table; state: pace, drafting by requests, sizes."""

    def __init__(self, sizes: Sequence[float], requests: Sequence[float]):
        near, drafts = _near(sizes), _near(requests)
        self._first = 1 + len(drafts)  # of the sizes
        n = self._first + len(near)
        self._prior = np.zeros((n, n))
        self._prior[1 : self._first, 1 : self._first] = DRAFTS**2 * drafts
        self._prior[self._first :, self._first :] = ALIKE**2 * near + EACH**2 * np.eye(len(near))
        self._near = near
        self._newest = -1  # size of the newest run without prompts
        self.mean = np.zeros(n)
        self.cov = self._prior.copy()
        self.cov[0, 0] = OFF**2
        self._runs: list[Run] = []
        self._ended = False  # the newest of them gets no more steps
        self._walked, self._steps = 0.0, 0  # since the last update
        self._last: tuple[tuple[int, int, int], float] | None = None  # the newest step without prompts
        self.walks = 9e-4  # variance that the pace gains from step to step on the average
        self.noise = 0.02  # of a step beside the pace: standard deviation
        self._pairs = 0  # equal neighbours so far

    def hear(self, key: tuple[int, int, int], context: float, log: float, took: float, prompt: bool) -> None:
        """A step of ``key`` = (rows, drafting requests, width).

        log: see ``Run.logs``; took: log of the milliseconds.
        """
        self._steps += 1
        fresh = True
        if prompt:
            self._runs.append(Run(key[0], context, key[1], key[2], 1, log, self._walked, 0.1))
            return
        noise = max(self.noise, LEAST_NOISE)
        walked = WANDERS * noise * noise
        if self._last is not None and self._last[0] == key:
            step, usual = took - self._last[1], math.sqrt(2.0) * noise
            fresh = abs(step) > JUMP * usual
            if fresh:
                walked += step * step
            self._pairs += 1  # 1.25 mean deviations are a standard deviation
            rate = max(CALM, 1.0 / (4.0 + self._pairs))
            self.noise += rate * (1.25 * min(abs(step), CLIP * usual) / math.sqrt(2.0) - self.noise)
            self.walks += rate * (min(walked, MOST) - self.walks)
        else:
            walked = max(walked, self.walks)  # what it did meanwhile does not show
            if self._last is not None and self._last[0][0] != key[0]:
                walked += (LOAD * math.log(key[0] / self._last[0][0])) ** 2
        self._walked += walked
        self._last = key, took
        run = self._runs[-1] if self._runs else None
        fresh, self._ended = fresh or self._ended, False
        if fresh or run is None or run.weight < 1.0 or (run.rows, run.drafting, run.width) != key:
            self._runs.append(Run(key[0], context, key[1], key[2], 1, log, self._walked, 1.0))
            return
        run.steps += 1
        run.logs += log
        run.context += (context - run.context) / run.steps
        run.walked += (self._walked - run.walked) / run.steps

    def learn(self, parts: Callable[[Run], tuple[float, Shares, float, Shares]]) -> bool:
        """Take in the runs that wait; whether there was anything to compare.

        parts: of a run, the price of its rows at a pace of 1, as far as is known now, and which sizes it is made
        of, with their weights; the same of its drafting.
        """
        runs, walked = self._runs, self._walked
        if len({(r.rows, r.drafting, r.width) for r in runs}) < 2:
            self._runs, self._ended = (
                runs[-1:],
                True,
            )  # the newest is what another kind of step is held against
            return False
        m, n = len(runs), len(self.mean)
        seen, off = np.zeros((m, n)), np.empty(m)
        seen[:, 0] = 1.0
        for i, run in enumerate(runs):
            rows, sizes, drafts, counts = parts(run)
            whole = rows + drafts
            for count, share in counts if run.weight == 1.0 else ():
                seen[i, 1 + count] += share * drafts / whole
            for size, share in sizes:
                seen[i, self._first + size] += share * rows / whole
            off[i] = run.logs / run.steps - (math.log(whole) if run.context >= 0 else 0.0)
            if run.weight == 1.0:
                self._newest = sizes[-1][0]
        off -= self.mean[0]
        keep = math.exp(-self._steps / FORGETS)
        pace = self.cov[0, 0]
        self.cov *= keep
        self.cov += (1.0 - keep) * self._prior
        self.cov[0, 0] = pace
        when = np.array([r.walked for r in runs])
        steps = np.array([r.steps * r.weight for r in runs])
        with_all = seen @ self.cov  # [m, n]
        noise = max(self.noise, LEAST_NOISE)
        total = with_all @ seen.T + np.minimum(when[:, None], when)
        own = noise * noise / steps
        far = off * off / (ODD * ODD * (total.diagonal() + own))
        total[np.diag_indices(m)] += own * np.maximum(far, 1.0)
        with_all[:, 0] += when
        self.cov[0, 0] += walked
        gain = np.linalg.solve(total, with_all)  # [m, n]
        self.mean += off @ gain
        self.cov -= with_all.T @ gain
        self.cov = 0.5 * (self.cov + self.cov.T)  # rounding would tell its halves apart
        self._runs, self._walked, self._steps = [], 0.0, 0
        return True

    @property
    def drafts(self) -> Floats:
        """Log of the correction of drafting, by requests."""
        return self.mean[1 : self._first]

    @property
    def sizes(self) -> Floats:
        """The same of steps, by size."""
        return self.mean[self._first :]

    def hopes(self) -> Floats:
        """What each size near the newest one may prove to cost over what is thought: one never tried stays dear."""
        j, var = self._newest, self.cov[self._first :, self._first :]
        if j < 0:
            return np.ones(len(var))
        apart = np.sqrt(np.maximum(var.diagonal() + var[j, j] - 2.0 * var[j], 0.0))
        out: Floats = np.where(self._near[j] > NEAR, np.exp(-HOPE * apart), 1.0)
        return out


def _near(counts: Sequence[float]) -> Floats:
    """[n, n] the smaller over the larger."""
    at = np.array(counts, dtype=np.float64) + 1.0
    out: Floats = np.minimum(at[:, None], at) / np.maximum(at[:, None], at)
    return out
