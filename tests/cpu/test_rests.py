"""Where drafting does not pay the policy is asked now and then only: nothing is lost, and anything new ends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from firesteel.bench.virtual import SCENES, Bed, jobs, simulated_bed, tables
from firesteel.core import NO_DRAFTS, FinishReason, StepRecord
from firesteel.engine.draftboard import Draftboard, Rest
from firesteel.speculation.cost import CostModel
from firesteel.speculation.policy import Adaptive, Candidate, Drafting, Load

pytestmark = pytest.mark.cpu
K, AT_ONCE = 7, 8
LINEAR = tables(K)["linear"]


class Asked(Adaptive):
    """Counts questions and what a rest stood for."""

    questions = rests = 0
    never = False  # whether it is asked at every step

    def drafting(self, candidates: Sequence[Candidate], load: Load) -> Drafting:
        self.questions += 1
        said = super().drafting(candidates, load)
        if self.never and said.rest:
            return Drafting(said.request_ids, said.width, said.reason, said.weights)
        return said

    def rested(self, steps: int) -> None:
        self.rests += steps
        super().rested(steps)


def ran(never: bool, tokens: int = 160) -> tuple[Asked, list[StepRecord], Bed]:
    """A run at eight requests whose drafts are too poor to pay."""
    bed = simulated_bed(SCENES["poor"], K, AT_ONCE, tokens + 32)
    policy = Asked(K, CostModel(LINEAR), bed.start())
    policy.never = never
    records = bed.run(policy, LINEAR, jobs(3 * AT_ONCE, tokens), AT_ONCE)
    return policy, records, bed


def test_most_steps_are_planned_without_asking() -> None:
    policy, records, _ = ran(never=False)
    assert policy.questions + policy.rests == len(records), "every step was asked for or rested through"
    assert policy.rests > 0.6 * len(records)
    always, _, _ = ran(never=True)
    assert always.rests == 0


def test_a_rest_changes_neither_what_is_decided_nor_what_is_learned() -> None:
    """Probes, looks and prices come as if every step had asked; a plan may be a few steps older."""
    (rested, some, _), (asked, all_, _) = ran(never=False), ran(never=True)
    seen = [p.cost.measured + len(p.lessons._steps) + len(p.slept.steps) for p in (rested, asked)]
    assert seen == [len(some), len(all_)], "every step's time has been seen, or waits"
    assert rested.cost.measured > 0.9 * len(some)
    drafted = [sum(r.drafting > 0 for r in records) for records in (some, all_)]
    assert drafted[0] == pytest.approx(drafted[1], abs=max(3, 0.1 * drafted[1]))
    assert drafted[1] > 0, "probes go on"
    ms = [sum(r.measured_ms for r in records) / sum(r.emitted for r in records) for records in (some, all_)]
    assert ms[0] == pytest.approx(ms[1], rel=0.01)


def test_records_of_a_rest_are_whole() -> None:
    _, records, _ = ran(never=False)
    plain = [r for r in records if r.prompt_rows == 0 and not r.drafting and not r.budget.drafts]
    assert all(r.predicted_ms > 0 and r.budget.reason and r.draft_reason for r in plain)
    off = [abs(r.predicted_ms - r.measured_ms) / r.measured_ms for r in plain[AT_ONCE:]]
    assert max(off) < 0.05, "a price that was asked for at the begin of a rest still holds at its end"


def test_a_new_request_ends_a_rest_at_once() -> None:
    bed = simulated_bed(SCENES["poor"], K, 4, 400)
    policy = Asked(K, CostModel(LINEAR), bed.start())
    engine = bed.engine
    engine.runner.virtual, engine.scheduler.policy = CostModel(LINEAR), policy
    work = jobs(3, 300)
    for prompt, params in work[:2]:
        engine.add(prompt, params, params.seed or 0)
    while not (engine.scheduler._rest is not None and engine.scheduler._rest.steps):
        engine.step()
    before = policy.questions
    engine.step()
    assert policy.questions == before, "at rest"
    prompt, params = work[2]
    new = engine.add(prompt, params, params.seed or 0)
    engine.step()
    assert policy.questions == before + 1, "asked for the step that runs its prompt"
    while not new.output:
        engine.step()
    assert engine.scheduler._rest is None or new in engine.scheduler._rest.decodes
    for sequence in list(engine.scheduler.running):
        engine.end(sequence.request_id, FinishReason.ABORT)
    engine.drain()


def test_an_idle_engine_has_no_rest_and_a_prompt_alone_its_own_price() -> None:
    policy, _, bed = ran(never=False)
    engine = bed.engine
    assert engine.scheduler._rest is None and policy.rests, "it ended with the last request"
    prompt, params = jobs(1, 8)[0]
    engine.records.clear()
    engine.add(prompt * 3, params, params.seed or 0)
    engine.step()
    engine.drain()
    alone = next(r for r in engine.records if r.prompt_rows and not r.decodes)
    assert alone.predicted_ms == pytest.approx(alone.measured_ms, rel=0.1), "not that of the steps before"


def test_a_rest_goes_on_only_for_the_same_requests() -> None:
    bed = simulated_bed(SCENES["poor"], K, 2, 64)
    for prompt, params in jobs(2, 16):
        bed.engine.add(prompt, params, params.seed or 0)
    one, two = bed.engine.scheduler.waiting
    rest = Rest(Drafting(frozenset(), 0, "drafting does not pay", rest=2), NO_DRAFTS, [one], 1.0)
    assert rest.goes_on(Draftboard(8, decodes=[one]))
    assert not rest.goes_on(Draftboard(8, decodes=[two]))
    assert not rest.goes_on(Draftboard(8, decodes=[one, two]))
    rest.steps = 2
    assert not rest.goes_on(Draftboard(8, decodes=[one])), "it is over"
    bed.engine.drain()


def test_what_is_off_is_corrected_once() -> None:
    """Steps of a rest were predicted by prices that may have been corrected before they are learned from."""
    bed = simulated_bed(SCENES["poor"], K, AT_ONCE, 512)
    dear = replace(LINEAR, step_ms=tuple(5.0 * v for v in LINEAR.step_ms))
    policy, engine = Asked(K, CostModel(dear), bed.start()), bed.engine
    engine.runner.virtual, engine.scheduler.policy = CostModel(LINEAR), policy
    for prompt, params in jobs(AT_ONCE, 400):
        engine.add(prompt, params, params.seed or 0)
    true, least = CostModel(LINEAR).row_ms(AT_ONCE), float("inf")
    while engine.busy:
        engine.step()
        least = min(least, policy.cost.row_ms(AT_ONCE))
    assert policy.rests > 100 and policy.cost.row_ms(AT_ONCE) == pytest.approx(true, rel=0.1)
    assert least > 0.9 * true, "corrected for the same steps twice"
