"""FP4 weights in memory and in registers.

Two layouts, both in blocks of 128 outputs by 128 inputs with four E8M0 scales per
line in one word, int32 [M/128, K/128, 128]. Nothing is dequantised in memory.

"planes": uint8 [M/128, K/128, 2, 128, 32]. Byte j of a line of 64 inputs holds element j in
its low nibble and element 32 + j in its high one, so that each nibble plane is one
scale group and one matrix step.
"pairs": uint8 [M/128, K/128, 128, 64] as in the checkpoint, for targets whose matrix
instruction takes E2M1 and its scales.
"folded": as "planes", but with the inputs of a block in the order of ``arranged`` and the bits of every
four bytes in the order that a byte permutation takes (see ``fold_words``). A group's scale relative to its
block's goes into the e4m3 code, which has room for it, so that a block is an e4m3 block with one scale:
float32 [M/128, K/128]. The scale words then hold, per group, 8 * the exponent field that 0.5 gets.
Of the four threads that hold a line of a matrix instruction's operand each has one group: one table of codes.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from firesteel.checkpoint.codecs import e8m0_to_float, fp4_table, fp4_unpack
from firesteel.ops.triton.launch import begin, cdiv, dense, kernel, pow2

BLOCK = 128  # outputs and inputs of a block
HIGHEST = 192  # largest scale byte that ``unpack16`` can keep in bfloat16's range
TOP_FIELD = (
    12  # exponent field of 0.5 in a block's largest groups: 6 becomes 384, the next power of two overflows
)

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

FOLDED = tl.constexpr("""{
.reg .b32 m, n, a, b;
and.b32 m, $2, 0x77777777;
shr.b32 n, m, 16;
prmt.b32 a, $3, $7, m;
prmt.b32 b, $3, $7, n;
shl.b32 m, $2, 4;
lop3.b32 $0, m, 0x80808080, a, 0xEA;
lop3.b32 $1, $2, 0x80808080, b, 0xEA;
}""")


@kernel()
def inputs():
    """Which inputs of a block ``arranged`` puts at 0, 1, ...: int32 [128]."""
    at = tl.arange(0, 128)
    return 32 * (at // 4 % 4) + 4 * (at // 16) + at % 4


@kernel()
def places():
    """Where ``arranged`` puts the inputs 0, 1, ... of a block: int32 [128]."""
    at = tl.arange(0, 128)
    return 16 * (at // 4 % 8) + 4 * (at // 32) + at % 4


@kernel()
def unfold_plane(packed, field, PLANE: tl.constexpr):
    """One plane of ``unfold_half``, for targets without a byte permutation: e4m3 codes uint8 [M, 32]."""
    j = tl.arange(0, 32)
    at = (j // 4) * 4 + (j % 4) // 2 + 2 * PLANE
    byte = tl.gather(packed, tl.broadcast_to(at[None, :], packed.shape), 1)
    size = (byte >> ((j % 2) * 4).to(tl.uint8)[None, :]) & 7
    field = field.to(tl.uint8)
    code = tl.where(size == 0, 0, tl.where(size == 1, field, (size << 2) + field)).to(tl.uint8)
    return code | ((packed if PLANE else packed << 4) & 0x80)


@kernel()
def unfold_half(packed, field, ASM: tl.constexpr):
    """e4m3 [M, 64] of one half of a folded block, packed uint8 [M, 32]; field int32 [M, 32]: of its bytes' groups."""
    if ASM:
        a, b = tl.inline_asm_elementwise(
            FOLDED,
            "=r,=r,r,r,r,r,r,r,r,r,r",
            [packed, field * 0x01010100 + 0x0C080000, field * 0x01010101 + 0x1C181410],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    else:
        a, b = unfold_plane(packed, field, 0), unfold_plane(packed, field, 1)
    return tl.join(a, b).permute(0, 2, 1).reshape(packed.shape[0], 64).to(tl.float8e4nv, bitcast=True)


@kernel()
def unfold(first, second, scales, ASM: tl.constexpr):
    """e4m3 [M, 128] of the two halves of folded block lines, uint8 [M, 32], and scale bytes, uint8 [M, 8]: of the
    four groups, twice.

    Value * 2^-(log2 of the block's scale). The layouts of the joined parts are those of the matrix
    instruction's operand, so nothing moves between threads.
    """
    lines: tl.constexpr = first.shape[0]
    field = tl.broadcast_to(scales.to(tl.int32).reshape(lines, 2, 4, 1), (lines, 2, 4, 4)).reshape(lines, 32)
    a, b = unfold_half(first, field, ASM), unfold_half(second, field, ASM)
    return tl.join(a, b).permute(0, 2, 1).reshape(first.shape[0], 128)


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


def arranged(x: Tensor) -> Tensor:
    """x [..., K] in the order of folded weights: input 32 q + 4 j + i of a block of 128 at 16 j + 4 q + i."""
    return dense(x.unflatten(-1, (-1, 4, 8, 4)).transpose(-3, -2).flatten(-4))


@kernel()
def arrange_kernel(x, out, K: tl.constexpr, SPAN: tl.constexpr):
    """``arranged`` of int32 x [*, K / 4], four codes each: out alike. A program per row; SPAN at least K / 4."""
    begin()
    row = tl.program_id(0).to(tl.int64) * (K // 4)
    at = tl.arange(0, SPAN)
    live = at < K // 4
    value = tl.load(x + row + at // 32 * 32 + at % 4 * 8 + at // 4 % 8, mask=live, other=0)
    tl.store(out + row + at, value, mask=live)


def arranged_rows(x: Tensor) -> Tensor:
    """``arranged`` of e4m3 rows [R, K]."""
    out, (rows, k) = torch.empty_like(x), x.shape
    arrange_kernel[(rows,)](x.view(torch.int32), out.view(torch.int32), K=k, SPAN=pow2(k // 4), num_warps=4)
    return out


def fold_words(codes: Tensor) -> Tensor:
    """FP4 codes uint8 [..., 2, 32] of two planes as folded bytes uint8 [..., 32].

    Four elements k of both planes share 32 bits: sizes of the first at bits 4k, of the second at 16 + 4k,
    signs at 8k + 3 and 8k + 7.
    """
    wide = codes.to(torch.int32).unflatten(-1, (8, 4))
    place = torch.arange(4, dtype=torch.int32, device=codes.device)
    size, sign = wide & 7, wide >> 3
    first = (size[..., 0, :, :] << (4 * place)) | (sign[..., 0, :, :] << (8 * place + 3))
    second = (size[..., 1, :, :] << (4 * place + 16)) | (sign[..., 1, :, :] << (8 * place + 7))
    words = (first | second).sum(-1, dtype=torch.int32)  # no two of them share a bit
    return words.view(torch.uint8)


def fold_blocks(packed: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ "folded" of "planes": (blocks, words, block scales float32 [M/128, K/128], whether it is exact: bool []).

    It is unless the scales of some block lie further apart than e4m3 can hold, a factor of 2^11. Groups of
    nothing but zeros do not count.
    """
    codes = torch.stack((packed & 15, packed >> 4), -2)  # [m, kb, 2, 128, 2, 32]
    used = ((codes & 7) != 0).any(-1).transpose(2, 3).flatten(3)  # [m, kb, 128, 4]
    byte = words.contiguous().view(torch.uint8).view(used.shape).to(torch.int32)
    base = (torch.where(used, byte, 0).amax((2, 3)) - (TOP_FIELD - 6)).clamp(1, 254)
    field = torch.where(used, byte - base[..., None, None] + 6, 6)
    exact = ((field >= 1) & (field <= TOP_FIELD)).all()
    folded = (8 * field).to(torch.uint8).view(torch.int32).squeeze(-1)
    wide = arranged(codes.transpose(2, 3).flatten(3)).unflatten(-1, (2, 2, 32))  # [m, kb, 128, 2, 2, 32]
    return fold_words(wide.transpose(2, 3)), folded, e8m0_to_float(base.to(torch.uint8)), exact


def unpack_blocks(packed: Tensor, words: Tensor) -> Tensor:
    """float32 [M, K] of "planes" and their scale words, for tests and references."""
    table = fp4_table(packed.device)[:16, 0]
    m, blocks = packed.shape[:2]
    planes = torch.stack((table[(packed & 15).long()], table[(packed >> 4).long()]), 3)
    wide = planes.permute(0, 4, 1, 2, 3, 5).reshape(m * BLOCK, blocks * 4, 32)  # of [m, kb, 2, 2, 128, 32]
    scale = words.transpose(1, 2).reshape(-1).view(torch.uint8).view(m * BLOCK, blocks * 4)
    return (wide * e8m0_to_float(scale).unsqueeze(-1)).flatten(1)
