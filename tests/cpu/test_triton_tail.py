"""The tail's Triton kernels under the interpreter against the plain torch ops."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated

import pytest
import torch

triton = pytest.importorskip("triton", reason="the 'gpu' extra is not installed")

import triton.language as tl  # noqa: E402

from firesteel.checkpoint.codecs import QTensor  # noqa: E402
from firesteel.ops.reference import noise  # noqa: E402
from firesteel.ops.reference.tail import ReferenceOps  # noqa: E402
from firesteel.ops.testing import assert_row_invariant, slot_state  # noqa: E402
from firesteel.ops.testing_cases import ROW_CASES, Case  # noqa: E402
from firesteel.ops.triton.backend import TritonOps  # noqa: E402
from firesteel.ops.triton.launch import kernel  # noqa: E402
from firesteel.ops.triton.sample import gumbel, uniform, words_of  # noqa: E402
from firesteel.ops.types import Calibration, MarkovHead, Numerics, PromptRows, Proposal, SlotState  # noqa: E402
from oracles.sampling import philox4x32  # noqa: E402

pytestmark = pytest.mark.cpu
NUMERICS = {"official": Numerics(True), "float32": Numerics(False)}


@pytest.fixture(params=list(NUMERICS), scope="module")
def numerics(request: pytest.FixtureRequest) -> Numerics:
    return NUMERICS[request.param]


def random_state(slots: int, vocab: int, length: int = 40, gamma: int = 4, seed: int = 0) -> SlotState:
    """Requests in mid-answer, half of them greedy; the last line is scratch."""
    g = torch.Generator().manual_seed(seed)

    def ints(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, (slots, *shape), generator=g)

    return slot_state(
        slots,
        vocab,
        length,
        gamma,
        temperature=torch.where(torch.rand(slots, generator=g) < 0.4, 0.0, 1.3),
        seed_lo=ints(2**32),
        seed_hi=ints(2**32),
        sample=ints(4),
        passes=ints(9),
        cursor=ints(length - gamma - 2),
        anchor=ints(vocab),
        alive=torch.ones(slots, dtype=torch.int64),
        max_len=torch.full((slots,), length),
    )


# ---- noise ---------------------------------------------------------------------------
@kernel("first")
def draw(first, words, flat, noisy, position, stream, high, low, index, N: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    key = [tl.load(p).to(tl.uint32) for p in (position, stream, high, low, index)]
    bits = words_of(first, (key[0], key[1], key[2], key[3], key[4]), N, PAIRS)
    tl.store(words + at, bits.to(tl.int64))
    tl.store(flat + at, uniform(bits))
    tl.store(noisy + at, gumbel(bits))


@kernel("first")
def draw_rows(first, words, position, stream, high, low, index, N: tl.constexpr, R: tl.constexpr):  # type: ignore[no-untyped-def]
    at, row = tl.arange(0, N), tl.arange(0, R)
    key = [tl.load(p + row).to(tl.uint32)[None, :] for p in (position, stream, high, low, index)]
    bits = words_of(first, (key[0], key[1], key[2], key[3], key[4]), N)
    tl.store(words + row[None, :] * N + at[:, None], bits.to(tl.int64))


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("first", [0, 1028])
def test_noise_has_the_reference_words(pairs: bool, first: int) -> None:
    n = 4096
    state = random_state(3, 50, seed=5)
    place = torch.tensor([12345])
    slot = torch.tensor([1])
    want = noise.words(range(first, first + n), place, slot, state, 9)[0]
    words, flat, noisy = torch.empty(n, dtype=torch.int64), torch.empty(n), torch.empty(n)
    key = (place, torch.tensor([9]), state.seed_hi[1:2], state.seed_lo[1:2], state.sample[1:2])
    draw[(1,)](first, words, flat, noisy, *key, N=n, PAIRS=pairs)
    assert torch.equal(words, want)
    assert torch.equal(flat, noise.uniform(want))
    torch.testing.assert_close(noisy, noise.gumbel(want), rtol=1e-6, atol=3e-7)
    for at in (0, 1, 2, 3, 4093):
        keys = (int(state.seed_lo[1]), int(state.sample[1]))
        counter = ((first + at) // 4, 12345, 9, int(state.seed_hi[1]))
        assert int(words[at]) == philox4x32(counter, keys)[(first + at) % 4]


def test_noise_of_rows_has_the_reference_words() -> None:
    n, rows = 128, 16
    state, slots = random_state(rows, 50, seed=6), torch.arange(rows)
    place, stream = torch.arange(rows) * 37, torch.arange(rows) % 3
    want = noise.words(range(512, 512 + n), place, slots, state, stream)
    words = torch.empty(rows, n, dtype=torch.int64)
    draw_rows[(1,)](512, words, place, stream, state.seed_hi, state.seed_lo, state.sample, N=n, R=rows)
    assert torch.equal(words, want)


def test_noise_is_fine_grained_and_finite_at_both_ends() -> None:
    edge = torch.tensor([0, 1, 2, 255, 256, 2**31, 2**32 - 300, 2**32 - 129, 2**32 - 128, 2**32 - 1])
    flat, noisy = torch.empty(16), torch.empty(16)

    bits = torch.nn.functional.pad(edge, (0, 6))
    turn[(1,)](bits, flat, noisy, N=16)
    assert torch.equal(flat, noise.uniform(bits))
    want = noise.gumbel(bits.double().long())
    assert bool(torch.isfinite(noisy).all())
    torch.testing.assert_close(noisy, want, rtol=1e-6, atol=3e-7)


@kernel()
def turn(bits, flat, noisy, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    word = tl.load(bits + at).to(tl.uint32)
    tl.store(flat + at, uniform(word))
    tl.store(noisy + at, gumbel(word))


# ---- head and sampling -----------------------------------------------------------------
def head_case(ops: ReferenceOps, rows: int, vocab: int = 300, k: int = 96):  # type: ignore[no-untyped-def]
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, k, generator=g).bfloat16().float()
    weight = QTensor.dense((torch.randn(vocab, k, generator=g) * k**-0.5 * 3).bfloat16())
    slots = torch.randint(0, 6, (rows,), generator=g)
    return x, ops.linear_weight(weight), slots, torch.randint(1, 40, (rows,), generator=g)


@pytest.mark.parametrize("rows", [1, 19])
def test_head_sample_is_sample_of_logits(numerics: Numerics, rows: int) -> None:
    ops, plain = TritonOps(numerics), ReferenceOps(numerics)
    state = random_state(6, 300)
    x, head, slots, positions = head_case(ops, rows)
    logits = ops.logits(x, head)
    fused = ops.head_sample(x, head, slots, positions, state)
    stored = ops.sample(logits, slots, positions, state)
    want = plain.sample(logits, slots, positions, state)
    for got in (fused, stored):
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    x, head, slots, positions = head_case(plain, rows)
    torch.testing.assert_close(logits, plain.logits(x, head), rtol=1e-5, atol=1e-5)


def test_broken_rows_are_told_and_ties_take_the_lowest_id() -> None:
    ops = TritonOps(NUMERICS["float32"])
    state = slot_state(3, 2500, 40)
    logits = torch.zeros(6, 2500)
    logits[0, [2400, 1500, 77]] = 4.0  # ties over three tiles
    logits[1, 2000] = float("nan")
    logits[2, 2001] = float("inf")
    logits[3] = float("-inf")
    logits[4] = float("-inf")
    logits[4, 2499] = -5.0
    slots = torch.zeros(6, dtype=torch.int64)
    tokens, finite = ops.sample(logits, slots, slots + 7, state)
    assert finite.tolist() == [True, False, False, False, True, True]
    assert tokens[[0, 4, 5]].tolist() == [77, 2499, 0]
    assert bool(((tokens >= 0) & (tokens < 2500)).all())


@pytest.mark.parametrize(
    ("kind", "name"), [("official", "sample"), ("official", "head_sample"), ("float32", "head_sample")]
)
def test_tail_rows_are_invariant(kind: str, name: str) -> None:
    ops, case = TritonOps(NUMERICS[kind]), ROW_CASES[name]
    some = case.rows[:24]
    assert_row_invariant(lambda rows: case.run(ops, rows), lambda r: r, some, sizes=(3, 18), alone=3)


@pytest.mark.parametrize("name", ["sample", "head_sample"])
def test_tail_tokens_equal_the_reference(name: str) -> None:
    case, official = ROW_CASES[name], NUMERICS["official"]
    rows = case.rows[:40]
    got, want = (case.run(ops, rows) for ops in (TritonOps(official), ReferenceOps(official)))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


# ---- the walk ----------------------------------------------------------------------------
def walk_case(ops: ReferenceOps, groups: int, depth: int = 3, vocab: int = 300, rank: int = 24, d: int = 40):  # type: ignore[no-untyped-def]
    g = torch.Generator().manual_seed(groups)
    dense = [
        QTensor.dense(torch.randn(n, k, generator=g).bfloat16()) for n, k in ((vocab, rank), (1, d + rank))
    ]
    w1 = (torch.randn(vocab, rank, generator=g) * 0.4).bfloat16().float()
    head = MarkovHead(w1, ops.linear_weight(dense[0]), ops.linear_weight(dense[1]))
    base = 2 * torch.randn(groups, depth, vocab, generator=g)
    z = torch.randn(groups, depth, d, generator=g).bfloat16().float()
    return base, z, head


@pytest.mark.parametrize(
    ("name", "rejection", "shaped"),
    [
        ("official", False, False),
        ("float32", False, True),
        ("official", True, True),
        ("float32", True, False),
    ],
)
def test_walk_equals_the_reference(name: str, rejection: bool, shaped: bool) -> None:
    numerics, groups, keep = NUMERICS[name], 5, rejection
    slots = torch.tensor([3, 0, 4, 1, 2])
    got, want = [], []
    for ops, into in ((TritonOps(numerics), got), (ReferenceOps(numerics), want)):
        state = random_state(7, 300, length=30)
        state.cursor[4] = 28  # drafts past the last position share it
        if shaped:
            state.frequency[:] = 0.7
        base, z, head = walk_case(ops, groups)
        proposal = ops.markov_walk(
            base, z, head, slots, state, shaped=shaped, rejection=rejection, keep_logits=keep
        )
        into.extend((proposal.tokens, state.history, proposal.margin, proposal.confidence))
        into.append(proposal.logits if keep else torch.zeros(1))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    for a, b in zip(got[2:], want[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


def test_walk_rows_are_invariant() -> None:
    ops = TritonOps(NUMERICS["official"])
    base, z, head = walk_case(ops, 20, depth=2)

    def run(rows: list[int]) -> tuple[torch.Tensor, ...]:
        state = random_state(21, 300)
        out = ops.markov_walk(
            base[rows],
            z[rows],
            head,
            torch.tensor(rows),
            state,
            shaped=False,
            rejection=False,
            keep_logits=True,
        )
        assert out.confidence is not None and out.logits is not None
        return out.tokens, out.margin, out.confidence, out.logits

    def draw_rows(n: int, rng) -> list[int]:  # type: ignore[no-untyped-def]
        return rng.sample(range(20), n)

    assert_row_invariant(run, lambda r: r, range(20), batches=draw_rows, sizes=(5, 18), alone=2)


# ---- rows and commit ------------------------------------------------------------------------
def drafted_state(slots: int, seed: int, length: int = 64, gamma: int = 5) -> SlotState:
    """Requests with drafts of every length, some ended, some near their limit, survivals with ties."""
    g = torch.Generator().manual_seed(seed)
    state = random_state(slots, 50, length, gamma, seed)
    state.drafts.copy_(torch.randint(0, 4, state.drafts.shape, generator=g))
    state.draft_len.copy_(torch.randint(0, gamma + 1, (slots,), generator=g))
    state.draft_cap.copy_(torch.randint(0, gamma + 1, (slots,), generator=g).clamp_min(2))
    state.alive.copy_((torch.rand(slots, generator=g) < 0.8).long())
    state.max_len.copy_(state.cursor + torch.randint(1, 9, (slots,), generator=g))
    state.stop_ids[:, 0] = torch.where(torch.rand(slots, generator=g) < 0.3, 3, -1)
    steps = torch.randint(1, 4, state.survival.shape, generator=g) / 4
    state.survival.copy_(steps.cumprod(-1))
    state.alive[-1] = 0
    return state


@pytest.mark.parametrize("seed", range(6))
def test_admit_is_exact(seed: int) -> None:
    ops, plain = TritonOps(NUMERICS["official"]), ReferenceOps(NUMERICS["official"])
    state = drafted_state(12, seed)
    decodes = torch.randperm(11, generator=torch.Generator().manual_seed(seed))[: 3 + seed]
    decodes = torch.cat((decodes, torch.tensor([11, 11])))  # padding: the scratch slot
    for drafts in (0, 1, 2, 5, 9, 17, 100):
        got, want = ops.admit(decodes, drafts, state), plain.admit(decodes, drafts, state)
        assert torch.equal(got, want), f"{drafts} drafts"


def prompt_rows(chunks: list[tuple[int, int, int, bool]]) -> PromptRows:
    """Rows of (slot, start, length, last) chunks."""
    columns: list[list[int]] = [[], [], [], [], [], []]
    for slot, start, n, last in chunks:
        at = len(columns[0])
        for i in range(n):
            for column, value in zip(columns, (7 * at + i, start + i, slot, at, at + n - 1), strict=False):
                column.append(value)
        if last:
            columns[5].append(at + n - 1)
    return PromptRows(*(torch.tensor(c, dtype=torch.int64) for c in columns))


@pytest.mark.parametrize("chunks", [[], [(9, 4, 3, True), (10, 0, 70, False), (8, 5, 1, True)]])
@pytest.mark.parametrize("seed", range(3))
def test_rows_verdict_and_state_are_exact(seed: int, chunks: list[tuple[int, int, int, bool]]) -> None:
    decodes, drafts = torch.tensor([5, 2, 7, 0, 3, 11]), 7
    found = []
    for ops in (TritonOps(NUMERICS["official"]), ReferenceOps(NUMERICS["official"])):
        state = drafted_state(12, seed, length=90)
        widths = ops.admit(decodes, drafts, state)
        total = len(decodes) + drafts
        rows, samples = ops.build_rows(state, prompt_rows(chunks), decodes, widths, total, 80)
        g = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, 4, samples.rows.shape, generator=g)
        finite = torch.rand(tokens.shape, generator=g) < 0.9
        scratch = state.cursor.shape[0] - 1
        verdict = ops.commit(tokens, finite, rows, samples, state, 1 + 5)
        state.history[scratch] = 0  # anything may stand there
        found.append((vars(rows), vars(samples), vars(verdict), vars(state)))
    for got, want in zip(*found, strict=True):
        for name, value in want.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(got[name], value), name
            else:
                assert got[name] == value, name


@pytest.mark.parametrize("head", [False, True])
def test_survival_equals_the_reference(head: bool) -> None:
    g = torch.Generator().manual_seed(1)
    margin = 4 * torch.rand(9, 5, generator=g)
    margin[0, 0], margin[1, 1] = float("nan"), float("inf")
    confidence = torch.randn(9, 5, generator=g) if head else None
    state = random_state(12, 50)
    slots = torch.randperm(11, generator=g)[:9]
    table = Calibration(torch.randn(2, 6, generator=g), torch.tensor([0.4, 0.8]), torch.tensor([1.1, 0.7]))
    given = Proposal(torch.zeros(9, 5, dtype=torch.int64), margin, confidence, None)
    official = NUMERICS["official"]
    got, want = (
        o.survival(given, slots, state, table) for o in (TritonOps(official), ReferenceOps(official))
    )
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-7)
    assert bool((got[:, 1:] <= got[:, :-1]).all())


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_drafts_are_noted_as_the_reference_does(head: bool, known: bool) -> None:
    g = torch.Generator().manual_seed(2)
    lines = []
    for make in (TritonOps, ReferenceOps):
        ops, state = make(NUMERICS["official"]), random_state(12, 50)
        g.manual_seed(2)
        drafts = torch.randint(0, 50, (7, 3), generator=g)
        signals = torch.rand(7, 3, generator=g), torch.randn(7, 3, generator=g) if head else None
        table = Calibration(
            torch.randn(2, 6, generator=g), torch.tensor([0.4, 0.8]), torch.tensor([1.1, 0.7])
        )
        slots = torch.randperm(11, generator=g)[:7]
        out = ops.note_drafts(Proposal(drafts, *signals, None), slots, state, table if known else None)
        assert bool((state.draft_len[slots] == 3).all())
        lines.append([out, *(t for t in vars(state).values() if isinstance(t, torch.Tensor))])
    for got, want in zip(*lines, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("groups", [1, 2, 60])
def test_block_rows_equal_the_reference(groups: int) -> None:
    state = random_state(64, 50)
    slots = torch.randperm(63, generator=torch.Generator().manual_seed(4))[:groups]
    official = NUMERICS["official"]
    got, want = (o.block_rows(slots, 5, 49, state) for o in (TritonOps(official), ReferenceOps(official)))
    for name, value in vars(want).items():
        mine = getattr(got, name)
        assert torch.equal(mine, value) if isinstance(value, torch.Tensor) else mine == value, name
        assert not isinstance(value, torch.Tensor) or mine.is_contiguous(), "kernels count on dense rows"
        assert not isinstance(value, torch.Tensor) or value.is_contiguous(), "kernels count on dense rows"


# ---- shaping and scores ----------------------------------------------------------------------
@pytest.mark.parametrize("name", ["shape", "logprobs"])
def test_shaped_rows_equal_the_reference_and_are_invariant(name: str) -> None:
    case: Case = ROW_CASES[name]
    ops, plain = TritonOps(NUMERICS["official"]), ReferenceOps(NUMERICS["official"])
    rows = case.rows[:10]
    got, want = (case.run(o, rows) for o in (ops, plain))
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    assert_row_invariant(lambda r: case.run(ops, r), lambda r: r, rows, sizes=(2, 6), alone=1)


def test_shaping_of_every_kind_equals_the_reference() -> None:
    """Several tiles, ties at every threshold, bans, penalties and truncation in all combinations."""
    vocab, slots = 2500, 9
    g = torch.Generator().manual_seed(3)
    state = random_state(slots, vocab, length=60, seed=3)
    state.temperature.copy_(torch.tensor([0.0, 1.0, 0.7, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0]))
    state.top_k.copy_(torch.tensor([5, 0, 40, 3, 0, 1, 0, 2499, 0]))
    state.top_p.copy_(torch.tensor([0.5, 0.9, 1.0, 0.8, 1.0, 1.0, 0.3, 1.0, 1.0]))
    state.min_p.copy_(torch.tensor([0.2, 0.0, 0.01, 0.0, 0.1, 0.0, 0.05, 0.0, 0.0]))
    state.repetition[[1, 3, 6]], state.presence[[2, 3]], state.frequency[[3, 4]] = 1.3, 0.5, 0.25
    state.prompt_len.fill_(10)
    state.stop_from.copy_(torch.tensor([0, 50, 0, 50, 0, 0, 50, 0, 0]))
    state.stop_ids[:, :2] = torch.tensor([17, 2400])
    state.bias_ids = torch.randint(0, vocab, (slots, 4), generator=g)
    state.bias_values = torch.randn(slots, 4, generator=g)
    state.bias_ids[2, 1:] = -1
    state.history.copy_(torch.randint(0, 40, state.history.shape, generator=g))
    state.bad_words = torch.full((slots, 3, 3), -1)
    positions = torch.randint(12, 50, (slots,), generator=g)
    for s in range(slots):
        state.bad_words[s, 0] = torch.tensor([*state.history[s, positions[s] - 2 : positions[s]], 7])
        state.bad_words[s, 1] = torch.tensor([-1, 999, 8])
        state.bad_words[s, 2] = torch.tensor([-1, -1, 9])
    state.allowed = torch.rand(slots, vocab, generator=g) < 0.9
    logits = (4 * torch.randn(slots, vocab, generator=g)).round() / 2  # many ties
    official = NUMERICS["official"]
    rows = torch.arange(slots)
    got, want = (
        o.shape(logits, rows, positions, state) for o in (TritonOps(official), ReferenceOps(official))
    )
    finite = torch.isfinite(want)
    assert torch.equal(torch.isfinite(got), finite), (torch.isfinite(got) != finite).sum(1)
    torch.testing.assert_close(got[finite], want[finite], rtol=1e-6, atol=1e-6)
    scores = [
        o.logprobs(logits, torch.arange(slots) * 250, 6)
        for o in (TritonOps(official), ReferenceOps(official))
    ]
    for a, b in zip(*(vars(s).values() for s in scores), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-5)
