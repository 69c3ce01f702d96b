"""Firesteel: DeepSeek-V4 with DSpark speculative decoding, every token a row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from firesteel.config import EngineConfig, ParameterError, SamplingParams
    from firesteel.engine.asynchronous import AsyncEngine
    from firesteel.engine.llm import LLM
    from firesteel.engine.output import Completion

_LAZY = {
    "AsyncEngine": "firesteel.engine.asynchronous",
    "LLM": "firesteel.engine.llm",
    "Completion": "firesteel.engine.output",
    "EngineConfig": "firesteel.config",
    "ParameterError": "firesteel.config",
    "SamplingParams": "firesteel.config",
}

__all__ = [
    "LLM",
    "AsyncEngine",
    "Completion",
    "EngineConfig",
    "ParameterError",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that ``import firesteel`` stays light."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'firesteel' has no attribute {name!r}")
