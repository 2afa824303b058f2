"""Starts `cacheblend serve` on a free port; clients that time the first tokens it streams."""

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
from lab.servers.processes import SELECTOR, START_S, answers, count_failed, free_port, running


@contextmanager
def serving(model: Path | str, store: str, *options: str) -> Iterator[tuple[str, "Popen[Any]"]]:
    """The URL of `cacheblend serve` with these options, and its process; stopped at the end."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", "from cacheblend.cli import main; main()", "serve", "--model", str(model)]
    command += ["--port", str(port), "--store", store, "--drain", "1", *options]
    with running(command, os.environ, lambda: answers(f"{url}/v1/models")) as process:
        yield url, process


class Client:
    """A client of a server: greedy, streamed."""

    def __init__(self, url: str, process: "Popen[Any]") -> None:
        import httpx

        self._http, self._process = httpx.Client(base_url=url, timeout=START_S), process
        self._model = self._http.get("/v1/models").json()["data"][0]["id"]

    def stream(self, path: str, **body: Any) -> Iterator[tuple[float, dict[str, Any]]]:
        """The events of an answer, and the seconds since the request; they include making its JSON."""
        started = time.perf_counter()
        body |= {"model": self._model, "temperature": 0, "stream": True}
        with self._http.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                raise InvalidInputError(f"the server answered {answer.status_code}: {answer.read().decode()[:500]}")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    came, event = time.perf_counter() - started, json.loads(line[6:])
                    if "error" in event:
                        raise InvalidInputError(f"the server ended the stream: {event['error']['message']}")
                    yield came, event

    def metric_lines(self) -> list[str]:
        text: str = self._http.get("/metrics").text
        return text.splitlines()

    def metrics(self, prefix: str) -> dict[str, float]:
        """Those whose names begin so, with their labels."""
        found = [line.rsplit(" ", 1) for line in self.metric_lines() if line.startswith(prefix)]
        return {name: float(value) for name, value in found}

    @contextmanager
    def alone(self, others: Sequence["Client"]) -> Iterator[None]:
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


# ---- completions of token ids -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A prompt of token ids, and the spans of its chunks; None: nothing is said of them."""

    ids: list[int]
    spans: list[list[int]] | None


@dataclass(frozen=True)
class Got:
    """The client's time to first token, and the server's report."""

    ttft_s: float
    report: dict[str, Any]


class IdClient(Client):
    """Completes prompts of token ids at a recompute ratio, with the chunks named."""

    def __init__(self, url: str, process: "Popen[Any]", ratio: float) -> None:
        super().__init__(url, process)
        self._ratio = ratio

    def ask(self, asked: Asked, tokens: int, mode: str) -> Got:
        first, report, settings = 0.0, dict[str, Any](), {"mode": mode, "recompute_ratio": self._ratio}
        if asked.spans is not None:
            settings["chunks"] = asked.spans
        events = self.stream(
            "/v1/completions", prompt=asked.ids, max_tokens=tokens, ignore_eos=True, cacheblend=settings
        )
        for came, event in events:
            first = first or came
            report = event.get("cacheblend") or report
        return Got(first, report)

    def settle(self) -> None:
        """Returns when no answer waits to be compared."""
        while any(self.metrics("cacheblend_shadow_waiting").values()):
            time.sleep(0.1)

    def store(self, chunks: list[list[int]]) -> None:
        """Makes the server compute and store chunks."""
        answer = self._http.post("/v1/chunks", json={"chunks": [{"token_ids": ids} for ids in chunks]})
        if answer.status_code != 200:
            raise InvalidInputError(f"the server answered {answer.status_code}: {answer.text[:500]}")


@contextmanager
def completing(
    folder: Path,
    ratio: float,
    clients: int,
    *,
    shadow: float = 0.0,
    discover: bool = False,
    store: str = "memory://?max_bytes=8GiB",
) -> Iterator[IdClient]:
    """A client of a server that answers so many requests at once; asked at the end what failed in it.

    `discover`: text that nobody marked is found, learnt and stored; otherwise requests store nothing.
    """
    options = ["--active", str(clients), "--waiting", "1000", "--ratio", str(ratio), "--no-playground"]
    options += ["--shadow", str(shadow), "--selector", SELECTOR]
    options += ["--discover", "--capture"] if discover else ["--no-discover", "--no-capture"]
    with serving(folder, store, *options) as (url, process):
        client = IdClient(url, process, ratio)
        yield client
        count_failed(client.metric_lines())


# ---- chats --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answered:
    """A chat as its client saw it: time to first token, tokens of the prompt, those loaded by how."""

    ttft_s: float
    prompt_tokens: int
    hit_tokens: dict[str, int]


class ChatClient(Client):
    """Streams chat completions; sends no field that OpenAI does not have."""

    def ask(self, messages: Sequence[dict[str, Any]], tokens: int) -> Answered:
        first, report = 0.0, dict[str, Any]()
        for came, event in self.stream("/v1/chat/completions", messages=messages, max_tokens=tokens):
            report = event.get("cacheblend") or report
            delta = event["choices"][0]["delta"] if event.get("choices") else {"role": ""}
            if "role" not in delta:  # the opening event has one, and comes before anything is computed
                first = first or came
        return Answered(first, report["prompt_tokens"], report["hit_tokens"])


@contextmanager
def chatting(folder: Path, ratio: float, options: Sequence[str]) -> Iterator[ChatClient]:
    """A client of a server with an empty store; asked at the end what failed in it."""
    options = ("--ratio", str(ratio), "--no-playground", "--capture", *options)
    with serving(folder, "memory://?max_bytes=4GiB", *options) as (url, process):
        client = ChatClient(url, process)
        yield client
        count_failed(client.metric_lines())
