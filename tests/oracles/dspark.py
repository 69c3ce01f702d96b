"""The DSpark drafter as one straight line: from all tokens of a request to one block, no cache, no engine.

    taps      mean over the streams behind each tapped target layer, concatenated
    main_x    norm(main_proj(taps)), one row per token that the target has run
    context   per stage norm(wkv(main_x)), rotated at the row's own position; the last ``window`` before the block
    block     [anchor, noise, ...]: every row sees the context and all rows of the block
    z, base   collapsed streams before the norm; head(norm(z))
    walk      logits_j = base_j + W2·W1[x_{j-1}], x_{-1} = anchor; confidence_j = w·[z_j ; W1[x_{j-1}]]
    draft     x_j = argmax(logits_j + T·noise), the noise that the target uses at that position

``Options`` choose the numerics: float32, float64 as the yardstick of what float32 costs, or official.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firesteel.checkpoint.reader import Checkpoint
from oracles.official import Options, Straight
from oracles.sampling import gumbel
from oracles.tensors import Tensors

FLOAT32 = Options(official=False)


@dataclass(frozen=True)
class Block:
    """One drafting pass of ``width`` rows: ``base`` [width, V] and ``z`` [width, D]."""

    base: Tensor
    z: Tensor


class Drafter:
    """Target and drafter of a checkpoint folder; the target's pieces are the straight-line oracle's."""

    def __init__(self, path: str | Path, options: Options = FLOAT32):
        self.target = Straight(path, options)
        self.c: dict[str, Any] = self.target.c
        values, quantised = dict(self.target.source.values), set(self.target.source.quantised)
        with Checkpoint.open(path) as checkpoint:
            for name in checkpoint.tensors:
                if name.startswith("mtp.") and not name.endswith(".scale"):
                    weight = checkpoint.qtensor(name.removesuffix(".weight"))
                    values[name] = weight.dequant()
                    if weight.scale is not None:
                        quantised.add(name.removesuffix(".weight"))
        self.target.source = Tensors(self.target.source.raw, values, frozenset(quantised))
        self.stages = len({name.split(".")[1] for name in values if name.startswith("mtp.")})
        self.last = f"mtp.{self.stages - 1}"
        self.w = self.target.w

    @property
    def has_confidence(self) -> bool:
        """Whether the checkpoint holds the confidence head."""
        return f"{self.last}.confidence_head.proj.weight" in self.target.source.values

    @torch.no_grad()
    def main_x(self, tokens: Sequence[int]) -> Tensor:
        """[n, D] of all tokens that the target has run."""
        t, ids = self.target, torch.tensor(list(tokens))
        h = t.r(self.w("embed.weight")[ids]).unsqueeze(1).repeat(1, self.c["hc_mult"], 1)
        found = {}
        for layer in range(t.layers):
            h, _ = t.first(h, layer)
            h, _ = t.second(h, layer, ids)
            found[layer] = t.r(h.mean(1))
        taps = torch.cat([found[i] for i in self.c["dspark_target_layer_ids"]], -1)
        return t.norm(t.linear(taps, "mtp.0.main_proj"), "mtp.0.main_norm")

    @torch.no_grad()
    def block(self, tokens: Sequence[int], anchor: int, width: int) -> Block:
        """The pass behind ``tokens`` (all that the target has run) and ``anchor`` (not yet run)."""
        return self.block_of(self.main_x(tokens), anchor, width)

    @torch.no_grad()
    def block_of(self, main_x: Tensor, anchor: int, width: int) -> Block:
        """The same from the features."""
        t, start = self.target, len(main_x)
        ids = torch.tensor([anchor] + [self.c["dspark_noise_token_id"]] * (width - 1))
        at = torch.arange(start, start + width)
        low = max(0, start - self.c["sliding_window"])
        h = t.r(self.w("embed.weight")[ids]).unsqueeze(1).repeat(1, self.c["hc_mult"], 1)
        for i in range(self.stages):
            p = f"mtp.{i}"
            before = self._row(main_x[low:], p, torch.arange(low, start))
            h, _ = t.half(
                h, f"{p}.hc_attn", f"{p}.attn_norm", lambda x, p=p, b=before: self._attend(x, p, b, at)
            )
            h, _ = t.half(h, f"{p}.hc_ffn", f"{p}.ffn_norm", lambda x, p=p: self._experts(x, p))
        z = self._collapse(h)
        return Block(t.norm(z, f"{self.last}.norm") @ self.w("head.weight").T, z)

    def _row(self, x: Tensor, stage: str, at: Tensor) -> Tensor:
        """K = V rows of a stage."""
        t, p = self.target, f"{stage}.attn"
        return t.stored(t.rotate(t.norm(t.linear(x, f"{p}.wkv"), f"{p}.kv_norm"), "main", at))

    def _attend(self, x: Tensor, stage: str, before: Tensor, at: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        t, c, p = self.target, self.c, f"{stage}.attn"
        q = t.linear(t.norm(t.linear(x, f"{p}.wq_a"), f"{p}.q_norm"), f"{p}.wq_b")
        q = q.unflatten(-1, (c["num_attention_heads"], -1))
        q = t.rotate(t.r(q * torch.rsqrt(q.square().mean(-1, keepdim=True) + c["rms_norm_eps"])), "main", at)
        keys = torch.cat((before, self._row(x, stage, at)))
        # the context is one tile of the running softmax, the block the next; nothing is hidden
        tile = (torch.arange(len(keys)) >= len(before)).long().expand(len(x), -1)
        o = t.softmax(q, keys, tile, self.w(f"{p}.attn_sink"))
        o = t.rotate(o, "main", at, back=True)
        groups = o.flatten(1).unflatten(1, (c["o_groups"], -1))
        wo_a = t.r(self.w(f"{p}.wo_a.weight")).unflatten(0, (c["o_groups"], -1))
        low = t.r(torch.einsum("ngi,goi->ngo", groups, wo_a)).flatten(1)
        return t.linear(low, f"{p}.wo_b"), {}

    def _experts(self, x: Tensor, stage: str) -> tuple[Tensor, dict[str, Tensor]]:
        t, c, p = self.target, self.c, f"{stage}.ffn"
        scores = torch.sqrt(torch.nn.functional.softplus(x @ self.w(f"{p}.gate.weight").T))
        ids = (scores + self.w(f"{p}.gate.bias")).topk(c["num_experts_per_tok"], -1).indices
        weight = scores.gather(1, ids)
        weight = weight / weight.sum(-1, keepdim=True) * c["routed_scaling_factor"]
        out = t.expert(x, f"{p}.shared_experts", torch.ones_like(x[:, :1]))
        for row in range(len(x)):
            for e, w in zip(ids[row].tolist(), weight[row], strict=True):
                out[row] += t.expert(x[row : row + 1], f"{p}.experts.{e}", w)[0]
        return t.r(out), {}

    def _collapse(self, h: Tensor) -> Tensor:
        t = self.target
        flat = h.flatten(1)
        size = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.c["rms_norm_eps"])
        mix = (flat @ self.w(f"{self.last}.hc_head_fn").T) * size
        share = mix * self.w(f"{self.last}.hc_head_scale") + self.w(f"{self.last}.hc_head_base")
        return t.r(torch.einsum("nj,njd->nd", torch.sigmoid(share) + self.c["hc_eps"], h))

    # ---- heads ----------------------------------------------------------------------------------
    @torch.no_grad()
    def walk(self, block: Block, anchor: int, drafts: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Logits [width, V] and confidence logits [width], each behind the drafts before it."""
        previous = torch.tensor([anchor, *drafts[:-1]])
        embedded = self.w(f"{self.last}.markov_head.markov_w1.weight")[previous]
        logits = block.base + embedded @ self.w(f"{self.last}.markov_head.markov_w2.weight").T
        if not self.has_confidence:
            return logits, None
        head = self.w(f"{self.last}.confidence_head.proj.weight")
        return logits, (torch.cat((block.z, embedded), -1) @ head.T)[:, 0]

    def drawn(self, logits: Tensor, position: int, seed: int, heat: float) -> int:
        """The draft at ``position`` from its logits [V]: argmax of logits plus T times that place's noise."""
        noise = [gumbel(token, position, seed, 0) for token in range(len(logits))]
        return int((logits + heat * torch.tensor(noise)).argmax())

    def greedy(self, block: Block, anchor: int) -> list[int]:
        """The drafts at temperature 0."""
        out: list[int] = []
        for j in range(len(block.base)):
            logits, _ = self.walk(block, anchor, [*out, 0] + [0] * (len(block.base) - j - 1))
            out.append(int(logits[j].argmax()))
        return out
