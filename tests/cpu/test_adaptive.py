"""Adaptive verification on real models: the text stays, whatever is drafted, priced or broken.

Throughput is counted on a virtual clock (prices from a table), so it is exact
and repeats; the drafters are random models, bad and good.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from firesteel import LLM, SamplingParams
from firesteel.bench.virtual import Bed, Job, Point, priced, tables
from firesteel.config import ParameterError
from firesteel.models.deepseek_v4.config import DSparkConfig
from firesteel.models.deepseek_v4.random_init import tiny_config, write_random
from firesteel.speculation.cost import CostModel, CostTable
from firesteel.speculation.policy import Adaptive, FixedWidth
from firesteel.speculation.survival import Calibrator, Coefficients

pytestmark = pytest.mark.cpu
K = 5
SPEC = {"num_speculative_tokens": K, "enable_adaptive_verification": True}
FAST = {"numerics": "float32", "max_model_len": 192}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target with a drafter that is never right, and one with a drafter that often is."""
    config = tiny_config(
        num_hidden_layers=2,
        compress_ratios=(0, 4),
        dspark=DSparkConfig(
            block_size=K, noise_token_id=259, target_layer_ids=(0, 1), markov_rank=16, stages=1
        ),
        mtp_stages=1,
    )
    folder = tmp_path_factory.mktemp("adaptive")
    return {
        name: write_random(folder / name, config, 3, agreement=agreement)
        for name, agreement in (("bad", 0.0), ("good", 1.0))
    }


def traffic(n: int, tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    r = random.Random(5)
    prompts = [[r.randrange(3, 500) for _ in range(r.randrange(2, 20))] for _ in range(n)]
    heat = [r.choice([0.0, 0.8]) for _ in range(n)]
    return prompts, [
        SamplingParams(max_tokens=tokens, temperature=t, seed=i, ignore_eos=True) for i, t in enumerate(heat)
    ]


def work(n: int, tokens: int) -> list[Job]:
    return [(tuple(p), q) for p, q in zip(*traffic(n, tokens), strict=True)]


@pytest.mark.parametrize("which", ["bad", "good"])
def test_text_is_that_of_plain_decoding(which: str, models: dict[str, Path]) -> None:
    prompts, params = traffic(7, 30)
    plain = LLM(models[which], max_num_seqs=1, **FAST)
    want = [plain.generate([p], q)[0].token_ids for p, q in zip(prompts, params, strict=True)]
    llm = LLM(
        models[which],
        max_num_seqs=4,
        max_num_batched_tokens=24,
        debug_sync=True,
        debug_poison=True,
        speculative=SPEC,
        **FAST,
    )
    assert [c.token_ids for c in llm.generate(prompts, params)] == want
    llm.engine.scheduler.check()
    assert any("adaptive: measured" in n for n in llm.notes)


@pytest.fixture(scope="module")
def beds(models: dict[str, Path]) -> dict[str, Bed]:
    """Beds whose adaptive runs know nothing at first."""
    out = {}
    for name, model in models.items():
        llm = LLM(
            model,
            max_num_seqs=8,
            max_num_batched_tokens=128,
            prefix_caching=False,
            speculative={"num_speculative_tokens": K},
            **FAST,
        )
        out[name] = Bed(llm.engine, lambda: Calibrator(Coefficients.prior(K, True, True)))
    return out


def rates(
    bed: Bed, table: CostTable, concurrency: int, n: int, believed: CostTable | None = None
) -> dict[str, float]:
    todo, warmup = work(n + 6, 60), 6
    arms: dict[str, Point] = {}
    for width in (0, K):
        arms[f"K={width}"] = priced(
            bed.fixed(width, todo, concurrency, warmup), table, str(width), concurrency
        )
    records = bed.run(bed.adaptive(believed or table), table, todo, concurrency, warmup)
    arms["adaptive"] = priced(records, table, "adaptive", concurrency)
    return {name: p.rate for name, p in arms.items()}


@pytest.mark.parametrize("table", ["staircase", "linear", "flat"])
def test_a_drafter_that_is_never_right_costs_almost_nothing(table: str, beds: dict[str, Bed]) -> None:
    got = rates(beds["bad"], tables(K)[table], 4, 10)
    assert got["adaptive"] >= 0.985 * got["K=0"], got


def test_a_drafter_that_wins_is_used(beds: dict[str, Bed]) -> None:
    got = rates(beds["good"], tables(K)["flat"], 4, 10)
    assert got[f"K={K}"] > 1.3 * got["K=0"], "the drafter is not good enough to test anything"
    assert got["adaptive"] >= 0.99 * max(got.values()), got


def test_virtual_time_repeats(beds: dict[str, Bed]) -> None:
    first, second = (rates(beds["good"], tables(K)["linear"], 3, 4) for _ in range(2))
    assert first == second


# ---- what is broken is named, and heals ------------------------------------------------------
def heard(bed: Bed, policy: Adaptive, clock: CostTable, todo: list[Job]) -> tuple[list[list[int]], list[str]]:
    """Texts, and the names of the alarms that the steps' records carry."""
    bed.engine.drain()
    bed.engine.scheduler.policy = policy
    bed.engine.runner.virtual = CostModel(clock)
    bed.engine.runner._calibration = None
    bed.engine.records.clear()
    seqs = [bed.engine.add(p, q, q.seed or 0) for p, q in todo]
    while bed.engine.busy:
        bed.engine.step()
    notes = [note.partition(":")[0] for r in bed.engine.records for note in r.notes]
    return [list(s.output) for s in seqs], notes


@pytest.fixture(scope="module")
def plain(beds: dict[str, Bed]) -> dict[str, list[list[int]]]:
    """Texts without drafts."""
    out = {}
    for name, bed in beds.items():
        bed.engine.scheduler.policy = FixedWidth(0)
        seqs = [bed.engine.add(p, q, q.seed or 0) for p, q in work(8, 60)]
        while bed.engine.busy:
            bed.engine.step()
        out[name] = [list(s.output) for s in seqs]
    return out


def scaled(table: CostTable, factor: float, at: int | None = None) -> CostTable:
    """Prices times ``factor``, all of them or one."""
    ms = tuple(v * (factor if at is None or i == at else 1.0) for i, v in enumerate(table.step_ms))
    draft = {w: tuple(v * (factor if at is None else 1.0) for v in p) for w, p in table.draft.items()}
    return replace(table, step_ms=ms, draft=draft)


def test_a_table_of_another_machine_is_corrected(
    beds: dict[str, Bed], plain: dict[str, list[list[int]]]
) -> None:
    """Prices five times too high, as from a slower machine whose table was copied: same text, said so, healed."""
    bed, clock = beds["good"], tables(K)["linear"]
    policy = bed.adaptive(scaled(clock, 5.0))
    texts, notes = heard(bed, policy, clock, work(8, 60))
    assert texts == plain["good"] and "cost table departs" in notes
    assert (
        policy.cost.departures > 8 and bed.engine.stats()["adaptive"]["departures"] == policy.cost.departures
    )
    for _ in range(3):
        heard(bed, policy, clock, work(8, 60))
    at = [r.rows for r in bed.engine.records][-20:]
    here, true = policy.cost.step_ms(at), CostModel(clock).step_ms(at)  # type: ignore[arg-type]
    assert max(abs(here / true - 1)) < 0.3 and "cost table departs" not in policy.watch.alarms


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_a_table_poisoned_at_one_size(
    factor: float, beds: dict[str, Bed], plain: dict[str, list[list[int]]]
) -> None:
    bed, clock = beds["good"], tables(K)["staircase"]
    todo = work(8, 60)
    policy = bed.adaptive(scaled(clock, factor, at=4))
    texts, _ = heard(bed, policy, clock, todo)
    assert texts == plain["good"]
    heard(bed, policy, clock, todo)
    wrong = priced(bed.engine.records, clock, "poisoned", 8)
    heard(bed, bed.adaptive(clock), clock, todo)
    assert wrong.rate >= 0.9 * priced(bed.engine.records, clock, "right", 8).rate


def test_a_flat_table_is_named(beds: dict[str, Bed], plain: dict[str, list[list[int]]]) -> None:
    bed, clock = beds["good"], tables(K)["linear"]
    texts, notes = heard(bed, bed.adaptive(tables(K)["flat"]), clock, work(8, 60))
    assert texts == plain["good"] and "flat cost table" in notes


@pytest.mark.parametrize(
    ("stuck", "name"),
    [(-40.0, "confidence stuck"), (40.0, "confidence stuck"), (float("nan"), "confidence not finite")],
)
def test_a_broken_confidence_head(
    stuck: float,
    name: str,
    beds: dict[str, Bed],
    plain: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logits of a head that says 0, 1 or nothing: named, without weight in the next calibration, text unchanged."""
    bed = beds["good"]
    drafter = bed.engine.runner.drafter
    assert drafter is not None
    propose = drafter.propose

    def broken(*args: object, **kwargs: object) -> object:
        p = propose(*args, **kwargs)  # type: ignore[arg-type]
        return replace(p, confidence=torch.full_like(p.margin, stuck))

    monkeypatch.setattr(drafter, "propose", broken)
    policy = bed.adaptive(tables(K)["flat"])
    texts, notes = heard(bed, policy, tables(K)["flat"], work(8, 60))
    assert texts == plain["good"] and name in notes
    weight = policy.calibrator.coefficients.head[1]
    assert policy.calibrator.refits and weight == 0.0
    assert sum(r.accepted for r in bed.engine.records) > 100, "drafting goes on without the head"
    monkeypatch.undo()
    heard(bed, policy, tables(K)["flat"], work(8, 60))
    assert name not in policy.watch.alarms


def test_a_drafter_that_is_always_wrong(beds: dict[str, Bed], plain: dict[str, list[list[int]]]) -> None:
    bed, clock = beds["bad"], tables(K)["flat"]  # where drafting is cheap enough to go on for a while
    policy = bed.adaptive(clock)
    texts, notes = heard(bed, policy, clock, work(8, 60))
    assert texts == plain["bad"]
    assert "drafts never accepted" in notes
    assert sum(r.drafting > 0 for r in list(bed.engine.records)[-20:]) <= 4, "it should have stopped drafting"


# ---- what people may ask for -----------------------------------------------------------------
def test_settings_that_cannot_be_met_are_errors(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="cost_table: only adaptive"):
        LLM(models["bad"], speculative={"cost_table": "x.json"}, **FAST)
    foreign = tmp_path / "cost.json"
    tables(K)["flat"].save(foreign)
    with pytest.raises(ValueError, match="measured for 'flat'"):
        LLM(models["bad"], speculative=SPEC | {"cost_table": str(foreign)}, **FAST)
    with pytest.raises(ParameterError, match="min_tokens_per_second: only adaptive"):
        LLM(models["bad"], **FAST).generate([[5]], SamplingParams(min_tokens_per_second=5.0))
    with pytest.raises(ParameterError, match="simulated_acceptance: draws coupled"):
        LLM(models["bad"], speculative={"acceptance": "rejection", "simulated_acceptance": {}}, **FAST)
    with pytest.raises(ParameterError, match=r"trace='.*'.*choose another file"):
        LLM(models["bad"], trace=str(tmp_path / "no" / "such.jsonl"), **FAST)


def test_trace_file_holds_every_step(models: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    llm = LLM(models["good"], trace=str(file), max_num_seqs=4, speculative=SPEC, **FAST)
    llm.generate(*traffic(3, 12))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [r.step for r in llm.engine.records]
    assert sum(line["emitted"] for line in lines) == 36
    assert {"budget", "predicted_ms", "measured_ms", "draft_reason", "accepted", "rows"} <= set(lines[0])
    assert {"drafts", "reason", "expected_tokens"} <= set(lines[0]["budget"])
    llm.engine.close()
