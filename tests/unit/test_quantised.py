"""Models that were quantised in place, whose weights are tensor subclasses: their fingerprint, and adapters beside."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.adapters import digest_of
from cacheblend.engines.fingerprint import fingerprint_model
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.adapter_watch import AdapterWatch
from fake_adapters import add_adapter, set_adapter
from families import tiny_model
from parity.scenes import RAG, A, B, C, open_engine


class Int8(torch.Tensor):
    """A weight in int8 with a scale for each row, as torchao's: it has no bytes of its own, only its parts have."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, settings: object = None) -> "Int8":
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, settings: object = None) -> None:
        self.data_, self.scale, self.settings = data, scale, settings

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, object]]:
        return ["data_", "scale"], {"settings": self.settings}

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].data_, args[0].scale, args[0].settings)
        if function is torch.ops.aten.t.default:
            return args[0].plain().t()
        if function is torch.ops.aten.linear.default:
            return nn.functional.linear(args[0], args[1].plain(), *args[2:])
        raise NotImplementedError(f"{cls.__name__}: {function}")

    def plain(self) -> torch.Tensor:
        return self.data_.to(self.scale.dtype) * self.scale


class Opaque(Int8):
    """One that does not say what it consists of."""

    __tensor_flatten__ = property()  # type: ignore[assignment]


class Settings:
    """An object whose text names the place where it lies."""


def quantised(family: str = "llama", kind: type[Int8] = Int8, settings: object = None, bits: float = 127.0) -> Any:
    model: Any = copy.deepcopy(tiny_model(family))
    for module in [each for each in model.modules() if isinstance(each, nn.Linear) and each is not model.lm_head]:
        weight = module.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / bits
        module.weight = nn.Parameter(
            kind((weight / scale).round().to(torch.int8), scale, settings), requires_grad=False
        )
    return model


def test_copies_agree_and_every_part_counts() -> None:
    """Not where an object lies: processes that quantise equally agree."""
    one = fingerprint_model(quantised())
    assert one == fingerprint_model(quantised()) != fingerprint_model(tiny_model("llama"))  # type: ignore[arg-type]
    others = [quantised(bits=100.0), quantised(settings="other"), quantised()]
    others[2].model.layers[3].self_attn.k_proj.weight.data_[0, 0] += 1
    assert len({one, *map(fingerprint_model, others)}) == 4
    assert fingerprint_model(quantised(settings=Settings())) == fingerprint_model(quantised(settings=Settings()))
    with pytest.raises(InvalidInputError, match=r"bytes of a Opaque cannot be read.*BlendEngine\(\.\.\., fingerprint="):
        fingerprint_model(quantised(kind=Opaque))
    assert BlendEngine(quantised(kind=Opaque), fingerprint="mine").fingerprint == "mine"


def blends(model: Any) -> None:
    with open_engine(model, [A, B, C], recompute_ratio=1.0) as engine:
        result = engine.prefill(RAG)
        assert sum(result.report.hit_tokens.values()) == len(A) + len(B) + len(C)
        torch.testing.assert_close(result.logits, engine.prefill(RAG, mode="full").logits, atol=1e-4, rtol=1e-4)


def test_a_quantised_model_is_blended_and_adapters_on_it_are_watched() -> None:
    """And scales: a merge into a quantised weight quantises it anew."""
    blends(quantised())
    model = quantised()
    add_adapter(model, "a", seed=1)
    add_adapter(model, "b", seed=2)
    watch = AdapterWatch(model)
    before = watch.digest
    assert not watch.look()
    set_adapter(model, "a")
    assert watch.look() and watch.digest != before
    assert fingerprint_model(model) == fingerprint_model(quantised())
    for layer in model.model.layers:
        layer.self_attn.k_proj.base_layer.weight.scale *= 1.5
    assert watch.look()


def test_torchao_in_place() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    models: list[Any] = [copy.deepcopy(tiny_model("llama")) for _ in range(2)]
    plain = fingerprint_model(models[0])
    for model in models:
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    one, other = models
    assert plain != fingerprint_model(one) == fingerprint_model(other)
    assert len({digest_of(each.model.layers[0].self_attn.q_proj.weight) for each in models}) == 1
    blends(one)
