"""Decides, step by step, how many drafts are verified and which requests draft.

``FixedWidth`` is a setting; ``Adaptive`` (adaptive.py) searches all of them.
Both answer the scheduler's two questions with plain values, and both learn
only from what a committed step says, so a plan can be sent to other ranks as
it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from firesteel.core import Budget
from firesteel.speculation.adaptive import Adaptive
from firesteel.speculation.budget import fixed
from firesteel.speculation.survival import Coefficients
from firesteel.speculation.terms import (
    Candidate,
    DraftBlocks,
    Drafting,
    Load,
    Policy,
    Proposed,
    Timing,
    Verified,
)

__all__ = [
    "Adaptive",
    "Candidate",
    "DraftBlocks",
    "Drafting",
    "FixedWidth",
    "Load",
    "Policy",
    "Proposed",
    "Timing",
    "Verified",
]


class FixedWidth:
    """Every request verifies and drafts ``gamma`` tokens, as far as it lets itself and rows last; 0: plain decoding."""

    learns = False

    def __init__(self, gamma: int):
        self.gamma = gamma

    def budget(self, candidates: Sequence[Candidate], load: Load) -> Budget:
        """All drafts that exist."""
        return fixed([c.ready for c in candidates], load.room)

    def drafting(self, candidates: Sequence[Candidate], load: Load) -> Drafting:
        """Everybody who wants drafts."""
        ids = frozenset(c.request_id for c in candidates if c.cap and self.gamma)
        return Drafting(ids, self.gamma if ids else 0, "fixed width" if ids else "speculation off")

    def predict(self, rows: int, context: float, drafting: Drafting) -> float:
        """Fixed widths need no prices."""
        return 0.0

    def rested(self, steps: int) -> None:
        """It never rests: an answer takes no time."""

    def calibration(self) -> Coefficients | None:
        """Survival stays 1."""
        return None

    def learn(self, proposed: Sequence[Proposed], verified: Sequence[Verified], timing: Timing) -> None:
        """Nothing to learn."""

    def forget(self, request_id: int, tokens: int = 0) -> None:
        """Nothing is kept."""
