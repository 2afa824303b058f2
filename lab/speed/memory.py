"""Peak resident memory of a blend and of a full prefill, each in its own process, the store on disk."""

import json
import random
import sys
import tempfile
from typing import Any

import torch

from cacheblend.bench.ttft import TtftSettings, draw_prompt, open_chunks, open_model
from cacheblend.core.config import BlendConfig
from cacheblend.core.failures import count_failure, failures
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.baselines import full_recompute
from cacheblend.engines.provenance import stamp
from cacheblend.store import open_store
from lab.bench import forget_peak, peak_bytes
from lab.checkout import measured_apart

STEPS = ("warm", "full", "blend")
PASSED_ON = ("model", "shape", "threads", "seed")
"""Of the settings, to the processes."""


def run(settings: TtftSettings) -> dict[str, Any]:
    """Warms a store in one process, then measures one prefill of each arm in its own process.

    Of the settings `PASSED_ON` count.

    Returns:
        ``peak_bytes`` by arm, the prompt's ``kv_bytes``, and ``excess_over_kv``: (blend - full) / KV cache.
    """
    measured: dict[str, dict[str, Any]] = {}
    passed_on = json.dumps({name: getattr(settings, name) for name in PASSED_ON})
    with tempfile.TemporaryDirectory(prefix="cacheblend-bench-") as folder:
        for arm in STEPS:
            measured[arm] = measured_apart("lab.speed.memory", arm, folder, passed_on)
            for reason, count in measured[arm].pop("failed").items():
                count_failure(reason, count)
    excess = measured["blend"]["peak_bytes"] - measured["full"]["peak_bytes"]
    kv_bytes = measured["blend"]["kv_bytes"]
    return {
        "peak_bytes": {arm: measured[arm]["peak_bytes"] for arm in ("full", "blend")},
        "kv_bytes": kv_bytes,
        "excess_over_kv": excess / kv_bytes,
        "model": settings.model or settings.shape,
        "prompt_tokens": settings.prompt_tokens,
        "ratio": settings.ratios[0],
        **stamp(),
    }


def _measure(arm: str, folder: str, settings: TtftSettings) -> dict[str, Any]:
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    model, tokenizer, _ = open_model(settings)
    draw = random.Random(settings.seed)
    with open_store(folder, ram_bytes=0) as store:
        engine = BlendEngine(model, tokenizer, store=store, config=BlendConfig(capture=False), fingerprint="bench")
        chunks = open_chunks(settings, engine, draw)
        if arm == "warm":
            engine.warm(chunks)
        prompt = draw_prompt(settings, chunks, engine.runtime.survey.vocab_size, draw)
        forget_peak()
        if arm == "full":
            full_recompute(engine, prompt)
        elif arm == "blend":
            # The KV cache is part of the peak, as in transformers' own prefill: it is held until the end.
            result = engine.prefill(prompt, ratio=settings.ratios[0])
            assert result.kv
        kv_bytes = len(prompt) * engine.runtime.survey.layout.block_bytes(1)
        return {"peak_bytes": peak_bytes(), "kv_bytes": kv_bytes, "failed": failures()}


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], sys.argv[2], TtftSettings(**json.loads(sys.argv[3])))))
