"""An engine without a model: everything of a step but the forward passes.

Scheduler, memory account, admission on the state's tensors, sampling groups,
commit, policy: all as in service, by the same code. What the model would say
is drawn (``speculation.simulated``). So a simulation decides exactly as the
engine does, and is as fast as the host.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from firesteel.config import EngineConfig, ParameterError
from firesteel.engine.loop import Engine
from firesteel.engine.memory import Memory
from firesteel.engine.runner import Runner
from firesteel.engine.slots import Slots
from firesteel.engine.sync import SyncGuard
from firesteel.models.deepseek_v4.config import DSparkConfig
from firesteel.models.deepseek_v4.random_init import tiny_config
from firesteel.ops.reference.tail import ReferenceOps
from firesteel.ops.types import Numerics, Proposal
from firesteel.speculation.policy import Policy

VOCAB = 256
CPU = torch.device("cpu")


class HollowOps(ReferenceOps):
    """Reference ops whose head says nothing: the tokens are drawn afterwards."""

    def head_sample(self, x: Tensor, head: Any, slots: Tensor, positions: Tensor, state: Any) -> Any:
        return torch.zeros_like(slots), torch.ones_like(slots, dtype=torch.bool)


class HollowTarget:
    """Stands where a target stands and computes nothing."""

    def __init__(self, config: Any, ops: HollowOps):
        self.config, self.ops = config, ops
        self.weights = SimpleNamespace(embed=torch.zeros(1), head=None)

    def begin(self, rows: Any, page_table: Tensor) -> None:
        """No pass, nothing to share."""

    def forward(self, ctx: Any, memory: Any, taps: Any = ()) -> tuple[Tensor, list[Tensor]]:
        """No streams."""
        return _Any.rows, []

    def collapse(self, h: Any) -> tuple[Any, Any]:
        """Nothing to collapse."""
        return h, h


class _Any:
    """Streams that give nothing for any index."""

    rows: Any

    def __getitem__(self, index: Any) -> Any:
        return self


_Any.rows = _Any()


class HollowDrafter:
    """Stands where a drafter stands; ``head``: whether it would have a confidence head."""

    taps = ()

    def __init__(self, head: bool):
        confidence = torch.zeros(1) if head else None
        self.weights = SimpleNamespace(markov=SimpleNamespace(confidence=confidence), stages=())
        self.head = head

    def propose(self, slots: Tensor, width: int, *rest: Any, **how: Any) -> Proposal:
        """Shapes only; the values are drawn afterwards."""
        shape = (slots.shape[0], width)
        zero = torch.zeros(shape)
        return Proposal(torch.zeros(shape, dtype=torch.int64), zero, zero if self.head else None, None)

    def write_context(self, *_: Any) -> None:
        """No context."""


def hollow_engine(settings: EngineConfig, policy: Policy | None = None, head: bool = True) -> Engine:
    """An idle engine; ``settings`` must simulate acceptance, since nothing else makes tokens."""
    spec = settings.speculative
    if spec is None or spec.simulated_acceptance is None:
        raise ParameterError("simulation: needs a speculative config with simulated_acceptance")
    gamma, length = settings.gamma, settings.max_model_len or settings.default_model_len
    config = tiny_config(
        vocab_size=VOCAB,
        num_hidden_layers=1,
        compress_ratios=(0,),
        num_hash_layers=0,
        max_position_embeddings=max(length, 1024),
        dspark=DSparkConfig(
            block_size=gamma, noise_token_id=VOCAB - 1, target_layer_ids=(0,), markov_rank=8, stages=1
        ),
        mtp_stages=1,
    )
    ops = HollowOps(Numerics(official=False))
    pages = -(-length // config.page_size) * settings.slots + 8
    memory = Memory(config, settings.slots, length, pages, gamma, CPU)
    target: Any = HollowTarget(config, ops)
    slots = Slots(settings.slots + 1, VOCAB, length, gamma, CPU)
    runner = Runner(target, memory, slots, SyncGuard(False, CPU), None, spec)
    runner.target = target
    drafter: Any = HollowDrafter(head)
    runner.drafter = drafter
    return Engine(settings, VOCAB, length, (), memory, runner, None, policy)
