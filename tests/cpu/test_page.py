"""The page in a real browser: coloured tokens, moving charts, keys, and a quiet console.

Needs a Chromium and its driver (Debian: chromium, chromium-driver); skipped where they are missing.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

from browser import Browser, browser, missing
from firesteel.config import EngineConfig
from firesteel.engine.build import build_engine
from firesteel.engine.frontend import Frontend
from firesteel.models.deepseek_v4.random_init import tiny_config, write_random
from firesteel.serve.app import ServeOptions, create_app
from firesteel.serve.client import ThreadEngine
from firesteel.speculation.cost import CostModel, CostTable
from firesteel.speculation.policy import Adaptive
from firesteel.tokenizer import byte_tokenizer

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(missing() is not None, reason=f"no browser: {missing()}")]

ENTER, ESCAPE, LEFT_ARROW, RIGHT_ARROW = "\ue007", "\ue00c", "\ue012", "\ue014"
FIXED = {"method": "dspark", "num_speculative_tokens": 3}
# a step costs the same whatever it verifies: drafts always pay
FLAT = CostTable("flat", (1, 64), (2.0, 2.0), 64, 0.0, (1, 4), {1: (0.1, 0.1), 3: (0.1, 0.1)})


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "tiny"
    config = tiny_config(compress_ratios=(0, 4, 16), n_routed_experts=4)
    write_random(path, config, 11, agreement=0.9)
    byte_tokenizer(config.vocab_size).save(path)
    return path


def serve(folder: Path, **options: Any) -> Iterator[str]:
    """A server on a real socket; gives its address."""
    speculative = options.pop("speculative", FIXED)
    config = EngineConfig.of(max_num_seqs=4, max_model_len=1024, threads=1, speculative=speculative)

    def make(progress: Callable[[str], None]) -> Frontend:
        built = build_engine(folder, config, progress)
        if isinstance(built.engine.scheduler.policy, Adaptive):
            built.engine.scheduler.policy.cost = CostModel(FLAT)
        return Frontend(built)

    engine = ThreadEngine(make)
    app = create_app(engine, ServeOptions(names=("tiny",), **options))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not (server.started and engine.info):
        assert thread.is_alive()
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    yield from serve(folder)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture
def page(window: Browser, url: str) -> Browser:
    window.size(1280, 800)
    window.open(url)
    window.run("localStorage.clear(); sessionStorage.clear()")
    window.complaints()
    window.wait("the engine is ready", lambda: window.text("#state") == "ready")
    return window


def ask(page: Browser, text: str, **settings: str) -> None:
    """Send a prompt by keyboard, with settings by the ids of their fields."""
    for name, value in settings.items():
        page.run(
            "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
            "e.dispatchEvent(new Event('input', {bubbles: true}))",
            name.replace("_", "-"),
            value,
        )
    page.type("#prompt", text + ENTER)


def idle(page: Browser) -> bool:
    """The newest answer is complete."""
    return page.count(".answer") > 0 and page.count(".answer.running") == 0


def ink(page: Browser, chart: str) -> int:
    """Pixels that a chart has drawn, weighted so that a moved line changes the number."""
    return int(
        page.run(
            "const c = document.querySelector(`[data-chart=${arguments[0]}] canvas`);"
            "const g = new OffscreenCanvas(c.width, c.height).getContext('2d', {willReadFrequently: true});"
            "g.drawImage(c, 0, 0); const d = g.getImageData(0, 0, c.width, c.height).data; let n = 0;"
            "for (let i = 3; i < d.length; i += 4) if (d[i]) n += 1 + (i % 9973) / 9973 + d[i - 3] / 255;"
            "return Math.round(n * 100)",
            chart,
        )
    )


def test_tokens_show_where_they_come_from(page: Browser) -> None:
    ask(page, "Hello", max_tokens="48", effort="none", seed="3")
    page.wait("the answer", lambda: idle(page) and page.count(".facts b"))
    drafted, sampled = page.count(".k.d"), page.count(".k.s")
    assert drafted > 0 and sampled > 0
    assert drafted + sampled <= 48
    assert page.count(".answer canvas.strip") == 1
    assert "tokens per step" in page.text(".facts")
    colours = page.run(
        "return ['.k.d', '.k.s'].map((c) => getComputedStyle(document.querySelector(c)).backgroundColor)"
    )
    assert colours[0] != colours[1]
    assert not page.complaints()


def test_the_same_without_drafts(page: Browser) -> None:
    ask(page, "Hello", max_tokens="40", effort="none", temperature="1")
    page.wait("the answer", lambda: idle(page) and page.count(".facts button"))
    page.click(".facts button")
    page.wait("the comparison", lambda: page.count(".note.good, .note.bad"))
    assert page.text(".note").startswith("Identical: the same ")
    assert not page.complaints()


def test_thinking_is_apart(page: Browser) -> None:
    ask(page, "Hello", max_tokens="24", effort="high", seed="1")
    page.wait("the answer", lambda: idle(page))
    assert page.count(".thought .k") > 0
    assert "Thinking, " in page.text(".thought summary")
    assert not page.complaints()


def test_charts_move(page: Browser) -> None:
    before = ink(page, "throughput")
    ask(page, "Hello", max_tokens="900", effort="none")
    page.wait("a rate", lambda: page.text("#f-rate") not in ("–", "0"))
    page.wait("another picture", lambda: ink(page, "throughput") != before)
    page.wait("a budget", lambda: page.count('[data-chart="budget"]:not(.empty)'))
    page.wait("a cost curve", lambda: page.count('[data-chart="cost"]:not(.empty)'))
    page.wait("places", lambda: page.count('[data-chart="depth"]:not(.empty)'))
    for chart in ("length", "queue", "memory", "cost", "depth"):
        assert ink(page, chart) > 0, chart
    assert "widths are fixed" in page.text('[data-chart="reliability"]')
    page.wait("the end", lambda: idle(page), 60)
    assert not page.complaints()


def test_predictions_are_shown(window: Browser, folder: Path) -> None:
    for url in serve(folder, speculative={**FIXED, "enable_adaptive_verification": True}):
        window.size(1280, 800)
        window.open(url)
        window.wait("ready", lambda: window.text("#state") == "ready")
        ask(window, "Hello", max_tokens="400", effort="none")
        window.wait("reliability", lambda: window.count('[data-chart="reliability"]:not(.empty)'), 60)
        window.wait("a prediction", lambda: "the prediction" in window.text('[data-chart="cost"] figcaption'))
        assert ink(window, "reliability") > 0
        assert not window.complaints()


def test_escape_stops(page: Browser) -> None:
    ask(page, "Hello", max_tokens="1000", effort="none")  # greedy: it goes round in circles
    page.wait("a token", lambda: page.count(".k"))
    page.type("body", ESCAPE)
    page.wait("the end", lambda: idle(page), 5)
    assert page.text(".problem") == "stopped"
    page.wait("the slot is free", lambda: page.text("#state") == "ready")


def test_keys(page: Browser) -> None:
    ask(page, "Hello", max_tokens="12", effort="none", seed="3")
    page.wait("the answer", lambda: idle(page) and page.count(".facts b"))
    page.run("document.querySelector('.answer .text').focus()")
    page.type(".answer .text", RIGHT_ARROW + RIGHT_ARROW)
    assert page.count(".k.here") == 1 and "step " in page.text("#tip")
    page.run("document.activeElement.blur()")
    page.type("body", "t")
    assert page.run("return document.body.classList.contains('colours')") is False
    page.type("body", "?")
    assert page.count("#help[open]") == 1
    page.run("document.getElementById('help').close()")
    page.type("body", "d")
    assert page.run("return document.documentElement.dataset.theme") in ("light", "dark")
    page.type("body", "n")
    assert page.count(".answer") == 0
    assert not page.complaints()


def test_a_refused_request_says_why(page: Browser) -> None:
    ask(page, "", prompt="x" * 3000, max_tokens="8")
    page.wait("the error", lambda: page.count(".problem"))
    assert "max_model_len" in page.text(".problem")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone(page: Browser, url: str, scheme: str) -> None:
    """At 390 pixels nothing sticks out, and the engine is one tap away; text is readable in light and dark."""
    page.size(390, 844, mobile=True)
    page.scheme(scheme)
    ask(page, "Hello", max_tokens="30", effort="none", seed="3")
    page.wait("the answer", lambda: idle(page) and page.count(".facts b"))
    page.click("#settings-button")
    assert page.count("#settings:not([hidden])") == 1
    assert rightmost(page, "#chat") <= 390
    for css in (".k.d", ".k.s", ".facts", "#prompt"):
        assert contrast(page, css) >= 4.5, css
    page.click('[data-show="board"]')
    page.wait("charts", lambda: page.run("return document.getElementById('charts').clientHeight") > 500)
    assert rightmost(page, "#board") <= 390
    assert contrast(page, ".chart figcaption span") >= 4.5


@pytest.mark.parametrize("width", [821, 1000, 1200, 1600])
def test_nothing_sticks_out(page: Browser, width: int) -> None:
    page.size(width, 760)
    page.click("#settings-button")
    edge = page.run("return document.getElementById('board').getBoundingClientRect().left")
    assert rightmost(page, "#chat") <= edge + 1
    assert rightmost(page, "#board") <= width


def rightmost(page: Browser, css: str) -> float:
    """The right edge of whatever is visible inside an element."""
    return float(
        page.run(
            "const all = [...document.querySelectorAll(arguments[0] + ' *')].filter((e) => e.checkVisibility());"
            "return Math.max(...all.map((e) => e.getBoundingClientRect().right))",
            css,
        )
    )


def contrast(page: Browser, css: str) -> float:
    """WCAG contrast of an element's text with what is behind it."""
    return float(
        page.run(
            """
            const lum = (c) => { const v = c.map((x) => x / 255).map((x) => x <= 0.03928 ? x / 12.92
                : ((x + 0.055) / 1.055) ** 2.4); return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
            const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
            let e = document.querySelector(arguments[0]); const ink = rgb(getComputedStyle(e).color);
            let back = rgb(getComputedStyle(e).backgroundColor);
            while (back.length === 4 && back[3] === 0) {
                e = e.parentElement;
                back = rgb(getComputedStyle(e).backgroundColor);
            }
            const [a, b] = [lum(ink), lum(back)].sort((x, y) => y - x); return (a + 0.05) / (b + 0.05);
            """,
            css,
        )
    )


def test_without_speculation_it_says_so(window: Browser, folder: Path) -> None:
    for url in serve(folder, speculative=None):
        window.size(1280, 800)
        window.open(url)
        window.wait("the notice", lambda: "Speculation is off" in window.text("#notices"))
        window.wait(
            "the chart's reason", lambda: "no speculative config" in window.text('[data-chart="length"]')
        )


def test_with_a_key(window: Browser, folder: Path) -> None:
    for url in serve(folder, speculative=None, api_keys=("s3cret",)):
        window.open(url)
        window.wait("the question", lambda: window.count("#key-dialog[open]"))
        window.type("#key", "s3cret")
        window.click('#key-dialog button[value="ok"]')
        window.wait("ready", lambda: window.text("#state") == "ready")
        window.run("document.activeElement.blur()")  # the driver types nowhere right after a dialog
        ask(window, "Hello", max_tokens="24", effort="none")
        window.wait("the answer", lambda: idle(window) and window.count(".k"))
