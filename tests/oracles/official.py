"""DeepSeek-V4's target as one straight line: a whole prompt, layer by layer, no cache, no chunks.

Written from the model's description for two purposes. With ``official=True`` it rounds where the
official forward pass rounds:

    activations        bf16 after every operation
    FP8/FP4 linears    their input in e4m3, one power-of-two scale per 128 channels
    K=V rows, entries  e4m3 with one power-of-two scale per 64 of the dims that are not rotated
    indexer            queries and keys rotated by a Hadamard matrix, then FP4 per 32; scores in bf16
    wo_a               dequantised to bf16, its input not quantised
    attention          probabilities in bf16 before they meet the values
    compressors, mHC mixing coefficients, router, final logits: float32

With ``official=False`` nothing rounds, and ``dtype=torch.float64`` makes it the yardstick of what
float32 summation costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oracles import tensors

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TILE = 64  # entries that share one softmax maximum


@dataclass(frozen=True)
class Options:
    """Which rounding, and choices that the official description leaves open.

    ``one_maximum``: probabilities are taken relative to the maximum over all keys; otherwise relative
    to the running one (sink, then window, then entries in tiles). Both are legal and round differently.
    ``norm_in_bf16``: every step of the query's unweighted norm is rounded, not only its result.
    ``scores_in_bf16``: so are the indexer's head weights, products and their terms.
    ``shuffle``: a seed; checkpoint linears add their products in that random order.
    """

    official: bool = True
    dtype: torch.dtype = torch.float32
    one_maximum: bool = False
    norm_in_bf16: bool = False
    scores_in_bf16: bool = False
    shuffle: int | None = None


OFFICIAL = Options()


# ---- number formats ------------------------------------------------------------------------------
def to_bf16(x: Tensor) -> Tensor:
    """Nearest bf16 value, in the dtype of x."""
    return x.to(torch.float32).to(torch.bfloat16).to(x.dtype)


def power_of_two(amax: Tensor, top: float) -> Tensor:
    """Smallest power of two s with top * s >= amax."""
    ratio = amax.to(torch.float64) / top
    exponent = torch.ceil(torch.log2(ratio))
    exponent = torch.where(torch.exp2(exponent - 1) >= ratio, exponent - 1, exponent)
    exponent = torch.where(torch.exp2(exponent) < ratio, exponent + 1, exponent)
    return torch.exp2(exponent)


def grouped(x: Tensor, size: int) -> list[Tensor]:
    """The last dim in groups of ``size``; the last one may be shorter."""
    return list(x.split(size, dim=-1))


def to_e4m3(x: Tensor, size: int) -> Tensor:
    """x rounded to e4m3 with a scale per ``size`` channels; largest magnitude floored at 1e-4."""
    out = []
    for part in grouped(x.to(torch.float64), size):
        amax = part.abs().amax(-1, keepdim=True).to(torch.float32).clamp_min(1e-4)
        scale = power_of_two(amax, 448.0)
        value = (part / scale).clamp(-448.0, 448.0)
        exponent = torch.floor(torch.log2(value.abs().clamp_min(2.0**-20))).clamp_min(-6)
        step = torch.exp2(exponent - 3)  # three mantissa bits; subnormals share the step of 2^-6
        out.append(torch.round(value / step) * step * scale)
    return torch.cat(out, -1).to(x.dtype)


def to_e2m1(x: Tensor, size: int) -> Tensor:
    """x rounded to FP4 with a power-of-two scale per ``size`` channels; ties to the even code."""
    values = torch.tensor(E2M1, dtype=torch.float64)
    middle = (values[1:] + values[:-1]) / 2
    out = []
    for part in grouped(x.to(torch.float64), size):
        amax = part.abs().amax(-1, keepdim=True).clamp_min(6.0 * 2.0**-126)
        scale = power_of_two(amax, 6.0)
        value = (part / scale).abs().clamp_max(6.0).unsqueeze(-1)
        odd = torch.arange(7) % 2 == 1  # from an odd code a tie goes up
        code = ((value > middle) | ((value == middle) & odd)).sum(-1)
        out.append(torch.sign(part) * values[code] * scale)
    return torch.cat(out, -1).to(x.dtype)


def hadamard(n: int) -> Tensor:
    """Orthogonal [n, n]: entry (i, j) is (-1)^(number of ones in i AND j) / sqrt(n)."""
    rows = [[(-1.0) ** bin(i & j).count("1") for j in range(n)] for i in range(n)]
    return torch.tensor(rows, dtype=torch.float64) / math.sqrt(n)


# ---- the model -----------------------------------------------------------------------------------
class Straight:
    """The target of a checkpoint folder. ``attention`` and ``experts`` are the halves of a block."""

    def __init__(self, path: str | Path, options: Options = OFFICIAL):
        self.source = tensors.load(path)
        self.o = options
        self.c: dict[str, Any] = self.source.raw
        self.layers: int = self.c["num_hidden_layers"]
        self.turn = {"main": self._frequencies(False), "compress": self._frequencies(True)}

    # ---- pieces
    def r(self, x: Tensor) -> Tensor:
        """An activation: bf16 in official numerics."""
        return to_bf16(x) if self.o.official else x

    def w(self, name: str) -> Tensor:
        return self.source[name].to(self.o.dtype)

    def linear(self, x: Tensor, prefix: str) -> Tensor:
        """A checkpoint linear, its input quantised if the weight is."""
        if self.o.official and prefix in self.source.quantised:
            x = to_e4m3(x, 128)
        weight = self.w(f"{prefix}.weight")
        if self.o.shuffle is not None:
            generator = torch.Generator().manual_seed(self.o.shuffle)
            order = torch.randperm(x.shape[-1], generator=generator)
            x, weight = x[..., order], weight[:, order]
        return self.r(x @ weight.T)

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"])
        return self.r(x * scale * self.w(f"{name}.weight"))

    def _frequencies(self, compressed: bool) -> Tensor:
        """float32 [rd/2]: radians per position of each pair, with YaRN in compressed layers."""
        c, dim = self.c, self.c["qk_rope_head_dim"]
        theta = c["compress_rope_theta"] if compressed else c["rope_theta"]
        plain = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        scaling = c.get("rope_scaling")
        if not compressed or not scaling:
            return plain
        longest = scaling["original_max_position_embeddings"]

        def pair(turns: float) -> float:
            return dim * math.log(longest / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(pair(scaling["beta_fast"])), 0)
        high = min(math.ceil(pair(scaling["beta_slow"])), dim - 1)
        out = plain.clone()
        for i in range(dim // 2):
            share = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
            out[i] = plain[i] * (1 - share) + plain[i] / scaling["factor"] * share
        return out

    def rotate(self, x: Tensor, table: str, positions: Tensor, back: bool = False) -> Tensor:
        """Turn the last dims of x [n, ..., d] as complex pairs by the row's position."""
        angle = positions.to(torch.float32).unsqueeze(-1) * self.turn[table]
        spin = torch.complex(angle.cos(), -angle.sin() if back else angle.sin())
        spin = spin.to(torch.complex128 if self.o.dtype == torch.float64 else torch.complex64)
        spin = spin.view(spin.shape[0], *[1] * (x.dim() - 2), spin.shape[1])
        dim = 2 * spin.shape[-1]
        pairs = torch.view_as_complex(x[..., -dim:].unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * spin).flatten(-2)
        return torch.cat((x[..., :-dim], self.r(turned)), -1)

    def stored(self, row: Tensor) -> Tensor:
        """A K=V row or entry as the cache holds it."""
        if not self.o.official:
            return row
        dim = self.c["qk_rope_head_dim"]
        return torch.cat((to_e4m3(row[..., :-dim], 64), row[..., -dim:]), -1)

    def indexed(self, x: Tensor) -> Tensor:
        """An indexer query or key before it is scored."""
        if not self.o.official:
            return x
        turned = (x.to(torch.float64) @ hadamard(x.shape[-1])).to(x.dtype)
        return to_e2m1(self.r(turned), 32)

    # ---- residual streams
    def coefficients(self, h: Tensor, prefix: str) -> tuple[Tensor, Tensor, Tensor]:
        """(pre [n, hc], post [n, hc], mixing matrix [n, source, destination])."""
        hc, eps = self.c["hc_mult"], self.c["hc_eps"]
        flat = h.flatten(1)
        size = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"])
        m = (flat @ self.w(f"{prefix}_fn").T) * size
        scale, base = self.w(f"{prefix}_scale"), self.w(f"{prefix}_base")
        pre = torch.sigmoid(m[:, :hc] * scale[0] + base[:hc]) + eps
        post = 2 * torch.sigmoid(m[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
        mix = (m[:, 2 * hc :] * scale[2] + base[2 * hc :]).view(-1, hc, hc)
        mix = torch.softmax(mix, -1) + eps
        mix = mix / (mix.sum(1, keepdim=True) + eps)
        for _ in range(self.c["hc_sinkhorn_iters"] - 1):
            mix = mix / (mix.sum(2, keepdim=True) + eps)
            mix = mix / (mix.sum(1, keepdim=True) + eps)
        return pre, post, mix

    def half(self, h: Tensor, prefix: str, norm: str, sublayer: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """One mHC sublayer on streams h [n, hc, D]: (new streams, what happened inside)."""
        pre, post, mix = self.coefficients(h, prefix)
        x = self.norm(self.r(torch.einsum("nj,njd->nd", pre, h)), norm)
        f, seen = sublayer(x)
        new = post.unsqueeze(-1) * f.unsqueeze(1) + torch.einsum("njk,njd->nkd", mix, h)
        return self.r(new), {"x": x, "f": f, **seen}

    # ---- attention
    def compressed(self, x: Tensor, prefix: str, dim: int, ratio: int, index: bool) -> Tensor:
        """All entries [n // ratio, dim] that a prompt closes."""
        p = f"{prefix}.compressor"
        count = x.shape[0] // ratio
        if count == 0:  # the prompt is shorter than one window
            return x.new_zeros(0, dim)
        value = (x @ self.w(f"{p}.wkv.weight").T)[: count * ratio].unflatten(0, (count, ratio))
        score = (x @ self.w(f"{p}.wgate.weight").T)[: count * ratio].unflatten(0, (count, ratio))
        score = score + self.w(f"{p}.ape")
        if ratio == 4:  # B half of this window, A half of the one before it
            a_value, a_score = value[:-1, :, :dim], score[:-1, :, :dim]
            none = value.new_zeros(1, ratio, dim)
            value = torch.cat((torch.cat((none, a_value)), value[..., dim:]), 1)
            score = torch.cat((torch.cat((none - math.inf, a_score)), score[..., dim:]), 1)
        entry = self.r((torch.softmax(score, 1) * value).sum(1))
        starts = torch.arange(count) * ratio
        entry = self.rotate(self.norm(entry, f"{p}.norm"), "compress", starts)
        return self.indexed(entry) if index else self.stored(entry)

    def chosen(self, x: Tensor, qa: Tensor, prefix: str, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the ``visible`` [n, E] entries each row attends to, and the scores [n, E]."""
        c, p = self.c, f"{prefix}.indexer"
        heads, dim = c["index_n_heads"], c["index_head_dim"]
        keys = self.compressed(x, p, dim, 4, True)
        q = self.linear(qa, f"{p}.wq_b").unflatten(-1, (heads, dim))
        q = self.indexed(self.rotate(q, "compress", torch.arange(x.shape[0])))
        weight = self.linear(x, f"{p}.weights_proj") * (dim**-0.5 * heads**-0.5)
        dots = torch.einsum("nhd,ed->nhe", q, keys)
        if self.o.scores_in_bf16:
            weight, dots = to_bf16(weight), to_bf16(dots)
        terms = torch.relu(dots) * weight.unsqueeze(-1)
        score = self.r((to_bf16(terms) if self.o.scores_in_bf16 else terms).sum(1))
        order = score.masked_fill(~visible, -math.inf).sort(dim=-1, descending=True, stable=True).indices
        mask = torch.zeros_like(visible)
        mask.scatter_(1, order[:, : c["index_topk"]], True)
        return mask & visible, score

    def softmax(self, q: Tensor, keys: Tensor, tile: Tensor, sinks: Tensor) -> Tensor:
        """q [n, H, d] attends to keys [m, d]; ``tile`` [n, m] numbers a key's tile, -1 hides it."""
        score = torch.einsum("nhd,md->nhm", q, keys) * q.shape[-1] ** -0.5
        score = score.masked_fill((tile < 0).unsqueeze(1), -math.inf)
        top = sinks.expand(q.shape[0], -1).unsqueeze(-1)
        parts, tops = [], []
        for t in range(int(tile.max()) + 1):
            mine = (tile == t).unsqueeze(1)
            best = score if self.o.one_maximum else score.masked_fill(~mine, -math.inf)
            top = torch.maximum(top, best.amax(-1, keepdim=True))
            parts.append(torch.exp(score - top).masked_fill(~mine, 0.0))
            tops.append(top)
        total, out = torch.exp(sinks.unsqueeze(-1) - top), torch.zeros_like(q)
        for part, then in zip(parts, tops, strict=True):
            fade = torch.exp(then - top)
            total = total + part.sum(-1, keepdim=True) * fade
            out = out + torch.einsum("nhm,md->nhd", self.r(part), keys) * fade
        return self.r(out / total)

    def attention(self, x: Tensor, layer: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The attention sublayer on normed rows x [n, D]."""
        c, p, n = self.c, f"layers.{layer}.attn", x.shape[0]
        ratio, seen = c["compress_ratios"][layer], {}
        table = "compress" if ratio else "main"
        at = torch.arange(n)
        qa = self.norm(self.linear(x, f"{p}.wq_a"), f"{p}.q_norm")
        q = self.linear(qa, f"{p}.wq_b").unflatten(-1, (c["num_attention_heads"], -1))
        q = self.rotate(self._unit(q), table, at)
        kv = self.stored(self.rotate(self.norm(self.linear(x, f"{p}.wkv"), f"{p}.kv_norm"), table, at))
        back = at.unsqueeze(1) - at
        tile = torch.where((back >= 0) & (back < c["sliding_window"]), 0, -1)
        keys = kv
        if ratio:
            entries = self.compressed(x, p, c["head_dim"], ratio, False)
            visible = torch.arange(entries.shape[0]) < ((at + 1) // ratio).unsqueeze(1)
            if ratio == 4:
                visible, seen["index_scores"] = self.chosen(x, qa, p, visible)
            rank = visible.long().cumsum(1) - 1
            tile = torch.cat((tile, torch.where(visible, 1 + rank // TILE, -1)), 1)
            keys = torch.cat((kv, entries))
            seen |= {"entries": entries, "selected": visible}
        o = self.softmax(q, keys, tile, self.w(f"{p}.attn_sink"))
        o = self.rotate(o, table, at, back=True)
        group = o.flatten(1).unflatten(1, (c["o_groups"], -1))
        wo_a = self.r(self.w(f"{p}.wo_a.weight")).unflatten(0, (c["o_groups"], -1))
        low = self.r(torch.einsum("ngi,goi->ngo", group, wo_a)).flatten(1)
        return self.linear(low, f"{p}.wo_b"), {"kv": kv, "q": q, "attention": o, **seen}

    def _unit(self, q: Tensor) -> Tensor:
        eps = self.c["rms_norm_eps"]
        if not self.o.norm_in_bf16:
            return self.r(q * torch.rsqrt(q.square().mean(-1, keepdim=True) + eps))
        size = to_bf16(to_bf16(q.square()).mean(-1, keepdim=True))
        return to_bf16(q * to_bf16(torch.rsqrt(to_bf16(size + eps))))

    # ---- experts
    def experts(self, x: Tensor, layer: int, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The expert sublayer on normed rows x [n, D]."""
        c, p = self.c, f"layers.{layer}.ffn"
        scores = torch.sqrt(torch.nn.functional.softplus(x @ self.w(f"{p}.gate.weight").T))
        if layer < c["num_hash_layers"]:
            ids = self.source[f"{p}.gate.tid2eid"][tokens]
        else:
            best = (scores + self.w(f"{p}.gate.bias")).sort(dim=-1, descending=True, stable=True).indices
            ids = best[:, : c["num_experts_per_tok"]]
        weight = scores.gather(1, ids)
        weight = weight / weight.sum(-1, keepdim=True) * c["routed_scaling_factor"]
        out = torch.zeros_like(x)
        for e in range(c["n_routed_experts"]):
            row, place = torch.where(ids == e)
            if len(row):
                out[row] += self.expert(x[row], f"{p}.experts.{e}", weight[row, place].unsqueeze(-1))
        out = out + self.expert(x, f"{p}.shared_experts", torch.ones_like(x[:, :1]))
        order = ids.sort(-1)
        return self.r(out), {"ids": order.values, "weights": weight.gather(1, order.indices)}

    def expert(self, x: Tensor, prefix: str, weight: Tensor) -> Tensor:
        """One expert; its routing weight goes in before w2."""
        limit = self.c["swiglu_limit"]
        gate = self.linear(x, f"{prefix}.w1").clamp_max(limit)
        up = self.linear(x, f"{prefix}.w3").clamp(-limit, limit)
        return self.linear(self.r(gate * torch.sigmoid(gate) * up * weight), f"{prefix}.w2")

    # ---- whole
    def first(self, h: Tensor, layer: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The attention half of a block on streams h."""
        p = f"layers.{layer}"
        return self.half(h, f"{p}.hc_attn", f"{p}.attn_norm", lambda x: self.attention(x, layer))

    def second(self, h: Tensor, layer: int, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The expert half of a block on streams h."""
        p = f"layers.{layer}"
        return self.half(h, f"{p}.hc_ffn", f"{p}.ffn_norm", lambda x: self.experts(x, layer, tokens))

    def head(self, h: Tensor) -> Tensor:
        """Collapse of the streams, norm and logits [n, V]."""
        flat = h.flatten(1)
        size = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"])
        share = (flat @ self.w("hc_head_fn").T) * size * self.w("hc_head_scale") + self.w("hc_head_base")
        y = self.r(torch.einsum("nj,njd->nd", torch.sigmoid(share) + self.c["hc_eps"], h))
        return self.norm(y, "norm") @ self.w("head.weight").T

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """[n, V] of a whole prompt, in the dtype of the options."""
        ids = torch.tensor(tokens)
        h = self.r(self.w("embed.weight")[ids]).unsqueeze(1).repeat(1, self.c["hc_mult"], 1)
        for layer in range(self.layers):
            h, _ = self.first(h, layer)
            h, _ = self.second(h, layer, ids)
        return self.head(h)
