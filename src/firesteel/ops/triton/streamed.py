"""Folded experts on Hopper, with a block unpacked while the matrix units still work on the one before.

The same sums in the same order as ``folded``, so the same bits. Written in Gluon, Triton's language with
explicit layouts and waits: the compiler of plain Triton waits for a product whose left operand lies in
registers before it touches the next. A program makes two lines of weight blocks for a tile of rows; blocks
come by asynchronous copies ``STAGES`` deep.

Three things keep the assembler from putting a wait behind every matrix instruction, which it does without
an error: no product is in flight where the loop turns, a sum is added up before its registers take the
next product, and the loop's body has no branch.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from firesteel.ops.triton.fp4 import FOLDED
from firesteel.ops.triton.launch import gdc_launch_dependents, gdc_wait, launched_early
from firesteel.ops.triton.spec import Spec

How = tuple[int, int, int, int]  # warps, stages, blocks unrolled, registers per thread
M = gl.constexpr(128)  # outputs of a block line
FEW = 16  # lines of a tile up to which rows are put into the order of the weights as they are copied


# ---- layouts ----------------------------------------------------------------------------
@gluon.constexpr_function
def packed_layout(warps):
    """Of uint8 [128, 32], so that what it unpacks to is a matrix operand as it stands."""
    registers = [[0, 1], [0, 2], [8, 0], [0, 16]] + ([[64, 0]] if warps == 4 else [])
    rows = [[16, 0], [32, 0], [64, 0]][: 2 if warps == 4 else 3]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, rows, [], [128, 32])


@gluon.constexpr_function
def sum_layout(warps, n):
    """Of float32 sums [128, n]."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, n, 32])


@gluon.constexpr_function
def row_layout(warps, n):
    """Of pointers to a block of rows [n, 128], 16 bytes each or what is left for one thread."""
    wide = min(16, n * 4 // warps)
    return gl.BlockedLayout([1, wide], [wide // 4, 128 // wide], [warps, 1], [1, 0])


@gluon.constexpr_function
def group_layout(packed):
    """Of scales [lines, 4], for lines packed in the layout ``packed``: those of the groups that a thread has."""
    bases = [packed.reg_bases, packed.lane_bases, packed.warp_bases]
    wide = [[[line, at // 16, at // 4 % 4, at % 4] for line, at in some] for some in bases]
    whole = gl.DistributedLinearLayout(*wide, [], [packed.shape[0], 2, 4, 4])
    return gl.SliceLayout(1, gl.SliceLayout(3, whole))


# ---- unpacking --------------------------------------------------------------------------
@gluon.jit
def fields_of(words, AT: gl.constexpr, LINES: gl.constexpr, PACKED: gl.constexpr):
    """int32 [LINES, 32]: exponent fields of packed bytes, of the scale words of lines AT ... in shared memory."""
    FOURS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    field = words._reinterpret(gl.uint8, [words.shape[0], 4], FOURS).slice(AT, LINES, 0)
    field = field.load(group_layout(PACKED)).to(gl.int32)
    field = gl.expand_dims(gl.expand_dims(field, 1), 3)
    field, _ = gl.broadcast(field, gl.full([LINES, 2, 4, 4], 0, gl.int32, field.type.layout))
    return gl.convert_layout(gl.reshape(field, [LINES, 32]), PACKED, assert_trivial=True)


@gluon.jit
def unfold_half(packed, field, LINES: gl.constexpr):
    """``fp4.unfold_half`` with given layouts: codes uint8 [LINES, 64]."""
    a, b = gl.inline_asm_elementwise(
        FOLDED,
        "=r,=r,r,r,r,r,r,r,r,r,r",
        [packed, field * 0x01010100 + 0x0C080000, field * 0x01010101 + 0x1C181410],
        dtype=(gl.uint8, gl.uint8),
        is_pure=True,
        pack=4,
    )
    return gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), [LINES, 64])


@gluon.jit
def operand(first, second, words, slot, WARPS: gl.constexpr, N: gl.constexpr):
    """e4m3 [128, 128] of the packed block in a slot of shared memory."""
    LINES: gl.constexpr = packed_layout(WARPS)
    field = fields_of(words.index(slot), 0, M, LINES)
    a = unfold_half(first.index(slot).load(LINES), field, M)
    b = unfold_half(second.index(slot).load(LINES), field, M)
    c = gl.reshape(gl.permute(gl.join(a, b), (0, 2, 1)), [128, 128]).to(gl.float8e4nv, bitcast=True)
    return gl.convert_layout(c, gl.DotOperandLayout(0, sum_layout(WARPS, N), 4), assert_trivial=True)


# ---- copies -----------------------------------------------------------------------------
@gluon.jit
def fetch_block(w, ws, first, second, words, slot, at, some, WARPS: gl.constexpr):
    """Start copying block ``at`` of w and its scale words into a slot, if ``some``."""
    HALF: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [WARPS, 1], [1, 0])
    WORD: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    line = gl.expand_dims(gl.arange(0, M, layout=gl.SliceLayout(1, HALF)), 1)
    to = line * 32 + gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, HALF)), 0)
    keep = gl.full([M, 32], some, gl.int1, HALF)
    async_copy.async_copy_global_to_shared(first.index(slot), w + at * 8192 + to, mask=keep)
    async_copy.async_copy_global_to_shared(second.index(slot), w + at * 8192 + 4096 + to, mask=keep)
    word = ws + at * 128 + gl.arange(0, M, layout=WORD)
    async_copy.async_copy_global_to_shared(words.index(slot), word, mask=gl.full([M], some, gl.int1, WORD))


@gluon.jit
def product(a, x, slot, sums):
    """Start a times the rows in a slot, into the registers of ``sums``, whose values are gone."""
    return warpgroup_mma(a, x.index(slot).permute((1, 0)), sums, use_acc=False, is_async=True)


# ---- sums -------------------------------------------------------------------------------
@gluon.jit
def pair_sum(
    w, ws, wb, x, tp, row, live, step, one_at, two_at,
    K: gl.constexpr, N: gl.constexpr, ARRANGED: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    UNROLL: gl.constexpr,
):  # fmt: skip
    """``folded.pair_sum``: block lines one_at and two_at times rows ``row`` [N], float32 [128, N] twice.

    tp [N]: where the rows' scales of block 0 lie, of the next ``step`` further. UNROLL divides STAGES and the
    blocks: within so many blocks each unpacking runs beside a product.
    """
    BLOCKS: gl.constexpr = K // 128
    SUMS: gl.constexpr = sum_layout(WARPS, N)
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(16, 4, 2, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a0 = gl.allocate_shared_memory(gl.uint8, [STAGES, M, 32], SWIZZLED)
    a1 = gl.allocate_shared_memory(gl.uint8, [STAGES, M, 32], SWIZZLED)
    e0 = gl.allocate_shared_memory(gl.uint8, [STAGES, M, 32], SWIZZLED)
    e1 = gl.allocate_shared_memory(gl.uint8, [STAGES, M, 32], SWIZZLED)
    aw = gl.allocate_shared_memory(gl.int32, [STAGES, M], FLAT)
    ew = gl.allocate_shared_memory(gl.int32, [STAGES, M], FLAT)
    rows = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, N, 128], gl.NVMMASharedLayout(128, 8, 2))
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, N], FLAT)
    lane = gl.arange(0, 128, layout=gl.SliceLayout(0, row_layout(WARPS, N)))
    if not ARRANGED:  # copied four bytes at a time
        lane = 32 * (lane // 4 % 4) + 4 * (lane // 16) + lane % 4
    lane = gl.expand_dims(lane, 0)
    xp = x + gl.expand_dims(row, 1) * K + lane
    one_at, two_at = one_at * BLOCKS, two_at * BLOCKS
    for i in gl.static_range(STAGES - 1):
        if i < BLOCKS:
            fetch_block(w, ws, a0, a1, aw, i, one_at + i, True, WARPS)
            fetch_block(w, ws, e0, e1, ew, i, two_at + i, True, WARPS)
            async_copy.async_copy_global_to_shared(rows.index(i), xp + i * 128, mask=gl.expand_dims(live, 1))
            async_copy.async_copy_global_to_shared(scales.index(i), tp + i * step)
        async_copy.commit_group()
    one = gl.zeros([M, N], gl.float32, SUMS)
    two = gl.zeros([M, N], gl.float32, SUMS)
    b, c = gl.load(wb + one_at), gl.load(wb + two_at)
    slot = 0
    async_copy.wait_group(STAGES - 2)
    for base in range(0, BLOCKS, UNROLL):
        for u in gl.static_range(UNROLL):
            here = slot + u
            fill = gl.where(here == 0, STAGES - 1, here - 1) if u == 0 else here - 1
            then = gl.where(here == STAGES - 1, 0, here + 1) if u == UNROLL - 1 else here + 1
            if u == 0:
                a = operand(a0, a1, aw, here, WARPS, N)
                sums = product(a, rows, here, gl.zeros([M, N], gl.float32, SUMS))
            t = scales.index(here).load(gl.SliceLayout(0, SUMS))
            e = operand(e0, e1, ew, here, WARPS, N)
            done = warpgroup_mma_wait(0, deps=[sums])
            one += done * gl.expand_dims(t * b, 0)
            sums = product(e, rows, here, done)
            far = base + u + STAGES - 1  # into the slot of the block before, whose products are done
            some = far < BLOCKS
            fetch_block(w, ws, a0, a1, aw, fill, one_at + far, some, WARPS)
            fetch_block(w, ws, e0, e1, ew, fill, two_at + far, some, WARPS)
            async_copy.async_copy_global_to_shared(
                rows.index(fill), xp + far * 128, mask=gl.expand_dims(live & some, 1)
            )
            async_copy.async_copy_global_to_shared(
                scales.index(fill), tp + far * step, mask=gl.full([N], some, gl.int1, tp.type.layout)
            )
            async_copy.commit_group()
            s = t * c
            ahead = gl.minimum(base + u + 1, BLOCKS - 1)
            b, c = gl.load(wb + one_at + ahead), gl.load(wb + two_at + ahead)
            async_copy.wait_group(STAGES - 2)
            if u < UNROLL - 1:
                a = operand(a0, a1, aw, then, WARPS, N)
                done = warpgroup_mma_wait(0, deps=[sums])
                two += done * gl.expand_dims(s, 0)
                sums = product(a, rows, then, done)
            else:
                done = warpgroup_mma_wait(0, deps=[sums])
                two += done * gl.expand_dims(s, 0)
        slot = then
    return one, two


ROUNDED = gl.constexpr("""{
.reg .b32 p;
cvt.rn.bf16x2.f32 p, $3, $2;
shl.b32 $0, p, 16;
and.b32 $1, p, 0xFFFF0000;
}""")


@gluon.jit
def rounded(v):
    """v rounded to bfloat16, two at a time: one by one the instruction takes eight cycles."""
    v = v.to(gl.int32, bitcast=True)
    v = gl.inline_asm_elementwise(ROUNDED, "=r,=r,r,r", [v], dtype=gl.int32, is_pure=True, pack=2)
    return v.to(gl.float32, bitcast=True)


@gluon.jit
def finish_up(
    gate, up, share, limit, h, hs, first, m,
    INNER: gl.constexpr, N: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """``experts.finish_up`` of official numerics: lines first ... of h, their scales at hs + first ..."""
    gate, up = rounded(gate), rounded(up)
    gate = gl.where(gate > limit, limit, gate)  # NaN stays
    up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
    v = gate / (1.0 + gl.exp(-gate)) * up * gl.expand_dims(share, 0)
    v = rounded(v)
    bits = gl.maximum(gl.max(gl.abs(v), axis=0), 1e-4).to(gl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    code = gl.minimum(gl.maximum(v * gl.expand_dims(inverse, 0), -448.0), 448.0)
    code = gl.where(v != v, v, code).to(gl.float8e4nv)
    line = first + gl.arange(0, N, layout=gl.SliceLayout(0, sum_layout(WARPS, N)))
    gl.store(hs + line, (exponent << 23).to(gl.float32, bitcast=True))
    WIDE: gl.constexpr = gl.BlockedLayout([16, 1], [8, 4], [1, WARPS], [0, 1])
    line = (first + gl.arange(0, N, layout=gl.SliceLayout(0, WIDE))).to(gl.int64)
    column = m * 128 + gl.arange(0, M, layout=gl.SliceLayout(1, WIDE))
    to = h + gl.expand_dims(line, 0) * INNER + gl.expand_dims(column, 1)
    code = gl.reshape(gl.permute(gl.reshape(code, [4, 8, 4, N]), (1, 0, 2, 3)), [M, N])  # ``fp4.arranged``
    gl.store(to, gl.convert_layout(code, WIDE))


@gluon.jit(do_not_specialize=["slots", "limit"])
def streamed_up_kernel(
    w, ws, wb, x, xs, order, owner, weights, h, hs, slots, limit,
    K: gl.constexpr, INNER: gl.constexpr, TOP: gl.constexpr, TILE_N: gl.constexpr, ARRANGED: gl.constexpr,
    WARPS: gl.constexpr, STAGES: gl.constexpr, UNROLL: gl.constexpr,
):  # fmt: skip
    """``folded_up_kernel`` with PIECES 1; xs float32 [rows, K / 128] as the rows are, not as the lines."""
    gdc_launch_dependents()
    gdc_wait()
    tile, m = gl.program_id(0), gl.program_id(1)
    expert = gl.load(owner + tile)
    if expert >= 0:
        first = tile * TILE_N
        at = gl.load(
            order + first + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, row_layout(WARPS, TILE_N)))
        )
        row = (gl.maximum(at, 0) // TOP).to(gl.int64)
        SCALES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        index = gl.load(order + first + gl.arange(0, TILE_N, layout=SCALES))
        tp = xs + gl.maximum(index, 0) // TOP * (K // 128)
        gate_at = (expert * (2 * INNER // 128) + m).to(gl.int64)
        gate, up = pair_sum(
            w,
            ws,
            wb,
            x,
            tp,
            row,
            at >= 0,
            1,
            gate_at,
            gate_at + INNER // 128,
            K,
            TILE_N,
            ARRANGED,
            WARPS,
            STAGES,
            UNROLL,
        )
        COLUMNS: gl.constexpr = gl.SliceLayout(0, sum_layout(WARPS, TILE_N))
        index = gl.load(order + first + gl.arange(0, TILE_N, layout=COLUMNS))
        share = gl.load(weights + gl.maximum(index, 0))
        finish_up(gate, up, share, limit, h, hs + m * slots * TILE_N, first, m, INNER, TILE_N, WARPS)


@gluon.jit
def keep_out(out, sums, order, first, at, D: gl.constexpr, N: gl.constexpr, WARPS: gl.constexpr):
    """Store sums [128, N] of lines first ... as columns ``at`` ... of their assignments in out [*, D]."""
    WIDE: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, WARPS], [0, 1])
    value = gl.convert_layout(sums.to(out.dtype.element_ty), WIDE)
    taken = gl.load(order + first + gl.arange(0, N, layout=gl.SliceLayout(0, WIDE)))
    n = at + gl.arange(0, M, layout=gl.SliceLayout(1, WIDE))
    keep = gl.expand_dims(n < D, 1) & gl.expand_dims(taken >= 0, 0)
    gl.store(out + gl.expand_dims(taken.to(gl.int64) * D, 0) + gl.expand_dims(n, 1), value, mask=keep)


@gluon.jit(do_not_specialize=["slots"])
def streamed_down_kernel(
    w, ws, wb, h, hs, order, owner, out, slots,
    D: gl.constexpr, WIDE: gl.constexpr, K: gl.constexpr, TILE_N: gl.constexpr, WARPS: gl.constexpr,
    STAGES: gl.constexpr, UNROLL: gl.constexpr,
):  # fmt: skip
    """``folded_down_kernel``, 256 outputs per program."""
    gdc_launch_dependents()
    gdc_wait()
    tile, piece = gl.program_id(0), gl.program_id(1)
    expert = gl.load(owner + tile)
    if expert >= 0:
        first = tile * TILE_N
        line = first + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, row_layout(WARPS, TILE_N)))
        live = gl.load(order + line) >= 0
        SCALES: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
        tp = hs + first + gl.arange(0, TILE_N, layout=SCALES)
        at = (expert * (WIDE // 128) + 2 * piece).to(gl.int64)
        one, two = pair_sum(
            w,
            ws,
            wb,
            h,
            tp,
            line.to(gl.int64),
            live,
            slots * TILE_N,
            at,
            at + 1,
            K,
            TILE_N,
            True,
            WARPS,
            STAGES,
            UNROLL,
        )
        keep_out(out, one, order, first, piece * 256, D, TILE_N, WARPS)
        keep_out(out, two, order, first, piece * 256 + 128, D, TILE_N, WARPS)


# ---- launches ---------------------------------------------------------------------------
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
    how: How,
) -> None:
    """Fill h and hs; see ``streamed_up_kernel``. x: ``fp4.arranged`` for tiles of more than 16 lines."""
    slots, (lines, inner) = owner.shape[0], h.shape
    warps, stages, unroll, registers = how
    streamed_up_kernel[(slots, inner // 128)](
        data, words, base, x, xs, order, owner, weights, h, hs, slots, limit, K=x.shape[1], INNER=inner, TOP=top,
        TILE_N=lines // slots, ARRANGED=lines // slots > FEW, WARPS=warps, STAGES=stages, UNROLL=unroll,
        num_warps=warps, maxnreg=registers, launch_pdl=launched_early(),
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
    how: How,
) -> None:
    """Fill out; see ``streamed_down_kernel``. m: outputs in whole blocks."""
    slots, (lines, k) = owner.shape[0], h.shape
    warps, stages, unroll, registers = how
    streamed_down_kernel[(slots, m // 256)](
        data, words, base, h, hs, order, owner, out, slots, D=out.shape[1], WIDE=m, K=k,
        TILE_N=lines // slots, WARPS=warps, STAGES=stages, UNROLL=unroll,
        num_warps=warps, maxnreg=registers, launch_pdl=launched_early(),
    )  # fmt: skip


# ---- offline compilation ----------------------------------------------------------------
UP = {
    "w": "*u8", "ws": "*i32", "wb": "*fp32", "x": "*fp8", "xs": "*fp32", "order": "*i32", "owner": "*i32",
    "weights": "*fp32", "h": "*fp8", "hs": "*fp32", "slots": "i32", "limit": "fp32",
}  # fmt: skip
DOWN = {
    "w": "*u8", "ws": "*i32", "wb": "*fp32", "h": "*fp8", "hs": "*fp32", "order": "*i32", "owner": "*i32",
    "out": "*bf16", "slots": "i32",
}  # fmt: skip


def specs(tile_n: int, size: str, up_how: How | None, down_how: How | None) -> list[Spec]:
    """Both products for tiles of that many lines, those that are launched so."""

    def spec(name: str, fn: object, signature: dict[str, str], sizes: dict[str, int], how: How) -> Spec:
        warps, stages, unroll, registers = how
        return Spec(
            name=f"experts-{name}-streamed-{size}",
            fn=fn,
            signature=signature,
            constexprs={**sizes, "TILE_N": tile_n, "WARPS": warps, "STAGES": stages, "UNROLL": unroll},
            options={"num_warps": warps, "maxnreg": registers},
            targets=("sm_90",),
        )

    made = []
    if up_how:
        made.append(
            spec(
                "up",
                streamed_up_kernel,
                UP,
                {"K": 4096, "INNER": 2048, "TOP": 6, "ARRANGED": tile_n > FEW},
                up_how,
            )
        )
    if down_how:
        made.append(spec("down", streamed_down_kernel, DOWN, {"D": 4096, "WIDE": 4096, "K": 2048}, down_how))
    return made
