"""``firesteel simulate`` and ``firesteel profile``: traces, arrivals, predictions, errors, files."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from firesteel.bench import profile, simulate
from firesteel.bench.simulate import Request, Setup, load_table, predict, read_trace, synthetic
from firesteel.bench.virtual import SCENES, tables
from firesteel.cli import main
from firesteel.config import ParameterError
from firesteel.core import StepPlan
from firesteel.engine.profile import Profiler
from firesteel.models.deepseek_v4.config import DSparkConfig
from firesteel.models.deepseek_v4.random_init import tiny_config, write_random

pytestmark = pytest.mark.cpu
K = 5


def setup(table: str = "staircase", **changes: object) -> Setup:
    values = {"gamma": K, "slots": 8, "rows": 96, "length": 160} | changes
    return Setup(tables(K)[table], SCENES["measured"], **values)  # type: ignore[arg-type]


def test_plain_decoding_by_hand() -> None:
    """One user, prompts of 16 tokens in one step, then a step of one row a token."""
    (got,) = predict(setup(slots=1), ["none"], [1], lambda c: [Request(16, 11)] * 3)
    per_request = 3.9 + 10 * 1.5  # ms: 16 rows, then 10 steps of 1 row
    # the host plans a step ahead, so between requests one step passes before the next prompt is admitted
    assert got.tokens == 33 and got.steps == 33
    assert got.seconds == pytest.approx(3 * per_request / 1e3, rel=1e-6)
    assert got.per_user == pytest.approx(1e3 / 1.5, rel=1e-6)
    assert got.first_token_s == pytest.approx(3.9e-3, rel=1e-6)


def test_host_time_is_added_to_every_step() -> None:
    fast, slow = (
        predict(setup(slots=1), ["none"], [1], lambda c: [Request(16, 11)], host_ms=h)[0] for h in (0.0, 1.0)
    )
    assert slow.seconds - fast.seconds == pytest.approx(11e-3, rel=1e-6)


def test_arms_rank_as_they_should() -> None:
    got = predict(setup(), ["none", "K=5", "adaptive"], [8], lambda c: synthetic(24, 16, 64))
    none, fixed, adaptive = (o.tokens_per_second for o in got)
    assert adaptive >= 0.98 * max(none, fixed) and fixed > none
    assert len({o.tokens for o in got}) == 1


def test_arrivals_set_the_pace() -> None:
    """One request every 100 ms, each done in less: mostly idle, so nobody waits."""
    trace = [Request(8, 10, arrival=0.1 * i) for i in range(5)]
    (got,) = predict(setup(), ["none"], [8], lambda c: trace)
    assert 0.4 < got.seconds < 0.45 and got.first_token_s < 0.01
    (burst,) = predict(setup(), ["none"], [8], lambda c: [Request(8, 10, arrival=0.0)] * 5)
    assert burst.seconds < 0.06


def test_traces_are_checked_by_line(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"prompt": 12, "output": 5}\n\n{"prompt": 3, "output": 7}\n')
    assert read_trace(file) == [Request(12, 5), Request(3, 7)]
    for bad, said in (
        ('{"prompt": 1}', "line 1.*'prompt' and 'output'"),
        ("nonsense", "line 1"),
        ('{"prompt": 0, "output": 1}', "line 1.*at least 1"),
        ("", "no requests"),
        ('{"prompt": 1, "output": 1, "arrival": 0}\n{"prompt": 1, "output": 1}', "all or none"),
    ):
        file.write_text(bad)
        with pytest.raises(ParameterError, match=said):
            read_trace(file)


def test_tables_by_name_or_file(tmp_path: Path) -> None:
    assert load_table("flat", K) == tables(K)["flat"]
    file = tmp_path / "cost.json"
    tables(K)["linear"].save(file)
    assert load_table(str(file), K) == tables(K)["linear"]
    with pytest.raises(ParameterError, match="neither a readable cost table"):
        load_table(str(tmp_path / "none.json"), K)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    argv = [
        "simulate",
        "--concurrency",
        "1,4",
        "--arms",
        "none,adaptive",
        "--output",
        "24",
        "--json",
        str(out),
    ]
    assert main(argv) == 0
    result = json.loads(out.read_text())
    assert (
        result["simulated"] is True and len(result["points"]) == 4 and "SIMULATED" in capsys.readouterr().out
    )
    for bad in (
        ["--arms", "K=9"],
        ["--concurrency", "0"],
        ["--acceptance", '{"rate": 1}'],
        ["--table", "no"],
    ):
        assert main(["simulate", *bad]) == 2
        assert "firesteel: " in capsys.readouterr().err


def one_layer(folder: Path) -> Path:
    """A checkpoint of one layer with a drafter of one stage."""
    config = tiny_config(
        num_hidden_layers=1,
        compress_ratios=(0,),
        num_hash_layers=0,
        dspark=DSparkConfig(block_size=2, noise_token_id=259, target_layer_ids=(0,), markov_rank=8, stages=1),
        mtp_stages=1,
    )
    return write_random(folder / "model", config, 3)


def test_profile_writes_a_table_that_its_engine_takes(tmp_path: Path) -> None:
    model, out = one_layer(tmp_path), tmp_path / "new" / "cost.json"
    common = ["--max-num-seqs", "2", "--max-model-len", "96", "--k", "2"]
    assert (
        profile.main(["--model", str(model), *common, "--max-num-batched-tokens", "8", "--out", str(out)])
        == 0
    )
    from firesteel import LLM

    spec = {"num_speculative_tokens": 2, "enable_adaptive_verification": True, "cost_table": str(out)}
    llm = LLM(model, max_num_seqs=2, max_model_len=96, speculative=spec)
    assert any("prices from" in n for n in llm.notes)
    assert load_table(str(out), 2).rows[-1] == 6
    with pytest.raises(ParameterError, match=r"\.svg"):
        profile.main(["--model", str(model), "--plot", "x.png"])
    for nowhere in (
        tmp_path,
        tmp_path / "model" / "config.json" / "cost.json",
    ):  # known before anything is measured
        with pytest.raises(ParameterError, match=r"choose another file|name a file"):
            profile.main(["--model", str(tmp_path / "none"), "--out", str(nowhere)])
    assert simulate.parser().prog == "firesteel simulate"


def test_a_pass_of_the_profile_prices_what_a_profile_prices(tmp_path: Path) -> None:
    """Its table has the same places, each with its own price; a pass that is broken off leaves no slot taken."""
    from firesteel import LLM

    llm = LLM(
        one_layer(tmp_path), max_num_seqs=3, max_model_len=200, speculative={"num_speculative_tokens": 2}
    )
    runner, memory = llm.engine.runner, llm.engine.memory
    free = memory.free_slots
    profiler = Profiler(runner, 2, 12, 200)
    whole = profiler.run()

    def price(plan: StepPlan, context: int) -> float:
        drafting = 7.0 * len(plan.drafting) * (plan.draft_width + 1) if plan.draft_width else 0.0
        return plan.rows * (1 + context / 1000) + drafting

    profiler._once = price  # type: ignore[method-assign]
    planned: list[int] = []
    seen = dict(profiler.pass_over(random.Random(0), lambda: planned.append(1)))
    assert len(planned) == len(seen), "before each step that counts"
    again = dict(profiler.pass_over(random.Random(1)))
    assert seen == again and list(seen) != list(again)
    table = profiler.table_of(seen)
    assert (table.rows, table.requests, table.context) == (whole.rows, whole.requests, whole.context)
    assert set(table.draft) == set(whole.draft) == {1, 2} and table.fingerprint == whole.fingerprint
    assert table.step_ms == pytest.approx([r * 1.064 for r in table.rows])
    for width, prices in table.draft.items():
        assert prices == pytest.approx([7.0 * n * (width + 1) for n in table.requests])
    assert table.context_ms == pytest.approx(1.0)
    rest = profiler.pass_over(random.Random(2))
    next(rest)
    assert memory.free_slots < free
    rest.close()
    assert memory.free_slots == free


def test_check_against_the_real_engine(tmp_path: Path) -> None:
    """Without a model behind it the engine takes exactly the steps that it takes with one."""
    model, out = one_layer(tmp_path), tmp_path / "check.json"
    argv = ["simulate", "--check", "--model", str(model), "--k", "2", "--arms", "none,K=2"]
    argv += ["--concurrency", "2", "--prompt", "8", "--output", "12", "--seconds", "0.1", "--json", str(out)]
    assert main(argv) == 0
    result = json.loads(out.read_text())
    assert [p["arm"] for p in result["points"]] == ["none", "K=2"] and result["passes_of_the_profile"] >= 1
    for point in result["points"]:
        assert point["steps_predicted"] == point["steps_measured"] > 0
        assert point["predicted"] > 0 and point["measured"] > 0 and point["runs"] >= 1
        assert point["host_ms_per_step"] > 0
        assert point["ratio"] == pytest.approx(point["predicted"] / point["measured"], rel=0.01)


def test_check_skips_the_time_between_arrivals(tmp_path: Path) -> None:
    """Requests an hour apart, and nobody waits; the engine is idle for most of either time."""
    trace, out = tmp_path / "trace.jsonl", tmp_path / "check.json"
    trace.write_text("".join(f'{{"prompt": 8, "output": 6, "arrival": {3600 * i}}}\n' for i in range(3)))
    argv = ["simulate", "--check", "--model", str(one_layer(tmp_path)), "--k", "2", "--arms", "none"]
    argv += ["--concurrency", "2", "--trace", str(trace), "--seconds", "0.1", "--json", str(out)]
    assert main(argv) == 0
    (point,) = json.loads(out.read_text())["points"]
    assert point["ratio"] == pytest.approx(1.0, abs=1e-3) and point["measured"] == pytest.approx(
        18 / 7200, abs=0.06
    )


def test_check_names_an_unknown_arm_before_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arms, said in (("none,fast", "'fast' is none of"), ("K=9", "raise --k")):
        assert main(["simulate", "--check", "--model", str(tmp_path / "none"), "--arms", arms]) == 2
        assert said in capsys.readouterr().err
    assert main(["simulate", "--check", "--seconds", "0"]) == 2
    assert "--seconds" in capsys.readouterr().err
