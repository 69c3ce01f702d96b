"""Strict, streaming reader of safetensors checkpoints.

Headers are parsed and checked first: nothing is read into memory before every tensor is known to be
there, once, with the right shape and dtype, in a file as long as its header says. Then each tensor
is read exactly once, its values are checked, and ``finish`` fails if one was forgotten.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open

from firesteel.checkpoint.codecs import Format, QTensor
from firesteel.checkpoint.spec import DTYPE_BYTES, CheckpointError, Layout, Stored, TensorSpec, compare

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
HEADER_LIMIT = 100_000_000  # bytes; longer headers are garbage

# maps stored tensors to (official name -> where it lies, problems)
View = Callable[[Mapping[str, Stored]], tuple[dict[str, Stored], list[str]]]


@dataclass(frozen=True)
class Header:
    """Parsed header of one file: tensors, and the number of bytes before their data."""

    tensors: dict[str, Stored]
    data_start: int
    file_bytes: int


def read_header(path: Path) -> Header:
    """Parse and check one safetensors header; raises CheckpointError for anything but a sound file."""
    file = path.name
    if not path.is_file():
        raise CheckpointError(f"{path}: file is missing; fetch the checkpoint again")
    size = path.stat().st_size
    with path.open("rb") as handle:
        first = handle.read(8)
        if len(first) < 8:
            raise CheckpointError(f"{file}: truncated, expected an 8-byte header length, found {size} bytes")
        length = int.from_bytes(first, "little")
        if length > HEADER_LIMIT or length < 2:
            raise CheckpointError(
                f"{file}: not a safetensors file, expected a header of 2..{HEADER_LIMIT} bytes, found {length}"
            )
        if size < 8 + length:
            raise CheckpointError(f"{file}: truncated, expected {8 + length} bytes of header, found {size}")
        text = handle.read(length)
    try:
        raw = json.loads(text, object_pairs_hook=lambda pairs: unique(file, pairs))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as err:
        raise CheckpointError(f"{file}: header is not valid JSON ({err}); the file is damaged") from err
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file}: header: expected a JSON object, found {type(raw).__name__}")
    return Header(parse_entries(file, raw, 8 + length, size), 8 + length, size)


def unique(file: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys must differ; a plain parse would silently keep the last."""
    out = dict(pairs)
    if len(out) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise CheckpointError(f"{file}: tensor '{twice}': duplicate in the header, expected one entry")
    return out


def parse_entries(file: str, raw: dict[str, Any], start: int, size: int) -> dict[str, Stored]:
    """Tensors of a header; checks that data ranges tile the rest of the file without gap or overlap."""
    tensors: dict[str, Stored] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in raw.items():
        if name == "__metadata__":
            continue
        label = f"{file}: tensor '{name}'"
        dtype, shape, offsets = entry_fields(label, entry)
        want = math.prod(shape) * DTYPE_BYTES[dtype]
        if offsets[1] - offsets[0] != want:
            raise CheckpointError(
                f"{label}: expected {want} bytes for {dtype} {list(shape)}, "
                f"found data_offsets of {offsets[1] - offsets[0]} bytes"
            )
        tensors[name] = Stored(file, name, dtype, shape)
        ranges.append((offsets[0], offsets[1], name))
    ranges.sort()
    at = 0
    for begin, end, name in ranges:
        if begin != at:
            raise CheckpointError(f"{file}: tensor '{name}': expected data at offset {at}, found {begin}")
        at = end
        if start + end > size:
            found = max(0, size - start - begin)
            raise CheckpointError(
                f"{file}: truncated in tensor '{name}': expected {end - begin} bytes, found {found} "
                f"(file: expected {start + ranges[-1][1]} bytes, found {size}); fetch the file again"
            )
    if start + at != size:
        raise CheckpointError(f"{file}: expected {start + at} bytes, found {size}: data no tensor names")
    return tensors


def entry_fields(label: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """(dtype, shape, offsets) of one header entry, each checked for type and sign."""
    if not isinstance(entry, dict):
        raise CheckpointError(f"{label}: expected an object in the header, found {type(entry).__name__}")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{label}: expected a dtype out of {', '.join(DTYPE_BYTES)}, found {dtype!r}")
    if not counts(shape):
        raise CheckpointError(f"{label}: expected a shape of non-negative integers, found {shape!r}")
    if not counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{label}: expected data_offsets [begin, end], found {offsets!r}")
    return dtype, tuple(shape), (offsets[0], offsets[1])


def counts(value: Any) -> TypeGuard[list[int]]:
    """Whether ``value`` is a list of non-negative integers (booleans are not)."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def find_files(folder: Path) -> tuple[list[str], dict[str, str] | None]:
    """(shard file names, weight map of the index or None) of a checkpoint folder."""
    index = folder / INDEX_NAME
    if not index.is_file():
        if (folder / SINGLE_NAME).is_file():
            return [SINGLE_NAME], None
        raise CheckpointError(
            f"{folder}: neither {INDEX_NAME} nor {SINGLE_NAME}; point --model at a checkpoint folder"
        )
    try:
        raw = json.loads(index.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as err:
        raise CheckpointError(f"{INDEX_NAME}: not valid JSON ({err})") from err
    table = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{INDEX_NAME}: expected an object 'weight_map', found {type(table).__name__}")
    for name, file in table.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{INDEX_NAME}: tensor '{name}': expected a file name, found {file!r}")
    return sorted(set(table.values())), table


def scan(folder: Path) -> tuple[dict[str, Stored], list[str]]:
    """(stored name -> where it lies, problems) over all shards, checked against the index."""
    files, table = find_files(folder)
    found: dict[str, Stored] = {}
    problems: list[str] = []
    for file in files:
        if not (folder / file).is_file():
            names = [name for name, home in (table or {}).items() if home == file]
            problems.append(
                f"{file}: expected by {INDEX_NAME} for {len(names)} tensors (first '{names[0]}'), "
                "found no such file"
            )
            continue
        for name, entry in read_header(folder / file).tensors.items():
            if name in found:
                problems.append(
                    f"{file}: tensor '{name}': duplicate, expected once, found in {found[name].file} too"
                )
                continue
            found[name] = entry
            if table is not None and table.get(name) != file:
                home = table.get(name, "no entry")
                problems.append(f"{file}: tensor '{name}': expected by {INDEX_NAME} in {home}, found here")
    for name, file in (table or {}).items():
        if name not in found and (folder / file).is_file():
            problems.append(f"{file}: tensor '{name}': expected by {INDEX_NAME}, not in the file")
    return found, problems


@dataclass
class Checkpoint:
    """An open checkpoint. ``tensors``: official name -> where it lies. Use as a context manager."""

    folder: Path
    tensors: dict[str, Stored]
    problems: list[str]
    layout: Layout | None = None
    check_values: bool = True
    _reads: dict[str, int] = field(default_factory=dict)
    _skipped: dict[str, str] = field(default_factory=dict)
    _handles: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | Path, view: View | None = None, *, check_values: bool = True) -> Checkpoint:
        """Parse all headers below ``path`` (a folder, or one .safetensors file); reads no data.

        ``view`` translates foreign tensor names. Raises CheckpointError for damaged or truncated files;
        duplicates and index faults are kept for ``check``.
        """
        folder = Path(path)
        problems: list[str] = []
        if folder.is_file():
            stored = read_header(folder).tensors
            folder = folder.parent
        elif folder.is_dir():
            stored, problems = scan(folder)
        else:
            raise CheckpointError(f"{folder}: no such checkpoint; point --model at a checkpoint folder")
        if view is None:
            return cls(folder, dict(stored), problems, check_values=check_values)
        tensors, more = view(stored)
        return cls(folder, tensors, problems + more, check_values=check_values)

    def check(self, layout: Layout | Mapping[str, TensorSpec]) -> Checkpoint:
        """Compare with ``layout`` before any data is read; raises one CheckpointError with up to 20 faults."""
        if not isinstance(layout, Layout):
            layout = Layout(dict(layout))
        problems = self.problems + layout.problems + compare(layout.specs, self.tensors, layout.ignored)
        if problems:
            raise CheckpointError.of(str(self.folder), problems)
        self.layout = layout
        return self

    # ---- data ------------------------------------------------------------------------------------
    def tensor(self, name: str, part: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Read one tensor (CPU), or the ``part`` of it that this rank owns; checks its values.

        One-byte weights and scales keep their dtype (``float8_e4m3fn``, ``float8_e8m0fnu``, ``int8``).
        Raises CheckpointError for NaN, infinity, NaN codes and bad expert ids, naming the first index.
        """
        entry = self.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.folder}: tensor '{name}' is not in this checkpoint")
        self._reads[name] = self._reads.get(name, 0) + 1
        data = self._load(entry, part)
        if self.check_values:
            below = self.layout.specs[name].ids_below if self.layout and name in self.layout.specs else None
            check_values(f"{entry.file}: tensor '{entry.stored_name}'", data, entry.dtype, below)
        return data

    def _load(self, entry: Stored, part: tuple[slice, ...] | None) -> torch.Tensor:
        handle = self._handles.get(entry.file)
        try:
            if handle is None:
                handle = safe_open(str(self.folder / entry.file), framework="pt", device="cpu")
                self._handles[entry.file] = handle
            if entry.pick is None and part is None:
                return handle.get_tensor(entry.stored_name)
            view = handle.get_slice(entry.stored_name)
            if entry.pick is None:
                return view[part]
            index, start, end = entry.pick
            data = view[index : index + 1, start:end][0]
            return data if part is None else data[part]
        except (SafetensorError, OSError) as err:
            raise CheckpointError(f"{entry.file}: tensor '{entry.stored_name}': {err}") from err

    def qtensor(
        self,
        prefix: str,
        part: tuple[slice, ...] | None = None,
        scale_part: tuple[slice, ...] | None = None,
    ) -> QTensor:
        """``prefix.weight`` joined with ``prefix.scale`` if it has one; formats as stored.

        ``part`` and ``scale_part`` are the rank's slices of the two stored tensors. A name without a
        ``.weight`` (such as ``hc_head_fn``) is taken as it is.
        """
        name = f"{prefix}.weight" if f"{prefix}.weight" in self.tensors else prefix
        data = self.tensor(name, part)
        dtype = self.tensors[name].dtype
        scale_name = f"{prefix}.scale"
        if scale_name not in self.tensors:
            if dtype in ("I8", "U8", "F8_E4M3"):
                raise CheckpointError(
                    f"{self.tensors[name].file}: tensor '{scale_name}': missing, expected the scales of {dtype} "
                    f"'{name}' {list(self.tensors[name].shape)}"
                )
            return QTensor.dense(data.to(torch.int64) if dtype == "I32" else data)
        scale = self.tensor(scale_name, scale_part)
        if scale.element_size() == 1:
            scale = scale.view(torch.uint8)
        if dtype in ("I8", "U8"):
            data = data.view(torch.uint8)
            return QTensor("fp4", data, scale, (*data.shape[:-1], data.shape[-1] * 2))
        return QTensor("fp8", data, scale, tuple(data.shape))

    def format(self, prefix: str) -> Format:
        """Stored format of ``prefix.weight``, without reading it."""
        names: dict[str, Format] = {"I8": "fp4", "U8": "fp4", "F8_E4M3": "fp8", "F32": "f32", "I64": "i64"}
        return names.get(self.tensors[f"{prefix}.weight"].dtype, "bf16")

    def skip(self, name: str, reason: str) -> None:
        """Declare that this process does not need ``name`` (such as another rank's expert)."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder}: tensor '{name}' is not in this checkpoint")
        self._skipped[name] = reason

    def finish(self) -> None:
        """Raise CheckpointError unless every tensor of the layout was read exactly once or skipped."""
        assert self.layout is not None, "check() comes before finish()"
        problems = []
        for name in self.layout.specs:
            reads = self._reads.get(name, 0)
            if reads == 0 and name not in self._skipped:
                problems.append(f"tensor '{name}': expected to be loaded once, was never read")
            elif reads > 1 or (reads and name in self._skipped):
                problems.append(f"tensor '{name}': expected to be loaded once, was read {reads} times")
        extra = [name for name in self._reads if name not in self.layout.specs]
        problems += [f"tensor '{name}': is ignored by the layout, yet was read" for name in extra]
        if problems:
            raise CheckpointError.of(str(self.folder), problems)

    def close(self) -> None:
        """Let go of the open files; tensors already read stay valid."""
        self._handles.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# ---- values --------------------------------------------------------------------------------------
def check_values(label: str, data: torch.Tensor, dtype: str, ids_below: int | None) -> None:
    """Raise CheckpointError naming the first element that no sound checkpoint holds."""
    if ids_below is not None:
        check_ids(label, data, ids_below)
    elif dtype in ("F32", "BF16", "F16"):
        first_bad(label, ~torch.isfinite(data), data, "a finite value")
    elif dtype == "F8_E4M3":
        code = data.view(torch.uint8)
        first_bad(label, (code & 0x7F) == 0x7F, code, "an E4M3 value that is not NaN", "code ")
    elif dtype == "F8_E8M0" or (dtype == "U8" and label.endswith(".scale'")):
        code = data.view(torch.uint8)
        first_bad(label, code == 255, code, "an E8M0 scale that is not NaN", "code ")


def first_bad(label: str, bad: torch.Tensor, data: torch.Tensor, expected: str, unit: str = "") -> None:
    if not bool(bad.any()):
        return
    index = [int(i) for i in bad.nonzero()[0]]
    value = data[tuple(index)].item()
    raise CheckpointError(
        f"{label}: index {index}: expected {expected}, found {unit}{value} ({int(bad.sum())} in all)"
    )


def check_ids(label: str, table: torch.Tensor, below: int) -> None:
    """Rows of expert ids: each in 0..below-1, no id twice in a row."""
    first_bad(label, (table < 0) | (table >= below), table, f"an expert id in 0..{below - 1}")
    order = table.sort(-1).values
    twice = (order[..., 1:] == order[..., :-1]).any(-1)
    if bool(twice.any()):
        row = int(twice.nonzero()[0, 0])
        raise CheckpointError(
            f"{label}: row {row}: expected distinct expert ids, found {table[row].tolist()}"
        )
