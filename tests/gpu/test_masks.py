"""Masks of verify rows on a device: no wait but the one that has a name."""

from __future__ import annotations

import torch

from firesteel.ops.reference.tail import ReferenceOps
from firesteel.ops.types import Numerics
from oracles.masks import check_step


def test_masks_find_their_rows() -> None:
    check_step(ReferenceOps(Numerics(False)), torch.device("cuda"))
