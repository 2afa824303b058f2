"""What blocks are named by: fingerprints of model folders and of models in memory, their identity (anchor, tenants,
load options), the adapters in effect, and weights that are written to or quantised in place.
"""

import copy
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from cacheblend.core.config import ANCHOR_TEXT, BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import root_name
from cacheblend.core.plan.planner import Anchor
from cacheblend.core.select.selection import Selection, SelectorChoice
from cacheblend.core.select.selectors import Corrected, Gradual, Head, Hkvd
from cacheblend.engines import fingerprint
from cacheblend.engines.adapters import adapted_layers, digest_of
from cacheblend.engines.fingerprint import (
    ModelIdentity,
    fingerprint_folder,
    fingerprint_model,
    room_of,
    with_adapters,
)
from cacheblend.engines.hf import BlendEngine
from cacheblend.engines.hf.adapter_watch import AdapterWatch
from fake_adapters import add_adapter, disable, layers, merge, set_adapter, unload, unmerge
from families import tiny_model
from parity.scenes import RAG, A, B, C, open_engine

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "torch_dtype": "float32",
    "transformers_version": "5.0.0",
    "rms_norm_eps": 1e-6,
}


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    for i in range(2):
        save_file({"w": torch.arange(50) + i}, made / f"model-{i}.safetensors")
    return made


def swap_shards(folder: Path) -> None:
    one, other = folder / "model-0.safetensors", folder / "model-1.safetensors"
    first = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(first)


def with_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


SEEN: list[Callable[[Path], object]] = [
    lambda folder: flip_byte(folder / "model-1.safetensors"),
    swap_shards,
    lambda folder: (folder / "model-1.safetensors").unlink(),
    lambda folder: with_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 10001.0}),
    lambda folder: with_config(folder, rms_norm_eps=1e-5),
    lambda folder: with_config(folder, sliding_window=128),
    lambda folder: with_config(folder, num_hidden_layers=1),
]


@pytest.mark.parametrize("change", SEEN)
def test_changes_of_weights_and_fields_that_shape_kv_are_seen(folder: Path, change: Callable[[Path], object]) -> None:
    before = fingerprint_folder(folder)
    for other in (
        {"torch_dtype": "bfloat16"},
        {"transformers_version": "4"},
        {"use_cache": False},
        {"eos_token_id": 7},
    ):
        with_config(folder, **other)
        assert fingerprint_folder(folder) == before
    with_config(folder)
    change(folder)
    assert fingerprint_folder(folder) != before


def flip_byte(file: Path, at: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_copies_agree_and_load_options_count(folder: Path, tmp_path: Path, cache_home: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "elsewhere" / "under another name")
    (copy / "README.md").write_text("a model")
    (copy / "config.json").write_text(json.dumps(dict(reversed(CONFIG.items())), indent=4))
    assert fingerprint_folder(copy) == fingerprint_folder(folder)
    link = tmp_path / "link"
    link.symlink_to(folder)
    found = fingerprint_folder(link)
    assert found == fingerprint_folder(folder)
    shutil.rmtree(cache_home, ignore_errors=True)
    cache_home.write_text("a file where the folder should be")  # then it is done without
    assert found == fingerprint_folder(folder) == fingerprint_folder(folder)
    for missing in ("config.json", "*.safetensors"):
        other = shutil.copytree(copy, tmp_path / f"without {missing[-6:]}")
        for file in list(other.glob(missing)):
            file.unlink()
        with pytest.raises(InvalidInputError, match=r"no model folder: it needs config.json and weights"):
            fingerprint_folder(other)
    # load options change it, whatever their order
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    plain = fingerprint_folder(tmp_path)
    assert fingerprint_folder(tmp_path, {}) == plain
    one = fingerprint_folder(tmp_path, {"sliding_window": 8, "rope_theta": 1e4})
    assert one == fingerprint_folder(tmp_path, {"rope_theta": 1e4, "sliding_window": 8})
    described = "[('rope_theta', '10000.0'), ('sliding_window', '8')]"
    assert one == hashlib.sha256(f"{plain}\n{described}".encode()).hexdigest()  # as blocks have been named so far


def test_digests_are_remembered(folder: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "SETTLED_S", -1.0)
    hashed: list[str] = []
    real = fingerprint.hashlib.file_digest
    monkeypatch.setattr(
        fingerprint.hashlib, "file_digest", lambda s, kind: (hashed.append(Path(s.name).name), real(s, kind))[1]
    )
    first = fingerprint_folder(folder)
    assert sorted(hashed) == ["model-0.safetensors", "model-1.safetensors"]
    assert len(list(cache_home.rglob("*"))) == 2 + 2
    assert fingerprint_folder(folder) == first
    assert len(hashed) == 2
    for note in (file for file in cache_home.rglob("*") if file.is_file()):
        note.write_text("")  # cut short by a crash
    assert fingerprint_folder(folder) == first and len(hashed) == 4
    flip_byte(folder / "model-0.safetensors")
    assert fingerprint_folder(folder) != first
    assert hashed[4:] == ["model-0.safetensors"]


def tiny(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, **changes))


def test_models_in_memory() -> None:
    base = fingerprint_model(tiny())
    assert fingerprint_model(tiny()) == base
    changed = tiny()
    with torch.no_grad():
        changed.model.layers[0].self_attn.k_proj.weight[0, 0] += 1e-3
    others = [changed, tiny(1), tiny().to(torch.bfloat16), tiny(rope_theta=5e5)]
    assert len({base, *map(fingerprint_model, others)}) == 5
    model = tiny()
    model.scale = nn.Parameter(torch.tensor(1.0))
    one = fingerprint_model(model)
    model.scale.data.add_(1)
    assert fingerprint_model(model) != one


# ---- identity: what a model's blocks are named by ------------------------------------------------------------------

WITH_BOS = ModelIdentity(None, "weights", "bfloat16", 1, "a model")
WITHOUT_BOS = ModelIdentity(None, "weights", "bfloat16", None, "a model")


def test_the_planner_names_blocks_by_weights_dtype_codec_salt_and_tenant() -> None:
    planner = WITH_BOS.planner(BlendConfig(block_size=32))
    assert planner.root == planner.exact_root == root_name("weights", "bfloat16")
    assert (planner.block_size, planner.codec, planner.anchor) == (32, "raw", Anchor("bos", 1))

    compressed = WITH_BOS.planner(BlendConfig(codec="int8", salt="ours"))
    assert compressed.root == root_name("weights", "bfloat16", "int8", "ours")
    assert compressed.exact_root == root_name("weights", "bfloat16", salt="ours")

    one = WITH_BOS.planner(BlendConfig(salt="ours"), "one")
    assert one.root == root_name("weights", "bfloat16", salt="ours\x1fone")

    # The anchor is BOS where there is one.
    assert WITH_BOS.anchor("auto") == Anchor("bos", 1)
    assert WITHOUT_BOS.anchor("auto") == Anchor("none", None)
    assert WITH_BOS.anchor("none") == Anchor("none", 1)
    assert WITH_BOS.anchor("system") == Anchor("system", 1)
    with pytest.raises(InvalidInputError, match="'bos' needs a tokenizer"):
        WITHOUT_BOS.anchor("bos")
    with pytest.raises(InvalidInputError, match="'text' needs a text and the model's tokenizer"):
        WITH_BOS.anchor("text", "A")
    with_texts = replace(WITH_BOS, in_front=lambda text: ((1,), tuple(map(ord, text))))
    assert with_texts.planner(BlendConfig(anchor="text", anchor_text="A")).anchor == Anchor("text", 1, ((1,), (65,)))
    assert with_texts.planner(BlendConfig(anchor="text")).anchor.front == ((1,), tuple(map(ord, ANCHOR_TEXT)))
    with pytest.raises(InvalidInputError, match="anchor_text has no effect without the anchor 'text'"):
        BlendConfig(anchor_text="A")


def test_auto_is_the_text_and_head_where_they_fit_the_model_and_otherwise_what_asks_for_less() -> None:
    def resolved(context: int | None, is_plain: bool = True, **config: Any) -> tuple[str, Any]:
        room = room_of(context, is_plain)
        known = replace(WITH_BOS, in_front=lambda text: ((1,), tuple(map(ord, text))), room=room)
        found = known.resolved(BlendConfig(**config))
        assert known.resolved(found) == found and known.planner(found) == known.planner(BlendConfig(**config))
        return found.anchor, found.make_selector()

    ours, least = Corrected(Head(0.15, recency=1.0), 0.5), 8 * (1 + len(ANCHOR_TEXT))
    assert resolved(least) == resolved(None) == ("text", ours)
    assert resolved(least - 1) == resolved(None, is_plain=False) == ("bos", Gradual(0.15))
    assert resolved(least - 1, anchor="text", recompute_ratio=0.05) == ("text", replace(ours, inner=Head(0.05, 1.0)))
    assert resolved(None, is_plain=False, anchor="text") == ("text", Gradual(0.15))  # a latent's key is its value too
    assert resolved(None, anchor="bos") == ("bos", Gradual(0.15))
    # settings of checks ask for what has checks; what is named has its own settings
    assert resolved(None, check_layers=(2,)) == ("text", Hkvd((2,), (0.15,)))
    for named in ({"correction": 0.2}, {"correction": 0.0}, {"recency": 0.3}):
        made = Selection(selector="head", **{"recency": 1.0, "correction": 0.5} | named).make_selector()
        assert resolved(None, **named) == ("text", made)
    with pytest.raises(InvalidInputError, match="recency must be"):
        BlendConfig(recency=7)
    with pytest.raises(InvalidInputError, match="that is what there is where none is named"):
        SelectorChoice.parse("auto")
    assert resolved(None, measure="v") == ("text", Gradual(0.15, "v"))
    assert resolved(None, selector="head") == ("text", Head(0.15))
    # a tokenizer that has no token for a text
    silent = replace(WITH_BOS, room=99, in_front=Mock(side_effect=InvalidInputError("a chunk has no tokens")))
    assert silent.resolved(BlendConfig()).anchor == "bos"
    with pytest.raises(InvalidInputError, match="a chunk has no tokens"):
        silent.resolved(BlendConfig(anchor="text"))
    # without a tokenizer there is no text
    assert replace(WITH_BOS, room=room_of(None, True)).resolved(BlendConfig()).anchor == "bos"


# ---- adapters, over a fake of PEFT's layers; weights quantised in place ---------------------------------------
def model_with(*adapters: str) -> Any:
    """A model with adapters a (seed 1), b (2) and so on; the first one is active."""
    model = copy.deepcopy(tiny_model("llama"))
    for name in adapters:
        add_adapter(model, name, seed=ord(name) - ord("a") + 1)
    if adapters:
        set_adapter(model, adapters[0])
    return model


def test_a_digest_tells_which_adapters_are_active_and_the_fingerprint_does_not() -> None:
    watch = AdapterWatch(model_with())
    assert watch.adapted().digest == "" and not watch.look() and watch.version == 0
    assert with_adapters("weights", "") == "weights"
    model = model_with("a", "b")
    alone, watch = AdapterWatch(model_with("a")), AdapterWatch(model)
    assert alone.adapted().digest == watch.adapted().digest != "", "whatever else is loaded"
    found = {"", alone.adapted().digest}
    for names in (("a", "b"), ("b",)):
        set_adapter(model, *names)
        watch.look()
        found.add(watch.adapted().digest)
    assert len(found) == 4 and AdapterWatch(model).adapted().digest == watch.adapted().digest
    one, two = model_with(), model_with()
    add_adapter(one, "x", seed=1)
    add_adapter(two, "y", seed=1)
    assert AdapterWatch(one).adapted().digest != AdapterWatch(two).adapted().digest, "a name is part of it"
    # the fingerprint of weights is that of the model without adapters
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
    before = watch.adapted().digest
    assert not watch.look()
    change(model)
    assert watch.look() and watch.adapted().digest != before and watch.version == 1
    assert not watch.look() and watch.version == 1


def test_switching_back_gives_the_digest_back_and_a_merge_leaves_its_rounding() -> None:
    model = model_with("a", "b")
    watch = AdapterWatch(model)
    separate = watch.adapted().digest
    set_adapter(model, "b")
    assert watch.look()
    set_adapter(model, "a")
    assert watch.look() and watch.adapted().digest == separate
    disable(model)
    assert watch.look() and watch.adapted().digest == ""
    disable(model, False)
    assert watch.look() and watch.adapted().digest == separate
    merge(model)
    watch.look()
    merged = watch.adapted().digest
    unmerge(model)
    assert watch.look() and watch.adapted().digest not in ("", separate, merged)
    merge(model)
    unload(model)  # for good: the weights are not the model's any more
    assert watch.look() and watch.adapted().digest != ""
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
    before = watch.adapted().digest
    with torch.no_grad():
        layers(model)[1].base_layer.weight[3, 5] += 1.0
    assert watch.look() and watch.adapted().digest != before != ""
    assert not watch.look()


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
def test_written_weights_change_the_digest(adapters: tuple[str, ...], change: Callable[[Any], None]) -> None:
    model = model_with(*adapters)
    if adapters and change is replaced:
        pytest.skip("the adapted layer holds it elsewhere")
    watch = AdapterWatch(model)
    before = watch.adapted().digest
    assert not watch.look()
    change(model)
    assert watch.look() and not watch.look()
    assert watch.adapted().digest != before
    other = model_with(*adapters)
    same = AdapterWatch(other)
    change(other)
    assert same.look() and same.adapted().digest == watch.adapted().digest  # by what they hold
    trained(model)
    assert watch.look() and watch.adapted().digest != same.adapted().digest


def test_precision_and_values_of_weights_without_versions_are_watched() -> None:
    # a lower precision of float32 multiplications
    model, half = model_with(), model_with().to(torch.bfloat16)
    watch, other = AdapterWatch(model), AdapterWatch(half)
    try:
        torch.set_float32_matmul_precision("high")
        assert watch.look() and watch.adapted().digest != "" == other.adapted().digest and not other.look()
        assert AdapterWatch(model).adapted().digest == watch.adapted().digest
        found = {watch.adapted().digest}
        torch.set_float32_matmul_precision("medium")
        assert watch.look()
        found |= {watch.adapted().digest}
        assert len(found) == 2
    finally:
        torch.set_float32_matmul_precision("highest")
    assert watch.look() and watch.adapted().digest == ""
    # weights without versions by their values; those that are no numbers do not change
    with torch.inference_mode():
        model = model_with()
        for weight in model.parameters():
            weight.data = weight.data.clone()
    watch = AdapterWatch(model)
    assert not watch.look()
    with torch.inference_mode():
        in_data(model)
    assert watch.look() and watch.adapted().digest != ""
    model = model_with()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
        model.lm_head.weight.fill_(float("nan"))
    watch = AdapterWatch(model)
    assert not watch.look() and watch.adapted().digest == ""


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


def test_a_quantised_model_is_named_by_all_its_parts_and_blended_and_watched() -> None:
    """Not by where an object lies: processes that quantise equally agree."""
    one = fingerprint_model(quantised())
    assert one == fingerprint_model(quantised()) != fingerprint_model(tiny_model("llama"))  # type: ignore[arg-type]
    others = [quantised(bits=100.0), quantised(settings="other"), quantised()]
    others[2].model.layers[3].self_attn.k_proj.weight.data_[0, 0] += 1
    assert len({one, *map(fingerprint_model, others)}) == 4
    assert fingerprint_model(quantised(settings=Settings())) == fingerprint_model(quantised(settings=Settings()))
    with pytest.raises(InvalidInputError, match=r"bytes of a Opaque cannot be read.*BlendEngine\(\.\.\., fingerprint="):
        fingerprint_model(quantised(kind=Opaque))
    assert BlendEngine(quantised(kind=Opaque), fingerprint="mine").fingerprint == "mine"
    # adapters on it are watched, and scales: a merge into a quantised weight quantises it anew
    blends(quantised())
    model = quantised()
    add_adapter(model, "a", seed=1)
    add_adapter(model, "b", seed=2)
    watch = AdapterWatch(model)
    before = watch.adapted().digest
    assert not watch.look()
    set_adapter(model, "a")
    assert watch.look() and watch.adapted().digest != before
    assert fingerprint_model(model) == fingerprint_model(quantised())
    for layer in model.model.layers:
        layer.self_attn.k_proj.base_layer.weight.scale *= 1.5
    assert watch.look()


def blends(model: Any) -> None:
    with open_engine(model, [A, B, C], recompute_ratio=1.0) as engine:
        result = engine.prefill(RAG)
        assert sum(result.report.hit_tokens.values()) == len(A) + len(B) + len(C)
        torch.testing.assert_close(result.logits, engine.prefill(RAG, mode="full").logits, atol=1e-4, rtol=1e-4)


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
