"""What the page shows of the engine: the last minutes by the second, and what is known now.

Fed by the same "stats" messages as the metrics. A dashboard reads it as JSON
from ``/firesteel/stats?since=T``, which holds the complete seconds after T.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from firesteel.serve.messages import ModelInfo
from firesteel.serve.metrics import OFF, why_inactive

SECONDS = 300  # kept
STEADY = 200  # steps of a size after which an old one counts less and less
# summed over the steps of a second
SUMS = (
    "steps", "decoding_steps", "groups", "tokens", "prompt_tokens", "drafts", "verified", "accepted", "expected",
    "emitted", "measured_ms", "host_ms", "predicted_ms", "predicted_measured_ms",
)  # fmt: skip
# as they stood at its end
GAUGES = ("running", "waiting", "pages_held", "pages_cached", "pages_free")


@dataclass
class _Second:
    """One second; ``t`` in seconds since the epoch."""

    t: int
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    gauges: dict[str, int] = field(default_factory=lambda: dict.fromkeys(GAUGES, 0))


@dataclass
class _Size:
    """Steps of one number of rows: means of measured and predicted milliseconds."""

    steps: int = 0
    measured: float = 0.0
    predictions: int = 0
    predicted: float = 0.0

    def add(self, measured: float, predicted: float) -> None:
        """One step; ``predicted`` 0 if nobody predicted it."""
        self.steps += 1
        self.measured += (measured - self.measured) / min(self.steps, STEADY)
        if predicted > 0:
            self.predictions += 1
            self.predicted += (predicted - self.predicted) / min(self.predictions, STEADY)


class Board:
    """Everything a dashboard asks for; belongs to the event loop's thread."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._past: deque[_Second] = deque(maxlen=SECONDS)
        self._now = _Second(int(clock()))
        self._info: ModelInfo | None = None
        self._sizes: dict[int, _Size] = {}
        self._depth: dict[str, list[int]] = {"verified_at": [], "accepted_at": []}
        self._latest: dict[str, Any] = {}  # quality, reliability and curve, as they came last
        self._draft_reason = ""
        self._reason = ""  # why the newest decoding step verified no drafts
        self._active = False

    def ready(self, info: ModelInfo) -> None:
        """A (new) engine: what was known of the one before it is forgotten, but not the past seconds."""
        self._advance()
        self._info = info
        self._now.gauges = {**dict.fromkeys(GAUGES, 0), "pages_free": info.pages}
        self._sizes.clear()
        self._latest.clear()
        self._depth = {"verified_at": [], "accepted_at": []}
        self._draft_reason = self._reason = ""
        self._active = False

    # ---- in --------------------------------------------------------------------
    def stats(self, message: Mapping[str, Any]) -> None:
        """Take a "stats" message."""
        self._advance()
        now = message["counters"]
        held = now["pages"] - now["pages_free"] - now["pages_cached"]
        values = (now["running"], now["waiting"], max(held, 0), now["pages_cached"], now["pages_free"])
        self._now.gauges = dict(zip(GAUGES, values, strict=True))
        self._depth = message["depth"]
        for name in ("quality", "reliability", "curve"):
            if name in message:
                self._latest[name] = message[name]
        for step in message["steps"]:
            self._step(step)

    def _advance(self) -> None:
        """Close the seconds that have passed; in one without a message nothing ran."""
        t = int(self._clock())
        if t - self._now.t > SECONDS:
            self._past.clear()
            self._now = _Second(t - SECONDS, gauges=self._now.gauges)
        while self._now.t < t:
            self._past.append(self._now)
            self._now = _Second(self._now.t + 1, gauges=self._now.gauges)

    def _step(self, step: Mapping[str, Any]) -> None:
        sums = self._now.sums
        sums["steps"] += 1
        sums["tokens"] += step["emitted"]
        sums["prompt_tokens"] += step["prompt_rows"]
        sums["measured_ms"] += step["measured_ms"]
        sums["host_ms"] += step["host_ms"]
        if step["predicted_ms"] > 0:
            sums["predicted_ms"] += step["predicted_ms"]
            sums["predicted_measured_ms"] += step["measured_ms"]
        if step["decodes"]:
            self._decoding(step)
        if step["rows"]:
            size = self._sizes.setdefault(_rounded(step["rows"]), _Size())
            size.add(step["measured_ms"], step["predicted_ms"])
        self._draft_reason = step["draft_reason"]

    def _decoding(self, step: Mapping[str, Any]) -> None:
        sums = self._now.sums
        sums["decoding_steps"] += 1
        sums["groups"] += step["decodes"]
        sums["verified"] += step["verified"]
        sums["accepted"] += step["accepted"]
        sums["drafts"] += step["drafts"]
        if step["drafts"]:
            sums["expected"] += max(step["expected_tokens"], 0.0)
            sums["emitted"] += step["emitted"]
        self._active = step["drafts"] > 0
        gamma = self._info.gamma if self._info is not None else 0
        self._reason = "" if self._active else why_inactive(step, self._draft_reason, gamma)

    # ---- out -------------------------------------------------------------------
    def snapshot(self, since: float = 0.0, up: bool = True) -> dict[str, Any]:
        """Plain values without NaN; of the seconds those after ``since``, complete ones only.

        up: whether the engine lives; of a dead one nothing runs.
        """
        self._advance()
        if not up:
            self._now.gauges = dict.fromkeys(GAUGES, 0)
        seconds = [s for s in self._past if s.t > since]
        points: dict[str, list[float]] = {"t": [s.t for s in seconds]}
        points |= {name: [round(s.sums[name], 3) for s in seconds] for name in SUMS}
        points |= {name: [s.gauges[name] for s in seconds] for name in GAUGES}
        steps = [
            [rows, s.steps, round(s.measured, 4), round(s.predicted, 4) if s.predictions else None]
            for rows, s in sorted(self._sizes.items())
        ]
        return {
            "engine": _plain(vars(self._info)) if self._info is not None else None,
            "speculation": self._speculation(),
            "points": points,
            "now": dict(self._now.gauges),
            "depth": self._depth,
            "quality": _plain(self._latest.get("quality", [])),
            "reliability": _plain(self._latest.get("reliability", [])),
            "cost": {"curve": _plain(self._latest.get("curve", [])), "steps": steps},
        }

    def _speculation(self) -> dict[str, Any]:
        """Whether drafts are verified and, if not, why."""
        if self._info is None:
            return {"gamma": 0, "active": False, "reason": "the engine is not ready"}
        off = "" if self._info.gamma else f"{OFF}: start with --speculative-config"
        return {
            "gamma": self._info.gamma,
            "active": self._active,
            "reason": off or self._reason,
            "adaptive": self._info.adaptive,
        }


def _rounded(rows: int) -> int:
    """Row counts with four significant bits: neighbours of large ones share a line."""
    unit = 1 << max(rows.bit_length() - 4, 0)
    return rows // unit * unit


def _plain(value: Any) -> Any:
    """Without NaN and infinity, which JSON does not know."""
    if isinstance(value, float):
        return round(value, 5) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
