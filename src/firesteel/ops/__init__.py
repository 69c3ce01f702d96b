"""Signatures of all ops and the choice of a backend.

To add a backend: subclass ``ReferenceOps`` (an op you do not override falls to
plain torch), say in ``supports`` why it cannot run where it cannot, and add it
to ``BACKENDS``. ``tests/cpu/test_ops.py`` then runs every op of it against the
reference and checks that rows are invariant.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from firesteel.ops.interface import Ops
from firesteel.ops.types import Numerics

BACKENDS = ("triton", "native", "reference")  # in order of preference; "triton" on a GPU only


class BackendError(RuntimeError):
    """A backend that was asked for cannot run here; the message says why."""


@dataclass(frozen=True)
class Choice:
    """The chosen backend, and why each preferred one was passed over."""

    ops: Ops
    reasons: dict[str, str]


def build(name: str, numerics: Numerics) -> Ops:
    """Make one backend by name or raise BackendError with the reason."""
    if name == "reference":
        from firesteel.ops.reference.tail import ReferenceOps

        return ReferenceOps(numerics)
    if name == "triton":
        from firesteel.ops import triton

        reason = triton.why_not()
        if reason:
            raise BackendError(f"ops backend 'triton' cannot run here: {reason}; set backend='native'")
        return triton.TritonOps(numerics)
    if name == "native":
        from firesteel.ops.native import NativeOps, why_not

        reason = why_not()
        if reason:
            raise BackendError(f"ops backend 'native' cannot run here: {reason}; set backend='reference'")
        return NativeOps(numerics)
    raise BackendError(f"unknown ops backend {name!r}; known: auto, {', '.join(BACKENDS)}")


def interpreted() -> bool:
    """Whether Triton kernels would run on the CPU, slowly and for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def select(name: str, numerics: Numerics) -> Choice:
    """Choose a backend: a named one or, for 'auto', the first that can run."""
    if name != "auto":
        return Choice(build(name, numerics), {})
    reasons: dict[str, str] = {}
    for candidate in BACKENDS:
        if candidate == "triton" and interpreted():
            reasons[candidate] = (
                "kernels are interpreted (TRITON_INTERPRET); only backend='triton' asks for that"
            )
            continue
        try:
            return Choice(build(candidate, numerics), reasons)
        except BackendError as err:
            reasons[candidate] = str(err)
    raise AssertionError("the reference backend always runs")


__all__ = ["BACKENDS", "BackendError", "Choice", "Numerics", "Ops", "build", "select"]
