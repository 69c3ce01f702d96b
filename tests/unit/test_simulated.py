"""Settings of simulated acceptance, and that no server takes it."""

from __future__ import annotations

import math

import pytest

from firesteel.cli import _parser
from firesteel.config import ParameterError, SimulatedAcceptance, SpeculativeConfig
from firesteel.serve.options import resolve
from firesteel.speculation.simulated import coefficients, separation

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
