"""What ops take and give: prepared weights, numerics, the context of one pass.

Shapes: R rows, D hidden, d head dim, H heads, hc residual streams, S slots
(the last one is scratch), P pages (page 0 is scratch).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from firesteel.core import RowBatch


@dataclass(frozen=True)
class Numerics:
    """Which rounding the model performs.

    ``official``: activations on the bf16 grid, quantised linears see e4m3
    activations (one power-of-two scale per 128 channels), K=V rows and
    entries are e4m3 in their unrotated dims, the indexer is Hadamard-rotated
    FP4. ``float32``: dequantised weights, no rounding anywhere.
    """

    official: bool

    @property
    def name(self) -> str:
        """The setting's spelling."""
        return "official" if self.official else "float32"


@dataclass(frozen=True)
class Rope:
    """One rotary table as frequencies: ``inv_freq`` float32 [rd/2], on the device."""

    inv_freq: Tensor
    dim: int


@dataclass(frozen=True)
class Linear:
    """A prepared weight [N, K]; ``data`` belongs to the backend that made it.

    ``quantised``: the checkpoint holds FP8 or FP4, so official numerics
    quantise the activations in front of it.
    """

    data: Any
    n: int
    k: int
    quantised: bool


@dataclass(frozen=True)
class Experts:
    """Prepared routed experts: ``w13`` [E, 2I, D] (gate first), ``w2`` [E, D, I]."""

    w13: Any
    w2: Any
    count: int
    inner: int
    quantised: bool


@dataclass(frozen=True)
class Hyper:
    """Coefficient weights of one mHC sublayer: fn [(2+hc)hc, hc*D], base, scale [3]."""

    fn: Linear
    base: Tensor
    scale: Tensor
    iters: int
    eps: float
    rms_eps: float


@dataclass(frozen=True)
class HyperHead:
    """Weights of the final collapse: fn [hc, hc*D], base [hc], scale [1]."""

    fn: Linear
    base: Tensor
    scale: Tensor
    eps: float
    rms_eps: float


@dataclass(frozen=True)
class Norm:
    """An RMS norm: weight float32 [n] (None: unweighted) and its epsilon."""

    weight: Tensor | None
    eps: float


@dataclass(frozen=True)
class Router:
    """Gate [E, D] with either a selection bias [E] or a token id table [V, k]."""

    gate: Linear
    bias: Tensor | None
    table: Tensor | None
    top_k: int
    scale: float


@dataclass(frozen=True)
class DraftStage:
    """Weights of one draft stage: mHC around window attention, then around experts.

    ``span`` rows of the window are seen, ``eps`` belongs to the queries' norm,
    ``limit`` to the experts; the others as in a target layer.
    """

    attn_hyper: Hyper
    attn_norm: Norm
    wq_a: Linear
    q_norm: Norm
    wq_b: Linear
    wkv: Linear
    kv_norm: Norm
    sinks: Tensor
    wo_a: tuple[Linear, ...]
    wo_b: Linear
    ffn_hyper: Hyper
    ffn_norm: Norm
    router: Router
    experts: Experts
    shared: tuple[tuple[Linear, Linear], ...]
    heads: int
    span: int
    eps: float
    limit: float
    table: str


@dataclass(frozen=True)
class ContextWeights:
    """What turns taps into the drafter's context rows.

    ``project`` [D, taps*D] with its ``norm``; per stage its wkv [d, D] and the
    norm of its K=V rows, which the rotary ``table`` turns.
    """

    project: Linear
    norm: Norm
    stages: tuple[tuple[Linear, Norm], ...]
    table: str


@dataclass(frozen=True)
class MarkovHead:
    """The drafter's sequential head: w1 float32 [V, r], w2 [V, r], confidence [1, D+r] or None."""

    w1: Tensor
    w2: Linear
    confidence: Linear | None


@dataclass(frozen=True)
class Proposal:
    """Drafts of G groups, on the device.

    ``tokens`` int64 [G, K]; ``margin`` float32 [G, K] best minus second best of
    the perturbed logits, in units of T (raw at T = 0); ``confidence`` float32
    [G, K] logits of the head, or None; ``logits`` float32 [G, K, V] after
    shaping, only where asked for.
    """

    tokens: Tensor
    margin: Tensor
    confidence: Tensor | None
    logits: Tensor | None


@dataclass(frozen=True)
class Calibration:
    """Logistic model of acceptance: depth float32 [2, K], head and margin float32 [2]; see speculation/survival.py."""

    depth: Tensor
    head: Tensor
    margin: Tensor


@dataclass
class CompressorMemory:
    """State of one compressor.

    ``raw`` float32 [S, ring, 2*width]: (value | gate score) of recent rows,
    ring slot = position mod ring. ``entries`` [P, page/ratio, dim]: finished
    entries by page.
    """

    raw: Tensor
    entries: Tensor


@dataclass(frozen=True)
class Compressor:
    """Weights of one compressor.

    ``project`` [2*width, D]: values then gate scores, width = dim (HCA) or
    2*dim (CSA: A half then B half). ``ape`` float32 [ratio, width].
    """

    project: Linear
    ape: Tensor
    norm: Norm
    ratio: int
    dim: int
    overlap: bool
    rope_dim: int
    index: bool = False  # indexer keys: Hadamard and FP4 in official numerics


@dataclass
class SlotState:
    """Per-slot state on the device; S lines, the last one is scratch.

    int64 [S]: ``cursor`` (position of the anchor: all before it have run),
    ``anchor``, ``alive`` (1 while the request may go on), ``max_len`` (total
    tokens allowed), ``seed_lo, seed_hi, sample`` (noise key), ``top_k``,
    ``stop_from``, ``prompt_len``. float32 [S]: ``temperature``, ``top_p``,
    ``min_p``, ``repetition``, ``presence``, ``frequency``. ``stop_ids`` int64
    [S, n] padded with -1. ``history`` int64 [S, L]: token ids by position, as
    far as they ran. ``drafts`` int64 [S, K], ``draft_len`` int64 [S] how many
    exist, ``draft_cap`` int64 [S] how many the request lets be verified,
    ``passes`` int64 [S] drafting passes so far; ``margin, confidence, survival``
    float32 [S, K]; ``draft_logits`` float32 [S, K, V] under dense rejection.
    ``bias_ids`` int64 [S, nb] padded with -1, ``bias_values`` float32 [S, nb];
    ``allowed`` bool [S, V] or None while no request restricts its tokens;
    ``bad_words`` int64 [S, nw, lw], right-aligned and padded with -1.
    """

    cursor: Tensor
    anchor: Tensor
    alive: Tensor
    max_len: Tensor
    seed_lo: Tensor
    seed_hi: Tensor
    sample: Tensor
    top_k: Tensor
    stop_from: Tensor
    prompt_len: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    stop_ids: Tensor
    history: Tensor
    drafts: Tensor
    draft_len: Tensor
    draft_cap: Tensor
    passes: Tensor
    margin: Tensor
    confidence: Tensor
    survival: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    bad_words: Tensor
    allowed: Tensor | None = None
    draft_logits: Tensor | None = None


@dataclass(frozen=True)
class PromptRows:
    """Prompt rows of a plan, on the device: int64 [R_p] as in RowBatch, and the
    row indices ``sampling`` int64 [F] of the last rows of final chunks."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    first: Tensor
    last: Tensor
    sampling: Tensor


@dataclass
class PassContext:
    """Everything about one pass that all layers share.

    ``page_table`` int64 [S, pages]; ``rotary`` maps a table name to the
    (cos, sin) float32 [R, rd/2] of the rows; ``entry_rotary`` maps a ratio to
    those of the entry a row would close. ``scratch`` keeps what a backend
    wants to compute once per pass.
    """

    rows: RowBatch
    page_table: Tensor
    page_size: int
    rotary: dict[str, tuple[Tensor, Tensor]]
    entry_rotary: dict[int, tuple[Tensor, Tensor]]
    block: int = 0  # rows per group of a drafting pass
    scratch: dict[Any, Any] = field(default_factory=dict)
