"""``firesteel eval``: exact match on worked problems in GSM8K's JSONL form, in up to four arms.

A line holds ``question`` and ``answer``, the answer ending in ``#### N``. The
model's last ``#### N`` (or else its last number) is compared as a number. All
arms are greedy, and speculation may not change a text: for every problem the
token ids of each arm are compared with those of the first one.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from firesteel.bench.report import environment
from firesteel.config import ParameterError, SamplingParams
from firesteel.engine.llm import LLM

PROBLEMS = Path(__file__).parent / "data" / "gsm_symbolic.jsonl"
HELD_OUT = Path(__file__).parent / "data" / "gsm_symbolic_held_out.jsonl"
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


@dataclass(frozen=True)
class Problem:
    """One question with its worked answer."""

    question: str
    answer: str

    @property
    def number(self) -> float:
        """The expected result."""
        found = number_of(self.answer)
        assert found is not None, "checked when it was read"
        return found


def read_problems(path: str | Path, limit: int | None = None) -> list[Problem]:
    """Problems of a JSONL file; raises ParameterError naming the line."""
    out = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as err:
        raise ParameterError(f"problems: {path} cannot be read ({err.strerror}); give a JSONL file") from err
    for i, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            problem = Problem(str(raw["question"]), str(raw["answer"]))
        except (json.JSONDecodeError, KeyError, TypeError) as err:
            raise ParameterError(
                f"problems: {path}, line {i}: expected question and answer ({err!r})"
            ) from err
        if number_of(problem.answer) is None:
            raise ParameterError(
                f"problems: {path}, line {i}: the answer has no number; end it with '#### N'"
            )
        out.append(problem)
    if limit is not None and limit < 1:
        raise ParameterError(f"limit={limit}: expected an integer from 1 up")
    if not out:
        raise ParameterError(f"problems: {path} holds none; give a JSONL file with question and answer")
    return out[:limit]


def split_shots(
    problems: Sequence[Problem], shots: int, examples: Sequence[Problem] | None = None
) -> tuple[list[Problem], list[Problem]]:
    """(worked examples, problems left to solve): ``shots`` from ``examples``, or else the first ones of the problems.

    Raises ParameterError if there are too few.
    """
    if shots < 0:
        raise ParameterError(f"shots={shots}: expected an integer from 0 up")
    source = list(problems if examples is None else examples)
    left = list(problems[shots:]) if examples is None else list(problems)
    if len(source) < shots or not left:
        raise ParameterError(f"shots={shots}: {len(source)} problems do not leave any to solve; lower shots")
    return source[:shots], left


def number_of(text: str) -> float | None:
    """The number behind the last ``####``, or else the last number; None if there is none."""
    marked = re.findall(rf"####\s*\$?\s*({NUMBER})", text)
    found = marked or re.findall(NUMBER, text)
    return float(found[-1].replace(",", "")) if found else None


@dataclass(frozen=True)
class Score:
    """Exact match of one arm, with the binomial standard error."""

    arm: str
    mode: str
    problems: int
    correct: int
    tokens: int
    seconds: float
    steps: int

    @property
    def share(self) -> float:
        """Share of correct answers."""
        return self.correct / max(self.problems, 1)

    @property
    def error(self) -> float:
        """Standard error of the share."""
        return math.sqrt(self.share * (1 - self.share) / max(self.problems, 1))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "exact_match": self.share, "standard_error": self.error}


def evaluate(
    llm: LLM,
    problems: Sequence[Problem],
    arm: str,
    thinking: bool,
    max_tokens: int = 400,
    progress: Callable[[int], None] = lambda _: None,
    shots: Sequence[Problem] = (),
) -> tuple[Score, list[tuple[int, ...]]]:
    """Greedy answers of all problems, and their token ids for comparing arms.

    ``shots``: worked examples that come first, as turns of the conversation.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    prompts = [prompt_of(llm, p, thinking, shots) for p in problems]
    done = 0

    def tick(answer: Any) -> None:
        nonlocal done
        if answer.finish is not None:
            done += 1
            progress(done)

    begun = time.perf_counter()
    steps = len(llm.engine.records)
    results = llm.generate(prompts, params, on_token=tick)
    seconds = time.perf_counter() - begun
    right = sum(_same(number_of(r.text), p.number) for r, p in zip(results, problems, strict=True))
    score = Score(
        arm=arm,
        mode="thinking" if thinking else "chat",
        problems=len(problems),
        correct=right,
        tokens=sum(len(r.token_ids) for r in results),
        seconds=seconds,
        steps=len(llm.engine.records) - steps,
    )
    return score, [r.token_ids for r in results]


def prompt_of(llm: LLM, problem: Problem, thinking: bool, shots: Sequence[Problem] = ()) -> str:
    """The conversation that asks one problem behind worked examples."""
    turns = [(role, text) for p in shots for role, text in (("user", p.question), ("assistant", p.answer))]
    said = [{"role": role, "content": text} for role, text in (*turns, ("user", problem.question))]
    return llm.prompt_of(said, thinking, "low" if thinking else None)


def _same(found: float | None, expected: float) -> bool:
    return found is not None and math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-6)


ARMS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "fixed 5": {"num_speculative_tokens": 5},
    "fixed 7": {"num_speculative_tokens": 7},
    "adaptive": {"num_speculative_tokens": 7, "enable_adaptive_verification": True},
}


def differing(texts: Sequence[Sequence[tuple[int, ...]]]) -> list[int]:
    """Indices of the problems whose token ids differ between arms; ``texts``: one list of answers per arm."""
    return [i for i, answers in enumerate(zip(*texts, strict=True)) if len(set(answers)) > 1]


def run_arms(
    model: str | None,
    problems: Sequence[Problem],
    arms: Sequence[str],
    modes: Sequence[bool],
    settings: dict[str, Any],
    progress: Callable[[str, int], None] = lambda _a, _b: None,
    shots: Sequence[Problem] = (),
    max_tokens: int = 400,
) -> dict[str, Any]:
    """Every arm in every mode (False: chat, True: thinking), one engine at a time.

    ``identical`` says by mode for how many problems all arms wrote the same tokens, and names the others.
    """
    scores: list[Score] = []
    notes: dict[str, list[str]] = {}
    texts: dict[tuple[str, bool], list[tuple[int, ...]]] = {}
    for arm in arms:
        llm = LLM(model, speculative=ARMS[arm], **settings)
        notes[arm] = list(llm.notes)
        for thinking in modes:
            tick = partial(progress, f"{arm}, {'thinking' if thinking else 'chat'}")
            score, texts[arm, thinking] = evaluate(llm, problems, arm, thinking, max_tokens, tick, shots)
            scores.append(score)
        del llm  # before the next arm's weights
    identical = {}
    for mode in modes:
        differ = differing([texts[a, mode] for a in arms])
        name = "thinking" if mode else "chat"
        identical[name] = {
            "problems": len(problems),
            "identical": len(problems) - len(differ),
            "differing": differ,
        }
    return {
        "bench": "eval",
        "environment": environment(),
        "notes": notes,
        "arms": {arm: ARMS[arm] for arm in arms},
        "settings": {**settings, "shots": len(shots), "max_tokens": max_tokens, "temperature": 0.0},
        "scores": [s.to_json() for s in scores],
        "identical_texts": identical if len(arms) > 1 else None,
    }
