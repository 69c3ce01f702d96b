"""The drafter against a straight-line oracle: base logits, drafts, confidences, in every situation.

Every drafting pass of real engine runs is recorded and recomputed from the finished text alone: the
tokens before the anchor, the anchor, nothing else. Differences count against a floor that is measured,
the distance of the oracle's float32 from its float64.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel.bench.exact import fastest
from firesteel.bench.toys import toy_config
from firesteel.config import SamplingParams
from firesteel.engine import owed
from firesteel.engine.llm import LLM
from firesteel.models.deepseek_v4.config import DSparkConfig
from firesteel.models.deepseek_v4.random_init import write_random
from firesteel.ops.types import Proposal, SlotState
from oracles.dspark import Drafter
from oracles.official import Options

WINDOW, VOCAB, PAGE = 16, 160, 256
MULTIPLE = 4.0  # how many floors two float32 programs may lie apart
BACKENDS = tuple(dict.fromkeys((fastest(), "reference")))

SHAPES: dict[str, dict[str, Any]] = {
    "two stages": {"stages": 2, "markov_rank": 16},
    "one stage": {"stages": 1, "markov_rank": 7, "target_layer_ids": (2,)},
    "three stages": {"stages": 3, "markov_rank": 33, "target_layer_ids": (2, 0, 1)},
    "no confidence head": {"stages": 2, "markov_rank": 1},
}


@dataclass
class Seen:
    """One request's part of a drafting pass."""

    seed: int
    cursor: int
    anchor: int
    width: int
    base: Tensor  # [width, V]
    logits: Tensor  # [width, V]
    tokens: list[int]
    confidence: Tensor | None


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint per shape; a middling drafter, so that blocks end everywhere."""
    root, out = tmp_path_factory.mktemp("drafters"), {}
    for name, fields in SHAPES.items():
        spark = DSparkConfig(**{"block_size": 5, "noise_token_id": 2, "target_layer_ids": (1, 2), **fields})
        out[name] = write_random(
            root / name.replace(" ", "-"),
            toy_config(dspark=spark),
            3,
            agreement=0.6,
            confidence_head=name != "no confidence head",
        )
    return out


def record(llm: LLM) -> list[Seen]:
    """From now on, every drafting pass of ``llm``."""
    drafter, seen = llm.engine.runner.drafter, list[Seen]()
    assert drafter is not None
    propose, logits = drafter.propose, drafter.target.logits

    def recorded(slots: Tensor, width: int, state: SlotState, *rest: Any, **options: Any) -> Proposal:
        bases: list[Tensor] = []

        def keep(x: Tensor) -> Tensor:
            bases.append(logits(x))
            return bases[-1]

        drafter.target.logits = keep  # type: ignore[method-assign]
        before = state.cursor[slots].tolist(), state.anchor[slots].tolist(), state.seed_lo[slots].tolist()
        out = propose(slots, width, state, *rest, **(options | {"keep_logits": True}))
        drafter.target.logits = logits  # type: ignore[method-assign]
        assert out.logits is not None
        base = bases[0].unflatten(0, (-1, width))
        for g, (cursor, anchor, seed) in enumerate(zip(*before, strict=True)):
            confidence = None if out.confidence is None else out.confidence[g].clone()
            seen.append(
                Seen(
                    seed,
                    cursor,
                    anchor,
                    width,
                    base[g].clone(),
                    out.logits[g].clone(),
                    out.tokens[g].tolist(),
                    confidence,
                )
            )
        return out

    drafter.propose = recorded  # type: ignore[method-assign]
    return seen


class Judge:
    """Compares recorded passes with the oracle of a checkpoint."""

    def __init__(self, path: Path):
        self.oracle = Drafter(path)
        self.exact = Drafter(path, Options(official=False, dtype=torch.float64))
        self.floor = self._floor()

    def _floor(self) -> float:
        """Float32 against float64 over one long block and its heads."""
        rng = random.Random(1)
        tokens, drafts = [rng.randrange(3, VOCAB) for _ in range(40)], [5, 9, 17, 3, 60, 61, 7, 8]
        a, b = (o.block(tokens, 11, 8) for o in (self.oracle, self.exact))
        x, y = self.oracle.walk(a, 11, drafts), self.exact.walk(b, 11, drafts)
        far = [float((a.base.double() - b.base).abs().max()), float((x[0].double() - y[0]).abs().max())]
        if x[1] is not None and y[1] is not None:
            far.append(float((x[1].double() - y[1]).abs().max()))
        floor = max(far)
        assert 0 < floor < 1e-4, f"float32 lies {floor:.1e} from float64"
        return floor

    def check(self, seen: Sequence[Seen], texts: dict[int, Sequence[int]], heat: float) -> int:
        """Every pass of the requests in ``texts`` (seed -> prompt and answer); how many there were."""
        bound, count = MULTIPLE * self.floor, 0
        features = {seed: self.oracle.main_x(list(text)[:-1]) for seed, text in texts.items()}
        for pass_ in seen:
            text = texts.get(pass_.seed)
            if text is None or pass_.cursor >= len(text):
                continue  # the request had ended; nobody looks at these drafts
            assert pass_.anchor == text[pass_.cursor], "the anchor is not the newest token"
            block = self.oracle.block_of(features[pass_.seed][: pass_.cursor], pass_.anchor, pass_.width)
            logits, confidence = self.oracle.walk(block, pass_.anchor, pass_.tokens)
            where = f"width {pass_.width} at {pass_.cursor}"
            assert float((pass_.base - block.base).abs().max()) <= bound, f"base logits, {where}"
            assert float((pass_.logits - logits).abs().max()) <= bound, f"logits, {where}"
            assert (confidence is None) == (pass_.confidence is None)
            if confidence is not None and pass_.confidence is not None:
                assert float((pass_.confidence - confidence).abs().max()) <= bound, f"confidence, {where}"
            if heat == 0.0:
                if clear(logits, bound):
                    assert pass_.tokens == self.oracle.greedy(block, pass_.anchor), f"drafts, {where}"
            elif count % 7 == 0:  # the noise of the oracle is slow
                for j, token in enumerate(pass_.tokens):
                    drawn = self.oracle.drawn(logits[j], pass_.cursor + 1 + j, pass_.seed, heat)
                    assert token == drawn, f"draft {j}, {where}"
            count += 1
        return count


def clear(logits: Tensor, bound: float) -> bool:
    """Whether no best logit is so close to the next that rounding may decide."""
    best = logits.topk(2, -1).values
    return float((best[:, 0] - best[:, 1]).min()) > 2 * bound


@pytest.fixture(scope="module")
def judges(folders: dict[str, Path]) -> dict[str, Judge]:
    return {}


def judge(judges: dict[str, Judge], folders: dict[str, Path], name: str) -> Judge:
    if name not in judges:
        judges[name] = Judge(folders[name])
    return judges[name]


def engine(path: Path, k: int, **settings: Any) -> LLM:
    common: dict[str, Any] = {
        "numerics": "float32",
        "backend": fastest(),
        "max_model_len": 640,
        "debug_poison": True,
        "speculative": {"num_speculative_tokens": k},
    }
    return LLM(path, **(common | settings))


def run(
    llm: LLM, prompts: Sequence[Sequence[int]], heat: float, tokens: int = 20
) -> tuple[dict[int, Sequence[int]], list[Any]]:
    """Answers under seeds 100, 101, ...: (seed -> whole text, completions)."""
    params = [
        SamplingParams(max_tokens=tokens, temperature=heat, seed=100 + i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    out = llm.generate([list(p) for p in prompts], params)
    return {100 + i: [*p, *o.token_ids] for i, (p, o) in enumerate(zip(prompts, out, strict=True))}, out


def random_prompt(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed * 1000 + n)
    return [rng.randrange(3, VOCAB) for _ in range(n)]


# prompts of 1..3 tokens, around the window, longer than it
LENGTHS = (1, 2, 3, 5, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3)


@pytest.mark.parametrize("heat", (0.0, 1.0))
@pytest.mark.parametrize("name", list(SHAPES))
def test_shapes(name: str, heat: float, folders: dict[str, Path], judges: dict[str, Judge]) -> None:
    """First blocks and blocks after partial acceptance: short and long prompts, each shape of drafter."""
    llm = engine(folders[name], 4)
    seen = record(llm)
    texts, out = run(llm, [random_prompt(n) for n in LENGTHS], heat, 12)
    assert judge(judges, folders, name).check(seen, texts, heat) >= 3 * len(LENGTHS)
    first = [s for s in seen if s.cursor in LENGTHS]
    assert len(first) >= len(LENGTHS)
    kept = [a for o in out for a in (o.stats["accepted_at"] or [0])[:1]]
    assert sum(kept) > 0, "no draft was accepted: nothing after partial acceptance was seen"


@pytest.mark.parametrize("backend", BACKENDS)
def test_backends(backend: str, folders: dict[str, Path], judges: dict[str, Judge]) -> None:
    llm = engine(folders["two stages"], 3, backend=backend)
    seen = record(llm)
    texts, _ = run(llm, [random_prompt(n) for n in (1, 30)], 0.6, 8)
    assert judge(judges, folders, "two stages").check(seen, texts, 0.6) >= 4


@pytest.mark.parametrize("k", range(1, 9))
def test_widths(k: int, folders: dict[str, Path], judges: dict[str, Judge]) -> None:
    """Block widths below, at and above the trained block."""
    llm = engine(folders["two stages"], k)
    seen = record(llm)
    texts, _ = run(llm, [random_prompt(n, k) for n in (2, 21)], 0.0, 10)
    assert judge(judges, folders, "two stages").check(seen, texts, 0.0) >= 4
    assert {s.width for s in seen} == {k}


@pytest.mark.parametrize("rows", (5, 13))
def test_after_chunked_prompts(rows: int, folders: dict[str, Path], judges: dict[str, Judge]) -> None:
    """Context rows that were written chunk by chunk."""
    llm = engine(folders["two stages"], 3, max_num_batched_tokens=rows, max_num_seqs=2)
    seen = record(llm)
    texts, _ = run(llm, [random_prompt(n) for n in (3, 24, 50)], 0.0, 8)
    assert judge(judges, folders, "two stages").check(seen, texts, 0.0) >= 6


@pytest.mark.parametrize("extra", (1, 2, WINDOW + 2))
def test_after_prefix_hits(extra: int, folders: dict[str, Path], judges: dict[str, Judge]) -> None:
    """Context rows that come from a snapshot: all, most or none of the window."""
    llm = engine(folders["two stages"], 4)
    shared = random_prompt(PAGE)
    llm.generate([[*shared, 7]], SamplingParams(max_tokens=2, temperature=0.0, seed=1))
    seen = record(llm)
    texts, out = run(llm, [[*shared, *random_prompt(extra, 9)]], 0.0, 10)
    assert out[0].usage["cached_tokens"] == PAGE
    assert judge(judges, folders, "two stages").check(seen, texts, 0.0) >= 3


def test_after_preemption(folders: dict[str, Path], judges: dict[str, Judge]) -> None:
    """Rings that were copied out in mid-answer and came back into another slot."""
    llm = engine(folders["two stages"], 3, num_pages=3, max_num_seqs=3, prefix_caching=False)
    seen = record(llm)
    texts, out = run(llm, [random_prompt(n) for n in (240, 243, 245)], 0.0, 24)
    assert any(o.stats["preemptions"] for o in out)
    assert judge(judges, folders, "two stages").check(seen, texts, 0.0) >= 12


def test_steps_without_drafts_leave_no_holes(folders: dict[str, Path], judges: dict[str, Judge]) -> None:
    """Context rows are written in every step: drafting stops for a while and goes on."""
    llm = engine(folders["two stages"], 3)
    plan, skipped = llm.engine.scheduler.plan, [0]

    def quiet() -> Any:
        step = plan()
        if step is not None and 3 <= step.step <= 9 and step.drafting:
            skipped[0] += 1
            step = type(step)(**{**vars(step), "drafting": (), "draft_width": 0})
        return step

    llm.engine.scheduler.plan = quiet  # type: ignore[method-assign]
    seen = record(llm)
    texts, _ = run(llm, [random_prompt(2)], 0.0, 30)
    assert skipped[0] >= 4
    late = [s for s in seen if s.cursor > 8]
    assert judge(judges, folders, "two stages").check(late, texts, 0.0) >= 3


def seldom(llm: LLM, every: int) -> None:
    """Let only every so-many-th step draft, and those right after a request came back or hit a snapshot."""
    plan, near = llm.engine.scheduler.plan, [0]

    def planned() -> Any:
        step = plan()
        if step is not None and (step.restores or any(a.snapshot for a in step.admissions)):
            near[0] = step.step + 4
        if step is not None and step.drafting and step.step % every and step.step > near[0]:
            step = replace(step, drafting=(), draft_width=0, report_drafts=False)
        return step

    llm.engine.scheduler.plan = planned  # type: ignore[method-assign]


@pytest.mark.parametrize("every", (5, 40))
def test_context_rows_that_wait_change_nothing(
    every: int, folders: dict[str, Path], judges: dict[str, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of draftless steps are written late: through preemption, snapshots and reused slots to the same bits."""
    prompts = [*(random_prompt(n) for n in (223, 228, 234, 3)), [*random_prompt(PAGE), 7]]
    results = []
    for most in (owed.MOST_BYTES, 0):  # 0: every step at once
        monkeypatch.setattr(owed, "MOST_BYTES", most)
        llm = engine(folders["two stages"], 3, num_pages=4, max_num_seqs=3)
        seldom(llm, every)
        waits = llm.engine.runner.owed
        assert waits is not None
        seen, longest, write = record(llm), [0], waits.write

        def counted(
            slots: Any = None, write: Any = write, longest: Any = longest, waits: Any = waits
        ) -> None:
            longest[0] = max(longest[0], len(waits.passes))
            write(slots)

        monkeypatch.setattr(waits, "write", counted)
        texts, out = run(llm, [*prompts, *prompts[3:]], 0.0, 50)
        count, found = len(seen), judge(judges, folders, "two stages")
        assert found.check(seen, texts, 0.0) >= 5 and any(o.stats["preemptions"] for o in out)
        later, hit = run(llm, [[*random_prompt(PAGE), 9]], 0.0, 50)
        assert found.check(seen[count:], later, 0.0) >= 1 and hit[0].usage["cached_tokens"] == PAGE
        results.append((seen, texts, longest[0]))
    (waited, texts, most_passes), (eager, same, one) = results
    assert most_passes > 3 and one == 1, "rows waited, and those of the yardstick did not"
    assert most_passes <= 2 * waits.most, (
        "rows that had left their window, or whose request had ended, waited on"
    )
    assert texts == same and len(waited) == len(eager) > 0
    for a, b in zip(waited, eager, strict=True):
        assert torch.equal(a.logits, b.logits) and a.tokens == b.tokens and a.cursor == b.cursor


def test_acceptance_is_partial(folders: dict[str, Path]) -> None:
    """The runs above see every outcome: none, some and all drafts of a block accepted."""
    llm = engine(folders["two stages"], 3)
    seen = record(llm)
    texts, _ = run(llm, [random_prompt(n) for n in LENGTHS], 0.0, 24)
    counts = set()
    for s in seen:
        after = list(texts[s.seed])[s.cursor + 1 :]
        if len(after) > s.width:
            hits = [a == b for a, b in zip(s.tokens, after, strict=False)]
            counts.add(hits.index(False) if False in hits else s.width)
    assert {0, 1} < counts


@pytest.mark.parametrize("backend", BACKENDS)
def test_official_numerics(backend: str, folders: dict[str, Path]) -> None:
    """The official roundings, context and block rows in FP8 included: most passes to float32's last digits.

    A value at the edge of a rounding may fall on the other side, and then a whole block moves; without the
    roundings every block does.
    """
    llm = engine(folders["two stages"], 4, numerics="official", backend=backend)
    seen = record(llm)
    texts, _ = run(llm, [random_prompt(n) for n in (1, 3, WINDOW, 2 * WINDOW + 3)], 1.0, 10)
    rounded, smooth = (Drafter(folders["two stages"], Options(official=o)) for o in (True, False))
    far: dict[bool, list[float]] = {True: [], False: []}
    for s in [s for s in seen if s.cursor < len(texts[s.seed])]:
        for official, oracle in ((True, rounded), (False, smooth)):
            block = oracle.block(texts[s.seed][: s.cursor], s.anchor, s.width)
            far[official].append(float((s.base - block.base).abs().max()))
    assert len(far[True]) >= 12
    assert sum(d < 1e-4 for d in far[True]) > 0.5 * len(far[True]), sorted(far[True])
    assert min(far[False]) > 1e-2


# ---- the oracle is not the engine, and it sees faults ----------------------------------------------
@pytest.mark.parametrize("fault", ("late context", "wide window", "causal", "own token", "normed confidence"))
def test_faults_are_far_beyond_the_floor(
    fault: str, folders: dict[str, Path], judges: dict[str, Judge]
) -> None:
    """Mistakes that other engines made lie far from the oracle."""
    found = judge(judges, folders, "two stages")
    o, tokens, anchor, drafts = found.oracle, random_prompt(40), 11, [5, 9, 17, 60]
    x = o.main_x(tokens)
    block = o.block_of(x, anchor, 4)
    logits, confidence = o.walk(block, anchor, drafts)
    assert confidence is not None
    if fault == "late context":  # features of p-1 stored for p
        far = o.block_of(torch.cat((x[:1], x[:-1])), anchor, 4).base - block.base
    elif fault == "wide window":  # one context row too many
        o.c["sliding_window"] += 1
        far = o.block_of(x, anchor, 4).base - block.base
        o.c["sliding_window"] -= 1
    elif fault == "causal":  # the anchor's row does not see the others
        far = o.block_of(x, anchor, 1).base - block.base[:1]
    elif fault == "own token":  # the Markov embedding of the draft itself
        far = o.walk(block, drafts[0], [*drafts[1:], 0])[0] - logits
    else:  # the confidence reads the hidden state behind the norm
        z = o.target.norm(block.z, f"{o.last}.norm")
        far = o.walk(type(block)(block.base, z), anchor, drafts)[1] - confidence  # type: ignore[operator]
    assert float(far.abs().max()) > 100 * MULTIPLE * found.floor
