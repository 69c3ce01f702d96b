"""Ranks whose confidences differ still run the same plans and the same widths: two processes over gloo."""

from __future__ import annotations

import hashlib
import json
import multiprocessing as mp
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from firesteel.bench.virtual import jobs, simulated_bed, tables
from firesteel.config import SimulatedAcceptance
from firesteel.core import StepPlan
from firesteel.engine.follow import follow, stop
from firesteel.parallel import ALONE, Group, join

pytestmark = pytest.mark.cpu
K, USERS = 5, 4


def perturbed(engine: Any, size: float) -> None:
    """Confidences that differ from the other rank's, as different kernels would make them, only more."""
    simulator, noise = engine.runner.simulator, torch.Generator().manual_seed(7)
    proposal = simulator.proposal

    def wrong(*args: Any) -> Any:
        p = proposal(*args)
        return replace(p, confidence=p.confidence + size * torch.randn(p.confidence.shape, generator=noise))

    simulator.proposal = wrong


def rank_main(rank: int, folder: str, answers: int, agree: bool) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    bed = simulated_bed(SimulatedAcceptance(spread=1.0), K, USERS, 96)
    engine = bed.engine
    runner, group = engine.runner, join()
    runner.group = group if agree else Quiet(group.rank, group.size, group.handle)
    local: list[list[int]] = []
    admit = runner.target.ops.admit
    runner.target.ops.admit = lambda *a: local.append((w := admit(*a)).tolist()) or w  # type: ignore[method-assign]
    seen: list[str] = []

    def note(plan: StepPlan) -> None:
        s = runner.slots.state
        what = [plan.step, plan.budget.drafts, plan.rows, [d.request_id for d in plan.drafting]]
        integers = [s.cursor.tolist(), s.anchor.tolist(), s.draft_len.tolist(), s.drafts.tolist()]
        seen.append(hashlib.blake2b(json.dumps([what, integers]).encode(), digest_size=8).hexdigest())

    if rank == 0:
        launch = runner.launch

        def told(plan: StepPlan) -> Any:
            handle = launch(plan)
            note(plan)
            return handle

        runner.launch = told  # type: ignore[method-assign]
        table = tables(K)["staircase"]
        bed.run(bed.adaptive(table), table, jobs(answers, 64), USERS)
        stop(runner)
    else:
        perturbed(engine, 1.0)
        follow(runner, note)
    Path(f"{folder}/rank{rank}.json").write_text(json.dumps({"seen": seen, "local": local}))
    dist.destroy_process_group()


class Quiet(Group):
    """The planted fault: plans are shared, integers are not."""

    def agree(self, values: torch.Tensor) -> torch.Tensor:
        return values


def both(folder: Path, answers: int, agree: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    context = mp.get_context("spawn")
    ranks = [context.Process(target=rank_main, args=(r, str(folder), answers, agree)) for r in range(2)]
    for p in ranks:
        p.start()
    for p in ranks:
        p.join(280)
        if p.is_alive():
            p.terminate()
    assert [p.exitcode for p in ranks] == [0, 0]
    first, second = (json.loads((folder / f"rank{r}.json").read_text()) for r in range(2))
    return first, second


def test_a_thousand_steps_with_perturbed_confidences(tmp_path: Path) -> None:
    first, second = both(tmp_path, 180, agree=True)
    assert len(first["seen"]) >= 1000 and first["seen"] == second["seen"]
    differing = sum(a != b for a, b in zip(first["local"], second["local"], strict=True))
    assert differing > 50, "the perturbation must matter, or the test shows nothing"


def test_without_agreement_the_ranks_part(tmp_path: Path) -> None:
    first, second = both(tmp_path, 12, agree=False)
    assert first["seen"] != second["seen"]


def test_alone_nothing_is_sent() -> None:
    values = torch.arange(3)
    assert ALONE.agree(values) is values and ALONE.share("x") == "x" and not ALONE.sent
    with pytest.raises(AssertionError, match="integers"):
        ALONE.agree(torch.zeros(1))
    assert join() is ALONE
