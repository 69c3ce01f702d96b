"""``firesteel doctor``: is this machine fit to serve, and can its numbers be trusted?

Every check is a line of a table and an entry of a JSON report that can be sent
in: it holds no host name, no user name and no path. A check that fails says
what to change; one that cannot run says why.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from firesteel import __version__
from firesteel.bench.report import environment, write_json
from firesteel.config import EngineConfig, SamplingParams
from firesteel.engine.build import BUNDLED, place
from firesteel.engine.llm import LLM
from firesteel.errors import user_errors
from firesteel.inspect import inspect_path
from firesteel.ops import Choice

OK, NOTE, WARN, FAIL = "ok", "note", "warn", "fail"
PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "rich")
EXTRAS = {
    "serve": ("starlette", "uvicorn", "pydantic", "prometheus-client"),
    "structured": ("llguidance",),
    "otel": ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
}
OPEN_FILES = 4096  # below it, a server runs out of sockets before it runs out of slots
# vendor's figures by a part of the device's name: memory TB/s, dense bf16 TFLOP/s
PEAKS = {
    "H200": (4.8, 989.0),
    "H100": (3.35, 989.0),
    "B200": (8.0, 2250.0),
    "A100": (2.0, 312.0),
    "MI300X": (5.3, 1307.0),
    "MI325X": (6.0, 1307.0),
    "MI355X": (8.0, 2500.0),
}
LEAST_COPY, LEAST_MATMUL = 0.7, 0.45  # shares of those that a healthy device reaches
BATCHES, ALONE = (2, 3, 5, 9, 16, 33), 6  # row counts of the invariance checks; rows also run alone
PROMPTS = (
    "Ada has 12 apples and buys 3 bags with 8 apples each. How many apples does she have?",
    "def fibonacci(n):",
    "It was a cold morning, and the old man",
)


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, how it stands, what was found, and what to change if it is bad."""

    name: str
    status: str
    found: str
    change: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


# ---- the machine ---------------------------------------------------------------------
def check_system() -> Iterator[Check]:
    """Python, cores, memory, open files."""
    version = platform.python_version()
    fits = sys.version_info >= (3, 11)
    yield Check("python", OK if fits else FAIL, version, "" if fits else "install Python 3.11 or newer")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Check("processor", NOTE, f"{environment()['cpu']}, {cores} usable cores", facts={"cores": cores})
    total, free = (os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_AVPHYS_PAGES"))
    gib = [pages * os.sysconf("SC_PAGE_SIZE") / 2**30 for pages in (total, free)]
    yield Check("memory", NOTE, f"{gib[0]:.1f} GiB, {gib[1]:.1f} unused", facts={"gib": round(gib[0], 1)})
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = soft == resource.RLIM_INFINITY or soft >= OPEN_FILES
    change = "" if many else f"raise it before serving: ulimit -n {4 * OPEN_FILES}"
    yield Check("open files", OK if many else WARN, f"limit {soft}", change, {"limit": soft})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_packages() -> Iterator[Check]:
    """Versions, and which extras are there."""
    found = {p: _version(p) for p in PACKAGES}
    gone = [p for p, v in found.items() if v is None]
    text = ", ".join(f"{p} {v}" for p, v in found.items() if v)
    change = f"pip install {' '.join(gone)}" if gone else ""
    yield Check("packages", FAIL if gone else OK, text, change, {"firesteel": __version__, **found})
    for extra, parts in EXTRAS.items():
        lacking = [p for p in parts if _version(p) is None]
        if lacking:
            hint = f"for this feature: pip install 'firesteel[{extra}]'"
            yield Check(f"extra {extra}", NOTE, f"not installed ({', '.join(lacking)})", hint)
        else:
            yield Check(f"extra {extra}", OK, "installed")


def check_compiler() -> Iterator[Check]:
    """The C++ compiler and what the compiled backend says of it."""
    from firesteel.ops.native import why_not
    from firesteel.ops.native.build import BuildError, compiler

    try:
        program = compiler()
    except BuildError as err:
        yield Check("compiler", WARN, str(err), "install g++ or clang++; without it CPU ops are plain torch")
        return
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20)
    first = said.stdout.splitlines()[0] if said.stdout else Path(program).name
    yield Check("compiler", OK, first)
    reason = why_not()
    change = (
        "CPU ops fall to plain torch, several times slower; mend the compiler or set CXX" if reason else ""
    )
    yield Check("compiled ops", WARN if reason else OK, reason or "built, and right", change)


# ---- the numbers ---------------------------------------------------------------------
def check_backend(name: str) -> tuple[list[Check], Choice | None]:
    """Which backend would serve, on what, and why others would not."""
    try:
        choice, device = place(EngineConfig.of(backend=name))
    except user_errors() as err:
        return [Check("ops backend", FAIL, str(err), "set --backend auto")], None
    passed = "".join(f"; {other} not used: {why}" for other, why in choice.reasons.items())
    slow = choice.ops.name == "reference" or (torch.cuda.is_available() and device.type == "cpu")
    change = "the fastest one for this machine is passed over: see the reason" if slow and passed else ""
    found = f"{choice.ops.name} on {device.type}{passed}"
    facts = {"name": choice.ops.name, "device": device.type, "reasons": choice.reasons}
    return [Check("ops backend", WARN if slow else OK, found, change, facts)], choice


def check_invariance(choice: Choice, threads: int, names: Iterable[str] | None = None) -> Check:
    """Every op (or those ``names``) gives a row the same bits alone and in any batch, at so many threads."""
    from firesteel.ops.testing import assert_row_invariant
    from firesteel.ops.testing_cases import ALL_CASES

    cases = {n: ALL_CASES[n] for n in (ALL_CASES if names is None else names)}
    name = f"rows invariant, {choice.ops.name}, {threads} thread{'s' if threads > 1 else ''}"
    if choice.ops.name not in ("native", "reference"):
        found = "ops of a GPU are checked by its tests (pytest -m gpu), texts below"
        return Check(f"rows invariant, {choice.ops.name}", NOTE, found)
    begun, faults = time.perf_counter(), []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for title, case in cases.items():
            batches = case.world.batch if case.world else None

            def run(rows: Any, case: Any = case) -> Any:
                return case.run(choice.ops, rows)

            try:
                assert_row_invariant(
                    run, lambda rows: rows, case.rows, batches=batches, sizes=BATCHES, alone=ALONE
                )
            except AssertionError as err:
                faults.append(f"{title}: {err}")
    finally:
        torch.set_num_threads(before)
    seconds = time.perf_counter() - begun
    facts = {"cases": len(cases), "seconds": round(seconds, 1), "faults": faults}
    if faults:
        change = "texts would depend on the load: use --backend reference and send this report in"
        return Check(name, FAIL, f"{len(faults)} of {len(cases)} ops fail; {faults[0]}", change, facts)
    return Check(
        name, OK, f"{len(cases)} ops, the same bits alone and in batches ({seconds:.0f} s)", "", facts
    )


# ---- the accelerator -------------------------------------------------------------------
def check_devices() -> Iterator[Check]:
    """GPUs, and whether they reach what such a device should."""
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        why = "none visible" if built else "this torch is built for the CPU"
        yield Check("accelerator", NOTE, f"{why}; the CPU serves", "")
        return
    stack = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    for index in range(torch.cuda.device_count()):
        at = torch.cuda.get_device_properties(index)
        gib = at.total_memory / 2**30
        facts = {"name": at.name, "gib": round(gib, 1), "stack": stack}
        yield Check(f"device {index}", OK, f"{at.name}, {gib:.0f} GiB, {stack}", "", facts)
        yield from check_floors(index, at.name)


def check_floors(index: int, name: str) -> Iterator[Check]:
    """Copy bandwidth (bytes read plus written) and bf16 products of one device."""
    copy, matmul = measure_copy(index), measure_matmul(index)
    peak = next((rates for part, rates in PEAKS.items() if part in name), None)
    figures = (
        ("copy", copy, "TB/s", peak[0] if peak else None, LEAST_COPY),
        ("bf16 matmul", matmul, "TFLOP/s", peak[1] if peak else None, LEAST_MATMUL),
    )
    for what, value, unit, top, least in figures:
        label, facts = f"device {index} {what}", {"value": round(value, 3), "unit": unit, "peak": top}
        if top is None:
            yield Check(label, NOTE, f"{value:.2f} {unit}; no figure to compare with", "", facts)
            continue
        share = value / top
        bad = share < least
        change = (
            "another program, a power limit or heat holds it back; see nvidia-smi or rocm-smi" if bad else ""
        )
        yield Check(label, FAIL if bad else OK, f"{value:.2f} {unit}, {share:.0%} of {top:g}", change, facts)


def measure_copy(index: int, size: int = 2**30) -> float:
    """TB/s read and written by a copy of ``size`` bytes, the best of several."""
    source = torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}")
    target = torch.empty_like(source)
    return 2 * size / _best_ms(index, lambda: target.copy_(source)) / 1e9


def measure_matmul(index: int, n: int = 8192) -> float:
    """TFLOP/s of a square bf16 product, the best of several."""
    a, b = (torch.randn(n, n, device=f"cuda:{index}", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _best_ms(index, lambda: torch.mm(a, b, out=out)) / 1e9


def _best_ms(index: int, work: Callable[[], Any], repeats: int = 10, inner: int = 5) -> float:
    times = []
    with torch.cuda.device(index):
        for _ in range(repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(inner):
                work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / inner)
    return min(times)


# ---- the checkpoint ----------------------------------------------------------------------
def check_checkpoint(model: Path, backend: str, threads: int | None) -> Iterator[Check]:
    """What ``inspect`` says of it; and that texts do not depend on company or, with a drafter, on drafts."""
    name = "bundled model" if model == BUNDLED else f"checkpoint {model.name}"
    try:
        report = inspect_path(model)
    except user_errors() as err:
        found = str(err).replace(str(model), model.name)  # the report holds no path
        yield Check(name, FAIL, found, "give a checkpoint folder with --model")
        return
    if report.problems:
        found = f"{len(report.problems)} problems; {report.problems[0]}"
        yield Check(name, FAIL, found, "fetch it again; firesteel inspect tells the rest")
        return
    yield Check(name, OK, "sound: every tensor has its name, shape and format")
    try:
        yield from check_texts(model, report.drafter == "dspark", backend, threads)
    except user_errors() as err:
        yield Check(f"{name}, answers", FAIL, str(err).replace(str(model), model.name), "see the message")


def check_texts(model: Path, drafter: bool, backend: str, threads: int | None) -> Iterator[Check]:
    """Greedy and sampled answers: alone, together and, if there is a drafter, with drafts."""
    settings: dict[str, Any] = {"backend": backend, "threads": threads, "max_model_len": 512}
    params = [SamplingParams(max_tokens=32, temperature=t, seed=7) for t in (0.0, 1.0)]
    llm = LLM(model, **settings)
    asks = [(_prompt(llm, text), p) for text in PROMPTS for p in params]
    alone = [llm.generate([prompt], p)[0].token_ids for prompt, p in asks]
    begun = time.perf_counter()
    together = [c.token_ids for c in llm.generate([a for a, _ in asks], [p for _, p in asks])]
    rate = sum(map(len, together)) / (time.perf_counter() - begun)
    yield _same("texts alone and together", alone, together, f", {rate:.0f} tokens/s for {len(asks)}")
    if not drafter:
        yield Check("texts with and without drafts", NOTE, "the checkpoint has no drafter")
        return
    drafted = LLM(model, speculative={"method": "dspark", "num_speculative_tokens": 5}, **settings)
    answers = drafted.generate([a for a, _ in asks], [p for _, p in asks])
    verified, accepted = (sum(a.stats[k] for a in answers) for k in ("verified", "accepted"))
    told = f", {accepted} of {verified} drafts accepted"
    yield _same("texts with and without drafts", alone, [a.token_ids for a in answers], told)


def _prompt(llm: LLM, text: str) -> Any:
    """Text for a model with a tokenizer, ids made from it otherwise."""
    if llm.tokenizer is not None:
        return [llm.config.bos_token_id, *llm.tokenizer.encode(text)]
    return [ord(c) % llm.config.vocab_size for c in text]


def _same(name: str, want: list[Any], have: list[Any], told: str) -> Check:
    differ = [i for i, (a, b) in enumerate(zip(want, have, strict=True)) if a != b]
    if differ:
        change = "texts must never depend on the load: use --backend reference and send this report in"
        return Check(name, FAIL, f"{len(differ)} of {len(want)} answers differ", change, {"differ": differ})
    return Check(name, OK, f"{len(want)} answers, token for token the same{told}")


# ---- all of it -----------------------------------------------------------------------------
def examine(model: Path, backend: str, threads: int | None, progress: Callable[[str], None]) -> list[Check]:
    """All checks in order; ``progress`` hears what begins."""
    out: list[Check] = []
    for what, checks in (
        ("system", check_system),
        ("packages", check_packages),
        ("compiler", check_compiler),
    ):
        progress(what)
        out.extend(checks())
    progress("accelerators")
    out.extend(check_devices())
    chosen, choice = check_backend(backend)
    out.extend(chosen)
    if choice is not None:
        on_gpu = choice.ops.name not in ("native", "reference")
        for count in sorted({1} if on_gpu else {1, threads or torch.get_num_threads()}):
            progress(f"invariance of every op, {count} threads")
            out.append(check_invariance(choice, count))
    progress("checkpoint")
    out.extend(check_checkpoint(model, backend, threads))
    return out


def run_doctor(model: str | None, backend: str, threads: int | None, report: str | None) -> int:
    """Examine, print a table, write the report; 1 if a check fails."""
    console = Console()
    with Console(stderr=True).status("looking") as status:
        checks = examine(
            Path(model) if model else BUNDLED,
            backend,
            threads,
            lambda what: status.update(f"checking {what}"),
        )
    colours = {OK: "green", NOTE: "dim", WARN: "yellow", FAIL: "bold red"}
    table = Table("check", "", "found", "change")
    for check in checks:
        table.add_row(check.name, f"[{colours[check.status]}]{check.status}", check.found, check.change)
    console.print(table)
    counts = {status: sum(c.status == status for c in checks) for status in (OK, NOTE, WARN, FAIL)}
    verdict = "fit to serve" if not counts[FAIL] else f"{counts[FAIL]} checks failed: see the last column"
    console.print(verdict, style="bold")
    head = {"verdict": verdict, "counts": counts, "environment": environment()}
    write_json({**head, "checks": [asdict(c) for c in checks]}, report)
    if report is not None:
        console.print(f"report: {Path(report).name}", style="dim")
    return 1 if counts[FAIL] else 0
