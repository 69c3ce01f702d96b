"""Names, shapes and sizes against the published totals; name maps; tensor-parallel slices; footprint."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from firesteel.checkpoint.spec import Layout, Stored, compare
from firesteel.models.deepseek_v4 import footprint as f
from firesteel.models.deepseek_v4.config import ConfigError, LayerKind
from firesteel.models.deepseek_v4.layout import (
    check_ranks,
    confidence_name,
    expected_tensors,
    fit_layout,
    layer_kinds,
    rank_slices,
    shard_count,
    shard_of,
)
from firesteel.models.deepseek_v4.names import module_name, official_name, official_view
from firesteel.models.deepseek_v4.presets import flash_dspark, pro_dspark
from firesteel.models.deepseek_v4.random_init import tiny_config

FLASH, PRO, TINY = flash_dspark(), pro_dspark(), tiny_config()
FLASH_SPECS = expected_tensors(FLASH)


def stored(config=TINY, **formats) -> dict[str, Stored]:  # type: ignore[no-untyped-def]
    """Headers of a perfect checkpoint."""
    specs = expected_tensors(config, **formats)
    return {n: Stored("f", n, s.dtypes[0], s.shape) for n, s in specs.items()}


def faults(layout: Layout, found: dict[str, Stored]) -> list[str]:
    return layout.problems + compare(layout.specs, found, layout.ignored)


# ---- published numbers ---------------------------------------------------------------------------
def test_flash_totals_are_exact() -> None:
    assert len(FLASH_SPECS) == 72_317
    assert sum(s.nbytes for s in FLASH_SPECS.values()) == 166_878_536_440
    census = Counter(s.dtypes[0] for s in FLASH_SPECS.values())
    assert census == {
        "I8": 35_328,
        "F8_E8M0": 35_718,
        "F8_E4M3": 390,
        "BF16": 445,
        "F32": 433,
        "I64": 3,
    }


def test_pro_totals_are_exact() -> None:
    specs = expected_tensors(PRO)
    assert len(specs) == 149_782
    assert sum(s.nbytes for s in specs.values()) == 892_727_580_904


def test_flash_drafter_part() -> None:
    draft = {n: s for n, s in FLASH_SPECS.items() if n.startswith("mtp.")}
    assert len(draft) == 4_705
    assert round(sum(s.nbytes for s in draft.values()) / 1e9, 2) == 10.86
    assert all(s.part.startswith("drafter.") for s in draft.values())
    assert set(FLASH_SPECS) - set(draft) == set(expected_tensors(FLASH, drafter=False))


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "part", "tp"),
    [
        ("embed.weight", "BF16", (129280, 4096), "embed", "dim0"),
        ("layers.0.attn.wq_b.scale", "F8_E8M0", (256, 8), "attention", "dim0"),
        ("layers.2.attn.wo_a.weight", "F8_E4M3", (8192, 4096), "attention", "dim0"),
        ("layers.2.attn.wo_b.weight", "F8_E4M3", (4096, 8192), "attention", "dim1"),
        ("layers.2.attn.compressor.ape", "F32", (4, 1024), "compressor", "replicated"),
        ("layers.3.attn.compressor.wkv.weight", "BF16", (512, 4096), "compressor", "replicated"),
        ("layers.2.attn.indexer.compressor.ape", "F32", (4, 256), "indexer", "replicated"),
        ("layers.2.attn.indexer.weights_proj.weight", "BF16", (64, 4096), "indexer", "dim0"),
        ("layers.0.hc_attn_fn", "F32", (24, 16384), "hyper", "replicated"),
        ("layers.2.ffn.gate.tid2eid", "I64", (129280, 6), "router", "replicated"),
        ("layers.3.ffn.gate.bias", "F32", (256,), "router", "replicated"),
        ("layers.9.ffn.experts.255.w2.weight", "I8", (4096, 1024), "experts", "expert"),
        ("layers.9.ffn.experts.0.w1.scale", "F8_E8M0", (2048, 128), "experts", "expert"),
        ("mtp.0.main_proj.scale", "F8_E8M0", (32, 96), "drafter.main", "replicated"),
        ("mtp.2.markov_head.markov_w2.weight", "BF16", (129280, 256), "drafter.markov", "dim0"),
        ("mtp.2.confidence_head.proj.weight", "BF16", (1, 4352), "drafter.confidence", "replicated"),
    ],
)
def test_flash_samples(name: str, dtype: str, shape: tuple[int, ...], part: str, tp: str) -> None:
    spec = FLASH_SPECS[name]
    assert (spec.dtypes[0], spec.shape, spec.part, spec.tp) == (dtype, shape, part, tp)


def test_absent_on_purpose() -> None:
    for name in (
        "layers.0.attn.compressor.ape",
        "layers.3.attn.indexer.wq_b.weight",
        "layers.0.ffn.gate.bias",
        "layers.3.ffn.gate.tid2eid",
        "mtp.0.attn.compressor.ape",
        "mtp.1.main_proj.weight",
        "mtp.0.norm.weight",
        "mtp.2.embed.weight",
    ):
        assert name not in FLASH_SPECS


def test_official_files() -> None:
    assert shard_count(FLASH) == 48 and shard_count(PRO) == 66
    homes = {name: shard_of(FLASH, name) for name in FLASH_SPECS}
    assert set(homes.values()) == set(range(48))
    assert [n for n, k in homes.items() if k == 0] == ["embed.weight"]
    assert {n for n, k in homes.items() if k == 44} == {
        "norm.weight",
        "head.weight",
        "hc_head_fn",
        "hc_head_base",
        "hc_head_scale",
    }
    order = list(homes.values())
    assert order == sorted(order)


# ---- formats -------------------------------------------------------------------------------------
@pytest.mark.parametrize("experts", ["fp4", "fp8", "dense"])
@pytest.mark.parametrize("linear", ["fp8", "dense"])
def test_formats_are_read_off_the_tensors(experts: str, linear: str) -> None:
    found = stored(expert_format=experts, linear_format=linear)
    layout = fit_layout(TINY, found)
    assert faults(layout, found) == []
    assert layout.formats["layers.1.ffn.experts.3.w2"] == experts
    assert layout.formats["mtp.0.main_proj"] == linear
    assert layout.confidence_head and layout.drafter


def test_target_and_drafter_may_differ() -> None:
    target, draft = stored(expert_format="fp8"), stored(expert_format="fp4")
    found = {n: (draft if n.startswith("mtp.") else target)[n] for n in target}
    layout = fit_layout(TINY, found)
    assert faults(layout, found) == []
    assert layout.formats["layers.0.ffn.experts.0.w1"] == "fp8"
    assert layout.formats["mtp.0.ffn.experts.0.w1"] == "fp4"


def test_float_scales_and_heads_of_other_dtypes_are_accepted() -> None:
    found = stored()
    for name in ("layers.0.attn.wq_a.scale", "mtp.2.markov_head.markov_w1.weight", "head.weight"):
        found[name] = replace(found[name], dtype="F32")
    found["layers.0.ffn.gate.tid2eid"] = replace(found["layers.0.ffn.gate.tid2eid"], dtype="I32")
    assert faults(fit_layout(TINY, found), found) == []


def test_mixed_experts_in_a_block_are_refused() -> None:
    found, other = stored(), stored(expert_format="fp8")
    for leaf in ("weight", "scale"):
        name = f"layers.1.ffn.experts.5.w2.{leaf}"
        found[name] = other[name]
    problems = faults(fit_layout(TINY, found), found)
    assert len(problems) == 1 and "layers.1.ffn.experts" in problems[0] and "fp8" in problems[0]


def test_wrong_dtype_shape_missing_and_surplus_are_each_named() -> None:
    found = stored()
    name = "layers.1.attn.wq_b"
    found[f"{name}.weight"] = replace(found[f"{name}.weight"], dtype="F8_E5M2")
    found["norm.weight"] = replace(found["norm.weight"], shape=(64,))
    del found["layers.2.attn.wkv.scale"]
    found["layers.9.attn.wkv.scale"] = Stored("g", "layers.9.attn.wkv.scale", "F8_E8M0", (1, 1))
    text = "\n".join(faults(fit_layout(TINY, found), found))
    assert "expected dtype F8_E4M3, found F8_E5M2" in text
    assert "expected shape [128], found [64]" in text
    assert "'layers.2.attn.wkv.scale': missing, expected F8_E8M0" in text
    assert "g: tensor 'layers.9.attn.wkv.scale': surplus" in text
    assert text.count("\n") == 3


def test_linear_weight_in_fp4_bytes_is_not_taken_for_experts() -> None:
    found = stored()
    found["layers.0.attn.wq_a.weight"] = replace(found["layers.0.attn.wq_a.weight"], dtype="I8")
    assert "found I8" in "".join(faults(fit_layout(TINY, found), found))


# ---- drafter -------------------------------------------------------------------------------------
def test_missing_confidence_head_is_a_note() -> None:
    found = stored()
    del found[confidence_name(TINY)]
    layout = fit_layout(TINY, found)
    assert faults(layout, found) == []
    assert not layout.confidence_head and confidence_name(TINY) in layout.notes[0]


def test_config_can_switch_the_confidence_head_off() -> None:
    found = stored()
    assert TINY.dspark is not None
    config = replace(TINY, dspark=replace(TINY.dspark, confidence_head=False))
    layout = fit_layout(config, found)
    assert faults(layout, found) == [] and not layout.confidence_head
    assert list(layout.ignored) == [confidence_name(TINY)]


def test_no_stage_at_all_is_one_problem() -> None:
    found = stored(drafter=False)
    problems = faults(fit_layout(TINY, found), found)
    assert len(problems) == 1 and "dspark_*" in problems[0]
    assert faults(fit_layout(TINY, found, drafter=False), found) == []


def test_unwanted_stages_are_ignored_with_a_reason() -> None:
    found = stored()
    off = fit_layout(TINY, found, drafter=False)
    assert faults(off, found) == [] and set(off.ignored.values()) == {"draft stages were not asked for"}
    bare = replace(TINY, dspark=None, mtp_stages=1)
    assert "no dspark_* fields" in fit_layout(bare, found).ignored["mtp.0.main_proj.weight"]
    preview = {n: s for n, s in found.items() if not n.startswith("mtp.")}
    preview["mtp.0.e_proj.weight"] = Stored("f", "mtp.0.e_proj.weight", "F8_E4M3", (128, 128))
    layout = fit_layout(bare, preview)
    assert faults(layout, preview) == [] and "plain MTP" in layout.ignored["mtp.0.e_proj.weight"]


# ---- names ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model.embed_tokens.weight", "embed.weight"),
        ("lm_head.weight", "head.weight"),
        ("model.norm.weight", "norm.weight"),
        ("model.hc_head.hc_base", "hc_head_base"),
        ("model.layers.3.attn.norm.weight", "layers.3.attn.kv_norm.weight"),
        ("model.layers.3.attn.compressor.norm.weight", "layers.3.attn.compressor.norm.weight"),
        ("model.layers.3.self_attn.kv_norm.weight", "layers.3.attn.kv_norm.weight"),
        ("model.layers.3.self_attn.compressor.kv_norm.weight", "layers.3.attn.compressor.norm.weight"),
        ("model.layers.3.self_attn.q_a_proj.weight_scale_inv", "layers.3.attn.wq_a.scale"),
        (
            "model.layers.3.self_attn.compressor.indexer.scorer.weights_proj.weight",
            "layers.3.attn.indexer.weights_proj.weight",
        ),
        (
            "model.layers.3.self_attn.compressor.indexer.position_bias",
            "layers.3.attn.indexer.compressor.ape",
        ),
        ("model.layers.3.attn_hc.scale", "layers.3.hc_attn_scale"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "layers.3.ffn.gate.bias"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", "layers.3.ffn.shared_experts.w3.weight"),
        ("mtp.2.markov_head.markov_w1.weight", "mtp.2.markov_head.markov_w1.weight"),
        ("layers.3.ffn.experts.1.w1.weight", "layers.3.ffn.experts.1.w1.weight"),
    ],
)
def test_foreign_names(theirs: str, ours: str) -> None:
    assert official_name(theirs) == ours


def test_every_official_name_survives_both_ways() -> None:
    names = list(expected_tensors(TINY))
    theirs = [module_name(name) for name in names]
    assert len(set(theirs)) == len(names)
    assert [official_name(name) for name in theirs] == names
    assert [official_name(name) for name in names] == names


def test_stacked_experts_are_split_and_cover_everything() -> None:
    found = stored(expert_format="dense", linear_format="dense")
    hf = {n: s for n, s in found.items() if ".ffn.experts." not in n or n.startswith("mtp.")}
    for layer in range(4):
        p = f"model.layers.{layer}.mlp.experts."
        for name, shape in (("gate_up_proj", (8, 128, 128)), ("down_proj", (8, 128, 64))):
            hf[p + name] = Stored("f", p + name, "BF16", shape)
    view, problems = official_view(hf)
    assert problems == [] and faults(fit_layout(TINY, view), view) == []
    assert view["layers.1.ffn.experts.3.w3.weight"].pick == (3, 64, 128)
    assert view["layers.1.ffn.experts.3.w1.weight"].pick == (3, 0, 64)


def test_two_spellings_of_one_tensor_are_a_duplicate() -> None:
    one = Stored("f", "norm.weight", "BF16", (128,))
    two = replace(one, file="g", stored_name="model.norm.weight")
    _, problems = official_view({"norm.weight": one, "model.norm.weight": two})
    assert len(problems) == 1 and "duplicate" in problems[0] and "g" in problems[0]


# ---- ranks ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [2, 8])
def test_ranks_cover_every_tensor_once(size: int) -> None:
    for spec in FLASH_SPECS.values():
        shares = [rank_slices(spec, rank, size, 256) for rank in range(size)]
        mine = [s for s in shares if s is not None]
        if spec.tp == "expert":
            assert len(mine) == 1
        elif spec.tp == "replicated":
            assert len(set(map(str, mine))) == 1
        else:
            dim = int(spec.tp[-1])
            assert [s[dim].start for s in mine[1:]] == [s[dim].stop for s in mine[:-1]]
            assert mine[-1][dim].stop == spec.shape[dim]


def test_impossible_rank_counts() -> None:
    for size in (1, 2, 4, 8):
        check_ranks(FLASH, size)
    for size in (0, 3, 16):
        with pytest.raises(ConfigError, match="tensor-parallel"):
            check_ranks(FLASH, size)
    with pytest.raises(ConfigError, match="does not split"):
        rank_slices(expected_tensors(TINY)["layers.0.attn.wo_a.scale"], 0, 2, 8)


# ---- footprint -----------------------------------------------------------------------------------
def test_row_sizes() -> None:
    assert f.kv_row_bytes(FLASH) == 584
    assert f.index_row_bytes(FLASH) == 68 and f.index_row_bytes(FLASH, "fp8") == 132
    assert f.raw_row_bytes(FLASH, LayerKind.CSA) == 8192
    assert f.raw_row_bytes(FLASH, LayerKind.HCA) == 4096
    assert f.raw_index_row_bytes(FLASH) == 2048


def test_history_growth() -> None:
    assert f.history_bytes_per_token(FLASH, "fp8") == 21 * 179 + 20 * 4.5625  # the published 3.85 kB
    assert round(f.history_bytes_per_token(PRO, "fp8") / 1e3, 1) == 5.5
    assert f.history_bytes_per_token(FLASH) == 3514.25
    assert f.page_bytes(FLASH) == 3514.25 * 256
    assert f.history_bytes_per_token(tiny_config(compress_ratios=(0, 0))) == 0


def test_snapshots_and_rings() -> None:
    assert round(f.snapshot_bytes(FLASH) / 1e6, 2) == 3.84
    assert round(f.snapshot_bytes(PRO) / 1e6, 1) == 5.4
    for config, quoted, with_slack in ((FLASH, 18, 20.5), (PRO, 27, 30.5)):
        rings = f.ring_bytes(config, 5)
        assert sum(rings.values()) == f.slot_bytes(config, 5)
        assert round(f.slot_bytes(config, 5) / 1e6, 1) == with_slack
        # the quoted sizes have CSA rings of 14 rows in place of 26
        csa = rings["CSA raw rows"] + rings["indexer raw rows"]
        assert round((f.slot_bytes(config, 5) - csa * 12 / 26) / 1e6) == quoted


def test_weights_add_up_over_ranks() -> None:
    whole = f.weight_bytes(FLASH, 1, wo_a_bf16=False)
    assert sum(whole.values()) == 166_878_536_440
    one = f.weight_bytes(FLASH, 8, wo_a_bf16=False)
    assert one["experts"] * 8 == whole["experts"] and one["embed"] * 8 == whole["embed"]
    assert one["shared"] == whole["shared"]
    extra = sum(f.weight_bytes(FLASH, 1).values()) - sum(whole.values())
    assert extra == (43 + 3) * 8192 * 4096


def test_plan_fills_the_gpu_and_no_more() -> None:
    plan = f.plan_memory(FLASH, 141, 2, max_model_len=131072)
    assert plan.fits and plan.gamma == 5
    for slots in (1, 64, 256):
        pages = plan.tokens(slots) // 256
        used = slots * plan.slot_total + pages * plan.page
        assert used <= plan.state < used + plan.page
    assert plan.full_slots * (plan.slot_total + 512 * plan.page) <= plan.state
    small = f.plan_memory(FLASH, 80, 1)
    assert not small.fits and small.state < 0 and small.tokens(1) == 0
    assert f.plan_memory(FLASH, 141, 2, drafter=False).slot["draft context"] == 0
    with pytest.raises(ConfigError, match="positive"):
        f.plan_memory(FLASH, 0)


def test_layer_kinds() -> None:
    assert layer_kinds(TINY) == {LayerKind.WINDOW: 1, LayerKind.CSA: 2, LayerKind.HCA: 1}
