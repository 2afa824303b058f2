"""What an error in a request's blending means for its client and for figures. Raises nothing."""

import logging
from dataclasses import dataclass

from cacheblend.core.errors import InvalidInputError, StoreError
from cacheblend.engines.vllm.reasons import BAD_SPANS, SLOW_STORE, UNREADABLE
from cacheblend.engines.vllm.scheduler.adapters import AdapterUnusableError

logger = logging.getLogger("cacheblend.vllm")


@dataclass(frozen=True)
class Failure:
    """Why a request is left to vLLM.

    Attributes:
        label: in `fallbacks`.
        reason: one of few, in the answer and in `not_blended`.
        detail: what is wrong, for the client.
    """

    label: str
    reason: str
    detail: str = ""


def failure_of(error: Exception, request_id: str) -> Failure:
    """Names and logs an error."""
    where = f"request {request_id} is not blended"
    if isinstance(error, InvalidInputError):
        logger.warning("%s: %s", where, error)
        return Failure(BAD_SPANS, "bad parameters", str(error))
    if isinstance(error, AdapterUnusableError):
        logger.warning("%s: its LoRA adapter: %s", where, error)
        return Failure(error.reason, error.reason, str(error))
    if isinstance(error, TimeoutError):
        logger.warning("%s: the store did not answer in time", where)
        return Failure(SLOW_STORE, SLOW_STORE)
    if isinstance(error, StoreError | OSError):
        logger.warning("%s: %s", where, error)
        return Failure(UNREADABLE, UNREADABLE)
    logger.error(where, exc_info=error)
    return Failure(type(error).__name__, type(error).__name__)
