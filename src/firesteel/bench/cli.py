"""``firesteel bench NAME``: every module of this package that has a ``main(argv)`` is a command."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from firesteel.config import ParameterError

SKIP = {"cli"}


def commands() -> dict[str, str]:
    """Name and first line of the documentation of every benchmark; nothing is imported for it."""
    out = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        runs = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
        if runs and file.stem not in SKIP:
            said = (ast.get_docstring(tree) or "").splitlines() or [""]
            out[file.stem] = said[0].split(": ", 1)[-1] if said[0].startswith("``") else said[0]
    return out


def main(argv: Sequence[str]) -> int:
    """Run one benchmark; without a name, or with --help, list them."""
    known = commands()
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: firesteel bench NAME [options]; firesteel bench NAME --help\n")
        width = max(map(len, known))
        print("\n".join(f"  {name:<{width}}  {said}" for name, said in known.items()))
        return 0 if argv else 2
    name = argv[0]
    if name not in known:
        print(f"firesteel bench: no benchmark {name!r}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"firesteel.bench.{name}").main(list(argv[1:])))


# ---- values of options -----------------------------------------------------------
def integers(option: str, text: str) -> tuple[int, ...]:
    """``64,16,1``; raises ParameterError naming the option."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as err:
        raise ParameterError(f"{option} {text!r}: expected integers, e.g. 64,16,4,1") from err


def rates(option: str, text: str) -> tuple[float, ...]:
    """``.9,.8,.7``; raises ParameterError naming the option."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as err:
        raise ParameterError(f"{option} {text!r}: expected numbers, e.g. .9,.8,.7") from err


def engine_settings(pairs: Sequence[str]) -> dict[str, Any]:
    """``NAME=JSON`` options as engine settings; a value that is no JSON is taken as text."""
    out: dict[str, Any] = {}
    for pair in pairs:
        name, found, value = pair.partition("=")
        if not found or not name:
            raise ParameterError(f"--set {pair!r}: expected NAME=VALUE, e.g. max_model_len=2048")
        try:
            out[name] = json.loads(value)
        except json.JSONDecodeError:
            out[name] = value
    return out
