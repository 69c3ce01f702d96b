"""Priority and ``min_tokens_per_second``: weights in what adaptive verification maximises, on a virtual clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from firesteel.bench.virtual import SCENES, Bed, Job, jobs, simulated_bed, tables
from firesteel.config import ParameterError, SamplingParams
from firesteel.engine.sequence import Sequence
from firesteel.speculation.book import Book
from firesteel.speculation.cost import CostModel
from firesteel.speculation.survival import Coefficients
from firesteel.speculation.terms import Candidate

pytestmark = pytest.mark.cpu
K, USERS, TOKENS = 7, 12, 160
TABLE = tables(K)["linear"]  # where rows are dear: nothing is drafted at this load unless somebody asks


@pytest.fixture(scope="module")
def bed() -> Bed:
    return simulated_bed(SCENES["measured"], K, USERS, TOKENS + 32)


def serve(bed: Bed, work: list[Job]) -> tuple[list[float], list[Sequence]]:
    """All requests side by side; each one's tokens per virtual second until the first ends, and the sequences."""
    bed.engine.drain()
    bed.engine.records.clear()
    bed.engine.scheduler.policy = bed.adaptive(TABLE)
    bed.engine.runner.virtual = CostModel(TABLE)
    seqs = [bed.engine.add(p, q, q.seed or 0) for p, q in work]
    while not any(s.finish for s in seqs):
        bed.engine.step()
    seconds = sum(r.measured_ms for r in bed.engine.records) / 1e3
    speeds = [len(s.output) / seconds for s in seqs]
    while bed.engine.busy:
        bed.engine.step()
    return speeds, seqs


def wishing(index: int, **wish: float) -> list[Job]:
    work = jobs(USERS, TOKENS)
    prompt, params = work[index]
    work[index] = (prompt, replace(params, **wish))
    return work


def test_a_wish_for_speed_is_met_by_drafts(bed: Bed) -> None:
    before, plain = serve(bed, jobs(USERS, TOKENS))
    wish = 1.5 * before[3]
    after, texts = serve(bed, wishing(3, min_tokens_per_second=wish))
    assert after[3] >= 0.95 * wish > 1.2 * before[3], (before[3], after[3], wish)
    assert [s.output for s in texts] == [s.output for s in plain]
    others = np.delete(np.array(after) / np.array(before), 3)
    assert others.mean() > 0.75, "the others pay for it, but not much more than it costs"


def test_a_wish_that_is_met_anyway_changes_nothing(bed: Bed) -> None:
    before, _ = serve(bed, jobs(USERS, TOKENS))
    after, _ = serve(bed, wishing(3, min_tokens_per_second=0.5 * before[3]))
    assert after == before


def test_priority_is_a_weight_of_drafts(bed: Bed) -> None:
    """Smaller is more urgent; -3 makes a token count eight times."""
    before, plain = serve(bed, jobs(USERS, TOKENS))
    after, texts = serve(bed, wishing(5, priority=-3))
    assert after[5] > 1.3 * before[5], (before[5], after[5])
    assert [s.output for s in texts] == [s.output for s in plain]


def test_weights_of_wishes_grow_and_fade() -> None:
    book = Book(3, Coefficients.prior(3, True, True))
    asks = [Candidate(1, 0, 3, floor=100.0), Candidate(2, 0, 3)]
    book.ask(asks)
    for _ in range(30):  # 50 tokens a second each
        book.clock([1, 2], np.array([1, 1]), 20.0)
    high = book.weights(asks)
    assert high[0] > 4.0 and high[1] == 1.0
    for _ in range(100):  # 200 a second
        book.clock([1, 2], np.array([4, 4]), 20.0)
    assert book.weights(asks)[0] == 1.0
    book.forget(1)
    assert book.weights([Candidate(1, 0, 3)])[0] == 1.0, "a new request under an old id starts anew"


def test_a_wish_must_be_a_number() -> None:
    for bad in (-1.0, float("nan"), "fast"):
        with pytest.raises(ParameterError, match="min_tokens_per_second"):
            SamplingParams(min_tokens_per_second=bad)  # type: ignore[arg-type]
