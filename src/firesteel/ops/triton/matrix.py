"""Weights in their formats, and the ops that multiply by them.

Official numerics on a device: FP8 linears as e4m3 by e4m3, FP4 experts as e2m1 by e4m3 (block-scaled
instructions where the target has them, else unpacked to e4m3 in registers), all else as bfloat16.
float32 numerics dequantise in registers and multiply in IEEE float32: exact rather than quick.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firesteel.checkpoint.codecs import QTensor
from firesteel.ops.reference.linear import is_quantised
from firesteel.ops.reference.tail import ReferenceOps
from firesteel.ops.triton import folded, fp4, linear, moe, route, together
from firesteel.ops.triton.aside import Aside
from firesteel.ops.triton.launch import cdiv, dense
from firesteel.ops.triton.linear import GROUP, Scratch, Weight
from firesteel.ops.triton.moe import Arithmetic, Grouped
from firesteel.ops.triton.streams import Unsummed
from firesteel.ops.triton.target import Target
from firesteel.ops.types import Experts, Linear, Router

LOG = logging.getLogger("firesteel.ops")


class FormatError(ValueError):
    """A weight that these kernels cannot hold; the message says which."""


@dataclass
class Fp4Weight:
    """An FP4 weight [n, k] as blocks of a single "expert"."""

    blocks: Grouped | folded.Weights
    n: int
    k: int

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.blocks.nbytes


def round_up(n: int) -> int:
    """n in whole blocks of 128."""
    return cdiv(n, GROUP) * GROUP


class MatrixOps(ReferenceOps):
    """Linears, router and experts as Triton kernels."""

    device: torch.device
    target: Target
    store: torch.dtype
    scratch: Scratch
    aside: Aside | None  # a second stream, where that is worth its launches

    # ---- weights ----------------------------------------------------------------
    def linear_weight(self, weight: QTensor) -> Linear:
        return self.stacked_weight([weight])

    def stacked_weight(self, weights: Sequence[QTensor]) -> Linear:
        formats = {w.format for w in weights}
        n, k = sum(w.shape[0] for w in weights), weights[0].shape[1]
        data: Weight | Fp4Weight
        if formats == {"fp8"}:
            data = linear.fp8_parts(weights, self.device, self.target)
        elif formats == {"fp4"}:
            data = Fp4Weight(self._blocks([weights]), n, k)
        elif formats <= {"bf16", "f32"}:
            data = linear.dense_parts(weights, self.device)
        else:
            raise FormatError(
                f"one input's weights must share a format to be stacked, found {sorted(formats)}"
            )
        return Linear(data, n, k, is_quantised(weights[0]))

    def expert_weights(self, w1: Sequence[QTensor], w2: Sequence[QTensor], w3: Sequence[QTensor]) -> Experts:
        pairs: list[Sequence[QTensor]] = list(zip(w1, w3, strict=True))
        single: list[Sequence[QTensor]] = [(w,) for w in w2]
        up, down = self._grouped(pairs), self._grouped(single)
        if type(up) is not type(down):  # both products have one form: h is handed over in it
            up, down = self._grouped(pairs, fold=False), self._grouped(single, fold=False)
        return Experts(up, down, len(w1), w1[0].shape[0], is_quantised(w1[0]))

    def _grouped(
        self, experts: Sequence[Sequence[QTensor]], *, fold: bool = True
    ) -> Grouped | folded.Weights:
        """One product of all experts; each part is padded to whole blocks of 128 outputs."""
        if experts[0][0].format == "fp4":
            return self._blocks(experts, fold=fold)
        kind, (_, k) = experts[0][0].format, experts[0][0].shape
        if kind == "fp8":
            made = [[linear.fp8_parts([w], self.device, self.target) for w in parts] for parts in experts]
            scale = torch.cat([w.scale for parts in made for w in parts if w.scale is not None])
        else:
            made = [[linear.dense_parts([w], self.device) for w in parts] for parts in experts]
            scale = self.scratch.arrived
        padded = [self._pad(w.data) for parts in made for w in parts]
        m = sum(p.shape[0] for p in padded) // len(experts)
        return Grouped("rows", torch.cat(padded), scale, m, round_up(k))

    def _pad(self, data: Tensor) -> Tensor:
        n, k = data.shape
        if n % GROUP == 0 and k % GROUP == 0:
            return data
        out = torch.zeros(round_up(n), round_up(k), dtype=torch.float32, device=data.device)
        out[:n, :k] = data.to(torch.float32)
        return out.to(data.dtype)

    def _blocks(self, experts: Sequence[Sequence[QTensor]], *, fold: bool = True) -> Grouped | folded.Weights:
        """FP4 blocks of all experts; the big buffers are filled one part at a time."""
        pairs = self.target.scaled_mma and self.numerics.official
        if fold and not pairs and (made := self._folded(experts)) is not None:
            return made
        layout, k = ("pairs" if pairs else "planes"), round_up(experts[0][0].shape[1])
        lines = [cdiv(w.shape[0], GROUP) for w in experts[0]]
        total, blocks = sum(lines) * len(experts), k // GROUP
        shape = (GROUP, 64) if pairs else (2, GROUP, 32)
        data = torch.empty(total, blocks, *shape, dtype=torch.uint8, device=self.device)
        scale = torch.empty(total, blocks, GROUP, dtype=torch.int32, device=self.device)
        at = 0
        for parts in experts:
            for w, n in zip(parts, lines, strict=True):
                assert w.scale is not None and w.shape[0] <= n * GROUP, "experts of one shape"
                data[at : at + n], scale[at : at + n] = fp4.pack_blocks(
                    w.data.to(self.device),
                    w.scale.to(self.device),
                    pairs=pairs,
                    unsigned_zero=self.target.fnuz,
                )
                at += n
        return Grouped(layout, data, scale, sum(lines) * GROUP, k)

    def _folded(self, experts: Sequence[Sequence[QTensor]]) -> folded.Weights | None:
        """As ``_blocks`` with group scales in e4m3 codes; None where the target or the scales do not allow it."""
        if not self.numerics.official or self.target.fnuz:
            return None
        lines = [cdiv(w.shape[0], GROUP) for w in experts[0]]
        total, k = sum(lines) * len(experts), round_up(experts[0][0].shape[1])
        data = torch.empty(total, k // GROUP, 2, GROUP, 32, dtype=torch.uint8, device=self.device)
        scale = torch.empty(total, k // GROUP, GROUP, dtype=torch.int32, device=self.device)
        base = torch.empty(total, k // GROUP, dtype=torch.float32, device=self.device)
        at, exact = 0, []
        for parts in experts:
            for w, n in zip(parts, lines, strict=True):
                assert w.scale is not None and w.shape[0] <= n * GROUP, "experts of one shape"
                planes = fp4.pack_blocks(
                    w.data.to(self.device), w.scale.to(self.device), pairs=False, unsigned_zero=False
                )
                data[at : at + n], scale[at : at + n], base[at : at + n], fits = fp4.fold_blocks(*planes)
                exact.append(fits)
                at += n
        if not bool(torch.stack(exact).all()):
            LOG.warning("FP4 weights with scales more than 2^11 apart in one block keep the slower form")
            return None
        return folded.Weights(data, scale, base, sum(lines) * GROUP, k)

    def share_input(self, weights: Sequence[tuple[Linear, bool]]) -> None:
        if self.numerics.official and all(isinstance(w.data, Weight) for w, _ in weights):
            together.group_of([(w.data if w.quantised else w.data.narrow(), wide) for w, wide in weights])

    # ---- one product ----------------------------------------------------------------
    def linear(self, x: Tensor, w: Linear) -> Tensor:
        official = self.numerics.official
        if isinstance(w.data, Fp4Weight):
            return self._fp4_linear(x, w.data, quantise=official, dtype=self.store)
        if (made := self._from_group(x, w.data)) is not None:
            return made
        if official and w.quantised:
            q, scale = linear.quantised(x, round_up(w.k), self.target.fp8)
            return linear.product(q, scale, w.data, "fp8", self.store, self.scratch, self.target)
        return self._plain(x, w, self.store)

    def linear_f32(self, x: Tensor, w: Linear) -> Tensor:
        if isinstance(w.data, Fp4Weight):
            return self._fp4_linear(x, w.data, quantise=False, dtype=torch.float32)
        made = self._from_group(x, w.data)
        return self._plain(x, w, torch.float32) if made is None else made

    def _from_group(self, x: Tensor, w: Weight) -> Tensor | None:
        """The product if one launch made it with others of its input, or makes it now."""
        forms = getattr(x, "quantised_forms", None)
        if forms is None:
            return None
        if (made := forms.pop(id(w), None)) is not None:
            if self.aside is not None and self.scratch is self.aside.scratch:
                self.aside.hold([made])
            return made
        if w.group is None or x.shape[0] == 0 or x.dtype != torch.bfloat16:
            return None
        if (how := together.manner_for(w.group, x.shape[0], self.target)) is None:
            return None
        form = (
            linear.quantised(x, x.shape[1], self.target.fp8)
            if w.group.fp8 is not None
            else (x, w.group.table)
        )
        found = together.products(dense(x), form, w.group, self.store, self.scratch, self.target, how)
        forms.update({id(member): result for (member, _), result in zip(w.group.members, found, strict=True)})
        return forms.pop(id(w))

    def _plain(self, x: Tensor, w: Linear, dtype: torch.dtype) -> Tensor:
        """Without quantising x; bfloat16 products in official numerics where the weight is bfloat16's."""
        kind, x = self._values(x, w.data)
        return linear.product(x, None, w.data, kind, dtype, self.scratch, self.target)

    def _values(self, x: Tensor, w: Weight) -> tuple[str, Tensor]:
        """(kind, x as its operand): activations of official numerics lie on the bf16 grid."""
        x = dense(x)
        if self.numerics.official and w.narrow().data.dtype == torch.bfloat16:
            return "bf16", x.to(torch.bfloat16)
        return "f32", x.to(torch.float32)

    def _fp4_linear(self, x: Tensor, w: Fp4Weight, *, quantise: bool, dtype: torch.dtype) -> Tensor:
        """As one expert that all rows go to."""
        rows, tile = x.shape[0], 16
        slots = cdiv(rows, tile)
        out = torch.empty(rows, w.n, dtype=dtype, device=x.device)
        if rows == 0:
            return out
        line = torch.arange(slots * tile, dtype=torch.int32, device=x.device)
        order, owner = torch.where(line < rows, line, -1), torch.zeros_like(line[:slots])
        padded = torch.zeros(slots * tile, w.blocks.k, dtype=torch.float32, device=x.device)
        padded[:rows, : w.k] = x
        how = moe.arithmetic("fp8" if quantise else "f32", self.target)
        scale, blocks = padded, w.blocks
        wide = isinstance(blocks, folded.Weights)
        if quantise:
            padded, scale = linear.quantise(padded, w.blocks.k, self.target.fp8)
            scale = dense(scale.t()) if wide else scale
        elif isinstance(blocks, Grouped) and blocks.format == "pairs":
            raise FormatError(f"no float32 product with an FP4 weight [{w.n}, {w.k}] on {self.target.name}")
        padded = fp4.arranged(padded) if wide else padded
        return moe.down(blocks, how, padded, scale, moe.Tiles(order, owner), out, self.scratch)

    def output(self, o: Tensor, wo_a: Sequence[Linear], wo_b: Linear) -> Tensor:
        x, first = dense(o.flatten(1)), wo_a[0]
        if len(wo_a) > 1 and first.n % linear.TILE_M == 0 and first.k % GROUP == 0:
            whole = self._joined(wo_a, self.numerics.official)
            kind, x = self._values(x, whole)
            made = self._output_codes(x, whole, kind, wo_b, len(wo_a))
            if made is not None:
                return made
            low = linear.product(
                x, None, whole, kind, self.store, self.scratch, self.target, groups=len(wo_a)
            )
        else:
            groups = x.unflatten(-1, (len(wo_a), -1))
            low = torch.cat([self.linear(groups[:, g], w) for g, w in enumerate(wo_a)], dim=-1)
        return self.linear(low, wo_b)

    def _output_codes(self, x: Tensor, wo_a: Weight, kind: str, wo_b: Linear, groups: int) -> Tensor | None:
        """``output`` if the first product can hand over its results quantised."""
        if not wo_b.quantised or not isinstance(wo_b.data, Weight) or wo_b.data.scale is None:
            return None
        if (form := linear.codes(x, wo_a, kind, self.scratch, self.target, groups)) is None:
            return None
        return linear.product(*form, wo_b.data, "fp8", self.store, self.scratch, self.target)

    @staticmethod
    def _joined(parts: Sequence[Linear], official: bool) -> Weight:
        """The groups' weights as one; made at first use, the parts become views of it."""
        head = parts[0].data
        if head.joined is None:
            made: list[Weight] = [p.data.narrow() if official else p.data for p in parts]
            data = torch.cat([w.data for w in made])
            for p, view in zip(parts, data.chunk(len(parts)), strict=True):
                p.data.data = view
            head.joined = Weight(data, None, 1)
        return head.joined

    # ---- experts --------------------------------------------------------------------
    def route(self, x: Tensor, w: Router, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.linear_f32(x, w.gate)
        return route.route(logits, w.bias, w.table, tokens, w.top_k, w.scale)

    def moe(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        experts: Experts,
        shared: Sequence[tuple[Linear, Linear]],
        limit: float,
        valid: Tensor | None = None,
        begun: Sequence[Tensor] | None = None,
        whole: bool = True,
    ) -> Tensor:
        """``valid`` bool [R]: rows that may get anything finite instead, and whose experts are not read."""
        rows, top = ids.shape
        if rows == 0:
            return torch.empty(0, x.shape[1], dtype=self.store, device=x.device)
        w13: Grouped | folded.Weights = experts.w13
        w2: Grouped | folded.Weights = experts.w2
        official = self.numerics.official
        quantised = official and experts.quantised
        how = self._expert_arithmetic(w13, quantised)
        if quantised:
            xq, xs = linear.quantised(x, w13.k, self.target.fp8)
        else:
            xq = torch.nn.functional.pad(dense(x), (0, w13.k - x.shape[1]))
            xq = dense(xq.to(torch.bfloat16 if how.kind == "bf16" else torch.float32))
            xs = xq  # not read
        wide = isinstance(w13, folded.Weights)
        tiles = moe.plan(
            dense(ids),
            experts.count,
            moe.tile_of(rows, top, experts.count, folded=wide),
            valid,
            xs if wide else None,
        )
        h, hs = moe.up(
            w13,
            how,
            xq,
            xs,
            dense(weights),
            tiles,
            top,
            limit,
            self.scratch,
            official=official,
            round_h=quantised,
        )
        parts = torch.empty(rows * top, x.shape[1], dtype=self.store, device=x.device)
        moe.down(w2, how, h, hs, tiles, parts, self.scratch)
        if begun is None:
            begun = [self._shared(x, *pair, limit) for pair in shared]
        else:
            assert self.aside is not None, "who has begun something has a second stream"
            self.aside.join()
        if not whole:
            return Unsummed(parts, begun, valid).tensor(rows)
        return moe.combine(parts, begun, rows, self.store, valid)

    def begin_shared(
        self, x: Tensor, router: Router, shared: Sequence[tuple[Linear, Linear]], limit: float
    ) -> Sequence[Tensor] | None:
        """On a second stream, whose kernels have counters of their own.

        What both streams use is made before they part: quantised forms of ``x``, and products that the
        gate and the shared experts make in one launch.
        """
        if self.aside is None or x.shape[0] == 0 or not hasattr(x, "quantised_forms"):
            return None
        if any(isinstance(w.data, Fp4Weight) for pair in shared for w in pair):
            return None
        up = self._ups(x, router.gate, shared)
        if up is None and self.numerics.official and any(w13.quantised for w13, _ in shared):
            linear.quantised(x, round_up(x.shape[1]), self.target.fp8)
        self.aside.hold(up or ())
        with self.aside.fork(self):
            if up is None:
                up = [self.linear(x, w13) for w13, _ in shared]
            return [self._second(u, w2, limit) for u, (_, w2) in zip(up, shared, strict=True)]

    def _ups(self, x: Tensor, gate: Linear, shared: Sequence[tuple[Linear, Linear]]) -> list[Tensor] | None:
        """First products of the shared experts if the gate's launch makes them; its own is kept for ``route``."""
        made = self._from_group(x, gate.data) if isinstance(gate.data, Weight) else None
        if made is None:
            return None
        forms: dict[Any, Any] = x.quantised_forms  # type: ignore[attr-defined]
        forms[id(gate.data)] = made
        return [forms.pop(id(w13.data)) for w13, _ in shared]

    def _expert_arithmetic(self, w: Grouped | folded.Weights, quantised: bool) -> Arithmetic:
        if quantised:
            return moe.arithmetic("fp8", self.target)
        narrow = self.numerics.official and w.data.dtype == torch.bfloat16
        return moe.arithmetic("bf16" if narrow else "f32", self.target)

    def _shared(self, x: Tensor, w13: Linear, w2: Linear, limit: float) -> Tensor:
        return self._second(self.linear(x, w13), w2, limit)

    def _second(self, up: Tensor, w2: Linear, limit: float) -> Tensor:
        form = self.target.fp8 if self.numerics.official and w2.quantised else None
        return self.linear(moe.apply_swiglu(up, limit, form), w2)
