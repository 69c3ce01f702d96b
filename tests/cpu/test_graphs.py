"""Recorded steps with a recorder that runs on the CPU: sizes, padding, static buffers, the self-test.

``Replayer`` is what a device graph is: the function runs once when it is recorded, a replay computes
again from the static inputs and writes into the tensors that recording returned.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel import LLM, SamplingParams
from firesteel.config import EngineConfig, ParameterError
from firesteel.engine.build import place
from firesteel.engine.graphs import (
    GraphMismatch,
    GraphPlan,
    Graphs,
    Shape,
    contexts,
    request_buckets,
    row_buckets,
)
from firesteel.engine.rehearsal import Rehearsal, record_graphs
from firesteel.models.deepseek_v4.random_init import tiny_config, write_random

pytestmark = pytest.mark.cpu
SPEC = {"method": "dspark", "num_speculative_tokens": 3}
SETTINGS = {"max_num_seqs": 3, "max_num_batched_tokens": 20, "max_model_len": 96, "num_pages": 12}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def leaves(out: Any) -> list[Tensor]:
    """All tensors in what a part returns."""
    if isinstance(out, Tensor):
        return [out]
    if out is None:
        return []
    parts = out if isinstance(out, tuple) else vars(out).values()
    return [t for part in parts for t in leaves(part)]


class Replayer:
    """Records without a device; ``broken``: replays get tensors of this dtype wrong."""

    def __init__(self, broken: torch.dtype | None = None):
        self.recorded, self.broken = 0, broken

    def record(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.recorded += 1
        out = run()

        def replay() -> None:
            fresh = run()
            for into, new in zip(leaves(out), leaves(fresh), strict=True):
                into.copy_(new)
                if into.dtype == self.broken:
                    into.add_(1)

        return replay, out

    def used(self) -> int:
        return 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graphs") / "model"
    write_random(path, tiny_config(compress_ratios=(0, 4, 16), n_routed_experts=4), 11)
    return path


def engine(folder: Path, graphs: bool, **settings: Any) -> LLM:
    llm = LLM(folder, **{**SETTINGS, "speculative": SPEC, **settings})
    if graphs:
        record_graphs(llm.engine.runner, llm.engine.config, llm.engine.max_model_len, recorder=Replayer())
    return llm


# ---- sizes -----------------------------------------------------------------------------
def test_ladders_hold_every_step_and_stay_short() -> None:
    for most in (1, 2, 7, 64, 100, 1000, 2048):
        sizes = row_buckets(most)
        assert sizes[-1] == most and list(sizes) == sorted(set(sizes)) and len(sizes) <= 40
        assert all(b <= max(a + 2, a * 5 / 4 + 3) for a, b in itertools.pairwise(sizes))
        assert request_buckets(most)[-1] == most
    plan = GraphPlan.of(8192, 256, 7, 4096, (7,))
    assert plan.rows[-1] == 2048 and plan.samples[-1] == 2048 and plan.requests[-1] == 256
    assert plan.contexts == (4103,) and contexts(1 << 20) == (8192, 65536, 1 << 20)
    long = GraphPlan.of(8192, 256, 7, 1 << 20, ())
    assert len(long.forwards) == 36 + 2 * 28 and max(r for r, c in long.forwards if c > 8192) == 512
    assert len(plan.rows) <= 40 and "36 forwards to 2048 rows" in str(plan)


class Nothing:
    """Parts that compute nothing."""

    device = torch.device("cpu")

    def forward_rows(self, rows: Any) -> Tensor:
        return torch.zeros(rows.count, 1)

    def sample_rows(self, hidden: Tensor, rows: Any, samples: Any, widest: int) -> Any:
        return samples

    def draft_slots(self, slots: Tensor, width: int) -> Any:
        return slots


def test_a_step_takes_the_smallest_recording_that_holds_it() -> None:
    graphs = Graphs(Nothing(), GraphPlan.of(640, 4, 3, 20000, (3,)), Replayer(), 4)
    graphs.record()
    assert graphs.shape(5, 5, 3, True, 90) == Shape(6, 6, 4)
    assert graphs.shape(30, 1, 1, True, 90) == Shape(32, 1, 1)
    assert graphs.shape(30, 2, 1, True, 90) == Shape(32, 2, 2)
    assert graphs.shape(9, 9, 3, False, 90) == Shape(12, None, 3)  # its tail does more
    assert graphs.shape(641, 8, 3, True, 90) == Shape(641, None, 3)  # larger than any
    assert graphs.shape(7, 0, 0, True, 90) == Shape(8, None, 0)  # nothing samples
    assert graphs.shape(600, 4, 3, True, 8192) == Shape(640, 4, 4)
    assert graphs.shape(600, 4, 3, True, 8193) == Shape(600, None, 3)  # many rows, far along
    assert graphs.shape(500, 4, 3, True, 30000) == Shape(512, 4, 4)  # a bound beyond the model's length


# ---- steps -------------------------------------------------------------------------------
PROMPTS = [list(range(5, 5 + n)) for n in (3, 30, 1, 17, 8)]


def texts(llm: LLM, **changes: Any) -> list[tuple[int, ...]]:
    params = [
        SamplingParams(max_tokens=9, temperature=t, seed=7 + i, **changes)
        for i, t in enumerate((0.0, 1.0, 1.0, 0.7, 0.0))
    ]
    return [tuple(c.token_ids) for c in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_recorded_steps_write_the_same_text(folder: Path, backend: str) -> None:
    plain, recorded = engine(folder, False, backend=backend), engine(folder, True, backend=backend)
    graphs = recorded.engine.runner.graphs
    assert graphs is not None
    graphs.replays.update(dict.fromkeys(graphs.replays, 0))
    assert texts(recorded) == texts(plain)
    assert all(graphs.replays[part] > 0 for part in ("forward", "tail", "draft")), graphs.replays
    steps = recorded.engine.records
    assert graphs.replays["forward"] == len(steps), "every step fits a recording"


def test_special_steps_run_their_tail_eagerly(folder: Path) -> None:
    plain, recorded = engine(folder, False), engine(folder, True)
    graphs = recorded.engine.runner.graphs
    assert graphs is not None
    before = dict(graphs.replays)
    for changes in ({"top_p": 0.8}, {"logprobs": 2}, {"frequency_penalty": 0.5}):
        assert texts(recorded, **changes) == texts(plain, **changes)
    assert graphs.replays["forward"] > before["forward"] and graphs.replays["tail"] == before["tail"]
    assert graphs.eager["tail"] > 0 and recorded.engine.stats()["graphs"]["eager"] == graphs.eager


def test_adaptive_steps_and_rejection_agree(folder: Path) -> None:
    adaptive = {**SPEC, "enable_adaptive_verification": True}
    assert texts(engine(folder, True, speculative=adaptive)) == texts(engine(folder, False))
    rejection = {**SPEC, "acceptance": "rejection"}
    both = [texts(engine(folder, graphs, speculative=rejection)) for graphs in (True, False)]
    assert both[0] == both[1]


def test_no_host_value_is_read_in_a_recorded_step(folder: Path) -> None:
    assert texts(engine(folder, True, debug_sync=True)) == texts(engine(folder, False))


def test_padding_is_inert(folder: Path) -> None:
    llm = engine(folder, True, debug_poison=True)  # dead state is NaN after every step
    assert texts(llm) == texts(engine(folder, False))


# ---- self-test -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("broken", "what"), [(torch.int64, "tail of 1 rows"), (torch.float32, "draft of 3 requests")]
)
def test_the_self_test_refuses_a_replay_that_differs(folder: Path, broken: torch.dtype, what: str) -> None:
    llm = engine(folder, False)
    runner, config = llm.engine.runner, llm.engine.config
    with pytest.raises(GraphMismatch, match=what):
        record_graphs(runner, config, llm.engine.max_model_len, recorder=Replayer(broken))
    assert runner.graphs is None and runner.memory.free_slots == config.slots
    llm.engine.memory.check([])


def test_the_rehearsal_has_mixed_rows_and_leaves_no_trace(folder: Path) -> None:
    llm = engine(folder, False)
    runner = llm.engine.runner
    before = Rehearsal(runner, 96, runner.memory.gamma)
    rows, samples = before.rows(20, 3)
    assert rows.count == 20 and int((rows.last - rows.first).max()) == 7, "decodes and a prompt chunk"
    assert len(set(samples.width.tolist())) > 1, "random widths"
    before.leave()
    assert int(runner.slots.state.alive.sum()) == 0 and runner.memory.free_slots == 3


@pytest.mark.parametrize("rows", [20, 300, 640])
def test_every_row_of_the_rehearsal_lies_on_a_page_of_its_request(folder: Path, rows: int) -> None:
    """Rows beyond a request's pages would share the spare one: no two runs of them need agree."""
    llm = engine(folder, False, max_model_len=700, max_num_batched_tokens=640, num_pages=8)
    memory, world = llm.engine.memory, Rehearsal(llm.engine.runner, 700, 0)
    batch, _ = world.rows(rows, 3)
    live = batch.valid
    for slot in set(batch.slots[live].tolist()):
        last = int(batch.positions[live & (batch.slots == slot)].max())
        assert memory.pages_for(last + 1) <= len(memory._pages[slot])
    assert int(live.sum()) >= rows - 1, "the chunk fills the step"
    world.leave()


# ---- devices -------------------------------------------------------------------------------
def test_an_engine_without_drafter_records_over_slots_that_hold_drafts(folder: Path) -> None:
    """As the arm of a sweep that does not speculate: its steps have one row per request."""
    llm = engine(folder, False)
    twin = copy.copy(llm.engine.runner)
    twin.drafter, twin.owed, twin._saved, twin.graphs = None, None, {}, None
    config = replace(llm.engine.config, speculative=None, max_num_batched_tokens=64)
    graphs = record_graphs(twin, config, llm.engine.max_model_len, recorder=Replayer())
    assert graphs.plan.gamma == 0 < twin.memory.gamma and graphs.plan.rows[-1] > graphs.plan.samples[-1]


def test_a_device_that_is_not_there_is_an_error_and_a_choice_is_explained(folder: Path) -> None:
    with pytest.raises(ParameterError, match="backend='native': computes on the CPU only"):
        place(EngineConfig(device="cuda", backend="native"))
    if not torch.cuda.is_available():
        with pytest.raises(ParameterError, match="device='cuda': torch sees no"):
            LLM(folder, device="cuda")
        choice, device = place(EngineConfig())
        assert device.type == "cpu" and "torch sees no" in choice.reasons["triton"]
    choice, device = place(EngineConfig(device="cpu", backend="reference"))
    assert (choice.ops.name, device.type, choice.reasons) == ("reference", "cpu", {})
    with pytest.raises(ParameterError, match="device"):
        EngineConfig(device="tpu")
