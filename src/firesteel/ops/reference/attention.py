"""Window and compressed attention, compressors and indexer in plain torch.

State is addressed by absolute position. A key of the running pass is read from
the pass, an older one from the slot's ring; both hold the stored form, so the
split does not show in the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from firesteel.core import RowBatch
from firesteel.ops.reference import numeric
from firesteel.ops.reference.linear import ReferenceMatrix
from firesteel.ops.types import Compressor, CompressorMemory, Linear, Norm, PassContext, Rope

ROW_BLOCK = 64  # rows whose keys are gathered at once; bounds memory, not results
ENTRY_TILE = 64  # entries per softmax tile
KV_GROUP = 64  # dims per stored scale
INDEX_GROUP = 32


def angles(rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin float32 [R, rd/2] of absolute positions."""
    turn = positions.to(torch.float32).unsqueeze(-1) * rope.inv_freq
    return torch.cos(turn), torch.sin(turn)


def bmm_rows(a: Tensor, b: Tensor) -> Tensor:
    """Batched product with one item per row; a lone item is doubled, since a
    single product may be split over threads and a batch is not."""
    if a.shape[0] == 1:
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return torch.bmm(a, b)


def gather_window(
    ring: Tensor, data: Tensor, rows: RowBatch, pick: Tensor, span: int
) -> tuple[Tensor, Tensor]:
    """The ``span`` stored rows up to and including each picked row.

    ring [S, n, w] by position mod n, data [R, w] of this pass, pick int64 [B].
    Returns ([B, span, w], valid bool [B, span]); invalid lanes are zero.
    """
    size = ring.shape[1]
    back = torch.arange(span - 1, -1, -1, device=data.device)
    want = rows.positions[pick].unsqueeze(-1) - back
    first = rows.first[pick].unsqueeze(-1)
    start = rows.positions[first]
    in_pass = want >= start
    here = data[(first + (want - start)).clamp_min(0).clamp_max(data.shape[0] - 1)]
    slot = rows.slots[pick].unsqueeze(-1)
    there = ring[slot, want.clamp_min(0) % size]
    valid = want >= 0
    got = torch.where(in_pass.unsqueeze(-1), here, there)
    return got.masked_fill(~valid.unsqueeze(-1), 0.0), valid


def store_ring(ring: Tensor, data: Tensor, rows: RowBatch) -> None:
    """Write the last ``n`` rows of every slot into its ring [S, n, w]; the rest go to scratch."""
    size = ring.shape[1]
    keep = rows.valid & (rows.positions[rows.last] - rows.positions < size)
    slot = torch.where(keep, rows.slots, ring.shape[0] - 1)
    ring[slot, rows.positions % size] = data


def entry_address(ctx: PassContext, ratio: int, slots: Tensor, entries: Tensor) -> tuple[Tensor, Tensor]:
    """(page, place) of entry indices; slots broadcast against entries."""
    per_page = ctx.page_size // ratio
    column = (entries // per_page).clamp_max(ctx.page_table.shape[1] - 1)
    return ctx.page_table[slots, column], entries % per_page


class ReferenceAttention(ReferenceMatrix):
    """Queries, stored rows, compressors, selection and attention."""

    def begin_pass(
        self,
        rows: RowBatch,
        page_table: Tensor,
        page_size: int,
        ropes: Mapping[str, Rope],
        ratios: Sequence[int],
    ) -> PassContext:
        rotary = {name: angles(rope, rows.positions) for name, rope in ropes.items()}
        entry = {r: angles(ropes["compress"], rows.positions // r * r) for r in ratios}
        return PassContext(rows, page_table, page_size, rotary, entry)

    def query(self, q: Tensor, heads: int, eps: float, table: str, ctx: PassContext) -> Tensor:
        q = self.act(numeric.rms(q.unflatten(-1, (heads, -1)), eps))
        cos, sin = ctx.rotary[table]
        return self.act(numeric.rotate(q, cos.unsqueeze(1), sin.unsqueeze(1)))

    def key_value(self, kv: Tensor, norm: Norm, table: str, ctx: PassContext) -> Tensor:
        cos, sin = ctx.rotary[table]
        return self._stored(self.act(numeric.rotate(self.norm(kv, norm), cos, sin)), 2 * cos.shape[-1])

    def _stored(self, row: Tensor, rope_dim: int) -> Tensor:
        """Round a K=V row or entry to what the cache holds."""
        if not self.numerics.official:
            return row
        n = row.shape[-1] - rope_dim
        return torch.cat((numeric.e4m3_groups(row[..., :n], KV_GROUP), row[..., n:]), dim=-1)

    def _indexed(self, x: Tensor) -> Tensor:
        """Round an indexer query or key: Hadamard, then FP4."""
        if not self.numerics.official:
            return x
        return numeric.e2m1_groups(self.act(numeric.hadamard(x)), INDEX_GROUP)

    # ---- compressors ------------------------------------------------------
    def compress(self, x: Tensor, w: Compressor, memory: CompressorMemory, ctx: PassContext) -> None:
        rows = ctx.rows
        width = w.dim * (2 if w.overlap else 1)
        raw = self.linear_f32(x, w.project)
        raw = torch.cat((raw[:, :width], raw[:, width:] + w.ape[rows.positions % w.ratio]), dim=-1)
        closing = torch.nonzero(rows.valid & ((rows.positions + 1) % w.ratio == 0)).flatten()
        if closing.numel():
            value, score = self._pool_inputs(raw, w, memory.raw, rows, closing)
            share = torch.exp(score - score.amax(1, keepdim=True))  # softmax over dim 1 depends on the batch
            entry = (share / share.sum(1, keepdim=True) * value).sum(1)
            cos, sin = ctx.entry_rotary[w.ratio]
            entry = self.act(numeric.rotate(self.norm(self.act(entry), w.norm), cos[closing], sin[closing]))
            entry = self._indexed(entry) if w.index else self._stored(entry, w.rope_dim)
            page, place = entry_address(ctx, w.ratio, rows.slots[closing], rows.positions[closing] // w.ratio)
            memory.entries[page, place] = entry
        store_ring(memory.raw, raw, rows)

    @staticmethod
    def _pool_inputs(
        raw: Tensor, w: Compressor, ring: Tensor, rows: RowBatch, closing: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(values, scores) [B, tokens, dim] that one entry pools."""
        width = raw.shape[1] // 2
        got, valid = gather_window(ring, raw, rows, closing, w.ratio * (2 if w.overlap else 1))
        value, score = got[..., :width], got[..., width:]
        if w.overlap:  # A half of the window before, B half of this one
            n, d = w.ratio, w.dim
            value = torch.cat((value[:, :n, :d], value[:, n:, d:]), dim=1)
            score = torch.cat((score[:, :n, :d], score[:, n:, d:]), dim=1)
        return value, score.masked_fill(~valid.unsqueeze(-1), float("-inf"))

    # ---- indexer ----------------------------------------------------------
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
        rows = ctx.rows
        most = (ctx.rows.max_position + 1) // ratio  # visible entries of the longest row
        visible = (rows.positions + 1) // ratio
        index = torch.arange(-(-most // ENTRY_TILE) * ENTRY_TILE, device=q.device)  # whole tiles only
        if most <= top_k:
            return torch.where(index < visible.unsqueeze(-1), index, -1)
        cos, sin = ctx.rotary[table]
        q = self._indexed(self.act(numeric.rotate(q, cos.unsqueeze(1), sin.unsqueeze(1))))
        scores = torch.full((rows.count, index.shape[0]), float("-inf"), device=q.device)
        for lo in range(0, index.shape[0], ENTRY_TILE):
            tile = index[lo : lo + ENTRY_TILE]
            for at in range(0, rows.count, ROW_BLOCK):
                block = slice(at, at + ROW_BLOCK)
                k = keys[entry_address(ctx, ratio, rows.slots[block, None], tile)]
                dots = bmm_rows(q[block], k.transpose(1, 2)).clamp_min(0.0)
                scores[block, lo : lo + ENTRY_TILE] = (dots * head_weights[block, :, None]).sum(1)
        hidden = index >= visible.unsqueeze(-1)
        scores = self.act(scores).masked_fill(hidden, float("-inf"))
        best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :top_k]
        best = best.masked_fill(hidden.gather(1, best), index.shape[0])  # sorts last
        best = torch.sort(best, dim=-1).values
        return best.masked_fill(best == index.shape[0], -1)

    # ---- attention --------------------------------------------------------
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
        rows, out = ctx.rows, torch.empty_like(q)
        for at in range(0, rows.count, ROW_BLOCK):
            pick = torch.arange(at, min(at + ROW_BLOCK, rows.count), device=q.device)
            state = RunningSoftmax(q[pick], sinks, self)
            state.add(*gather_window(window, kv, rows, pick, span))
            if entries is not None:
                chosen = self._chosen(selection, ratio, rows, pick)
                for lo in range(0, chosen.shape[1], ENTRY_TILE):
                    tile = chosen[:, lo : lo + ENTRY_TILE]
                    valid = tile >= 0
                    address = entry_address(ctx, ratio, rows.slots[pick, None], tile.clamp_min(0))
                    state.add(entries[address].masked_fill(~valid.unsqueeze(-1), 0.0), valid)
            out[pick] = state.result()
        cos, sin = ctx.rotary[table]
        return self.act(numeric.rotate(self.act(out), cos.unsqueeze(1), sin.unsqueeze(1), inverse=True))

    @staticmethod
    def _chosen(selection: Tensor | None, ratio: int, rows: RowBatch, pick: Tensor) -> Tensor:
        """Entry indices [B, n], -1 padded to a whole number of tiles."""
        if selection is not None:
            chosen = selection[pick]
        else:
            visible = (rows.positions[pick] + 1) // ratio
            index = torch.arange((rows.max_position + 1) // ratio, device=visible.device)
            chosen = torch.where(index < visible.unsqueeze(-1), index, -1)
        return torch.nn.functional.pad(chosen, (0, -chosen.shape[1] % ENTRY_TILE), value=-1)

    def output(self, o: Tensor, wo_a: Sequence[Linear], wo_b: Linear) -> Tensor:
        groups = o.flatten(1).unflatten(-1, (len(wo_a), -1))
        low = torch.cat([self.act(self.linear_f32(groups[:, g], w)) for g, w in enumerate(wo_a)], dim=-1)
        return self.linear(low, wo_b)

    def store_window(self, window: Tensor, kv: Tensor, ctx: PassContext) -> None:
        store_ring(window, kv, ctx.rows)


class RunningSoftmax:
    """Running softmax over key tiles; a fully masked tile changes no bit.

    The sink starts it: maximum = sink, denominator = 1, value 0.
    """

    def __init__(self, q: Tensor, sinks: Tensor, ops: ReferenceMatrix):
        self.q, self.ops, self.scale = q, ops, q.shape[-1] ** -0.5
        self.top = sinks.expand(q.shape[0], -1).unsqueeze(-1)
        self.total = torch.ones_like(self.top)
        self.acc = torch.zeros_like(q)

    def add(self, keys: Tensor, valid: Tensor) -> None:
        """keys [B, n, d] are keys and values; invalid lanes hold zeros."""
        scores = bmm_rows(self.q, keys.transpose(1, 2)) * self.scale
        scores = scores.masked_fill(~valid.unsqueeze(1), float("-inf"))
        top = torch.maximum(self.top, scores.amax(-1, keepdim=True))
        fade = torch.exp(self.top - top)
        p = torch.exp(scores - top)
        self.total = self.total * fade + p.sum(-1, keepdim=True)
        self.acc = self.acc * fade + bmm_rows(self.ops.act(p), keys)
        self.top = top

    def result(self) -> Tensor:
        """[B, H, d]."""
        return self.acc / self.total
