"""The flags of ``firesteel serve``: what each means here, has no effect here, or contradicts.

Names are those of the servers people come from, where they mean the same.
Nothing heavy is imported: the command line builds its parser from this.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firesteel.config import EngineConfig, ParameterError

DEFAULT_PORT = 8000
# accepted because launch commands carry them; what they would decide is decided already
NO_EFFECT = {
    "--gpu-memory-utilization": "history pages are counted, not a share of memory; see --num-pages",
    "--trust-remote-code": "no code of a checkpoint is ever run",
    "--distributed-executor-backend": "one engine process holds the whole model",
    "--moe-backend": "experts use the ops backend; see --backend",
    "--compilation-config": "nothing is compiled or captured on this device",
    "--enforce-eager": "nothing is captured on this device",
    "--async-scheduling": "the loop always plans one step ahead",
    "--enable-auto-tool-choice": "tool calls are always parsed",
    "--enable-expert-parallel": "there is one rank",
    "--dtype": "weights keep the formats of the checkpoint",
    "--attention-backend": "attention uses the ops backend; see --backend",
    "--all2all-backend": "there is one rank",
    "--max-cudagraph-capture-size": "nothing is captured on this device",
    "--cudagraph-capture-sizes": "nothing is captured on this device",
    "--enable-chunked-prefill": "prompts always run in chunks that fit the step",
    "--seed": "a request without a seed draws its own, which the answer tells",
    "--disable-log-requests": "requests are never logged",
    "--disable-uvicorn-access-log": "there is no access log; see /metrics",
}
_SWITCHES = (
    "--trust-remote-code", "--enforce-eager", "--enable-auto-tool-choice", "--enable-expert-parallel",
    "--disable-log-requests", "--disable-uvicorn-access-log",
)  # fmt: skip
_ALWAYS = ("--async-scheduling", "--enable-chunked-prefill")  # switching them off is an error
_VALUES = (
    "--gpu-memory-utilization", "--distributed-executor-backend", "--moe-backend", "--dtype", "--attention-backend",
    "--all2all-backend", "--max-cudagraph-capture-size", "--seed",
)  # fmt: skip
_ALLOWED = {
    "--tokenizer-mode": ("auto", "deepseek_v4"),
    "--reasoning-parser": ("deepseek_v4",),
    "--tool-call-parser": ("deepseek_v4",),
    "--kv-cache-dtype": ("auto", "fp8", "fp8_e4m3"),
    "--block-size": ("256",),
}
_PARALLEL = ("--tensor-parallel-size", "--data-parallel-size", "--pipeline-parallel-size")


@dataclass(frozen=True)
class Launch:
    """Everything a server is started with."""

    model: str | None
    settings: dict[str, Any]  # keywords of EngineConfig, plain values
    names: tuple[str, ...]
    host: str
    port: int
    api_keys: tuple[str, ...]
    max_request_bytes: int
    cors_origins: tuple[str, ...]
    drain_seconds: float
    watchdog_seconds: float
    log_level: str
    otlp_endpoint: str | None = None
    tls: dict[str, str] = field(default_factory=dict)  # keyword of the HTTP server -> file
    notes: tuple[str, ...] = ()


def add_options(p: argparse.ArgumentParser) -> None:
    """All flags of ``firesteel serve``."""
    p.add_argument(
        "model_path", nargs="?", metavar="MODEL", help="checkpoint folder (default: the bundled model)"
    )
    p.add_argument("--model", help="the same as MODEL")
    p.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names of the model in the API")
    _engine_options(p.add_argument_group("engine"))
    _http_options(p.add_argument_group("HTTP"))
    _known_options(p.add_argument_group("accepted for launch commands of other servers"))


def _engine_options(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--max-model-len", type=int, help="tokens one request may have in all")
    g.add_argument("--max-num-seqs", type=int, help="requests that run at once")
    g.add_argument("--max-num-batched-tokens", type=int, help="rows of one step")
    g.add_argument("--max-waiting", type=int, help="requests that may queue; more get 429")
    g.add_argument("--num-pages", type=int, help="history pages of 256 tokens")
    g.add_argument("--swap-space", type=float, metavar="GIB", help="host memory for preempted requests")
    g.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="reuse common prefixes (default)",
    )
    g.add_argument(
        "--speculative-config",
        metavar="JSON",
        help="""e.g. '{"method":"dspark","num_speculative_tokens":5}'""",
    )
    g.add_argument("--numerics", choices=("official", "float32"), help="rounding of activations")
    g.add_argument("--backend", help="ops backend: auto, native, triton or reference")
    g.add_argument("--threads", type=int, help="CPU threads per op")
    for name, what in (
        ("compile", "a grammar may take to compile"),
        ("mask", "its masks may take in a step"),
    ):
        help_text = f"what {what}; beyond it that request fails"
        g.add_argument(f"--structured-{name}-seconds", type=float, metavar="SECONDS", help=help_text)


def _http_options(g: argparse._ArgumentGroup) -> None:
    g.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    g.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"port (default {DEFAULT_PORT}; 0: any free one)"
    )
    g.add_argument(
        "--api-key",
        action="append",
        default=[],
        help="accepted key; may be given several times (or FIRESTEEL_API_KEY)",
    )
    g.add_argument("--ssl-certfile", help="TLS certificate; needs --ssl-keyfile")
    g.add_argument("--ssl-keyfile", help="TLS key; needs --ssl-certfile")
    g.add_argument("--ssl-ca-certs", help="certificates that clients must show one of")
    g.add_argument(
        "--max-request-bytes", type=int, default=32 * 2**20, help="larger bodies get 413 (default 32 MiB)"
    )
    g.add_argument(
        "--allowed-origins", nargs="+", default=[], metavar="ORIGIN", help="CORS origins (default: none)"
    )
    g.add_argument(
        "--drain-seconds", type=float, default=30.0, help="time for running requests after SIGTERM"
    )
    g.add_argument(
        "--watchdog-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="an engine without a step for so long while requests are open is restarted (300; 0: never)",
    )
    g.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send OpenTelemetry traces to this collector, e.g. http://127.0.0.1:4318 (extra otel)",
    )
    g.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))


def _known_options(g: argparse._ArgumentGroup) -> None:
    for name, short in zip(_PARALLEL, ("-tp", "-dp", "-pp"), strict=True):
        g.add_argument(name, short, type=int, default=1, metavar="N", help="1 is what there is")
    for name, allowed in _ALLOWED.items():
        g.add_argument(name, help=f"{' or '.join(allowed)}: what is used anyway")
    for name in _SWITCHES:
        g.add_argument(name, action="store_true", default=None, help=f"no effect: {NO_EFFECT[name]}")
    for name in _ALWAYS:
        g.add_argument(name, action=argparse.BooleanOptionalAction, help=f"no effect: {NO_EFFECT[name]}")
    for name in _VALUES:
        g.add_argument(name, help=f"no effect: {NO_EFFECT[name]}")
    sizes, graphs = "--cudagraph-capture-sizes", "--compilation-config"
    g.add_argument(sizes, nargs="+", type=int, metavar="ROWS", help=f"no effect: {NO_EFFECT[sizes]}")
    g.add_argument(graphs, metavar="JSON", help=f"no effect: {NO_EFFECT[graphs]}")


def resolve(args: argparse.Namespace) -> Launch:
    """What the flags mean together; raises ParameterError for what contradicts or does not exist."""
    if args.model and args.model_path and args.model != args.model_path:
        raise ParameterError("--model: differs from MODEL; give one of them")
    model = args.model_path or args.model
    notes = _notes(args)
    settings = _settings(args)
    EngineConfig.of(**settings)  # says what is wrong before anything is loaded
    name = Path(model).name or str(model) if model else "firesteel"
    keys = [*args.api_key, *filter(None, [os.environ.get("FIRESTEEL_API_KEY")])]
    for flag, value, low in (
        ("--port", args.port, 0),
        ("--max-request-bytes", args.max_request_bytes, 1),
        ("--drain-seconds", args.drain_seconds, 0),
        ("--watchdog-timeout", args.watchdog_timeout, 0),
    ):
        if not low <= value < float("inf"):
            raise ParameterError(f"{flag}: {value}: expected a finite number from {low} up")
    if args.port > 65535:
        raise ParameterError(f"--port: {args.port}: expected an integer from 0 to 65535")
    return Launch(
        model=model,
        settings=settings,
        names=tuple(args.served_model_name or [name]),
        host=args.host,
        port=args.port,
        api_keys=tuple(keys),
        max_request_bytes=args.max_request_bytes,
        cors_origins=tuple(args.allowed_origins),
        drain_seconds=args.drain_seconds,
        watchdog_seconds=args.watchdog_timeout,
        log_level=args.log_level,
        otlp_endpoint=args.otlp_endpoint,
        tls=_tls(args),
        notes=tuple(notes),
    )


def _value(args: argparse.Namespace, flag: str) -> Any:
    return getattr(args, flag.lstrip("-").replace("-", "_"))


def _notes(args: argparse.Namespace) -> list[str]:
    """One line per flag without effect."""
    for flag in _PARALLEL:
        if _value(args, flag) != 1:
            raise ParameterError(
                f"{flag}: {_value(args, flag)} ranks are not available in this version; use 1"
            )
    for flag, allowed in _ALLOWED.items():
        value = _value(args, flag)
        if value is not None and value not in allowed:
            raise ParameterError(f"{flag}: {value!r} is not available; expected {' or '.join(allowed)}")
    for flag in _ALWAYS:
        if _value(args, flag) is False:
            raise ParameterError(f"--no-{flag[2:]}: {NO_EFFECT[flag]}; leave it out")
    if args.compilation_config is not None:
        try:
            json.loads(args.compilation_config)
        except ValueError as err:
            raise ParameterError(f"--compilation-config: not JSON ({err})") from err
    if args.gpu_memory_utilization is not None:
        _share(args.gpu_memory_utilization)
    given = [flag for flag in NO_EFFECT if _value(args, flag) is not None]
    return [f"{flag}: no effect: {NO_EFFECT[flag]}" for flag in given]


def _share(text: str) -> None:
    try:
        fits = 0 < float(text) <= 1
    except ValueError:
        fits = False
    if not fits:
        raise ParameterError(f"--gpu-memory-utilization: {text!r}: expected a number above 0, at most 1")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """Keywords of EngineConfig; what was not given keeps its default."""
    if args.kv_cache_dtype not in (None, "auto") and args.numerics == "float32":
        raise ParameterError("--kv-cache-dtype: fp8 contradicts --numerics float32; leave one of them out")
    given = {
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_waiting": args.max_waiting,
        "num_pages": args.num_pages,
        "swap_gib": args.swap_space,
        "prefix_caching": args.enable_prefix_caching,
        "numerics": args.numerics,
        "backend": args.backend,
        "threads": args.threads,
        "structured_compile_seconds": args.structured_compile_seconds,
        "structured_mask_seconds": args.structured_mask_seconds,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    if args.speculative_config is not None:
        try:
            settings["speculative"] = json.loads(args.speculative_config)
        except ValueError as err:
            raise ParameterError(f"--speculative-config: not JSON ({err})") from err
        if (
            isinstance(settings["speculative"], dict)
            and settings["speculative"].get("simulated_acceptance") is not None
        ):
            raise ParameterError(
                "--speculative-config: simulated_acceptance makes meaningless text, for benchmarks only; "
                "leave it out, or use firesteel bench"
            )
    return settings


def _tls(args: argparse.Namespace) -> dict[str, str]:
    if bool(args.ssl_certfile) != bool(args.ssl_keyfile):
        raise ParameterError("--ssl-certfile, --ssl-keyfile: one needs the other; give both")
    if args.ssl_ca_certs and not args.ssl_certfile:
        raise ParameterError("--ssl-ca-certs: needs --ssl-certfile and --ssl-keyfile")
    files = {
        "ssl_certfile": args.ssl_certfile,
        "ssl_keyfile": args.ssl_keyfile,
        "ssl_ca_certs": args.ssl_ca_certs,
    }
    for name, file in files.items():
        if file and not Path(file).is_file():
            raise ParameterError(f"--{name.replace('_', '-')}: {file}: no such file")
    return {name: file for name, file in files.items() if file}
