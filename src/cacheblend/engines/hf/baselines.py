"""Methods that compute a first token, for benchmarks, `ask --compare` and `demo` to compare on the same prompt. Full
recompute, prefix caching, the fused path with any selector (full reuse, blend), transformers' own decode loop."""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from cacheblend.core.fuse.prefill import PrefillResult
from cacheblend.core.load.loader import LayerKV
from cacheblend.core.plan.prompt import Prompt
from cacheblend.core.report import BlendReport
from cacheblend.core.select.selectors import Selector
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.ambient import without_ambient
from cacheblend.engines.hf.recurrent import States, cache_argument, fill_cache
from cacheblend.engines.hf.sampling import Sampler, SamplingParams
from cacheblend.engines.tokens.detokenizer import TextStream

TOUCHED_ROWS = 64
SHORTEST_PREFIX = 16


@dataclass
class FirstToken:
    """The result of one method."""

    logits: torch.Tensor  # [vocab] at the prompt's last position
    ttft_s: float  # seconds until the logits are computed
    row_layers: int  # rows times layers computed
    kv: DynamicCache | list[LayerKV] | None = None  # of the prompt, as decoding takes it; None if the method keeps none
    report: BlendReport | None = None  # set by the methods that load stored KV
    states: States | None = None  # of recurrent layers behind the prompt, beside a list as `kv`


@without_ambient
def touch(engine: BlendEngine, prompt: Prompt) -> None:
    """Runs a short plain forward, so that no method pays for the first read of the weights."""
    engine.model(input_ids=engine.runtime.ids_of(prompt)[None, :TOUCHED_ROWS])


@without_ambient
def full_recompute(engine: BlendEngine, prompt: Prompt) -> FirstToken:
    """The baseline without this package: transformers' own forward with a cache, last logits only."""
    cache = DynamicCache(config=engine.model.config)
    return _plain(engine, prompt, cache, known=0, started=time.perf_counter())


@without_ambient
def prefix_caching(engine: BlendEngine, prompt: Prompt) -> FirstToken:
    """Loads the leading blocks whose KV is exact and computes the rest without blending. A prefix shorter than
    `SHORTEST_PREFIX` tokens (a BOS token, for example) is computed, as prefix caches do: behind one transformers needs
    an attention mask, which costs more than it saves. With recurrent layers the fused path does it."""
    if engine.runtime.survey.kinds.states:
        return _first_token(engine.prefill(prompt, mode="prefix"))
    started = time.perf_counter()
    plan = engine.runtime.planner.plan(prompt, engine.store)
    if plan.prefix_length < SHORTEST_PREFIX:
        return _plain(engine, prompt, DynamicCache(config=engine.model.config), known=0, started=started)
    kv = []
    with engine.runtime.prefiller.open_loader(plan, engine.runtime.survey.num_layers) as loader:
        for layer in range(engine.runtime.survey.num_layers):
            loaded = loader.layer(layer)
            kv.append(LayerKV(loaded.keys[:, : plan.prefix_length], loaded.values[:, : plan.prefix_length]))
    cache = fill_cache(engine.model, kv)
    load_s = time.perf_counter() - started
    first = _plain(engine, prompt, cache, known=plan.prefix_length, started=started)
    hits = {"prefix": plan.prefix_length}
    first.report = BlendReport(len(plan), hits, load_s=load_s, compute_s=first.ttft_s - load_s, ttft_s=first.ttft_s)
    return first


@without_ambient
def fused(engine: BlendEngine, prompt: Prompt, selector: Selector) -> FirstToken:
    """Runs the fused path: full reuse and blend differ only in their selector."""
    return _first_token(engine.prefill(prompt, selector=selector))


def _first_token(result: PrefillResult) -> FirstToken:
    report, states = result.report, None if result.states is None else result.states.last
    return FirstToken(result.logits, report.ttft_s, report.row_layers, result.kv, report, states)


@without_ambient
def finish(
    engine: BlendEngine,
    prompt: Prompt,
    first: FirstToken,
    params: SamplingParams,
    seen: Callable[[int, torch.Tensor], None] | None = None,
) -> tuple[str, list[int]]:
    """Decodes the answer that follows a method's first logits on its engine and prompt: (text, token ids). Consumes its
    KV. `seen` is called after each token with its id and the logits [vocab] that it was sampled from."""
    assert first.kv is not None
    sampler = Sampler(engine.runtime.ids_of(prompt), first.logits, params, engine.runtime.eos_ids)
    tokens = plain_tokens(engine.model, first.kv, sampler, first.states)
    stream = TextStream(engine.runtime.builder.detokenizer() if engine.runtime.builder else None, params.stop)
    while sampler.finish_reason is None and not stream.stopped:
        with engine.runtime.view.threads.layer():
            token = next(tokens)
        stream.push(token)
        if seen is not None:
            seen(token, sampler.logits)
    stream.finish()
    return stream.text, sampler.token_ids


@without_ambient
def follow(engine: BlendEngine, prompt: Prompt, first: FirstToken, ids: Sequence[int]) -> torch.Tensor:
    """What a method's KV has the model expect of each token of this answer: logits [tokens, vocab]. The KV stays."""
    kv = copy.deepcopy(first.kv)
    cache = kv if isinstance(kv, DynamicCache) else fill_cache(engine.model, kv or [], first.states)
    given = torch.tensor([ids[:-1]], device=first.logits.device, dtype=torch.int64)
    if not given.numel():
        return first.logits[None]
    at = torch.arange(len(prompt), len(prompt) + given.shape[1], device=given.device)[None]
    with engine.runtime.view.threads.layer():
        out = engine.model(input_ids=given, position_ids=at, use_cache=True, **cache_argument(engine.model, cache))
    return torch.cat([first.logits[None], out.logits[0]])


def _plain(engine: BlendEngine, prompt: Prompt, cache: DynamicCache, *, known: int, started: float) -> FirstToken:
    ids = engine.runtime.ids_of(prompt)[None, known:]
    with engine.runtime.view.threads.layer():
        out = engine.model(input_ids=ids, use_cache=True, logits_to_keep=1, **cache_argument(engine.model, cache))
    engine.runtime.prefiller.synchronize()
    seconds = time.perf_counter() - started
    return FirstToken(out.logits[0, -1], seconds, ids.shape[1] * engine.runtime.survey.num_layers, cache)


def plain_tokens(
    model: PreTrainedModel, kv: list[LayerKV] | DynamicCache, sampler: Sampler, states: States | None = None
) -> Iterator[int]:
    """Decodes a sampler's answer with transformers' own forward and cache. `kv` has one entry per layer, or is a filled
    transformers cache; a list is moved into such a cache after the first token, and emptied. `states` are those of
    recurrent layers, beside a list."""
    yield sampler.sample()
    if sampler.finish_reason is None and not isinstance(kv, DynamicCache):
        kv = fill_cache(model, kv, states)
    cache = cache_argument(model, kv)
    while sampler.finish_reason is None:
        position = torch.tensor([[len(sampler) - 1]], device=sampler.last_id.device)
        out = model(input_ids=sampler.last_id[None], position_ids=position, use_cache=True, **cache)
        sampler.logits = out.logits[0, -1]
        yield sampler.sample()
