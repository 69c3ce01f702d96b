"""Repairs of Triton's CPU interpreter (seen with 3.8.0), for tests without a GPU.

The interpreter keeps bfloat16 as integers and computes with those, and its own
rounding to narrow floats drops carries, rounds half away from zero and knows no
NaN. ``install`` puts torch's conversions in their place, widens bfloat16
operands before arithmetic, and sums ``tl.dot`` in float64 so that the BLAS's
block sizes cannot show. A kernel must still not ``tl.sum`` a bfloat16 tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
import triton.runtime.interpreter as runtime

FLOATS = {
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
RAW = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


def _convert(data: Any, source: Any, target: Any) -> Any:
    """Array of Triton float type ``source`` as the bit pattern (unsigned) of ``target``."""
    shape = np.shape(data)
    raw = np.ascontiguousarray(data).reshape(-1)
    value = torch.from_numpy(raw.view(RAW[raw.itemsize]).copy()).view(FLOATS[source])
    if source.primitive_bitwidth != 64:
        value = value.to(torch.float32)
    out = value.to(FLOATS[target])
    width = out.element_size()
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    return out.view(signed).numpy().view(f"uint{8 * width}").reshape(shape)


def _narrow(dtype: Any) -> bool:
    return dtype.scalar == tl.bfloat16 or (dtype.scalar in FLOATS and dtype.scalar.primitive_bitwidth == 8)


def _widen(handle: Any) -> Any:
    """A bfloat16 or FP8 handle as float32; any other unchanged."""
    if not _narrow(handle.dtype):
        return handle
    data = _convert(handle.data, handle.dtype.scalar, tl.float32).view(np.float32)
    return runtime.TensorHandle(data, tl.float32)


def _to_bf16(data: Any) -> Any:
    bits = _convert(np.asarray(data, dtype=np.float32), tl.float32, tl.bfloat16)
    return runtime.TensorHandle(bits.view(np.uint16), tl.bfloat16)


def _patch_conversions(builder: Any) -> None:
    plain_convert, plain_cast = runtime._convert_float, builder.cast_impl

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source not in FLOATS or target not in FLOATS:
            return plain_convert(data, source, target, rounding)
        return _convert(data, source, target)

    def cast_impl(self: Any, src: Any, target: Any) -> Any:
        source, goal = src.dtype.scalar, target.scalar
        if source == goal or tl.bfloat16 not in (source, goal):
            return plain_cast(self, src, target)
        if source == tl.bfloat16:
            data = _widen(src).data.astype(runtime._get_np_dtype(target))
            return runtime.TensorHandle(data, goal)
        return _to_bf16(src.data)

    runtime._convert_float = convert_float
    builder.cast_impl = cast_impl


def _patch_arithmetic(builder: Any) -> None:
    plain_binary, plain_unary, plain_fma = builder.binary_op, builder.unary_op, builder.create_fma

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        if lhs.dtype.scalar != tl.bfloat16 or op in BITWISE:
            return plain_binary(self, lhs, rhs, op)
        out = op(_widen(lhs).data, _widen(rhs).data)
        return runtime.TensorHandle(out, tl.int1) if out.dtype == np.bool_ else _to_bf16(out)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        if arg.dtype.scalar != tl.bfloat16:
            return plain_unary(self, arg, op)
        return _to_bf16(op(_widen(arg).data))

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if z.dtype.scalar not in (tl.bfloat16, tl.float32):
            return plain_fma(self, x, y, z)
        wide = [_widen(v).data.astype(np.float64) for v in (x, y, z)]
        out = wide[0] * wide[1] + wide[2]
        if z.dtype.scalar == tl.bfloat16:
            return _to_bf16(out)
        return runtime.TensorHandle(out.astype(np.float32), tl.float32)

    builder.binary_op, builder.unary_op, builder.create_fma = binary_op, unary_op, create_fma


def _patch_dot(builder: Any) -> None:
    plain_dot, plain_value = builder.create_dot, runtime._mxfp_value_handle_to_float32

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        if not a.dtype.scalar.is_floating():
            return plain_dot(self, a, b, d, precision, imprecise)
        wide = [_widen(v).data.astype(np.float64) for v in (a, b)]
        out = np.matmul(*wide).astype(d.data.dtype) + d.data
        return runtime.TensorHandle(out, d.dtype.scalar)

    def scaled_value(handle: Any) -> Any:
        return _widen(handle).data if _narrow(handle.dtype) else plain_value(handle)

    builder.create_dot = create_dot
    runtime._mxfp_value_handle_to_float32 = scaled_value


_INSTALLED: list[bool] = []


def install() -> None:
    """Patch the interpreter of this process, once."""
    if _INSTALLED:
        return
    builder = runtime.InterpreterBuilder
    _patch_conversions(builder)
    _patch_arithmetic(builder)
    _patch_dot(builder)
    _INSTALLED.append(True)
