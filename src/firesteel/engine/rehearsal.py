"""Records an engine's graphs at start and proves them: random requests, replay against eager."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from firesteel.config import EngineConfig
from firesteel.core import RowBatch, SampleRows
from firesteel.engine.graphs import DeviceRecorder, GraphPlan, Graphs, Recorder
from firesteel.engine.runner import Runner
from firesteel.ops.types import PromptRows, SlotState
from firesteel.speculation.budget import draft_widths

CONTEXT = 200  # tokens that the rehearsal's requests have behind them at most


class Rehearsal:
    """Random requests in every slot of an idle engine; ``leave`` gives the slots back.

    ``length``: tokens a request may have. Drafts, survivals and lengths are
    random, so that verify widths are, too; up to ``gamma`` drafts, which may be fewer than there is room for
    in the slots (an engine without a drafter over the slots of one that has it). ``longest``: tokens that
    the first slot has pages for, a prompt chunk's bound.
    """

    def __init__(self, runner: Runner, length: int, gamma: int, seed: int = 0):
        self.runner, self.length, self.gamma = runner, length, gamma
        self.device = runner.device
        self.generator = torch.Generator().manual_seed(seed)
        self.before = self.state()
        self.held: list[int] = []
        memory = runner.memory
        context = max(1, min(CONTEXT, length - gamma - 2))
        least = self.longest = min(context + gamma + 2, length)
        tokens = length  # the first one's prompt chunk may fill a whole step
        while (slot := memory.take_slot(tokens)) is not None or tokens > least:
            if slot is None:
                tokens = max(tokens // 2, least)
                continue
            if not self.held:
                self.longest = tokens
            self.held.append(slot)
            tokens = least
        memory.push()
        self._fill(context)

    def _fill(self, context: int) -> None:
        state, n = self.runner.slots.state, len(self.held)
        at = self._to(torch.tensor(self.held, dtype=torch.int64))
        vocab, gamma = self.runner.target.config.vocab_size, self.gamma

        def ints(high: int, *shape: int) -> Tensor:
            return self._to(torch.randint(0, high, (n, *shape), generator=self.generator))

        state.cursor[at] = ints(context) + 1
        state.anchor[at], state.drafts[at] = ints(vocab), ints(vocab, state.drafts.shape[1])
        state.alive[at], state.max_len[at] = 1, self.length
        state.draft_len[at], state.draft_cap[at] = ints(gamma + 1), gamma
        state.draft_len[at[:1]] = gamma  # some drafts, whatever was drawn
        state.seed_lo[at], state.seed_hi[at] = ints(2**32), ints(2**32)
        state.temperature[at] = self._to(torch.rand(n, generator=self.generator).round())
        steps = torch.rand(n, state.survival.shape[1], generator=self.generator)
        state.survival[at] = self._to(steps.cumprod(-1))
        for ring in self.runner.memory.all_rings():
            if ring.is_floating_point():
                ring[at] = self._to(torch.randn(n, *ring.shape[1:], generator=self.generator).to(ring.dtype))

    def _to(self, values: Tensor) -> Tensor:
        return values.to(self.device)

    # ---- what the self-test asks for ------------------------------------------
    def rows(self, count: int, groups: int) -> tuple[RowBatch, SampleRows]:
        """Decodes of as many requests as there is room for; what they leave goes to one prompt chunk."""
        ops, state, gamma = self.runner.target.ops, self.runner.slots.state, self.gamma
        prompt, live = self._no_prompt(), self.held[: min(count, max(groups, 1))]
        spare = count - len(self.held) * (1 + gamma)
        if spare > 0 and len(live) > 1:
            prompt = self._chunk(live.pop(0), min(spare, self.longest - 1))
        rows = count - prompt.tokens.shape[0]
        scratch = state.cursor.shape[0] - 1
        decodes = self._to(torch.tensor([*live, *[scratch] * (groups - len(live))], dtype=torch.int64))
        widths = ops.admit(decodes, max(rows - len(live), 0), state)
        return ops.build_rows(state, prompt, decodes, widths, rows, self.length + gamma)

    def _no_prompt(self) -> PromptRows:
        return PromptRows(*(self._to(torch.zeros(0, dtype=torch.int64)) for _ in range(6)))

    def _chunk(self, slot: int, n: int) -> PromptRows:
        """A prompt's first ``n`` rows that sample nothing."""
        at = torch.arange(n)
        vocab = self.runner.target.config.vocab_size
        tokens = torch.randint(0, vocab, (n,), generator=self.generator)
        parts = (tokens, at, at * 0 + slot, at * 0, at * 0 + n - 1, at[:0])
        return PromptRows(*map(self._to, parts))

    def slots(self, count: int) -> Tensor:
        """``count`` slots; scratch behind the last real one."""
        scratch = self.runner.slots.state.cursor.shape[0] - 1
        some = self.held[:count]
        return self._to(torch.tensor([*some, *[scratch] * (count - len(some))], dtype=torch.int64))

    def state(self) -> dict[str, Tensor]:
        """A copy of every table of the slots."""
        tables = {f.name: getattr(self.runner.slots.state, f.name) for f in fields(SlotState)}
        return {name: t.clone() for name, t in tables.items() if t is not None}

    def restore(self, saved: dict[str, Tensor]) -> None:
        """Put a copy back, in place."""
        for name, values in saved.items():
            getattr(self.runner.slots.state, name).copy_(values)

    def same(self, saved: dict[str, Tensor]) -> bool:
        """Whether every slot but the scratch one holds these values."""
        now = self.state()
        return all(torch.equal(now[name][:-1], values[:-1]) for name, values in saved.items())

    def leave(self) -> None:
        """The engine is idle again, and its slots are as they were."""
        self.restore(self.before)
        for slot in self.held:
            self.runner.memory.release(slot)
        self.held = []


def record_graphs(
    runner: Runner,
    settings: EngineConfig,
    length: int,
    progress: Callable[[str], None] = lambda _: None,
    recorder: Recorder | None = None,
) -> Graphs:
    """Plan, record and test the recordings of an idle engine, then let its runner use them."""
    spec, gamma = settings.speculative, settings.gamma
    widths: tuple[int, ...] = ()
    if runner.drafter is not None and spec is not None and not spec.rejection:
        widths = draft_widths(gamma) if spec.enable_adaptive_verification else (gamma,)
    plan = GraphPlan.of(settings.max_num_batched_tokens, settings.slots, gamma, length, widths)
    progress(f"graphs: {plan}")
    runner.fix_addresses()
    scratch = runner.slots.state.cursor.shape[0] - 1
    graphs = Graphs(runner, plan, recorder or DeviceRecorder(runner.device), scratch)
    graphs.record(progress)
    world = Rehearsal(runner, length, gamma)
    try:
        graphs.self_test(world, progress)
    finally:
        world.leave()
    runner.graphs = graphs
    return graphs
