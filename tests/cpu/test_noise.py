"""A machine that others use, too: prices measured badly, a clock whose pace wanders; what is lost is exact.

Decisions are made on the noisy clock and then priced by the true table.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from firesteel.bench.virtual import Bed, jobs, priced, simulated_bed
from firesteel.config import SimulatedAcceptance
from firesteel.speculation.cost import CostModel, CostTable

pytestmark = pytest.mark.cpu
K, AT_ONCE = 7, 4
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
TRUE = CostTable(  # a CPU, where a drafted row costs nearly a whole one
    "cpu",
    ROWS,
    (2.2, 2.7, 3.0, 3.3, 4.2, 5.2, 7.2, 9.4, 13.0, 16.5, 23.5, 31.0),
    64,
    0.0,
    (1, 2, 4),
    {1: (1.0, 1.3, 1.9), 4: (1.8, 2.6, 4.3), 7: (2.4, 3.7, 6.3)},
)


class Shared(CostModel):
    """The clock of a machine whose pace wanders by ``slow`` within some 0.4 s, and single steps by ``single``."""

    def __init__(self, table: CostTable, seed: int, slow: float = 0.2, single: float = 0.12):
        super().__init__(table)
        self.draw, self.slow, self.single, self.now = random.Random(seed), slow, single, 0.0

    def price(self, rows: int, context: float, requests: int, width: int) -> float:
        ms = super().price(rows, context, requests, width)
        keep = math.exp(-ms / 400.0)
        self.now = keep * self.now + math.sqrt(1 - keep * keep) * self.draw.gauss(0, self.slow)
        spike = self.draw.random() if self.draw.random() < 0.02 else 0.0
        return ms * math.exp(self.now + self.draw.gauss(0, self.single) + spike)


def badly_measured(seed: int) -> CostTable:
    """Every price off by 20 %, and those of few rows by a quarter more: drafts look cheap."""
    r = random.Random(seed)

    def off(v: float) -> float:
        return v * math.exp(r.gauss(0, 0.2))

    steps = tuple(off(v) * (1.25 if i < 5 else 1.0) for i, v in enumerate(TRUE.step_ms))
    return replace(TRUE, step_ms=steps, draft={w: tuple(off(v) for v in p) for w, p in TRUE.draft.items()})


@pytest.fixture(scope="module")
def bed() -> Bed:
    rates = (0.8, 0.72, 0.7, 0.7, 0.7, 0.7, 0.7)
    return simulated_bed(SimulatedAcceptance(rates=rates, spread=1.8), K, AT_ONCE, 160)


@pytest.mark.parametrize("seed", [1, 3])
def test_noise_and_a_bad_table_do_not_start_drafting_that_loses(seed: int, bed: Bed) -> None:
    work, engine = jobs(24, 64, seed=seed), bed.engine
    plain = priced(bed.fixed(0, work, AT_ONCE, 8), TRUE, "none", AT_ONCE)
    policy = bed.adaptive(badly_measured(seed))
    engine.drain()
    engine.runner.virtual, engine.scheduler.policy = Shared(TRUE, seed), policy
    engine.runner._calibration = None
    bed._loop(work[:8], AT_ONCE)
    engine.records.clear()
    bed._loop(work[8:], AT_ONCE)
    ours = priced(list(engine.records), TRUE, "adaptive", AT_ONCE)
    assert ours.rate >= 0.955 * plain.rate, (ours, plain)
