"""Request sets for benchmarks: read from the usual forms, frozen into one JSONL, named by its hash.

    SPEED-Bench   question_id, category, turns            (first turn; export the parquet as JSONL)
    ShareGPT      conversations of {from, value}          (up to the first human turn; JSON list or JSONL)
    GSM8K         question, answer
    plain         prompt, messages or token_ids; id and domain optional

A frozen line is ``{"id", "domain", "prompt" | "messages" | "token_ids", "thinking"}`` and is itself a plain
form, so a set that was frozen once gives the same requests, in the same order, everywhere.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firesteel.config import ParameterError
from firesteel.engine.llm import LLM

DATA = Path(__file__).parent.parent / "eval" / "data"
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # SPEED-Bench rows whose text must be fetched first
ROLES = {"human": "user", "user": "user", "system": "system"}
FORMS = ("auto", "plain", "gsm8k", "sharegpt", "speed-bench")


@dataclass(frozen=True)
class Ask:
    """One prompt of a set: exactly one of ``prompt`` (continued as it stands), ``messages`` or ``token_ids``."""

    key: str  # names the problem; seeds are hashed from it
    domain: str
    prompt: str | None = None
    messages: tuple[tuple[str, str], ...] = ()  # (role, content)
    token_ids: tuple[int, ...] = ()
    thinking: bool = False

    def to_json(self) -> dict[str, Any]:
        """The frozen form."""
        out: dict[str, Any] = {"id": self.key, "domain": self.domain}
        if self.token_ids:
            return out | {"token_ids": list(self.token_ids)}
        if self.messages:
            said = [{"role": role, "content": content} for role, content in self.messages]
            return out | {"messages": said, "thinking": self.thinking}
        return out | {"prompt": self.prompt}


@dataclass(frozen=True)
class RequestSet:
    """Requests in order; ``digest`` names them."""

    name: str
    asks: tuple[Ask, ...]

    def __len__(self) -> int:
        return len(self.asks)

    @property
    def digest(self) -> str:
        """SHA-256 of the frozen lines, 16 hex digits."""
        return hashlib.sha256(self.text().encode()).hexdigest()[:16]

    def text(self) -> str:
        """The frozen JSONL."""
        lines = (json.dumps(a.to_json(), ensure_ascii=False, sort_keys=True) for a in self.asks)
        return "".join(f"{line}\n" for line in lines)

    def freeze(self, path: str | Path) -> None:
        """Write the frozen JSONL; ``read_requests`` gives the same set back."""
        Path(path).write_text(self.text(), encoding="utf-8")

    def first(self, per_domain: int) -> RequestSet:
        """The first so many requests of every domain, in order."""
        if per_domain < 1:
            raise ParameterError(f"requests per domain {per_domain}: expected an integer from 1 up")
        left = dict.fromkeys(self.domains(), per_domain)
        kept = []
        for ask in self.asks:
            if left[ask.domain] > 0:
                left[ask.domain] -= 1
                kept.append(ask)
        return RequestSet(f"{self.name}, {per_domain} a domain", tuple(kept))

    def domains(self) -> dict[str, int]:
        """Requests by domain."""
        out: dict[str, int] = {}
        for ask in self.asks:
            out[ask.domain] = out.get(ask.domain, 0) + 1
        return out


def seed_of(base: int, problem: str, repeat: int) -> int:
    """The sampling seed of one repeat of one problem, 0 <= seed < 2**64.

    Equal for every arm, so that arms are paired; different for every problem,
    because equal seeds share their noise by position.
    """
    said = f"{base}\x00{problem}\x00{repeat}".encode()
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little")


# ---- reading -------------------------------------------------------------------
def read_requests(path: str | Path, form: str = "auto", limit: int | None = None) -> RequestSet:
    """A set from a JSON or JSONL file; raises ParameterError naming file and line.

    ``form``: one of FORMS; "auto" decides by the fields of each line. ``limit``: the first N.
    """
    if form not in FORMS:
        raise ParameterError(f"form={form!r}: expected one of {', '.join(FORMS)}")
    if limit is not None and limit < 1:
        raise ParameterError(f"limit={limit}: expected an integer from 1 up")
    asks: list[Ask] = []
    for where, raw in _records(Path(path)):
        ask = _ask(raw, form, where, len(asks))
        if ask is not None:
            asks.append(ask)
        if limit is not None and len(asks) == limit:
            break
    if not asks:
        raise ParameterError(f"requests: {path} holds none; give a JSONL file of prompts")
    keys = [a.key for a in asks]
    twice = next((k for k in keys if keys.count(k) > 1), None) if len(set(keys)) < len(keys) else None
    if twice is not None:
        raise ParameterError(
            f"requests: {path}: id {twice!r} occurs twice; make ids unique, seeds come from them"
        )
    return RequestSet(Path(path).stem, tuple(asks))


def _records(path: Path) -> Iterable[tuple[str, Any]]:
    """(place, parsed record) of a JSONL file or of a JSON list."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise ParameterError(f"requests: {path} is no text; export parquet files as JSONL first") from err
    except OSError as err:
        raise ParameterError(f"requests: {path} cannot be read ({err.strerror}); give a JSONL file") from err
    if text.lstrip().startswith("["):
        try:
            for number, raw in enumerate(json.loads(text), 1):
                yield f"{path}, record {number}", raw
        except json.JSONDecodeError as err:
            raise ParameterError(f"requests: {path}: not JSON ({err}); give a JSON list or JSONL") from err
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except json.JSONDecodeError as err:
                raise ParameterError(f"requests: {path}, line {number}: not JSON ({err})") from err


def _ask(raw: Any, form: str, where: str, index: int) -> Ask | None:
    """One record; None for a ShareGPT conversation without a human turn."""
    if not isinstance(raw, Mapping):
        raise ParameterError(f"requests: {where}: expected an object, found {type(raw).__name__}")
    fields = {"speed-bench": "turns", "sharegpt": "conversations", "gsm8k": "question"}
    found = (
        next((name for name, field in fields.items() if field in raw), "plain") if form == "auto" else form
    )
    field = fields.get(found)
    if field is not None and field not in raw:
        raise ParameterError(f"requests: {where}: form {found!r} needs the field {field!r}; set another form")
    if found == "speed-bench":
        return _speed_bench(raw, where, index)
    if found == "sharegpt":
        return _sharegpt(raw, where, index)
    if found == "gsm8k":
        text = _text(raw["question"], where, "question")
        return Ask(
            _key(raw, "gsm8k", index), str(raw.get("domain", "arithmetic")), messages=(("user", text),)
        )
    return _plain(raw, where, index)


def _speed_bench(raw: Mapping[str, Any], where: str, index: int) -> Ask:
    turns = raw["turns"]
    if not isinstance(turns, list) or not turns:
        raise ParameterError(f"requests: {where}: turns must be a list of at least one text")
    text = _text(turns[0], where, "turns")
    if text.startswith(PLACEHOLDER):
        raise ParameterError(
            f"requests: {where}: the text of this SPEED-Bench record is a placeholder; fetch the full data first"
        )
    domain = str(raw.get("category") or "other")
    return Ask(str(raw.get("question_id", f"speed-bench-{index}")), domain, messages=(("user", text),))


def _sharegpt(raw: Mapping[str, Any], where: str, index: int) -> Ask | None:
    said: list[tuple[str, str]] = []
    turns = raw["conversations"]
    if not isinstance(turns, list):
        raise ParameterError(f"requests: {where}: conversations must be a list of turns")
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise ParameterError(f"requests: {where}: a turn must be an object with from and value")
        role = ROLES.get(str(turn.get("from", turn.get("role", ""))))
        if role is None:
            return None  # begins with the model's turn
        said.append((role, _text(turn.get("value", turn.get("content")), where, "value")))
        if role == "user":
            return Ask(_key(raw, "sharegpt", index), str(raw.get("domain", "chat")), messages=tuple(said))
    return None


def _plain(raw: Mapping[str, Any], where: str, index: int) -> Ask:
    key, domain = _key(raw, "request", index), str(raw.get("domain", "other"))
    ids, messages = raw.get("token_ids"), raw.get("messages")
    if isinstance(ids, list) and ids and all(isinstance(i, int) and i >= 0 for i in ids):
        return Ask(key, domain, token_ids=tuple(ids))
    if isinstance(messages, list) and messages and all(isinstance(m, Mapping) for m in messages):
        said = tuple(
            (str(m.get("role", "user")), _text(m.get("content"), where, "content")) for m in messages
        )
        return Ask(key, domain, messages=said, thinking=bool(raw.get("thinking", False)))
    if isinstance(raw.get("prompt"), str) and raw["prompt"]:
        return Ask(key, domain, prompt=raw["prompt"])
    raise ParameterError(
        f"requests: {where}: expected prompt, messages, token_ids, question, turns or conversations"
    )


def _key(raw: Mapping[str, Any], prefix: str, index: int) -> str:
    return str(raw["id"]) if "id" in raw else f"{prefix}-{index}"


def _text(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise ParameterError(f"requests: {where}: {field} must hold a non-empty text")
    return value


# ---- the bundled prompts ---------------------------------------------------------
def bundled(split: str = "held-out", per_domain: int | None = None) -> RequestSet:
    """Arithmetic, code and prose in turn, from the package; ``split``: "fit" (calibration) or "held-out".

    Arithmetic: the shipped problems, the first half for fitting, in chat and thinking mode in turn.
    """
    if split not in ("fit", "held-out"):
        raise ParameterError(f"split={split!r}: expected 'fit' or 'held-out'")
    texts = [json.loads(x) for x in (DATA / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    lists = {
        domain: [
            Ask(t["id"], domain, prompt=t["prompt"])
            for t in texts
            if (t["domain"], t["split"]) == (domain, split)
        ]
        for domain in ("code", "prose")
    }
    problems = read_requests(DATA / "gsm_symbolic.jsonl", "gsm8k").asks
    half = len(problems) // 2
    mine = problems[:half] if split == "fit" else problems[half:]
    sums = [Ask(a.key, "arithmetic", messages=a.messages, thinking=i % 2 == 1) for i, a in enumerate(mine)]
    count = min(map(len, lists.values())) if per_domain is None else per_domain
    groups = [sums[:count], *(asks[:count] for asks in lists.values())]
    mixed = [g[i] for i in range(count) for g in groups if i < len(g)]
    return RequestSet(f"bundled {split}", tuple(mixed))


def _beginnings(domain: str, held_out: bool, cuts: Sequence[float]) -> list[Ask]:
    """Excerpts of the first half (held out) or of the second (for fitting), each cut at shares of its length."""
    texts = [
        json.loads(x)["text"] for x in (DATA / f"{domain}.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    half = len(texts) // 2
    mine = range(half) if held_out else range(half, len(texts))
    return [
        Ask(f"{domain}-text-{i}-{c:g}", domain, prompt=texts[i][: int(c * len(texts[i]))])
        for i in mine
        for c in cuts
    ]


def held_out_texts(cuts: Sequence[float] = (0.1, 0.3, 0.5)) -> RequestSet:
    """Beginnings of unseen excerpts of code and prose, each cut at several shares of its length, and problems.

    Nothing of it is in ``fit_set``: the excerpts are the first half, the problems their held-out half, in both modes.
    """
    out = [ask for domain in ("code", "prose") for ask in _beginnings(domain, True, cuts)]
    problems = read_requests(DATA / "gsm_symbolic.jsonl", "gsm8k").asks
    for a in problems[len(problems) // 2 :]:
        for thinking in (False, True):
            mode = "thinking" if thinking else "chat"
            out.append(Ask(f"{a.key}-{mode}", "arithmetic", messages=a.messages, thinking=thinking))
    return RequestSet("held-out texts", tuple(out))


def fit_set() -> RequestSet:
    """What a calibration is fitted on: ``bundled("fit")`` and beginnings of the excerpts not held out.

    Fitted on short prompts alone, survival is too high inside a page.
    """
    pairs = zip(_beginnings("code", False, (0.2,)), _beginnings("prose", False, (0.2,)), strict=True)
    return RequestSet("bundled fit", (*bundled("fit").asks, *(ask for pair in pairs for ask in pair)))


def random_prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> RequestSet:
    """``count`` prompts of ``length`` uniformly random token ids, a function of the seed."""
    if count < 1 or length < 1:
        raise ParameterError(
            f"random prompts {count}x{length}: expected two integers from 1 up, e.g. 64x1024"
        )
    draw = random.Random(seed)
    asks = [
        Ask(f"random-{i}", "random", token_ids=tuple(draw.randrange(3, vocab_size) for _ in range(length)))
        for i in range(count)
    ]
    return RequestSet(f"random {count}x{length}", tuple(asks))


# ---- token ids ---------------------------------------------------------------------
def encode(llm: LLM, ask: Ask) -> list[int]:
    """Token ids of a request; without a tokenizer the bytes of its text stand for them (random models)."""
    if ask.token_ids:
        return list(ask.token_ids)
    said = [{"role": role, "content": content} for role, content in ask.messages]
    if llm.tokenizer is None:
        text = ask.prompt if ask.prompt is not None else "\n".join(content for _, content in ask.messages)
        low, vocab = 3, llm.config.vocab_size
        return [low + b % (vocab - low) for b in text.encode()]
    if ask.messages:
        return list(llm.tokenizer.encode(llm.prompt_of(said, ask.thinking, "low" if ask.thinking else None)))
    assert ask.prompt is not None, "an ask holds one of three forms"
    return [llm.config.bos_token_id, *llm.tokenizer.encode(ask.prompt)]


def encode_all(llm: LLM, asks: Sequence[Ask], room: int) -> list[list[int]]:
    """Token ids of all; raises ParameterError naming a prompt that leaves no ``room`` tokens to answer."""
    out, most = [], llm.engine.max_model_len
    for ask in asks:
        ids = encode(llm, ask)
        if len(ids) + room > most:
            raise ParameterError(
                f"request {ask.key!r}: {len(ids)} prompt and {room} answer tokens exceed max_model_len={most}; "
                "raise max_model_len or lower the answer's tokens"
            )
        out.append(ids)
    return out
