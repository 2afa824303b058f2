"""Errors in the form that OpenAI's clients expect: `ApiError`, and the handlers that turn all others into it."""

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from cacheblend.core.errors import CacheBlendError, ModelChangedError, StoreError, shown
from cacheblend.core.failures import count_failure
from cacheblend.engines.hf.scheduler import ClosedError, QueueFullError, TooLateError
from cacheblend.serve.log_lines import request_id

logger = logging.getLogger("cacheblend.serve")
_LONGEST, _LONGEST_NAME = 1000, 200  # characters of a message, and of a field's name, that are sent
_KINDS = {"int": "an integer", "float": "a number", "finite": "a number", "bool": "true or false", "string": "a text"}
_KINDS |= {"list": "a list", "tuple": "a list", "dict": "an object", "model": "an object"}
_RULES = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
}
"""What pydantic's kinds of errors say here; others are about a value's kind, or have a sentence of their own."""


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
        self.status, self.message, self.param, self.code = status, _cut(message, _LONGEST), param, code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else kind
        param = self.param and _cut(self.param, _LONGEST_NAME)
        return {"error": {"message": self.message, "type": kind, "param": param, "code": self.code}}

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
        where, what = _described(error.errors(), error.body)
        if not where and first["type"] != "value_error":
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


def _described(errors: Sequence[Any], body: Any) -> tuple[str, str]:
    """Where the first wrong value is, by the request's own names, and what it should be. A value that may have several
    forms has an error for each of them: those that got furthest into it count."""
    found: dict[str, list[Any]] = {}
    for each in errors:
        place, value = list[str](), body
        for part in each["loc"][1:]:  # has names of pydantic's, too: of a form, of a key
            is_key = isinstance(value, dict) and part in value
            if is_key or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
                value = value[part]
            elif each["loc"][0] == "body" and (each["type"] != "missing" or part != each["loc"][-1]):
                continue
            place.append(_cut(str(part), 80))
        if each["loc"][:2] == errors[0]["loc"][:2]:
            found.setdefault(".".join(place), []).append(each)
    where = max(found, key=lambda name: name.count("."))
    kinds = [_KINDS.get(each["type"].partition("_")[0]) for each in found[where] if each["type"] not in _RULES]
    first = found[where][0]
    if first["type"] in ("missing", "extra_forbidden"):
        return where, "is missing" if first["type"] == "missing" else "there is no such field"
    if first["type"] in _RULES:
        what = _RULES[first["type"]].format(**first["ctx"])
    elif kinds[0] is None:
        return where, str(first.get("ctx", {}).get("error", first["msg"]))
    else:
        what = f"must be {' or '.join(dict.fromkeys(kind for kind in kinds if kind))}"
    given = first["input"]
    given = {list: "a list", dict: "an object"}.get(type(given)) or shown(given[:100] if type(given) is str else given)
    return where, f"{what}; got {given}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."
