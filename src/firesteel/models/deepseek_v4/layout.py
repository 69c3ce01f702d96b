"""The tensors of a DeepSeek-V4 checkpoint: names, shapes, dtypes, parts and tensor-parallel rules.

Names are the official ones (no ``model.`` prefix; a quantised ``X.weight`` has its scales in
``X.scale``). Number formats are taken from the tensors that are there, per weight, for target and
drafter independently; the config's ``expert_dtype`` only says what is expected of an absent one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from firesteel.checkpoint.codecs import FP4_GROUP, QTensor, block_shape
from firesteel.checkpoint.reader import Checkpoint
from firesteel.checkpoint.spec import Layout, Stored, TensorSpec, TPRule
from firesteel.checkpoint.writer import write_checkpoint
from firesteel.models.deepseek_v4.config import ConfigError, LayerKind, V4Config
from firesteel.models.deepseek_v4.names import official_view

__all__ = [
    "TensorSpec",
    "Weight",
    "check_ranks",
    "expected_tensors",
    "fit_layout",
    "layer_kinds",
    "open_checkpoint",
    "rank_slices",
    "shard_count",
    "shard_of",
    "weight_specs",
    "weights_and_tensors",
    "write_official",
]

DENSE = ("BF16", "F32")
FLOAT = ("F32", "BF16")
FP4_BYTES = ("I8", "U8")
E8M0 = ("F8_E8M0", "U8")  # some tools keep the scale bytes under an integer name
LINEAR_SCALES = ("F8_E8M0", "F32", "U8")


@dataclass(frozen=True)
class Weight:
    """A matrix that may be stored quantised: ``prefix.weight`` [rows, cols] and ``prefix.scale``."""

    prefix: str
    rows: int
    cols: int
    kind: Literal["linear", "expert"]
    part: str
    tp: TPRule = "replicated"


Item = Weight | TensorSpec


def weight_specs(weight: Weight, fmt: str, scales: tuple[str, ...] = LINEAR_SCALES) -> list[TensorSpec]:
    """The one or two tensors of ``weight`` stored as ``fp4``, ``fp8`` or ``dense``."""
    name, rows, cols = f"{weight.prefix}.weight", weight.rows, weight.cols
    if fmt == "dense":
        return [TensorSpec(name, (rows, cols), DENSE, weight.part, weight.tp)]
    if fmt == "fp4":
        data = TensorSpec(name, (rows, cols // 2), FP4_BYTES, weight.part, weight.tp)
        grid, scales = (rows, cols // FP4_GROUP), E8M0
    else:
        data = TensorSpec(name, (rows, cols), ("F8_E4M3",), weight.part, weight.tp)
        grid = block_shape(rows, cols)
    return [data, TensorSpec(f"{weight.prefix}.scale", grid, scales, weight.part, weight.tp)]


def hyper_items(config: V4Config, prefix: str, part: str) -> Iterator[Item]:
    """mHC mixing coefficients of both sublayers of one block."""
    hc, width = config.hc_mult, config.hc_mult * config.hidden_size
    mix = (2 + hc) * hc
    for side in ("attn", "ffn"):
        yield TensorSpec(f"{prefix}hc_{side}_fn", (mix, width), FLOAT, part)
        yield TensorSpec(f"{prefix}hc_{side}_base", (mix,), FLOAT, part)
        yield TensorSpec(f"{prefix}hc_{side}_scale", (3,), FLOAT, part)


def hyper_head_items(config: V4Config, prefix: str, part: str) -> Iterator[Item]:
    """The final collapse of the streams."""
    hc = config.hc_mult
    yield TensorSpec(f"{prefix}hc_head_fn", (hc, hc * config.hidden_size), FLOAT, part)
    yield TensorSpec(f"{prefix}hc_head_base", (hc,), FLOAT, part)
    yield TensorSpec(f"{prefix}hc_head_scale", (1,), FLOAT, part)


def compressor_items(config: V4Config, prefix: str, width: int, ratio: int, part: str) -> Iterator[Item]:
    """One compressor: ratio 4 overlaps windows and is two widths wide."""
    wide = (2 if ratio == 4 else 1) * width
    yield TensorSpec(f"{prefix}wkv.weight", (wide, config.hidden_size), DENSE, part)
    yield TensorSpec(f"{prefix}wgate.weight", (wide, config.hidden_size), DENSE, part)
    yield TensorSpec(f"{prefix}norm.weight", (width,), DENSE, part)
    yield TensorSpec(f"{prefix}ape", (ratio, wide), FLOAT, part)


def attention_items(config: V4Config, prefix: str, ratio: int, mark: str) -> Iterator[Item]:
    """Attention of one block; ``ratio`` 0 has no compressor, only ratio 4 has an indexer."""
    c, p = config, f"{prefix}attn."
    heads, part = c.num_attention_heads, f"{mark}attention"
    yield Weight(f"{p}wq_a", c.q_lora_rank, c.hidden_size, "linear", part)
    yield TensorSpec(f"{p}q_norm.weight", (c.q_lora_rank,), DENSE, f"{mark}norm")
    yield Weight(f"{p}wq_b", heads * c.head_dim, c.q_lora_rank, "linear", part, "dim0")
    yield Weight(f"{p}wkv", c.head_dim, c.hidden_size, "linear", part)
    yield TensorSpec(f"{p}kv_norm.weight", (c.head_dim,), DENSE, f"{mark}norm")
    yield TensorSpec(f"{p}attn_sink", (heads,), FLOAT, part, "dim0")
    wide = c.o_groups * c.o_lora_rank
    yield Weight(f"{p}wo_a", wide, heads * c.head_dim // c.o_groups, "linear", part, "dim0")
    yield Weight(f"{p}wo_b", c.hidden_size, wide, "linear", part, "dim1")
    if ratio:
        yield from compressor_items(c, f"{p}compressor.", c.head_dim, ratio, f"{mark}compressor")
    if ratio == 4:
        i, part = f"{p}indexer.", f"{mark}indexer"
        yield Weight(f"{i}wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank, "linear", part, "dim0")
        yield TensorSpec(f"{i}weights_proj.weight", (c.index_n_heads, c.hidden_size), DENSE, part, "dim0")
        yield from compressor_items(c, f"{i}compressor.", c.index_head_dim, ratio, part)


def ffn_items(config: V4Config, prefix: str, hashed: bool, mark: str) -> Iterator[Item]:
    """Router, routed experts and the shared expert of one block."""
    c, p = config, f"{prefix}ffn."
    experts, wide, inner = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size
    yield TensorSpec(f"{p}gate.weight", (experts, wide), DENSE, f"{mark}router")
    if hashed:
        table = (c.vocab_size, c.num_experts_per_tok)
        yield TensorSpec(f"{p}gate.tid2eid", table, ("I64", "I32"), f"{mark}router", ids_below=experts)
    else:
        yield TensorSpec(f"{p}gate.bias", (experts,), FLOAT, f"{mark}router")
    for e in range(experts):
        q, part = f"{p}experts.{e}.", f"{mark}experts"
        yield Weight(f"{q}w1", inner, wide, "expert", part, "expert")
        yield Weight(f"{q}w3", inner, wide, "expert", part, "expert")
        yield Weight(f"{q}w2", wide, inner, "expert", part, "expert")
    for name, rows, cols in (("w1", inner, wide), ("w3", inner, wide), ("w2", wide, inner)):
        yield Weight(f"{p}shared_experts.{name}", rows, cols, "linear", f"{mark}shared")


def block_items(config: V4Config, prefix: str, ratio: int, hashed: bool, mark: str = "") -> Iterator[Item]:
    """One decoder block, of the target (``mark`` empty) or of the drafter."""
    for norm in ("attn_norm", "ffn_norm"):
        yield TensorSpec(f"{prefix}{norm}.weight", (config.hidden_size,), DENSE, f"{mark}norm")
    yield from attention_items(config, prefix, ratio, mark)
    yield from hyper_items(config, prefix, f"{mark}hyper")
    yield from ffn_items(config, prefix, hashed, mark)


def drafter_items(config: V4Config) -> Iterator[Item]:
    """The DSpark stages ``mtp.*``; embedding and head are the target's."""
    draft = config.dspark
    if draft is None:
        return
    wide, rank, vocab = config.hidden_size, draft.markov_rank, config.vocab_size
    for stage in range(draft.stages):
        p = f"mtp.{stage}."
        yield from block_items(config, p, 0, False, "drafter.")
        if stage == 0:
            yield Weight(f"{p}main_proj", wide, len(draft.target_layer_ids) * wide, "linear", "drafter.main")
            yield TensorSpec(f"{p}main_norm.weight", (wide,), DENSE, "drafter.norm")
        if stage == draft.stages - 1:
            yield TensorSpec(f"{p}norm.weight", (wide,), DENSE, "drafter.norm")
            yield from hyper_head_items(config, p, "drafter.hyper")
            for name in ("markov_w1", "markov_w2"):
                yield TensorSpec(
                    f"{p}markov_head.{name}.weight", (vocab, rank), DENSE, "drafter.markov", "dim0"
                )
            if draft.confidence_head:
                yield TensorSpec(confidence_name(config), (1, wide + rank), DENSE, "drafter.confidence")


def confidence_name(config: V4Config) -> str:
    """Name of the confidence head's only tensor."""
    assert config.dspark is not None
    return f"mtp.{config.dspark.stages - 1}.confidence_head.proj.weight"


def weights_and_tensors(config: V4Config, *, drafter: bool = True) -> Iterator[Item]:
    """Everything in the order of the official files, before number formats are known."""
    c = config
    yield TensorSpec("embed.weight", (c.vocab_size, c.hidden_size), DENSE, "embed", "dim0")
    for layer in range(c.num_hidden_layers):
        yield from block_items(c, f"layers.{layer}.", c.compress_ratios[layer], c.is_hash_layer(layer))
    yield TensorSpec("norm.weight", (c.hidden_size,), DENSE, "norm")
    yield TensorSpec("head.weight", (c.vocab_size, c.hidden_size), DENSE, "head", "dim0")
    yield from hyper_head_items(c, "", "hyper")
    if drafter:
        yield from drafter_items(c)


def expected_tensors(
    config: V4Config,
    *,
    drafter: bool = True,
    expert_format: str | None = None,
    linear_format: str = "fp8",
    linear_scales: tuple[str, ...] = LINEAR_SCALES,
) -> dict[str, TensorSpec]:
    """Name to spec of every tensor a checkpoint of ``config`` holds, in the official formats.

    ``expert_format`` None takes the config's ``expert_dtype``; ``dense`` describes unquantised files.
    """
    experts = expert_format or config.expert_dtype
    out: dict[str, TensorSpec] = {}
    for item in weights_and_tensors(config, drafter=drafter):
        if isinstance(item, TensorSpec):
            out[item.name] = item
            continue
        fmt = experts if item.kind == "expert" else linear_format
        for spec in weight_specs(item, fmt, linear_scales):
            out[spec.name] = spec
    return out


def found_format(weight: Weight, entry: Stored | None, default: str) -> str:
    """Number format of a weight, read off the tensor that is there."""
    if entry is None:
        return default
    if entry.dtype in FP4_BYTES and weight.kind == "expert":
        return "fp4"
    if entry.dtype == "F8_E4M3":
        return "fp8"
    return "dense" if entry.dtype in DENSE else default


def fit_layout(config: V4Config, found: Mapping[str, Stored], *, drafter: bool = True) -> Layout:
    """The layout of a checkpoint that holds ``found`` (official names), formats as they are there.

    A missing confidence head is noted, not an error. ``mtp.*`` tensors that are not used (plain
    MTP, or ``drafter=False``) are listed as ignored, each with a reason.
    """
    layout = Layout({}, drafter=drafter and config.dspark is not None)
    stages = [name for name in found if name.startswith("mtp.")]
    if layout.drafter and not stages:
        layout.problems.append(
            "no 'mtp.*' tensor: expected the DSpark stages that config.json announces (dspark_* fields); "
            "serve without the drafter or remove these fields"
        )
        layout.drafter = False
    for item in weights_and_tensors(config, drafter=layout.drafter):
        if isinstance(item, TensorSpec):
            layout.specs[item.name] = item
            continue
        default = config.expert_dtype if item.kind == "expert" else "fp8"
        fmt = found_format(item, found.get(f"{item.prefix}.weight"), default)
        layout.formats[item.prefix] = fmt
        for spec in weight_specs(item, fmt):
            layout.specs[spec.name] = spec
    note_head(config, found, layout)
    if not layout.drafter:
        reason = ignore_reason(config, found, drafter)
        layout.ignored.update((name, reason) for name in stages)
    elif config.dspark is not None and not config.dspark.confidence_head and confidence_name(config) in found:
        layout.ignored[confidence_name(config)] = "config.json switches the confidence head off"
    layout.problems += mixed_experts(layout.formats)
    return layout


def note_head(config: V4Config, found: Mapping[str, Stored], layout: Layout) -> None:
    """Settle whether there is a confidence head; absence is a note that names the tensor."""
    if not layout.drafter:
        return
    name = confidence_name(config)
    layout.confidence_head = name in layout.specs and name in found
    if name in layout.specs and name not in found:
        del layout.specs[name]
        layout.notes.append(f"no confidence head ('{name}' is absent): survival is estimated without it")


def ignore_reason(config: V4Config, found: Mapping[str, Stored], drafter: bool) -> str:
    """Why the ``mtp.*`` tensors of this checkpoint are left alone."""
    if config.dspark is not None:
        return "draft stages were not asked for" if not drafter else "draft stages are incomplete"
    if "mtp.0.main_proj.weight" in found:
        return "DSpark stage, but config.json has no dspark_* fields"
    return "plain MTP stage, not DSpark: Firesteel drafts with DSpark only"


def mixed_experts(formats: Mapping[str, str]) -> list[str]:
    """Blocks whose routed experts are not all in one format; kernels need one per block."""
    blocks: dict[str, dict[str, str]] = {}
    for prefix, fmt in formats.items():
        block, mark, _ = prefix.partition(".ffn.experts.")
        if mark:
            blocks.setdefault(block, {}).setdefault(fmt, prefix)
    return [
        f"tensors '{block}.ffn.experts.*': expected one number format, found "
        + ", ".join(f"{fmt} ('{prefix}')" for fmt, prefix in seen.items())
        for block, seen in blocks.items()
        if len(seen) > 1
    ]


# ---- files and ranks -----------------------------------------------------------------------------
def shard_count(config: V4Config, *, drafter: bool = True) -> int:
    """Files of the official folder: embedding, one per layer, closing tensors, one per stage."""
    return config.num_hidden_layers + 2 + (config.dspark.stages if drafter and config.dspark else 0)


def shard_of(config: V4Config, name: str) -> int:
    """0-based official file of a tensor."""
    head, _, rest = name.partition(".")
    if head == "embed":
        return 0
    if head == "layers":
        return 1 + int(rest.split(".", 1)[0])
    if head == "mtp":
        return config.num_hidden_layers + 2 + int(rest.split(".", 1)[0])
    return config.num_hidden_layers + 1


def check_ranks(config: V4Config, size: int) -> None:
    """Raise ConfigError unless ``size`` ranks can share this model: it divides heads, groups, experts.

    Output groups bound it: the rows of one group need all heads of that group on one rank.
    """
    if size < 1:
        raise ConfigError(f"tensor-parallel size must be at least 1, found {size}")
    for name in ("o_groups", "num_attention_heads", "index_n_heads", "n_routed_experts", "vocab_size"):
        value = getattr(config, name)
        if value % size:
            raise ConfigError(f"tensor-parallel size {size} does not divide {name} {value}; choose a divisor")


def rank_slices(spec: TensorSpec, rank: int, size: int, experts: int) -> tuple[slice, ...] | None:
    """What rank ``rank`` of ``size`` reads of a tensor: slices per dim, or None for another rank's expert.

    Raises ConfigError if the tensor, or its scale grid, does not split evenly.
    """
    whole = tuple(slice(0, n) for n in spec.shape)
    if size == 1 or spec.tp == "replicated":
        return whole
    if spec.tp == "expert":
        if experts % size:
            raise ConfigError(
                f"tensor-parallel size {size} does not divide {experts} experts; choose a divisor"
            )
        index = int(spec.name.split(".experts.")[1].split(".")[0])
        return whole if index // (experts // size) == rank else None
    dim = 0 if spec.tp == "dim0" else 1
    if spec.shape[dim] % size:
        raise ConfigError(
            f"tensor '{spec.name}' {list(spec.shape)} does not split over {size} ranks along dim {dim}; "
            "choose a smaller tensor-parallel size"
        )
    step = spec.shape[dim] // size
    return tuple(slice(rank * step, (rank + 1) * step) if i == dim else s for i, s in enumerate(whole))


def layer_kinds(config: V4Config) -> dict[LayerKind, int]:
    """How many target layers there are of every kind."""
    kinds = [config.kind(layer) for layer in range(config.num_hidden_layers)]
    return {kind: kinds.count(kind) for kind in LayerKind}


# ---- folders -------------------------------------------------------------------------------------
def open_checkpoint(
    path: str | Path, config: V4Config | None = None, *, drafter: bool = True, check_values: bool = True
) -> Checkpoint:
    """Open and check a checkpoint folder in any spelling; no data is read.

    The result's ``layout`` says which formats, drafter and heads it has. Raises ConfigError or
    CheckpointError (file, tensor, expected, found).
    """
    config = config or V4Config.load(path)
    checkpoint = Checkpoint.open(path, official_view, check_values=check_values)
    return checkpoint.check(fit_layout(config, checkpoint.tensors, drafter=drafter))


def write_official(
    path: str | Path,
    config: V4Config,
    tensors: Iterable[tuple[str, QTensor | torch.Tensor]],
    *,
    raw_config: dict[str, Any] | None = None,
    one_file_per_layer: bool = True,
    shard_bytes: int | None = None,
    extra_files: Sequence[str | Path] = (),
) -> Path:
    """Write ``tensors`` (official names, in the order of ``expected_tensors``) and check the result.

    ``raw_config`` replaces the config.json made from ``config`` (such as one without quantisation).
    """
    folder = write_checkpoint(
        path,
        raw_config or config.to_dict(),
        tensors,
        shard_of=(lambda name: shard_of(config, name)) if one_file_per_layer else None,
        shard_bytes=shard_bytes,
        extra_files=extra_files,
    )
    open_checkpoint(folder).close()
    return folder
