"""Geometries of the official releases that carry a DSpark drafter."""

from __future__ import annotations

from firesteel.models.deepseek_v4.config import DSparkConfig, V4Config, Yarn

YARN = Yarn(factor=16.0, original_max_position_embeddings=65536, beta_fast=32.0, beta_slow=1.0)


def flash_dspark() -> V4Config:
    """V4-Flash with DSpark (Flash-DSpark, Flash-0731): 43 layers, 3 draft stages."""
    return V4Config(
        vocab_size=129280,
        hidden_size=4096,
        num_hidden_layers=43,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1024,
        o_lora_rank=1024,
        o_groups=8,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=512,
        sliding_window=128,
        compress_ratios=(0, 0, *((4, 128) * 20), 4),
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        yarn=YARN,
        max_position_embeddings=1048576,
        rms_norm_eps=1e-6,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        moe_intermediate_size=2048,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=6,
        num_hash_layers=3,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        bos_token_id=0,
        eos_token_id=1,
        expert_dtype="fp4",
        dspark=DSparkConfig(
            block_size=5, noise_token_id=128799, target_layer_ids=(40, 41, 42), markov_rank=256, stages=3
        ),
        mtp_stages=3,
    )


def pro_dspark() -> V4Config:
    """V4-Pro with DSpark (Pro-0813): 61 layers, 3 draft stages."""
    return V4Config(
        vocab_size=129280,
        hidden_size=7168,
        num_hidden_layers=61,
        num_attention_heads=128,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1536,
        o_lora_rank=1024,
        o_groups=16,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=1024,
        sliding_window=128,
        compress_ratios=(128, 128, *((4, 128) * 29), 4),
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        yarn=YARN,
        max_position_embeddings=1048576,
        rms_norm_eps=1e-6,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        moe_intermediate_size=3072,
        n_routed_experts=384,
        n_shared_experts=1,
        num_experts_per_tok=6,
        num_hash_layers=3,
        routed_scaling_factor=2.5,
        swiglu_limit=10.0,
        bos_token_id=0,
        eos_token_id=1,
        expert_dtype="fp4",
        dspark=DSparkConfig(
            block_size=5, noise_token_id=128799, target_layer_ids=(58, 59, 60), markov_rank=512, stages=3
        ),
        mtp_stages=3,
    )
