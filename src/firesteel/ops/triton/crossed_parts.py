"""Parts of the products that have the rows as the M operand: sums of a range of K, results. See ``crossed``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from firesteel.ops.triton.piped_parts import barrier, code_of, kept, room_again, sum_layout, zeros


@gluon.constexpr_function
def lines_layout(some):
    """Of scales [64, some]: a thread has those of the two rows whose sums it has."""
    registers = [[0, 1], [0, 2], [8, 0]] if some == 4 else [[0, 1], [8, 0]]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, some])


@gluon.jit
def column(t, u: gl.constexpr, SOME: gl.constexpr):
    """Column u of t [64, SOME] as factors of sums [64, 128]."""
    if SOME == 4:
        even, odd = gl.split(gl.reshape(t, [64, 2, 2]))
        low, high = gl.split(even if u % 2 == 0 else odd)
        mine = low if u < 2 else high
    else:
        low, high = gl.split(t)
        mine = low if u == 0 else high
    mine = gl.convert_layout(mine, gl.SliceLayout(1, sum_layout(128)), assert_trivial=True)
    return gl.expand_dims(mine, 1).broadcast_to([64, 128])


@gluon.jit
def line_places(line, rows, BLOCKS: gl.constexpr, SOME: gl.constexpr):
    """Places [64, SOME] of the first scales of lines ``line`` ... in xs [rows, BLOCKS]; the last one repeats."""
    row = gl.minimum(line + gl.arange(0, 64, gl.SliceLayout(1, lines_layout(SOME))), rows - 1)
    return gl.expand_dims(row * BLOCKS, 1) + gl.expand_dims(some_blocks(SOME), 0)


@gluon.jit
def some_blocks(SOME: gl.constexpr):
    """0 ... SOME - 1."""
    return gl.arange(0, SOME, gl.SliceLayout(0, lines_layout(SOME)))


@gluon.jit
def first_scales(ws, xs, n0, rows, block, BLOCKS: gl.constexpr, SOME: gl.constexpr):
    """Scales of SOME blocks from ``block`` on: of a tile at ws, and of rows n0 ..."""
    block = gl.multiple_of(block, 4)
    s = gl.load(ws + (some_blocks(SOME) + block))
    return s, gl.load(xs + (line_places(n0, rows, BLOCKS, SOME) + block))


@gluon.jit
def one_range(
    ws, xs, n0, rows, block, s, t, w_ring, x_ring, full, empty, stage, turn,
    SHARE: gl.constexpr, BLOCKS: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    SOME: gl.constexpr,
):  # fmt: skip
    """Sums [64, 128] of rows n0 ... over STEPS blocks from ``block`` on; then where the ring is.

    ws: the weight's scales of its tile; those of SOME blocks are read at once, the first are s and t.
    """
    acc = zeros(128, 32)
    block = gl.multiple_of(block, 4)
    xp, wp = line_places(n0, rows, BLOCKS, SOME) + block, some_blocks(SOME) + block
    t *= gl.expand_dims(s, 0)
    for i in range(STEPS // SOME):
        far = gl.minimum(i + 1, STEPS // SOME - 1) * SOME
        s, following = gl.load(ws + (wp + far)), gl.load(xs + (xp + far))
        for u in gl.static_range(SOME):
            mbarrier.wait(full.index(stage), turn)
            x, w = x_ring.index(stage * GROUPS + SHARE), w_ring.index(stage).permute((1, 0))
            d = warpgroup_mma(x, w, zeros(128, 32), use_acc=False, is_async=True)
            d = warpgroup_mma_wait(0, deps=[d])
            mbarrier.arrive(empty.index(stage), count=1)
            acc = gl.fma(d, column(t, u, SOME), acc)  # the assembler starts the next product first
            stage += 1
            if stage == STAGES:
                stage = 0
                turn ^= 1
        t = following * gl.expand_dims(s, 0)
    return acc, stage, turn


@gluon.jit
def left_out(full, empty, stage, turn, STEPS: gl.constexpr, STAGES: gl.constexpr):
    """Let the blocks of rows past the end go by."""
    for _ in range(STEPS):
        mbarrier.wait(full.index(stage), turn)
        mbarrier.arrive(empty.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            turn ^= 1
    return stage, turn


@gluon.jit
def plain_range(
    w_ring, x_ring, full, empty, stage, turn,
    SHARE: gl.constexpr, STEPS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``one_range`` of bfloat16, in steps of 64 channels, of 64 rows."""
    acc = zeros(128, 16)
    for _ in range(STEPS):
        mbarrier.wait(full.index(stage), turn)
        x, w = x_ring.index(stage * GROUPS + SHARE), w_ring.index(stage).permute((1, 0))
        acc = warpgroup_mma(x, w, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            turn ^= 1
    acc = gl.convert_layout(acc, sum_layout(128), assert_trivial=True)
    return acc, stage, turn


@gluon.jit
def put_codes(acc, q, steps, rows, m0, n0, N: gl.constexpr):
    """Sums [64, 128] as ``activations.quantise_kernel`` makes of them, rounded to bf16 first.

    q e4m3 [rows, N], steps float32 [rows, N / 128].
    """
    value = acc.to(gl.bfloat16).to(gl.float32)
    bits = gl.maximum(gl.max(gl.abs(value), axis=1), 1e-4).to(gl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    line = n0 + gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
    to = steps + line.to(gl.int64) * (N // 128) + m0 // 128
    gl.store(to, (exponent << 23).to(gl.float32, bitcast=True), mask=line < rows)
    code = code_of(value, gl.expand_dims(inverse, 1)).to(q.dtype.element_ty)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    store_lines(gl.convert_layout(code, WIDE), q + m0, N, rows, n0)


@gluon.jit
def put(
    acc, out, exact, to, room, table, rows, m0, n0,
    N: gl.constexpr, MEMBERS: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """Sums [64, 128] of rows n0 ... and outputs m0 ... to where they belong."""
    if COPIED:
        room_again()
        room.store(acc.to(to.dtype))
        fence_async_shared()
        barrier()
        tma.async_copy_shared_to_global(to, [n0, m0], room)
    elif MEMBERS:
        entry = table + m0 // 64 * 4
        lead, first = gl.multiple_of(gl.load(entry), 64), gl.load(entry + 1)
        base = gl.multiple_of(rows * gl.load(entry + 2), 64) + gl.multiple_of(m0 - first, 64)
        if gl.load(entry + 3) != 0:
            store_lines(acc, exact + base, lead, rows, n0)
        else:
            WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
            store_lines(gl.convert_layout(acc.to(out.dtype.element_ty), WIDE), out + base, lead, rows, n0)
    elif out.dtype.element_ty == gl.float8e4nv:
        put_codes(acc, out, exact, rows, m0, n0, N)
    else:
        store_lines(acc.to(out.dtype.element_ty), out + m0, N, rows, n0)


@gluon.jit
def store_lines(value, base, lead, rows, n0):
    """value [64, 128] of rows n0 ... to base [rows, lead]."""
    LAYOUT: gl.constexpr = value.type.layout
    line = n0 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    at = gl.expand_dims(line.to(gl.int64) * lead, 1) + gl.expand_dims(
        gl.arange(0, 128, gl.SliceLayout(0, LAYOUT)), 0
    )
    gl.store(base + at, value, mask=gl.expand_dims(line < rows, 1))


@gluon.jit
def all_ranges(acc, part, SPLITS: gl.constexpr, SIDE: gl.constexpr, OWN: gl.constexpr):
    """Sums of all ranges in ascending order; those in part [SPLITS, OWN], with SIDE == 1 the last one in acc."""
    result = kept(acc, part, 128)
    for r in range(1, SPLITS if SIDE > 1 else SPLITS - 1):  # one after another: registers
        result += kept(acc, part + r * OWN, 128)
    if SIDE == 1:
        result += acc
    return result
