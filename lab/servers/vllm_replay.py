"""Replays a RAGPulse trace on vLLM with prefix caching and on vLLM with the plug-in: what each can serve.

    store                        passages of the first two thirds that the sampled requests use
    both prefix caches           the last requests of the first two thirds
    measured                     requests sampled from the last third, at saturation, then at a few rates

The same is measured with everything that the trace has. Only one server works at a time.

With `discover` two servers with the plug-in serve the same requests: one whose store has the passages, and one whose
store has what discovery learnt of the first two thirds, in order and from an empty store. It goes on learning.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lab.bench import AdvanceStage, silent
from lab.servers.clients import random_ids, saturate
from lab.servers.discovery import learn_in_order
from lab.servers.replay import (
    ANSWER_TOKENS,
    FILL,
    LEARN,
    OWN_TOKENS,
    RATE_REQUESTS,
    RATES,
    SHARES,
    Sample,
    TraceRequest,
    at_rates,
    draw_rates,
    own_ids,
    prompt,
    read_trace,
)
from lab.servers.vllm_server import Pair, Server
from lab.settings import Replay

DISCOVERED = "discovered"
ARMS = ("marked", DISCOVERED)
STAGES = (
    *(FILL, "vllm, passages", "blend, passages", "vllm, whole", "blend, whole", RATES),
    *(LEARN, *(f"{arm}, passages" for arm in ARMS)),
)

FILLING_TOKENS = 1500  # of a prompt that fills the store
WARM_REQUESTS = 20  # requests that fill the prefix caches; of more, the first would be evicted again


def run(pair: Pair, what: Replay, advance: AdvanceStage = silent) -> dict[str, Any]:
    """Requests per second of both servers at saturation, and time to first token by rate."""
    trace, shares = read_trace(what.trace), tuple(what.rate or SHARES)
    sample = Sample.of(trace, what.requests, what.seed)
    forms = {"passages": False} | ({"whole": True} if what.whole else {})
    lengths = (
        len(prompt(request, [0] * OWN_TOKENS, whole=whole))
        for whole in forms.values()
        for request in (*sample.requests, *sample.before[-WARM_REQUESTS:])
    )
    longest = max(FILLING_TOKENS, *lengths)
    result: dict[str, Any] = {}
    with pair.serving(longest + ANSWER_TOKENS + 64) as (plain, blend):
        servers = {"vllm": plain, "blend": blend}
        _fill(blend, sample.passages, advance)
        for form, whole in forms.items():  # one server after the other, at saturation

            def prompts(requests: Sequence[TraceRequest], name: str, *, whole: bool = whole) -> list[list[int]]:
                return [prompt(r, own_ids(what.seed, f"{name} {n}"), whole=whole) for n, r in enumerate(requests)]

            asked, warm = prompts(sample.requests, form), prompts(sample.before[-WARM_REQUESTS:], f"{form} before")
            found = sample.lengths([len(ids) for ids in asked], int(pair.config.num_hidden_layers), pair.ratio)
            for name, server in servers.items():
                saturate(partial(_ask, server), warm, what.clients)
                told = partial(advance, f"{name}, {form}")
                found[name] = saturate(partial(_ask, server), asked, what.clients, told)
            found["speedup"] = found["blend"]["requests_per_s"] / found["vllm"]["requests_per_s"]
            result[form] = found

        def late(name: str, share: float) -> list[list[int]]:
            first = enumerate(sample.requests[:RATE_REQUESTS])
            return [prompt(request, own_ids(what.seed, f"{name} {share} {number}")) for number, request in first]

        saturation = result["passages"]["blend"]["requests_per_s"]
        arms = {name: partial(_ask, server) for name, server in servers.items()}
        result["rates"] = at_rates(arms, late, shares, saturation, what.seed, advance)
        counters = blend.counters()
    found = result["passages"]
    figures = {"replay_speedup": found["speedup"], "replay_of_ceiling": found["speedup"] / found["ceiling"]}
    if what.discover:
        with replace(pair, discover=True).serving(longest + ANSWER_TOKENS + 64) as both:
            result["discover"] = _discover(dict(zip(ARMS, both, strict=True)), sample, trace, what, advance)
        figures["discovered_of_marked"] = result["discover"]["of_marked"]
    settings = {name: value for name, value in vars(what).items() if name not in ("rate", "whole")}
    settings |= {"trace": what.trace.name, "rates": shares, "rate_requests": RATE_REQUESTS, "with_whole": what.whole}
    settings |= {"own_tokens": OWN_TOKENS, "answer_tokens": ANSWER_TOKENS}
    return {"figures": figures, **result, "counters": counters, "replay": settings, **pair.facts()}


def _ask(server: Server, ids: list[int]) -> float:
    return server.ask(ids, ANSWER_TOKENS).ttft_s


def _discover(
    servers: Mapping[str, Server], sample: Sample, trace: list[TraceRequest], what: Replay, advance: AdvanceStage
) -> dict[str, Any]:
    """Both at saturation, with nothing marked."""
    requests = [request for request in trace if request.passages][: len(sample.before)]
    seen = (prompt(request, own_ids(what.seed, f"seen {n}")) for n, request in enumerate(requests))
    learnt, _ = learn_in_order(seen, len(requests), what.seed, lambda done: advance(LEARN, done, len(requests)))
    prompts = [prompt(r, own_ids(what.seed, f"{DISCOVERED} {n}")) for n, r in enumerate(sample.requests)]
    used = learnt.found_in(prompts)
    found: dict[str, Any] = {
        "chunks": len(learnt.chunks),
        "chunks_in_replay": len(used),
        "learnt": vars(learnt.figures),
    }
    for (name, server), chunks in zip(servers.items(), (sample.passages, used), strict=True):
        _fill(server, chunks, advance)
        found[name] = saturate(partial(_ask, server), prompts, what.clients, partial(advance, f"{name}, passages"))
    return found | {"of_marked": found[DISCOVERED]["requests_per_s"] / found[ARMS[0]]["requests_per_s"]}


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


def _fill(server: Server, chunks: list[list[int]], advance: AdvanceStage) -> None:
    """Makes the server store chunks, several in a request, and waits until it has."""
    filled, wanted = 0, sum(map(len, chunks))
    for ids, spans in filling_prompts(chunks):
        server.ask(ids, 1, spans)
        filled += sum(stop - start for start, stop in spans)
        server.wait_for_captures(filled, pause=0)
        advance(FILL, filled, wanted)
    server.wait_for_captures(wanted)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws time to first token against the rate of requests, for both servers."""
    found = result["passages"]
    labels = {"vllm": "vLLM, prefix caching", "blend": "vLLM with CacheBlend"}
    saturated = {name: (label, found[name]["requests_per_s"]) for name, label in labels.items()}
    draw_rates(result["rates"], saturated, f"RAGPulse on {result['model']}, r = {result['ratio']:g}", path)
