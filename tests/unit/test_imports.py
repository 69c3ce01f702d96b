"""The house rules that a reader cannot see at a glance: who imports whom, no vendor in a model, sizes."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "firesteel"

# Dependencies point to a smaller number or stay level. A new top-level module needs its place here.
LAYERS = {
    "core": 0, "config": 0, "parallel": 0, "ops": 0, "checkpoint": 0, "sampling": 0, "structured": 0,
    "models": 1, "speculation": 1, "tokenizer": 1,
    "engine": 2,
    "serve": 3, "bench": 3, "eval": 3, "train": 3, "inspect": 3, "demo": 3, "doctor": 3, "client": 3, "errors": 3,
    "cli": 4, "__init__": 4, "__main__": 4,
}  # fmt: skip
# level with each other, yet kept apart
APART = {("speculation", "models"), ("models", "speculation"), ("core", "ops"), ("serve", "train")}
VENDORS = {"cuda", "hip", "rocm", "nvidia", "amd", "triton", "nccl", "rccl"}
MAX_LINES, TOO_MANY_LINES, MAX_FUNCTION = 500, 600, 60


@dataclass(frozen=True)
class Edge:
    """One import: module ``source`` (file, line) names ``target``, both without the package prefix."""

    source: str
    target: str
    where: str


def module_name(root: Path, file: Path) -> str:
    """``ops/__init__.py`` -> ``ops``; the package's own ``__init__.py`` -> ``__init__``."""
    parts = list(file.relative_to(root).with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


def imports(root: Path, file: Path) -> Iterator[Edge]:
    """Every import of the package by itself: absolute, relative, lazy and for types only."""
    source = module_name(root, file)
    folder = file.relative_to(root).parent.parts
    package = root.name
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        where = f"{file.relative_to(root)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").split(".") if node.module else []
            if node.level:
                up = folder[: len(folder) - (node.level - 1)]
                base = [package, *up, *base]
            # `from firesteel import ops` names a module only in its last part
            names = [[*base, alias.name] for alias in node.names] if len(base) == 1 else [base]
        else:
            continue
        for name in names:
            if name and name[0] == package:
                yield Edge(source, ".".join(name[1:]) or "__init__", where)


def import_faults(root: Path) -> list[str]:
    """Imports against the direction, sorted by place."""
    faults = []
    for file in sorted(root.rglob("*.py")):
        source = module_name(root, file).split(".")[0]
        if source not in LAYERS:
            faults.append(
                f"{file.relative_to(root)}: give {source!r} its layer in tests/unit/test_imports.py"
            )
            continue
        for edge in imports(root, file):
            target = edge.target.split(".")[0]
            if source == "__init__" or target == source:
                continue
            known = (root / target).is_dir() or (root / f"{target}.py").is_file()
            if target == "__version__":
                continue
            if not known:  # `from firesteel import SamplingParams`
                target = "__init__"
            if LAYERS.get(target, 0) > LAYERS[source]:
                faults.append(f"{edge.where}: {source} imports {edge.target}, which stands above it")
            elif (source, target) in APART:
                faults.append(f"{edge.where}: {source} and {target} must not know each other")
    return faults


def vendor_faults(root: Path) -> list[str]:
    """Names of vendors in the code of models/: comments and docstrings may speak of them."""
    faults = []
    for file in sorted((root / "models").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        docs = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            for word in _words(node) if id(node) not in docs else ():
                hits = VENDORS.intersection(word.lower().replace(".", "_").replace(":", "_").split("_"))
                if hits:
                    line = getattr(node, "lineno", 0)
                    faults.append(
                        f"{file.relative_to(root)}:{line}: {word!r} names a vendor; ask ops instead"
                    )
    return faults


def _words(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            return [name]
        case ast.keyword(arg=str(name)):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.alias(name=name):
            return name.split(".")
        case ast.ImportFrom(module=str(name)):
            return name.split(".")
        case ast.Constant(value=str(text)):
            return text.split()
        case _:
            return []


def size_faults(root: Path) -> tuple[list[str], list[str]]:
    """(faults, warnings) about long files and long functions."""
    faults, warned = [], []
    for file in sorted(root.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        if lines > MAX_LINES:
            (faults if lines > TOO_MANY_LINES else warned).append(
                f"{file.relative_to(root)}: {lines} lines, split it by idea ({MAX_LINES} is the mark)"
            )
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION + 20:
                    warned.append(f"{file.relative_to(root)}:{node.lineno}: {node.name} has {length} lines")
    return faults, warned


# ---- the package ---------------------------------------------------------
def test_dependencies_point_one_way() -> None:
    faults = import_faults(SRC)
    assert not faults, "\n" + "\n".join(faults)


def test_models_name_no_vendor() -> None:
    faults = vendor_faults(SRC)
    assert not faults, "\n" + "\n".join(faults)


def test_files_stay_readable() -> None:
    faults, warned = size_faults(SRC)
    for line in warned:
        warnings.warn(line, stacklevel=1)
    assert not faults, "\n" + "\n".join(faults)


def test_import_is_light() -> None:
    """`import firesteel` pulls no torch: the command line answers --help at once."""
    import subprocess
    import sys

    code = "import sys, firesteel; sys.exit('torch' in sys.modules)"
    env = {"PYTHONPATH": str(SRC.parent), "PATH": ""}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=60).returncode == 0


# ---- the rules themselves, on a made-up tree --------------------------------
@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A clean package with one module per layer."""
    root = tmp_path / "firesteel"
    for name, text in {
        "__init__.py": "def f():\n    from firesteel.engine.loop import Loop\n    return Loop\n",
        "core.py": "import math\nfrom dataclasses import dataclass\n",
        "ops/__init__.py": "from firesteel.core import Row\n",
        "models/__init__.py": "",
        "models/v4.py": '"""For cuda and rocm."""\n# amd too\nfrom firesteel import ops\nfrom ..core import Row\n',
        "speculation/budget.py": "from firesteel.core import Row\n",
        "engine/loop.py": "from firesteel.models import v4\nfrom ..speculation import budget\nfrom .memory import M\n",
        "serve/app.py": "from firesteel import __version__, engine\n",
        "cli.py": "from firesteel import LLM\nimport firesteel.serve.app\n",
    }.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_clean_tree_passes(tree: Path) -> None:
    assert import_faults(tree) == []
    assert vendor_faults(tree) == []
    assert size_faults(tree) == ([], [])


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("core.py", "from firesteel.models import v4", "core imports models"),
        ("core.py", "from .engine.loop import Loop", "core imports engine.loop"),
        ("core.py", "import firesteel.ops", "core and ops must not know each other"),
        ("ops/triton.py", "from ..engine import loop", "ops imports engine"),
        ("ops/deep/a.py", "from ...serve import app", "ops imports serve"),
        ("models/v4.py", "def f():\n    from firesteel import engine", "models imports engine"),
        ("models/v4.py", "from firesteel.speculation import budget", "models and speculation"),
        ("speculation/a.py", "from firesteel.models.v4 import Net", "speculation and models"),
        ("speculation/a.py", "if TYPE_CHECKING:\n    import firesteel.engine.loop", "imports engine.loop"),
        ("engine/loop.py", "from firesteel import LLM", "engine imports LLM"),
        ("engine/loop.py", "import firesteel", "engine imports __init__"),
        ("serve/app.py", "from firesteel.cli import main", "serve imports cli"),
        ("novel/a.py", "", "give 'novel' its layer"),
    ],
)
def test_wrong_import_is_found(tree: Path, file: str, text: str, says: str) -> None:
    (tree / file).parent.mkdir(parents=True, exist_ok=True)
    (tree / file).write_text(text)
    faults = import_faults(tree)
    assert len(faults) == 1 and says in faults[0], faults


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nx = torch.cuda.is_available()",
        "def f(is_hip): return is_hip",
        "import triton.language as tl",
        "device = 'cuda:0'",
        "f(use_rocm=True)",
        "class AMD_Linear: pass",
    ],
)
def test_vendor_in_a_model_is_found(tree: Path, text: str) -> None:
    (tree / "models/v4.py").write_text(text)
    assert vendor_faults(tree)


def test_innocent_words_are_not_vendors(tree: Path) -> None:
    (tree / "models/v4.py").write_text("chip = 'cudanine'\nwhip = chip\nx.ship(amdahl=1)\n")
    assert vendor_faults(tree) == []


def test_long_file_is_found(tree: Path) -> None:
    (tree / "core.py").write_text("x = 1\n" * (MAX_LINES + 1))
    assert size_faults(tree)[0] == [] and "501 lines" in size_faults(tree)[1][0]
    (tree / "core.py").write_text("x = 1\n" * (TOO_MANY_LINES + 1))
    assert "601 lines" in size_faults(tree)[0][0]
