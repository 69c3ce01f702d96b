"""Parts of a step as recorded graphs: the only file that knows capture.

    forward  by rows, context    static RowBatch -> layers, context rows -> ``hidden``
    tail     by sampling rows    static SampleRows + ``hidden`` -> sample, accept, commit -> Verdict
    draft    by requests, width  static slots -> block pass, walk, survival -> Proposal

A part that finds a recording at least as large as its work pads up to it: rows
in the scratch slot at position 0, groups of width 0, requests in the scratch
slot. Nothing else tells a recording from an eager step; both run the same
functions of the runner. Steps with more rows than the largest recording, and
tails that shape, mask, report or reject (their tables may move), run eagerly.

A forward is recorded for positions up to a bound, since grids and scratch follow
it; engines of long contexts have several bounds, the longer ones for fewer rows.

All recordings replay on one stream, one after the other, so they share one
memory pool. The largest are recorded first: smaller ones fit into their space.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from firesteel.config import ParameterError
from firesteel.core import RowBatch, SampleRows, Verdict
from firesteel.ops.types import Proposal

MOST_ROWS = 2048
MOST_ROW_BUCKETS = 40
CONTEXTS = (8192, 65536)  # bounds below the model's length, where that is well beyond
LONG_ROWS = 512  # of a forward beyond the first bound: more rows take longer than their launches
REQUEST_BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)

T = TypeVar("T")


class Parts(Protocol):
    """What a runner lets be recorded; every tensor on the device, no host value read."""

    device: torch.device

    def forward_rows(self, rows: RowBatch) -> Tensor:
        """Streams [R, hc, D] after the last layer; writes windows, pages and context rows."""

    def sample_rows(self, hidden: Tensor, rows: RowBatch, samples: SampleRows, widest: int) -> Verdict:
        """Sample, accept and commit plain rows."""

    def draft_slots(self, slots: Tensor, width: int) -> tuple[Proposal, Tensor]:
        """(proposal, survival) of new drafts, noted in the slots."""


# ---- what is recorded -------------------------------------------------------------------
def row_buckets(most: int) -> tuple[int, ...]:
    """Row counts to record up to ``most``: growing by at most a quarter from 8 on, 40 at most."""
    sizes, step = [1, 2, 3, 4, 6, 8], 4
    while sizes[-1] < most:
        if sizes[-1] >= 8 * step:
            step *= 2
        sizes.append(sizes[-1] + step)
    kept = [s for s in sizes if s < most] + [most]
    assert len(kept) <= MOST_ROW_BUCKETS, "eight sizes per doubling at most"
    return tuple(kept)


def request_buckets(most: int) -> tuple[int, ...]:
    """Request counts to record up to ``most``."""
    return (*(s for s in REQUEST_BUCKETS if s < most), most)


def contexts(max_position: int) -> tuple[int, ...]:
    """Bounds of positions to record for."""
    return (*(c for c in CONTEXTS if 2 * c <= max_position), max_position)


def fitting(sizes: Sequence[int], need: int) -> int | None:
    """The smallest size that holds ``need``, or None."""
    return next((s for s in sizes if s >= need), None)


@dataclass(frozen=True)
class GraphPlan:
    """Sizes to record: ``rows`` of forwards by ``contexts`` (largest positions), ``samples`` of tails,
    ``requests`` by ``widths`` of drafts."""

    rows: tuple[int, ...]
    samples: tuple[int, ...]
    requests: tuple[int, ...]
    widths: tuple[int, ...]
    slots: int
    gamma: int
    contexts: tuple[int, ...]

    @classmethod
    def of(
        cls, max_rows: int, slots: int, gamma: int, max_model_len: int, widths: Sequence[int]
    ) -> GraphPlan:
        """For steps of up to ``max_rows`` rows over ``slots`` requests that draft ``widths``; others run eagerly."""
        most = min(max_rows, MOST_ROWS)
        return cls(
            rows=row_buckets(most),
            samples=row_buckets(min(most, slots * (1 + gamma))),
            requests=request_buckets(slots) if widths else (),
            widths=tuple(widths),
            slots=slots,
            gamma=gamma,
            contexts=contexts(max_model_len + gamma),
        )

    @property
    def forwards(self) -> tuple[tuple[int, int], ...]:
        """(rows, largest position) of every forward, the largest last."""
        first = self.contexts[0]
        return tuple((r, c) for c in self.contexts for r in self.rows if c == first or r <= LONG_ROWS)

    @property
    def count(self) -> int:
        """Recordings in all."""
        return len(self.forwards) + len(self.samples) + len(self.requests) * len(self.widths)

    def __str__(self) -> str:
        bounds = "/".join(map(str, self.contexts))
        parts = [f"{len(self.forwards)} forwards to {self.rows[-1]} rows and position {bounds}"]
        parts.append(f"{len(self.samples)} tails to {self.samples[-1]} rows")
        if self.requests:
            sizes = f"{len(self.requests)} sizes to {self.requests[-1]} requests x {len(self.widths)} widths"
            parts.append(f"drafts of {sizes}")
        return ", ".join(parts)


# ---- recorders ------------------------------------------------------------------------------
class Recorder(Protocol):
    """Turns a function over static tensors into one that can be run again without its host part."""

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """(replay, what ``run`` returned: tensors that every replay overwrites)."""

    def used(self) -> int:
        """Bytes of device memory in use."""


class DeviceRecorder:
    """CUDA or HIP graphs through torch; one pool, one side stream.

    ``torch.cuda.graph`` collects garbage and empties caches before every
    capture; with a hundred of them that is most of the time, so it is done once.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)
        gc.collect()
        torch.cuda.empty_cache()

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Run once to compile and to fill caches, then capture."""
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            run()
            torch.cuda.synchronize(self.device)
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                out = run()
            finally:
                graph.capture_end()
        return graph.replay, out

    def used(self) -> int:
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)


@dataclass
class Recording(Generic[T]):
    """One size: ``replay`` reads the static inputs and overwrites ``out``."""

    replay: Callable[[], None]
    out: T


@dataclass
class Static:
    """Inputs at fixed addresses; a recording of n rows reads the first n lines."""

    rows: RowBatch
    samples: SampleRows
    slots: Tensor
    hidden: Tensor | None = None

    @classmethod
    def of(cls, plan: GraphPlan, scratch: int, device: torch.device) -> Static:
        """Inert inputs of the largest sizes: padding rows, groups of width 0, the scratch slot."""

        def ints(n: int, value: int = 0) -> Tensor:
            return torch.full((n,), value, dtype=torch.int64, device=device)

        r, s = plan.rows[-1], plan.samples[-1]
        own = torch.arange(r, dtype=torch.int64, device=device)
        valid = torch.zeros(r, dtype=torch.bool, device=device)
        rows = RowBatch(ints(r), ints(r), ints(r, scratch), own, own.clone(), valid, plan.contexts[-1])
        groups = min(s, plan.slots)
        samples = SampleRows(ints(s), ints(s, groups), ints(groups), ints(groups), ints(groups, scratch))
        return cls(rows, samples, ints(max(plan.slots, 1), scratch))

    def first_rows(self, n: int, max_position: int) -> RowBatch:
        """The first ``n`` rows."""
        r = self.rows
        parts = (r.tokens, r.positions, r.slots, r.first, r.last, r.valid)
        tokens, positions, slots, first, last, valid = (t[:n] for t in parts)
        return RowBatch(tokens, positions, slots, first, last, valid, max_position)

    def first_samples(self, n: int, groups: int) -> SampleRows:
        """The first ``n`` sampling rows and ``groups`` groups."""
        s = self.samples
        return SampleRows(s.rows[:n], s.group[:n], s.offset[:groups], s.width[:groups], s.slots[:groups])


@dataclass(frozen=True)
class Shape:
    """Sizes a step is padded to: ``rows`` of the pass, ``samples`` and ``groups`` of its tail
    (None: the tail runs eagerly on what there is)."""

    rows: int
    samples: int | None
    groups: int


class GraphMismatch(RuntimeError):
    """A replay gave other bits than the eager step; the message says which size."""


class Graphs:
    """All recordings of one engine, and the choice among them."""

    def __init__(self, parts: Parts, plan: GraphPlan, recorder: Recorder, scratch: int):
        self.parts, self.plan, self.recorder, self.scratch = parts, plan, recorder, scratch
        self.static = Static.of(plan, scratch, parts.device)
        self.forwards: dict[tuple[int, int], Recording[None]] = {}
        self.tails: dict[int, Recording[Verdict]] = {}
        self.drafts: dict[tuple[int, int], Recording[tuple[Proposal, Tensor]]] = {}
        self.replays: dict[str, int] = dict.fromkeys(("forward", "tail", "draft"), 0)
        self.eager: dict[str, int] = dict(self.replays)  # parts of steps that no recording holds
        self.seconds = 0.0
        self.bytes = 0

    # ---- recording ------------------------------------------------------------
    @torch.inference_mode()
    def record(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Record every size, the largest first. Raises ParameterError if memory does not suffice."""
        begun, before = time.perf_counter(), self.recorder.used()
        try:
            for what, run in self._recipes():
                progress(f"graphs: {what}")
                run()
        except torch.cuda.OutOfMemoryError as err:
            gib = (self.recorder.used() - before) / 2**30
            raise ParameterError(
                f"graphs: no memory left after {len(self.forwards) + len(self.tails) + len(self.drafts)} of "
                f"{self.plan.count} recordings ({gib:.1f} GiB); lower num_pages or max_num_batched_tokens, "
                "or set graphs=False"
            ) from err
        self.seconds, self.bytes = time.perf_counter() - begun, self.recorder.used() - before

    def _recipes(self) -> Iterator[tuple[str, Callable[[], None]]]:
        for n, top in sorted(self.plan.forwards, reverse=True):
            yield f"forward of {n} rows", lambda n=n, top=top: self._record_forward(n, top)  # type: ignore[misc]
        for n in reversed(self.plan.samples):
            yield f"tail of {n} rows", lambda n=n: self._record_tail(n)  # type: ignore[misc]
        for n in reversed(self.plan.requests):
            for width in self.plan.widths:
                yield f"draft {width} of {n}", lambda n=n, w=width: self._record_draft(n, w)  # type: ignore[misc]

    def _record_forward(self, n: int, top: int) -> None:
        rows = self.static.first_rows(n, top)
        if self.static.hidden is None:  # the largest comes first and shows shape and dtype
            self.static.hidden = torch.zeros_like(self.parts.forward_rows(rows))
        hidden = self.static.hidden[:n]

        def run() -> None:
            hidden.copy_(self.parts.forward_rows(rows))

        self.forwards[n, top] = Recording(*self.recorder.record(run))

    def _record_tail(self, n: int) -> None:
        assert self.static.hidden is not None, "forwards are recorded first"
        samples, hidden = self.static.first_samples(n, self.groups(n)), self.static.hidden
        widest = 1 + self.plan.gamma

        def run() -> Verdict:
            return self.parts.sample_rows(hidden, self.static.rows, samples, widest)

        self.tails[n] = Recording(*self.recorder.record(run))

    def _record_draft(self, n: int, width: int) -> None:
        slots = self.static.slots[:n]

        def run() -> tuple[Proposal, Tensor]:
            return self.parts.draft_slots(slots, width)

        self.drafts[n, width] = Recording(*self.recorder.record(run))

    def groups(self, samples: int) -> int:
        """Groups that a tail of ``samples`` rows has room for."""
        return min(samples, self.plan.slots)

    # ---- replaying ---------------------------------------------------------------
    def shape(self, rows: int, samples: int, groups: int, plain: bool, max_position: int) -> Shape:
        """What to pad a step of ``rows`` rows to; ``plain``: its tail does nothing but sample and commit."""
        size = fitting(self.plan.rows, rows)
        if size is None or self._bound(size, max_position) is None:
            self.eager["forward"] += 1
            self.eager["tail"] += samples > 0
            return Shape(rows, None, groups)
        tail = fitting(self.plan.samples, samples) if plain and samples else None
        self.eager["tail"] += samples > 0 and tail is None
        return Shape(size, tail, groups if tail is None else self.groups(tail))

    def has(self, rows: RowBatch) -> bool:
        """Whether a forward of exactly this many rows was recorded for their positions."""
        return self._bound(rows.count, rows.max_position) is not None

    def _bound(self, rows: int, max_position: int) -> int | None:
        """The recorded bound of positions for these rows, or None."""
        top = min(
            max_position, self.plan.contexts[-1]
        )  # a plan's own bound may lie beyond the model's length
        return next((c for c in self.plan.contexts if c >= top and (rows, c) in self.forwards), None)

    def forward(self, rows: RowBatch) -> Tensor:
        """``forward_rows`` of a batch that has exactly a recorded size."""
        n, top = rows.count, self._bound(rows.count, rows.max_position)
        assert top is not None and self.static.hidden is not None, f"{n} rows were not recorded"
        _copy(self.static.first_rows(n, top), rows)
        self.forwards[n, top].replay()
        self.replays["forward"] += 1
        return self.static.hidden[:n]

    def tail(self, samples: SampleRows, size: int) -> Verdict:
        """``sample_rows`` of the rows last given to ``forward``; overwritten by the next call."""
        n, groups = min(samples.rows.shape[0], size), self.groups(size)
        assert samples.slots.shape[0] >= groups, "the step was built for this shape"
        into = self.static.first_samples(size, groups)
        names = ("offset", "width", "slots")
        tables = [(getattr(into, name), getattr(samples, name)[:groups]) for name in names]
        tables.append((into.rows[:n], samples.rows[:n]))
        torch._foreach_copy_([a for a, _ in tables], [b for _, b in tables])
        if n < size:
            into.rows[n:].zero_()
        self.tails[size].replay()
        self.replays["tail"] += 1
        return self.tails[size].out

    def draft_size(self, requests: int, width: int) -> int | None:
        """The recorded number of requests that holds ``requests`` at this width, or None."""
        size = fitting(self.plan.requests, requests)
        if size is not None and (size, width) in self.drafts:
            return size
        self.eager["draft"] += 1
        return None

    def draft(self, slots: Tensor, width: int) -> tuple[Proposal, Tensor]:
        """``draft_slots`` of exactly a recorded number of slots; overwritten by the next call."""
        n = slots.shape[0]
        self.static.slots[:n].copy_(slots)
        self.drafts[n, width].replay()
        self.replays["draft"] += 1
        return self.drafts[n, width].out

    @property
    def note(self) -> str:
        """One line for the log."""
        return f"graphs: {self.plan}; {self.bytes / 2**30:.2f} GiB, recorded in {self.seconds:.1f} s"

    # ---- self-test ---------------------------------------------------------------
    @torch.inference_mode()
    def self_test(self, world: TestWorld, progress: Callable[[str], None] = lambda _: None) -> None:
        """Replay every size with random rows and compare bits with the eager parts. Raises GraphMismatch."""
        for n, top in sorted(self.plan.forwards):
            progress(f"graphs: testing {n} rows")
            self._test_step(n, top, world)
        for n, width in self.drafts:
            self._test_draft(n, width, world)
        self.replays.update(dict.fromkeys(self.replays, 0))

    def _test_step(self, n: int, top: int, world: TestWorld) -> None:
        """A forward of ``n`` rows, then every tail that such a step can use."""
        shape = self.shape(n, min(n, self.plan.samples[-1]), 0, True, top)
        assert shape.rows == n, "every recorded size is its own bucket"
        rows, samples = world.rows(n, self.groups(shape.samples) if shape.samples else 0)
        rows = replace(rows, max_position=top)  # the recording for this bound
        want = self.parts.forward_rows(rows).clone()
        live = rows.valid
        _demand(_rows_equal(self.forward(rows), want, live), f"forward of {n} rows")
        if shape.samples is None:
            return
        before = world.state()
        verdict = self.parts.sample_rows(want, rows, samples, 1 + self.plan.gamma)
        kept = [getattr(verdict, f.name).clone() for f in fields(verdict)]
        after = world.state()
        world.restore(before)
        self.forward(rows)
        got = self.tail(samples, shape.samples)
        same = all(torch.equal(getattr(got, f.name), t) for f, t in zip(fields(got), kept, strict=True))
        _demand(same, f"tail of {shape.samples} rows")
        _demand(world.same(after), f"slots after a tail of {shape.samples} rows")
        world.restore(before)

    def _test_draft(self, n: int, width: int, world: TestWorld) -> None:
        slots, before = world.slots(n), world.state()
        proposal, survival = self.parts.draft_slots(slots, width)
        kept = [proposal.tokens.clone(), proposal.margin.clone(), survival.clone()]
        world.restore(before)
        proposal, survival = self.draft(slots, width)
        got = [proposal.tokens, proposal.margin, survival]
        live = slots != self.scratch
        same = all(_rows_equal(a, b, live) for a, b in zip(got, kept, strict=True))
        _demand(same, f"draft of {n} requests, width {width}")
        world.restore(before)


class TestWorld(Protocol):
    """Random requests for the self-test, and their device state."""

    def rows(self, count: int, groups: int) -> tuple[RowBatch, SampleRows]:
        """A step of ``count`` rows with random verify widths; ``groups`` in its tail."""

    def slots(self, count: int) -> Tensor:
        """int64 [count] slots, scratch behind the last real one."""

    def state(self) -> Any:
        """A copy of all slot state."""

    def restore(self, saved: Any) -> None:
        """Put a copy back."""

    def same(self, saved: Any) -> bool:
        """Whether the slot state equals a copy (the scratch slot aside)."""


def _demand(same: bool, what: str) -> None:
    if not same:
        raise GraphMismatch(f"{what}: the replay differs from the eager step; set graphs=False and report it")


def _rows_equal(a: Tensor, b: Tensor, live: Tensor) -> bool:
    a, b = a[live], b[live]
    return bool(torch.all((a == b) | ((a != a) & (b != b))))


def _copy(into: RowBatch, rows: RowBatch) -> None:
    """Every table of ``rows`` into the static one; few launches."""
    names = ("tokens", "positions", "slots", "first", "last")
    torch._foreach_copy_([getattr(into, n) for n in names], [getattr(rows, n) for n in names])
    into.valid.copy_(rows.valid)
