"""Tiny random checkpoints that together cover every layer kind, and random prompts for them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from firesteel.models.deepseek_v4.config import V4Config
from firesteel.models.deepseek_v4.layout import write_official
from firesteel.models.deepseek_v4.random_init import random_tensors, tiny_config, write_random

_HOME = tempfile.TemporaryDirectory(prefix="firesteel-oracles-")  # removed when the process ends


@dataclass(frozen=True)
class Case:
    """A geometry and how it is exercised.

    ``prompt`` tokens long; every split into two chunks is tried up to ``every`` tokens, and for a
    longer prompt the splits beside its boundaries. ``steep`` scales the channels of every norm by
    powers of two down to 2^-12, so that groups of an activation with one common scale reach the
    subnormals of e4m3; only then does it matter which channels share a scale.
    """

    name: str
    prompt: int
    seed: int = 0
    every: int = 48
    steep: bool = False
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> V4Config:
        """The geometry, without a drafter."""
        return tiny_config(dspark=None, **self.changes)

    def folder(self) -> Path:
        """The checkpoint, written once per process."""
        path = Path(_HOME.name) / f"{self.name}-{self.seed}"
        if path.exists():
            return path
        if not self.steep:
            return write_random(path, self.config, self.seed, drafter=False)
        tensors = random_tensors(self.config, self.seed, drafter=False)
        return write_official(path, self.config, ((name, steep(name, t)) for name, t in tensors))

    def tokens(self, n: int | None = None, seed: int = 0) -> list[int]:
        """``n`` random token ids (default: the case's prompt length)."""
        generator = torch.Generator().manual_seed(1000 * self.seed + seed + 17)
        return torch.randint(3, 512, (n or self.prompt,), generator=generator).tolist()


def steep(name: str, tensor: Any) -> Any:
    """A norm's weight with blocks of 16 channels scaled by 1, 2^-4, 2^-8, 2^-12 in turn."""
    if not name.endswith("norm.weight"):
        return tensor
    block = torch.arange(tensor.shape[0]) // 16 % 4
    return (tensor.float() * torch.exp2(-4.0 * block)).to(tensor.dtype)


# fewer experts and one shared shape keep a pass short; what differs is the attention
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("window", 41, 1, changes={"compress_ratios": (0, 0), "num_hash_layers": 0}),
        Case("csa", 47, 2, changes={"compress_ratios": (4,), "num_hash_layers": 0, "index_topk": 3}),
        Case("hca16", 47, 3, changes={"compress_ratios": (16,), "num_hash_layers": 1}),
        Case(
            "hca128",
            300,
            4,
            changes={"compress_ratios": (128, 128), "num_hash_layers": 1, "sliding_window": 32},
        ),
        Case("mixed", 48, 5, changes={"compress_ratios": (0, 4, 16, 4)}),
        Case(
            "plain_rope",  # no YaRN, an indexer that never has to choose, wide window
            45,
            6,
            changes={
                "compress_ratios": (16, 4, 0),
                "yarn": None,
                "index_topk": 64,
                "sliding_window": 24,
                "num_hash_layers": 2,
            },
        ),
        Case(
            "page",  # crosses the 256-token page with both compressors and a real choice
            285,
            7,
            changes={"compress_ratios": (4, 16), "num_hash_layers": 1, "index_topk": 16},
        ),
        Case(
            "flash",  # Flash's order of kinds, three hash layers, three experts of twelve
            40,
            8,
            changes={
                "compress_ratios": (0, 0, 4, 16, 4),
                "num_hash_layers": 3,
                "n_routed_experts": 12,
                "num_experts_per_tok": 3,
                "routed_scaling_factor": 2.5,
                "swiglu_limit": 0.7,  # low enough that both clamps act
                "num_attention_heads": 8,
                "o_groups": 4,
            },
        ),
        Case(
            "steep",  # several groups of 128 channels per row and of 64 per entry
            44,
            9,
            steep=True,
            changes={
                "compress_ratios": (4, 16),
                "hidden_size": 256,
                "head_dim": 128,
                "num_attention_heads": 2,
                "q_lora_rank": 192,
            },
        ),
    )
}


def cuts(case: Case) -> list[int]:
    """Where to split the prompt in two: everywhere, or beside every boundary of a long one."""
    n, c = case.prompt, case.config
    if n <= case.every:
        return list(range(1, n))
    steps = sorted({r for r in c.compress_ratios if r} | {c.sliding_window, c.page_size})
    edges = {1, n - 1}
    for step in steps:
        edges |= {step - 1, step, step + 1}
    return sorted(e for e in edges if 0 < e < n)


def random_case(seed: int) -> Case:
    """Any small geometry, for sweeps; a function of the seed."""
    generator = torch.Generator().manual_seed(seed)

    def one(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    heavy, layers = one(8, 16, 32, 64, 128), one(1, 2, 3, 4)
    groups, experts = one(1, 2, 4), one(4, 7, 12)
    changes = {
        "compress_ratios": tuple(one(0, 4, heavy) for _ in range(layers)),
        "sliding_window": one(5, 8, 16, 33, 128),
        "index_topk": one(1, 2, 5, 8, 40, 70),
        "num_attention_heads": groups * one(1, 2),
        "o_groups": groups,
        "n_routed_experts": experts,
        "num_experts_per_tok": one(1, 2, 3, 4),
        "num_hash_layers": one(0, 1, layers),
        "hc_sinkhorn_iters": one(1, 3, 20),
        "routed_scaling_factor": one(1.0, 2.5),
        "swiglu_limit": one(0.5, 10.0),
    }
    if one(True, False):
        changes["yarn"] = None
    return Case(f"random{seed}", one(3, 30, 70, 150, 270), seed, changes=changes)
