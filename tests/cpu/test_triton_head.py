"""The head's and the walk's forms over tensor descriptors under the interpreter against ``head_rows``."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="the 'gpu' extra is not installed")

from firesteel.ops.testing import slot_state  # noqa: E402
from firesteel.ops.triton import head  # noqa: E402
from firesteel.ops.triton.head import Form, Walk  # noqa: E402
from firesteel.ops.triton.sample import Partials  # noqa: E402
from firesteel.ops.triton.target import INTERPRETER, TARGETS  # noqa: E402
from firesteel.ops.types import SlotState  # noqa: E402

pytestmark = pytest.mark.cpu
ROWS, RANK, HIDDEN = 37, 32, 128
FORM = Form(64, 16, 4, 2, 8)


def state_of(vocab: int) -> SlotState:
    g = torch.Generator().manual_seed(vocab)
    seed_lo, seed_hi = (torch.randint(0, 2**32, (ROWS,), generator=g) for _ in range(2))
    temperature = torch.where(torch.arange(ROWS) % 3 == 0, 0.0, 1.2)
    return slot_state(ROWS, vocab, 60, 4, temperature=temperature, seed_lo=seed_lo, seed_hi=seed_hi)


def chosen(parts: Partials | None, slots: Tensor, places: Tensor, state: SlotState) -> list[Tensor]:
    """Tokens, soundness and, of a walk, margins."""
    assert parts is not None
    tokens = torch.empty(parts.rows, dtype=torch.int64)
    finite, margins = torch.empty(parts.rows, dtype=torch.bool), torch.zeros(parts.rows)
    parts.reduce(slots, places, state, tokens, finite, margins if parts.second else None)
    return [tokens, finite, margins]


def draw(vocab: int, k: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(k)
    w = (torch.randn(vocab, k, generator=g) * 2 * k**-0.5).bfloat16()
    return torch.randn(ROWS, k, generator=g).bfloat16(), w


@pytest.mark.parametrize("vocab", [256, 300])
def test_wide_head_stores_what_the_plain_one_does(vocab: int) -> None:
    x, w = draw(vocab, HIDDEN)
    stored = torch.empty(ROWS, vocab)
    head.run_rows(x, w, INTERPRETER, True, ROWS, stored, None, None)
    for n in (1, 16, ROWS):
        out = torch.full((n, 2 * vocab), 7.0)
        head.run_wide(FORM, x[:n], w, n, out[:, :vocab])  # rows that lie apart
        torch.testing.assert_close(out[:, :vocab], stored[:n], rtol=1e-6, atol=1e-6)
        assert bool((out[:, vocab:] == 7.0).all())


@pytest.mark.parametrize(("vocab", "rejection"), [(256, False), (300, True)])
def test_walk_over_descriptors_equals_the_plain_one(vocab: int, rejection: bool) -> None:
    _, w2 = draw(vocab, RANK)
    w1 = draw(vocab, RANK)[1].float()
    g = torch.Generator().manual_seed(3)
    base = torch.randn(ROWS, 3, vocab, generator=g)
    base[4, 1, 9] = float("inf")
    base[6, 1, [30, 130, 230]] = 20.0
    w2[[130, 230]] = w2[30].clone()  # ties of one row over tiles of other programs
    previous = torch.randint(0, vocab, (ROWS,), generator=g)
    state, slots = state_of(vocab), torch.arange(ROWS)
    places = slots + 3
    for n in (1, 16, ROWS):
        walk = Walk(base[:n, 1], previous[:n], rejection)
        sampling = (slots[:n], places[:n], state)
        logits = [torch.empty(n, vocab) for _ in range(3)]
        plain = head.run_rows(w1, w2, INTERPRETER, True, n, logits[0], sampling, walk)
        got = head.run_walk(FORM, w1, w2, walk, n, logits[1], sampling)
        head.run_walk(FORM, w1, w2, walk, n, logits[2], None)
        sound = torch.arange(n) != 4
        for a, b in zip(
            chosen(got, slots[:n], places[:n], state),
            chosen(plain, slots[:n], places[:n], state),
            strict=True,
        ):
            assert torch.equal(a[sound], b[sound])
        assert torch.equal(chosen(got, slots[:n], places[:n], state)[1], sound)
        torch.testing.assert_close(logits[1], logits[0], rtol=1e-6, atol=1e-6)
        assert torch.equal(logits[1], logits[2])


def test_forms_are_for_hopper_and_fit_their_kernels() -> None:
    for name, target in TARGETS.items():
        for rows in (1, 4, 16, 17, 64, 65, 192, 256, 448, 512, 1024, 2048):
            walk = head.walk_form(rows, 256, target)
            wide = head.wide_form(rows, 4096, target)
            for form in (walk, wide):
                assert form is None or name == "sm_90"
            assert walk is None or walk.tile_r % walk.chunk == 0
        assert head.walk_form(8, 24, target) is None, "a rank that is no power of two"
        assert head.wide_form(512, 100, target) is None
