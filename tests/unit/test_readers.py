"""Request sets: every form is read into the same thing, freezing changes nothing, bad files are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firesteel.bench.readers import (
    bundled,
    fit_set,
    held_out_texts,
    random_prompts,
    read_requests,
    seed_of,
)
from firesteel.config import ParameterError

pytestmark = pytest.mark.unit

SPEED = {
    "question_id": "q7",
    "category": "coding",
    "turns": ["Write a loop.", "Now in C."],
    "multiturn": True,
}
SHARE = {
    "id": "s1",
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi"},
        {"from": "gpt", "value": "Hello"},
    ],
}
GSM = {"question": "1+1?", "answer": "#### 2"}
PLAIN = {"id": "p", "domain": "prose", "prompt": "Once upon"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "thinking": True}
IDS = {"token_ids": [4, 5, 6]}


def lines(folder: Path, *records: Any) -> Path:
    file = folder / "set.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    return file


def test_every_form_in_one_file(tmp_path: Path) -> None:
    found = read_requests(lines(tmp_path, SPEED, SHARE, GSM, PLAIN, CHAT, IDS))
    speed, share, gsm, plain, chat, ids = found.asks
    assert (speed.key, speed.domain, speed.messages) == ("q7", "coding", (("user", "Write a loop."),))
    assert share.messages == (("system", "Be brief."), ("user", "Hi")), "the model's answer is no prompt"
    assert gsm.messages == (("user", "1+1?"),) and gsm.domain == "arithmetic"
    assert (plain.prompt, plain.domain, plain.messages) == ("Once upon", "prose", ())
    assert chat.thinking and ids.token_ids == (4, 5, 6)
    assert found.domains() == {"coding": 1, "chat": 1, "arithmetic": 1, "prose": 1, "other": 2}


def test_sharegpt_as_a_json_list_without_conversations_that_the_model_begins(tmp_path: Path) -> None:
    file = tmp_path / "share.json"
    begun = {
        "id": "s0",
        "conversations": [{"from": "gpt", "value": "Hello"}, {"from": "human", "value": "Hi"}],
    }
    file.write_text(json.dumps([begun, SHARE, {"id": "e", "conversations": []}]))
    assert [a.key for a in read_requests(file, "sharegpt").asks] == ["s1"]


def test_a_frozen_set_is_itself(tmp_path: Path) -> None:
    first = read_requests(lines(tmp_path, SPEED, SHARE, GSM, PLAIN, CHAT, IDS))
    first.freeze(tmp_path / "frozen.jsonl")
    again = read_requests(tmp_path / "frozen.jsonl")
    assert again.asks == first.asks and again.digest == first.digest
    assert again.text() == (tmp_path / "frozen.jsonl").read_text()


def test_the_first_of_every_domain(tmp_path: Path) -> None:
    more = [PLAIN | {"id": f"p{i}"} for i in range(3)]
    found = read_requests(lines(tmp_path, SPEED, *more, GSM)).first(2)
    assert [a.key for a in found.asks] == ["q7", "p0", "p1", "gsm8k-4"]
    with pytest.raises(ParameterError, match="per domain"):
        found.first(0)


def test_the_digest_sees_order_and_content(tmp_path: Path) -> None:
    a = read_requests(lines(tmp_path, PLAIN, IDS | {"id": "i"})).digest
    b = read_requests(lines(tmp_path, IDS | {"id": "i"}, PLAIN)).digest
    c = read_requests(lines(tmp_path, PLAIN | {"prompt": "Once upon."}, IDS | {"id": "i"})).digest
    assert len({a, b, c}) == 3


@pytest.mark.parametrize(
    ("records", "form", "said"),
    [
        ([PLAIN, {"turns": []}], "auto", "line 2"),
        ([{"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM ..."]}], "auto", "placeholder"),
        ([PLAIN], "gsm8k", "'question'"),
        ([{"id": "x"}], "auto", "expected prompt"),
        ([PLAIN, PLAIN], "auto", "'p' occurs twice"),
        ([["a"]], "auto", "expected an object"),
        ([], "auto", "holds none"),
        ([PLAIN], "parquet", "form="),
    ],
)
def test_bad_sets_are_named(records: list[Any], form: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=said):
        read_requests(lines(tmp_path, *records), form)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1\xff\xfe")
    with pytest.raises(ParameterError, match="export parquet"):
        read_requests(tmp_path / "x.parquet")
    with pytest.raises(ParameterError, match="cannot be read"):
        read_requests(tmp_path / "none")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{')
    with pytest.raises(ParameterError, match="line 2"):
        read_requests(tmp_path / "bad.jsonl")
    (tmp_path / "broken.json").write_text("[{]")
    with pytest.raises(ParameterError, match="not JSON"):
        read_requests(tmp_path / "broken.json")


def test_seeds_depend_on_all_three_and_nothing_else() -> None:
    seeds = {seed_of(b, p, r) for b in (0, 1) for p in ("a", "b") for r in (0, 1)}
    assert len(seeds) == 8 and all(0 <= s < 2**64 for s in seeds)
    assert seed_of(3, "q7", 2) == 17223153602368738274, "frozen results need frozen seeds"


def test_bundled_sets_share_no_prompt() -> None:
    fit, held, texts = fit_set(), bundled("held-out"), held_out_texts()
    assert set(bundled("fit").asks) < set(fit.asks)
    assert (
        set(fit.domains()) == set(held.domains()) == set(texts.domains()) == {"arithmetic", "code", "prose"}
    )
    assert len(set(held.domains().values())) == 1 and len(held) >= 60, "balanced"

    def said(a: Any) -> str:
        return a.prompt or a.messages[-1][1]

    unseen = {said(a) for a in (*held.asks, *texts.asks)}
    assert not {said(a) for a in fit.asks} & unseen
    assert not any(a[:80] == b[:80] for a in map(said, fit.asks) for b in unseen if len(b) >= 80), (
        "one excerpt"
    )
    for found in (fit, held, texts):
        assert len({a.key for a in found.asks}) == len(found)
    with pytest.raises(ParameterError, match="split="):
        bundled("train")


def test_random_prompts_are_a_function_of_their_seed() -> None:
    one = random_prompts(3, 5, 100, 1)
    assert one == random_prompts(3, 5, 100, 1) and one.digest != random_prompts(3, 5, 100, 2).digest
    assert all(len(a.token_ids) == 5 and min(a.token_ids) >= 3 and max(a.token_ids) < 100 for a in one.asks)
    with pytest.raises(ParameterError, match="0x5"):
        random_prompts(0, 5, 100)
