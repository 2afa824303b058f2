"""Replays a RAGPulse trace on vLLM with prefix caching and on vLLM with the plug-in: what each can serve.

    store                        passages of the first two thirds that the sampled requests use
    both prefix caches           the last requests of the first two thirds
    measured                     requests sampled from the last third, at saturation, then at a few rates

A request is a few new tokens, its passages, the user's input: only the passages recur, as in the trace, where a system
prompt of its own precedes each request. The same is measured with everything that the trace has. Only one server works
at a time.

With `discover` two servers with the plug-in serve the same requests: one whose store has the passages, and one whose
store has what discovery learnt of the first two thirds, in order and from an empty store. It goes on learning.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lab.servers.clients import ask_at, poisson_times, saturate
from lab.servers.discovery import learn_in_order
from lab.servers.ragpulse import TraceRequest, TraceText, random_ids, read_trace
from lab.servers.rates_plot import draw_rates
from lab.servers.replay import Sample, row_layer_ceiling
from lab.servers.vllm_server import Pair, Server

Progress = Callable[[str, int, int], None]
"""Called with (one of `STAGES`, done, in all)."""

FILL, RATES = "filling the store", "rates"
LEARN, DISCOVERED = "learning", "discovered"
ARMS = ("marked", DISCOVERED)
STAGES = (
    *(FILL, "vllm, passages", "blend, passages", "vllm, whole", "blend, whole", RATES),
    *(LEARN, *(f"{arm}, passages" for arm in ARMS)),
)

FILLING_TOKENS = 1500  # of a prompt that fills the store
WARM_REQUESTS = 20  # requests that fill the prefix caches; of more, the first would be evicted again


@dataclass(frozen=True)
class Replay:
    """What is replayed.

    Attributes:
        trace: folder of a RAGPulse trace.
        requests: number sampled from the last third, of requests with passages.
        own_tokens: new tokens that precede each request.
        answer_tokens: tokens of each answer.
        clients: requests under way at saturation.
        rates: shares of the plug-in's saturation; at each, requests arrive as a Poisson process.
        rate_requests: number of requests at each rate.
        with_whole: also replay everything that the trace has, at saturation.
        discover: also compare what discovery learns with passages that are marked and stored.
        seed: of the sample and of the arrival times.
    """

    trace: Path
    requests: int = 100
    own_tokens: int = 32
    answer_tokens: int = 4
    clients: int = 16
    rates: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8)
    rate_requests: int = 24
    with_whole: bool = True
    discover: bool = False
    seed: int = 0


def prompt(request: TraceRequest, own: list[int], *, whole: bool) -> list[int]:
    """Token ids of a request: new tokens, passages, the user's input.

    Args:
        request: of the trace.
        own: token ids that precede it.
        whole: also its system prompt, history and web search.
    """
    texts: tuple[TraceText, ...] = (*request.passages, *request.question)
    if whole:
        texts = (*request.system, *request.passages, *request.history, *request.web_search, *request.question)
    return [*own, *(token for text in texts for token in text.token_ids())]


def replay(pair: Pair, what: Replay, progress: Progress | None = None) -> dict[str, Any]:
    """Requests per second of both servers at saturation, and time to first token by rate.

    Args:
        pair: the servers.
        what: what is replayed.
        progress: see `Progress`.

    Raises:
        InvalidInputError: the trace cannot be read or is too short, vLLM is not installed here or does not start.
    """
    trace = read_trace(what.trace)
    sample = Sample.of(trace, what.requests, what.seed)
    advance = progress or (lambda stage, done, total: None)
    forms = {"passages": False} | ({"whole": True} if what.with_whole else {})
    lengths = (
        len(prompt(request, [0] * what.own_tokens, whole=whole))
        for whole in forms.values()
        for request in (*sample.requests, *sample.before[-WARM_REQUESTS:])
    )
    longest = max(FILLING_TOKENS, *lengths)
    result: dict[str, Any] = {}
    with pair.serving(longest + what.answer_tokens + 64) as (plain, blend):
        servers = {"vllm": plain, "blend": blend}
        _fill(blend, _passages(sample), advance)
        for form, whole in forms.items():
            result[form] = _saturate_both(servers, sample, what, pair, form, whole, advance)
        result["rates"] = _sweep(servers, sample, what, result["passages"]["blend"]["requests_per_s"], advance)
        counters = blend.counters()
    found = result["passages"]
    figures = {"replay_speedup": found["speedup"], "replay_of_ceiling": found["speedup"] / found["ceiling"]}
    if what.discover:
        with replace(pair, discover=True).serving(longest + what.answer_tokens + 64) as both:
            result["discover"] = _discover(dict(zip(ARMS, both, strict=True)), sample, trace, what, advance)
        figures["discovered_of_marked"] = result["discover"]["of_marked"]
    return {
        "figures": figures,
        **result,
        "counters": counters,
        "replay": {**vars(what), "trace": what.trace.name},
        **pair.described(),
    }


def _saturate_both(
    servers: dict[str, Server],
    sample: Sample,
    what: Replay,
    pair: Pair,
    form: str,
    whole: bool,
    advance: Progress,
) -> dict[str, Any]:
    """One server after the other, at saturation."""
    prompts = [prompt(r, _own(f"{form} {n}", what), whole=whole) for n, r in enumerate(sample.requests)]
    warm = [
        prompt(r, _own(f"{form} before {n}", what), whole=whole)
        for n, r in enumerate(sample.before[-WARM_REQUESTS:])
    ]  # fmt: skip
    lengths = [(len(ids), sample.held_tokens(r)) for ids, r in zip(prompts, sample.requests, strict=True)]
    found: dict[str, Any] = {
        "tokens": [tokens for tokens, _ in lengths],
        "held_tokens": [held for _, held in lengths],
        "ceiling": row_layer_ceiling(lengths, pair.layers, pair.ratio),
    }
    for name, server in servers.items():
        _saturate(server, warm, what, lambda done: None)
        found[name] = _saturate(
            server, prompts, what, partial(_advance_stage, advance, f"{name}, {form}", len(prompts))
        )
    found["speedup"] = found["blend"]["requests_per_s"] / found["vllm"]["requests_per_s"]
    return found


def _advance_stage(advance: Progress, stage: str, total: int, done: int) -> None:
    advance(stage, done, total)


def _saturate(server: Server, prompts: list[list[int]], what: Replay, done: Callable[[int], None]) -> dict[str, Any]:
    return saturate(lambda ids: server.ask(ids, what.answer_tokens).ttft_s, prompts, what.clients, done)


def _sweep(
    servers: dict[str, Server], sample: Sample, what: Replay, saturation: float, advance: Progress
) -> list[dict[str, Any]]:
    """Time to first token at each rate, counted from when a request was due; one server after the other."""
    found = []
    for done, share in enumerate(what.rates, 1):
        rate = share * saturation
        point: dict[str, Any] = {"requests_per_s": rate}
        for name, server in servers.items():
            asked = sample.requests[: what.rate_requests]
            own = [_own(f"{name} {share} {number}", what) for number in range(len(asked))]
            prompts = [prompt(request, ids, whole=False) for request, ids in zip(asked, own, strict=True)]
            due = list(zip(poisson_times(rate, len(asked), f"{what.seed} {share}"), prompts, strict=True))

            def ask(ids: list[int], server: Server = server) -> float:
                return server.ask(ids, what.answer_tokens).ttft_s

            times = ask_at(ask, due)
            point[name] = {"ttft_s": times, "median_s": statistics.median(times)}
        found.append(point)
        advance(RATES, done, len(what.rates))
    return found


def _discover(
    servers: dict[str, Server], sample: Sample, trace: list[TraceRequest], what: Replay, advance: Progress
) -> dict[str, Any]:
    """Both at saturation, with nothing marked."""
    requests = [request for request in trace if request.passages][: len(sample.before)]
    seen = (prompt(request, _own(f"seen {n}", what), whole=False) for n, request in enumerate(requests))
    learnt, _ = learn_in_order(seen, len(requests), what.seed, partial(_advance_stage, advance, LEARN, len(requests)))
    prompts = [prompt(r, _own(f"{DISCOVERED} {n}", what), whole=False) for n, r in enumerate(sample.requests)]
    used = learnt.found_in(prompts)
    found: dict[str, Any] = {
        "chunks": len(learnt.chunks),
        "chunks_in_replay": len(used),
        "learnt": vars(learnt.figures),
    }
    for (name, server), chunks in zip(servers.items(), (_passages(sample), used), strict=True):
        _fill(server, chunks, advance)
        told = partial(_advance_stage, advance, f"{name}, passages", len(prompts))
        found[name] = _saturate(server, prompts, what, told)
    return found | {"of_marked": found[DISCOVERED]["requests_per_s"] / found[ARMS[0]]["requests_per_s"]}


def _passages(sample: Sample) -> list[list[int]]:
    return [passage.token_ids() for passage in sorted(sample.stored, key=lambda passage: passage.id)]


def filling_prompts(chunks: Sequence[list[int]]) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Prompts that have all chunks in turn, with the chunks' spans: of at most `FILLING_TOKENS`, or of one longer chunk
    alone, which is part of a prompt that the server takes."""
    waiting = list(chunks)
    while waiting:
        ids, spans = random_ids(f"filling {len(waiting)}", 16), list[list[int]]()
        while waiting and (not spans or len(ids) + len(waiting[-1]) < FILLING_TOKENS):
            chunk = waiting.pop()
            spans.append([len(ids), len(ids) + len(chunk)])
            ids += chunk
        yield [*ids, 300], spans


def _fill(server: Server, chunks: list[list[int]], advance: Progress) -> None:
    """Makes the server store chunks, several in a request, and waits until it has."""
    filled, wanted = 0, sum(map(len, chunks))
    for ids, spans in filling_prompts(chunks):
        server.ask(ids, 1, spans)
        filled += sum(stop - start for start, stop in spans)
        server.wait_for_captures(filled, pause=0)
        advance(FILL, filled, wanted)
    server.wait_for_captures(wanted)


def _own(seed: str, what: Replay) -> list[int]:
    return random_ids(f"{what.seed} own {seed}", what.own_tokens)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws time to first token against the rate of requests, for both servers. Needs matplotlib."""
    found = result["passages"]
    labels = {"vllm": "vLLM, prefix caching", "blend": "vLLM with CacheBlend"}
    curves = {
        label: ([point[name]["median_s"] for point in result["rates"]], found[name]["requests_per_s"])
        for name, label in labels.items()
    }
    rates = [point["requests_per_s"] for point in result["rates"]]
    draw_rates(rates, curves, f"RAGPulse on {result['model']}, r = {result['ratio']:g}", path)
