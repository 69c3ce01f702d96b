"""The output head on Hopper with the noise of one tile beside the matrix products of another.

    one warp          tiles of W and rows -> STAGES slots of shared memory, ahead over the ends of tiles
    two warp groups   in turn: a tile of 128 ids and 128 rows -> through shared memory -> one thread a row

A group that has its products draws their noise and compares while the other group multiplies; the order of the
slots alone keeps them in turn. The products are those of ``head_rows``: K ascends through one chain of matrix
instructions, weights are the M operand. Written in Gluon: plain Triton cannot give warps different work.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from firesteel.ops.triton.launch import (
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    launched_early,
    processors,
    usable,
)
from firesteel.ops.triton.sample import (
    DRAFT_STREAM,
    KEY,
    MINUS_LOG_2,
    NO_ID,
    PARTS,
    SHIFT,
    WORDS,
    Partials,
    philox,
    seeds,
    waiting,
)
from firesteel.ops.triton.spec import Spec
from firesteel.ops.types import SlotState

V, STEP = gl.constexpr(128), gl.constexpr(64)  # ids and K of a slot
HALF = gl.constexpr(64)  # rows of a block of them
SOME = gl.constexpr(8)  # ids whose noise a thread draws at once
KEEP_NAN = gl.constexpr(tl.PropagateNan.ALL)
STAGES = 5
SLOT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


# ---- layouts ----------------------------------------------------------------------------
@gluon.constexpr_function
def sum_layout(rows):
    """Of float32 products [ids, rows]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])


@gluon.constexpr_function
def own_layout(rows):
    """Of [SOME * 128 / rows, rows]: a thread has SOME neighbouring ids of one row."""
    lanes, across = (32, max(1, rows // 32)) if rows >= 32 else (rows, 1)
    return gl.BlockedLayout([8, 1], [32 // lanes, lanes], [4 // across, across], [0, 1])


@gluon.constexpr_function
def call_layout(rows):
    """Of [SOME * 32 / rows, rows] calls of the generator: the same rows in the same threads as ``own_layout``."""
    lanes, across = (32, max(1, rows // 32)) if rows >= 32 else (rows, 1)
    return gl.BlockedLayout([2, 1], [32 // lanes, lanes], [4 // across, across], [0, 1])


@gluon.constexpr_function
def spread_layout(rows):
    """Of float32 [ids, rows] in shared memory: eight ids of one column lie in different banks."""
    return (
        gl.SwizzledSharedLayout(8, 1, 4, [1, 0]) if rows >= 32 else gl.SwizzledSharedLayout(8, 2, 2, [1, 0])
    )


# ---- noise and comparison ---------------------------------------------------------------
@gluon.jit
def halves(acc, ROWS: gl.constexpr):
    """Ids 0 to 63 and 64 to 127 of sums [128, ROWS]: they lie in different registers of the same threads."""
    return gl.split(gl.permute(gl.reshape(acc, [2, V // 2, ROWS]), (1, 2, 0)))


@gluon.jit
def put(part, buffer):
    """Sums [ids, rows] into shared memory [chunks, ids of a chunk, rows]."""
    buffer._reinterpret(gl.float32, part.shape, spread_layout(part.shape[1])).store(part)


@gluon.jit
def by_call(word, calls):
    """A word [rows] of every row's key beside ``calls`` [n, 1]: [1, rows], in the same registers."""
    return gl.expand_dims(gl.convert_layout(word, gl.SliceLayout(0, calls.type.layout)), 0)


@gluon.jit
def perturbed(logit, calls, key):
    """``sample.perturb`` with given layouts, of the ids 4 * calls [n, 1] ...; nothing moves between threads."""
    heat, place, stream, high, low, index = key
    a, b, c, d = philox(
        calls.to(gl.uint32),
        by_call(place, calls),
        by_call(stream, calls),
        by_call(high, calls),
        by_call(low, calls),
        by_call(index, calls),
    )
    drawn = gl.join(gl.join(a, c), gl.join(b, d))  # [n, rows, half, odd]: id v has word v % 4
    drawn = gl.reshape(gl.permute(drawn, (0, 2, 3, 1)), logit.shape)
    noise = waiting(gl.convert_layout(drawn, logit.type.layout, assert_trivial=True))
    return gl.fma(noise, gl.expand_dims(heat * MINUS_LOG_2, 0) + gl.zeros_like(noise), logit)


@gluon.jit
def keep_best(
    buffer, more, at, first, key, hot, best, found, second,
    VOCAB: gl.constexpr, SECOND: gl.constexpr, ADD: gl.constexpr,
):  # fmt: skip
    """Take the logits in ``buffer`` [chunks, n, rows] of ids first ... into every lane's best (value, start, second).

    ADD: those in the slots at ... of ``more`` [*, rows, n] are added. ``found`` is where the n ids begin that the
    best one was among; the lane says which it is.
    """
    N: gl.constexpr = buffer.shape[1]
    OWN: gl.constexpr = own_layout(buffer.shape[2])
    CALL: gl.constexpr = call_layout(buffer.shape[2])
    calls = gl.arange(0, N // WORDS, layout=gl.SliceLayout(1, CALL))
    calls = gl.expand_dims(first // WORDS + calls, 1)
    for c in range(buffer.shape[0]):
        logit = buffer.index(c).load(OWN)
        if ADD:
            logit += more.index(at + c).permute((1, 0)).load(OWN)
        start = first + c * N
        score = logit
        if hot:  # all greedy: the noise is multiplied by 0
            score = perturbed(logit, calls, key)
        if VOCAB % V != 0:
            lane = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(1, OWN)), 1)
            score = gl.where(lane + start < VOCAB, score, float("-inf"))
        if SECOND:
            second = gl.maximum(second, gl.minimum(best, score))
        found = gl.where(score > best, start, found)  # ids ascend: the first of equals stays
        best = gl.maximum(best, score, propagate_nan=KEEP_NAN)
        calls += N // WORDS
    return best, found, second


@gluon.jit
def row_keys(
    slots, positions, passes, seed_lo, seed_hi, sample, temperature, at, ok, REJECTION: gl.constexpr
):
    """``sample.row_key`` with given layouts."""
    slot = gl.load(slots + at, mask=ok, other=0)
    place = gl.load(positions + at, mask=ok, other=0).to(gl.uint32)
    if REJECTION:
        stream = ((gl.load(passes + slot, mask=ok, other=0) << SHIFT) + DRAFT_STREAM).to(gl.uint32)
    else:
        stream = place ^ place  # the target's
    high = gl.load(seed_hi + slot, mask=ok, other=0).to(gl.uint32)
    low = gl.load(seed_lo + slot, mask=ok, other=0).to(gl.uint32)
    index = gl.load(sample + slot, mask=ok, other=0).to(gl.uint32)
    heat = gl.load(temperature + slot, mask=ok, other=0.0)
    return heat, place, stream, high, low, index


@gluon.jit
def keep_winner(best, found, second, to, ok, values, chosen, seconds, SECOND: gl.constexpr):
    """``walk.winners``: one (value, id or -1, second) per row at ``to``; best, found, second of ``keep_best``."""
    best = gl.where(best < float("inf"), best, float("inf"))  # a NaN or +inf is a best +inf
    lane = gl.expand_dims(gl.arange(0, best.shape[0], layout=gl.SliceLayout(1, best.type.layout)), 1)
    found = gl.where(found == NO_ID, NO_ID, found + lane)
    top = gl.max(best, axis=0)
    name = gl.min(gl.where(best == gl.expand_dims(top, 0), found, NO_ID), axis=0)
    gl.store(values + to, top, mask=ok)
    gl.store(chosen + to, gl.where(top == float("inf"), -1, name), mask=ok)
    if SECOND:
        rest = gl.where(found == gl.expand_dims(name, 0), second, best)
        gl.store(seconds + to, gl.max(rest, axis=0), mask=ok)


# ---- the head ---------------------------------------------------------------------------
@gluon.jit
def products(ring, i, K: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr):
    """Tile i of the program: float32 [V, N] of the first N rows of its slots."""
    ws, xs, full, empty, turns = ring
    STEPS: gl.constexpr = K // STEP
    acc = gl.zeros([V, N], gl.float32, sum_layout(N))
    if i > 0:  # a slot's phase may be waited for only when the one before is over
        mbarrier.wait(turns.index(GROUP), (i - 1) // 2 & 1)
    for k in range(STEPS):
        step = i * STEPS + k
        slot = step % STAGES
        mbarrier.wait(full.index(slot), step // STAGES & 1)
        rows = xs.index(slot) if xs.shape[1] == N else xs.index(slot).slice(0, N)
        acc = warpgroup_mma(ws.index(slot), rows.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
    mbarrier.arrive(turns.index(1 - GROUP))
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((i * STEPS + STEPS - 1) % STAGES))
    return acc


@gluon.jit
def half_start(start, rows):
    """Where HALF rows of a tile begin: the last ones end with the rows, and repeat some of those before."""
    return gl.minimum(start, rows - HALF)


@gluon.jit
def one_tile(
    ring, tables, sizes, buffer, i, tile, start, N: gl.constexpr, GROUP: gl.constexpr, HOW: gl.constexpr
):
    """Vocabulary tile ``tile`` of the N rows start ..., which is tile i of the program."""
    slots, positions, seed_lo, seed_hi, sample, temperature, values, chosen = tables
    rows, _, tiles = sizes
    OWN: gl.constexpr = own_layout(N)
    IDS: gl.constexpr = SOME * 128 // N
    TIMES: gl.constexpr = V * N // (buffer.shape[0] * buffer.shape[1] * buffer.shape[2])
    line = gl.arange(0, N, layout=gl.SliceLayout(0, OWN))
    every = line >= 0
    row = half_start(start, rows) + line
    if N > HALF:
        row = gl.where(line < HALF, row, half_start(start + HALF, rows) + line - HALF)
    key = row_keys(slots, positions, slots, seed_lo, seed_hi, sample, temperature, row, every, False)
    acc = products(ring, i, HOW[1], N, HOW[2], GROUP)  # they hide the loads above
    part = buffer._reinterpret(gl.float32, [V // IDS // TIMES, IDS, N], spread_layout(N))
    pieces = halves(acc, N) if TIMES == 2 else (acc,)
    hot = gl.max(key[0], axis=0) > 0.0
    best = gl.full([IDS, N], float("-inf"), gl.float32, OWN)
    found = gl.full([IDS, N], NO_ID, gl.int32, OWN)
    for h in gl.static_range(TIMES):
        put(pieces[h], part)
        best, found, _ = keep_best(
            part, part, 0, tile * V + h * (V // 2), key, hot, best, found, best, HOW[0], False, False
        )
    keep_winner(best, found, best, row * tiles + tile, every, values, chosen, values, False)


@gluon.jit
def multiply(ring, tables, sizes, buffer, GROUP: gl.constexpr, HOW: gl.constexpr):
    """Tiles GROUP, GROUP + 2, ... of the program; the last rows may fill half a tile."""
    gdc_wait()
    rows, row_tiles, tiles = sizes
    programs = gl.num_programs(0)
    for i in range(GROUP, (tiles * row_tiles - gl.program_id(0) + programs - 1) // programs, 2):
        pid = gl.program_id(0) + i * programs
        tile, start = pid // row_tiles, pid % row_tiles * (2 * HALF)
        if start + HALF < rows:
            one_tile(ring, tables, sizes, buffer, i, tile, start, 2 * HALF, GROUP, HOW)
        else:
            one_tile(ring, tables, sizes, buffer, i, tile, start, HALF, GROUP, HOW)


@gluon.jit
def fetch_rows(x, ring, slot, start, k, rows):
    """The two halves of a tile of rows, both within the rows."""
    xs, full = ring[1], ring[2]
    one, two = half_start(start, rows), half_start(start + HALF, rows)
    tma.async_copy_global_to_shared(x, [one, k], full.index(slot), xs.index(slot).slice(0, HALF))
    tma.async_copy_global_to_shared(x, [two, k], full.index(slot), xs.index(slot).slice(HALF, HALF))


@gluon.jit
def fetch(w, x, ring, sizes, HOW: gl.constexpr):
    """Fill the slots; weights of the first ones before the kernel in front has finished."""
    ws, _, full, empty, _ = ring
    rows, row_tiles, tiles = sizes
    STAGES: gl.constexpr = HOW[2]
    STEPS: gl.constexpr = HOW[1] // STEP
    BYTES: gl.constexpr = w.block_type.nbytes + 2 * x.block_type.nbytes
    programs = gl.num_programs(0)
    pid = gl.program_id(0)
    count = (tiles * row_tiles - pid + programs - 1) // programs
    for s in gl.static_range(STAGES):
        mbarrier.expect(full.index(s), BYTES)
        tma.async_copy_global_to_shared(w, [pid // row_tiles * V, s * STEP], full.index(s), ws.index(s))
    gdc_wait()
    for s in gl.static_range(STAGES):
        fetch_rows(x, ring, s, pid % row_tiles * (2 * HALF), s * STEP, rows)
    for step in range(STAGES, count * STEPS):
        slot, k, at = step % STAGES, step % STEPS * STEP, pid + step // STEPS * programs
        mbarrier.wait(empty.index(slot), (step // STAGES + 1) & 1)
        mbarrier.expect(full.index(slot), BYTES)
        tma.async_copy_global_to_shared(w, [at // row_tiles * V, k], full.index(slot), ws.index(slot))
        fetch_rows(x, ring, slot, at % row_tiles * (2 * HALF), k, rows)


@gluon.jit
def chunks(parts, g: gl.constexpr):
    """Half a tile of sums in shared memory [chunks, ids, rows] of group g."""
    part = parts.index(g)
    wide: gl.constexpr = part.shape[1]
    return part._reinterpret(gl.float32, [part.shape[0] // SOME, SOME, wide], spread_layout(wide))


@gluon.jit(do_not_specialize=["rows", "row_tiles", "tiles"])
def head_pingpong(
    x, w, slots, positions, seed_lo, seed_hi, sample, temperature, values, chosen, rows, row_tiles, tiles,
    VOCAB: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles pid, pid + programs, ... of vocabulary tile * row_tiles + row tile; see the module. At least 64 rows.

    w, x: descriptors of bf16 blocks [128, 64] and [64, 64]. One (value, id) per row and vocabulary tile [rows, tiles].
    """
    gdc_launch_dependents()
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, V, STEP], w.layout)
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * HALF, STEP], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for g in gl.static_range(2):
        mbarrier.init(turns.index(g), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    parts = gl.allocate_shared_memory(gl.float32, [2, V // 2, 2 * HALF], spread_layout(2 * HALF))
    ring = (ws, xs, full, empty, turns)
    tables = (slots, positions, seed_lo, seed_hi, sample, temperature, values, chosen)
    sizes = (rows, row_tiles, tiles)
    HOW: gl.constexpr = (VOCAB, K, STAGES)
    gl.warp_specialize(
        [
            (multiply, (ring, tables, sizes, chunks(parts, 0), 0, HOW)),
            (multiply, (ring, tables, sizes, chunks(parts, 1), 1, HOW)),
            (fetch, (w, x, ring, sizes, HOW)),
        ],
        [4, 1],
        [240, 24],
    )


# ---- launches ---------------------------------------------------------------------------
def block(w: Tensor, lines: int = 128) -> TensorDescriptor:
    """A descriptor of bf16 [N, K] in blocks of a slot."""
    return TensorDescriptor.from_tensor(w, [lines, 64], SLOT)


def unit_of(stride: int) -> int:
    """16 if the stride is a multiple of it, so that the compiler knows; else 1."""
    return 16 if stride % 16 == 0 else 1


Sampling = tuple[Tensor, Tensor, SlotState]  # slots, positions, state


def fits(rows: int, k: int) -> bool:
    """Whether ``run_head`` takes the shape."""
    return usable() and rows >= 64 and k % 64 == 0 and k >= 64 * STAGES


def run_head(x: Tensor, w: Tensor, rows: int, sampling: Sampling) -> Partials:
    """``head.run_head`` that samples, without a walk: x [R, K] and w [V, K] bf16, R at least 64."""
    (vocab, k), row_tiles = w.shape, cdiv(rows, 128)
    tiles = cdiv(vocab, 128)
    parts = Partials(rows, tiles, x.device, False)
    programs = min(processors(x.device), tiles * row_tiles)
    slots, positions, state = sampling
    head_pingpong[(programs,)](
        block(x, 64), block(w), slots, positions, *seeds(state)[1:], parts.values, parts.ids, rows, row_tiles, tiles,
        VOCAB=vocab, K=k, STAGES=STAGES, num_warps=4, launch_pdl=launched_early(),
    )  # fmt: skip
    return parts


# ---- offline compilation ----------------------------------------------------------------
DESCRIPTOR = f"tensordesc<bf16[128, 64],{SLOT!r}>"


def _specs() -> list[Spec]:
    """The Flash head."""
    counts = dict.fromkeys(("rows", "row_tiles", "tiles"), "i32")
    types = {**KEY, **PARTS, "x": DESCRIPTOR.replace("128, ", "64, "), "w": DESCRIPTOR, **counts}
    signature = {n: t for n, t in types.items() if n in head_pingpong.arg_names}
    sizes = {"VOCAB": 129280, "K": 4096, "STAGES": STAGES}
    return [Spec("head_pingpong", head_pingpong, signature, sizes, {"num_warps": 4}, targets=("sm_90",))]


KERNELS = _specs()
