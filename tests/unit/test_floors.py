"""Floors: formulas against sizes known from elsewhere and against brute force."""

from __future__ import annotations

import random

import pytest

from firesteel.bench.floors import (
    H200,
    Load,
    Rates,
    Work,
    draft_work,
    expected_experts,
    floor,
    verify_work,
)
from firesteel.bench.geometry import GEOMETRIES, flash_8l, geometry
from firesteel.config import ParameterError
from firesteel.models.deepseek_v4.config import LayerKind
from firesteel.models.deepseek_v4.footprint import weight_bytes
from firesteel.models.deepseek_v4.presets import flash_dspark
from firesteel.models.deepseek_v4.random_init import tiny_config

pytestmark = pytest.mark.unit

STATES = ("attention", "indexer scores", "embed")


def test_the_floor_is_the_larger_of_reading_and_computing() -> None:
    rates = Rates(100.0, {"bf16": 10.0, "fp8": 20.0, "fp4": 40.0}, "made up")
    ops = [Work("a", "x", 100.0, 5.0), Work("a", "y", 10.0, 20.0), Work("b", "x", 50.0, 40.0, "fp4")]
    found = floor(ops, rates)
    assert found.step_ms == pytest.approx(1e3 * max(1.6, 0.5 + 2.0 + 1.0))
    assert found.serial_ms == pytest.approx(1e3 * (1.0 + 2.0 + 1.0))
    assert found.by_op == pytest.approx({"x": 2e3, "y": 2e3})
    assert (found.bytes, found.flop) == (160.0, 65.0)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_expected_experts(rows: int) -> None:
    draw = random.Random(1)
    tries = [len({e for _ in range(rows) for e in draw.sample(range(8), 3)}) for _ in range(20_000)]
    assert expected_experts(8, 3, rows) == pytest.approx(sum(tries) / len(tries), rel=0.01)


@pytest.mark.parametrize("config", [tiny_config(), flash_8l()], ids=["tiny", "flash-8L"])
def test_all_experts_hit_is_all_weights_read(config) -> None:  # type: ignore[no-untyped-def]
    """Against the memory plan, which counts every tensor: less the embedding table and what is no matrix."""
    load = Load(1, 1, 0, experts=[config.n_routed_experts] * config.num_hidden_layers)
    ours = sum(w.bytes for w in verify_work(config, load, drafter=False) if w.op not in STATES)
    plan = weight_bytes(config, drafter=False)
    rest = sum(plan.values()) - plan["embed"] - ours
    assert (
        0
        < rest
        <= plan["norm"] + plan["router"] + plan["hyper"] + plan["compressor"] + plan["attention"] // 100
    )
    tables = config.num_hash_layers * config.vocab_size * config.num_experts_per_tok * 8
    assert rest == pytest.approx(tables, abs=0.01 * sum(plan.values())), "hash tables, norms, biases and ape"


def test_flash_at_one_row_by_hand() -> None:
    """Six FP4 experts, the shared one in FP8 and 1.06 GB of head dominate."""
    config = flash_8l()
    work = verify_work(config, Load(1, 1, 1024), drafter=False)
    expert = 3 * 4096 * 2048 * (1 / 2 + 1 / 32)
    by_op = {op: sum(w.bytes for w in work if w.op == op) for op in ("experts", "LM head", "wq_b", "wo_a")}
    assert by_op["experts"] == pytest.approx(8 * 6 * expert, rel=1e-9)
    assert by_op["LM head"] == 129280 * 4096 * 2
    assert by_op["wq_b"] == pytest.approx(8 * 64 * 512 * 1024 * (1 + 1 / 128**2), rel=1e-6)
    assert by_op["wo_a"] == 8 * 2 * 8 * 1024 * 4096, "bf16"
    found = floor(work, H200)
    assert found.step_ms == found.bytes / H200.read * 1e3, "one row is bound by reading"
    assert 0.6 < found.step_ms < 0.8


def test_attention_reads_each_request_once_and_computes_for_each_row() -> None:
    config = flash_8l()
    one, many = (
        {w.layer: w for w in verify_work(config, Load(8, n, 8192)) if w.op == "attention"} for n in (1, 8)
    )
    for layer, work in one.items():
        kind = config.kind(int(layer.split(".")[1]))
        entries = {LayerKind.WINDOW: 0, LayerKind.CSA: 512, LayerKind.HCA: 64}[kind]
        keys = 128 + entries
        assert work.flop == many[layer].flop == 4 * 8 * 64 * 512 * keys
        assert many[layer].bytes - work.bytes == 7 * keys * 584
    scores = [w for w in verify_work(config, Load(8, 2, 8192)) if w.op == "indexer scores"]
    assert len(scores) == 3 and all(w.flop == 2 * 8 * 64 * 128 * 2048 for w in scores)
    assert all(w.bytes == 2 * 2048 * 68 + 8 * 2048 for w in scores)


def test_floors_grow_with_every_part_of_a_load() -> None:
    config = flash_8l()
    base = floor(verify_work(config, Load(64, 16, 1024)), H200).step_ms
    for more in (
        Load(128, 16, 1024),
        Load(64, 64, 1024),
        Load(64, 16, 65536),
        Load(64, 16, 1024, experts=[256] * 8),
    ):
        assert floor(verify_work(config, more), H200).step_ms > base
    fewer = Load(2048, 256, 1024, sampling=256)
    assert (
        floor(verify_work(config, fewer), H200).flop
        < floor(verify_work(config, Load(2048, 256, 1024)), H200).flop
    )


def test_drafting() -> None:
    config = flash_8l()
    work = draft_work(config, 16, 7, 1024)
    by_op = {w.op: w for w in work}
    assert by_op["base logits"].bytes == 2 * 4 * 16 * 7 * 129280
    assert by_op["Markov walk"].flop == 2 * 16 * 7 * 129280 * 256
    assert sum(w.op == "experts" for w in work) == 3
    with pytest.raises(ParameterError, match="drafter"):
        draft_work(tiny_config(dspark=None), 1, 1, 1)


def test_bad_loads_and_rates_are_named() -> None:
    with pytest.raises(ParameterError, match="rows"):
        Load(0, 1, 1)
    with pytest.raises(ParameterError, match="fp8"):
        Rates(1.0, {"bf16": 1.0, "fp4": 1.0}, "")
    with pytest.raises(ParameterError, match="flash-8L"):
        geometry("flash")


def test_flash_8l_is_the_beginning_of_flash() -> None:
    ours, full = flash_8l(), flash_dspark()
    assert ours.compress_ratios == full.compress_ratios[:8]
    kinds = [ours.kind(i) for i in range(8)]
    assert [kinds.count(k) for k in (LayerKind.WINDOW, LayerKind.CSA, LayerKind.HCA)] == [2, 3, 3]
    assert ours.num_hash_layers == 3 and ours.dspark is not None and ours.dspark.stages == 3
    assert sum(weight_bytes(ours).values()) == pytest.approx(41e9, rel=0.03)
    assert set(GEOMETRIES) == {"flash-8L", "tiny"}
