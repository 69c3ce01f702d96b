"""Parameters and frames arrive as they were sent."""

from __future__ import annotations

import json

import pytest

from firesteel.config import SamplingParams
from firesteel.serve.messages import (
    LENGTH,
    MAX_FRAME,
    MessageError,
    Piece,
    body_length,
    pack,
    params_of,
    plain_params,
)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(
            logit_bias={5: -1.5, 2**20: 3.0}, stop=("a", "\ud800"), bad_words=("x",), bad_word_ids=((1, 2), (3,)),
            allowed_token_ids=(7, 5), stop_token_ids=(1,), seed=2**64 - 1, logprobs=0, speculative=False, n=3,
        ),
    ],
)  # fmt: skip
def test_parameters_survive(params: SamplingParams) -> None:
    frame = pack(plain_params(params))
    assert body_length(frame[: LENGTH.size]) == len(frame) - LENGTH.size
    assert params_of(json.loads(frame[LENGTH.size :])) == params


def test_only_changes_travel() -> None:
    assert plain_params(SamplingParams(seed=4)) == {"seed": 4}


def test_a_foreign_frame_is_refused() -> None:
    with pytest.raises(MessageError):
        body_length(LENGTH.pack(MAX_FRAME + 1))


def test_piece_from_a_list() -> None:
    end = {"finish_reason": "stop", "seed": 1, "usage": {}, "stats": {}}
    piece = Piece.of([2, "t", [5], [[-1.0, 0, []]], end, [[3, 1, 2]]])
    assert (piece.index, piece.text, piece.token_ids, piece.origins) == (2, "t", [5], [[3, 1, 2]])
    assert piece.end is not None and piece.end.finish_reason == "stop"
    assert Piece.of([0, "", [], [], None, []]).end is None
