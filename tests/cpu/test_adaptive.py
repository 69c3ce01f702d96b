"""Adaptive verification: the text stays, a drafter that cannot win is left alone, one that wins is used.

Throughput is counted on a virtual clock (prices from a table), so it is exact
and repeats; the drafters are random models, bad and good.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from firesteel import LLM, SamplingParams
from firesteel.bench.virtual import Bed, tables
from firesteel.config import ParameterError
from firesteel.models.deepseek_v4.config import DSparkConfig
from firesteel.models.deepseek_v4.random_init import tiny_config, write_random
from firesteel.speculation.cost import CostTable
from firesteel.speculation.policy import Adaptive

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


def rates(
    model: Path, table: str, concurrency: int, arms: dict[str, dict | None], n: int
) -> dict[str, float]:
    prompts, params = traffic(n + 6, 60)
    return {
        arm: Bed(model, arm, spec, 8, **FAST)
        .run(tables(K)[table], concurrency, prompts, params, warmup=6)
        .rate
        for arm, spec in arms.items()
    }


@pytest.mark.parametrize("table", ["staircase", "linear", "flat"])
def test_a_drafter_that_is_never_right_costs_almost_nothing(table: str, models: dict[str, Path]) -> None:
    got = rates(models["bad"], table, 4, {"none": None, "adaptive": SPEC}, 10)
    assert got["adaptive"] >= 0.97 * got["none"], got


def test_a_drafter_that_wins_is_used(models: dict[str, Path]) -> None:
    arms = {"none": None, f"fixed {K}": {"num_speculative_tokens": K}, "adaptive": SPEC}
    got = rates(models["good"], "flat", 4, arms, 10)
    assert got[f"fixed {K}"] > 1.3 * got["none"], "the drafter is not good enough to test anything"
    assert got["adaptive"] >= 0.98 * max(got.values()), got


def test_virtual_time_repeats(models: dict[str, Path]) -> None:
    first, second = (rates(models["good"], "linear", 3, {"adaptive": SPEC}, 4) for _ in range(2))
    assert first == second


def test_broken_prices_and_signals_change_no_text(models: dict[str, Path]) -> None:
    """A flat table, one with a size ten times too dear, confidences of NaN: other budgets, same text."""
    prompts, params = traffic(5, 24)
    plain = LLM(models["good"], max_num_seqs=4, **FAST)
    want = [c.token_ids for c in plain.generate(prompts, params)]
    llm = LLM(models["good"], max_num_seqs=4, speculative=SPEC, **FAST)
    policy = llm.engine.policy
    assert isinstance(policy, Adaptive)
    base = policy.cost.table
    poisoned = tuple(ms * (10 if i == 2 else 1) for i, ms in enumerate(base.step_ms))
    for prices in (tuple(1.0 for _ in base.rows), poisoned):
        policy.cost.__init__(  # type: ignore[misc]
            CostTable("x", base.rows, prices, base.context, 0.0, base.requests, base.draft)
        )
        assert [c.token_ids for c in llm.generate(prompts, params)] == want
    drafter = llm.engine.runner.drafter
    assert drafter is not None
    head = drafter.weights.markov.confidence
    assert head is not None
    propose = drafter.propose

    def blind(*args: object, **kwargs: object) -> object:
        from dataclasses import replace

        p = propose(*args, **kwargs)  # type: ignore[arg-type]
        return replace(p, confidence=torch.full_like(p.margin, float("nan")))

    drafter.propose = blind  # type: ignore[method-assign,assignment]
    assert [c.token_ids for c in llm.generate(prompts, params)] == want


def test_settings_that_cannot_be_met_are_errors(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="cost_table: only adaptive"):
        LLM(models["bad"], speculative={"cost_table": "x.json"}, **FAST)
    foreign = tmp_path / "cost.json"
    tables(K)["flat"].save(foreign)
    with pytest.raises(ValueError, match="measured for 'flat'"):
        LLM(models["bad"], speculative=SPEC | {"cost_table": str(foreign)}, **FAST)
