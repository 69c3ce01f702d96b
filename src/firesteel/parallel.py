"""What ranks must agree on: rank 0's plan and rank 0's integers, and nothing else.

Every rank holds floats of its own that may differ in their last bits
(confidences, survivals). None may decide anything by them: a plan is made on
rank 0 and sent whole, with the page table it relies on, and the integers that
a device decides (verify widths, sampled tokens, drafts) are overwritten by
those of rank 0's device.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Ranks that run the same steps; alone by default, when nothing is sent.

    ``handle``: a ``torch.distributed`` process group whose backend can send
    the tensors given to ``agree``.
    """

    rank: int = 0
    size: int = 1
    handle: Any = None
    sent: Counter[str] = field(default_factory=Counter, compare=False)

    @property
    def leads(self) -> bool:
        """Whether this rank decides."""
        return self.rank == 0

    def agree(self, values: Tensor) -> Tensor:
        """Rank 0's ``values`` on every rank, in place; only integers are worth agreeing on."""
        assert not values.is_floating_point(), "ranks agree on integers, not on floats"
        if self.size > 1:
            values = values.contiguous()
            dist.broadcast(values, src=0, group=self.handle)
            self.sent["integers"] += 1
        return values

    def share(self, value: Any) -> Any:
        """Rank 0's ``value`` (plain values only) on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.handle)
        self.sent["plans"] += 1
        return box[0]


ALONE = Group()


def join(handle: Any = None) -> Group:
    """The group of an initialised ``torch.distributed``; alone without one."""
    if not (dist.is_available() and dist.is_initialized()):
        return ALONE
    return Group(dist.get_rank(handle), dist.get_world_size(handle), handle)
