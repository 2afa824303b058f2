"""`cacheblend serve` for one way of reuse, and OpenAI's API as a plain client uses it."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

from cacheblend.core.errors import InvalidInputError
from lab.servers.agents.conversation import Marked
from lab.servers.failed import count_failed
from lab.servers.processes import START_S, answers, free_port, running

PREFIX, MARKED, DISCOVERED = "prefix caching", "marked", "discovered"
OPTIONS: dict[str, tuple[str, ...]] = {
    PREFIX: ("--no-discover", "--chunk-tokens", "4"),
    MARKED: ("--no-discover",),
    DISCOVERED: ("--discover",),
}
"""Of each arm's server. All of them capture, and find exact prefixes."""

MARKS: dict[str, Marked | None] = {PREFIX: "question", MARKED: "results", DISCOVERED: None}
"""What each arm's client marks. The text in front of the first chunk is stored as an exact prefix, at its first
sighting. So the question, which never comes again, is prefix caching's only chunk: it gets all that it can use, and
blends nothing. With discovery what prompts begin with is stored at its second sighting."""


@dataclass(frozen=True)
class Answered:
    """A request as its client saw it.

    Attributes:
        ttft_s: seconds to the first token.
        prompt_tokens: of the request.
        hit_tokens: loaded from the store, by how.
        text: of the answer.
    """

    ttft_s: float
    prompt_tokens: int
    hit_tokens: dict[str, int]
    text: str


class ChatClient:
    """Streams chat completions; sends no field that OpenAI does not have.

    Args:
        url: of the server.
        process: of the server.
    """

    def __init__(self, url: str, process: "Popen[Any]") -> None:
        import httpx

        self._http, self._process = httpx.Client(base_url=url, timeout=START_S), process
        self._model = self._http.get("/v1/models").json()["data"][0]["id"]

    def ask(self, messages: Sequence[dict[str, Any]], tokens: int) -> Answered:
        """Sends one request; the time includes making its JSON.

        Raises:
            InvalidInputError: the server did not answer.
        """
        started, first, text = time.perf_counter(), 0.0, ""
        report: dict[str, Any] = {}
        body = {"model": self._model, "messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
        with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise InvalidInputError(f"the server answered {answer.status_code}: {answer.read().decode()[:500]}")
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise InvalidInputError(f"the server ended the stream: {event['error']['message']}")
                report = event.get("cacheblend") or report
                delta = event["choices"][0]["delta"] if event.get("choices") else {"role": ""}
                if "role" not in delta:  # the opening event has one, and comes before anything is computed
                    first = first or time.perf_counter() - started
                    text += delta.get("content") or ""
        return Answered(first, report["prompt_tokens"], report["hit_tokens"], text)

    def metric_lines(self) -> list[str]:
        """The server's metrics as it gives them."""
        text: str = self._http.get("/metrics").text
        return text.splitlines()

    def figures(self) -> dict[str, float]:
        """What discovery has done, by the server's metrics."""
        lines = [line for line in self.metric_lines() if line.startswith("cacheblend_discov")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    @contextmanager
    def alone(self, others: Sequence["ChatClient"]) -> Iterator[None]:
        """Stops the other servers meanwhile: what they store in idle time must not slow this one down."""
        for other in others:
            other._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for other in others:
                other._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)


@contextmanager
def chatting(arm: str, folder: Path, ratio: float) -> Iterator[ChatClient]:
    """The server of an arm on a free port, with an empty store; stopped at the end, and asked before what failed in it.

    Args:
        arm: one of `OPTIONS`.
        folder: of the model.
        ratio: recompute ratio.

    Raises:
        InvalidInputError: the server did not start; with the end of its output.
    """
    port = free_port()
    command = [sys.executable, "-c", "from cacheblend.cli import main; main()", "serve", "--model", str(folder)]
    command += ["--port", str(port), "--store", "memory://?max_bytes=4GiB", "--ratio", str(ratio), "--no-playground"]
    command += ["--drain", "1", "--capture", *OPTIONS[arm]]
    url = f"http://127.0.0.1:{port}"
    with running(command, os.environ, lambda: answers(f"{url}/v1/models")) as process:
        client = ChatClient(url, process)
        yield client
        count_failed(client.metric_lines())
