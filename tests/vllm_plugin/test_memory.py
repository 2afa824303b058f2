"""What the plug-in's model takes of a GPU while vLLM loads and profiles; PyTorch's device `meta` stands in for it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.vllm.internals import decoder, weight_loader
from cacheblend.engines.vllm.workspace import ModelSizes, workspace_of

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
        use_mla=False,
    )
    return SimpleNamespace(
        kv_transfer_config=None if connector is None else SimpleNamespace(**connector),
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=128),
        speculative_config=None,
    )


def reserved(connector: dict[str, Any] | None, device: str = "meta") -> int:
    weight_loader.release_reserved()
    attention = nn.Linear(2, 2)
    weight_loader._reserve(attention, config_of(connector), torch.device(device))
    taken = weight_loader.release_reserved()
    assert weight_loader.release_reserved() == 0
    return taken


def test_all_that_blending_needs_is_taken_until_the_connector_starts() -> None:
    sizes = decoder.model_sizes(config_of(CONNECTOR), torch.device("meta"), {})
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


TIER = "cuda://?max_bytes=5MiB, file:///kv"


@pytest.mark.parametrize("workspace_bytes", [None, 0, 12345])
def test_records_that_the_device_keeps_are_taken_as_well(workspace_bytes: int | None) -> None:
    """Whatever is set for blending: they lie there all the time."""
    extra = {"workspace_bytes": workspace_bytes} if workspace_bytes is not None else {}
    with_tier, without = (
        reserved(CONNECTOR | {"kv_connector_extra_config": {"store": store, **extra}}) for store in (TIER, "/kv")
    )
    assert with_tier == without + (5 << 20)


def test_what_was_taken_for_records_goes_back_to_the_device_and_only_that(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(None))
    model = nn.Linear(2, 2).to_empty(device="meta")
    for to_device, times in ((False, 0), (True, 1)):
        weight_loader._reserve(model, config_of(CONNECTOR), torch.device("meta"))
        assert weight_loader.release_reserved(to_device=to_device) > 0 and len(emptied) == times
    assert weight_loader.release_reserved(to_device=True) == 0 and len(emptied) == 1  # on a CPU nothing was taken


@pytest.mark.parametrize(
    ("store", "device", "message"),
    [
        (TIER, "cpu", "on a CPU: leave cuda:// out"),
        ("cuda://1?max_bytes=5MiB, file:///kv", "meta", "names the GPU 1"),
        ("cuda://, file:///kv", "meta", "needs a bound"),
        ("cuda://?max_bytes=5MiB", "meta", "nothing behind"),
    ],
)
def test_a_tier_that_cannot_be_is_refused_while_the_model_is_loaded(store: str, device: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        reserved(CONNECTOR | {"kv_connector_extra_config": {"store": store}}, device)


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ("/kv", "set workspace_bytes, max_model_len or"),
        ("cuda://?max_bytes=500GiB, file:///kv", r"500.00 GiB of it for stored records.*max_bytes of cuda://"),
    ],
)
def test_a_gpu_without_that_much_is_refused_with_a_way_out(
    store: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    model = nn.Linear(2, 2).to_empty(device="meta")
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(InvalidInputError, match=message):
        connector = CONNECTOR | {"kv_connector_extra_config": {"store": store}}
        weight_loader._reserve(model, config_of(connector), torch.device("meta"))
