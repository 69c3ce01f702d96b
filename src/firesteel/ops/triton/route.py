"""Expert choice of each row."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from firesteel.ops.triton.launch import begin, kernel, pow2
from firesteel.ops.triton.spec import Spec


@kernel()
def root_softplus(x):
    """sqrt(log(1 + e^x)) without overflow; log(1 + y) by its quotient, exact for small y."""
    y = tl.exp(-tl.abs(x))
    one = 1.0 + y
    low = tl.where(one == 1.0, y, tl.log(one) * (y / tl.where(one == 1.0, 1.0, one - 1.0)))
    return tl.sqrt_rn(tl.maximum(x, 0.0) + low + (x - x))  # NaN stays


@kernel("rows")
def route_kernel(
    logits,
    bias,
    table,
    tokens,
    ids,
    weights,
    scale,
    rows,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TOP: tl.constexpr,
    LANES: tl.constexpr,
    HASHED: tl.constexpr,
):
    """One row: ids int64 [rows, TOP] ascending, weights float32 of logits float32 [rows, EXPERTS].

    Chosen by score plus bias, ties to the lowest id, or read from table int64 [V, TOP]. A row
    with NaN still gets valid ids.
    """
    begin()
    row = tl.program_id(0).to(tl.int64)
    bins, lane = tl.arange(0, BINS), tl.arange(0, LANES)
    real = bins < EXPERTS
    score = root_softplus(tl.load(logits + row * EXPERTS + bins, mask=real, other=0.0))
    if HASHED:
        token = tl.load(tokens + row)
        found = tl.load(table + token * TOP + lane, mask=lane < TOP, other=BINS).to(tl.int32)
    else:
        value = score + tl.load(bias + bins, mask=real, other=0.0)
        bits = value.to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # orders like the floats
        key = tl.where(value != value, -2147483647, key)
        key = tl.where(real, key, -2147483648)
        found = tl.full((LANES,), BINS, tl.int32)
        for j in tl.static_range(TOP):
            best = tl.min(tl.where(key == tl.max(key, axis=0), bins, BINS), axis=0)
            found = tl.where(lane == j, best, found)
            key = tl.where(bins == best, -2147483648, key)
    a, b = found[:, None], found[None, :]
    before = (b < a) | ((b == a) & (lane[None, :] < lane[:, None]))
    rank = tl.sum(before.to(tl.int32), axis=1)
    chosen = tl.sum(tl.where(a == bins[None, :], score[None, :], 0.0), axis=1)
    total = tl.sum(tl.where(lane < TOP, chosen, 0.0), axis=0)
    weight = chosen / (total + 1e-20) * scale
    tl.store(ids + row * TOP + rank, found.to(tl.int64), mask=lane < TOP)
    tl.store(weights + row * TOP + rank, weight, mask=lane < TOP)


def route(
    logits: Tensor, bias: Tensor | None, table: Tensor | None, tokens: Tensor, top: int, scale: float
) -> tuple[Tensor, Tensor]:
    """(ids int64 [R, top] ascending, weights float32 [R, top]) of gate logits float32 [R, E]."""
    rows, experts = logits.shape
    ids = torch.empty(rows, top, dtype=torch.int64, device=logits.device)
    weights = torch.empty(rows, top, dtype=torch.float32, device=logits.device)
    if rows:
        route_kernel[(rows,)](
            logits, logits if bias is None else bias, ids if table is None else table, tokens, ids, weights,
            scale, rows, EXPERTS=experts, BINS=pow2(experts), TOP=top, LANES=pow2(top),
            HASHED=table is not None, num_warps=1,
        )  # fmt: skip
    return ids, weights


def _spec(hashed: bool) -> Spec:
    return Spec(
        name=f"route{'-table' if hashed else ''}",
        fn=route_kernel,
        signature={
            "logits": "*fp32", "bias": "*fp32", "table": "*i64", "tokens": "*i64", "ids": "*i64",
            "weights": "*fp32", "scale": "fp32", "rows": "i32",
        },
        constexprs={"EXPERTS": 256, "BINS": 256, "TOP": 6, "LANES": 8, "HASHED": hashed},
        options={"num_warps": 1},
    )  # fmt: skip


KERNELS: list[Spec] = [_spec(False), _spec(True)]
