"""A store that an earlier version wrote: this one finds all of it, under the same names, and reads the same KV."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend.core.config import BlendConfig
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines.hf import BlendEngine

DATA = Path(__file__).parents[1] / "data" / "store-0.1"
FACTS: dict[str, Any] = json.loads((DATA / "facts.json").read_text())
CHUNKS = FACTS["chunks"]
WAYS = {"plain": {}, "int8": {"codec": "int8"}, "tenant": {}, "system-anchor": {"anchor": "system"}}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(DATA / "store", tmp_path / "store")
    yield tmp_path / "store"


@pytest.mark.parametrize("way", WAYS)
def test_every_block_is_found_and_gives_the_same_logits(way: str, store: Path) -> None:
    tenant = "tenant-a" if way == "tenant" else ""
    # the facts were written when one check was the default
    config = BlendConfig(block_size=32, check_layers=(1,), capture=False, **WAYS[way])  # type: ignore[arg-type]
    order = [chunk(CHUNKS[name]) for name in ("third", "first", "second")]
    prompt = Prompt.of([text(FACTS["system"]), *order, text(FACTS["question"])])
    with BlendEngine.from_pretrained(DATA / "model", store=str(store), config=config, with_tokenizer=False) as engine:
        assert len(list(engine.store.manifests())) == 3 * len(WAYS)
        with torch.no_grad(), engine.open_prefill(prompt, tenant=tenant) as prefill:
            while not prefill.advance():
                pass
            result = prefill.result()
            report = result.report
        assert report.missed_tokens == 0 and not report.fallbacks
        assert report.loaded_tokens >= sum(map(len, CHUNKS.values()))
        if way == "system-anchor":  # the prompt's system prompt, and the chunk that stands right behind it
            assert report.hit_tokens["prefix"] == len(FACTS["system"]) + len(CHUNKS["third"])
        wanted = torch.tensor(FACTS["logits"][way])
        torch.testing.assert_close(result.logits, wanted, rtol=1e-4, atol=1e-4)
        assert not engine.store.stats().damaged
