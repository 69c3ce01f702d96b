"""Parts of the products that are pipelined by hand on Hopper: copies, sums of a range of K, results.

See ``piped``, whose kernel is made of these.
"""

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

from firesteel.ops.triton.launch import gdc_wait

try:
    from triton.experimental.gluon.language import barrier
except ImportError:  # its name up to Triton 3.6
    from triton.experimental.gluon.language import thread_barrier as barrier

CODES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
HALVES = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


# ---- copies -----------------------------------------------------------------------------
@gluon.jit
def piece(place, M: gl.constexpr, N16: gl.constexpr, SIDE_8: gl.constexpr, SIDE_16: gl.constexpr):
    """(whether of e4m3, tile of its weight, part of its ranges of K) of a piece of work: bfloat16 comes first."""
    LONG: gl.constexpr = (N16 + M - 1) // M * SIDE_16
    narrow = place >= LONG
    rest = place - gl.where(narrow, LONG, 0)
    tile = gl.where(narrow, rest // SIDE_8, rest // SIDE_16)
    return narrow, tile, gl.where(narrow, rest % SIDE_8, rest % SIDE_16)


@gluon.jit
def copy_first(w, a_ring, full, m0, k, STEP: gl.constexpr, COUNT: gl.constexpr, BYTES: gl.constexpr):
    """Start copying the weight's first COUNT blocks; the rest of BYTES follows."""
    for j in gl.static_range(COUNT):
        mbarrier.expect(full.index(j), BYTES)
        tma.async_copy_global_to_shared(w, [m0, k + j * STEP], full.index(j), a_ring.index(j))


@gluon.jit
def copy_work(
    w, x, y, a_ring, b_ring, c_ring, full, empty, at, begun, m0, n0, k, column,
    STEP: gl.constexpr, STEPS: gl.constexpr, N1: gl.constexpr, TWO: gl.constexpr, STAGES: gl.constexpr,
    BYTES: gl.constexpr,
):  # fmt: skip
    """Copy STEPS blocks of lines m0 ... of w from channel k on, and of lines n0 ... of x from column + k on."""
    for _ in range(STEPS):
        stage, turn = at % STAGES, (at // STAGES) & 1
        if at >= begun:
            mbarrier.wait(empty.index(stage), turn ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            tma.async_copy_global_to_shared(w, [m0, k], full.index(stage), a_ring.index(stage))
        tma.async_copy_global_to_shared(x, [n0, column + k], full.index(stage), b_ring.index(stage))
        if TWO:
            tma.async_copy_global_to_shared(y, [n0 + N1, column + k], full.index(stage), c_ring.index(stage))
        k += STEP
        at += 1
    return at


@gluon.jit
def copy_ahead(
    w8, x8, y8, w16, x16, y16, a_ring, b_ring, c_ring, full, empty, rows, programs,
    K: gl.constexpr, N8: gl.constexpr, N16: gl.constexpr, GROUP_N: gl.constexpr, SIDE_8: gl.constexpr,
    SIDE_16: gl.constexpr, M: gl.constexpr, N1: gl.constexpr, N2: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: blocks of weights and rows in the order in which they are multiplied."""
    TWO: gl.constexpr = N2 > 0
    STEPS_8: gl.constexpr = K // 128 // SIDE_8
    STEPS_16: gl.constexpr = K // 64 // SIDE_16
    PLACES: gl.constexpr = (N8 + M - 1) // M * SIDE_8 + (N16 + M - 1) // M * SIDE_16
    BYTES: gl.constexpr = (M + N1 + N2) * 128
    AHEAD_8: gl.constexpr = STAGES if STAGES < STEPS_8 else STEPS_8
    AHEAD_16: gl.constexpr = STAGES if STAGES < STEPS_16 else STEPS_16
    if N8 > 0 and N16 > 0:
        a_half = a_ring._reinterpret(gl.bfloat16, [STAGES, M, 64], HALVES)
        b_half = b_ring._reinterpret(gl.bfloat16, [STAGES, N1, 64], HALVES)
        c_half = c_ring._reinterpret(gl.bfloat16, [STAGES, N2 if TWO else N1, 64], HALVES)
    else:
        a_half, b_half, c_half = a_ring, b_ring, c_ring
    spans = (rows + N1 + N2 - 1) // (N1 + N2)
    narrow, tile, split = piece(gl.program_id(0) // spans, M, N16, SIDE_8, SIDE_16)
    begun = gl.where(narrow, AHEAD_8, AHEAD_16)
    if N16 == 0:  # nothing writes weights: no need to wait
        copy_first(w8, a_ring, full, tile * M, split * (STEPS_8 * 128), 128, AHEAD_8, BYTES)
    elif N8 == 0:
        copy_first(w16, a_half, full, tile * M, split * (STEPS_16 * 64), 64, AHEAD_16, BYTES)
    elif narrow:
        copy_first(w8, a_ring, full, tile * M, split * (STEPS_8 * 128), 128, AHEAD_8, BYTES)
    else:
        copy_first(w16, a_half, full, tile * M, split * (STEPS_16 * 64), 64, AHEAD_16, BYTES)
    gdc_wait()
    at = 0
    for work in range(gl.program_id(0), PLACES * spans, programs):
        narrow, tile, split = piece(work // spans, M, N16, SIDE_8, SIDE_16)
        n0 = work % spans * (N1 + N2)
        column = tile * M // GROUP_N * K
        if N16 == 0:
            at = copy_work(
                w8, x8, y8, a_ring, b_ring, c_ring, full, empty, at, begun, tile * M, n0,
                split * (STEPS_8 * 128), column, 128, STEPS_8, N1, TWO, STAGES, BYTES,
            )  # fmt: skip
        elif N8 == 0:
            at = copy_work(
                w16, x16, y16, a_half, b_half, c_half, full, empty, at, begun, tile * M, n0,
                split * (STEPS_16 * 64), column, 64, STEPS_16, N1, TWO, STAGES, BYTES,
            )  # fmt: skip
        elif narrow:
            at = copy_work(
                w8, x8, y8, a_ring, b_ring, c_ring, full, empty, at, begun, tile * M, n0, split * (STEPS_8 * 128), 0,
                128, STEPS_8, N1, TWO, STAGES, BYTES,
            )  # fmt: skip
        else:
            at = copy_work(
                w16, x16, y16, a_half, b_half, c_half, full, empty, at, begun, tile * M, n0, split * (STEPS_16 * 64), 0,
                64, STEPS_16, N1, TWO, STAGES, BYTES,
            )  # fmt: skip


# ---- sums -------------------------------------------------------------------------------
@gluon.constexpr_function
def sum_layout(n, depth=32):
    """Of float32 sums [64, n] of one warp group; depth: values of K per instruction."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, depth])


@gluon.jit
def zeros(N: gl.constexpr, DEPTH: gl.constexpr):
    """Sums [64, N] of nothing."""
    return gl.full([64, N], 0.0, gl.float32, sum_layout(N, DEPTH))


@gluon.constexpr_function
def lines_layout(blocks):
    """Of scales [N, blocks]: a thread has those of a row."""
    return gl.BlockedLayout([1, blocks], [32, 1], [4, 1], [1, 0])


@gluon.jit
def scale_places(line, rows, BLOCKS: gl.constexpr, N: gl.constexpr, SOME: gl.constexpr):
    """Places [N, SOME] of the first scales of lines ``line`` ... in xs [rows, BLOCKS]; the last one repeats."""
    row = gl.minimum(line + gl.arange(0, N, gl.SliceLayout(1, lines_layout(SOME))), rows - 1)
    block = gl.arange(0, SOME, gl.SliceLayout(0, lines_layout(SOME)))
    return gl.expand_dims(row * BLOCKS, 1) + gl.expand_dims(block, 0)


@gluon.jit
def picked(some, u, SOME: gl.constexpr):
    """Column u of scales [N, SOME]."""
    at = gl.expand_dims(gl.arange(0, SOME, gl.SliceLayout(0, lines_layout(SOME))), 0)
    return gl.sum(gl.where(at == u, some, 0.0), axis=1)


@gluon.jit
def next_scales(some, xs, places, i, STEPS: gl.constexpr, N: gl.constexpr, SOME: gl.constexpr):
    """Scales [N, SOME] for block i + 1: those for block i, or the next ones."""
    far = gl.minimum(i + 1, STEPS - SOME) // SOME * SOME
    due = gl.full([N, SOME], i % SOME == SOME - 1, gl.int1, lines_layout(SOME))
    return gl.load(xs + (places + far), mask=due, other=some)


@gluon.jit
def by_rows(t, N: gl.constexpr):
    """Scales t [N] as factors of [64, N]."""
    scale = gl.convert_layout(t, gl.SliceLayout(0, sum_layout(N)))
    return gl.expand_dims(scale, 0).broadcast_to([64, N])


@gluon.jit
def add_block(a, b, t, acc, N: gl.constexpr):
    """acc [64, N] + a [64, 128] times b [128, N] times the scales t [N]."""
    d = warpgroup_mma(a, b, zeros(N, 32), use_acc=False, is_async=True)
    scale = by_rows(t, N)  # while the tensor cores work
    d = warpgroup_mma_wait(0, deps=[d])
    return gl.fma(d, scale, acc)


@gluon.jit
def flat(acc, N: gl.constexpr):
    """acc [64, N] as [64 * N] such that a thread's values of two lines and two columns lie side by side."""
    return gl.reshape(gl.permute(gl.reshape(acc, [4, 2, 8, N // 8, 4, 2]), (0, 3, 2, 4, 1, 5)), [64 * N])


@gluon.jit
def unflat(v, N: gl.constexpr):
    """The inverse of ``flat``."""
    six = gl.permute(gl.reshape(v, [4, N // 8, 8, 4, 2, 2]), (0, 4, 2, 1, 3, 5))
    return gl.convert_layout(gl.reshape(six, [64, N]), sum_layout(N), assert_trivial=True)


@gluon.jit
def keep(acc, part, N: gl.constexpr):
    """Put a sum into part [64 * N]."""
    v = flat(acc, N)
    gl.store(part + gl.arange(0, 64 * N, layout=v.type.layout), v)


@gluon.jit
def kept(acc, part, N: gl.constexpr):
    """The sum that ``keep`` put there; of acc only the layout counts."""
    at = gl.arange(0, 64 * N, layout=flat(acc, N).type.layout)
    return unflat(gl.load(part + at, cache_modifier=".cg"), N)


@gluon.jit
def store_at(acc, base, lead, rows, n0, live, N: gl.constexpr):
    """acc [64, N] of rows n0 ... to base [rows, lead], if ``live``."""
    FLAT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    m = gl.arange(0, 64, gl.SliceLayout(1, FLAT))
    line = n0 + gl.arange(0, N, gl.SliceLayout(0, FLAT))
    value = gl.convert_layout(acc.to(base.dtype.element_ty), FLAT)
    at = base + gl.expand_dims(line.to(gl.int64) * lead, 0) + gl.expand_dims(m, 1)
    gl.store(at, value, mask=gl.expand_dims((line < rows) & live, 0))


@gluon.jit
def store_sums(acc, base, lead, rows, n0, live, N: gl.constexpr):
    """``store_at`` of float32 as the sums lie in registers: eight lanes have 32 bytes of a row."""
    LAYOUT: gl.constexpr = acc.type.layout
    m = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    line = n0 + gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
    at = base + gl.expand_dims(line.to(gl.int64) * lead, 0) + gl.expand_dims(m, 1)
    gl.store(at, acc, mask=gl.expand_dims((line < rows) & live, 0))


@gluon.jit
def copy_out(acc, out, room, m0, n0):
    """Start copying acc [64, N] of outputs m0 ... and rows n0 ... to out by its descriptor."""
    room.store(gl.permute(acc.to(out.dtype), (1, 0)))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(out, [n0, m0], room)


@gluon.jit
def room_again():
    """Wait until what the last copy leaves from may be written to."""
    tma.store_wait(0)  # by the thread that started it
    barrier()


@gluon.jit
def operands(
    a_ring, b_ring, c_ring, stage,
    SHARE: gl.constexpr, M: gl.constexpr, W1: gl.constexpr, BY_ROWS: gl.constexpr,
):  # fmt: skip
    """A warp group's blocks in a stage of the rings: of outputs, of rows, and of more of either."""
    a, b = a_ring.index(stage), b_ring.index(stage)
    if M == 256:
        return a.slice(SHARE * 128, 64, 0), b.permute((1, 0)), a.slice(SHARE * 128 + 64, 64, 0)
    else:
        if M == 128:
            a = a.slice(SHARE * 64, 64, 0)
        if BY_ROWS:
            b = b.slice(SHARE * W1, W1, 0)
        return a, b.permute((1, 0)), c_ring.index(stage).permute((1, 0))


@gluon.jit
def fp8_range(
    wsp, xs, n0, n1, rows, block, a_ring, b_ring, c_ring, full, empty, at,
    SHARE: gl.constexpr, BLOCKS: gl.constexpr, STEPS: gl.constexpr, M: gl.constexpr, W1: gl.constexpr,
    W2: gl.constexpr, TWO: gl.constexpr, BY_ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Sums [64, W1] of rows n0 ... and [64, W2] of n1 ... over the next STEPS blocks, from ``block`` on; then ``at``.

    wsp: the weight's scales of these blocks.
    """
    UNROLL: gl.constexpr = 4 if W1 <= 64 and not TWO else 1  # wider tiles do not fit the registers then
    SOME: gl.constexpr = 2 if TWO else 4  # blocks whose scales are read at once
    acc, more = zeros(W1, 32), zeros(W2, 32)
    tp = scale_places(n0, rows, BLOCKS, W1, SOME) + block
    some, s = gl.load(xs + tp), gl.load(wsp)
    if TWO:
        vp = scale_places(n1, rows, BLOCKS, W2, SOME) + block
        others = gl.load(xs + vp)
    for base in range(0, STEPS, UNROLL):
        for u in gl.static_range(UNROLL):
            stage, turn = at % STAGES, (at // STAGES) & 1
            i = base + u
            j = u if UNROLL == 4 else i % SOME
            t = picked(some, j, SOME) * s
            some = next_scales(some, xs, tp, i, STEPS, W1, SOME)
            if TWO:
                v = picked(others, j, SOME) * s
                others = next_scales(others, xs, vp, i, STEPS, W2, SOME)
            s = gl.load(wsp + gl.minimum(i + 1, STEPS - 1))
            mbarrier.wait(full.index(stage), turn)
            a, b, c = operands(a_ring, b_ring, c_ring, stage, SHARE, M, W1, BY_ROWS)
            acc = add_block(a, b, t, acc, W1)
            if TWO:
                more = add_block(a, c, v, more, W2)
            mbarrier.arrive(empty.index(stage), count=1)
            at += 1
    return acc, more, at


@gluon.jit
def bf16_range(
    a_ring, b_ring, c_ring, full, empty, at,
    SHARE: gl.constexpr, STEPS: gl.constexpr, M: gl.constexpr, W1: gl.constexpr, W2: gl.constexpr,
    TWO: gl.constexpr, BY_ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """``fp8_range`` of bfloat16, in steps of 64 channels."""
    acc, more = zeros(W1, 16), zeros(W2, 16)
    for _ in range(STEPS):
        stage, turn = at % STAGES, (at // STAGES) & 1
        mbarrier.wait(full.index(stage), turn)
        a, b, c = operands(a_ring, b_ring, c_ring, stage, SHARE, M, W1, BY_ROWS)
        acc = warpgroup_mma(a, b, acc, is_async=True)
        if TWO:
            if M == 256:
                more = warpgroup_mma(c, b, more, is_async=True)
            else:
                more = warpgroup_mma(a, c, more, is_async=True)
            acc, more = warpgroup_mma_wait(0, deps=[acc, more])
        else:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage), count=1)
        at += 1
    plain: gl.constexpr = sum_layout(W1)
    other: gl.constexpr = sum_layout(W2)
    acc = gl.convert_layout(acc, plain, assert_trivial=True)
    return acc, gl.convert_layout(more, other, assert_trivial=True), at


@gluon.jit
def keep_both(acc, more, part, W1: gl.constexpr, W2: gl.constexpr, TWO: gl.constexpr):
    """``keep`` one sum or two."""
    keep(acc, part, W1)
    if TWO:
        keep(more, part + 64 * W1, W2)


@gluon.jit
def total(acc, first, SPLITS: gl.constexpr, OWN: gl.constexpr, OTHERS: gl.constexpr, N: gl.constexpr):
    """All ranges' sums added in ascending order: with OTHERS all of ``first`` [SPLITS, OWN], else acc is the last."""
    result = kept(acc, first, N)
    for r in gl.static_range(1, SPLITS if OTHERS else SPLITS - 1):
        result += kept(acc, first + r * OWN, N)
    if not OTHERS:
        result += acc
    return result


@gluon.jit
def arrives(
    acc, more, part, arrived, slot, split,
    SPLITS: gl.constexpr, SIDE: gl.constexpr, OWN: gl.constexpr, W1: gl.constexpr, W2: gl.constexpr,
    TWO: gl.constexpr,
):  # fmt: skip
    """Whether this is the last piece of its tile; what other pieces need goes to part [SPLITS, OWN]."""
    last = slot >= 0
    if SIDE > 1:
        keep_both(acc, more, part + ((split + 1) * (SPLITS // SIDE) - 1) * OWN, W1, W2, TWO)
        barrier()  # all stores of this warp group stand before its arrival
        last = gl.atomic_add(arrived + slot, 1, sem="acq_rel") == SIDE - 1
    return last


@gluon.jit
def whole(
    acc, part, narrow,
    N8: gl.constexpr, N16: gl.constexpr, SPLITS_8: gl.constexpr, SIDE_8: gl.constexpr, SPLITS_16: gl.constexpr,
    SIDE_16: gl.constexpr, OWN: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """The sum of all ranges of K of the piece's format; acc is the last of them."""
    if N16 == 0 or (N8 > 0 and narrow):
        if SPLITS_8 > 1:
            acc = total(acc, part, SPLITS_8, OWN, SIDE_8 > 1, N)
    elif SPLITS_16 > 1:
        acc = total(acc, part, SPLITS_16, OWN, SIDE_16 > 1, N)
    return acc


@gluon.jit
def put_quantised(acc, more, q, steps, room, lead, rows, m, n, live, N: gl.constexpr):
    """Sums of 128 outputs m ... of rows n ... as ``activations.quantise_kernel`` makes of them, rounded to bf16 first.

    q e4m3 [rows, lead], steps float32 [rows, lead / 128]. Through shared memory: there a row's values come together.
    """
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    room.store(gl.permute(acc.to(gl.bfloat16), (1, 0)))
    barrier()
    a = room.load(LINES).to(gl.float32)
    barrier()
    room.store(gl.permute(more.to(gl.bfloat16), (1, 0)))
    barrier()
    b = room.load(LINES).to(gl.float32)
    most = gl.maximum(gl.max(gl.abs(a), axis=1), gl.max(gl.abs(b), axis=1))
    bits = gl.maximum(most, 1e-4).to(gl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    inverse = gl.expand_dims(((254 - exponent) << 23).to(gl.float32, bitcast=True), 1)
    row = n + gl.arange(0, N, gl.SliceLayout(1, LINES))
    inside = (row < rows) & live
    line = row.to(gl.int64)
    gl.store(
        steps + line * (lead // 128) + m // 128, (exponent << 23).to(gl.float32, bitcast=True), mask=inside
    )
    at = (
        q + gl.expand_dims(line * lead + m, 1) + gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, LINES)), 0)
    )
    gl.store(at, code_of(a, inverse).to(q.dtype.element_ty), mask=gl.expand_dims(inside, 1))
    gl.store(at + 64, code_of(b, inverse).to(q.dtype.element_ty), mask=gl.expand_dims(inside, 1))
    barrier()


@gluon.jit
def code_of(v, inverse):
    """The value whose e4m3 code is stored; NaN stays."""
    code = gl.minimum(gl.maximum(v * inverse, -448.0), 448.0)
    return gl.where(v != v, v, code)


@gluon.jit
def put(
    acc, out, exact, to, room, base, lead, wide, rows, m, n, live,
    MEMBERS: gl.constexpr, COPIED: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """A warp group's sums to where they belong: see ``multiply``."""
    if COPIED:
        room_again()
        copy_out(acc, to, room, m, n)
    elif MEMBERS:
        if wide != 0:
            store_at(acc, exact + base, lead, rows, n, live, N)
        else:
            store_at(acc, out + base, lead, rows, n, live, N)
    elif out.dtype.element_ty == gl.float32:
        store_sums(acc, out + base, lead, rows, n, live, N)
    else:
        store_at(acc, out + base, lead, rows, n, live, N)
