"""GSM-Symbolic problems from reasoning-gym, and arithmetic drills, as V4 chats.

Format of every answer: the worked steps, one per line, then a last line
``#### N`` with the bare number. In chat mode the steps are visible; in thinking
mode they stand inside the thinking part and only ``#### N`` follows it.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from firesteel.models.deepseek_v4.chat_strings import (
    ASSISTANT,
    BOS,
    EFFORT_TEXTS,
    END_THINK,
    EOS,
    THINK,
    USER,
)

PACKAGE = "reasoning_gym.arithmetic.gsm_symbolic"
# templates the published generator draws from; the other 15 of the 100 are marked broken there
TEMPLATES = tuple(
    i for i in range(100) if i not in (32, 35, 37, 61, 63, 65, 74, 76, 77, 79, 86, 87, 90, 97, 98)
)
SUFFIX = " Give the result as your final answer. Do not include units."
TRAIN_SEEDS = 1 << 40  # training draws from here up; every smaller seed is left for evaluation
SCAFFOLD, PROMPT, ANSWER = 0, 1, 2  # loss classes of a text segment


def held_out(count: int = 5) -> tuple[int, ...]:
    """The templates that training never sees, chosen by hash."""
    ranked = sorted(TEMPLATES, key=lambda i: hashlib.sha256(f"firesteel-held-out-{i}".encode()).hexdigest())
    return tuple(sorted(ranked[:count]))


@dataclass(frozen=True)
class Problem:
    """``steps`` is the worked solution without the final line; ``answer`` the bare number as text."""

    question: str
    steps: str
    answer: str
    template: int


def generators() -> dict[int, Callable[[Random, float], dict[str, Any]]]:
    """Template number -> generator function of the installed reasoning-gym."""
    out: dict[int, Callable[[Random, float], dict[str, Any]]] = {}
    for part in ("generators_00_49", "generators_50_99"):
        module = importlib.import_module(f"{PACKAGE}.{part}")
        for name in dir(module):
            if name.startswith("generate_") and name[9:].isdigit():
                out[int(name[9:])] = getattr(module, name)
    return out


def plain_number(text: str) -> str:
    """'36.0' -> '36', '1,200' -> '1200', '4.50' -> '4.5'; other text unchanged."""
    text = text.replace(",", "")
    return text.rstrip("0").rstrip(".") if re.fullmatch(r"-?\d+\.\d+", text) else text


def plain_text(text: str) -> str:
    """Drop the '.0' of whole numbers, unusual spacing and bullets of a worked solution."""
    text = re.sub(r"(\d)\.0+(?![\d])", r"\1", text)
    text = text.replace("\u2022", "-").replace("\u00a0", " ")
    lines = [re.sub(r"[ \t]+", " ", line).strip() for line in text.splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith("####"))


def make(template: int, source: Callable[[Random, float], dict[str, Any]], seed: int) -> Problem | None:
    """One problem, or None if its numbers carry float noise or the answer is no number."""
    item = source(Random(seed), 1.0)
    steps = plain_text(item["metadata"]["answer_cot"])
    question = item["question"].strip()
    answer = plain_number(str(item["answer"]).strip())
    if not re.fullmatch(r"-?\d+(\.\d{1,3})?", answer) or re.search(r"\.\d{5,}", question + steps):
        return None
    return Problem(question, steps, answer, template)


def stream(seed: int, skip: frozenset[str], kept: tuple[int, ...]) -> Callable[[], Problem]:
    """Endless training problems of the ``kept`` templates; questions in ``skip`` never come."""
    rng, sources = Random(f"pick-{seed}"), generators()
    counter = [TRAIN_SEEDS + seed * (1 << 32)]

    def draw() -> Problem:
        while True:
            counter[0] += 1
            template = rng.choice(kept)
            problem = make(template, sources[template], counter[0])
            if problem is not None and problem.question not in skip:
                return problem

    return draw


def evaluation_set(seed: int = 2026, size: int = 500) -> list[Problem]:
    """The first ``size`` problems of trained templates of ``reasoning_gym.create_dataset('gsm_symbolic', seed=seed)``.

    Steps plain. The draw of templates and the seeds are restated here, because training machines
    carry only the generators. Noisy items stay; their answer is compared numerically.
    """
    sources, held = generators(), set(held_out())
    out: list[Problem] = []
    for i, template in enumerate(Random(seed).choices(TEMPLATES, k=2 * size)):
        if template in held or len(out) == size:
            continue
        item = sources[template](Random(seed + i), 1.0)
        steps = plain_text(item["metadata"]["answer_cot"])
        out.append(
            Problem(item["question"] + SUFFIX, steps, plain_number(str(item["answer"]).strip()), template)
        )
    return out


def template_set(templates: tuple[int, ...], each: int, seed: int = 7_000_000) -> list[Problem]:
    """``each`` problems of every template, from seeds below the training seeds."""
    sources = generators()
    out = []
    for template in templates:
        made = (make(template, sources[template], seed + i) for i in range(20 * each))
        out += [replace(p, question=p.question + SUFFIX) for p in made if p is not None][:each]
    return out


Segment = tuple[str, int]  # text and its loss class


def opening(question: str) -> str:
    """A user turn and the assistant marker."""
    return f"{USER}{question}{ASSISTANT}"


def reply(problem: Problem, thinking: bool) -> str:
    """What the assistant says after its marker, without EOS."""
    if thinking:
        return f"{THINK}{problem.steps}{END_THINK}#### {problem.answer}"
    return f"{END_THINK}{problem.steps}\n#### {problem.answer}"


def prompt(question: str, thinking: bool) -> str:
    """The rendered prompt up to and with the thinking tag (low effort, no system text)."""
    return BOS + opening(question) + (THINK if thinking else END_THINK)


def tagged(problem: Problem, thinking: bool) -> list[Segment]:
    """One turn; the thinking tag belongs to the prompt."""
    tag = THINK if thinking else END_THINK
    body = reply(problem, thinking).removeprefix(tag)
    return [(opening(problem.question), PROMPT), (tag, SCAFFOLD), (body + EOS, ANSWER)]


def chat(problems: list[Problem], thinking: bool, rng: Random) -> list[Segment]:
    """A conversation; in thinking mode the reasoning of earlier turns is dropped, as V4's encoder does."""
    head = BOS
    if thinking and rng.random() < 0.15:
        head += EFFORT_TEXTS[rng.choice(("high", "max"))]
    elif rng.random() < 0.06:
        head += rng.choice(SYSTEMS)
    out: list[Segment] = [(head, SCAFFOLD)]
    for problem in problems[:-1]:
        if thinking:
            out += [(opening(problem.question), PROMPT), (END_THINK, SCAFFOLD)]
            out += [(f"#### {problem.answer}{EOS}", SCAFFOLD)]
        else:
            out += tagged(problem, False)
    return out + tagged(problems[-1], thinking)


SYSTEMS = (
    "You are a careful assistant.",
    "You solve word problems step by step.",
    "You are a helpful assistant that shows its work and ends with the number.",
)


def with_suffix(problem: Problem, rng: Random) -> Problem:
    """The published data set appends an instruction; most training problems have it, some not."""
    if rng.random() < 0.8:
        return Problem(problem.question + SUFFIX, problem.steps, problem.answer, problem.template)
    return problem


# ---- arithmetic drills ------------------------------------------------------
def number(x: float) -> str:
    """At most four decimals, no trailing zeros."""
    return plain_number(f"{x:.4f}")


def operands(rng: Random) -> tuple[int, int]:
    """Sizes as word problems have them: mostly two and three digits, sometimes round."""
    a, b = (rng.choice((rng.randint(2, 12), rng.randint(2, 99), rng.randint(2, 999))) for _ in "ab")
    if rng.random() < 0.2:
        a *= rng.choice((10, 100, 1000))
    return a, b


def drill(rng: Random) -> tuple[str, str]:
    """(expression, value)."""
    kind = rng.randrange(7)
    a, b = operands(rng)
    unit = rng.choice(("", "", "", "$", "\u20ac", "\u00a3"))
    gap = rng.choice((" ", " ", ""))
    if kind <= 1:
        sign = rng.choice(("*", "*", "x", "\u00d7"))
        return f"{unit}{a}{gap}{sign}{gap}{b}", unit + str(a * b)
    if kind == 2:
        return f"{unit}{a * b}{gap}{rng.choice(('/', '/', chr(0xF7)))}{gap}{b}", unit + str(a)
    if kind == 3:
        parts = [rng.randint(1, 9999 if rng.random() < 0.3 else 500) for _ in range(rng.randint(2, 5))]
        return f"{gap}+{gap}".join(unit + str(p) for p in parts), unit + str(sum(parts))
    if kind == 4:
        a, b = a * rng.choice((1, 10)), b * rng.choice((1, 7))
        return f"{unit}{max(a, b)}{gap}-{gap}{unit}{min(a, b)}", unit + str(max(a, b) - min(a, b))
    if kind == 5:
        share = rng.randint(1, 19) * 5 / 100
        return f"{unit}{a * 20}{gap}*{gap}{number(share)}", unit + number(a * 20 * share)
    cents = rng.randint(5, 2000) / 100
    return f"{b}{gap}*{gap}{unit}{number(cents)}", unit + number(round(b * cents * 100) / 100)


def drill_chat(rng: Random) -> list[Segment]:
    """One short question about an expression."""
    left, right = drill(rng)
    question = rng.choice(("What is {}?", "Calculate {}.", "{} = ?", "Work out {}.")).format(left)
    problem = Problem(question, f"{left} = {right}", right.lstrip("$\u20ac\u00a3"), -1)
    return [(BOS, SCAFFOLD), *tagged(problem, rng.random() < 0.5)]


def drill_page(rng: Random) -> list[Segment]:
    """A page of equations, plain text."""
    lines = (" = ".join(drill(rng)) for _ in range(rng.randint(8, 24)))
    return [(BOS, SCAFFOLD), ("\n".join(lines) + "\n" + EOS, ANSWER)]
