"""The loading controller in an engine: blocks that it does not load are computed, and it learns from measured times."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cacheblend.core.cost.controller import Controller
from cacheblend.core.cost.cost_model import CostModel, TierSpeed
from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.cost_model import controller_of, read_cost_model, write_cost_model
from cacheblend.engines.hf import BlendEngine, SamplingParams
from cacheblend.engines.hf.scheduler import Ask, DoneEvent, Limits, Scheduler
from cacheblend.store import MemoryStore, TieredStore
from cacheblend.store.combined import CascadeStore
from command_line import runner
from families import tiny_model
from lab.speed.throttle import ThrottledStore
from parity.scenes import RAG, A, B, C, assert_same, greedy, open_engine
from reference import plain_kv

FOUR = SamplingParams(max_new_tokens=4, ignore_eos=True)
PREFILL = ((32, 0.02), (128, 0.1))


def cost_model_file(path: Path, engine: BlendEngine, **tiers: float) -> str:
    cost_model = CostModel(PREFILL, {name: TierSpeed(speed) for name, speed in tiers.items()})
    write_cost_model(path, cost_model, engine.fingerprint, "cpu", engine.stored_layout)
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
        known = read_cost_model(cost_model, engine.fingerprint, engine.stored_layout, "cpu")
        learnt: list[Any] = []
        monkeypatch.setattr(engine.prefiller.controller, "learn", lambda *given: learnt.append(given))
        for raised_by in (1.0, 1.5, 3.0):
            engine.settings = replace(engine.settings, raised_by=raised_by)
            ratio = engine.prefill(RAG).report.recompute_ratio
            decision, plan, *_ = learnt.pop()
            assert ratio == pytest.approx(0.2 * raised_by) and decision.ratio == ratio
            higher = replace(engine.config, recompute_ratio=ratio)
            assert decision == controller_of(known, higher, engine.stored_layout).decide(plan)


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


def test_the_controller_learns_that_a_tier_is_slower_than_measured(tmp_path: Path) -> None:
    model = tiny_model("llama")
    with open_engine(model, []) as engine:
        file = cost_model_file(tmp_path / "cost-model.json", engine, slow=1e7)
    store = ThrottledStore(5e5, tier="slow")
    with open_engine(model, store=store, cost_model=file) as engine:
        assert engine.prefill(RAG).report.left_out_tokens == 0
        reports = [engine.prefill(RAG).report for _ in range(20)]
        assert engine.prefiller.controller is not None
        assert engine.prefiller.controller.cost_model.tiers["slow"].bytes_per_s < 5e6
        assert any(report.left_out_tokens for report in reports)


def test_the_speeds_of_two_tiers_are_learnt_separately(tmp_path: Path) -> None:
    """A device a thousand times slower than measured does not change the learnt speed of memory."""
    model, near, far = tiny_model("llama"), MemoryStore(), ThrottledStore(1e5, tier="slow")
    open_engine(model, [A], store=near).close()
    with open_engine(model, [B, C], store=far) as engine:
        file = cost_model_file(tmp_path / "cost-model.json", engine, slow=1e9, memory=1e6)
    with open_engine(model, [], store=CascadeStore([near, far]), cost_model=file) as engine:
        hits = engine.prefill(RAG).report.hit_tokens
        assert (hits["memory"], hits["slow"]) == (len(A), len(B) + len(C))
        assert engine.prefiller.controller is not None
        tiers = engine.prefiller.controller.cost_model.tiers
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
            scheduler = Scheduler(engine, Limits(active=3, row_layers=50))
            done = [threading.Event() for _ in range(together)]
            with scheduler._changed:  # submit all before the first one starts
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


def test_calibrate_and_ask_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runner(capsys)
    store, out = f"file://{tmp_path}/store?ram_bytes=64MiB", tmp_path / "cost-model.json"
    done = run("calibrate", "-m", "nano", "-s", store, "-o", out, "-l", 128, "-l", 512, "--runs", 1)
    assert done.code == 0, done.err
    assert "read from memory" in done.out and "read from disk" in done.out
    data = json.loads(out.read_text())
    assert [tokens for tokens, _ in data["prefill_s"]] == [128, 512]
    with open_engine(tiny_model("llama"), []) as engine, pytest.raises(InvalidInputError, match="another model"):
        read_cost_model(out, engine.fingerprint, engine.stored_layout, "cpu")
    question = ("-p", "Anna has a red key.", "-q", "Who has a key?")
    answered = run("ask", "-m", "nano", "-s", store, "--cost-model", out, *question)
    assert answered.code == 0, answered.err
    assert "loading controller:" in answered.err
