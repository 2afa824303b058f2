"""What the plug-in's model takes of a GPU while vLLM loads and profiles; PyTorch's device `meta` stands in for it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from vllm_running import needs_vllm

pytestmark = needs_vllm

CONNECTOR = {"kv_connector": "CacheBlendConnector", "kv_connector_extra_config": {"store": "/kv"}}
OTHER = {"kv_connector": "OtherConnector", "kv_connector_extra_config": {"a": 1}}


def config_of(connector: dict[str, Any] | None) -> Any:
    text = SimpleNamespace(intermediate_size=512)
    model = SimpleNamespace(
        hf_text_config=text,
        hf_config=text,
        dtype=torch.bfloat16,
        max_model_len=1000,
        get_num_layers=lambda parallel: 6,
        get_hidden_size=lambda: 256,
        get_num_kv_heads=lambda parallel: 4,
        get_num_attention_heads=lambda parallel: 8,
        get_head_size=lambda: 32,
        get_vocab_size=lambda: 2048,
    )
    return SimpleNamespace(
        kv_transfer_config=None if connector is None else SimpleNamespace(**connector),
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=128),
    )


def reserved(connector: dict[str, Any] | None, device: str = "meta") -> int:
    from cacheblend.engines.vllm import compat_model

    compat_model.release_reserved()
    model = nn.Linear(2, 2)
    if device != "cpu":
        model.to_empty(device=device)
    compat_model._reserve(model, config_of(connector))
    taken = compat_model.release_reserved()
    assert compat_model.release_reserved() == 0
    return taken


def test_all_that_blending_needs_is_taken_until_the_connector_starts() -> None:
    from cacheblend.engines.vllm import compat_model
    from cacheblend.engines.vllm.workspace import ModelSizes, workspace_of

    sizes = compat_model.model_sizes(config_of(CONNECTOR), torch.device("meta"), {})
    assert sizes == ModelSizes(6, 256, 256, 256, 128, 32, 2, 1000, 128)
    assert reserved(CONNECTOR) == workspace_of(sizes).total
    checked = {"kv_connector": "CacheBlendConnector", "kv_connector_extra_config": {"store": "/kv", "shadow": 0.1}}
    assert reserved(checked) == workspace_of(replace(sizes, checked_vocab=2048)).total > reserved(CONNECTOR)


@pytest.mark.parametrize("nbytes", [0, 12345])
def test_the_setting_decides(nbytes: int) -> None:
    extra = CONNECTOR["kv_connector_extra_config"] | {"workspace_bytes": nbytes}  # type: ignore[operator]
    assert reserved(CONNECTOR | {"kv_connector_extra_config": extra}) == nbytes


def test_nothing_is_taken_on_a_cpu_or_for_other_connectors() -> None:
    assert reserved(CONNECTOR, device="cpu") == 0
    assert reserved(OTHER) == reserved(None) == 0


def test_the_connector_is_found_among_several() -> None:
    several = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [OTHER, CONNECTOR]}}
    assert reserved(several) == reserved(CONNECTOR) > 0
    several["kv_connector_extra_config"] = {"connectors": [OTHER]}
    assert reserved(several) == 0


def test_a_gpu_without_that_much_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from cacheblend.core.errors import InvalidInputError
    from cacheblend.engines.vllm import compat_model

    model = nn.Linear(2, 2).to_empty(device="meta")

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(InvalidInputError, match="set workspace_bytes, max_model_len or"):
        compat_model._reserve(model, config_of(CONNECTOR))
