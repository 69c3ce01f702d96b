"""The GPU backend: Triton kernels for CUDA and ROCm from one source."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firesteel.ops.triton.backend import TritonOps


def why_not() -> str | None:
    """Why the backend cannot run here, or None."""
    try:
        from firesteel.ops.triton import launch, target
    except ImportError as err:
        return f"Triton cannot be imported ({err}); install firesteel[gpu]"
    import torch

    if launch.INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "torch sees no CUDA or ROCm device"
    try:
        target.of_device(torch.device("cuda", torch.cuda.current_device()))
    except target.TargetError as err:
        return str(err)
    return None


def __getattr__(name: str) -> object:
    """``TritonOps`` is imported on first use: kernels are decorated then."""
    if name == "TritonOps":
        from firesteel.ops.triton.backend import TritonOps

        return TritonOps
    raise AttributeError(name)


__all__ = ["TritonOps", "why_not"]
