"""The sweep end to end on tiny models: arms are paired, texts equal, counts honest, results complete."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firesteel.bench import calibration, cli, ops, plots, rounds, steps
from firesteel.bench.arms import Arm, Rig, parse_arms
from firesteel.bench.geometry import RandomWeights, build_random, load
from firesteel.bench.loops import Job
from firesteel.bench.readers import RequestSet, random_prompts
from firesteel.bench.rounds import Plan, Sweep, sweep
from firesteel.bench.sweep import complaints, shortfalls, tables
from firesteel.config import EngineConfig, ParameterError, SamplingParams
from firesteel.engine.build import BUNDLED
from firesteel.eval import gsm
from firesteel.models.deepseek_v4.config import DSparkConfig
from firesteel.models.deepseek_v4.random_init import tiny_config, write_random

pytestmark = pytest.mark.cpu

SMALL = {"max_model_len": 128, "threads": 1, "num_pages": 16}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny target whose drafter is often right."""
    spec = DSparkConfig(block_size=5, noise_token_id=2, target_layer_ids=(0, 1), markov_rank=16, stages=1)
    config = tiny_config(compress_ratios=(0, 4), dspark=spec, mtp_stages=1)
    return str(write_random(tmp_path_factory.mktemp("sweep") / "model", config, 3, agreement=1.0))


@pytest.fixture(scope="module")
def requests() -> RequestSet:
    return random_prompts(5, 6, 512)


def plan(**changes: Any) -> Plan:
    base = Plan(
        concurrency=(1, 3),
        arms="none,1,3,adaptive",
        rounds=2,
        requests=4,
        max_tokens=10,
        warmups=1,
        engine=dict(SMALL),
    )
    return replace(base, **changes)


@pytest.fixture(scope="module")
def result(model: str, requests: RequestSet) -> dict[str, Any]:
    return sweep(model, requests, plan())


def test_result_is_complete_and_checked(result: dict[str, Any], requests: RequestSet) -> None:
    assert [p["concurrency"] for p in result["points"]] == [3, 1], "descending"
    assert result["requests"]["sha256"] == requests.digest and result["settings"]["rounds"] == 2
    assert not result["simulated"] and result["cost_table"]["step_ms"]
    assert complaints(result) == []
    for point in result["points"]:
        checks = point["checks"]
        assert (
            checks["identical_texts"] and checks["client_equals_server_tokens"] and checks["preemptions"] == 0
        )
        assert set(point["arms"]) == {"none", "K=1", "K=3", "adaptive"}
        tokens = {arm["tokens"] for arm in point["arms"].values()}
        assert len(tokens) == 1 and tokens.pop() > 0
        none, three = point["arms"]["none"], point["arms"]["K=3"]
        assert none["drafts_per_request_step"] == 0 < three["drafts_per_request_step"] <= 3
        assert three["steps"] < none["steps"], "accepted drafts save steps"
        assert none["tokens_per_second"] > 0 and none["ttft_ms"]["p50"] > 0 and none["tpot_ms"]["p99"] > 0
        assert point["verdict"]["best_fixed"] in point["arms"] and point["verdict"]["held_out"]["rounds"] == 1
        assert len(point["acceptance_by_position"]["judged"]) == 3
    assert result["geometric_mean"]["ratio"] > 0 and result["geometric_mean_crossed"]["lower"] is not None
    assert json.loads(json.dumps(result)), "plain values"
    assert len(tables(result)) == 2


def test_plots_and_page(result: dict[str, Any], tmp_path: Path) -> None:
    page = plots.write_report(result, tmp_path).read_text()
    names = {p.name for p in tmp_path.glob("*.svg")}
    assert names == {"pareto.svg", "budget.svg", "ratio.svg", "acceptance.svg", "cost.svg"}
    assert all(p.stat().st_size < 200_000 for p in tmp_path.iterdir())
    assert page.count("<svg") == 5 and "src=" not in page, "self-contained"
    first = (tmp_path / "pareto.svg").read_bytes()
    plots.write_report(result, tmp_path)
    assert (tmp_path / "pareto.svg").read_bytes() == first, "the same result gives the same file"


def test_jobs_are_paired_over_arms_and_differ_over_rounds(model: str, requests: RequestSet) -> None:
    work = Sweep(model, requests, plan(arms="none,1", rounds=2))
    seen = [[(tuple(j.ids), j.params.seed) for j in work.jobs(r * 4, 4)] for r in (0, 0, 1)]
    assert seen[0] == seen[1] and not set(seen[0]) & set(seen[2])
    warm = {j.params.seed for j in work.jobs(0, 4, rounds.WARM)}
    assert not warm & {seed for _, seed in seen[0]}
    # the sixth request is the first one again, with another seed
    again = work.jobs(5, 1)[0]
    assert again.ids == work.prompts[0] and again.params.seed != seen[0][0][1]


def test_rounds_fit_into_the_time_that_is_given(
    model: str, requests: RequestSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    work = Sweep(
        model, requests, plan(arms="none,1", rounds=9, seconds=100.0, concurrency=(4, 1), max_tokens=2)
    )

    def run(*_: Any, **__: Any) -> Any:
        now[0] += 4.0  # 8 s a round and 8 s of warm-up; two of three parts of the time are for 4 requests
        return real(*_, **__)

    real = work.rig.run
    monkeypatch.setattr(work.rig, "run", run)
    monkeypatch.setattr(rounds.time, "monotonic", lambda: now[0])
    counts = [len(p["arms"]["none"]["tokens_per_second_by_round"]) for p in work.run()]
    assert counts == [7, 3]  # 8 + 7 * 8 = 64 of 66.7 s; 8 + 3 * 8 of the 36 that are left
    now[0] = 0.0
    work.plan = replace(work.plan, seconds=1.0)
    assert [p["checks"]["identical_texts"] for p in work.run()] == [True, True] and now[0] == 48.0  # two each


def test_points_that_ended_are_kept(
    model: str, requests: RequestSet, result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of a sweep are not lost with its last minute."""
    kept: list[dict[str, Any]] = []

    def point(_: Sweep, concurrency: int, *__: Any) -> Any:
        if concurrency == 1:
            raise KeyboardInterrupt
        return result["points"][0]

    monkeypatch.setattr(Sweep, "point", point)
    with pytest.raises(KeyboardInterrupt):
        rounds.sweep(model, requests, plan(concurrency=(4, 1)), keep=kept.append)
    assert [one["points"] for one in kept] == [result["points"][:1]]
    assert kept[0].keys() == result.keys()


def test_different_texts_are_complained_about(result: dict[str, Any]) -> None:
    spoiled = json.loads(json.dumps(result))
    spoiled["points"][0]["checks"] = {
        "client_equals_server_tokens": False,
        "preemptions": 2,
        "identical_texts": False,
    }
    assert [
        ("different tokens" in c, "preemptions" in c, "different texts" in c) for c in complaints(spoiled)
    ] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]


def test_requirements(result: dict[str, Any]) -> None:
    assert len(shortfalls(result, 0.0, 0.0)) == 2, "one scored round has no bound, so it proves nothing"
    good = json.loads(json.dumps(result))
    for point in good["points"]:
        point["verdict"]["held_out"]["lower"] = 0.96
    good["geometric_mean"]["ratio"] = 0.97
    assert shortfalls(good, 0.95, 0.96) == []
    assert [("lower" in c, "mean" in c) for c in shortfalls(good, 0.97, 0.98)] == [(True, False)] * 2 + [
        (False, True)
    ]


def test_a_point_starts_from_nothing(model: str, requests: RequestSet) -> None:
    """Caches, calibration and counters of one point are gone at the next; weights stay."""
    rig = Rig(model, parse_arms("none,3,adaptive"), max_num_seqs=4, **SMALL)
    weights = rig.llm.engine.runner.target.weights
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True)
    jobs = [Job(list(a.token_ids), params.with_seed(i)) for i, a in enumerate(requests.asks)]
    runs = [rig.run(arm, jobs, 3) for arm in rig.arms]
    assert len({r.digest for r in runs}) == 1 and all(r.tokens == 60 == r.server_tokens for r in runs)
    assert rig.policy("adaptive").cost.measured > 0  # type: ignore[attr-defined]
    before = rig.policy("adaptive")
    rig.start()
    after = rig.policy("adaptive")
    assert after is not before and after.cost.measured == 0  # type: ignore[attr-defined]
    assert rig.pristine is not None and rig.pristine.cost.measured == 0  # type: ignore[attr-defined]
    for frontend in rig.frontends.values():
        assert frontend.engine.runner.target.weights is weights and not frontend.engine.records
    assert rig.frontends["none"].engine.runner.drafter is None, "plain decoding pays for no drafter"
    assert rig.frontends["K=3"].engine.config.gamma == 3
    rig.llm.engine.memory.check()


@pytest.mark.parametrize(("rate", "fewer"), [(0.0, False), (1.0, True)])
def test_simulated_acceptance_of_both_extremes(rate: float, fewer: bool, requests: RequestSet) -> None:
    found = sweep(
        "tiny",
        requests,
        plan(simulated={"rates": [rate]}, ignore_eos=True, concurrency=(2,), arms="none,3", warmups=0),
    )
    assert found["simulated"] and complaints(found) == []
    (point,) = found["points"]
    assert (point["arms"]["K=3"]["steps"] < 0.6 * point["arms"]["none"]["steps"]) is fewer
    assert "SIMULATED" in str(tables(found)[0].title) and any("SIMULATED" in n for n in found["notes"])


def test_plain_decoding_alone_needs_no_drafter(tmp_path: Path, requests: RequestSet) -> None:
    bare = write_random(tmp_path / "bare", tiny_config(compress_ratios=(0, 4), dspark=None), 1)
    found = sweep(str(bare), requests, plan(arms="none", concurrency=(2,)))
    assert complaints(found) == [] and "verdict" not in found["points"][0] and found["geometric_mean"] is None


def test_arms_and_plans_that_make_no_sense() -> None:
    assert parse_arms("none, 5,adaptive") == (Arm("none", 0), Arm("K=5", 5), Arm("adaptive", 5, True))
    assert parse_arms("none,adaptive", 7)[1] == Arm("adaptive", 7, True)
    for bad in ("", "none,none", "none,-1", "0", "adaptive", "none,fast"):
        with pytest.raises(ParameterError, match="arms"):
            parse_arms(bad)
    for changes in (
        {"rounds": 1},
        {"seconds": 0.0},
        {"concurrency": (0,)},
        {"clock": "sun"},
        {"simulated": {"rates": [2.0]}},
    ):
        with pytest.raises(ParameterError):
            plan(**changes)


def test_commands(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = cli.commands()
    assert {"sweep", "steps", "plots", "calibration", "exact"} <= set(known) and "cli" not in known
    assert all(known.values()), "every benchmark says what it is"
    assert cli.main([]) == 2 and "sweep" in capsys.readouterr().out
    assert cli.main(["nothing"]) == 2
    file = tmp_path / "r.json"
    argv = ["sweep", "--model", model, "--random", "4x5", "--concurrency", "2", "--arms", "none,2,adaptive"]
    argv += [
        "--rounds",
        "2",
        "--requests-per-round",
        "3",
        "--max-tokens",
        "6",
        "--warmups",
        "0",
        "--json",
        str(file),
    ]
    argv += [
        "--plots",
        str(tmp_path / "p"),
        "--clock",
        "cpu",
        "--pin",
        "none",
        "--freeze",
        str(tmp_path / "set.jsonl"),
    ]
    assert cli.main([*argv, "--set", "max_model_len=64"]) == 0
    assert json.loads(file.read_text())["settings"]["clock"] == "cpu"
    assert len((tmp_path / "set.jsonl").read_text().splitlines()) == 4
    assert (
        cli.main(["plots", str(file), "--out", str(tmp_path / "q")]) == 0
        and (tmp_path / "q/report.html").is_file()
    )
    assert (
        cli.main([*argv, "--set", "max_model_len=9"]) == 2 and "request 'random-0'" in capsys.readouterr().err
    )
    assert cli.main(["sweep", "--model", model, "--set", "x"]) == 2


def test_random_geometry_is_a_function_of_its_seed() -> None:
    config, device = tiny_config(), torch.device("cpu")
    one, same, other = (RandomWeights(config, seed, device) for seed in (0, 0, 1))
    for prefix in ("layers.0.ffn.experts.3.w1", "layers.1.attn.wq_b", "head"):
        a, b, c = (s.qtensor(prefix) for s in (one, same, other))
        assert a.format == b.format and torch.equal(a.dequant(), b.dequant())
        assert not torch.equal(a.dequant(), c.dequant())
        if a.format != "bf16":
            assert 0.5 < float(a.dequant().std()) * a.shape[1] ** 0.5 < 2.0, "activations keep their size"
    built = build_random("tiny", EngineConfig(max_model_len=64, num_pages=8))
    assert built.engine.runner.drafter is None and "random weights" in built.notes[0]
    with pytest.raises(ParameterError, match="geometry"):
        build_random("huge", EngineConfig())


def test_steps_against_floors() -> None:
    llm = load("tiny", max_num_seqs=8, max_num_batched_tokens=64, max_model_len=320, num_pages=32,
               prefix_caching=False, speculative={"num_speculative_tokens": 3})  # fmt: skip
    rates = steps.measure_rates(torch.device("cpu"), 1 << 22)
    found = steps.measure(llm, (1, 8, 512), (40, 300), (1, 2), rates, repeats=1)
    assert [(v["context"], v["rows"]) for v in found["verify"]] == [(40, 1), (40, 8), (300, 1), (300, 8)]
    assert [(d["context"], d["requests"]) for d in found["draft"]] == [(40, 1), (40, 2), (300, 1), (300, 2)]
    assert [(s["rows"], s["requests"]) for s in found["shapes"][:2]] == [(8, 2), (8, 8)]
    for line in (*found["verify"], *found["shapes"]):
        assert line["ms"] > 0 and line["floor_ms"] > 0 and line["experts"] == "counted in this step"
    assert found["verify"][0]["distinct_experts"] == 2.0, "one row hits its top-k"
    assert all("draft context" not in line["by_op_ms"] for line in found["verify"]), (
        "on a CPU they wait for a draft"
    )
    assert all(line["by_op_ms"]["draft context"] > 0 for line in found["draft"])
    llm.engine.memory.check()
    # the engine still serves afterwards
    (done,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True))
    assert len(done.token_ids) == 5
    with pytest.raises(ParameterError, match="max_model_len"):
        steps.measure(llm, (1,), (1000,), (1,), rates)


def test_ops_explain_the_step() -> None:
    llm = load("tiny", max_num_seqs=8, max_num_batched_tokens=64, max_model_len=320, num_pages=32,
               prefix_caching=False, speculative={"num_speculative_tokens": 3})  # fmt: skip
    found = ops.measure(llm, (8,), 40, (2,), steps.measure_rates(torch.device("cpu"), 1 << 22), repeats=2)
    verify, draft = found
    labels = {line["op"]: line for line in verify["ops"]}
    layers = len(llm.engine.runner.target.weights.layers)
    assert labels["moe"]["calls"] == labels["wq_a"]["calls"] == labels["attention"]["calls"] == layers
    assert labels["wkv"]["calls"] == layers and "context_rows" not in labels, "on a CPU they wait for a draft"
    costs = (
        "moe",
        "wq_b",
        "output",
        "head_sample",
        "compress",
        "indexer.wq_b",
        "hyper_step",
        "route",
    )
    for op in costs:
        assert labels[op]["ms"] > 0 and labels[op]["floor_ms"] > 0, op
    assert "other linear" not in labels, "every product has a name"
    drafting = {line["op"]: line["calls"] for line in draft["ops"]}
    assert drafting["draft_stage"] == 3 and drafting["markov_walk"] == drafting["context_rows"] == 1
    assert "attention" not in drafting and "moe" not in drafting, "the verify part is not counted again"
    llm.engine.memory.check()


def test_calibration_quality(model: str) -> None:
    """A good fit passes where a bad one fails, on the same blocks."""
    llm = load(model, speculative={"num_speculative_tokens": 3}, max_model_len=128, max_num_seqs=8)
    asked = RequestSet(
        "two domains",
        tuple(
            replace(a, domain=("code", "prose")[i % 2])
            for i, a in enumerate(random_prompts(8, 4, 512, 5).asks)
        ),
    )
    cells = calibration.gather(llm, asked, (0.0, 1.0), 40)
    assert [(c.domain, c.temperature) for c in cells] == [
        ("code", 0.0),
        ("code", 1.0),
        ("prose", 0.0),
        ("prose", 1.0),
    ]
    whole = calibration.Blocks.joined([c.blocks for c in cells])
    assert len(set(whole.group.tolist())) == 16, "requests stay apart over cells"
    fitted = calibration.calibrate(whole)
    said = calibration.judge(cells, fitted, times=10)
    assert said["blocks"] == len(whole)
    lines = said["quality"]["sampled"]["logistic"]["by_depth"]
    assert [line["depth"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert sum(b["count"] for b in line["bins"]) == line["count"]
        assert line["interval"][0] <= line["interval"][1]
    flipped = replace(fitted, coefficients=replace(fitted.coefficients, depth=-fitted.coefficients.depth - 3))
    worse = calibration.judge(cells, flipped, times=2)
    ece = [q["domains"]["code"]["survival"]["logistic"]["ece"] for q in (said, worse)]
    assert ece[0] < ece[1]
    assert set(said["domains"]["prose"]["auc"]) == {"drafts", "combined", "head", "margin"}
    assert len(calibration.tables(said)) == 3


def test_noise_is_the_ece_of_perfect_predictions() -> None:
    draw = np.random.default_rng(3)
    for count in (500, 20_000):
        predicted = draw.random(count)
        truth = (draw.random(count) < predicted).astype(np.float64)
        found = calibration.ece(predicted, truth)
        assert 0.4 < found / calibration.noise(predicted) < 2.0
    assert calibration.noise(predicted) < 0.01


def test_eval_names_the_problems_whose_texts_differ() -> None:
    texts = [[(1, 2), (3,)], [(1, 2), (4,)], [(1, 2), (3,)]]
    assert gsm.differing(texts) == [1] and gsm.differing(texts[:1]) == []


def test_eval_in_four_arms(tmp_path: Path) -> None:
    """Greedy texts of all arms are equal, and a text that is not would be named."""
    spec = DSparkConfig(block_size=5, noise_token_id=2, target_layer_ids=(0, 1), markov_rank=16, stages=1)
    config = tiny_config(vocab_size=3072, compress_ratios=(0, 4), dspark=spec, mtp_stages=1)
    folder = write_random(
        tmp_path / "m",
        config,
        3,
        agreement=1.0,
        extra_files=[BUNDLED / "tokenizer.json"],
        one_file_per_layer=False,
    )
    problems = [gsm.Problem(f"What is {i} plus {i}?", f"{2 * i}\n#### {2 * i}") for i in range(3)]
    settings = {"max_model_len": 256, "max_num_seqs": 2, "threads": 1}
    seen: list[str] = []

    def progress(name: str, done: int) -> None:
        seen.append(name)

    found = gsm.run_arms(
        str(folder), problems[1:], list(gsm.ARMS), [False], settings, progress, problems[:1], 24
    )
    assert found["identical_texts"] == {"chat": {"problems": 2, "identical": 2, "differing": []}}
    scores = {s["arm"]: s for s in found["scores"]}
    assert set(scores) == {"none", "fixed 5", "fixed 7", "adaptive"}
    assert len({s["tokens"] for s in scores.values()}) == 1 and set(seen) == {f"{a}, chat" for a in gsm.ARMS}
    assert scores["fixed 5"]["steps"] < scores["none"]["steps"], (
        "the drafter is right often enough to test anything"
    )
    assert found["settings"]["shots"] == 1 and found["arms"]["fixed 7"] == {"num_speculative_tokens": 7}


def test_eval_shots() -> None:
    problems = [gsm.Problem(f"q{i}", f"#### {i}") for i in range(5)]
    shots, left = gsm.split_shots(problems, 2)
    assert shots == problems[:2] and left == problems[2:], "a shown example is not asked"
    assert gsm.split_shots(problems, 1, problems[4:]) == (problems[4:], problems)
    with pytest.raises(ParameterError, match="shots=5"):
        gsm.split_shots(problems, 5)
    said: list[Any] = []

    class Fake:
        def prompt_of(self, messages: list[dict[str, str]], *_: Any) -> str:
            said.extend((m["role"], m["content"]) for m in messages)
            return ""

    gsm.prompt_of(Fake(), problems[3], False, shots)  # type: ignore[arg-type]
    assert said == [
        ("user", "q0"),
        ("assistant", "#### 0"),
        ("user", "q1"),
        ("assistant", "#### 1"),
        ("user", "q3"),
    ]


def test_arms_in_turns(model: str, requests: RequestSet) -> None:
    """Same tokens, checks and results as with whole rounds; nothing is shared but the weights."""
    work = Sweep(model, requests, plan(slice=0.002, concurrency=(3,)))
    (point,) = work.run()
    checks = point["checks"]
    assert checks["identical_texts"] and checks["client_equals_server_tokens"]
    whole = sweep(model, requests, plan(concurrency=(3,)))["points"][0]
    for name, arm in point["arms"].items():
        assert arm["tokens"] == whole["arms"][name]["tokens"]
        assert arm["steps"] == whole["arms"][name]["steps"] or name == "adaptive"
    runners = [f.engine.runner for f in work.rig.frontends.values()]
    assert len({id(r.memory) for r in runners}) == len(runners)
    assert len({id(r.slots.state) for r in runners}) == len(runners)
    assert len({id(r.target.weights) for r in runners}) == 1
    assert work.rig.frontends["none"].engine.runner.drafter is None
    assert len({id(f.engine.cache) for f in work.rig.frontends.values()}) == len(runners)
    for runner in runners:
        runner.memory.check()


def test_arms_in_turns_know_prompts(model: str, requests: RequestSet) -> None:
    """With ``keep_prefixes`` each cache has the prompts before the first round."""
    work = Sweep(model, requests, plan(slice=0.002, concurrency=(2,), keep_prefixes=True, warmups=0))
    (point,) = work.run()
    assert point["checks"]["identical_texts"]
    hits = {name: vars(f.engine.cache.stats) for name, f in work.rig.frontends.items() if f.engine.cache}
    assert len(hits) == 4 and len({str(h) for h in hits.values()}) == 1, "all caches saw the same"


def test_a_slice_must_be_a_time() -> None:
    with pytest.raises(ParameterError, match="slice"):
        plan(slice=0.0)


def test_arms_in_turns_are_refused_on_a_gpu_before_anything_is_loaded() -> None:
    with pytest.raises(ParameterError, match="leave it out on a GPU"):
        Rig("no such folder", parse_arms("none,1"), None, True, device="cuda")
