"""Every acceptance rule emits the target's distribution: whole blocks, counted and compared.

Toy logits go through the real draft, row, sampling and commit ops; no model. Seeds are fixed, so
nothing here is a matter of luck; the wrong rules at the end show that the test sees what it should.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from firesteel.core import SampleRows
from firesteel.ops import BackendError, build
from firesteel.ops.interface import Ops
from firesteel.ops.reference import draft, noise
from firesteel.ops.reference.tail import ReferenceOps
from firesteel.ops.types import Numerics, SlotState
from oracles import toy
from oracles.toy import Tables, Toy

DRAWS, FEW, VOCAB, DEPTH = 100_000, 20_000, 4, 3
CAUGHT = 1e-6  # far below what a right rule may show
RULES = ("coupled", "dense", "one_hot")
TABLES = Tables.random(VOCAB, DEPTH, seed=5, distance=0.8)
PLAIN = ReferenceOps(Numerics(official=False))


def backend(name: str) -> Ops:
    try:
        return build(name, Numerics(official=False))
    except BackendError as err:
        pytest.skip(str(err))


def p_value(machine: Toy, width: int = 2, **cut: float) -> float:
    """Of the first three emitted tokens against the target's own product."""
    found = toy.counts(machine.blocks(DEPTH, width), VOCAB)
    target = toy.shaped(machine.tables.target, machine.heat, **cut)
    return toy.chi_square(found, toy.joint(target, DEPTH))


@pytest.mark.parametrize("heat", (0.5, 1.0, 2.0))
@pytest.mark.parametrize("rule", RULES)
def test_blocks_and_acceptance(rule: str, heat: float) -> None:
    """The joint distribution of three tokens, and how often drafts are accepted."""
    machine = Toy(PLAIN, TABLES, rule, heat, DRAWS)
    assert p_value(machine) > 1e-4
    check_acceptance(machine)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cut", ({"top_k": 3}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.95}), ids=str)
def test_truncated_on_both_sides(rule: str, cut: dict[str, float]) -> None:
    machine = Toy(PLAIN, TABLES, rule, 1.0, FEW, **cut)
    assert p_value(machine, **cut) > 1e-4
    check_acceptance(machine, **cut)


@pytest.mark.parametrize("width", (1, 3))
@pytest.mark.parametrize("rule", RULES)
def test_other_widths(rule: str, width: int) -> None:
    """One draft a step, and more drafts than are counted: blocks that end in every way."""
    assert p_value(Toy(PLAIN, TABLES, rule, 1.0, FEW, seed=1), width) > 1e-4


@pytest.mark.parametrize("rule", RULES)
def test_native(rule: str) -> None:
    machine = Toy(backend("native"), TABLES, rule, 1.0, FEW, seed=2)
    assert p_value(machine) > 1e-4
    check_acceptance(machine)


def test_argmax_drafts_count_as_certain() -> None:
    """A greedy drafter is exact under the one-hot rule, whatever the temperature."""
    assert p_value(Toy(PLAIN, TABLES, "one_hot", 1.0, FEW, greedy_drafts=True)) > 1e-4


@pytest.mark.parametrize("rule", RULES)
def test_certain_target(rule: str) -> None:
    """T -> 0 is the argmax, also where the drafter disagrees."""
    machine = Toy(PLAIN, TABLES, rule, 0.0, 64)
    blocks = machine.blocks(DEPTH, 2)
    want, token = [], 0
    for d in range(DEPTH):
        token = int(TABLES.target[d, token].argmax())
        want.append(token)
    assert (blocks == torch.tensor(want)).all()


# ---- acceptance ----------------------------------------------------------------------------------
def expected_acceptance(rule: str, p: Tensor, q: Tensor) -> float:
    if rule == "coupled":
        return toy.coupled_acceptance(p, q)
    return float(torch.minimum(p, q).sum() if rule == "dense" else (p * q).sum())


def check_acceptance(machine: Toy, **cut: float) -> None:
    """The first draft, and the second given the first: the formulas, within 3 sigma."""
    drafts, accepted = machine.first_drafts, machine.first_accepted
    p, q = (toy.shaped(t, machine.heat, **cut) for t in (machine.tables.target, machine.tables.drafts()))
    _near(int((accepted >= 1).sum()), len(drafts), expected_acceptance(machine.rule, p[0, 0], q[0, 0]))
    for first in range(VOCAB):  # that the first was accepted says nothing of the second
        among = (accepted >= 1) & (drafts[:, 0] == first)
        if int(among.sum()) > 500:
            hits = int((accepted[among] == 2).sum())
            _near(hits, int(among.sum()), expected_acceptance(machine.rule, p[1, first], q[1, first]), 4.0)


def _near(hits: int, draws: int, share: float, sigmas: float = 3.0) -> None:
    sigma = math.sqrt(draws * max(share * (1 - share), 1e-12))
    assert abs(hits - share * draws) <= sigmas * sigma + 1e-6 * draws, (hits / draws, share, sigma / draws)


def test_acceptance_formula_by_hand() -> None:
    """Equal distributions always agree, disjoint ones never; two tokens by hand."""
    half = torch.tensor([0.5, 0.5]).double()
    assert toy.coupled_acceptance(half, half) == pytest.approx(1.0)
    assert toy.coupled_acceptance(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])) == 0.0
    # (.7, .3) and (.5, .5): 1 / (1 + max(3/7, 1)) + 1 / (max(7/3, 1) + 1)
    p = torch.tensor([0.7, 0.3]).double()
    assert toy.coupled_acceptance(p, half) == pytest.approx(0.5 + 0.3)


def test_chi_square_by_hand() -> None:
    """60 heads of 100: statistic 4, one degree of freedom, p = .0455."""
    assert toy.chi_square(torch.tensor([60, 40]), torch.tensor([0.5, 0.5])) == pytest.approx(0.0455, abs=1e-4)


# ---- wrong rules are seen ------------------------------------------------------------------------
def test_wrong_argmax_weighed_by_softmax() -> None:
    """Argmax drafts, q from the softmax that they were not drawn from."""
    assert p_value(Toy(PLAIN, TABLES, "dense", 1.0, FEW, greedy_drafts=True)) < CAUGHT


@pytest.mark.parametrize("rule", ("dense", "one_hot"))
def test_wrong_constant_u(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """u = 0 accepts everything."""
    stuck = SimpleNamespace(**vars(noise))
    stuck.uniform = lambda bits: torch.zeros(bits.shape)
    monkeypatch.setattr(draft, "noise", stuck)
    assert p_value(Toy(PLAIN, TABLES, rule, 1.0, FEW)) < CAUGHT


class OneTokenResidual(ReferenceOps):
    """Dense acceptance whose residual removes only the drafted token."""

    def sample_rejection(
        self, logits: Tensor, samples: SampleRows, positions: Tensor, state: SlotState
    ) -> tuple[Tensor, Tensor]:
        dense, finite = super().sample_rejection(logits, samples, positions, state)
        kept, state.draft_logits = state.draft_logits, None
        single, _ = super().sample_rejection(logits, samples, positions, state)
        state.draft_logits = kept
        depth = torch.arange(len(dense)) - samples.offset[samples.group]
        drafted = state.drafts[samples.slots[samples.group], depth.clamp_max(state.drafts.shape[1] - 1)]
        return torch.where(dense == drafted, dense, single), finite


def test_wrong_residual() -> None:
    machine = Toy(OneTokenResidual(Numerics(official=False)), TABLES, "dense", 1.0, FEW)
    assert p_value(machine) < CAUGHT


class Trusting(ReferenceOps):
    """Coupled sampling that takes every draft for the target's token."""

    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, state: SlotState
    ) -> tuple[Tensor, Tensor]:
        token, finite = super().sample(logits, slots, positions, state)
        depth = positions - 1 - state.cursor[slots]
        exists = depth < state.draft_len[slots]
        return torch.where(exists, state.drafts[slots, depth.clamp_max(DEPTH - 1)], token), finite


def test_wrong_trust() -> None:
    machine = Toy(Trusting(Numerics(official=False)), TABLES, "coupled", 1.0, FEW)
    assert p_value(machine) < CAUGHT


def test_wrong_proposal_temperature() -> None:
    """Drafts drawn at T = 1 but weighed as if at T = 2."""

    def spoil(state: SlotState) -> None:
        assert state.draft_logits is not None
        state.draft_logits *= 0.5

    assert p_value(Toy(PLAIN, TABLES, "dense", 1.0, FEW, spoil=spoil)) < CAUGHT


def test_wrong_shared_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether to accept is decided by a word that the draft was drawn with."""
    shared = SimpleNamespace(**vars(noise))
    shared.ACCEPT = noise.DRAFT
    monkeypatch.setattr(draft, "noise", shared)
    same_pass = Toy(PLAIN, TABLES, "dense", 1.0, FEW, spoil=lambda state: state.passes.zero_())
    assert p_value(same_pass) < CAUGHT
