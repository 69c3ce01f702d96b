"""A planner that looks ahead (DSpark, Appendix A): harmless under coupled acceptance, biased under rejection.

Target (.7, .3), draft (.5, .5), a_1 = .8, c_2 = .9 behind token A and 0 behind B; a step of 1, 2, 3 rows takes
1, 2 and 1/.45 units. Whoever reads c_2 before deciding on token 1 verifies behind A and not behind B, so under
rejection A comes out with .5 + .5 * .7 = .85. Real ops, real ``choose``, counted outcomes.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from firesteel.ops.reference.tail import ReferenceOps
from firesteel.ops.types import Numerics
from firesteel.speculation.adaptive import Adaptive
from firesteel.speculation.budget import choose
from firesteel.speculation.cost import CostModel, CostTable
from firesteel.speculation.survival import Calibrator, Coefficients
from firesteel.speculation.terms import Candidate, Load, Proposed, Timing
from oracles.toy import Tables, Toy

pytestmark = pytest.mark.cpu
OPS = ReferenceOps(Numerics(official=False))
A, P_A, DRAWS = 0, 0.7, 40_000
SIGMA = math.sqrt(P_A * (1 - P_A) / DRAWS)
FIRST, BEHIND_A, BEHIND_B = 0.8, 0.9, 0.0


def machine(rule: str, seed: int) -> Toy:
    """Depth 3: the counter-example at every place."""
    target = torch.log(torch.tensor([0.7, 0.3])).expand(3, 2, 2).contiguous()
    tables = Tables(target, torch.zeros(3, 2), torch.zeros(2, 2))
    return Toy(OPS, tables, rule, 1.0, DRAWS, seed=seed)


def step_ms(rows: np.ndarray) -> np.ndarray:
    return np.array([1.0, 2.0, 1 / 0.45])[rows - 1]


def survivals(drafts: Tensor) -> list[tuple[float, float]]:
    """a_1 and a_1 a_2 of each block: c_2 depends on the first draft."""
    return [(FIRST, FIRST * (BEHIND_A if d == A else BEHIND_B)) for d in drafts[:, 0].tolist()]


def budgets(rows: list[tuple[float, float]]) -> Tensor:
    """Drafts that ``choose`` verifies for requests that run alone."""
    known = {s: choose(np.array(s), 1, 1.0, step_ms, 0.0, 2).drafts for s in set(rows)}
    return torch.tensor([known[s] for s in rows])


def first_tokens(toy: Toy, wanted: Tensor) -> Tensor:
    """First emitted token of every request, each verified as wide as its own budget says."""
    out = torch.full((toy.draws,), -1)
    drafts = toy.state.draft_len.clone()
    for width in wanted.unique().tolist():
        slots = torch.nonzero(wanted == width).flatten()
        toy.state.draft_len[: toy.draws] = drafts[: toy.draws]
        tokens, _, _ = toy.verify(slots, width)
        out[slots] = tokens[:, 0]
    return out


def share_of_a(tokens: Tensor) -> float:
    return float((tokens == A).double().mean())


def looking_ahead(rule: str) -> float:
    """The planner that must not be: it sizes each step on the confidences of the drafts it decides on."""
    toy = machine(rule, 1)
    toy.draft(torch.arange(DRAWS), 2)
    wanted = budgets(survivals(toy.state.drafts[:DRAWS]))
    assert set(wanted.tolist()) == {0, 2}, "verify both behind A, none behind B"
    return share_of_a(first_tokens(toy, wanted))


def looking_back(rule: str, *, repeat_noise: bool = False) -> float:
    """The engine's planner: sized on the confidences of the drafting pass before.

    The step before emitted nothing at these positions that was not sampled plainly; ``repeat_noise`` plants the
    fault that the second pass draws its drafts with the noise of the first.
    """
    toy, everyone = machine(rule, 2), torch.arange(DRAWS)
    toy.draft(everyone, 2)
    before = toy.state.drafts[:DRAWS].clone()
    stale = [(FIRST, FIRST * (BEHIND_A if d == A else BEHIND_B)) for d in before[:, 1].tolist()]
    toy.verify(everyone, 0)  # plain decoding: position + 1, whose draft was the pass's second, comes next
    if repeat_noise:
        toy.state.passes.zero_()
    toy.draft(everyone, 2)
    return share_of_a(first_tokens(toy, budgets(stale)))


@pytest.mark.parametrize("rule", ["coupled", "dense"])
def test_the_engines_planner_is_right_under_both_rules(rule: str) -> None:
    assert looking_back(rule) == pytest.approx(P_A, abs=4 * SIGMA)


def test_under_coupled_acceptance_even_looking_ahead_is_right() -> None:
    assert looking_ahead("coupled") == pytest.approx(P_A, abs=4 * SIGMA)


def test_a_biased_planner_is_caught_under_rejection() -> None:
    """.85 as in the paper; were it .7, this test could not tell a right planner from a wrong one."""
    assert looking_ahead("dense") == pytest.approx(0.85, abs=4 * SIGMA)


def test_repeated_draft_noise_is_caught_under_rejection() -> None:
    """Stale confidences that come from the very draw that is repeated are not stale."""
    assert abs(looking_back("dense", repeat_noise=True) - P_A) > 8 * SIGMA


def test_adaptive_sizes_a_step_on_earlier_drafts_only() -> None:
    """Whatever the newest drafts' confidences are, the budget for them was decided without."""
    table = CostTable("toy", (1, 2, 3), (1.0, 2.0, 1 / 0.45), 1, 0.0, (1,), {1: (0.01,), 2: (0.01,)})
    answers = []
    for newest in (4.0, -4.0):  # a pass that was launched but is not committed says nothing yet
        start = Calibrator(Coefficients.prior(2, True, False), every=10**9)
        policy = Adaptive(2, CostModel(table), start, rejection=True)
        policy.learn([Proposed(1, 1, (1.4, 2.2), (0.0, 0.0), (0.8, 0.72))], [], Timing(1, 1.0, 1.0))
        load = Load(1, 1.0, 1.0, 8)
        policy.drafting([Candidate(1, 0, 2)], load)
        in_flight = Proposed(1, 1, (newest, newest), (0.0, 0.0), (0.5, 0.5))
        answers.append(policy.budget([Candidate(1, 2, 2)], load))
        policy.learn([in_flight], [], Timing(1, 1.0, 1.0))
    assert answers[0] == answers[1]
