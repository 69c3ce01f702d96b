"""``python -m firesteel.ops.triton.compile``: every kernel for every target, without a GPU.

Compiles each ``Spec`` for gfx950, gfx942, sm_90 and sm_100 and reads registers, local
memory, spills and matrix instructions out of the machine code. Exit status 1 on
any fault: a kernel that does not compile or needs more local memory than a program
gets, a spill (on gfx942 more than ALLOWED_SPILLS, on sm_90 than FRAMES), a block-scaled kernel without that
instruction on gfx950, ``dot_scaled`` on gfx942. Nothing here is run on a device: the
figures say what the compiler made, not that it computes the right thing.

The file of figures keeps one run per Triton version: a run replaces the kernels it
compiled and leaves the other versions' alone, and the table shows all of them.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from firesteel.ops.triton import launch
from firesteel.ops.triton.spec import Spec
from firesteel.ops.triton.target import TARGETS, Target

MODULES = (
    "linear", "together", "experts", "folded", "moe", "route", "attention", "indexer", "compress", "norms", "hyper",
    "context", "head", "sample", "draft", "shape", "rows", "commit", "drawn",
)  # fmt: skip
STRICT = ("gfx950", "sm_90", "sm_100")  # no spill at all, but for ...
# ... bytes of stack frame that a form may keep on sm_90: a few addresses, written before its loop and read outside
# of it. Each was measured on an H200 and is faster than the form that it replaced.
FRAMES = {
    "linear-fp8-crossed-2-768": 8,
    "linears-together-piped-384": 16,
    "attention_all_gathered_4": 8,
    "attention_chosen_gathered_4": 16,
    "attention_window_relay": 8,
    "attention_block_relay": 8,
    "attention_all_relay": 8,
    "attention_chosen_relay": 16,
    "experts-down-fed-64": 8,  # Triton 3.6 alone; one number, in its loop
}
ALLOWED_SPILLS: dict[str, int] = {}  # gfx942: registers a kernel may spill; none does (Triton 3.8.0)
INSTRUCTIONS = re.compile(r"\b(wgmma\.mma_async\S+|mma\.sync\S+|tcgen05\.mma\S*|v_s?mfmac?_\w+)")
SCALED = "v_mfma_scale"


@dataclass
class Made:
    """What the compiler made of one kernel for one target.

    ``registers``: vector registers per thread (AMD: with the ``accumulators`` among them);
    ``local``: bytes of LDS or shared memory; ``spills``: registers (AMD) or bytes of stack frame (NVIDIA);
    ``matrix``: how often each matrix instruction stands in the code.
    """

    kernel: str
    target: str
    registers: int = 0
    accumulators: int = 0
    local: int = 0
    spills: int = 0
    matrix: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)


def specs(only: Sequence[str] = ()) -> list[Spec]:
    """All kernels, or those whose name holds one of ``only``."""
    found: list[Spec] = []
    for module in MODULES:
        found += importlib.import_module(f"firesteel.ops.triton.{module}").KERNELS
    names = Counter(spec.name for spec in found)
    twice = [name for name, count in names.items() if count > 1]
    assert not twice, f"kernels of one name: {twice}"
    return [s for s in found if not only or any(part in s.name for part in only)]


class _Absent:
    """Stands where Triton looks for a device while it compiles for one that is not here."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        """What kernels ask for that differ by target."""
        return self.target


def compile_spec(spec: Spec, target: Target) -> Any:
    """The compiled kernel; raises whatever the compiler raises."""
    names: list[str] = spec.fn.arg_names
    constants, options = dict(spec.constexprs), dict(spec.options)
    for key, value in spec.overrides.get(target.name, {}).items():
        (constants if key in names else options)[key] = value
    missing = [n for n in names if n not in spec.signature and n not in constants]
    assert not missing, f"{spec.name}: no type and no value for {missing}"
    types = {n: spec.signature.get(n, "constexpr") for n in names}
    types = {n: f"*{target.fp8_name}" if t == "*fp8" else t for n, t in types.items()}
    aligned = [i for i, n in enumerate(names) if types[n].startswith("*") or n in spec.aligned]
    source = (GluonASTSource if spec.fn.is_gluon() else ASTSource)(
        fn=spec.fn,
        signature=types,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    device = GPUTarget(target.backend, target.arch, target.wave)
    driver = triton.runtime.driver
    before = driver._active  # there may be none, and asking for it would look for a device
    driver.set_active(_Absent(device))
    try:
        return triton.compile(source, target=device, options=options)
    finally:
        driver._active = before


def read_amd(text: str, made: Made) -> None:
    """Registers and spills from the metadata of the assembly."""

    def count(key: str) -> int:
        hit = re.search(rf"\.{key}:\s+(\d+)", text)
        assert hit, f"no .{key} in the assembly"
        return int(hit.group(1))

    made.registers, made.accumulators = count("vgpr_count"), count("agpr_count")
    made.spills = count("vgpr_spill_count") + count("sgpr_spill_count")


def read_nvidia(cubin: bytes, made: Made) -> None:
    """Registers and stack frame as cuobjdump reports them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    hit = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert hit, f"unexpected report of cuobjdump: {report[:200]}"
    made.registers, made.spills = int(hit.group(1)), int(hit.group(2))


def judge(spec: Spec, target: Target, made: Made, ir: str) -> None:
    """Write down what is wrong."""
    if made.local > target.local_bytes:
        made.faults.append(f"{made.local} bytes of local memory, a program gets {target.local_bytes}")
    allowed = 0 if target.name in STRICT else ALLOWED_SPILLS.get(spec.name, 0)
    if target.name == "sm_90":
        allowed = FRAMES.get(spec.name, 0)
    if made.spills > allowed:
        made.faults.append(f"{made.spills} spilled, {allowed} allowed")
    if target.name == "gfx950" and spec.scaled and not any(name.startswith(SCALED) for name in made.matrix):
        made.faults.append(f"no {SCALED}")
    if not target.scaled_mma and "tt.dot_scaled" in ir:
        made.faults.append(f"dot_scaled, which {target.name} has no instruction for")


def make(spec: Spec, target: Target) -> Made:
    """Compile, read and judge one kernel."""
    made, begin = Made(spec.name, target.name), time.perf_counter()
    try:
        compiled = compile_spec(spec, target)
    except Exception as err:  # the compiler raises anything; the table has to say what
        lines = [line.strip() for line in str(err).splitlines() if line.strip()]
        made.faults.append(f"{type(err).__name__}: {(lines or ['no message'])[-1][:200]}")
        return made
    made.seconds = round(time.perf_counter() - begin, 1)
    made.local = int(compiled.metadata.shared)
    text = compiled.asm["amdgcn" if target.backend == "hip" else "ptx"]
    made.matrix = dict(sorted(Counter(INSTRUCTIONS.findall(text)).items()))
    if target.backend == "hip":
        read_amd(text, made)
    else:
        read_nvidia(compiled.asm["cubin"], made)
    judge(spec, target, made, compiled.asm["ttgir" if spec.fn.is_gluon() else "ttir"])
    return made


def make_named(name: str, target: str) -> Made:
    """``make`` by names, for a worker process."""
    spec = next(s for s in specs() if s.name == name)
    return make(spec, TARGETS[target])


def make_all(wanted: Iterable[Spec], targets: Sequence[str], jobs: int) -> list[Made]:
    """All pairs, in the order of the specs; a line per kernel goes to stderr.

    Every target has workers of its own: Triton 3.6 stops with a failed assertion where a process
    compiles a conversion to FP8 for gfx950 and then for gfx942.
    """
    wanted, context = list(wanted), multiprocessing.get_context("spawn")
    found: dict[tuple[str, str], Made] = {}
    for target in targets:
        names = [spec.name for spec in wanted if target in spec.targets]
        with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
            for made in pool.map(make_named, names, [target] * len(names)):
                note = "; ".join(made.faults) or "ok"
                line = f"{made.target:7} {made.kernel:40} {made.seconds:6.1f} s  {note}"
                print(line, file=sys.stderr, flush=True)
                found[made.kernel, target] = made
    return [found[s.name, t] for s in wanted for t in targets if t in s.targets]


# ---- the report ------------------------------------------------------------------------------
def short(name: str) -> str:
    """A matrix instruction without what all of its kind share."""
    return name.replace(".sync.aligned", "").replace("mma_async.", "")


Runs = dict[str, list[Made]]  # Triton version -> kernels


def read_runs(path: Path) -> Runs:
    """The figures of a file that ``write_runs`` wrote; none if there is no file."""
    if not path.exists():
        return {}
    raw = json.loads(path.read_text())
    return {version: [Made(**made) for made in kernels] for version, kernels in raw["triton"].items()}


def write_runs(path: Path, runs: Runs) -> None:
    """One line per kernel, so that a change of one is a change of one line."""
    blocks = []
    for version, made in runs.items():
        figures = [
            {k: v for k, v in asdict(m).items() if k != "seconds"} for m in made
        ]  # a cache has no time
        lines = ",\n".join("   " + json.dumps(f) for f in figures)
        blocks.append(f'  "{version}": [\n{lines}\n  ]')
    path.write_text('{\n "command": "make kernels",\n "triton": {\n' + ",\n".join(blocks) + "\n }\n}\n")


def merged(old: Runs, version: str, made: Sequence[Made]) -> Runs:
    """``old`` with ``made`` in place of the same kernels of that version; kernels that are no more go."""
    kept = {(m.kernel, m.target): m for m in old.get(version, [])} | {(m.kernel, m.target): m for m in made}
    order = [(spec.name, target) for spec in specs() for target in TARGETS if target in spec.targets]
    runs = {**old, version: [kept[pair] for pair in order if pair in kept]}
    return dict(sorted(runs.items(), reverse=True))


def summary(runs: Runs) -> list[str]:
    """A line per version and target."""
    lines = [
        "| Triton | target | kernels | spilling | most registers | most local KiB | native scaled instruction |",
        "|---|---|---|---|---|---|---|",
    ]
    native = re.compile(r"v_mfma_scale|block_scale|mxf4|mxf8")
    for version, made in runs.items():
        for target in TARGETS.values():
            rows = [m for m in made if m.target == target.name]
            if not rows:
                continue
            scaled = sum(any(native.search(name) for name in m.matrix) for m in rows)
            local = f"{max(m.local for m in rows) / 1024:.1f} of {target.local_bytes // 1024}"
            spilling, registers = sum(m.spills > 0 for m in rows), max(m.registers for m in rows)
            lines.append(
                f"| {version} | {target.name} | {len(rows)} | {spilling} | {registers} | {local} | {scaled or '–'} |"
            )
    return lines


def table(rows: Sequence[Made]) -> list[str]:
    """A line per kernel."""
    lines = ["| kernel | registers | local KiB | spills | matrix instructions |", "|---|---|---|---|---|"]
    for m in rows:
        registers = f"{m.registers} ({m.accumulators})" if m.accumulators else str(m.registers)
        matrix = ", ".join(f"{short(name)} ×{count}" for name, count in m.matrix.items()) or "–"
        spills = "; ".join([str(m.spills), *m.faults])
        lines.append(f"| {m.kernel} | {registers} | {m.local / 1024:.1f} | {spills} | {matrix} |")
    return lines


def page(runs: Runs) -> str:
    """docs/kernels.md."""
    lines = [
        "# Kernels as compiled",
        "",
        "Made by `make kernels`; no device was used, so this shows what the compiler made and not that it "
        "computes the right thing. Registers: per thread, on AMD vector registers (of which accumulation "
        "registers); local: LDS or shared memory of a program; spills: registers (AMD) or bytes of stack frame "
        "(NVIDIA); then how often each matrix instruction stands in the code. The widths are those of "
        "DeepSeek-V4-Flash.",
        "",
        *summary(runs),
    ]
    for version, made in runs.items():
        for target in TARGETS.values():
            rows = [m for m in made if m.target == target.name]
            if rows:
                lines += ["", f"## {target.name}, Triton {version}", ""]
                lines += [f"A program may use {target.local_bytes // 1024} KiB; waves of {target.wave}.", ""]
                lines += table(rows)
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="parts of kernel names")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="file of figures to bring up to date")
    parser.add_argument("--docs", type=Path, help="file for the table")
    args = parser.parse_args(arguments)
    if launch.INTERPRETED:
        parser.error("kernels are interpreted here; unset TRITON_INTERPRET")
    made = make_all(specs(args.only), args.targets, args.jobs)
    runs = merged(read_runs(args.json) if args.json else {}, triton.__version__, made)
    if args.json:
        write_runs(args.json, runs)
    if args.docs:
        args.docs.write_text(page(runs))
    bad = [m for m in made if m.faults]
    print(f"{len(made)} compiled, {len(bad)} with faults")
    for m in bad:
        print(f"{m.target} {m.kernel}: {'; '.join(m.faults)}")
    return 1 if bad or not made else 0


if __name__ == "__main__":
    sys.exit(main())
