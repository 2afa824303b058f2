"""Snapshots of recurrent layers in stores: lost, damaged, foreign, evicted, in tiers, of tenants, and under load.

Whatever happens to a snapshot, an answer is the model's own; at worst the prefix is computed.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cacheblend.cli import app
from cacheblend.core.names import STATE_IDS, BlockName, state_name
from cacheblend.core.plan.blocks import Block, KVLayout, LayerShape
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.core.select.selectors import AllRows
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.recurrent import SnapshotFormat
from cacheblend.engines.hf.scheduler import Limits, Scheduler
from cacheblend.store import KVStore, MemoryStore, TieredStore, open_store
from cacheblend.store.format.block_file import decode_header, header_bytes
from families import tiny_model
from hybrid_figure import TOLERANCE, prefix_error
from integration.test_scheduler import PARAMS, submit
from parity.scenes import QUESTION, RAG, SYSTEM, UNSEEN, A, B, C, assert_close, greedy, open_engine, random_ids, run
from vllm_table import RESULTS, record

FAMILY = "qwen3_next"
LEADING = Prompt.of([A, QUESTION])
FRESH = Prompt.of([text(random_ids(30, 90)), B, QUESTION])


def snapshot_of(engine: BlendEngine, prompt: Prompt = LEADING) -> BlockName:
    """Name of the snapshot behind the prompt's exact prefix."""
    spans = [span for span in engine.planner.plan(prompt, engine.store).spans if span.source.value == "prefix"]
    return state_name(spans[-1].name)


@torch.no_grad()
def prefix_and_check(engine: BlendEngine, prompt: Prompt = LEADING) -> tuple[int, Sequence[str]]:
    """Tokens of the exact prefix that a full recompute loads, whose logits are compared; and what was lost."""
    outcome = run(engine, prompt, AllRows())
    logits = engine.model(torch.tensor([prompt.token_ids.tolist()])).logits[0, -1]
    assert_close(outcome.result.logits, logits, 3e-5, "logits")
    return outcome.report.hit_tokens["prefix"], outcome.report.fallbacks


@pytest.fixture(params=["memory", "disk", "tiers"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KVStore]:
    disk = open_store(tmp_path / "kv") if request.param != "memory" else None
    opened = MemoryStore() if disk is None else disk if request.param == "disk" else TieredStore(MemoryStore(1), disk)
    with opened:
        yield opened


def test_a_missing_snapshot_is_made_again(store: KVStore) -> None:
    """First what is in front of it is used, then nothing; the next request makes it again, and `warm` does too."""
    with open_engine(tiny_model(FAMILY), store=store, capture=True) as engine:
        kinds = engine.survey.kinds
        assert kinds.state_bytes / engine.survey.layout.block_bytes(1) > len(A)  # so there is one, at A's end
        assert prefix_and_check(engine) == (40, [])
        assert store.delete(snapshot_of(engine))
        assert prefix_and_check(engine)[0] == 0
        assert engine.warm([A]).stored == 1
        assert prefix_and_check(engine)[0] == 40
        assert store.delete(snapshot_of(engine))
        engine.generate(LEADING, PARAMS)
        assert engine.flush(60)
        assert prefix_and_check(engine)[0] == 40


@pytest.mark.may_fail("block lost")
def test_a_shallower_snapshot_serves_where_the_deepest_is_gone_or_a_block_of_the_prefix_is_lost(tmp_path: Path) -> None:
    """LFM2's states are small: there is a snapshot at every block of 16 tokens."""
    with open_store(tmp_path) as store, open_engine(tiny_model("lfm2"), store=store) as engine:
        assert prefix_and_check(engine)[0] == 40
        assert store.delete(snapshot_of(engine))
        assert prefix_and_check(engine)[0] == 32
        # The records of a block rot after the plan was made: the pass begins again where a state is still right.
        second = engine.planner.plan(LEADING, store).spans[1].name
        [file] = [path for path in tmp_path.rglob("*") if path.is_file() and second.hex() in path.name]
        data = bytearray(file.read_bytes())
        header = decode_header(bytes(data[: header_bytes(data, len(data))]), len(data), second)
        data[header.data_at + header.place.begins[-1]] ^= 1
        file.write_bytes(data)
        prefix, lost = prefix_and_check(engine)
        assert prefix == 16 and len(lost) == 1


@pytest.mark.may_fail("block lost")
@pytest.mark.parametrize("kind", ["disk", "tiers"])
def test_a_damaged_snapshot_is_reported_removed_and_made_again(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with open_store(folder) as store, open_engine(tiny_model(FAMILY), store=store) as engine:
        name = snapshot_of(engine)
    with open_store(folder) as store, open_engine(tiny_model(FAMILY), [], store=store) as engine:  # another process
        assert prefix_and_check(engine) == (40, [])
        assert not store.verify()
    [file] = [path for path in folder.rglob("*") if path.is_file() and name.hex() in path.name]
    data = bytearray(file.read_bytes())
    data[-2000] ^= 1
    file.write_bytes(data)
    disk = open_store(folder)
    opened = disk if kind == "disk" else TieredStore(MemoryStore(), disk)
    with opened as store, open_engine(tiny_model(FAMILY), [], store=store, capture=True) as engine:
        prefix, lost = prefix_and_check(engine)
        assert prefix == 0 and len(lost) == 1 and "the states at position 40" in lost[0]
        assert store.stats().damaged == 1
        engine.generate(LEADING, PARAMS)
        assert engine.flush(60)
        assert prefix_and_check(engine) == (40, [])


@pytest.mark.parametrize("shape", ["other bytes", "another dtype"])
def test_a_snapshot_of_other_tensors_is_not_used(shape: str) -> None:
    """The name is right, and so is the checksum; but what lies in it is another model's, or of another dtype."""
    with open_engine(tiny_model(FAMILY)) as engine:
        name, own = snapshot_of(engine), SnapshotFormat(engine.survey.kinds.states)
        parent = engine.planner.plan(LEADING, engine.store).spans[2].name
        assert engine.store.delete(name)
        layout = own.layout if shape == "another dtype" else KVLayout((LayerShape(1, 8),) * 3, torch.uint8)
        records = [torch.zeros(layout.record_shape(layer, 1), dtype=torch.uint8) for layer in range(3)]
        assert engine.store.write(Block(name, parent, STATE_IDS, records, layout))
        assert prefix_and_check(engine) == (0, [])


def test_models_of_two_dtypes_and_tenants_have_snapshots_of_their_own() -> None:
    with (
        MemoryStore() as store,
        open_engine(tiny_model(FAMILY), store=store) as full,
        open_engine(tiny_model(FAMILY, torch.bfloat16), store=store) as half,
    ):
        assert snapshot_of(full) != snapshot_of(half)
        assert prefix_and_check(full)[0] == 40
        assert half.prefill(LEADING).report.hit_tokens["prefix"] == 40
    with open_engine(tiny_model(FAMILY), [], capture=True) as engine:
        engine.warm([A], tenant="one")
        for tenant, prefix in (("one", 40), ("two", 0), ("", 0)):
            with engine.open_prefill(LEADING, tenant=tenant) as prefill:
                while not prefill.advance():
                    pass
                assert prefill.result().report.hit_tokens["prefix"] == prefix


def test_a_stores_bound_counts_snapshots_and_evicts_them_and_one_without_room_fails_no_request() -> None:
    model = tiny_model(FAMILY)
    with open_engine(model, [A]) as engine:
        with_one = engine.store.stats().bytes
        assert engine.store.delete(snapshot_of(engine))
        state_bytes = with_one - engine.store.stats().bytes
        assert engine.survey.kinds.state_bytes <= state_bytes <= engine.survey.kinds.state_bytes + 4096
    with MemoryStore(2 * with_one) as store, open_engine(model, [], store=store) as engine:
        for seed in range(20):
            engine.warm([chunk(random_ids(40, 200 + seed))])
            assert store.stats().bytes <= 2 * with_one
        assert store.stats().evictions > 0
        assert prefix_and_check(engine)[0] == 0
        engine.warm([A])
        assert prefix_and_check(engine)[0] == 40
    with MemoryStore(30_000) as store, open_engine(model, [], store=store, capture=True) as engine:
        assert engine.survey.kinds.state_bytes > 10_000
        for prompt in (LEADING, RAG, LEADING):
            assert engine.generate(prompt, PARAMS, ratio=1.0).token_ids == greedy(engine.model, prompt, 6)
            engine.flush(60)


@pytest.mark.parametrize("family", [FAMILY, "jamba", "falcon_h1", "lfm2-tail"])
def test_answers_together_are_those_alone(family: str) -> None:
    """Prompts share layers, answers decode side by side, and choices of one prompt each have a state of their own."""
    prompts = (LEADING, RAG, Prompt.of([SYSTEM, C, UNSEEN, A, QUESTION]), FRESH)
    with open_engine(tiny_model(family), capture=True) as engine:
        expected = [greedy(engine.model, prompt, 6) for prompt in prompts]
        scheduler = Scheduler(engine, Limits(active=6, row_layers=50))
        try:
            listeners = [submit(scheduler, prompt, ratio=1.0, choices=1 + number % 2)
                         for number, prompt in enumerate(prompts * 3)]  # fmt: skip
            done = [listener.wait() for listener in listeners]
        finally:
            scheduler.close()
        assert [each.error for each in done] == [None] * 12
        for listener, tokens in zip(listeners, expected * 3, strict=True):
            assert all(each == tokens for each in listener.tokens.values())
        assert engine.flush(60)
        if family != "jamba":
            assert prefix_and_check(engine, FRESH)[0] == 30


def test_removing_a_chunk_removes_its_snapshots(tmp_path: Path) -> None:
    with open_store(tmp_path) as store, open_engine(tiny_model(FAMILY), [A], store=store) as engine:
        name = snapshot_of(engine)
        assert store.held([name]) == [True]
    assert CliRunner().invoke(app, ["store", "rm", str(tmp_path), "--all"]).exit_code == 0
    with open_store(tmp_path) as store:
        assert store.held([name]) == [False] and store.stats().blocks == 0


def test_the_figure_is_computed_and_merged(tmp_path: Path) -> None:
    path = tmp_path / "reach.json"
    path.write_text('{"date": "today", "figures": {"families": 24, "hybrid_prefix_exact": false}}')
    record(path, hybrid_prefix_exact=all(prefix_error(family) <= TOLERANCE for family in (FAMILY, "jamba")))
    merged = {"date": "today", "figures": {"families": 24, "hybrid_prefix_exact": True}}
    assert json.loads(path.read_text()) == merged and list(tmp_path.iterdir()) == [path]
    assert json.loads(RESULTS.read_text())["figures"]["hybrid_prefix_exact"] is True
