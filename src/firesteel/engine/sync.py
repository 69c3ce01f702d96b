"""Every host/device synchronisation has a name; in debug mode any other is an error.

On a GPU the driver reports unnamed waits. On the CPU, where nothing waits,
the operators that would are refused, so the rule is tested without a GPU. Ops
of a CPU backend may read values: they are the device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


class HiddenSync(RuntimeError):
    """A step read a device value at a place that has no name."""


_READS = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::equal",
    "aten::is_nonzero",
}


class _Refuse(TorchDispatchMode):
    """Raises where a host value would come out of a tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        masked = name == "aten::index" and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] or ()
        )
        if name in _READS or masked:
            raise HiddenSync(
                f"{name} waits for the device inside a step; name it in engine/sync.py or avoid it"
            )
        return func(*args, **(kwargs or {}))


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device: staged in pinned memory, so that nobody waits for the stream."""
    if device.type == "cpu":
        return values
    if not values.numel():
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """A copy on the host, complete when the stream gets there; pinned if it comes from a device."""
    if values.device.type == "cpu":
        return values.clone()
    return values.to("cpu", non_blocking=True)


class Clock:
    """Two events around the device work of a step; starts when it is made."""

    def __init__(self) -> None:
        self._begun, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._begun.record()

    def stop(self) -> None:
        """Mark the end of the work queued so far."""
        self._ended.record()

    def wait(self) -> None:
        """Wait until that work is done, but not for what was queued behind it."""
        self._ended.synchronize()

    @property
    def ms(self) -> float:
        """Milliseconds between the marks, on the device."""
        return float(self._begun.elapsed_time(self._ended))


class SyncGuard:
    """Counts named synchronisations and, in debug mode, refuses all others."""

    def __init__(self, debug: bool, device: torch.device):
        self.debug, self.device = debug, device
        self.counts: Counter[str] = Counter()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Code that must not wait."""
        if not self.debug:
            yield
        elif self.device.type == "cpu":
            with _Refuse():
                yield
        else:
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """A wait that is meant."""
        self.counts[name] += 1
        if not self.debug:
            yield
        elif self.device.type == "cpu":
            with _disable_current_modes():
                yield
        else:
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("default")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(mode)

    def wrap(self, ops: Any) -> Any:
        """In debug mode on the CPU: ops whose inside may read values."""
        if not self.debug or self.device.type != "cpu":
            return ops
        return _Device(ops)


class _Device:
    """Forwards to a CPU backend with the guard suspended."""

    def __init__(self, ops: Any):
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ops, name)
        if not callable(value):
            return value

        def run(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return value(*args, **kwargs)

        forward: Callable[..., Any] = run
        return forward
