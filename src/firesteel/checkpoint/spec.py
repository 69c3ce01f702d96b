"""What a checkpoint must hold, tensor by tensor, and the error for one that does not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# bytes per element of the safetensors dtypes this package reads
DTYPE_BYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}

TPRule = Literal["dim0", "dim1", "expert", "replicated"]


class CheckpointError(ValueError):
    """A checkpoint that must not be loaded; the message names file, tensor, expected and found."""

    @classmethod
    def of(cls, where: str, problems: list[str], limit: int = 20) -> CheckpointError:
        """One error for many problems; the first ``limit`` are listed, the rest counted."""
        lines = [f"{where}: {len(problems)} problem{'s' if len(problems) != 1 else ''} with this checkpoint"]
        lines += [f"  - {line}" for line in problems[:limit]]
        if len(problems) > limit:
            lines.append(f"  ... and {len(problems) - limit} more")
        return cls("\n".join(lines))


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that must be present.

    ``dtypes`` are safetensors names, the official one first. ``tp``: split over ranks along dim 0 or
    dim 1, whole experts by index, or a copy on every rank. ``ids_below``: values are ids in
    0..ids_below-1, distinct within a row.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    part: str
    tp: TPRule = "replicated"
    ids_below: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the official dtype."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtypes[0]]


@dataclass
class Layout:
    """All tensors a model takes from one checkpoint, fitted to the formats found in it.

    ``formats`` maps a weight prefix (``layers.0.attn.wq_a``) to ``fp4``, ``fp8`` or ``dense``;
    ``ignored`` gives a reason per tensor that is left alone; ``problems`` were found while fitting.
    """

    specs: dict[str, TensorSpec]
    formats: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    drafter: bool = False
    confidence_head: bool = False


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies: file, name in that file, dtype, shape, and the part of it that is meant.

    ``pick`` is None for the whole tensor, else (index into dim 0, first row, row end) of a stacked one.
    """

    file: str
    stored_name: str
    dtype: str
    shape: tuple[int, ...]
    pick: tuple[int, int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the part that is meant."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def compare(
    specs: Mapping[str, TensorSpec], found: Mapping[str, Stored], ignored: Mapping[str, str]
) -> list[str]:
    """Every way in which ``found`` is not exactly ``specs`` plus ``ignored``; empty if it is."""
    problems = []
    for name, spec in specs.items():
        entry = found.get(name)
        if entry is None:
            problems.append(f"tensor '{name}': missing, expected {'/'.join(spec.dtypes)} {list(spec.shape)}")
            continue
        label = f"{entry.file}: tensor '{entry.stored_name}'"
        if entry.dtype not in spec.dtypes:
            problems.append(f"{label}: expected dtype {' or '.join(spec.dtypes)}, found {entry.dtype}")
        if entry.shape != spec.shape:
            problems.append(f"{label}: expected shape {list(spec.shape)}, found {list(entry.shape)}")
    for name, entry in found.items():
        if name not in specs and name not in ignored:
            problems.append(
                f"{entry.file}: tensor '{entry.stored_name}': surplus ({entry.dtype} {list(entry.shape)}), "
                "expected no tensor of this name"
            )
    return problems
