"""What is in a checkpoint, what it lacks, and what it needs to run: ``firesteel inspect``.

Only headers are read, so a terabyte checkpoint takes seconds. A lone config.json is inspected too:
the answer is then what a checkpoint of it must hold.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from firesteel.checkpoint.reader import INDEX_NAME, SINGLE_NAME, Checkpoint
from firesteel.checkpoint.spec import CheckpointError, Layout, Stored, TensorSpec, compare
from firesteel.models.deepseek_v4.config import ConfigError, V4Config
from firesteel.models.deepseek_v4.footprint import GIB, MemoryPlan, plan_memory
from firesteel.models.deepseek_v4.layout import (
    confidence_name,
    expected_tensors,
    fit_layout,
    layer_kinds,
    shard_count,
)
from firesteel.models.deepseek_v4.names import official_view

MANY = 20  # problems shown before they are only counted
SLOT_STEPS = (1, 16, 64, 256, 1024)


@dataclass
class PartRow:
    """Tensors of one part of the model."""

    part: str
    tensors: int = 0
    bytes: int = 0
    formats: dict[str, int] = field(default_factory=dict)  # dtype -> tensors


@dataclass
class InspectReport:
    """Everything ``inspect`` found; ``problems`` empty means that it can be served."""

    path: str
    kind: str  # "checkpoint" or "config" (nothing but a config.json: what is listed is expected)
    geometry: dict[str, Any]
    layers: dict[str, int]
    files: int
    tensors: int
    bytes: int
    parts: list[PartRow]
    weight_formats: dict[str, dict[str, int]]  # target and drafter -> fp4, fp8, dense -> weights
    drafter: str  # "dspark", "plain-mtp", "absent" or "none"
    confidence_head: bool
    heads: list[str]
    spelling: str  # "official" or "hugging face"
    tokenizer: bool
    ignored: dict[str, int]  # reason -> tensors
    notes: list[str]
    problems: list[str]

    def to_json(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)


def config_file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def holds_weights(path: Path) -> bool:
    return path.is_dir() and ((path / INDEX_NAME).is_file() or (path / SINGLE_NAME).is_file())


def inspect_path(path: str | Path) -> InspectReport:
    """Inspect a checkpoint folder, or a config.json alone.

    Raises ConfigError for an unusable config and CheckpointError for files whose headers cannot be read;
    everything else that is wrong is listed in ``problems``.
    """
    path = Path(path)
    config = V4Config.load(path)
    if not holds_weights(path):
        stray = sorted(path.glob("*.safetensors")) if path.is_dir() else []
        if stray:
            raise CheckpointError(f"{path}: {stray[0].name} but no {INDEX_NAME}; fetch the index as well")
        return expected_report(path, config)
    with Checkpoint.open(path, official_view) as checkpoint:
        return checkpoint_report(path, config, checkpoint)


def expected_report(path: Path, config: V4Config) -> InspectReport:
    """What a checkpoint of ``config`` must hold, in the official formats."""
    specs = expected_tensors(config)
    layout = Layout(specs, drafter=config.dspark is not None)
    layout.confidence_head = config.dspark is not None and config.dspark.confidence_head
    for name, spec in specs.items():
        if f"{name.removesuffix('weight')}scale" in specs and name.endswith(".weight"):
            layout.formats[name.removesuffix(".weight")] = "fp4" if spec.dtypes[0] == "I8" else "fp8"
    rows = {name: Stored("", name, spec.dtypes[0], spec.shape) for name, spec in specs.items()}
    report = build_report(path, "config", config, layout, rows, shard_count(config))
    if config.dspark is None and config.mtp_stages:
        report.drafter = "plain-mtp"
        report.notes.append("plain MTP stages are not listed: Firesteel drafts with DSpark only")
    return report


def checkpoint_report(path: Path, config: V4Config, checkpoint: Checkpoint) -> InspectReport:
    """What the checkpoint holds, compared with what its config promises."""
    found = checkpoint.tensors
    layout = fit_layout(config, found)
    files = len({entry.file for entry in found.values()})
    report = build_report(path, "checkpoint", config, layout, found, files)
    report.problems = checkpoint.problems + layout.problems + compare(layout.specs, found, layout.ignored)
    foreign = any(name != entry.stored_name for name, entry in found.items())
    report.spelling = "hugging face" if foreign else "official"
    return report


def build_report(
    path: Path, kind: str, config: V4Config, layout: Layout, found: dict[str, Stored], files: int
) -> InspectReport:
    """Fill the report from headers (or from the expected tensors standing in for them)."""
    parts: dict[str, PartRow] = {}
    for name, entry in found.items():
        spec = layout.specs.get(name)
        part = spec.part if spec else ("ignored" if name in layout.ignored else "surplus")
        row = parts.setdefault(part, PartRow(part))
        row.tensors += 1
        row.bytes += entry.nbytes
        row.formats[entry.dtype] = row.formats.get(entry.dtype, 0) + 1
    formats: dict[str, Counter[str]] = {"target": Counter(), "drafter": Counter()}
    for prefix, fmt in layout.formats.items():
        formats["drafter" if prefix.startswith("mtp.") else "target"][fmt] += 1
    return InspectReport(
        path=str(path),
        kind=kind,
        geometry=config.summary(),
        layers={name.value: count for name, count in layer_kinds(config).items() if count},
        files=files,
        tensors=len(found),
        bytes=sum(row.bytes for row in parts.values()),
        parts=list(parts.values()),
        weight_formats={who: dict(count) for who, count in formats.items() if count},
        drafter=drafter_kind(config, layout, found),
        confidence_head=layout.confidence_head,
        heads=heads_found(config, found),
        spelling="official",
        tokenizer=path.is_dir() and (path / "tokenizer.json").is_file(),
        ignored=dict(Counter(layout.ignored.values())),
        notes=list(layout.notes),
        problems=[],
    )


def drafter_kind(config: V4Config, layout: Layout, found: dict[str, Stored]) -> str:
    if layout.drafter:
        return "dspark"
    if config.dspark is not None:
        return "absent"
    if "mtp.0.main_proj.weight" in found:
        return "dspark without config fields"
    return "plain-mtp" if any(name.startswith("mtp.") for name in found) else "none"


def heads_found(config: V4Config, found: dict[str, Stored]) -> list[str]:
    """Which of the heads are there: LM head, and the drafter's Markov and confidence heads."""
    names = {"lm": "head.weight"}
    if config.dspark is not None:
        last = f"mtp.{config.dspark.stages - 1}."
        names["markov"] = f"{last}markov_head.markov_w1.weight"
        names["confidence"] = confidence_name(config)
    return [label for label, name in names.items() if name in found]


def specs_found(path: Path, config: V4Config) -> list[TensorSpec] | None:
    """Specs in the dtypes of a real checkpoint, or None if there is only a config."""
    if not holds_weights(path):
        return None
    with Checkpoint.open(path, official_view) as checkpoint:
        layout = fit_layout(config, checkpoint.tensors)
        return [
            TensorSpec(name, spec.shape, (checkpoint.tensors[name].dtype,), spec.part, spec.tp)
            for name, spec in layout.specs.items()
            if name in checkpoint.tensors
        ]


def plan(
    config: V4Config,
    gpu_gib: float,
    tp: int = 1,
    max_model_len: int | None = None,
    **options: Any,
) -> MemoryPlan:
    """Memory plan of one rank; options as in ``footprint.plan_memory``."""
    return plan_memory(config, gpu_gib, tp, max_model_len=max_model_len, **options)


# ---- output --------------------------------------------------------------------------------------
def size(count: float) -> str:
    """Bytes for people: 1.85 kB, 3.90 MB, 166.88 GB (powers of 1000, as file sizes are quoted)."""
    for unit, step in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= step:
            return f"{count / step:.2f} {unit}"
    return f"{count:.0f} B"


def geometry_table(report: InspectReport) -> Table:
    g = report.geometry
    table = Table(title="geometry", title_justify="left")
    table.add_column("what")
    table.add_column("value")
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.layers.items())
    rows = [
        ("layers", f"{g['num_hidden_layers']} ({kinds})"),
        ("hidden, streams, vocabulary", f"{g['hidden_size']}, {g['hc_mult']}, {g['vocab_size']}"),
        ("heads x dim (rotary)", f"{g['num_attention_heads']} x {g['head_dim']} ({g['qk_rope_head_dim']})"),
        (
            "experts",
            f"{g['n_routed_experts']} top {g['num_experts_per_tok']}, width {g['moe_intermediate_size']}, "
            f"{g['num_hash_layers']} hash layers",
        ),
        ("indexer", f"{g['index_n_heads']} x {g['index_head_dim']}, top {g['index_topk']}"),
        ("window, longest context", f"{g['sliding_window']}, {g['max_position_embeddings']}"),
    ]
    draft = g["dspark"]
    if draft:
        rows.append(
            (
                "drafter",
                f"{draft['stages']} stages, block {draft['block_size']}, taps {list(draft['target_layer_ids'])}",
            )
        )
    for row in rows:
        table.add_row(*row)
    return table


def parts_table(report: InspectReport) -> Table:
    verb = "holds" if report.kind == "checkpoint" else "must hold"
    table = Table(title=f"{verb} {report.tensors} tensors, {report.bytes} bytes", title_justify="left")
    table.add_column("part")
    for name in ("tensors", "size"):
        table.add_column(name, justify="right")
    table.add_column("stored as")
    for row in report.parts:
        stored = ", ".join(f"{dtype} x{count}" for dtype, count in sorted(row.formats.items()))
        table.add_row(row.part, str(row.tensors), size(row.bytes), stored)
    return table


def render(report: InspectReport, console: Console | None = None) -> None:
    """Print a report as tables."""
    out = console or Console()
    what = "checkpoint" if report.kind == "checkpoint" else "config only, no weights"
    out.print(f"[bold]{escape(report.path)}[/bold]: {what}, {report.files} files, {report.spelling} names")
    out.print(geometry_table(report))
    out.print(parts_table(report))
    for who, formats in report.weight_formats.items():
        out.print(f"{who} weights: " + ", ".join(f"{count} {fmt}" for fmt, count in formats.items()))
    head = "with" if report.confidence_head else "without"
    out.print(
        f"drafter: {report.drafter}" + (f", {head} confidence head" if report.drafter == "dspark" else "")
    )
    out.print(
        f"heads: {', '.join(report.heads) or 'none'}; tokenizer.json: {'yes' if report.tokenizer else 'no'}"
    )
    for reason, count in report.ignored.items():
        out.print(f"ignored: {count} tensors, {escape(reason)}")
    for note in report.notes:
        out.print(f"note: {escape(note)}")
    for problem in report.problems[:MANY]:
        out.print(f"[red]problem:[/red] {escape(problem)}", highlight=False)
    if len(report.problems) > MANY:
        out.print(f"[red]... and {len(report.problems) - MANY} more problems[/red]")
    verdict = "[green]sound[/green]" if not report.problems else f"[red]{len(report.problems)} problems[/red]"
    if report.kind == "checkpoint":
        out.print(f"verdict: {verdict}")


def render_plan(memory: MemoryPlan, console: Console | None = None) -> None:
    """Print a memory plan."""
    out = console or Console()
    table = Table(title=f"one GPU of {memory.tp}, {memory.gpu_bytes / GIB:.0f} GiB", title_justify="left")
    table.add_column("what")
    table.add_column("size", justify="right")
    for part, held in sorted(memory.weights.items(), key=lambda item: -item[1]):
        table.add_row(f"weights: {part}", size(held))
    table.add_row("weights in all", size(memory.weights_total), style="bold")
    table.add_row("reserve (assumed)", size(memory.reserve))
    table.add_row("left for state", size(memory.state), style="bold")
    for name, held in memory.slot.items():
        table.add_row(f"per slot: {name}", size(held))
    table.add_row("per slot in all", size(memory.slot_total), style="bold")
    table.add_row("history per token", size(memory.history_per_token))
    table.add_row("history per page of 256", size(memory.page))
    table.add_row("snapshot of a prefix", size(memory.snapshot))
    out.print(table)
    if memory.state <= 0:
        out.print("[red]the weights do not fit; use more GPUs or larger ones[/red]")
        return
    fit = Table(title="tokens of history beside N slots", title_justify="left")
    for name in ("slots", "tokens", "tokens per slot"):
        fit.add_column(name, justify="right")
    for slots in SLOT_STEPS:
        tokens = memory.tokens(slots)
        if tokens:
            fit.add_row(str(slots), str(tokens), str(tokens // slots))
    out.print(fit)
    out.print(f"requests of {memory.max_model_len} tokens at once: {memory.full_slots}")


def plan_json(memory: MemoryPlan) -> dict[str, Any]:
    """JSON-ready form of a plan, derived values included."""
    derived = {
        "weights_total": memory.weights_total,
        "slot_total": memory.slot_total,
        "full_slots": memory.full_slots,
        "tokens_at_slots": {str(n): memory.tokens(n) for n in SLOT_STEPS},
        "fits": memory.fits,
    }
    return asdict(memory) | derived


def run_inspect(
    path: str | Path,
    plan: bool = False,
    gpu_gib: float = 141.0,
    tp: int = 1,
    as_json: bool = False,
    max_model_len: int | None = None,
    console: Console | None = None,
) -> int:
    """``firesteel inspect``: print the report (and plan); 0 sound, 1 problems or no fit, 2 unreadable."""
    out = console or Console()
    try:
        report = inspect_path(path)
        memory = None
        if plan:
            config = V4Config.load(path)
            memory = plan_memory(
                config, gpu_gib, tp, max_model_len=max_model_len, specs=specs_found(Path(path), config)
            )
    except (ConfigError, CheckpointError) as err:
        if as_json:
            out.file.write(json.dumps({"error": str(err)}) + "\n")
        else:
            out.print(f"[red]{type(err).__name__}:[/red] {escape(str(err))}", highlight=False)
        return 2
    if as_json:
        body = report.to_json() | ({"plan": plan_json(memory)} if memory else {})
        out.file.write(json.dumps(body, indent=2) + "\n")
    else:
        render(report, out)
        if memory:
            render_plan(memory, out)
    return 1 if report.problems or (memory is not None and not memory.fits) else 0
