"""A step of the drafter's walk on Hopper with the noise of one tile beside the products of another.

    one warp          tiles of W2 -> STAGES slots of shared memory, from before the kernel in front has finished
    one warp          tiles of base -> AHEAD slots of shared memory, where many rows are walked
    two warp groups   in turn: a tile of T ids and R rows -> through shared memory -> + base, noise
                      -> best, its id, second best of every lane -> one winner per row, program and group

``pingpong`` with few K steps and one tile of rows for a whole program.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
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
from firesteel.ops.triton.pingpong import (
    DESCRIPTOR,
    SOME,
    STEP,
    Sampling,
    block,
    keep_best,
    keep_winner,
    own_layout,
    put,
    row_keys,
    spread_layout,
    sum_layout,
    unit_of,
)
from firesteel.ops.triton.piped_parts import barrier
from firesteel.ops.triton.sample import KEY, NO_ID, PARTS, Partials, seeds
from firesteel.ops.triton.spec import Spec


@gluon.jit
def gather_rows(x, previous, xs, start, rows, K: gl.constexpr, R: gl.constexpr):
    """Rows x[previous] float32 into bf16 slots [K / STEP, R, STEP]."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    row = start + gl.arange(0, R, layout=gl.SliceLayout(1, LINES))
    at = gl.load(previous + row, mask=row < rows, other=0)
    lane = gl.expand_dims(gl.arange(0, STEP, layout=gl.SliceLayout(0, LINES)), 0)
    to = x + gl.expand_dims(at * K, 1) + lane
    parts = ()
    for k in gl.static_range(K // STEP):  # all loads before the first wait for one
        parts = parts + (gl.load(to + k * STEP),)  # type: ignore[assignment]  # noqa: RUF005
    for k in gl.static_range(K // STEP):
        xs.index(k).store(parts[k].to(gl.bfloat16))
    fence_async_shared()


@gluon.jit
def base_tile(base, stride, line, name, tile, VOCAB: gl.constexpr, T: gl.constexpr):
    """Logits [T, R] of vocabulary tile ``tile`` from rows ``line`` [1, R] of base; past the end anything.

    The rows' addresses are made again for every tile: kept, they would fill registers.
    """
    TILES: gl.constexpr = (VOCAB + T - 1) // T
    at = gl.minimum(tile, TILES - 1) * T
    again = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [line], dtype=gl.int32, is_pure=False, pack=1
    )
    to = base + at + again.to(gl.int64) * stride
    if VOCAB % T == 0:
        old = gl.load(to + name)
    else:
        old = gl.load(to + name, mask=name + at < VOCAB, other=0.0)
    return old


@gluon.jit
def walk_group(
    x, previous, base, ring, copied, tables, sizes, buffer,
    GROUP: gl.constexpr, VOCAB: gl.constexpr, K: gl.constexpr, T: gl.constexpr, R: gl.constexpr,
    STAGES: gl.constexpr, REJECTION: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Tiles GROUP, GROUP + 2, ... of the program; the first group gathers the rows."""
    gdc_wait()
    slots, positions, passes, seed_lo, seed_hi, sample, temperature, values, chosen, seconds = tables
    rows, base_stride = sizes
    ws, xs, full, empty, turns, ready = ring
    more, filled, freed = copied
    PIECES: gl.constexpr = T // (SOME * 128 // R)
    STEPS: gl.constexpr = K // STEP
    OWN: gl.constexpr = own_layout(R)
    start = gl.program_id(1) * R
    row = start + gl.arange(0, R, layout=gl.SliceLayout(0, OWN))
    ok = row < rows
    key = row_keys(slots, positions, passes, seed_lo, seed_hi, sample, temperature, row, ok, REJECTION)
    if GROUP == 0:
        gather_rows(x, previous, xs, start, rows, K, R)
        mbarrier.arrive(ready)
    hot = gl.max(key[0], axis=0) > 0.0
    best = gl.full([SOME * 128 // R, R], float("-inf"), gl.float32, OWN)
    found = gl.full([SOME * 128 // R, R], NO_ID, gl.int32, OWN)
    second = best
    programs = gl.num_programs(0)
    TILES: gl.constexpr = (VOCAB + T - 1) // T
    SUMS: gl.constexpr = sum_layout(R)
    line = start + gl.arange(0, R, layout=gl.SliceLayout(0, SUMS))
    line = gl.expand_dims(gl.where(line < rows, line, 0), 0)
    name = gl.expand_dims(gl.arange(0, T, layout=gl.SliceLayout(1, SUMS)), 1)
    if AHEAD == 0:
        ahead = base_tile(base, base_stride, line, name, gl.program_id(0) + GROUP * programs, VOCAB, T)
    mbarrier.wait(ready, 0)
    for i in range(GROUP, (TILES - gl.program_id(0) + programs - 1) // programs, 2):
        tile = gl.program_id(0) + i * programs
        acc = gl.zeros([T, R], gl.float32, SUMS)
        if i > 0:
            mbarrier.wait(turns.index(GROUP), (i - 1) // 2 & 1)
        for k in gl.static_range(STEPS):
            step = i * STEPS + k
            mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
            acc = warpgroup_mma(ws.index(step % STAGES), xs.index(k).permute((1, 0)), acc, is_async=True)
        mbarrier.arrive(turns.index(1 - GROUP))
        acc = warpgroup_mma_wait(0, deps=[acc])
        for k in gl.static_range(STEPS):
            mbarrier.arrive(empty.index((i * STEPS + k) % STAGES))
        if AHEAD == 0:
            acc = gl.fma(acc, gl.full([T, R], 1.0, gl.float32, SUMS), ahead)  # a sum, and not the dot's start
            put(acc, buffer)
            ahead = base_tile(base, base_stride, line, name, tile + 2 * programs, VOCAB, T)
            best, found, second = keep_best(
                buffer, more, 0, tile * T, key, hot, best, found, second, VOCAB, True, False
            )
        else:
            put(acc, buffer)
            slot = i % AHEAD
            mbarrier.wait(filled.index(slot), i // AHEAD & 1)
            best, found, second = keep_best(
                buffer, more, slot * PIECES, tile * T, key, hot, best, found, second, VOCAB, True, True
            )
            barrier()
            mbarrier.arrive(freed.index(slot))
    parts = 2 * programs
    to = row * parts + 2 * gl.program_id(0) + GROUP
    keep_winner(best, found, second, to, ok, values, chosen, seconds, True)


@gluon.jit
def fetch_walk(
    w, ws, full, empty, VOCAB: gl.constexpr, K: gl.constexpr, T: gl.constexpr, STAGES: gl.constexpr
):
    """Fill the slots; nothing writes weights, so without a wait for the kernel in front."""
    STEPS: gl.constexpr = K // STEP
    TILES: gl.constexpr = (VOCAB + T - 1) // T
    programs = gl.num_programs(0)
    count = (TILES - gl.program_id(0) + programs - 1) // programs
    for step in range(count * STEPS):
        slot = step % STAGES
        mbarrier.wait(empty.index(slot), (step // STAGES + 1) & 1, pred=step >= STAGES)
        mbarrier.expect(full.index(slot), w.block_type.nbytes)
        at = (gl.program_id(0) + step // STEPS * programs) * T
        tma.async_copy_global_to_shared(w, [at, step % STEPS * STEP], full.index(slot), ws.index(slot))


@gluon.jit
def fetch_base(base, copied, VOCAB: gl.constexpr, T: gl.constexpr, R: gl.constexpr, AHEAD: gl.constexpr):
    """Fill AHEAD slots with tiles of the base logits, in pieces of the ids that a warp group compares at once."""
    more, filled, freed = copied
    N: gl.constexpr = SOME * 128 // R
    TILES: gl.constexpr = (VOCAB + T - 1) // T
    programs = gl.num_programs(0)
    start = gl.program_id(1) * R
    if AHEAD > 0:
        gdc_wait()
        for i in range((TILES - gl.program_id(0) + programs - 1) // programs):
            slot = i % AHEAD
            mbarrier.wait(freed.index(slot), (i // AHEAD + 1) & 1, pred=i >= AHEAD)
            mbarrier.expect(filled.index(slot), T * R * 4)
            for c in gl.static_range(T // N):
                at = (gl.program_id(0) + i * programs) * T + c * N
                to = more.index(slot * (T // N) + c)
                tma.async_copy_global_to_shared(base, [start, at], filled.index(slot), to)


@gluon.jit(do_not_specialize=["rows", "base_units"])
def walk_pingpong(
    x, w, base, previous, slots, positions, passes, seed_lo, seed_hi, sample, temperature, values, chosen, seconds,
    rows, base_units,
    VOCAB: gl.constexpr, K: gl.constexpr, T: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr,
    REJECTION: gl.constexpr, UNIT: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """``walk.walk_rows`` of R rows per program: a winner per row, program and group [rows, 2 * programs].

    w: a descriptor of W2 [VOCAB, K] bf16 in blocks [T, 64]; rows of ``base`` are base_units * UNIT apart, or, with
    AHEAD > 0, it is a descriptor of float32 blocks [R, 1024 / R].
    """
    gdc_launch_dependents()
    ws = gl.allocate_shared_memory(gl.bfloat16, [STAGES, T, STEP], w.layout)
    xs = gl.allocate_shared_memory(gl.bfloat16, [K // STEP, R, STEP], w.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    N: gl.constexpr = SOME * 128 // R
    one = gl.allocate_shared_memory(gl.float32, [T // N, N, R], spread_layout(R))
    two = gl.allocate_shared_memory(gl.float32, [T // N, N, R], spread_layout(R))
    SLOTS: gl.constexpr = max(AHEAD, 1)
    filled = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(AHEAD):
        mbarrier.init(filled.index(s), count=1)
        mbarrier.init(freed.index(s), count=1)
    if AHEAD > 0:
        more = gl.allocate_shared_memory(gl.float32, [AHEAD * (T // N), R, N], base.layout)
    else:
        more = one
    copied = (more, filled, freed)
    tables = (slots, positions, passes, seed_lo, seed_hi, sample, temperature, values, chosen, seconds)
    ring = (ws, xs, full, empty, turns, ready)
    sizes = (rows, base_units.to(gl.int64) * UNIT)
    gl.warp_specialize(
        [
            (
                walk_group,
                (x, previous, base, ring, copied, tables, sizes, one, 0, VOCAB, K, T, R, STAGES, REJECTION, AHEAD),
            ),
            (
                walk_group,
                (x, previous, base, ring, copied, tables, sizes, two, 1, VOCAB, K, T, R, STAGES, REJECTION, AHEAD),
            ),
            (fetch_walk, (w, ws, full, empty, VOCAB, K, T, STAGES)),
            (fetch_base, (base, copied, VOCAB, T, R, AHEAD)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


@dataclass(frozen=True)
class Form:
    """Ids and rows of a tile, slots of W2 and of base logits (0: loaded as the sums lie); touches no bit.

    A slot of base logits belongs to one warp group: their number is even.
    """

    ids: int
    rows: int
    stages: int = 8
    ahead: int = 0

    def __post_init__(self) -> None:
        assert self.ahead % 2 == 0, "both groups would wait at one slot"

    @property
    def piece(self) -> tuple[list[int], gl.NVMMASharedLayout]:
        """Block [rows, ids] of base logits and its layout in shared memory: a line of the swizzle is one of ids."""
        wide = int(SOME) * 128 // self.rows
        layout = gl.NVMMASharedLayout(swizzle_byte_width=4 * wide, element_bitwidth=32, rank=2)
        return [self.rows, wide], layout


FORMS = (Form(128, 16), Form(128, 32), Form(128, 64, 4, 2))
LOADING = FORMS[1]  # where base logits cannot be copied


def form_of(rows: int, base: Tensor) -> Form:
    """The first one that holds the rows, or the widest for tiles of them; measured on an H200."""
    form = next((f for f in FORMS if rows <= f.rows), FORMS[-1])
    copies = base.stride(0) % 4 == 0 and base.data_ptr() % 16 == 0
    return form if copies or not form.ahead else LOADING


def fits(rows: int, k: int) -> bool:
    """Whether ``run_walk`` takes the shape."""
    return usable() and rows >= 1 and k in (64, 128, 256)


def run_walk(
    x: Tensor, w: Tensor, base: Tensor, previous: Tensor, rejection: bool, rows: int, sampling: Sampling,
    form: Form | None = None,
) -> Partials:  # fmt: skip
    """``head.run_head`` of a step of the walk that stores nothing: x float32 [V, K], w bf16 [V, K]."""
    (vocab, k), form = w.shape, form or form_of(rows, base)
    row_tiles = cdiv(rows, form.rows)
    programs = min(cdiv(vocab, form.ids), max(1, processors(x.device) // row_tiles))
    parts = Partials(rows, 2 * programs, x.device, True)
    unit, old = unit_of(base.stride(0)), base
    if form.ahead:
        old = TensorDescriptor.from_tensor(base, *form.piece)
    slots, positions, state = sampling
    walk_pingpong[(programs, row_tiles)](
        x, block(w, form.ids), old, previous, slots, positions, *seeds(state), parts.values, parts.ids,
        parts.seconds, rows, base.stride(0) // unit,
        VOCAB=vocab, K=k, T=form.ids, R=form.rows, STAGES=form.stages, REJECTION=rejection, UNIT=unit, AHEAD=form.ahead,
        num_warps=4, launch_pdl=launched_early(),
    )  # fmt: skip
    return parts


# ---- offline compilation ----------------------------------------------------------------
def _specs() -> list[Spec]:
    """The walk of rank 256 in every form."""
    counts = dict.fromkeys(("rows", "base_units"), "i32")
    types = {**KEY, **PARTS, "x": "*fp32", "previous": "*i64", **counts}
    sizes = {"VOCAB": 129280, "K": 256, "UNIT": 16, "REJECTION": False}
    out = []
    for form in FORMS:
        types["w"], types["base"] = DESCRIPTOR.replace("128, ", f"{form.ids}, "), "*fp32"
        if form.ahead:
            (lines, wide), layout = form.piece
            types["base"] = f"tensordesc<fp32[{lines}, {wide}],{layout!r}>"
        tiles = {"T": form.ids, "R": form.rows, "STAGES": form.stages, "AHEAD": form.ahead}
        name, options = f"walk_pingpong_{form.rows}", {"num_warps": 4}
        out.append(Spec(name, walk_pingpong, dict(types), {**sizes, **tiles}, options, targets=("sm_90",)))
    return out


KERNELS = _specs()
