"""The flags of other servers: taken, reported as without effect, or refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from firesteel.cli import _parser, main
from firesteel.config import EngineConfig, ParameterError
from firesteel.serve.options import _ALWAYS, _SWITCHES, NO_EFFECT, Launch, resolve


def launch(*argv: str) -> Launch:
    args: argparse.Namespace = _parser().parse_args(["serve", *argv])
    return resolve(args)


def test_the_launch_command_of_the_validation_run() -> None:
    """All its flags, parallel degree 1."""
    got = launch(
        "/models/DeepSeek-V4-Flash", "--served-model-name", "DeepSeek-V4", "--tensor-parallel-size", "1",
        "--data-parallel-size", "1", "--enable-prefix-caching", "--max-model-len", "16384", "--max-num-seqs", "256",
        "--max-num-batched-tokens", "8192", "--gpu-memory-utilization", "0.9", "--kv-cache-dtype", "fp8",
        "--tokenizer-mode", "deepseek_v4", "--reasoning-parser", "deepseek_v4", "--trust-remote-code",
        "--distributed-executor-backend", "mp", "--moe-backend", "aiter", "--async-scheduling",
        "--compilation-config", '{"cudagraph_mode":"FULL"}',
        "--speculative-config", '{"method":"dspark","num_speculative_tokens":7,"enable_adaptive_verification":true}',
    )  # fmt: skip
    assert got.names == ("DeepSeek-V4",) and got.model == "/models/DeepSeek-V4-Flash"
    config = EngineConfig.of(**got.settings)
    assert (config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens) == (16384, 256, 8192)
    assert config.gamma == 7 and config.prefix_caching
    assert config.speculative is not None and config.speculative.enable_adaptive_verification
    told = {note.split(":")[0] for note in got.notes}
    assert told == {
        "--gpu-memory-utilization", "--trust-remote-code", "--distributed-executor-backend", "--moe-backend",
        "--async-scheduling", "--compilation-config",
    }  # fmt: skip
    assert all(": no effect: " in note for note in got.notes)


def test_every_flag_without_effect_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Each is taken, told once with its reason, and marked in the help."""
    values = {
        "--gpu-memory-utilization": "0.5",
        "--compilation-config": "{}",
        "--cudagraph-capture-sizes": "8",
    }
    switches = [*_SWITCHES, *_ALWAYS]
    for flag, reason in NO_EFFECT.items():
        argv = [flag] if flag in switches else [flag, values.get(flag, "1")]
        assert launch(*argv).notes == (f"{flag}: no effect: {reason}",)
    with pytest.raises(SystemExit):
        launch("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"no effect: {reason}"[:40] in text for reason in NO_EFFECT.values())


def test_defaults() -> None:
    got = launch()
    assert got.model is None and got.names == ("firesteel",) and not got.notes and not got.settings
    assert got.host == "127.0.0.1" and not got.api_keys and not got.cors_origins
    assert launch("/models/v4").names == ("v4",)


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--tensor-parallel-size", "8"], "--tensor-parallel-size"),
        (["-dp", "2"], "--data-parallel-size"),
        (["--kv-cache-dtype", "int8"], "--kv-cache-dtype"),
        (["--kv-cache-dtype", "fp8", "--numerics", "float32"], "contradicts"),
        (["--reasoning-parser", "qwen3"], "deepseek_v4"),
        (["--no-async-scheduling"], "--no-async-scheduling"),
        (["--no-enable-chunked-prefill"], "--no-enable-chunked-prefill"),
        (["--watchdog-timeout", "-1"], "--watchdog-timeout"),
        (["--watchdog-timeout", "inf"], "--watchdog-timeout"),
        (["--drain-seconds", "nan"], "--drain-seconds"),
        (["--compilation-config", "{"], "not JSON"),
        (["--speculative-config", "{"], "not JSON"),
        (["--speculative-config", '{"method":"eagle"}'], "method"),
        (["--gpu-memory-utilization", "2"], "--gpu-memory-utilization"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--ssl-keyfile", "k"], "--ssl-certfile"),
        (["a", "--model", "b"], "--model"),
        (["--max-request-bytes", "0"], "--max-request-bytes"),
    ],
)
def test_contradictions_are_errors(argv: list[str], word: str) -> None:
    with pytest.raises(ParameterError, match=word):
        launch(*argv)


def test_unknown_and_shortened_flags_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--frobnicate", "--max-num-seq"):
        with pytest.raises(SystemExit):
            launch(flag, "3")
        assert flag in capsys.readouterr().err


def test_an_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--tensor-parallel-size", "2"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRESTEEL_API_KEY", "secret")
    assert launch("--api-key", "a").api_keys == ("a", "secret")


def test_tls_files_must_exist(tmp_path: Path) -> None:
    cert = tmp_path / "cert"
    cert.write_text("x")
    with pytest.raises(ParameterError, match="--ssl-keyfile"):
        launch("--ssl-certfile", str(cert), "--ssl-keyfile", str(tmp_path / "none"))
    assert launch("--ssl-certfile", str(cert), "--ssl-keyfile", str(cert)).tls["ssl_keyfile"] == str(cert)
