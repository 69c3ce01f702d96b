"""The bundled model in ``numerics: float32`` against Hugging Face with the same weights.

Real text, a prompt with a problem in it: the whole prompt, chunks across the
borders of windows and entries, and 64 greedy tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from firesteel import LLM, SamplingParams
from firesteel.engine.build import BUNDLED
from firesteel.eval.gsm import PROBLEMS, read_problems
from firesteel.models.deepseek_v4.chat import encode_messages
from firesteel.tokenizer import Tokenizer
from oracles.compare import MULTIPLE
from oracles.drive import Drive, load_target
from oracles.hf import Oracle
from oracles.official import Options, Straight

GREEDY = 64


@dataclass(frozen=True)
class Theirs:
    """Hugging Face's logits, and the largest difference that counts as equal."""

    oracle: Oracle
    logits: torch.Tensor
    bound: float


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    problem = read_problems(PROBLEMS, 1)[0]
    text = encode_messages([{"role": "user", "content": problem.question}], False)
    return Tokenizer.load(BUNDLED).encode(text)


@pytest.fixture(scope="module")
def theirs(prompt: list[int]) -> Theirs:
    """The bound is measured: how far Hugging Face in float32 lies from an independent float64 run."""
    oracle = Oracle(BUNDLED)
    logits = oracle.logits(prompt)
    exact = Straight(BUNDLED, Options(official=False, dtype=torch.float64)).logits(prompt)
    floor = float((logits.double() - exact).abs().max())
    assert 0 < floor < 2e-3, f"Hugging Face in float32 lies {floor:.1e} from float64"
    return Theirs(oracle, logits, MULTIPLE * floor)


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_logits_in_chunks(backend: str, prompt: list[int], theirs: Theirs) -> None:
    if backend == "native":
        native = pytest.importorskip("firesteel.ops.native")
        if native.why_not():
            pytest.skip(native.why_not())
    target = load_target(BUNDLED, "float32", backend)
    n = len(prompt)
    for slot, sizes in enumerate(([n], [3, 1, n - 4], [n - 1, 1], [n // 2, n - n // 2])):
        drive = Drive(target, slot + 1, n)
        got = drive.chunks(slot, prompt, sizes)
        far = (got - theirs.logits).abs().max().item()
        assert far <= theirs.bound, f"{far:.2e} in chunks of {sizes}"


def test_greedy_text(prompt: list[int], theirs: Theirs) -> None:
    llm = LLM(numerics="float32", max_num_seqs=1)
    ours = llm.generate([prompt], SamplingParams(max_tokens=GREEDY, temperature=0.0, ignore_eos=True))[
        0
    ].token_ids
    logits = theirs.oracle.logits([*prompt, *ours[:-1]])[len(prompt) - 1 :]
    best = logits.topk(2, dim=-1)
    for i, token in enumerate(ours):
        gap = (best.values[i, 0] - best.values[i, 1]).item()
        assert token == best.indices[i, 0].item() or gap < theirs.bound, f"token {i}: {token}, gap {gap:.2e}"
