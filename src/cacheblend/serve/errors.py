"""Errors as OpenAI's clients know them."""

import logging
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from cacheblend.core.errors import CacheBlendError, InvalidInputError, StoreError
from cacheblend.engines.hf.tickets import ClosedError, QueueFullError, TooLateError

logger = logging.getLogger("cacheblend.serve")
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """What a client is told.

    Attributes:
        status: of HTTP.
        message: for people.
        param: the field that is wrong; None: none in particular.
        code: for programs.
        retry_after_s: seconds after which to ask again; None: nothing is said of it.
    """

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
        """The JSON object."""
        kind = _TYPES.get(self.status, "api_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        headers = {} if self.retry_after_s is None else {"Retry-After": str(max(1, round(self.retry_after_s)))}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body(), self.status, headers)


def log_internal(error: Exception) -> ApiError:
    """What a client is told; where that says that the log says why, it does."""
    told = api_error(error)
    if told.code == "internal":
        logger.error("a request failed", exc_info=error)
    return told


def api_error(error: Exception) -> ApiError:
    """What a client is told of an error; of one that is not its own doing nothing but that there was one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidInputError):
        return ApiError(400, str(error))
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", retry_after_s=error.retry_after_s)
    if isinstance(error, TooLateError):
        return ApiError(503, str(error), code="timeout", retry_after_s=1)
    if isinstance(error, ClosedError):
        return ApiError(503, str(error), code="shutting_down", retry_after_s=5)
    if isinstance(error, StoreError):
        return ApiError(503, "the store cannot be used at the moment", code="store", retry_after_s=5)
    if isinstance(error, HTTPException):
        why = f": {error.__cause__}" if error.status_code == 400 and error.__cause__ else ""  # of a body
        return ApiError(error.status_code, f"{error.detail}{why}")
    if isinstance(error, CacheBlendError):
        return ApiError(400, str(error))
    return ApiError(503, "the request failed inside the server; its log says why", code="internal", retry_after_s=1)
