"""The loading controller in an engine: blocks that it does not load are computed, and it learns from measured times.

And snapshots of recurrent layers: whatever happens to one, an answer is the model's own."""

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cacheblend.cli import app
from cacheblend.core.cost.controller import Controller
from cacheblend.core.cost.cost_model import CostModel, TierSpeed
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import STATE_IDS, BlockName, state_name
from cacheblend.core.plan.blocks import Block, KVLayout, LayerShape
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.core.select.selectors import AllRows
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.recurrent import SnapshotFormat
from cacheblend.engines.hf.scheduler import Limits, Scheduler
from cacheblend.engines.hf.tickets import Ask, DoneEvent
from cacheblend.engines.settings import controller_of, load_cost_model, write_cost_model
from cacheblend.store import KVStore, MemoryStore, TieredStore, open_store
from cacheblend.store.combined import CascadeStore
from cacheblend.store.format.block_file import decode_headers, header_bytes, header_of
from command_line import Run
from families import tiny_model
from integration.test_scheduler import PARAMS, submit
from lab.speed.throttle import ThrottledStore
from parity.scenes import (
    QUESTION,
    RAG,
    SYSTEM,
    UNSEEN,
    A,
    B,
    C,
    assert_close,
    assert_same,
    greedy,
    open_engine,
    random_ids,
    run,
)
from reference import plain_kv

FOUR = SamplingParams(max_new_tokens=4, ignore_eos=True)
PREFILL = ((32, 0.02), (128, 0.1))


def cost_model_file(path: Path, engine: BlendEngine, **tiers: float) -> str:
    cost_model = CostModel(PREFILL, {name: TierSpeed(speed) for name, speed in tiers.items()})
    write_cost_model(path, cost_model, engine.fingerprint, "cpu", engine.runtime.stored_layout)
    return str(path)


@pytest.fixture(scope="module")
def cost_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cost model file in which the store is much slower than computing."""
    with open_engine(tiny_model("llama"), []) as engine:
        return cost_model_file(tmp_path_factory.mktemp("costs") / "cost-model.json", engine, slow=1e3, memory=1e9)


def test_blocks_slower_to_load_than_to_compute_are_computed_unless_a_ratio_is_named(cost_model: str) -> None:
    model, store = tiny_model("llama"), ThrottledStore(1e9, tier="slow")
    with open_engine(model, store=store, cost_model=cost_model) as engine:
        result = engine.prefill(RAG)
        report = result.report
        stored = len(A) + len(B) + len(C)
        assert (report.left_out_tokens, report.missed_tokens, report.hit_tokens.get("slow", 0)) == (stored, 0, 0)
        assert "faster than loading" in report.decision
        logits, layers = plain_kv(model, RAG.token_ids.tolist())
        assert_same(result, logits, layers, 3e-5)
        assert engine.generate(RAG, FOUR).token_ids == greedy(model, RAG, 4)
        report = engine.prefill(RAG, ratio=0.15).report
        assert (report.decision, report.left_out_tokens) == ("", 0) and report.hit_tokens["slow"] > 0
    with open_engine(tiny_model("llama"), store=MemoryStore(), cost_model=cost_model) as engine:
        report = engine.prefill(RAG).report
        assert (report.left_out_tokens, report.missed_tokens) == (0, 0)
        assert report.recomputed_tokens < report.loaded_tokens
        assert "all stored blocks from memory" in report.decision


def test_expected_times_count_the_ratio_that_the_shadow_checks_floor_has_raised(
    cost_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(tiny_model("llama"), store=MemoryStore(), cost_model=cost_model, recompute_ratio=0.2) as engine:
        known = load_cost_model(cost_model, model=engine.fingerprint, codec="raw", device="cpu")
        learnt: list[Any] = []
        monkeypatch.setattr(engine.runtime.prefiller.controller, "learn", lambda *given: learnt.append(given))
        for raised_by in (1.0, 1.5, 3.0):
            engine.runtime.settings = replace(engine.runtime.settings, raised_by=raised_by)
            ratio = engine.prefill(RAG).report.recompute_ratio
            decision, plan, *_ = learnt.pop()
            assert ratio == pytest.approx(0.2 * raised_by) and decision.ratio == ratio
            higher = replace(engine.config, recompute_ratio=ratio)
            assert decision == controller_of(known, higher, engine.runtime.stored_layout).decide(plan)


def test_blocks_left_out_are_not_captured_again_but_promoted(cost_model: str) -> None:
    store = TieredStore(MemoryStore(), ThrottledStore(1e9, tier="slow"))
    with open_engine(tiny_model("llama"), store=store, cost_model=cost_model, capture=True) as engine:
        store.front.prune(0)
        stored, blocks = len(A) + len(B) + len(C), store.back.stats().blocks
        assert engine.generate(RAG, FOUR).report.left_out_tokens == stored
        assert engine.flush(timeout=60)
        assert len(engine.store.manifests()) == 3
        assert store.back.stats().blocks <= blocks + 1  # the system prompt, whose KV is exact
        report = engine.generate(RAG, FOUR).report
        assert (report.left_out_tokens, report.hit_tokens["memory"]) == (0, stored)


def test_the_controller_learns_that_a_tier_is_slower_and_of_two_each_speed(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with open_engine(model, []) as engine:
        file = cost_model_file(tmp_path / "cost-model.json", engine, slow=1e7)
    store = ThrottledStore(5e5, tier="slow")
    with open_engine(model, store=store, cost_model=file) as engine:
        assert engine.prefill(RAG).report.left_out_tokens == 0
        reports = [engine.prefill(RAG).report for _ in range(20)]
        assert engine.runtime.prefiller.controller is not None
        assert engine.runtime.prefiller.controller.cost_model.tiers["slow"].bytes_per_s < 5e6
        assert any(report.left_out_tokens for report in reports)

    # a device a thousand times slower than measured does not change the learnt speed of memory
    model, near, far = tiny_model("llama"), MemoryStore(), ThrottledStore(1e5, tier="slow")
    open_engine(model, [A], store=near).close()
    with open_engine(model, [B, C], store=far) as engine:
        file = cost_model_file(tmp_path / "cost-model.json", engine, slow=1e9, memory=1e6)
    with open_engine(model, [], store=CascadeStore([near, far]), cost_model=file) as engine:
        hits = engine.prefill(RAG).report.hit_tokens
        assert (hits["memory"], hits["slow"]) == (len(A), len(B) + len(C))
        assert engine.runtime.prefiller.controller is not None
        tiers = engine.runtime.prefiller.controller.cost_model.tiers
        assert tiers["slow"].bytes_per_s < 0.9e9
        assert tiers["memory"].bytes_per_s > 1e6


def test_compute_time_is_learnt_only_from_prefills_that_run_alone(
    cost_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt: list[bool] = []
    inner = Controller.learn

    def learn(self: Controller, decision: Any, plan: Any, compute_s: float | None, read_s: Any) -> None:
        learnt.append(compute_s is not None)
        inner(self, decision, plan, compute_s, read_s)

    monkeypatch.setattr(Controller, "learn", learn)
    with open_engine(tiny_model("llama"), store=MemoryStore(), cost_model=cost_model) as engine:
        for together in (1, 3):
            scheduler = Scheduler(engine.runtime, Limits(active=3, row_layers=50))
            done = [threading.Event() for _ in range(together)]
            with scheduler._lock:  # submit all before the first one starts
                for each in done:
                    scheduler.submit(Ask(RAG, FOUR), lambda e, each=each: isinstance(e, DoneEvent) and each.set())
            assert all(each.wait(60) for each in done)
            scheduler.close()
    assert learnt == [True, False, False, False]


def test_a_cost_model_of_another_setup_is_refused(cost_model: str, tmp_path: Path) -> None:
    for change, message in (
        ({"format": 2}, "no cost model of format 1"),
        ({"model": "x"}, "another model"),
        ({"codec": "int8"}, "codec int8, not raw"),
        ({"device": "cuda"}, "device cuda, not cpu"),
        (None, "cannot be read"),
    ):
        changed = "{" if change is None else json.dumps(json.loads(Path(cost_model).read_text()) | change)
        (tmp_path / "other.json").write_text(changed)
        with pytest.raises(InvalidInputError, match=message):
            open_engine(tiny_model("llama"), [], cost_model=str(tmp_path / "other.json"))


def test_calibrate_and_ask_on_the_command_line(run: Run, tmp_path: Path) -> None:
    store, out = f"file://{tmp_path}/store?ram_bytes=64MiB", tmp_path / "cost-model.json"
    done = run("calibrate", "-m", "nano", "-s", store, "-o", out, "-l", 128, "-l", 512, "--runs", 1)
    assert done.code == 0, done.err
    assert "read from memory" in done.out and "read from disk" in done.out
    data = json.loads(out.read_text())
    assert [tokens for tokens, _ in data["prefill_s"]] == [128, 512]
    with open_engine(tiny_model("llama"), []) as engine, pytest.raises(InvalidInputError, match="another model"):
        load_cost_model(out, model=engine.fingerprint, codec="raw", device="cpu")
    question = ("-p", "Anna has a red key.", "-q", "Who has a key?")
    answered = run("ask", "-m", "nano", "-s", store, "--cost-model", out, *question)
    assert answered.code == 0, answered.err
    assert "loading controller:" in answered.err


FAMILY = "qwen3_next"
LEADING = Prompt.of([A, QUESTION])
FRESH = Prompt.of([text(random_ids(30, 90)), B, QUESTION])


def snapshot_of(engine: BlendEngine, prompt: Prompt = LEADING) -> BlockName:
    """Name of the snapshot behind the prompt's exact prefix."""
    spans = [span for span in engine.runtime.planner.plan(prompt, engine.store).spans if span.source.value == "prefix"]
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
        kinds = engine.runtime.survey.kinds
        assert kinds.state_bytes / engine.runtime.survey.layout.block_bytes(1) > len(A)  # so there is one, at A's end
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
        second = engine.runtime.planner.plan(LEADING, store).spans[1].name
        [file] = [path for path in tmp_path.rglob("*") if path.is_file() and second.hex() in path.name]
        data = bytearray(file.read_bytes())
        header = header_of(decode_headers(bytes(data[: header_bytes(data, len(data))]), len(data)), second)
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
        name, own = snapshot_of(engine), SnapshotFormat(engine.runtime.survey.kinds.states)
        parent = engine.runtime.planner.plan(LEADING, engine.store).spans[2].name
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
            with engine.runtime.open_prefill(LEADING, tenant=tenant) as prefill:
                while not prefill.advance():
                    pass
                assert prefill.result().report.hit_tokens["prefix"] == prefix


def test_a_stores_bound_counts_snapshots_and_evicts_them_and_one_without_room_fails_no_request() -> None:
    model = tiny_model(FAMILY)
    with open_engine(model, [A]) as engine:
        with_one = engine.store.stats().bytes
        assert engine.store.delete(snapshot_of(engine))
        state_bytes = with_one - engine.store.stats().bytes
        assert engine.runtime.survey.kinds.state_bytes <= state_bytes <= engine.runtime.survey.kinds.state_bytes + 4096
    with MemoryStore(2 * with_one) as store, open_engine(model, [], store=store) as engine:
        for seed in range(20):
            engine.warm([chunk(random_ids(40, 200 + seed))])
            assert store.stats().bytes <= 2 * with_one
        assert store.stats().evictions > 0
        assert prefix_and_check(engine)[0] == 0
        engine.warm([A])
        assert prefix_and_check(engine)[0] == 40
    with MemoryStore(30_000) as store, open_engine(model, [], store=store, capture=True) as engine:
        assert engine.runtime.survey.kinds.state_bytes > 10_000
        for prompt in (LEADING, RAG, LEADING):
            assert engine.generate(prompt, PARAMS, ratio=1.0).token_ids == greedy(engine.model, prompt, 6)
            engine.flush(60)


@pytest.mark.parametrize("family", [FAMILY, "jamba", "falcon_h1", "lfm2-tail"])
def test_answers_together_are_those_alone(family: str) -> None:
    """Prompts share layers, answers decode side by side, and choices of one prompt each have a state of their own."""
    prompts = (LEADING, RAG, Prompt.of([SYSTEM, C, UNSEEN, A, QUESTION]), FRESH)
    with open_engine(tiny_model(family), capture=True) as engine:
        expected = [greedy(engine.model, prompt, 6) for prompt in prompts]
        scheduler = Scheduler(engine.runtime, Limits(active=6, row_layers=50))
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
