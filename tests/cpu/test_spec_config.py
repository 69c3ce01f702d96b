"""The speculative config: every wrong value is an error that says what would be right; and what a request sets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from firesteel import cli
from firesteel.bench import acceptance
from firesteel.bench.exact import fastest
from firesteel.bench.toys import Toys, toy_config
from firesteel.checkpoint.spec import CheckpointError
from firesteel.config import ParameterError, SamplingParams, SpeculativeConfig
from firesteel.engine.llm import LLM
from firesteel.models.deepseek_v4.config import ConfigError
from firesteel.models.deepseek_v4.random_init import write_random

PROMPTS = [[5, 9, 33], [7] * 18, [*range(20, 61)], [3]]


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    return Toys(tmp_path_factory.mktemp("toys"))


@pytest.fixture(scope="module")
def good(toys: Toys) -> Path:
    return toys.folder("good")


def serve(path: Path, speculative: Any, **settings: Any) -> LLM:
    common: dict[str, Any] = {"numerics": "float32", "backend": fastest(), "max_model_len": 96}
    return LLM(path, speculative=speculative, **(common | settings))


# ---- wrong values --------------------------------------------------------------------------------
WRONG: list[tuple[Any, tuple[str, ...]]] = [
    ({"method": "mtp"}, ("'mtp'", "'dspark'")),
    ({"method": "eagle"}, ("'eagle'", "'dspark'")),
    ({"method": None}, ("None", "'dspark'")),
    ({"num_speculative_tokens": 0}, ("num_speculative_tokens=0", "from 1")),
    ({"num_speculative_tokens": -3}, ("num_speculative_tokens=-3", "from 1")),
    ({"num_speculative_tokens": 2.0}, ("num_speculative_tokens=2.0", "an integer")),
    ({"num_speculative_tokens": "5"}, ("num_speculative_tokens='5'", "an integer")),
    ({"num_speculative_tokens": True}, ("num_speculative_tokens=True", "an integer")),
    ({"num_speculative_tokens": None}, ("num_speculative_tokens=None", "an integer")),
    ({"num_speculative_tokens": 65}, ("num_speculative_tokens=65", "64")),
    ({"acceptance": "typical"}, ("'typical'", "'coupled'", "'rejection'")),
    ({"proposal": "argmax"}, ("'argmax'", "'dense'", "'one_hot'")),
    ({"enable_adaptive_verification": 1}, ("enable_adaptive_verification=1", "true or false")),
    ({"num_tokens": 5}, ("'num_tokens'", "num_speculative_tokens", "method", "acceptance")),
    ({"model": "draft"}, ("'model'", "known:")),
    ([5], ("list", "object")),
    (5, ("int", "object")),
]


@pytest.mark.parametrize(("value", "words"), WRONG, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_wrong_values(value: Any, words: tuple[str, ...], good: Path) -> None:
    """The same message from Python and as JSON, before anything is loaded."""
    for form in (value, json.dumps(value)):
        with pytest.raises(ParameterError) as err:
            SpeculativeConfig.of(form)
        for word in words:
            assert word in str(err.value)
    with pytest.raises(ParameterError):
        serve(good, value)


@pytest.mark.parametrize("text", ("", "{", "dspark", "{'method': 'dspark'}", "method=dspark"))
def test_not_json(text: str) -> None:
    with pytest.raises(ParameterError) as err:
        SpeculativeConfig.of(text)
    assert "not JSON" in str(err.value) and '{"method":"dspark","num_speculative_tokens":5}' in str(err.value)


def test_right_values() -> None:
    config = SpeculativeConfig.of('{"method":"dspark","num_speculative_tokens":7}')
    assert config == SpeculativeConfig(num_speculative_tokens=7)
    assert SpeculativeConfig.of(None) is None and SpeculativeConfig.of(config) is config
    assert SpeculativeConfig.of({}) == SpeculativeConfig()


def test_every_field_is_documented() -> None:
    text = SpeculativeConfig.__doc__ or ""
    for name in SpeculativeConfig.__dataclass_fields__:
        assert f"{name}:" in text


# ---- the command line ----------------------------------------------------------------------------
def command(model: Path, config: str) -> list[str]:
    prompt = ["--prompt", "x", "--max-tokens", "2", "--max-model-len", "64"]
    return ["generate", "--model", str(model), *prompt, "--speculative-config", config]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"method":"mtp"}', ("'mtp'", "'dspark'")),
        ('{"num_speculative_tokens":0}', ("num_speculative_tokens=0",)),
        ('{"num_speculative_tokens":64}', ("num_speculative_tokens=64", "max_model_len=64")),
        ('{"draft":5}', ("'draft'", "known:")),
        ("{", ("not JSON",)),
        ("[]", ("object",)),
    ],
)
def test_command_line(
    config: str, words: tuple[str, ...], good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr, exit code 2, no traceback."""
    assert cli.main(command(good, config)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("firesteel: ") and "Traceback" not in "".join(lines)
    for word in words:
        assert word in lines[-1]


# ---- checkpoints ---------------------------------------------------------------------------------
def test_no_drafter(tmp_path: Path) -> None:
    path = write_random(tmp_path / "bare", toy_config(), 0, drafter=False)
    with pytest.raises(ParameterError) as err:
        serve(path, {})
    assert "no DSpark drafter" in str(err.value) and "leave the speculative config out" in str(err.value)
    assert serve(path, None).generate([[5]], SamplingParams(max_tokens=2, seed=1))[0].token_ids


def test_plain_mtp_is_refused(tmp_path: Path) -> None:
    """One ``mtp.0`` stage of the preview, without dspark_* fields."""
    import torch

    from firesteel.models.deepseek_v4.layout import write_official
    from firesteel.models.deepseek_v4.random_init import random_tensors

    config = toy_config(dspark=None, mtp_stages=1)
    wide = config.hidden_size
    extra = {f"mtp.0.{n}.weight": torch.ones(wide).bfloat16() for n in ("enorm", "hnorm", "norm")}
    extra |= {f"mtp.0.{n}.weight": torch.ones(wide, wide).bfloat16() for n in ("e_proj", "h_proj")}
    path = write_official(tmp_path / "mtp", config, [*random_tensors(config, 0), *extra.items()])
    with pytest.raises(ParameterError) as err:
        serve(path, {})
    assert "no DSpark drafter" in str(err.value)
    assert serve(path, None).generate([[5]], SamplingParams(max_tokens=2, seed=1))[0].token_ids


def test_announced_but_absent_stages(tmp_path: Path) -> None:
    """dspark_* fields without any mtp.* tensor."""
    path = write_random(tmp_path / "bare", toy_config(), 0, drafter=False)
    (path / "config.json").write_text(json.dumps(toy_config().to_dict()))
    with pytest.raises((CheckpointError, ParameterError)) as err:
        serve(path, {})
    assert "mtp" in str(err.value)


def edited(path: Path, tmp_path: Path, **changes: Any) -> Path:
    """The same checkpoint under a config.json with other fields."""
    target = tmp_path / "edited"
    target.mkdir()
    for file in path.iterdir():
        if file.name != "config.json":
            (target / file.name).symlink_to(file)
    raw = json.loads((path / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(raw))
    return target


@pytest.mark.parametrize(
    "change",
    [
        {"sample_from_anchor": False},
        {"draft_vocab_size": 80},
        {"dspark_block_size": 0},
        {"dspark_noise_token_id": 160},
        {"dspark_target_layer_ids": [1, 7]},
        {"dspark_target_layer_ids": [1, 1]},
        {"dspark_markov_rank": None},
    ],
    ids=str,
)
def test_other_conventions_are_refused_by_name(change: dict[str, Any], good: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as err:
        serve(edited(good, tmp_path, **change), {})
    assert next(iter(change)) in str(err.value)


@pytest.mark.parametrize("field", ("dspark_block_size", "dspark_markov_rank", "dspark_target_layer_ids"))
def test_missing_fields_are_named(field: str, good: Path, tmp_path: Path) -> None:
    path = edited(good, tmp_path)
    raw = json.loads((path / "config.json").read_text())
    del raw[field]
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError) as err:
        serve(path, {})
    assert field in str(err.value)


def test_confidence_head_absent(tmp_path: Path) -> None:
    """It works, says so, and names the tensor; asking for the head by name is an error."""
    path = write_random(tmp_path / "headless", toy_config(), 1, confidence_head=False, agreement=0.9)
    llm = serve(path, {"num_speculative_tokens": 3})
    assert any("no confidence head" in n and "mtp.1.confidence_head.proj.weight" in n for n in llm.notes)
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    quick, plain = (e.generate(PROMPTS, params) for e in (llm, serve(path, None)))
    assert [a.token_ids for a in quick] == [a.token_ids for a in plain]
    assert sum(a.stats["accepted"] for a in quick) > 0
    with pytest.raises(ParameterError) as err:
        serve(path, {"confidence": "head"})
    assert "confidence_head" in str(err.value) and "'auto'" in str(err.value)


def test_config_switches_the_head_off(good: Path, tmp_path: Path) -> None:
    llm = serve(edited(good, tmp_path, enable_confidence_head=False), {"num_speculative_tokens": 2})
    assert any("no confidence head" in n for n in llm.notes)


def test_k_against_block_and_model_length(good: Path) -> None:
    """Any K from 1; above the trained block it warns; the model length bounds it."""
    for k in (1, 4, 5):
        assert not [n for n in serve(good, {"num_speculative_tokens": k}).notes if "warning" in n]
    warned = [n for n in serve(good, {"num_speculative_tokens": 6}).notes if n.startswith("warning")]
    assert len(warned) == 1 and "num_speculative_tokens=6" in warned[0] and "block of 5" in warned[0]
    serve(good, {"num_speculative_tokens": 15}, max_model_len=16)
    for k in (16, 17):
        with pytest.raises(ParameterError) as err:
            serve(good, {"num_speculative_tokens": k}, max_model_len=16)
        assert f"num_speculative_tokens={k}" in str(err.value) and "max_model_len=16" in str(err.value)


def test_errors_come_before_the_weights(good: Path, tmp_path: Path) -> None:
    """A wrong K, or a checkpoint without drafter, is found before a layer of the target is read."""
    bare = write_random(tmp_path / "bare", toy_config(), 0, drafter=False)
    for path, k in ((good, 64), (bare, 3)):
        seen: list[str] = []
        with pytest.raises(ParameterError):
            LLM(path, progress=seen.append, max_model_len=64, speculative={"num_speculative_tokens": k})
        assert "layers.0" not in seen


# ---- per request ---------------------------------------------------------------------------------
def answers(llm: LLM, **params: Any) -> list[Any]:
    values: dict[str, Any] = {"max_tokens": 24, "temperature": 0.6, "seed": 3, "ignore_eos": True}
    return llm.generate(PROMPTS, SamplingParams(**(values | params)))


@pytest.fixture(scope="module")
def quick(good: Path) -> LLM:
    return serve(good, {"num_speculative_tokens": 4})


def consistent(stats: dict[str, Any]) -> None:
    """accepted <= verified <= drafted in all, by depth, and deeper never more than shallower."""
    verified, accepted = stats["verified_at"], stats["accepted_at"]
    assert stats["accepted"] == sum(accepted) <= stats["verified"] == sum(verified) <= stats["drafted"]
    assert len(accepted) <= len(verified)
    assert all(a <= v for a, v in zip(accepted, verified, strict=False))
    for line in (verified, accepted):
        assert line == sorted(line, reverse=True)
    for depth in range(1, len(accepted)):  # a draft is accepted only behind an accepted one
        assert accepted[depth] <= min(accepted[depth - 1], verified[depth])


def test_statistics(quick: LLM, good: Path) -> None:
    plain = answers(serve(good, None))
    for a, b in zip(plain, answers(quick), strict=True):
        assert a.token_ids == b.token_ids
        consistent(b.stats)
        assert len(b.token_ids) == b.stats["steps"] + b.stats["accepted"]  # every step adds one of its own
        assert b.stats["tokens_per_step"] == pytest.approx(len(b.token_ids) / b.stats["steps"])
        assert b.stats["accepted_at"][0] > 0
        assert (a.stats["drafted"], a.stats["verified"], a.stats["accepted"]) == (0, 0, 0)
        assert a.stats["steps"] == len(a.token_ids)


def test_statistics_of_steps_and_requests_agree(good: Path) -> None:
    llm = serve(good, {"num_speculative_tokens": 4})
    done = answers(llm)
    for name in ("verified", "accepted"):
        assert sum(getattr(r, name) for r in llm.engine.records) == sum(a.stats[name] for a in done)
    assert sum(r.emitted for r in llm.engine.records) == sum(len(a.token_ids) for a in done)


@pytest.mark.parametrize("cap", (0, 1, 2, 3, 4, 9))
def test_cap_of_a_request(cap: int, quick: LLM, good: Path) -> None:
    for a, b in zip(answers(quick), answers(quick, max_draft_tokens=cap), strict=True):
        assert a.token_ids == b.token_ids
        consistent(b.stats)
        assert len(b.stats["verified_at"]) == min(cap, 4)


def test_speculation_off_for_a_request(quick: LLM) -> None:
    for a, b in zip(answers(quick), answers(quick, speculative=False), strict=True):
        assert a.token_ids == b.token_ids
        assert (b.stats["drafted"], b.stats["verified"], b.stats["accepted"]) == (0, 0, 0)
        assert b.stats["steps"] == len(b.token_ids)


def test_mixed_requests_in_one_batch(quick: LLM) -> None:
    """Each keeps its own setting beside the others."""
    kinds: list[dict[str, Any]] = [
        {},
        {"speculative": False},
        {"max_draft_tokens": 1},
        {"max_draft_tokens": 3},
    ]
    params = [SamplingParams(max_tokens=24, temperature=0.6, seed=3, ignore_eos=True, **k) for k in kinds]
    done = quick.generate(PROMPTS, params)
    assert [len(a.stats["verified_at"]) for a in done] == [4, 0, 1, 3]
    assert [a.token_ids for a in done] == [a.token_ids for a in answers(quick)]
    for a in done:
        consistent(a.stats)


def test_statistics_of_a_stopped_request(quick: LLM) -> None:
    """Cut inside a block: accepted drafts behind the cut do not count, nor do they become tokens."""
    whole = answers(quick)[0]
    for i in range(1, 12):
        stop = whole.token_ids[i]
        done = quick.generate(
            [PROMPTS[0]],
            SamplingParams(max_tokens=24, temperature=0.6, seed=3, ignore_eos=True, stop_token_ids=(stop,)),
        )[0]
        consistent(done.stats)
        assert 0 <= done.stats["steps"] + done.stats["accepted"] - len(done.token_ids) <= 1


@pytest.mark.parametrize("acceptance", ("coupled", "rejection"))
def test_statistics_under_preemption(good: Path, acceptance: str) -> None:
    """Copied out, recomputed or left alone: no draft is counted twice."""
    make: Callable[[float], LLM] = lambda gib: serve(  # noqa: E731
        good,
        {"num_speculative_tokens": 4, "acceptance": acceptance},
        max_model_len=320,
        num_pages=3,
        prefix_caching=False,
        swap_gib=gib,
    )
    prompts = [[3 + (i * j) % 150 for j in range(240 + i)] for i in range(3)]
    params = SamplingParams(max_tokens=24, temperature=0.6, seed=2, ignore_eos=True)
    for gib in (4.0, 0.0):
        llm = make(gib)
        done = llm.generate(prompts, params)
        assert llm.engine.stats()["preemptions"] > 0
        for a in done:
            consistent(a.stats)
            assert len(a.token_ids) == a.stats["steps"] + a.stats["accepted"]


# ---- the acceptance table --------------------------------------------------------------------------
def test_tally_by_hand() -> None:
    """Three drafts: all accepted, none accepted, and an end token in the second of two accepted ones."""
    tally = acceptance.Tally()
    tally.take(tokens=4, verified=3, accepted=3)
    tally.take(tokens=1, verified=3, accepted=0)
    tally.take(tokens=2, verified=3, accepted=2)
    assert (tally.reached, tally.accepted) == ([3, 2, 1], [2, 2, 1])
    assert tally.tokens_per_step == pytest.approx(7 / 3)
    assert tally.conditional == pytest.approx([2 / 3, 1.0, 1.0])


def test_acceptance_program(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every domain, temperature and rule, as a table and as JSON."""
    file = tmp_path / "acceptance.json"
    options = ["--k", "2", "--prompts", "1", "--max-tokens", "6", "--json", str(file)]
    assert acceptance.main(["--model", str(good), *options]) == 0
    result = json.loads(file.read_text())
    cells = result["cells"]
    assert len(cells) == 3 * 3 * 3 and {"commit", "date", "cpu"} <= set(result["environment"])
    assert all(1.0 <= c["tokens_per_step"] <= 3.0 and len(c["conditional"]) <= 2 for c in cells)
    shown = capsys.readouterr().out
    for word in ("arithmetic, T = 0", "code, T = 0.6", "prose, T = 1", *acceptance.RULES):
        assert word in shown


def test_acceptance_program_wrong_use(toys: Toys, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bare = write_random(tmp_path / "bare", toy_config(), 0, drafter=False)
    for options in (["--k", "x"], ["--k", "0"], ["--rules", "typical"], ["--model", str(bare)]):
        assert acceptance.main([*options, "--prompts", "1", "--max-tokens", "2"]) == 2
        assert capsys.readouterr().err.strip().splitlines()[-1].startswith("acceptance: ")
