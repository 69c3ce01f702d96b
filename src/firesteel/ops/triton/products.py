"""Kernels of one product: rows of activations with a weight in its checkpoint format.

Weights are the M operand of ``tl.dot`` and rows its N operand, so that one matrix
instruction family serves every row count. The K dimension is cut into ``SPLITS`` ranges that
depend on the weight alone; their sums are added in ascending order, by the last of
several programs or by one program, with the same bits. A tile of rows may have any width for the
same reason: it changes which rows share an instruction, not the order of a row's additions.
"""

from __future__ import annotations

import triton.language as tl

from firesteel.ops.triton.launch import begin, kernel


@kernel()
def scales_of(s, t, LINES: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """[TILE_M, TILE_N] scales of a block's product: s of the weight, a scalar or [TILE_M]; t [TILE_N] of the rows."""
    if LINES == 128:
        return tl.broadcast_to((s * t)[None, :], (TILE_M, TILE_N))
    else:
        return s[:, None] * t[None, :]


@kernel()
def range_sum(
    w,
    x,
    ws,
    xs,
    rm,
    rn,
    first,
    COUNT: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
    LINES: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Sum over COUNT blocks of 128 channels from block ``first``: float32 [TILE_M, TILE_N].

    w [*, K] lines rm; x [*, STRIDE] lines rn; scales of a block are read one block ahead by hand: only
    what feeds a dot gets pipelined, and a value carried over two iterations would stop that too.
    """
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    rk = tl.arange(0, 128)
    wp = w + rm.to(tl.int64)[:, None] * K + rk[None, :]
    xp = x + rn.to(tl.int64)[None, :] * STRIDE + rk[:, None]
    if LINES == 128:  # a tile of at most 128 aligned outputs has one scale: a scalar
        wsp = ws + (tl.min(rm, axis=0) // LINES) * BLOCKS
    else:
        wsp = ws + (rm // LINES) * BLOCKS
    xsp = xs + rn * BLOCKS
    last = first + COUNT - 1
    if SCALED:
        s = tl.load(wsp + first)
        if KIND != "f32":
            t = tl.load(xsp + first)
    for i in range(COUNT):
        block = first + i
        if K % 128 == 0:
            a = tl.load(wp + block * 128)
            b = tl.load(xp + block * 128)
        else:
            inside = block * 128 + rk < K
            a = tl.load(wp + block * 128, mask=inside[None, :], other=0.0)
            b = tl.load(xp + block * 128, mask=inside[:, None], other=0.0)
        if SCALED:
            ahead = tl.minimum(block + 1, last)
            s1 = tl.load(wsp + ahead)
            if KIND == "f32":
                acc += tl.dot(a.to(tl.float32), b, input_precision="ieee") * (
                    s if LINES == 128 else s[:, None]
                )
            else:
                t1 = tl.load(xsp + ahead)
                if KIND == "f16":
                    a, b = a.to(tl.float16), b.to(tl.float16)
                acc = tl.fma(tl.dot(a, b), scales_of(s, t, LINES, TILE_M, TILE_N), acc)
                t = t1
            s = s1
        elif KIND == "f32":
            acc = tl.dot(a.to(tl.float32), b, acc, input_precision="ieee")
        else:
            acc = tl.dot(a, b, acc)
    return acc


@kernel()
def ranges_end(
    acc,
    part,
    own,
    plane,
    counter,
    live,
    split,
    SPLITS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """(whether this program of a tile arrives last, then the sum of all ranges); part [SPLITS, plane]."""
    tl.store(part + split * plane + own, acc, mask=live)
    tl.debug_barrier()  # all stores of this program stand before its arrival
    last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
    if last:
        acc = tl.zeros((TILE_M, TILE_N), tl.float32)
        for other in range(SPLITS):
            acc += tl.load(part + other * plane + own, mask=live, other=0.0, cache_modifier=".cg")
        tl.store(counter, 0)
    return last, acc


@kernel("rows")
def linear_kernel(
    w,
    ws,
    x,
    xs,
    out,
    part,
    arrived,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
    LINES: tl.constexpr,
    GROUP_N: tl.constexpr,
    SPLITS: tl.constexpr,
    PARALLEL: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    KIND: tl.constexpr,
    SCALED: tl.constexpr,
):
    """out [rows, N] = x times w [N, K] transposed.

    KIND says what is multiplied: "fp8" and "f16" e4m3 x [rows, STRIDE] with xs float32 [rows, BLOCKS],
    "bf16" and "f32" values. SCALED: ws float32 [N / LINES, BLOCKS] belongs to w. Outputs
    g * GROUP_N ... use columns g * K ... of x. With PARALLEL every program sums one of SPLITS ranges
    of K into ``part`` float32 [SPLITS, rows, N] and the last one of a tile to arrive adds them.
    """
    begin()
    tile, span = tl.program_id(0), tl.program_id(1)
    rm = tile * TILE_M + tl.arange(0, TILE_M)
    line = span * TILE_N + tl.arange(0, TILE_N)
    live = (rm < N)[:, None] & (line < rows)[None, :]
    at = line.to(tl.int64)[None, :] * N + rm[:, None]
    # lines past the end repeat the last one and are not stored
    wm = tl.minimum(rm, N - 1)
    rn = tl.minimum(line, rows - 1)
    x += tile * TILE_M // GROUP_N * K
    count: tl.constexpr = BLOCKS // SPLITS
    if PARALLEL:
        split = tl.program_id(2)
        acc = range_sum(
            w, x, ws, xs, wm, rn, split * count, count, K, STRIDE, BLOCKS, LINES, TILE_M, TILE_N, KIND, SCALED
        )
        plane, counter = rows.to(tl.int64) * N, arrived + tile * tl.num_programs(1) + span
        last, total = ranges_end(acc, part, at, plane, counter, live, split, SPLITS, TILE_M, TILE_N)
        if last:
            tl.store(out + at, total.to(out.dtype.element_ty), mask=live)
    else:
        total = range_sum(
            w, x, ws, xs, wm, rn, 0, count, K, STRIDE, BLOCKS, LINES, TILE_M, TILE_N, KIND, SCALED
        )  # fmt: skip
        for split in range(1, SPLITS):
            total += range_sum(
                w, x, ws, xs, wm, rn, split * count, count, K, STRIDE, BLOCKS, LINES, TILE_M, TILE_N, KIND, SCALED
            )  # fmt: skip
        tl.store(out + at, total.to(out.dtype.element_ty), mask=live)


@kernel("rows", "tiles")
def wide_kernel(
    w,
    ws,
    x,
    xs,
    out,
    part,
    arrived,
    rows,
    tiles,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP_N: tl.constexpr,
    SPLITS: tl.constexpr,
    PARALLEL: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    STEP: tl.constexpr,
    KIND: tl.constexpr,
):
    """``linear_kernel`` for many rows through tensor descriptors, which cost no registers for addresses.

    w of blocks [TILE_M, STEP], x of blocks [TILE_N, STEP], both of values of KIND "fp8", STEP then 128 and
    scales per 128 outputs, or "bf16".
    """
    begin()
    pid = tl.program_id(0)
    tile, span = pid % tiles, pid // tiles
    m0, n0 = tile * TILE_M, span * TILE_N
    rm, line = m0 + tl.arange(0, TILE_M), n0 + tl.arange(0, TILE_N)
    live = (rm < N)[:, None] & (line < rows)[None, :]
    at = line.to(tl.int64)[None, :] * N + rm[:, None]
    column = m0 // GROUP_N * K
    first = 0
    STEPS: tl.constexpr = K // STEP // SPLITS  # of one range
    TOTAL: tl.constexpr = STEPS if PARALLEL else K // STEP
    if PARALLEL:
        split = tl.program_id(1)
        first = split * STEPS
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    SUMS: tl.constexpr = SPLITS if not PARALLEL else 1
    if SUMS > 1:
        total = tl.zeros((TILE_M, TILE_N), tl.float32)
    if KIND == "fp8":
        wsp = ws + m0 // 128 * (K // 128)
        xsp = xs + tl.minimum(line, rows - 1) * (K // 128)
        s, t = tl.load(wsp + first), tl.load(xsp + first)
    for i in range(TOTAL):
        at_k = first + i
        a = w.load([m0, at_k * STEP])
        b = x.load([n0, column + at_k * STEP]).T
        if KIND == "fp8":
            ahead = first + tl.minimum(i + 1, TOTAL - 1)
            s1, t1 = tl.load(wsp + ahead), tl.load(xsp + ahead)
            acc = tl.fma(tl.dot(a, b), scales_of(s, t, 128, TILE_M, TILE_N), acc)
            s, t = s1, t1
        else:
            acc = tl.dot(a, b, acc)
        if SUMS > 1:  # noqa: SIM102 -- decided when compiled
            if (i + 1) % STEPS == 0:  # a range ends
                total += acc
                acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    if PARALLEL:
        plane, counter = rows.to(tl.int64) * N, arrived + pid
        last, acc = ranges_end(acc, part, at, plane, counter, live, split, SPLITS, TILE_M, TILE_N)
        if last:
            tl.store(out + at, acc.to(out.dtype.element_ty), mask=live)
    else:
        if SUMS > 1:
            acc = total
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=live)
