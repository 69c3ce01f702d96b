"""Takes the pictures of the page that the documents show: ``python tests/pictures.py [--model FOLDER]``.

Other conversations run for a while before, so that the charts have something to show. Questions are the
shipped test problems.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2

from browser import Browser, browser, missing

ROOT = Path(__file__).parents[1]
PROBLEMS = ROOT / "src" / "firesteel" / "eval" / "data" / "gsm_symbolic.jsonl"
ADAPTIVE = {"method": "dspark", "num_speculative_tokens": 5, "enable_adaptive_verification": True}


@contextlib.contextmanager
def serving(model: str | None, speculative: dict[str, object]) -> Iterator[str]:
    """The address of a server that is ready."""
    command = [sys.executable, "-m", "firesteel.cli", "serve", *([model] if model else []), "--port", "0"]
    command += ["--max-num-seqs", "8", "--served-model-name", "firesteel-demo"]
    command += ["--speculative-config", json.dumps(speculative)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    try:
        assert server.stderr is not None
        url = next(
            m.group(1) for line in server.stderr if (m := re.search(r"listening on (http://\S+)", line))
        )
        threading.Thread(target=server.stderr.read, daemon=True).start()
        while httpx2.get(f"{url}/ready").status_code != 200:
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(20)


@contextlib.contextmanager
def company(url: str, questions: list[str], count: int = 3) -> Iterator[None]:
    """Other conversations, ``count`` at a time."""
    stop = threading.Event()

    def talk(first: int) -> None:
        with httpx2.Client(base_url=url, timeout=120) as http:
            for seed in range(first, 10_000, count):
                if stop.is_set():
                    return
                message = {"role": "user", "content": questions[seed % len(questions)]}
                body = {"messages": [message], "temperature": 0.6, "seed": seed, "max_tokens": 220}
                http.post("/v1/chat/completions", json=body)
                stop.wait(seed % 5 * 0.3)

    threads = [threading.Thread(target=talk, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def ask(window: Browser, url: str, questions: list[str], seconds: float) -> None:
    """A conversation after a while in company, ending with the comparison if anything was drafted."""
    window.size(1440, 900)
    window.scheme("light")
    window.open(url)
    with company(url, questions[1:]):
        time.sleep(seconds)
    window.type("#prompt", questions[0] + "\ue007")
    window.wait("the answer", lambda: window.count(".facts b") and not window.count(".running"), 120)
    if window.count(".facts button"):
        window.click(".facts button")
        window.wait("the comparison", lambda: window.count(".note.good, .note.bad"), 120)
    time.sleep(2.2)


def take(window: Browser, out: Path) -> None:
    """Wide and narrow, light and dark."""
    window.run(  # a token at the end of the first line: what it tells covers no other
        "const all = [...document.querySelectorAll('.answer .k.d')], y = all[0].getBoundingClientRect().top;"
        "const line = all.filter((e) => Math.abs(e.getBoundingClientRect().top - y) < 5);"
        "line.at(-1).dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
    )
    window.picture(out / "page-light.png")
    window.run("document.getElementById('log').dispatchEvent(new PointerEvent('pointerleave'))")
    window.scheme("dark")
    window.size(1440, 1120)
    time.sleep(1.5)
    window.picture(out / "page-dark.png")
    window.scheme("light")
    window.size(390, 844, mobile=True, scale=2)
    window.run("const l = document.getElementById('log'); l.scrollTop = l.scrollHeight")
    time.sleep(1.5)
    window.picture(out / "page-phone.png")
    window.click('[data-show="board"]')
    time.sleep(1.5)
    window.picture(out / "page-phone-engine.png")


def main() -> int:
    """Start a server, take the pictures, stop it."""
    args = argparse.ArgumentParser(description="pictures of the page")
    args.add_argument("--model", help="checkpoint folder (default: the bundled model)")
    args.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    args.add_argument("--seconds", type=float, default=25.0, help="company before the question is asked")
    opt = args.parse_args()
    if missing():
        print(f"pictures: {missing()}", file=sys.stderr)
        return 1
    opt.out.mkdir(parents=True, exist_ok=True)
    questions = [json.loads(line)["question"] for line in PROBLEMS.read_text().splitlines()[:12]]
    with (
        tempfile.TemporaryDirectory() as folder,
        browser(Path(folder)) as window,
        serving(opt.model, ADAPTIVE) as url,
    ):
        ask(window, url, questions, opt.seconds)
        take(window, opt.out)
        assert not window.complaints()
    return 0


if __name__ == "__main__":
    sys.exit(main())
