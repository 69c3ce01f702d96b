"""Hugging Face ``DeepseekV4ForCausalLM`` with the weights of one of our checkpoints.

It knows no quantisation: what it computes is what ``numerics: float32`` has to compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from oracles import tensors

NAMES = {  # official -> Hugging Face, below one layer
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.attn_sink": "self_attn.sinks",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.compressor.wkv.weight": "self_attn.compressor.kv_proj.weight",
    "attn.compressor.wgate.weight": "self_attn.compressor.gate_proj.weight",
    "attn.compressor.norm.weight": "self_attn.compressor.kv_norm.weight",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "attn.indexer.compressor.wkv.weight": "self_attn.compressor.indexer.kv_proj.weight",
    "attn.indexer.compressor.wgate.weight": "self_attn.compressor.indexer.gate_proj.weight",
    "attn.indexer.compressor.norm.weight": "self_attn.compressor.indexer.kv_norm.weight",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
}
TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
SAME = (  # fields with one name and meaning in both
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "sliding_window",
    "max_position_embeddings",
    "rms_norm_eps",
    "hc_mult",
    "hc_sinkhorn_iters",
    "hc_eps",
    "moe_intermediate_size",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "swiglu_limit",
    "rope_theta",
    "compress_rope_theta",
)
KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention"}


def config_of(raw: dict[str, Any]) -> DeepseekV4Config:
    """Hugging Face's config of a flat config.json; it has one ratio per kind of layer."""
    layers = raw["num_hidden_layers"]
    ratios = raw["compress_ratios"][:layers]
    heavy = {r for r in ratios if r > 4}
    assert len(heavy) <= 1, "Hugging Face knows one heavy ratio per model"
    factor = raw["qk_rope_head_dim"] / raw["head_dim"]
    main = {"rope_type": "default", "rope_theta": raw["rope_theta"], "partial_rotary_factor": factor}
    compress = {**main, "rope_theta": raw["compress_rope_theta"]}
    if raw.get("rope_scaling"):
        scaling = {k: v for k, v in raw["rope_scaling"].items() if k not in ("type", "rope_type")}
        compress = {**compress, **scaling, "rope_type": "yarn", "attention_factor": 1.0}
    hashed = raw["num_hash_layers"]
    return DeepseekV4Config(
        **{name: raw[name] for name in SAME},
        num_key_value_heads=1,
        partial_rotary_factor=factor,
        layer_types=[KINDS.get(r, "heavily_compressed_attention") for r in ratios],
        compress_rates={
            "compressed_sparse_attention": 4,
            "heavily_compressed_attention": heavy.pop() if heavy else 128,
        },
        mlp_layer_types=["hash_moe" if i < hashed else "moe" for i in range(layers)],
        rope_parameters={"main": main, "compress": compress},
        tie_word_embeddings=False,
    )


def state_of(source: tensors.Tensors) -> dict[str, Tensor]:
    """Hugging Face's state dict; routed experts are stacked, gate before up."""
    c = source.raw
    state = {theirs: source[ours] for ours, theirs in TOP.items()}
    for i in range(c["num_hidden_layers"]):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        for name, value in source.values.items():
            if name.startswith(ours) and ".experts." not in name:
                state[theirs + NAMES[name.removeprefix(ours)]] = value
        w1, w2, w3 = (
            [source[f"{ours}ffn.experts.{e}.{w}.weight"] for e in range(c["n_routed_experts"])]
            for w in ("w1", "w2", "w3")
        )
        both = [torch.cat((gate, up)) for gate, up in zip(w1, w3, strict=True)]
        state[theirs + "mlp.experts.gate_up_proj"] = torch.stack(both)
        state[theirs + "mlp.experts.down_proj"] = torch.stack(w2)
    return state


@contextmanager
def lowest_index_wins() -> Iterator[None]:
    """The indexer's ``Tensor.topk`` breaks ties by shape; ours go to the lowest index."""
    plain = Tensor.topk

    def stable(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        assert largest, "the indexer takes the largest"
        values, indices = torch.sort(x, dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    Tensor.topk = stable  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.topk = plain  # type: ignore[method-assign]


class Oracle:
    """A float32, eager, unbatched Hugging Face model of a checkpoint folder."""

    def __init__(self, path: str | Path):
        source = tensors.load(path)
        self.model = DeepseekV4ForCausalLM._from_config(
            config_of(source.raw), attn_implementation="eager", dtype=torch.float32
        )
        self.model.set_experts_implementation("eager")
        left = self.model.load_state_dict(state_of(source), strict=True)
        assert not left.missing_keys and not left.unexpected_keys
        self.model.eval()

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """float32 [n, V] of one whole sequence, without a cache."""
        with lowest_index_wins():
            return self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
