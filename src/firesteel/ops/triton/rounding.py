"""Rounding and rotation inside kernels, in float32 registers.

No narrow casts: rounding to e4m3 and e2m1 adds and subtracts a number whose last
place is the wanted step, so that the bits are the same on every target, also on
those without an e4m3fn conversion. The rules are those of ``ops.reference.numeric``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

E4M3_FRACTION = tl.constexpr(0x600000)  # 448 = 1.75 * 2^8
E4M3_EXPONENT = tl.constexpr(8)
E2M1_FRACTION = tl.constexpr(0x400000)  # 6 = 1.5 * 2^2
E2M1_EXPONENT = tl.constexpr(2)


@triton.jit
def on_grid(x, OFFICIAL: tl.constexpr):
    """An activation: rounded to the bf16 grid in official numerics, kept as float32."""
    if OFFICIAL:
        x = x.to(tl.bfloat16).to(tl.float32)
    return x


@triton.jit
def narrow(x):
    """float32 as bf16. On NVIDIA two in one instruction, which the compiler does not find by itself."""
    if cuda_capability_geq(9, 0):
        pair: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        x = tl.inline_asm_elementwise(pair, "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        x = x.to(tl.bfloat16)
    return x


@triton.jit
def stored(x, OFFICIAL: tl.constexpr):
    """An activation as it is stored: bf16 in official numerics, else float32."""
    if OFFICIAL:
        x = narrow(x)
    return x


@triton.jit
def over(a, b):
    """a / b of normal numbers and one shape to two bits, never fused with a sum behind it."""
    if cuda_capability_geq(9, 0):
        quotient: tl.constexpr = "{ .reg .f32 t; rcp.approx.ftz.f32 t, $2; mul.rn.f32 $0, $1, t; }"
        a = tl.inline_asm_elementwise(quotient, "=r,r,r", [a, b], dtype=tl.float32, is_pure=True, pack=1)
    else:
        a = a / b
    return a


@triton.jit
def operand(x, OFFICIAL: tl.constexpr):
    """A matrix operand: values on the bf16 grid lose nothing as bf16."""
    if OFFICIAL:
        x = x.to(tl.bfloat16)
    else:
        x = x.to(tl.float32)
    return x


@triton.jit
def pow2_scale(amax, FRACTION: tl.constexpr, EXPONENT: tl.constexpr):
    """(s, 1/s) with s = 2^ceil(log2(amax / top)), top = (1 + FRACTION / 2^23) * 2^EXPONENT."""
    bits = amax.to(tl.int32, bitcast=True)
    e = (bits >> 23) - EXPONENT
    e = tl.where((bits & 0x7FFFFF) > FRACTION, e + 1, e)
    return (e << 23).to(tl.float32, bitcast=True), ((254 - e) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_groups(x, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """x [GROUPS * SIZE] rounded to e4m3 with one power-of-two scale per group; NaN and inf give NaN."""
    g = tl.reshape(x, [GROUPS, SIZE])
    amax = tl.maximum(tl.max(tl.abs(g), axis=1), 1e-4)
    scale, inverse = pow2_scale(amax, E4M3_FRACTION, E4M3_EXPONENT)
    v = tl.minimum(tl.maximum(g * inverse[:, None], -448.0), 448.0)
    power = (v.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    magic = tl.maximum(power, 0.015625) * 1572864.0  # 1.5 * 2^23 steps of 2^-3; 2^-6 is the least normal
    q = ((v + magic) - magic) * scale[:, None] + (g - g)
    return tl.reshape(q, [GROUPS * SIZE])


@triton.jit
def e2m1_groups(x, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """x [GROUPS * SIZE] rounded to e2m1 with one power-of-two scale per group; NaN and inf give NaN."""
    g = tl.reshape(x, [GROUPS, SIZE])
    amax = tl.maximum(tl.max(tl.abs(g), axis=1), 7.052966104933725e-38)  # 6 * 2^-126
    scale, inverse = pow2_scale(amax, E2M1_FRACTION, E2M1_EXPONENT)
    v = tl.minimum(tl.maximum(g * inverse[:, None], -6.0), 6.0)
    power = (v.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    magic = tl.maximum(power, 1.0) * 6291456.0  # 1.5 * 2^23 steps of 2^-1; below 1 the step stays
    q = ((v + magic) - magic) * scale[:, None] + (g - g)
    return tl.reshape(q, [GROUPS * SIZE])


@triton.jit
def rotation(cos_ptr, sin_ptr, at, lane, flat, dim):
    """(cos, signed sin) of each lane of a row whose dims from ``flat`` to ``dim`` turn as pairs.

    ``at`` is the offset of the row's angles. A lane x with partner p (lane ^ 1) turns
    to x * cos + p * sin; lanes that do not turn get cos 1 and sin 0.
    """
    turned = (lane >= flat) & (lane < dim)
    pair = (lane - flat) // 2
    cos = tl.load(cos_ptr + at + pair, mask=turned, other=1.0)
    sin = tl.load(sin_ptr + at + pair, mask=turned, other=0.0)
    return cos, tl.where(lane % 2 == 0, -sin, sin)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x)."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def store_form(x, q_ptr, step_ptr, row, N: tl.constexpr, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """The e4m3 form of a row x [BLOCK] of N values with a step per 128, as ``quantise_kernel`` makes it.

    FORM 1: e4m3fn; 2: fnuz codes, which mean half, so that steps are doubled.
    """
    group = tl.arange(0, BLOCK // 128)
    k = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    v = tl.reshape(x, [BLOCK // 128, 128])
    amax = tl.maximum(tl.max(tl.abs(v), axis=1), 1e-4)
    step, inverse = pow2_scale(amax, E4M3_FRACTION, E4M3_EXPONENT)
    code = v * inverse[:, None]
    if not cuda_capability_geq(9, 0):  # there the conversion saturates, and keeps NaN
        code = tl.minimum(tl.maximum(code, -448.0), 448.0)
        code = tl.where(v != v, v, code)  # a clamp would hide NaN
    if FORM == 2:
        code, step = code * 0.5, step * 2.0
    tl.store(q_ptr + row * N + k, code.to(q_ptr.dtype.element_ty), mask=k < N)
    tl.store(step_ptr + row * (N // 128) + group, step, mask=group < N // 128)
