"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

import re
from typing import Any

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
MAX_MESSAGE = 2000  # characters; messages quote what was sent
_NAMED = re.compile(r"([a-z][a-z_0-9]*(?:\[\d+\])?(?:\.[A-Za-z_0-9.\[\]]+)?)(?:=|:)")


class ApiError(Exception):
    """What a client gets instead of an answer.

    ``param`` is the field of the request at fault; ``retry_after`` seconds
    after which another try makes sense.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        if len(message) > MAX_MESSAGE:
            message = message[: MAX_MESSAGE // 2] + " ... " + message[-MAX_MESSAGE // 2 :]
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """The JSON object of the response, or of the last event of a stream."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        code = self.code if self.code is not None else self.status
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response."""
        out = {"retry-after": str(self.retry_after)} if self.retry_after is not None else {}
        if self.status == 401:
            out["www-authenticate"] = "Bearer"
        return out


def bad(param: str | None, problem: str, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, f"{param}: {problem}" if param else problem, param=param, code=code)


def of_parameter(message: str) -> ApiError:
    """A 400 from the text of a ParameterError, which begins with the name of the field."""
    named = _NAMED.match(message)
    return ApiError(400, message, param=named.group(1) if named else None)


def unavailable(message: str, retry_after: int = 5) -> ApiError:
    """A 503: nothing is wrong with the request."""
    return ApiError(503, message, code="unavailable", retry_after=retry_after)
