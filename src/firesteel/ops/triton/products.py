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
def ranges_read(
    part,
    own,
    plane,
    live,
    SPLITS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """The sum of all ranges, which other programs wrote; AT_ONCE, a divisor of SPLITS, are read at a time."""
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    for some in range(SPLITS // AT_ONCE):
        for more in tl.static_range(AT_ONCE):
            other = part + (some * AT_ONCE + more) * plane
            acc += tl.load(other + own, mask=live, other=0.0, cache_modifier=".cg")
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
    AT_ONCE: tl.constexpr = 1,
):
    """(whether this program of a tile arrives last, then the sum of all ranges); part [SPLITS, plane]."""
    tl.store(part + split * plane + own, acc, mask=live)
    tl.debug_barrier()  # all stores of this program stand before its arrival
    last = tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1
    if last:
        acc = ranges_read(part, own, plane, live, SPLITS, TILE_M, TILE_N, AT_ONCE)
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
    AT_ONCE: tl.constexpr = 1,
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
        last, total = ranges_end(acc, part, at, plane, counter, live, split, SPLITS, TILE_M, TILE_N, AT_ONCE)
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


@kernel()
def wide_sum(
    w,
    x,
    ws,
    xs,
    m0,
    n0,
    column,
    rn,
    first,
    K: tl.constexpr,
    STEP: tl.constexpr,
    STEPS: tl.constexpr,
    SUMS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    KIND: tl.constexpr,
):
    """``range_sum`` through tensor descriptors: float32 [TILE_M, TILE_N], SUMS ranges one after another.

    A range is STEPS steps of STEP channels from step ``first``; rn: lines of the scales xs.
    """
    TOTAL: tl.constexpr = STEPS * SUMS
    acc = tl.zeros((TILE_M, TILE_N), tl.float32)
    if SUMS > 1:
        total = tl.zeros((TILE_M, TILE_N), tl.float32)
    if KIND == "fp8":
        wsp = ws + m0 // 128 * (K // 128)
        xsp = xs + rn * (K // 128)
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
    if SUMS > 1:
        acc = total
    return acc


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
    AT_ONCE: tl.constexpr = 1,
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
    STEPS: tl.constexpr = K // STEP // SPLITS  # of one range
    rn = tl.minimum(line, rows - 1)
    if PARALLEL:
        split = tl.program_id(1)
        acc = wide_sum(
            w, x, ws, xs, m0, n0, column, rn, split * STEPS, K, STEP, STEPS, 1, TILE_M, TILE_N, KIND
        )
        plane, counter = rows.to(tl.int64) * N, arrived + pid
        last, acc = ranges_end(acc, part, at, plane, counter, live, split, SPLITS, TILE_M, TILE_N, AT_ONCE)
        if last:
            tl.store(out + at, acc.to(out.dtype.element_ty), mask=live)
    else:
        acc = wide_sum(w, x, ws, xs, m0, n0, column, rn, 0, K, STEP, STEPS, SPLITS, TILE_M, TILE_N, KIND)
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=live)


@kernel("rows", "spans")
def pair_kernel(
    w,
    ws,
    x,
    xs,
    out,
    rows,
    spans,
    N: tl.constexpr,
    K: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """``wide_kernel`` of FP8 for tiles of 128 outputs: two sums of 64 share the rows and one product's registers.

    w of blocks [64, 128], x of blocks [TILE_N, 128]. For weights of one range of K: there is no room for a
    third sum. Programs of one weight tile are neighbours.
    """
    begin()
    pid = tl.program_id(0)
    tile, span = pid // spans, pid % spans
    m0, n0 = tile * 128, span * TILE_N
    STEPS: tl.constexpr = K // 128
    line = n0 + tl.arange(0, TILE_N)
    upper = tl.zeros((64, TILE_N), tl.float32)
    lower = tl.zeros((64, TILE_N), tl.float32)
    wsp = ws + tile * STEPS
    xsp = xs + tl.minimum(line, rows - 1) * STEPS
    s, t = tl.load(wsp), tl.load(xsp)
    for i in range(STEPS):
        ahead = tl.minimum(i + 1, STEPS - 1)
        s1, t1 = tl.load(wsp + ahead), tl.load(xsp + ahead)
        a = w.load([m0, i * 128])
        b = x.load([n0, i * 128]).T
        c = w.load([m0 + 64, i * 128])
        upper = tl.fma(tl.dot(a, b), scales_of(s, t, 128, 64, TILE_N), upper)
        lower = tl.fma(tl.dot(c, b), scales_of(s, t, 128, 64, TILE_N), lower)
        s, t = s1, t1
    rm = m0 + tl.arange(0, 64)
    at = line.to(tl.int64)[None, :] * N + rm[:, None]
    live, more = (rm < N)[:, None] & (line < rows)[None, :], (rm + 64 < N)[:, None] & (line < rows)[None, :]
    tl.store(out + at, upper.to(out.dtype.element_ty), mask=live)
    tl.store(out + at + 64, lower.to(out.dtype.element_ty), mask=more)
