"""``firesteel train``: corpus, target, drafter or export, each a program of its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

PROGRAMS = {
    "corpus": ("corpus", "tokenizer and token streams from declared folders of text"),
    "target": ("run", "a small target, in a given time"),
    "drafter": ("drafter_run", "the DSpark drafter of a target, in a given time"),
    "export": ("export", "a training state as a folder in the official layout"),
}


def usage() -> str:
    """What there is."""
    lines = [f"  {name:<9} {text}" for name, (_, text) in PROGRAMS.items()]
    return (
        "usage: firesteel train PROGRAM ...\n\n"
        + "\n".join(lines)
        + "\n\n  PROGRAM --help lists its settings"
    )


def main(argv: Sequence[str]) -> int:
    """Run one program with the rest of the arguments; 2 if there is no such one or a package is missing."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in PROGRAMS:
        print(f"firesteel: train {argv[0]}: no such program\n{usage()}", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(f"firesteel.train.{PROGRAMS[argv[0]][0]}")
        module.main(list(argv[1:]))
    except ModuleNotFoundError as err:
        if (err.name or "").split(".")[0] == "firesteel":
            raise
        print(f"firesteel: train needs {err.name}; pip install 'firesteel[train]'", file=sys.stderr)
        return 2
    return 0
