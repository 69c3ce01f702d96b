"""The head and the walk on warps of different work give the bits of the plain forms, whatever the rows."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the 'gpu' extra is not installed")

from firesteel.ops.testing import slot_state
from firesteel.ops.triton import head, launch, pingpong, pingwalk, why_not
from firesteel.ops.triton.head import Walk
from firesteel.ops.triton.sample import Partials
from firesteel.ops.triton.target import of_device
from firesteel.ops.types import SlotState

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(launch.INTERPRETED, reason="kernels run under the interpreter in this process"),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.skipif(not launch.usable(), reason="an NVIDIA device of capability 9 is needed"),
]

ROWS = 301


def state_of(vocab: int, heat: float) -> SlotState:
    rng = torch.Generator("cuda").manual_seed(vocab)
    seed_lo, seed_hi = (torch.randint(0, 2**32, (ROWS,), generator=rng, device="cuda") for _ in range(2))
    temperature = torch.where(torch.arange(ROWS, device="cuda") % 3 == 0, 0.0, heat)
    made = slot_state(ROWS, vocab, 500, 4, temperature=temperature, seed_lo=seed_lo, seed_hi=seed_hi)
    tables = {f.name: getattr(made, f.name) for f in fields(made)}
    return replace(made, **{name: t.cuda() for name, t in tables.items() if isinstance(t, Tensor)})


def chosen(parts: Partials | None, slots: Tensor, places: Tensor, state: SlotState) -> list[Tensor]:
    """Tokens, soundness and, of a walk, margins."""
    assert parts is not None
    tokens = torch.empty(parts.rows, dtype=torch.int64, device="cuda")
    finite = torch.empty(parts.rows, dtype=torch.bool, device="cuda")
    margins = torch.zeros(parts.rows, device="cuda")
    parts.reduce(slots, places, state, tokens, finite, margins if parts.second else None)
    return [tokens, finite, margins]


def normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=rng)


@pytest.mark.parametrize(("vocab", "k"), [(20096, 1024), (20001, 512)])
def test_head_chooses_what_the_plain_form_does(vocab: int, k: int) -> None:
    rng = torch.Generator("cuda").manual_seed(k)
    w, x = (normal(rng, vocab, k) * 2 * k**-0.5).bfloat16(), normal(rng, ROWS, k).bfloat16()
    w[[700, 9000]] = w[30].clone()  # ties of one row over tiles of other programs
    x[5, 3] = float("nan")
    target, slots = of_device(x.device), torch.arange(ROWS, device="cuda")
    places = slots + 3
    for heat in (0.0, 1.2):
        state = state_of(vocab, heat)
        want = chosen(
            head.run_rows(x, w, target, True, ROWS, None, (slots, places, state), None), slots, places, state
        )
        for n in (64, 65, 100, 128, 200, ROWS):
            sampling = (slots[:n], places[:n], state)
            got = chosen(pingpong.run_head(x[:n], w, n, sampling), *sampling)
            sound = torch.arange(n, device="cuda") != 5
            assert torch.equal(got[0][sound], want[0][:n][sound])
            assert torch.equal(got[1], sound)


@pytest.mark.parametrize(("vocab", "rejection"), [(20096, False), (20004, True), (20003, False)])
def test_walk_chooses_what_the_plain_form_does(vocab: int, rejection: bool) -> None:
    rank, rng = 256, torch.Generator("cuda").manual_seed(vocab)
    w1, w2 = normal(rng, vocab, rank), (normal(rng, vocab, rank) / 16).bfloat16()
    base = normal(rng, ROWS, 3, vocab)
    base[4, 1, 9] = float("inf")
    base[6, 1, [30, 1130, 17230]] = 20.0
    w2[[1130, 17230]] = w2[30].clone()
    previous = torch.randint(0, vocab, (ROWS,), generator=rng, device="cuda")
    target, slots = of_device(base.device), torch.arange(ROWS, device="cuda")
    places = slots + 3
    for heat in (0.0, 1.2):
        state = state_of(vocab, heat)
        whole = (slots, places, state)
        plain = head.run_rows(w1, w2, target, True, ROWS, None, whole, Walk(base[:, 1], previous, rejection))
        want = chosen(plain, *whole)
        for n in (1, 16, 17, 40, 64, 65, 128, 200, ROWS):
            sampling = (slots[:n], places[:n], state)
            walk = Walk(base[:n, 1], previous[:n], rejection)
            got = chosen(
                pingwalk.run_walk(w1, w2, walk.base, walk.previous, rejection, n, sampling), *sampling
            )
            sound = torch.arange(n, device="cuda") != 4
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a[sound], b[:n][sound])
            assert torch.equal(got[1], sound)
