"""Many streaming clients, many of which leave: does every kept stream hold the offline text, and does nothing leak?

The server is a real process on loopback; the clients are coroutines of this one.
``python -m firesteel.bench.soak --clients 200 --seconds 300 --json bench/results/soak.json``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from firesteel.bench.report import environment, write_json
from firesteel.bench.serving import ServerProcess, metrics, request, served, wait_until_ready
from firesteel.config import SamplingParams
from firesteel.engine.llm import LLM
from firesteel.models.deepseek_v4.random_init import tiny_config, write_random
from firesteel.tokenizer import byte_tokenizer

MAX_GROWTH = 0.03  # of a process's memory after the first quarter
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 32, "max_num_batched_tokens": 128, "max_model_len": 768, "threads": 1,
    "num_pages": 28,  # fewer than 32 requests of full length need: memory pressure is part of the test
    "speculative": {"method": "dspark", "num_speculative_tokens": 3},
}  # fmt: skip
FLAGS = ["--served-model-name", "soak"]
for _name, _value in SETTINGS.items():
    _flag = "--speculative-config" if _name == "speculative" else "--" + _name.replace("_", "-")
    FLAGS += [_flag, json.dumps(_value)]
# what a client does with its request, and how often
WAYS = {"stream": 50, "whole": 10, "leave": 30, "leave at once": 10}


@dataclass(frozen=True)
class Asked:
    """One request of the catalogue and what it must bring."""

    body: dict[str, Any]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


def catalogue(model: Path, count: int, seed: int) -> list[Asked]:
    """Requests of every kind with their offline answers, which know no speculation, batch or cache."""
    dice = random.Random(seed)
    llm = LLM(model, **{**SETTINGS, "max_num_seqs": 16, "num_pages": None, "speculative": None})
    assert llm.tokenizer is not None, "the model was written with one"
    # shared over a page's border; the second grows over one, so that pages run short in mid-answer
    stems = ["".join(dice.choices("abcdefgh ", k=size)) for size in (300, 490, 0)]
    bodies: list[dict[str, Any]] = []
    for at in range(count):
        prompt = f"{stems[at % 3]} {at}"
        body: dict[str, Any] = {"prompt": prompt, "seed": dice.randrange(2**31)}
        body |= {
            "max_tokens": dice.choice((8, 24, 24, 48, 48, 200)),
            "temperature": dice.choice((0, 0.7, 1.0)),
        }
        if at % 4 == 0:
            body |= {"top_p": 0.9, "frequency_penalty": 0.3, "ignore_eos": True}
        if at % 5 == 0:
            body |= {"stop": ["e", "xyz"]}
        bodies.append(body)
    prompts = [[llm.config.bos_token_id, *llm.tokenizer.encode(b["prompt"])] for b in bodies]
    params = [SamplingParams.of(**{k: v for k, v in b.items() if k != "prompt"}) for b in bodies]
    done = llm.generate(prompts, params)
    return [Asked(b, d.text, d.token_ids, d.finish_reason) for b, d in zip(bodies, done, strict=True)]


@dataclass
class Tally:
    """What the clients saw."""

    ways: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)  # why a kept answer is not the offline one
    first_token_s: list[float] = field(default_factory=list)


async def _stream(port: int, asked: Asked, tally: Tally, leave_after: int | None) -> None:
    """A streamed request, kept to its end or left after so many events."""
    body = {**asked.body, "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    text, ids, finish, usage, closed = "", [], None, None, False
    begun = time.perf_counter()
    async with request(port, "POST", "/v1/completions", body) as reply:
        if reply.status != 200:
            raise ConnectionError(f"status {reply.status}: {(await reply.body())[:300]!r}")
        seen = 0
        async for event in reply.events():
            if seen == 0:
                tally.first_token_s.append(time.perf_counter() - begun)
            seen += 1
            if leave_after is not None and seen > leave_after:
                return
            if event is None:
                closed = True
                break
            if "error" in event:
                raise ConnectionError(str(event["error"]))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["text"]
                ids += choice["token_ids"]
                finish = choice["finish_reason"] or finish
    if leave_after is not None and not closed:
        return
    tally.tokens += len(ids)
    _compare(asked, text, tuple(ids), finish, (usage or {}).get("completion_tokens"), tally)
    if not closed:
        tally.wrong.append(f"{asked.body['prompt'][-12:]!r}: no [DONE]")


async def _whole(port: int, asked: Asked, tally: Tally) -> None:
    async with request(port, "POST", "/v1/completions", {**asked.body, "return_token_ids": True}) as reply:
        body = json.loads(await reply.body())
    if reply.status != 200:
        raise ConnectionError(f"status {reply.status}: {str(body)[:300]}")
    choice = body["choices"][0]
    tally.tokens += len(choice["token_ids"])
    made = body["usage"]["completion_tokens"]
    _compare(asked, choice["text"], tuple(choice["token_ids"]), choice["finish_reason"], made, tally)


def _compare(
    asked: Asked, text: str, ids: tuple[int, ...], finish: str | None, made: int | None, tally: Tally
) -> None:
    got, want = (
        (text, ids, finish, made),
        (asked.text, asked.token_ids, asked.finish_reason, len(asked.token_ids)),
    )
    if got != want:
        tally.wrong.append(f"{asked.body['prompt'][-12:]!r}: {got} instead of {want}"[:500])


async def _client(port: int, number: int, requests: Sequence[Asked], until: float, tally: Tally) -> None:
    """One client after another request until the time is over; whatever goes wrong is noted, not hidden."""
    dice = random.Random(number)
    while time.monotonic() < until:
        asked = dice.choice(requests)
        way = dice.choices(list(WAYS), list(WAYS.values()))[0]
        try:
            if way == "whole":
                await _whole(port, asked, tally)
            elif way == "stream":
                await _stream(port, asked, tally, None)
            else:
                await _leave(port, asked, tally, dice, way)
        except (ConnectionError, OSError) as err:
            tally.wrong.append(f"{way}: {type(err).__name__}: {err}"[:500])
        tally.ways[way] += 1


async def _leave(port: int, asked: Asked, tally: Tally, dice: random.Random, way: str) -> None:
    if way == "leave":
        await _stream(port, asked, tally, dice.randrange(1, 12))
        return
    with contextlib.suppress(TimeoutError):  # in the queue, in the prompt or between two tokens
        async with asyncio.timeout(dice.uniform(0, 0.3)):
            if dice.random() < 0.5:
                await _stream(port, asked, tally, None)
            else:
                await _whole(port, asked, tally)


def _memory(pid: int) -> tuple[float, float]:
    """MiB a process has resident, and how much of it is its own (anonymous)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.endswith("kB")}
    return found["VmRSS"], found["RssAnon"]


async def _watch(server: ServerProcess, until: float, samples: list[dict[str, float]]) -> None:
    """Memory of both processes and the pages in use, every second."""
    begun = time.monotonic()
    while time.monotonic() < until:
        now = await metrics(server.port)
        line = {"at": time.monotonic() - begun, "running": now["num_requests_running"]}
        for name, pid in (("api", server.process.pid), ("engine", server.engines[-1])):
            line[name], line[f"{name} anonymous"] = _memory(pid)
        samples.append({**line, "waiting": now["num_requests_waiting"]})
        await asyncio.sleep(1.0)


def growth(samples: Sequence[dict[str, float]], name: str) -> dict[str, float]:
    """Memory behind the first quarter (median of a tenth of the run) against that of the last tenth."""
    total = samples[-1]["at"]
    early = [s[name] for s in samples if 0.25 * total <= s["at"] <= 0.35 * total]
    late = [s[name] for s in samples if s["at"] >= 0.9 * total]
    before, after = statistics.median(early), statistics.median(late)
    return {"after_quarter_mib": before, "end_mib": after, "growth": after / before - 1}


async def _settle(port: int, seconds: float = 30.0) -> dict[str, float]:
    """Metrics once nothing runs; those of the last look if something never ends."""
    deadline = time.monotonic() + seconds
    while True:
        now = await metrics(port)
        busy = now["num_requests_running"] + now["num_requests_waiting"]
        if not busy or time.monotonic() > deadline:
            return now
        await asyncio.sleep(0.3)


async def _run(
    server: ServerProcess, requests: Sequence[Asked], clients: int, seconds: float
) -> dict[str, Any]:
    await wait_until_ready(server)
    tally, samples = Tally(), list[dict[str, float]]()
    until = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group:
        group.create_task(_watch(server, until, samples))
        for number in range(clients):
            group.create_task(_client(server.port, number, requests, until, tally))
    now = await _settle(server.port)
    last = Tally()  # alone, after everything
    for asked in requests:
        await _stream(server.port, asked, last, None)
    pages = {state: now[f'kv_cache_pages{{state="{state}"}}'] for state in ("all", "free", "cached")}
    return {
        "clients": clients,
        "seconds": seconds,
        "requests": dict(tally.ways),
        "kept_tokens": tally.tokens,
        "first_token_s_median": statistics.median(tally.first_token_s or [0.0]),
        "wrong": [*tally.wrong, *last.wrong][:20],
        "wrong_count": len(tally.wrong) + len(last.wrong),
        "left_running": now["num_requests_running"] + now["num_requests_waiting"],
        "pages": pages,
        "pages_lost": pages["all"] - pages["free"] - pages["cached"],
        "restarts": now["engine_restarts"],
        "steps": now["engine_steps_total"],
        "preemptions": now["num_preemptions_total"],
        "prefix_hit_tokens": now["prefix_cache_hits_total"],
        "accepted_drafts": now["spec_decode_num_accepted_tokens_total"],
        "most_running": max(s["running"] for s in samples),
        "most_waiting": max(s["waiting"] for s in samples),
        "memory": {name: growth(samples, name) for name in ("api", "engine")},
        "memory_anonymous": {name: growth(samples, f"{name} anonymous") for name in ("api", "engine")},
    }


def faults(result: dict[str, Any]) -> list[str]:
    """What must not be, in words; empty if the run is good."""
    out = (
        [f"{result['wrong_count']} answers are wrong, first: {result['wrong'][0]}"] if result["wrong"] else []
    )
    for name, want in (("left_running", 0), ("pages_lost", 0), ("restarts", 0), ("exit_code", 0)):
        if result[name] != want:
            out.append(f"{name} is {result[name]}")
    for name in ("steps", "kept_tokens", "prefix_hit_tokens", "accepted_drafts"):
        if not result[name]:
            out.append(f"{name} is 0: nothing was tested")
    for name, memory in result["memory"].items():
        if memory["growth"] > MAX_GROWTH:
            out.append(f"the {name} process grew by {memory['growth']:.1%} after the first quarter")
    return out


def soak(folder: Path, clients: int, seconds: float, kinds: int = 36, seed: int = 0) -> dict[str, Any]:
    """The whole run on a tiny random model written to ``folder``; ``faults`` of the result are in it."""
    config = tiny_config()
    model = write_random(folder / "tiny", config, 3, agreement=0.8)
    byte_tokenizer(config.vocab_size).save(model)
    requests = catalogue(model, kinds, seed)
    with served(model, *FLAGS) as server:
        result = asyncio.run(_run(server, requests, clients, seconds))
        result["exit_code"] = server.terminate()
    result["faults"] = faults(result)
    return result


def show(result: dict[str, Any], console: Console) -> None:
    """A table for people."""
    table = Table("what", "value", title=f"{result['clients']} clients, {result['seconds']:.0f} s")
    for name in ("requests", "kept_tokens", "steps", "preemptions", "most_running", "most_waiting", "pages"):
        table.add_row(name, str(result[name]))
    for name, memory in result["memory"].items():
        table.add_row(
            f"memory of the {name} process", f"{memory['end_mib']:.0f} MiB, {memory['growth']:+.2%}"
        )
    console.print(table)
    console.print("\n".join(result["faults"]) or "every kept answer is the offline one; nothing leaked")


def main(argv: list[str] | None = None) -> int:
    """Entry point; the exit status is 1 if anything was wrong."""
    p = argparse.ArgumentParser(
        description="streaming clients with random disconnects against a server process"
    )
    p.add_argument("--clients", type=int, default=200)
    p.add_argument("--seconds", type=float, default=300.0)
    p.add_argument("--seed", type=int, default=0, help="of the requests")
    p.add_argument("--json", default=None, help="write the result here")
    args = p.parse_args(argv)
    if args.clients < 1 or args.seconds < 4:
        p.error("--clients: at least 1; --seconds: at least 4")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temp:
        result = soak(Path(temp), args.clients, args.seconds, seed=args.seed)
    result = {"environment": environment(), **result}
    show(result, Console())
    write_json(result, args.json)
    return 1 if result["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
