"""``NativeOps``: every op of the interface as one call into the library."""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from firesteel.checkpoint.codecs import QTensor
from firesteel.core import RowBatch
from firesteel.ops.native.draft import NativeDraft
from firesteel.ops.native.library import dense, function, pack, record
from firesteel.ops.reference.linear import is_quantised
from firesteel.ops.types import (
    Compressor,
    CompressorMemory,
    ContextWeights,
    DraftStage,
    Experts,
    Hyper,
    HyperHead,
    Linear,
    Norm,
    Numerics,
    PassContext,
    Rope,
    Router,
)

PASS = struct.Struct("9q")
STAGE = struct.Struct("4qddqd4qddqd4qdqd5qd6qd5qd")
MAX_STREAMS, MAX_GROUPS, MAX_STAGES = 8, 64, 16
NO_PAGES = (0, 0, 1, 0)
KEY = "native"  # of what belongs to a weight or a pass and is made once


def once(owner: Any, make: Any) -> Any:
    """What ``make(owner)`` gave the first time; kept in the (frozen) owner itself."""
    found = owner.__dict__.get(KEY)
    if found is None:
        found = owner.__dict__[KEY] = make(owner)
    return found


def _norm(norm: Norm) -> tuple[int, float, Tensor | None]:
    """(weight pointer or 0, epsilon, what keeps the pointer alive)."""
    if norm.weight is None:
        return 0, norm.eps, None
    weight = norm.weight.to(torch.float32).contiguous()
    return weight.data_ptr(), norm.eps, weight


def _hyper(w: Hyper | HyperHead) -> tuple[Any, ...]:
    """(fn, base, scale, iters, eps, rms_eps, keepalive)."""
    base, scale = dense(w.base), dense(w.scale)
    iters = w.iters if isinstance(w, Hyper) else 0
    return w.fn.data.address, base.data_ptr(), scale.data_ptr(), iters, w.eps, w.rms_eps, (base, scale)


def _compressor(w: Compressor) -> tuple[Any, ...]:
    """(project, ape, norm weight, norm eps, ratio, dim, overlap, index, keepalive)."""
    ape = dense(w.ape)
    weight, eps, keep = once(w.norm, _norm)
    shape = (w.ratio, w.dim, int(w.overlap), int(w.index))
    return w.project.data.address, ape.data_ptr(), weight, eps, *shape, (ape, keep)


def _stage(w: DraftStage) -> tuple[Any, ...]:
    """(address of the stage's record, head dim, keepalive); field by field as StageWeight in stage.cpp."""
    fields: list[Any] = []
    for hyper, norm in ((w.attn_hyper, w.attn_norm), (w.ffn_hyper, w.ffn_norm)):
        fields += (*once(hyper, _hyper)[:-1], *once(norm, _norm)[:2])
    fields += (w.wq_a.data.address, w.wq_b.data.address, w.wkv.data.address)
    fields += (*once(w.q_norm, _norm)[:2], *once(w.kv_norm, _norm)[:2])
    sinks, low = dense(w.sinks), [x.data.address for x in w.wo_a]
    shared = [x.data.address for pair in w.shared for x in pair] or [0]
    lists = [record(struct.Struct(f"{len(values)}q"), *values) for values in (low, shared)]
    at = [ctypes.addressof(values) for values in lists]
    assert len(low) <= MAX_GROUPS, f"at most {MAX_GROUPS} output groups, got {len(low)}"
    fields += (sinks.data_ptr(), w.heads, w.wkv.n, w.span, len(low), w.eps, at[0], w.wo_b.data.address)
    fields += (*once(w.router, _router)[:-1], w.router.top_k, w.router.scale)
    experts = w.experts
    fields += (experts.w13.address, experts.w2.address, experts.count, len(w.shared), at[1], w.limit)
    made = record(STAGE, *fields)
    return ctypes.addressof(made), w.wkv.n, (made, lists, sinks)


class _Context:
    """Context weights as the library sees them; the rings' addresses are found once."""

    def __init__(self, w: ContextWeights):
        taps, stages = w.project.k // w.project.n, len(w.stages)
        assert stages <= MAX_STAGES, f"at most {MAX_STAGES} draft stages, got {stages}"
        weight, eps, _ = once(w.norm, _norm)
        self.layout = "5qd6q" + "2qd2q" * stages
        self.taps, self.more = taps, f"{3 + taps}q"  # of every pass
        self.project = (w.project.data.address, weight, eps)
        self.stages = [(wkv.data.address, *once(norm, _norm)[:2]) for wkv, norm in w.stages]
        self.windows: list[Tensor] = []
        self.placed: tuple[Any, ...] = ()

    def of(self, windows: Sequence[Tensor]) -> tuple[Any, ...]:
        """Fields of every stage: wkv, norm weight, epsilon, ring, rows of the ring."""
        known = self.windows
        if len(known) != len(windows) or not all(map(operator.is_, known, windows)):
            assert len(windows) == len(self.stages), "one ring per stage"
            assert all(window.is_contiguous() for window in windows), "rings are written in place"
            pairs = zip(self.stages, windows, strict=True)
            self.placed = tuple(f for s, ring in pairs for f in (*s, ring.data_ptr(), ring.shape[1]))
            self.windows = list(windows)
        return self.placed


def _router(w: Router) -> tuple[Any, ...]:
    """(gate, bias or 0, table or 0, keepalive)."""
    bias = None if w.bias is None or w.table is not None else dense(w.bias)
    table = None if w.table is None else dense(w.table)
    assert bias is not None or table is not None, "a router has a bias or a table"
    at = [0 if t is None else t.data_ptr() for t in (bias, table)]
    return w.gate.data.address, *at, (bias, table)


def _addresses(owner: Any, weights: Any, make: Callable[[], list[int]]) -> int:
    """Address of a list of weight records, remade only when ``weights`` is another object."""
    found = owner.__dict__.get(KEY)
    if found is None or found[0] is not weights:
        values = make() or [0]
        made = record(struct.Struct(f"{len(values)}q"), *values)
        found = owner.__dict__[KEY] = (weights, ctypes.addressof(made), made)
    return int(found[1])


def _pages(entries: Tensor) -> tuple[int, int, int, int]:
    """(data, page stride, entries per page, dim) of [P, n, dim] whose pages may lie apart."""
    stride, lines, dim = entries.stride(), entries.shape[1], entries.shape[2]
    assert stride[2] == 1 and stride[1] == dim, "a page's entries lie one after another"
    return entries.data_ptr(), stride[0], lines, dim


class _Pass:
    """A pass as the library sees it; lives in the context's scratch."""

    def __init__(self, ctx: PassContext):
        r = ctx.rows
        self.keep = [dense(t) for t in (r.positions, r.slots, r.first, r.last, r.valid, ctx.page_table)]
        fields = [t.data_ptr() for t in self.keep]
        self.record = record(PASS, *fields, r.count, ctx.page_table.shape[1], ctx.page_size)
        self.address = ctypes.addressof(self.record)
        self.turns: dict[str | int, tuple[int, int, int, Any]] = {}

    def turn(self, table: str | int, pair: tuple[Tensor, Tensor]) -> tuple[int, int, int, Any]:
        """(cos, sin, half, keepalive) of a rotary table or of a ratio's entries."""
        found = self.turns.get(table)
        if found is None:
            cos, sin = dense(pair[0]), dense(pair[1])
            found = self.turns[table] = (cos.data_ptr(), sin.data_ptr(), cos.shape[-1], (cos, sin))
        return found


def _pass(ctx: PassContext) -> _Pass:
    found = ctx.scratch.get(KEY)
    if found is None:
        found = ctx.scratch[KEY] = _Pass(ctx)
    return found


class NativeOps(NativeDraft):
    """The compiled CPU backend; the few ops not written here are the plain torch ones."""

    name = "native"

    def __init__(self, numerics: Numerics):
        super().__init__(numerics)
        self._linear = function("linear", "5q")
        self._linear_f32 = function("linear_f32", "5q")
        self._embed = function("embed", "7q")
        self._norm = function("norm", "4qd2q")
        self._hyper_pre = function("hyper_pre", "8qddqd4q")
        self._hyper_head = function("hyper_head", "8qddqd4q")
        self._hyper_post = function("hyper_post", "9q")
        self._tap = function("tap", "6q")
        self._query = function("query", "5qd5q")
        self._key_value = function("key_value", "5qd5q")
        self._compress = function("compress", "5qd14q")
        self._index_select = function("index_select", "17q")
        self._attention = function("attention", "22q")
        self._store_window = function("store_window", "6q")
        self._output = function("output", "7q")
        self._route = function("route", "7qd3q")
        self._moe = function("moe", "11qd2q")
        self._draft_stage = function("draft_stage", "13q")
        self._angles = function("angles", "7q")
        self._tables: dict[
            Any, tuple[Mapping[str, Rope], Tensor, Tensor]
        ] = {}  # ropes stay alive: ids are unique

    # ---- weights ------------------------------------------------------------
    def linear_weight(self, weight: QTensor) -> Linear:
        return self.stacked_weight([weight])

    def stacked_weight(self, weights: Sequence[QTensor]) -> Linear:
        packed = pack([weights], is_quantised(weights[0]))
        return Linear(packed, *packed.shape, packed.quantised)

    def expert_weights(self, w1: Sequence[QTensor], w2: Sequence[QTensor], w3: Sequence[QTensor]) -> Experts:
        quantised = is_quantised(w1[0])
        w13 = pack([(a, b) for a, b in zip(w1, w3, strict=True)], quantised)
        return Experts(w13, pack([(w,) for w in w2], quantised), len(w1), w1[0].shape[0], quantised)

    # ---- one pass ------------------------------------------------------------
    def begin_pass(
        self,
        rows: RowBatch,
        page_table: Tensor,
        page_size: int,
        ropes: Mapping[str, Rope],
        ratios: Sequence[int],
    ) -> PassContext:
        """As the plain one; all angles of equally wide tables lie in one tensor."""
        if len({rope.dim for rope in ropes.values()}) != 1:
            return super().begin_pass(rows, page_table, page_size, ropes, ratios)
        names, positions = list(ropes), dense(rows.positions)
        turns, steps = self._turns(ropes, tuple(ratios))
        angle = torch.empty(turns.shape[0], rows.count, turns.shape[1])
        given = (positions.data_ptr(), rows.count, turns.data_ptr(), steps.data_ptr(), *turns.shape)
        self._angles(*given, angle.data_ptr())
        pairs = list(zip(torch.cos(angle).unbind(), torch.sin(angle).unbind(), strict=True))
        entry = dict(zip(ratios, pairs[len(names) :], strict=True))
        return PassContext(rows, page_table, page_size, dict(zip(names, pairs, strict=False)), entry)

    def _turns(self, ropes: Mapping[str, Rope], ratios: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(frequencies [T, half], int64 ratios [T]) of the rows' tables and of the entries; made once."""
        found = self._tables.get((id(ropes), ratios))
        if found is None or found[0] is not ropes:
            compress = [ropes["compress"].inv_freq] if ratios else []
            turns = torch.stack([rope.inv_freq for rope in ropes.values()] + compress * len(ratios))
            steps = torch.tensor([1] * len(ropes) + list(ratios))
            found = self._tables[id(ropes), ratios] = (ropes, turns, steps)
        return found[1], found[2]

    # ---- rows ---------------------------------------------------------------
    def embed(self, table: Tensor, tokens: Tensor, streams: int) -> Tensor:
        table, tokens = dense(table), dense(tokens)
        rows, d = tokens.shape[0], table.shape[1]
        out = torch.empty(rows, streams, d)
        self._embed(table.data_ptr(), tokens.data_ptr(), rows, streams, d, out.data_ptr(), self._flags())
        return out

    def linear(self, x: Tensor, w: Linear) -> Tensor:
        x = dense(x)
        rows = x.shape[0]
        out = torch.empty(rows, w.n)
        self._linear(x.data_ptr(), rows, w.data.address, out.data_ptr(), self._flags())
        return out

    def linear_f32(self, x: Tensor, w: Linear) -> Tensor:
        x = dense(x)
        rows = x.shape[0]
        out = torch.empty(rows, w.n)
        self._linear_f32(x.data_ptr(), rows, w.data.address, out.data_ptr(), self._flags())
        return out

    def logits(self, x: Tensor, head: Linear) -> Tensor:
        return self.linear_f32(x, head)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        x, n = dense(x), x.shape[-1]
        out = torch.empty_like(x)
        weight, eps, _ = once(norm, _norm)
        self._norm(x.data_ptr(), x.numel() // n, n, weight, eps, out.data_ptr(), self._flags())
        return out

    def hyper_pre(self, h: Tensor, w: Hyper, norm: Norm) -> tuple[Tensor, Tensor, Tensor]:
        h = dense(h)
        rows, hc, d = h.shape
        assert hc <= MAX_STREAMS, f"at most {MAX_STREAMS} streams, got {hc}"
        x, post, comb = torch.empty(rows, d), torch.empty(rows, hc), torch.empty(rows, hc, hc)
        fn, base, scale, iters, eps, rms_eps, _ = once(w, _hyper)
        weight, norm_eps, _ = once(norm, _norm)
        coefficients = (fn, base, scale, iters, eps, rms_eps, weight, norm_eps)
        out = (x.data_ptr(), post.data_ptr(), comb.data_ptr())
        self._hyper_pre(h.data_ptr(), rows, hc, d, *coefficients, *out, self._flags())
        return x, post, comb

    def hyper_head(self, h: Tensor, w: HyperHead, norm: Norm) -> tuple[Tensor, Tensor]:
        h = dense(h)
        rows, hc, d = h.shape
        assert hc <= MAX_STREAMS, f"at most {MAX_STREAMS} streams, got {hc}"
        z, x = torch.empty(rows, d), torch.empty(rows, d)
        fn, base, scale, iters, eps, rms_eps, _ = once(w, _hyper)
        weight, norm_eps, _ = once(norm, _norm)
        coefficients = (fn, base, scale, iters, eps, rms_eps, weight, norm_eps)
        self._hyper_head(
            h.data_ptr(), rows, hc, d, *coefficients, x.data_ptr(), z.data_ptr(), 0, self._flags()
        )
        return z, x

    def hyper_post(self, f: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        f, h, post, comb = dense(f), dense(h), dense(post), dense(comb)
        rows, hc, d = h.shape
        out = torch.empty(rows, hc, d)
        given = (f.data_ptr(), h.data_ptr(), post.data_ptr(), comb.data_ptr())
        self._hyper_post(*given, rows, hc, d, out.data_ptr(), self._flags())
        return out

    def tap(self, h: Tensor) -> Tensor:
        h = dense(h)
        rows, hc, d = h.shape
        out = torch.empty(rows, d)
        self._tap(h.data_ptr(), rows, hc, d, out.data_ptr(), self._flags())
        return out

    def context_rows(
        self,
        passes: Sequence[tuple[Sequence[Tensor], PassContext]],
        w: ContextWeights,
        windows: Sequence[Tensor],
        first: Tensor | None = None,
    ) -> None:
        """As the plain one, in one call; only rows that a ring keeps are computed."""
        made: _Context = once(w, _Context)
        _, hc, d = passes[0][0][0].shape
        fields: list[int] = []
        half, kept = 0, []
        for streams, ctx in passes:
            assert len(streams) == made.taps, "a tap per column block of the projection"
            shared, given = _pass(ctx), [dense(h) for h in streams]
            cos, sin, half, _ = shared.turn(w.table, ctx.rotary[w.table])
            fields += (shared.address, cos, sin, *(h.data_ptr() for h in given))
            kept.append(given)  # alive until the call
        assert first is None or (first.is_contiguous() and first.shape[0] >= windows[0].shape[0])
        chosen = (windows[0].shape[0], 0 if first is None else first.data_ptr())
        head = (made.taps, hc, d, *made.project, len(made.stages), len(passes), half, self._flags(), *chosen)
        call = function("context_rows", made.layout + made.more * len(passes))
        call(*head, *made.of(windows), *fields)

    # ---- attention ------------------------------------------------------------
    def query(self, q: Tensor, heads: int, eps: float, table: str, ctx: PassContext) -> Tensor:
        q = dense(q)
        rows, d = q.shape[0], q.shape[1] // heads
        out = torch.empty(rows, heads, d)
        cos, sin, half, _ = _pass(ctx).turn(table, ctx.rotary[table])
        self._query(q.data_ptr(), rows, heads, d, 0, eps, cos, sin, half, out.data_ptr(), self._flags())
        return out

    def key_value(self, kv: Tensor, norm: Norm, table: str, ctx: PassContext) -> Tensor:
        kv = dense(kv)
        rows, d = kv.shape
        out = torch.empty(rows, d)
        weight, eps, _ = once(norm, _norm)
        cos, sin, half, _ = _pass(ctx).turn(table, ctx.rotary[table])
        self._key_value(kv.data_ptr(), rows, 1, d, weight, eps, cos, sin, half, out.data_ptr(), self._flags())
        return out

    def compress(self, x: Tensor, w: Compressor, memory: CompressorMemory, ctx: PassContext) -> None:
        x, raw = dense(x), memory.raw
        assert raw.is_contiguous(), "the ring is written in place"
        fixed = once(w, _compressor)
        shared = _pass(ctx)
        cos, sin, half, _ = shared.turn(w.ratio, ctx.entry_rotary[w.ratio])
        places = (raw.data_ptr(), raw.shape[1], *_pages(memory.entries))
        self._compress(shared.address, x.data_ptr(), *fixed[:-1], *places, cos, sin, half, self._flags())

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
        q, head_weights = dense(q), dense(head_weights)
        rows, heads, d = q.shape
        width = min((ctx.rows.max_position + 1) // ratio, top_k)
        out = torch.empty(rows, width, dtype=torch.int64)
        shared = _pass(ctx)
        cos, sin, half, _ = shared.turn(table, ctx.rotary[table])
        given = (q.data_ptr(), heads, d, head_weights.data_ptr(), *_pages(keys))
        shape = (ratio, top_k, width)
        self._index_select(shared.address, *given, *shape, cos, sin, half, out.data_ptr(), self._flags())
        return out

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
        q, kv, window, sinks = dense(q), dense(kv), dense(window), dense(sinks)
        rows, heads, d = q.shape
        out = torch.empty(rows, heads, d)
        shared = _pass(ctx)
        cos, sin, half, _ = shared.turn(table, ctx.rotary[table])
        pages, chosen, selected = NO_PAGES, 0, 0
        if selection is not None:
            selection = dense(selection)
            chosen, selected = selection.data_ptr(), selection.shape[1]
        if entries is not None and (selection is None or selected):
            pages = _pages(entries)
        keys = (shared.address, kv.data_ptr(), window.data_ptr(), window.shape[1], d)
        given = (q.data_ptr(), heads, span, sinks.data_ptr(), *pages, ratio, chosen, selected)
        self._attention(*keys, *given, cos, sin, half, out.data_ptr(), 0, self._flags())
        return out

    def block_attention(
        self, q: Tensor, kv: Tensor, window: Tensor, span: int, sinks: Tensor, table: str, ctx: PassContext
    ) -> Tensor:
        q, kv, window, sinks = dense(q), dense(kv), dense(window), dense(sinks)
        rows, heads, d = q.shape
        out = torch.empty(rows, heads, d)
        shared = _pass(ctx)
        cos, sin, half, _ = shared.turn(table, ctx.rotary[table])
        keys = (shared.address, kv.data_ptr(), window.data_ptr(), window.shape[1], d)
        given = (q.data_ptr(), heads, span, sinks.data_ptr(), *NO_PAGES, 1, 0, 0)
        self._attention(*keys, *given, cos, sin, half, out.data_ptr(), 1, self._flags())
        return out

    def draft_stage(self, h: Tensor, w: DraftStage, window: Tensor, ctx: PassContext) -> Tensor:
        """As the plain one, in one call."""
        h, tokens = dense(h), dense(ctx.rows.tokens)
        _, hc, d = h.shape
        assert hc <= MAX_STREAMS, f"at most {MAX_STREAMS} streams, got {hc}"
        assert window.is_contiguous(), "a ring is one block"
        out = torch.empty(h.shape)
        address, _, _ = once(w, _stage)
        shared = _pass(ctx)
        cos, sin, half, _ = shared.turn(w.table, ctx.rotary[w.table])
        given = (address, shared.address, h.data_ptr(), hc, d, tokens.data_ptr())
        ring = (window.data_ptr(), window.shape[1])
        self._draft_stage(*given, *ring, cos, sin, half, out.data_ptr(), self._flags())
        return out

    def store_window(self, window: Tensor, kv: Tensor, ctx: PassContext) -> None:
        kv = dense(kv)
        assert window.is_contiguous(), "the window is written in place"
        at = window.data_ptr()
        self._store_window(_pass(ctx).address, kv.data_ptr(), at, window.shape[1], window.shape[2], at)

    def output(self, o: Tensor, wo_a: Sequence[Linear], wo_b: Linear) -> Tensor:
        o = dense(o)
        rows, groups = o.shape[0], len(wo_a)
        assert groups <= MAX_GROUPS, f"at most {MAX_GROUPS} output groups, got {groups}"
        low = _addresses(wo_b, wo_a, lambda: [w.data.address for w in wo_a])
        out = torch.empty(rows, wo_b.n)
        last = wo_b.data.address
        self._output(o.data_ptr(), rows, groups, low, last, out.data_ptr(), self._flags())
        return out

    # ---- experts ----------------------------------------------------------------
    def route(self, x: Tensor, w: Router, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, tokens = dense(x), dense(tokens)
        rows, k = x.shape[0], w.top_k
        ids, weights = torch.empty(rows, k, dtype=torch.int64), torch.empty(rows, k)
        gate, bias, table, _ = once(w, _router)
        given = (x.data_ptr(), rows, gate, bias, table, tokens.data_ptr(), k, w.scale)
        self._route(*given, ids.data_ptr(), weights.data_ptr(), self._flags())
        return ids, weights

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
        x, ids, weights = dense(x), dense(ids), dense(weights)
        rows, d = x.shape
        out = torch.empty(rows, d)
        list_of = _addresses(experts, shared, lambda: [w.data.address for pair in shared for w in pair])
        given = (x.data_ptr(), rows, d, ids.shape[1], ids.data_ptr(), weights.data_ptr())
        packed = (experts.w13.address, experts.w2.address, experts.count, len(shared), list_of)
        self._moe(*given, *packed, limit, out.data_ptr(), self._flags())
        return out
