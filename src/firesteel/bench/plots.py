"""Plots of benchmark results as small SVG files, and one self-contained HTML page.

    firesteel bench plots sweep.json --out FOLDER

Takes the JSON of ``bench sweep``, ``calibrate``, ``profile`` (a cost table) and ``bench steps``.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from firesteel.config import ParameterError
from firesteel.errors import user_errors

Result = Mapping[str, Any]
ARM_COLOURS = ("#888888", "#9ecae1", "#6baed6", "#3182bd", "#08519c", "#e6550d", "#31a354")
SIZE = (6.4, 4.0)
MOST_BYTES = 200_000


def _figure() -> tuple[Any, Any]:
    """(figure, axes) without a display; raises ParameterError naming the extra."""
    try:
        import matplotlib
    except ModuleNotFoundError as err:
        raise ParameterError("plots need matplotlib; pip install 'firesteel[bench]'") from err
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "firesteel", "font.size": 9})
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
    assert path.stat().st_size < MOST_BYTES, f"{path.name} is too large for a repository"
    return path


def _colours(names: Sequence[str]) -> dict[str, str]:
    fixed = [n for n in names if n != "adaptive"]
    return {n: ARM_COLOURS[i % 5] for i, n in enumerate(fixed)} | {"adaptive": ARM_COLOURS[5]}


def _mark(result: Result) -> str:
    return ", SIMULATED acceptance" if result.get("simulated") else ""


# ---- bench sweep -------------------------------------------------------------------
def pareto(result: Result, path: Path) -> Path:
    """Throughput against speed per user, one line per arm, one mark per concurrency."""
    figure, axes = _figure()
    points = sorted(result["points"], key=lambda p: p["concurrency"])
    names = list(points[0]["arms"])
    colours = _colours(names)
    for name in names:
        arms = [p["arms"][name] for p in points]
        known = [(a["tokens_per_second_per_user"], a["tokens_per_second"]) for a in arms]
        xy = [(x, y) for x, y in known if x]
        wide = 2.4 if name == "adaptive" else 1.2
        axes.plot(*zip(*xy, strict=True), "o-", color=colours[name], lw=wide, ms=3.5, label=name)
    for p in points:
        arm = p["arms"].get("adaptive") or p["arms"][names[-1]]
        if arm["tokens_per_second_per_user"]:
            at = (arm["tokens_per_second_per_user"], arm["tokens_per_second"])
            axes.annotate(str(p["concurrency"]), at, textcoords="offset points", xytext=(5, 4), fontsize=7)
    axes.set(
        xlabel="tokens/s per user", ylabel="tokens/s in all", title=f"throughput and speed{_mark(result)}"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):  # plain numbers instead of powers of ten
        axis.set_major_formatter("{x:,.0f}")
        axis.set_minor_formatter("{x:,.0f}")
        axis.set_tick_params(which="minor", labelsize=7)
    axes.legend(frameon=False)
    return _save(figure, path)


def ratios(result: Result, path: Path) -> Path:
    """Adaptive over the best fixed arm by concurrency, with the lower 95 % bound."""
    figure, axes = _figure()
    judged = sorted((p for p in result["points"] if "verdict" in p), key=lambda p: p["concurrency"])
    x = [p["concurrency"] for p in judged]
    mid = [p["verdict"]["held_out"]["ratio"] for p in judged]
    low = [p["verdict"]["held_out"]["lower"] or m for p, m in zip(judged, mid, strict=True)]
    axes.axhline(1.0, color="#888888", lw=1)
    axes.errorbar(
        x,
        mid,
        yerr=[[m - lo for m, lo in zip(mid, low, strict=True)], [0] * len(mid)],
        fmt="o",
        color=ARM_COLOURS[5],
    )
    for p in judged:
        where = (p["concurrency"], p["verdict"]["held_out"]["ratio"])
        axes.annotate(
            p["verdict"]["best_fixed"], where, textcoords="offset points", xytext=(5, 5), fontsize=7
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [str(c) for c in x])
    axes.set(
        xlabel="requests at once",
        ylabel="adaptive / best fixed",
        title=f"against the best fixed arm{_mark(result)}",
    )
    return _save(figure, path)


def budget(result: Result, path: Path) -> Path:
    """Drafts verified per request and step against load."""
    figure, axes = _figure()
    points = sorted(result["points"], key=lambda p: p["concurrency"])
    x = [p["concurrency"] for p in points]
    colours = _colours(list(points[0]["arms"]))
    for name in (n for n in points[0]["arms"] if n != "none"):
        y = [p["arms"][name]["drafts_per_request_step"] for p in points]
        axes.plot(x, y, "o-", color=colours[name], lw=2.4 if name == "adaptive" else 1, ms=3.5, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [str(c) for c in x])
    axes.set(
        xlabel="requests at once",
        ylabel="drafts per request and step",
        title=f"budget and load{_mark(result)}",
    )
    axes.legend(frameon=False)
    return _save(figure, path)


def acceptance(result: Result, path: Path) -> Path:
    """How often a draft is accepted, given that all before it were and as a running product."""
    figure, axes = _figure()
    judged = [p["acceptance_by_position"] for p in result["points"] if p.get("acceptance_by_position")]
    depth = max(len(a["judged"]) for a in judged)
    tried = [sum(a["judged"][j] for a in judged if j < len(a["judged"])) for j in range(depth)]
    taken = [sum(a["accepted"][j] for a in judged if j < len(a["accepted"])) for j in range(depth)]
    conditional = [t / max(n, 1) for t, n in zip(taken, tried, strict=True)]
    product, run = [], 1.0
    for c in conditional:
        run *= c
        product.append(run)
    x = list(range(1, depth + 1))
    axes.plot(x, conditional, "o-", color=ARM_COLOURS[3], label="accepted if all before it were")
    axes.plot(x, product, "s--", color=ARM_COLOURS[5], label="survives")
    axes.set(
        xlabel="position in the block", ylabel="share", ylim=(0, 1.02), title=f"acceptance{_mark(result)}"
    )
    axes.legend(frameon=False)
    return _save(figure, path)


# ---- calibration ---------------------------------------------------------------------
def reliability(curves: Mapping[str, Sequence[Result]], path: Path, title: str = "survival") -> Path:
    """Predicted against observed; ``curves``: name -> bins of ``predicted``, ``observed`` and ``count``."""
    figure, axes = _figure()
    axes.plot([0, 1], [0, 1], color="#888888", lw=1)
    for name, bins in curves.items():
        axes.plot(
            [b["predicted"] for b in bins],
            [b["observed"] for b in bins],
            "o-",
            ms=3,
            label=name,
        )
    axes.set(xlabel="predicted", ylabel="observed", xlim=(0, 1), ylim=(0, 1), title=f"reliability: {title}")
    axes.legend(frameon=False)
    return _save(figure, path)


# ---- cost tables and steps -------------------------------------------------------------
def cost_curve(table: Result, path: Path) -> Path:
    """Price of a step by rows, and of a drafting pass by requests."""
    figure, axes = _figure()
    style = "steps-pre" if table.get("staircase") else "default"
    axes.plot(
        table["rows"],
        table["step_ms"],
        "o-",
        ms=3,
        drawstyle=style,
        color=ARM_COLOURS[5],
        label="step, by rows",
    )
    for width, prices in sorted(table["draft"].items(), key=lambda kv: int(kv[0])):
        axes.plot(table["requests"], prices, "s--", ms=3, lw=1, label=f"drafting {width}, by requests")
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="rows or requests", ylabel="ms", ylim=(0, None), title=f"cost, context {table['context']}"
    )
    axes.legend(frameon=False)
    return _save(figure, path)


def steps(result: Result, path: Path) -> Path:
    """Measured milliseconds of a verify step against rows, with the floor, by context."""
    figure, axes = _figure()
    contexts = sorted({r["context"] for r in result["verify"]})
    for context, colour in zip(contexts, ARM_COLOURS[1:] * 3, strict=False):
        part = [r for r in result["verify"] if r["context"] == context]
        rows = [r["rows"] for r in part]
        axes.plot(rows, [r["ms"] for r in part], "o-", ms=3, color=colour, label=f"context {context}")
        if all(r["floor_ms"] for r in part):
            axes.plot(rows, [r["floor_ms"] for r in part], ":", color=colour, label="its floor")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="rows", ylabel="ms", title="verify step")
    axes.legend(frameon=False)
    return _save(figure, path)


# ---- a page ------------------------------------------------------------------------------
def plots_of(result: Result, folder: Path) -> list[Path]:
    """All plots that a result has the data for."""
    made: list[Path] = []

    def draw(name: str, plot: Callable[..., Path], *args: Any) -> None:
        made.append(plot(*args[:1], folder / f"{name}.svg", *args[1:]))

    if result.get("bench") == "sweep":
        draw("pareto", pareto, result)
        draw("budget", budget, result)
        if any("verdict" in p for p in result["points"]):
            draw("ratio", ratios, result)
        if any(p.get("acceptance_by_position") for p in result["points"]):
            draw("acceptance", acceptance, result)
        if result.get("cost_table"):
            draw("cost", cost_curve, result["cost_table"])
    elif result.get("bench") == "calibration":
        for kind, methods in result["quality"].items():
            for how, said in methods.items():
                curves = {
                    f"position {line['depth']}": line["bins"] for line in said["by_depth"] if line.get("bins")
                }
                draw(f"reliability_{kind}_{how}", reliability, curves, f"{kind}, {how}")
        curves = {name: said["survival"]["logistic"]["bins"] for name, said in result["domains"].items()}
        draw("reliability_domains", reliability, curves, "all depths, by domain")
    elif result.get("bench") == "steps":
        draw("steps", steps, result)
    elif "step_ms" in result:
        draw("cost", cost_curve, result)
    else:
        raise ParameterError("plots: this JSON is no result of sweep, calibrate, steps or profile")
    return made


STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .7rem;border-bottom:1px solid #ddd;"
    "text-align:right}th{background:#f5f5f5}.mark{background:#fff3cd;padding:.5rem 1rem}"
    ".plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(26rem,1fr));gap:1rem}svg{width:100%;height:auto}"
    "pre{background:#f7f7f7;padding:1rem;overflow:auto}"
)


def page(result: Result, images: Sequence[Path]) -> str:
    """A self-contained page: table, plots, all settings."""
    title = f"firesteel {result.get('bench', 'cost table')}"
    mark = (
        '<p class="mark">Acceptance is simulated: the texts mean nothing.</p>'
        if result.get("simulated")
        else ""
    )
    drawn = "".join(f"<figure>{_inline(p)}</figure>" for p in images)
    rest = {
        k: v for k, v in result.items() if k not in ("points", "quality", "verify", "draft", "cost_table")
    }
    settings = html.escape(json.dumps(rest, indent=1, ensure_ascii=False))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
        f"<h1>{title}</h1>{mark}{_table(result)}<div class=plots>{drawn}</div>"
        f"<h2>Settings</h2><pre>{settings}</pre></html>\n"
    )


def _inline(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return text[text.index("<svg") :]


def _table(result: Result) -> str:
    """The sweep's throughput table; nothing for other results."""
    if result.get("bench") != "sweep":
        return ""
    names = list(result["points"][0]["arms"])
    head = "".join(
        f"<th>{html.escape(n)}</th>" for n in ("at once", *names, "best fixed", "ratio", "lower 95 %")
    )
    body = ""
    for p in result["points"]:
        cells = [str(p["concurrency"]), *(f"{p['arms'][n]['tokens_per_second']:,.0f}" for n in names)]
        v = p.get("verdict")
        if v:
            lower = v["held_out"]["lower"]
            cells += [
                v["best_fixed"],
                f"{v['held_out']['ratio']:.3f}",
                "-" if lower is None else f"{lower:.3f}",
            ]
        body += "<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>"
    return f"<table><caption>tokens/s</caption><tr>{head}</tr>{body}</table>"


def write_report(result: Result, folder: str | Path) -> Path:
    """All plots of a result and ``report.html``; the page's path."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "report.html"
    file.write_text(page(result, plots_of(result, out)), encoding="utf-8")
    return file


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 2 on a user's error."""
    p = argparse.ArgumentParser(prog="firesteel bench plots", description="plots and a page of a result")
    p.add_argument("result", help="JSON of bench sweep, bench steps, calibrate or profile")
    p.add_argument("--out", default=".", metavar="FOLDER", help="where SVG files and report.html go")
    args = p.parse_args(argv)
    try:
        try:
            result = json.loads(Path(args.result).read_text(encoding="utf-8"))
        except json.JSONDecodeError as err:
            raise ParameterError(f"plots: {args.result} is not JSON ({err})") from err
        print(write_report(result, args.out))
    except user_errors() as err:
        print(f"plots: {err}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
