"""Random checkpoints of any geometry, for tests and benchmarks.

Magnitudes are chosen so that activations keep unit scale through any depth, logits vary between
tokens, every router, sink, bias and compressor matters, and nothing overflows FP8 or FP4. Each
tensor is a function of (seed, name, shape) alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from firesteel.checkpoint.codecs import QTensor
from firesteel.models.deepseek_v4.config import DSparkConfig, V4Config, Yarn
from firesteel.models.deepseek_v4.layout import (
    TensorSpec,
    Weight,
    weights_and_tensors,
    write_official,
)

LOGIT_STD = 3.0  # spread of the logits of a random target
EMBED_GAIN = 6.0  # how far the token outweighs what the layers add, at full agreement


def tiny_config(**overrides: Any) -> V4Config:
    """A complete small V4 geometry (all layer kinds, hash layer, YaRN, three draft stages).

    ``overrides`` are V4Config fields. ``compress_ratios`` alone also sets the number of layers; the
    drafter's taps move to the last layers unless ``dspark`` is given (None: no drafter).
    """
    fields: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 2,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 8,
        "sliding_window": 16,
        "compress_ratios": (0, 4, 16, 4),
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "yarn": Yarn(factor=16.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0),
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_hash_layers": 1,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "expert_dtype": "fp4",
    }
    fields.update(overrides)
    fields["compress_ratios"] = tuple(fields["compress_ratios"])
    if "num_hidden_layers" not in overrides:
        fields["num_hidden_layers"] = len(fields["compress_ratios"])
    layers = fields["num_hidden_layers"]
    if "dspark" not in overrides:
        taps = tuple(range(max(0, layers - 3), layers))
        fields["dspark"] = DSparkConfig(
            block_size=5, noise_token_id=2, target_layer_ids=taps, markov_rank=32, stages=3
        )
    if "mtp_stages" not in overrides:
        fields["mtp_stages"] = fields["dspark"].stages if fields["dspark"] else 0
    config = V4Config(**fields)
    return V4Config.from_dict(config.to_dict(), where="tiny_config()")


class Source:
    """Random numbers that depend on the seed and a tensor's name only."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))

    def normal(self, name: str, shape: tuple[int, ...], std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator(name)) * std + mean


def hash_table(source: Source, name: str, shape: tuple[int, ...], experts: int) -> torch.Tensor:
    """int64 [V, k]: k distinct expert ids per token id, in random order."""
    score = torch.rand((shape[0], experts), generator=source.generator(name))
    return score.argsort(-1)[:, : shape[1]].contiguous()


def mix_base(config: V4Config, source: Source, spec: TensorSpec) -> torch.Tensor:
    """Base of an mHC mix: moderate pre and post weights, streams that mostly keep to themselves."""
    hc = config.hc_mult
    pre = source.normal(spec.name + "/pre", (hc,), 0.5, -0.5)
    post = source.normal(spec.name + "/post", (hc,), 0.5)
    comb = source.normal(spec.name + "/comb", (hc, hc), 0.7) + 1.5 * torch.eye(hc)
    return torch.cat((pre, post, comb.flatten()))


Rule = Callable[[V4Config, Source, TensorSpec], torch.Tensor]


def scaled(gain: float) -> Rule:
    """Normal with ``gain``/sqrt(inputs)."""
    return lambda _, source, spec: source.normal(spec.name, spec.shape, gain / math.sqrt(spec.shape[-1]))


def plain(std: float, mean: float = 0.0) -> Rule:
    """Normal with this deviation and mean."""
    return lambda _, source, spec: source.normal(spec.name, spec.shape, std, mean)


# first matching name ending decides
RULES: tuple[tuple[str, Rule], ...] = (
    ("norm.weight", plain(0.1, 1.0)),
    ("embed.weight", plain(1.0)),
    ("head.weight", scaled(LOGIT_STD)),
    ("attn_sink", plain(1.0)),
    (".ape", plain(0.5)),
    ("_fn", scaled(1.0)),
    ("hc_head_base", plain(0.5)),
    ("_base", mix_base),
    ("_scale", plain(0.1, 0.3)),
    ("gate.bias", plain(0.1)),
    ("gate.weight", scaled(1.5)),
    ("markov_w1.weight", plain(1.0)),
    ("markov_w2.weight", scaled(1.0)),
    ("confidence_head.proj.weight", scaled(0.5)),
    (".weight", scaled(1.0)),
)


def random_tensor(config: V4Config, source: Source, spec: TensorSpec) -> torch.Tensor:
    """One unquantised tensor in its official dtype."""
    if spec.ids_below is not None:
        return hash_table(source, spec.name, spec.shape, spec.ids_below)
    rule = next(rule for ending, rule in RULES if spec.name.endswith(ending))
    dtype = torch.float32 if spec.dtypes[0] == "F32" else torch.bfloat16
    return rule(config, source, spec).to(dtype)


def token_tensors(config: V4Config, source: Source, agreement: float) -> dict[str, torch.Tensor]:
    """Embedding, head and Markov head that share a bigram, so that drafts are sometimes right.

    With weight ``agreement`` the embedding and the head live in one random subspace of the Markov
    rank, where the Markov head repeats the target's next-token preference of the bare token; with
    the rest they are free. What the layers add is what the drafter cannot know.
    """
    draft, wide, vocab = config.dspark, config.hidden_size, config.vocab_size
    if draft is None or agreement <= 0:
        return {}
    rank = min(draft.markov_rank, wide)
    basis = torch.linalg.qr(source.normal("bigram/basis", (wide, rank))).Q.T * math.sqrt(wide / rank)
    code, read = source.normal("bigram/code", (vocab, rank)), source.normal("bigram/read", (vocab, rank))
    share = math.sqrt(agreement)
    free = math.sqrt(1 - agreement)
    embed = source.normal("embed.weight", (vocab, wide), free) + share * code @ basis
    head = source.normal("head.weight", (vocab, wide), free) + share * read @ basis
    gain = EMBED_GAIN**agreement
    pad = (0, draft.markov_rank - rank)
    last = f"mtp.{draft.stages - 1}."
    markov = agreement * LOGIT_STD * math.sqrt(wide) / rank
    out = {
        "embed.weight": embed * gain,
        "head.weight": head * (LOGIT_STD / math.sqrt(wide)),
        f"{last}markov_head.markov_w1.weight": torch.nn.functional.pad(code, pad),
        f"{last}markov_head.markov_w2.weight": torch.nn.functional.pad(read * markov, pad),
        # the drafter's own opinion shrinks as the bigram takes over
        f"{last}norm.weight": source.normal(f"{last}norm.weight", (wide,), 0.1, 1.0) * free,
    }
    return {name: tensor.to(torch.bfloat16) for name, tensor in out.items()}


def random_tensors(
    config: V4Config,
    seed: int,
    *,
    expert_format: Literal["fp4", "fp8"] = "fp4",
    linear_scales: Literal["e8m0", "f32"] = "e8m0",
    quantised: bool = True,
    dense_dtype: torch.dtype = torch.bfloat16,
    drafter: bool = True,
    confidence_head: bool = True,
    agreement: float = 0.0,
) -> Iterator[tuple[str, QTensor | torch.Tensor]]:
    """(official name, tensor) of a random checkpoint, in the order of the official files."""
    source = Source(seed)
    special = token_tensors(config, source, agreement)
    for item in weights_and_tensors(config, drafter=drafter):
        if isinstance(item, Weight):
            name = f"{item.prefix}.weight"
            value = source.normal(name, (item.rows, item.cols), 1 / math.sqrt(item.cols))
            if not quantised:
                yield name, value.to(dense_dtype)
            elif item.kind == "expert" and expert_format == "fp4":
                yield name, QTensor.fp4(value)
            else:
                yield name, QTensor.fp8(value, linear_scales)
        elif confidence_head or not item.name.endswith("confidence_head.proj.weight"):
            tensor = special.get(item.name)
            yield item.name, random_tensor(config, source, item) if tensor is None else tensor


def write_random(
    path: str | Path,
    config: V4Config,
    seed: int,
    *,
    expert_format: Literal["fp4", "fp8"] = "fp4",
    linear_scales: Literal["e8m0", "f32"] = "e8m0",
    quantised: bool = True,
    dense_dtype: torch.dtype = torch.bfloat16,
    drafter: bool = True,
    confidence_head: bool = True,
    agreement: float = 0.0,
    one_file_per_layer: bool = True,
    extra_files: Sequence[str | Path] = (),
) -> Path:
    """Write a random checkpoint of ``config`` in the official layout and return its folder.

    ``quantised=False`` writes every weight in ``dense_dtype`` and a config.json that says so.
    ``confidence_head=False`` leaves the head's tensor out although the config announces it, as some
    checkpoints do. ``agreement`` in 0..1: how often the drafter is right (0: hardly ever).
    Raises CheckpointError if the folder holds weights already.
    """
    if not 0 <= agreement <= 1:
        raise ValueError(f"agreement must lie in 0..1, found {agreement}")
    config = replace(config, expert_dtype=expert_format)
    if not drafter:
        config = replace(config, dspark=None, mtp_stages=0)
    raw = config.to_dict()
    if not quantised:
        del raw["quantization_config"]
        raw["torch_dtype"] = str(dense_dtype).removeprefix("torch.")
    tensors = random_tensors(
        config,
        seed,
        expert_format=expert_format,
        linear_scales=linear_scales,
        quantised=quantised,
        dense_dtype=dense_dtype,
        drafter=drafter,
        confidence_head=confidence_head,
        agreement=agreement,
    )
    return write_official(
        path,
        config,
        tensors,
        raw_config=raw,
        one_file_per_layer=one_file_per_layer,
        extra_files=extra_files,
    )
