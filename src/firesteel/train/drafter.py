"""The trainable DSpark drafter: stages, heads, random anchors, loss.

It reads the taps of a frozen ``V4Train`` and is trained on whole packed rows, many blocks per
row at once. A block at anchor position P sees the context rows max(0, P - window) .. P - 1 of
its document and all of its own rows, in both directions. Module and parameter names are the
official checkpoint's (``mtp.*``), and everything is written apart from the serving engine, so
that each can be checked against the other.

Letters: B rows, S tokens, D hidden, w window, n = S/w windows per row, a anchors per window,
K slots per block (the trained block size), R = n*a*K block rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from firesteel.models.deepseek_v4.config import DSparkConfig, V4Config
from firesteel.train import gsm
from firesteel.train.attention import Attention, Linear8, Norm, Numerics, Weight, rotary_table, rotate
from firesteel.train.model import Block, V4Train, merge_streams

CE, L1, BCE = 0.1, 0.9, 1.0  # shares of the three losses


@dataclass(frozen=True)
class Anchors:
    """Where the blocks of a batch start.

    ``at`` int64 [B, n, a]: positions in the row, inside their window. ``width`` int64 [B, n, a]:
    rows of each block; slots behind it do not exist. ``live`` bool [B, n, a]: the block counts.
    """

    at: Tensor
    width: Tensor
    live: Tensor

    def slots(self, count: int) -> Tensor:
        """Positions int64 [B, n, a, K] of all slots; may lie behind the row's end."""
        return self.at[..., None] + torch.arange(count, device=self.at.device)


@dataclass(frozen=True)
class View:
    """What blocks see: ``context`` bool [B, n, a, 2w] of this window and the one before it,
    ``own`` bool [B, n, a, K]; rotary tables of the row [S, pairs, 2] and of the block rows [B, R, pairs, 2]."""

    context: Tensor
    own: Tensor
    row_table: Tensor
    slot_table: Tensor


@dataclass(frozen=True)
class Drafted:
    """Of every block row: ``z`` and its norm ``x``, both [B, n*a, K, D]; ``loads`` per stage [E]."""

    z: Tensor
    x: Tensor
    loads: list[Tensor]


class BlockAttention(Attention):
    """Attention of a draft stage."""

    def context(self, main: Tensor, table: Tensor) -> Tensor:
        """Stored context rows [B, S, d] of the projected taps [B, S, D]."""
        return self.store(rotate(self.kv_norm(self.wkv(main)).float(), table))

    def blocks(self, x: Tensor, context: Tensor, view: View) -> Tensor:
        """Block rows ``x`` [B, R, D], normed -> [B, R, D]."""
        table, w = view.slot_table[:, :, None], self.window
        count, anchors, slots = view.own.shape[1:]
        q = self.query(self.q_norm(self.wq_a(x)), table)
        kv = self.store(rotate(self.kv_norm(self.wkv(x)).float(), view.slot_table))
        own = kv.unflatten(1, (count, anchors, slots))
        window = context.unflatten(1, (count, w))
        before = torch.cat([torch.zeros_like(window[:, :1]), window[:, :-1]], 1)
        keys = torch.cat([before, window], 2)  # [B, n, 2w, d]
        shape = (anchors, slots, self.heads)
        far = q.unflatten(1, (count, -1)).flatten(2, 3) @ keys.transpose(-1, -2)
        far = self._masked(far.unflatten(2, shape), view.context)
        near = q.unflatten(1, (count, anchors, slots)).flatten(3, 4) @ own.transpose(-1, -2)
        near = self._masked(near.unflatten(3, (slots, self.heads)), view.own)
        sink = self.attn_sink.float()[:, None]
        top = torch.maximum(far.amax(-1, keepdim=True), near.amax(-1, keepdim=True))
        top = torch.maximum(top, sink).detach()
        e_far, e_near = torch.exp(far - top), torch.exp(near - top)
        total = e_far.sum(-1, keepdim=True) + e_near.sum(-1, keepdim=True) + torch.exp(sink - top)
        p_far, p_near = ((e / total).to(self.num.dtype) for e in (e_far, e_near))
        out = (p_far.flatten(2, 4) @ keys).unflatten(2, shape)
        out = out + (p_near.flatten(3, 4) @ own).unflatten(3, (slots, self.heads))
        return self.output(out.flatten(1, 3), table)

    def _masked(self, score: Tensor, seen: Tensor) -> Tensor:
        """[B, n, a, K, H, keys] float32, scaled; keys not in ``seen`` [B, n, a, keys] at -inf."""
        return torch.where(seen[:, :, :, None, None], score.float() * self.dim**-0.5, -math.inf)


class Stage(Block):
    """One draft stage. The first also owns the projection of the taps, the last one the heads."""

    main_proj: Linear8
    main_norm: Norm
    norm: Norm
    markov_head: nn.ModuleDict
    confidence_head: nn.ModuleDict

    def __init__(self, cfg: V4Config, draft: DSparkConfig, index: int, num: Numerics):
        super().__init__(cfg, index, num)
        size, n = cfg.hidden_size, cfg.hc_mult
        self.attn = BlockAttention(cfg, index, num)
        if index == 0:
            self.main_proj = Linear8(size, len(draft.target_layer_ids) * size, num)
            self.main_norm = Norm(size, cfg.rms_norm_eps, num)
        if index < draft.stages - 1:
            return
        self.norm = Norm(size, cfg.rms_norm_eps, num)
        self.hc_head_fn = nn.Parameter(torch.randn(n, n * size) * 0.2 * (n * size) ** -0.5)
        self.hc_head_base = nn.Parameter(torch.full((n,), -math.log(max(n - 1.0, 1.0))))
        self.hc_head_scale = nn.Parameter(torch.ones(1))
        pair = {f"markov_{w}": Weight(cfg.vocab_size, draft.markov_rank) for w in ("w1", "w2")}
        nn.init.zeros_(pair["markov_w2"].weight)
        self.markov_head = nn.ModuleDict(pair)
        if draft.confidence_head:
            proj = Weight(1, size + draft.markov_rank)
            nn.init.zeros_(proj.weight)
            self.confidence_head = nn.ModuleDict({"proj": proj})

    def forward(  # type: ignore[override]
        self, h: Tensor, tokens: Tensor, main: Tensor, view: View
    ) -> tuple[Tensor, Tensor]:
        """Streams [B, R, n, D] and ids [B, R] of block rows -> (new streams, rows per expert [E])."""
        assert isinstance(self.attn, BlockAttention)
        context = self.attn.context(main, view.row_table)
        x, post, comb = self.mix(h, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale)
        h = self.merge(self.attn.blocks(self.attn_norm(x), context, view), h, post, comb)
        x, post, comb = self.mix(h, self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale)
        f, load = self.ffn(self.ffn_norm(x), tokens)
        return self.merge(f, h, post, comb), load


class DrafterTrain(nn.Module):
    """Drafter of one target; ``cfg.dspark`` says its form. Embedding and head are the target's, frozen."""

    table: Tensor

    def __init__(self, cfg: V4Config, num: Numerics):
        super().__init__()
        assert cfg.dspark is not None, "a config with dspark_* fields"
        self.cfg, self.num, self.draft = cfg, num, cfg.dspark
        stages = self.draft.stages
        plain = replace(
            cfg, num_hidden_layers=stages, compress_ratios=(0,) * stages, num_hash_layers=0, dspark=None
        )
        self.mtp = nn.ModuleList(Stage(plain, self.draft, i, num) for i in range(stages))
        longest = cfg.max_position_embeddings + self.draft.block_size
        table = rotary_table(cfg.qk_rope_head_dim, cfg.rope_theta, cfg, False, longest)
        self.register_buffer("table", table, persistent=False)
        ids = sorted(self.draft.target_layer_ids)
        self.order = [ids.index(i) for i in self.draft.target_layer_ids]

    @property
    def first(self) -> Stage:
        """The stage with the projection of the taps."""
        stage = self.mtp[0]
        assert isinstance(stage, Stage)
        return stage

    @property
    def last(self) -> Stage:
        """The stage with the heads."""
        stage = self.mtp[-1]
        assert isinstance(stage, Stage)
        return stage

    def start_from(self, target: V4Train) -> None:
        """Begin with the target's final norm and collapse: the shared head was trained behind them."""
        with torch.no_grad():
            self.last.norm.weight.copy_(target.norm.weight)
            for name in ("hc_head_fn", "hc_head_base", "hc_head_scale"):
                getattr(self.last, name).copy_(getattr(target, name))

    def view(self, anchors: Anchors, blocks: Tensor, align: int, length: int) -> View:
        """Masks and tables; ``blocks`` int32 [B, S/align] are document numbers (see ``Packing``)."""
        w, slots = self.cfg.sliding_window, self.draft.block_size
        doc = blocks.repeat_interleave(align // w, 1)
        joined = doc[:, 1:] == doc[:, :-1]
        joined = torch.cat([joined.new_zeros(len(doc), 1), joined], 1)
        inside = (anchors.at % w)[..., None]
        j = torch.arange(2 * w, device=blocks.device)
        context = (j >= inside) & (j < inside + w) & ((j >= w) | joined[:, :, None, None])
        own = torch.arange(slots, device=blocks.device) < anchors.width[..., None]
        place = anchors.slots(slots).flatten(1)
        return View(context, own, self.table[:length], self.table[place])

    def forward(
        self,
        tokens: Tensor,
        taps: list[Tensor],
        embed: Tensor,
        anchors: Anchors,
        blocks: Tensor,
        align: int,
    ) -> Drafted:
        """``tokens`` int64 [B, S], ``taps`` [B, S, D] of the tapped layers, ascending; ``embed`` [V, D]."""
        slots, streams = self.draft.block_size, self.cfg.hc_mult
        first, last = self.first, self.last
        main = first.main_norm(first.main_proj(torch.cat([taps[i] for i in self.order], -1)))
        view = self.view(anchors, blocks, align, tokens.shape[1])
        start = tokens.gather(1, anchors.at.flatten(1)).view_as(anchors.at)
        ids = torch.full_like(view.own, self.draft.noise_token_id, dtype=torch.int64)
        ids[..., 0] = start
        ids = ids.flatten(1)
        h = F.embedding(ids, embed).to(self.num.dtype)[:, :, None].expand(-1, -1, streams, -1).contiguous()
        loads = []
        for stage in self.mtp:
            h, load = stage(h, ids, main, view)
            loads.append(load)
        z = merge_streams(h, last.hc_head_fn, last.hc_head_base, last.hc_head_scale, self.cfg)
        return Drafted(z.unflatten(1, (-1, slots)), last.norm(z).unflatten(1, (-1, slots)), loads)

    # ---- heads -----------------------------------------------------------------------------
    def logits(self, x: Tensor, head: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """(logits float32 [..., V] with the Markov bias of ``previous`` [...], its embedding [..., r])."""
        w1, w2 = (self._head(f"markov_head.markov_{w}").to(self.num.dtype) for w in ("w1", "w2"))
        embedded = F.embedding(previous, w1)
        return F.linear(x, head.to(self.num.dtype)).float() + F.linear(embedded, w2).float(), embedded

    def confidence(self, z: Tensor, embedded: Tensor) -> Tensor:
        """The confidence head's logit float32 [...] of pre-norm hiddens and Markov embeddings."""
        proj = self._head("confidence_head.proj").to(self.num.dtype).float()
        return (torch.cat([z.float(), embedded.float()], -1) * proj[0]).sum(-1)

    def _head(self, name: str) -> Tensor:
        module = self.last.get_submodule(name)
        assert isinstance(module, Weight)
        return module.weight


# ---- anchors and what they are trained on ------------------------------------------------------------
def documents(blocks: Tensor, align: int) -> Tensor:
    """Document number of every token, int32 [B, S]."""
    return blocks.repeat_interleave(align, 1)


def eligible(classes: Tensor, doc: Tensor) -> Tensor:
    """bool [B, S]: the token and the one behind it belong to one answer or text."""
    answer = classes == gsm.ANSWER
    out = torch.zeros_like(answer)
    out[:, :-1] = answer[:, :-1] & answer[:, 1:] & (doc[:, :-1] == doc[:, 1:])
    return out


def draw_anchors(allowed: Tensor, window: int, count: int, slots: int, short: float) -> Anchors:
    """``count`` random allowed positions per window; a share ``short`` of blocks is narrower than ``slots``."""
    score = (torch.rand_like(allowed, dtype=torch.float32) + allowed).unflatten(1, (-1, window))
    best = score.topk(count, -1)
    base = torch.arange(score.shape[1], device=allowed.device)[:, None] * window
    at = best.indices + base
    width = torch.full_like(at, slots)
    if short > 0 and slots > 1:
        narrow = torch.randint_like(width, 1, slots)
        width = torch.where(torch.rand_like(at, dtype=torch.float32) < short, narrow, width)
    return Anchors(at, width, best.values >= 1)


@dataclass(frozen=True)
class Lesson:
    """What block rows are taught, all [B, n*a, K]: ``previous`` and ``truth`` token ids, the position
    ``source`` whose target hidden predicts the truth, and the weight of each slot (0: does not count)."""

    previous: Tensor
    truth: Tensor
    source: Tensor
    weight: Tensor


def lesson(tokens: Tensor, classes: Tensor, doc: Tensor, anchors: Anchors, slots: int) -> Lesson:
    """Slot j of a block at P reads token P+j and is to predict token P+j+1 as the target does."""
    length = tokens.shape[1]
    place = anchors.slots(slots).flatten(1, 2)  # [B, n*a, K]
    here, behind = place.clamp_max(length - 1).flatten(1), (place + 1).clamp_max(length - 1).flatten(1)
    shape = place.shape[1:]
    same = doc.gather(1, behind).unflatten(1, shape) == doc.gather(1, place[..., 0])[..., None]
    counts = same & (classes.gather(1, behind).unflatten(1, shape) == gsm.ANSWER)
    counts &= (place + 1 < length) & anchors.live.flatten(1)[..., None]
    depth = torch.arange(slots, device=tokens.device)
    counts = (counts & (depth < anchors.width.flatten(1)[..., None])).float().cumprod(-1)
    return Lesson(
        tokens.gather(1, here).unflatten(1, shape),
        tokens.gather(1, behind).unflatten(1, shape),
        here.unflatten(1, shape),
        counts * torch.exp(-depth / slots),
    )


@dataclass(frozen=True)
class Losses:
    """Scalars: the total, its three parts (unweighted by their shares), mean 1 - TV of the first and last slot."""

    total: Tensor
    ce: Tensor
    l1: Tensor
    bce: Tensor
    agree_first: Tensor
    agree_last: Tensor


def loss_terms(
    logits: Tensor, said: Tensor, p_target: Tensor, truth: Tensor, w: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Weighted means (CE, L1, BCE, 1 - TV of the first slot, of the last); ``said``: the confidence logits.

    ``logits``, ``p_target`` float32 [B, N, K, V], the rest [B, N, K]. The confidence's own target,
    1 - L1/2, is a constant.
    """
    log_p = logits.log_softmax(-1)
    ce = -log_p.gather(-1, truth[..., None])[..., 0]
    l1 = (log_p.exp() - p_target).abs().sum(-1)
    agree = (1 - 0.5 * l1.detach()).clamp(0, 1)
    bce = F.binary_cross_entropy_with_logits(said, agree, reduction="none")
    total = w.sum().clamp(min=1e-6)
    first, last = ((agree[..., j] * w[..., j]).sum() / w[..., j].sum().clamp(min=1e-6) for j in (0, -1))
    return (w * ce).sum() / total, (w * l1).sum() / total, (w * bce).sum() / total, first, last


def draft_loss(
    drafter: DrafterTrain,
    out: Drafted,
    task: Lesson,
    hidden: Tensor,
    head: Tensor,
    terms: Callable[..., tuple[Tensor, ...]] = loss_terms,
) -> Losses:
    """0.1 CE(text) + 0.9 L1(draft, target) + BCE(confidence, 1 - L1/2), means over weighted slots.

    ``hidden`` [B, S, D]: the target's normed hidden states; ``head`` [V, D]. Previous tokens are
    those of the text (teacher forcing). ``terms``: ``loss_terms``, or its compiled form.
    """
    index = task.source.flatten(1)[..., None].expand(-1, -1, hidden.shape[-1])
    with torch.no_grad():
        wanted = hidden.gather(1, index).view_as(out.x)
        p_target = F.linear(wanted, head.to(hidden.dtype)).float().softmax(-1)
    logits, embedded = drafter.logits(out.x, head, task.previous)
    has_head = drafter.draft.confidence_head
    said = drafter.confidence(out.z, embedded) if has_head else torch.zeros_like(task.weight)
    ce, l1, bce, first, last = terms(logits, said, p_target, task.truth, task.weight)
    total = CE * ce + L1 * l1 + (BCE * bce if has_head else 0.0)
    return Losses(total, ce, l1, bce, first, last)
