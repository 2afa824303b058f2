"""What a server's routes share: engine, scheduler, metrics, tenants and settings, and who a request is from."""

import time
from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import Depends, Request

from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.scheduler import Limits, QueueFullError, Scheduler
from cacheblend.engines.tokens.builder import PromptBuilder
from cacheblend.serve.errors import ApiError
from cacheblend.serve.fair_queue import FairQueue, Work
from cacheblend.serve.keys import ApiKey
from cacheblend.serve.metrics import Metrics
from cacheblend.serve.prompts import TextLimit
from cacheblend.serve.settings import ServeSettings
from cacheblend.serve.tenants import Tenants
from cacheblend.serve.tool_calls import format_of

T = TypeVar("T")
PARSERS = 4  # requests that are tokenised at a time


class ServerState:
    """State of one server. Methods may be called from any thread, coroutines on the server's loop. The engine stays
    open after the server has stopped; its owner closes it."""

    def __init__(self, engine: BlendEngine, settings: ServeSettings) -> None:
        self.engine, self.settings = engine, settings
        if settings.shadow_settings is not None:
            engine.runtime.watch(settings.shadow_settings)
        self.scheduler = Scheduler(engine.runtime, Limits(settings.active, settings.waiting))
        self.metrics = Metrics(engine.runtime, lambda: self.waiting, lambda: self.scheduler.active)
        if settings.store_bytes is not None and engine.runtime.histories is not None:
            raise InvalidInputError("--edits stores text, which no quota counts: leave out --store-quota, or --edits")
        self.tenants = Tenants(engine, settings.store_bytes, settings.pin_bytes)
        self.text_limit = TextLimit(engine, settings.max_prompt_tokens)
        # In which tool calls are read from answers; None: they are not.
        self.call_format = format_of(settings.tool_call_parser, getattr(engine.tokenizer, "chat_template", None))
        self._side = FairQueue(1, settings.waiting)
        self._parsing = FairQueue(PARSERS, settings.waiting)
        self._compiling = FairQueue(1, settings.waiting)
        self.queues = (self._side, self._parsing, self._compiling)

    @property
    def waiting(self) -> int:
        """Requests that wait to be read, for the form of their answer, or to be run."""
        return self._parsing.waiting + self._compiling.waiting + self.scheduler.waiting

    def body_bytes(self, path: str) -> int:
        """Bytes of a body to a path: of one prompt, or of many chunks."""
        most = self.settings.max_body_bytes
        if path.startswith(("/v1/chunks", "/v1/documents")):
            return most
        return min(most, self.text_limit.body_bytes or most)

    async def parse(self, request: Request, work: Callable[[], T]) -> T:
        """Runs what makes a request's prompt, which takes a place in the queue. Raises as `FairQueue.run`."""
        return await self._prepare(self._parsing, request, work)

    async def compile(self, request: Request, work: Callable[[], T]) -> T:
        """Runs what compiles the form of an answer, which may take seconds: one at a time; no prompt waits for it."""
        return await self._prepare(self._compiling, request, work)

    async def _prepare(self, queue: FairQueue, request: Request, work: Callable[[], T]) -> T:
        counts = self._parsing.waiting_of + self.scheduler.waiting_of  # forms have a bound of their own
        # Another key that has more gives way, once the prompt is made: see `Scheduler.submit_prompts`.
        if counts.total() >= self.settings.waiting and max(counts.values()) <= counts[request.state.tenant] + 1:
            raise QueueFullError(counts.total(), 1)
        return await self._run(queue, request, work)

    async def run_serially(self, request: Request, work: Work[T]) -> T:
        """Runs work that does not go through the scheduler (storing, explaining), a slice at a time. The key takes
        turns with the others; a function's generator lets others go first at each ``yield``. Raises as `parse`."""
        return await self._run(self._side, request, work)

    async def _run(self, queue: FairQueue, request: Request, work: Work[T]) -> T:
        deadline = time.monotonic() + self.settings.timeout_s
        return await queue.run(request.state.tenant, work, deadline, request.is_disconnected)

    def key_of_header(self, authorization: str | None) -> ApiKey:
        """The key in an ``Authorization`` header; raises `ApiError` if it has none, or an unknown one."""
        key = self.settings.keys.find(authorization)
        if key is None:
            raise ApiError(401, "this server needs an API key: Authorization: Bearer KEY", code="invalid_api_key")
        return key

    def check_size(self, prompt: Prompt) -> None:
        """Raises `ApiError` if a prompt has more tokens or more chunks than the settings allow."""
        max_tokens, max_chunks = self.settings.max_prompt_tokens, self.settings.max_chunks
        if max_tokens is not None and len(prompt) > max_tokens:
            raise ApiError(400, f"the prompt has {len(prompt)} tokens; at most {max_tokens} are read", code="too_long")
        if len(prompt.chunks) > max_chunks:
            raise ApiError(400, f"the prompt has {len(prompt.chunks)} chunks; at most {max_chunks} are allowed")

    def builder(self) -> PromptBuilder:
        """What tokenises texts. Raises `ApiError` if the engine has no tokenizer."""
        if self.engine.runtime.builder is None:
            raise ApiError(400, "this server has no tokenizer")
        return self.engine.runtime.builder

    def token_bytes(self, token: int) -> bytes:
        """What a token stands for, which may be a part of a character; of a special token its text."""
        return self.engine.runtime.builder.token_bytes(token) if self.engine.runtime.builder else str(token).encode()

    def token_name(self, token: int) -> str:
        """A token's text; where it is a part of a character its bytes, as OpenAI writes them: ``\\xf0\\x9f``."""
        return self.token_bytes(token).decode(errors="backslashreplace")


async def authenticate(request: Request) -> ApiKey:
    """The key that a request is made with; noted for the log and the queues. Raises as `ServerState.key_of_header`."""
    state: ServerState = request.app.state.server
    key = state.key_of_header(request.headers.get("authorization"))
    request.state.key, request.state.tenant = key.name, key.label
    return key


Key = Annotated[ApiKey, Depends(authenticate)]  # parameter of a route that needs a key
