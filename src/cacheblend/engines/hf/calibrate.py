"""Measures a cost model for the loading controller: prefill times, blend overhead, speed of each store tier."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

from cacheblend.core.cost.cost_model import CostModel, TierSpeed
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines.hf.engine import BlendEngine
from cacheblend.engines.settings import controller_of
from cacheblend.store.speed import measure

LENGTHS = (256, 1024, 4096)
_CHUNK = 256


def calibrate(engine: BlendEngine, *, lengths: Sequence[int] = LENGTHS, rounds: int = 3) -> CostModel:
    """Measures the cost model of the engine's model on its device, with the store that it will use later. `lengths` of
    prompts in tokens, ascending, are skipped where the context is shorter; after one warm-up the median of `rounds`
    counts. Raises `InvalidInputError`: fewer than two lengths fit; `StoreError`."""
    engine.survey.kinds.check_none("the cost model of the loading controller")
    limit = engine.survey.max_length
    fitting = [tokens for tokens in lengths if limit is None or tokens <= limit]
    if len(fitting) < 2:
        raise InvalidInputError(
            f"at least two of the lengths {list(lengths)} must fit the model's context of {limit} tokens"
        )
    rng = random.Random(0)
    prefills = []
    for tokens in fitting:
        prompt = Prompt.of([text(_ids(engine, rng, tokens))])
        prefills.append((tokens, _seconds(engine, prompt, rounds)))
    cost_model = CostModel(tuple(prefills))
    tiers: dict[str, TierSpeed] = {}
    for name, store in engine.store.tiers().items():
        _, tiers[name] = measure(store, engine.stored_layout, rounds=rounds)
    return replace(cost_model, tiers=tiers, overhead=_overhead(engine, cost_model, rng, fitting[-1], rounds))


def _overhead(engine: BlendEngine, cost_model: CostModel, rng: random.Random, tokens: int, rounds: int) -> float:
    """How many times longer a row-layer takes in a blend of stored chunks, at the lowest ratio, than in a prefill."""
    around = min(32, tokens // 4)
    size = max(1, min(_CHUNK, tokens - 2 * around))  # a short context holds less than a chunk of the usual size
    chunks = [chunk(_ids(engine, rng, size)) for _ in range(max(1, (tokens - 2 * around) // size))]
    own = {bytes(each.token_ids) for each in chunks}
    engine.warm(chunks)
    try:
        rng.shuffle(chunks)
        prompt = Prompt.of([text(_ids(engine, rng, around)), *chunks, text(_ids(engine, rng, around))])
        plan = engine.planner.plan(prompt, engine.store)
        expected = controller_of(cost_model, engine.config, engine.stored_layout).decide(plan).compute_s
        return _seconds(engine, prompt, rounds) / expected
    finally:
        for manifest in engine.store.manifests():
            if bytes(manifest.token_ids) in own:
                engine.store.delete_manifest(manifest.chunk_id)
                for name in manifest.block_names:
                    engine.store.delete(name)


def _seconds(engine: BlendEngine, prompt: Prompt, rounds: int) -> float:
    times = [engine.prefill(prompt, ratio=None).report.compute_s for _ in range(rounds + 1)]
    return statistics.median(times[1:])


def _ids(engine: BlendEngine, rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(engine.survey.vocab_size) for _ in range(count)]
