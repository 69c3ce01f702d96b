"""The engine as a caller sees it: batches, chunks, reused slots, ends of answers, seeds, errors.

What a request gets may depend on its prompt, parameters and seed only; "alone" means a fresh engine
that has never seen another request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from firesteel import LLM, SamplingParams
from firesteel.config import ParameterError
from firesteel.models.deepseek_v4.random_init import tiny_config, write_random
from firesteel.ops import BackendError, Numerics, select
from firesteel.tokenizer import FIRST_BYTE, byte_tokenizer
from oracles.drive import Drive

EOS = 1
LETTERS = tuple(FIRST_BYTE + b for b in range(ord("a"), ord("z") + 1))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
LENGTHS = (5, 1, 33, 17, 60, 4)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["reference", "native"], scope="module")
def backend(request: pytest.FixtureRequest) -> str:
    try:
        select(request.param, Numerics(True))
    except (BackendError, ImportError) as err:
        pytest.skip(str(err))
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with every layer kind and a tokenizer of single bytes."""
    path = tmp_path_factory.mktemp("engine") / "model"
    config = tiny_config(dspark=None, compress_ratios=(0, 4, 16), n_routed_experts=4)
    write_random(path, config, 11, drafter=False)
    byte_tokenizer(config.vocab_size).save(path)
    return path


@pytest.fixture(scope="module")
def make(folder: Path, backend: str) -> Any:
    """``make(**settings)``: a fresh engine."""

    def build(**settings: Any) -> LLM:
        defaults = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 512}
        return LLM(folder, **{**defaults, "backend": backend, **settings})

    return build


@pytest.fixture
def llm(make: Any) -> Iterator[LLM]:
    """A fresh engine, whose account is checked when the test is over."""
    engine = make()
    yield engine
    settled(engine)


def settled(llm: LLM) -> None:
    """Nothing runs, nothing is lost, every slot is free."""
    engine = llm.engine
    assert not engine.busy and not llm.frontend.open
    engine.scheduler.check()
    assert engine.memory.free_slots == engine.memory.slots


@cache
def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(100 * seed + length)
    return tuple(torch.randint(3, 512, (length,), generator=generator).tolist())


def prompts() -> list[tuple[int, ...]]:
    return [prompt(n) for n in LENGTHS]


def ids(completions: Sequence[Any]) -> list[tuple[int, ...]]:
    return [c.token_ids for c in completions]


def sampled() -> list[SamplingParams]:
    """Other seeds, temperatures and lengths for every prompt."""
    base = SamplingParams(ignore_eos=True)
    return [
        replace(base, seed=2**40 + i, temperature=0.8 + 0.1 * (i % 3), max_tokens=4 + i)
        for i in range(len(LENGTHS))
    ]


@pytest.fixture(scope="module")
def alone(make: Any) -> dict[str, list[tuple[int, ...]]]:
    """Each prompt in an engine of its own: greedy and sampled."""
    one = torch.get_num_threads()
    torch.set_num_threads(1)
    out = {
        "greedy": [ids(make().generate([p], GREEDY))[0] for p in prompts()],
        "sampled": [ids(make().generate([p], s))[0] for p, s in zip(prompts(), sampled(), strict=True)],
    }
    torch.set_num_threads(one)
    return out


# ---- batches -------------------------------------------------------------------------------------
def test_batch_equals_alone(llm: LLM, alone: dict[str, list[tuple[int, ...]]]) -> None:
    """Six requests over three slots; then all again in the used engine, in another order."""
    assert ids(llm.generate(prompts(), GREEDY)) == alone["greedy"]
    assert ids(llm.generate(prompts(), sampled())) == alone["sampled"]
    back = llm.generate(prompts()[::-1], sampled()[::-1])
    assert ids(back)[::-1] == alone["sampled"]
    assert len(set(alone["sampled"])) == len(LENGTHS)


def test_greedy_and_sampled_share_steps(llm: LLM, alone: dict[str, list[tuple[int, ...]]]) -> None:
    params = [GREEDY if i % 2 else s for i, s in enumerate(sampled())]
    want = [alone["greedy" if i % 2 else "sampled"][i] for i in range(len(LENGTHS))]
    assert ids(llm.generate(prompts(), params)) == want


@pytest.mark.parametrize("rows", [1, 3, 7, 64])
def test_chunk_sizes(make: Any, alone: dict[str, list[tuple[int, ...]]], rows: int) -> None:
    """Steps of 1 to 64 rows: prompts in chunks, decodes beside them."""
    pick = [0, 1, 2] if rows < 7 else list(range(len(LENGTHS)))
    llm = make(max_num_batched_tokens=rows)
    got = llm.generate([prompts()[i] for i in pick], [sampled()[i] for i in pick])
    assert ids(got) == [alone["sampled"][i] for i in pick]
    assert max(r.rows for r in llm.engine.records) <= rows
    settled(llm)


def test_float32_batch_equals_alone(make: Any) -> None:
    """The numerics in which nothing hides a last bit."""
    want = [ids(make(numerics="float32").generate([p], GREEDY))[0] for p in prompts()[:4]]
    llm = make(numerics="float32", max_num_batched_tokens=24)
    assert ids(llm.generate(prompts()[:4], GREEDY)) == want


def test_unread_memory_is_never_read(make: Any, alone: dict[str, list[tuple[int, ...]]]) -> None:
    """With everything dead overwritten by NaN after each step, and stray synchronisations refused."""
    llm = make(debug_poison=True, debug_sync=True, max_num_batched_tokens=20)
    assert ids(llm.generate(prompts(), sampled())) == alone["sampled"]
    settled(llm)


def test_the_engine_is_the_target_in_a_loop(make: Any) -> None:
    """Greedy tokens are the argmax of the target's own passes."""
    llm = make(numerics="float32")
    params = replace(GREEDY, ignore_eos=True)
    got = llm.generate([prompt(33)], params)[0]
    assert list(got.token_ids) == Drive(llm.engine.runner.target, 1, 64).greedy(0, prompt(33), 8)


def test_a_prefix_hit_changes_nothing(make: Any) -> None:
    """300 tokens twice, then a prompt that shares the first page only."""
    llm = make()
    long, other = prompt(300), (*prompt(300)[:280], *prompt(20))
    want = [ids(make(prefix_caching=False).generate([p], GREEDY))[0] for p in (long, other)]
    first, again, part = (llm.generate([p], GREEDY)[0] for p in (long, long, other))
    assert ids([first, again, part]) == [want[0], want[0], want[1]]
    assert [c.usage["cached_tokens"] for c in (first, again, part)] == [0, 256, 256]
    settled(llm)


# ---- where an answer ends ------------------------------------------------------------------------
def letters(llm: LLM, count: int = 12, **changes: Any) -> Any:
    """An answer made of letters, one token each."""
    params = SamplingParams(max_tokens=count, temperature=0.9, seed=3, allowed_token_ids=LETTERS)
    return llm.generate([prompt(17)], replace(params, **changes))[0]


def test_stop_ids(llm: LLM) -> None:
    whole = letters(llm)
    assert whole.finish_reason == "length" and len(whole.token_ids) == 12
    for target in dict.fromkeys(whole.token_ids[3:8]):
        end = whole.token_ids.index(target) + 1
        got = letters(llm, stop_token_ids=(target, 500))
        assert got.token_ids == whole.token_ids[:end]
        assert (got.finish_reason, got.stop_reason) == ("stop", target)
        assert got.usage["completion_tokens"] == end


def test_end_token(llm: LLM) -> None:
    """The model's end token ends an answer and leaves no text, unless it is to be ignored."""
    to_end = {EOS: 100.0}
    got = llm.generate([prompt(5)], replace(GREEDY, logit_bias=to_end))[0]
    assert (got.token_ids, got.text, got.finish_reason) == ((EOS,), "", "stop")
    on = llm.generate([prompt(5)], replace(GREEDY, logit_bias=to_end, ignore_eos=True))[0]
    assert on.token_ids == (EOS,) * GREEDY.max_tokens and on.finish_reason == "length"
    late = llm.generate([prompt(5)], replace(GREEDY, logit_bias=to_end, min_tokens=4))[0]
    assert late.token_ids.index(EOS) == 4 and late.finish_reason == "stop"


def test_stop_strings(llm: LLM) -> None:
    """A stop string spans several tokens; the text ends before its first occurrence."""
    whole = letters(llm)
    assert len(whole.text) == 12
    for size in (1, 2, 5):
        stop = whole.text[6 : 6 + size]
        at = whole.text.index(stop)
        got = letters(llm, stop=(stop,))
        assert (got.text, got.finish_reason, got.stop_reason) == (whole.text[:at], "stop", stop)
        assert got.token_ids == whole.token_ids[: at + size]
        kept = letters(llm, stop=(stop,), include_stop_str_in_output=True)
        assert kept.text == whole.text[: at + size]


def test_which_stop_string_wins(llm: LLM) -> None:
    """The one that is complete first; an unfinished one stays in the text."""
    whole = letters(llm)
    early, late = whole.text[4:6], whole.text[8:11]
    got = letters(llm, stop=(late, early))
    assert got.text == whole.text[: whole.text.index(early)] and got.stop_reason == early
    unfinished = whole.text[-3:] + "9"
    assert letters(llm, stop=(unfinished,)).text == whole.text


def test_stop_string_at_the_last_token(llm: LLM) -> None:
    whole = letters(llm)
    got = letters(llm, stop=(whole.text[-2:],))
    at = whole.text.index(whole.text[-2:])
    assert (got.text, got.finish_reason) == (whole.text[:at], "stop")


def test_max_tokens(llm: LLM) -> None:
    """0 computes nothing, 1 is the first token of more, the model's length ends an answer."""
    more = llm.generate([prompt(17)], replace(GREEDY, ignore_eos=True))[0]
    none = llm.generate([prompt(17)], replace(GREEDY, max_tokens=0))[0]
    assert (none.token_ids, none.text, none.finish_reason) == ((), "", "length")
    assert none.usage["prompt_tokens"] == none.usage["total_tokens"] == 17
    one = llm.generate([prompt(17)], replace(GREEDY, max_tokens=1, ignore_eos=True))[0]
    assert one.token_ids == more.token_ids[:1] and one.finish_reason == "length"


def test_model_length_ends_an_answer(make: Any) -> None:
    llm = make(max_model_len=40)
    got = llm.generate([prompt(37), prompt(39)], replace(GREEDY, max_tokens=100, ignore_eos=True))
    assert [len(c.token_ids) for c in got] == [3, 1]
    assert all(c.finish_reason == "length" for c in got)
    settled(llm)


# ---- seeds ---------------------------------------------------------------------------------------
def test_seeds(llm: LLM) -> None:
    """Equal seeds give equal text, other seeds other text; a drawn seed is reported and works again."""
    hot = SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True)
    a, b, c = llm.generate([prompt(5)] * 3, [replace(hot, seed=s) for s in (7, 7, 8)])
    assert a.token_ids == b.token_ids != c.token_ids
    assert (a.seed, c.seed) == (7, 8)
    drawn, other = llm.generate([prompt(5)] * 2, hot)
    assert drawn.seed != other.seed and drawn.token_ids != other.token_ids
    assert ids(llm.generate([prompt(5)], replace(hot, seed=drawn.seed))) == [drawn.token_ids]
    top = llm.generate([prompt(5)] * 2, [replace(hot, seed=s) for s in (2**64 - 1, 2**32 - 1)])
    assert top[0].seed == 2**64 - 1 and top[0].token_ids != top[1].token_ids


def test_every_position_has_its_own_noise(llm: LLM) -> None:
    """At a temperature where noise alone decides, tokens differ from position to position."""
    wild = SamplingParams(max_tokens=12, temperature=100.0, ignore_eos=True, seed=9)
    assert len(set(llm.generate([prompt(5)], wild)[0].token_ids)) > 8


def test_samples_of_one_prompt(llm: LLM) -> None:
    """n answers differ, share the seed, and the first is the only one of n = 1."""
    hot = SamplingParams(max_tokens=6, temperature=1.0, ignore_eos=True, seed=5)
    several = llm.generate([prompt(17)], replace(hot, n=4))
    assert [c.index for c in several] == [0, 1, 2, 3] and {c.seed for c in several} == {5}
    assert len(set(ids(several))) == 4
    assert llm.generate([prompt(17)], hot)[0].token_ids == several[0].token_ids


def test_a_seed_continues_its_own_answer(llm: LLM) -> None:
    """Noise goes by position: a prompt with part of its answer goes on with the rest of it."""
    hot = SamplingParams(max_tokens=10, temperature=1.0, ignore_eos=True, seed=21)
    whole = llm.generate([prompt(17)], hot)[0].token_ids
    rest = llm.generate([(*prompt(17), *whole[:4])], replace(hot, max_tokens=6))[0].token_ids
    assert rest == whole[4:]


# ---- errors --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("bad", "changes", "name"),
    [
        ((), {}, "prompt"),
        ((3, 512), {}, "prompt"),
        ((-1, 3), {}, "prompt"),
        (prompt(512), {}, "prompt"),
        ((3,), {"stop_token_ids": (512,)}, "stop_token_ids"),
        ((3,), {"stop_token_ids": tuple(range(3, 40))}, "stop_token_ids"),
        ((3,), {"logit_bias": {512: 1.0}}, "logit_bias"),
        ((3,), {"allowed_token_ids": (9, 600)}, "allowed_token_ids"),
    ],
)
def test_refused_requests(llm: LLM, bad: tuple[int, ...], changes: Any, name: str) -> None:
    """A request that cannot be served names its parameter; its batch leaves nothing behind."""
    with pytest.raises(ParameterError, match=f"^{name}"):
        llm.generate([prompt(5), bad], [GREEDY, replace(GREEDY, **changes)])
    settled(llm)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("top_p", 0.0),
        ("top_k", -2),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**64),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
    ],
)
def test_refused_parameters(name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=f"^{name}="):
        SamplingParams(**{name: value})


def test_refused_calls(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="params"):
        llm.generate([prompt(5)], [GREEDY, GREEDY])
    with pytest.raises(ParameterError, match="unknown engine setting 'slots'"):
        LLM(llm.path, slots=3)
    with pytest.raises(ParameterError, match="max_model_len"):
        LLM(llm.path, max_model_len=4096)
    assert llm.generate([]) == []


def test_a_prompt_list_with_a_stray_id_is_refused(llm: LLM) -> None:
    """[[5, 6], 7] is neither one prompt nor a list of prompts; a float is no id."""
    with pytest.raises(ParameterError, match=r"^prompts: "):
        llm.generate([prompt(5), 7], GREEDY)  # type: ignore[list-item]
    with pytest.raises(ParameterError, match=r"^prompt: "):
        llm.generate([[5, 6.5]], GREEDY)  # type: ignore[list-item]


def test_a_request_whose_logits_break(llm: LLM, alone: dict[str, list[tuple[int, ...]]]) -> None:
    """NaN in one request ends that one; its neighbours and later users of its slot see nothing of it."""
    embed = llm.engine.runner.target.weights.embed
    kept = embed[500].clone()
    broken = (*prompt(33)[:20], 500, *prompt(33)[20:])
    embed[500] = float("nan")
    got = llm.generate([prompts()[0], broken, prompts()[3]], GREEDY)
    embed[500] = kept
    assert got[1].finish_reason == "error" and got[1].token_ids == () and "finite" in got[1].error
    assert [got[0].token_ids, got[2].token_ids] == [alone["greedy"][0], alone["greedy"][3]]
    assert ids(llm.generate(prompts(), GREEDY)) == alone["greedy"]


# ---- mixes ---------------------------------------------------------------------------------------
def test_stream_is_the_completion(llm: LLM) -> None:
    """Pieces join to the text; nothing of a stop string is ever shown."""
    whole = letters(llm)
    stop = whole.text[7:10]
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=3, allowed_token_ids=LETTERS, stop=(stop,))
    *pieces, last = llm.stream(prompt(17), params)
    assert "".join(str(p) for p in pieces) == last.text == whole.text[: whole.text.index(stop)]


def test_account_after_a_mix(make: Any, alone: dict[str, list[tuple[int, ...]]]) -> None:
    """Streams left early, refusals, stops and full queues; the pages and slots add up after each."""
    llm = make(max_num_seqs=2, max_num_batched_tokens=16)
    stream = llm.stream(prompt(60), replace(GREEDY, max_tokens=30, allowed_token_ids=LETTERS))
    next(stream)
    assert llm.engine.busy
    stream.close()
    settled(llm)
    with pytest.raises(ParameterError):
        llm.generate([prompt(60), prompt(5), ()], GREEDY)
    settled(llm)

    def hang_up(answer: Any) -> None:
        if answer.seq.prompt == prompt(33) and len(answer.ids) == 2:
            raise ConnectionError("gone")

    got = llm.generate(prompts(), GREEDY, on_token=hang_up)
    assert [c.finish_reason == "error" for c in got] == [n == 33 for n in LENGTHS]
    assert [c.token_ids for c in got if c.finish_reason != "error"] == [
        t for n, t in zip(LENGTHS, alone["greedy"], strict=True) if n != 33
    ]
    settled(llm)
    letters(llm, stop=("a", "e", "i"))
    settled(llm)
    assert ids(llm.generate(prompts(), sampled())) == alone["sampled"]
    settled(llm)
