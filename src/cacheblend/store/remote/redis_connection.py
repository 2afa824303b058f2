"""The connection to a Redis server or cluster: commands in pipelines, and what may go wrong with them."""

import threading
from functools import partial
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from cacheblend.core.errors import InvalidInputError, StoreError, StoreFullError, StoreUnreachableError


class RedisConnection:
    """Opened on first use. May be used from any thread.

    Args:
        url: ``redis://``, ``rediss://`` or ``valkey://`` host:port/database.
        timeout: seconds that a connection or an answer may take.
        cluster: the server is a node of a cluster.

    Attributes:
        place: the URL without user and password.

    Raises:
        InvalidInputError: redis-py is not installed.
    """

    def __init__(self, url: str, timeout: float, cluster: bool) -> None:
        try:
            import redis
        except ImportError as error:
            raise InvalidInputError("a store in Redis needs redis-py: pip install 'cacheblend[redis]'") from error
        parts = urlsplit(url)
        scheme = parts.scheme.replace("valkey", "redis")
        self.place = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
        from redis.backoff import NoBackoff
        from redis.exceptions import RedisClusterException
        from redis.retry import Retry

        options: dict[str, Any] = {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), 1),  # for a connection that was closed while idle
        }
        if cluster:
            options["retry"] = Retry(NoBackoff(), 0)  # the cluster's client repeats commands of a lost node by itself
        kind = redis.RedisCluster if cluster else redis.Redis
        self._no_answer = (redis.ConnectionError, redis.TimeoutError, RedisClusterException, OSError)
        self._full, self._refused = redis.OutOfMemoryError, redis.RedisError
        self._open = partial(kind.from_url, urlunsplit((scheme, *parts[1:3], "", "")), **options)
        self._client: Any = None  # opened on first use: a cluster's client connects at once
        self._opening = threading.Lock()

    def together(self, ask: Any, all_of: int | None = None) -> list[Any]:
        """The answers to the commands that `ask` adds to a pipeline; commands after the first `all_of` may fail.

        Raises:
            StoreUnreachableError, StoreFullError, StoreError: no answer in time, no memory left, or refused.
        """

        def run() -> list[Any]:
            with self._opening:  # a second client, once garbage, would close connections that are in use
                if self._client is None:
                    self._client = self._open()
            with self._client.pipeline(transaction=False) as pipe:
                ask(pipe)
                answers: list[Any] = pipe.execute(raise_on_error=False)
            for answer in answers[:all_of]:
                if isinstance(answer, Exception):
                    raise answer
            return answers

        try:
            return run()
        except self._no_answer as error:
            message = f"{self.place} does not answer: {error or type(error).__name__}"
            raise StoreUnreachableError(message) from error
        except self._full as error:
            raise StoreFullError(f"{self.place} has no memory left: {error}") from error
        except self._refused as error:
            raise StoreError(f"{self.place} refused: {error}") from error

    def close(self) -> None:
        """Closes it, if it was opened."""
        if self._client is not None:
            self._client.close()
