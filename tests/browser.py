"""A headless browser by the WebDriver protocol: what the page's tests need of it, without a client library."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id, by the standard
DRIVERS = ("chromedriver", "chromium.chromedriver")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--no-first-run", "--disable-extensions", "--disable-background-networking", "--force-color-profile=srgb",
)  # fmt: skip


def missing() -> str | None:
    """Why there is no browser here, or None."""
    for names in (DRIVERS, BROWSERS):
        if not any(map(shutil.which, names)):
            return f"no {' or '.join(names)} on the PATH"
    return None


class Browser:
    """One window."""

    def __init__(self, http: httpx2.Client, session: str) -> None:
        self._http, self._session = http, session

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        reply = self._http.request(method, f"/session/{self._session}{path}", json=body)
        value = reply.json()["value"]
        assert reply.status_code == 200, value
        return value

    def open(self, url: str) -> None:
        """Load a page."""
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """What a script returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def find(self, css: str) -> str:
        """An element's id; raises AssertionError if there is none."""
        return str(self._call("POST", "/element", {"using": "css selector", "value": css})[ELEMENT])

    def click(self, css: str) -> None:
        """Click as a person would: it must be visible."""
        self._call("POST", f"/element/{self.find(css)}/click", {})

    def type(self, css: str, text: str) -> None:
        """Type into an element; U+E007 is Enter, U+E00C Escape."""
        self._call("POST", f"/element/{self.find(css)}/value", {"text": text})

    def text(self, css: str) -> str:
        """The visible text of an element."""
        return str(self._call("GET", f"/element/{self.find(css)}/text"))

    def count(self, css: str) -> int:
        """How many elements match."""
        return int(self.run("return document.querySelectorAll(arguments[0]).length", css))

    def wait(self, what: str, holds: Callable[[], Any], seconds: float = 20.0) -> Any:
        """The first true value of ``holds``; raises AssertionError with ``what`` if time runs out."""
        deadline = time.monotonic() + seconds
        while not (value := holds()):
            assert time.monotonic() < deadline, f"not in {seconds:g} s: {what}"
            time.sleep(0.05)
        return value

    def devtools(self, method: str, **params: Any) -> Any:
        """A command of the browser's own protocol."""
        return self._call("POST", "/goog/cdp/execute", {"cmd": method, "params": params})

    def size(self, width: int, height: int, mobile: bool = False, scale: float = 1.0) -> None:
        """The viewport in CSS pixels."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, mobile=mobile, deviceScaleFactor=scale,
        )  # fmt: skip

    def scheme(self, name: str) -> None:
        """What the system prefers: light or dark."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.devtools("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: Path) -> None:
        """A PNG of what is visible."""
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def complaints(self) -> list[str]:
        """What the console said since the last call, warnings and errors only."""
        entries = self._call("POST", "/se/log", {"type": "browser"})
        return [e["message"] for e in entries if e["level"] in ("WARNING", "SEVERE")]


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A window of a fresh browser; ``profile`` is an empty folder for what it keeps."""
    program = next(filter(None, map(shutil.which, DRIVERS)))
    binary = next(filter(None, map(shutil.which, BROWSERS)))
    log = profile / "driver.log"
    with log.open("w") as out:
        driver = subprocess.Popen(
            [program, "--port=0"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "HOME": str(profile)},
        )
    try:
        port = _port(log, driver)
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            options: dict[str, Any] = {"binary": binary, "prefs": {"credentials_enable_service": False}}
            options["args"] = [*FLAGS, f"--user-data-dir={profile / 'data'}"]
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            reply = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
            assert reply.status_code == 200, reply.text
            made = Browser(http, reply.json()["value"]["sessionId"])
            try:
                yield made
            finally:
                made._call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(10)


def _port(log: Path, driver: subprocess.Popen[bytes]) -> int:
    """The port that the driver chose."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and driver.poll() is None:
        said = log.read_text()
        if "started successfully on port " in said:
            return int(said.split("started successfully on port ")[1].split(".")[0])
        time.sleep(0.05)
    raise AssertionError(f"the driver did not start: {log.read_text()}")
