"""``firesteel bench sweep``: adaptive verification against every fixed width, over concurrency, on the wall clock.

A frozen request set is run in closed loops at descending concurrency. At each
point all arms are warmed up, then interleaved round by round in one process on
the same weights, with the same seeds: under coupled acceptance every arm must
write the same tokens, which is checked. The best fixed arm is chosen on even
rounds and scored on odd ones; the ratio has a paired lower 95 % bound.

    firesteel bench sweep --json sweep.json --plots .
    firesteel bench sweep --requests speed_bench.jsonl --concurrency 256,128,64,32,16,8,4 --max-tokens 2048
    firesteel bench sweep --simulated .85,.80,.76,.74,.72,.70,.69 --max-tokens 256 --ignore-eos
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from firesteel.bench.arms import ADAPTIVE, parse_arms
from firesteel.bench.cli import engine_settings, integers, rates
from firesteel.bench.geometry import GEOMETRIES, geometry
from firesteel.bench.readers import FORMS, RequestSet, bundled, random_prompts, read_requests
from firesteel.bench.report import write_json
from firesteel.bench.rounds import CLOCKS, PHASES, Plan, pin, sweep
from firesteel.config import ParameterError
from firesteel.engine.build import BUNDLED
from firesteel.errors import user_errors
from firesteel.models.deepseek_v4.config import V4Config

PRESETS = {  # simulated acceptance by position
    "low": (0.02,) * 7,
    "flash": (0.85, 0.80, 0.76, 0.74, 0.72, 0.70, 0.69),
    "high": (0.99,) * 7,
}


def tables(result: dict[str, Any]) -> list[Table]:
    """Throughput by arm, and what adaptive did, for the terminal."""
    mark = " (SIMULATED acceptance)" if result["simulated"] else ""
    names = list(result["points"][0]["arms"])
    decode = result["settings"]["phase"] == "decode"
    what = "tokens/s while all requests decode" if decode else "tokens/s"
    rates = Table(title=f"{what} | per user{mark}", title_justify="left")
    for column in ("at once", *names, "best fixed", "adaptive / best", "lower 95 %"):
        rates.add_column(column, justify="right", no_wrap=True)
    detail = Table(title=f"adaptive{mark}", title_justify="left")
    for column in (
        "at once",
        "drafts/step",
        "accepted",
        "TTFT p50/p99 ms",
        "TPOT p50/p99 ms",
        "step ms",
        "host ms",
        "measured/predicted",
    ):
        detail.add_column(column, justify="right", no_wrap=True)
    for point in result["points"]:
        cells = []
        for name in names:
            arm = point["arms"][name]
            user = arm["tokens_per_second_per_user"]
            whole = arm["decode_tokens_per_second" if decode else "tokens_per_second"] or 0.0
            cells.append(f"{whole:,.0f} | {user:,.0f}" if user else f"{whole:,.0f}")
        verdict = point.get("verdict")
        tail = ("-", "-", "-")
        if verdict:
            held = verdict["held_out"]
            lower = "-" if held["lower"] is None else f"{held['lower']:.3f}"
            tail = (verdict["best_fixed"], f"{held['ratio']:.3f}", lower)
        rates.add_row(str(point["concurrency"]), *cells, *tail)
        if ADAPTIVE in point["arms"]:
            detail.add_row(*_detail(point))
    return [rates, detail] if detail.row_count else [rates]


def _detail(point: dict[str, Any]) -> list[str]:
    arm = point["arms"][ADAPTIVE]

    def pair(values: dict[str, float | None]) -> str:
        return "-" if values["p50"] is None else f"{values['p50']:.1f} / {values['p99']:.1f}"

    off = arm["measured_over_predicted"]
    return [
        str(point["concurrency"]),
        f"{arm['drafts_per_request_step']:.2f}",
        f"{arm['accepted_share']:.2f}",
        pair(arm["ttft_ms"]),
        pair(arm["tpot_ms"]),
        f"{arm['step_ms']:.2f}",
        f"{arm['host_ms_per_step']:.2f}",
        "-" if off is None else f"{off:.2f}",
    ]


def shortfalls(result: dict[str, Any], lower: float, mean: float) -> list[str]:
    """Where adaptive misses a required lower bound of a point, or a required geometric mean."""
    out = []
    for point in result["points"]:
        found = point["verdict"]["held_out"]["lower"] if "verdict" in point else None
        if found is None or found < lower:
            out.append(f"{point['concurrency']} at once: lower bound {found} is below the required {lower}")
    whole = result["geometric_mean"]
    if whole is None or whole["ratio"] < mean:
        out.append(f"geometric mean {whole and whole['ratio']} is below the required {mean}")
    return out


def complaints(result: dict[str, Any]) -> list[str]:
    """Why the figures must not be trusted; empty if all checks passed."""
    out = []
    for point in result["points"]:
        checks, at = point["checks"], point["concurrency"]
        if not checks["client_equals_server_tokens"]:
            out.append(f"{at} at once: client and server counted different tokens")
        if checks["preemptions"]:
            out.append(f"{at} at once: {checks['preemptions']} preemptions; raise num_pages")
        if checks["identical_texts"] is False:
            out.append(f"{at} at once: the arms wrote different texts under coupled acceptance")
    return out


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="firesteel bench sweep", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument(
        "--model",
        default=None,
        help="checkpoint folder, flash-8L or tiny (random weights); default: the bundled model",
    )
    p.add_argument(
        "--requests", default=None, metavar="FILE", help="JSONL or JSON set (default: the bundled prompts)"
    )
    p.add_argument("--random", default=None, metavar="NxT", help="N random prompts of T tokens instead")
    p.add_argument("--form", default="auto", choices=FORMS, help="form of that file")
    p.add_argument("--limit", type=int, default=None, help="use its first N requests")
    p.add_argument("--freeze", default=None, metavar="FILE", help="write the set in its frozen form there")
    p.add_argument(
        "--concurrency", default="64,32,16,8,4,2,1", help="requests at once, run in descending order"
    )
    p.add_argument("--arms", default="none,1,3,5,7,adaptive")
    p.add_argument(
        "--drafts",
        type=int,
        default=None,
        help="of the adaptive arm at most (default: as the widest fixed arm)",
    )
    p.add_argument("--rounds", type=int, default=8)
    p.add_argument(
        "--seconds",
        type=float,
        default=None,
        metavar="S",
        help="only as many rounds as fit into S, 2 at least",
    )
    p.add_argument(
        "--requests-per-round",
        default=None,
        metavar="N or Nx",
        help="a number, or times the concurrency as in 1x (default: 3x, at least 24)",
    )
    p.add_argument("--max-tokens", type=int, default=96, help="tokens of an answer at most")
    p.add_argument("--temperature", type=float, default=1.0)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--ignore-eos", action="store_true", help="every answer gets --max-tokens tokens")
    p.add_argument("--warmups", type=int, default=2)
    p.add_argument("--warm-requests", type=int, default=None, help="of one warm-up (default: as a round)")
    p.add_argument("--seed", type=int, default=0, help="base of all seeds")
    p.add_argument("--no-prefix-caching", action="store_true")
    p.add_argument(
        "--keep-prefixes", action="store_true", help="run prompts once per point: later runs find them cached"
    )
    p.add_argument(
        "--phase",
        default="all",
        choices=PHASES,
        help="decode: judge by the time in which all requests decode (give --requests-per-round 1x)",
    )
    p.add_argument("--acceptance", default="coupled", choices=("coupled", "rejection"))
    p.add_argument(
        "--simulated",
        default=None,
        help=f"acceptance by position, e.g. .9,.8,.7, or {', '.join(PRESETS)}; results are marked",
    )
    p.add_argument(
        "--spread", type=float, default=0.0, help="with --simulated: how unequal requests are, in log-odds"
    )
    p.add_argument(
        "--set", action="append", default=[], metavar="NAME=JSON", help="an EngineConfig field, e.g. device"
    )
    p.add_argument("--threads", type=int, default=1, help="CPU threads of one op")
    p.add_argument("--pin", default="auto", help="CPU to run on: a number, auto (the last allowed) or none")
    p.add_argument(
        "--slice",
        type=float,
        default=None,
        metavar="S",
        help="arms of a round run in turns of S seconds, the one furthest behind next (CPU only): for a machine "
        "whose speed changes (default: one arm behind the other)",
    )
    p.add_argument(
        "--clock", default="wall", choices=tuple(CLOCKS), help="cpu: count this process's own seconds"
    )
    p.add_argument(
        "--require",
        default=None,
        metavar="LOWER,MEAN",
        help="exit 1 if a lower bound or the geometric mean is below",
    )
    p.add_argument("--json", default=None, metavar="FILE", help="write the result here")
    p.add_argument("--plots", default=None, metavar="FOLDER", help="write SVG plots and report.html there")
    return p


def _plan(args: argparse.Namespace) -> Plan:
    simulated = None
    if args.simulated is not None:
        found = PRESETS.get(args.simulated)
        simulated = {"rates": list(found or rates("--simulated", args.simulated)), "spread": args.spread}
    waves = (args.requests_per_round or "").endswith("x")
    count = None
    if args.requests_per_round is not None:
        (count,) = integers("--requests-per-round", args.requests_per_round.removesuffix("x"))
    return Plan(
        concurrency=integers("--concurrency", args.concurrency),
        arms=args.arms,
        drafts=args.drafts,
        rounds=args.rounds,
        seconds=args.seconds,
        requests=None if waves else count,
        waves=count if waves else None,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        ignore_eos=args.ignore_eos,
        warmups=args.warmups,
        warm_requests=args.warm_requests,
        seed=args.seed,
        prefix_caching=not args.no_prefix_caching,
        keep_prefixes=args.keep_prefixes,
        phase=args.phase,
        slice=args.slice,
        clock=args.clock,
        acceptance=args.acceptance,
        simulated=simulated,
        engine={"threads": args.threads, **engine_settings(args.set)},
    )


def _requests(args: argparse.Namespace) -> RequestSet:
    """The set that the options name."""
    if args.random is not None and args.requests is not None:
        raise ParameterError("--random and --requests: two request sets; give one")
    if args.random is not None:
        count, length = (*integers("--random", args.random.replace("x", ",")), 0)[:2]
        name = args.model
        config = geometry(name) if name in GEOMETRIES else V4Config.load(name or BUNDLED)
        return random_prompts(count, length, config.vocab_size, args.seed)
    return bundled() if args.requests is None else read_requests(args.requests, args.form, args.limit)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 2 on a user's error, 1 if a check failed."""
    args = _parser().parse_args(argv)
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 170)
    try:
        plan = _plan(args)
        requests = _requests(args)
        required = rates("--require", args.require) if args.require else ()
        if required and len(required) != 2:
            raise ParameterError(f"--require {args.require!r}: expected two numbers, e.g. 0.95,0.98")
        if args.freeze:
            requests.freeze(args.freeze)
        pinned = None if args.pin == "none" else pin(None if args.pin == "auto" else int(args.pin))
        arms = parse_arms(plan.arms, plan.drafts)
        total = len(set(plan.concurrency)) * len(arms) * (plan.rounds + plan.warmups) + 1
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("sweep", total=total)
            result = sweep(
                args.model,
                requests,
                plan,
                pinned,
                lambda said: bar.update(task, advance=1, description=said),
                lambda so_far: write_json(so_far, args.json),  # whoever stops it keeps the points that ended
            )
    except user_errors() as err:
        print(f"sweep: {err}", file=sys.stderr)
        return 2
    for table in tables(result):
        console.print(table)
    mean = result["geometric_mean"]
    if mean is not None:
        lower = "no bound" if mean["lower"] is None else f"lower 95 % bound {mean['lower']:.3f}"
        console.print(f"adaptive / best fixed, geometric mean {mean['ratio']:.3f} ({lower})", highlight=False)
    if args.plots:
        from firesteel.bench.plots import write_report

        console.print(f"wrote {write_report(result, args.plots)}", highlight=False)
    wrong = complaints(result)
    if required:
        wrong += shortfalls(result, *required)
    for line in wrong:
        print(f"sweep: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
