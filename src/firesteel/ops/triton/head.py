"""The output head and what follows it in the same pass: base logits, noise, argmax.

    tile of W [BV, K] x rows^T [K, BR] -> float32 logits of BV ids and BR rows
    -> stored, or perturbed and reduced to one (value, id) per row and tile

Weights are the M operand and rows the N operand: BV, BK, warps and stages never
change, only BR follows the row count, so a logit is the same chain of matrix
instructions in every batch. Row tiles of one weight tile run next to each
other, so that its bytes come from memory once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from firesteel.ops.triton import logits, pingpong, pingwalk
from firesteel.ops.triton.launch import begin, cdiv, dense, kernel
from firesteel.ops.triton.sample import KEY, PARTS, Partials, perturb, row_key, seeds, tile_best
from firesteel.ops.triton.spec import Spec
from firesteel.ops.triton.target import TARGETS, Target
from firesteel.ops.triton.walk import head_wide, walk_rows
from firesteel.ops.types import Linear, SlotState

TILE_V, TILE_K = 128, 64
ROW_TILES = (16, 32, 64, 128)
CHUNK = 16  # rows of one program whose noise exists at once


@triton.jit
def head_dot(x, w, x_rows, ok, ids, inside, K: tl.constexpr, V: tl.constexpr, R: tl.constexpr, STEP: tl.constexpr, NARROW: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    """float32 [V, R]: W[ids] times rows, K in ascending steps of one order."""
    acc = tl.zeros((V, R), tl.float32)
    lane = tl.arange(0, STEP)
    w_at = w + ids.to(tl.int64)[:, None] * K + lane[None, :]
    x_at = x + x_rows[None, :] * K + lane[:, None]
    for k in range(0, K, STEP):
        if K % STEP == 0:
            a = tl.load(w_at + k, mask=inside[:, None], other=0.0)
            b = tl.load(x_at + k, mask=ok[None, :], other=0.0)
        else:
            a = tl.load(w_at + k, mask=inside[:, None] & (k + lane[None, :] < K), other=0.0)
            b = tl.load(x_at + k, mask=ok[None, :] & (k + lane[:, None] < K), other=0.0)
        if NARROW:
            acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
        else:
            acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def finish_rows(logit, start, step, where, tables, key, sizes, BASE: tl.constexpr, STORE: tl.constexpr, PICK: tl.constexpr, REJECTION: tl.constexpr, N: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    """What becomes of the products [V, N] of the rows start, start + step, ..."""
    tile, ids, inside = where
    base, out, values, chosen, seconds = tables
    slots, positions, passes, seed_lo, seed_hi, sample, temperature = key
    rows, base_stride, out_stride, tiles = sizes
    row = start + step * tl.arange(0, N)
    ok = row < rows
    wide = row.to(tl.int64)
    both = inside[:, None] & ok[None, :]
    if BASE:
        logit = tl.load(base + wide[None, :] * base_stride + ids[:, None], mask=both, other=0.0) + logit
    if STORE:
        tl.store(out + wide[None, :] * out_stride + ids[:, None], logit, mask=both)
    if PICK:
        heat, place, stream, high, low, index = row_key(
            slots, positions, passes, seed_lo, seed_hi, sample, temperature, row, ok, REJECTION
        )
        score = logit
        if tl.max(heat, axis=0) > 0.0:  # all greedy: the noise is multiplied by 0
            words = (place[None, :], stream[None, :], high[None, :], low[None, :], index[None, :])
            score = perturb(logit, heat[None, :], tile * ids.shape[0], words, PAIRS)
        best, found, second = tile_best(logit, score, ids[:, None], inside[:, None], 0, BASE)
        at = row * tiles + tile  # of rows * tiles: far below 2^31
        tl.store(values + at, best, mask=ok)
        tl.store(chosen + at, found, mask=ok)
        if BASE:
            tl.store(seconds + at, second, mask=ok)


@triton.jit
def finish(acc, start, step, place, tables, key, sizes, BASE: tl.constexpr, STORE: tl.constexpr, PICK: tl.constexpr, REJECTION: tl.constexpr, N: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    """``finish_rows`` of at most CHUNK rows at a time: the noise of a whole wide tile would not fit the registers."""
    if PICK and N > CHUNK:  # even and odd columns: neighbours lie in one thread
        even, odd = tl.split(tl.reshape(acc, (acc.shape[0], N // 2, 2)))
        first: tl.constexpr = (
            CHUNK // 2 if N >= 128 and not BASE else CHUNK
        )  # while the other half fills registers too
        finish(
            even,
            start,
            2 * step,
            place,
            tables,
            key,
            sizes,
            BASE,
            STORE,
            PICK,
            REJECTION,
            N // 2,
            first,
            PAIRS,
        )
        finish(
            odd,
            start + step,
            2 * step,
            place,
            tables,
            key,
            sizes,
            BASE,
            STORE,
            PICK,
            REJECTION,
            N // 2,
            CHUNK,
            PAIRS,
        )
    else:
        finish_rows(acc, start, step, place, tables, key, sizes, BASE, STORE, PICK, REJECTION, N, PAIRS)


@kernel("rows", "row_tiles", "base_stride", "out_stride", "tiles")
def head_rows(  # type: ignore[no-untyped-def]
    x,
    w,
    base,
    previous,
    slots,
    positions,
    passes,
    seed_lo,
    seed_hi,
    sample,
    temperature,
    out,
    values,
    chosen,
    seconds,
    rows,
    row_tiles,
    base_stride,
    out_stride,
    tiles,
    VOCAB: tl.constexpr,
    K: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_K: tl.constexpr,
    NARROW: tl.constexpr,
    GATHER: tl.constexpr,
    BASE: tl.constexpr,
    STORE: tl.constexpr,
    PICK: tl.constexpr,
    REJECTION: tl.constexpr,
    CHUNK: tl.constexpr,
    PAIRS: tl.constexpr = True,
):
    """One vocabulary tile of up to TILE_R rows; GATHER reads row r of ``x`` at ``previous[r]``."""
    begin()
    pid = tl.program_id(0)
    tile = pid // row_tiles
    start = (pid % row_tiles) * TILE_R
    row = start + tl.arange(0, TILE_R)
    ok = row < rows
    ids = tile * TILE_V + tl.arange(0, TILE_V)
    if VOCAB % TILE_V == 0:
        inside = tl.full((TILE_V,), 1, tl.int1)
    else:
        inside = ids < VOCAB
    if GATHER:
        x_rows = tl.load(previous + row, mask=ok, other=0)
    else:
        x_rows = row.to(tl.int64)
    acc = head_dot(x, w, x_rows, ok, ids, inside, K, TILE_V, TILE_R, TILE_K, NARROW)
    tables = (base, out, values, chosen, seconds)
    key = (slots, positions, passes, seed_lo, seed_hi, sample, temperature)
    sizes = (rows, base_stride, out_stride, tiles)
    place = (tile, ids, inside)
    finish(acc, start, 1, place, tables, key, sizes, BASE, STORE, PICK, REJECTION, TILE_R, CHUNK, PAIRS)


def row_tile(rows: int, narrow: bool) -> int:
    """Rows of one program: the N extent of one instruction family, free to follow the row count.

    Float32 products run on scalar units, where a wide tile gains nothing and fills the registers.
    """
    if not narrow:
        return ROW_TILES[0]
    return next((t for t in ROW_TILES if rows <= t), ROW_TILES[-1])


def options(target: Target, walk: bool, tile: int) -> dict[str, Any]:
    """Warps, stages and register limit of the head, or of a step of the walk, on a target; they touch no bit.

    On Hopper two programs of the widest tile share a multiprocessor: one draws noise while the other
    multiplies; pairs of registers for the noise would spill there. The walk's K is 256: on gfx942 a second
    stage brings little and spills 6 registers.
    """
    if target.backend == "hip":
        stages = 1 if walk and target.name == "gfx942" else 2
        return {"num_warps": 8, "num_stages": stages, "matrix_instr_nonkdim": 16}
    if target.backend == "cuda":
        if tile == 128 and not walk and target.name == "sm_90":
            return {"num_warps": 8, "num_stages": 3, "maxnreg": 128, "PAIRS": False}
        return {"num_warps": 8, "num_stages": 4}
    return {}


def weight_of(head: Linear) -> Tensor:
    """The unquantised weight [N, K] of a prepared linear."""
    w = head.data if isinstance(head.data, Tensor) else head.data.data
    assert isinstance(w, Tensor) and w.shape == (head.n, head.k) and w.is_contiguous(), "a dense head"
    assert w.dtype in (torch.float32, torch.bfloat16), "heads are kept in float32 or bfloat16"
    return w


@dataclass(frozen=True)
class Walk:
    """What a step of the drafter's walk adds: ``base`` float32 [G, V] (rows may lie apart),
    ``previous`` int64 [G], whether noise comes from the drafter's own stream."""

    base: Tensor
    previous: Tensor
    rejection: bool


@dataclass(frozen=True)
class Form:
    """Tiles and launch of ``walk_rows`` or ``head_wide``; touches no bit.

    Of a walk ``chunk``, rows of one program whose noise exists at once, and ``programs`` per multiprocessor.
    """

    tile_v: int
    tile_r: int
    warps: int
    stages: int
    chunk: int
    programs: int = 1

    @property
    def options(self) -> dict[str, int]:
        """Launch options."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def walk_form(rows: int, k: int, target: Target) -> Form | None:
    """The form of a step of the walk over tensor descriptors, None where there is none; measured on an H200."""
    if target.name != "sm_90" or k not in (64, 128, 256):
        return None
    if rows <= 16:
        return Form(64, 16, 4, 3, 16, 2)
    return Form(64, 32, 8, 2, 16, 2) if rows <= 32 else Form(64, 64, 4, 2, 16, 2)


def wide_form(rows: int, k: int, target: Target) -> Form | None:
    """The form that stores logits over tensor descriptors, None where ``head_rows`` is as quick.

    On an H200 a tile of 256 rows takes 1.7 times as long as one of 128.
    """
    if target.name != "sm_90" or k % TILE_K or rows <= 128 or 7 * cdiv(rows, 256) >= 4 * cdiv(rows, 128):
        return None
    return Form(128, 256, 8, 4, 256)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; a few where kernels are interpreted."""
    return 3 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def unit_of(*strides: int) -> int:
    """16 if all strides are multiples of it, so that the compiler knows; else 1."""
    return 16 if all(s % 16 == 0 for s in strides) else 1


def run_head(
    x: Tensor,
    w: Tensor,
    target: Target,
    *,
    narrow: bool,
    rows: int,
    store: Tensor | None = None,
    sampling: tuple[Tensor, Tensor, SlotState] | None = None,
    walk: Walk | None = None,
) -> Partials | None:
    """Launch the head: into ``store`` [R, V] (any row stride) and, with ``sampling``
    (slots, positions, state), into tile winners. ``narrow``: bf16 products (exact on bf16 values).

    The form of the kernel follows the row count; the bits of a logit do not."""
    assert x.is_contiguous(), "rows lie one after another"
    if narrow and rows > 0 and w.dtype == torch.bfloat16:
        if walk is not None:
            if store is None and sampling is not None and pingwalk.fits(rows, w.shape[1]):
                return pingwalk.run_walk(x, w, walk.base, walk.previous, walk.rejection, rows, sampling)
            if (form := walk_form(rows, w.shape[1], target)) is not None:
                return run_walk(form, x, w, walk, rows, store, sampling)
        elif x.dtype == torch.bfloat16 and store is None and pingpong.fits(rows, w.shape[1]):
            assert sampling is not None, "something to make"
            return pingpong.run_head(x, w, rows, sampling)
        elif x.dtype == torch.bfloat16 and store is not None and sampling is None:
            wide = wide_form(rows, w.shape[1], target)
            if logits.stored(x, w, store, wide is not None, target):
                return None
            if wide is not None:
                run_wide(wide, x, w, rows, store)
                return None
    return run_rows(x, w, target, narrow, rows, store, sampling, walk)


def run_rows(
    x: Tensor,
    w: Tensor,
    target: Target,
    narrow: bool,
    rows: int,
    store: Tensor | None,
    sampling: tuple[Tensor, Tensor, SlotState] | None,
    walk: Walk | None,
) -> Partials | None:
    """``run_head`` by ``head_rows``, the form of every device and dtype."""
    vocab, k = w.shape
    tile, row_block = TILE_V, row_tile(rows, narrow)
    tiles, row_tiles = cdiv(vocab, tile), cdiv(rows, row_block)
    parts = Partials(rows, tiles, x.device, walk is not None) if sampling is not None else None
    unused = w
    key: tuple[Tensor, ...] = (unused,) * 7
    if sampling is not None:
        key = (*sampling[:2], *seeds(sampling[2]))
    head_rows[(tiles * row_tiles,)](
        x,
        w,
        unused if walk is None else walk.base,
        unused if walk is None else walk.previous,
        *key,
        unused if store is None else store,
        *((unused,) * 3 if parts is None else (parts.values, parts.ids, parts.seconds)),
        rows,
        row_tiles,
        0 if walk is None else walk.base.stride(0),
        0 if store is None else store.stride(0),
        tiles,
        VOCAB=vocab,
        K=k,
        TILE_V=tile,
        TILE_R=row_block,
        TILE_K=TILE_K,
        NARROW=narrow,
        GATHER=walk is not None,
        BASE=walk is not None,
        STORE=store is not None,
        PICK=sampling is not None,
        REJECTION=walk is not None and walk.rejection,
        CHUNK=CHUNK,
        **options(target, walk is not None, row_block),
    )
    return parts


def run_walk(
    form: Form,
    x: Tensor,
    w: Tensor,
    walk: Walk,
    rows: int,
    store: Tensor | None,
    sampling: tuple[Tensor, Tensor, SlotState] | None,
) -> Partials | None:
    """``run_head`` of a step of the walk by ``walk_rows``."""
    (vocab, k), row_tiles = w.shape, cdiv(rows, form.tile_r)
    there = multiprocessors(x.device) * form.programs // row_tiles
    programs = min(cdiv(vocab, form.tile_v), max(1, there))
    parts = Partials(rows, programs, x.device, True) if sampling is not None else None
    key: tuple[Tensor, ...] = (w,) * 7 if sampling is None else (*sampling[:2], *seeds(sampling[2]))
    base_stride, out_stride = walk.base.stride(0), 0 if store is None else store.stride(0)
    unit = unit_of(base_stride, out_stride)
    walk_rows[(programs, row_tiles)](
        x,
        TensorDescriptor.from_tensor(w, [form.tile_v, k]),
        walk.base,
        walk.previous,
        *key,
        w if store is None else store,
        *((w,) * 3 if parts is None else (parts.values, parts.ids, parts.seconds)),
        rows,
        base_stride // unit,
        out_stride // unit,
        programs,
        VOCAB=vocab,
        K=k,
        TILE_V=form.tile_v,
        TILE_R=form.tile_r,
        STORE=store is not None,
        PICK=sampling is not None,
        REJECTION=walk.rejection,
        UNIT=unit,
        CHUNK=form.chunk,
        **form.options,
    )
    return parts


def run_wide(form: Form, x: Tensor, w: Tensor, rows: int, store: Tensor) -> None:
    """``run_head`` of many rows by ``head_wide``: logits stored."""
    (vocab, k), row_tiles, stride = w.shape, cdiv(rows, form.tile_r), store.stride(0)
    unit = unit_of(stride)
    head_wide[(cdiv(vocab, form.tile_v) * row_tiles,)](
        TensorDescriptor.from_tensor(x, [form.tile_r, TILE_K]),
        TensorDescriptor.from_tensor(w, [form.tile_v, TILE_K]),
        store,
        rows,
        row_tiles,
        stride // unit,
        VOCAB=vocab,
        K=k,
        TILE_V=form.tile_v,
        TILE_R=form.tile_r,
        TILE_K=TILE_K,
        UNIT=unit,
        **form.options,
    )


def head_logits(x: Tensor, w: Tensor, target: Target, narrow: bool) -> Tensor:
    """float32 [R, V] with the bits that ``run_head`` compares."""
    out = torch.empty(x.shape[0], w.shape[0], dtype=torch.float32, device=x.device)
    run_head(dense(x), w, target, narrow=narrow, rows=x.shape[0], store=out)
    return out


def _specs() -> list[Spec]:
    """The Flash head at every row tile, the walk of rank 256, and stored logits."""
    counts = ("rows", "row_tiles", "base_stride", "out_stride", "tiles")
    arrays = {"x": "*bf16", "w": "*bf16", "base": "*fp32", "previous": "*i64", "out": "*fp32"}
    signature = {**arrays, **KEY, **PARTS, **dict.fromkeys(counts, "i32")}

    def spec(name: str, tile: int, k: int, walk: bool, store: bool, pick: bool) -> Spec:
        shape = {"VOCAB": 129280, "K": k, "TILE_V": TILE_V, "TILE_R": tile, "TILE_K": TILE_K}
        flags = {"NARROW": True, "GATHER": walk, "BASE": walk, "STORE": store, "PICK": pick}
        constants = {**shape, **flags, "REJECTION": False, "CHUNK": CHUNK, "PAIRS": True}
        types = {**signature, "x": "*fp32"} if walk else signature
        return Spec(
            name,
            head_rows,
            types,
            constants,
            {"num_warps": 8, "num_stages": 4},
            overrides={t: options(TARGETS[t], walk, tile) for t in TARGETS},
        )

    out = [spec(f"head_sample_{t}", t, 4096, False, False, True) for t in ROW_TILES]
    out += [spec(f"walk_{t}", t, 256, True, False, True) for t in ROW_TILES]
    return [
        *out,
        *(spec(f"logits_{t}", t, 4096, False, True, False) for t in (64, 16)),
        *_descriptor_specs(),
        *logits.KERNELS,
        *pingpong.KERNELS,
        *pingwalk.KERNELS,
    ]


def _descriptor_specs() -> list[Spec]:
    """Every form on Hopper of the walk of rank 256 and of stored logits."""
    hopper, counts = TARGETS["sm_90"], (1, 16, 32, 64, 128, 256, 512, 2048)

    def spec(name: str, fn: Any, form: Form, arrays: dict[str, str], constants: dict[str, Any]) -> Spec:
        integers = dict.fromkeys(("rows", "row_tiles", "base_units", "out_units", "programs"), "i32")
        types = {k: t for k, t in {**arrays, **integers, "out": "*fp32"}.items() if k in fn.arg_names}
        sizes = {"VOCAB": 129280, "TILE_V": form.tile_v, "TILE_R": form.tile_r, "UNIT": 16}
        name = f"{name}_{form.tile_v}x{form.tile_r}"
        return Spec(name, fn, types, {**sizes, **constants}, form.options, targets=("sm_90",))

    walks = dict.fromkeys(f for n in counts if (f := walk_form(n, 256, hopper)) is not None)
    wides = dict.fromkeys(f for n in counts if (f := wide_form(n, 4096, hopper)) is not None)
    flags = {"K": 256, "STORE": False, "PICK": True, "REJECTION": False}
    tables = {"x": "*fp32", "base": "*fp32", "previous": "*i64", **KEY, **PARTS}
    out = []
    for form in walks:
        arrays = {**tables, "w": f"tensordesc<bf16[{form.tile_v}, 256]>"}
        out.append(spec("walk_rows", walk_rows, form, arrays, {**flags, "CHUNK": form.chunk}))
    for form in wides:
        arrays = {k: f"tensordesc<bf16[{n}, {TILE_K}]>" for k, n in (("w", form.tile_v), ("x", form.tile_r))}
        out.append(spec("logits_wide", head_wide, form, arrays, {"K": 4096, "TILE_K": TILE_K}))
    return out


KERNELS = _specs()
