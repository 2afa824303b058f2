"""Errors in the form that OpenAI's clients expect: `ApiError`, and the handlers that turn all others into it."""

import logging
import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from cacheblend.core.errors import CacheBlendError, ModelChangedError, ModelOverflowError, StoreError, shown
from cacheblend.core.failures import count_failure
from cacheblend.engines.hf.scheduler import ClosedError, QueueFullError, TooLateError
from cacheblend.serve.log_lines import request_id

logger = logging.getLogger("cacheblend.serve")
_WORDS = {"string": "a text", "dictionary": "an object", "boolean": "true or false", "integer": "an integer"}
_FORMS = re.compile(r"str|bool|constrained-.*|.*\[.*")
"""What pydantic calls the forms that a value may have; no field of a request is called so."""


class ApiError(Exception):
    """An error that is sent to the client: a message for people, the wrong field if it is one, a code for programs, and
    seconds after which to try again, if that may help."""

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
        self.message = message if len(message) <= 1000 else f"{message[:996]} ..."
        self.status, self.param, self.code = status, param and param[:200], code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(max(1, round(self.retry_after_s)))}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def api_error(error: Exception) -> ApiError:
    """The error to send to the client. One that the client did not cause is logged, and sent without its details."""
    match error:
        case ApiError():
            return error
        case ModelChangedError():
            return ApiError(503, str(error), code="model_changed", retry_after_s=1)
        case QueueFullError():
            return ApiError(429, str(error), code="queue_full", retry_after_s=error.retry_after_s)
        case TooLateError():
            return ApiError(503, str(error), code="timeout", retry_after_s=1)
        case ClosedError():
            return ApiError(503, str(error), code="shutting_down", retry_after_s=5)
        case StoreError():
            return ApiError(503, "the store is not available at the moment", code="store", retry_after_s=5)
        case ModelOverflowError():
            logger.error("%s", error, extra={"request_id": request_id.get()})
            count_failure("request")
            return ApiError(500, str(error), code="model_overflow")
        case CacheBlendError():
            return ApiError(400, str(error))
    logger.error("a request failed", exc_info=error, extra={"request_id": request_id.get()})
    count_failure("request")
    return ApiError(503, "the request failed inside the server; its log says why", code="internal", retry_after_s=1)


def add_error_handlers(app: FastAPI) -> None:
    """Makes the app answer invalid requests, HTTP errors and `ApiError`s in OpenAI's form."""

    @app.exception_handler(RequestValidationError)
    async def invalid_request(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            where = f"character {first['loc'][-1]}"
            return ApiError(400, f"the body is not JSON: {first['ctx']['error']}, {where}").response()
        where, what = _described(error.errors())
        if not where and first["type"] not in ("value_error", "extra_forbidden"):
            return ApiError(400, "the body is not a JSON object, sent as application/json").response()
        return ApiError(400, f"{where}: {what}" if where else what, param=where or None).response()

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        cause = f": {error.__cause__}" if error.status_code == 400 and error.__cause__ else ""  # a body that is no JSON
        response = ApiError(error.status_code, f"{error.detail}{cause}").response()
        response.headers.update(error.headers or {})  # a 405's Allow
        return response

    @app.exception_handler(ApiError)
    async def own_error(_: Request, error: ApiError) -> Response:
        return error.response()


def _described(errors: Sequence[Any]) -> tuple[str, str]:
    """Where the first wrong value is, by the request's own names, and what it should be. A value that may have several
    forms has an error for each of them: those that got furthest into it count."""
    found: dict[str, list[Any]] = {}
    for each in errors:
        place = ".".join(part[:80] for part in map(str, each["loc"][1:]) if not _FORMS.fullmatch(part))
        if each["loc"][:2] == errors[0]["loc"][:2]:
            found.setdefault(place, []).append(each)
    where = max(found, key=lambda name: name.count("."))
    first = found[where][0]
    if first["type"] in ("missing", "extra_forbidden"):
        return where, "is missing" if first["type"] == "missing" else "there is no such field"
    what = " or ".join(dict.fromkeys(_in_our_words(each["msg"]) for each in found[where])).replace(" or must be", " or")
    if first["type"] == "value_error":
        return where, what
    given = first["input"]
    if isinstance(given, list | dict):  # of any length
        return where, f"{what}; got {'a list' if isinstance(given, list) else 'an object'}"
    return where, f"{what}; got {shown(given[:100] if isinstance(given, str) else given)}"


def _in_our_words(message: str) -> str:
    if kind := re.match(r"Input should be a (?:valid|finite) (\w+)", message):
        return f"must be {_WORDS.get(kind[1], f'a {kind[1]}')}"
    return re.sub(r"^\w+ should ", "must ", message.removeprefix("Value error, ").replace(" after validation", ""))
