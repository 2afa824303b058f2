"""What ends the start with one line, or, with `on_unblendable: plain`, leaves all prompts to vLLM: found in the worker.

Situations: a cache that blending cannot read, found when prefills are prepared; a scheduler's side that is not told of
it; a model whose code raises something of its own when its layers are called one by one; an encoder, which has no group
of KV cache; a group that has a drafter's layers only; layers whose `forward` vLLM has replaced (weights kept on the
host).
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cacheblend.core.errors import ModelNotBlendableError
from vllm_running import needs_vllm

pytestmark = needs_vllm


def connector_of(on_unblendable: str) -> Any:
    from cacheblend.engines.vllm.connector import CacheBlendConnector

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
    from cacheblend.engines.vllm.jobs import StepJobs, Unblendable

    def refuse(*args: Any, **options: Any) -> None:
        raise ModelNotBlendableError("keeps eight bits of no known type")

    shape = SimpleNamespace(is_latent=True)
    model = SimpleNamespace(layers=[0, 1], attention=[], head_shapes=[shape], device=torch.device("cpu"))
    monkeypatch.setattr(module, "BlendModel", lambda config: model)
    monkeypatch.setattr(module, "Worker", refuse)
    monkeypatch.setattr(module, "workspace_of", lambda sizes: "nothing")
    monkeypatch.setattr(module.compat_model, "model_sizes", lambda *args: None)
    monkeypatch.setattr(module.compat_prefix, "groups_of", lambda *args: [])
    monkeypatch.setattr(module.compat_prefix, "windows_of", lambda *args: [None])
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
    assert {name: each.failure for name, each in report.outcomes.items()} == dict.fromkeys(
        "ab", "ModelNotBlendableError"
    )
    assert report.captured == 1
    connector.shutdown()


def test_a_request_of_a_model_without_groups_ends() -> None:
    assert connector_of("plain").request_finished_all_groups(SimpleNamespace(request_id="a"), ()) == (False, None)


@pytest.mark.parametrize("error", [KeyError("lengths"), RuntimeError("a\nb"), AssertionError(), TypeError("forward()")])
def test_whatever_a_models_own_code_raises_is_named_in_one_line(error: Exception) -> None:
    from cacheblend.engines.vllm.worker.model import BlendModel

    def raises() -> None:
        raise error

    model: Any = object.__new__(BlendModel)
    model._model, model._learn_layers = nn.Linear(1, 1), raises
    with pytest.raises(ModelNotBlendableError, match=f"layers of Linear .* {type(error).__name__}: ") as told:
        model._learn()
    assert "\n" not in str(told.value)


def test_memory_that_ran_out_says_nothing_of_the_model() -> None:
    from cacheblend.engines.vllm.worker.model import BlendModel

    def raises() -> None:
        raise torch.OutOfMemoryError

    model: Any = object.__new__(BlendModel)
    model._learn_layers = raises
    with pytest.raises(torch.OutOfMemoryError):
        model._learn()


def test_a_group_of_a_drafters_layers_alone_has_no_builder() -> None:
    from cacheblend.engines.vllm.compat import metadata_builders

    backend = SimpleNamespace(get_builder_cls=lambda: lambda spec, names, config, device: names)
    cache = torch.zeros(1)
    layers = [SimpleNamespace(layer_name=f"l{n}", get_attn_backend=lambda: backend, kv_cache=cache) for n in range(2)]
    names = [["draft.0"], ["l0", "draft.1"], ["draft.2", "l1"]]
    groups = [SimpleNamespace(layer_names=each, kv_cache_spec=SimpleNamespace()) for each in names]
    config: Any = SimpleNamespace()
    assert metadata_builders(config, layers, SimpleNamespace(kv_cache_groups=groups)) == [None, *names[1:]]


def test_a_forward_that_vllm_has_set_is_put_back() -> None:
    from cacheblend.engines.vllm.compat_model import computed_by

    own, replaced = nn.Linear(1, 1), nn.Linear(1, 1)

    def bringing(rows: torch.Tensor) -> torch.Tensor:
        return rows

    replaced.__dict__["forward"] = bringing
    with computed_by([own, replaced], [lambda rows: rows + 1] * 2):
        assert float(own(torch.zeros(1))) == float(replaced(torch.zeros(1))) == 1
    assert replaced.__dict__["forward"] is bringing
    assert "forward" not in own.__dict__
