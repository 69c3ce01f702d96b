"""Checkpoint folders on disk: strict reader, official writer, number formats."""

from firesteel.checkpoint.codecs import CodecError, QTensor
from firesteel.checkpoint.reader import Checkpoint
from firesteel.checkpoint.spec import CheckpointError, Layout, Stored, TensorSpec
from firesteel.checkpoint.writer import write_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CodecError",
    "Layout",
    "QTensor",
    "Stored",
    "TensorSpec",
    "write_checkpoint",
]
