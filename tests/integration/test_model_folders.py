"""Model folders as they are found: in every form of weights what is whole opens as what it is, and all else is refused
in one sentence, or named by what runs."""

import json
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.dynamic_module_utils as dynamic_modules
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, LlamaForCausalLM

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.plan.prompt import Prompt, chunk, text
from cacheblend.engines import fingerprint
from cacheblend.engines.hf import BlendEngine, model_loader
from cacheblend.engines.hf.doctor import diagnose
from cacheblend.nano import model_path
from fake_adapters import add_adapter
from families import tiny_model

Tensors = dict[str, torch.Tensor]
CHUNK = chunk(list(range(40, 70)))
PROMPT = Prompt.of([text([1, 7, 9]), CHUNK, text(list(range(100, 120)))])
UP, HEAD = "model.layers.1.mlp.up_proj.weight", "lm_head.weight"


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are noted at once; code of models is copied to a folder of this test, and none is imported yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "SETTLED_S", -1.0)
    monkeypatch.setattr(dynamic_modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    as_in_another_process()


@pytest.fixture(scope="module")
def tensors(built: Path) -> Tensors:
    return {name: value.clone() for name, value in LlamaForCausalLM.from_pretrained(built).state_dict().items()}


def opened(folder: Path, **options: Any) -> tuple[str, torch.Tensor]:
    """The name of what a folder opens as, and a prompt's logits."""
    with BlendEngine.from_pretrained(folder, store="memory", with_tokenizer=False, **options) as engine:
        if engine.model.config.tie_word_embeddings:
            assert engine.model.lm_head.weight is engine.model.model.embed_tokens.weight
        return engine.runtime.planner.root.hex(), engine.prefill(PROMPT).logits


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(InvalidInputError) as raised:
        opened(folder, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def parts_of(held: Tensors, count: int) -> list[Tensors]:
    names = sorted(held)
    return [{name: held[name].contiguous() for name in names[i::count]} for i in range(count)]


def one_safetensors(folder: Path, held: Tensors) -> None:
    save_file(parts_of(held, 1)[0], folder / "model.safetensors", {"format": "pt"})


def one_bin(folder: Path, held: Tensors) -> None:
    torch.save(held, folder / "pytorch_model.bin")


def safetensors_shards(folder: Path, held: Tensors, name: str = "model", end: str = "safetensors") -> None:
    index = {}
    for number, part in enumerate(parts_of(held, 3), 1):
        file = f"{name}-{number:05}-of-00003.{end}"
        index.update(dict.fromkeys(part, file))
        if end == "bin":
            torch.save(part, folder / file)
        else:
            save_file(part, folder / file, {"format": "pt"})
    (folder / f"{name}.{end}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def bin_shards(folder: Path, held: Tensors) -> None:
    safetensors_shards(folder, held, "pytorch_model", "bin")


Form = Callable[[Path, Tensors], None]
FORMS: list[Form] = [one_safetensors, safetensors_shards, one_bin, bin_shards]


def write(folder: Path, built: Path, form: Form, held: Tensors, **config: Any) -> Path:
    shutil.copytree(built, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    changed = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(changed))
    form(folder, held)
    return folder


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda held: {name: value for name, value in held.items() if name not in names}


def of_another_shape(held: Tensors) -> Tensors:
    return held | {UP: held[UP][:-1]}


def with_others(held: Tensors) -> Tensors:
    return held | {"model.layers.1.mlp.gate": torch.ones(3), "vision.weight": torch.ones(2, 2)}


SHAPE = r"tensors have other shapes|mlp\.up_proj\.weight of another shape"
CASES: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any], dict[str, Any], str]] = {
    # what becomes of the tensors, of the config, options, and how it is refused; empty: it opens
    "whole": (lambda held: held, {}, {}, ""),
    "a tensor is missing": (without(UP), {}, {}, r"with model\.layers\.1\.mlp\.up_proj\.weight missing"),
    "a head that is not tied is missing": (without(HEAD), {}, {}, r"lm_head\.weight missing"),
    "a tied head is missing": (without(HEAD), {"tie_word_embeddings": True}, {}, ""),
    "other tensors beside": (with_others, {}, {}, ""),
    "another shape": (of_another_shape, {}, {}, SHAPE),
    "another shape, ignored": (of_another_shape, {}, {"ignore_mismatched_sizes": True}, SHAPE),
    "of another model": (lambda held: {"w": torch.ones(3)}, {}, {}, r"and \d+ more tensors missing"),
    "quantised by a library that is not here": (
        lambda held: held,
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {},
        "cannot be loaded: ",
    ),
    "quantised in a way that transformers does not know": (
        lambda held: held,
        {"quantization_config": {"quant_method": "of tomorrow"}},
        {},
        "are quantised by of tomorrow, which this version of transformers does not know",
    ),
    "quantised without a method": (lambda held: held, {"quantization_config": {"bits": 4}}, {}, "cannot be loaded: "),
}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("case", CASES)
def test_what_is_whole_opens_and_all_else_is_refused(
    form: Form, case: str, built: Path, tensors: Tensors, tmp_path: Path
) -> None:
    change, config, options, message = CASES[case]
    folder = write(tmp_path / "model", built, form, change(tensors), **config)
    if message:
        assert re.search(message, refused(folder, **options))
        assert case != "a tensor is missing" or f"{UP} missing" in diagnose(folder).reason
        return
    name, logits = opened(folder, **options)
    head = {HEAD: tensors["model.embed_tokens.weight"].clone()} if config.get("tie_word_embeddings") else {}
    plain, wanted = opened(write(tmp_path / "whole", built, form, tensors | head))
    assert torch.equal(logits, wanted) and (name == plain) == (case == "whole")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_weights_of_which_anything_is_gone_are_refused(
    form: Form, built: Path, tensors: Tensors, tmp_path: Path
) -> None:
    """At random: a tensor, the end of a file, a file, a line of an index, or a bit, which makes another name."""
    draw = random.Random(form.__name__)
    whole = write(tmp_path / "whole", built, form, tensors)
    plain, _ = opened(whole)
    for number in range(10):
        kind = ("tensor", "end", "file", "bytes", "index")[number % 5]
        gone = draw.choice(sorted(tensors))
        held = without(gone)(tensors) if kind == "tensor" else tensors
        folder = write(tmp_path / f"{number}", built, form, held)
        files = sorted(file for each in ("*.safetensors", "*.bin") for file in folder.glob(each))
        file = draw.choice(files)
        if kind == "tensor":
            assert f"{gone} missing" in refused(folder)
        elif kind == "end":
            file.write_bytes(file.read_bytes()[: -draw.randrange(1, file.stat().st_size)])
            assert file.name in refused(folder)
        elif kind == "file":
            file.unlink()
            assert "download" in (said := refused(folder)) or "no model folder" in said
        elif kind == "index" and (index := next(folder.glob("*.index.json"), None)) is not None:
            listed = json.loads(index.read_text())
            del listed["weight_map"][gone]
            index.write_text(json.dumps(listed))  # transformers reads the files that it names, whole
            assert opened(folder)[0] == plain
        elif kind == "bytes" and file.suffix == ".safetensors":
            content = bytearray(file.read_bytes())
            content[-draw.randrange(1, 1000)] ^= 1
            file.write_bytes(content)
            assert opened(folder)[0] != plain


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_that_are_missing_are_refused(family: str, tmp_path: Path) -> None:
    """transformers joins those that it finds in one tensor."""
    tiny_model(family).save_pretrained(tmp_path / "whole")
    held = load_file(tmp_path / "whole" / "model.safetensors")
    experts = [name for name in sorted(held) if "experts" in name]
    for number, name in enumerate((experts[0], experts[len(experts) // 2], experts[-1])):
        folder = shutil.copytree(tmp_path / "whole", tmp_path / f"{number}")
        one_safetensors(folder, without(name)(held))
        for options in ({}, {"ignore_mismatched_sizes": True}):
            assert "missing" in (said := refused(folder, **options)) or "other shapes" in said


def test_files_that_cannot_be_read_are_one_sentence(built: Path, tensors: Tensors, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", built, one_safetensors, tensors, model_type="of_tomorrow")
    assert "the config of" in refused(folder) and "of_tomorrow" in refused(folder)
    folder = write(tmp_path / "gguf", built, one_safetensors, tensors)
    (folder / "w.gguf").write_bytes(b"GGUF" + bytes(5000))
    assert str(folder) in refused(folder, gguf_file="w.gguf")


def test_weights_of_llama_cpp_are_named_by_their_file(built: Path, tensors: Tensors, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    folder = write(tmp_path / "model", built, one_safetensors, tensors)
    plain, wanted = opened(folder)
    config = json.loads((folder / "config.json").read_text())
    write_gguf(gguf, folder / "w.gguf", config, tensors)
    name, logits = opened(folder, gguf_file="w.gguf")
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-3)
    assert name != plain == opened(folder)[0]
    write_gguf(gguf, folder / "w.gguf", config, tensors | {UP: tensors[UP] + 0.1})
    other, changed = opened(folder, gguf_file="w.gguf")
    assert other not in (name, plain) and not torch.allclose(changed, wanted)
    write_gguf(gguf, folder / "w.gguf", config, without(UP)(tensors))
    assert f"{UP} missing" in refused(folder, gguf_file="w.gguf")
    whole = (folder / "w.gguf").read_bytes()
    (folder / "w.gguf").write_bytes(whole[: len(whole) // 2])
    assert str(folder) in refused(folder, gguf_file="w.gguf")


GGUF_NAMES = {
    "input_layernorm": "attn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
    "norm": "output_norm", "embed_tokens": "token_embd", "lm_head": "output",
}  # fmt: skip


def write_gguf(gguf: Any, file: Path, config: dict[str, Any], held: Tensors) -> None:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    out = gguf.GGUFWriter(file, "llama")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_vocab_size(config["vocab_size"])
    for name, tensor in held.items():
        *where, kind, _ = name.split(".")
        place = f"blk.{where[2]}." if "layers" in where else ""
        if (count := heads.get(kind)) is not None:  # llama.cpp orders the rotated pairs otherwise
            tensor = tensor.reshape(count, 2, len(tensor) // count // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
        out.add_tensor(f"{place}{GGUF_NAMES[kind]}.weight", tensor.numpy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


@pytest.mark.parametrize("device_map", [{"": "cpu"}, "auto", "cpu", torch.device("cpu")], ids=str)
def test_a_real_device_map_keeps_name_and_profile(device_map: Any) -> None:
    pytest.importorskip("accelerate")
    if torch.cuda.is_available():
        pytest.skip("auto is another device")
    with BlendEngine.from_pretrained(model_path(), store="memory") as engine:
        plain, profile = engine.runtime.planner.root, engine.runtime.settings.profile
    with BlendEngine.from_pretrained(model_path(), store="memory", device_map=device_map) as engine:
        assert (engine.runtime.planner.root, engine.runtime.settings.profile) == (plain, profile)


@pytest.mark.parametrize("device_map", ["meta", {"model": "cpu", "lm_head": "disk"}], ids=str)
def test_weights_that_stay_in_their_files_are_refused(device_map: Any, built: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    said = refused(built, device_map=device_map, offload_folder=str(tmp_path / "off"))
    assert "would be on no device" in said and (HEAD in said or "more tensors" in said)


class Opens:
    """A class of transformers that gives this model, and says this of its loading."""

    def __init__(self, model: Any, **found: Any) -> None:
        self.model, self.found = model, found

    def from_pretrained(self, folder: Path, **options: Any) -> Any:
        return self.model, self.found


def test_a_model_without_its_weights_is_refused() -> None:
    config = tiny_model("llama").config
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    with pytest.raises(InvalidInputError, match=r"and \d+ more tensors would be on no device .* on one device"):
        model_loader.read_weights(Opens(model), Path("m"), "auto")


def test_an_adapter_beside_the_weights_needs_no_other_model(
    built: Path, tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever base it names: transformers puts it on the model of the same folder, and without PEFT ignores it."""
    folder = write(tmp_path / "model", built, one_safetensors, tensors)
    adapter = {"base_model_name_or_path": "org/not-on-this-machine", "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    plain = fingerprint.fingerprint_folder(folder)
    monkeypatch.setattr(model_loader, "is_peft_available", lambda: True, raising=False)
    assert model_loader._changing(folder, {}) == {}
    save_file({"lora": torch.ones(3)}, folder / "adapter_model.safetensors")
    assert fingerprint.fingerprint_folder(folder) != plain
    (folder / "config.json").unlink()
    assert "holds an adapter without the model" in refused(folder)


def test_a_model_beside_its_adapter_is_as_complete_as_any(built: Path, tensors: Tensors, tmp_path: Path) -> None:
    """Of a model that it puts an adapter on, transformers says what was missing of the adapter alone."""
    for name, message in ((None, ""), (UP, UP), ("model.layers.1.self_attn.q_proj.weight", r"1\.self_attn\.q_proj")):
        held = tensors if name is None else without(name)(tensors)
        folder = write(tmp_path / str(name), built, one_safetensors, held)
        model, missing, named = LlamaForCausalLM.from_pretrained(folder), set[str](), message
        add_adapter(model, "default", 0)
        if name is None:
            assert model_loader.read_weights(Opens(model), folder, "auto") is model
            missing = {"model.layers.1.self_attn.q_proj.lora_A.default.weight"}
            named = r"lora_A\.default\.weight missing"
        with pytest.raises(InvalidInputError, match=named):
            model_loader.read_weights(Opens(model, missing_keys=missing), folder, "auto")


def test_peft_folders(built: Path, tensors: Tensors, tmp_path: Path) -> None:
    """An adapter alone, beside its model, and merged into it: what runs is what is named."""
    peft = pytest.importorskip("peft")
    model = LlamaForCausalLM.from_pretrained(built)
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings)
    alone = tmp_path / "alone"
    adapted.save_pretrained(alone)
    assert "holds an adapter without the model" in refused(alone)
    embedded = write(tmp_path / "embedded", built, one_safetensors, tensors)
    for file in alone.iterdir():
        shutil.copy(file, embedded)
    config = json.loads((embedded / "adapter_config.json").read_text())
    (embedded / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/elsewhere"}))
    merged = tmp_path / "merged"
    adapted.merge_and_unload().save_pretrained(merged)
    plain, one, other = opened(built), opened(embedded), opened(merged)
    assert len({plain[0], one[0], other[0]}) == 3
    torch.testing.assert_close(one[1], other[1], atol=1e-3, rtol=1e-3)
    assert not torch.allclose(one[1], plain[1], atol=1e-2)
    (embedded / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 64}))
    assert opened(embedded)[0] != one[0]
    one_safetensors(embedded, without(UP)(tensors))
    assert f"{UP} missing" in refused(embedded)


CODE = {
    "configuration_own.py": """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own"
""",
    "numbers_own.py": "FACTOR = 1.0\n",
    "layers_own.py": "from .numbers_own import FACTOR\n\ndef turned(hidden):\n    return hidden * FACTOR\n",
    "modeling_own.py": """
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel
from .configuration_own import OwnConfig
from .layers_own import turned

class OwnModel(LlamaModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.mlp.register_forward_hook(lambda module, args, out: turned(out))

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.post_init()
""",
}
AUTO_MAP = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


def as_in_another_process() -> None:
    """transformers keeps the classes that it has imported, and gives them again for a folder whose code was changed."""
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]
    for mapping in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        kept = mapping._extra_content
        for key, value in list(kept.items()):
            if "transformers_modules" in f"{key} {value}":
                del kept[key]


def with_code(folder: Path, built: Path, tensors: Tensors, **changed: str) -> Path:
    write(folder, built, one_safetensors, tensors, model_type="own", auto_map=AUTO_MAP)
    for name, content in (CODE | {f"{name}.py": content for name, content in changed.items()}).items():
        (folder / name).write_text(content)
    return folder


def test_code_that_comes_with_the_weights_is_part_of_their_name(built: Path, tensors: Tensors, tmp_path: Path) -> None:
    """Its files, and those that they import, wherever they are; nothing that another version computed is loaded."""
    names, found = list[str](), list[torch.Tensor]()
    versions: list[dict[str, str]] = [
        {},
        {"numbers_own": "FACTOR = 1.5\n"},
        {"layers_own": CODE["layers_own.py"].replace("* FACTOR", "- FACTOR")},
        {"nothing_imports_this": "X = 1\n"},
    ]
    config, options = BlendConfig(block_size=8), {"trust_remote_code": True, "with_tokenizer": False}
    for number, changed in enumerate(versions):
        folder = with_code(tmp_path / f"{number}" / "own", built, tensors, **changed)
        as_in_another_process()
        with BlendEngine.from_pretrained(folder, store=tmp_path / "kv", config=config, **options) as engine:
            is_known = engine.fingerprint in names
            assert (sum(engine.prefill(PROMPT).report.hit_tokens.values()) > 0) == is_known == (number == 3)
            engine.warm([CHUNK])
            assert sum(engine.prefill(PROMPT).report.hit_tokens.values()) > 0
            names.append(engine.fingerprint)
            found.append(engine.prefill(PROMPT, mode="full").logits)
    assert len(set(names)) == 3 and names[3] == names[0] and torch.equal(found[3], found[0])
    assert not torch.allclose(found[0], found[1]) and not torch.allclose(found[0], found[2])


def test_code_that_is_changed_is_named_by_what_runs_in_a_process_and_in_memory(
    built: Path, tensors: Tensors, tmp_path: Path
) -> None:
    found, names = list[tuple[str, torch.Tensor]](), set[str]()
    for factor in ("1.0", "1.5"):
        shutil.rmtree(tmp_path / "own", ignore_errors=True)
        folder = with_code(tmp_path / "own", built, tensors, numbers_own=f"FACTOR = {factor}\n")
        found.append(opened(folder, trust_remote_code=True))
    assert (found[0][0] == found[1][0]) == torch.equal(found[0][1], found[1][1])
    for factor in ("1.0", "1.5"):
        folder = with_code(tmp_path / factor / "own", built, tensors, numbers_own=f"FACTOR = {factor}\n")
        as_in_another_process()
        opens = model_loader.class_of(model_loader.read_config(folder, trust_remote_code=True))
        names.add(fingerprint.fingerprint_model(opens.from_pretrained(folder, trust_remote_code=True)))
    assert len(names) == 2


def test_code_that_is_not_run_changes_no_name(built: Path, tensors: Tensors, tmp_path: Path) -> None:
    """Of a model that transformers knows itself, opened without its code, and of one that has none."""
    folder = write(tmp_path / "model", built, one_safetensors, tensors)
    plain = opened(folder)[0]
    assert opened(folder, trust_remote_code=True)[0] == plain
    (folder / "helpers.py").write_text("X = 1\n")
    assert opened(folder, trust_remote_code=True)[0] == plain
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": AUTO_MAP}))
    assert opened(folder, trust_remote_code=False)[0] == plain
