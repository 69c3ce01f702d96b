"""How many drafts a step verifies.

``fixed`` is the plain setting: every request verifies what it may, as far as
the step has room. Which drafts those are is decided on the device (``admit``),
best survival first.
"""

from __future__ import annotations

from collections.abc import Sequence

from firesteel.core import NO_DRAFTS, Budget


def fixed(ready: Sequence[int], room: int) -> Budget:
    """All drafts that exist, or as many as there are rows for.

    ``ready``: drafts each request could verify (0: none proposed, or it does
    not want any); ``room``: rows left in the step.
    """
    wanted = sum(ready)
    if wanted == 0:
        return NO_DRAFTS
    drafts = min(wanted, max(room, 0))
    reason = "fixed width" if drafts == wanted else "fixed width, cut by max_num_batched_tokens"
    return Budget(drafts, expected_tokens=float(len(ready)), reason=reason)
