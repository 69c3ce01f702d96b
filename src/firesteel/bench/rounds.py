"""The rounds of a sweep: all arms interleaved on one rig, judged point by point. ``sweep.py`` is the command."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from firesteel.bench.acceptance import Tally
from firesteel.bench.arms import ADAPTIVE, Arm, Rig, Run, parse_arms
from firesteel.bench.loops import Job
from firesteel.bench.pairing import Ratio, judge, overall, percentiles
from firesteel.bench.readers import RequestSet, encode_all, seed_of
from firesteel.bench.report import environment
from firesteel.config import ParameterError, SamplingParams, SimulatedAcceptance
from firesteel.speculation.policy import Adaptive

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
PHASES = ("all", "decode")
WARM = 1_000_000  # repeats from here on are warm-ups: seeds of their own


@dataclass(frozen=True)
class Plan:
    """All settings of one sweep; they are fields of its result."""

    concurrency: tuple[int, ...] = (64, 32, 16, 8, 4, 2, 1)
    arms: str = "none,1,3,5,7,adaptive"
    drafts: int | None = None  # that the adaptive arm may make at most; None: as the widest fixed arm
    rounds: int = 8
    seconds: float | None = None  # of all points; then as many rounds as fit, from 2 to ``rounds``
    requests: int | None = None  # of one round; None: 3 x concurrency, at least 24
    waves: int | None = None  # the same as a multiple of the concurrency
    max_tokens: int = 96
    temperature: float = 1.0
    top_p: float = 1.0
    ignore_eos: bool = False
    warmups: int = 2
    warm_requests: int | None = None  # of one warm-up; None: as many as a round
    seed: int = 0
    prefix_caching: bool = True
    keep_prefixes: bool = False  # a prompt runs once at a point, unmeasured, and is in the cache from then on
    phase: str = "all"  # "decode": arms are judged by the time in which all requests decode
    slice: float | None = None  # seconds of an arm's turn within a round; None: whole rounds
    clock: str = "wall"  # "cpu": seconds this process ran, for one thread on a shared machine
    acceptance: str = "coupled"
    simulated: dict[str, Any] | None = None  # fields of SimulatedAcceptance
    engine: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.concurrency or min(self.concurrency) < 1:
            raise ParameterError(f"concurrency={self.concurrency}: expected integers from 1 up")
        if self.rounds < 2 or self.warmups < 0:
            raise ParameterError(
                f"rounds={self.rounds}, warmups={self.warmups}: the best arm is chosen on even and scored on odd "
                "rounds; give at least 2 rounds and no negative warm-ups"
            )
        if self.seconds is not None and not self.seconds > 0:
            raise ParameterError(f"seconds={self.seconds}: expected a number above 0, or none for all rounds")
        if self.slice is not None and not self.slice > 0:
            raise ParameterError(f"slice={self.slice}: expected seconds above 0, or none for whole rounds")
        if self.phase not in PHASES:
            raise ParameterError(f"phase={self.phase!r}: expected one of {', '.join(PHASES)}")
        if self.keep_prefixes and not self.prefix_caching:
            raise ParameterError("keep_prefixes: there is no prefix cache; leave prefix_caching on")
        if self.clock not in CLOCKS:
            raise ParameterError(f"clock={self.clock!r}: expected one of {', '.join(CLOCKS)}")
        SimulatedAcceptance.of(self.simulated)  # raises on what is none

    def per_round(self, concurrency: int) -> int:
        """Requests of one round."""
        if self.waves is not None:
            return self.waves * concurrency
        return self.requests or max(3 * concurrency, 24)  # fewer, and the run-down is most of a round


def pin(cpu: int | None) -> int | None:
    """Bind this process to one CPU (None: the last one it may use); the CPU, or None where that is impossible."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    allowed = sorted(os.sched_getaffinity(0))
    chosen = allowed[-1] if cpu is None else cpu
    if chosen not in allowed:
        raise ParameterError(f"pin={chosen}: this process may use the CPUs {allowed}; choose one of them")
    os.sched_setaffinity(0, {chosen})
    return chosen


class Sweep:
    """The points of one plan on one rig."""

    def __init__(self, model: str | None, requests: RequestSet, plan: Plan):
        self.requests, self.plan = requests, plan
        self.arms = parse_arms(plan.arms, plan.drafts)
        most = max(plan.concurrency)
        spec: dict[str, Any] = {"acceptance": plan.acceptance}
        if plan.simulated is not None:
            spec["simulated_acceptance"] = dict(plan.simulated)
        width = 1 + max(a.width for a in self.arms)
        settings = {"max_num_seqs": most, "max_num_batched_tokens": max(most * width, 512)}
        settings |= {"prefix_caching": plan.prefix_caching} | plan.engine
        self.rig = Rig(model, self.arms, spec, plan.slice is not None, **settings)
        self.prompts = encode_all(self.rig.llm, requests.asks, plan.max_tokens)

    def jobs(self, first: int, count: int, offset: int = 0) -> list[Job]:
        """``count`` requests from place ``first`` of the endlessly repeated set, each repeat with its own seeds."""
        out = []
        for i in range(first, first + count):
            repeat, at = divmod(i, len(self.prompts))
            seed = seed_of(self.plan.seed, self.requests.asks[at].key, offset + repeat)
            params = SamplingParams(
                max_tokens=self.plan.max_tokens,
                temperature=self.plan.temperature,
                top_p=self.plan.top_p,
                ignore_eos=self.plan.ignore_eos,
                seed=seed,
            )
            out.append(Job(self.prompts[at], params))
        return out

    def point(
        self, concurrency: int, tick: Callable[[str], None] = lambda _: None, until: float = math.inf
    ) -> dict[str, Any]:
        """Warm-ups, rounds and judgement at one concurrency; no third round is begun that would end past ``until``."""
        plan, count = self.plan, self.plan.per_round(concurrency)
        self.rig.start()
        tally = self._warm_up(concurrency, tick)
        runs: dict[str, list[Run]] = {arm.name: [] for arm in self.arms}
        known: set[tuple[int, ...]] = set()
        for r in range(plan.rounds):
            begun = time.monotonic()
            if plan.keep_prefixes:
                self._cache(self.jobs(r * count, count), concurrency, known)
            for run in self._round(r, count, concurrency, tick):
                runs[run.arm].append(run)
            now = time.monotonic()
            if r >= 1 and 2 * now - begun > until:
                break
        out: dict[str, Any] = {
            "concurrency": concurrency,
            "requests_per_round": count,
            "arms": {name: _of_runs(part) for name, part in runs.items()},
            "checks": self._checks(runs),
            "acceptance_by_position": None if tally is None else _of_tally(tally),
        }
        rates = {name: [run.rate(plan.phase) for run in part] for name, part in runs.items()}
        fixed = [a.name for a in self.arms if not a.adaptive]
        if ADAPTIVE in rates and fixed:
            out["verdict"] = judge(rates, ADAPTIVE, fixed).to_json()
        if ADAPTIVE in rates:
            learned = self.rig.policy(ADAPTIVE)
            assert isinstance(learned, Adaptive), "the adaptive arm"
            out["reliability"] = learned.calibrator.quality()
        return out

    def _round(self, turn: int, count: int, concurrency: int, tick: Callable[[str], None]) -> Iterator[Run]:
        """All arms on the jobs of one round: one behind the other, or in turns."""
        plan, order = self.plan, self._order(turn)
        clock, keep, said = CLOCKS[plan.clock], plan.keep_prefixes, f"{concurrency} at once, round {turn + 1}"
        work = [(arm, self.jobs(turn * count, count)) for arm in order]
        if plan.slice is not None:
            yield from self.rig.in_turns(work, concurrency, plan.slice, clock, keep)
            for _ in order:
                tick(said)
            return
        for arm, jobs in work:
            tick(f"{said}, {arm.name}")
            yield self.rig.run(arm, jobs, concurrency, clock=clock, keep_prefixes=keep)

    def _cache(self, jobs: Sequence[Job], concurrency: int, known: set[tuple[int, ...]]) -> None:
        """Run the prompts that are not ``known``, for one token each: else the first arm of a round pays for them."""
        new = {tuple(j.ids): j for j in jobs if tuple(j.ids) not in known}
        once = [Job(j.ids, replace(j.params, max_tokens=1)) for j in new.values()]
        for arm in (
            self.arms if self.plan.slice is not None else self.arms[:1]
        ):  # each has a cache, or all one
            if once:
                self.rig.run(arm, [replace(j) for j in once], concurrency, keep_prefixes=True)
        known |= set(new)

    def _order(self, turn: int) -> list[Arm]:
        """The arms in the order of this round."""
        return [self.arms[i] for i in order_of(len(self.arms), turn)]

    def _warm_up(self, concurrency: int, tick: Callable[[str], None]) -> Tally | None:
        """All arms in turn, unmeasured; acceptance by position is counted here, on the widest fixed arm."""
        count = self.plan.warm_requests or self.plan.per_round(concurrency)
        widest = max(
            (a for a in self.arms if a.width and not a.adaptive), key=lambda a: a.width, default=None
        )
        tally = Tally()
        for turn in range(self.plan.warmups):
            for arm in self._order(turn):
                tick(f"{concurrency} at once, warm-up {turn + 1}, {arm.name}")
                jobs = self.jobs(turn * count, count, WARM)
                hear = tally if arm is widest else None
                self.rig.run(arm, jobs, concurrency, hear, keep_prefixes=self.plan.keep_prefixes)
        return tally if tally.steps else None

    def _checks(self, runs: dict[str, list[Run]]) -> dict[str, Any]:
        """What makes the figures of a point comparable."""
        flat = [run for part in runs.values() for run in part]
        texts = [len({run.digest for run in turn}) == 1 for turn in zip(*runs.values(), strict=True)]
        lossless = self.plan.acceptance == "coupled"
        return {
            "client_equals_server_tokens": all(run.tokens == run.server_tokens for run in flat),
            "preemptions": sum(run.preemptions for run in flat),
            "identical_texts": all(texts) if lossless else None,
            "answers_per_round_compared": len(runs) if lossless else 0,
        }

    def run(self, tick: Callable[[str], None] = lambda _: None) -> Iterator[dict[str, Any]]:
        """All points, the highest concurrency first."""
        points, seconds = sorted(set(self.plan.concurrency), reverse=True), self.plan.seconds
        end = None if seconds is None else time.monotonic() + seconds
        for i, c in enumerate(points):  # a round takes about as the root of the concurrency
            share, now = math.sqrt(c) / sum(math.sqrt(rest) for rest in points[i:]), time.monotonic()
            yield self.point(c, tick, math.inf if end is None else now + share * (end - now))


def order_of(arms: int, turn: int) -> list[int]:
    """Order of a round: every arm stands at every place, and right behind every other one, equally often.

    A heavy arm leaves a warm machine behind. Williams' Latin squares: as many rounds as there are arms, twice as
    many for an odd number of arms, which needs each line and its reverse.
    """
    line = [(((i + 1) // 2 if i % 2 else arms - i // 2) + turn) % arms for i in range(arms)]
    return line[::-1] if arms % 2 and turn // arms % 2 else line


def _of_tally(tally: Tally) -> dict[str, Any]:
    return {
        "judged": tally.reached,
        "accepted": tally.accepted,
        "conditional": tally.conditional,
        "tokens_per_verify_step": tally.tokens_per_step,
    }


def _windows(runs: Sequence[Run]) -> float | None:
    """Tokens per second while all requests decode."""
    seconds = sum(r.window.seconds for r in runs)
    return sum(r.window.tokens for r in runs) / seconds if seconds else None


def _of_runs(runs: Sequence[Run]) -> dict[str, Any]:
    """One arm at one point: totals over rounds, percentiles over all requests."""
    decode = sum(r.decode_seconds for r in runs)
    steps = sum(r.steps for r in runs)
    decodes = sum(r.decodes for r in runs)
    reasons: Counter[str] = Counter()
    draft_reasons: Counter[str] = Counter()
    for run in runs:
        reasons.update(run.reasons)
        draft_reasons.update(run.draft_reasons)
    priced = sum(r.priced_ms for r in runs)
    return {
        "tokens_per_second": sum(r.tokens for r in runs) / sum(r.seconds for r in runs),
        "tokens_per_second_by_round": [r.rate() for r in runs],
        "decode_tokens_per_second": _windows(runs),
        "decode_tokens_per_second_by_round": [r.rate("decode") for r in runs],
        "tokens_per_second_per_user": sum(r.decode_tokens for r in runs) / decode if decode else None,
        "ttft_ms": percentiles([v for r in runs for v in r.ttft_ms]),
        "tpot_ms": percentiles([v for r in runs for v in r.tpot_ms]),
        "tokens": sum(r.tokens for r in runs),
        "server_tokens": sum(r.server_tokens for r in runs),
        "seconds": sum(r.seconds for r in runs),
        "steps": steps,
        "device_share": sum(r.busy_ms for r in runs) / 1e3 / sum(r.seconds for r in runs),
        "host_ms_per_step": sum(r.host_ms for r in runs) / max(steps, 1),
        "step_ms": sum(r.busy_ms for r in runs) / max(steps, 1),
        "drafts_per_request_step": sum(r.drafts for r in runs) / max(decodes, 1),
        "accepted_share": sum(r.accepted for r in runs) / max(sum(r.verified for r in runs), 1),
        "measured_over_predicted": priced / sum(r.predicted_ms for r in runs) if priced else None,
        "departed_steps": sum(r.departures for r in runs),
        "preemptions": sum(r.preemptions for r in runs),
        "reasons": dict(reasons.most_common()),
        "draft_reasons": dict(draft_reasons.most_common()),
        "longest_host_ms_by_round": [r.longest_host_ms for r in runs],
        "longest_decode_turn_ms_by_round": [1e3 * r.window.longest_turn for r in runs],
        "full_collections": sum(r.full_collections for r in runs),
    }


def sweep(
    model: str | None,
    requests: RequestSet,
    plan: Plan,
    pinned: int | None = None,
    tick: Callable[[str], None] = lambda _: None,
    keep: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """The whole result of one sweep as plain values; ``keep`` gets what there is after every point."""
    tick("loading")
    work, points, out = Sweep(model, requests, plan), [], {}
    for point in work.run(tick):
        points.append(point)
        out = _result(work, model, requests, plan, pinned, points)
        keep(out)
    return out


def _result(
    work: Sweep,
    model: str | None,
    requests: RequestSet,
    plan: Plan,
    pinned: int | None,
    points: list[dict[str, Any]],
) -> dict[str, Any]:
    judged = [p["verdict"] for p in points if "verdict" in p]
    return {
        "bench": "sweep",
        "simulated": plan.simulated is not None,
        "model": Path(model).name if model else "bundled",
        "settings": asdict(plan) | {"pinned_cpu": pinned, "threads": torch.get_num_threads()},
        "requests": {
            "name": requests.name,
            "count": len(requests),
            "sha256": requests.digest,
            "domains": requests.domains(),
            "prompt_tokens": percentiles([float(len(p)) for p in work.prompts]),
        },
        "arrangement": "one process, weights loaded once, one engine object per arm and point over shared weights"
        + (
            ", pages and slots"
            if plan.slice is None
            else "; pages and slots apart; arms run in turns of a slice"
        )
        + "; the arm 'none' runs without drafter; prefix cache emptied before every run",
        "notes": list(work.rig.llm.notes),
        "cost_table": work.rig.cost_table,
        "points": points,
        "geometric_mean": _mean(judged, "held_out"),
        "geometric_mean_crossed": _mean(judged, "crossed"),
        "environment": environment(),
    }


def _mean(verdicts: Sequence[dict[str, Any]], which: str) -> dict[str, Any] | None:
    if not verdicts:
        return None
    ratios = [
        Ratio(
            v[which]["ratio"],
            -float("inf") if v[which]["lower"] is None else v[which]["lower"],
            float("inf") if v[which]["error"] is None else v[which]["error"],
            v[which]["rounds"],
        )
        for v in verdicts
    ]
    return overall(ratios).to_json()
