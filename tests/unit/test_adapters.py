"""Which adapters are in effect, and whether that has changed: over a fake of PEFT's layers, and beside weights that
were quantised in place, which are tensor subclasses."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.adapters import adapted_layers, digest_of
from cacheblend.engines.fingerprint import ModelIdentity, fingerprint_model, with_adapters
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.adapter_watch import AdapterWatch
from fake_adapters import add_adapter, disable, layers, merge, set_adapter, unload, unmerge
from families import tiny_model
from parity.scenes import RAG, A, B, C, open_engine


def model_with(*adapters: str) -> Any:
    """A model with adapters a (seed 1), b (2) and so on; the first one is active."""
    model = copy.deepcopy(tiny_model("llama"))
    for name in adapters:
        add_adapter(model, name, seed=ord(name) - ord("a") + 1)
    if adapters:
        set_adapter(model, adapters[0])
    return model


def test_a_digest_tells_which_adapters_are_active() -> None:
    watch = AdapterWatch(model_with())
    assert watch.digest == "" and not watch.look() and watch.version == 0
    assert with_adapters("weights", "") == "weights"
    model = model_with("a", "b")
    alone, watch = AdapterWatch(model_with("a")), AdapterWatch(model)
    assert alone.digest == watch.digest != "", "whatever else is loaded"
    found = {"", alone.digest}
    for names in (("a", "b"), ("b",)):
        set_adapter(model, *names)
        watch.look()
        found.add(watch.digest)
    assert len(found) == 4 and AdapterWatch(model).digest == watch.digest
    one, two = model_with(), model_with()
    add_adapter(one, "x", seed=1)
    add_adapter(two, "y", seed=1)
    assert AdapterWatch(one).digest != AdapterWatch(two).digest, "a name is part of it"


def replace_weight(model: Any) -> None:
    layers(model)[3].lora_B["a"].weight.data = layers(model)[3].lora_B["a"].weight.data + 1


def write_weight(model: Any) -> None:
    with torch.no_grad():
        layers(model)[3].lora_A["a"].weight[0, 0] += 1


def hot_swap(model: Any) -> None:
    """As PEFT's, behind PyTorch's counter of versions."""
    for lora in layers(model):
        lora.lora_A["a"].weight.data.copy_(torch.randn_like(lora.lora_A["a"].weight))


CHANGES: list[Callable[[Any], None]] = [
    lambda model: set_adapter(model, "b"),
    lambda model: set_adapter(model, "a", "b"),
    lambda model: layers(model)[2].active_adapters.append("b"),
    lambda model: add_adapter(model, "c", seed=3),
    replace_weight,
    write_weight,
    hot_swap,
    lambda model: layers(model)[5].scaling.update(a=3.0),
    lambda model: add_adapter(model, "a", seed=9),
    merge,
]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen_once(change: Callable[[Any], None]) -> None:
    model = model_with("a", "b")
    watch = AdapterWatch(model)
    before = watch.digest
    assert not watch.look()
    change(model)
    assert watch.look() and watch.digest != before and watch.version == 1
    assert not watch.look() and watch.version == 1


def test_switching_back_gives_the_digest_back_and_a_merge_leaves_its_rounding() -> None:
    model = model_with("a", "b")
    watch = AdapterWatch(model)
    separate = watch.digest
    set_adapter(model, "b")
    assert watch.look()
    set_adapter(model, "a")
    assert watch.look() and watch.digest == separate
    disable(model)
    assert watch.look() and watch.digest == ""
    disable(model, False)
    assert watch.look() and watch.digest == separate
    merge(model)
    watch.look()
    merged = watch.digest
    unmerge(model)
    assert watch.look() and watch.digest not in ("", separate, merged)
    merge(model)
    unload(model)  # for good: the weights are not the model's any more
    assert watch.look() and watch.digest != ""
    assert not list(adapted_layers(model)) and not watch.look()


@pytest.mark.parametrize("is_opened_merged", [True, False])
def test_weights_that_are_written_under_a_merged_adapter_are_others(is_opened_merged: bool) -> None:
    """Training goes on with the adapter in the weights: one number of an adapted layer, which no sample shows."""
    model = model_with("a")
    if is_opened_merged:
        merge(model)
    watch = AdapterWatch(model)
    if not is_opened_merged:
        merge(model)
        watch.look()
    before = watch.digest
    with torch.no_grad():
        layers(model)[1].base_layer.weight[3, 5] += 1.0
    assert watch.look() and watch.digest != before != ""
    assert not watch.look()


def test_the_fingerprint_of_weights_is_that_of_the_model_without_adapters() -> None:
    plain = fingerprint_model(model_with())
    assert fingerprint_model(model_with("a")) == plain == fingerprint_model(model_with("a", "b"))
    merged = model_with("a")
    merge(merged)
    assert fingerprint_model(merged) != plain
    roots = {  # blocks are named by the adapters, too
        ModelIdentity(None, "weights", "float32", None, "m", adapters).planner(BlendConfig()).root
        for adapters in ("", "one", "two")
    }
    assert len(roots) == 3
    assert ModelIdentity(None, "weights", "float32", None, "m").planner(BlendConfig()).root in roots


# ---- the weights themselves -------------------------------------------------------------------------------


def in_data(model: Any) -> None:
    """All weights, behind PyTorch's counter of versions."""
    for weight in model.parameters():
        weight.data.mul_(1.5)


def trained(model: Any) -> None:
    """A step of training, as an optimiser writes it."""
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(1.01)


def replaced(model: Any) -> None:
    layer = model.model.layers[1].self_attn
    layer.k_proj.weight = torch.nn.Parameter(layer.k_proj.weight.detach() * 2)


WRITES: list[Callable[[Any], None]] = [
    trained,
    in_data,
    replaced,
    lambda model: model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()}),
    lambda model: model.half(),
]


@pytest.mark.parametrize("change", WRITES, ids=["trained", "in data", "replaced", "loaded", "halved"])
@pytest.mark.parametrize("adapters", [(), ("a",)], ids=["plain", "adapted"])
def test_weights_that_are_written_to_are_part_of_the_digest(
    adapters: tuple[str, ...], change: Callable[[Any], None]
) -> None:
    model = model_with(*adapters)
    if adapters and change is replaced:
        pytest.skip("the adapted layer holds it elsewhere")
    watch = AdapterWatch(model)
    before = watch.digest
    assert not watch.look()
    change(model)
    assert watch.look() and not watch.look()
    assert watch.digest != before
    other = model_with(*adapters)
    same = AdapterWatch(other)
    change(other)
    assert same.look() and same.digest == watch.digest  # by what they hold
    trained(model)
    assert watch.look() and watch.digest != same.digest


def test_a_lower_precision_of_float32_multiplications_is_part_of_the_digest() -> None:
    model, half = model_with(), model_with().to(torch.bfloat16)
    watch, other = AdapterWatch(model), AdapterWatch(half)
    try:
        torch.set_float32_matmul_precision("high")
        assert watch.look() and watch.digest != "" == other.digest and not other.look()
        assert AdapterWatch(model).digest == watch.digest
        found = {watch.digest}
        torch.set_float32_matmul_precision("medium")
        assert watch.look()
        found |= {watch.digest}
        assert len(found) == 2
    finally:
        torch.set_float32_matmul_precision("highest")
    assert watch.look() and watch.digest == ""


def test_weights_without_versions_are_watched_by_their_values_and_those_that_are_no_numbers_do_not_change() -> None:
    with torch.inference_mode():
        model = model_with()
        for weight in model.parameters():
            weight.data = weight.data.clone()
    watch = AdapterWatch(model)
    assert not watch.look()
    with torch.inference_mode():
        in_data(model)
    assert watch.look() and watch.digest != ""
    model = model_with()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
        model.lm_head.weight.fill_(float("nan"))
    watch = AdapterWatch(model)
    assert not watch.look() and watch.digest == ""


# ---- quantised in place ----------------------------------------------------------------------------------


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
