"""Results on disk: whole or as they were."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from firesteel.bench.report import write_json
from firesteel.config import ParameterError


def test_a_result_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "new" / "r.json"
    write_json({"a": "ä"}, file)
    assert json.loads(file.read_text()) == {"a": "ä"} and os.listdir(file.parent) == ["r.json"]
    real = Path.write_text

    def torn(self: Path, text: str) -> int:
        real(self, text[: len(text) // 2])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", torn)
        with pytest.raises(KeyboardInterrupt):
            write_json({"a": list(range(100))}, file)
    assert json.loads(file.read_text()) == {"a": "ä"} and os.listdir(file.parent) == ["r.json"]
    write_json({"b": 2}, file)
    assert json.loads(file.read_text()) == {"b": 2} and os.listdir(file.parent) == ["r.json"]


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    pipe, heard = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()))
    reader.start()
    write_json({"a": 1}, pipe)
    reader.join(10)
    assert json.loads(heard[0]) == {"a": 1} and pipe.is_fifo()
    with pytest.raises(ParameterError, match="a folder"):
        write_json({}, tmp_path)
    write_json({}, None)


def test_a_link_stays_one(tmp_path: Path) -> None:
    """/dev/stdout is a link to what a shell writes to."""
    file, link = tmp_path / "real.json", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    write_json({"a": 1}, link)
    assert link.is_symlink() and json.loads(file.read_text()) == {"a": 1}
