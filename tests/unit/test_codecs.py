"""FP4, FP8 and E8M0 against independent restatements, exhaustively where the space is small."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from firesteel.checkpoint import codecs as c

CODES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def random(shape: tuple[int, ...], seed: int, spread: float = 1.0) -> torch.Tensor:
    """Normal values whose rows differ by powers of two, so that scales differ."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * torch.exp2(
        spread * torch.randn(shape[:-1], generator=g)
    ).unsqueeze(-1)


def test_e8m0_every_byte() -> None:
    value = c.e8m0_to_float(torch.arange(256, dtype=torch.uint8))
    for byte in range(255):
        assert value[byte].item() == 2.0 ** (byte - 127)  # exact in float64, subnormal at byte 0
    assert math.isnan(value[255].item())
    named = {0: 2.0**-127, 120: 2.0**-7, 127: 1.0, 254: 2.0**127}
    assert {b: value[b].item() for b in named} == named


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e8m0fnu])
def test_e8m0_reads_bits_whatever_the_dtype(dtype: torch.dtype) -> None:
    code = torch.tensor([0, 1, 120, 127, 200, 254], dtype=torch.uint8)
    assert torch.equal(c.e8m0_to_float(code.view(dtype)), c.e8m0_to_float(code))


def test_e8m0_agrees_with_torch() -> None:
    code = torch.arange(1, 255, dtype=torch.uint8)
    assert torch.equal(code.view(torch.float8_e8m0fnu).to(torch.float32), c.e8m0_to_float(code))


def test_e8m0_round_trip_and_refusals() -> None:
    code = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(c.float_to_e8m0(c.e8m0_to_float(code)), code)
    for bad in (0.0, -1.0, 3.0, float("inf")):
        with pytest.raises(c.CodecError, match="power"):
            c.float_to_e8m0(torch.tensor([bad]))
    with pytest.raises(c.CodecError, match="one-byte"):
        c.e8m0_to_float(torch.tensor([1.0]))


def test_fp4_every_byte_low_nibble_first() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(8, 32)[:, :16].contiguous()
    scale = torch.full((8, 1), 127, dtype=torch.uint8)
    value = c.fp4_dequant(packed, scale)
    for row in range(8):
        for col in range(16):
            byte = packed[row, col].item()
            for nibble, code in enumerate((byte % 16, byte // 16)):
                want = CODES[code % 8] * (-1 if code >= 8 else 1)
                assert value[row, 2 * col + nibble].item() == want


def test_fp4_every_code_packs_and_unpacks() -> None:
    codes = torch.arange(256, dtype=torch.int64)
    pairs = torch.stack((codes % 16, codes // 16), -1).flatten().to(torch.uint8)
    packed = c.fp4_pack(pairs)
    assert torch.equal(packed, torch.arange(256, dtype=torch.uint8))
    assert torch.equal(c.fp4_unpack(packed.view(torch.int8)), pairs)


def test_fp4_rounds_to_nearest_even() -> None:
    grid = torch.linspace(-7, 7, 14 * 64 + 1)  # hits every midpoint exactly
    code = c.fp4_codes(grid)
    signed = [*CODES, *[-v for v in CODES]]
    for x, k in zip(grid.tolist(), code.tolist(), strict=True):
        best = min(abs(abs(x) - v) for v in CODES)
        ties = [i for i, v in enumerate(CODES) if abs(abs(x) - v) == best]
        want = ties[0] if len(ties) == 1 else next(i for i in ties if i % 2 == 0)
        assert abs(signed[k]) == CODES[want], x
        assert (k >= 8) == (math.copysign(1, x) < 0)


@given(st.integers(0, 2**31), st.floats(0, 12))
def test_fp4_round_trip_is_idempotent_and_near(seed: int, spread: float) -> None:
    weight = random((4, 64), seed, spread)
    data, scale = c.fp4_quant(weight)
    once = c.fp4_dequant(data, scale)
    assert torch.equal(c.fp4_dequant(*c.fp4_quant(once)), once)
    # half a step of the coarsest interval is 1 code unit; nothing saturates
    step = c.e8m0_to_float(scale).repeat_interleave(32, -1)
    assert bool(((once - weight).abs() <= step).all())


@given(st.integers(0, 2**31), st.floats(0, 12))
def test_fp4_scale_is_the_smallest_power_of_two(seed: int, spread: float) -> None:
    weight = random((2, 32), seed, spread)
    scale = c.e8m0_to_float(c.fp4_quant(weight)[1]).double().squeeze(-1)
    amax = weight.double().abs().amax(-1)
    assert bool((amax <= 6 * scale).all()) and bool((amax > 3 * scale).all())


@pytest.mark.parametrize("largest", [6.0, 448.0])
def test_scale_exponent_is_exact_at_the_edges(largest: float) -> None:
    for e in (-100, -7, 0, 1, 60):
        top = torch.tensor(largest * 2.0**e)
        above = torch.nextafter(top, torch.tensor(float("inf")))
        assert c.pow2_exponent(top.view(1), largest).item() == e
        assert c.pow2_exponent(above.view(1), largest).item() == e + 1


def test_fp4_extremes() -> None:
    zeros, scale = c.fp4_quant(torch.zeros(2, 32))
    assert torch.equal(c.fp4_dequant(zeros, scale), torch.zeros(2, 32))
    big = torch.full((1, 32), 2.5e38)  # rounds to 3, scale 2^126
    assert torch.isfinite(c.fp4_dequant(*c.fp4_quant(big))).all()
    tiny = torch.full((1, 32), 6 * 2.0**-127)
    assert torch.equal(c.fp4_dequant(*c.fp4_quant(tiny)), tiny)


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (130, 200), (64, 384), (257, 32)])
@pytest.mark.parametrize("kind", ["e8m0", "f32"])
def test_fp8_against_loops(shape: tuple[int, int], kind: str) -> None:
    weight = random(shape, 5, 3.0)
    data, scale = c.fp8_quant(weight, kind)  # type: ignore[arg-type]
    assert tuple(scale.shape) == (-(-shape[0] // 128), -(-shape[1] // 128))
    value, grid = c.fp8_dequant(data, scale), c.scale_to_float(scale)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            here = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            amax = weight[here].abs().max().item()
            want = 2.0 ** math.ceil(math.log2(amax / 448)) if kind == "e8m0" else amax / 448
            assert grid[i, j].item() == pytest.approx(want, rel=1e-6 if kind == "f32" else 0)
            assert torch.equal(value[here], data[here].float() * grid[i, j])
    assert ((value - weight).abs() <= weight.abs() / 16 + c.spread(grid, *shape) * 2.0**-9).all()


@given(st.integers(0, 2**31), st.integers(1, 150), st.integers(1, 150))
def test_fp8_round_trip_is_idempotent(seed: int, rows: int, cols: int) -> None:
    once = c.fp8_dequant(*c.fp8_quant(random((rows, cols), seed, 4.0)))
    assert torch.equal(c.fp8_dequant(*c.fp8_quant(once)), once)


def test_fp8_keeps_every_code_point() -> None:
    code = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8)
    value = code.view(torch.float8_e4m3fn).float().view(1, -1)
    data, scale = c.fp8_quant(value)
    assert scale.flatten().tolist() == [127, 127]
    assert torch.equal(data.view(torch.uint8).flatten(), code)


def test_leading_dims_are_batches() -> None:
    weight = random((3, 130, 64), 9)
    for quant, dequant in ((c.fp4_quant, c.fp4_dequant), (c.fp8_quant, c.fp8_dequant)):
        whole = dequant(*quant(weight))
        assert torch.equal(whole, torch.stack([dequant(*quant(w)) for w in weight]))


def test_shapes_that_do_not_fit_are_refused() -> None:
    data, scale = c.fp4_quant(random((4, 64), 0))
    with pytest.raises(c.CodecError, match="needs scales"):
        c.fp4_dequant(data, scale[:, :1])
    with pytest.raises(c.CodecError, match="needs scales"):
        c.fp8_dequant(*reversed(c.fp8_quant(random((4, 64), 0))))
    with pytest.raises(c.CodecError, match="multiple of 32"):
        c.fp4_quant(torch.zeros(2, 48))


def test_qtensor_forms() -> None:
    weight = random((64, 64), 3)
    four, eight = c.QTensor.fp4(weight), c.QTensor.fp8(weight, "f32")
    assert four.shape == eight.shape == (64, 64)
    assert four.nbytes == 64 * 32 + 64 * 2 and eight.nbytes == 64 * 64 + 4
    assert torch.equal(four.dequant(), c.fp4_dequant(*c.fp4_quant(weight)))
    dense = c.QTensor.dense(weight.to(torch.bfloat16))
    assert dense.format == "bf16" and torch.equal(dense.dequant(), weight.to(torch.bfloat16).float())
    with pytest.raises(c.CodecError, match="float16"):
        c.QTensor.dense(weight.half())
    with pytest.raises(c.CodecError, match="integer"):
        c.QTensor.dense(torch.zeros(2, 2, dtype=torch.int64)).dequant()
