"""Equally likely cases of what the next blocks of many requests may be, the same at every decision."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SCENARIOS = 256  # requests times scenarios of one decision


@dataclass(frozen=True)
class Strata:
    """Which case is what for R requests, [S, R] each: strata, not draws; a decision must not be a lottery."""

    own: Floats  # below a request's trust in its own blocks: one of them
    block: Ints  # which of them
    pooled: Floats  # otherwise, below the trust in the pool: one of its blocks; out of step with ``own``
    other: Ints  # which of those


@cache
def strata_of(requests: int) -> Strata:
    """Cases for so many requests: the fewer there are, the more of them."""
    s = min(max(SCENARIOS // max(requests, 1), 2), 64)
    case, column = np.arange(s)[:, None], np.arange(requests)
    return Strata((case + 0.5) / s, case + 5 * column, ((case * 13) % s + 0.5) / s, case * 37 + 11 * column)
