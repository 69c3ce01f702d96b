"""Survival on the device against the formula in numpy, and the calibration that ships with the bundled model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firesteel.bench.readers import fit_set, held_out_texts
from firesteel.engine.build import BUNDLED
from firesteel.ops.interface import Ops
from firesteel.ops.native import NativeOps
from firesteel.ops.reference.tail import ReferenceOps
from firesteel.ops.testing import slot_state
from firesteel.ops.types import Calibration, Numerics, Proposal
from firesteel.speculation.survival import Coefficients

pytestmark = pytest.mark.cpu
RESULT = Path(__file__).parents[2] / "bench" / "results" / "calibration.json"


@pytest.mark.parametrize("kind", [ReferenceOps, NativeOps])
@pytest.mark.parametrize("head", [True, False])
def test_device_survival_is_the_formula_that_was_fitted(kind: type[Any], head: bool) -> None:
    """Greedy and sampled slots, margins from 0 to beyond the clamp, NaN and infinity."""
    g = torch.Generator().manual_seed(3)
    margin = 60 * torch.rand(10, 7, generator=g) ** 4
    margin[0, 0], margin[1, 1], margin[2, 2] = float("nan"), float("inf"), 0.0
    logit = 3 * torch.randn(10, 7, generator=g)
    logit[3, 3] = float("nan")
    slots = torch.randperm(11, generator=g)[:10]
    state = slot_state(12, 50, 40, 7)
    state.temperature[:6], state.temperature[6:] = 0.0, 0.7
    made = Coefficients.load(BUNDLED / "calibration.json")
    table = Calibration(*(torch.tensor(v, dtype=torch.float32) for v in made.plain()))
    proposal = Proposal(torch.zeros(10, 7, dtype=torch.int64), margin, logit if head else None, None)
    ops: Ops = kind(Numerics(True))
    got = ops.survival(proposal, slots, state, table)
    depth = np.broadcast_to(np.arange(7), (10, 7))
    heat = np.broadcast_to((state.temperature[slots] > 0).numpy()[:, None], (10, 7)).astype(np.int64)
    seen = logit.double().numpy() if head else np.zeros((10, 7))
    want = np.cumprod(made.probability(seen, margin.double().numpy(), depth, heat), axis=1)
    assert np.abs(got.double().numpy() - want).max() < 2e-6
    assert len(set(heat[:, 0])) == 2


def test_bundled_calibration_leaves_it_to_the_traffic_how_drafts_fare() -> None:
    made = Coefficients.load(BUNDLED / "calibration.json")
    assert made.depth.shape == (2, 7) and made.uses_head and made.uses_margin
    assert made.usual == (), "made from a mixture that is nobody's traffic"
    assert (made.head > 0).all() and (made.margin > 0).all(), "a clearer draft is a likelier one"
    origin = json.loads((BUNDLED / "calibration.json").read_text())["origin"]
    assert origin["requests"] == 2 * len(fit_set()), "made from the fit set, greedy and sampled"


def test_recorded_quality_is_of_held_out_text_and_good_enough() -> None:
    said = json.loads(RESULT.read_text())
    asked = held_out_texts().first(80)
    assert said["requests"]["sha256"] == asked.digest and said["blocks"] >= 20_000
    assert set(said["quality"]) == {"greedy", "sampled"} and len(said["domains"]) == 3
    assert all(said["passed"].values()), said["passed"]
    for methods in said["quality"].values():
        for line in methods["logistic"]["by_depth"]:
            assert line["ece"] <= 0.02 and line["interval"][0] <= line["interval"][1]
