"""What the offline compiler has to know about a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from firesteel.ops.triton.target import TARGETS


@dataclass(frozen=True)
class Spec:
    """One kernel with one set of constants, as ``make kernels`` compiles it.

    ``signature`` maps the run-time arguments to Triton types (``"*bf16"``,
    ``"i32"``, ``"fp32"``; ``"*fp8"`` is the target's e4m3 type); every other
    argument of ``fn`` must be in ``constexprs``. Pointers are compiled as 16-byte
    aligned, integers only if named in ``aligned``. ``options``: ``num_warps``, ``num_stages``.
    ``overrides`` maps a target to constants and options that replace those above
    on it. ``scaled``: gfx950 must use its block-scaled matrix instruction.
    """

    name: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = tuple(TARGETS)
    aligned: tuple[str, ...] = ()
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    scaled: bool = False
