"""Kernels of the routed experts' two products in all formats but "folded"; ``moe`` plans and launches them."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from firesteel.ops.triton.fp4 import half_sum, places, scaled_sum
from firesteel.ops.triton.launch import begin, kernel
from firesteel.ops.triton.products import range_sum
from firesteel.ops.triton.spec import Spec


# ---- products ---------------------------------------------------------------------------
@kernel()
def block_sum(
    w,
    ws,
    x,
    xs,
    row,
    line_at,
    first,
    COUNT: tl.constexpr,
    K: tl.constexpr,
    TILE_N: tl.constexpr,
    PAIR: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    FNUZ: tl.constexpr,
    ASM: tl.constexpr,
):
    """COUNT FP4 blocks from ``first`` of block line line_at of w times lines ``row`` of x: float32 [128, TILE_N].

    With PAIR > 0 also those of block line line_at + PAIR, as a second result. Scales are read one
    block ahead by hand: only what feeds a dot gets pipelined.
    """
    blocks: tl.constexpr = K // 128
    rm = tl.arange(0, 128)
    gate_s = ws + line_at * (blocks * 128) + rm
    up_s = gate_s + PAIR * (blocks * 128)
    tp = xs + row * blocks
    gate = tl.zeros((128, TILE_N), tl.float32)
    up = tl.zeros((128, TILE_N), tl.float32)
    g, u = tl.load(gate_s + first * 128), tl.load(up_s + first * 128)
    t = tl.load(tp + first) if KIND == "fp8" else g
    if FORMAT == "pairs":
        rk, wk = tl.arange(0, 128), tl.arange(0, 64)
        inside = rm[:, None] * 64 + wk[None, :]
    else:
        rk = tl.arange(0, 32)
        inside = rm[:, None] * 32 + rk[None, :]
    gate_w = w + line_at * (blocks * 8192) + inside
    up_w = gate_w + PAIR * (blocks * 8192)
    xp = x + row[None, :] * K + rk[:, None]
    for i in range(COUNT):
        block = first + i
        ahead = tl.minimum(block + 1, first + COUNT - 1)
        g1 = tl.load(gate_s + ahead * 128)
        t1 = tl.load(tp + ahead) if KIND == "fp8" else g1
        if PAIR > 0:
            u1 = tl.load(up_s + ahead * 128)
        else:
            u1 = g1
        if FORMAT == "pairs":
            x0 = tl.load(xp + block * 128)
            gate = scaled_sum(gate, tl.load(gate_w + block * 8192), g, x0, t, TILE_N)
            if PAIR > 0:
                up = scaled_sum(up, tl.load(up_w + block * 8192), u, x0, t, TILE_N)
        else:
            for half in tl.static_range(2):
                at = block * 8192 + half * 4096
                x0, x1 = tl.load(xp + block * 128 + half * 64), tl.load(xp + block * 128 + half * 64 + 32)
                gate = half_sum(gate, tl.load(gate_w + at), g, x0, x1, t, 2 * half, KIND, FNUZ, ASM)
                if PAIR > 0:
                    up = half_sum(up, tl.load(up_w + at), u, x0, x1, t, 2 * half, KIND, FNUZ, ASM)
        g, u, t = g1, u1, t1
    return gate, up


@kernel()
def expert_sum(
    w,
    ws,
    x,
    xs,
    row,
    expert,
    m,
    first,
    COUNT: tl.constexpr,
    K: tl.constexpr,
    LINES: tl.constexpr,
    PAIR: tl.constexpr,
    TILE_N: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    FNUZ: tl.constexpr,
    ASM: tl.constexpr,
):
    """Outputs m * 128 ... of an expert with LINES outputs, and those PAIR * 128 further on; see ``block_sum``."""
    blocks: tl.constexpr = K // 128
    if FORMAT == "rows":
        scaled: tl.constexpr = KIND == "fp8" or ws.dtype.element_ty == tl.float32
        wp = w + expert.to(tl.int64) * (LINES * K)
        wsp = ws + expert * (LINES // 128 * blocks)
        rm = m * 128 + tl.arange(0, 128)
        gate = range_sum(wp, x, wsp, xs, rm, row, first, COUNT, K, K, blocks, 128, 128, TILE_N, KIND, scaled)
        up = gate
        if PAIR > 0:
            rm += PAIR * 128
            up = range_sum(
                wp, x, wsp, xs, rm, row, first, COUNT, K, K, blocks, 128, 128, TILE_N, KIND, scaled
            )
    else:
        line_at = (expert * (LINES // 128) + m).to(tl.int64)
        pair: tl.constexpr = 0 if KIND == "f32" else PAIR  # float32 steps hold too much for two sums at once
        gate, up = block_sum(
            w, ws, x, xs, row, line_at, first, COUNT, K, TILE_N, pair, FORMAT, KIND, FNUZ, ASM
        )
        if KIND == "f32" and PAIR > 0:
            up, _ = block_sum(
                w, ws, x, xs, row, line_at + PAIR, first, COUNT, K, TILE_N, 0, FORMAT, KIND, FNUZ, ASM
            )
        if KIND == "bf16":
            gate, up = gate * 18446744073709551616.0, up * 18446744073709551616.0  # 2^64 of unpack16
    return gate, up


@kernel()
def swiglu(gate, up, limit):
    """silu(min(gate, limit)) * clamp(up, -limit, limit), float32."""
    gate = tl.where(gate > limit, limit, gate)  # NaN stays
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-gate)) * up


@kernel()
def finish_up(
    gate,
    up,
    share,
    limit,
    h,
    hs,
    line,
    m,
    INNER: tl.constexpr,
    KIND: tl.constexpr,
    OFFICIAL: tl.constexpr,
    ROUND: tl.constexpr,
    FNUZ: tl.constexpr,
    ARRANGED: tl.constexpr = False,
):
    """SwiGLU of two [128, n] sums times the route weights ``share`` [n], stored as h for the second product.

    Lines ``line`` [n], columns m * 128 ...; hs [n]: where the lines' scales go. ARRANGED: for folded weights.
    """
    if OFFICIAL:
        gate, up = gate.to(tl.bfloat16).to(tl.float32), up.to(tl.bfloat16).to(tl.float32)
    v = swiglu(gate, up, limit) * share[None, :]
    if OFFICIAL:
        v = v.to(tl.bfloat16).to(tl.float32)
    if ROUND:
        bits = tl.maximum(tl.max(tl.abs(v), axis=0), 1e-4).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        step = (exponent << 23).to(tl.float32, bitcast=True)
        code = tl.minimum(tl.maximum(v * inverse[None, :], -448.0), 448.0)
        code = tl.where(v != v, v, code)
        if KIND == "bf16":
            v = code.to(tl.float8e4nv).to(tl.float32) * step[None, :]
        else:
            if FNUZ:
                code, step = code * 0.5, step * 2.0
            v = code
            tl.store(hs, step)
    column = places() if ARRANGED else tl.arange(0, 128)
    at = line.to(tl.int64)[None, :] * INNER + m * 128 + column[:, None]
    tl.store(h + at, v.to(h.dtype.element_ty))


@kernel("lines", "limit")
def up_kernel(
    w,
    ws,
    x,
    xs,
    order,
    owner,
    weights,
    h,
    hs,
    part,
    arrived,
    lines,
    limit,
    K: tl.constexpr,
    INNER: tl.constexpr,
    TOP: tl.constexpr,
    SPLITS: tl.constexpr,
    PARALLEL: tl.constexpr,
    TILE_N: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    OFFICIAL: tl.constexpr,
    ROUND: tl.constexpr,
    FNUZ: tl.constexpr,
    ASM: tl.constexpr,
):
    """Gate and up products of one tile, SwiGLU, route weight, quantised again.

    A program makes 128 channels, one scale group, of TILE_N lines. x [rows, K] and h [lines, INNER]
    are e4m3 with scales xs, hs float32 (KIND "fp8"), or plain values. OFFICIAL: bf16
    after each step; ROUND: h is put on the e4m3 grid. Ranges of K as in ``linear_kernel``:
    part float32 [SPLITS, lines, 2 * INNER].
    """
    begin()
    tile, m = tl.program_id(0), tl.program_id(1)
    expert = tl.load(owner + tile)
    if expert < 0:
        return
    line = tile * TILE_N + tl.arange(0, TILE_N)
    row = (tl.maximum(tl.load(order + line), 0) // TOP).to(tl.int64)
    count: tl.constexpr = K // 128 // SPLITS
    pair: tl.constexpr = INNER // 128
    if PARALLEL:
        split = tl.program_id(2)
        gate, up = expert_sum(
            w,
            ws,
            x,
            xs,
            row,
            expert,
            m,
            split * count,
            count,
            K,
            2 * INNER,
            pair,
            TILE_N,
            FORMAT,
            KIND,
            FNUZ,
            ASM,
        )
        index = tl.load(order + line)  # read again: registers are short during the sum
        plane = lines.to(tl.int64) * (2 * INNER)
        at = line.to(tl.int64)[None, :] * (2 * INNER) + m * 128 + tl.arange(0, 128)[:, None]
        live = tl.broadcast_to((index >= 0)[None, :], (128, TILE_N))
        tl.store(part + split * plane + at, gate, mask=live)
        tl.store(part + split * plane + at + INNER, up, mask=live)
        tl.debug_barrier()  # all stores of this program stand before its arrival
        counter = arrived + tile * tl.num_programs(1) + m
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            gate, up = tl.zeros((128, TILE_N), tl.float32), tl.zeros((128, TILE_N), tl.float32)
            for other in range(SPLITS):
                gate += tl.load(part + other * plane + at, mask=live, other=0.0, cache_modifier=".cg")
                up += tl.load(part + other * plane + at + INNER, mask=live, other=0.0, cache_modifier=".cg")
            share = tl.load(weights + tl.maximum(index, 0))
            finish_up(
                gate,
                up,
                share,
                limit,
                h,
                hs + line * (INNER // 128) + m,
                line,
                m,
                INNER,
                KIND,
                OFFICIAL,
                ROUND,
                FNUZ,
            )
            tl.store(counter, 0)
    else:
        gate, up = tl.zeros((128, TILE_N), tl.float32), tl.zeros((128, TILE_N), tl.float32)
        for split in range(SPLITS):
            g, u = expert_sum(
                w, ws, x, xs, row, expert, m, split * count, count, K, 2 * INNER, pair, TILE_N, FORMAT, KIND, FNUZ, ASM
            )  # fmt: skip
            gate += g
            up += u
        share = tl.load(weights + tl.maximum(tl.load(order + line), 0))
        finish_up(
            gate,
            up,
            share,
            limit,
            h,
            hs + line * (INNER // 128) + m,
            line,
            m,
            INNER,
            KIND,
            OFFICIAL,
            ROUND,
            FNUZ,
        )


@kernel("lines")
def down_kernel(
    w,
    ws,
    h,
    hs,
    order,
    owner,
    out,
    part,
    arrived,
    lines,
    D: tl.constexpr,
    WIDE: tl.constexpr,
    K: tl.constexpr,
    SPLITS: tl.constexpr,
    PARALLEL: tl.constexpr,
    TILE_N: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    FNUZ: tl.constexpr,
    ASM: tl.constexpr,
):
    """out [assignments, D] = h [lines, K] times w2 of the tile's expert; WIDE is D in whole blocks of 128.

    Ranges of K as in ``up_kernel``: part float32 [SPLITS, lines, WIDE].
    """
    begin()
    tile, m = tl.program_id(0), tl.program_id(1)
    expert = tl.load(owner + tile)
    if expert < 0:
        return
    line = tile * TILE_N + tl.arange(0, TILE_N)
    taken = tl.load(order + line)
    row = line.to(tl.int64)
    n = m * 128 + tl.arange(0, 128)
    count: tl.constexpr = K // 128 // SPLITS
    keep = (n < D)[:, None] & (taken >= 0)[None, :]
    to = out + taken.to(tl.int64)[None, :] * D + n[:, None]
    if PARALLEL:
        split = tl.program_id(2)
        acc, _ = expert_sum(
            w, ws, h, hs, row, expert, m, split * count, count, K, WIDE, 0, TILE_N, FORMAT, KIND, FNUZ, ASM
        )
        plane = lines.to(tl.int64) * WIDE
        at = row[None, :] * WIDE + n[:, None]
        tl.store(part + split * plane + at, acc, mask=keep)
        tl.debug_barrier()
        counter = arrived + tile * tl.num_programs(1) + m
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros((128, TILE_N), tl.float32)
            for other in range(SPLITS):
                total += tl.load(part + other * plane + at, mask=keep, other=0.0, cache_modifier=".cg")
            tl.store(to, total.to(out.dtype.element_ty), mask=keep)
            tl.store(counter, 0)
    else:
        total = tl.zeros((128, TILE_N), tl.float32)
        for split in range(SPLITS):
            acc, _ = expert_sum(
                w,
                ws,
                h,
                hs,
                row,
                expert,
                m,
                split * count,
                count,
                K,
                WIDE,
                0,
                TILE_N,
                FORMAT,
                KIND,
                FNUZ,
                ASM,
            )
            total += acc
        tl.store(to, total.to(out.dtype.element_ty), mask=keep)


# ---- offline compilation ------------------------------------------------------------------
def _expert_specs(
    kind: str, format_: str, tile_n: int, targets: tuple[str, ...], parallel: bool = False
) -> list[Spec]:
    fp8 = kind == "fp8"
    value = {"fp8": "*fp8", "bf16": "*bf16", "f32": "*fp32"}[kind]
    data = value if format_ == "rows" else "*u8"
    scale = "*fp32" if format_ == "rows" else "*i32"
    x = value
    common: dict[str, Any] = {
        "TILE_N": tile_n, "FORMAT": format_, "KIND": kind, "FNUZ": False, "ASM": False,
        "SPLITS": 2, "PARALLEL": parallel,
    }  # fmt: skip
    signature = {
        "w": data, "ws": scale, "order": "*i32", "owner": "*i32", "part": "*fp32", "arrived": "*i32", "lines": "i32",
    }  # fmt: skip
    how = "-split" if parallel else ""
    changes: dict[str, dict[str, Any]] = {
        "gfx950": {"num_stages": 2, "matrix_instr_nonkdim": 16},
        "gfx942": {"num_stages": 2, "matrix_instr_nonkdim": 16, "FNUZ": True},
        "sm_90": {"ASM": True}
        | ({"maxnreg": 168} if fp8 and tile_n == 16 and format_ == "planes" else {})
        | ({"num_warps": 8} if fp8 and format_ == "rows" else {}),
        "sm_100": {"ASM": True},
    }  # fmt: skip
    options = {"num_warps": 4, "num_stages": 2 if kind == "f32" else 4}
    up_spec = Spec(
        name=f"experts-up-{format_}-{kind}-{tile_n}{how}",
        fn=up_kernel,
        signature=signature
        | {"x": x, "xs": "*fp32", "weights": "*fp32", "h": x, "hs": "*fp32", "limit": "fp32"},
        constexprs=common | {"K": 4096, "INNER": 2048, "TOP": 6, "OFFICIAL": kind != "f32", "ROUND": fp8},
        options=options,
        targets=targets,
        overrides=changes,
        scaled=format_ == "pairs",
    )
    down_spec = Spec(
        name=f"experts-down-{format_}-{kind}-{tile_n}{how}",
        fn=down_kernel,
        signature=signature | {"h": x, "hs": "*fp32", "out": "*bf16"},
        constexprs=common | {"D": 4096, "WIDE": 4096, "K": 2048},
        options=options,
        targets=targets,
        overrides=changes,
        scaled=format_ == "pairs",
    )
    return [up_spec, down_spec]


PLANES, PAIRS = ("sm_90", "gfx942"), ("gfx950", "sm_100")
KERNELS: list[Spec] = [
    *(
        spec
        for tile in (16, 32)
        for spec in (
            *_expert_specs("fp8", "planes", tile, PLANES, parallel=True),
            *_expert_specs("fp8", "planes", tile, ("gfx942",)),
            *_expert_specs("fp8", "pairs", tile, PAIRS, parallel=True),
            *_expert_specs("fp8", "pairs", tile, PAIRS),
        )
    ),
    *_expert_specs("fp8", "rows", 16, PLANES + PAIRS, parallel=True),
    *_expert_specs("bf16", "rows", 16, PLANES + PAIRS, parallel=True),
    *_expert_specs("f32", "planes", 16, PLANES + PAIRS, parallel=True),
]
