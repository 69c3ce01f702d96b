"""``firesteel bench calibration``: how far the survival of drafts can be trusted, on text that fitted nothing.

Every draft of every block is verified on held-out prompts (arithmetic, code and
prose, each greedy and at T=1), so each block tells at every depth whether its
draft and all before it were accepted. Survival is judged by its expected
calibration error over 15 equal-mass bins, per depth and per domain, with
bootstrap intervals over requests; the signals by their AUC on single drafts.

    firesteel bench calibration --json calibration_quality.json --plots .
    firesteel bench calibration --calibration calibration.json --max-tokens 256
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from firesteel.bench.cli import engine_settings, rates
from firesteel.bench.geometry import load
from firesteel.bench.readers import RequestSet, encode, fit_set, held_out_texts, read_requests
from firesteel.bench.report import environment, write_json
from firesteel.config import ParameterError
from firesteel.engine.llm import LLM
from firesteel.errors import user_errors
from firesteel.speculation.survival import BINS, Coefficients, auc, ece, margin_feature
from firesteel.train.calibrate import NAMES, Blocks, Fit, calibrate, collect, conditional

Floats = NDArray[np.float64]
GROUPS = NDArray[np.int64]
ECE_PER_DEPTH, ECE_PER_DOMAIN = 0.02, 0.035  # what counts as good


@dataclass(frozen=True)
class Cell:
    """Blocks of one domain at one temperature."""

    domain: str
    temperature: float
    blocks: Blocks


def gather(
    llm: LLM,
    requests: RequestSet,
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Cell]:
    """Answer every request at every temperature; ``progress`` hears finished answers."""
    out, done = [], 0
    for domain in requests.domains():
        prompts = [encode(llm, a) for a in requests.asks if a.domain == domain]
        for heat in temperatures:
            before = done

            def tick(count: int, start: int = before) -> None:
                progress(start + count)

            out.append(Cell(domain, heat, collect(llm, prompts, [heat], max_tokens, seed, tick)))
            done, seed = done + len(prompts), seed + len(prompts)
    return out


def load_fit(path: str | Path, depths: int, uses_head: bool) -> Fit:
    """A calibration file with its temperatures; raises CalibrationError if it was fitted for other signals."""
    coefficients = Coefficients.load(path).fitted_to(depths, uses_head, True)
    raw = json.loads(Path(path).read_text())
    kept = {k: [float(t) for t in v] for k, v in raw.get("temperatures", {}).items() if len(v) == depths}
    return Fit(kept, coefficients)


# ---- one number with its interval ------------------------------------------------------
@dataclass(frozen=True)
class Judged:
    """Predictions and outcomes of single drafts with the request each came from."""

    predicted: Floats
    truth: Floats
    group: GROUPS

    @classmethod
    def joined(cls, parts: Sequence[Judged]) -> Judged:
        """All of several."""
        return cls(
            np.concatenate([p.predicted for p in parts]),
            np.concatenate([p.truth for p in parts]),
            np.concatenate([p.group for p in parts]),
        )


def resampled(group: GROUPS, times: int, seed: int = 0) -> list[NDArray[np.int64]]:
    """Indices of ``times`` bootstrap samples that draw whole groups with replacement."""
    order = np.argsort(group, kind="stable")
    _, starts = np.unique(group[order], return_index=True)
    members = np.split(order, starts[1:])
    draw = np.random.default_rng(seed)
    return [
        np.concatenate([members[i] for i in draw.integers(0, len(members), len(members))])
        for _ in range(times)
    ]


def interval(values: Sequence[float]) -> list[float] | None:
    """The 95 % percentile interval of bootstrap values; None if there are none."""
    known = [v for v in values if np.isfinite(v)]
    return [float(v) for v in np.percentile(known, (2.5, 97.5))] if known else None


def ece_of(judged: Judged, times: int) -> dict[str, Any]:
    """ECE, its bootstrap interval, and the bins of a reliability diagram.

    ``noise``: the ECE that perfect predictions would show with so few samples; ECE never averages to zero.
    """
    samples = resampled(judged.group, times)
    return {
        "ece": ece(judged.predicted, judged.truth),
        "interval": interval([ece(judged.predicted[s], judged.truth[s]) for s in samples]),
        "noise": noise(judged.predicted),
        "count": len(judged.truth),
        "observed": float(judged.truth.mean()),
        "bins": bins(judged),
    }


def noise(predicted: Floats, draws: int = 20, seed: int = 0) -> float:
    """Mean ECE of outcomes that are drawn with exactly the predicted probabilities."""
    draw = np.random.default_rng(seed)
    return float(
        np.mean(
            [
                ece(predicted, (draw.random(len(predicted)) < predicted).astype(np.float64))
                for _ in range(draws)
            ]
        )
    )


def bins(judged: Judged, count: int = BINS) -> list[dict[str, float]]:
    """Equal-mass bins: mean prediction, share that happened, size."""
    order = np.argsort(judged.predicted, kind="stable")
    return [
        {
            "predicted": float(judged.predicted[part].mean()),
            "observed": float(judged.truth[part].mean()),
            "count": len(part),
        }
        for part in np.array_split(order, min(count, len(order)))
        if len(part)
    ]


# ---- of blocks ------------------------------------------------------------------------
def survivals(blocks: Blocks, fitted: Fit | None, how: str) -> list[Judged]:
    """By depth: predicted survival and whether the draft and all before it were accepted."""
    product = np.cumprod(conditional(blocks, fitted, how), axis=1)
    out = []
    for j in range(blocks.depths):
        known = blocks.known > j
        truth = (blocks.accepted[known] > j).astype(np.float64)
        out.append(Judged(product[known, j], truth, blocks.group[known]))
    return out


def signals(blocks: Blocks, fitted: Fit) -> dict[str, Judged]:
    """Scores of single drafts that all before them survived: the model, the head alone, the margin alone."""
    depth = np.broadcast_to(np.arange(blocks.depths), blocks.margin.shape)
    open_ = (depth <= blocks.accepted[:, None]) & (depth < blocks.known[:, None])
    truth = (depth < blocks.accepted[:, None]).astype(np.float64)[open_]
    group = np.broadcast_to(blocks.group[:, None], depth.shape)[open_]
    scores = {"combined": conditional(blocks, fitted, "logistic"), "margin": margin_feature(blocks.margin)}
    if blocks.head is not None:
        scores["head"] = blocks.head
    return {name: Judged(score[open_], truth, group) for name, score in scores.items()}


def discrimination(blocks: Blocks, fitted: Fit, times: int) -> dict[str, Any]:
    """AUC of every signal, and the interval of what the combination gains over each alone."""
    found = signals(blocks, fitted)
    samples = resampled(found["combined"].group, times)
    drawn = {name: [auc(j.predicted[s], j.truth[s]) for s in samples] for name, j in found.items()}
    out: dict[str, Any] = {"drafts": len(found["combined"].truth)}
    for name, judged in found.items():
        value = auc(judged.predicted, judged.truth)
        out[name] = {"auc": value if np.isfinite(value) else None, "interval": interval(drawn[name])}
        if name != "combined":
            gains = [a - b for a, b in zip(drawn["combined"], drawn[name], strict=True)]
            out[name]["gain_of_combined"] = interval(gains)
    return out


def judge(cells: Sequence[Cell], fitted: Fit, times: int = 200) -> dict[str, Any]:
    """Everything about held-out blocks: by class, method and depth; by domain; by domain and temperature."""
    whole = Blocks.joined([c.blocks for c in cells])
    methods = ("head", "sts", "logistic") if whole.head is not None else ("logistic",)
    quality: dict[str, Any] = {}
    for kind, name in enumerate(NAMES):
        part = whole.pick(whole.kind == kind)
        if len(part):
            quality[name] = {how: {"by_depth": _depths(part, fitted, how, times)} for how in methods}
    domains: dict[str, Any] = {}
    for domain in dict.fromkeys(c.domain for c in cells):
        mine = [c for c in cells if c.domain == domain]
        blocks = Blocks.joined([c.blocks for c in mine])
        domains[domain] = _domain(blocks, fitted, methods, times) | {
            "by_temperature": {
                f"{c.temperature:g}": _domain(c.blocks, fitted, ("logistic",), times) for c in mine
            }
        }
    return {"blocks": len(whole), "quality": quality, "domains": domains, "passed": verdict(quality, domains)}


def _depths(blocks: Blocks, fitted: Fit, how: str, times: int) -> list[dict[str, Any]]:
    return [
        {"depth": j + 1, **ece_of(judged, times)}
        for j, judged in enumerate(survivals(blocks, fitted, how))
        if len(judged.truth)
    ]


def _domain(blocks: Blocks, fitted: Fit, methods: Sequence[str], times: int) -> dict[str, Any]:
    """ECE over all depths together, by method; AUC of the signals."""
    pooled = {how: ece_of(Judged.joined(survivals(blocks, fitted, how)), times) for how in methods}
    return {"blocks": len(blocks), "survival": pooled, "auc": discrimination(blocks, fitted, times)}


def verdict(quality: Mapping[str, Any], domains: Mapping[str, Any]) -> dict[str, bool]:
    """Whether the calibrated survival is as good as it should be."""
    lines = [line for said in quality.values() for line in said["logistic"]["by_depth"]]
    best = True
    for said in domains.values():
        alone = [said["auc"][s]["auc"] for s in ("head", "margin") if s in said["auc"]]
        mine = said["auc"]["combined"]["auc"]
        best = best and mine is not None and all(a is None or mine > a for a in alone)
    return {
        f"ece_per_depth_at_most_{ECE_PER_DEPTH:g}": all(line["ece"] <= ECE_PER_DEPTH for line in lines),
        f"ece_per_domain_at_most_{ECE_PER_DOMAIN:g}": all(
            d["survival"]["logistic"]["ece"] <= ECE_PER_DOMAIN for d in domains.values()
        ),
        "combined_auc_above_each_alone": best,
    }


# ---- command ----------------------------------------------------------------------------
def run(args: argparse.Namespace, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Fit (unless a file is given), collect held-out blocks, judge them."""
    temperatures = rates("--temperatures", args.temperatures)
    settings = {"max_num_seqs": args.max_num_seqs} | engine_settings(args.set)
    llm = load(args.model, speculative={"num_speculative_tokens": args.k}, **settings)
    assert llm.engine.runner.drafter is not None, "a model without drafter is refused when it is loaded"
    head = llm.engine.runner.drafter.weights.markov.confidence is not None
    own = llm.path / "calibration.json"
    file = args.calibration or (str(own) if own.is_file() else None)
    if file is not None:
        fitted, origin = load_fit(file, args.k, head), Path(file).name
    else:
        used = fit_set()
        total = len(used) * len(temperatures)
        cells = gather(llm, used, temperatures, args.max_tokens, 1, lambda n: progress("fitting", n, total))
        fitted, origin = calibrate(Blocks.joined([c.blocks for c in cells])), "fitted on " + used.name
    asked = held_out_texts() if args.requests is None else read_requests(args.requests)
    if args.per_domain is not None:
        asked = asked.first(args.per_domain)
    total = len(asked) * len(temperatures)
    cells = gather(
        llm, asked, temperatures, args.max_tokens, 1 << 20, lambda n: progress("held out", n, total)
    )
    if not sum(len(c.blocks) for c in cells):
        raise ParameterError(
            "calibration: no block was verified; give more requests or a larger --max-tokens"
        )
    progress("judging", total, total)
    return {
        "bench": "calibration",
        "model": Path(args.model).name if args.model else "bundled",
        "settings": settings | {"k": args.k, "temperatures": temperatures, "max_tokens": args.max_tokens},
        "calibration": origin,
        "requests": {
            "name": asked.name,
            "count": len(asked),
            "sha256": asked.digest,
            "domains": asked.domains(),
        },
        "notes": list(llm.notes),
        **judge(cells, fitted, args.bootstrap),
        "environment": environment(),
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """Survival ECE by depth, and ECE and AUC by domain."""
    out = []
    for name, methods in result["quality"].items():
        columns = (*(f"{m} ECE" for m in methods), "noise")
        table = Table("depth", "blocks", "survive", *columns, title=f"survival, {name}")
        for lines in zip(*(said["by_depth"] for said in methods.values()), strict=True):
            cells = [_with(line["ece"], line["interval"], 100, "%") for line in lines]
            cells.append(f"{100 * lines[-1]['noise']:.1f}%")
            table.add_row(
                str(lines[0]["depth"]), str(lines[0]["count"]), f"{lines[0]['observed']:.3f}", *cells
            )
        out.append(table)
    table = Table("domain", "blocks", "ECE", "AUC combined", "AUC head", "AUC margin", title="by domain")
    for name, said in result["domains"].items():
        found = said["survival"]["logistic"]
        scores = (said["auc"].get(s) for s in ("combined", "head", "margin"))
        shown = ("-" if s is None or s["auc"] is None else _with(s["auc"], s["interval"]) for s in scores)
        table.add_row(name, str(said["blocks"]), _with(found["ece"], found["interval"], 100, "%"), *shown)
    return [*out, table]


def _with(value: float, ends: list[float] | None, times: float = 1.0, unit: str = "") -> str:
    digits = 1 if times > 1 else 3
    said = f"{times * value:.{digits}f}{unit}"
    return said if ends is None else f"{said} [{times * ends[0]:.{digits}f}, {times * ends[1]:.{digits}f}]"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 2 on a user's error."""
    p = argparse.ArgumentParser(prog="firesteel bench calibration", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--model", default=None, help="checkpoint folder (default: the bundled model)")
    p.add_argument(
        "--calibration", default=None, metavar="FILE", help="default: the checkpoint's own, or fitted now"
    )
    p.add_argument("--requests", default=None, metavar="FILE", help="held-out set (default: bundled texts)")
    p.add_argument("--per-domain", type=int, default=None, help="the first N requests of each domain")
    p.add_argument("--k", type=int, default=7, help="drafts per step")
    p.add_argument("--temperatures", default="0,1")
    p.add_argument("--max-tokens", type=int, default=128, help="tokens of one answer at most")
    p.add_argument("--max-num-seqs", type=int, default=32)
    p.add_argument("--bootstrap", type=int, default=200, help="resamplings behind an interval")
    p.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="an EngineConfig field")
    p.add_argument("--json", default=None, metavar="FILE")
    p.add_argument(
        "--plots", default=None, metavar="FOLDER", help="write reliability diagrams and report.html there"
    )
    args = p.parse_args(argv)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 130)
    try:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("loading", total=None)
            result = run(args, lambda said, n, of: bar.update(task, description=said, completed=n, total=of))
    except user_errors() as err:
        print(f"calibration: {err}", file=sys.stderr)
        return 2
    write_json(result, args.json)
    for table in tables(result):
        console.print(table)
    for name, good in result["passed"].items():
        console.print(f"{'yes' if good else 'NO '}  {name.replace('_', ' ')}", highlight=False)
    console.print(
        f"{result['blocks']} held-out blocks; calibration: {result['calibration']}", highlight=False
    )
    if args.plots:
        from firesteel.bench.plots import write_report

        console.print(f"wrote {write_report(result, args.plots)}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
