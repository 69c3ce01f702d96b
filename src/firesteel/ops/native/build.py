"""Compiles the native library at first use and keeps it in a cache.

The cache key holds the sources, the flags, the compiler and the CPU, so another
machine or another version never loads what was made for this one. Concurrent
builds do the same work twice and agree: the last rename wins.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
NATIVE = "-march=native"
FLAGS = (
    "-std=c++17",
    "-O3",
    NATIVE,
    "-ffp-contract=off",  # fused only where the source says so: tails equal main loops
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-fvisibility=hidden",
    "-w",
)
OPENMP = "-fopenmp"
KINDS = ("f32", "bf16", "fp4")  # of weights; kernels.cpp is compiled once for each
SECONDS = 300  # of one compiler run


class BuildError(RuntimeError):
    """The library could not be compiled; the message says why."""


def compiler() -> str:
    """Path of the C++ compiler: $CXX, else g++, clang++ or c++."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"no C++ compiler ({', '.join(names)} not found); install one or set CXX")


def cache_folder() -> Path:
    """$FIRESTEEL_CACHE or ~/.cache/firesteel, or a fresh private folder where neither can be written."""
    base = os.environ.get("FIRESTEEL_CACHE")
    folder = (Path(base) if base else Path.home() / ".cache" / "firesteel") / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="firesteel-"))


def cpu_identity() -> str:
    """What -march=native depends on."""
    lines = {platform.machine()}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines |= {
                line for line in file if line.startswith(("model name", "flags", "Features", "CPU part"))
            }
    except OSError:
        lines.add(platform.processor())
    return "".join(sorted(lines))


def key(cxx: str) -> str:
    """Hash of everything that decides the library's code."""
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True, timeout=60).stdout
    digest = hashlib.sha256(repr((FLAGS, OPENMP, KINDS, version, cpu_identity())).encode())
    for source in sorted(HERE.glob("*.cpp")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:24]


def library_path() -> Path:
    """The compiled library, built if the cache lacks it; raises BuildError."""
    cxx = compiler()
    try:
        target = cache_folder() / f"ops-{key(cxx)}.so"
        if target.is_file():
            return target
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as work:
            made = _build(cxx, Path(work))
            os.replace(made, target)
    except (OSError, subprocess.TimeoutExpired) as err:
        raise BuildError(f"{err}; check the compiler and the cache folder ($FIRESTEEL_CACHE)") from err
    return target


def _build(cxx: str, work: Path) -> Path:
    """Compile with everything, else without OpenMP (threads then run one after another), else for any CPU."""
    plain = tuple(flag for flag in FLAGS if flag != NATIVE)
    first: BuildError | None = None
    for flags in ((*FLAGS, OPENMP), FLAGS, (*plain, OPENMP), plain):
        try:
            return _compile(cxx, flags, work)
        except BuildError as err:
            first = first or err
    assert first is not None
    raise first


def _compile(cxx: str, flags: tuple[str, ...], work: Path) -> Path:
    """All units side by side, then the link."""
    units: list[tuple[str, str, tuple[str, ...]]] = [
        (f"{kind}.o", "kernels.cpp", (f"-DKIND={i}", f"-DTASK=task_{kind}")) for i, kind in enumerate(KINDS)
    ]
    units.append(("library.o", "library.cpp", ()))
    running = []
    for out, source, extra in units:
        command = [cxx, *flags, *extra, "-c", str(HERE / source), "-o", str(work / out)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in running]
    finally:
        for process in running:
            process.kill()  # does nothing to one that has ended
    for process, output in zip(running, outputs, strict=True):
        _check(process.returncode, output, cxx)
    made = work / "ops.so"
    command = [cxx, *flags, "-shared", *(str(work / out) for out, _, _ in units), "-o", str(made)]
    link = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    _check(link.returncode, link.stderr, cxx)
    return made


def _check(code: int, output: str, cxx: str) -> None:
    if code:
        lines = [line for line in output.splitlines() if line.strip()][:6]
        raise BuildError(f"{Path(cxx).name} failed with status {code}:\n  " + "\n  ".join(lines))


def load() -> ctypes.CDLL:
    """The library, compiled if need be; raises BuildError."""
    path = library_path()
    # OpenMP reads this when it is loaded: threads that spin while others hold the cores cost tenfold
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    try:
        return ctypes.CDLL(str(path))
    except OSError as err:
        raise BuildError(f"{path} does not load ({err}); delete it and start again") from err
