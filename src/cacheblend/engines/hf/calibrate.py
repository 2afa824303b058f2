"""Measures a cost model for the loading controller: prefill times, blend overhead, speed of each store tier."""

import contextlib
import os
import random
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from cacheblend.core.cost.cost_model import CostModel, TierSpeed
from cacheblend.core.errors import BlockLostError, InvalidInputError, StoreError
from cacheblend.core.names import BlockName, as_token_ids, block_name, root_name
from cacheblend.core.plan.blocks import Block, KVLayout
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines.hf.engine import BlendEngine
from cacheblend.engines.settings import controller_of
from cacheblend.store import KVStore
from cacheblend.store.disk import DiskStore

LENGTHS = (256, 1024, 4096)
_CHUNK = 256  # tokens of a chunk, and of a block that measures a store
FEW, MANY = 1, 8  # numbers of blocks in the two measurements; their difference separates throughput from latency


def calibrate(engine: BlendEngine, *, lengths: Sequence[int] = LENGTHS, rounds: int = 3) -> CostModel:
    """Measures the cost model of the engine's model on its device, with the store that it will use later. `lengths` of
    prompts in tokens, ascending, are skipped where the context is shorter; after one warm-up the median of `rounds`
    counts. Raises `InvalidInputError`: fewer than two lengths fit; `StoreError`."""
    engine.runtime.survey.kinds.check_none("the cost model of the loading controller")
    limit = engine.runtime.survey.max_length
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
        _, tiers[name] = measure_store(store, engine.runtime.stored_layout, rounds=rounds)
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
        plan = engine.runtime.planner.plan(prompt, engine.store)
        expected = controller_of(cost_model, engine.config, engine.runtime.stored_layout).decide(plan).compute_s
        return _seconds(engine, prompt, rounds) / expected
    finally:
        for manifest in engine.store.manifests():
            if bytes(manifest.token_ids) in own:
                with contextlib.suppress(StoreError):
                    engine.store.delete_chunk(manifest.block_names)


def _seconds(engine: BlendEngine, prompt: Prompt, rounds: int) -> float:
    times = [engine.prefill(prompt, ratio=None).report.compute_s for _ in range(rounds + 1)]
    return statistics.median(times[1:])


def _ids(engine: BlendEngine, rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(engine.runtime.survey.vocab_size) for _ in range(count)]


def measure_store(store: KVStore, layout: KVLayout, *, rounds: int = 3) -> tuple[str, TierSpeed]:
    """The tier's own name and its speed, the median of some rounds. Writes random blocks under unique names, reads them
    uncached and removes them. `store`: one tier; see `KVStore.tiers`, which has the name that it has beside others of
    its kind. Raises `StoreError`: the store cannot be written or read."""
    root = root_name(f"a measurement {secrets.token_hex(8)}", "float32")
    names: list[BlockName] = []
    try:
        for number in range(MANY):
            ids, records = as_token_ids([number, *range(_CHUNK - 1)]), []
            for layer in range(len(layout.layers)):
                shape, dtype = layout.record_shape(layer, _CHUNK), layout.record_dtype
                size = int(torch.Size(shape).numel()) * dtype.itemsize
                records.append(torch.randint(0, 255, (size,), dtype=torch.uint8).view(dtype).view(shape))
            block = Block(block_name(root, ids), root, ids, records, layout)
            store.write(block)
            names.append(block.name)
        entries = store.find(names)
        few_s, many_s = (_layer_seconds(store, names[:count], len(layout.layers), rounds) for count in (FEW, MANY))
    finally:
        for name in names:
            with contextlib.suppress(StoreError):
                store.delete(name)
    block_s = max((many_s - few_s) / (MANY - FEW), 1e-9)
    record_bytes = layout.block_bytes(_CHUNK) / len(layout.layers)
    tier = next((entry.tier for entry in entries if entry is not None), "unknown")
    return tier, TierSpeed(record_bytes / block_s, max(0.0, few_s - block_s))


def _layer_seconds(store: KVStore, names: list[BlockName], layers: int, rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        if isinstance(store, DiskStore) and hasattr(os, "posix_fadvise"):  # whose files leave the page cache
            for file in map(store.file_of, names):
                with contextlib.suppress(OSError), Path(file).open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        for layer in range(layers):
            for record in store.read_many(names, layer):
                if isinstance(record, BlockLostError):
                    raise StoreError(f"the store cannot be measured: {record.reason}")
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) / layers
