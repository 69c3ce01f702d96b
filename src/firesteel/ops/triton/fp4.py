"""FP4 weights in memory and in registers.

Two layouts, both in blocks of 128 outputs by 128 inputs with four E8M0 scales per
line in one word, int32 [M/128, K/128, 128]. Nothing is dequantised in memory.

"planes": uint8 [M/128, K/128, 2, 128, 32]. Byte j of a line of 64 inputs holds element j in
its low nibble and element 32 + j in its high one, so that each nibble plane is one
scale group and one matrix step.
"pairs": uint8 [M/128, K/128, 128, 64] as in the checkpoint, for targets whose matrix
instruction takes E2M1 and its scales.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from firesteel.checkpoint.codecs import e8m0_to_float, fp4_table, fp4_unpack
from firesteel.ops.triton.launch import cdiv, dense, kernel

BLOCK = 128  # outputs and inputs of a block
HIGHEST = 192  # largest scale byte that ``unpack16`` can keep in bfloat16's range

# ---- registers ----------------------------------------------------------------------------
CODES = tl.constexpr("""{
.reg .b32 a, b;
shl.b32 a, $2, 4;
shl.b32 b, $2, 2;
and.b32 a, a, 0x80808080;
lop3.b32 $0, b, 0x1C1C1C1C, a, 0xEA;
and.b32 a, $2, 0x80808080;
shr.b32 b, $2, 2;
lop3.b32 $1, b, 0x1C1C1C1C, a, 0xEA;
}""")

VALUES = tl.constexpr("""{
.reg .b32 p, q, a, b;
prmt.b32 p, $4, 0, 0x4140;
prmt.b32 q, $4, 0, 0x4342;
shl.b32 a, p, 12;
and.b32 a, a, 0x80008000;
shl.b32 b, p, 6;
lop3.b32 a, b, 0x01C001C0, a, 0xEA;
mul.bf16x2 $0, a, $5;
shl.b32 a, q, 12;
and.b32 a, a, 0x80008000;
shl.b32 b, q, 6;
lop3.b32 a, b, 0x01C001C0, a, 0xEA;
mul.bf16x2 $1, a, $6;
shl.b32 a, p, 8;
and.b32 a, a, 0x80008000;
shl.b32 b, p, 2;
lop3.b32 a, b, 0x01C001C0, a, 0xEA;
mul.bf16x2 $2, a, $7;
shl.b32 a, q, 8;
and.b32 a, a, 0x80008000;
shl.b32 b, q, 2;
lop3.b32 a, b, 0x01C001C0, a, 0xEA;
mul.bf16x2 $3, a, $8;
}""")


@kernel()
def unpack8(packed, FNUZ: tl.constexpr, ASM: tl.constexpr):
    """Both nibble planes as e4m3 (sign, two exponent bits, one mantissa bit): value * 2^-6, fnuz 2^-7."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            CODES, "=r,=r,r", [packed], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
    else:
        low = ((packed << 4) & 0x80) | ((packed << 2) & 0x1C)
        high = (packed & 0x80) | ((packed >> 2) & 0x1C)
    if FNUZ:
        return low.to(tl.float8e4b8, bitcast=True), high.to(tl.float8e4b8, bitcast=True)
    else:
        return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)


@kernel()
def unpack16(packed, low_scale, high_scale, ASM: tl.constexpr):
    """Both nibble planes as bfloat16, each times its scale [M]: value * 2^(byte - 127 - 64)."""
    s = ((low_scale.to(tl.int16) + 62) << 7).to(tl.bfloat16, bitcast=True)[:, None]
    t = ((high_scale.to(tl.int16) + 62) << 7).to(tl.bfloat16, bitcast=True)[:, None]
    if ASM:
        low, high = tl.inline_asm_elementwise(
            VALUES,
            "=r,=r,=r,=r,r,r,r,r,r",
            [packed, s, t],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        wide = packed.to(tl.int16)
        a = ((wide & 8) << 12) | ((wide & 7) << 6)
        b = ((wide & 0x80) << 8) | ((wide & 0x70) << 2)
        low = a.to(tl.bfloat16, bitcast=True) * s
        high = b.to(tl.bfloat16, bitcast=True) * t
    return low, high


@kernel()
def power(word, PLANE: tl.constexpr, FNUZ: tl.constexpr):
    """Scale PLANE of the packed E8M0 words as float32, times what ``unpack8`` leaves out."""
    scale = (((word >> (8 * PLANE)) & 0xFF) << 23).to(tl.float32, bitcast=True)
    return scale * (128.0 if FNUZ else 64.0)


@kernel()
def half_sum(
    acc,
    packed,
    word,
    first,
    second,
    t,
    PLANE: tl.constexpr,
    KIND: tl.constexpr,
    FNUZ: tl.constexpr,
    ASM: tl.constexpr,
):
    """acc [128, n] plus 64 inputs: packed [128, 32], rows [32, n] twice, scales PLANE and PLANE + 1 of word.

    t float32 [n]: the rows' scales, of the FP8 kind only. The bf16 kind leaves out 2^64 (see ``unpack16``).
    """
    if KIND == "bf16":
        a, b = unpack16(packed, word >> (8 * PLANE) & 0xFF, word >> (8 * PLANE + 8) & 0xFF, ASM)
        acc = tl.dot(a, first, acc)
        acc = tl.dot(b, second, acc)
    else:
        a, b = unpack8(packed, FNUZ, ASM)
        s0, s1 = power(word, PLANE, FNUZ)[:, None], power(word, PLANE + 1, FNUZ)[:, None]
        if KIND == "f32":
            acc = tl.dot(a.to(tl.float32) * s0, first, acc, input_precision="ieee")
            acc = tl.dot(b.to(tl.float32) * s1, second, acc, input_precision="ieee")
        else:
            acc += tl.dot(a, first) * (s0 * t[None, :])
            acc += tl.dot(b, second) * (s1 * t[None, :])
    return acc


@kernel()
def scaled_sum(acc, packed, word, x, t, TILE_N: tl.constexpr):
    """acc [128, n] plus 128 inputs by the block-scaled instruction: packed "pairs" [128, 64], x e4m3 [128, n].

    The rows' power-of-two scale t float32 [n] stands for four groups of 32.
    """
    plane = tl.arange(0, 4)[None, :] * 8
    scale = ((word[:, None] >> plane) & 0xFF).to(tl.uint8)
    byte = ((t.to(tl.int32, bitcast=True) >> 23) & 0xFF).to(tl.uint8)
    xs = tl.broadcast_to(byte[:, None], (TILE_N, 4))
    return tl.dot_scaled(packed, scale, "e2m1", x, xs, "e4m3", acc)


# ---- layout ------------------------------------------------------------------------------
def pack_blocks(data: Tensor, scale: Tensor, *, pairs: bool, unsigned_zero: bool) -> tuple[Tensor, Tensor]:
    """FP4 of the checkpoint (uint8 [N, K/2], E8M0 [N, K/32]) to blocks and scale words, padded to whole blocks.

    ``unsigned_zero`` writes minus zero as zero, for targets where its e4m3 code is NaN.
    """
    n, half = data.shape
    m, blocks = cdiv(n, BLOCK), cdiv(half, BLOCK // 2)
    codes = torch.zeros(m * BLOCK, blocks * BLOCK, dtype=torch.uint8, device=data.device)
    codes[:n, : 2 * half] = fp4_unpack(data)
    if unsigned_zero:
        codes[codes == 8] = 0
    grid = codes.view(m, BLOCK, blocks, -1)
    if pairs:
        packed = (grid[..., 0::2] | (grid[..., 1::2] << 4)).transpose(1, 2)
    else:
        planes = grid.unflatten(-1, (2, 2, 32))
        packed = (planes[..., 0, :] | (planes[..., 1, :] << 4)).permute(0, 2, 3, 1, 4)
    bytes_ = torch.full((m * BLOCK, blocks * 4), 127, dtype=torch.uint8, device=data.device)
    bytes_[:n, : scale.shape[1]] = scale.view(torch.uint8)
    words = bytes_.view(torch.int32).view(m, BLOCK, blocks)
    return dense(packed), dense(words.transpose(1, 2))


def unpack_blocks(packed: Tensor, words: Tensor) -> Tensor:
    """float32 [M, K] of "planes" and their scale words, for tests and references."""
    table = fp4_table(packed.device)[:16, 0]
    m, blocks = packed.shape[:2]
    planes = torch.stack((table[(packed & 15).long()], table[(packed >> 4).long()]), 3)
    wide = planes.permute(0, 4, 1, 2, 3, 5).reshape(m * BLOCK, blocks * 4, 32)  # of [m, kb, 2, 2, 128, 32]
    scale = words.transpose(1, 2).reshape(-1).view(torch.uint8).view(m * BLOCK, blocks * 4)
    return (wide * e8m0_to_float(scale).unsqueeze(-1)).flatten(1)
