"""The compiled CPU backend: one C++ library called through ctypes.

``why_not()`` says why it cannot be used here. ``NativeOps`` computes what the
plain torch backend computes; results differ only where sums are added in
another order or exp and log round differently.
"""

from __future__ import annotations

from firesteel.ops.native.backend import NativeOps
from firesteel.ops.native.check import why_not

__all__ = ["NativeOps", "why_not"]
