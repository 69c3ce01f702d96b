"""Attention and everything between the matrices (norms, streams, compressors, indexer)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from firesteel.core import RowBatch
from firesteel.ops.reference.tail import ReferenceOps
from firesteel.ops.triton import attention, compress, hyper, indexer, norms
from firesteel.ops.triton.target import Target
from firesteel.ops.types import (
    Compressor,
    CompressorMemory,
    Hyper,
    HyperHead,
    Linear,
    Norm,
    PassContext,
    Rope,
)


def f32_weight(w: Linear) -> Tensor:
    """The float32 [N, K] data of an unquantised weight."""
    data = getattr(w.data, "data", w.data)
    assert isinstance(data, Tensor) and data.dtype == torch.float32, "stream coefficients are float32"
    return data


class SparseOps(ReferenceOps):
    """Ops between the matrices as Triton kernels."""

    device: torch.device
    target: Target
    store: torch.dtype

    @property
    def cache(self) -> torch.dtype:  # type: ignore[override]
        """K=V rows and entries lie on the bf16 grid in official numerics."""
        return self.store

    @property
    def _official(self) -> bool:
        return self.numerics.official

    @property
    def _form(self) -> torch.dtype | None:
        """The type in which quantised products read what a norm gives."""
        return self.target.fp8 if self.numerics.official else None

    def begin_pass(
        self,
        rows: RowBatch,
        page_table: Tensor,
        page_size: int,
        ropes: Mapping[str, Rope],
        ratios: Sequence[int],
    ) -> PassContext:
        tables = (rows.tokens, rows.positions, rows.slots, rows.first, rows.last, rows.valid)
        assert all(t.is_contiguous() for t in tables), "kernels find row r of a table at its r-th element"
        rotary = {name: norms.rotary(rope, rows.positions, 1) for name, rope in ropes.items()}
        entry = {r: norms.rotary(ropes["compress"], rows.positions, r) for r in ratios}
        return PassContext(rows, page_table, page_size, rotary, entry)

    def embed(self, table: Tensor, tokens: Tensor, streams: int) -> Tensor:
        return norms.embed(table, tokens, streams, self.store, self._official)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return norms.norm(x, norm, self.store, self._official, self._form)

    def tap(self, h: Tensor) -> Tensor:
        return norms.tap(h, self.store, self._official)

    def hyper_pre(self, h: Tensor, w: Hyper, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
        return hyper.pre(h, self._mixer(w, norm))

    def hyper_step(
        self, f: Tensor, h: Tensor, post: Tensor, comb: Tensor, w: Hyper, norm: Norm
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return hyper.step(f, h, post, comb, self._mixer(w, norm))

    def _mixer(self, w: Hyper | HyperHead, norm: Norm) -> hyper.Mixer:
        iters = w.iters if isinstance(w, Hyper) else 0
        return hyper.Mixer(
            f32_weight(w.fn), w.base, w.scale, iters, w.eps, w.rms_eps, norm, self.store, self._official, self._form
        )  # fmt: skip

    def hyper_post(self, f: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        return hyper.post(f, h, post, comb, self.store, self._official)

    def hyper_head(self, h: Tensor, w: HyperHead, norm: Norm) -> tuple[Tensor, Tensor]:
        return hyper.head(h, self._mixer(w, norm))

    def query(self, q: Tensor, heads: int, eps: float, table: str, ctx: PassContext) -> Tensor:
        return norms.query(q, heads, eps, norms.angles(table, ctx), self.store, self._official)

    def queries(self, q: Tensor, heads: int, eps: float, table: str, ctx: PassContext) -> Tensor:
        """Heads as they come, with a note that ``attention`` is to norm and turn them."""
        return attention.unturned(q, heads, eps)

    def key_value(self, kv: Tensor, norm: Norm, table: str, ctx: PassContext) -> Tensor:
        return norms.key_value(kv, norm, norms.angles(table, ctx), self.store, self._official)

    def compress(self, x: Tensor, w: Compressor, memory: CompressorMemory, ctx: PassContext) -> None:
        compress.compress(self.linear_f32(x, w.project), w, memory, ctx, self._official)

    def index_select(
        self,
        q: Tensor,
        head_weights: Tensor,
        keys: Tensor,
        ratio: int,
        top_k: int,
        rope_dim: int,
        table: str,
        ctx: PassContext,
    ) -> Tensor:
        return indexer.index_select(q, head_weights, keys, ratio, top_k, table, ctx, self._official)

    def attention(
        self,
        q: Tensor,
        kv: Tensor,
        window: Tensor,
        span: int,
        sinks: Tensor,
        entries: Tensor | None,
        ratio: int,
        selection: Tensor | None,
        table: str,
        ctx: PassContext,
    ) -> Tensor:
        return attention.attention(
            q,
            kv,
            window,
            span,
            sinks,
            entries,
            ratio,
            selection,
            table,
            ctx,
            self.store,
            self._official,
            self.target,
        )

    def block_attention(
        self, q: Tensor, kv: Tensor, window: Tensor, span: int, sinks: Tensor, table: str, ctx: PassContext
    ) -> Tensor:
        assert ctx.block > 0, "a drafting pass states its block width"
        return attention.attention(
            q, kv, window, span, sinks, None, 0, None, table, ctx, self.store, self._official, self.target
        )

    def store_window(self, window: Tensor, kv: Tensor, ctx: PassContext) -> None:
        norms.store_ring(window, kv, ctx.rows)
