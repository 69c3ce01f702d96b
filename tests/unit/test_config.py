"""config.json: three spellings, one geometry, and an error for everything else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firesteel.models.deepseek_v4.config import ConfigError, LayerKind, V4Config, yarn_bounds
from firesteel.models.deepseek_v4.config_parse import NATIVE_NAMES, dump_config, dump_converted, parse_config
from firesteel.models.deepseek_v4.presets import flash_dspark, pro_dspark
from firesteel.models.deepseek_v4.random_init import tiny_config

DELETE = object()


def flash(**changes: Any) -> dict[str, Any]:
    """The official Flash config.json with fields changed or deleted."""
    raw = json.loads(json.dumps(dump_config(flash_dspark())))
    for name, value in changes.items():
        if value is DELETE:
            del raw[name]
        else:
            raw[name] = value
    return raw


def native(config: V4Config) -> dict[str, Any]:
    """The same geometry as inference/config.json spells it."""
    raw = dump_config(config)
    out = {there: raw[here] for here, there in NATIVE_NAMES.items()}
    out |= {name: raw[name] for name in raw if name.startswith("dspark_")}
    assert config.yarn is not None
    out |= {
        "n_mtp_layers": config.mtp_stages,
        "score_func": "sqrtsoftplus",
        "original_seq_len": config.yarn.original_max_position_embeddings,
        "rope_factor": config.yarn.factor,
        "beta_fast": config.yarn.beta_fast,
        "beta_slow": config.yarn.beta_slow,
        "dtype": "fp8",
        "scale_fmt": "ue8m0",
        "scale_dtype": "fp8",
    }
    return out


def test_official_flash_by_hand() -> None:
    raw = flash()
    assert raw["compress_ratios"] == [0, 0, *[4, 128] * 20, 4, 0, 0, 0]
    assert raw["quantization_config"] == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    }
    assert raw["rope_scaling"] == {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    config = parse_config(raw)
    kinds = [config.kind(i) for i in range(43)]
    assert [kinds.count(k) for k in LayerKind] == [2, 21, 20]
    assert config.dspark is not None and config.dspark.stages == config.mtp_stages == 3
    assert config.yarn is not None and yarn_bounds(64, 160000.0, config.yarn) == (15, 25)


def test_official_pro_layers() -> None:
    config = pro_dspark()
    assert len(config.compress_ratios) == 61
    kinds = [config.kind(i) for i in range(61)]
    assert [kinds.count(k) for k in LayerKind] == [0, 30, 31]


@pytest.mark.parametrize("config", [flash_dspark(), pro_dspark(), tiny_config(), tiny_config(dspark=None)])
def test_round_trips(config: V4Config) -> None:
    assert parse_config(json.loads(json.dumps(dump_config(config)))) == config
    assert parse_config(native(config)) == config  # native states the longest context as original * factor
    bare = replace(config, dspark=None, mtp_stages=0)
    assert parse_config(json.loads(json.dumps(dump_converted(config)))) == bare


@given(
    st.lists(st.sampled_from([0, 4, 8, 16, 128, 256]), min_size=1, max_size=9),
    st.integers(0, 4),
    st.booleans(),
)
def test_any_layer_list_round_trips(ratios: list[int], stages: int, head: bool) -> None:
    config = tiny_config(compress_ratios=ratios, num_hash_layers=0)
    assert config.dspark is not None
    draft = replace(config.dspark, stages=stages, confidence_head=head) if stages else None
    config = replace(config, dspark=draft, mtp_stages=stages)
    assert parse_config(dump_config(config)) == config


def test_converted_form_of_transformers() -> None:
    config = pytest.importorskip("transformers").DeepseekV4Config(**dump_converted(tiny_config()))
    raw = json.loads(config.to_json_string(use_diff=False))
    raw["architectures"] = ["DeepseekV4ForCausalLM"]
    assert parse_config(raw) == replace(tiny_config(), dspark=None, mtp_stages=0)


def test_plain_mtp_and_stage_counts() -> None:
    fields = {n: DELETE for n in flash() if n.startswith("dspark_")}
    preview = parse_config(flash(compress_ratios=[0, 0, *[4, 128] * 20, 4, 0], **fields))
    assert preview.dspark is None and preview.mtp_stages == 1
    # num_nextn_predict_layers is not believed
    assert parse_config(flash(num_nextn_predict_layers=7)).mtp_stages == 3
    short = parse_config(flash(compress_ratios=flash()["compress_ratios"][:43], n_mtp_layers=3))
    assert short == flash_dspark()


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"model_type": "deepseek_v41"}, "model_type", "deepseek_v41"),
    ({"architectures": ["LlamaForCausalLM"]}, "architectures", "Llama"),
    ({"architectures": DELETE}, "architectures", "missing"),
    ({"hidden_size": None}, "hidden_size", "null"),
    ({"hidden_size": DELETE}, "hidden_size", "missing"),
    ({"hidden_size": "4096"}, "hidden_size", "'4096'"),
    ({"hidden_size": 4096.0}, "hidden_size", "4096.0"),
    ({"index_topk": True}, "index_topk", "True"),
    ({"hidden_size": 0}, "hidden_size", "found 0"),
    ({"q_lora_rank": -1}, "q_lora_rank", "found -1"),
    ({"rms_norm_eps": 0}, "rms_norm_eps", "> 0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps", "finite"),
    ({"swiglu_limit": "10"}, "swiglu_limit", "'10'"),
    ({"compress_ratios": [0, 4]}, "compress_ratios", "2 entries"),
    ({"compress_ratios": None}, "compress_ratios", "null"),
    ({"compress_ratios": [0, 4.5] * 30}, "compress_ratios", "integers"),
    ({"compress_ratios": [0, 0, *[4, 100] * 20, 4]}, "compress_ratios[3]", "100"),
    ({"compress_ratios": [2, *[0] * 45]}, "compress_ratios[0]", "found 2"),
    ({"compress_ratios": [-4, *[0] * 45]}, "compress_ratios[0]", "found -4"),
    ({"compress_ratios": [512, *[0] * 45]}, "compress_ratios[0]", "found 512"),
    ({"compress_ratios": [0] * 43 + [0, 4, 0]}, "compress_ratios[44]", "draft stage 1"),
    ({"compress_ratios": [0] * 43}, "compress_ratios", "n_mtp_layers"),
    ({"n_mtp_layers": 1}, "n_mtp_layers", "found 1"),
    ({"num_hash_layers": 44}, "num_hash_layers", "0..43"),
    ({"num_experts_per_tok": 257}, "num_experts_per_tok", "n_routed_experts"),
    ({"o_groups": 7}, "o_groups", "divisor"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim", "even"),
    ({"expert_dtype": "int4"}, "expert_dtype", "'fp4'"),
    ({"expert_dtype": DELETE}, "expert_dtype", "missing"),
    ({"moe_intermediate_size": 2000}, "moe_intermediate_size", "multiple of 32"),
    ({"scoring_func": "sigmoid"}, "scoring_func", "sqrtsoftplus"),
    ({"norm_topk_prob": 1}, "norm_topk_prob", "True"),
    ({"hidden_act": None}, "hidden_act", "null"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings", "False"),
    ({"num_key_value_heads": 8}, "num_key_value_heads", "found 8"),
    ({"n_shared_experts": 2}, "n_shared_experts", "found 2"),
    ({"vision_n_layers": 24}, "vision_n_layers", "text"),
    ({"dspark_markov_rank": DELETE}, "dspark_markov_rank", "or none"),
    ({"dspark_markov_rank": None}, "dspark_markov_rank", "null"),
    ({"dspark_target_layer_ids": [40, 41, 43]}, "dspark_target_layer_ids", "0..42"),
    ({"dspark_target_layer_ids": [40, 40, 42]}, "dspark_target_layer_ids", "distinct"),
    ({"dspark_target_layer_ids": []}, "dspark_target_layer_ids", "distinct"),
    ({"dspark_noise_token_id": 129280}, "dspark_noise_token_id", "129279"),
    ({"draft_vocab_size": 32000}, "draft_vocab_size", "32000"),
    ({"eos_token_id": 129280}, "eos_token_id", "129280"),
    ({"eos_token_id": None}, "eos_token_id", "null"),
    ({"rope_scaling": DELETE}, "rope_scaling", "missing"),
    ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling.type", "'yarn'"),
    ({"rope_scaling": {"type": "yarn", "factor": None}}, "rope_scaling.factor", "null"),
    ({"quantization_config": None}, "quantization_config", "null"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method", "awq"),
    (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
        "quantization_config.weight_block_size",
        "64",
    ),
    (
        {"quantization_config": {"quant_method": "fp8", "moe_quant_algo": "NVFP4"}},
        "quantization_config.moe_quant_algo",
        "NVFP4",
    ),
]


@pytest.mark.parametrize(("changes", "field", "detail"), BAD, ids=lambda v: v if isinstance(v, str) else "")
def test_faults_name_file_field_and_finding(changes: dict[str, Any], field: str, detail: str) -> None:
    with pytest.raises(ConfigError) as err:
        parse_config(flash(**changes), "somewhere/config.json")
    text = str(err.value)
    assert text.startswith("somewhere/config.json: ")
    assert f"'{field}'" in text and detail in text and "expected" in text


@pytest.mark.parametrize("name", sorted(set(dump_config(flash_dspark())) - {"rope_scaling"}))
def test_null_is_never_a_value(name: str) -> None:
    free = {
        "attention_dropout",
        "initializer_range",
        "num_nextn_predict_layers",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
    if name in free:  # nothing that serving depends on
        assert parse_config(flash(**{name: None})) == flash_dspark()
        return
    with pytest.raises(ConfigError, match=rf"'{name}'"):
        parse_config(flash(**{name: None}))


def test_native_faults_use_native_names() -> None:
    raw = native(flash_dspark())
    raw["dim"] = -4
    with pytest.raises(ConfigError, match=r"'dim'.*found -4"):
        parse_config(raw)
    raw = native(flash_dspark())
    del raw["rope_factor"]
    with pytest.raises(ConfigError, match="'rope_factor' is missing"):
        parse_config(raw)


def test_converted_faults() -> None:
    good = dump_converted(tiny_config())
    for change, field in (
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"layer_types": ["global"] * 4}, r"layer_types\[0\]"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "mlp_layer_types"),
        (
            {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 16}},
            "compress_rates",
        ),
        ({"rope_parameters": {"main": good["rope_parameters"]["main"]}}, "rope_parameters.compress"),
    ):
        with pytest.raises(ConfigError, match=field):
            parse_config(good | change)


def test_unquantised_config_needs_no_expert_dtype() -> None:
    raw = flash(quantization_config=DELETE, expert_dtype=DELETE)
    assert parse_config(raw) == flash_dspark()
    assert parse_config(flash(rope_scaling=None)).yarn is None


def test_confidence_head_switch() -> None:
    config = parse_config(flash(enable_confidence_head=False))
    assert config.dspark is not None and not config.dspark.confidence_head
    assert dump_config(config)["enable_confidence_head"] is False


@pytest.mark.parametrize("body", ["{", "[]", "\udcff", ""])
def test_files_that_are_no_config(tmp_path: Path, body: str) -> None:
    (tmp_path / "config.json").write_bytes(body.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        V4Config.load(tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        V4Config.load(tmp_path / "absent")
