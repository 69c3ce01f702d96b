"""The rest of the trainable V4: experts, hyper-connections, the model."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firesteel.models.deepseek_v4.config import LayerKind, V4Config
from firesteel.train.attention import (
    Attention,
    Linear8,
    Norm,
    Numerics,
    Packing,
    Weight,
    rms,
    rotary_table,
)
from firesteel.train.quant import fake_act, fake_fp4_weight
from firesteel.train.sinkhorn import sinkhorn


class Gate(Weight):
    """Routing: sqrt(softplus) scores; experts by token id (hash layers) or by score + bias."""

    bias: Tensor
    tid2eid: Tensor

    def __init__(self, cfg: V4Config, hashed: bool, num: Numerics):
        super().__init__(cfg.n_routed_experts, cfg.hidden_size)
        self.topk, self.scale, self.hashed, self.num = (
            cfg.num_experts_per_tok, cfg.routed_scaling_factor, hashed, num,
        )  # fmt: skip
        if hashed:
            self.register_buffer("tid2eid", hash_table(cfg))
        else:
            self.register_buffer("bias", torch.zeros(cfg.n_routed_experts))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """``x`` [N, D], ``tokens`` [N] -> dense routing weights [N, E], float32, zero where not chosen."""
        w = self.weight.to(self.num.dtype).float()
        score = F.softplus(F.linear(x.float(), w)).sqrt()
        ids = (
            self.tid2eid[tokens] if self.hashed else (score + self.bias).detach().topk(self.topk, -1).indices
        )
        part = score.gather(1, ids)
        part = part / (part.sum(-1, keepdim=True) + 1e-20) * self.scale
        return torch.zeros_like(score).scatter(1, ids, part)


def hash_table(cfg: V4Config) -> Tensor:
    """int64 [V, k]: k distinct experts for every token id, from a fixed seed."""
    gen = torch.Generator().manual_seed(20)
    order = torch.rand(cfg.vocab_size, cfg.n_routed_experts, generator=gen).argsort(-1)
    return order[:, : cfg.num_experts_per_tok].contiguous()


class Shared(nn.Module):
    """The expert every token passes."""

    def __init__(self, cfg: V4Config, num: Numerics):
        super().__init__()
        size, inner, self.limit = cfg.hidden_size, cfg.moe_intermediate_size, cfg.swiglu_limit
        self.w1, self.w3 = Linear8(inner, size, num), Linear8(inner, size, num)
        self.w2 = Linear8(size, inner, num, gain=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(swiglu(self.w1(x), self.w3(x), self.limit).to(x.dtype))


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clip(up), float32."""
    return F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


class Experts(nn.Module):
    """Routed experts, computed densely: unrouted ones get weight zero.

    For a dozen small experts three large matrix products beat gathering rows.
    """

    def __init__(self, cfg: V4Config, num: Numerics):
        super().__init__()
        count, size, inner = cfg.n_routed_experts, cfg.hidden_size, cfg.moe_intermediate_size
        self.limit, self.num = cfg.swiglu_limit, num
        self.w1 = nn.Parameter(torch.randn(count, inner, size) * size**-0.5)
        self.w3 = nn.Parameter(torch.randn(count, inner, size) * size**-0.5)
        self.w2 = nn.Parameter(torch.randn(count, size, inner) * 0.3 * inner**-0.5)

    def deployed(self, w: Tensor) -> Tensor:
        """A stack of weights in the compute dtype, rounded as it will be stored."""
        return (fake_fp4_weight(w) if self.num.quantise else w).to(self.num.dtype)

    def forward(self, x: Tensor, routing: Tensor) -> Tensor:
        """``x`` [N, D], ``routing`` [N, E] -> [N, D]."""
        count, inner = self.w1.shape[:2]
        seen = fake_act(x) if self.num.quantise else x
        gate = F.linear(seen, self.deployed(self.w1).flatten(0, 1)).unflatten(-1, (count, inner))
        up = F.linear(seen, self.deployed(self.w3).flatten(0, 1)).unflatten(-1, (count, inner))
        z = (swiglu(gate, up, self.limit) * routing[:, :, None]).to(self.num.dtype)
        z = fake_act(z) if self.num.quantise else z
        w2 = self.deployed(self.w2).transpose(1, 2).flatten(0, 1)
        return z.flatten(1) @ w2


class MoE(nn.Module):
    def __init__(self, cfg: V4Config, layer: int, num: Numerics):
        super().__init__()
        self.gate = Gate(cfg, cfg.is_hash_layer(layer), num)
        self.experts = Experts(cfg, num)
        self.shared_experts = Shared(cfg, num)

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` [B, S, D], ``tokens`` [B, S] -> ([B, S, D], tokens per expert [E], float32)."""
        flat = x.flatten(0, 1)
        routing = self.gate(flat, tokens.flatten())
        out = self.experts(flat, routing).float() + self.shared_experts(flat).float()
        return out.to(x.dtype).view_as(x), (routing > 0).sum(0).float()


class Block(nn.Module):
    """One layer on ``hc_mult`` residual streams."""

    hc_attn_fn: Tensor
    hc_attn_base: Tensor
    hc_attn_scale: Tensor
    hc_ffn_fn: Tensor
    hc_ffn_base: Tensor
    hc_ffn_scale: Tensor

    def __init__(self, cfg: V4Config, layer: int, num: Numerics):
        super().__init__()
        self.num, self.eps, self.hc_eps = num, cfg.rms_norm_eps, cfg.hc_eps
        self.streams, self.iters = cfg.hc_mult, cfg.hc_sinkhorn_iters
        self.attn = Attention(cfg, layer, num)
        self.ffn = MoE(cfg, layer, num)
        self.attn_norm = Norm(cfg.hidden_size, self.eps, num)
        self.ffn_norm = Norm(cfg.hidden_size, self.eps, num)
        n = self.streams
        for turn, part in enumerate(("attn", "ffn")):
            width = (2 + n) * n
            base = torch.zeros(width)
            base[:n] = -2.0
            base[(2 * layer + turn) % n] = 1.5
            base[2 * n :] = (4.0 * torch.eye(n)).flatten()
            fn = torch.randn(width, n * cfg.hidden_size) * 0.2 * (n * cfg.hidden_size) ** -0.5
            setattr(self, f"hc_{part}_fn", nn.Parameter(fn))
            setattr(self, f"hc_{part}_base", nn.Parameter(base))
            setattr(self, f"hc_{part}_scale", nn.Parameter(torch.ones(3)))

    def mix(self, h: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Streams [B, S, n, D] -> (sublayer input [B, S, D], post [B, S, n], mixer [B, S, n, n])."""
        n = self.streams
        m = F.linear(rms(h.flatten(2), self.eps), fn)
        pre, post, comb = m.split([n, n, n * n], -1)
        pre = torch.sigmoid(pre * scale[0] + base[:n]) + self.hc_eps
        post = 2 * torch.sigmoid(post * scale[1] + base[n : 2 * n])
        comb = (comb * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
        comb = sinkhorn(comb, self.iters, self.hc_eps)
        y = (pre[..., None] * h.float()).sum(2).to(self.num.dtype)
        return y, post, comb

    def merge(self, f: Tensor, h: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """h'_k = post_k f + sum_j comb[j, k] h_j."""
        out = post[..., None] * f.float()[:, :, None]
        for j in range(self.streams):
            out = out + comb[:, :, j, :, None] * h[:, :, j, None].float()
        return out.to(self.num.dtype)

    def forward(
        self, h: Tensor, tokens: Tensor, table: Tensor, blocks: Tensor, long_rows: int, align: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(new streams [B, S, n, D], tokens per expert [E], indexer loss scalar)."""
        x, post, comb = self.mix(h, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale)
        f, loss = self.attn(self.attn_norm(x), table, Packing(blocks, long_rows), align)
        h = self.merge(f, h, post, comb)
        x, post, comb = self.mix(h, self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale)
        f, load = self.ffn(self.ffn_norm(x), tokens)
        return self.merge(f, h, post, comb), load, loss


def merge_streams(h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, cfg: V4Config) -> Tensor:
    """The final collapse: streams [B, S, n, D] -> their weighted sum [B, S, D], not yet normed."""
    v = F.linear(rms(h.flatten(2), cfg.rms_norm_eps), fn)
    a = torch.sigmoid(v * scale + base) + cfg.hc_eps
    return (a[..., None] * h.float()).sum(2).to(h.dtype)


@dataclass
class Output:
    """``hidden`` [B, S, D] normed; ``loads`` per layer [E]; ``index_loss`` scalar; ``taps`` or None."""

    hidden: Tensor
    loads: list[Tensor]
    index_loss: Tensor
    taps: list[Tensor] | None


class V4Train(nn.Module):
    """The target model. Call it on token rows; :meth:`logits` turns hidden states into logits."""

    main: Tensor
    compress: Tensor

    def __init__(self, cfg: V4Config, num: Numerics):
        super().__init__()
        self.cfg, self.num = cfg, num
        self.align = math.lcm(cfg.sliding_window, *(r for r in cfg.compress_ratios if r))
        n, size = cfg.hc_mult, cfg.hidden_size
        self.embed = Weight(cfg.vocab_size, size)
        self.layers = nn.ModuleList(Block(cfg, i, num) for i in range(cfg.num_hidden_layers))
        self.norm = Norm(size, cfg.rms_norm_eps, num)
        self.head = Weight(cfg.vocab_size, size, gain=0.5)
        self.hc_head_fn = nn.Parameter(torch.randn(n, n * size) * 0.2 * (n * size) ** -0.5)
        self.hc_head_base = nn.Parameter(torch.full((n,), -math.log(n - 1.0)))
        self.hc_head_scale = nn.Parameter(torch.ones(1))
        nn.init.normal_(self.embed.weight, std=0.5)
        rope, most = cfg.qk_rope_head_dim, cfg.max_position_embeddings
        self.register_buffer("main", rotary_table(rope, cfg.rope_theta, cfg, False, most), persistent=False)
        self.register_buffer(
            "compress", rotary_table(rope, cfg.compress_rope_theta, cfg, True, most), persistent=False
        )

    def forward(
        self,
        tokens: Tensor,
        blocks: Tensor | None = None,
        long_rows: int | None = None,
        taps: Collection[int] = (),
    ) -> Output:
        """``tokens`` int64 [B, S]; see :class:`Packing` for ``blocks`` and ``long_rows`` (default: all rows).

        Without ``blocks`` every row is one document; S is then padded to ``align`` inside.
        ``taps``: layers whose outputs, averaged over streams, are wanted: one [B, S, D] each, ascending.
        """
        batch, length = tokens.shape
        if blocks is None:
            tokens = F.pad(tokens, (0, -length % self.align))
            blocks = tokens.new_zeros((batch, tokens.shape[1] // self.align), dtype=torch.int32)
        rows = batch if long_rows is None else long_rows
        h = F.embedding(tokens, self.embed.weight).to(self.num.dtype)
        h = h[:, :, None].expand(-1, -1, self.cfg.hc_mult, -1).contiguous()
        loads, seen, index_loss = [], [], h.new_zeros((), dtype=torch.float32)
        for i, layer in enumerate(self.layers):
            table = self.main if self.cfg.kind(i) is LayerKind.WINDOW else self.compress
            h, load, loss = layer(h, tokens, table[: tokens.shape[1]], blocks, rows, self.align)
            loads.append(load)
            index_loss = index_loss + loss
            if i in taps:
                seen.append(h.float().mean(2).to(self.num.dtype)[:, :length])
        return Output(self.collapse(h)[:, :length], loads, index_loss, seen if taps else None)

    def collapse(self, h: Tensor) -> Tensor:
        """Streams [B, S, n, D] -> normed hidden [B, S, D]."""
        return self.norm(merge_streams(h, self.hc_head_fn, self.hc_head_base, self.hc_head_scale, self.cfg))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [..., V]."""
        return F.linear(hidden, self.head.weight.to(self.num.dtype)).float()
