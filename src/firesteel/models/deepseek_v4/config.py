"""Geometry of a DeepSeek-V4 checkpoint, read from its ``config.json``.

The canonical spelling is the flat Hugging Face one that ships beside the
weights; the native ``inference/config.json`` spelling is accepted too.
Nothing here has a default that a checkpoint should state itself: a missing or
``null`` field is an error that names the field.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A config.json that Firesteel cannot serve; the message names the field."""


class LayerKind(Enum):
    """What a layer attends to besides its window of raw keys."""

    WINDOW = "window"  # compress ratio 0
    CSA = "csa"  # ratio 4: overlapping entries, chosen by the indexer
    HCA = "hca"  # larger ratios: every visible entry


@dataclass(frozen=True)
class Yarn:
    """YaRN parameters of the compressed layers' rotary table."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class DSparkConfig:
    """Fields of the drafter stages that live inside the target's checkpoint."""

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    stages: int
    confidence_head: bool = True


@dataclass(frozen=True)
class V4Config:
    """Immutable geometry of one target and, if present, its drafter."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    sliding_window: int
    compress_ratios: tuple[int, ...]  # target layers only; draft stages are always 0
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    max_position_embeddings: int
    rms_norm_eps: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    bos_token_id: int
    eos_token_id: int
    expert_dtype: str = "fp4"
    dspark: DSparkConfig | None = None
    mtp_stages: int = 0  # stages in the file, whatever their kind (plain MTP: 1)

    # ---- derived ---------------------------------------------------------
    def kind(self, layer: int) -> LayerKind:
        """Kind of target layer ``layer``."""
        ratio = self.compress_ratios[layer]
        if ratio == 0:
            return LayerKind.WINDOW
        return LayerKind.CSA if ratio == 4 else LayerKind.HCA

    def is_hash_layer(self, layer: int) -> bool:
        """Whether expert ids of this layer come from the token id table."""
        return layer < self.num_hash_layers

    @property
    def nope_dim(self) -> int:
        """Dims of a K=V row that are not rotated."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def page_size(self) -> int:
        """Tokens per history page: 256, a multiple of every ratio (checked)."""
        return 256

    @classmethod
    def load(cls, path: str | Path) -> V4Config:
        """Read ``config.json`` from a file or a checkpoint folder."""
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise ConfigError(f"{file}: no config.json; point --model at a checkpoint folder")
        try:
            raw = json.loads(file.read_text())
        except (json.JSONDecodeError, UnicodeDecodeError) as err:
            raise ConfigError(f"{file}: not valid JSON ({err})") from err
        if not isinstance(raw, dict):
            raise ConfigError(f"{file}: expected a JSON object, found {type(raw).__name__}")
        return cls.from_dict(raw, where=str(file))

    @classmethod
    def from_dict(cls, raw: dict[str, Any], where: str = "config.json") -> V4Config:
        """Build from the parsed JSON; raises ConfigError naming field and file."""
        from firesteel.models.deepseek_v4.config_parse import parse_config

        return parse_config(raw, where)

    def to_dict(self) -> dict[str, Any]:
        """The flat Hugging Face spelling, as the official folder has it."""
        from firesteel.models.deepseek_v4.config_parse import dump_config

        return dump_config(self)

    def summary(self) -> dict[str, Any]:
        """Plain values for ``--json`` outputs."""
        return asdict(self)


def yarn_bounds(dim: int, theta: float, yarn: Yarn) -> tuple[int, int]:
    """(lo, hi) pair indices of YaRN's ramp for ``dim`` rotary dims."""

    def at(beta: float) -> float:
        span = yarn.original_max_position_embeddings / (beta * 2 * math.pi)
        return dim * math.log(span) / (2 * math.log(theta))

    return max(math.floor(at(yarn.beta_fast)), 0), min(math.ceil(at(yarn.beta_slow)), dim - 1)
