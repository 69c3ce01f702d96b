"""Train a small DeepSeek-V4 in a given time.

    python -m firesteel.train.run --data DIR --out DIR --seconds 1080

The plan is a time, not a step count: speed is measured first, the learning rate
follows the fraction of the time spent, and the last checkpoint is always usable.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from firesteel.models.deepseek_v4.config import V4Config, Yarn
from firesteel.train import data, gsm, sinkhorn
from firesteel.train.attention import Numerics
from firesteel.train.evaluate import continue_text, exact_match
from firesteel.train.export import export, load
from firesteel.train.model import Block, V4Train
from firesteel.train.optim import Optimiser, schedule

EVAL_SEED = 2026
PROBES = (
    "import os\nimport sys\n\n\ndef read_lines(path):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self,",
    "Fellow citizens of the Senate and of the House of Representatives:\n\nThe condition of",
    "HAMLET.\nTo be, or not to be,",
)


def demo_config() -> V4Config:
    """Geometry of the bundled model: seven layers of all kinds, about 26 MB stored."""
    return V4Config(
        vocab_size=3072, hidden_size=384, num_hidden_layers=7, num_attention_heads=8, head_dim=64,
        qk_rope_head_dim=32, q_lora_rank=128, o_lora_rank=128, o_groups=2, index_n_heads=16, index_head_dim=64,
        index_topk=256, sliding_window=128, compress_ratios=(0, 0, 4, 128, 4, 128, 4), rope_theta=10000.0,
        compress_rope_theta=160000.0, yarn=Yarn(4.0, 1024, 32.0, 1.0), max_position_embeddings=4096,
        rms_norm_eps=1e-6, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, moe_intermediate_size=256,
        n_routed_experts=12, n_shared_experts=1, num_experts_per_tok=3, num_hash_layers=2,
        routed_scaling_factor=1.5, swiglu_limit=10.0, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip


def row_losses(hidden: Tensor, head: Tensor, tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(weighted cross-entropy sum [B], weight sum [B]) of predicting token t+1 from hidden t."""
    logits = F.linear(hidden[:, :-1], head).float()
    ce = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view_as(
        weights[:, 1:]
    )
    return (ce * weights[:, 1:]).sum(1), weights[:, 1:].sum(1)


@dataclass
class Clock:
    """Training time spent, over restarts."""

    budget: float
    before: float = 0.0
    began: float = 0.0

    def start(self) -> None:
        self.began = time.monotonic()

    @property
    def spent(self) -> float:
        return self.before + (time.monotonic() - self.began if self.began else 0.0)

    @property
    def fraction(self) -> float:
        return self.spent / self.budget


@torch.no_grad()
def balance(layers: Iterable[nn.Module], loads: Sequence[Tensor], rate: float) -> Tensor:
    """Move routing biases against the load; returns the largest load over the mean."""
    worst = []
    for layer, count in zip(layers, loads, strict=True):
        worst.append(count.max() / count.mean())
        assert isinstance(layer, Block)
        gate = layer.ffn.gate
        if not gate.hashed:
            gate.bias += rate * torch.sign(count.mean() - count)
    return torch.stack(worst).max()


class Trainer:
    """Model, optimiser, data and their checkpoints."""

    def __init__(self, cfg: V4Config, shape: data.Shape, opt: argparse.Namespace):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.opt, self.shape, self.cfg = opt, shape, cfg
        torch.manual_seed(opt.seed)
        torch.set_float32_matmul_precision("high")
        self.num = Numerics(dtype=torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self.model = V4Train(cfg, self.num).to(self.device).train()
        self.optimiser = Optimiser(self.model)
        self.clock, self.step, self.tokens = Clock(opt.seconds), 0, 0
        self.history: list[dict[str, float]] = []
        self.loss = row_losses
        self.class_weight = torch.from_numpy(data.LOSS).to(self.device)
        if opt.compile:
            torch._dynamo.config.recompile_limit = 64
            for layer in self.model.layers:
                layer.compile()
            self.model.collapse = torch.compile(self.model.collapse)  # type: ignore[method-assign]
            self.loss = torch.compile(row_losses)
        self.log = (opt.out / "log.txt").open("a")

    def say(self, text: str) -> None:
        print(text, flush=True)
        self.log.write(text + "\n")
        self.log.flush()

    def train_step(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """One optimiser step; returns device scalars for the log."""
        cuda = {k: v.to(self.device, non_blocking=True) for k, v in batch.items()}
        tokens = cuda["tokens"].long()
        weights = self.class_weight[cuda["classes"].long()]
        out = self.model(tokens, cuda["blocks"], self.shape.long_rows)
        head = self.model.head.weight.to(self.num.dtype)
        sums, counts = self.loss(out.hidden, head, tokens, weights)
        ce = sums.sum() / counts.sum().clamp(min=1)
        (ce + out.index_loss).backward()
        factor = schedule(self.clock.fraction, self.step, self.opt.warmup)
        norm = self.optimiser.step(self.opt.rate * factor)
        worst = balance(self.model.layers, out.loads, 1e-3 * factor)
        self.step += 1
        self.tokens += tokens.numel()
        n = self.shape.long_rows
        parts = [s.sum() / c.sum().clamp(min=1) for s, c in ((sums[:n], counts[:n]), (sums[n:], counts[n:]))]
        names = ("loss", "long", "short", "index", "norm", "load")
        values = (ce, *parts, out.index_loss, norm, worst)
        return {k: v.detach() for k, v in zip(names, values, strict=True)}

    def save(self) -> None:
        """Write everything needed to resume, atomically."""
        state = {
            "model": self.model.state_dict(), "adam": self.optimiser.adam.state_dict(),
            "muon": {f"{a}x{b}": v for (a, b), v in self.optimiser.muon.state.items()},
            "step": self.step, "tokens": self.tokens, "spent": self.clock.spent, "config": self.cfg.to_dict(),
        }  # fmt: skip
        temp = self.opt.out / "state.tmp"
        torch.save(state, temp)
        temp.replace(self.opt.out / "state.pt")
        fresh, latest = self.opt.out / f"export-{self.step}", self.opt.out / "latest"
        shutil.rmtree(fresh, ignore_errors=True)
        export(self.model, fresh, self.opt.data / "tokenizer.json")
        shutil.rmtree(latest, ignore_errors=True)
        fresh.replace(latest)

    def resume(self, path: Path) -> None:
        state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimiser.adam.load_state_dict(state["adam"])
        for key, value in state["muon"].items():
            a, b = key.split("x")
            self.optimiser.muon.state[(int(a), int(b))] = value
        self.step, self.tokens, self.clock.before = state["step"], state["tokens"], state["spent"]
        self.say(f"resumed at step {self.step}, {self.clock.spent:.0f} s")

    def report(self, values: dict[str, Tensor], rate: float) -> None:
        row = {k: round(float(v), 4) for k, v in values.items()}
        row |= {"step": self.step, "tokens": self.tokens, "seconds": round(self.clock.spent, 1)}
        self.history.append(row)
        shown = " ".join(f"{k} {row[k]:.3f}" for k in ("loss", "long", "short", "index", "norm", "load"))
        self.say(
            f"step {self.step} {self.clock.spent:.0f}s {self.tokens / 1e6:.1f}M {rate / 1e3:.0f}k tok/s {shown}"
        )

    def train(self, batches: Any) -> None:
        """Run until the clock is spent."""
        first = time.monotonic()
        for _ in range(3):  # compile outside of the clock
            values = self.train_step(next(batches))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.say(f"compiled in {time.monotonic() - first:.0f} s, loss {float(values['loss']):.3f}")
        self.clock.start()
        mark, seen, saved = time.monotonic(), self.tokens, time.monotonic()
        while self.clock.fraction < 1.0:
            values = self.train_step(next(batches))
            if self.step % self.opt.every == 0:
                self.report(values, (self.tokens - seen) / (time.monotonic() - mark))
                mark, seen = time.monotonic(), self.tokens
                if len(self.history) == 2:
                    self.plan()
            if time.monotonic() - saved > self.opt.save_seconds:
                self.save()
                saved = time.monotonic()
        self.save()

    def profile(self, batches: Any, steps: int = 4) -> None:
        """Where the time of a step goes, by kernel."""
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as prof:
            for _ in range(steps):
                self.train_step(next(batches))
            torch.cuda.synchronize()
        table = prof.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90
        )
        (self.opt.out / "profile.txt").write_text(table)

    def plan(self) -> None:
        """Say what the measured speed gives for the whole time."""
        a, b = self.history[0], self.history[1]
        speed = (b["tokens"] - a["tokens"]) / max(1e-3, b["seconds"] - a["seconds"])
        memory = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else 0.0
        total = speed * self.clock.budget
        per = self.shape.rows * self.shape.length
        self.say(
            f"plan: {speed:.0f} tok/s, {total / 1e6:.0f}M tokens, {total / per:.0f} steps, {memory:.0f} GiB"
        )


def finish(trainer: Trainer, problems: list[gsm.Problem], tok: Tokenizer, opt: argparse.Namespace) -> None:
    """Evaluate the last export, reloaded, and write report.json."""
    began = time.monotonic()
    model = load(opt.out / "latest", trainer.num, trainer.device.type).eval()
    held = set(gsm.held_out())
    report: dict[str, Any] = {"history": trainer.history, "tokens": trainer.tokens, "step": trainer.step}
    with torch.compiler.set_stance("force_eager"):
        for mode in ("chat", "thinking"):
            score = exact_match(model, tok, problems, mode == "thinking")
            known = [f for f, p in zip(score.flags, problems, strict=True) if p.template not in held]
            rate = sum(known) / max(1, len(known))
            report[mode] = {"right": score.right, "total": score.total, "known": sum(known), "of": len(known)}
            trainer.say(
                f"{mode}: exact match {score.rate:.3f} of {score.total}, {rate:.3f} of trained templates"
            )
            report[f"{mode}_texts"] = score.texts
            report[f"{mode}_flags"] = score.flags
        if problems:
            others = gsm.template_set(gsm.held_out(), 20)
            score = exact_match(model, tok, others, False)
            report["held_out"] = {"right": score.right, "total": score.total, "texts": score.texts}
            trainer.say(f"held-out templates, chat: {score.rate:.3f} of {score.total}")
        for text in PROBES:
            out = continue_text(model, tok, gsm.BOS + text)
            trainer.say(f"--- {text!r}\n{out}")
            report.setdefault("probes", []).append([text, out])
    report["evaluation_seconds"] = time.monotonic() - began
    (opt.out / "report.json").write_text(json.dumps(report))
    trainer.say(f"finished in {time.monotonic() - began:.0f} s")


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Settings of a run; makes its folder."""
    args = argparse.ArgumentParser(prog="firesteel train target", description="train a small V4 target")
    args.add_argument("--data", type=Path, required=True, help="folder of firesteel.train.corpus")
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--seconds", type=float, default=1080.0)
    args.add_argument("--rows", type=int, default=32)
    args.add_argument("--long-rows", type=int, default=8)
    args.add_argument("--length", type=int, default=2048)
    args.add_argument("--workers", type=int, default=max(0, min(12, (os.cpu_count() or 1) - 3)))
    args.add_argument("--seed", type=int, default=1)
    args.add_argument("--warmup", type=int, default=200)
    args.add_argument("--rate", type=float, default=1.0, help="factor on all peak learning rates")
    args.add_argument("--every", type=int, default=100, help="steps between log lines")
    args.add_argument("--save-seconds", type=float, default=240.0)
    args.add_argument("--problems", type=int, default=500)
    args.add_argument("--no-compile", dest="compile", action="store_false")
    args.add_argument("--profile", action="store_true", help="write profile.txt after training (GPU)")
    args.add_argument("--start", type=Path, help="begin from an exported folder, with a fresh optimiser")
    args.add_argument("--resume", type=Path, help="a state.pt of an earlier run")
    opt = args.parse_args(argv)
    opt.out.mkdir(parents=True, exist_ok=True)
    return opt


def main(argv: Sequence[str] | None = None, cfg: V4Config | None = None) -> None:
    """Train, export and evaluate; ``cfg``: another geometry than the start's or the bundled one."""
    opt = options(argv)
    if cfg is None and opt.start:
        cfg = replace(V4Config.load(opt.start), dspark=None, mtp_stages=0)
    shape = data.Shape(opt.rows, opt.long_rows, opt.length, min(1024, opt.length))
    problems = gsm.evaluation_set(EVAL_SEED, opt.problems)
    skip = data.evaluation_questions([gsm.evaluation_set(EVAL_SEED, max(500, opt.problems))])
    batches = iter(data.loader(opt.data, shape, opt.seed, skip, opt.workers))
    trainer = Trainer(cfg or demo_config(), shape, opt)
    trainer.say(
        f"parameters: {sum(p.numel() for p in trainer.model.parameters()) / 1e6:.1f}M on {trainer.device}"
    )
    if trainer.device.type == "cuda":
        trainer.say(f"sinkhorn kernel differs by {sinkhorn.check_kernel(trainer.device):.2e}")
    if opt.start:
        trainer.model.load_state_dict(load(opt.start, trainer.num).state_dict())
    if opt.resume:
        trainer.resume(opt.resume)
    trainer.train(batches)
    (opt.out / "history.json").write_text(json.dumps(trainer.history))
    if opt.profile:
        trainer.profile(batches)
    finish(trainer, problems, Tokenizer.from_file(str(opt.data / "tokenizer.json")), opt)


if __name__ == "__main__":
    main()
