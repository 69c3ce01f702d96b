"""``firesteel demo``: three real prompts on the bundled model."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from firesteel.config import SamplingParams
from firesteel.engine.llm import LLM
from firesteel.engine.output import Completion
from firesteel.eval.gsm import PROBLEMS, read_problems

CODE = 'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):\n'
PROSE = "It was a cold morning, and the old man"


def run_demo(llm: LLM, as_json: bool = False) -> int:
    """A word problem (the first of the shipped test set), code and prose: prompt, answer, speed."""
    problem = read_problems(PROBLEMS, 1)[0].question
    greedy = SamplingParams(max_tokens=200, temperature=0.0)
    short = SamplingParams(max_tokens=64, temperature=0.0)
    lively = SamplingParams(max_tokens=64, temperature=0.7, seed=1)
    assert llm.tokenizer is not None, "the bundled model has a tokenizer"
    bos = llm.config.bos_token_id
    cases: list[tuple[str, str, Any, SamplingParams]] = [
        ("word problem", problem, llm.prompt_of([{"role": "user", "content": problem}]), greedy),
        ("code", CODE, [bos, *llm.tokenizer.encode(CODE)], short),
        ("prose, temperature 0.7", PROSE, [bos, *llm.tokenizer.encode(PROSE)], lively),
    ]
    results = [(name, shown, llm.generate([prompt], params)[0]) for name, shown, prompt, params in cases]
    if as_json:
        print(json.dumps({name: done.to_json() for name, _, done in results}, ensure_ascii=False))
        return 0
    console = Console(highlight=False)
    for note in llm.notes:
        console.print(note, style="dim", markup=False)
    for name, shown, done in results:
        _show(console, name, shown, done)
    return 0


def _show(console: Console, name: str, prompt: str, done: Completion) -> None:
    console.rule(name)
    console.print(prompt, style="bold", markup=False, end="\n" if name == "word problem" else "")
    console.print(done.text, markup=False)
    console.print(
        f"{len(done.token_ids)} tokens, {done.stats['tokens_per_second']:.0f} tokens/s, "
        f"ended by {done.finish_reason}",
        style="dim",
        markup=False,
    )
