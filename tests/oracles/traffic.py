"""Random traffic against one engine, and every text against the same request run alone.

    PYTHONPATH=src:tests python -m oracles.traffic --operations 2000 --seed 0

An operation adds a request, turns the loop, aborts a request, or clears the prefix cache. Each episode
has another engine: slots, rows per step, pages, swap space and debug modes are drawn from the seed.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from firesteel import LLM, SamplingParams
from firesteel.core import FinishReason
from firesteel.engine.output import Answer, Completion
from firesteel.models.deepseek_v4.config import V4Config
from firesteel.models.deepseek_v4.random_init import tiny_config, write_random
from firesteel.speculation.policy import Adaptive
from firesteel.tokenizer import FIRST_BYTE, byte_tokenizer

VOCAB = 300
EOS = 1
LETTERS = "etaoinsr"


def small_config(**overrides: Any) -> V4Config:
    """The smallest geometry with a CSA and an HCA layer, a hash layer and a drafter."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 16,
        "o_lora_rank": 16,
        "o_groups": 1,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "hc_sinkhorn_iters": 2,
        "hc_mult": 2,
        "compress_ratios": (4, 16),
        "max_position_embeddings": 2048,
    }
    return tiny_config(**{**fields, **overrides})


def write_model(folder: str | Path, seed: int = 0, agreement: float = 0.0, **overrides: Any) -> Path:
    """A random checkpoint of ``small_config`` with a byte tokenizer; returns its folder.

    ``agreement`` 0..1: how often its drafter is right.
    """
    config = small_config(**overrides)
    path = write_random(folder, config, seed, agreement=agreement)
    byte_tokenizer(config.vocab_size).save(path)
    return path


@contextmanager
def page_size(tokens: int) -> Iterator[None]:
    """Engines built and run inside have pages of so many tokens: more boundaries per second.

    A multiple of every ratio, and no shorter than the window.
    """
    before = V4Config.page_size
    V4Config.page_size = property(lambda _: tokens)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        V4Config.page_size = before  # type: ignore[method-assign]


# ---- requests ------------------------------------------------------------------
@dataclass(frozen=True)
class Request:
    """What a client sends."""

    prompt: tuple[int, ...]
    params: SamplingParams


def random_params(rng: random.Random, longest: int) -> SamplingParams:
    """Any mix of parameters whose text can be compared; half of all requests are plain."""

    def maybe(share: float, value: Any, default: Any) -> Any:
        return value if rng.random() < share else default

    def some(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(n))

    heat = rng.choice((0.0, 0.0, 0.7, 1.0, 1.3))
    longest = rng.randint(1, longest)
    plain = {
        "max_tokens": longest,
        "temperature": heat,
        "seed": rng.choice((0, 1, 2**32, rng.randrange(2**64))),
        "ignore_eos": rng.random() < 0.6,
        "n": rng.choice((1, 1, 2, 3)) if heat else 1,
        "cache_salt": maybe(0.1, "other", ""),
        "priority": maybe(0.3, rng.randint(-2, 2), 0),
        "logprobs": maybe(0.3, rng.choice((0, 1, 5)), None),
        "prompt_logprobs": maybe(0.08, rng.choice((0, 2)), None),
        "echo": maybe(0.1, True, False),
    }
    if rng.random() < 0.5:
        return SamplingParams(**plain)
    return SamplingParams(
        **plain,
        min_tokens=maybe(0.3, rng.randint(0, longest), 0),
        top_k=maybe(0.3, rng.choice((1, 2, 20, VOCAB)), 0),
        top_p=maybe(0.3, rng.choice((0.1, 0.8, 0.95)), 1.0),
        min_p=maybe(0.2, rng.choice((0.01, 0.2, 1.0)), 0.0),
        repetition_penalty=maybe(0.3, rng.choice((0.8, 1.3)), 1.0),
        presence_penalty=maybe(0.2, rng.choice((-1.0, 1.5)), 0.0),
        frequency_penalty=maybe(0.2, rng.choice((-0.5, 0.7)), 0.0),
        logit_bias=maybe(0.2, {t: rng.choice((-100.0, 2.0, 5.0)) for t in some(rng.randint(1, 5))}, {}),
        allowed_token_ids=maybe(0.15, some(rng.choice((1, 2, 40))), None),
        bad_words=maybe(0.15, tuple(rng.choice(LETTERS) for _ in range(2)), ()),
        bad_word_ids=maybe(0.2, tuple(some(rng.randint(1, 3)) for _ in range(rng.randint(1, 3))), ()),
        stop=maybe(0.2, tuple(rng.choice(LETTERS) for _ in range(rng.randint(1, 3))), ()),
        stop_token_ids=maybe(0.3, some(rng.randint(1, 6)), ()),
        include_stop_str_in_output=maybe(0.5, True, False),
    )


def random_requests(rng: random.Random, count: int, page: int, longest: int) -> list[Request]:
    """Prompts that share stems around page boundaries, with random parameters."""
    stems = [[rng.randrange(FIRST_BYTE, VOCAB) for _ in range(3 * page)] for _ in range(2)]
    edges = [1, page - 1, page, page + 1, 2 * page - 1, 2 * page, 2 * page + 1, 3 * page, 3 * page]
    out = []
    for _ in range(count):
        shared = rng.choice((*edges, rng.randint(0, 3 * page)))
        tail = rng.choice((0, 0, 1, 2, rng.randint(1, page)))
        prompt = rng.choice(stems)[:shared] + [rng.randrange(FIRST_BYTE, VOCAB) for _ in range(tail)]
        out.append(Request(tuple(prompt or [EOS]), random_params(rng, longest)))
    return out


# ---- the same request alone -------------------------------------------------------
def essence(done: Completion) -> dict[str, Any]:
    """Everything of an answer that may not depend on traffic."""
    usage = {k: v for k, v in done.usage.items() if k != "cached_tokens"}
    return {**{f.name: getattr(done, f.name) for f in fields(done) if f.name != "stats"}, "usage": usage}


class Alone:
    """Answers of requests that run alone: one slot, no cache, whole prompts; remembered."""

    def __init__(self, folder: str | Path, **settings: Any):
        self.llm = LLM(
            folder, max_num_seqs=1, prefix_caching=False, **{"max_num_batched_tokens": 1024, **settings}
        )
        self._known: dict[int, list[Completion]] = {}
        self._keep: list[Request] = []

    def __call__(self, request: Request) -> list[Completion]:
        known = self._known.get(id(request))
        if known is None:
            known = self.llm.generate([list(request.prompt)], request.params)
            self._known[id(request)] = known
            self._keep.append(request)  # so that its id stays its own
        return known


# ---- traffic --------------------------------------------------------------------------
@dataclass
class Report:
    """What a run did."""

    operations: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    aborted: int = 0
    tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    recomputes: int = 0
    cached_tokens: int = 0
    accepted: int = 0  # drafts

    @property
    def total(self) -> int:
        """Operations of all kinds."""
        return sum(self.operations.values())


def random_settings(rng: random.Random, number: int, page: int, need: int, debug: float) -> dict[str, Any]:
    """An engine under one kind of pressure or another; ``need``: pages of the largest request.

    By turns: pages for one large request, twice; some more; plenty. Preempted requests are recomputed in
    every second episode.
    """
    spare = (0, rng.choice((0, 2)), rng.choice((8, 14, 20)), None)[number % 4]
    return {
        "max_num_seqs": rng.choice((1, 3, 5)) if spare is None else rng.choice((4, 5, 8)),
        "max_num_batched_tokens": rng.choice((2, 5, page - 1, page, page + 1, 3 * page)),
        "num_pages": None if spare is None else need + spare,
        "swap_gib": float(number % 2),
        "prefix_caching": spare != 0 or rng.random() < 0.5,
        "debug_poison": rng.random() < debug,
        "debug_sync": rng.random() < debug / 2,
    }


class Episode:
    """One engine, random operations, and the checks."""

    def __init__(
        self, folder: str | Path, rng: random.Random, pool: Sequence[Request], report: Report, **settings: Any
    ):
        self.llm = LLM(folder, **settings)
        self.rng, self.pool, self.report, self.settings = rng, pool, report, settings
        self.open: list[Answer] = []
        self.asked: dict[int, Request] = {}
        self.ended: list[Answer] = []

    def operate(self) -> None:
        """One random operation."""
        rng, front = self.rng, self.llm.frontend
        kind = rng.choices(("add", "step", "abort", "clear"), (24, 68, 6, 2))[0]
        self.report.operations[kind] += 1
        if kind == "add":
            request = rng.choice(self.pool)
            for answer in front.add(list(request.prompt), request.params):
                self.open.append(answer)
                self.asked[answer.request_id] = request
        elif kind == "step":
            self.turn()
        elif kind == "abort" and self.open:
            answer = self.open.pop(rng.randrange(len(self.open)))
            front.drop(answer, FinishReason.ABORT)
            self.ended.append(answer)
        elif kind == "clear" and self.llm.engine.cache is not None:
            self.llm.engine.cache.clear()
        if rng.random() < 0.3:
            self.llm.engine.scheduler.check()

    def turn(self) -> None:
        """One turn of the loop."""
        self.report.steps += 1
        for answer in self.llm.frontend.step():
            if answer.finish is not None:
                self.open.remove(answer)
                self.ended.append(answer)

    def finish(self, alone: Alone) -> None:
        """Run everything to its end, compare, and look for leaks."""
        idle = 0
        while self.open:
            before = sum(len(a.ids) for a in self.open) + len(self.ended)
            self.turn()
            idle = idle + 1 if before == sum(len(a.ids) for a in self.open) + len(self.ended) else 0
            assert idle < 2000, f"no progress: {self.llm.engine.stats()}"
        self.llm.engine.drain()
        for answer in self.ended:
            self.compare(answer, alone(self.asked[answer.request_id])[answer.seq.sample])
        self.check_empty()
        stats = self.llm.engine.stats()
        self.report.preemptions += stats["preemptions"]
        self.report.recomputes += stats["recomputes"]
        self.report.accepted += sum(r.accepted for r in self.llm.engine.records)

    def compare(self, answer: Answer, want: Completion) -> None:
        """The whole answer, or of an aborted one the part that came."""
        found = answer.completion()
        if answer.finish is FinishReason.ABORT:
            self.report.aborted += 1
            ids = found.token_ids
            assert ids == want.token_ids[: len(ids)], f"aborted request {self.asked[answer.request_id]}"
            return
        same, other = essence(found), essence(want)
        wrong = [f"{name}: {same[name]} alone: {other[name]}" for name in same if same[name] != other[name]]
        assert not wrong, (
            f"request {answer.request_id}, {self.asked[answer.request_id]}, {self.settings}: {'; '.join(wrong)}"
        )
        self.report.compared += 1
        self.report.tokens += len(found.token_ids)
        self.report.cached_tokens += found.usage["cached_tokens"]

    def check_empty(self) -> None:
        """Nothing is held but cached prefixes, and nothing at all once they are dropped."""
        engine = self.llm.engine
        engine.scheduler.check()
        memory, cache = engine.memory, engine.cache
        cached = cache.holds() if cache is not None else []
        assert memory.free_slots == memory.slots and not memory.live_slots(), "a slot leaked"
        assert memory.pool.free + len(cached) == memory.num_pages, "a page leaked"
        if cache is not None:
            cache.clear()
            assert not cache.holds()
        assert memory.pool.free == memory.num_pages, "the cache leaked a page"
        assert engine.runner.saved_bytes == 0, "a preempted request's copy leaked"
        assert not engine.busy
        policy = engine.scheduler.policy
        if isinstance(policy, Adaptive):  # the book forgets with the next digest
            assert set(policy.book._row) <= set(policy.lessons._gone), "the policy keeps an ended request"


def run_traffic(
    folder: str | Path,
    seed: int,
    operations: int,
    *,
    page: int = 16,
    first: int = 0,
    episode: int = 150,
    requests: int = 30,
    longest: int = 20,
    debug: float = 0.3,
    speculative: dict[str, Any] | None = None,
    **settings: Any,
) -> Report:
    """``operations`` random operations, each episode on a fresh engine; raises AssertionError on any difference.

    Episode k of a seed is the same whatever ran before: ``first`` starts there. ``page`` must be the page
    size in force; ``longest`` bounds max_tokens; ``debug`` is the share of episodes with debug modes;
    ``speculative`` goes to the engines under test alone, ``settings`` to all.
    """
    report, number = Report(), first
    settings = {"numerics": "float32", "max_model_len": 4 * page + longest, **settings}
    alone = Alone(folder, **settings)
    need = -(-(4 * page + longest) // page)
    while report.total < operations:
        rng = random.Random(f"{seed}/{number}")
        pool = random_requests(rng, requests, page, longest)
        drawn = random_settings(rng, number, page, need, debug)
        run = Episode(folder, rng, pool, report, **{**drawn, **settings, "speculative": speculative})
        for _ in range(min(episode, operations - report.total)):
            run.operate()
        try:
            run.finish(alone)
        except AssertionError as err:
            raise AssertionError(f"seed {seed}, episode {number}: {err}") from err
        number += 1
    return report


def main() -> None:
    """The long run, by hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="episode to start with")
    parser.add_argument("--page", type=int, default=16, help="tokens per page; V4 has 256")
    parser.add_argument("--numerics", default="float32")
    parser.add_argument("--drafts", type=int, default=0, help="drafts per step; 0: no speculation")
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, page_size(args.page):
        report = run_traffic(
            write_model(Path(folder) / "model", agreement=0.8 if args.drafts else 0.0),
            args.seed,
            args.operations,
            first=args.first,
            page=args.page,
            speculative={"num_speculative_tokens": args.drafts} if args.drafts else None,
            numerics=args.numerics,
            backend=args.backend,
        )
    print(report, f"{time.perf_counter() - begun:.1f} s")


if __name__ == "__main__":
    main()
