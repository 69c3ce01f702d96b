"""Where answers end and what is reported of them: limits, stop strings, scores, echo, memory, order."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firesteel import LLM, SamplingParams
from firesteel.config import MAX_STOP_IDS, ParameterError
from firesteel.core import FinishReason
from firesteel.engine.loop import QueueFull
from firesteel.engine.output import Completion, TextStream
from firesteel.tokenizer import FIRST_BYTE
from oracles.drive import Drive
from oracles.traffic import EOS, VOCAB, page_size, write_model

PAGE = 16
SETTINGS: dict[str, Any] = {"numerics": "float32", "max_model_len": 128, "max_num_seqs": 3}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, seed=0, ignore_eos=True)
LETTERS = tuple(FIRST_BYTE + b for b in b"abcdefgh")


@pytest.fixture(scope="module", autouse=True)
def short_pages() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with page_size(PAGE):
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("limits") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, **SETTINGS)


def tokens(n: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(n)]


def one(llm: LLM, prompt: Sequence[int], params: SamplingParams = GREEDY, **changes: Any) -> Completion:
    return llm.generate([list(prompt)], replace(params, **changes))[0]


# ---- lengths -------------------------------------------------------------------------------------
@pytest.mark.parametrize("most", [1, 2, 9])
def test_max_tokens_is_exact(llm: LLM, most: int) -> None:
    got = one(llm, tokens(10), max_tokens=most)
    assert (len(got.token_ids), got.finish_reason, got.usage["completion_tokens"]) == (most, "length", most)


@pytest.mark.parametrize("room", [1, 2, 5])
def test_the_model_length_is_a_limit_of_its_own(llm: LLM, room: int) -> None:
    """Prompts up to one token below it; the answer gets what is left, whatever it asked for."""
    prompt = tokens(SETTINGS["max_model_len"] - room)
    for most in (room - 1, room, room + 1, 10**6):
        got = one(llm, prompt, max_tokens=most)
        assert (len(got.token_ids), got.finish_reason) == (min(most, room), "length")


def test_prompts_at_and_beyond_the_limit_are_refused(llm: LLM) -> None:
    for n in (SETTINGS["max_model_len"], SETTINGS["max_model_len"] + 1, 1000):
        with pytest.raises(ParameterError, match=r"^prompt.*max_model_len=128.*shorten"):
            one(llm, tokens(n))


def test_nothing_is_computed_for_no_tokens(llm: LLM) -> None:
    steps = len(llm.engine.records)
    got = one(llm, tokens(9), max_tokens=0, echo=True)
    assert len(llm.engine.records) == steps
    assert (got.token_ids, got.finish_reason) == (tuple(tokens(9)), "length")


@pytest.mark.parametrize("end", [True, False])
def test_scoring_alone_ends_by_length(llm: LLM, end: bool) -> None:
    """The one token that scoring samples is not the answer's, not even if it is the end token."""
    allowed = (EOS,) if end else (LETTERS[0],)
    got = one(llm, tokens(9), max_tokens=0, prompt_logprobs=0, ignore_eos=False, allowed_token_ids=allowed)
    assert (got.token_ids, got.text, got.finish_reason, got.stop_reason) == ((), "", "length", None)
    assert got.prompt_logprobs is not None and len(got.prompt_logprobs) == 9


def test_stop_ids_and_the_end_token_share_a_table(llm: LLM) -> None:
    most = tuple(range(100, 100 + MAX_STOP_IDS))
    one(llm, tokens(5), stop_token_ids=most)
    one(llm, tokens(5), stop_token_ids=most[1:], ignore_eos=False)
    one(llm, tokens(5), stop_token_ids=(*most, 100))  # twice the same counts once
    for refused in ({"stop_token_ids": most, "ignore_eos": False}, {"stop_token_ids": (*most, 200)}):
        with pytest.raises(ParameterError, match=r"^stop_token_ids: 17 with the end token; at most 16"):
            one(llm, tokens(5), **refused)


@pytest.mark.parametrize("least", [0, 1, 3, 8])
def test_min_tokens_keeps_every_end_away(llm: LLM, least: int) -> None:
    """End token, stop id and stop string are as likely as can be."""
    loved = {EOS: 50.0, LETTERS[0]: 50.0, LETTERS[1]: 49.0}
    got = one(
        llm, tokens(7), max_tokens=8, min_tokens=least, logit_bias=loved, ignore_eos=False,
        stop_token_ids=(LETTERS[0],), stop=("b",), temperature=1.0,
    )  # fmt: skip
    assert len(got.token_ids) >= max(least, 1)
    assert not {EOS, LETTERS[0]} & set(got.token_ids[:least])
    if least < 8:
        assert got.finish_reason == "stop" and len(got.token_ids) <= least + 1


# ---- stop strings ----------------------------------------------------------------------------------
def test_stop_strings_at_every_place(llm: LLM) -> None:
    """Every start and length; text, ids, scores, usage and reasons end at one token."""
    params = replace(GREEDY, max_tokens=10, temperature=1.0, seed=4, allowed_token_ids=LETTERS, logprobs=0)
    whole = one(llm, tokens(12), params)
    assert whole.logprobs is not None and len(whole.text) == 10
    places = [(start, size) for start in range(10) for size in (1, 2, 3, 10) if start + size <= 10]
    cases = [
        replace(params, stop=(whole.text[a : a + n],), include_stop_str_in_output=keep)
        for a, n in places
        for keep in (False, True)
    ]
    for case, got in zip(cases, llm.generate([tokens(12)] * len(cases), cases), strict=True):
        stop = case.stop[0]
        at = whole.text.index(stop)
        used = at + len(stop)
        assert got.text == whole.text[: used if case.include_stop_str_in_output else at]
        assert got.token_ids == whole.token_ids[:used]
        assert got.logprobs == whole.logprobs[:used]
        assert got.usage["completion_tokens"] == used
        assert got.usage["total_tokens"] == 12 + used
        assert (got.finish_reason, got.stop_reason) == ("stop", stop)


class Spelled:
    """A tokenizer whose token i is the i-th of some strings."""

    def __init__(self, parts: Sequence[str]):
        self.parts = parts

    def detokenizer(self) -> Any:
        return self

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self.parts[i] for i in ids)

    def finish(self) -> str:
        return ""


def first_stop(parts: Sequence[str], stops: Sequence[str], least: int) -> tuple[int, int, str] | None:
    """(tokens, place, string) of the first stop that a token completes, the leftmost of several."""
    text = ""
    for i, part in enumerate(parts):
        before, text = len(text), text + part
        hits = []
        for stop in stops:
            for at in range(len(text) - len(stop) + 1):
                if text[at : at + len(stop)] == stop and at + len(stop) > before:
                    hits.append((at, stop))
        if hits and i + 1 >= least and part:
            return (i + 1, *min(hits))
    return None


@settings(max_examples=400)
@given(
    parts=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    least=st.integers(0, 4),
    keep=st.booleans(),
    cuts=st.lists(st.integers(1, 4), max_size=8),
)
def test_stop_strings_for_any_split_into_tokens(
    parts: list[str], stops: list[str], least: int, keep: bool, cuts: list[int]
) -> None:
    """Tokens of any length, in steps of any number of tokens; what is shown early is never taken back."""
    params = SamplingParams(
        max_tokens=max(len(parts), least),
        min_tokens=least,
        stop=tuple(stops),
        include_stop_str_in_output=keep,
    )
    stream = TextStream(Spelled(parts), params)  # type: ignore[arg-type]
    want, at, shown, kept = first_stop(parts, stops, least), 0, "", 0
    for cut in [*cuts, len(parts)]:
        step = tuple(range(at, min(at + cut, len(parts))))
        at += len(step)
        kept += stream.push(step)
        stable = stream.text[: stream.stable]
        assert stable.startswith(shown)
        shown = stable
        if stream.stopped:
            break
    if want is None:
        assert (stream.stopped, kept, stream.text) == (None, len(parts), "".join(parts))
    else:
        used, place, stop = want
        end = place + len(stop) if keep else place
        assert (kept, stream.ids, stream.stopped) == (used, list(range(used)), stop)
        assert stream.text == "".join(parts)[:end]
    assert stream.text.startswith(shown)


def test_a_stop_string_of_several_bytes_per_character(llm: LLM) -> None:
    """é is two tokens here: text appears with the second, and the answer ends there."""
    first, second = (FIRST_BYTE + b for b in "é".encode())
    forced = {"allowed_token_ids": (first, second), "bad_word_ids": ((first, first), (second, second))}
    got = one(llm, [second], stop=("éé",), include_stop_str_in_output=True, **forced)
    assert (got.text, got.token_ids, got.finish_reason) == ("éé", (first, second) * 2, "stop")
    cut = one(llm, [second], max_tokens=3, **forced)
    assert (cut.text, cut.finish_reason) == ("é\ufffd", "length")


# ---- scores ------------------------------------------------------------------------------------------
def straight(llm: LLM, ids: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [n, V] of one pass over all tokens, in float64."""
    logits = Drive(llm.engine.runner.target, 1, 128).step([(0, 0, ids)])[0]
    return torch.log_softmax(logits.double(), -1)


def test_logprobs_are_those_of_a_straight_pass(llm: LLM) -> None:
    """Of answer and prompt; before temperature, penalties and bans."""
    prompt = tokens(21)
    shaped = replace(
        GREEDY, temperature=0.8, top_k=5, repetition_penalty=1.5, logprobs=3, prompt_logprobs=2, seed=9,
        logit_bias={5: 3.0},
    )  # fmt: skip
    got = one(llm, prompt, shaped)
    assert got.logprobs is not None and got.prompt_logprobs is not None
    ids = [*prompt, *got.token_ids]
    want = straight(llm, ids[:-1])
    assert got.prompt_logprobs[0] is None
    scores = [*got.prompt_logprobs[1:], *got.logprobs]
    for i, score in enumerate(scores):
        line, token = want[i], ids[i + 1]
        assert score is not None
        assert score.logprob == pytest.approx(float(line[token]), abs=1e-5)
        assert score.rank == int((line > line[token]).sum())
        n = 2 if i < len(prompt) - 1 else 3
        assert len(score.top) == n
        assert [v for _, v in score.top] == pytest.approx(line.topk(n).values.tolist(), abs=1e-5)
        assert score.top[0][0] == int(line.argmax())


def test_greedy_takes_the_most_probable(llm: LLM) -> None:
    got = one(llm, tokens(30), logprobs=5)
    assert got.logprobs is not None and len(got.logprobs) == len(got.token_ids)
    for token, score in zip(got.token_ids, got.logprobs, strict=True):
        assert score.rank == 0 and score.top[0] == (token, score.logprob)
        assert [v for _, v in score.top] == sorted((v for _, v in score.top), reverse=True)
        assert sum(math.exp(v) for _, v in score.top) <= 1 + 1e-6


@pytest.mark.parametrize("rows", [1, 3, 7, 16, 50])
def test_scores_do_not_depend_on_chunks_or_company(folder: Path, llm: LLM, rows: int) -> None:
    """Bit for bit; every request gets its own number of alternatives."""
    jobs = [
        (tokens(40, 1), replace(GREEDY, logprobs=2, prompt_logprobs=1)),
        (tokens(17, 2), replace(GREEDY, logprobs=None)),
        (tokens(70, 3), replace(GREEDY, temperature=1.0, logprobs=0, prompt_logprobs=20, max_tokens=3)),
        (tokens(5, 4), replace(GREEDY, logprobs=20)),
    ]
    other = LLM(folder, **{**SETTINGS, "max_num_batched_tokens": rows})
    found = other.generate([p for p, _ in jobs], [s for _, s in jobs])
    for (prompt, params), got in zip(jobs, found, strict=True):
        want = one(llm, prompt, params)
        assert (got.logprobs, got.prompt_logprobs) == (want.logprobs, want.prompt_logprobs)
        assert (got.logprobs is None) == (params.logprobs is None)
        assert all(len(s.top) == params.logprobs for s in got.logprobs or ())


def test_scored_prompts_are_computed_whole(folder: Path) -> None:
    """A prefix hit would leave positions without scores."""
    llm = LLM(folder, **SETTINGS)
    prompt = tokens(50)
    one(llm, prompt)
    assert one(llm, prompt).usage["cached_tokens"] == 48
    scored = one(llm, prompt, prompt_logprobs=0)
    assert scored.usage["cached_tokens"] == 0
    assert scored.prompt_logprobs is not None and None not in scored.prompt_logprobs[1:]


def test_echo_puts_the_prompt_in_front(llm: LLM) -> None:
    prompt = [FIRST_BYTE + b for b in b"echo: "]
    plain = one(llm, prompt, logprobs=0)
    got = one(llm, prompt, logprobs=0, echo=True)
    assert got.text == "echo: " + plain.text and got.token_ids == (*prompt, *plain.token_ids)
    assert (got.logprobs, got.usage) == (plain.logprobs, plain.usage)
    *pieces, last = llm.stream(prompt, replace(GREEDY, echo=True))
    assert isinstance(last, Completion) and "".join(str(p) for p in pieces) == last.text == got.text
    stopped = one(llm, prompt, echo=True, stop=("echo",))
    assert stopped.text == got.text  # the prompt does not end the answer


# ---- memory and order ----------------------------------------------------------------------------
def test_a_request_larger_than_all_pages_is_refused(folder: Path) -> None:
    llm = LLM(folder, num_pages=3, **SETTINGS)
    assert len(one(llm, tokens(20), max_tokens=3 * PAGE - 20).token_ids) == 28
    with pytest.raises(ParameterError, match=r"^max_tokens: 49 tokens need 4 pages of 3; .*num_pages"):
        one(llm, tokens(20), max_tokens=29)


def test_a_full_queue_refuses_whole_requests(folder: Path) -> None:
    """n = 4 with room for three: none of the four stays."""
    llm = LLM(folder, max_waiting=3, **SETTINGS)
    with pytest.raises(QueueFull, match="max_waiting"):
        llm.frontend.add(tokens(5), replace(GREEDY, n=4, temperature=1.0))
    assert not llm.engine.scheduler.waiting and not llm.frontend.open
    llm.engine.drain()
    answers = llm.frontend.add(tokens(5), replace(GREEDY, n=3, temperature=1.0))
    while any(a.finish is None for a in answers):
        llm.frontend.step()
    llm.engine.scheduler.check()


@pytest.mark.parametrize("rows", [1, 2, 5, 19])
def test_no_step_has_more_rows_than_allowed(folder: Path, rows: int) -> None:
    llm = LLM(folder, **{**SETTINGS, "max_num_batched_tokens": rows})
    done = llm.generate([tokens(n, n) for n in (30, 3, 17, 9)], GREEDY)
    records = llm.engine.records
    assert max(r.rows for r in records) <= rows
    assert sum(r.emitted for r in records) == sum(len(c.token_ids) for c in done)
    assert sum(r.prompt_rows for r in records) == 30 + 3 + 17 + 9
    assert [r.step for r in records] == list(range(1, len(records) + 1))
    assert all(r.host_ms > 0 and r.measured_ms > 0 for r in records)


def finished_order(llm: LLM, jobs: Sequence[tuple[list[int], SamplingParams]]) -> list[int]:
    """Indices of the jobs in the order in which they end."""
    answers = [llm.frontend.add(p, s)[0] for p, s in jobs]
    order: list[int] = []
    while len(order) < len(answers):
        for changed in llm.frontend.step():
            if changed.finish is not None:
                order.append(answers.index(changed))
    llm.engine.drain()
    return order


def test_smaller_priorities_run_first(folder: Path) -> None:
    """One slot: by priority, then by arrival."""
    llm = LLM(folder, **{**SETTINGS, "max_num_seqs": 1})
    jobs = [(tokens(5, i), replace(GREEDY, priority=p)) for i, p in enumerate((0, 5, -1, 0, -1))]
    assert finished_order(llm, jobs) == [2, 4, 0, 3, 1]


def test_a_long_prompt_does_not_stop_the_others(folder: Path) -> None:
    """Answers go on while a prompt of many chunks runs, and a short prompt overtakes it."""
    llm = LLM(folder, **{**SETTINGS, "max_num_batched_tokens": 12})
    answer = llm.frontend.add(tokens(4), replace(GREEDY, max_tokens=40))[0]
    while not answer.ids:
        llm.frontend.step()
    long = llm.frontend.add(tokens(110, 1), GREEDY)[0]
    short = llm.frontend.add(tokens(6, 2), replace(GREEDY, max_tokens=2))[0]
    before = len(answer.ids)
    while not long.ids:
        llm.frontend.step()
    assert len(answer.ids) - before >= 9  # one token in each of the steps
    assert short.finish is not None
    for open_answer in (answer, long):
        llm.frontend.drop(open_answer, FinishReason.ABORT)
    llm.engine.drain()


def test_the_least_urgent_request_gives_way(folder: Path) -> None:
    """Pages for one and a half: the one of the larger priority number is copied out and comes back."""
    llm = LLM(folder, num_pages=5, prefix_caching=False, **SETTINGS)
    jobs = [
        (tokens(30, 1), replace(GREEDY, max_tokens=30, priority=3)),
        (tokens(30, 2), replace(GREEDY, max_tokens=30, priority=-3)),
    ]
    done = llm.generate([p for p, _ in jobs], [s for _, s in jobs])
    assert done[0].stats["preemptions"] >= 1 and done[1].stats["preemptions"] == 0
    assert llm.engine.stats()["recomputes"] == 0
    assert [len(c.token_ids) for c in done] == [30, 30]


def test_swap_space_is_a_limit(folder: Path) -> None:
    """Copies beyond it are not made; those requests are recomputed."""
    space = 1.5 * LLM(folder, **SETTINGS).engine.memory.ring_bytes() / 2**30
    llm = LLM(folder, num_pages=8, prefix_caching=False, swap_gib=space, **{**SETTINGS, "max_num_seqs": 5})
    seen = 0
    answers = [llm.frontend.add(tokens(14, i), replace(GREEDY, max_tokens=50))[0] for i in range(5)]
    while any(a.finish is None for a in answers):
        llm.frontend.step()
        seen = max(seen, llm.engine.runner.saved_bytes)
    assert seen <= space * 2**30
    assert llm.engine.stats()["recomputes"] > 0
    llm.engine.drain()
    assert llm.engine.runner.saved_bytes == 0


def test_statistics_of_the_prefix_cache(folder: Path) -> None:
    llm = LLM(folder, **SETTINGS)
    prompt = tokens(40)
    for _ in range(3):
        one(llm, prompt, max_tokens=1)
    stats = llm.engine.stats()["prefix"]
    assert (stats["queries"], stats["hits"], stats["hit_tokens"]) == (3, 2, 64)
    assert stats["prompt_tokens"] == 120 and stats["snapshots"] == 1
    salted = one(llm, prompt, max_tokens=1, cache_salt="tenant")
    assert salted.usage["cached_tokens"] == 0


def test_an_answer_is_reused_by_the_next_turn(folder: Path) -> None:
    """Prompt, answer and a new question: the hit reaches into the answer."""
    llm = LLM(folder, **SETTINGS)
    prompt = tokens(20)
    first = one(llm, prompt, max_tokens=30)
    second = one(llm, [*prompt, *first.token_ids, *tokens(5, 9)])
    assert second.usage["cached_tokens"] == 48
    fresh = one(LLM(folder, **SETTINGS), [*prompt, *first.token_ids, *tokens(5, 9)])
    assert second.token_ids == fresh.token_ids


def test_an_answer_without_a_tokenizer(tmp_path: Path) -> None:
    """Token ids in, token ids out; text and what needs it is refused by name."""
    path = write_model(tmp_path / "model")
    (path / "tokenizer.json").unlink()
    llm = LLM(path, **SETTINGS)
    got = one(llm, tokens(5))
    assert len(got.token_ids) == 8 and got.text == ""
    for prompt, params in ((["text"], GREEDY), ([[5]], replace(GREEDY, stop=("a",)))):
        with pytest.raises(ParameterError, match=r"tokenizer\.json"):
            llm.generate(prompt, params)  # type: ignore[arg-type]


def test_the_clock_of_an_answer(llm: LLM) -> None:
    done = one(llm, tokens(30))
    assert 0 < done.stats["first_token_seconds"] <= done.stats["seconds"]
    assert done.stats["tokens_per_second"] == pytest.approx(8 / done.stats["seconds"])
    assert done.stats["steps"] == 8
