"""The embedded server over HTTP: time to first token, what the server adds to the engine, a trace of real requests.

Passages are stored before, and the requests store nothing: each finds exactly the passages that its ceiling assumes.

ttft       stored chunks in shuffled order, `full` and `blend` alternating
overhead   a client's waiting time beyond the engine's planning and prefill, on the same requests
shadow     throughput of saturated servers, one with the shadow check and one without, in turn
replay     RAGPulse at saturation, one mode after the other, then at a few rates
"""

import json
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cacheblend.bench.clients import ask_at, poisson_times, saturate
from cacheblend.bench.processes import START_S, answers, free_port, running
from cacheblend.bench.prompts import LAST_ID, Prompts, PromptShape
from cacheblend.bench.ragpulse import TraceRequest, TraceText, random_ids, read_trace
from cacheblend.bench.replaying import Sample, row_layer_ceiling
from cacheblend.bench.shadowing import WITH, WITHOUT, Arm, shadow_overhead
from cacheblend.bench.shapes import check_choice, config_of
from cacheblend.bench.stamp import stamp
from cacheblend.bench.vllm_server import shape_folder
from cacheblend.core.errors import InvalidInputError

Progress = Callable[[str, int, int], None]
"""Called with (one of `STAGES`, done, in all)."""

FILL, RATES = "filling the store", "rates"
SHADOW = "shadow check"
STAGES = ("first tokens", SHADOW, FILL, "full, replay", "blend, replay", RATES)
MODES = ("full", "blend")
SHADOW_REQUESTS = 4  # of each client in a round of the shadow check
WAITING = "cacheblend_shadow_waiting"
FILLING = 8  # passages of a request that has them stored


@dataclass(frozen=True)
class Serving:
    """What is measured.

    Attributes:
        model: a model folder; or `shape`: random weights of a known shape.
        trace: folder of a RAGPulse trace; None leaves the replay out.
        shadow: share of the requests that one of two servers checks (`bench.shadowing`); 0 leaves that out.
        prompt: shape of the first part's prompts.
        ratio: recompute ratio.
        runs: measured rounds of the first part, after one warm-up.
        requests: number of requests replayed.
        clients: requests under way at once.
        rates: rates of requests, as shares of the saturation of `blend`.
        rate_requests: number of requests at each rate.
        answer_tokens, own_tokens: tokens of an answer, and of the text that only one request has.
        seed: of everything drawn.
    """

    model: str | None = None
    shape: str | None = None
    trace: Path | None = None
    shadow: float = 0.0
    prompt: PromptShape = field(default_factory=PromptShape)
    ratio: float = 0.15
    runs: int = 5
    requests: int = 100
    clients: int = 8
    rates: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8)
    rate_requests: int = 24
    answer_tokens: int = 4
    own_tokens: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice(self.model, self.shape)

    @property
    def layers(self) -> int:
        """Number of the model's layers."""
        return int(config_of(self.model, self.shape).num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary."""
        return int(config_of(self.model, self.shape).vocab_size)


@dataclass(frozen=True)
class Asked:
    """A prompt of token ids, and the spans of its chunks."""

    ids: list[int]
    spans: list[list[int]]


@dataclass(frozen=True)
class Got:
    """The client's time to first token, and the server's report."""

    ttft_s: float
    report: dict[str, Any]


class Client:
    """A client of a server: greedy, streamed."""

    def __init__(self, url: str, model: str, ratio: float) -> None:
        import httpx

        self.url, self._model, self._ratio = url, model, ratio
        self._http = httpx.Client(base_url=url, timeout=START_S)

    def ask(self, asked: Asked, tokens: int, mode: str) -> Got:
        """Sends one request; the time includes making its JSON.

        Raises:
            InvalidInputError: the server did not answer.
        """
        started, first = time.perf_counter(), 0.0
        report: dict[str, Any] = {}
        body = {
            "model": self._model,
            "prompt": asked.ids,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "cacheblend": {"chunks": asked.spans, "mode": mode, "recompute_ratio": self._ratio},
        }
        with self._http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise InvalidInputError(f"the server answered {answer.status_code}: {answer.read().decode()[:500]}")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - started
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise InvalidInputError(f"the server ended the stream: {event['error']['message']}")
                    report = event.get("cacheblend") or report
        return Got(first, report)

    def shadow_metrics(self) -> dict[str, float]:
        """The server's metrics of the shadow check, with their labels."""
        lines = self._http.get("/metrics").text.splitlines()
        found = [line.rsplit(" ", 1) for line in lines if line.startswith("cacheblend_shadow")]
        return {name: float(value) for name, value in found}

    def settle(self) -> None:
        """Returns when no answer waits to be compared."""
        while any(value for name, value in self.shadow_metrics().items() if name.startswith(WAITING)):
            time.sleep(0.1)

    def store(self, chunks: list[list[int]]) -> None:
        """Makes the server compute and store chunks.

        Raises:
            InvalidInputError: the server refused.
        """
        body = {"chunks": [{"token_ids": ids} for ids in chunks]}
        answer = self._http.post("/v1/chunks", json=body)
        if answer.status_code != 200:
            raise InvalidInputError(f"the server answered {answer.status_code}: {answer.text[:500]}")


def run(what: Serving, progress: Progress | None = None) -> dict[str, Any]:
    """Runs all parts; returns `figures` and the raw numbers.

    Raises:
        InvalidInputError: the trace or the model cannot be read, or the server does not start.
    """
    advance = progress or (lambda stage, done, total: None)
    if what.trace is not None and what.vocab_size < LAST_ID:
        raise InvalidInputError(f"a trace is replayed with token ids up to {LAST_ID}; this model has {what.vocab_size}")
    sample = None if what.trace is None else Sample.of(read_trace(what.trace), what.requests, what.seed)
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = Path(what.model) if what.model else stack.enter_context(shape_folder(what.shape or "", what.seed))
        client = stack.enter_context(serving(folder, what))
        result["ttft"] = _first_tokens(client, what, advance)
        figures = {name: result["ttft"].pop(name) for name in ("ttft_speedup", "overhead_ms")}
        if what.shadow:
            checked = stack.enter_context(serving(folder, what, what.shadow))
            result["shadow"] = _shadow(client, checked, what, advance)
            figures["shadow_overhead"] = result["shadow"]["overhead"]
        if sample is not None:
            result["replay"] = found = _replay(client, sample, what, advance)
            figures |= {
                "replay_speedup": found["speedup"],
                "replay_of_ceiling": found["speedup"] / found["ceiling"],
            }
    return {
        "figures": figures,
        **result,
        "model": what.model or what.shape,
        "ratio": what.ratio,
        "settings": {**vars(what), "trace": what.trace and what.trace.name, "prompt": vars(what.prompt)},
        **stamp(),
    }


@contextmanager
def serving(folder: Path, what: Serving, shadow: float = 0.0) -> Iterator[Client]:
    """`cacheblend serve` on a free port, with a shadow check of this share; stopped at the end.

    Raises:
        InvalidInputError: the server did not start; with the end of its output.
    """
    port = free_port()
    arguments = [sys.executable, "-c", "from cacheblend.cli import main; main()", "serve", "--model", str(folder)]
    arguments += ["--port", str(port), "--store", "memory://?max_bytes=8GiB", "--active", str(what.clients)]
    arguments += ["--waiting", "1000", "--ratio", str(what.ratio), "--no-playground", "--no-capture", "--drain", "1"]
    arguments += ["--shadow", str(shadow)]
    url = f"http://127.0.0.1:{port}"
    with running(arguments, os.environ, lambda: answers(f"{url}/v1/models")):
        with urllib.request.urlopen(f"{url}/v1/models") as response:
            name = json.loads(response.read())["data"][0]["id"]
        yield Client(url, name, what.ratio)


def _first_tokens(client: Client, what: Serving, advance: Progress) -> dict[str, Any]:
    shape, prompts = what.prompt, Prompts(what.prompt, what.seed, what.vocab_size)

    def draw() -> Asked:
        return Asked(*prompts.draw())

    client.store(prompts.chunks)
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    beyond: list[float] = []
    for number in range(what.runs + 1):
        asked = draw()
        for mode in MODES if number % 2 else MODES[::-1]:
            got = client.ask(asked, 2, mode)
            if number:
                times[mode].append(got.ttft_s)
                own = got.report["plan_s"] + got.report["wait_s"] + got.report["compute_s"]
                beyond.append(got.ttft_s - own)
        advance(STAGES[0], number + 1, what.runs + 1)
    medians = {mode: statistics.median(taken) for mode, taken in times.items()}
    return {
        "ttft_speedup": medians["full"] / medians["blend"],
        "overhead_ms": 1e3 * statistics.median(beyond),
        "ttft_s": times,
        "beyond_the_engine_s": beyond,
        "tokens": shape.tokens,
    }


def _shadow(plain: Client, checked: Client, what: Serving, advance: Progress) -> dict[str, Any]:
    """Blended requests with the check and without."""
    prompts = Prompts(what.prompt, what.seed, what.vocab_size)
    arms = {}
    for name, client in ((WITHOUT, plain), (WITH, checked)):
        client.store(prompts.chunks)

        def ask(asked: Asked, client: Client = client) -> float:
            return client.ask(asked, what.answer_tokens, "blend").ttft_s

        arms[name] = Arm(ask, client.settle)
    count = min(what.requests, SHADOW_REQUESTS * what.clients)
    found = shadow_overhead(
        arms,
        lambda: [Asked(*prompts.draw()) for _ in range(count)],
        rounds=what.runs,
        clients=what.clients,
        done=lambda number: advance(SHADOW, number, what.runs + 1),
    )
    return found | {"share": what.shadow, "requests": count, "metrics": checked.shadow_metrics()}


def _replay(client: Client, sample: Sample, what: Serving, advance: Progress) -> dict[str, Any]:
    """One mode after the other at saturation, then at rates."""
    waiting = sorted(sample.stored, key=lambda passage: passage.id)
    for at in range(0, len(waiting), FILLING):
        client.store([passage.token_ids() for passage in waiting[at : at + FILLING]])
        advance(FILL, min(at + FILLING, len(waiting)), len(waiting))
    prompts = {mode: [_asked(r, f"{mode} {n}", what) for n, r in enumerate(sample.requests)] for mode in MODES}
    lengths = [(len(a.ids), sample.held_tokens(r)) for a, r in zip(prompts["full"], sample.requests, strict=True)]
    found: dict[str, Any] = {"ceiling": row_layer_ceiling(lengths, what.layers, what.ratio)}
    found |= {"tokens": [tokens for tokens, _ in lengths], "held_tokens": [held for _, held in lengths]}
    for mode in MODES:
        loaded: list[int] = []

        def ask(asked: Asked, mode: str = mode, loaded: list[int] = loaded) -> float:
            got = client.ask(asked, what.answer_tokens, mode)
            loaded.append(sum(got.report["hit_tokens"].values()))
            return got.ttft_s

        def done(count: int, mode: str = mode) -> None:
            advance(f"{mode}, replay", count, what.requests)

        found[mode] = saturate(ask, prompts[mode], what.clients, done) | {"loaded_tokens": sum(loaded)}
    found["speedup"] = found["blend"]["requests_per_s"] / found["full"]["requests_per_s"]
    found["rates"] = []
    for number, share in enumerate(what.rates, 1):
        rate = share * found["blend"]["requests_per_s"]
        point: dict[str, Any] = {"requests_per_s": rate}
        for mode in MODES:
            asked = [
                _asked(r, f"{mode} {share} {n}", what) for n, r in enumerate(sample.requests[: what.rate_requests])
            ]
            due = list(zip(poisson_times(rate, len(asked), f"{what.seed} {share}"), asked, strict=True))

            def ask_late(one: Asked, mode: str = mode) -> float:
                return client.ask(one, what.answer_tokens, mode).ttft_s

            times = ask_at(ask_late, due)
            point[mode] = {"ttft_s": times, "median_s": statistics.median(times)}
        found["rates"].append(point)
        advance(RATES, number, len(what.rates))
    return found


def _asked(request: TraceRequest, seed: str, what: Serving) -> Asked:
    own = random_ids(f"{what.seed} own {seed}", what.own_tokens)
    return _prompt(own, list(request.passages), [token for text in request.question for token in text.token_ids()])


def _prompt(front: list[int], passages: list[TraceText], question: list[int]) -> Asked:
    ids, spans = list(front), []
    for passage in passages:
        spans.append([len(ids), len(ids) + passage.tokens])
        ids += passage.token_ids()
    return Asked(ids + question, spans)


def table(result: dict[str, Any]) -> str:
    """A line for each figure."""
    return "\n".join(f"{name}: {value:.3f}" for name, value in result["figures"].items())


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws time to first token against the rate of requests, for both modes. Needs matplotlib."""
    from cacheblend.bench.rates_plot import draw_rates

    found = result["replay"]
    curves = {
        "full recompute": ([point["full"]["median_s"] for point in found["rates"]], found["full"]["requests_per_s"]),
        "blend": ([point["blend"]["median_s"] for point in found["rates"]], found["blend"]["requests_per_s"]),
    }
    rates = [point["requests_per_s"] for point in found["rates"]]
    draw_rates(rates, curves, f"RAGPulse on {result['model']}, r = {result['ratio']:g}, cacheblend serve", path)
