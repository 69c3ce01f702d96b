"""Folded experts on Hopper with copying and multiplying warps apart.

The same sums in the same order as ``streamed`` and ``folded``, so the same bits. A program stays and takes one
piece of work after another: two lines of weight blocks (128 outputs each) for a tile of rows. Four warps copy
blocks of both lines, rows and scales ahead into a ring of shared memory, across the ends of pieces. Two
warp groups unpack and multiply half of the outputs each: while one unpacks, scales and adds, the matrix units work
for the other.

No product is in flight where a group's loop turns or waits for the ring: else the assembler puts a wait behind
every matrix instruction, without an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from firesteel.ops.triton.launch import gdc_launch_dependents, gdc_wait, launched_early, pow2, processors
from firesteel.ops.triton.piped_parts import barrier, sum_layout, zeros
from firesteel.ops.triton.spec import Spec
from firesteel.ops.triton.streamed import fields_of, rounded, unfold_half

LINES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
)  # of uint8 [64, 32], so that what it unpacks to is a matrix operand as it stands
ROWS = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))  # pointers to a block of rows [N, 128]
FLAT = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
TWICE = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLANES = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=8, rank=2)  # of a block [256, 32]


@dataclass(frozen=True)
class Feed:
    """How a product is launched; changes no bit. ``stages`` of two blocks, ``registers`` of a multiplying thread."""

    stages: int
    registers: int = 192


# ---- copies -----------------------------------------------------------------------------
@gluon.jit
def plus(a, b):
    """Their sum."""
    return a + b


@gluon.jit
def copy_blocks(w, at, words_at, packed, words, full, slot, WHICH: gl.constexpr):
    """Start copying two blocks of a line, the first or second of a slot, and their scale words."""
    for j in gl.static_range(2):
        to = packed.index(slot * 4 + 2 * WHICH + j)
        tma.async_copy_global_to_shared(w, [(at + j) * 256, 0], full.index(slot), to)
    async_copy.async_copy_global_to_shared(words.index(slot * 2 + WHICH), words_at)


@gluon.jit
def feed(
    w, ws, wb, x, xs, order, owner, packed, words, bases, rows, scales, mail, full, empty, slots, programs,
    K: gl.constexpr, PIECES: gl.constexpr, STRIDE: gl.constexpr, APART: gl.constexpr, TOP: gl.constexpr,
    N: gl.constexpr, PLACES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warps: works in turn, two blocks after another. TOP 0: rows and their scales lie as the lines do."""
    BLOCKS: gl.constexpr = K // 128
    LIST: gl.constexpr = gl.BlockedLayout([PLACES // 128], [32], [4], [0])
    gdc_wait()
    place = gl.arange(0, PLACES, layout=LIST)
    hit = (gl.load(owner + place, mask=place < slots, other=-1) >= 0).to(gl.int32)
    rank = gl.associative_scan(hit, 0, plus)
    count = gl.sum(hit, axis=0)
    lane = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, ROWS)), 0)
    word = gl.arange(0, 256, layout=TWICE)
    four = gl.arange(0, 4, layout=FLAT)
    slot, turn = 0, 0
    for work in range(gl.program_id(0), count * PIECES, programs):
        tile = gl.sum(gl.where((hit > 0) & (rank == work // PIECES + 1), place, 0), axis=0)
        at = (gl.load(owner + tile) * (2 * PIECES) + work % PIECES * STRIDE) * BLOCKS
        first = tile * N
        index = gl.load(order + first + gl.arange(0, N, layout=gl.SliceLayout(1, ROWS)))
        live = gl.expand_dims(index >= 0, 1)
        if TOP > 0:
            row = gl.maximum(index, 0) // TOP
            other = gl.load(order + first + gl.arange(0, N, layout=FLAT))
            tp = xs + gl.maximum(other, 0) // TOP * BLOCKS
            step = 1
        else:
            row = first + gl.arange(0, N, layout=gl.SliceLayout(1, ROWS))
            tp = xs + first + gl.arange(0, N, layout=FLAT)
            step = slots * N
        xp = x + gl.expand_dims(row.to(gl.int64) * K, 1) + lane
        wsp = ws + at.to(gl.int64) * 128 + word
        bp = wb + at + four // 2 * (APART * BLOCKS) + four % 2
        for i in range(BLOCKS // 2):
            mbarrier.wait(empty.index(slot), turn ^ 1)
            if i == 0:  # before anything arrives in the slot
                mail.index(slot).store(gl.full([1], tile * PIECES + work % PIECES, gl.int32, FLAT))
            mbarrier.expect(full.index(slot), 4 * 8192)
            copy_blocks(w, at, wsp, packed, words, full, slot, 0)
            copy_blocks(w, at + APART * BLOCKS, wsp + APART * BLOCKS * 128, packed, words, full, slot, 1)
            for j in gl.static_range(2):
                async_copy.async_copy_global_to_shared(rows.index(slot * 2 + j), xp + j * 128, mask=live)
                async_copy.async_copy_global_to_shared(scales.index(slot * 2 + j), tp + j * step)
            async_copy.async_copy_global_to_shared(bases.index(slot), bp)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            at += 2
            wsp += 256
            xp += 256
            tp += 2 * step
            bp += 2
            slot += 1
            if slot == STAGES:
                slot = 0
                turn ^= 1
    mbarrier.wait(empty.index(slot), turn ^ 1)
    mail.index(slot).store(gl.full([1], -1, gl.int32, FLAT))
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
    mbarrier.arrive(full.index(slot), count=1)


# ---- sums -------------------------------------------------------------------------------
@gluon.jit
def operand(packed, words, slot, WHICH: gl.constexpr, J: gl.constexpr, SHARE: gl.constexpr, N: gl.constexpr):
    """e4m3 [64, 128]: a warp group's outputs of block J of the first or second line in a slot."""
    field = fields_of(words.index(slot * 2 + WHICH), J * 128 + SHARE * 64, 64, LINES)
    block = packed.index(slot * 4 + 2 * WHICH + J)
    a, b = block.slice(SHARE * 64, 64, 0).load(LINES), block.slice(SHARE * 64 + 128, 64, 0).load(LINES)
    a, b = unfold_half(a, field, 64), unfold_half(b, field, 64)
    c = gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), [64, 128]).to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(c, gl.DotOperandLayout(0, sum_layout(N), 4), assert_trivial=True)


@gluon.jit
def product(a, rows, at, sums):
    """Start a times the rows of a block, into the registers of ``sums``, whose values are gone."""
    return warpgroup_mma(a, rows.index(at).permute((1, 0)), sums, use_acc=False, is_async=True)


@gluon.jit
def of_base(bases, slot, PLACE: gl.constexpr):
    """Scale of a block: of blocks 0 and 1 of the first line, then of the second."""
    return gl.sum(bases.index(slot).slice(PLACE, 1).load(FLAT), axis=0)


@gluon.jit
def pair_sum(
    packed, words, bases, rows, scales, full, empty, slot, turn,
    SHARE: gl.constexpr, BLOCKS: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warp group's halves of both block lines times the rows, float32 [64, N] twice; then slot and turn."""
    SUMS: gl.constexpr = sum_layout(N)
    one, two = zeros(N, 32), zeros(N, 32)
    for _ in range(BLOCKS // 2):
        mbarrier.wait(full.index(slot), turn)
        fence_async_shared()
        a = operand(packed, words, slot, 0, 0, SHARE, N)
        sums = product(a, rows, slot * 2, zeros(N, 32))
        for j in gl.static_range(2):
            t = scales.index(slot * 2 + j).load(gl.SliceLayout(0, SUMS))
            e = operand(packed, words, slot, 1, j, SHARE, N)
            s = t * of_base(bases, slot, j)
            done = warpgroup_mma_wait(0, deps=[sums])
            one += done * gl.expand_dims(s, 0)
            sums = product(e, rows, slot * 2 + j, done)
            s = t * of_base(bases, slot, 2 + j)
            if j == 0:
                a = operand(packed, words, slot, 0, 1, SHARE, N)
            done = warpgroup_mma_wait(0, deps=[sums])
            two += done * gl.expand_dims(s, 0)
            if j == 0:
                sums = product(a, rows, slot * 2 + 1, done)
        mbarrier.arrive(empty.index(slot), count=1)
        turn = gl.where(slot == STAGES - 1, turn ^ 1, turn)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
    return one, two, slot, turn


@gluon.jit
def told(mail, full, slot, turn):
    """The work that the block in a slot belongs to."""
    mbarrier.wait(full.index(slot), turn)
    return gl.sum(mail.index(slot).load(FLAT), axis=0)


# ---- first product ----------------------------------------------------------------------
@gluon.jit
def finish_up(
    gate, up, share, limit, h, hs, first, m, tops, met, parity,
    SHARE: gl.constexpr, INNER: gl.constexpr, N: gl.constexpr,
):  # fmt: skip
    """``experts.finish_up`` of official numerics for half of the outputs; the other group has the other half."""
    gate, up = gate.to(gl.bfloat16).to(gl.float32), up.to(gl.bfloat16).to(gl.float32)
    gate = gl.where(gate > limit, limit, gate)  # NaN stays
    up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
    v = gate / (1.0 + gl.exp(-gate)) * up * gl.expand_dims(share, 0)
    v = rounded(v)
    top = gl.max(gl.abs(v), axis=0)
    tops.index(parity * 2 + SHARE).store(top)
    barrier()
    mbarrier.arrive(met.index(SHARE), count=1)
    mbarrier.wait(met.index(1 - SHARE), parity)
    top = gl.maximum(top, tops.index(parity * 2 + 1 - SHARE).load(gl.SliceLayout(0, sum_layout(N))))
    bits = gl.maximum(top, 1e-4).to(gl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    code = gl.minimum(gl.maximum(v * gl.expand_dims(inverse, 0), -448.0), 448.0)
    code = gl.where(v != v, v, code).to(gl.float8e4nv)
    if SHARE == 0:
        line = first + gl.arange(0, N, layout=gl.SliceLayout(0, sum_layout(N)))
        gl.store(hs + line, (exponent << 23).to(gl.float32, bitcast=True))
    WIDE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    line = (first + gl.arange(0, N, layout=gl.SliceLayout(0, WIDE))).to(gl.int64)
    at = gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    column = m * 128 + SHARE * 8 + at // 8 * 16 + at % 8
    to = h + gl.expand_dims(line, 0) * INNER + gl.expand_dims(column, 1)
    code = gl.reshape(gl.permute(gl.reshape(code, [2, 8, 4, N]), (1, 0, 2, 3)), [64, N])  # ``fp4.arranged``
    gl.store(to, gl.convert_layout(code, WIDE))


@gluon.jit
def make_up(
    order, weights, h, hs, packed, words, bases, rows, scales, mail, full, empty, tops, met, slots, limit,
    SHARE: gl.constexpr, K: gl.constexpr, INNER: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A multiplying warp group of the first product."""
    PIECES: gl.constexpr = INNER // 128
    gdc_wait()
    slot, turn, parity = 0, 0, 0
    work = told(mail, full, slot, turn)
    while work >= 0:
        first, m = work // PIECES * N, work % PIECES
        index = gl.load(order + first + gl.arange(0, N, layout=gl.SliceLayout(0, sum_layout(N))))
        share = gl.load(weights + gl.maximum(index, 0))
        gate, up, slot, turn = pair_sum(
            packed, words, bases, rows, scales, full, empty, slot, turn, SHARE, K // 128, N, STAGES
        )
        finish_up(gate, up, share, limit, h, hs + m * slots * N, first, m, tops, met, parity, SHARE, INNER, N)
        parity ^= 1
        work = told(mail, full, slot, turn)


@gluon.jit(do_not_specialize=["slots", "programs", "limit"])
def fed_up_kernel(
    w, ws, wb, x, xs, order, owner, weights, h, hs, slots, programs, limit,
    K: gl.constexpr, INNER: gl.constexpr, TOP: gl.constexpr, N: gl.constexpr, PLACES: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """``streamed_up_kernel`` for tiles of N lines; PLACES: at least ``slots``, a power of two."""
    gdc_launch_dependents()
    packed = gl.allocate_shared_memory(gl.uint8, [STAGES * 4, 256, 32], w.layout)
    words = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 256], LINE)
    rows = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, N, 128], gl.NVMMASharedLayout(128, 8, 2))
    scales = gl.allocate_shared_memory(gl.float32, [STAGES * 2, N], LINE)
    bases = gl.allocate_shared_memory(gl.float32, [STAGES, 4], LINE)
    mail = gl.allocate_shared_memory(gl.int32, [STAGES, 1], LINE)
    tops = gl.allocate_shared_memory(gl.float32, [4, N], LINE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    met = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(met.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                feed,
                (
                    w, ws, wb, x, xs, order, owner, packed, words, bases, rows, scales, mail, full, empty, slots,
                    programs, K, INNER // 128, 1, INNER // 128, TOP, N, PLACES, STAGES,
                ),
            ),
            (
                make_up,
                (
                    order, weights, h, hs, packed, words, bases, rows, scales, mail, full, empty, tops, met, slots,
                    limit, 0, K, INNER, N, STAGES,
                ),
            ),
            (
                make_up,
                (
                    order, weights, h, hs, packed, words, bases, rows, scales, mail, full, empty, tops, met, slots,
                    limit, 1, K, INNER, N, STAGES,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


# ---- second product ---------------------------------------------------------------------
@gluon.jit
def keep_out(sums, out, taken, at, D: gl.constexpr):
    """Store sums [64, N] as columns ``at`` ... of assignments ``taken`` in out [*, D]."""
    WIDE: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    value = gl.convert_layout(sums.to(out.dtype.element_ty), WIDE)
    n = at + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    keep = gl.expand_dims(n < D, 1) & gl.expand_dims(taken >= 0, 0)
    gl.store(out + gl.expand_dims(taken.to(gl.int64) * D, 0) + gl.expand_dims(n, 1), value, mask=keep)


@gluon.jit
def make_down(
    order, out, packed, words, bases, rows, scales, mail, full, empty,
    SHARE: gl.constexpr, D: gl.constexpr, WIDE: gl.constexpr, K: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A multiplying warp group of the second product."""
    PIECES: gl.constexpr = WIDE // 256
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    gdc_wait()
    slot, turn = 0, 0
    work = told(mail, full, slot, turn)
    while work >= 0:
        one, two, slot, turn = pair_sum(
            packed, words, bases, rows, scales, full, empty, slot, turn, SHARE, K // 128, N, STAGES
        )
        first, at = work // PIECES * N, work % PIECES * 256 + SHARE * 64
        taken = gl.load(order + first + gl.arange(0, N, layout=gl.SliceLayout(0, STORED)))
        keep_out(one, out, taken, at, D)
        keep_out(two, out, taken, at + 128, D)
        work = told(mail, full, slot, turn)


@gluon.jit(do_not_specialize=["slots", "programs"])
def fed_down_kernel(
    w, ws, wb, h, hs, order, owner, out, slots, programs,
    D: gl.constexpr, WIDE: gl.constexpr, K: gl.constexpr, N: gl.constexpr, PLACES: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """``streamed_down_kernel`` for tiles of N lines; PLACES: at least ``slots``, a power of two."""
    gdc_launch_dependents()
    packed = gl.allocate_shared_memory(gl.uint8, [STAGES * 4, 256, 32], w.layout)
    words = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 256], LINE)
    rows = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, N, 128], gl.NVMMASharedLayout(128, 8, 2))
    scales = gl.allocate_shared_memory(gl.float32, [STAGES * 2, N], LINE)
    bases = gl.allocate_shared_memory(gl.float32, [STAGES, 4], LINE)
    mail = gl.allocate_shared_memory(gl.int32, [STAGES, 1], LINE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                feed,
                (
                    w, ws, wb, h, hs, order, owner, packed, words, bases, rows, scales, mail, full, empty, slots,
                    programs, K, WIDE // 256, 2, 1, 0, N, PLACES, STAGES,
                ),
            ),
            (
                make_down,
                (
                    order, out, packed, words, bases, rows, scales, mail, full, empty, 0, D, WIDE, K, N, STAGES,
                ),
            ),
            (
                make_down,
                (
                    order, out, packed, words, bases, rows, scales, mail, full, empty, 1, D, WIDE, K, N, STAGES,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )  # fmt: skip


# ---- launches ---------------------------------------------------------------------------
def places(slots: int) -> int:
    """A power of two of at least so many tiles; the same for most row counts, to compile one kernel for them."""
    return max(512, pow2(slots))


def blocks_of(data: Tensor) -> TensorDescriptor:
    """A descriptor of packed blocks [256, 32]."""
    return TensorDescriptor.from_tensor(data.view(-1, 32), [256, 32], PLANES)


def up(
    data: Tensor,
    words: Tensor,
    base: Tensor,
    x: Tensor,
    xs: Tensor,
    weights: Tensor,
    order: Tensor,
    owner: Tensor,
    h: Tensor,
    hs: Tensor,
    top: int,
    limit: float,
    how: Feed,
) -> None:
    """Fill h and hs; see ``fed_up_kernel``. x: ``fp4.arranged``."""
    slots, (lines, inner), programs = owner.shape[0], h.shape, processors(x.device)
    fed_up_kernel[(programs,)](
        blocks_of(data), words, base, x, xs, order, owner, weights, h, hs, slots, programs, limit,
        K=x.shape[1], INNER=inner, TOP=top, N=lines // slots, PLACES=places(slots), STAGES=how.stages,
        REGISTERS=how.registers, num_warps=4, launch_pdl=launched_early(),
    )  # fmt: skip


def down(
    data: Tensor,
    words: Tensor,
    base: Tensor,
    m: int,
    h: Tensor,
    hs: Tensor,
    order: Tensor,
    owner: Tensor,
    out: Tensor,
    how: Feed,
) -> None:
    """Fill out; see ``fed_down_kernel``. m: outputs in whole blocks."""
    slots, (lines, k), programs = owner.shape[0], h.shape, processors(h.device)
    stages = how.stages - (out.element_size() > 2)  # wider results leave through more shared memory
    fed_down_kernel[(programs,)](
        blocks_of(data), words, base, h, hs, order, owner, out, slots, programs, D=out.shape[1], WIDE=m, K=k,
        N=lines // slots, PLACES=places(slots), STAGES=stages, REGISTERS=how.registers, num_warps=4,
        launch_pdl=launched_early(),
    )  # fmt: skip


# ---- offline compilation ----------------------------------------------------------------
BLOCK = f"tensordesc<u8[256, 32],{PLANES!r}>"
UP = {
    "w": BLOCK, "ws": "*i32", "wb": "*fp32", "x": "*fp8", "xs": "*fp32", "order": "*i32", "owner": "*i32",
    "weights": "*fp32", "h": "*fp8", "hs": "*fp32", "slots": "i32", "programs": "i32", "limit": "fp32",
}  # fmt: skip
DOWN = {
    "w": BLOCK, "ws": "*i32", "wb": "*fp32", "h": "*fp8", "hs": "*fp32", "order": "*i32", "owner": "*i32",
    "out": "*bf16", "slots": "i32", "programs": "i32",
}  # fmt: skip


def specs(tile_n: int, slots: int, size: str, up_how: Feed | None, down_how: Feed | None) -> list[Spec]:
    """Both products for tiles of that many lines, those that are launched so."""

    def spec(name: str, fn: object, signature: dict[str, str], sizes: dict[str, int], how: Feed) -> Spec:
        return Spec(
            name=f"experts-{name}-fed-{size}",
            fn=fn,
            signature=signature,
            constexprs={
                **sizes, "N": tile_n, "PLACES": places(slots), "STAGES": how.stages, "REGISTERS": how.registers,
            },
            options={"num_warps": 4},
            targets=("sm_90",),
        )  # fmt: skip

    made = []
    if up_how:
        made.append(spec("up", fed_up_kernel, UP, {"K": 4096, "INNER": 2048, "TOP": 6}, up_how))
    if down_how:
        made.append(spec("down", fed_down_kernel, DOWN, {"D": 4096, "WIDE": 4096, "K": 2048}, down_how))
    return made
