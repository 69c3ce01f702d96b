"""Tensor names: official (native) and those of Hugging Face ``transformers``.

Two foreign spellings are read: the module names (``model.layers.0.self_attn.q_a_proj.weight``) and
what ``save_pretrained`` writes (native names under ``model.``, with ``attn.norm`` for ``attn.kv_norm``
and ``hc_head.hc_fn`` for ``hc_head_fn``). Stacked experts are split into official single ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from firesteel.checkpoint.spec import Stored

# (module name, official name) inside one block, whole path components, longest first
PAIRS: tuple[tuple[str, str], ...] = (
    ("self_attn.compressor.indexer.scorer.weights_proj", "attn.indexer.weights_proj"),
    ("self_attn.compressor.indexer.q_b_proj", "attn.indexer.wq_b"),
    ("self_attn.compressor.indexer.kv_proj", "attn.indexer.compressor.wkv"),
    ("self_attn.compressor.indexer.gate_proj", "attn.indexer.compressor.wgate"),
    ("self_attn.compressor.indexer.kv_norm", "attn.indexer.compressor.norm"),
    ("self_attn.compressor.indexer.position_bias", "attn.indexer.compressor.ape"),
    ("self_attn.compressor.kv_proj", "attn.compressor.wkv"),
    ("self_attn.compressor.gate_proj", "attn.compressor.wgate"),
    ("self_attn.compressor.kv_norm", "attn.compressor.norm"),
    ("self_attn.compressor.position_bias", "attn.compressor.ape"),
    ("self_attn.q_a_proj", "attn.wq_a"),
    ("self_attn.q_b_proj", "attn.wq_b"),
    ("self_attn.q_a_norm", "attn.q_norm"),
    ("self_attn.kv_proj", "attn.wkv"),
    ("self_attn.kv_norm", "attn.kv_norm"),
    ("self_attn.sinks", "attn.attn_sink"),
    ("self_attn.o_a_proj", "attn.wo_a"),
    ("self_attn.o_b_proj", "attn.wo_b"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("attn_hc.fn", "hc_attn_fn"),
    ("attn_hc.base", "hc_attn_base"),
    ("attn_hc.scale", "hc_attn_scale"),
    ("ffn_hc.fn", "hc_ffn_fn"),
    ("ffn_hc.base", "hc_ffn_base"),
    ("ffn_hc.scale", "hc_ffn_scale"),
    ("mlp.gate.e_score_correction_bias", "ffn.gate.bias"),
    ("mlp.gate", "ffn.gate"),
    ("mlp.shared_experts.gate_proj", "ffn.shared_experts.w1"),
    ("mlp.shared_experts.up_proj", "ffn.shared_experts.w3"),
    ("mlp.shared_experts.down_proj", "ffn.shared_experts.w2"),
    ("mlp.experts", "ffn.experts"),
)
TOP_PAIRS: tuple[tuple[str, str], ...] = (
    ("embed_tokens.weight", "embed.weight"),
    ("lm_head.weight", "head.weight"),
    ("hc_head.hc_fn", "hc_head_fn"),
    ("hc_head.hc_base", "hc_head_base"),
    ("hc_head.hc_scale", "hc_head_scale"),
)
SCALE_ENDINGS = (".weight_scale_inv", ".weight_scale")
# save_pretrained reverses the norm rename too far: this one is the K=V norm
KV_NORM_QUIRK = "attn.norm."
BLOCK_NAME = re.compile(r"^((?:layers|mtp)\.\d+\.)(.+)$")
STACKED = re.compile(
    r"^(layers\.\d+\.)(?:mlp|ffn)\.experts\.(gate_up_proj|down_proj)(_scale_inv|\.weight_scale_inv|\.weight)?$"
)


def official_name(stored: str) -> str:
    """Official name of a stored tensor; unknown names come back without ``model.`` only."""
    name = stored.removeprefix("model.")
    for ending in SCALE_ENDINGS:
        if name.endswith(ending):
            name = name.removesuffix(ending) + ".scale"
    for foreign, official in TOP_PAIRS:
        if name == foreign:
            return official
    match = BLOCK_NAME.match(name)
    if match is None:
        return name
    block, rest = match.groups()
    if rest.startswith(KV_NORM_QUIRK):
        return f"{block}attn.kv_norm.{rest.removeprefix(KV_NORM_QUIRK)}"
    for foreign, official in PAIRS:
        if rest == foreign or rest.startswith(foreign + "."):
            return block + official + rest.removeprefix(foreign)
    return name


def module_name(official: str) -> str:
    """Module name in ``transformers`` of an official target tensor (experts stay single).

    ``mtp.*`` tensors have no counterpart there and come back unchanged.
    """
    if official == "head.weight":
        return "lm_head.weight"
    for foreign, native in TOP_PAIRS:
        if official == native:
            return f"model.{foreign}"
    match = BLOCK_NAME.match(official)
    if match is None or official.startswith("mtp."):
        return official if official.startswith("mtp.") else f"model.{official}"
    block, rest = match.groups()
    if rest.endswith(".scale"):
        rest = rest.removesuffix(".scale") + ".weight_scale_inv"
    for foreign, native in PAIRS:
        if rest == native or rest.startswith(native + "."):
            return f"model.{block}{foreign}{rest.removeprefix(native)}"
    return f"model.{block}{rest}"


def split_stacked(name: str, entry: Stored) -> dict[str, Stored] | None:
    """Official single-expert tensors of a stacked one, or None if it is not one.

    ``gate_up_proj`` [E, 2I, D] holds w1 in rows 0..I-1 and w3 in the rest; ``down_proj`` [E, D, I] is
    w2. Scale stacks split the same way (I must then be a multiple of 128).
    """
    match = STACKED.match(name)
    if match is None or len(entry.shape) != 3:
        return None
    block, kind, ending = match.groups()
    leaf = "scale" if ending and "scale" in ending else "weight"
    experts, rows, cols = entry.shape
    if kind == "gate_up_proj" and rows % 2:
        return None
    parts = (("w1", 0, rows // 2), ("w3", rows // 2, rows)) if kind == "gate_up_proj" else (("w2", 0, rows),)
    return {
        f"{block}ffn.experts.{e}.{part}.{leaf}": replace(
            entry, shape=(end - start, cols), pick=(e, start, end)
        )
        for e in range(experts)
        for part, start, end in parts
    }


def official_view(stored: Mapping[str, Stored]) -> tuple[dict[str, Stored], list[str]]:
    """(official name -> where it lies, problems) of the tensors of a checkpoint."""
    out: dict[str, Stored] = {}
    problems: list[str] = []
    for name, entry in stored.items():
        plain = name.removeprefix("model.")
        found = split_stacked(plain, entry) or {official_name(name): entry}
        for official, part in found.items():
            if official in out:
                problems.append(
                    f"{entry.file}: tensor '{name}': duplicate of '{out[official].stored_name}' in "
                    f"{out[official].file}, both are '{official}'; expected one"
                )
            else:
                out[official] = part
    return out, problems
