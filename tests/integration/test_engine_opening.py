"""What an engine is opened on: stores that are shared, full or lose blocks, and folders that lack something."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import BlockLostError, InvalidInputError, StoreError
from cacheblend.core.names import BlockName
from cacheblend.core.plan.blocks import Block, RecordMemory
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines.hf import BlendEngine
from cacheblend.store import MemoryStore
from small_llama import (
    BLOCK,
    GREEDY,
    PARTS,
    PASSAGES,
    SOON,
    Open,
    check_sums,
    names_of,
    plain,
)

# ---- stores -----------------------------------------------------------------------------------------------


def test_a_second_engine_hits_the_chunks_of_the_first_on_disk(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = shutil.copytree(built, tmp_path / "copy")
    with BlendEngine.from_pretrained(built, store=tmp_path / "store") as first:
        cold = first.generate(PARTS, GREEDY, ratio=1.0)
        assert first.flush(SOON)
    with BlendEngine.from_pretrained(copy, store=f"file://{tmp_path}/store?ram_bytes=1MiB") as second:
        warm = second.generate(PARTS, GREEDY, ratio=1.0)
    assert warm.token_ids == cold.token_ids
    assert warm.report.missed_tokens == 0
    assert warm.report.hit_tokens["disk"] == sum(len(s) for s in second.prompt(PARTS).chunks)
    check_sums(warm)


def test_engines_with_different_salts_share_nothing(open_engine: Open) -> None:
    store = MemoryStore()
    engines = [open_engine(store, salt=salt) for salt in ("a", "b", "a")]
    engines[0].warm(PASSAGES)
    loaded = [engine.generate(PARTS, GREEDY).report.loaded_tokens for engine in engines[1:]]
    assert loaded[0] == 0
    assert loaded[1] > 0


def test_a_store_passed_by_the_caller_stays_open(open_engine: Open, tmp_path: Path) -> None:
    class Closed(MemoryStore):
        closed = False

        def close(self) -> None:
            self.closed = True
            super().close()

    store = Closed()
    with open_engine(store) as engine:
        engine.warm(PASSAGES)
    assert not store.closed
    assert len(store.manifests()) == 3


class FullStore(MemoryStore):
    def write(self, block: Block) -> bool:
        raise StoreError("no space left on device")


@pytest.mark.may_fail("store write")
def test_requests_succeed_when_the_store_cannot_be_written(open_engine: Open) -> None:
    engine = open_engine(FullStore())
    for _ in range(2):
        answer = engine.generate(PARTS, GREEDY)
        assert answer.token_ids == plain(engine, engine.prompt(PARTS))
        assert answer.report.loaded_tokens == 0
        assert engine.flush(SOON)
    with pytest.raises(StoreError, match="no space left"):
        engine.warm(PASSAGES)


class LosingStore(MemoryStore):
    """Finds all blocks, but cannot read those in `lost`."""

    lost: frozenset[BlockName] = frozenset()

    def read_layers(
        self,
        names: Sequence[BlockName],
        layers: range,
        heads: slice | None = None,
        memory: RecordMemory | None = None,
    ) -> list[list[torch.Tensor] | BlockLostError]:
        lost = self.lost if layers[-1] > 1 else frozenset()
        read = super().read_layers(names, layers, heads, memory)
        return [
            BlockLostError([name], "checksum") if name in lost else records
            for name, records in zip(names, read, strict=True)
        ]


@pytest.mark.may_fail("block lost")
def test_a_lost_block_is_recomputed_and_reported(open_engine: Open) -> None:
    store = LosingStore()
    engine = open_engine(store)
    engine.warm(PASSAGES)
    store.lost = frozenset(names_of(engine, PASSAGES[1])[1:2])
    answer = engine.generate(PARTS, GREEDY, ratio=1.0)
    assert answer.token_ids == plain(engine, engine.prompt(PARTS))
    assert answer.report.missed_tokens == BLOCK
    assert len(answer.report.fallbacks) == 1
    # how many layers one read takes depends on how fast the reads before were
    assert re.search(r"1 block\(s\) lost: (layer 2|layers \d to \d): checksum", answer.report.fallbacks[0])
    check_sums(answer)


# ---- models, tokenizers, folders --------------------------------------------------------------------------


def test_an_engine_without_a_tokenizer_takes_ids(built: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(built).eval()
    passage = chunk(range(20, 45), "ids")
    with BlendEngine(model, config=BlendConfig(block_size=BLOCK)) as engine:
        assert engine.warm([passage]).tokens == 25
        prompt = Prompt.of([text([1, 7, 8]), passage, text([9, 10])])
        answer = engine.generate(prompt, GREEDY, ratio=1.0)
        assert answer.token_ids == plain(engine, prompt)
        assert (answer.text, answer.report.hit_tokens["memory"]) == ("", 25)
        for refused in (lambda: engine.generate(["a"]), lambda: engine.warm(["a"])):
            with pytest.raises(InvalidInputError, match=r"no tokenizer: .*token ids"):
                refused()
    with pytest.raises(InvalidInputError, match="'bos' needs a tokenizer"):
        BlendEngine(model, config=BlendConfig(anchor="bos"))


def test_a_folder_that_cannot_be_opened_is_refused(built: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(built, tmp_path / "broken")
    (broken / "config.json").write_text("{")
    for folder, message in ((tmp_path, "no model folder"), (broken, "is not JSON")):
        with pytest.raises(InvalidInputError, match=message):
            BlendEngine.from_pretrained(folder)


def test_options_that_change_the_kv_change_the_block_names(built: Path, loaded: BlendEngine) -> None:
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
    with BlendEngine.from_pretrained(built, rope_parameters=linear) as other:
        assert other.planner.root != loaded.planner.root


def test_a_folder_without_a_tokenizer_takes_ids(built: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(built, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*", "special*", "chat*"))
    with pytest.raises(InvalidInputError, match=r"no tokenizer .*; add or repair its files") as caught:
        BlendEngine.from_pretrained(bare)
    assert "with_tokenizer=False" in caught.value.__notes__[0] and "with_tokenizer" not in str(caught.value)
    with BlendEngine.from_pretrained(bare, with_tokenizer=False) as engine:
        assert engine.generate(Prompt.of([text([5, 6, 7])]), GREEDY).token_ids
