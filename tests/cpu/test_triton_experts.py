"""The routed experts' kernels under the interpreter: tiles, plans, folded weights."""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from firesteel.ops.reference.tail import ReferenceOps
from firesteel.ops.testing import assert_close
from firesteel.ops.testing_cases import normal, weight
from firesteel.ops.triton import folded, fp4, moe, plan
from firesteel.ops.triton.backend import TritonOps
from firesteel.ops.triton.linear import quantise
from firesteel.ops.types import Numerics

pytestmark = pytest.mark.cpu


def expert_parts(
    w13: Any, w2: Any, ops: TritonOps, tile: int, parallel: bool, shape: folded.Shape | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(h codes by assignment, its scales, float32 parts of every assignment) of nine rows."""
    x, scale = quantise(normal(9, 512), 512, torch.float8_e4m3fn)
    ids, how = torch.tensor([[0, 2], [1, 2], [0, 1]] * 3), moe.arithmetic("fp8", ops.target)
    tiles = moe.plan(ids, 3, tile, None, scale)
    h, hs = moe.up(
        w13, how, x, scale, torch.ones(9, 2), tiles, 2, 9.0, ops.scratch,
        official=True, round_h=True, parallel=parallel, shape=shape,
    )  # fmt: skip
    out = torch.full((18, 200), float("nan"))
    moe.down(w2, how, h, hs, tiles, out, ops.scratch, parallel, shape)
    real = (tiles.order >= 0) & (tiles.owner.repeat_interleave(tile) >= 0)
    order = torch.argsort(tiles.order[real])
    lines = hs.t() if shape else hs
    return h[real][order].view(torch.uint8), lines[real][order], out


@pytest.mark.parametrize("fold", [False, True])
def test_expert_tiles_and_ranges_change_no_bit(fold: bool) -> None:
    ops, experts = TritonOps(Numerics(True)), range(3)
    pairs = [(weight("fp4", 128, 512, e), weight("fp4", 128, 512, 9 + e)) for e in experts]
    w13 = ops._blocks(pairs, fold=fold)
    w2 = ops._blocks([(weight("fp4", 200, 128, 20 + e),) for e in experts], fold=fold)
    forms: list[tuple[int, bool, folded.Shape | None]]
    if fold:
        parts = [folded.Part(1, 4, 2), folded.Part(2, 4, 2), folded.Part(4, 4, 2)]
        late = folded.Shape(folded.Part(2, 4, 2, ahead=False), folded.Part(1, 4, 2, ahead=False))
        forms = [
            (16, False, folded.Shape(up, down))
            for up, down in zip(parts, (*parts[:2], parts[0]), strict=True)
        ]
        forms += [(32, False, folded.Shape(parts[1], parts[0])), (32, False, late)]
    else:
        forms = [(16, False, None), (16, True, None), (32, False, None)]
    results = [expert_parts(w13, w2, ops, *form) for form in forms]
    assert not results[0][2].isnan().any() and int(ops.scratch.arrived.sum()) == 0
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("once", [8192, 0])  # assignments read once, or as often as they are needed
def test_plan_places_every_assignment_once(once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "ONCE", once)
    ids = torch.randint(0, 6, (23, 2), generator=torch.Generator().manual_seed(0))
    ids[:, 0] = 4  # a crowd at one expert
    for tile in (16, 32):
        tiles = moe.plan(ids, 8, tile)
        order, owner = tiles.order, tiles.owner
        lines = order.view(-1, tile)[owner >= 0]
        placed = lines[lines >= 0]
        assert sorted(placed.tolist()) == list(range(46))
        for line, expert in zip(lines, owner[owner >= 0], strict=True):
            assert torch.all(ids.flatten()[line[line >= 0].long()] == expert)
        used = [e for e in owner.tolist() if e >= 0]
        assert used == sorted(used) and int(owner.min()) >= -1


@pytest.mark.parametrize("once", [8192, 0])
@pytest.mark.parametrize("rows", [1, 3, 40])  # few: fewer assignments than experts
def test_plan_leaves_out_rows_that_are_not_valid(
    rows: int, once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "ONCE", once)
    dice = torch.Generator().manual_seed(rows)
    ids = torch.rand(rows, 32, generator=dice).topk(3).indices.sort(-1).values
    for valid in (torch.rand(rows, generator=dice) < 0.5, torch.zeros(rows, dtype=torch.bool)):
        tiles = moe.plan(ids, 32, 16, valid)
        order, owner = tiles.order, tiles.owner
        lines = order.view(-1, 16)[owner >= 0]
        want = [a for a in range(3 * rows) if valid[a // 3]]
        assert sorted(lines[lines >= 0].tolist()) == want and int(owner.min()) >= -1
        assert len(lines) == len({int(e) for e in ids.flatten()[want]})


def test_experts_of_invalid_rows_are_not_read() -> None:
    parts, shared = torch.ones(6, 8), torch.ones(3, 8)
    parts[2:4] = float("nan")
    valid = torch.tensor([True, False, True])
    out = moe.combine(parts, [shared], 3, torch.float32, valid)
    assert out.tolist() == [[3.0] * 8, [0.0] * 8, [3.0] * 8]


def test_rows_that_are_not_valid_change_no_bit() -> None:
    ops, top, experts = TritonOps(Numerics(True)), 2, 5
    up = [[weight("fp4", 64, 96, seed=10 * i + e) for e in range(experts)] for i in (1, 2)]
    w = ops.expert_weights(up[0], [weight("fp4", 96, 64, seed=30 + e) for e in range(experts)], up[1])
    x, share = normal(7, 96), torch.ones(7, top)
    ids = torch.stack([torch.arange(i, i + top) % experts for i in range(7)]).sort(-1).values
    valid = torch.tensor([True, False, True, True, False, False, True])
    shared = [tuple(ops.linear_weight(weight("fp8", n, k)) for n, k in ((256, 96), (96, 128)))]
    whole = ops.moe(x, ids, share, w, shared, 1.5)
    x[~valid], ids[~valid] = 1e30, 4
    some = ops.moe(x, ids, share, w, shared, 1.5, valid=valid)
    assert torch.equal(some[valid], whole[valid]) and some.isfinite().all()


# ---- group scales in e4m3 codes ------------------------------------------------------------
def permuted(low: Tensor, high: Tensor, picks: Tensor) -> Tensor:
    """What the byte permutation makes of two words and the low 16 bits of a third; sizes below 8 only."""
    source = torch.stack([(w >> (8 * k)) & 0xFF for w in (low, high) for k in range(4)], -1)
    chosen = torch.stack([(picks >> (4 * k)) & 7 for k in range(4)], -1)
    return source.gather(-1, chosen)


def test_folded_weights_are_exact() -> None:
    """The instructions of ``fp4.FOLDED`` step by step, on weights with odd shapes and far scales."""
    w = weight("fp4", 130, 160)
    w.scale.view(torch.uint8)[:] = torch.randint(100, 112, w.scale.shape, dtype=torch.uint8)
    planes = fp4.pack_blocks(w.data, w.scale, pairs=False, unsigned_zero=False)
    packed, words, base, exact = fp4.fold_blocks(*planes)
    assert exact
    word = packed.view(torch.int32).long() & 0xFFFFFFFF  # [m, kb, 2, 128, 8]
    field = words.long()[:, :, None, :, None] >> (8 * (torch.arange(8) % 4)) & 0xFF
    low, high = field * 0x01010100 + 0x0C080000, field * 0x01010101 + 0x1C181410
    parts = []
    for plane in range(2):
        size = permuted(*torch.broadcast_tensors(low, high, (word & 0x77777777) >> (16 * plane)))
        sign = torch.stack([(word >> (8 * k + 4 * plane)) & 8 for k in range(4)], -1) << 4
        parts.append((size | sign).flatten(-2))
    wide = torch.stack(parts, 3).to(torch.uint8).view(torch.float8_e4m3fn).float()  # [m, kb, 2, 2, 128, 32]
    wide = wide.permute(0, 4, 1, 2, 3, 5).flatten(2) * base.repeat_interleave(128, 1)[:, None]
    assert torch.equal(wide.flatten(0, 1), fp4.arranged(fp4.unpack_blocks(*planes)))


def test_rows_are_arranged_as_weights_are() -> None:
    x = torch.randint(0, 256, (3, 384), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    want = fp4.arranged(x)
    assert int(want[1, 128 + 16 * 5 + 4 * 2 + 3]) == int(x[1, 128 + 32 * 2 + 4 * 5 + 3])
    codes = x.view(torch.float8_e4m3fn)
    assert torch.equal(fp4.arranged_rows(codes).view(torch.uint8), want)


def test_far_scales_keep_the_slower_form(caplog: pytest.LogCaptureFixture) -> None:
    w, x = weight("fp4", 128, 256), normal(3, 256)
    w.scale.view(torch.uint8)[0, :2] = torch.tensor([120, 100], dtype=torch.uint8)
    w.data[0, :16] = 0x11
    ops, oracle = TritonOps(Numerics(True)), ReferenceOps(Numerics(True))
    kept = ops.linear_weight(w)
    assert isinstance(kept.data.blocks, moe.Grouped) and "slower form" in caplog.text
    assert_close(ops.linear(x, kept), want := oracle.linear(x, oracle.linear_weight(w)), want, grid=True)
    w.data[0, 16:32] = 0  # the small scale's group holds nothing now: it does not count
    kept = ops.linear_weight(w)
    assert isinstance(kept.data.blocks, folded.Weights)
    assert_close(ops.linear(x, kept), want := oracle.linear(x, oracle.linear_weight(w)), want, grid=True)
