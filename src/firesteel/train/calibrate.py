"""``firesteel calibrate``: fit the survival model of a checkpoint's drafter, and say how good it is.

The engine answers prompts with every draft verified, so each block tells at every depth whether its
draft and all before it were accepted. Fitted from that: one temperature per depth (sequential
temperature scaling, DSpark 3.2.1) and the logistic model of ``speculation.survival``, which the engine
uses. One half of the requests fits, the other half measures; the file is fitted on all.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from firesteel.bench.readers import encode, fit_set
from firesteel.bench.report import environment, write_json
from firesteel.config import ParameterError, SamplingParams
from firesteel.core import Budget
from firesteel.engine.llm import LLM
from firesteel.speculation.policy import (
    Candidate,
    Drafting,
    FixedWidth,
    Load,
    Proposed,
    Timing,
    Verified,
)
from firesteel.speculation.survival import (
    CLASSES,
    Coefficients,
    Samples,
    auc,
    brier,
    ece,
    fit,
    logistic,
    sequential_temperatures,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NAMES = ("greedy", "sampled")


@dataclass(frozen=True)
class Blocks:
    """Drafted and wholly verified blocks, n of them, K deep.

    ``head`` float64 [n, K] logits of the confidence head (None: there is none), ``margin`` [n, K];
    ``accepted`` int64 [n] leading drafts that were accepted, ``known`` [n] depths at which that is known;
    ``kind`` [n] temperature class, ``group`` [n] which request it came from.
    """

    head: Floats | None
    margin: Floats
    accepted: Ints
    known: Ints
    kind: Ints
    group: Ints

    def __len__(self) -> int:
        return len(self.margin)

    @property
    def depths(self) -> int:
        """K."""
        return int(self.margin.shape[1])

    def pick(self, which: NDArray[np.bool_]) -> Blocks:
        """A subset."""
        head = None if self.head is None else self.head[which]
        return Blocks(
            head,
            self.margin[which],
            self.accepted[which],
            self.known[which],
            self.kind[which],
            self.group[which],
        )

    @classmethod
    def joined(cls, parts: Sequence[Blocks]) -> Blocks:
        """All of several."""
        heads = [p.head for p in parts if p.head is not None]
        head = np.concatenate(heads) if len(heads) == len(parts) else None
        names = ("margin", "accepted", "known", "kind", "group")
        return cls(head, *(np.concatenate([getattr(p, n) for p in parts]) for n in names))

    def samples(self) -> Samples:
        """Drafts that were not behind a rejection, one line each."""
        depth = np.broadcast_to(np.arange(self.depths), self.margin.shape)
        open_ = (depth <= self.accepted[:, None]) & (depth < self.known[:, None])
        kind = np.broadcast_to(self.kind[:, None], depth.shape)
        head = np.zeros(self.margin.shape) if self.head is None else self.head
        accepted = (depth < self.accepted[:, None]).astype(np.float64)
        return Samples(head[open_], self.margin[open_], depth[open_], kind[open_], accepted[open_])


@dataclass(frozen=True)
class Fit:
    """``temperatures`` of each class by depth (empty without a head); ``coefficients`` of the logistic model."""

    temperatures: dict[str, list[float]]
    coefficients: Coefficients

    def to_json(self) -> dict[str, Any]:
        """The calibration file."""
        return {**self.coefficients.to_json(), "temperatures": self.temperatures}


def calibrate(blocks: Blocks, uses_margin: bool = True) -> Fit:
    """Both models from blocks; a class that never occurred keeps its prior."""
    prior = Coefficients.prior(blocks.depths, blocks.head is not None, uses_margin)
    temperatures: dict[str, list[float]] = {}
    for kind, name in enumerate(NAMES):
        full = blocks.pick((blocks.kind == kind) & (blocks.known == blocks.depths))
        if full.head is not None and len(full):
            head = [full.head[:, j] for j in range(full.depths)]
            survived = [(full.accepted > j).astype(np.float64) for j in range(full.depths)]
            temperatures[name] = sequential_temperatures(head, survived)
    samples = blocks.samples()
    usual: list[float] = []  # where it has no samples, a depth is worth what the one before it is
    for j in range(blocks.depths):
        mine = samples.accepted[samples.depth == j]
        usual.append(float(mine.mean()) if len(mine) else usual[-1] if usual else 0.5)
    return Fit(temperatures, replace(fit(samples, prior), usual=tuple(usual)))


# ---- quality ---------------------------------------------------------------------------------------
def conditional(blocks: Blocks, fitted: Fit | None, how: str) -> Floats:
    """P(draft accepted | all before it) [n, K]: the head alone ("head"), with its temperatures ("sts") or
    the logistic model ("logistic")."""
    if how == "logistic":
        assert fitted is not None
        depth = np.broadcast_to(np.arange(blocks.depths), blocks.margin.shape)
        kind = np.broadcast_to(blocks.kind[:, None], depth.shape)
        head = np.zeros(blocks.margin.shape) if blocks.head is None else blocks.head
        return fitted.coefficients.probability(head, blocks.margin, depth, kind)
    assert blocks.head is not None
    scale = np.ones(blocks.margin.shape)
    if how == "sts":
        assert fitted is not None
        for number, name in enumerate(NAMES):
            if name in fitted.temperatures:
                scale[blocks.kind == number] = fitted.temperatures[name]
    return logistic(blocks.head / scale)


def by_depth(blocks: Blocks, predicted: Floats) -> list[dict[str, float | None]]:
    """Quality of conditional predictions and of their running product, by depth; ECE in 15 equal-mass bins.

    An AUC is None where only one outcome occurred.
    """
    out = []
    survival = np.cumprod(predicted, axis=1)
    for j in range(blocks.depths):
        known = blocks.known > j
        open_ = known & (blocks.accepted >= j)
        p, truth = predicted[open_, j], (blocks.accepted[open_] > j).astype(np.float64)
        s, alive = survival[known, j], (blocks.accepted[known] > j).astype(np.float64)
        if len(p) == 0:
            continue
        line: dict[str, float] = {"depth": j + 1, "samples": len(p), "accepted": float(truth.mean())}
        line |= {"ece": ece(p, truth), "brier": brier(p, truth), "auc": auc(p, truth)}
        line |= {"blocks": len(s), "survived": float(alive.mean()), "survival_ece": ece(s, alive)}
        line |= {"survival_brier": brier(s, alive), "survival_auc": auc(s, alive)}
        out.append({k: None if math.isnan(v) else v for k, v in line.items()})
    return out


def quality(blocks: Blocks, fitted: Fit) -> dict[str, Any]:
    """By temperature class and method, ``by_depth`` of blocks that did not fit the model."""
    out: dict[str, Any] = {}
    for kind, name in enumerate(NAMES[:CLASSES]):
        part = blocks.pick(blocks.kind == kind)
        if len(part):
            how = ("head", "sts", "logistic") if part.head is not None else ("logistic",)
            out[name] = {h: by_depth(part, conditional(part, fitted, h)) for h in how}
    return out


def report(blocks: Blocks, uses_margin: bool = True) -> tuple[Fit, dict[str, Any]]:
    """(model fitted on all blocks, quality of one fitted on every other request, measured on the rest)."""
    if len(blocks) == 0:
        raise ParameterError("calibrate: no block was verified; give more prompts or a larger --max-tokens")
    even = np.zeros(len(blocks), dtype=np.bool_)
    for kind in range(CLASSES):  # every other request of a class fits
        mine = blocks.kind == kind
        even[mine] = np.unique(blocks.group[mine], return_inverse=True)[1] % 2 == 0
    said: dict[str, Any] = {"blocks": len(blocks), "requests": len(np.unique(blocks.group))}
    if even.any() and not even.all():
        half = calibrate(blocks.pick(even), uses_margin)
        said["quality"] = quality(blocks.pick(~even), half)
    return calibrate(blocks, uses_margin), said


# ---- the engine -------------------------------------------------------------------------------------
@dataclass
class Recorder:
    """A policy that drafts and verifies all it can, and keeps what became of it."""

    gamma: int
    lines: list[tuple[Proposed, Verified]] = field(default_factory=list)
    learns: bool = True

    def __post_init__(self) -> None:
        self._fixed = FixedWidth(self.gamma)
        self._pending: dict[int, Proposed] = {}

    def budget(self, candidates: Sequence[Candidate], load: Load) -> Budget:
        """All drafts that exist."""
        return self._fixed.budget(candidates, load)

    def drafting(self, candidates: Sequence[Candidate], load: Load) -> Drafting:
        """Everybody."""
        return self._fixed.drafting(candidates, load)

    def predict(self, rows: int, context: float, drafting: Drafting) -> float:
        """Nobody asks."""
        return 0.0

    def rested(self, steps: int) -> None:
        """It never rests."""

    def calibration(self) -> Coefficients | None:
        """Survival is not used."""
        return None

    def learn(self, proposed: Sequence[Proposed], verified: Sequence[Verified], timing: Timing) -> None:
        """Outcomes belong to the drafts of the pass before; a request's last block is cut and left out."""
        for v in verified:
            before = self._pending.pop(v.request_id, None)
            if before is not None and v.verified and not v.ended:
                self.lines.append((before, v))
        self._pending.update((p.request_id, p) for p in proposed)

    def forget(self, request_id: int, tokens: int = 0) -> None:
        """A request has ended."""
        self._pending.pop(request_id, None)

    def blocks(self) -> Blocks:
        """All outcomes as columns."""
        k = self.gamma

        def column(rows: list[tuple[float, ...]]) -> Floats:
            return np.array(rows, dtype=np.float64).reshape(-1, k)

        has_head = bool(self.lines) and bool(self.lines[0][0].head)
        return Blocks(
            column([p.head for p, _ in self.lines]) if has_head else None,
            column([p.margin for p, _ in self.lines]),
            np.array([v.accepted for _, v in self.lines], dtype=np.int64),
            np.array([v.verified for _, v in self.lines], dtype=np.int64),
            np.array([p.kind for p, _ in self.lines], dtype=np.int64),
            np.array([p.request_id for p, _ in self.lines], dtype=np.int64),
        )


def collect(
    llm: LLM,
    prompts: Sequence[str | Sequence[int]],
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> Blocks:
    """Blocks of an engine with a drafter and fixed widths; ``progress`` hears finished answers."""
    gamma = llm.settings.gamma
    if gamma == 0:
        raise ParameterError("calibrate: the engine has no drafter; give a speculative config")
    recorder = Recorder(gamma)
    scheduler = llm.engine.scheduler
    before, scheduler.policy = scheduler.policy, recorder
    pairs = [(p, t) for p in prompts for t in temperatures]
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=t, seed=seed + i) for i, (_, t) in enumerate(pairs)
    ]
    done = 0

    def tick(answer: Any) -> None:
        nonlocal done
        if answer.finish is not None:
            done += 1
            progress(done)

    try:
        llm.generate([p if isinstance(p, str) else list(p) for p, _ in pairs], params, on_token=tick)
    finally:
        scheduler.policy = before
    return recorder.blocks()


def read_prompts(path: str | Path, llm: LLM, limit: int | None = None) -> list[str | list[int]]:
    """Prompts of a JSONL file: each line has ``prompt`` (text), ``token_ids``, ``messages`` or GSM8K's ``question``.

    Questions are asked in chat and thinking mode in turn. Raises ParameterError naming the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as err:
        raise ParameterError(f"prompts: {path} cannot be read ({err.strerror}); give a JSONL file") from err
    out: list[str | list[int]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
        except json.JSONDecodeError as err:
            raise ParameterError(f"prompts: {path}, line {number}: not JSON ({err})") from err
        out.append(_prompt(raw, llm, f"{path}, line {number}", thinking=number % 2 == 0))
        if limit is not None and len(out) == limit:
            break
    return out


def _prompt(raw: Any, llm: LLM, where: str, thinking: bool) -> str | list[int]:
    if isinstance(raw, dict):
        if isinstance(raw.get("token_ids"), list):
            return [int(t) for t in raw["token_ids"]]
        if isinstance(raw.get("prompt"), str):
            ids = [] if llm.tokenizer is None else list(llm.tokenizer.encode(raw["prompt"]))
            return [llm.config.bos_token_id, *ids] if ids else str(raw["prompt"])
        if isinstance(raw.get("messages"), list):
            return llm.prompt_of(raw["messages"], bool(raw.get("thinking", thinking)))
        if isinstance(raw.get("question"), str):
            effort = "low" if thinking else None
            return llm.prompt_of([{"role": "user", "content": raw["question"]}], thinking, effort)
    raise ParameterError(f"prompts: {where}: expected prompt, token_ids, messages or question")


@dataclass(frozen=True)
class Job:
    """Settings of one calibration; ``k`` None takes the trained block size, ``prompts`` None the bundled ones."""

    model: str | None = None
    prompts: str | None = None
    limit: int | None = None
    k: int | None = None
    temperatures: tuple[float, ...] = (0.0, 1.0)
    max_tokens: int = 256
    acceptance: str = "coupled"
    seed: int = 0
    engine: dict[str, Any] = field(default_factory=dict)


def run(job: Job, progress: Callable[[int, int], None] = lambda _d, _t: None) -> tuple[Fit, dict[str, Any]]:
    """Load the model, answer the prompts, fit; the report names machine, settings and quality."""
    from firesteel.engine.build import BUNDLED
    from firesteel.models.deepseek_v4.config import V4Config

    dspark = V4Config.load(job.model or BUNDLED).dspark
    if dspark is None:
        raise ParameterError(
            f"calibrate: {job.model or 'the bundled model'} has no drafter; train one with firesteel train drafter"
        )
    spec = {"num_speculative_tokens": job.k or dspark.block_size, "acceptance": job.acceptance}
    llm = LLM(job.model, speculative=spec, **job.engine)
    if job.prompts is None:
        prompts: list[str | list[int]] = [encode(llm, ask) for ask in fit_set().asks[: job.limit]]
    else:
        prompts = read_prompts(job.prompts, llm, job.limit)
    total = len(prompts) * len(job.temperatures)
    blocks = collect(
        llm, prompts, job.temperatures, job.max_tokens, job.seed, lambda done: progress(done, total)
    )
    fitted, said = report(blocks, uses_margin=job.acceptance == "coupled")
    if job.prompts is None:  # nobody's traffic: what drafts are usually worth is for the engine to find out
        fitted = replace(fitted, coefficients=replace(fitted.coefficients, usual=()))
    about = {"environment": environment(), "notes": list(llm.notes), "k": spec["num_speculative_tokens"]}
    about |= {"temperatures": list(job.temperatures), "acceptance": job.acceptance, "prompts": len(prompts)}
    return fitted, about | said


def write(fitted: Fit, said: dict[str, Any], path: str | Path) -> None:
    """The calibration file, with where it comes from."""
    origin = {k: said[k] for k in ("blocks", "requests", "k", "acceptance", "environment") if k in said}
    Path(path).write_text(json.dumps({**fitted.to_json(), "origin": origin}, indent=1) + "\n")


def main(args: argparse.Namespace) -> int:
    """``firesteel calibrate``: run, write the file, print what it gained."""
    try:
        temperatures = tuple(float(t) for t in args.temperatures.split(","))
    except ValueError as err:
        raise ParameterError(f"--temperatures {args.temperatures!r}: give numbers, as in 0,1") from err
    for name in ("k", "limit", "max_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ParameterError(f"--{name.replace('_', '-')}: {value}: expected an integer from 1 up")
    engine = {"numerics": args.numerics, "backend": args.backend, "threads": args.threads}
    engine |= {"max_model_len": args.max_model_len, "max_num_seqs": args.max_num_seqs}
    job = Job(
        args.model,
        args.prompts,
        args.limit,
        args.k,
        temperatures,
        args.max_tokens,
        args.acceptance,
        args.seed,
        engine,
    )
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("answers", total=None)
        fitted, said = run(job, lambda done, total: bar.update(task, completed=done, total=total))
    write(fitted, said, args.out)
    write_json(said, args.json)
    for name, methods in said.get("quality", {}).items():
        table = Table("depth", "accepted", *(f"{m} {q}" for m in methods for q in ("ECE", "AUC")), title=name)
        for lines in zip(*methods.values(), strict=True):
            cells = ("-" if line[q] is None else f"{line[q]:.3f}" for line in lines for q in ("ece", "auc"))
            table.add_row(str(lines[0]["depth"]), f"{lines[0]['accepted']:.3f}", *cells)
        Console().print(table)
    Console().print(f"{said['blocks']} blocks of {said['requests']} requests; wrote {args.out}")
    return 0
