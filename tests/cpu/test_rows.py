"""A row's logits have the same bits whatever runs beside it and wherever its state lies.

The yardstick is every token run as the only row of its pass. Compared are bits, not values. Two
threads get a smaller share: how ops split over threads is tested op by op elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import repeat

import pytest
import torch
from torch import Tensor

from firesteel.models.deepseek_v4.config import LayerKind
from firesteel.ops import BackendError, Numerics, select
from oracles import rows
from oracles.cases import CASES
from oracles.drive import Drive, Target, load_target

NAN = float("nan")
SHORT, LONG = "mixed", "page"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["reference", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    try:
        select(request.param, Numerics(False))
    except (BackendError, ImportError) as err:
        pytest.skip(str(err))
    return str(request.param)


@pytest.fixture(params=["float32", "official"])
def numerics(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@cache
def loaded(name: str, numerics: str, backend: str) -> Target:
    return load_target(CASES[name].folder(), numerics, backend)


@cache
def yardstick(name: str, numerics: str, backend: str) -> Tensor:
    case = CASES[name]
    together = case.prompt - 65 if case.prompt > 200 else 0
    return rows.alone(loaded(name, numerics, backend), case.tokens(), together)


class Setting:
    """One target with a prompt and its yardstick."""

    def __init__(self, name: str, numerics: str, backend: str):
        self.target = loaded(name, numerics, backend)
        self.tokens = CASES[name].tokens()
        self.want = yardstick(name, numerics, backend)
        self.length = len(self.tokens)


@pytest.fixture
def short(numerics: str, backend: str) -> Setting:
    """48 tokens through all layer kinds."""
    return Setting(SHORT, numerics, backend)


@pytest.fixture
def long(numerics: str, backend: str) -> Setting:
    """285 tokens: past the page, with entries to choose from."""
    return Setting(LONG, numerics, backend)


def test_every_split_in_two(short: Setting) -> None:
    assert rows.two_chunks(short.target, short.tokens, short.want) == 0


def test_chunk_sizes(short: Setting) -> None:
    """Whole, every constant size that leaves a rest, and random ones, in one reused slot."""
    n = short.length
    sizes = [[n]] + [[k] * (n // k) + [n % k] * bool(n % k) for k in (3, 7, 16, 17)]
    sizes += rows.random_chunkings(n, 1, seed=3, most=12)
    assert rows.chunkings(short.target, short.tokens, short.want, sizes) == 0


def test_company_slots_and_pages(short: Setting) -> None:
    """Beside up to 64 rows of others, in any slot, on any pages, with padding rows."""
    assert rows.company(short.target, short.tokens, short.want, seed=1, rounds=2) == 0


def test_one_row_beside_1_to_63(short: Setting) -> None:
    """The same decode row in batches of 2 to 64 rows."""
    generator = rows.picker(5)
    drive = Drive(short.target, 8, 128, rows.GAMMA)
    at = len(short.tokens) - 1
    drive.step([(3, 0, short.tokens[:at])])
    wrong = 0
    for n in range(2, 65, 1 if short.target.ops.name == "native" else 3):
        guests = rows.guests(dict.fromkeys(range(8), 0), 3, n - 1, 128, generator, exact=True)
        place = rows.below(len(guests) + 1, generator)
        groups = [*guests[:place], (3, at, short.tokens[at:]), *guests[place:]]
        assert sum(len(tokens) for _, _, tokens in groups) == n
        wrong += rows.same_bits(drive.step(groups)[place], short.want[at:])
    assert wrong == 0


def test_long_prompt(long: Setting) -> None:
    """285 tokens in one chunk and in random ones."""
    sizes = [[long.length], *rows.random_chunkings(long.length, 2, seed=4, most=120)]
    assert rows.chunkings(long.target, long.tokens, long.want, sizes) == 0


def test_long_prompt_in_company(long: Setting) -> None:
    assert rows.company(long.target, long.tokens, long.want, seed=2, rounds=1, most=200) == 0


@pytest.mark.parametrize("good", [1, 3, 7, 0], ids=["1", "3", "7", "random"])
def test_rejected_rows_leave_no_trace(short: Setting, good: int) -> None:
    """Blocks of eight rows of which 1, 3 or 7 are right (so at every offset to the windows), and any."""
    blocks = repeat((good, rows.GAMMA + 1 - good)) if good else rows.random_blocks(3)
    assert rows.rejected(short.target, short.tokens, short.want, blocks) == 0


def test_two_threads(numerics: str, backend: str) -> None:
    """Chunks and company of up to 64 rows with two threads per op."""
    torch.set_num_threads(2)
    target, tokens = loaded(SHORT, numerics, backend), CASES[SHORT].tokens(10)
    want = rows.alone(target, tokens)
    assert rows.chunkings(target, tokens, want, [[10], [3, 7]]) == 0
    assert rows.company(target, tokens, want, seed=6, rounds=1) == 0


# ---- what nobody may read ------------------------------------------------------------------------
def poison(drive: Drive) -> None:
    """NaN everywhere."""
    for tensor in drive.tensors():
        tensor.fill_(NAN)


def poison_unseen(drive: Drive, slot: int, cursor: int) -> None:
    """NaN in everything that no row of ``slot`` at or after ``cursor`` may read.

    Left are: the last window-1 K=V rows; raw rows of windows that are still open, and the A half of
    the window before; the entries of closed windows on the slot's own pages.
    """
    config = drive.target.config
    for i, layer in enumerate(drive.memory.layers):
        keep(layer.window, slot, range(max(cursor - config.sliding_window + 1, 0), cursor))
        ratio = config.compress_ratios[i]
        for memory in (layer.entries, layer.index):
            if memory is None:
                continue
            open_from = cursor // ratio * ratio
            overlap = config.kind(i) is LayerKind.CSA
            first = max(open_from - ratio, 0) if overlap else open_from
            keep(memory.raw, slot, range(first, cursor))
            if overlap:  # of the window before only the A halves of value and score
                size, half = memory.raw.shape[1], memory.raw.shape[2] // 4
                for p in range(first, open_from):
                    memory.raw[slot, p % size, half : 2 * half] = NAN
                    memory.raw[slot, p % size, 3 * half :] = NAN
            owned = drive.memory.page_table[slot]
            flat = memory.entries[owned].flatten(0, 1)
            flat[cursor // ratio :] = NAN
            memory.entries.fill_(NAN)
            memory.entries[owned] = flat.unflatten(0, (len(owned), -1))


def keep(ring: Tensor, slot: int, positions: range) -> None:
    """NaN in all of a ring [S, n, w] but these rows of one slot."""
    size = ring.shape[1]
    at = torch.tensor([p % size for p in positions], dtype=torch.int64)
    rest = ring[slot, at].clone()
    ring.fill_(NAN)
    ring[slot, at] = rest


def test_fresh_memory_may_hold_nan(short: Setting) -> None:
    """Nothing is read before it is written: scratch, free pages, other slots, unwritten rows."""
    drive = Drive(short.target, 3, 300, rows.GAMMA)
    poison(drive)
    assert rows.same_bits(drive.chunks(1, short.tokens, [48], padding=3, slack=40), short.want) == 0
    poison(drive)
    assert (
        rows.same_bits(drive.chunks(2, short.tokens, [1] * 5 + [9, 34], padding=2, slack=70), short.want) == 0
    )


@pytest.mark.parametrize("name", [SHORT, LONG])
def test_unseen_rows_may_hold_nan(name: str, numerics: str, backend: str) -> None:
    """Between any two chunks everything outside the visible state is overwritten with NaN."""
    here = Setting(name, numerics, backend)
    cuts = list(range(0, here.length, 3)) if name == SHORT else [0, 3, 63, 64, 130, 255, 256, 257, 281]
    drive = Drive(here.target, 2, 300, rows.GAMMA)
    for at, end in zip(cuts, [*cuts[1:], here.length], strict=True):
        poison_unseen(drive, 1, at)
        got = drive.step([(1, at, here.tokens[at:end])], padding=1, slack=20)[0]
        assert rows.same_bits(got, here.want[at:end]) == 0, f"rows {at} to {end}"


def test_poison_reaches_what_is_read(numerics: str) -> None:
    """One visible row, raw row or entry that is NaN does show: the tests above can fail."""
    here = Setting(SHORT, numerics, "reference")
    for what in range(3):
        drive = Drive(here.target, 1, 64, rows.GAMMA)
        drive.step([(0, 0, here.tokens[:39])])
        layer = drive.memory.layers[1]
        assert layer.entries is not None
        if what == 0:
            layer.window[0, (39 - 15) % layer.window.shape[1]] = NAN
        elif what == 1:
            layer.entries.raw[0, 33 % layer.entries.raw.shape[1]] = NAN
        else:
            layer.entries.entries[1, :9] = NAN
        assert drive.step([(0, 39, here.tokens[39:])])[0].isnan().any()
