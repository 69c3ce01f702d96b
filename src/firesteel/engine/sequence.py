"""One request inside the engine: what the host knows of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property

from firesteel.config import SamplingParams
from firesteel.core import Admission, FinishReason, Origin, Shaping
from firesteel.engine.guide import Guide
from firesteel.engine.runner import TokenScore
from firesteel.speculation.terms import Candidate

MAX_TOP_K = 2**31 - 1  # what the device's tables hold; more than any vocabulary


@dataclass(eq=False)  # one is itself, whatever it holds
class Sequence:
    """Host state of one sample of one request.

    ``base`` are the tokens to run as prompt rows: the prompt or, after a
    preemption whose copy did not fit, the prompt and the answer so far.
    """

    request_id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_len: int
    stop_ids: tuple[int, ...]
    sample: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    guide: Guide | None = None  # rules of its tokens: a grammar, a thinking budget
    slot: int = -1
    base: tuple[int, ...] = ()
    planned: int = 0  # positions of base that are planned or reused
    output: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)  # of ``output``; tokens of a kind share one
    prompt_scores: dict[int, TokenScore] = field(default_factory=dict)
    in_flight: int = 0  # steps not yet committed that sample for this request
    steps: int = 0  # steps that sampled for it
    draft_cap: int = 0  # drafts it may verify per step
    ready: int = 0  # drafts that its last planned step proposes
    offer: tuple[int, Candidate] | None = None  # it as the policy saw it last, and ``ready`` then
    drafted: int = 0
    verified_at: list[int] = field(default_factory=list)  # by depth inside the block
    accepted_at: list[int] = field(default_factory=list)
    reused: int = 0  # prompt tokens taken from the prefix cache
    preemptions: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    admitted: float | None = None  # when it first took a slot
    saved_pages: int = 0  # > 0: its device state waits in a copy
    restart: bool = False  # its state was given up: base is run again once all tokens are known
    boundaries: list[int] = field(default_factory=list)  # snapshots wanted while the prompt runs
    want: int = 0  # snapshot wanted at this committed boundary
    snapped: int = 0  # deepest boundary with a snapshot of this request
    keys: list[bytes] = field(default_factory=list)  # snapshots it made
    chain: list[bytes] = field(default_factory=list)  # page keys of its tokens, as far as needed
    answer_key: bytes | None = None  # its latest snapshot inside the answer
    finish: FinishReason | None = None
    error: str = ""

    def __post_init__(self) -> None:
        self.base = self.base or self.prompt

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: priority, then arrival."""
        return self.params.priority, self.request_id

    @property
    def prefilled(self) -> bool:
        """Whether all prompt rows have been planned."""
        return self.planned == len(self.base)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and answer so far."""
        return (*self.prompt, *self.output)

    @property
    def known(self) -> int:
        """Tokens the host knows."""
        return len(self.prompt) + len(self.output)

    @property
    def bound(self) -> int:
        """Upper bound of tokens after the steps in flight: each may accept all its drafts."""
        return min(self.known + self.in_flight * (1 + self.draft_cap), self.max_len)

    def count(self, step: int, tokens: int, verified: int, accepted: int) -> None:
        """Account one verify step and where its tokens come from; accepted <= verified at every depth."""
        assert accepted <= verified, "more drafts accepted than verified"
        drafted = min(accepted, tokens)
        self.origins.extend([Origin(step, True, verified)] * drafted)
        self.origins.extend([Origin(step, False, verified)] * (tokens - drafted))
        for at, n in ((self.verified_at, verified), (self.accepted_at, accepted)):
            at.extend([0] * (n - len(at)))
            for depth in range(n):
                at[depth] += 1

    @property
    def exhausted(self) -> bool:
        """Whether the steps in flight reach the length limit already."""
        return self.known + self.in_flight >= self.max_len

    @property
    def failure(self) -> str:
        """Why no token could be sampled."""
        if self.guide is not None and self.guide.error:
            return f"structured_outputs: {self.guide.error}"
        return "no token could be sampled: the model's logits were not finite, or every token was excluded"

    @cached_property
    def shaped(self) -> bool:
        """Whether its logits are changed before they are sampled."""
        return not self.shaping().neutral

    def shaping(self) -> Shaping:
        """What the device must do to the logits."""
        p = self.params
        return Shaping(
            top_k=min(max(p.top_k, 0), MAX_TOP_K),
            top_p=p.top_p,
            min_p=p.min_p,
            repetition=p.repetition_penalty,
            presence=p.presence_penalty,
            frequency=p.frequency_penalty,
            bias=tuple(sorted(p.logit_bias.items())),
            allowed=p.allowed_token_ids,
            bad_words=self.bad_words,
            stop_from=min(len(self.prompt) + p.min_tokens, self.max_len),
            prompt_len=len(self.prompt),
        )

    def admission(self, snapshot: tuple[int, ...]) -> Admission:
        """The order that puts it into its slot, behind the reused prefix."""
        if self.admitted is None:
            self.admitted = time.perf_counter()
        return Admission(
            request_id=self.request_id,
            slot=self.slot,
            seed=self.seed,
            sample=self.sample,
            temperature=self.params.temperature,
            max_len=self.max_len,
            stop_ids=self.stop_ids,
            draft_cap=self.draft_cap,
            shaping=self.shaping(),
            prefix=self.base[: self.planned],
            snapshot=snapshot,
        )
