"""Wrong or contradictory flags: one line that names the flag, before anything is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from firesteel.cli import main
from firesteel.config import ParameterError
from firesteel.serve.errors import ApiError
from firesteel.serve.protocol import ChatRequest, read
from firesteel.speculation.cost import CostError, CostTable
from firesteel.speculation.survival import CalibrationError, Coefficients


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["generate", "--prompt", "x", "--chat", "--thinking-budget", "5"], "--thinking-budget"),
        (["generate", "--prompt", "x", "--json-schema", "no/such/file"], "--json-schema"),
        (["eval", "--max-tokens", "0"], "--max-tokens"),
        (["eval", "--speculative-config", "{}"], "--speculative-config"),
        (["eval", "--held-out", "--problems", "x.jsonl"], "--held-out"),
        (["calibrate", "--k", "0"], "--k"),
        (["calibrate", "--limit", "-3"], "--limit"),
        (["calibrate", "--max-tokens", "0"], "--max-tokens"),
        (["simulate", "--requests", "0"], "--requests"),
        (["simulate", "--prompt", "0"], "--prompt"),
        (["simulate", "--output", "-1"], "--output"),
        (["simulate", "--host-ms", "-1"], "--host-ms"),
        (["simulate", "--host-ms", "nan"], "--host-ms"),
        (["simulate", "--trace", "no/such/file"], "--trace"),
        (["serve", "--port", "99999"], "--port"),
    ],
)
def test_the_flag_is_named(argv: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith("firesteel: ") and word in said and said.count("\n") == 1


@pytest.mark.parametrize("field", ["stream", "structured_outputs", "stream_options"])
def test_a_field_that_begins_like_a_type_is_named(field: str) -> None:
    with pytest.raises(ApiError, match=f"{field}: ") as err:
        read(ChatRequest, {"messages": [], field: "x"})
    assert err.value.message.startswith(field)


def test_files_that_are_no_text_are_named(tmp_path: Path) -> None:
    file = tmp_path / "binary"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CalibrationError, match="binary: not readable"):
        Coefficients.load(file)
    with pytest.raises(CostError, match="binary: no readable cost table"):
        CostTable.load(file, "any")


def test_the_comparison_names_the_extra_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from firesteel.bench.hf import Theirs

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ParameterError, match=r"firesteel\[test\]"):
        Theirs(tmp_path)
