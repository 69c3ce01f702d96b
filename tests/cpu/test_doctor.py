"""The doctor finds what is wrong, says what to change, and its report tells nothing of who runs it."""

from __future__ import annotations

import getpass
import json
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from firesteel import doctor
from firesteel.cli import main
from firesteel.models.deepseek_v4.random_init import tiny_config, write_random
from firesteel.ops import Choice, Numerics
from firesteel.ops.reference.tail import ReferenceOps
from firesteel.tokenizer import byte_tokenizer

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("doctor") / "tiny"
    config = tiny_config(compress_ratios=(0, 4, 16), n_routed_experts=4)
    write_random(path, config, 11, agreement=0.9)
    byte_tokenizer(config.vocab_size).save(path)
    return path


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Drifting(ReferenceOps):
    """Its products depend on how many rows there are."""

    def linear(self, x: Tensor, w: object) -> Tensor:
        """As the reference, and a little of the row count."""
        return super().linear(x, w) * (1 + 1e-6 * x.shape[0])  # type: ignore[arg-type]


def test_a_drifting_op_is_found() -> None:
    names = ["linear-fp4-100x96", "linear-bf16-24x77"]
    sound = doctor.check_invariance(Choice(ReferenceOps(Numerics(True)), {}), 1, names)
    assert sound.status == doctor.OK and sound.facts["cases"] == 2
    found = doctor.check_invariance(Choice(Drifting(Numerics(True)), {}), 1, names)
    assert found.status == doctor.FAIL and "differs from its bits elsewhere" in found.found
    assert "--backend reference" in found.change


def test_a_backend_that_is_passed_over() -> None:
    (check,), choice = doctor.check_backend("reference")
    assert check.status == doctor.WARN and choice is not None, "plain torch is slow"
    (check,), choice = doctor.check_backend("nonsense")
    assert check.status == doctor.FAIL and check.change and choice is None


def test_texts_of_a_drafting_checkpoint(folder: Path) -> None:
    checks = {c.name: c for c in doctor.check_checkpoint(folder, "auto", 1)}
    assert [c.status for c in checks.values()] == [doctor.OK] * 3, checks
    assert "drafts accepted" in checks["texts with and without drafts"].found


def test_a_broken_checkpoint(folder: Path, tmp_path: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = next(n for n in index["weight_map"] if n.endswith("attn_norm.weight"))
    del index["weight_map"][name]
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (check,) = doctor.check_checkpoint(tmp_path, "auto", 1)
    assert check.status == doctor.FAIL and check.change
    (gone,) = doctor.check_checkpoint(tmp_path / "nowhere", "auto", 1)
    assert gone.status == doctor.FAIL and str(tmp_path) not in gone.found


def test_a_slow_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measure_copy", lambda index: 4.4)
    monkeypatch.setattr(doctor, "measure_matmul", lambda index: 100.0)
    copy, matmul = doctor.check_floors(0, "NVIDIA H200")
    assert (copy.status, matmul.status) == (doctor.OK, doctor.FAIL) and matmul.change
    assert [c.status for c in doctor.check_floors(0, "unheard of")] == [doctor.NOTE] * 2


def test_the_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "check_invariance", lambda choice, count: doctor.Check("rows", doctor.OK, "x")
    )
    report = tmp_path / "report.json"
    arguments = ["doctor", "--model", str(folder), "--threads", "1", "--json", str(report)]
    assert main(arguments) == 0
    told = report.read_text()
    assert json.loads(told)["counts"]["fail"] == 0
    for private in (str(folder.parent), platform.node(), str(Path.home()), f"/{getpass.getuser()}/"):
        assert private not in told or len(private) < 3, private
    assert main([*arguments[:2], str(tmp_path / "none"), *arguments[3:]]) == 1
    failed = [c for c in json.loads(report.read_text())["checks"] if c["status"] == "fail"]
    assert failed and all(c["change"] for c in failed)
    assert main([*arguments, "--threads", "0"]) == 2
