"""``firesteel profile``: measure what steps and drafting passes cost on this machine, and save the table.

The file is what ``cost_table`` of the speculative config and ``firesteel
simulate --table`` read. It carries a fingerprint and is refused elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from firesteel.bench.report import place_for
from firesteel.config import ParameterError


def parser() -> argparse.ArgumentParser:
    """Options of ``firesteel profile``."""
    p = argparse.ArgumentParser(prog="firesteel profile", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--model", default=None, help="checkpoint folder (default: the bundled model)")
    p.add_argument("--numerics", default="official", choices=("official", "float32"))
    p.add_argument("--backend", default="auto", help="ops backend")
    p.add_argument("--threads", type=int, default=None, help="CPU threads per op")
    p.add_argument("--k", type=int, default=5, help="drafts per request at most")
    p.add_argument("--max-num-seqs", type=int, default=16, help="requests that run at once")
    p.add_argument("--max-num-batched-tokens", type=int, default=512, help="rows of one step")
    p.add_argument("--max-model-len", type=int, default=None, help="tokens one request may have in all")
    p.add_argument(
        "--cpu-time", action="store_true", help="count this process's CPU time only (shared machines)"
    )
    p.add_argument("--out", default="cost.json", metavar="FILE", help="the table")
    p.add_argument("--plot", default=None, metavar="FILE.svg", help="the curves; needs the extra 'bench'")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """``firesteel profile``."""
    import time

    from firesteel.engine.llm import LLM
    from firesteel.engine.profile import Profiler

    args = parser().parse_args(argv)
    console = Console(stderr=True)
    if args.plot is not None and not args.plot.endswith(".svg"):
        raise ParameterError(f"--plot {args.plot}: name a .svg file")
    for file in (args.out, args.plot):
        if file is not None:
            place_for(file)  # before minutes of measuring
    llm = LLM(
        args.model,
        numerics=args.numerics,
        backend=args.backend,
        threads=args.threads,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        speculative={"num_speculative_tokens": args.k},
    )
    if args.cpu_time:
        llm.engine.runner.timer = time.process_time
    with console.status("profile") as status:
        measure = Profiler(llm.engine.runner, args.k, args.max_num_batched_tokens, llm.engine.max_model_len)
        table = measure.run(lambda part: status.update(part))
    table.save(args.out)
    shown = Table("rows", "ms", title=table.fingerprint)
    for rows, ms in zip(table.rows, table.step_ms, strict=True):
        shown.add_row(str(rows), f"{ms:.3f}")
    Console().print(shown)
    drafts = Table("drafting requests", *(f"width {w}, ms" for w in sorted(table.draft)))
    for i, n in enumerate(table.requests):
        drafts.add_row(str(n), *(f"{table.draft[w][i]:.3f}" for w in sorted(table.draft)))
    Console().print(drafts)
    Console().print(
        f"context: {table.context_ms * 1e3:.2f} µs more per row and thousand tokens; saved to {args.out}"
    )
    if args.plot is not None:
        from firesteel.bench.plots import cost_curve

        cost_curve(table.to_json(), Path(args.plot))
    return 0


if __name__ == "__main__":
    sys.exit(main())
