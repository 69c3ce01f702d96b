"""The bit comparison of whole steps: passes on sound kernels, and sees a single row that its batch changes."""

from __future__ import annotations

from typing import Any

import pytest

from firesteel.bench import bits

pytestmark = pytest.mark.cpu
ARGS = ["--model", "tiny", "--rows", "200", "--max-num-seqs", "8", "--context", "60", "--set", 'device="cpu"']


def test_rows_keep_their_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert bits.main(ARGS) == 0
    assert "0 differ" in capsys.readouterr().out


def test_a_row_that_depends_on_its_batch_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = bits.Bits.run

    def run(self: Any, slots: list[int], widths: list[int], count: int) -> Any:
        h, tokens = plain(self, slots, widths, count)
        if count == 8:  # one bit, in one row count
            h[0, 0, 0] += abs(h[0, 0, 0]) * 2.0**-20
        return h, tokens

    monkeypatch.setattr(bits.Bits, "run", run)
    assert bits.main(ARGS) == 1
    assert "verify:" in capsys.readouterr().out
