"""The compiled functions as Python callables, and weights in the library's layout.

Every function takes one record of 8-byte fields, packed by ``struct`` into bytes:
that costs half a microsecond, a tenth of what long ctypes argument lists cost,
and is safe when threads call at once.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.checkpoint.codecs import FP4_GROUP, QTensor
from firesteel.ops.native.build import load

F32, BF16, FP4 = 0, 1, 2
NARROWEST, WIDEST = 64, 190  # scale bytes an FP4 kernel can keep apart without leaving float32
SPREAD = 60  # most that two scale bytes of one weight may differ

Call = Callable[..., None]
WEIGHT = struct.Struct("5q")  # data, n, k, kind, quantised


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library; raises BuildError."""
    lib = load()
    lib.fs_pack_words.argtypes = [ctypes.c_int64] * 3
    lib.fs_pack_words.restype = ctypes.c_int64
    lib.fs_is_bf16.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    lib.fs_is_bf16.restype = ctypes.c_int64
    return lib


@functools.cache
def function(name: str, layout: str) -> Call:
    """``fs_<name>`` as f(*fields); ``layout``: q for integers and pointers, d for doubles."""
    raw = getattr(library(), f"fs_{name}")
    raw.argtypes, raw.restype = [ctypes.c_char_p], None
    pack = struct.Struct(layout).pack

    def call(*fields: Any) -> None:
        raw(pack(*fields))

    return call


def dense(x: Tensor) -> Tensor:
    """The tensor with its elements in order."""
    return x if x.is_contiguous() else x.contiguous()


def record(layout: struct.Struct, *fields: int) -> Any:
    """A record that stays at one address; the owner keeps the result."""
    return ctypes.create_string_buffer(layout.pack(*fields), layout.size)


class Packed:
    """Weights of one shape [N, K] in the library's layout, one after another.

    ``address`` points to their records in C. Plain torch code may still use a
    packed weight as the second operand of ``functional.linear``.
    """

    __slots__ = ("address", "count", "data", "kind", "quantised", "record", "shape")

    def __init__(self, data: Tensor, shape: tuple[int, int], kind: int, quantised: bool):
        self.data, self.shape, self.kind, self.quantised = data, shape, kind, quantised
        self.count = data.shape[0]
        step = data.shape[1] * data.element_size()
        fields = [
            field
            for i in range(self.count)
            for field in (data.data_ptr() + i * step, *shape, kind, int(quantised))
        ]
        self.record = record(struct.Struct(f"{len(fields)}q"), *fields)
        self.address = ctypes.addressof(self.record)

    def __getitem__(self, index: int) -> Packed:
        return Packed(self.data[index : index + 1], self.shape, self.kind, self.quantised)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return self.data.numel() * self.data.element_size()

    def product(self, x: Tensor, threads: int = 1) -> Tensor:
        """x [..., K] times the first weight transposed: float32 [..., N]."""
        flat = x.reshape(-1, self.shape[1]).contiguous()
        out = torch.empty(flat.shape[0], self.shape[0])
        function("linear_f32", "5q")(
            flat.data_ptr(), flat.shape[0], self.address, out.data_ptr(), threads << 8
        )
        return out.unflatten(0, x.shape[:-1])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.linear and len(args) == 2 and not kwargs:
            return args[1].product(args[0], torch.get_num_threads())
        return NotImplemented


def kind_of(weights: Sequence[QTensor]) -> int:
    """The smallest layout that holds all these weights exactly."""
    if all(w.format == "fp4" and w.shape[1] % FP4_GROUP == 0 for w in weights):
        bounds = [(int(w.scale.min()), int(w.scale.max())) for w in weights if w.scale is not None]
        low, high = min(b[0] for b in bounds), max(b[1] for b in bounds)
        if low >= NARROWEST and high <= WIDEST and high - low <= SPREAD:
            return FP4
    for w in weights:
        dense = w.dequant().contiguous()
        if not library().fs_is_bf16(dense.data_ptr(), dense.numel()):
            return F32
    return BF16


def pack(groups: Sequence[Sequence[QTensor]], quantised: bool) -> Packed:
    """Pack each group's weights, stacked along N, as one weight; all get one shape and layout."""
    kind = kind_of([w for group in groups for w in group])
    n, k = sum(w.shape[0] for w in groups[0]), groups[0][0].shape[1]
    data = torch.zeros(len(groups), library().fs_pack_words(n, k, kind), dtype=torch.int32)
    put = function("pack", "8q")
    for line, group in zip(data, groups, strict=True):
        column = 0
        for w in group:
            scale = None
            if kind == FP4:
                assert w.scale is not None
                weight, scale = w.data.view(torch.uint8).contiguous(), w.scale.view(torch.uint8).contiguous()
            else:
                weight = w.dequant().contiguous()
            at = 0 if scale is None else scale.data_ptr()
            put(weight.data_ptr(), at, w.shape[0], column, n, k, kind, line.data_ptr())
            column += w.shape[0]
        assert column == n, "stacked experts have one shape"
    return Packed(data, (n, k), kind, quantised)
