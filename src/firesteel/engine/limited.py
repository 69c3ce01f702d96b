"""Work in threads that may take only so long.

Native code cannot be interrupted: overdue work loses its caller and its place,
and its thread runs on until the library's own limits end it. That helps others
only where the library lets go of the interpreter, as llguidance does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

T = TypeVar("T")
MAX_OVERDUE = 16  # overdue jobs that may still run


class TooMany(RuntimeError):
    """So much overdue work still runs that no more is begun."""


class _Job(Generic[T]):
    """One piece of work and whether its caller has been told."""

    def __init__(self, work: Callable[[], T], late: Callable[[], Exception]):
        self.work, self.late = work, late
        self.told: Future[T] = Future()
        self.settled = False


class Background:
    """Jobs that nobody waits for: each tells its future, within ``seconds`` of its begin."""

    def __init__(self, seconds: float, threads: int, name: str):
        self.seconds, self.pending = seconds, 0
        self.overdue = 0  # jobs that run although their time is over
        self._name, self._threads = name, threads
        self._pool: ThreadPoolExecutor | None = None
        self._turns = threading.Semaphore(threads)  # an overdue job gives its turn back
        self._lock = threading.Lock()

    def begin(self, work: Callable[[], T], late: Callable[[], Exception]) -> Future[T]:
        """Queue ``work``; its future gets what it gives or raises, or ``late()`` if it takes too long.

        Time in the queue does not count. Raises TooMany. Callbacks of the
        future run in a thread of this class.
        """
        job = _Job(work, late)
        with self._lock:
            if self.overdue >= MAX_OVERDUE:
                raise TooMany(f"{self.overdue} jobs beyond their {self.seconds:g} s still run")
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads + MAX_OVERDUE + self._threads, self._name)
            self.pending += 1
        self._pool.submit(self._run, job)
        return job.told

    def _run(self, job: _Job[Any]) -> None:
        self._turns.acquire()
        timer = threading.Timer(self.seconds, lambda: self._late(job))
        timer.daemon = True
        timer.start()
        result, error = None, None
        try:
            result = job.work()
        except Exception as err:  # the caller's to judge
            error = err
        timer.cancel()
        if not self._settle(job):
            with self._lock:
                self.overdue -= 1
        elif error is not None:
            job.told.set_exception(error)
        else:
            job.told.set_result(result)

    def _late(self, job: _Job[Any]) -> None:
        if self._settle(job, late=True):
            job.told.set_exception(job.late())

    def _settle(self, job: _Job[Any], late: bool = False) -> bool:
        """Whether the caller is the one to tell; then the job's turn is over."""
        with self._lock:
            if job.settled:
                return False
            job.settled = True
            self.pending -= 1
            self.overdue += late
        self._turns.release()
        return True


class Foreground:
    """Jobs of one step: the caller waits for all, but for each at most ``seconds`` from its begin."""

    def __init__(self, seconds: float, threads: int, name: str):
        self.seconds, self.threads, self._name = seconds, threads, name
        self._pool: ThreadPoolExecutor | None = None

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T | None]:
        """Results in order; None for a job that took too long and may still run."""
        begun = [0.0] * len(jobs)

        def one(i: int) -> T:
            begun[i] = time.perf_counter()
            return jobs[i]()

        pool = self._open()
        futures = [pool.submit(one, i) for i in range(len(jobs))]
        out: list[T | None] = []
        for i in range(len(jobs)):  # they begin in this order
            if self._ends(futures, begun, i):
                out.append(futures[i].result())
                continue
            out.append(None)
            pool = self._replace()  # whoever queued behind it moves to fresh threads
            for j in range(i + 1, len(jobs)):
                if futures[j].cancel():
                    futures[j] = pool.submit(one, j)
        return out

    def _ends(self, futures: Sequence[Future[Any]], begun: Sequence[float], i: int) -> bool:
        """Wait for a job; False when its time is over."""
        while True:
            now = time.perf_counter()
            left = begun[i] + self.seconds - now if begun[i] else self.seconds
            try:
                futures[i].exception(timeout=max(left, 0.0))
                return True
            except TimeoutError:
                if begun[i] and time.perf_counter() - begun[i] >= self.seconds:
                    return futures[i].done()

    def _open(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, self._name)
        return self._pool

    def _replace(self) -> ThreadPoolExecutor:
        assert self._pool is not None, "a job of it is overdue"
        self._pool.shutdown(wait=False)
        self._pool = None
        return self._open()
