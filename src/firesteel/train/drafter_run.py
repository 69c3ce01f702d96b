"""Train the DSpark drafter of a frozen target in a given time.

    python -m firesteel.train.drafter_run --data DIR --out DIR --seconds 600 [--target-seconds 540]

Phases: the target learns on (only with --target-seconds); speed is measured and the plan fitted to the
time; the target writes answers of its own (``rollout``); the drafter learns from those and from fresh
texts; both are exported in the official layout, evaluated, and an initial calibration.json is fitted.
Every phase is saved; --resume goes on with the last state.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from firesteel.config import ParameterError
from firesteel.engine.build import BUNDLED
from firesteel.models.deepseek_v4.config import DSparkConfig, V4Config
from firesteel.train import calibrate, data, drafter_eval, gsm, run, sinkhorn
from firesteel.train.attention import Numerics
from firesteel.train.drafter import (
    DrafterTrain,
    documents,
    draft_loss,
    draw_anchors,
    eligible,
    lesson,
    loss_terms,
)
from firesteel.train.export import export, load, load_drafter, stored_bytes
from firesteel.train.model import V4Train
from firesteel.train.optim import Optimiser, schedule
from firesteel.train.rollout import Rows, rewrite

HEATS = (0.0, 1.0)  # temperatures at which the target writes


def draft_config(cfg: V4Config, opt: argparse.Namespace) -> V4Config:
    """The target's config with a drafter's fields; raises ParameterError if they do not fit it."""
    taps = opt.taps or list(range(max(0, cfg.num_hidden_layers - 3), cfg.num_hidden_layers))
    if not set(taps) <= set(range(cfg.num_hidden_layers)) or len(set(taps)) < len(taps):
        raise ParameterError(f"--taps {taps}: give distinct layers of 0..{cfg.num_hidden_layers - 1}")
    if not 0 <= opt.noise_token < cfg.vocab_size:
        raise ParameterError(f"--noise-token {opt.noise_token}: outside 0..{cfg.vocab_size - 1}")
    draft = DSparkConfig(opt.block, opt.noise_token, tuple(taps), opt.rank, opt.stages)
    return replace(cfg, dspark=draft, mtp_stages=opt.stages)


@dataclass(frozen=True)
class Plan:
    """What the measured speeds allow: batches that the target rewrites, then training steps."""

    batches: int
    steps: int
    rewrite_seconds: float


def make_plan(
    seconds: float, per_pass: float, per_step: float, passes: int, own: float, reuse: float
) -> Plan:
    """Split the time so that every rewritten batch is used ``reuse`` times.

    ``per_pass``, ``per_step``: measured seconds; ``own``: share of steps on rewritten batches.
    """
    if own <= 0 or passes == 0:
        return Plan(0, int(seconds / per_step), 0.0)
    batches = max(1, int(seconds / (passes * per_pass + reuse / own * per_step)))
    spent = batches * passes * per_pass
    return Plan(batches, max(1, int((seconds - spent) / per_step)), spent)


class DrafterTrainer:
    """Target (frozen), drafter, optimiser, the pool of rewritten batches, and their checkpoints."""

    def __init__(self, target: V4Train, cfg: V4Config, shape: data.Shape, opt: argparse.Namespace):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.opt, self.shape, self.cfg, self.num = opt, shape, cfg, target.num
        torch.manual_seed(opt.seed)
        torch.set_float32_matmul_precision("high")
        self.drafter = DrafterTrain(cfg, self.num)
        self.drafter.start_from(target)
        self.drafter.to(self.device).train()
        self.target = target.to(self.device).eval().requires_grad_(False)
        self.optimiser = Optimiser(self.drafter)
        self.clock, self.step, self.rng = run.Clock(opt.seconds), 0, Random(opt.seed)
        self.pool: list[Rows] = []
        self.history: list[dict[str, float]] = []
        self.written = 0.0  # seconds of the clock that went into the pool
        self.terms = loss_terms
        if opt.compile:
            torch._dynamo.config.recompile_limit = 64
            for block in (*self.target.layers, *self.drafter.mtp):
                block.compile()
            self.target.collapse = torch.compile(self.target.collapse)  # type: ignore[method-assign]
            self.terms = torch.compile(loss_terms)
        self.log = (opt.out / "log.txt").open("a")

    def say(self, text: str) -> None:
        """To the terminal and the log."""
        print(text, flush=True)
        self.log.write(text + "\n")
        self.log.flush()

    def settle(self) -> float:
        """Now, once the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    @property
    def learned(self) -> float:
        """Share of the learning time that is over."""
        return max(0.0, self.clock.spent - self.written) / max(1e-6, self.clock.budget - self.written)

    # ---- the target's own texts ----------------------------------------------------------------
    def fresh(self, batches: Iterator[dict[str, Tensor]]) -> Rows:
        """A batch as the loader made it."""
        return Rows.of(next(batches), self.shape.long_rows, self.device)

    def own(self, batches: Iterator[dict[str, Tensor]]) -> Rows:
        """A batch whose answers the target has written, each row greedily or sampled."""
        rows = self.fresh(batches)
        rows.heat = [self.rng.choice(HEATS) for _ in range(len(rows.tokens))]
        rows.seed = self.rng.getrandbits(40)
        rewrite(self.target, rows, self.opt.passes)
        return rows

    def fill_pool(self, batches: Iterator[dict[str, Tensor]], plan: Plan) -> None:
        """Write ``plan.batches`` batches; stops when the time planned for it is over by half."""
        began, share = time.monotonic(), torch.zeros((), device=self.device)
        for _ in range(plan.batches):
            rows = self.own(batches)
            answer = (rows.classes == gsm.ANSWER).sum()
            share += rows.own.sum() / answer.clamp(min=1)
            self.pool.append(rows)
            self.settle()
            if time.monotonic() - began > 1.5 * plan.rewrite_seconds + 1:
                break
        count = len(self.pool)
        self.say(
            f"the target wrote {count} batches in {time.monotonic() - began:.0f} s; of all answer and text "
            f"tokens {float(share) / max(1, count):.2f} are its own"
        )
        self.written = self.clock.spent
        slim = [(r.tokens.int().cpu(), r.classes.cpu(), r.blocks.cpu(), r.own.cpu()) for r in self.pool]
        torch.save(slim, self.opt.out / "pool.pt")

    def load_pool(self, path: Path) -> None:
        """The pool of an earlier run."""
        slim = torch.load(path, map_location=self.device, weights_only=True)
        for tokens, classes, blocks, own in slim:
            heat = [0.0] * len(tokens)
            self.pool.append(Rows(tokens.long(), classes, blocks, self.shape.long_rows, heat, 0, own))

    # ---- steps -----------------------------------------------------------------------------------
    def train_step(self, rows: Rows) -> dict[str, Tensor]:
        """One optimiser step on random anchors of a batch; returns device scalars for the log."""
        target, drafter = self.target, self.drafter
        slots = drafter.draft.block_size
        with torch.no_grad():
            seen = target(rows.tokens, rows.blocks, rows.long_rows, taps=drafter.draft.target_layer_ids)
            doc = documents(rows.blocks, target.align)
            anchors = draw_anchors(
                eligible(rows.classes, doc), self.cfg.sliding_window, self.opt.anchors, slots, self.opt.short
            )
            task = lesson(rows.tokens, rows.classes, doc, anchors, slots)
        assert seen.taps is not None
        out = drafter(rows.tokens, seen.taps, target.embed.weight, anchors, rows.blocks, target.align)
        losses = draft_loss(drafter, out, task, seen.hidden, target.head.weight, self.terms)
        losses.total.backward()
        factor = schedule(self.learned, self.step, self.opt.warmup)
        norm = self.optimiser.step(self.opt.rate * factor)
        worst = run.balance(drafter.mtp, out.loads, 2e-3 * factor)
        self.step += 1
        values = {"loss": losses.total, "ce": losses.ce, "l1": losses.l1, "bce": losses.bce}
        values |= {"first": losses.agree_first, "last": losses.agree_last, "norm": norm, "load": worst}
        return {k: v.detach() for k, v in values.items()}

    def next_rows(self, batches: Iterator[dict[str, Tensor]]) -> Rows:
        """A batch of the pool, or a fresh one."""
        if self.pool and self.rng.random() < self.opt.own:
            return self.rng.choice(self.pool)
        return self.fresh(batches)

    def measure(self, batches: Iterator[dict[str, Tensor]], count: int = 5) -> tuple[float, float]:
        """Seconds of one rewriting pass and of one training step, compiled and warm."""
        began = self.settle()
        rows = self.fresh(batches)
        for _ in range(3):
            rewrite(self.target, rows, 1)
            values = self.train_step(rows)
        self.say(f"compiled in {self.settle() - began:.0f} s, loss {float(values['loss']):.3f}")
        marks = [self.settle()]
        rewrite(self.target, rows, count)
        marks.append(self.settle())
        for _ in range(count):
            self.train_step(self.fresh(batches))
        marks.append(self.settle())
        return (marks[1] - marks[0]) / count, (marks[2] - marks[1]) / count

    def train(self, batches: Iterator[dict[str, Tensor]]) -> None:
        """Measure, plan, write, learn until the time is over."""
        per_pass, per_step = self.measure(batches)
        self.clock.start()
        left = self.clock.budget - self.clock.before
        saved_pool = self.opt.out / "pool.pt"
        if self.opt.resume and saved_pool.is_file():
            self.load_pool(saved_pool)
            plan = make_plan(left, per_pass, per_step, 0, self.opt.own, self.opt.reuse)
        else:
            plan = make_plan(left, per_pass, per_step, self.opt.passes, self.opt.own, self.opt.reuse)
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
        self.say(
            f"plan: {per_pass * 1e3:.0f} ms a pass, {per_step * 1e3:.0f} ms a step; {plan.batches} batches "
            f"written in {plan.rewrite_seconds:.0f} s, {plan.steps} steps; {memory:.0f} GiB"
        )
        if plan.batches:
            self.fill_pool(batches, plan)
        mark, saved, first = time.monotonic(), time.monotonic(), self.step
        while self.clock.fraction < 1.0:
            values = self.train_step(self.next_rows(batches))
            if self.step % self.opt.every == 0:
                self.report(values, (self.step - first) / (time.monotonic() - mark))
            if time.monotonic() - saved > self.opt.save_seconds:
                self.save()
                saved = time.monotonic()
        self.save()

    def report(self, values: dict[str, Tensor], rate: float) -> None:
        """One line of the log."""
        row = {k: round(float(v), 4) for k, v in values.items()}
        row |= {"step": self.step, "seconds": round(self.clock.spent, 1)}
        self.history.append(row)
        shown = " ".join(f"{k} {row[k]:.3f}" for k in values)
        self.say(f"step {self.step} {self.clock.spent:.0f}s {rate:.1f} steps/s {shown}")

    # ---- files -----------------------------------------------------------------------------------
    def save(self) -> None:
        """Write everything needed to resume, atomically."""
        state = {
            "model": self.drafter.state_dict(), "adam": self.optimiser.adam.state_dict(),
            "muon": {f"{a}x{b}": v for (a, b), v in self.optimiser.muon.state.items()},
            "step": self.step, "spent": self.clock.spent, "config": self.cfg.to_dict(),
            "history": self.history, "written": self.written,
        }  # fmt: skip
        temp = self.opt.out / "drafter.tmp"
        torch.save(state, temp)
        temp.replace(self.opt.out / "drafter.pt")

    def begin(self, path: Path) -> dict[str, Any]:
        """Take weights and moments of a saved state, of an older target too; the state."""
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        self.drafter.load_state_dict(state["model"])
        self.optimiser.adam.load_state_dict(state["adam"])
        for key, value in state["muon"].items():
            a, b = key.split("x")
            self.optimiser.muon.state[(int(a), int(b))] = value
        self.say(f"drafter of {path.name}, step {state['step']}")
        return state

    def resume(self, path: Path) -> None:
        """Go on with a saved state."""
        state = self.begin(path)
        self.step, self.clock.before, self.history = state["step"], state["spent"], state["history"]
        self.written = state["written"]
        self.say(f"resumed at step {self.step}, {self.clock.before:.0f} s")

    def export(self) -> Path:
        """Target and drafter in one folder, ``model`` inside the run's."""
        fresh, folder = self.opt.out / "model.tmp", self.opt.out / "model"
        shutil.rmtree(fresh, ignore_errors=True)
        tokenizer = self.opt.data / "tokenizer.json"
        export(self.target, fresh, tokenizer if tokenizer.is_file() else None, self.drafter)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.replace(folder)
        return folder


def finish(trainer: DrafterTrainer, folder: Path, tok: Tokenizer, opt: argparse.Namespace) -> dict[str, Any]:
    """Evaluate the exported folder, reloaded; write calibration.json into it and report.json beside it."""
    began = time.monotonic()
    device = trainer.device.type
    target = load(folder, trainer.num, device).eval()
    drafter = load_drafter(folder, trainer.num, device).eval()
    tallies: list[drafter_eval.Tally] = []
    said: dict[str, Any] = {"step": trainer.step, "history": trainer.history}
    with torch.compiler.set_stance("force_eager"):
        for prompts in drafter_eval.held_out_prompts(opt.data, tok, opt.problems, opt.texts, run.EVAL_SEED):
            for heat in HEATS:
                tally = drafter_eval.measure(target, drafter, prompts, heat, seed=len(tallies))
                rates = " ".join(f"{r:.3f}" for r in tally.to_json()["acceptance"] if r is not None)
                trainer.say(
                    f"{tally.name} T={heat:g}: {tally.tokens_per_step:.2f} tokens per step, accepted {rates}"
                )
                group = tally.blocks.group + 100_000 * len(tallies)
                tallies.append(replace(tally, blocks=replace(tally.blocks, group=group)))
    said["acceptance"] = [t.to_json() for t in tallies]
    if tallies:
        fitted, quality = calibrate.report(calibrate.Blocks.joined([t.blocks for t in tallies]))
        said["calibration"] = quality
        origin = {"k": opt.block, "acceptance": "coupled", "level": "training model"}
        calibrate.write(fitted, quality | origin, folder / "calibration.json")
    said["bytes"] = sum(f.stat().st_size for f in folder.iterdir())
    said["evaluation_seconds"] = time.monotonic() - began
    (opt.out / "report.json").write_text(json.dumps(said))
    trainer.say(
        f"{said['bytes'] / 1e6:.1f} MB in {folder.name}; finished in {said['evaluation_seconds']:.0f} s"
    )
    return said


def continue_target(opt: argparse.Namespace) -> Path:
    """Train the target on from its exported weights for ``--target-seconds``; the new folder."""
    out = opt.out / "target"
    if opt.resume and (out / "latest").is_dir():
        return out / "latest"
    argv = ["--data", opt.data, "--out", out, "--seconds", opt.target_seconds, "--start", opt.target]
    argv += [
        "--rows",
        opt.rows,
        "--long-rows",
        opt.long_rows,
        "--length",
        opt.length,
        "--workers",
        opt.workers,
    ]
    argv += ["--rate", opt.target_rate, "--every", opt.every, "--problems", opt.problems]
    argv += ["--seed", opt.seed + 1, "--warmup", opt.warmup] + ([] if opt.compile else ["--no-compile"])
    run.main([str(a) for a in argv])
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return out / "latest"


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Settings of a run; makes its folder."""
    args = argparse.ArgumentParser(prog="firesteel train drafter", description="train a DSpark drafter")
    args.add_argument("--data", type=Path, required=True, help="folder of firesteel train corpus")
    args.add_argument("--out", type=Path, required=True)
    args.add_argument(
        "--target", type=Path, default=BUNDLED, help="exported target (default: the bundled one)"
    )
    args.add_argument("--seconds", type=float, default=600.0, help="for writing and learning")
    args.add_argument("--target-seconds", type=float, default=0.0, help="train the target on before")
    args.add_argument("--target-rate", type=float, default=0.6, help="factor on its peak learning rates")
    args.add_argument("--block", type=int, default=7, help="drafts per block")
    args.add_argument("--taps", type=lambda s: [int(i) for i in s.split(",")], help="default: the last three")
    args.add_argument("--rank", type=int, default=128, help="of the Markov head")
    args.add_argument("--stages", type=int, default=3)
    args.add_argument("--noise-token", type=int, default=3, help="an id that never occurs in text")
    args.add_argument("--anchors", type=int, default=8, help="blocks per window and step")
    args.add_argument("--short", type=float, default=0.25, help="share of blocks with fewer slots")
    args.add_argument("--own", type=float, default=0.5, help="share of steps on texts the target wrote")
    args.add_argument("--passes", type=int, default=3, help="corrections of each such text")
    args.add_argument("--reuse", type=float, default=10.0, help="steps on each batch the target wrote")
    args.add_argument("--rate", type=float, default=1.0, help="factor on all peak learning rates")
    args.add_argument("--rows", type=int, default=32)
    args.add_argument("--long-rows", type=int, default=8)
    args.add_argument("--length", type=int, default=2048)
    args.add_argument("--workers", type=int, default=max(0, min(12, (os.cpu_count() or 1) - 3)))
    args.add_argument("--seed", type=int, default=1)
    args.add_argument("--warmup", type=int, default=200)
    args.add_argument("--every", type=int, default=100, help="steps between log lines")
    args.add_argument("--save-seconds", type=float, default=240.0)
    args.add_argument("--problems", type=int, default=200, help="held-out problems in the evaluation")
    args.add_argument("--texts", type=int, default=64, help="held-out texts per kind in the evaluation")
    args.add_argument("--max-mb", type=float, default=None, help="refuse a model that would be larger")
    args.add_argument("--no-compile", dest="compile", action="store_false")
    args.add_argument("--resume", action="store_true", help="go on with the state in --out")
    args.add_argument(
        "--begin", type=Path, help="drafter.pt of another run: its weights and moments, a new clock"
    )
    opt = args.parse_args(argv)
    opt.out.mkdir(parents=True, exist_ok=True)
    return opt


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Train, export and evaluate a drafter; returns the report."""
    opt = options(argv)
    if opt.target_seconds > 0:
        opt.target = continue_target(opt)
    cfg = draft_config(V4Config.load(opt.target), opt)
    shape = data.Shape(opt.rows, opt.long_rows, opt.length, min(1024, opt.length))
    cuda = torch.cuda.is_available()
    target = load(opt.target, Numerics(dtype=torch.bfloat16 if cuda else torch.float32))
    trainer = DrafterTrainer(target, cfg, shape, opt)
    size = (stored_bytes(target, trainer.drafter) + (opt.data / "tokenizer.json").stat().st_size) / 1e6 + 0.2
    count = sum(p.numel() for p in trainer.drafter.parameters()) / 1e6
    trainer.say(f"drafter: {count:.1f}M parameters on {trainer.device}; the model will take {size:.1f} MB")
    if opt.max_mb is not None and size > opt.max_mb:
        raise ParameterError(f"--max-mb {opt.max_mb:g}: the model would take {size:.1f} MB; lower --rank")
    if cuda:
        trainer.say(f"sinkhorn kernel differs by {sinkhorn.check_kernel(trainer.device):.2e}")
    tok = Tokenizer.from_file(str(opt.data / "tokenizer.json"))
    skip = data.evaluation_questions([gsm.evaluation_set(run.EVAL_SEED, 500)])
    batches = iter(data.loader(opt.data, shape, opt.seed + 7, skip, opt.workers))
    if opt.resume and (opt.out / "drafter.pt").is_file():
        trainer.resume(opt.out / "drafter.pt")
    elif opt.begin:
        trainer.begin(opt.begin)
    trainer.train(batches)
    return finish(trainer, trainer.export(), tok, opt)


if __name__ == "__main__":
    main()
