"""A deterministic test bed for scheduling: the real engine and real acceptance, time from a cost table.

Every arm runs the same closed loop: C requests at a time, a new one as soon as
one ends. A step takes what the table says, so a result depends on nothing but
the model, the table and the decisions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firesteel.config import SamplingParams
from firesteel.engine.llm import LLM
from firesteel.speculation.cost import CostModel, CostTable
from firesteel.speculation.policy import Adaptive
from firesteel.speculation.survival import Calibrator, Coefficients

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def tables(gamma: int) -> dict[str, CostTable]:
    """Shapes of hardware: a GPU's staircase, a linear CPU, and one where rows are free."""

    def made(
        name: str, step: Sequence[float], draft_base: float, draft_unit: float, stairs: bool
    ) -> CostTable:
        widths = sorted({1, (gamma + 1) // 2, gamma})
        draft = {w: tuple(draft_base + draft_unit * n * w for n in REQUESTS) for w in widths}
        return CostTable(name, ROWS, tuple(step), 64, 0.0, REQUESTS, draft, stairs)

    stairs = (1.5, 1.8, 2.3, 3.0, 3.9, 4.8, 6.5, 7.9, 9.3, 10.6, 13.4, 22.9)
    return {
        "staircase": made("staircase", stairs, 1.2, 0.007, True),
        "linear": made("linear", [2.0 + 0.9 * r for r in ROWS], 0.6, 0.25, False),
        "flat": made("flat", [8.0] * len(ROWS), 0.8, 0.0, False),
    }


@dataclass(frozen=True)
class Point:
    """One arm at one concurrency."""

    table: str
    arm: str
    concurrency: int
    tokens: int
    ms: float
    steps: int
    drafts_per_step: float

    @property
    def rate(self) -> float:
        """Tokens per virtual second."""
        return 1e3 * self.tokens / max(self.ms, 1e-9)


class Bed:
    """One engine per arm, reused over tables and concurrencies."""

    def __init__(self, model: str | Path, arm: str, spec: dict[str, Any] | None, slots: int, **settings: Any):
        self.arm = arm
        adaptive = bool(spec and spec.get("enable_adaptive_verification"))
        plain = {k: v for k, v in (spec or {}).items() if k != "enable_adaptive_verification"}
        self.llm = LLM(
            model,
            max_num_seqs=slots,
            max_num_batched_tokens=max(slots * 9, 128),
            prefix_caching=False,
            speculative=plain or None,
            **settings,
        )
        self.adaptive = adaptive

    def run(
        self,
        table: CostTable,
        concurrency: int,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        believed: CostTable | None = None,
        warmup: int = 0,
    ) -> Point:
        """The closed loop on a fresh policy.

        ``believed``: the table the policy starts from, if another; the first
        ``warmup`` requests are not counted.
        """
        engine = self.llm.engine
        engine.drain()
        engine.runner.virtual = CostModel(table)
        if self.adaptive:
            gamma = engine.config.gamma
            assert engine.runner.drafter is not None, "an adaptive arm drafts"
            head = engine.runner.drafter.weights.markov.confidence is not None
            start = Calibrator(Coefficients.prior(gamma, head, True))
            engine.scheduler.policy = Adaptive(gamma, CostModel(believed or table), start)
        pairs = list(zip(prompts, params, strict=True))
        self._loop(pairs[:warmup], concurrency)
        engine.records.clear()
        tokens = self._loop(pairs[warmup:], concurrency)
        records = list(engine.records)
        return Point(
            table=table.fingerprint,
            arm=self.arm,
            concurrency=concurrency,
            tokens=tokens,
            ms=sum(r.measured_ms for r in records),
            steps=len(records),
            drafts_per_step=sum(r.budget.drafts for r in records) / max(len(records), 1),
        )

    def _loop(self, pairs: list[tuple[Sequence[int], SamplingParams]], concurrency: int) -> int:
        """Run requests, ``concurrency`` at a time; tokens of all answers."""
        frontend, queue, open_, tokens = self.llm.frontend, list(pairs), 0, 0
        while queue or open_:
            while queue and open_ < concurrency:
                frontend.add(*queue.pop(0))
                open_ += 1
            for answer in frontend.step():
                if answer.finish is not None:
                    open_ -= 1
                    tokens += len(answer.ids)
        frontend.engine.drain()
        return tokens
