"""Settings of simulated acceptance, and that no server takes it."""

from __future__ import annotations

import math

import pytest
import torch

from firesteel.cli import _parser
from firesteel.config import ParameterError, SimulatedAcceptance, SpeculativeConfig
from firesteel.engine.slots import Slots
from firesteel.ops.types import Proposal
from firesteel.serve.options import resolve
from firesteel.speculation.simulated import Simulator, coefficients, separation

pytestmark = pytest.mark.unit


def test_settings_are_checked() -> None:
    spec = SpeculativeConfig.of({"simulated_acceptance": {"rates": [0.8, 0.5], "spread": 1}})
    assert spec is not None and spec.simulated_acceptance == SimulatedAcceptance(rates=(0.8, 0.5), spread=1)
    assert SpeculativeConfig.of({}) == SpeculativeConfig() and SimulatedAcceptance.of(None) is None
    for bad, said in (
        ({"rates": []}, "rates"),
        ({"rates": [1.2]}, "rates"),
        ({"trace": [[0.5], []]}, "trace"),
        ({"head_auc": 1.0}, "head_auc"),
        ({"spread": -1}, "spread"),
        ({"rate": 0.5}, "expected an object with fields among rates"),
        (True, "expected an object"),
    ):
        with pytest.raises(ParameterError, match=said):
            SpeculativeConfig.of({"simulated_acceptance": bad})


def test_a_server_refuses_it_by_name() -> None:
    argv = ["serve", "--speculative-config", '{"simulated_acceptance": {"rates": [0.9]}}']
    with pytest.raises(ParameterError, match="simulated_acceptance makes meaningless text"):
        resolve(_parser().parse_args(argv))
    argv[-1] = '{"simulated_acceptance": {}}'
    with pytest.raises(ParameterError, match="simulated_acceptance"):
        resolve(_parser().parse_args(argv))


def test_separation_gives_the_asked_auc() -> None:
    assert separation(0.5) == pytest.approx(0.0, abs=1e-12)
    assert 0.5 * (1 + math.erf(separation(0.85) / 2)) == pytest.approx(0.85)


def test_known_coefficients_put_rate_one_and_zero_at_finite_odds() -> None:
    c = coefficients(SimulatedAcceptance(rates=(1.0, 0.0)), 3, uses_head=False)
    assert abs(c.depth).max() < 30 and c.usual == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_tables_hold_what_is_drawn_step_by_step(spread: float) -> None:
    settings = SimulatedAcceptance(rates=(0.8, 0.6, 0.4), spread=spread)
    device, slots, lines = torch.device("cpu"), 4, 40
    state = Slots(slots, 97, lines, 3, device).state
    state.seed_lo[:], state.seed_hi[:] = torch.tensor([5, 6, 7, 8]), torch.tensor([1, 0, 2, 3])
    state.cursor[:] = torch.tensor([3, 20, 0, 30])
    plain = Simulator(settings, 3, 97, device)
    table = Simulator(settings, 3, 97, device, (slots, lines))
    table.prepare(torch.tensor([0, 3]), state)
    table.prepare(torch.tensor([1]), state)
    some = torch.tensor([3, 0, 1])
    real = Proposal(torch.zeros(3, 3, dtype=torch.int64), torch.zeros(3, 3), torch.zeros(3, 3), None)
    one, two = plain.proposal(real, some, state), table.proposal(real, some, state)
    for name in ("tokens", "margin", "confidence"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name
    places = torch.tensor([0, 39, 17])
    assert torch.equal(plain.tokens(some, places, state), table.tokens(some, places, state))
    assert plain.tokens(some, places, state).unique().numel() > 1
