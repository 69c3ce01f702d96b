"""Constants of the devices that the kernels are written for.

Sources: the vendors' architecture guides; LDS of gfx950 is 160 KiB per compute
unit, a block of sm_90 and sm_100 may ask for 227 KiB of shared memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Target:
    """One instruction set.

    ``wave``: threads per warp; ``local_bytes``: LDS or shared memory a program
    may use; ``fp8``: the type of 8-bit weights in device memory; ``scaled_mma``:
    whether ``tl.dot_scaled`` is one instruction of the block-scaled kind.
    """

    name: str
    backend: str
    arch: int | str
    wave: int
    local_bytes: int
    fp8: torch.dtype
    scaled_mma: bool

    @property
    def fnuz(self) -> bool:
        """Whether e4m3 here has no negative zero and half the usual exponent bias."""
        return self.fp8 == torch.float8_e4m3fnuz

    @property
    def beside(self) -> bool:
        """Whether a second stream is worth its launches: measured on an H200, never on AMD."""
        return self.backend == "cuda"

    @property
    def options(self) -> dict[str, int]:
        """Launch options every matrix kernel takes: one matrix instruction shape for every tile."""
        return {"matrix_instr_nonkdim": 16} if self.backend == "hip" else {}

    @property
    def fp8_name(self) -> str:
        """Triton's name of ``fp8`` in a signature."""
        return "fp8e4b8" if self.fnuz else "fp8e4nv"


KIB = 1024
TARGETS = {
    t.name: t
    for t in (
        Target("gfx950", "hip", "gfx950", 64, 160 * KIB, torch.float8_e4m3fn, True),
        Target("gfx942", "hip", "gfx942", 64, 64 * KIB, torch.float8_e4m3fnuz, False),
        Target("sm_90", "cuda", 90, 32, 227 * KIB, torch.float8_e4m3fn, False),
        Target("sm_100", "cuda", 100, 32, 227 * KIB, torch.float8_e4m3fn, True),
    )
}
NEWEST_NEEDED = (3, 8)  # Triton on sm_100: 3.6 stops in a pass of its own, 3.7 was not tried
INTERPRETER = Target("interpreter", "cpu", 0, 32, 227 * KIB, torch.float8_e4m3fn, False)


class TargetError(RuntimeError):
    """A device that the kernels are not written for; the message says which."""


@functools.cache
def of_device(device: torch.device) -> Target:
    """The target of a torch device; the CPU is the interpreter. Raises TargetError."""
    if device.type == "cpu":
        return INTERPRETER
    props = torch.cuda.get_device_properties(device)
    arch = getattr(props, "gcnArchName", "").split(":")[0]
    name = arch if torch.version.hip else f"sm_{props.major}{props.minor}"
    if name not in TARGETS:
        raise TargetError(f"no kernels for {props.name} ({name}); known: {', '.join(TARGETS)}")
    if name == "sm_100" and tuple(map(int, triton.__version__.split(".")[:2])) < NEWEST_NEEDED:
        raise TargetError(
            f"Triton {triton.__version__} fails on the block-scaled expert kernels for sm_100; install 3.8 or newer"
        )
    return TARGETS[name]
