"""The tokenizer wrapper: exact round trips, streaming, stop ids, fit to a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers, trainers

from firesteel.models.deepseek_v4 import chat_strings as s
from firesteel.models.deepseek_v4.chat import encode_messages
from firesteel.tokenizer import FIRST_BYTE, Tokenizer, TokenizerError, byte_tokenizer, protocol_tokens

BYTES = byte_tokenizer(512)


def trained() -> Inner:
    """A byte-level BPE with real merges, whose tokens cut multi-byte characters."""
    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[s.BOS, s.EOS, s.PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["the theme of the ether größe größer 漢字 漢語 🙂🙃 " * 4], trainer)
    inner.add_tokens([s.THINK, s.END_THINK, s.USER, s.ASSISTANT])
    return inner


BPE = Tokenizer(trained(), stop_token_ids=(1,))


def test_byte_tokenizer_has_the_promised_ids() -> None:
    assert BYTES.size == 512
    assert [BYTES.id_of(t) for t in (s.BOS, s.EOS, s.PAD)] == [0, 1, 2]
    assert BYTES.stop_token_ids == (1,)
    assert BYTES.id_of(s.SYSTEM) == 259
    assert [BYTES.id_of(t) for t in protocol_tokens()] == list(range(259, 259 + len(protocol_tokens())))
    assert [BYTES.token_bytes(FIRST_BYTE + b) for b in range(256)] == [bytes([b]) for b in range(256)]
    assert BYTES.encode("aé") == [FIRST_BYTE + b for b in "aé".encode()]


def test_byte_tokenizer_refuses_a_small_vocabulary() -> None:
    smallest = 259 + len(protocol_tokens())
    assert byte_tokenizer(smallest).size == smallest
    with pytest.raises(TokenizerError, match=f"at least {smallest}"):
        byte_tokenizer(smallest - 1)


def test_chat_prompt_becomes_protocol_ids() -> None:
    prompt = encode_messages([{"role": "user", "content": "Hi"}], thinking=True)
    ids = BYTES.encode(prompt)
    want = [BYTES.id_of(s.BOS), BYTES.id_of(s.USER), *(FIRST_BYTE + b for b in b"Hi")]
    assert ids == [*want, BYTES.id_of(s.ASSISTANT), BYTES.id_of(s.THINK)]  # and no second BOS
    assert BYTES.decode(ids, skip_special=False) == prompt
    assert BYTES.decode(ids) == prompt.removeprefix(s.BOS)


@given(st.text())
def test_text_round_trips(text: str) -> None:
    for tokenizer in (BYTES, BPE):
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@given(st.lists(st.integers(0, 400), max_size=40), st.booleans(), st.data())
def test_stream_equals_decode_equals_library(ids: list[int], skip: bool, data: st.DataObject) -> None:
    """Any ids, cut anywhere: invalid UTF-8 and unknown ids included."""
    for tokenizer in (BYTES, BPE):
        whole = tokenizer.decode(ids, skip_special=skip)
        assert whole == tokenizer._inner.decode(ids, skip_special_tokens=skip)
        stream, text, at = tokenizer.detokenizer(skip), "", 0
        while at < len(ids):
            step = data.draw(st.integers(1, 5))
            piece = stream.push(ids[at : at + step])
            text, at = text + piece, at + step
            assert whole.startswith(text)  # nothing that was said is taken back
        assert text + stream.finish() == whole
        assert stream.held == 0


def test_unfinished_character_waits() -> None:
    stream = BYTES.detokenizer()
    smile = [FIRST_BYTE + b for b in "🙂".encode()]
    assert [stream.push([i]) for i in smile] == ["", "", "", "🙂"]
    assert stream.push([FIRST_BYTE + ord("a"), *smile[:2]]) == "a"
    assert stream.held == 2
    assert stream.finish() == "\ufffd"
    assert stream.push(smile) == "🙂"  # a new stream starts clean


def test_special_ids_are_hidden_and_parser_tokens_are_not() -> None:
    ids = BYTES.encode(f"{s.BOS}{s.THINK}r{s.END_THINK}a{s.EOS}")
    assert BYTES.decode(ids) == "<think>r</think>a"
    assert BYTES.detokenizer().push(ids) == "<think>r</think>a"
    assert BYTES.detokenizer(skip_special=False).push(ids).endswith(s.EOS)


def test_ids_beyond_the_vocabulary_are_silent() -> None:
    assert BYTES.decode([FIRST_BYTE + ord("a"), 10_000, -1, FIRST_BYTE + ord("b")]) == "ab"


def test_save_and_load_keep_everything(tmp_path: Path) -> None:
    BPE.save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.stop_token_ids == (1, 7)
    assert loaded.special_ids == BPE.special_ids and loaded.size == BPE.size
    text = "the größte 漢字 <think>"
    assert loaded.encode(text) == BPE.encode(text)
    assert Tokenizer.load(tmp_path / "tokenizer.json").stop_token_ids == (1, 7)


def test_stop_ids_need_no_files(tmp_path: Path) -> None:
    BYTES.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert Tokenizer.load(tmp_path).stop_token_ids == ()


@pytest.mark.parametrize("value", ["1", [1, "2"], True, -1, 1.5])
def test_bad_eos_names_file_and_value(tmp_path: Path, value: object) -> None:
    BYTES.save(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(TokenizerError, match=r"generation_config\.json: eos_token_id="):
        Tokenizer.load(tmp_path)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no such file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{]")
    with pytest.raises(TokenizerError, match=r"not a tokenizer\.json"):
        Tokenizer.load(tmp_path)
    BYTES.save(tmp_path)
    (tmp_path / "config.json").write_text("{]")
    with pytest.raises(TokenizerError, match=r"config\.json: not valid JSON"):
        Tokenizer.load(tmp_path)


def test_other_kinds_of_tokenizer_are_refused() -> None:
    inner = Inner(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(TokenizerError, match="not a byte-level tokenizer"):
        Tokenizer(inner)


def test_check_against_a_model() -> None:
    BYTES.check(512, bos_token_id=0, eos_token_id=1)
    BYTES.check(1024)
    with pytest.raises(TokenizerError, match=r"ids go up to 511, the model's vocab_size is 500"):
        BYTES.check(500)
    with pytest.raises(TokenizerError, match="bos_token_id=5"):
        BYTES.check(512, bos_token_id=5)
    with pytest.raises(TokenizerError, match="eos_token_id=2"):
        BYTES.check(512, eos_token_id=2)
    with pytest.raises(TokenizerError, match="stop id 9999"):
        Tokenizer(trained(), stop_token_ids=(9999,)).check(512)


def test_unknown_token_and_bad_text() -> None:
    assert BYTES.has(s.THINK) and not BYTES.has("<nope>")
    with pytest.raises(TokenizerError, match="no token '<nope>'"):
        BYTES.id_of("<nope>")
    with pytest.raises(TokenizerError, match="lone surrogates"):
        BYTES.encode("a\ud800")
