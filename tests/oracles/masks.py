"""A step's masks on any device: guided rows among others, against rules known by heart."""

from __future__ import annotations

import torch

from firesteel.core import NO_DRAFTS, Chunk, Decode, RowBatch, SampleRows, StepPlan
from firesteel.engine.guide import Guide, Vocabulary, Words
from firesteel.engine.masks import Masks
from firesteel.engine.slots import slot_state
from firesteel.engine.sync import SyncGuard
from firesteel.ops.interface import Ops

VOCAB, EOS = 40, 1
LETTERS = tuple(range(10, 14))
VOCABULARY = Vocabulary(VOCAB)


class Language:
    """``Matcher`` of a finite set of strings; counts its calls."""

    def __init__(self, strings: set[tuple[int, ...]]):
        self.strings, self.text = strings, list[int]()
        self.calls = {"take": 0, "rollback": 0}
        self.error = ""

    def next(self, text: list[int]) -> set[int]:
        """What may stand behind a text."""
        n = len(text)
        more = {s[n] for s in self.strings if list(s[:n]) == text and len(s) > n}
        return more | ({EOS} if tuple(text) in self.strings else set())

    def mask(self) -> Words:
        return VOCABULARY.only(self.next(self.text))

    def take(self, token: int) -> bool:
        self.calls["take"] += 1
        if token not in self.next(self.text):
            return False
        self.text.append(token)
        return True

    def rollback(self, count: int) -> None:
        self.calls["rollback"] += count
        assert 0 < count <= len(self.text)
        del self.text[-count:]


def check_step(ops: Ops, device: torch.device, workers: int = 1) -> None:
    """Two guided decodes and a guided first token among others; one guided request has ended.

    Slot 0: request 9 has committed one letter. Slot 1: request 8 two, and its
    first draft is right. Slot 2: request 5 has no guide. Slot 3: request 7 has
    ended. Slot 4: request 6 is in its last chunk.
    """
    gamma = 2
    state = slot_state(6, VOCAB, 64, gamma, device)
    masks = Masks(gamma, SyncGuard(True, device), device)
    masks.threads.threads = workers
    words = {9: LETTERS, 8: LETTERS[::-1], 7: LETTERS, 6: LETTERS}
    kept = {rid: Guide(VOCABULARY, 5, None, Language({w}), {EOS}) for rid, w in words.items()}
    masks.guides.update(kept)
    state.history[0, 4:6] = torch.tensor([30, LETTERS[0]], device=device)
    state.history[1, 5:9] = torch.tensor([LETTERS[3], LETTERS[2], LETTERS[1], 33], device=device)
    plan = StepPlan(
        step=1,
        chunks=(Chunk(6, 4, 4, (30,), True),),
        decodes=tuple(Decode(rid, slot) for rid, slot in ((9, 0), (5, 2), (7, 3), (8, 1))),
        budget=NO_DRAFTS,
        max_position=9,
        guided=(6, 9, 7, 8),
    )

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device)

    row = ints(0, 1, 2, 3, 4, 5)  # chunk | 9: anchor | 5: anchor | 8: anchor and two drafts
    rows = RowBatch(row, ints(4, 5, 9, 6, 7, 8), ints(4, 0, 2, 1, 1, 1), row, row, row >= 0, 9)
    samples = SampleRows(
        row, ints(0, 1, 2, 4, 4, 4), ints(0, 1, 2, 3, 3), ints(1, 1, 1, 0, 3), ints(4, 0, 2, 3, 1)
    )
    logits = torch.randn(6, VOCAB, device=device)
    with masks.guard.step():
        answer = masks.answer(masks.ask(plan, rows, samples, state))
        assert answer is not None
        out = ops.restrict(logits, *answer)
    assert masks.guard.counts == {"grammar drafts": 1}
    allowed = {0: LETTERS[0], 1: LETTERS[1], 3: LETTERS[1], 4: LETTERS[0]}  # 5: behind a draft that is cut
    for at in range(6):
        keep = torch.ones(VOCAB, dtype=torch.bool)
        if at in allowed:
            keep = torch.arange(VOCAB) == allowed[at]
        assert torch.equal(torch.isfinite(out[at]).cpu(), keep), at
        assert torch.equal(out[at].cpu()[keep], logits[at].cpu()[keep])
    assert kept[8].cut == 1
    del kept
    assert not masks.guides, "a guide outlived its request"
