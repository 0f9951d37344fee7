"""What went wrong, as an OpenAI client expects it: a status code and ``{"error": {...}}``."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from runtime.errors import (
    ContextLengthError,
    EngineClosedError,
    RejectedError,
    RequestCancelledError,
    RequestTimeoutError,
    StepFailedError,
)

_ENGINES_NAMES = {"tenant": "user", "prompt": "messages"}  # for fields of requests
CLIENT_GONE = 499  # nobody will read it; as in nginx's logs
_TYPES = {404: "not_found_error", 405: "invalid_request_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error. ``param`` names the field at fault; ``code`` is a name for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _encodable(message)
        self.param = None if param is None else _encodable(param)
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """``Retry-After`` is in whole seconds by its standard; ``retry-after-ms`` is what OpenAI's own clients look at first."""
        if self.retry_after_s is None:
            return {}
        milliseconds = max(1, math.ceil(self.retry_after_s * 1000))
        return {"retry-after": str(math.ceil(milliseconds / 1000)), "retry-after-ms": str(milliseconds)}

    @property
    def event(self) -> bytes:
        """The error as an event of a stream that has already begun."""
        return b"data: " + json.dumps(self.body).encode() + b"\n\n"


def _encodable(text: str) -> str:
    """``text``, in which half of a surrogate pair, such as a client may send, is escaped: UTF-8 has no bytes for it."""
    return text.encode("utf-8", "backslashreplace").decode()


def bad_input(error: ValueError, fields: Collection[str]) -> ApiError:
    """The answer to a value that the engine refuses. A message that begins with one of ``fields``, or with the engine's name for
    it, is about that field."""
    message = str(error)
    first = message.partition(" ")[0].rstrip(":")
    field = first if first in fields else _ENGINES_NAMES.get(first)
    if first == "tenant":  # what a client does not know
        message = message.replace("tenant", "user", 1)
    # OpenAI's name for it: clients look for it to send less
    code = "context_length_exceeded" if isinstance(error, ContextLengthError) else "invalid_value"
    return ApiError(400, message, param=field if field in fields else None, code=code)


def api_error(error: BaseException) -> ApiError:
    """The answer to whatever was raised on the way."""
    text = str(error)
    match error:
        case ApiError():
            return error
        case RejectedError(reason="queue_full" | "slo" | "queue_timeout"):
            return ApiError(429, text, code=error.reason, retry_after_s=error.retry_after_s or 1.0)
        case RejectedError(reason="closed") | EngineClosedError():
            return ApiError(503, text, code="engine_closed")
        case RejectedError():  # the scheduler had the last word on what can never run
            return ApiError(400, text, code="invalid_value")
        case RequestCancelledError():
            return ApiError(503, text, code="cancelled")
        case RequestTimeoutError():
            return ApiError(504, text, code="timeout")
        case StepFailedError():
            return ApiError(500, text, code="step_failed")
    return ApiError(500, f"{type(error).__name__}: {text}", code="internal_error")


def validation_error(complaints: Sequence[Mapping[str, Any]], fields: Collection[str]) -> ApiError:
    """The first complaint of pydantic about a body, as one line: field, value, what is allowed."""
    first = complaints[0]
    kind, loc = first["type"], [part for part in first["loc"] if part != "body"]
    more = f" (and {len(complaints) - 1} more)" if len(complaints) > 1 else ""
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}", code="invalid_json")
    if not loc:
        return ApiError(400, "the body must be a JSON object, with content-type: application/json", code="invalid_json")
    where = ".".join(str(part) for part in loc)
    param = str(loc[0])
    if kind == "missing":
        return ApiError(400, f"{where} is missing{more}", param=param, code="missing_field")
    if kind == "extra_forbidden":
        known = "" if len(loc) > 1 else f"; the fields are {', '.join(fields)}"
        return ApiError(400, f"{where} is not a field{known}{more}", param=param, code="unknown_field")
    if kind == "value_error":  # one of our own, which says everything but where
        return ApiError(400, f"{where} {first['ctx']['error']}{more}", param=param, code="invalid_value")
    allowed = first["msg"].removeprefix("Input should be ")
    return ApiError(
        400, f"{where} is {shown(first['input'])}; it must be {allowed}{more}", param=param, code="invalid_value"
    )


def shown(value: object) -> str:
    """``value`` as a client wrote it, cut short."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    text = _encodable(text)  # pydantic cannot take half of a surrogate pair either
    return text if len(text) <= 60 else text[:57] + "..."
