"""Helpers around kernel launches.

House rules for every kernel here:
- decorate with ``@kernel("rows", ...)``, naming the integers that vary from step to
  step: Triton otherwise compiles another variant for 1 and for multiples of 16,
  and a row's bits must not depend on them;
- tiles, splits, warps and stages are constants of the weight shape or the
  geometry, never of the row count; no ``autotune``;
- load, widen to float32 at once, reduce in float32, clamp before an FP8 cast;
- call ``begin()`` before the first load of anything that another kernel writes: on NVIDIA a
  kernel is launched while the one before it still runs, and waits there.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl  # noqa: F401 -- the interpreter looks for it where a kernel is defined
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton built for AMD alone: nothing there is launched early

    @triton.jit
    def gdc_launch_dependents():
        """Nothing."""

    @triton.jit
    def gdc_wait():
        """Nothing."""


INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")  # read when a kernel is decorated

if INTERPRETED:
    from firesteel.ops.triton import interpret

    interpret.install()


@triton.jit
def begin():
    """Let the next kernel of the stream be launched, and wait until the one before has finished (from sm_90 on)."""
    if cuda_capability_geq(9, 0):
        gdc_launch_dependents()
        gdc_wait()


@functools.cache
def usable() -> bool:
    """Whether the device has the instructions that the forms in Gluon name: NVIDIA of capability 9."""
    if INTERPRETED or torch.version.cuda is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] == 9


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def launched_early() -> bool:
    """Whether kernels may be launched before the one in front has finished: NVIDIA from Hopper on."""
    usable = not INTERPRETED and torch.version.cuda is not None and torch.cuda.is_available()
    return usable and torch.cuda.get_device_capability()[0] >= 9


def kernel(*varying: str) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit`` that does not specialise the integers named in ``varying``.

    A kernel that waits by itself (``begin``) is launched early where the device allows it.
    """

    def wrap(fn: Callable[..., Any]) -> Any:
        made = triton.jit(fn, do_not_specialize=list(varying))
        if not INTERPRETED and " begin()" in inspect.getsource(fn):
            plain = made.run

            def run(*args: Any, **options: Any) -> Any:
                if launched_early():
                    options.setdefault("launch_pdl", True)
                return plain(*args, **options)

            made.run = run
        return made

    return wrap


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b."""
    return -(-a // b)


def pow2(n: int) -> int:
    """Smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def dense(x: Tensor) -> Tensor:
    """The tensor with its elements in order."""
    return x if x.is_contiguous() else x.contiguous()


def aligned_lines(lines: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised [lines, width] whose lines all start at 16 bytes: Triton compiles another variant otherwise."""
    step = max(1, 16 // dtype.itemsize)
    return torch.empty(lines, -(-width // step) * step, dtype=dtype, device=device)[:, :width]


def empty_like_rows(x: Tensor, *shape: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor on the device of ``x``."""
    return torch.empty(shape, dtype=dtype, device=x.device)
