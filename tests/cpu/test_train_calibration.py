"""Calibration from recorded blocks: the fit, the command, and its prompt files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from firesteel import cli
from firesteel.config import ParameterError, SamplingParams
from firesteel.engine.llm import LLM
from firesteel.models.deepseek_v4.random_init import write_random
from firesteel.speculation.survival import Coefficients
from firesteel.train import calibrate
from firesteel.train.calibrate import Blocks
from oracles.drafters import small


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target whose drafter is random too, apart from a shared bigram; taps out of order."""
    return write_random(tmp_path_factory.mktemp("model") / "m", small((2, 0, 1)), 5, agreement=0.9)


def made_up(count: int, depths: int, stretch: float, seed: int = 0) -> Blocks:
    """Blocks whose head is right but for a factor on its logits."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(1.0, 1.5, (count, depths))
    hit = rng.random((count, depths)) < 1 / (1 + np.exp(-truth))
    accepted = np.cumprod(hit, axis=1).sum(1)
    kind = np.arange(count) // 4 % 2
    full = np.full(count, depths)
    return Blocks(stretch * truth, np.zeros((count, depths)), accepted, full, kind, np.arange(count) // 4)


def test_calibration_undoes_overconfidence() -> None:
    fitted, said = calibrate.report(made_up(8000, 3, stretch=3.0))
    for name in ("greedy", "sampled"):
        assert fitted.temperatures[name] == pytest.approx([3.0] * 3, rel=0.25)
        lines = said["quality"][name]
        for j in range(3):
            raw, sts, logistic = (lines[how][j] for how in ("head", "sts", "logistic"))
            assert raw["ece"] > 0.08 > max(sts["ece"], logistic["ece"])
            assert raw["survival_ece"] > sts["survival_ece"]
            assert raw["brier"] > logistic["brier"]
            assert sts["auc"] == pytest.approx(raw["auc"]) and sts["auc"] > 0.75
    assert said["blocks"] == 8000
    assert fitted.coefficients.head == pytest.approx([1 / 3] * 2, rel=0.1)


def test_calibration_without_a_head_and_with_one_class() -> None:
    blocks = made_up(400, 3, 1.0)
    greedy = blocks.pick(blocks.kind == 0)
    fitted, said = calibrate.report(replace(greedy, head=None))
    assert fitted.temperatures == {} and not fitted.coefficients.uses_head
    assert list(said["quality"]) == ["greedy"] and list(said["quality"]["greedy"]) == ["logistic"]
    with pytest.raises(ParameterError, match="no block"):
        calibrate.report(greedy.pick(np.zeros(len(greedy), dtype=bool)))


def test_calibrate_command(folder: Path, tmp_path: Path) -> None:
    """On an engine: all drafts verified, the file is what adaptive verification reads, texts do not change."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"token_ids": [0, 5 + i, 9]}) + "\n" for i in range(8)))
    file, report = tmp_path / "calibration.json", tmp_path / "report.json"
    argv = ["calibrate", "--model", folder, "--prompts", prompts, "--max-tokens", 24, "--max-model-len", 64]
    argv += ["--out", file, "--json", report, "--k", 4]
    assert cli.main([str(a) for a in argv]) == 0
    said = json.loads(report.read_text())
    assert said["blocks"] > 50 and said["requests"] == 16 and said["k"] == 4
    assert {line["depth"] for line in said["quality"]["greedy"]["head"]} <= {1, 2, 3, 4}
    fitted = Coefficients.load(file)
    assert fitted.depth.shape == (2, 4) and fitted.uses_head and fitted.uses_margin
    assert len(json.loads(file.read_text())["temperatures"]["sampled"]) == 4
    spec = {"num_speculative_tokens": 4, "enable_adaptive_verification": True, "calibration": str(file)}
    llm = LLM(folder, max_model_len=64, speculative=spec)
    assert any("calibration.json" in note for note in llm.notes)


def test_recorder_matches_the_statistics_of_requests(folder: Path) -> None:
    llm = LLM(folder, max_model_len=64, speculative={"num_speculative_tokens": 5})
    before = llm.engine.scheduler.policy
    blocks = calibrate.collect(llm, [[0, 8, 9], [0, 12]], (0.0, 1.0), 30, seed=3)
    assert llm.engine.scheduler.policy is before
    assert blocks.depths == 5 and set(blocks.kind) == {0, 1}
    params = [SamplingParams(max_tokens=30, temperature=t, seed=3 + i) for i, t in enumerate((0.0, 1.0) * 2)]
    done = llm.generate([[0, 8, 9], [0, 8, 9], [0, 12], [0, 12]], params)
    kept = sum(d.stats["accepted"] for d in done) - int(blocks.accepted.sum())
    assert 0 <= kept <= 5 * len(done)  # the last block of a request is cut and left out
    with pytest.raises(ParameterError, match="no drafter"):
        calibrate.collect(LLM(folder, max_model_len=64), [[0, 8]], (0.0,), 4)


def test_prompt_files_name_their_faults(folder: Path, tmp_path: Path) -> None:
    llm = LLM(folder, max_model_len=64)
    file = tmp_path / "p.jsonl"
    for text, says in (
        ("{}", "line 1"),
        ('{"token_ids": [1]}\n{"x"', "line 2.*JSON"),
        ("[3]", "expected prompt"),
    ):
        file.write_text(text)
        with pytest.raises(ParameterError, match=says):
            calibrate.read_prompts(file, llm)
    file.write_text('{"token_ids": [4, 5]}\n\n{"token_ids": [6]}\n')
    assert calibrate.read_prompts(file, llm, limit=1) == [[4, 5]]
    with pytest.raises(ParameterError, match="cannot be read"):
        calibrate.read_prompts(tmp_path / "none", llm)
