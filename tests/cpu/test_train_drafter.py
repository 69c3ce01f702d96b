"""The trainable drafter against the engine's, its data and losses, and calibration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from firesteel import cli
from firesteel.bench.toys import Toys
from firesteel.config import ParameterError, SamplingParams
from firesteel.engine.llm import LLM
from firesteel.models.deepseek_v4.config import DSparkConfig, V4Config
from firesteel.models.deepseek_v4.random_init import write_random
from firesteel.train import drafter_eval, drafter_run, gsm
from firesteel.train.attention import Numerics
from firesteel.train.drafter import (
    Anchors,
    Drafted,
    DrafterTrain,
    documents,
    draft_loss,
    draw_anchors,
    eligible,
    lesson,
)
from firesteel.train.export import export, load, load_drafter, stored_bytes
from firesteel.train.model import V4Train
from firesteel.train.rollout import Rows, noise, rewrite, sampled, single_rows
from oracles.drafters import BLOCK, VOCAB, WINDOW, small

FLOAT32 = Numerics(quantise=False, dtype=torch.float32)
QUANTISED = Numerics(quantise=True, dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target whose drafter is random too, apart from a shared bigram; taps out of order."""
    return write_random(tmp_path_factory.mktemp("model") / "m", small((2, 0, 1)), 5, agreement=0.9)


def pad(text: list[int], align: int) -> tuple[Tensor, Tensor]:
    """(tokens [1, S], document numbers [1, S/align]) of one document."""
    text = text + [2] * (-len(text) % align)
    return torch.tensor([text]), torch.zeros(1, len(text) // align, dtype=torch.int32)


@torch.no_grad()
def blocks_at(
    target: V4Train, drafter: DrafterTrain, tokens: Tensor, numbers: Tensor, places: list[int], width: int
) -> tuple[Tensor, Tensor]:
    """(z, x) [len(places), K, D] of blocks in row 0."""
    windows = tokens.shape[1] // WINDOW
    seen = target(tokens, numbers, len(tokens), taps=drafter.draft.target_layer_ids)
    assert seen.taps is not None
    z, x = [], []
    for place in places:
        at = torch.arange(windows).view(1, -1, 1).expand(len(tokens), -1, 1) * WINDOW
        at = at.clone()
        at[0, place // WINDOW, 0] = place
        anchors = Anchors(at, torch.full_like(at, width), torch.ones_like(at, dtype=torch.bool))
        out = drafter(tokens, seen.taps, target.embed.weight, anchors, numbers, target.align)
        z.append(out.z[0, place // WINDOW])
        x.append(out.x[0, place // WINDOW])
    return torch.stack(z), torch.stack(x)


class Watch:
    """Every drafting pass of an engine: (anchor's position, anchor, proposal with logits)."""

    def __init__(self, llm: LLM):
        self.seen: list[tuple[int, int, Any]] = []
        drafter = llm.engine.runner.drafter
        assert drafter is not None
        plain = drafter.propose

        def propose(slots: Tensor, width: int, state: Any, *rest: Any, **settings: Any) -> Any:
            place, anchor = int(state.cursor[slots][0]), int(state.anchor[slots][0])
            proposal = plain(slots, width, state, *rest, **(settings | {"keep_logits": True}))
            self.seen.append((place, anchor, proposal))
            return proposal

        drafter.propose = propose  # type: ignore[method-assign]


# ---- against the engine ------------------------------------------------------------------------------
@pytest.mark.parametrize(("prompt", "width"), [(2, BLOCK), (37, BLOCK), (37, 3)])
@torch.no_grad()
def test_block_equals_the_engine(folder: Path, prompt: int, width: int) -> None:
    """Base logits, Markov bias and confidence; blocks at the start, past the window, and short ones."""
    target, drafter = load(folder, FLOAT32).eval(), load_drafter(folder, FLOAT32).eval()
    llm = LLM(
        folder,
        numerics="float32",
        backend="reference",
        max_model_len=128,
        speculative={"num_speculative_tokens": width},
    )
    watch = Watch(llm)
    ids = torch.randint(3, VOCAB, (prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
    text = ids + list(llm.generate([ids], params)[0].token_ids)
    seen = [s for s in watch.seen if s[0] < len(text) - 1]
    assert len(seen) >= 2
    tokens, numbers = pad(text, target.align)
    z, x = blocks_at(target, drafter, tokens, numbers, [s[0] for s in seen], width)
    for i, (place, anchor, proposal) in enumerate(seen):
        assert text[place] == anchor
        previous = torch.cat([torch.tensor([anchor]), proposal.tokens[0, :-1]])
        logits, embedded = drafter.logits(x[i, :width], target.head.weight, previous)
        assert logits.std() > 0.5
        assert (logits - proposal.logits[0]).abs().max() < 1e-4
        said = drafter.confidence(z[i, :width], embedded)
        assert (said - proposal.confidence[0]).abs().max() < 1e-4


def test_packed_blocks_equal_blocks_alone(folder: Path) -> None:
    target, drafter = load(folder, FLOAT32).eval(), load_drafter(folder, FLOAT32).eval()
    gen = torch.Generator().manual_seed(6)
    first, second = (torch.randint(3, VOCAB, (n,), generator=gen).tolist() for n in (20, 40))
    tokens = torch.tensor([first + [2] * 12 + second + [2] * 8])
    numbers = torch.tensor([[0, 0, 1, 1, 1]], dtype=torch.int32)
    places = [0, 3, 17, 30]
    _, packed = blocks_at(target, drafter, tokens, numbers, [32 + p for p in places], BLOCK)
    _, alone = blocks_at(target, drafter, *pad(second, 16), places, BLOCK)
    assert (packed - alone).abs().max() < 1e-4
    joined = torch.zeros_like(numbers)
    _, other = blocks_at(target, drafter, tokens, joined, [32 + p for p in places], BLOCK)
    assert (other - alone).abs().max() > 1e-2


def test_export_and_back(folder: Path, tmp_path: Path) -> None:
    """Quantised values survive; the folder holds both, and the target's own are untouched."""
    target, drafter = load(folder, QUANTISED).eval(), load_drafter(folder, QUANTISED).eval()
    export(target, tmp_path / "a", None, drafter)
    again = load_drafter(tmp_path / "a", QUANTISED).eval()
    assert V4Config.load(tmp_path / "a").dspark == V4Config.load(folder).dspark
    for ours, theirs in ((drafter, again), (target, load(tmp_path / "a", QUANTISED))):
        for name, value in ours.state_dict().items():
            assert torch.equal(value, theirs.state_dict()[name]), name
    size = sum(f.stat().st_size for f in (tmp_path / "a").glob("*.safetensors"))
    assert 0 <= size - stored_bytes(target, drafter) < 100_000  # the rest are headers
    export(target, tmp_path / "plain", None)
    assert V4Config.load(tmp_path / "plain").dspark is None
    with pytest.raises(ParameterError, match="no drafter"):
        load_drafter(tmp_path / "plain", QUANTISED)


# ---- anchors, lessons, loss ----------------------------------------------------------------------------
def test_anchors_stand_where_answers_go_on() -> None:
    classes = torch.zeros(2, 64, dtype=torch.uint8)
    classes[0, 5:20] = gsm.ANSWER
    classes[1, 32:64] = gsm.ANSWER
    doc = documents(torch.tensor([[0, 0, 1, 1], [0, 0, 1, 2]], dtype=torch.int32), 16)
    allowed = eligible(classes, doc)
    assert allowed[0].nonzero()[:, 0].tolist() == list(range(5, 19))
    assert not allowed[1, 47] and not allowed[1, 63]
    torch.manual_seed(0)
    drawn = draw_anchors(allowed, WINDOW, 4, BLOCK, 0.5)
    assert torch.equal(drawn.at // WINDOW, torch.arange(4).view(1, 4, 1).expand(2, 4, 4))
    assert torch.equal(allowed.gather(1, drawn.at.flatten(1)).view_as(drawn.live), drawn.live)
    assert drawn.live[0, 0].all() and not drawn.live[0, 2:].any()
    assert drawn.width.min() < BLOCK and drawn.width.max() == BLOCK


def test_lesson_ends_with_the_answer() -> None:
    tokens = torch.arange(32)[None] + 100
    classes = torch.full((1, 32), gsm.ANSWER, dtype=torch.uint8)
    classes[0, 12:] = gsm.SCAFFOLD
    doc = torch.zeros(1, 32, dtype=torch.int32)
    at = torch.tensor([[[3, 8], [16, 31]]])
    anchors = Anchors(
        at, torch.tensor([[[BLOCK, 2], [BLOCK, BLOCK]]]), torch.tensor([[[True, True], [True, True]]])
    )
    task = lesson(tokens, classes, doc, anchors, BLOCK)
    assert task.previous[0, 0].tolist() == list(range(103, 110))
    assert task.truth[0, 0].tolist() == list(range(104, 111))
    assert torch.equal(task.source, task.previous - 100)
    fall = torch.exp(-torch.arange(BLOCK) / BLOCK)
    assert torch.allclose(task.weight[0, 0], fall)
    assert torch.allclose(task.weight[0, 1], fall * (torch.arange(BLOCK) < 2))
    assert not task.weight[0, 2:].any()


def test_loss_is_the_papers() -> None:
    cfg = small()
    torch.manual_seed(3)
    drafter = DrafterTrain(cfg, FLOAT32)
    for p in drafter.parameters():
        p.data += 0.05 * torch.randn_like(p)
    x, z, hidden = (torch.randn(1, n, 64) for n in (3 * BLOCK, 3 * BLOCK, 32))
    x, z = x.view(1, 3, BLOCK, 64), z.view(1, 3, BLOCK, 64)
    tokens = torch.randint(3, VOCAB, (1, 32))
    classes = torch.full((1, 32), gsm.ANSWER, dtype=torch.uint8)
    at = torch.tensor([[[1, 5, 9], [16, 17, 28]]])[:, :1]
    anchors = Anchors(at, torch.full_like(at, BLOCK), torch.ones_like(at, dtype=torch.bool))
    task = lesson(tokens, classes, torch.zeros(1, 32, dtype=torch.int32), anchors, BLOCK)
    head = torch.randn(VOCAB, 64) * 0.3
    got = draft_loss(drafter, Drafted(z, x, []), task, hidden, head)
    w1, w2 = (drafter.last.markov_head[f"markov_{w}"].weight for w in ("w1", "w2"))  # type: ignore[index]
    proj = drafter.last.confidence_head["proj"].weight[0]  # type: ignore[index]
    total, weights = torch.zeros(()), 0.0
    for i, place in enumerate((1, 5, 9)):
        for j in range(BLOCK):
            e = w1[tokens[0, place + j]]
            p_d = (head @ x[0, i, j] + w2 @ e).softmax(0)
            p_t = (head @ hidden[0, place + j]).softmax(0)
            l1 = (p_d - p_t).abs().sum()
            c = torch.sigmoid(proj @ torch.cat([z[0, i, j], e]))
            want = (1 - l1 / 2).detach()
            bce = -(want * c.log() + (1 - want) * (1 - c).log())
            w = float(np.exp(-j / BLOCK))
            total = total + w * (-0.1 * p_d[tokens[0, place + j + 1]].log() + 0.9 * l1 + bce)
            weights += w
    assert torch.allclose(got.total, total / weights, rtol=1e-4)


# ---- the target's own texts ----------------------------------------------------------------------------
@torch.no_grad()
def decoded(model: V4Train, prompt: list[int], count: int, heat: float, gumbel: Tensor) -> list[int]:
    """Plain decoding, a whole pass per token."""
    ids = list(prompt)
    for _ in range(count):
        logits = model.logits(model(torch.tensor([ids])).hidden[:, -1])[0]
        ids.append(int((logits + heat * gumbel[len(ids)]).argmax()))
        if ids[-1] == 1:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_rewriting_is_decoding(folder: Path, heat: float) -> None:
    target = load(folder, FLOAT32).eval()
    prompts, room = [[0, 9, 30, 41], [0, 50, 7]], 9
    rows = single_rows(prompts, [[], []], room, 16, heat, 3, torch.device("cpu"))
    size = rows.tokens.shape[1]
    used = rewrite(target, rows, 50, until_settled=True)
    for i, prompt in enumerate(prompts):
        want = decoded(target, prompt, room, heat, noise(3, i, size, VOCAB, torch.device("cpu")))
        got = rows.tokens[i, len(prompt) : len(prompt) + len(want)].tolist()
        assert got == want
        assert rows.own[i].nonzero()[:, 0].tolist() == list(range(len(prompt), len(prompt) + len(want)))
    assert used > 5
    good = [rows.tokens[i, len(p) : len(p) + room].tolist() for i, p in enumerate(prompts)]
    good[0][4] = 77  # one wrong token in a guess
    again = single_rows(prompts, good, 0, 16, heat, 3, torch.device("cpu"))
    assert rewrite(target, again, 50, until_settled=True) < used
    assert torch.equal(again.tokens[:, :12], rows.tokens[:, :12])


def test_an_answer_that_ends_elsewhere_drops_the_rest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of [question answer EOS question answer EOS] in one document, and a document behind it."""
    target = load(folder, FLOAT32).eval()
    one = [0, 5, 6, 20, 21, 22, 1, 7, 8, 30, 31, 1, 2, 2, 2, 2]
    tokens = torch.tensor([one + [0, 40, 41, 42, 1] + [2] * 11])
    classes = torch.zeros_like(tokens, dtype=torch.uint8)
    for lo, hi in ((3, 7), (9, 12), (17, 21)):
        classes[0, lo:hi] = gsm.ANSWER
    numbers = torch.tensor([[0, 1]], dtype=torch.int32)
    for place, token, kept in ((4, 1, 5), (6, 25, 7), (4, 25, 12)):
        rows = Rows(
            tokens.clone(), classes.clone(), numbers, 1, [0.0], 0, torch.zeros_like(tokens, dtype=torch.bool)
        )

        def wants(model: V4Train, hidden: Tensor, rows: Rows, at: int = place, token: int = token) -> Tensor:
            want = rows.tokens.clone()
            want[0, at], want[0, 18] = token, 60  # 18: a text that is no answer stays as it is
            return want

        monkeypatch.setattr("firesteel.train.rollout.sampled", wants)
        rewrite(target, rows, 1)
        assert rows.tokens[0, place] == token
        assert (rows.tokens[0, kept:16] == 2).all() and (rows.classes[0, kept:16] == gsm.SCAFFOLD).all()
        assert torch.equal(rows.tokens[0, 16:], tokens[0, 16:])
        mine = [p for p in (3, 4, 5, 6) if p <= place] + [p for p in (9, 10, 11) if kept == 12]
        assert rows.own[0].nonzero()[:, 0].tolist() == mine


def test_sampling_uses_its_noise(folder: Path) -> None:
    target = load(folder, FLOAT32).eval()
    rows = single_rows([[0, 9, 30]], [[]], 20, 16, 1.0, 1, torch.device("cpu"))
    hidden = torch.randn(1, 32, 64)
    first = sampled(target, hidden, rows)
    assert torch.equal(first, sampled(target, hidden, rows))
    assert not torch.equal(first, sampled(target, hidden, replace(rows, seed=2)))
    assert not torch.equal(first, sampled(target, hidden, replace(rows, heat=[0.0])))


# ---- evaluation ------------------------------------------------------------------------------------------
def test_an_answer_ends_with_its_first_eos() -> None:
    tokens = torch.tensor([[0, 5, 1, 7, 1, 9], [1, 5, 6, 7, 8, 9]])
    own = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0]]).bool()
    kept = drafter_eval.until_end(own, tokens).int().tolist()
    assert kept == [[0, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0]], "an EOS of the prompt ends nothing"


def test_judging_counts_leading_agreement() -> None:
    tokens = torch.arange(20)
    own = (tokens >= 4) & (tokens < 14)
    drafts = tokens[:, None] + 1 + torch.arange(3)  # all right
    drafts[4, 1] = 99  # one accepted
    drafts[6, 0] = 99  # none
    ready = drafter_eval.Proposals(drafts, torch.ones(20, 3), torch.zeros(20, 3))
    blocks, count, steps = drafter_eval.judge(ready, tokens, own, 1.0, 5)
    assert blocks.accepted.tolist() == [1, 3, 0, 3, 3, 3, 3, 2, 1]
    assert blocks.known.tolist() == [3, 3, 3, 3, 3, 3, 3, 2, 1]
    assert (count, steps) == (9, 4)  # 4 -> 6 -> 7 -> 11 -> end
    assert set(blocks.group) == {5} and set(blocks.kind) == {1}
    assert len(blocks.samples().head) == 2 + 3 + 1 + 3 * 4 + 2 + 1


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_perfect_markov_head_is_always_accepted(tmp_path: Path, heat: float) -> None:
    """The target's text is a bigram of its noise; a drafter that is the bigram gets all of it."""
    folder = Toys(tmp_path).folder("copy")
    target, drafter = load(folder, FLOAT32).eval(), load_drafter(folder, FLOAT32).eval()
    prompts = drafter_eval.Prompts("bigram", [[0, 5, 9], [0, 70]], [[], []], 12)
    tally = drafter_eval.measure(target, drafter, prompts, heat, seed=4)
    rates = [r for r in tally.to_json()["acceptance"] if r is not None]
    assert min(rates) > 0.9 and tally.tokens_per_step > 3


# ---- the whole program -------------------------------------------------------------------------------------
def batches(rows: Rows) -> Iterator[dict[str, Tensor]]:
    """What a loader would give, always the same."""
    while True:
        yield {"tokens": rows.tokens.to(torch.int16), "classes": rows.classes, "blocks": rows.blocks}


def accepted(folder: Path, prompts: list[list[int]]) -> float:
    """Drafts that the engine accepts, of those it verified."""
    llm = LLM(folder, max_model_len=64, speculative={"num_speculative_tokens": BLOCK})
    params = [
        SamplingParams(max_tokens=24, temperature=t, seed=i, ignore_eos=True)
        for i, t in enumerate((0.0, 1.0) * 3)
    ]
    done = llm.generate(prompts, params)
    return sum(d.stats["accepted"] for d in done) / sum(d.stats["verified"] for d in done)


def test_training_makes_the_engine_accept_more(folder: Path, tmp_path: Path) -> None:
    target = load(folder, QUANTISED).eval()
    gen = torch.Generator().manual_seed(2)
    prompts = [[0, *torch.randint(3, VOCAB, (3,), generator=gen).tolist()] for _ in range(18)]
    rows = single_rows(prompts[:12], [[]] * 12, 28, 16, 1.0, 7, torch.device("cpu"))
    rewrite(target, rows, 28)
    argv = [
        "--data",
        tmp_path,
        "--out",
        tmp_path,
        "--seconds",
        1e9,
        "--rank",
        16,
        "--noise-token",
        2,
        "--every",
        5,
    ]
    argv += ["--anchors", 3, "--warmup", 5, "--no-compile", "--rate", 2, "--save-seconds", 1e9]
    opt = drafter_run.options([str(a) for a in argv])
    shape = drafter_run.data.Shape(12, 12, 32, 32, 16)
    cfg = drafter_run.draft_config(replace(V4Config.load(folder), dspark=None, mtp_stages=0), opt)
    assert cfg.dspark == DSparkConfig(BLOCK, 2, (0, 1, 2), 16, 3)
    trainer = drafter_run.DrafterTrainer(target, cfg, shape, opt)
    before = accepted(trainer.export(), prompts[12:])
    source = batches(rows)
    losses = [float(trainer.train_step(trainer.fresh(source))["loss"]) for _ in range(30)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.5, losses
    after = accepted(trainer.export(), prompts[12:])
    assert after > before + 0.05, (before, after)
    trainer.save()
    other = drafter_run.DrafterTrainer(load(folder, QUANTISED), cfg, shape, opt)
    other.resume(tmp_path / "drafter.pt")
    assert other.step == 30
    for name, value in trainer.drafter.state_dict().items():
        assert torch.equal(value, other.drafter.state_dict()[name]), name


def test_training_fits_its_time(folder: Path, tmp_path: Path) -> None:
    """Measure, plan, write, learn, save, and go on."""
    target = load(folder, QUANTISED)
    rows = single_rows([[0, 5, 9]] * 4, [[7] * 20] * 4, 0, 16, 0.0, 0, torch.device("cpu"))
    argv = ["--data", tmp_path, "--out", tmp_path, "--rank", 16, "--noise-token", 2, "--no-compile"]
    argv += ["--anchors", 2, "--every", 2, "--passes", 1, "--reuse", 2]
    for extra in (["--seconds", 1.5], ["--seconds", 2.5, "--resume"]):
        opt = drafter_run.options([str(a) for a in [*argv, *extra]])
        cfg = drafter_run.draft_config(V4Config.load(folder), opt)
        trainer = drafter_run.DrafterTrainer(target, cfg, drafter_run.data.Shape(4, 4, 32, 32, 16), opt)
        if opt.resume:
            trainer.resume(tmp_path / "drafter.pt")
            first = trainer.step
        trainer.train(batches(rows))
        assert trainer.pool and trainer.pool[0].own.any()
        assert opt.seconds <= trainer.clock.spent < opt.seconds + 2
    assert trainer.step > first
    (tmp_path / "next").mkdir()
    opt = drafter_run.options(
        [str(a) for a in [*argv, "--out", tmp_path / "next", "--begin", tmp_path / "drafter.pt"]]
    )
    again = drafter_run.DrafterTrainer(target, cfg, drafter_run.data.Shape(4, 4, 32, 32, 16), opt)
    again.begin(opt.begin)
    assert again.step == 0 and again.clock.before == 0.0, "its clock and schedule are new"
    for name, value in trainer.drafter.state_dict().items():
        assert torch.equal(value, again.drafter.state_dict()[name]), name
    said = (tmp_path / "log.txt").read_text()
    assert "plan:" in said and "resumed at step" in said


def test_plan_uses_each_written_batch_as_often_as_asked() -> None:
    plan = drafter_run.make_plan(600, 0.03, 0.06, 3, 0.5, 10)
    assert plan.batches * 3 * 0.03 + plan.steps * 0.06 == pytest.approx(600, rel=0.01)
    assert 0.5 * plan.steps / plan.batches == pytest.approx(10, rel=0.01)
    assert drafter_run.make_plan(600, 0.03, 0.06, 3, 0.0, 10).batches == 0


def test_wrong_settings_say_what_to_change(folder: Path, tmp_path: Path, capsys: Any) -> None:
    cfg = V4Config.load(folder)
    for extra, says in (
        (["--taps", "0,3"], "0..2"),
        (["--taps", "1,1"], "distinct"),
        (["--noise-token", "96"], "95"),
    ):
        opt = drafter_run.options(["--data", str(tmp_path), "--out", str(tmp_path), *extra])
        with pytest.raises(ParameterError, match=says):
            drafter_run.draft_config(cfg, opt)
    assert cli.main(["train"]) == 2
    assert cli.main(["train", "everything"]) == 2
    assert "no such program" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        cli.main(["train", "drafter", "--help"])
    assert end.value.code == 0 and "--target-seconds" in capsys.readouterr().out
