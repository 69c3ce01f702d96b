"""What the writer of checkpoint folders refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from firesteel.checkpoint import Checkpoint, CheckpointError, write_checkpoint
from firesteel.models.deepseek_v4.layout import write_official
from firesteel.models.deepseek_v4.random_init import random_tensors, tiny_config, write_random

TINY = tiny_config()


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound random checkpoint; tests copy it before they break it."""
    return write_random(tmp_path_factory.mktemp("official") / "ck", TINY, seed=7)


def test_writer_refuses(tmp_path: Path, official: Path) -> None:
    one = [("x", torch.zeros(2))]
    with pytest.raises(CheckpointError, match="already holds"):
        write_checkpoint(official, {}, one)
    with pytest.raises(CheckpointError, match="given twice"):
        write_checkpoint(tmp_path / "a", {}, one * 2)
    with pytest.raises(CheckpointError, match="cannot store dtype"):
        write_checkpoint(tmp_path / "b", {}, [("x", torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(CheckpointError, match="group by file"):
        write_checkpoint(
            tmp_path / "c",
            {},
            [(n, torch.zeros(1)) for n in ("a1", "b1", "a2")],
            shard_of=lambda name: ord(name[0]),
        )
    with pytest.raises(CheckpointError, match="no tensors"):
        write_checkpoint(tmp_path / "d", {}, [])
    with pytest.raises(CheckpointError, match="missing"):
        write_official(tmp_path / "e", TINY, list(random_tensors(TINY, 1))[:-1][:50])
    with pytest.raises(ValueError, match="agreement"):
        write_random(tmp_path / "f", TINY, 1, agreement=2)


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    tensors = [("a", torch.zeros(0, 3)), ("b", torch.tensor(2.5)), ("c", torch.arange(3, dtype=torch.int64))]
    write_checkpoint(tmp_path / "ck", {}, tensors)
    checkpoint = Checkpoint.open(tmp_path / "ck")
    for name, tensor in tensors:
        assert torch.equal(checkpoint.tensor(name), tensor)
