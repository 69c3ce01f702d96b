"""The parts of HTTP that all routes share: bodies, errors, event streams, keys, clients that leave."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from firesteel.serve.errors import ApiError, bad

log = logging.getLogger("firesteel.serve")
Result = TypeVar("Result")
OPEN_PATHS = frozenset({"/health", "/ready", "/ping", "/version", "/metrics"})


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8; lone surrogates, which clients can send, become escapes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "backslashreplace")


class Json(Response):
    """A JSON body."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body's bytes."""
        return dumps(content)


def error_response(error: ApiError) -> Response:
    """OpenAI's form of an error."""
    return Json(error.body(), error.status, error.headers)


async def read_json(request: Request, limit: int) -> Mapping[str, Any]:
    """The body as a JSON object; raises ApiError 413 above ``limit`` bytes, 400 for anything else."""
    too_large = ApiError(
        413, f"the request has more than {limit} bytes; shorten it or raise --max-request-bytes"
    )
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise too_large
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise too_large
    except ClientDisconnect as err:
        raise ClientGone from err
    try:
        value = json.loads(bytes(body))
    except (ValueError, RecursionError) as err:
        raise bad(None, f"the body is not JSON ({err})", "invalid_json") from err
    if not isinstance(value, dict):
        raise bad(None, "the body is not a JSON object", "invalid_json")
    return value


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``; if the client leaves first, it is cancelled and ClientGone raised."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, watch):
            each.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _left(receive: Receive) -> None:
    """Returns when the connection is closed; the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. ``close`` runs when the last is sent or the client has left."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], Awaitable[object]]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until there is nothing left, or nobody."""
        sender = asyncio.ensure_future(self._send(send))
        watch = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({sender, watch}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        except OSError:
            pass  # the client left while something was being sent
        finally:
            for each in (sender, watch):
                each.cancel()
            await asyncio.gather(sender, watch, return_exceptions=True)
            await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Gate:
    """Outermost layer: keys, counting, and errors that nobody has caught.

    keys: accepted API keys; none means open. The paths of probes stay open, and ``free`` ones.
    count: called with (path, status) of every response.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], count: Callable[[str, int], None], free: Iterable[str] = ()
    ) -> None:
        self._app, self._count, self._open = app, count, OPEN_PATHS.union(free)
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if self._locked(scope):
                raise ApiError(401, "no valid API key; send it as 'Authorization: Bearer KEY'")
            await self._app(scope, receive, counted)
        except ClientGone:
            await Response(status_code=499)(scope, receive, counted)  # nobody reads it; it is counted
        except (ApiError, HTTPException) as err:
            await error_response(as_api_error(err))(scope, receive, counted)
        except Exception:
            name = secrets.token_hex(8)
            log.exception("error %s while answering %s", name, scope["path"])
            if status == 0:
                failure = ApiError(
                    500, f"the server failed on this request; look for error {name} in its log"
                )
                await error_response(failure)(scope, receive, counted)
        finally:
            self._count(scope["path"], status)

    def _locked(self, scope: Scope) -> bool:
        if not self._keys or scope["path"] in self._open or scope["method"] == "OPTIONS":
            return False
        sent = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = sent.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return kind.lower() != b"bearer" or not any(matches)


def as_api_error(err: ApiError | HTTPException) -> ApiError:
    """Also for what the router raises: unknown paths and wrong methods."""
    if isinstance(err, ApiError):
        return err
    return ApiError(
        err.status_code, {404: "no such path", 405: "wrong method"}.get(err.status_code, err.detail)
    )
