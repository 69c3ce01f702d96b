"""What every benchmark says of itself: machine, commit, date; table and JSON from one dict."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from firesteel.config import ParameterError


def environment() -> dict[str, Any]:
    """Where and when a result was made; no host names or paths."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _commit() -> str:
    """Commit of the sources, "+" if they differ from it; "unknown" outside a checkout."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "."],
            cwd=here,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def place_for(path: str | Path) -> Path:
    """The file to write to; its folder is made. Raises ParameterError where that cannot be."""
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ParameterError(f"{path}: its folder cannot be made ({err}); choose another file") from err
    if file.is_dir():
        raise ParameterError(f"{path}: a folder; name a file")
    return file


def write_json(result: dict[str, Any], path: str | Path | None) -> None:
    """Store a result for comparison; None stores nothing. Who stops it in the middle keeps the file of before."""
    if path is None:
        return
    file, text = place_for(path), json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    if file.is_symlink() or (file.exists() and not file.is_file()):  # /dev/stdout, a pipe
        file.write_text(text)
        return
    part = file.with_name(f"{file.name}.part")
    try:
        part.write_text(text)
        part.replace(file)
    except BaseException:  # an interrupt, too
        part.unlink(missing_ok=True)
        raise
