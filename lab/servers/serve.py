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
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cacheblend.bench.stamp import stamp
from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.hf.shapes import check_choice, config_of
from lab.servers.clients import ask_at, poisson_times, saturate
from lab.servers.discovery import learn_in_order, watch_ms
from lab.servers.embedded_server import Asked, Client, serving
from lab.servers.prompts import LAST_ID, Prompts, PromptShape
from lab.servers.ragpulse import TraceRequest, TraceText, random_ids, read_trace
from lab.servers.replay import Sample, row_layer_ceiling
from lab.servers.shadow import WITH, WITHOUT, Arm, shadow_overhead
from lab.servers.vllm_server import shape_folder

Progress = Callable[[str, int, int], None]
"""Called with (one of `STAGES`, done, in all)."""

FILL, RATES = "filling the store", "rates"
SHADOW = "shadow check"
LEARN, DISCOVER = "learning", "discover, replay"
STAGES = ("first tokens", SHADOW, FILL, "full, replay", "blend, replay", RATES, LEARN, DISCOVER)
MODES = ("full", "blend")
SHADOW_REQUESTS = 4  # of each client in a round of the shadow check
FILLING = 8  # passages of a request that has them stored


@dataclass(frozen=True)
class Serving:
    """What is measured.

    Attributes:
        model: a model folder; or `shape`: random weights of a known shape.
        trace: folder of a RAGPulse trace; None leaves the replay out.
        shadow: share of the requests that one of two servers checks (`servers.shadow`); 0 leaves that out.
        discover: also replay with nothing marked.
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
    discover: bool = False
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


def run(what: Serving, progress: Progress | None = None) -> dict[str, Any]:
    """Runs all parts; returns `figures` and the raw numbers.

    Raises:
        InvalidInputError: the trace or the model cannot be read, or the server does not start.
    """
    advance = progress or (lambda stage, done, total: None)
    if what.trace is not None and what.vocab_size < LAST_ID:
        raise InvalidInputError(f"a trace is replayed with token ids up to {LAST_ID}; this model has {what.vocab_size}")
    if what.discover and what.trace is None:
        raise InvalidInputError("what is discovered is measured on a replay: also give a trace")
    trace = [] if what.trace is None else read_trace(what.trace)
    sample = Sample.of(trace, what.requests, what.seed) if trace else None
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = Path(what.model) if what.model else stack.enter_context(shape_folder(what.shape or "", what.seed))
        figures = _marked(folder, sample, what, advance, result)
        if sample is not None and what.discover:
            result["discover"] = found = _discover(folder, sample, trace, what, advance)
            rates = [part["requests_per_s"] for part in (found["replay"], result["replay"]["blend"])]
            figures |= {"discovered_of_marked": rates[0] / rates[1], "wasted": found["wasted"], "watch_ms": watch_ms()}
    return {
        "figures": figures,
        **result,
        "model": what.model or what.shape,
        "ratio": what.ratio,
        "settings": {**vars(what), "trace": what.trace and what.trace.name, "prompt": vars(what.prompt)},
        **stamp(),
    }


def _marked(
    folder: Path, sample: Sample | None, what: Serving, advance: Progress, result: dict[str, Any]
) -> dict[str, float]:
    """What is measured on chunks that are stored before and named by the client; returns figures, adds to `result`."""
    with ExitStack() as stack:
        client = stack.enter_context(serving(folder, what.ratio, what.clients))
        result["ttft"] = _first_tokens(client, what, advance)
        figures = {name: result["ttft"].pop(name) for name in ("ttft_speedup", "overhead_ms")}
        if what.shadow:
            checked = stack.enter_context(serving(folder, what.ratio, what.clients, shadow=what.shadow))
            result["shadow"] = _shadow(client, checked, what, advance)
            figures["shadow_overhead"] = result["shadow"]["overhead"]
        if sample is not None:
            result["replay"] = found = _replay(client, sample, what, advance)
            figures |= {
                "replay_speedup": found["speedup"],
                "replay_of_ceiling": found["speedup"] / found["ceiling"],
            }
    return figures


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
    _fill(client, [passage.token_ids() for passage in sorted(sample.stored, key=lambda one: one.id)], advance)
    prompts = {mode: [_asked(r, f"{mode} {n}", what) for n, r in enumerate(sample.requests)] for mode in MODES}
    lengths = [(len(a.ids), sample.held_tokens(r)) for a, r in zip(prompts["full"], sample.requests, strict=True)]
    found: dict[str, Any] = {"ceiling": row_layer_ceiling(lengths, what.layers, what.ratio)}
    found |= {"tokens": [tokens for tokens, _ in lengths], "held_tokens": [held for _, held in lengths]}
    for mode in MODES:
        found[mode] = _saturate(client, prompts[mode], mode, what, partial(advance, f"{mode}, replay"))
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


def _advance_to(advance: Progress, stage: str, total: int, done: int) -> None:
    advance(stage, done, total)


def _fill(client: Client, chunks: list[list[int]], advance: Progress) -> None:
    for at in range(0, len(chunks), FILLING):
        client.store(chunks[at : at + FILLING])
        advance(FILL, min(at + FILLING, len(chunks)), len(chunks))


def _saturate(
    client: Client, prompts: list[Asked], mode: str, what: Serving, advance: Callable[[int, int], None]
) -> dict[str, Any]:
    loaded: list[int] = []

    def ask(asked: Asked) -> float:
        got = client.ask(asked, what.answer_tokens, mode)
        loaded.append(sum(got.report["hit_tokens"].values()))
        return got.ttft_s

    found = saturate(ask, prompts, what.clients, lambda count: advance(count, len(prompts)))
    return found | {"loaded_tokens": sum(loaded)}


def _discover(
    folder: Path, sample: Sample, trace: list[TraceRequest], what: Serving, advance: Progress
) -> dict[str, Any]:
    """The sample with nothing marked, after the requests before it were seen; and what the whole trace wastes.

    Of what was learnt that is stored before which the sample has somewhere, as with what is marked.
    """
    requests = [request for request in trace if request.passages]
    seen = (_asked(request, f"seen {number}", what).ids for number, request in enumerate(requests))
    told = partial(_advance_to, advance, LEARN, len(requests))
    learnt, whole = learn_in_order(seen, len(sample.before), what.seed, told)
    prompts = [Asked(_asked(r, f"discover {n}", what).ids, None) for n, r in enumerate(sample.requests)]
    used = learnt.found_in(prompt.ids for prompt in prompts)
    with serving(folder, what.ratio, what.clients, discover=True) as client:
        _fill(client, used, advance)
        replayed = _saturate(client, prompts, "blend", what, partial(advance, DISCOVER))
    return {
        "replay": replayed,
        "wasted": whole.wasted,
        "learnt_before": vars(learnt.figures),
        "learnt": vars(whole.figures),
        "chunks": len(learnt.chunks),
        "chunks_in_replay": len(used),
    }


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
    from lab.servers.rates_plot import draw_rates

    found = result["replay"]
    curves = {
        "full recompute": ([point["full"]["median_s"] for point in found["rates"]], found["full"]["requests_per_s"]),
        "blend": ([point["blend"]["median_s"] for point in found["rates"]], found["blend"]["requests_per_s"]),
    }
    rates = [point["requests_per_s"] for point in found["rates"]]
    draw_rates(rates, curves, f"RAGPulse on {result['model']}, r = {result['ratio']:g}, cacheblend serve", path)
