"""``firesteel``: the command line. Each command is a thin caller of the package."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from firesteel import __version__
from firesteel.serve.options import add_options, resolve


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="firesteel", description="DeepSeek-V4 with DSpark, every token a row.")
    top.add_argument("--version", action="version", version=f"firesteel {__version__}")
    sub = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = sub.add_parser("generate", help="complete one prompt")
    generate.add_argument("--prompt", required=True, help="text to complete; with --chat, the user's message")
    generate.add_argument("--chat", action="store_true", help="wrap the prompt in V4's chat encoding")
    generate.add_argument("--thinking", action="store_true", help="with --chat: let the model think first")
    generate.add_argument("--thinking-budget", type=int, metavar="N", help="tokens the reasoning may have")
    generate.add_argument(
        "--json-schema",
        metavar="FILE",
        help="the answer is JSON of this schema; with --chat the model is told",
    )
    _model_options(generate)
    _sampling_options(generate)
    generate.add_argument("--json", action="store_true", help="print one JSON object instead of text")

    chat = sub.add_parser("chat", help="talk to the model in the terminal")
    chat.add_argument("--thinking", action="store_true", help="let the model think first")
    _model_options(chat)
    _sampling_options(chat)

    demo = sub.add_parser("demo", help="a word problem, code and prose on the bundled model")
    _model_options(demo)
    demo.add_argument("--json", action="store_true", help="print one JSON object instead of text")

    ev = sub.add_parser("eval", help="exact match on worked problems")
    _model_options(ev)
    ev.add_argument("--problems", default=None, help="JSONL in GSM8K's form (default: the 500 shipped ones)")
    ev.add_argument("--held-out", action="store_true", help="the shipped templates that training never saw")
    ev.add_argument("--limit", type=int, default=None, help="use the first N problems")
    ev.add_argument(
        "--arms", default="none", help="comma-separated: none, fixed 5, fixed 7, adaptive; or all"
    )
    ev.add_argument("--shots", type=int, default=0, help="worked examples in front of each problem")
    ev.add_argument(
        "--shot-problems", default=None, metavar="FILE", help="JSONL they come from (default: the first)"
    )
    ev.add_argument("--max-tokens", type=int, default=400, help="tokens of an answer at most")
    ev.add_argument("--mode", default="both", choices=("chat", "thinking", "both"))
    ev.add_argument("--max-num-seqs", type=int, default=32, help="problems that run at once")
    ev.add_argument("--json", default=None, metavar="FILE", help="write the result here")

    serve = sub.add_parser("serve", help="an OpenAI-compatible server", allow_abbrev=False)
    add_options(serve)

    calibrate = sub.add_parser("calibrate", help="fit a drafter's survival model, and say how good it is")
    _calibrate_options(calibrate)

    sub.add_parser("train", help="corpus, target, drafter or export: small V4 models", add_help=False)
    sub.add_parser("profile", help="measure what steps cost here, and save the table", add_help=False)
    sub.add_parser(
        "simulate", help="predict throughput from a cost table, without the hardware", add_help=False
    )
    sub.add_parser("bench", help="benchmarks by name: sweep, steps, exact, ...", add_help=False)

    doctor = sub.add_parser(
        "doctor", help="check this machine: versions, devices, self-tests, the bundled model"
    )
    doctor.add_argument("--model", default=None, help="checkpoint folder (default: the bundled model)")
    doctor.add_argument("--backend", default="auto", help="ops backend: auto, native, triton or reference")
    doctor.add_argument("--threads", type=int, default=None, help="CPU threads per op")
    doctor.add_argument(
        "--json", default="firesteel-doctor.json", metavar="FILE", help="the report (firesteel-doctor.json)"
    )

    inspect = sub.add_parser("inspect", help="what a checkpoint holds, or must hold")
    inspect.add_argument("path", help="checkpoint folder, or a config.json alone")
    inspect.add_argument("--plan", action="store_true", help="add a memory plan")
    inspect.add_argument(
        "--gpu-gib", type=float, default=141.0, help="memory of one GPU in GiB (default 141)"
    )
    inspect.add_argument("--tp", type=int, default=1, help="tensor-parallel degree of the plan")
    inspect.add_argument("--max-model-len", type=int, default=None, help="tokens of one request in the plan")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    return top


def _calibrate_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", default=None, help="checkpoint folder (default: the bundled model)")
    p.add_argument("--numerics", default="official", choices=("official", "float32"))
    p.add_argument("--backend", default="auto", help="ops backend: auto, native, triton or reference")
    p.add_argument("--threads", type=int, default=None, help="CPU threads per op")
    p.add_argument("--max-model-len", type=int, default=None, help="tokens one request may have in all")
    p.add_argument("--max-num-seqs", type=int, default=32, help="prompts that run at once")
    p.add_argument(
        "--prompts",
        default=None,
        help="JSONL with prompt, token_ids, messages or question a line (default: bundled)",
    )
    p.add_argument("--limit", type=int, default=None, help="use the first N prompts")
    p.add_argument("--k", type=int, default=None, help="drafts per step (default: the trained block size)")
    p.add_argument("--temperatures", default="0,1", help="each prompt is answered at each of these")
    p.add_argument("--max-tokens", type=int, default=256, help="tokens of one answer at most")
    p.add_argument("--acceptance", default="coupled", choices=("coupled", "rejection"))
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", default="calibration.json", help="the calibration file")
    p.add_argument("--json", default=None, metavar="FILE", help="write the report here")


def _model_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--model", default=None, help="checkpoint folder (default: the bundled model)")
    p.add_argument(
        "--numerics", default="official", choices=("official", "float32"), help="rounding of activations"
    )
    p.add_argument("--backend", default="auto", help="ops backend: auto, native, triton or reference")
    p.add_argument("--threads", type=int, default=None, help="CPU threads per op")
    p.add_argument("--max-model-len", type=int, default=None, help="tokens one request may have in all")
    p.add_argument(
        "--speculative-config",
        default=None,
        metavar="JSON",
        help="""e.g. '{"method":"dspark","num_speculative_tokens":5}'; fields: see SpeculativeConfig""",
    )


def _sampling_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--max-tokens", type=int, default=256, help="tokens to generate at most")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    p.add_argument("--seed", type=int, default=None, help="keys all noise; drawn and printed if absent")
    p.add_argument("--stop", action="append", default=[], help="stop string; may be given several times")
    p.add_argument("--ignore-eos", action="store_true", help="go on after the end token")


def _llm(args: argparse.Namespace) -> Any:
    from rich.console import Console

    from firesteel.engine.llm import LLM

    settings = {
        "numerics": args.numerics,
        "backend": args.backend,
        "threads": args.threads,
        "speculative": args.speculative_config,
    }
    with Console(stderr=True).status("loading") as status:
        return LLM(
            args.model,
            max_model_len=args.max_model_len,
            progress=lambda part: status.update(f"loading {part}"),
            **settings,
        )


def _params(args: argparse.Namespace) -> Any:
    from firesteel.config import SamplingParams

    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )


def _generate(args: argparse.Namespace) -> int:
    from firesteel.config import ParameterError

    if args.thinking and not args.chat:
        raise ParameterError("--thinking: only a chat thinks; add --chat")
    if args.chat and args.thinking_budget is not None and not args.thinking:
        raise ParameterError("--thinking-budget: there is no reasoning to limit; add --thinking")
    params = replace(_params(args), thinking_token_budget=args.thinking_budget)
    schema = None
    if args.json_schema is not None:
        schema = _json_schema(args.json_schema)
        params = replace(params, structured_outputs={"json": schema})
    llm = _llm(args)
    prompt = args.prompt
    if args.chat:
        messages = [{"role": "user", "content": prompt}]
        prompt = llm.prompt_of(messages, args.thinking, response_format=schema)
    elif llm.tokenizer is not None:
        prompt = [llm.config.bos_token_id, *llm.tokenizer.encode(prompt)]
    if args.json:
        print(json.dumps(llm.generate([prompt], params)[0].to_json(), ensure_ascii=False))
        return 0
    done = _print_stream(llm, prompt, params)
    print(
        f"[{done.finish_reason}, {len(done.token_ids)} tokens, {done.stats['tokens_per_second']:.1f} tokens/s, "
        f"seed {done.seed}]",
        file=sys.stderr,
    )
    return 0


def _json_schema(file: str) -> dict[str, Any]:
    """A JSON object from a file; raises ParameterError."""
    from firesteel.config import ParameterError

    try:
        schema = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as err:
        raise ParameterError(f"--json-schema: {file} cannot be read ({err.strerror})") from err
    except ValueError as err:
        raise ParameterError(f"--json-schema: {file} is not JSON ({err})") from err
    if not isinstance(schema, dict):
        raise ParameterError(f"--json-schema: {file} holds no JSON object")
    return schema


def _print_stream(llm: Any, prompt: Any, params: Any) -> Any:
    from firesteel.engine.output import Completion

    done = None
    for piece in llm.stream(prompt, params):
        if isinstance(piece, Completion):
            done = piece
        else:
            print(piece, end="", flush=True)
    print()
    return done


def _chat(args: argparse.Namespace) -> int:
    params = _params(args)
    llm = _llm(args)
    messages: list[dict[str, str]] = []
    print("Empty line or Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except EOFError:
            return 0
        if not line.strip():
            return 0
        messages.append({"role": "user", "content": line})
        try:
            done = _print_stream(llm, llm.prompt_of(messages, args.thinking), params)
        except ValueError as err:  # one bad line must not end the conversation
            print(f"firesteel: {err}", file=sys.stderr)
            messages.pop()
            continue
        reasoning, found, answer = done.text.partition("</think>")
        message = {"role": "assistant", "content": answer if found else done.text}
        if found:
            message["reasoning"] = reasoning
        messages.append(message)


def _demo(args: argparse.Namespace) -> int:
    from firesteel.demo import run_demo

    return run_demo(_llm(args), as_json=args.json)


def _eval(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from firesteel.bench.report import write_json
    from firesteel.config import ParameterError
    from firesteel.eval.gsm import ARMS, HELD_OUT, PROBLEMS, read_problems, run_arms, split_shots

    if args.held_out and args.problems is not None:
        raise ParameterError("--held-out: --problems names other problems; give one of them")
    if args.speculative_config is not None:
        raise ParameterError("--speculative-config: the arms of eval set it; use --arms")
    if args.max_tokens < 1:
        raise ParameterError(f"--max-tokens: {args.max_tokens}: expected an integer from 1 up")
    limit = args.limit if args.limit is None or args.shot_problems else args.limit + args.shots
    problems = read_problems(args.problems or (HELD_OUT if args.held_out else PROBLEMS), limit)
    examples = None if args.shot_problems is None else read_problems(args.shot_problems)
    shots, problems = split_shots(problems, args.shots, examples)
    arms = list(ARMS) if args.arms == "all" else [a.strip() for a in args.arms.split(",")]
    unknown = [a for a in arms if a not in ARMS]
    if unknown:
        raise ParameterError(f"arms: {unknown[0]!r} is none of {', '.join(ARMS)}")
    modes = {"chat": [False], "thinking": [True], "both": [False, True]}[args.mode]
    settings = {"numerics": args.numerics, "backend": args.backend, "threads": args.threads}
    settings |= {"max_num_seqs": args.max_num_seqs, "max_model_len": args.max_model_len}
    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def progress(name: str, done: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=len(problems))
            bar.update(tasks[name], completed=done)

        result = run_arms(args.model, problems, arms, modes, settings, progress, shots, args.max_tokens)
    table = Table(
        "arm", "mode", "problems", "exact match", "± standard error", "tokens/s", "tokens per engine step"
    )
    for s in result["scores"]:
        table.add_row(
            s["arm"],
            s["mode"],
            str(s["problems"]),
            f"{s['exact_match']:.4f}",
            f"{s['standard_error']:.4f}",
            f"{s['tokens'] / s['seconds']:.1f}",
            f"{s['tokens'] / s['steps']:.2f}",
        )
    Console().print(table)
    write_json(result, args.json)
    same = result["identical_texts"] or {}
    for mode, found in same.items():
        Console().print(f"{mode}: {found['identical']} of {found['problems']} texts identical in all arms")
    return 1 if any(found["differing"] for found in same.values()) else 0


def _calibrate(args: argparse.Namespace) -> int:
    from firesteel.train.calibrate import main

    return main(args)


def _bench(argv: Sequence[str]) -> int:
    from firesteel.bench.cli import main

    return main(argv)


def _train(argv: Sequence[str]) -> int:
    from firesteel.train.cli import main

    return main(argv)


def _serve(args: argparse.Namespace) -> int:
    launch = resolve(args)
    try:
        from firesteel.serve.main import run_serve
    except ModuleNotFoundError as err:
        print(f"firesteel: serve needs {err.name}; pip install 'firesteel[serve]'", file=sys.stderr)
        return 2
    return run_serve(launch)


def _inspect(args: argparse.Namespace) -> int:
    import math

    from firesteel.config import ParameterError

    if not (math.isfinite(args.gpu_gib) and args.gpu_gib > 0):
        raise ParameterError(f"gpu_gib={args.gpu_gib}: expected a positive number of GiB")
    for name in ("tp", "max_model_len"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ParameterError(f"{name}={value}: expected an integer from 1 up")
    from firesteel.inspect import run_inspect

    return run_inspect(
        args.path,
        plan=args.plan,
        gpu_gib=args.gpu_gib,
        tp=args.tp,
        as_json=args.json,
        max_model_len=args.max_model_len,
    )


def _doctor(args: argparse.Namespace) -> int:
    from firesteel.config import ParameterError
    from firesteel.doctor import run_doctor

    if args.threads is not None and args.threads < 1:
        raise ParameterError(f"threads={args.threads}: expected an integer from 1 up")
    return run_doctor(args.model, args.backend, args.threads, args.json)


COMMANDS = {
    "doctor": _doctor,
    "generate": _generate,
    "chat": _chat,
    "demo": _demo,
    "eval": _eval,
    "calibrate": _calibrate,
    "inspect": _inspect,
    "serve": _serve,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; a user's error is one line on stderr and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["train"]:  # programs with settings of their own
            return _train(words[1:])
        if words[:1] == ["bench"]:
            return _bench(words[1:])
        if words[:1] in (["profile"], ["simulate"]):
            return _bench(words)
        args = _parser().parse_args(words)
        return COMMANDS[args.command](args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
    except (ValueError, RuntimeError, OSError) as err:
        from firesteel.errors import user_errors

        if not isinstance(err, user_errors()):
            raise
        print(f"firesteel: {err}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
