"""Speculation changes no token: a pairwise covering array against every request run alone without it.

The cases, engines and comparisons are those of ``firesteel.bench.exact``, which samples the full product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from firesteel.bench import exact
from firesteel.bench.exact import FACTORS, Prover, choose, fastest, number_of, product_size
from firesteel.bench.toys import KINDS, Toys
from firesteel.config import SamplingParams
from firesteel.engine import runner
from firesteel.engine.llm import LLM
from firesteel.ops import build
from firesteel.ops.types import Numerics, SlotState
from oracles.toy import pairwise

ARRAY = pairwise(FACTORS, seed=2)
PARTS, ANSWER = 6, 8


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    return Toys(tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="module")
def prover(toys: Toys) -> Prover:
    return Prover(toys, fastest(), seed=3)


@pytest.fixture(scope="module")
def totals() -> Iterator[Counter[str]]:
    """What happened over the whole array, so that it cannot pass by doing nothing."""
    found: Counter[str] = Counter()
    yield found
    if found["parts"] == PARTS:
        for name in ("preemptions", "recomputes", "hits", "midblock"):
            assert found[name] > 0, f"no case of the array had {name}"
        assert found["preemptions"] > found["recomputes"], "no request was copied out"
        assert found["verified"] > found["accepted"] > found["verified"] // 4


def total(prover: Prover, cases: list[dict[str, Any]]) -> Counter[str]:
    """Counts over cases; fails on the first difference."""
    out: Counter[str] = Counter()
    for values in cases:
        outcome = prover.run(values, ANSWER)
        assert not outcome.mismatches, outcome.mismatches[0]
        out.update({k: v for k, v in asdict(outcome).items() if isinstance(v, int)})
    return out


def test_array_covers_every_pair() -> None:
    pairs = {(a, row[a], b, row[b]) for row in ARRAY for a in FACTORS for b in FACTORS if a < b}
    want = sum(len(FACTORS[a]) * len(FACTORS[b]) for a in FACTORS for b in FACTORS if a < b)
    assert len(pairs) == want
    assert len(ARRAY) < 1.2 * len(FACTORS["k"]) * len(FACTORS["batch"])


def test_numbers_name_cases() -> None:
    for number in (0, 1, 12345, product_size() - 1):
        assert number_of(choose(number)) == number


@pytest.mark.parametrize("part", range(PARTS))
def test_covering_array(part: int, prover: Prover, totals: Counter[str]) -> None:
    totals.update(total(prover, ARRAY[part::PARTS]))
    totals["parts"] += 1


@pytest.mark.parametrize("number", range(3))
def test_reference_ops(number: int, toys: Toys) -> None:
    """A few cases on plain torch, whatever backend the array ran on."""
    values = dict(ARRAY[number], batch=2 + number, rows=64, memory=FACTORS["memory"][number])
    assert total(Prover(toys, "reference", seed=4), [values])["tokens"] > 0


# ---- drafters ------------------------------------------------------------------------------------
def served(toys: Toys, kind: str, heat: float, **settings: Any) -> tuple[list[Any], list[Any]]:
    """(plain answers, speculative answers) of three requests on one kind of drafter."""
    common: dict[str, Any] = {"numerics": "float32", "backend": fastest(), "max_model_len": 128}
    prompts = [[5, 9, 33], [7] * 18, [*range(20, 61)]]
    params = SamplingParams(max_tokens=40, temperature=heat, seed=8, ignore_eos=True)
    plain = LLM(toys.folder(kind), **common).generate(prompts, params)
    return plain, LLM(toys.folder(kind), speculative=settings, **common).generate(prompts, params)


def share(answers: list[Any]) -> float:
    """Accepted of verified drafts."""
    return sum(a.stats["accepted"] for a in answers) / sum(a.stats["verified"] for a in answers)


@pytest.mark.parametrize("heat", (0.0, 0.6, 1.0))
def test_copy_of_the_target_is_always_accepted(toys: Toys, heat: float) -> None:
    """The drafter is the target and shares its noise: full blocks but for roundings of its weights."""
    plain, quick = served(toys, "copy", heat, num_speculative_tokens=6)
    assert [a.token_ids for a in quick] == [a.token_ids for a in plain]
    assert share(quick) > 0.95
    assert all(a.stats["steps"] <= 9 for a in quick)  # 40 tokens, 7 a step, two of the prompt's and the end's


@pytest.mark.parametrize("kind", ("good", "bad", "formats"))
def test_kinds_of_drafter(toys: Toys, kind: str) -> None:
    """Good ones are accepted often, useless ones hardly ever; other expert formats change nothing."""
    plain, quick = served(toys, kind, 0.6, num_speculative_tokens=3)
    assert [a.token_ids for a in quick] == [a.token_ids for a in plain]
    assert share(quick) < 0.1 if kind == "bad" else share(quick) > 0.3


@pytest.mark.parametrize("proposal", ("dense", "one_hot"))
def test_rejection_is_plain_at_zero_temperature(toys: Toys, proposal: str) -> None:
    plain, quick = served(
        toys, "good", 0.0, num_speculative_tokens=4, acceptance="rejection", proposal=proposal
    )
    assert [a.token_ids for a in quick] == [a.token_ids for a in plain]
    assert share(quick) > 0.2


@pytest.mark.parametrize("proposal", ("dense", "one_hot"))
def test_rejection_repeats_itself(toys: Toys, proposal: str) -> None:
    """Not the text of plain decoding, yet a function of the seed."""
    settings = {"num_speculative_tokens": 4, "acceptance": "rejection", "proposal": proposal}
    first, second = (served(toys, "good", 1.0, **settings)[1] for _ in range(2))
    assert [a.token_ids for a in first] == [a.token_ids for a in second]


def test_told_drafts_fill_every_block(prover: Prover) -> None:
    """A drafter that knows the answer on a target with real attention: K + 1 tokens a step."""
    values = dict(choose(0), k=5, batch=2, drafter="told", temperature=1.0, rows=1024)
    outcome = prover.run(values, 50)
    assert not outcome.mismatches
    assert outcome.verified > 40 and outcome.accepted >= outcome.verified - values["k"]  # less what EOS cuts


# ---- the proof can fail --------------------------------------------------------------------------
BUSY = dict(
    choose(0), k=4, batch=4, lengths="window", temperature=1.0, rows=64, drafter="misled", memory="ample"
)


def ops_class(prover: Prover) -> Any:
    """The class whose ops the prover runs."""
    return type(build(prover.backend, Numerics(official=False)))


def test_trusting_commit_is_seen(prover: Prover, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that believes every draft."""
    ops = ops_class(prover)
    commit = ops.commit

    def trusting(
        self: Any, tokens: Any, finite: Any, rows: Any, samples: Any, state: Any, widest: int
    ) -> Any:
        tokens = tokens.clone()
        for g, slot in enumerate(samples.slots.tolist()):
            at, n = int(samples.offset[g]), int(samples.width[g]) - 1
            if n > 0:
                tokens[at : at + n] = state.drafts[slot, :n]
        return commit(self, tokens, finite, rows, samples, state, widest)

    monkeypatch.setattr(ops, "commit", trusting)
    assert prover.run(BUSY).mismatches


class Remembering(Prover):
    """Keeps answers, so that a planted fault cannot reach what is compared with."""

    def __init__(self, toys: Toys, backend: str, seed: int):
        super().__init__(toys, backend, seed)
        self.kept: dict[str, Any] = {}

    def alone(self, target: str, numerics: str, prompt: tuple[int, ...], params: SamplingParams) -> Any:
        key = repr((target, numerics, prompt, params))
        if key not in self.kept:
            self.kept[key] = super().alone(target, numerics, prompt, params)
        return self.kept[key]


def test_rows_written_once_are_seen(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that keeps a rejected draft's row when its position runs again."""
    values = dict(BUSY, batch=1)
    prover = Remembering(toys, fastest(), seed=5)
    assert not prover.run(values).mismatches
    ops = ops_class(prover)
    store, tops = ops.store_window, dict[int, int]()

    def once(self: Any, window: Any, kv: Any, ctx: Any) -> None:
        before, rows = window.clone(), ctx.rows
        store(self, window, kv, ctx)
        old = rows.positions <= tops.get(id(window), -1)
        at = rows.slots[old], rows.positions[old] % window.shape[1]
        window[at] = before[at]
        tops[id(window)] = max(tops.get(id(window), -1), int(rows.positions.max()))

    monkeypatch.setattr(ops, "store_window", once)
    assert prover.run(values).mismatches


def test_poison_reaches_what_counts(prover: Prover, monkeypatch: pytest.MonkeyPatch) -> None:
    """Poisoned one row too early, the last accepted row included, every answer breaks."""
    poison = runner.poison

    def early(memory: Any, state: SlotState) -> None:
        state.cursor -= 1
        poison(memory, state)
        state.cursor += 1

    monkeypatch.setattr(runner, "poison", early)
    assert prover.run(dict(BUSY, poison=True)).mismatches
    monkeypatch.undo()
    assert not prover.run(dict(BUSY, poison=True)).mismatches


def test_a_case_that_raises_is_reported(prover: Prover, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the engine whose step failed neither hangs nor goes on."""
    llms: list[LLM] = []
    engine = Prover.engine

    def kept(self: Prover, values: Any, case: Any) -> LLM:
        llms.append(engine(self, values, case))

        def broken(plan: Any) -> Any:
            raise ValueError("no device")

        if len(llms) == 1:
            monkeypatch.setattr(llms[0].engine.runner, "launch", broken)
        return llms[-1]

    monkeypatch.setattr(Prover, "engine", kept)
    monkeypatch.setattr(exact, "numbers", lambda seed: iter([number_of(BUSY)] * 2))
    found = exact.sweep(prover, 1.0, Console(quiet=True))
    assert found["cases"] == 2 and len(found["mismatches"]) == 1
    assert found["mismatches"][0]["differs"] == ["raised ValueError('no device')"]
    with pytest.raises(RuntimeError, match="an earlier step failed"):
        llms[0].generate([[5]], SamplingParams(max_tokens=2))


# ---- the program ---------------------------------------------------------------------------------
def test_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One case by number: what it prints, what it writes, its exit code."""
    threads = torch.get_num_threads()
    number = number_of(dict(choose(0), k=3, batch=2, drafter="good"))
    file = tmp_path / "exact.json"
    assert exact.main(["--case", str(number), "--seed", "1", "--json", str(file)]) == 0
    torch.set_num_threads(threads)
    shown = capsys.readouterr().out
    assert "every answer equal" in shown and "1 of" in shown
    text = file.read_text()
    for word in ('"commit"', '"date"', '"cpu"', '"seed": 1', '"mismatches": []'):
        assert word in text


def test_kinds_are_all_used() -> None:
    assert set(FACTORS["drafter"]) == set(KINDS)
