"""Number formats of V4 weights: E8M0 scales, packed FP4 (E2M1), block FP8 (E4M3).

All codecs are exact restatements in torch, on any device. Scales are read by
bit views only: an E8M0 byte ``b`` is 2^(b-127), 255 is NaN; there is no sign and no zero.
Rounding is to nearest, ties to even. Nothing here allocates more than the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

FP4_GROUP = 32  # consecutive input elements that share one FP4 scale
FP8_BLOCK = 128  # rows and columns of one FP8 block
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0..7; 8..15 are the negatives
E4M3_MAX = 448.0

Format = Literal["fp4", "fp8", "bf16", "f32", "i64"]


class CodecError(ValueError):
    """Tensors that do not fit together as the number format demands."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """One-byte tensor reinterpreted as uint8; raises CodecError for wider dtypes."""
    if tensor.element_size() != 1:
        raise CodecError(f"expected a one-byte dtype, found {tensor.dtype}")
    return tensor if tensor.dtype == torch.uint8 else tensor.view(torch.uint8)


def e8m0_to_float(scale: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes (uint8, int8 or float8_e8m0fnu) to float32; byte 0 is the subnormal 2^-127."""
    code = as_bytes(scale).to(torch.int32)
    bits = code << 23
    bits = torch.where(code == 0, torch.full_like(bits, 1 << 22), bits)
    bits = torch.where(code == 255, torch.full_like(bits, 0x7FC00000), bits)
    return bits.view(torch.float32)


def float_to_e8m0(value: torch.Tensor) -> torch.Tensor:
    """Exact powers of two (float32) to E8M0 bytes, uint8. NaN becomes 255.

    Raises CodecError if a value is not a power of two in 2^-127..2^127.
    """
    value = value.to(torch.float32)
    mantissa, exponent = torch.frexp(value)
    nan = torch.isnan(value)
    code = exponent.to(torch.int32) - 1 + 127
    good = nan | ((mantissa == 0.5) & (code >= 0) & (code <= 254))
    if not bool(good.all()):
        bad = value[~good].flatten()[0].item()
        raise CodecError(f"{bad!r} is no E8M0 value; scales must be powers of two in 2^-127..2^127")
    return torch.where(nan, torch.full_like(code, 255), code).to(torch.uint8)


def pow2_exponent(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """Smallest integer e with ``largest * 2^e >= amax``, that is ceil(log2(amax/largest)), exactly.

    ``amax`` is float32 and positive; works on mantissas, so no logarithm is rounded.
    """
    mantissa, exponent = torch.frexp(amax.to(torch.float32))
    top, shift = torch.frexp(torch.tensor(largest, dtype=torch.float32))
    return exponent.to(torch.int32) - int(shift) + (mantissa > top.to(mantissa.device)).to(torch.int32)


def pow2_scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """E8M0 bytes of the scale for groups with this ``amax``; an all-zero group gets 2^0."""
    exponent = pow2_exponent(amax, largest)
    code = (exponent + 127).clamp(0, 254)
    return torch.where(amax > 0, code, torch.full_like(code, 127)).to(torch.uint8)


# ---- FP4 -----------------------------------------------------------------------------------------
def fp4_codes(value: torch.Tensor) -> torch.Tensor:
    """E2M1 codes 0..15 (uint8) of float values, nearest even, saturating at 6; keeps the sign of zero."""
    mag = value.abs()
    code = (mag > 0.25).to(torch.uint8)
    # a tie goes to the even code: down at the strict comparisons, up at the others
    for edge, strict in ((0.75, 0), (1.25, 1), (1.75, 0), (2.5, 1), (3.5, 0), (5.0, 1)):
        code += ((mag > edge) if strict else (mag >= edge)).to(torch.uint8)
    return code | (torch.signbit(value).to(torch.uint8) << 3)


def fp4_pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes [..., K] to bytes [..., K/2]: element 2j in the low nibble, 2j+1 in the high one."""
    if codes.shape[-1] % 2:
        raise CodecError(f"FP4 rows need an even length, found {codes.shape[-1]}")
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def fp4_unpack(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., K/2] to codes [..., K], uint8 0..15."""
    byte = as_bytes(packed)
    return torch.stack((byte & 15, byte >> 4), -1).flatten(-2)


def fp4_table(device: torch.device) -> torch.Tensor:
    """float32 [256, 2]: the two values of every packed byte."""
    half = torch.tensor(FP4_VALUES, dtype=torch.float32, device=device)
    value = torch.cat((half, -half))
    code = torch.arange(256, device=device)
    return torch.stack((value[code & 15], value[code >> 4]), -1)


def fp4_dequant(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [..., N, K] from bytes [..., N, K/2] and E8M0 scales [..., N, K/32]."""
    width = packed.shape[-1] * 2
    if width % FP4_GROUP or tuple(scale.shape) != (*packed.shape[:-1], width // FP4_GROUP):
        want = (*packed.shape[:-1], width / FP4_GROUP)
        raise CodecError(f"FP4 data {tuple(packed.shape)} needs scales {want}, found {tuple(scale.shape)}")
    value = fp4_table(packed.device)[as_bytes(packed).to(torch.int32)]
    value = value.view(*scale.shape, FP4_GROUP)
    return (value * e8m0_to_float(scale).unsqueeze(-1)).view(*packed.shape[:-1], width)


def fp4_quant(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes uint8 [..., N, K/2], E8M0 bytes uint8 [..., N, K/32]) of a finite float weight [..., N, K].

    Scale 2^ceil(log2(amax/6)) per 32 consecutive input elements.
    """
    if weight.shape[-1] % FP4_GROUP:
        raise CodecError(f"FP4 rows need a multiple of {FP4_GROUP} elements, found {weight.shape[-1]}")
    group = weight.to(torch.float32).unflatten(-1, (-1, FP4_GROUP))
    scale = pow2_scale(group.abs().amax(-1), FP4_VALUES[-1])
    # ldexp by the negated exponent is exact; 1/scale would overflow for the smallest scales
    codes = fp4_codes(torch.ldexp(group, 127 - scale.to(torch.int32).unsqueeze(-1)))
    return fp4_pack(codes.flatten(-2)), scale


# ---- FP8 -----------------------------------------------------------------------------------------
def block_shape(rows: int, cols: int) -> tuple[int, int]:
    """Shape of the scale grid of an FP8 weight [rows, cols]; partial blocks count."""
    return -(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK)


def spread(grid: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Block values [..., R, C] repeated over their elements, cut to [..., rows, cols]."""
    full = grid.repeat_interleave(FP8_BLOCK, -2)[..., :rows, :]
    return full.repeat_interleave(FP8_BLOCK, -1)[..., :cols]


def scale_to_float(scale: torch.Tensor) -> torch.Tensor:
    """float32 scales from E8M0 bytes or from float32/bfloat16 scales."""
    if scale.element_size() == 1:
        return e8m0_to_float(scale)
    return scale.to(torch.float32)


def fp8_dequant(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [..., N, K] from float8_e4m3fn [..., N, K] and scales [..., ceil(N/128), ceil(K/128)]."""
    rows, cols = data.shape[-2:]
    want = (*data.shape[:-2], *block_shape(rows, cols))
    if tuple(scale.shape) != want:
        raise CodecError(f"FP8 data {tuple(data.shape)} needs scales {want}, found {tuple(scale.shape)}")
    if data.element_size() == 1 and data.dtype != torch.float8_e4m3fn:
        data = data.view(torch.float8_e4m3fn)
    return data.to(torch.float32) * spread(scale_to_float(scale), rows, cols)


def fp8_quant(
    weight: torch.Tensor, scales: Literal["e8m0", "f32"] = "e8m0"
) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn [..., N, K], scales) of a finite float weight [..., N, K] in 128x128 blocks.

    ``e8m0``: scale bytes uint8, 2^ceil(log2(amax/448)). ``f32``: float32 scale amax/448.
    """
    weight = weight.to(torch.float32)
    rows, cols = weight.shape[-2:]
    grid = block_shape(rows, cols)
    padded = torch.nn.functional.pad(weight, (0, grid[1] * FP8_BLOCK - cols, 0, grid[0] * FP8_BLOCK - rows))
    tiles = padded.unflatten(-1, (grid[1], FP8_BLOCK)).unflatten(-3, (grid[0], FP8_BLOCK))
    amax = tiles.abs().amax((-3, -1))
    if scales == "e8m0":
        scale = pow2_scale(amax, E4M3_MAX)
        shift = spread(127 - scale.to(torch.int32), rows, cols)
        scaled = torch.ldexp(weight, shift)
    else:
        scale = torch.where(amax > 0, amax / E4M3_MAX, torch.ones_like(amax))
        scaled = weight / spread(scale, rows, cols)
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


# ---- one weight ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class QTensor:
    """One weight in its stored format.

    fp4: data uint8 [N, K/2], scale uint8 (E8M0) [N, K/32].
    fp8: data float8_e4m3fn [N, K], scale uint8 (E8M0) or float32 [ceil(N/128), ceil(K/128)].
    bf16, f32, i64: data [..], no scale. ``shape`` is always the logical one.
    """

    format: Format
    data: torch.Tensor
    scale: torch.Tensor | None
    shape: tuple[int, ...]

    def dequant(self) -> torch.Tensor:
        """The weight as float32 of ``shape``; an i64 table raises CodecError."""
        if self.format == "fp4":
            assert self.scale is not None
            return fp4_dequant(self.data, self.scale)
        if self.format == "fp8":
            assert self.scale is not None
            return fp8_dequant(self.data, self.scale)
        if self.format == "i64":
            raise CodecError("an integer table has no dequantised form; use .data")
        return self.data.to(torch.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of data and scale."""
        own = self.data.numel() * self.data.element_size()
        return own + (0 if self.scale is None else self.scale.numel() * self.scale.element_size())

    @classmethod
    def dense(cls, tensor: torch.Tensor) -> QTensor:
        """Wrap an unquantised tensor; raises CodecError for dtypes checkpoints do not have."""
        names: dict[torch.dtype, Format] = {
            torch.bfloat16: "bf16",
            torch.float32: "f32",
            torch.int64: "i64",
        }
        if tensor.dtype not in names:
            raise CodecError(f"expected bfloat16, float32 or int64, found {tensor.dtype}")
        return cls(names[tensor.dtype], tensor, None, tuple(tensor.shape))

    @classmethod
    def fp4(cls, weight: torch.Tensor) -> QTensor:
        """Quantise a float weight [N, K] to FP4."""
        data, scale = fp4_quant(weight)
        return cls("fp4", data, scale, tuple(weight.shape))

    @classmethod
    def fp8(cls, weight: torch.Tensor, scales: Literal["e8m0", "f32"] = "e8m0") -> QTensor:
        """Quantise a float weight [N, K] to block FP8."""
        data, scale = fp8_quant(weight, scales)
        return cls("fp8", data, scale, tuple(weight.shape))
