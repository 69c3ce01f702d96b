"""``firesteel bench floors``: the least time a step can take.

What must be read and computed, over what the machine can do.

A verify step of R rows (S of them sampling) for n requests at C tokens of context:

    weights     every matrix of every layer once, in its checkpoint format (wo_a in bf16, as official numerics
                run it); of the routed experts only the distinct ones that its rows hit
    experts     measured, or expected for independent uniform choices: E (1 - (1 - k/E)^R) per layer
    matrices    2 R N K operations each; routed experts 2 R k 3 D I; the LM head 2 S V D
    attention   reads min(C, window) K=V rows and the visible entries of each request once, however many of its
                rows look at them: CSA min(top_k, C/4), HCA C/128, and C/4 indexer keys per CSA layer;
                4 H d operations per row and key, 2 H_i d_i per row and indexer key
    states      K=V, raw compressor and draft context rows are written once

A drafting pass of K drafts for n requests reads the stages, n windows, the LM head and the Markov matrix once,
and writes and reads the base logits once in float32. Activations between ops are left out: they can stay on chip.

    firesteel bench floors --model flash-8L --contexts 1024,65536

    step   max(sum of bytes / bandwidth, sum of operations / their rates)      no order of ops can beat it
    serial sum over ops of max(bytes / bandwidth, operations / rate)           ops one after the other
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from firesteel.checkpoint.spec import TensorSpec
from firesteel.config import ParameterError
from firesteel.models.deepseek_v4.config import LayerKind, V4Config
from firesteel.models.deepseek_v4.footprint import (
    index_row_bytes,
    kv_row_bytes,
    raw_index_row_bytes,
    raw_row_bytes,
)
from firesteel.models.deepseek_v4.layout import (
    Item,
    Weight,
    block_items,
    drafter_items,
    hyper_head_items,
    weight_specs,
)

KINDS = ("bf16", "fp8", "fp4")  # instruction classes; FP4 weights may be computed at another class's rate


@dataclass(frozen=True)
class Rates:
    """What a machine was measured to do: bytes read per second, operations per second by class."""

    read: float
    flop: Mapping[str, float]
    source: str

    def __post_init__(self) -> None:
        missing = [k for k in KINDS if k not in self.flop]
        if missing or not all(v > 0 for v in (self.read, *self.flop.values())):
            raise ParameterError(
                f"rates: {missing or 'all'} must be given and positive; measure them on this machine"
            )

    def ms(self, work: Work) -> float:
        """Floor of one op in milliseconds."""
        return 1e3 * max(work.bytes / self.read, work.flop / self.flop[work.kind])

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"read_bytes_per_s": self.read, "flop_per_s": dict(self.flop), "source": self.source}


# seen on an H200 with the best of many plain kernels (read-only stream; cuBLASLt and torch._scaled_mm)
H200 = Rates(4.41e12, {"bf16": 774e12, "fp8": 1432e12, "fp4": 1432e12}, "H200, figures of the repository")


@dataclass(frozen=True)
class Work:
    """What one op of one layer must read or write (bytes), compute (operations) and with which class."""

    layer: str
    op: str
    bytes: float
    flop: float
    kind: str = "bf16"


@dataclass(frozen=True)
class Load:
    """What a step runs. ``experts``: distinct routed experts hit per layer (None: expected for uniform choices)."""

    rows: int
    requests: int
    context: int
    sampling: int | None = None  # rows that go through the head; None: all
    experts: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.rows < 1 or self.requests < 1 or self.context < 0:
            raise ParameterError(f"load: rows, requests >= 1 and context >= 0 expected, found {self}")


@dataclass(frozen=True)
class Floor:
    """Least milliseconds of some ops together."""

    step_ms: float
    serial_ms: float
    bytes: float
    flop: float
    by_op: dict[str, float]  # serial milliseconds by op, all layers together

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "step_ms": self.step_ms,
            "serial_ms": self.serial_ms,
            "bytes": self.bytes,
            "flop": self.flop,
            "by_op_ms": self.by_op,
        }


def floor(work: Iterable[Work], rates: Rates) -> Floor:
    """The floor of a list of ops."""
    ops = list(work)
    size, flop = sum(w.bytes for w in ops), sum(w.flop for w in ops)
    by_op: dict[str, float] = {}
    for w in ops:
        by_op[w.op] = by_op.get(w.op, 0.0) + rates.ms(w)
    computing = sum(w.flop / rates.flop[w.kind] for w in ops)
    return Floor(1e3 * max(size / rates.read, computing), sum(by_op.values()), size, flop, by_op)


def expected_experts(experts: int, chosen: int, rows: int) -> float:
    """Distinct experts that ``rows`` independent uniform choices of ``chosen`` of ``experts`` hit."""
    return experts * (1.0 - (1.0 - chosen / experts) ** rows)


# ---- ops ---------------------------------------------------------------------------
def _matrix(item: Item, experts: str) -> tuple[float, int, str]:
    """(bytes, rows x columns, class) of a matrix as it is held."""
    if isinstance(item, TensorSpec):
        return item.nbytes, item.shape[0] * item.shape[1], "bf16"
    fmt = experts if item.kind == "expert" else "fp8"
    size = sum(s.nbytes for s in weight_specs(item, fmt))
    if item.prefix.endswith("attn.wo_a"):
        return 2 * item.rows * item.cols, item.rows * item.cols, "bf16"
    return size, item.rows * item.cols, {"dense": "bf16"}.get(fmt, fmt)


def _is_matrix(item: Item) -> bool:
    """Whether rows are multiplied with it (tables, biases, norms and ape are not)."""
    if isinstance(item, Weight):
        return True
    return len(item.shape) == 2 and not item.name.endswith((".ape", ".tid2eid"))


def _name(item: Item, prefix: str) -> str:
    """``attn.wq_a``, ``experts``, ``shared``, ``hyper``: ops in a reader's words."""
    name = item.prefix if isinstance(item, Weight) else item.name.removesuffix(".weight")
    name = name.removeprefix(prefix)
    if name.startswith("ffn.shared_experts"):
        return "shared expert"
    if name.startswith("hc_"):
        return "hyper"
    if "compressor" in name:
        return "compressor"
    return {"ffn.gate": "router"}.get(name, name.removeprefix("attn."))


def block_work(
    config: V4Config, prefix: str, ratio: int, hashed: bool, rows: int, hit: float, only: str = ""
) -> list[Work]:
    """All matrices of one block for ``rows`` rows, ``hit`` distinct routed experts; ``only``: one op."""
    out, experts, per_expert = [], config.expert_dtype, 0.0
    for item in block_items(config, prefix, ratio, hashed):
        if not _is_matrix(item):
            continue
        size, cells, kind = _matrix(item, experts)
        if isinstance(item, Weight) and item.kind == "expert":
            per_expert += size
            continue
        out.append(Work(prefix, _name(item, prefix), size, 2.0 * rows * cells, kind))
    per_expert /= config.n_routed_experts
    flop = 2.0 * rows * config.num_experts_per_tok * 3 * config.hidden_size * config.moe_intermediate_size
    out.append(Work(prefix, "experts", hit * per_expert, flop, experts if experts in KINDS else "bf16"))
    return [w for w in out if not only or w.op == only]


def attention_work(config: V4Config, layer: int, load: Load) -> list[Work]:
    """What one target layer's attention reads, computes and stores besides its matrices."""
    c, prefix, kind = config, f"layers.{layer}.", config.kind(layer)
    row, ratio = kv_row_bytes(c), c.compress_ratios[layer]
    entries = load.context // ratio if ratio else 0
    seen = min(entries, c.index_topk) if kind is LayerKind.CSA else entries
    keys = min(load.context, c.sliding_window) + seen
    stored = row + raw_row_bytes(c, kind)
    out = [
        Work(
            prefix,
            "attention",
            load.requests * keys * row + load.rows * stored,
            4.0 * load.rows * c.num_attention_heads * c.head_dim * keys,
        )
    ]
    if kind is LayerKind.CSA:
        read = load.requests * entries * index_row_bytes(c) + load.rows * raw_index_row_bytes(c)
        flop = 2.0 * load.rows * c.index_n_heads * c.index_head_dim * entries
        out.append(Work(prefix, "indexer scores", read, flop, "fp8"))
    return out


def head_work(config: V4Config, rows: int, prefix: str = "") -> list[Work]:
    """Collapse and LM head of ``rows`` sampling rows; logits are not written."""
    cells = config.vocab_size * config.hidden_size
    collapse = next(i for i in hyper_head_items(config, prefix, "") if _is_matrix(i))
    size, mix, _ = _matrix(collapse, config.expert_dtype)
    return [
        Work(prefix or "head", "hyper", size, 2.0 * rows * mix),
        Work(prefix or "head", "LM head", 2.0 * cells, 2.0 * rows * cells),
    ]


def verify_work(config: V4Config, load: Load, drafter: bool = True) -> list[Work]:
    """Every op of a verify step; ``drafter``: it also writes context rows for the drafter."""
    c = config
    out = [Work("embed", "embed", 2.0 * load.rows * c.hidden_size, 0.0)]
    for i, ratio in enumerate(c.compress_ratios):
        hit = expected_experts(c.n_routed_experts, c.num_experts_per_tok, load.rows)
        if load.experts is not None:
            hit = float(load.experts[i])
        out += block_work(c, f"layers.{i}.", ratio, c.is_hash_layer(i), load.rows, hit)
        out += attention_work(c, i, load)
    out += head_work(c, load.rows if load.sampling is None else load.sampling)
    if drafter and c.dspark is not None:
        out += context_work(c, load.rows)
    return out


def context_work(config: V4Config, rows: int) -> list[Work]:
    """The drafter's share of a verify step: one context row per row and stage."""
    assert config.dspark is not None, "asked for with a drafter only"
    main = next(i for i in drafter_items(config) if isinstance(i, Weight) and i.prefix.endswith("main_proj"))
    size, cells, kind = _matrix(main, config.expert_dtype)
    out = [Work("mtp.0.", "draft context", size, 2.0 * rows * cells, kind)]
    for stage in range(config.dspark.stages):
        (wkv,) = block_work(config, f"mtp.{stage}.", 0, False, rows, 0.0, "wkv")
        stored = rows * kv_row_bytes(config)
        out.append(Work(wkv.layer, "draft context", wkv.bytes + stored, wkv.flop, wkv.kind))
    return out


def draft_work(
    config: V4Config, requests: int, width: int, context: int, experts: Sequence[float] | None = None
) -> list[Work]:
    """Every op of one drafting pass: ``width`` drafts for ``requests`` requests.

    ``experts``: distinct routed experts hit per stage. Raises ParameterError without a drafter.
    """
    c, draft = config, config.dspark
    if draft is None:
        raise ParameterError("draft floor: this geometry has no drafter; use one with dspark fields")
    rows = requests * width
    keys = min(context, c.sliding_window)
    out = [Work("embed", "embed", 2.0 * rows * c.hidden_size, 0.0)]
    for stage in range(draft.stages):
        prefix = f"mtp.{stage}."
        hit = expected_experts(c.n_routed_experts, c.num_experts_per_tok, rows)
        if experts is not None:
            hit = float(experts[stage])
        out += block_work(c, prefix, 0, False, rows, hit)
        flop = 4.0 * rows * c.num_attention_heads * c.head_dim * (keys + width)
        out.append(Work(prefix, "attention", requests * keys * kv_row_bytes(c), flop))
    out += head_work(c, rows, f"mtp.{draft.stages - 1}.")
    table = 2.0 * c.vocab_size * draft.markov_rank
    walk = 2.0 * rows * c.vocab_size * draft.markov_rank
    out.append(Work("walk", "base logits", 2 * 4.0 * rows * c.vocab_size, 0.0))
    out.append(Work("walk", "Markov walk", table + 2.0 * rows * draft.markov_rank, walk))
    return out


# ---- command -------------------------------------------------------------------------
def table(config: V4Config, context: int, rows: Sequence[int], gamma: int, rates: Rates) -> Table:
    """Floors of verify steps with half-wide groups, the step's and by op."""
    out = Table(title=f"least ms at context {context}: {rates.source}", title_justify="left")
    floors = [
        floor(verify_work(config, Load(r, max(1, round(2 * r / (2 + gamma))), context)), rates) for r in rows
    ]
    ops = sorted(floors[-1].by_op, key=lambda op: -floors[-1].by_op[op])[:9]
    for column in ("rows", "step", "serial", *ops):
        out.add_column(column, justify="right")
    for r, f in zip(rows, floors, strict=True):
        out.add_row(str(r), f"{f.step_ms:.3f}", f"{f.serial_ms:.3f}", *(f"{f.by_op[op]:.3f}" for op in ops))
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 2 on a user's error."""
    from firesteel.bench.cli import integers
    from firesteel.bench.geometry import GEOMETRIES, geometry
    from firesteel.errors import user_errors

    p = argparse.ArgumentParser(prog="firesteel bench floors", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--model", default="flash-8L", help=f"checkpoint folder, or {', '.join(GEOMETRIES)}")
    p.add_argument("--contexts", default="1024")
    p.add_argument("--rows", default="1,8,32,64,128,256,512,1024,2048")
    p.add_argument("--requests", default="1,16,64,256", help="of a drafting pass")
    p.add_argument("--k", type=int, default=7, help="drafts per request")
    p.add_argument("--read-tb", type=float, default=H200.read / 1e12, help="TB read per second")
    p.add_argument("--bf16-tflop", type=float, default=H200.flop["bf16"] / 1e12)
    p.add_argument("--fp8-tflop", type=float, default=H200.flop["fp8"] / 1e12, help="also of FP4 weights")
    args = p.parse_args(argv)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 150)
    try:
        config = geometry(args.model) if args.model in GEOMETRIES else V4Config.load(args.model)
        fp8 = args.fp8_tflop * 1e12
        said = f"{args.read_tb:g} TB/s, {args.bf16_tflop:g} bf16 and {args.fp8_tflop:g} fp8 Tflop/s"
        rates = Rates(args.read_tb * 1e12, {"bf16": args.bf16_tflop * 1e12, "fp8": fp8, "fp4": fp8}, said)
        for context in integers("--contexts", args.contexts):
            console.print(table(config, context, integers("--rows", args.rows), args.k, rates))
            if config.dspark is not None:
                for n in integers("--requests", args.requests):
                    f = floor(draft_work(config, n, args.k, context), rates)
                    line = f"drafting {args.k} for {n} requests: {f.step_ms:.3f} ms, serial {f.serial_ms:.3f}"
                    console.print(line, highlight=False)
    except user_errors() as err:
        print(f"floors: {err}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
