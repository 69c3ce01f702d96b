"""Small random checkpoints with drafters from perfect to useless, for the exactness proofs.

Three targets. ``deep``: every layer kind, and what the layers add decides the
tokens. ``model``: the same with a strong bigram, which a drafter can know.
``bigram``: the layers add nothing, so the drafter's Markov head can be an exact
copy of the target. ``script`` lets a drafter propose known answers, which gives
every acceptance length on a target that no small drafter could predict.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firesteel.checkpoint.codecs import QTensor
from firesteel.config import SamplingParams
from firesteel.core import Budget
from firesteel.engine.llm import LLM
from firesteel.engine.output import Completion
from firesteel.models.deepseek_v4.config import DSparkConfig, V4Config
from firesteel.models.deepseek_v4.layout import write_official
from firesteel.models.deepseek_v4.random_init import random_tensors, tiny_config
from firesteel.ops.types import Proposal, SlotState
from firesteel.speculation.policy import Candidate, Drafting, FixedWidth, Load
from firesteel.speculation.survival import Coefficients

SEED, AGREEMENT = 11, 0.97


@dataclass(frozen=True)
class Kind:
    """A drafter: whose, and how good. ``wrong``: share of scripted drafts that are spoilt."""

    target: str
    scripted: bool = False
    wrong: float = 0.0


KINDS: dict[str, Kind] = {
    "good": Kind("model"),  # shares the target's bigram
    "formats": Kind("model"),  # the same with experts in FP8, the target's in FP4
    "bad": Kind("deep"),  # knows nothing
    "copy": Kind("bigram"),  # the target itself
    "told": Kind("deep", scripted=True),  # proposes the answer
    "misled": Kind("deep", scripted=True, wrong=0.3),  # the answer with errors
}
TARGETS = {"model": "good", "deep": "bad", "bigram": "copy"}  # target -> a kind whose folder holds it


def toy_config(**changes: Any) -> V4Config:
    """All layer kinds in three layers, two draft stages, a window of 16."""
    fields: dict[str, Any] = {
        "vocab_size": 160,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 32,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 32,
        "o_lora_rank": 16,
        "o_groups": 2,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 6,
        "sliding_window": 16,
        "compress_ratios": (0, 4, 16),
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 1024,
        "dspark": DSparkConfig(
            block_size=5, noise_token_id=2, target_layer_ids=(1, 2), markov_rank=16, stages=2
        ),
    }
    return tiny_config(**(fields | changes))


def tensors_of(kind: str, config: V4Config) -> Iterator[tuple[str, QTensor | Tensor]]:
    """(official name, tensor) of a kind's checkpoint; all kinds of a target share its tensors."""
    if KINDS[kind].target == "bigram":
        yield from bigram_tensors(config)
        return
    agreement = AGREEMENT if KINDS[kind].target == "model" else 0.0
    other: dict[str, QTensor | Tensor] = {}
    if kind == "formats":
        other = dict(random_tensors(config, SEED, expert_format="fp8", agreement=agreement))
    elif kind == "bad":
        other = dict(random_tensors(config, SEED + 1))
        assert config.dspark is not None
        name = f"mtp.{config.dspark.stages - 1}.norm.weight"  # else the anchor's own embedding shows through
        gain, sign = other[name], torch.arange(config.hidden_size) % 2 * 2 - 1
        assert isinstance(gain, Tensor)
        other[name] = (gain * sign).to(gain.dtype)
    for name, tensor in random_tensors(config, SEED, agreement=agreement):
        yield name, other[name] if name.startswith("mtp.") and name in other else tensor


def bigram_tensors(config: V4Config) -> Iterator[tuple[str, QTensor | Tensor]]:
    """Sublayers return zero, so logits depend on the newest token alone; the Markov head knows them all.

    Needs a Markov rank of the hidden size: W1 = norm(embedding), W2 = head, base logits 0.
    """
    assert config.dspark is not None and config.dspark.markov_rank == config.hidden_size
    plain = dict(random_tensors(config, SEED))
    last = f"mtp.{config.dspark.stages - 1}."
    embed, gain, head = (plain[f"{name}.weight"] for name in ("embed", "norm", "head"))
    assert isinstance(embed, Tensor) and isinstance(gain, Tensor) and isinstance(head, Tensor)
    x = embed.float()
    unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps) * gain.float()
    special = {
        f"{last}norm.weight": torch.zeros_like(gain),
        f"{last}markov_head.markov_w1.weight": unit.to(torch.bfloat16),
        f"{last}markov_head.markov_w2.weight": head,
    }
    for name, tensor in plain.items():
        if name.startswith("layers.") and name.endswith((".wo_b.weight", ".w2.weight")):
            tensor = silent(tensor)
        yield name, special.get(name, tensor)


def silent(tensor: QTensor | Tensor) -> QTensor | Tensor:
    """The same weight, all zero."""
    if isinstance(tensor, Tensor):
        return torch.zeros_like(tensor)
    return replace(tensor, data=torch.zeros_like(tensor.data.view(torch.uint8)).view(tensor.data.dtype))


class Toys:
    """Writes each kind's checkpoint once below ``root``."""

    def __init__(self, root: Path):
        self.root = root
        self.vocab = toy_config().vocab_size

    def folder(self, kind: str) -> Path:
        """Checkpoint folder of a kind; a scripted drafter needs no weights of its own."""
        if KINDS[kind].scripted:
            kind = TARGETS[KINDS[kind].target]
        path = self.root / kind
        if not path.exists():
            config = toy_config()
            if KINDS[kind].target == "bigram":
                assert config.dspark is not None
                config = replace(config, dspark=replace(config.dspark, markov_rank=config.hidden_size))
            write_official(path, config, tensors_of(kind, config))
        return path


class Erratic(FixedWidth):
    """Verifies any number of drafts and lets anybody draft any width, by chance; the text may not notice."""

    def __init__(self, gamma: int, seed: int):
        super().__init__(gamma)
        self.rng = random.Random(seed)
        self.news: Coefficients | None = Coefficients.prior(gamma, True, True)

    def budget(self, candidates: Sequence[Candidate], load: Load) -> Budget:
        """Any number of the drafts that exist."""
        most = super().budget(candidates, load).drafts
        return Budget(self.rng.randint(0, most), reason="by chance")

    def drafting(self, candidates: Sequence[Candidate], load: Load) -> Drafting:
        """Some of those who want drafts, or nobody."""
        ids = frozenset(c.request_id for c in candidates if c.cap and self.rng.random() < 0.8)
        return Drafting(ids, self.rng.randint(1, self.gamma) if ids else 0, "by chance")

    def calibration(self) -> Coefficients | None:
        """Once: survivals then differ, so that requests verify different numbers of drafts."""
        news, self.news = self.news, None
        return news


def script(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    answers: Sequence[Completion],
    wrong: float = 0.0,
) -> None:
    """Let the drafter of ``llm`` propose ``answers``; a share ``wrong`` of the drafts is spoilt.

    Requests are told apart by their seeds. Beyond a known answer, and for unknown seeds, the drafts
    stay the drafter's own. Which drafts are spoilt depends on seed and position alone.
    """
    drafter, guard, vocab = llm.engine.runner.drafter, llm.engine.runner.guard, llm.config.vocab_size
    assert drafter is not None, "an engine without speculation has nobody to tell"
    known = {p.seed: (len(q), a.token_ids) for q, p, a in zip(prompts, params, answers, strict=True)}
    original = drafter.propose

    def propose(slots: Tensor, width: int, state: SlotState, *rest: Any, **options: Any) -> Proposal:
        proposal = original(slots, width, state, *rest, **options)
        with guard.named("debug: script"):
            tokens = proposal.tokens.clone()
            for g, slot in enumerate(slots.tolist()):
                seed = int(state.seed_hi[slot]) << 32 | int(state.seed_lo[slot])
                start, answer = known.get(seed, (0, ()))
                for j in range(width):
                    at = int(state.cursor[slot]) + 1 + j - start
                    if 0 <= at < len(answer):
                        spoil = (seed % 997 * 31 + at * 7919) % 1000 < 1000 * wrong
                        tokens[g, j] = (answer[at] + 1) % vocab if spoil else answer[at]
        return replace(proposal, tokens=tokens)

    drafter.propose = propose  # type: ignore[method-assign]
