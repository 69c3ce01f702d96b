"""Reading and writing ``config.json`` of DeepSeek-V4 checkpoints.

Three spellings are read: the flat Hugging Face one beside the official weights,
the native ``inference/config.json`` one, and the converted one that
``transformers`` saves (``layer_types``, ``compress_rates``, ``rope_parameters``).
The first is written (``dump_config``). Every error names file, field, expected and found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from firesteel.models.deepseek_v4.config import ConfigError, DSparkConfig, V4Config, Yarn
from firesteel.models.deepseek_v4.config_dump import (
    ARCHITECTURE,
    BLOCK,
    DSPARK_FIELDS,
    LAYER_TYPES,
    MODEL_TYPE,
    dump_config,
    dump_converted,
)

__all__ = ["Fields", "dump_config", "dump_converted", "parse_config"]

PAGE = 256  # every compress ratio must divide the history page
GROUP = 32  # FP4 weight groups

# native inference/config.json name of each flat field that only differs in name
NATIVE_NAMES: dict[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "head_dim": "head_dim",
    "qk_rope_head_dim": "rope_head_dim",
    "q_lora_rank": "q_lora_rank",
    "o_lora_rank": "o_lora_rank",
    "o_groups": "o_groups",
    "index_n_heads": "index_n_heads",
    "index_head_dim": "index_head_dim",
    "index_topk": "index_topk",
    "sliding_window": "window_size",
    "compress_ratios": "compress_ratios",
    "rope_theta": "rope_theta",
    "compress_rope_theta": "compress_rope_theta",
    "rms_norm_eps": "norm_eps",
    "hc_mult": "hc_mult",
    "hc_sinkhorn_iters": "hc_sinkhorn_iters",
    "hc_eps": "hc_eps",
    "moe_intermediate_size": "moe_inter_dim",
    "n_routed_experts": "n_routed_experts",
    "n_shared_experts": "n_shared_experts",
    "num_experts_per_tok": "n_activated_experts",
    "num_hash_layers": "n_hash_layers",
    "routed_scaling_factor": "route_scale",
    "swiglu_limit": "swiglu_limit",
    "expert_dtype": "expert_dtype",
}

# settings the engine has one implementation of; checked where a config states them
FIXED: dict[str, Any] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "score_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "sample_from_anchor": True,
}


@dataclass(frozen=True)
class Fields:
    """Typed access to one JSON object; every failure is a ConfigError that names the place."""

    raw: dict[str, Any]
    where: str
    names: dict[str, str]  # canonical name -> name in this spelling
    prefix: str = ""

    def label(self, name: str) -> str:
        return self.prefix + self.names.get(name, name)

    def fail(self, name: str, expected: str, found: Any) -> ConfigError:
        return ConfigError(
            f"{self.where}: field '{self.label(name)}': expected {expected}, found {shown(found)}"
        )

    def has(self, name: str) -> bool:
        return self.names.get(name, name) in self.raw

    def get(self, name: str, expected: str) -> Any:
        key = self.names.get(name, name)
        if key not in self.raw:
            raise ConfigError(
                f"{self.where}: field '{self.label(name)}' is missing: expected {expected}; "
                "add it as the official config.json of this model states it"
            )
        if self.raw[key] is None:
            raise self.fail(name, expected, None)
        return self.raw[key]

    def integer(self, name: str, low: int = 1, high: int | None = None) -> int:
        text = f"an integer >= {low}" if high is None else f"an integer in {low}..{high}"
        value = self.get(name, text)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(name, text, value)
        if value < low or (high is not None and value > high):
            raise self.fail(name, text, value)
        return value

    def number(self, name: str, *, zero: bool = False) -> float:
        text = "a finite number >= 0" if zero else "a finite number > 0"
        value = self.get(name, text)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(name, text, value)
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            raise self.fail(name, text, value)
        return float(value)

    def text(self, name: str, allowed: tuple[str, ...]) -> str:
        expected = " or ".join(repr(item) for item in allowed)
        value = self.get(name, expected)
        if not isinstance(value, str) or value not in allowed:
            raise self.fail(name, expected, value)
        return value

    def flag(self, name: str) -> bool:
        value = self.get(name, "true or false")
        if not isinstance(value, bool):
            raise self.fail(name, "true or false", value)
        return value

    def integers(self, name: str, expected: str) -> tuple[int, ...]:
        value = self.get(name, expected)
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise self.fail(name, expected, value)
        return tuple(value)

    def table(self, name: str, names: dict[str, str] | None = None) -> Fields:
        value = self.get(name, "an object")
        if not isinstance(value, dict):
            raise self.fail(name, "an object", value)
        return Fields(value, self.where, names or {}, f"{self.label(name)}.")


def shown(value: Any, limit: int = 120) -> str:
    """A value as JSON users know it, cut to ``limit`` characters."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def parse_config(raw: dict[str, Any], where: str = "config.json") -> V4Config:
    """Geometry from a parsed ``config.json`` in any of the three spellings.

    Raises ConfigError that names ``where``, the field, what was expected and what was found.
    """
    native = "dim" in raw and "hidden_size" not in raw
    fields = Fields(raw, where, NATIVE_NAMES if native else {})
    check_architecture(fields, native)
    check_fixed(fields)
    quantised = check_quantisation(fields, native)
    layers = fields.integer("num_hidden_layers")
    converted = not native and "compress_ratios" not in raw and "layer_types" in raw
    ratios, stages = read_converted_ratios(fields, layers) if converted else read_ratios(fields, layers)
    vocab = fields.integer("vocab_size")
    dspark = read_dspark(fields, layers, vocab, stages, converted)
    thetas, yarn, longest = read_rope(fields, native)
    config = V4Config(
        vocab_size=vocab,
        hidden_size=fields.integer("hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=fields.integer("num_attention_heads"),
        head_dim=fields.integer("head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim", 2),
        q_lora_rank=fields.integer("q_lora_rank"),
        o_lora_rank=fields.integer("o_lora_rank"),
        o_groups=fields.integer("o_groups"),
        index_n_heads=fields.integer("index_n_heads"),
        index_head_dim=fields.integer("index_head_dim"),
        index_topk=fields.integer("index_topk"),
        sliding_window=fields.integer("sliding_window"),
        compress_ratios=ratios,
        rope_theta=thetas[0],
        compress_rope_theta=thetas[1],
        yarn=yarn,
        max_position_embeddings=longest,
        rms_norm_eps=fields.number("rms_norm_eps"),
        hc_mult=fields.integer("hc_mult"),
        hc_sinkhorn_iters=fields.integer("hc_sinkhorn_iters"),
        hc_eps=fields.number("hc_eps"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        n_routed_experts=fields.integer("n_routed_experts"),
        n_shared_experts=fields.integer("n_shared_experts"),
        num_experts_per_tok=fields.integer("num_experts_per_tok"),
        num_hash_layers=read_hash_layers(fields, layers, converted),
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        swiglu_limit=fields.number("swiglu_limit"),
        bos_token_id=read_token(fields, "bos_token_id", vocab, 0 if native else None),
        eos_token_id=read_token(fields, "eos_token_id", vocab, 1 if native else None),
        expert_dtype=read_expert_dtype(fields, quantised),
        dspark=dspark,
        mtp_stages=dspark.stages if dspark else stages,
    )
    check_geometry(config, fields, quantised)
    return config


def check_architecture(fields: Fields, native: bool) -> None:
    """Refuse every model that is not DeepSeek-V4; the native spelling states no architecture."""
    raw = fields.raw
    if native and "model_type" not in raw and "architectures" not in raw:
        return
    if native or "model_type" in raw:
        fields.text("model_type", (MODEL_TYPE,))
    found = fields.get("architectures", f"['{ARCHITECTURE}']")
    if found != [ARCHITECTURE]:
        raise fields.fail("architectures", f"['{ARCHITECTURE}']", found)
    if not native:
        fields.text("model_type", (MODEL_TYPE,))
    if raw.get("vision_n_layers"):
        raise fields.fail("vision_n_layers", "0 or absent (text checkpoints only)", raw["vision_n_layers"])


def check_fixed(fields: Fields) -> None:
    """Settings with one legal value: wrong or null is an error, absent is not."""
    for name, legal in FIXED.items():
        if name in fields.raw and (fields.raw[name] != legal or type(fields.raw[name]) is not type(legal)):
            raise fields.fail(name, shown(legal), fields.raw[name])
    draft_vocab = fields.raw.get("draft_vocab_size")
    if draft_vocab is not None and draft_vocab != fields.raw.get("vocab_size"):
        raise fields.fail("draft_vocab_size", "the vocab_size of the target, or absent", draft_vocab)


def check_quantisation(fields: Fields, native: bool) -> bool:
    """Whether the config promises quantised weights; refuses schemes other than V4's own."""
    if native:
        if fields.has("dtype"):
            return fields.text("dtype", ("fp8", "bf16")) == "fp8"
        return True
    if "quantization_config" not in fields.raw:
        return False
    quant = fields.table("quantization_config")
    if quant.raw.get("moe_quant_algo") is not None:
        raise quant.fail(
            "moe_quant_algo", "absent (official FP4/FP8 experts only)", quant.raw["moe_quant_algo"]
        )
    quant.text("quant_method", ("fp8",))
    if "fmt" in quant.raw:
        quant.text("fmt", ("e4m3",))
    if quant.integers("weight_block_size", str(list(BLOCK))) != BLOCK:
        raise quant.fail("weight_block_size", str(list(BLOCK)), quant.raw["weight_block_size"])
    return True


def read_expert_dtype(fields: Fields, quantised: bool) -> str:
    """``fp4`` or ``fp8``; unquantised checkpoints need not say (tensors decide anyway)."""
    if fields.has("expert_dtype"):
        return fields.text("expert_dtype", ("fp4", "fp8"))
    inner = fields.raw.get("quantization_config")
    if isinstance(inner, dict) and "expert_dtype" in inner:
        return fields.table("quantization_config").text("expert_dtype", ("fp4", "fp8"))
    return fields.text("expert_dtype", ("fp4", "fp8")) if quantised else "fp4"


def check_ratio(fields: Fields, name: str, index: int, ratio: int) -> None:
    legal = ratio in (0, 4) or (ratio >= 8 and PAGE % ratio == 0)
    if not legal:
        raise fields.fail(
            f"{fields.names.get(name, name)}[{index}]", f"0, 4, or a divisor of {PAGE} from 8 up", ratio
        )


def read_ratios(fields: Fields, layers: int) -> tuple[tuple[int, ...], int]:
    """(target ratios, draft stages) of the list form; entries past the target are stages."""
    expected = f"a list of at least {layers} integers (one per layer, then a 0 per draft stage)"
    values = fields.integers("compress_ratios", expected)
    if len(values) < layers:
        raise fields.fail("compress_ratios", expected, f"{len(values)} entries")
    for index, ratio in enumerate(values):
        check_ratio(fields, "compress_ratios", index, ratio)
        if index >= layers and ratio:
            label = f"{fields.names.get('compress_ratios', 'compress_ratios')}[{index}]"
            raise fields.fail(label, f"0 (draft stage {index - layers})", ratio)
    stages = len(values) - layers
    if fields.has("n_mtp_layers"):
        stated = fields.integer("n_mtp_layers", 0)
        if stages and stated != stages:
            raise fields.fail(
                "n_mtp_layers", f"{stages}, as compress_ratios has {len(values)} entries", stated
            )
        stages = stated
    return values[:layers], stages


def read_converted_ratios(fields: Fields, layers: int) -> tuple[tuple[int, ...], int]:
    """The same from ``layer_types`` and ``compress_rates``; that form drops draft stages."""
    expected = f"a list of {layers} names out of {', '.join(LAYER_TYPES)}"
    types = fields.get("layer_types", expected)
    if not isinstance(types, list) or len(types) != layers:
        raise fields.fail("layer_types", expected, types)
    rates = fields.table("compress_rates")
    ratios = []
    for index, kind in enumerate(types):
        if kind not in LAYER_TYPES:
            raise fields.fail(f"layer_types[{index}]", f"one of {', '.join(LAYER_TYPES)}", kind)
        ratio = 0 if kind == LAYER_TYPES[0] else rates.integer(kind)
        check_ratio(rates, kind, index, ratio)
        if (ratio == 4) != (kind == LAYER_TYPES[1]):
            raise rates.fail(kind, "4" if kind == LAYER_TYPES[1] else f"a divisor of {PAGE} from 8 up", ratio)
        ratios.append(ratio)
    return tuple(ratios), fields.integer("n_mtp_layers", 0) if fields.has("n_mtp_layers") else 0


def read_hash_layers(fields: Fields, layers: int, converted: bool) -> int:
    if not converted or fields.has("num_hash_layers"):
        return fields.integer("num_hash_layers", 0, layers)
    expected = f"a list of {layers} names, 'hash_moe' first, then 'moe'"
    types = fields.get("mlp_layer_types", expected)
    if not isinstance(types, list) or len(types) != layers:
        raise fields.fail("mlp_layer_types", expected, types)
    count = sum(kind == "hash_moe" for kind in types)
    if types != ["hash_moe"] * count + ["moe"] * (layers - count):
        raise fields.fail("mlp_layer_types", expected, types)
    return count


def read_dspark(fields: Fields, layers: int, vocab: int, stages: int, converted: bool) -> DSparkConfig | None:
    """The drafter's fields: all or none. ``num_nextn_predict_layers`` is not looked at."""
    present = [name for name in DSPARK_FIELDS if name in fields.raw]
    if not present:
        return None
    missing = [name for name in DSPARK_FIELDS if name not in fields.raw]
    if missing:
        raise ConfigError(
            f"{fields.where}: field '{missing[0]}' is missing: expected all of {', '.join(DSPARK_FIELDS)} "
            f"or none, found only {', '.join(present)}"
        )
    ids = fields.integers("dspark_target_layer_ids", "a list of target layer numbers")
    if not ids or len(set(ids)) != len(ids) or min(ids) < 0 or max(ids) >= layers:
        raise fields.fail("dspark_target_layer_ids", f"distinct layer numbers in 0..{layers - 1}", list(ids))
    config = DSparkConfig(
        block_size=fields.integer("dspark_block_size"),
        noise_token_id=fields.integer("dspark_noise_token_id", 0, vocab - 1),
        target_layer_ids=ids,
        markov_rank=fields.integer("dspark_markov_rank"),
        stages=stages,
        confidence_head=fields.flag("enable_confidence_head")
        if fields.has("enable_confidence_head")
        else True,
    )
    if stages:
        return config
    if converted:  # converted checkpoints keep the fields but have lost the mtp.* tensors
        return None
    name = "compress_ratios"
    raise fields.fail(
        name,
        f"one 0 per draft stage behind the {layers} layers (or n_mtp_layers), as dspark_* fields are set",
        "no draft stage",
    )


def read_token(fields: Fields, name: str, vocab: int, default: int | None) -> int:
    """A token id; the native spelling leaves V4's fixed ids out (``default``)."""
    if default is not None and not fields.has(name):
        return default
    value = fields.raw.get(name)
    if isinstance(value, list) and len(value) == 1:
        return Fields({name: value[0]}, fields.where, {}).integer(name, 0, vocab - 1)
    return fields.integer(name, 0, vocab - 1)


def read_yarn(table: Fields, names: dict[str, str]) -> Yarn:
    inner = Fields(table.raw, table.where, names, table.prefix)
    return Yarn(
        factor=inner.number("factor"),
        original_max_position_embeddings=inner.integer("original_max_position_embeddings"),
        beta_fast=inner.number("beta_fast"),
        beta_slow=inner.number("beta_slow"),
    )


def read_rope(fields: Fields, native: bool) -> tuple[tuple[float, float], Yarn | None, int]:
    """((main theta, compressed theta), YaRN or None, longest position)."""
    if native:
        thetas = fields.number("rope_theta"), fields.number("compress_rope_theta")
        original = fields.integer("original_seq_len", 0)
        names = {"factor": "rope_factor", "original_max_position_embeddings": "original_seq_len"}
        yarn = read_yarn(fields, names) if original else None
        if fields.has("max_position_embeddings") or yarn is None:
            return thetas, yarn, fields.integer("max_position_embeddings")
        return thetas, yarn, int(original * yarn.factor)
    longest = fields.integer("max_position_embeddings")
    if "rope_parameters" in fields.raw and "rope_scaling" not in fields.raw:
        outer = fields.table("rope_parameters")
        main, compress = outer.table("main"), outer.table("compress")
        main.text("rope_type", ("default",))
        kind = compress.text("rope_type", ("default", "yarn"))
        scale = compress.raw.get("attention_factor", 1.0)
        if scale not in (1.0, None):
            raise compress.fail("attention_factor", "1.0 (V4 does not rescale attention)", scale)
        thetas = main.number("rope_theta"), compress.number("rope_theta")
        return thetas, read_yarn(compress, {}) if kind == "yarn" else None, longest
    thetas = fields.number("rope_theta"), fields.number("compress_rope_theta")
    if "rope_scaling" in fields.raw and fields.raw["rope_scaling"] is None:
        return thetas, None, longest  # null is the customary way to say: no YaRN
    scaling = fields.table("rope_scaling")
    scaling.text("rope_type" if "rope_type" in scaling.raw else "type", ("yarn",))
    return thetas, read_yarn(scaling, {}), longest


def check_geometry(config: V4Config, fields: Fields, quantised: bool) -> None:
    """Relations between fields that every kernel relies on."""
    rules = (
        (
            config.num_attention_heads % config.o_groups == 0,
            "o_groups",
            f"a divisor of num_attention_heads {config.num_attention_heads}",
            config.o_groups,
        ),
        (
            config.qk_rope_head_dim % 2 == 0 and config.qk_rope_head_dim < config.head_dim,
            "qk_rope_head_dim",
            f"an even number below head_dim {config.head_dim}",
            config.qk_rope_head_dim,
        ),
        (
            config.qk_rope_head_dim <= config.index_head_dim,
            "index_head_dim",
            f"at least qk_rope_head_dim {config.qk_rope_head_dim}",
            config.index_head_dim,
        ),
        (
            config.num_experts_per_tok <= config.n_routed_experts,
            "num_experts_per_tok",
            f"at most n_routed_experts {config.n_routed_experts}",
            config.num_experts_per_tok,
        ),
    )
    for good, name, expected, found in rules:
        if not good:
            raise fields.fail(name, expected, found)
    if quantised and config.expert_dtype == "fp4":
        for name in ("hidden_size", "moe_intermediate_size"):
            value = getattr(config, name)
            if value % GROUP:
                raise fields.fail(name, f"a multiple of {GROUP} (FP4 groups)", value)
    yarn = config.yarn
    if yarn is not None and yarn.beta_fast <= yarn.beta_slow:
        label = fields.names.get("beta_fast", "beta_fast")
        raise fields.fail(label, f"more than beta_slow {yarn.beta_slow}", yarn.beta_fast)
