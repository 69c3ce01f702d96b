"""The page at ``/``: plain files of the package, and the numbers it draws.

The files are open to everybody and hold nothing; the numbers and the chat want
the API key, if there is one. The policy lets a browser load from this server only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from firesteel import __version__
from firesteel.serve.client import EngineState
from firesteel.serve.errors import bad
from firesteel.serve.http import Json

if TYPE_CHECKING:
    from firesteel.serve.app import Server

FOLDER = Path(__file__).parent / "page"
FILES = {
    "/": "index.html",
    "/page/app.js": "app.js",
    "/page/chat.js": "chat.js",
    "/page/charts.js": "charts.js",
    "/page/style.css": "style.css",
    "/page/icon.svg": "icon.svg",
}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # asked for again, answered by 304 unless it changed
}


def handlers(server: Server) -> dict[str, Callable[[Request], Any]]:
    """Path to handler of everything behind the page."""

    async def file(request: Request) -> Response:
        path = FOLDER / FILES[request.url.path]
        return FileResponse(path, media_type=f"{_TYPES[path.suffix]}; charset=utf-8", headers=_HEADERS)

    async def stats(request: Request) -> Response:
        """``?since=T``: the seconds after T (seconds since the epoch) and what is known now."""
        try:
            since = float(request.query_params.get("since", 0))
        except ValueError as err:
            raise bad("since", f"not a number ({err})") from err
        up = server.client.state is EngineState.READY
        return Json({**_head(server), **server.board.snapshot(since, up)})

    return {**dict.fromkeys(FILES, file), "/firesteel/stats": stats}


def _head(server: Server) -> dict[str, Any]:
    client = server.client
    return {
        "model": server.options.names[0],
        "version": __version__,
        "state": "draining" if server.draining else client.state.value,
        "reason": client.reason,
        "restarts": client.restarts,
        "open_requests": client.open_requests,
        "alarms": server.metrics.alarms(),
    }
