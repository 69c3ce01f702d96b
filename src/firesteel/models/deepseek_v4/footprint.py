"""Bytes: what a V4 geometry costs in weights, history, rings and snapshots. All formulas live here.

Memory of a running engine is weights (split by tensor-parallel rules), a fixed ring per slot, and
history that grows with the tokens held. There is one K=V head, so history and rings are the same on
every rank, whatever the tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from firesteel.checkpoint.spec import TensorSpec
from firesteel.models.deepseek_v4.config import ConfigError, LayerKind, V4Config
from firesteel.models.deepseek_v4.layout import check_ranks, expected_tensors, layer_kinds, rank_slices

GIB = 1 << 30
KV_GROUP = 64  # unrotated dims that share one scale byte of a stored K=V row
SCALE_ALIGN = 8  # scale bytes of a row are padded to this
F32 = 4
BF16 = 2


# ---- rows ----------------------------------------------------------------------------------------
def kv_row_bytes(config: V4Config) -> int:
    """One stored K=V row or compressed entry: E4M3 unrotated dims, bf16 rotary dims, scale bytes.

    Official geometry: 448 + 128 + 8 (7 scales, padded) = 584.
    """
    groups = -(-config.nope_dim // KV_GROUP)
    scales = -(-groups // SCALE_ALIGN) * SCALE_ALIGN
    return config.nope_dim + BF16 * config.qk_rope_head_dim + scales


def index_row_bytes(config: V4Config, keys: Literal["fp4", "fp8"] = "fp4") -> int:
    """One indexer key: FP4 with a scale byte per 32 (official: 68), or E4M3 with one float32 scale (132)."""
    dim = config.index_head_dim
    return dim // 2 + -(-dim // 32) if keys == "fp4" else dim + F32


def raw_row_bytes(config: V4Config, kind: LayerKind) -> int:
    """One raw compressor row, value and score in float32; CSA rows are two widths wide (A and B half).

    Official: CSA 8192, HCA 4096.
    """
    halves = {LayerKind.WINDOW: 0, LayerKind.CSA: 2, LayerKind.HCA: 1}[kind]
    return 2 * halves * config.head_dim * F32


def raw_index_row_bytes(config: V4Config) -> int:
    """One raw row of the indexer's compressor (official: 2048)."""
    return 4 * config.index_head_dim * F32


# ---- history -------------------------------------------------------------------------------------
def history_bytes_per_token(config: V4Config, keys: Literal["fp4", "fp8"] = "fp4") -> float:
    """Growth per token of context: entries and indexer keys of all layers.

    Flash: 21 (584 + 68)/4 + 20 (584/128) = 3514 bytes. With 132-byte FP8 keys, as other engines
    store them, it is 3850; Pro 4890 + 141 = 5031, or 5511 with FP8 keys.
    """
    total = 0.0
    for layer in range(config.num_hidden_layers):
        ratio = config.compress_ratios[layer]
        if ratio:
            total += kv_row_bytes(config) / ratio
        if config.kind(layer) is LayerKind.CSA:
            total += index_row_bytes(config, keys) / ratio
    return total


def page_bytes(config: V4Config, keys: Literal["fp4", "fp8"] = "fp4") -> int:
    """One history page over all layers; whole rows, as every ratio divides the page."""
    return round(history_bytes_per_token(config, keys) * config.page_size)


# ---- rings ---------------------------------------------------------------------------------------
def ring_rows(config: V4Config, kind: LayerKind, gamma: int) -> int:
    """Raw compressor rows in a slot's ring.

    CSA pools two windows and keeps three steps of slack: 2 ratio + 3 (gamma+1). HCA keeps one window
    and one step: ratio + gamma + 1; the ratio is the largest one in use.
    """
    if kind is LayerKind.CSA:
        return 8 + 3 * (gamma + 1)
    return max((r for r in config.compress_ratios if r > 4), default=0) + gamma + 1


def kv_ring_rows(config: V4Config, gamma: int) -> int:
    """K=V rows of a layer (context rows of a draft stage) in a slot's ring: window + 3 (gamma+1)."""
    return config.sliding_window + 3 * (gamma + 1)


def ring_bytes(config: V4Config, gamma: int) -> dict[str, int]:
    """Bytes of one slot's rings by kind of state, for at most ``gamma`` drafts a step."""
    kinds = layer_kinds(config)
    stages = config.dspark.stages if config.dspark else 0
    row, rows = kv_row_bytes(config), kv_ring_rows(config, gamma)
    csa, csa_rows = kinds[LayerKind.CSA], ring_rows(config, LayerKind.CSA, gamma)
    hca_rows = sum(ratio + gamma + 1 for ratio in config.compress_ratios if ratio > 4)
    return {
        "window K=V": config.num_hidden_layers * rows * row,
        "draft context": stages * rows * row,
        "CSA raw rows": csa * csa_rows * raw_row_bytes(config, LayerKind.CSA),
        "indexer raw rows": csa * csa_rows * raw_index_row_bytes(config),
        "HCA raw rows": hca_rows * raw_row_bytes(config, LayerKind.HCA),
    }


def slot_bytes(config: V4Config, gamma: int) -> int:
    """Rings of one slot; also what a preemption copies.

    Flash 20.5 MB and Pro 30.5 MB at gamma 5 with CSA rings of 8 + 3 (gamma+1) rows. The often quoted
    18 and 27 MB hold for CSA rings of 8 + gamma + 1 rows, that is without two steps of slack.
    """
    return sum(ring_bytes(config, gamma).values())


def snapshot_bytes(config: V4Config) -> int:
    """What a prefix must store at a page boundary besides its pages.

    The boundary is a multiple of every ratio, so the next query sees window-1 older rows, draft stages
    a whole window, CSA compressors the A halves of their last 4 rows, HCA nothing. Flash 3.84 MB
    (3.87 with a full window per layer), Pro 5.36 MB.
    """
    kinds = layer_kinds(config)
    stages = config.dspark.stages if config.dspark else 0
    rows = config.num_hidden_layers * (config.sliding_window - 1) + stages * config.sliding_window
    half = (raw_row_bytes(config, LayerKind.CSA) + raw_index_row_bytes(config)) // 2
    return rows * kv_row_bytes(config) + kinds[LayerKind.CSA] * 4 * half


# ---- weights -------------------------------------------------------------------------------------
def tensor_bytes(spec: TensorSpec, tp: int, experts: int, *, rank: int = 0) -> int:
    """Bytes of ``spec`` that one rank holds."""
    if tp == 1:
        return spec.nbytes
    slices = rank_slices(spec, rank, tp, experts)
    if slices is None:
        return 0
    held = spec.nbytes
    for part, full in zip(slices, spec.shape, strict=True):
        held = held * (part.stop - part.start) // full
    return held


def weight_bytes(
    config: V4Config,
    tp: int = 1,
    *,
    drafter: bool = True,
    wo_a_bf16: bool = True,
    specs: Iterable[TensorSpec] | None = None,
) -> dict[str, int]:
    """Bytes of weights on one rank by part, in checkpoint formats.

    ``wo_a_bf16``: the official numerics run the grouped output projection in bf16, so it is held at
    twice its stored size. ``specs`` replaces the official formats by those of a real checkpoint.
    Raises ConfigError if ``tp`` does not divide what it must.
    """
    check_ranks(config, tp)
    out: dict[str, int] = {}
    given = specs if specs is not None else expected_tensors(config, drafter=drafter).values()
    for spec in given:
        held = tensor_bytes(spec, tp, config.n_routed_experts)
        if wo_a_bf16 and spec.name.endswith("attn.wo_a.weight") and spec.dtypes[0] == "F8_E4M3":
            held *= BF16
        out[spec.part] = out.get(spec.part, 0) + held
    return out


# ---- plan ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class MemoryPlan:
    """What fits on one GPU of ``tp``. Bytes unless the name says otherwise."""

    gpu_bytes: int
    tp: int
    gamma: int
    max_model_len: int
    weights: dict[str, int]
    reserve: int
    state: int  # left for rings, pages and snapshots; negative if the weights do not fit
    history_per_token: float
    page: int
    slot: dict[str, int]
    snapshot: int

    @property
    def slot_total(self) -> int:
        """Rings of one slot."""
        return sum(self.slot.values())

    @property
    def weights_total(self) -> int:
        """Weights of one rank."""
        return sum(self.weights.values())

    def tokens(self, slots: int) -> int:
        """Tokens of history (whole pages, over all requests) that fit beside ``slots`` rings."""
        left = self.state - slots * self.slot_total
        if left <= 0:
            return 0
        return left // self.page * 256 if self.page else self.max_model_len * slots

    @property
    def full_slots(self) -> int:
        """Requests of max_model_len tokens each that fit at once."""
        pages = -(-self.max_model_len // 256)
        return max(0, self.state // (self.slot_total + pages * self.page))

    @property
    def fits(self) -> bool:
        """Whether at least one full-length request fits."""
        return self.full_slots >= 1


def plan_memory(
    config: V4Config,
    gpu_gib: float,
    tp: int = 1,
    *,
    max_model_len: int | None = None,
    gamma: int | None = None,
    drafter: bool = True,
    utilization: float = 0.95,
    reserve_gib: float = 4.0,
    keys: Literal["fp4", "fp8"] = "fp4",
    wo_a_bf16: bool = True,
    specs: Iterable[TensorSpec] | None = None,
) -> MemoryPlan:
    """Memory plan of one rank with ``gpu_gib`` GiB.

    ``gamma`` is the most drafts a step may verify (default: the trained block size, 0 without drafter).
    ``reserve_gib`` stands for activations, graphs and libraries: an assumption, not a measurement.
    """
    if gpu_gib <= 0 or not 0 < utilization <= 1:
        raise ConfigError(
            f"GPU size must be positive and utilization in (0, 1], found {gpu_gib}, {utilization}"
        )
    use = config.dspark is not None and drafter
    gamma = gamma if gamma is not None else (config.dspark.block_size if config.dspark and use else 0)
    weights = weight_bytes(config, tp, drafter=use, wo_a_bf16=wo_a_bf16, specs=specs)
    total, reserve = int(gpu_gib * GIB), int(reserve_gib * GIB)
    slot = ring_bytes(config, gamma)
    if not use:
        slot["draft context"] = 0
    return MemoryPlan(
        gpu_bytes=total,
        tp=tp,
        gamma=gamma,
        max_model_len=max_model_len or config.max_position_embeddings,
        weights=weights,
        reserve=reserve,
        state=int(total * utilization) - reserve - sum(weights.values()),
        history_per_token=history_bytes_per_token(config, keys),
        page=page_bytes(config, keys),
        slot=slot,
        snapshot=snapshot_bytes(config),
    )
