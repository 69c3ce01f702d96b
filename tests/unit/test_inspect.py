"""inspect: reports of sound, lone, foreign and damaged checkpoints, and the exit codes."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from firesteel.checkpoint import CheckpointError
from firesteel.inspect import inspect_path, plan, render, render_plan, run_inspect
from firesteel.models.deepseek_v4.config import ConfigError, V4Config
from firesteel.models.deepseek_v4.presets import flash_dspark
from firesteel.models.deepseek_v4.random_init import tiny_config, write_random

TINY = tiny_config()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("inspect") / "ck", TINY, 1)


def lone(folder: Path, config: V4Config) -> Path:
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


def run(path: Path, **options: object) -> tuple[int, str]:
    out = io.StringIO()
    code = run_inspect(path, console=Console(file=out, width=140), **options)  # type: ignore[arg-type]
    return code, out.getvalue()


def test_sound_checkpoint(sound: Path) -> None:
    report = inspect_path(sound)
    assert report.problems == [] and report.kind == "checkpoint" and report.files == 9
    assert report.layers == {"window": 1, "csa": 2, "hca": 1}
    assert report.drafter == "dspark" and report.confidence_head
    assert report.heads == ["lm", "markov", "confidence"]
    assert report.weight_formats == {"target": {"fp8": 34, "fp4": 96}, "drafter": {"fp8": 25, "fp4": 72}}
    assert sum(row.tensors for row in report.parts) == report.tensors == 581
    data = sum(f.stat().st_size for f in sound.glob("*.safetensors"))
    assert 0.9 * data < report.bytes < data
    assert json.loads(json.dumps(report.to_json()))["geometry"]["hidden_size"] == 128


def test_lone_config_says_what_must_be_there(tmp_path: Path) -> None:
    report = inspect_path(lone(tmp_path, flash_dspark()))
    assert report.kind == "config" and report.problems == []
    assert (report.tensors, report.bytes, report.files) == (72_317, 166_878_536_440, 48)
    assert inspect_path(tmp_path / "config.json").tensors == 72_317
    code, text = run(tmp_path)
    assert code == 0 and "must hold 72317 tensors, 166878536440 bytes" in text


def test_text_and_json(sound: Path) -> None:
    code, text = run(sound)
    assert code == 0
    for word in ("sound", "experts", "drafter: dspark, with confidence head", "4 (1 window, 2 csa, 1 hca)"):
        assert word in text
    code, text = run(sound, as_json=True, plan=True, gpu_gib=8)
    body = json.loads(text)
    assert code == 0 and body["tensors"] == 581 and body["plan"]["fits"]
    assert body["plan"]["weights_total"] > 2_000_000


def test_damage_is_listed_not_raised(sound: Path, tmp_path: Path) -> None:
    for file in sound.iterdir():
        if not file.name.startswith("model-00003"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    report = inspect_path(tmp_path)
    assert any("model-00003" in p and "no such file" in p for p in report.problems)
    assert any("'layers.1.attn.wq_a.weight': missing" in p for p in report.problems)
    code, text = run(tmp_path)
    assert code == 1 and "more problems" in text


def test_drafter_variants(tmp_path: Path) -> None:
    bare = inspect_path(write_random(tmp_path / "a", TINY, 1, drafter=False))
    assert bare.drafter == "none" and bare.heads == ["lm"] and bare.problems == []
    headless = inspect_path(write_random(tmp_path / "b", TINY, 1, confidence_head=False))
    assert headless.drafter == "dspark" and not headless.confidence_head and headless.problems == []
    assert "no confidence head" in headless.notes[0] and headless.heads == ["lm", "markov"]
    folder = write_random(tmp_path / "c", TINY, 1)
    lone(folder, replace(TINY, dspark=None, mtp_stages=0))
    orphan = inspect_path(folder)
    assert orphan.drafter == "dspark without config fields" and orphan.problems == []
    assert orphan.ignored == {"DSpark stage, but config.json has no dspark_* fields": 241}
    lone(tmp_path / "a", TINY)
    absent = inspect_path(tmp_path / "a")
    assert absent.drafter == "absent" and len(absent.problems) == 1


def test_unreadable_is_exit_code_two(tmp_path: Path) -> None:
    code, text = run(tmp_path)
    assert code == 2 and "config.json" in text
    lone(tmp_path, TINY)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    code, text = run(tmp_path, as_json=True)
    assert code == 2 and "not a safetensors file" in json.loads(text)["error"]
    with pytest.raises(CheckpointError):
        inspect_path(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="fetch the index"):
        inspect_path(tmp_path)


def test_plan_output(tmp_path: Path) -> None:
    memory = plan(flash_dspark(), 141, 2, 131072)
    out = io.StringIO()
    render_plan(memory, Console(file=out, width=120))
    text = out.getvalue()
    for word in ("20.49 MB", "3.51 kB", "3.84 MB", "requests of 131072 tokens at once"):
        assert word in text
    out = io.StringIO()
    render_plan(plan(flash_dspark(), 80), Console(file=out, width=120))
    assert "do not fit" in out.getvalue()
    code, _ = run(lone(tmp_path, flash_dspark()), plan=True, gpu_gib=80)
    assert code == 1
    code, text = run(tmp_path, plan=True, tp=3)
    assert code == 2 and "tensor-parallel" in text
    with pytest.raises(ConfigError):
        plan(flash_dspark(), 141, 16)


def test_paths_with_brackets_are_printed(tmp_path: Path) -> None:
    folder = tmp_path / "[bold]v4"
    folder.mkdir()
    lone(folder, TINY)
    out = io.StringIO()
    render(inspect_path(folder), Console(file=out, width=400))
    assert "[bold]v4" in out.getvalue()
