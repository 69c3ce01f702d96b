"""``python -m firesteel.bench.invariance``: what bit-invariant rows cost on a GPU.

Two kernels, at Flash widths: the block-scaled FP8 linear and the grouped FP4
experts. For every candidate tile the bits of a row are compared over row
counts, places and batch-mates with one reference run, the values with float64;
then every candidate is timed against the floor (bytes over the measured read
bandwidth, operations over the measured rate; the larger of the two) and against the
best form that is free to change its summation order from one row count to another.

``--device cpu`` runs the same code at tiny sizes under Triton's interpreter
(``TRITON_INTERPRET=1``), without times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from firesteel.bench.kernels import (
    FLASH,
    NAN,
    TINY,
    Clock,
    Fp8,
    Grouped,
    Sizes,
    Tile,
    ceilings,
    first_line,
)
from firesteel.bench.report import environment, write_json

CHECKED = (1, 2, 3, 5, 8, 16, 17, 33, 64, 100, 128, 256, 300, 512, 1024, 2048)
TIMED = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def fp8_tiles(splits: int, device: torch.device) -> list[Tile]:
    """Candidates with one summation order, the first is the reference of bits."""
    if device.type == "cpu":
        return [
            Tile(64, n, 4, 3, k, splits, p) for k in ("fp8", "f16") for n in (16, 32) for p in (True, False)
        ]
    shapes = [
        (64, 16, 4, 6),
        (64, 32, 4, 5),
        (64, 64, 4, 5),
        (64, 128, 4, 4),
        (128, 128, 8, 4),
        (128, 64, 8, 4),
    ]
    tiles = [Tile(m, n, w, s, "fp8", splits, True) for m, n, w, s in shapes]
    tiles += [Tile(64, 16, 4, 4, "f16", splits, True), Tile(64, 64, 4, 4, "f16", splits, True)]
    if splits > 1:
        tiles += [Tile(64, 64, 4, 5, "fp8", splits, False), Tile(128, 128, 8, 4, "fp8", splits, False)]
    else:
        tiles += [Tile(128, 16, 8, 5, "fp8"), Tile(64, 8, 4, 6, "fp8"), Tile(128, 256, 8, 3, "fp8")]
    return tiles


def expert_tiles(device: torch.device) -> list[Tile]:
    """Candidates; bits are compared with the first of each kind."""
    if device.type == "cpu":
        small = [(128, 16, 1), (128, 32, 2), (64, 32, 4)]
        tiles = [Tile(m, n, 4, 3, "fp8", pieces) for m, n, pieces in small]
        return [*tiles, *(Tile(128, n, 4, 3, "bf16", 1, n == 16) for n in (16, 32))]
    shapes = [(128, 16, 4, 4, 1), (64, 16, 4, 4, 4), (128, 32, 8, 3, 1), (128, 64, 8, 3, 2)]
    tiles = [Tile(m, n, warps, stages, "fp8", pieces) for m, n, warps, stages, pieces in shapes]
    return [*tiles, Tile(128, 16, 4, 4, "bf16", 2, True), Tile(128, 64, 8, 4, "bf16", 2, False)]


# ---- comparing -----------------------------------------------------------------------------
def relative(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; NaN where something was not written."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def check_bits(
    subject: Fp8 | Grouped, tiles: Iterable[Tile], size: Sizes, device: torch.device
) -> list[dict[str, Any]]:
    """Every candidate against float64 and against the reference bits of its kind and K ranges."""
    base: dict[Any, Tensor] = {}
    out: list[dict[str, Any]] = []
    every = torch.arange(size.pool, device=device)
    dice = torch.Generator().manual_seed(0)
    few = torch.randperm(size.pool, generator=dice)[:8].to(device)
    exact = subject.exact(few)
    for tile in tiles:
        line: dict[str, Any] = {"tile": str(tile), **asdict(tile)}
        out.append(line)
        try:
            key = (tile.kind, 1 if isinstance(subject, Grouped) else tile.splits)
            if key not in base:
                base[key] = subject.result(tile, every)
            line["error"] = relative(subject.result(tile, few), exact)
            line["differ"], line["rows"] = 0, 0
            for rows in (r for r in CHECKED if r <= size.pool):
                pick = torch.randperm(size.pool, generator=dice)[:rows].to(device)
                got = subject.result(tile, pick)
                bad = (got != base[key][pick]).flatten(1).any(1)  # NaN differs from itself
                line["differ"] += int(bad.sum())
                line["rows"] += rows
                if bad.any():
                    line.setdefault("worst", [])
                    line["worst"].append((rows, int(bad.sum()), float((got - base[key][pick]).abs().max())))
        except Exception as err:  # one candidate that fails must not stop the others
            line["failed"] = first_line(err)
    return out


def measure(
    subject: Fp8 | Grouped, tiles: list[Tile], clock: Clock, top: dict[str, float], pool: int
) -> list[dict[str, Any]]:
    """Times of every candidate by row count, with the floor."""
    out: list[dict[str, Any]] = []
    for rows in (r for r in TIMED if r <= pool):
        line: dict[str, Any] = {"rows": rows, "floor_us": subject.floor(rows, top), "us": {}, "parts": {}}
        out.append(line)
        for tile in tiles:
            if clock.late or (tile.n > 16 and tile.n >= 4 * rows):
                continue
            try:
                took = subject.timed(tile, rows, clock)
            except Exception as err:  # as above
                line.setdefault("failed", {})[str(tile)] = first_line(err)
                continue
            if isinstance(took, dict):
                line["parts"][str(tile)] = took
                took = took["all"]
            if took is not None:
                line["us"][str(tile)] = took
        if isinstance(subject, Fp8) and not clock.late and clock.device.type == "cuda":
            line["library"] = subject.library(rows, clock)
    return out


def free_tiles(tiles: list[Tile]) -> list[Tile]:
    """The same kernel with other K ranges, which change bits: what invariance gives up."""
    seen = {t.splits for t in tiles}
    return [
        replace(t, splits=s, parallel=True)
        for s in (1, 2, 4, 8, 16)
        if s not in seen
        for t in tiles
        if t.kind == "fp8" and t.parallel and (t.m, t.n) in ((64, 16), (64, 64), (128, 128))
    ]


# ---- the report ------------------------------------------------------------------------------
def bits_table(name: str, lines: list[dict[str, Any]]) -> Table:
    """One line per candidate."""
    table = Table(title=f"{name}: bits and values", title_justify="left")
    for head in ("candidate", "rows compared", "rows that differ", "error against float64", "note"):
        table.add_column(head)
    for line in lines:
        worst = "; ".join(f"R={r}: {n} rows, {gap:.2g}" for r, n, gap in line.get("worst", [])[:3])
        error = f"{line['error']:.2e}" if "error" in line else "-"
        table.add_row(
            line["tile"],
            str(line.get("rows", "-")),
            str(line.get("differ", "-")),
            error,
            line.get("failed", worst),
        )
    return table


def best(us: dict[str, float], names: set[str]) -> tuple[str, float] | None:
    """The quickest of the named candidates."""
    found = [(t, n) for n, t in us.items() if n in names]
    return (min(found)[1], min(found)[0]) if found else None


def time_table(name: str, lines: list[dict[str, Any]], groups: dict[str, set[str]]) -> Table:
    """Floor, the best of each group of candidates, and the library, by row count."""
    table = Table(title=f"{name}: microseconds", title_justify="left")
    for head in ("rows", "floor", *groups, "library"):
        table.add_column(head)
    for line in lines:
        cells = [str(line["rows"]), f"{line['floor_us']:.1f}"]
        for names in groups.values():
            hit = best(line["us"], names)
            cells.append(f"{hit[1]:.1f} ({hit[1] / line['floor_us']:.2f}x) {hit[0]}" if hit else "-")
        library = {k: v for k, v in line.get("library", {}).items() if isinstance(v, float)}
        cells.append(", ".join(f"{k} {v:.1f}" for k, v in library.items()) or "-")
        table.add_row(*cells)
    return table


def groups_of(lines: list[dict[str, Any]], tiles: list[Tile], free: list[Tile]) -> dict[str, set[str]]:
    """Candidates by what they promise: one tile, equal bits, anything."""
    same = {line["tile"] for line in lines if line.get("differ") == 0}
    kinds = {t.kind for t in tiles}
    out = {f"equal bits, {kind}": {n for n in same if n.startswith(kind)} for kind in sorted(kinds)}
    return {**out, "free": {str(t) for t in (*tiles, *free)}}


def run(device: torch.device, size: Sizes, seconds: float, console: Console) -> dict[str, Any]:
    """Everything; tables go to the console as they are made."""
    clock = Clock(device, seconds)
    torch.manual_seed(0)
    top = ceilings(clock, device)
    console.print(
        f"read {top['read_tbs']:.2f} TB/s, bf16 {top['bf16_tflops']:.0f}, fp8 {top['fp8_tflops']:.0f} TFLOP/s"
    )
    result: dict[str, Any] = {"environment": environment(), "ceilings": top}

    def report(name: str, subject: Fp8 | Grouped, tiles: list[Tile], free: list[Tile]) -> None:
        bits = check_bits(subject, tiles, size, device)
        console.print(bits_table(name, bits))
        times = measure(subject, [*tiles, *free], clock, top, size.pool)
        if device.type == "cuda":
            console.print(time_table(name, times, groups_of(bits, tiles, free)))
        result[name] = {"bits": bits, "times": times, "late": clock.late}

    tiles = expert_tiles(device)
    report("experts", Grouped(size, device), tiles, [])
    for name, n, k, splits in size.linears:
        tiles = fp8_tiles(splits, device)
        report(
            f"{name} [{n}, {k}]",
            Fp8(n, k, size, device),
            tiles,
            free_tiles(tiles) if device.type == "cuda" else [],
        )
    result["late"] = clock.late
    return result


def main(arguments: list[str] | None = None) -> int:
    """The command; exit status 1 if a candidate's values are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="file for the result")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=170.0, help="no new timing starts after this")
    parser.add_argument("--width", type=int, default=170, help="columns of the tables")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    console = Console(width=args.width)
    result = run(device, TINY if args.device == "cpu" else FLASH, args.seconds, console)
    write_json(result, args.json)
    bits = [line for part in result.values() if isinstance(part, dict) for line in part.get("bits", [])]
    wrong = [line["tile"] for line in bits if "failed" not in line and not line.get("error", NAN) < 2e-2]
    if wrong:
        console.print(f"wrong values: {', '.join(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
