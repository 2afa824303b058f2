"""Opens a model folder: weights, tokenizer, fingerprint. A model that cannot be blended is refused before its weights
are read, where its config shows that."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from cacheblend.core.errors import CacheBlendError, InvalidInputError, ModelNotBlendableError
from cacheblend.core.kernels.rope import shift_limit
from cacheblend.core.plan.blocks import KVLayout, LayerShape
from cacheblend.engines.adapters import adapted_layers, base_tensors, plain_parts
from cacheblend.engines.checkpoint import check_files, states_in
from cacheblend.engines.fingerprint import file_digest, fingerprint_folder, with_own_code
from cacheblend.engines.folders import name_of

REASON_LINES, REASON_CHARACTERS = 3, 400  # most of a library's error message that `loading_reason` gives

# How files are found, read and placed, and by which code: the same numbers come out.
LEAVES_WEIGHTS = (
    "attn_implementation", "cache_dir", "device_map", "disable_mmap", "force_download", "local_files_only",
    "low_cpu_mem_usage", "max_memory", "offload_buffers", "offload_folder", "offload_state_dict",
    "output_loading_info", "proxies", "revision", "token", "tqdm_class", "trust_remote_code", "weights_only",
)  # fmt: skip
logger = logging.getLogger("cacheblend.engine")


@dataclass(frozen=True)
class OpenedModel:
    """A loaded model on its device, with its tokenizer (None if it was not requested) and its folder's name.
    `fingerprint`: of the files, its own code if that was run, and load options that change K and V."""

    model: PreTrainedModel
    tokenizer: Any
    fingerprint: str
    name: str


def open_folder(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    with_tokenizer: bool = True,
    **model_options: Any,
) -> OpenedModel:
    """Opens a model folder; arguments as for `BlendEngine.from_pretrained`."""
    folder, where = Path(path), checked_device(device)
    dtype = checked_dtype(model_options.pop("torch_dtype", None) or dtype)
    if subfolder := model_options.pop("subfolder", ""):
        folder = folder / subfolder
    before = states_in(folder)
    fingerprint = fingerprint_folder(folder, _changing(folder, model_options))
    opens = class_of(read_config(folder, **model_options))
    check_files(folder, model_options.get("variant"), model_options.get("use_safetensors"))
    remote_code = {name: value for name, value in model_options.items() if name == "trust_remote_code"}
    tokenizer = _tokenizer(folder, **remote_code) if with_tokenizer else None
    model = read_weights(opens, folder, dtype, **model_options)
    if device is not None or model_options.get("device_map") is None:
        model.to(where)
    # Weights that lie in a mapped file are copied: whoever wrote to it would change them under the running model.
    for tensor in (*model.parameters(), *model.buffers()):
        parts = [part for part in plain_parts(tensor.data) if part.device.type == "cpu"]
        parts = [part for part in parts if type(part) in (torch.Tensor, torch.nn.Parameter)]
        if not all(part.untyped_storage().resizable() for part in parts):
            tensor.data = tensor.data.clone()
    if states_in(folder) != before:
        raise InvalidInputError(
            f"files in {folder} were changed while the model was opened from them; open it again once they are complete"
        )
    return OpenedModel(model, tokenizer, with_own_code(fingerprint, model), name_of(folder))


def checked_dtype(dtype: str | torch.dtype) -> Any:
    """The dtype of weights, by name or as it is, or ``"auto"``. Raises `InvalidInputError`."""
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype == "auto" or (isinstance(named, torch.dtype) and named.is_floating_point):
        return named or dtype
    raise InvalidInputError(f"no dtype is called {dtype!r}; use auto, float32, bfloat16 or float16")


def checked_device(device: str | torch.device | None) -> torch.device:
    """The device of that name, CUDA for None if there is any. Raises `InvalidInputError`."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.empty(1, device=device)
        if found.is_meta:
            raise ValueError("it holds no data")
    except Exception as error:
        raise InvalidInputError(f"the device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
    return found.device


def _changing(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that may change K and V: that override the config (RoPE, window), quantise, or bring weights. An
    adapter beside the weights (`adapter_config.json`) is none: where PEFT is installed transformers puts it on the
    model of the same folder, whatever base it names, and engines name what is in effect (`AdapterWatch`)."""
    changing = {name: value for name, value in options.items() if name not in LEAVES_WEIGHTS}
    if changing.get("use_safetensors") is not False:  # the default, said or not
        changing.pop("use_safetensors", None)
    if file := changing.get("gguf_file"):
        found = next((each for each in (Path(file), folder / file) if each.is_file()), None)
        if found is None:
            raise InvalidInputError(f"there is no file {file} in {folder}; give gguf_file a path")
        changing["gguf_file"] = file_digest(found)
    return changing


def read_config(folder: Path, **options: Any) -> PretrainedConfig:
    """A folder's config, as options for transformers change it; raises `InvalidInputError` if it cannot be read."""
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, **options)
        return config
    except Exception as error:
        raise InvalidInputError(f"the config of {folder} cannot be opened: {loading_reason(error)}") from error


def class_of(config: PretrainedConfig) -> Any:
    """The class of transformers that opens a model: of language models, or of those that read images beside text. The
    latter are opened as a whole, and blended for prompts of text. The language model alone would have to be cut out of
    the weights by names that differ from model to model. Raises `ModelNotBlendableError` if neither opens it, or its
    config shows that it cannot be blended (`check_config`)."""
    check_config(config)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or ()
    ):
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise ModelNotBlendableError(
        f"{config.model_type} is no language model to transformers; only decoders that answer with text are blended, "
        "also those that read images beside it"
    )


def read_weights(opens: Any, folder: Path, dtype: str | torch.dtype, **options: Any) -> PreTrainedModel:
    """The model in evaluation mode, where transformers puts it; `opens` is of `class_of`, `options` go to
    `from_pretrained`. Raises `InvalidInputError`: not all weights can be loaded, or onto one device."""
    options["output_loading_info"] = True
    try:
        loaded = opens.from_pretrained(folder, dtype=dtype, **options)
    except (CacheBlendError, MemoryError, torch.OutOfMemoryError):
        raise
    except TypeError as error:  # transformers passes options that it does not know to the model's class
        options.pop("output_loading_info")
        raise InvalidInputError(f"{folder} cannot be opened with the options {', '.join(options)}: {error}") from error
    except Exception as error:
        raise InvalidInputError(f"{folder} cannot be loaded: {loading_reason(error)}") from error
    model, found = loaded if isinstance(loaded, tuple) else (loaded, {})
    _check_complete(model, folder, found)
    if elsewhere := [name for name, weight in model.named_parameters() if weight.is_meta]:
        raise InvalidInputError(
            f"of the weights in {folder} {_named(elsewhere)} would be on no device (device_map and max_memory leave "
            "them in files or in the host's memory); blending needs the whole model on one device"
        )
    method = getattr(model.config, "quantization_config", None)
    if method is not None and getattr(model, "hf_quantizer", None) is None:
        name = method.get("quant_method") if isinstance(method, Mapping) else getattr(method, "quant_method", None)
        raise InvalidInputError(
            f"the weights in {folder} are quantised by {name}, which this version of transformers does not know, so "
            "that it would take them for plain numbers; take a copy of the model that is not quantised so"
        )
    evaluated: PreTrainedModel = model.eval()
    return evaluated


def _check_complete(model: PreTrainedModel, folder: Path, found: Mapping[str, Any]) -> None:
    """Refuses a model of which parameters were not in the files: transformers gives them random numbers. Tied
    parameters, and those that a model's class declares dispensable, are not among them. A buffer has its initial
    values, which do not differ from one opening to the next."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    lacking = {str(name) for name in found.get("missing_keys", ())}
    if any(True for _ in adapted_layers(model)):  # then transformers tells what was missing of the adapters alone
        own = {id(tensor) for tensor in base_tensors(model, keep=True).values()}
        for name, weight in model.named_parameters():
            if id(weight) in own and not getattr(weight, "_is_hf_initialized", False):  # its mark of what it has read
                lacking.add(name)
    shaped = sorted({str(each[0] if isinstance(each, tuple) else each) for each in found.get("mismatched_keys", ())})
    missing = sorted(lacking & parameters)
    if missing or shaped:
        what = f"{_named(missing)} missing" if missing else f"{_named(shaped)} of another shape than config.json says"
        raise InvalidInputError(
            f"the weights in {folder} are incomplete for a {type(model).__name__}, with {what}, which would be random "
            "numbers; download the model again, or mend its config.json if that is of another model"
        )
    if buffers := sorted(lacking - parameters):
        logger.warning("%s has no %s, which keep their initial values", folder, _named(buffers))
    if extra := sorted({str(name) for name in found.get("unexpected_keys", ())}):
        logger.warning("%s has tensors that a %s does not use: %s", folder, type(model).__name__, _named(extra))


def _named(names: list[str]) -> str:
    more = f" and {len(names) - 3} more tensors" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _tokenizer(folder: Path, **options: Any) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **{"mistral_format": False} | options)
        if not tokenizer.encode("a", add_special_tokens=False):  # transformers makes an empty one of config.json alone
            raise ValueError("its vocabulary is empty")
        return tokenizer
    except Exception as error:
        refused = InvalidInputError(
            f"{folder} has no tokenizer that transformers can open: {loading_reason(error)}; add or repair its files"
        )
        # A note, which a traceback shows: on the command line there is no such argument.
        refused.add_note("To pass prompts as token ids, open the model with with_tokenizer=False.")
        raise refused from error


def loading_reason(error: Exception) -> str:
    """Why transformers could not load a file, in one line; its first one often says only that there is a problem."""
    text = str(error)
    if "above report" in text:  # the report goes to a log, which may be turned off
        return "the weights do not fit config.json: tensors have other shapes than it describes"
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    reason = " ".join(lines[:REASON_LINES]) or type(error).__name__
    return reason if len(reason) <= REASON_CHARACTERS else f"{reason[:REASON_CHARACTERS]}..."


def expected_layout(config: PretrainedConfig, dtype: torch.dtype | None = None) -> KVLayout:
    """The KV layout by a config alone, for plans and measurements that load no model; `survey_model` finds the real
    one. Assumes that all layers have the same shape. `dtype` None: that of the config, or fp32 if it has none. Raises
    `AttributeError`: the config lacks the number of layers, heads or dimensions."""
    config = config.get_text_config()
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    if rank := getattr(config, "kv_lora_rank", None):  # a latent and a rotated key part in halves, see `kernels.latent`
        kept = int(rank) + int(getattr(config, "qk_rope_head_dim", None) or 0)
        return KVLayout((LayerShape(1, -(-kept // 2)),) * int(config.num_hidden_layers), dtype)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVLayout((LayerShape(int(heads), int(width)),) * int(config.num_hidden_layers), dtype)


def check_config(config: Any) -> None:
    """Refuses by config models that would fail later, unclearly. Raises `ModelNotBlendableError`: an encoder-decoder
    model, attention with an indexer, inputs to each layer, layers that share KV, or a RoPE that cannot be shifted."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelNotBlendableError(f"{config.model_type} is an encoder-decoder model; only decoders are blended")
    text = config.get_text_config(decoder=True)
    top, kinds = getattr(text, "index_topk", None), getattr(text, "layer_types", None)
    if "indexed_attention" in (kinds or ()) or (top and not kinds):
        raise ModelNotBlendableError(
            f"{text.model_type} attends sparsely: an indexer selects the {top} tokens that "
            "each row attends to (DeepSeek sparse attention), so a row's KV depends on a selection that stored KV does "
            "not have; serve it without blending"
        )
    unsupported = {
        "hidden_size_per_layer_input": "gives each layer an input of its own beside the hidden states",
        "num_kv_shared_layers": "has layers that use the keys and values of others",
    }
    for name, found in unsupported.items():
        if value := getattr(text, name, None):
            raise ModelNotBlendableError(
                f"{text.model_type} {found} ({name} = {value}), which blending does not support; "
                f"models of {text.model_type} whose config.json has 0 there can be blended"
            )
    list(shift_limits(text))


def shift_limits(config: Any) -> Iterator[int | None]:
    """Shift limit of each RoPE in the config: one, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    original = getattr(config, "original_max_position_embeddings", None)
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in nested or [parameters]:
        yield shift_limit({"original_max_position_embeddings": original, **rope})
