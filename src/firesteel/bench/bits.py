"""``firesteel bench bits``: whole steps bit by bit, a row alone and among any others.

All requests stand at one context with random rings and pages. One pass runs every row that
they can have (anchor and all drafts); then random requests with random verify widths run in
every recorded row count (or any, where nothing is recorded), until enough rows were compared:
residual streams after the last layer and sampled tokens must have the bits of the first pass.
A drafting pass is compared in the same way. Exit status 1 on any difference.

    firesteel bench bits --json bits.json
    firesteel bench bits --model flash-8L --set device=cuda --rows 10000
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from firesteel.bench.cli import engine_settings
from firesteel.bench.geometry import load
from firesteel.bench.report import environment, write_json
from firesteel.bench.steps import Stepper
from firesteel.core import RowBatch
from firesteel.errors import user_errors
from firesteel.ops.types import PromptRows


class Bits:
    """Passes over random requests of one engine, compared with the widest one."""

    def __init__(self, step: Stepper, context: int, seed: int = 0):
        self.step, self.runner, self.context = step, step.runner, context
        self.gamma, self.wide = step.gamma, 1 + step.gamma
        self.generator = torch.Generator().manual_seed(seed)
        self.state = self.runner.slots.state
        self.device = self.runner.device
        step._reset(context)
        hot = torch.rand(len(step.slots), generator=self.generator).round()  # greedy and sampling
        self.state.temperature[self._ints(step.slots)] = hot.to(self.device)

    def _ints(self, values: Any) -> Tensor:
        return self.runner.slots.ints(values)

    def rows(self, slots: list[int], widths: list[int], count: int) -> RowBatch:
        """Rows of a step of these requests, padded to ``count``."""
        none = PromptRows(*(self._ints(()) for _ in range(6)))
        rows, _ = self.runner.target.ops.build_rows(
            self.state, none, self._ints(slots), self._ints(widths), count, self.context + self.gamma
        )
        return rows

    def run(self, slots: list[int], widths: list[int], count: int) -> tuple[Tensor, Tensor]:
        """(streams [n, hc, D], tokens [n]) of the n real rows."""
        rows, n = self.rows(slots, widths, count), sum(widths)
        graphs = self.runner.graphs
        h = (
            graphs.forward(rows)
            if graphs is not None and graphs.has(rows)
            else self.runner.forward_rows(rows)
        )
        _, x = self.runner.target.collapse(h[:n])
        tokens, _ = self.runner.target.ops.head_sample(
            x, self.runner.target.weights.head, rows.slots[:n], rows.positions[:n] + 1, self.state
        )
        return h[:n].clone(), tokens

    def whole(self) -> tuple[Tensor, Tensor]:
        """Every row of every request, in passes as wide as the engine allows: [slots, wide, ...]."""
        at_once = max(1, min(len(self.step.slots), self.step.max_rows // self.wide))
        parts = []
        for lo in range(0, len(self.step.slots), at_once):
            some = self.step.slots[lo : lo + at_once]
            parts.append(self.run(some, [self.wide] * len(some), self._size(len(some) * self.wide)))
        h, tokens = (torch.cat([p[i] for p in parts]) for i in range(2))
        return h.unflatten(0, (-1, self.wide)), tokens.unflatten(0, (-1, self.wide))

    def _size(self, rows: int) -> int:
        graphs = self.runner.graphs
        fit = None if graphs is None else next((s for s in graphs.plan.rows if s >= rows), None)
        return fit or rows

    def sizes(self) -> list[int]:
        """Row counts to try."""
        graphs, most = self.runner.graphs, min(self.step.max_rows, len(self.step.slots) * self.wide)
        some = graphs.plan.rows if graphs is not None else (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377)
        return [s for s in some if s <= most]

    def _random(self, high: int, count: int) -> list[int]:
        return torch.randint(0, high, (count,), generator=self.generator).tolist()

    def pick(self, count: int) -> tuple[list[int], list[int]]:
        """(indices of requests, widths): random ones whose rows fill most of ``count``."""
        order = torch.randperm(len(self.step.slots), generator=self.generator).tolist()
        who, widths, left = [], [], count - self._random(max(1, count // 8), 1)[0]
        for i in order:
            if left <= 0:
                break
            width = min(1 + self._random(self.wide, 1)[0], left)
            who.append(i)
            widths.append(width)
            left -= width
        return who, widths

    def verify(self, want: int, progress: Callable[[str], None]) -> dict[str, Any]:
        """Compare at least ``want`` rows; {row count: [rows compared, rows that differ]}."""
        h, tokens = self.whole()
        found: dict[int, list[int]] = {size: [0, 0] for size in self.sizes()}
        while sum(a for a, _ in found.values()) < want:
            for size in found:
                progress(f"{sum(a for a, _ in found.values())} rows compared")
                who, widths = self.pick(size)
                got_h, got = self.run([self.step.slots[i] for i in who], widths, size)
                first = self._ints([i for i, w in zip(who, widths, strict=True) for _ in range(w)])
                depth = self._ints([j for w in widths for j in range(w)])
                same = (got_h == h[first, depth]).flatten(1).all(1) & (got == tokens[first, depth])
                found[size][0] += same.numel()
                found[size][1] += int((~same).sum())
        return {"rows": sum(a for a, _ in found.values()), "differ": sum(b for _, b in found.values()),
                "by_count": {str(k): v for k, v in found.items()}}  # fmt: skip

    def draft(self, progress: Callable[[str], None]) -> dict[str, Any] | None:
        """The same of drafting passes: drafts, margins and confidences of a request alone and among others."""
        if self.runner.drafter is None:
            return None

        def run(slots: list[int]) -> list[Tensor]:
            graphs, n = self.runner.graphs, len(slots)
            size = graphs.draft_size(n, self.gamma) if graphs is not None else None
            scratch = self.state.cursor.shape[0] - 1
            if graphs is not None and size is not None:
                proposal, survival = graphs.draft(self._ints([*slots, *[scratch] * (size - n)]), self.gamma)
            else:
                proposal, survival = self.runner.draft_slots(self._ints(slots), self.gamma)
            parts = [proposal.tokens, proposal.margin, survival, proposal.confidence]
            return [t[:n].clone() for t in parts if t is not None]

        whole, compared, differ = run(self.step.slots), 0, 0
        for n in sorted({1, 2, 3, 7, 16, 33, 64, 100, len(self.step.slots)}):
            if n > len(self.step.slots):
                continue
            progress(f"drafting for {n}")
            who = torch.randperm(len(self.step.slots), generator=self.generator).tolist()[:n]
            at = self._ints(who)
            same = [
                (a == b[at]).flatten(1).all(1)
                for a, b in zip(run([self.step.slots[i] for i in who]), whole, strict=True)
            ]
            compared += n
            differ += int((~torch.stack(same).all(0)).sum())
        return {"requests": compared, "differ": differ}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; 1 if bits differ, 2 on a user's error."""
    p = argparse.ArgumentParser(prog="firesteel bench bits", description=__doc__)
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--model", default=None, help="checkpoint folder, flash-8L or tiny (random weights)")
    p.add_argument("--rows", type=int, default=10_000, help="rows to compare at least")
    p.add_argument("--context", type=int, default=300, help="tokens that every request stands at")
    p.add_argument("--k", type=int, default=7, help="drafts per request")
    p.add_argument("--max-num-seqs", type=int, default=256)
    p.add_argument("--set", action="append", default=[], metavar="NAME=JSON", help="an EngineConfig field")
    p.add_argument("--json", default=None, metavar="FILE", help="write the result here")
    args = p.parse_args(argv)
    longest = args.context + args.k + 2
    try:
        settings: dict[str, Any] = {
            "max_num_seqs": args.max_num_seqs,
            "max_num_batched_tokens": args.max_num_seqs * (1 + args.k),
            "max_model_len": longest,
            "num_pages": -(-longest // 256) * args.max_num_seqs,
            "prefix_caching": False,
            "speculative": {"num_speculative_tokens": args.k},
        } | engine_settings(args.set)
        with Console(stderr=True).status("loading") as status, torch.inference_mode():
            llm = load(args.model, status.update, **settings)
            step = Stepper(llm, 1)
            step.occupy(args.context)
            bits = Bits(step, args.context)
            result = {"verify": bits.verify(args.rows, status.update), "draft": bits.draft(status.update)}
    except user_errors() as err:
        print(f"bits: {err}", file=sys.stderr)
        return 2
    name = Path(args.model).name if args.model else "bundled"
    whole = {"bench": "bits", "model": name, "settings": settings, "notes": list(llm.notes), **result}
    write_json(whole | {"environment": environment()}, args.json)
    verify, draft = result["verify"], result["draft"]
    assert verify is not None, "always run"
    print(f"verify: {verify['rows']} rows in {len(verify['by_count'])} row counts, {verify['differ']} differ")
    if draft is not None:
        print(f"draft: {draft['requests']} requests, {draft['differ']} differ")
    return 1 if verify["differ"] or (draft and draft["differ"]) else 0


if __name__ == "__main__":
    sys.exit(main())
