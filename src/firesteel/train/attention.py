"""Attention of the trainable V4: window, compressors, indexer, output projection.

A whole sequence per forward pass, no cache. Written apart from the serving
engine, so that each can be checked against the other. Module and parameter
names are the official checkpoint's; routed experts are stacked ([E, out, in]).

Documents are packed into rows: each starts at a multiple of ``V4Train.align``
(window and every compress ratio divide it), so a packed document computes what
it would compute alone at position 0: rotary attention depends on distances
only, and windows never straddle documents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firesteel.models.deepseek_v4.config import LayerKind, V4Config, yarn_bounds
from firesteel.train.quant import fake_act, fake_fp4_act, fake_fp8_weight, hadamard


@dataclass(frozen=True)
class Numerics:
    """``quantise``: apply the deployed roundings; ``dtype``: of activations between ops."""

    quantise: bool = True
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Packing:
    """Which document each token and entry belongs to.

    ``blocks`` int32 [B, S/align]: document number of every aligned block of a row.
    ``long_rows``: the first rows of the batch, where the indexer runs; documents of the other
    rows must have at most ``index_topk`` compressed entries, so that it would choose them all.
    """

    blocks: Tensor
    long_rows: int


def rms(x: Tensor, eps: float) -> Tensor:
    """Unweighted RMS norm over the last axis, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rotary_table(dim: int, theta: float, cfg: V4Config, yarn: bool, length: int) -> Tensor:
    """float32 [length, dim/2, 2]: cos and sin of every position and pair."""
    pair = torch.arange(0, dim, 2, dtype=torch.float64)
    freq = theta ** (-pair / dim)
    if yarn and cfg.yarn is not None:
        lo, hi = yarn_bounds(dim, theta, cfg.yarn)
        ramp = ((torch.arange(dim // 2) - lo) / max(hi - lo, 1e-3)).clamp(0, 1).double()
        freq = freq * (1 - ramp) + freq / cfg.yarn.factor * ramp
    angle = torch.arange(length, dtype=torch.float64)[:, None] * freq
    return torch.stack([angle.cos(), angle.sin()], -1).float()


def rotate(x: Tensor, table: Tensor, inverse: bool = False) -> Tensor:
    """Rotate interleaved pairs of the last ``2 * table.shape[-2]`` channels; float32 in and out.

    ``table`` must broadcast against ``x`` without its channel axis: [..., pairs, 2].
    """
    width = 2 * table.shape[-2]
    nope, rope = x.split([x.shape[-1] - width, width], -1)
    even, odd = rope.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = table.unbind(-1)
    if inverse:
        sin = -sin
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([nope, turned], -1)


class Weight(nn.Module):
    """One named matrix or vector, ``<name>.weight``; a matrix starts normal with std ``gain/sqrt(in)``."""

    def __init__(self, *shape: int, gain: float = 1.0):
        super().__init__()
        start = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * gain * shape[-1] ** -0.5
        self.weight = nn.Parameter(start)


class Linear8(Weight):
    """FP8 linear [N, K]: block-quantised weight, activations e4m3 per 128 channels."""

    def __init__(self, out: int, inp: int, num: Numerics, gain: float = 1.0):
        super().__init__(out, inp, gain=gain)
        self.num = num

    def deployed(self) -> Tensor:
        """The weight in the compute dtype, rounded as it will be stored."""
        w = fake_fp8_weight(self.weight) if self.num.quantise else self.weight
        return w.to(self.num.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(fake_act(x) if self.num.quantise else x, self.deployed())


class Linear16(Weight):
    """BF16 linear [N, K]; the result is float32."""

    def __init__(self, out: int, inp: int, num: Numerics):
        super().__init__(out, inp)
        self.num = num

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(self.num.dtype)).float()


class Norm(Weight):
    """RMS norm with a weight that is stored in BF16."""

    def __init__(self, size: int, eps: float, num: Numerics):
        super().__init__(size)
        self.eps, self.num = eps, num

    def forward(self, x: Tensor) -> Tensor:
        """Any float dtype in; the compute dtype out."""
        return (rms(x, self.eps) * self.weight.to(self.num.dtype).float()).to(self.num.dtype)


class Compressor(nn.Module):
    """Pools every ``ratio`` tokens into one entry, per channel by softmax; overlapping if ratio is 4."""

    def __init__(self, cfg: V4Config, ratio: int, dim: int, num: Numerics):
        super().__init__()
        self.ratio, self.dim, self.overlap = ratio, dim, ratio == 4
        width = dim * (2 if self.overlap else 1)
        self.wkv = Linear16(width, cfg.hidden_size, num)
        self.wgate = Linear16(width, cfg.hidden_size, num)
        self.norm = Norm(dim, cfg.rms_norm_eps, num)
        self.ape = nn.Parameter(torch.zeros(ratio, width))

    def forward(self, x: Tensor, table: Tensor, entry_doc: Tensor) -> Tensor:
        """``x`` [B, S, D], ``entry_doc`` [B, S/ratio] -> rotated entries [B, S/ratio, dim], float32."""
        value = self.wkv(x).unflatten(1, (-1, self.ratio))
        score = self.wgate(x).unflatten(1, (-1, self.ratio)) + self.ape
        if self.overlap:
            value, score = self.widen(value, score, entry_doc)
        pooled = (score.softmax(2) * value).sum(2).to(self.norm.num.dtype)
        return rotate(self.norm(pooled).float(), table[:: self.ratio])

    def widen(self, value: Tensor, score: Tensor, entry_doc: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, r, 2d] -> [B, T, 2r, d]: A half of the window before, then B half of this one."""

        def shift(x: Tensor) -> Tensor:
            return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)

        a, b = value.split(self.dim, -1)
        score_a, score_b = score.split(self.dim, -1)
        same = entry_doc[:, 1:] == entry_doc[:, :-1]
        same = torch.cat([same.new_zeros(len(entry_doc), 1), same], 1)[:, :, None, None]
        score_a = torch.where(same, shift(score_a), -math.inf)
        return torch.cat([shift(a), b], 2), torch.cat([score_a, score_b], 2)


class Indexer(nn.Module):
    """Scores compressed entries for every query token."""

    spin: Tensor

    def __init__(self, cfg: V4Config, num: Numerics):
        super().__init__()
        self.heads, self.dim, self.num = cfg.index_n_heads, cfg.index_head_dim, num
        self.wq_b = Linear8(self.heads * self.dim, cfg.q_lora_rank, num)
        self.weights_proj = Linear16(self.heads, cfg.hidden_size, num)
        self.compressor = Compressor(cfg, 4, self.dim, num)
        self.register_buffer("spin", hadamard(self.dim), persistent=False)

    def forward(self, x: Tensor, qa: Tensor, table: Tensor, entry_doc: Tensor) -> Tensor:
        """Scores [B, S, S/4], float32, before any masking."""
        q = rotate(self.wq_b(qa).unflatten(-1, (self.heads, self.dim)).float(), table[:, None])
        k = self.compressor(x, table, entry_doc)
        if self.num.quantise:
            q = fake_fp4_act((q @ self.spin).to(self.num.dtype))
            k = fake_fp4_act((k @ self.spin).to(self.num.dtype))
        q, k = q.to(self.num.dtype), k.to(self.num.dtype)
        omega = self.weights_proj(x) * (self.dim * self.heads) ** -0.5
        dots = (q.flatten(1, 2) @ k.transpose(1, 2)).unflatten(1, (-1, self.heads))
        return (dots.float().relu() * omega[..., None]).sum(2)


class Attention(nn.Module):
    """Window attention plus compressed entries, one shared K=V head, sinks, grouped output projection."""

    def __init__(self, cfg: V4Config, layer: int, num: Numerics):
        super().__init__()
        self.kind, self.ratio = cfg.kind(layer), cfg.compress_ratios[layer]
        self.heads, self.dim, self.nope = cfg.num_attention_heads, cfg.head_dim, cfg.nope_dim
        self.window, self.eps, self.num = cfg.sliding_window, cfg.rms_norm_eps, num
        self.topk, self.groups = cfg.index_topk, cfg.o_groups
        size, lora = cfg.hidden_size, cfg.q_lora_rank
        self.wq_a = Linear8(lora, size, num)
        self.q_norm = Norm(lora, self.eps, num)
        self.wq_b = Linear8(self.heads * self.dim, lora, num)
        self.wkv = Linear8(self.dim, size, num)
        self.kv_norm = Norm(self.dim, self.eps, num)
        self.attn_sink = nn.Parameter(torch.zeros(self.heads))
        self.wo_a = Linear8(self.groups * cfg.o_lora_rank, self.heads * self.dim // self.groups, num)
        self.wo_b = Linear8(size, self.groups * cfg.o_lora_rank, num, gain=0.3)
        if self.kind is not LayerKind.WINDOW:
            self.compressor = Compressor(cfg, self.ratio, self.dim, num)
        if self.kind is LayerKind.CSA:
            self.indexer = Indexer(cfg, num)

    def store(self, row: Tensor) -> Tensor:
        """A float32 K=V row or entry as the cache holds it: e4m3 per 64 unrotated channels, rest BF16."""
        row = row.to(self.num.dtype)
        if not self.num.quantise:
            return row
        nope, rope = row.split([self.nope, self.dim - self.nope], -1)
        return torch.cat([fake_act(nope, 64), rope], -1)

    def forward(self, x: Tensor, table: Tensor, pack: Packing, align: int) -> tuple[Tensor, Tensor]:
        """``x`` [B, S, D] normed -> ([B, S, D], the indexer's loss, a float32 scalar)."""
        qa = self.q_norm(self.wq_a(x))
        q = self.query(qa, table[:, None])
        kv = self.store(rotate(self.kv_norm(self.wkv(x)).float(), table))
        near, near_kv = self.near_scores(q, kv, pack, align)
        index_loss = x.new_zeros((), dtype=torch.float32)
        if self.kind is LayerKind.WINDOW:
            out, _ = self.blend(q, near, near_kv, None, None)
        else:
            doc = pack.blocks.repeat_interleave(align // self.ratio, 1)
            entries = self.store(self.compressor(x, table, doc))
            seen = self.visible(pack, align)
            keep, score = self.select(x, qa, table, doc, seen, pack.long_rows)
            far = (q.flatten(1, 2) @ entries.transpose(1, 2)).unflatten(1, (-1, self.heads)).float()
            far = torch.where(keep[:, :, None], far * self.dim**-0.5, -math.inf)
            out, share = self.blend(q, near, near_kv, far, entries)
            if score is not None and self.training:
                assert share is not None
                index_loss = indexer_loss(score, share[: score.shape[0]], seen[: score.shape[0]])
        return self.output(out, table[:, None]), index_loss

    def query(self, qa: Tensor, table: Tensor) -> Tensor:
        """Low-rank queries [B, R, q_lora] -> rotated ones [B, R, H, d]; ``table`` broadcasts over heads."""
        q = rms(self.wq_b(qa).unflatten(-1, (self.heads, self.dim)), self.eps).to(self.num.dtype)
        return rotate(q.float(), table).to(self.num.dtype)

    def output(self, out: Tensor, table: Tensor) -> Tensor:
        """Attended values [B, R, H, d] -> [B, R, D]: rotated back, projected in groups."""
        out = rotate(out.float(), table, inverse=True).to(self.num.dtype)
        grouped = out.flatten(2).unflatten(-1, (self.groups, -1))
        wo_a = self.wo_a.deployed().unflatten(0, (self.groups, -1))
        low = torch.cat([F.linear(grouped[..., g, :], wo_a[g]) for g in range(self.groups)], -1)
        return self.wo_b(low)

    def near_scores(self, q: Tensor, kv: Tensor, pack: Packing, align: int) -> tuple[Tensor, Tensor]:
        """Scaled, masked window scores [B, nb, W, H, 2W] (float32) and their keys [B, nb, 2W, d].

        A block of W queries sees its own block and the one before it.
        """
        w = self.window
        block = kv.unflatten(1, (-1, w))
        before = torch.cat([torch.zeros_like(block[:, :1]), block[:, :-1]], 1)
        keys = torch.cat([before, block], 2)
        score = q.unflatten(1, (-1, w)).flatten(2, 3) @ keys.transpose(-1, -2)
        score = score.unflatten(2, (w, self.heads)).float() * self.dim**-0.5
        i = torch.arange(w, device=q.device)[:, None]
        j = torch.arange(2 * w, device=q.device)[None]
        band = (j > i) & (j <= i + w)
        doc = pack.blocks.repeat_interleave(align // w, 1)
        joined = doc[:, 1:] == doc[:, :-1]
        joined = torch.cat([joined.new_zeros(len(doc), 1), joined], 1)
        ok = band & ((j >= w) | joined[:, :, None, None])
        return torch.where(ok[:, :, :, None], score, -math.inf), keys

    def visible(self, pack: Packing, align: int) -> Tensor:
        """bool [B, S, T]: entry t is complete at the query and of the same document."""
        length = pack.blocks.shape[1] * align
        pos = torch.arange(length, device=pack.blocks.device)
        entry = torch.arange(length // self.ratio, device=pos.device)
        done = entry[None] < ((pos + 1) // self.ratio)[:, None]
        query_doc, entry_doc = (pack.blocks.repeat_interleave(n, 1) for n in (align, align // self.ratio))
        return done & (query_doc[:, :, None] == entry_doc[:, None])

    def select(
        self, x: Tensor, qa: Tensor, table: Tensor, doc: Tensor, seen: Tensor, rows: int
    ) -> tuple[Tensor, Tensor | None]:
        """(entries to attend [B, S, T], indexer scores of the first ``rows`` rows or None)."""
        if self.kind is not LayerKind.CSA or rows == 0:
            return seen, None
        score = self.indexer(x[:rows].detach(), qa[:rows].detach(), table, doc[:rows])
        if seen.shape[-1] <= self.topk:
            return seen, score
        masked = torch.where(seen[:rows], score, -math.inf).detach()
        best = masked.topk(self.topk, -1).indices
        chosen = torch.zeros_like(seen[:rows]).scatter(-1, best, True) & seen[:rows]
        return torch.cat([chosen, seen[rows:]]), score

    def blend(
        self, q: Tensor, near: Tensor, near_kv: Tensor, far: Tensor | None, entries: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """One softmax over window, entries and sink: (output [B, S, H, d], mean share [B, S, T])."""
        blocks, w = near.shape[1:3]
        sink = self.attn_sink.float()[:, None]
        top = torch.maximum(near.amax(-1, keepdim=True), sink)
        if far is not None:
            far = far.unflatten(1, (blocks, w))
            top = torch.maximum(top, far.amax(-1, keepdim=True))
        top = top.detach()
        e_near = torch.exp(near - top)
        total = e_near.sum(-1, keepdim=True) + torch.exp(sink - top)
        if far is None:
            p = (e_near / total).to(self.num.dtype)
            return (p.flatten(2, 3) @ near_kv).unflatten(2, (w, -1)).flatten(1, 2), None
        assert entries is not None
        e_far = torch.exp(far - top)
        total = total + e_far.sum(-1, keepdim=True)
        p = (e_near / total).to(self.num.dtype)
        p_far = (e_far / total).to(self.num.dtype)
        out = (p.flatten(2, 3) @ near_kv).flatten(1, 2) + p_far.flatten(1, 3) @ entries
        return out.unflatten(1, (-1, self.heads)), p_far.detach().float().mean(3).flatten(1, 2)


def indexer_loss(score: Tensor, share: Tensor, seen: Tensor) -> Tensor:
    """Cross-entropy of the indexer's softmax against the attention's mass over visible entries."""
    mass = share.sum(-1, keepdim=True)
    logp = torch.where(seen, score, -1e9).log_softmax(-1)
    each = -(share / mass.clamp(min=1e-6) * logp).sum(-1)
    live = (mass[..., 0] > 1e-4).float()
    return (each * live).sum() / live.sum().clamp(min=1)
