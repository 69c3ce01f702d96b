"""What must not take the server down: broken state, no memory, a hung engine, Ctrl-C, huge bodies, TLS and keys."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from firesteel import LLM, SamplingParams
from firesteel.bench.serving import ServerProcess, served
from firesteel.engine.frontend import Frontend
from firesteel.models.deepseek_v4.random_init import tiny_config, write_random
from firesteel.tokenizer import byte_tokenizer
from oracles.http_server import ThreadServer, thread_server

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 512, "threads": 1,
    "speculative": {"method": "dspark", "num_speculative_tokens": 3},
}  # fmt: skip
COMPLETIONS = "/v1/completions"
VICTIM = [40, 41, 42, 43, 44]
ENDLESS = {"prompt": "x", "max_tokens": 480, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("robust") / "tiny"
    config = tiny_config(compress_ratios=(0, 4, 16), n_routed_experts=4)
    write_random(path, config, 11, agreement=0.9)
    byte_tokenizer(config.vocab_size).save(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, **{**SETTINGS, "speculative": None})


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results of calls made at the same time."""
    out: list[Any] = [None] * len(calls)

    def run(at: int) -> None:
        out[at] = calls[at]()

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return out


def offline(llm: LLM, body: dict[str, Any]) -> str:
    params = SamplingParams.of(**{k: v for k, v in body.items() if k not in ("prompt", "stream")})
    prompt = body["prompt"]
    if isinstance(prompt, str):
        assert llm.tokenizer is not None
        prompt = [0, *llm.tokenizer.encode(prompt)]
    return str(llm.generate([prompt], params)[0].text)


# ---- one request fails, the others go on -------------------------------------------------
def break_victims(frontend: Frontend) -> None:
    """From now on a request for VICTIM finds NaN in its state after three tokens, as a broken kernel would leave."""
    step = frontend.step
    broken: set[int] = set()

    def stepping() -> list[Any]:
        for answer in frontend.open.values():
            seq = answer.seq
            if list(seq.prompt) == VICTIM and len(answer.ids) >= 3 and seq.slot >= 0:
                if seq.request_id not in broken:
                    for layer in frontend.engine.memory.layers:
                        for ring in layer.rings():
                            ring[seq.slot] = float("nan")
                broken.add(seq.request_id)
        return step()

    frontend.step = stepping  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def broken(folder: Path) -> Iterator[ThreadServer]:
    with thread_server(folder, SETTINGS, break_victims) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_nan_logits_fail_one_request_with_its_id(broken: ThreadServer, llm: LLM, stream: bool) -> None:
    victim = {"prompt": VICTIM, "max_tokens": 200, "ignore_eos": True, "seed": 3}
    others = [{"prompt": f"other {i}", "max_tokens": 40, "seed": i, "ignore_eos": True} for i in range(3)]
    failed = broken.counter('request_success_total{finished_reason="error"}')
    bodies = [{**body, "stream": stream} for body in (victim, *others)]
    replies = together([lambda b=b: broken.http.post(COMPLETIONS, json=b) for b in bodies])  # type: ignore[misc]
    if stream:
        events = [line for line in replies[0].text.split("\n\n") if line]
        assert replies[0].status_code == 200 and events[-1] == "data: [DONE]"
        name, error = json.loads(events[0][6:])["id"], json.loads(events[-2][6:])["error"]
        assert name in error["message"]
    else:
        assert replies[0].status_code == 500
        error = replies[0].json()["error"]
    assert "cmpl-" in error["message"] and "finite" in error["message"] and error["code"] == "engine_error"
    for reply, body in zip(replies[1:], others, strict=True):
        assert reply.status_code == 200
        if stream:
            lines = [line for line in reply.text.split("\n\n") if line][:-1]
            text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)
        else:
            text = reply.json()["choices"][0]["text"]
        assert text == offline(llm, body)
    assert broken.counter('request_success_total{finished_reason="error"}') == failed + 1
    assert broken.http.get("/health").status_code == 200
    broken.settle()


def test_no_memory_preempts_and_changes_no_text(folder: Path, llm: LLM) -> None:
    """Four requests that need two pages each, of three there are."""
    bodies = [
        {"prompt": [50 + i] * 200, "max_tokens": 150, "seed": i, "ignore_eos": True, "temperature": 0.8}
        for i in range(4)
    ]
    with thread_server(folder, {**SETTINGS, "num_pages": 3, "prefix_caching": False}) as server:
        replies = together([lambda b=b: server.http.post(COMPLETIONS, json=b) for b in bodies])  # type: ignore[misc]
        server.settle()
        time.sleep(0.3)
        assert server.counter("num_preemptions_total") > 0
        assert server.frontend.engine.memory.pool.free == 3
    for reply, body in zip(replies, bodies, strict=True):
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["text"] == offline(llm, body)


def test_huge_requests_are_refused_before_any_work(broken: ThreadServer) -> None:
    """Each of these would hold up everybody for seconds, or widen a table of all slots."""
    for body, param, word in (
        ({"prompt": "a" * 2_000_000}, "prompt", "cannot be 512 tokens"),
        ({"prompt": ["b", "a" * 2_000_000]}, "prompt", "cannot be 512 tokens"),
        ({"prompt": [5] * 500_000}, "prompt", "the model takes 512"),
        ({"prompt": [[5] * 500_000]}, "prompt", "the model takes 512"),
        ({"prompt": [[5]] * 100_000}, "prompt", "at most 4096 per request"),
        ({"prompt": "x", "stop": [f"{i}x" for i in range(100_000)]}, "stop", "at most 64"),
        ({"prompt": "x", "bad_words": [f"{i}x" for i in range(100_000)]}, "bad_words", "at most 256"),
        ({"prompt": "x", "bad_words": ["a" * 100_000]}, "bad_words", "at most 64 tokens"),
    ):
        reply = broken.http.post(COMPLETIONS, json=body)
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] == param and word in error["message"], reply.text
    reply = broken.http.post("/detokenize", json={"tokens": [5] * 500_000})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tokens"
    chat = {"messages": [{"role": "user", "content": "a" * 2_000_000}]}
    assert broken.http.post("/v1/chat/completions", json=chat).status_code == 400


def test_health_answers_while_a_long_text_is_tokenised(broken: ThreadServer) -> None:
    done = threading.Event()
    replies: list[httpx2.Response] = []

    def tokenize() -> None:
        replies.append(
            httpx2.post(f"{broken.url}/tokenize", json={"prompt": "long text " * 300_000}, timeout=60)
        )
        done.set()

    threading.Thread(target=tokenize).start()
    slowest = 0.0
    begun = time.monotonic()
    while not done.is_set():
        asked = time.monotonic()
        assert broken.http.get("/health").status_code == 200
        slowest = max(slowest, time.monotonic() - asked)
        time.sleep(0.01)
    total = time.monotonic() - begun
    assert replies[0].status_code == 200 and replies[0].json()["count"] == 3_000_001
    assert slowest < max(0.8 * total, 0.5), f"health took {slowest:.2f} of {total:.2f} s"


# ---- processes ---------------------------------------------------------------------------------
def wait_for(check: Callable[[], bool], seconds: float, server: ServerProcess) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, server.tail(40)
        time.sleep(0.02)


def files_of(pid: int) -> int:
    """Soft limit of open files."""
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return next(int(line.split()[3]) for line in lines if line.startswith("Max open files"))


def test_a_hung_engine_is_seen_and_replaced(folder: Path) -> None:
    """It lives and answers nothing: health turns, its requests fail, another one writes the same text."""
    flags = ("--max-model-len", "512", "--max-num-seqs", "4", "--threads", "1", "--watchdog-timeout", "2")
    with (
        served(folder, *flags) as server,
        httpx2.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=30) as http,
    ):
        wait_for(lambda: http.get("/ready").status_code == 200, 60, server)
        body = {"prompt": "the same", "seed": 4, "max_tokens": 20}
        before = http.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
        time.sleep(2.5)
        assert http.get("/health").status_code == 200, "an idle engine is not hung"
        first = server.engines[-1]
        os.kill(first, signal.SIGSTOP)
        stopped = time.monotonic()
        (reply,) = together([lambda: http.post(COMPLETIONS, json=ENDLESS)])
        assert time.monotonic() - stopped < 10
        assert reply.status_code == 503 and "--watchdog-timeout" in reply.json()["error"]["message"]
        health = http.get("/health")
        assert health.status_code == 503 and "made no step" in health.json()["reason"]
        refused = http.post(COMPLETIONS, json=body)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        wait_for(lambda: http.get("/ready").status_code == 200, 60, server)
        assert server.engines[-1] != first
        assert http.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == before
        assert "firesteel:engine_restarts 1.0" in http.get("/metrics").text
        os.kill(server.engines[-1], signal.SIGSTOP)  # hangs again, and now nobody is left to see it
        server.process.kill()
        wait_for(lambda: not Path(f"/proc/{server.engines[-1]}").exists(), 5, server)


def test_connections_are_files() -> None:
    """The server raises the limit that its shell gave it."""
    script = "from firesteel.serve.main import _allow_connections as raise_limit; raise_limit(); "
    script += "import os; print(os.getpid(), flush=True); input()"
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    shell = ["sh", "-c", f'ulimit -Sn 256; exec "{sys.executable}" -c "{script}"']
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert files_of(int(process.stdout.readline())) == min(hard, 65536)
        process.communicate("")


def test_ctrl_c_while_the_engine_is_being_imported(folder: Path) -> None:
    """As a terminal sends it, to the whole group: soon, silently, with nothing left behind."""
    with served(folder) as server:
        wait_for(lambda: bool(server.engines), 30, server)
        maps = Path(f"/proc/{server.engines[0]}/maps")
        wait_for(lambda: "libtorch" in maps.read_text(), 30, server)
        begun = time.monotonic()
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(15) == 0
        assert time.monotonic() - begun < 8
        wait_for(lambda: not Path(f"/proc/{server.engines[0]}").exists(), 5, server)
        time.sleep(0.1)
        assert not any("Traceback" in line or "KeyboardInterrupt" in line for line in server.lines), (
            server.tail()
        )


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate with")
    where = tmp_path_factory.mktemp("tls")
    key, cert = where / "key.pem", where / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    more = ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run([*command, *more, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return key, cert


def test_tls_keys_origins_and_size_together(folder: Path, certificate: tuple[Path, Path]) -> None:
    key, cert = certificate
    flags = ["--ssl-keyfile", str(key), "--ssl-certfile", str(cert), "--api-key", "secret", "--threads", "1"]
    flags += [
        "--allowed-origins",
        "https://a.example",
        "--max-request-bytes",
        "5000",
        "--max-model-len",
        "512",
    ]
    with served(folder, *flags) as server:
        url = f"https://127.0.0.1:{server.port}"
        trusted = ssl.create_default_context(cafile=str(cert))
        with httpx2.Client(base_url=url, timeout=30, verify=trusted) as http:
            wait_for(lambda: http.get("/ready").status_code == 200, 60, server)
            bearer = {"authorization": "Bearer secret"}
            assert http.get("/v1/models").status_code == 401
            assert http.get("/v1/models", headers=bearer).status_code == 200
            body = {"prompt": "x", "max_tokens": 3}
            assert http.post(COMPLETIONS, json=body).status_code == 401
            assert http.post(COMPLETIONS, json=body, headers=bearer).status_code == 200
            long = {"prompt": "x" * 6000}
            assert http.post(COMPLETIONS, json=long, headers=bearer).status_code == 413
            page = {"origin": "https://a.example", "access-control-request-method": "POST"}
            asked = {"access-control-request-headers": "authorization,content-type"}
            before = http.options(COMPLETIONS, headers={**page, **asked})
            assert before.status_code == 200, "a browser asks without the key"
            assert before.headers["access-control-allow-origin"] == "https://a.example"
            other = http.options(COMPLETIONS, headers={**page, **asked, "origin": "https://b.example"})
            assert "access-control-allow-origin" not in other.headers
            wrong = http.get("/v1/models", headers={"origin": "https://a.example"})
            assert wrong.status_code == 401 and wrong.headers["access-control-allow-origin"], (
                "the page reads why"
            )
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{url}/health")  # nobody vouches for the certificate
        with pytest.raises(httpx2.HTTPError):
            httpx2.get(f"http://127.0.0.1:{server.port}/health")


def test_the_launch_command_of_the_validation_run_starts_and_answers(tmp_path: Path) -> None:
    """With the model's path changed and parallel degree 1; what has no effect is told at the start."""
    config = tiny_config(compress_ratios=(0, 4, 16), n_routed_experts=4, max_position_embeddings=16384)
    model = write_random(tmp_path / "V4", config, 5, agreement=0.9)
    byte_tokenizer(config.vocab_size).save(model)
    graphs = '{"cudagraph_mode":"FULL","max_cudagraph_capture_size":2048}'
    drafts = '{"method":"dspark","num_speculative_tokens":7,"enable_adaptive_verification":true}'
    flags = [
        "--served-model-name", "DeepSeek-V4", "--tensor-parallel-size", "1", "--data-parallel-size", "1",
        "--trust-remote-code", "--distributed-executor-backend", "mp", "--moe-backend", "aiter",
        "--enable-prefix-caching", "--max-model-len", "16384", "--max-num-seqs", "256",
        "--max-num-batched-tokens", "8192", "--gpu-memory-utilization", "0.9", "--kv-cache-dtype", "fp8",
        "--block-size", "256", "--tokenizer-mode", "deepseek_v4", "--reasoning-parser", "deepseek_v4",
        "--compilation-config", graphs, "--async-scheduling", "--speculative-config", drafts,
    ]  # fmt: skip
    with (
        served(model, *flags) as server,
        httpx2.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as http,
    ):
        wait_for(lambda: http.get("/ready").status_code == 200, 120, server)
        assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 16384
        body = {"model": "DeepSeek-V4", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        assert http.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] <= 8
        told = [line.split(": ")[1:3] for line in server.lines if ": no effect: " in line]
        assert [what[0] for what in told] == [
            "--gpu-memory-utilization", "--trust-remote-code", "--distributed-executor-backend", "--moe-backend",
            "--compilation-config", "--async-scheduling",
        ]  # fmt: skip
