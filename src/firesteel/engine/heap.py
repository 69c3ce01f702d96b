"""Python's garbage collector looks again and again at all that lives; weights and kernels live for ever.

A full look takes 60 ms beside the bundled model: every token of that moment is late.
"""

from __future__ import annotations

import gc


def settle() -> None:
    """Collect what is garbage now, and leave alone what is not from here on: for processes that are an engine.

    What is alive now and becomes part of a cycle later is never freed, unless this is called again.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.collect()  # of nothing: the next one is due when a quarter more than that lives, not than all that is frozen
