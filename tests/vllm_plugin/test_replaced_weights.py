"""Weights that are replaced while vLLM starts: after workers have loaded them, before the scheduler's side reads them.

Path, size and time of writing stay. Nothing computed with the old weights is stored under the names of the new ones,
nor anything of the new ones loaded beside the old ones; also where one rank differs, and inside a `MultiConnector`.
"""

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from cacheblend.engines.vllm.connector import CacheBlendConnector
from cacheblend.engines.vllm.jobs import BlendOutcome, StepJobs, StepReport
from cacheblend.engines.vllm.worker.worker import Worker
from vllm_requests import CHUNK, OTHER, PROMPT, Request, SlowStore, claim, give, reported, scheduling, start, why
from vllm_running import COUNT, TWO_RANKS, Texts, Vllm, ask, tokens


@pytest.fixture
def replaced(models: dict[str, Path], tmp_path: Path) -> tuple[Path, Path]:
    """A model, and other weights of equal sizes."""
    made = [tmp_path / name for name in ("model", "others")]
    for folder in made:
        shutil.copytree(models["llama"], folder)
    file = made[1] / "model.safetensors"
    weights = {name: tensor.flip(0).contiguous() for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    return made[0], made[1]


class Started:
    """A start in which a model's files were replaced: answers are those of what was loaded; and its counts."""

    def __init__(
        self, vllm: Vllm, loaded: Path, model: Path, by: Path, store: Path, beside: Any, **engine: Any
    ) -> None:
        texts = Texts(33)
        passages = texts.passages(3)
        one, two = texts.prompt(passages), texts.prompt(passages[::-1])
        both = ask([one, two], alone=True)
        extra = {"store": f"file://{store}", "recompute_ratio": 1.0, "min_reused_share": 0.0}
        steps = [{"replace": [str(model), str(by)]}, both, both, COUNT]
        right = vllm.run(loaded, [both], None)["answers"][0]
        _, *found, self.counts = vllm.run(model, steps, extra, beside=beside, **engine)["answers"]
        for step in found:
            assert tokens(step) == tokens(right)


def kept_in(store: Path) -> list[Path]:
    """Files of blocks and chunks."""
    return [file for part in ("blocks", "manifests") for file in (store / part).rglob("*") if file.is_file()]


@pytest.mark.may_fail("other weights")
@pytest.mark.parametrize(
    ("engine", "beside"), [({}, None), (TWO_RANKS, None), ({}, [None])], ids=["one rank", "two ranks", "MultiConnector"]
)
def test_weights_that_are_replaced_before_the_scheduler_reads_them_name_nothing(
    vllm: Vllm,
    models: dict[str, Path],
    replaced: tuple[Path, Path],
    tmp_path: Path,
    engine: dict[str, Any],
    beside: Any,
) -> None:
    store = tmp_path / "store"
    counts = Started(vllm, models["llama"], *replaced, store, beside, **engine).counts
    assert not kept_in(store)
    assert counts["vllm:cacheblend_fallbacks other weights"] >= 3
    assert not counts.get("vllm:cacheblend_captured_tokens") and not counts.get("vllm:cacheblend_requests")


def test_files_that_were_copied_over_themselves_are_the_same_weights(
    vllm: Vllm, models: dict[str, Path], replaced: tuple[Path, Path], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    counts = Started(vllm, models["llama"], replaced[0], models["llama"], store, None).counts
    assert kept_in(store) and counts["vllm:cacheblend_captured_tokens"] and counts["vllm:cacheblend_requests"]


class Ranks:
    """What a worker's ranks say, one of them being others' than its own."""

    def __init__(self, elsewhere: int) -> None:
        self.elsewhere = elsewhere

    def agree_each(self, states: list[int]) -> list[int]:
        return [max(each, self.elsewhere) for each in states]


@pytest.mark.parametrize(("named", "elsewhere"), [("a", 0), ("b", 0), ("a", 1), ("", 0)])
def test_every_rank_refuses_where_one_does(named: str, elsewhere: int, caplog: pytest.LogCaptureFixture) -> None:
    worker: Any = object.__new__(Worker)
    taken: list[Any] = []
    worker._ranks, worker.step, worker.close = Ranks(elsewhere), taken.append, lambda: None
    connector: Any = object.__new__(CacheBlendConnector)
    connector.identity, connector._block_size = SimpleNamespace(weights="a", folder=Path("/m")), 16
    connector._worker, connector._is_compared = worker, False
    prompt = SimpleNamespace(request_id="a", block_ids=[[3, 4]], local_tokens=0)
    jobs: Any = StepJobs(blend=[prompt], capture=[SimpleNamespace()], weights=named)  # type: ignore[list-item]
    connector._connector_metadata = jobs
    with caplog.at_level(logging.ERROR):
        connector.start_load_kv(None)
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    if named in ("a", "") and not elsewhere:
        assert taken == [jobs] and connector._worker is worker and not errors
        return
    report = connector.build_connector_worker_meta()
    assert not taken and report.has_other_weights and report.captured == 1
    assert report.outcomes["a"].failure == "other weights"
    assert connector.get_finished(set()) == (None, {"a"}) and connector.get_block_ids_with_load_errors() == {3, 4}
    (record,) = errors
    assert "files in /m were changed" in record.getMessage() and "restart vLLM" in record.getMessage()
    fine = StepReport(3)
    assert fine.aggregate(report).has_other_weights and report.aggregate(fine).has_other_weights  # type: ignore[attr-defined]
    assert not fine.aggregate(fine).has_other_weights  # type: ignore[attr-defined]


@pytest.mark.may_fail("other weights")
def test_the_scheduler_side_leaves_everything_to_vllm_once_it_is_told() -> None:
    store = SlowStore()
    side = scheduling([CHUNK], store, keeps_events=True)
    first = give(side, Request(PROMPT, name="first"))
    assert len(side.take_jobs().blend) == 1
    looked_up = Request([3, *PROMPT], name="looked up")
    side.on_new(looked_up)
    side.take_events()
    told = StepReport(0, {"first": BlendOutcome("other weights")}, has_other_weights=True)
    side.provided(["first"])
    side.reported(told)
    side.reported(told)
    assert [event.__class__.__name__ for event in side.take_events()] == ["BlockRemoved"]
    assert claim(side, looked_up, 0) == 0
    store.asked.clear()
    missing = Request([4, *OTHER, 7, 8], [[1, 101]], name="missing")
    for request in (Request([5, *PROMPT], name="late"), missing):
        assert start(side, request) == 0
        side.allocated(request, [[1] * 9], 0)
        request.num_output_tokens = 1
        assert why(side, request) == "other weights"
    assert why(side, first) == "other weights"
    assert not side.take_jobs().capture and not store.asked and not side.is_busy
    assert side.counts.take().data["fallbacks"] == {"other weights": 3}
    side.reported(reported("first", "slow store"))
    assert side._why_paused == "other weights"  # for ever
