"""``numerics: official`` rounds where the official forward pass rounds.

Two comparisons with the straight-line reference of ``oracles.official``:

- half a layer at a time, both starting from the engine's own streams, so that nothing accumulates.
  Almost every row has to have equal bits. The rest are flips: two float32 sums that differ in the
  last bit fall on two sides of a rounding boundary.
- whole prompts. Flips are amplified there, so the bound is the noise floor: how far the reference
  moves if only the order of its additions changes.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from oracles.cases import CASES
from oracles.drive import Drive, load_target
from oracles.official import E2M1, Options, Straight, hadamard, to_bf16, to_e2m1, to_e4m3
from oracles.record import Halves, record

FLIPPED = (
    0.15  # share of rows that may hold a flip (measured: at most .07 with AVX-512, .10 with AVX2, mostly 0)
)
STEP = 0.10  # how far a flipped element may lie off, in units of its row's rms (measured: .05)
ROUTED = 0.01  # share of rows whose experts or entries may differ: a tie decided by a flip
OFFICIAL = Options()
ORDERS = (Options(dtype=torch.float64), Options(shuffle=1), Options(shuffle=2))


@cache
def recorded(name: str) -> list[Halves]:
    case = CASES[name]
    return record(load_target(case.folder(), "official"), case.tokens())


def differing(got: Tensor, want: Tensor) -> Tensor:
    """bool [n]: rows that differ anywhere."""
    return (got != want).flatten(1).any(1)


def farthest(got: Tensor, want: Tensor) -> float:
    """Largest difference in units of a row's rms."""
    got, want = got.double().flatten(1), want.double().flatten(1)
    return float(((got - want).abs().amax(1) / want.square().mean(1).sqrt().clamp_min(1e-12)).max())


def faults(name: str, layer: int, options: Options = OFFICIAL) -> list[str]:
    """Everything in one layer that lies beyond the bounds."""
    case = CASES[name]
    straight, seen = Straight(case.folder(), options), recorded(name)[layer]
    with torch.no_grad():
        between, first = straight.first(seen.before, layer)
        after, second = straight.second(seen.between, layer, torch.tensor(case.tokens()))
    pairs = [(f"attention half, {k}", v, first[k]) for k, v in seen.first.items()]
    pairs += [(f"expert half, {k}", v, second[k]) for k, v in seen.second.items()]
    pairs += [("streams between", seen.between, between), ("streams after", seen.after, after)]
    out = []
    for what, got, want in pairs:
        share = float(differing(got, want).double().mean())
        if what.endswith(("selected", "ids")):
            bad = share > ROUTED
        elif what.endswith("weights"):  # never rounded: float32 sums in two orders, or a flip before it
            bad = farthest(got, want) > 1e-3
        else:
            bad = share > FLIPPED or farthest(got, want) > STEP
        if bad:
            out.append(f"{what}: {share:.3f} of the rows differ, by up to {farthest(got, want):.1e} rms")
    return out


LAYERS = [(name, layer) for name, case in CASES.items() for layer in range(case.config.num_hidden_layers)]


@pytest.mark.parametrize(("name", "layer"), LAYERS)
def test_halves_of_a_layer(name: str, layer: int) -> None:
    assert not faults(name, layer)


def test_most_results_have_equal_bits() -> None:
    """Over all cases: rounded results are equal in bits, with a flip in a thousand."""
    differ = total = 0
    for name, case in CASES.items():
        straight = Straight(case.folder())
        for layer, seen in enumerate(recorded(name)):
            with torch.no_grad():
                _, first = straight.first(seen.before, layer)
                _, second = straight.second(seen.between, layer, torch.tensor(case.tokens()))
            for got, want in ((seen.first, first), (seen.second, second)):
                for key in got.keys() - {"weights"}:
                    differ += int((got[key] != want[key]).sum())
                    total += got[key].numel()
    assert differ < 1e-3 * total


@pytest.mark.parametrize(
    ("options", "where"),
    [
        (Options(official=False), "attention half, kv"),
        (Options(norm_in_bf16=True), "attention half, q"),
        (Options(one_maximum=True), "attention half, attention"),
    ],
    ids=["no rounding", "norm in bf16", "one maximum"],
)
def test_other_rounding_is_noticed(options: Options, where: str) -> None:
    """The bounds are tight enough to tell rounding rules apart that differ in one place."""
    assert any(line.startswith(where) for line in faults("mixed", 1, options))


@pytest.mark.parametrize("name", ["csa", "page"])
def test_fp4_keys_change_the_selection(name: str) -> None:
    """Were the indexer not quantised, other entries would be chosen: the test above sees FP4."""
    case = CASES[name]
    layer = case.config.compress_ratios.index(4)
    seen = recorded(name)[layer]
    with torch.no_grad():
        _, plain = Straight(case.folder(), Options(official=False)).first(seen.before, layer)
    assert float(differing(seen.first["selected"], plain["selected"]).double().mean()) > 5 * ROUTED


def distances(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Per row, rms over the vocabulary: engine [n], other orders of addition [n, orders], no rounding at all [n]."""
    case = CASES[name]
    path, tokens = case.folder(), case.tokens()[:150]
    base = Straight(path).logits(tokens)

    def off(other: Tensor) -> Tensor:
        return (other.double() - base.double()).square().mean(-1).sqrt()

    engine = Drive(load_target(path, "official"), 1, len(tokens)).step([(0, 0, tokens)])[0]
    floor = [off(Straight(path, options).logits(tokens)) for options in ORDERS]
    return off(engine), torch.stack(floor, 1), off(Straight(path, Options(official=False)).logits(tokens))


def test_whole_prompts_within_the_floor() -> None:
    """Median and 90 % of all rows: no farther than twice what another order of additions does.

    Which order moves most depends on the processor: torch's own differs.
    """
    engine, floor, unrounded = (torch.cat(d) for d in zip(*(distances(n) for n in CASES), strict=True))
    half, most = torch.tensor(0.5).double(), torch.tensor(0.9).double()
    assert engine.quantile(half) <= 2 * floor.quantile(half, 0).max() + 1e-3
    assert engine.quantile(most) <= 2 * floor.quantile(most, 0).max()
    # and it is the rounding that is reproduced: without it the logits are elsewhere
    assert engine.quantile(half) < unrounded.quantile(half) / 10
    assert engine.quantile(most) < unrounded.quantile(most) / 2


# ---- the reference's own number formats ----------------------------------------------------------
def test_e4m3_of_the_reference() -> None:
    """Against the dtype torch has, over magnitudes that meet subnormals, ties and scale borders."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 64, generator=generator) * torch.exp2(
        torch.randint(-18, 12, (400, 1), generator=generator)
    )
    x = torch.cat((x, to_bf16(x), torch.full((1, 64), 448.0), torch.full((1, 64), 449.0), torch.zeros(1, 64)))
    amax = x.abs().amax(-1, keepdim=True).clamp_min(1e-4)
    scale = torch.exp2(torch.ceil(torch.log2(amax.double() / 448.0))).float()
    want = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(to_e4m3(x, 64), want)
    assert torch.equal(to_e4m3(torch.cat((x, x), -1)[:, :100], 64)[:, 64:], to_e4m3(x[:, :36], 64))


def test_e2m1_of_the_reference() -> None:
    """Nearest of the 15 values under a power-of-two scale; ties to the even code."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    even = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0])
    assert torch.equal(to_e2m1(torch.cat((ties, -ties))[None], 16), torch.cat((even, -even))[None])
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 32, generator=generator)
    got = to_e2m1(x, 32)
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True).double() / 6.0)))
    grid = torch.tensor(E2M1).double()
    grid = torch.cat((grid, -grid)) * scale.unsqueeze(-1)
    nearest = (x.double().unsqueeze(-1) - grid).abs().amin(-1)
    assert torch.equal((x.double() - got.double()).abs(), nearest)


def test_hadamard_of_the_reference() -> None:
    h = hadamard(32)
    assert torch.allclose(h @ h.T, torch.eye(32).double())
    assert torch.equal(h, h.T)
