"""Writing ``config.json`` of DeepSeek-V4 checkpoints: the official spelling and the converted one."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

from firesteel.models.deepseek_v4.config import ConfigError, V4Config

ARCHITECTURE = "DeepseekV4ForCausalLM"
MODEL_TYPE = "deepseek_v4"
BLOCK = (128, 128)  # FP8 weight blocks
DSPARK_FIELDS = (
    "dspark_block_size",
    "dspark_noise_token_id",
    "dspark_target_layer_ids",
    "dspark_markov_rank",
)
LAYER_TYPES = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")


# what every official config.json states alike
COMMON: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": MODEL_TYPE,
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": list(BLOCK),
    },
}


def dump_config(config: V4Config) -> dict[str, Any]:
    """The flat spelling exactly as official folders have it (JSON-ready)."""
    stages = config.dspark.stages if config.dspark else config.mtp_stages
    yarn = config.yarn
    out: dict[str, Any] = copy.deepcopy(COMMON) | {
        "bos_token_id": config.bos_token_id,
        "compress_ratios": [*config.compress_ratios, *([0] * stages)],
        "compress_rope_theta": whole(config.compress_rope_theta),
        "eos_token_id": config.eos_token_id,
        "expert_dtype": config.expert_dtype,
        "hc_eps": config.hc_eps,
        "hc_mult": config.hc_mult,
        "hc_sinkhorn_iters": config.hc_sinkhorn_iters,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "index_head_dim": config.index_head_dim,
        "index_n_heads": config.index_n_heads,
        "index_topk": config.index_topk,
        "max_position_embeddings": config.max_position_embeddings,
        "moe_intermediate_size": config.moe_intermediate_size,
        "n_routed_experts": config.n_routed_experts,
        "n_shared_experts": config.n_shared_experts,
        "num_attention_heads": config.num_attention_heads,
        "num_experts_per_tok": config.num_experts_per_tok,
        "num_hash_layers": config.num_hash_layers,
        "num_hidden_layers": config.num_hidden_layers,
        "num_nextn_predict_layers": min(stages, 1),
        "o_groups": config.o_groups,
        "o_lora_rank": config.o_lora_rank,
        "q_lora_rank": config.q_lora_rank,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None
        if yarn is None
        else {
            "beta_fast": whole(yarn.beta_fast),
            "beta_slow": whole(yarn.beta_slow),
            "factor": whole(yarn.factor),
            "original_max_position_embeddings": yarn.original_max_position_embeddings,
            "type": "yarn",
        },
        "rope_theta": whole(config.rope_theta),
        "routed_scaling_factor": config.routed_scaling_factor,
        "sliding_window": config.sliding_window,
        "swiglu_limit": config.swiglu_limit,
        "vocab_size": config.vocab_size,
    }
    if config.dspark is not None:
        draft = config.dspark
        out["dspark_block_size"] = draft.block_size
        out["dspark_noise_token_id"] = draft.noise_token_id
        out["dspark_target_layer_ids"] = list(draft.target_layer_ids)
        out["dspark_markov_rank"] = draft.markov_rank
        if not draft.confidence_head:
            out["enable_confidence_head"] = False
    return out


def whole(value: float) -> int | float:
    """Whole numbers without a fraction, as official configs write thetas and YaRN factors."""
    return int(value) if value == int(value) else value


def dump_converted(config: V4Config) -> dict[str, Any]:
    """The spelling that ``transformers`` saves (target only): for comparing with it as an oracle.

    Raises ConfigError if the layers use more than one HCA ratio, which that form cannot say.
    """
    high = sorted({ratio for ratio in config.compress_ratios if ratio > 4})
    if len(high) > 1:
        raise ConfigError(f"compress_ratios: expected at most one ratio above 4, found {high}")
    out = dump_config(config)
    dropped = ("compress_ratios", "num_hash_layers", "rope_scaling", "quantization_config", "expert_dtype")
    for name in [*dropped, *DSPARK_FIELDS, "topk_method", "enable_confidence_head"]:
        out.pop(name, None)
    part = config.qk_rope_head_dim / config.head_dim
    kinds = {0: LAYER_TYPES[0], 4: LAYER_TYPES[1]}
    compress: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": config.compress_rope_theta,
        "partial_rotary_factor": part,
    }
    if config.yarn is not None:
        compress |= asdict(config.yarn) | {"rope_type": "yarn", "attention_factor": 1.0}
    main = {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": part}
    hashed = config.num_hash_layers
    return out | {
        "layer_types": [kinds.get(ratio, LAYER_TYPES[2]) for ratio in config.compress_ratios],
        "compress_rates": {LAYER_TYPES[1]: 4, LAYER_TYPES[2]: high[0] if high else 128},
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (config.num_hidden_layers - hashed),
        "partial_rotary_factor": part,
        "rope_parameters": {"main": main, "compress": compress},
    }
