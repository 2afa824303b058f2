"""What ends the start with one line, or, with `on_unblendable: plain`, leaves all prompts to vLLM: found in the worker.

Situations: a cache that blending cannot read, found when prefills are prepared; a scheduler's side that is not told of
it; a model whose code raises something of its own when its layers are called one by one; an encoder, which has no group
of KV cache; a group that has a drafter's layers only; layers whose `forward` vLLM has replaced (weights kept on the
host); another connector in front or behind, which goes on saving and loading while all prompts are left to vLLM.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.engines.vllm.connector import CacheBlendConnector
from cacheblend.engines.vllm.internals.decoder import computed_by
from cacheblend.engines.vllm.internals.interface import metadata_builders
from cacheblend.engines.vllm.jobs import StepJobs, Unblendable
from cacheblend.engines.vllm.worker.model import BlendModel
from vllm_running import FORGET, Texts, Vllm, ask, make_opt, tokens


def connector_of(on_unblendable: str) -> Any:
    made: Any = object.__new__(CacheBlendConnector)
    made._config = SimpleNamespace(
        store="memory", on_unblendable=on_unblendable, budget_row_layers=1, in_pages=None, read_timeout_s=1.0
    )
    made._vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_batched_tokens=64))
    made._kv_transfer_config = SimpleNamespace(kv_connector_extra_config={})
    made._unblendable, made._worker, made._scheduling, made._block_size = "", None, None, 16
    made._store = made._planner = made._kv_caches = None
    made._selector, made.identity = SimpleNamespace(of_model=lambda layers: None), SimpleNamespace(name="m")
    return made


@pytest.mark.parametrize("on_unblendable", ["error", "plain"])
def test_a_cache_that_cannot_be_read_is_named_or_left_to_vllm(
    monkeypatch: pytest.MonkeyPatch, on_unblendable: str
) -> None:
    from cacheblend.engines.vllm import connector as module

    def refuse(*args: Any, **options: Any) -> None:
        raise ModelNotBlendableError("keeps eight bits of no known type")

    shape = SimpleNamespace(is_latent=True)
    model = SimpleNamespace(layers=[0, 1], attention=[], head_shapes=[shape], device=torch.device("cpu"))
    monkeypatch.setattr(module, "BlendModel", lambda config: model)
    monkeypatch.setattr(module, "Worker", refuse)
    monkeypatch.setattr(module, "workspace_of", lambda sizes: "nothing")
    monkeypatch.setattr(module.decoder, "model_sizes", lambda *args: None)
    monkeypatch.setattr(module.prefix_cache, "groups_of", lambda *args: [])
    monkeypatch.setattr(module.prefix_cache, "windows_of", lambda *args: [None])
    connector = connector_of(on_unblendable)
    if on_unblendable == "error":
        with pytest.raises(ModelNotBlendableError, match="no known type"):
            connector.register_kv_caches({})
        return
    connector.register_kv_caches({})
    assert connector.get_handshake_metadata() == Unblendable("keeps eight bits of no known type")
    # Beside another connector the scheduler's side may not be told: what it sends comes back at once.
    prompts: Any = [
        SimpleNamespace(request_id="a", block_ids=[[3, 4, 5]], local_tokens=16),
        SimpleNamespace(request_id="b", block_ids=[[6, 7], [0, 8]], local_tokens=0),
    ]
    connector._connector_metadata = StepJobs(blend=prompts, capture=[SimpleNamespace()])
    connector.start_load_kv(None)
    assert connector.get_finished(set()) == (None, {"a", "b"})
    assert connector.get_block_ids_with_load_errors() == {4, 5}
    assert connector._worker.take_failed_requests() == {"b"}
    report = connector.build_connector_worker_meta()
    assert [report.outcomes[name].failure for name in "ab"] == ["ModelNotBlendableError"] * 2
    assert report.captured == 1
    connector.shutdown()


def test_a_request_of_a_model_without_groups_ends() -> None:
    assert connector_of("plain").request_finished_all_groups(SimpleNamespace(request_id="a"), ()) == (False, None)


@pytest.mark.parametrize("error", [KeyError("lengths"), RuntimeError("a\nb"), AssertionError(), TypeError("forward()")])
def test_whatever_a_models_own_code_raises_is_named_in_one_line(error: Exception) -> None:
    def raises() -> None:
        raise error

    model: Any = object.__new__(BlendModel)
    model._model, model._learn_layers = nn.Linear(1, 1), raises
    with pytest.raises(ModelNotBlendableError, match=f"layers of Linear .* {type(error).__name__}: ") as told:
        model._learn()
    assert "\n" not in str(told.value)


def test_memory_that_ran_out_says_nothing_of_the_model() -> None:
    def raises() -> None:
        raise torch.OutOfMemoryError

    model: Any = object.__new__(BlendModel)
    model._learn_layers = raises
    with pytest.raises(torch.OutOfMemoryError):
        model._learn()


def test_a_group_of_a_drafters_layers_alone_has_no_builder() -> None:
    backend = SimpleNamespace(get_builder_cls=lambda: lambda spec, names, config, device: names)
    cache = torch.zeros(1)
    layers = [SimpleNamespace(layer_name=f"l{n}", get_attn_backend=lambda: backend, kv_cache=cache) for n in range(2)]
    names = [["draft.0"], ["l0", "draft.1"], ["draft.2", "l1"]]
    groups = [SimpleNamespace(layer_names=each, kv_cache_spec=SimpleNamespace()) for each in names]
    config: Any = SimpleNamespace()
    assert metadata_builders(config, layers, SimpleNamespace(kv_cache_groups=groups)) == [None, *names[1:]]


def test_a_forward_that_vllm_has_set_is_put_back() -> None:
    own, replaced = nn.Linear(1, 1), nn.Linear(1, 1)

    def bringing(rows: torch.Tensor) -> torch.Tensor:
        return rows

    replaced.__dict__["forward"] = bringing
    with computed_by([own, replaced], [lambda rows: rows + 1] * 2):
        assert float(own(torch.zeros(1))) == float(replaced(torch.zeros(1))) == 1
    assert replaced.__dict__["forward"] is bringing
    assert "forward" not in own.__dict__


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("in_front", [True, False], ids=["the other in front", "ours in front"])
def test_another_connector_goes_on_beside_a_model_that_is_left_to_vllm(
    vllm: Vllm, tmp_path: Path, in_front: bool
) -> None:
    opt = make_opt(tmp_path / "opt")
    texts = Texts(16)
    asked = [texts.prompt(texts.passages(3)) for _ in range(6)]
    naming = [one.spans if number % 2 else [] for number, one in enumerate(asked)]
    steps = [ask(asked, chunks=naming, alone=True), *[FORGET, ask(asked, chunks=naming)] * 2]
    other = {
        "kv_connector": "Holding",
        "kv_connector_module_path": "holding",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "other")},
    }
    beside = [other, None] if in_front else [None, other]
    extra = {"store": f"file://{tmp_path}/store", "on_unblendable": "plain", "shadow": 1.0}
    engine = {"block_size": 32, "num_gpu_blocks_override": 47, "max_model_len": 1472}  # some of the requests wait
    given = vllm.run(opt, steps, extra, beside=beside, **engine)["answers"]
    right = vllm.run(opt, steps, None, **engine)["answers"]
    for number in (0, 2, 4):
        assert tokens(given[number]) == tokens(right[number])
    for number in (2, 4):
        cached = [one["cached"] for one in given[number]]
        assert all(cached[::2]) and not any(cached[1::2])  # the other loads what it has saved: prompts without chunks
