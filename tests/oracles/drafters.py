"""A small target with a drafter, for tests of its training and calibration."""

from __future__ import annotations

from typing import Any

from firesteel.models.deepseek_v4.config import DSparkConfig, V4Config
from firesteel.models.deepseek_v4.random_init import tiny_config

BLOCK, WINDOW, VOCAB = 7, 16, 96
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 64,
    "compress_ratios": (0, 4, 16),
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "hc_sinkhorn_iters": 4,
    "max_position_embeddings": 256,
}


def small(taps: tuple[int, ...] = (0, 1, 2)) -> V4Config:
    return tiny_config(**SMALL, dspark=DSparkConfig(BLOCK, 2, taps, 16, 3))
