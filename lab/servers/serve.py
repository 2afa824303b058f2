"""The embedded server over HTTP: time to first token, what the server adds to the engine, a trace of real requests.

Passages are stored before, and the requests store nothing: each finds exactly the passages that its ceiling assumes.

ttft       stored chunks in shuffled order, `full` and `blend` alternating
overhead   a client's waiting time beyond the engine's planning and prefill, on the same requests
shadow     throughput of saturated servers, one with the shadow check and one without, in turn
replay     RAGPulse at saturation, one mode after the other, then at a few rates
discover   the same requests with nothing marked, on a server whose store has what discovery learnt of the requests
           before them, from an empty store; it goes on learning
"""

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.provenance import stamp
from lab.bench import AdvanceStage, alternating, silent
from lab.servers.clients import LAST_ID, Prompts, saturate
from lab.servers.discovery import learn_in_order, watch_ms
from lab.servers.embedded_server import Asked, IdClient, completing
from lab.servers.processes import SELECTOR
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
from lab.servers.vllm_server import folder_of
from lab.settings import Serving

FIRST, SHADOW, DISCOVER = "first tokens", "shadow check", "discover, replay"
MODES = ("full", "blend")
STAGES = (FIRST, SHADOW, FILL, *(f"{mode}, replay" for mode in MODES), RATES, LEARN, DISCOVER)
SHADOW_REQUESTS = 4  # of each client in a round of the shadow check
FILLING = 8  # passages of a request that has them stored


def run(what: Serving, advance: AdvanceStage = silent) -> dict[str, Any]:
    """Runs all parts; returns `figures` and the raw numbers."""
    if what.trace is not None and what.config.vocab_size < LAST_ID:
        known = what.config.vocab_size
        raise InvalidInputError(f"a trace is replayed with token ids up to {LAST_ID}; this model has {known}")
    if what.discover and what.trace is None:
        raise InvalidInputError("what is discovered is measured on a replay: also give a trace")
    trace = [] if what.trace is None else read_trace(what.trace)
    sample = Sample.of(trace, what.requests, what.seed) if trace else None
    result: dict[str, Any] = {}
    with folder_of(what, what.seed) as folder:
        with ExitStack() as stack:  # chunks that are stored before and named by the client
            client = stack.enter_context(completing(folder, what.ratio, what.clients))
            result["ttft"] = _first_tokens(client, what, advance)
            figures = {name: result["ttft"].pop(name) for name in ("ttft_speedup", "overhead_ms")}
            if what.shadow:
                checked = stack.enter_context(completing(folder, what.ratio, what.clients, shadow=what.shadow))
                result["shadow"] = _shadow(client, checked, what, advance)
                figures["shadow_overhead"] = result["shadow"]["overhead"]
            if sample is not None:
                result["replay"] = found = _replay(client, sample, what, advance)
                figures["replay_speedup"] = found["speedup"]
                figures["replay_of_ceiling"] = found["speedup"] / found["ceiling"]
        if sample is not None and what.discover:
            result["discover"] = found = _discover(folder, sample, trace, what, advance)
            rates = [part["requests_per_s"] for part in (found["replay"], result["replay"]["blend"])]
            figures |= {"discovered_of_marked": rates[0] / rates[1], "wasted": found["wasted"], "watch_ms": watch_ms()}
    fixed = {"rates": SHARES, "rate_requests": RATE_REQUESTS, "answer_tokens": ANSWER_TOKENS, "own_tokens": OWN_TOKENS}
    return {
        "figures": figures,
        **result,
        "model": what.called,
        "ratio": what.ratio,
        "selector": SELECTOR,
        "settings": what.described(trace=what.trace and what.trace.name, **fixed),
        **stamp(),
    }


def _first_tokens(client: IdClient, what: Serving, advance: AdvanceStage) -> dict[str, Any]:
    prompts = Prompts(what.prompt, what.seed, what.config.vocab_size)
    client.store(prompts.chunks)
    arms = {mode: partial(client.ask, tokens=2, mode=mode) for mode in MODES}
    got = alternating(arms, lambda: Asked(*prompts.draw()), what.runs, partial(advance, FIRST))
    times = {mode: [each.ttft_s for each in found] for mode, found in got.items()}
    beyond = [
        each.ttft_s - sum(each.report[part] for part in ("plan_s", "wait_s", "compute_s"))
        for found in got.values()
        for each in found
    ]
    medians = {mode: statistics.median(taken) for mode, taken in times.items()}
    return {
        "ttft_speedup": medians["full"] / medians["blend"],
        "overhead_ms": 1e3 * statistics.median(beyond),
        "ttft_s": times,
        "beyond_the_engine_s": beyond,
        "tokens": what.prompt.tokens,
    }


def _ask(client: IdClient, asked: Asked, mode: str = "blend") -> float:
    return client.ask(asked, ANSWER_TOKENS, mode).ttft_s


def _shadow(plain: IdClient, checked: IdClient, what: Serving, advance: AdvanceStage) -> dict[str, Any]:
    """`overhead`: the share of throughput that the check costs, the median of the rounds; each round's figures.

    Each round both servers are asked the same blended requests, one after the other.
    """
    prompts, servers = Prompts(what.prompt, what.seed, what.config.vocab_size), {"without": plain, "with": checked}
    for client in servers.values():
        client.store(prompts.chunks)
    count = min(what.requests, SHADOW_REQUESTS * what.clients)

    def requests_per_s(client: IdClient, asked: Sequence[Asked]) -> float:
        found = saturate(partial(_ask, client), asked, what.clients)
        client.settle()  # what the server has put off is finished here: it would compute beside the other one
        return float(found["requests_per_s"])

    arms = {name: partial(requests_per_s, client) for name, client in servers.items()}
    rates = alternating(
        arms, lambda: [Asked(*prompts.draw()) for _ in range(count)], what.runs, partial(advance, SHADOW)
    )
    shares = [1 - with_it / without for with_it, without in zip(rates["with"], rates["without"], strict=True)]
    return {
        "overhead": statistics.median(shares),
        "by_round": shares,
        "requests_per_s": rates,
        "share": what.shadow,
        "requests": count,
        "metrics": checked.metrics("cacheblend_shadow"),
    }


def _replay(client: IdClient, sample: Sample, what: Serving, advance: AdvanceStage) -> dict[str, Any]:
    """One mode after the other at saturation, then at rates."""
    _fill(client, sample.passages, advance)
    prompts = {mode: [_asked(r, f"{mode} {n}", what) for n, r in enumerate(sample.requests)] for mode in MODES}
    lengths = [len(asked.ids) for asked in prompts["full"]]
    found = sample.lengths(lengths, int(what.config.num_hidden_layers), what.ratio)
    for mode in MODES:
        found[mode] = _saturate(client, prompts[mode], mode, what, advance, f"{mode}, replay")
    saturation = found["blend"]["requests_per_s"]
    found["speedup"] = saturation / found["full"]["requests_per_s"]

    def late(mode: str, share: float) -> list[Asked]:
        asked = enumerate(sample.requests[:RATE_REQUESTS])
        return [_asked(request, f"{mode} {share} {number}", what) for number, request in asked]

    arms = {mode: partial(_ask, client, mode=mode) for mode in MODES}
    found["rates"] = at_rates(arms, late, SHARES, saturation, what.seed, advance)
    return found


def _fill(client: IdClient, chunks: list[list[int]], advance: AdvanceStage) -> None:
    for at in range(0, len(chunks), FILLING):
        client.store(chunks[at : at + FILLING])
        advance(FILL, min(at + FILLING, len(chunks)), len(chunks))


def _saturate(
    client: IdClient, prompts: Sequence[Asked], mode: str, what: Serving, advance: AdvanceStage, stage: str
) -> dict[str, Any]:
    loaded: list[int] = []

    def ask(asked: Asked) -> float:
        got = client.ask(asked, ANSWER_TOKENS, mode)
        loaded.append(sum(got.report["hit_tokens"].values()))
        return got.ttft_s

    found = saturate(ask, prompts, what.clients, partial(advance, stage))
    return found | {"loaded_tokens": sum(loaded)}


def _discover(
    folder: Path, sample: Sample, trace: list[TraceRequest], what: Serving, advance: AdvanceStage
) -> dict[str, Any]:
    """The sample with nothing marked, after the requests before it were seen; and what the whole trace wastes.

    Of what was learnt that is stored before which the sample has somewhere, as with what is marked.
    """
    requests = [request for request in trace if request.passages]
    seen = (_asked(request, f"seen {number}", what).ids for number, request in enumerate(requests))
    learnt, whole = learn_in_order(
        seen, len(sample.before), what.seed, lambda done: advance(LEARN, done, len(requests))
    )
    prompts = [Asked(_asked(r, f"discover {n}", what).ids, None) for n, r in enumerate(sample.requests)]
    used = learnt.found_in(asked.ids for asked in prompts)
    with completing(folder, what.ratio, what.clients, discover=True) as client:
        _fill(client, used, advance)
        replayed = _saturate(client, prompts, "blend", what, advance, DISCOVER)
    return {
        "replay": replayed,
        "wasted": whole.wasted,
        "learnt_before": vars(learnt.figures),
        "learnt": vars(whole.figures),
        "chunks": len(learnt.chunks),
        "chunks_in_replay": len(used),
    }


def _asked(request: TraceRequest, name: str, what: Serving) -> Asked:
    own, spans = own_ids(what.seed, name), list[list[int]]()
    at = len(own)
    for passage in request.passages:
        spans.append([at, at + passage.tokens])
        at += passage.tokens
    return Asked(prompt(request, own), spans)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws time to first token against the rate of requests, for both modes."""
    found = result["replay"]
    title = f"RAGPulse on {result['model']}, r = {result['ratio']:g}, cacheblend serve"
    labels = {"full": "full recompute", "blend": "blend"}
    saturated = {mode: (label, found[mode]["requests_per_s"]) for mode, label in labels.items()}
    draw_rates(found["rates"], saturated, title, path)
