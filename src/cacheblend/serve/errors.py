"""Errors in the form that OpenAI's clients expect: `ApiError`, and the handlers that turn all others into it."""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from cacheblend.core.errors import CacheBlendError, ModelChangedError, StoreError
from cacheblend.core.failures import count_failure
from cacheblend.engines.hf.scheduler import ClosedError, QueueFullError, TooLateError
from cacheblend.serve.log_lines import request_id

logger = logging.getLogger("cacheblend.serve")
_TYPES = dict.fromkeys((400, 413, 422), "invalid_request_error") | dict.fromkeys((408, 504), "timeout_error")
_TYPES |= {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_TYPES |= {503: "service_unavailable_error"}


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
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "api_error")
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
        where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
        if not where:
            return ApiError(400, "the body is not a JSON object, sent as application/json").response()
        return ApiError(400, f"{where}: {first['msg']}", param=where).response()

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        cause = f": {error.__cause__}" if error.status_code == 400 and error.__cause__ else ""  # a body that is no JSON
        response = ApiError(error.status_code, f"{error.detail}{cause}").response()
        response.headers.update(error.headers or {})  # a 405's Allow
        return response

    @app.exception_handler(ApiError)
    async def own_error(_: Request, error: ApiError) -> Response:
        return error.response()
