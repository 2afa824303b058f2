"""The log: one JSON object a line, with its time, and with the id of the request that it is about."""

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

request_id: ContextVar[str | None] = ContextVar("cacheblend_request_id", default=None)
"""Of the request that is being served; None outside of one."""


class JsonLines(logging.Formatter):
    """A record as one line of JSON: ``time`` (UTC), ``level``, ``logger``, ``request_id``, and ``message`` with
    ``error``, or the fields of a record whose ``fields`` is a dictionary."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "logger": record.name}
        line["request_id"] = getattr(record, "request_id", None) or request_id.get()
        fields = getattr(record, "fields", None)
        line |= fields if isinstance(fields, dict) else {"message": record.getMessage()}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_json() -> None:
    """Has every logger write JSON lines to stderr, in place of what it was told before."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
