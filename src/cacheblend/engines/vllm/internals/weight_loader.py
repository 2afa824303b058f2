"""Finds the model that vLLM loads, which vLLM does not pass to a connector, and takes memory for blending meanwhile.
PyTorch tells whenever a module becomes part of another one. So nothing of vLLM's is replaced, and no model is named."""

import contextlib
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.transformers_utils.config import get_config

from cacheblend.core.errors import InvalidInputError, ModelNotBlendableError
from cacheblend.engines.checkpoint import OF_TRAINING, State, shards_of, states_in
from cacheblend.engines.folders import cached_snapshot
from cacheblend.engines.vllm import stores
from cacheblend.engines.vllm.config import read_config
from cacheblend.engines.vllm.internals import interface
from cacheblend.engines.vllm.internals.decoder import attention_layers, connector_settings, model_sizes
from cacheblend.engines.vllm.workspace import gib, workspace_of

_CONSOLIDATED, _OF_RANKS = "consolidated*.safetensors", "model-rank-*.safetensors"
_PATTERNS = {  # of files that vLLM looks for, by format; others as hf
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "mistral": (_CONSOLIDATED,),
    "npcache": ("*.bin", "*.pt"),
    "pt": ("*.pt",),
    "runai_streamer_sharded": (_OF_RANKS,),
    "sharded_state": (_OF_RANKS,),
}

_parents: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]]" = weakref.WeakKeyDictionary()
_begun: dict[str, tuple[Path, dict[str, State]]] = {}  # by the model's name
_reserved: "weakref.WeakKeyDictionary[nn.Module, torch.Tensor]" = weakref.WeakKeyDictionary()
_watching: list[Any] = []


def watch_loading() -> None:
    """From now on, remembers which module holds which. Idempotent."""
    if not _watching:
        _watching.append(register_module_module_registration_hook(_remember))


def model_of(attention: nn.Module) -> nn.Module:
    """The loaded model that holds this attention module. Raises ModelNotBlendableError: it was loaded before
    `watch_loading`."""
    top = attention
    while (parent := _parents.get(top)) is not None and (found := parent()) is not None:
        top = found
    if top is attention:
        raise ModelNotBlendableError(
            "vLLM did not load the plug-in 'cacheblend' before the model (is VLLM_PLUGINS set, and does it leave it "
            "out?)"
        )
    return top


def check_files(config: Any, folder: Path) -> None:
    """Refuses weights that were written to while vLLM loaded them in this process, and a folder that is another than
    it loaded: they would have the names of what is there now. Raises InvalidInputError: they were."""
    name = config.model_config.model
    begun, before = _begun.pop(name, (folder, dict[str, State]()))
    if begun != folder:
        raise InvalidInputError(
            f"{name} is {folder} now, and was {begun} when vLLM began to load it; restart vLLM with --revision set"
        )
    now = states_in(folder)
    changed = [file for file, state in before.items() if now.get(file) != state]
    if changed:
        raise InvalidInputError(
            f"{changed[0]} in {folder} was changed while vLLM loaded the model from it; restart vLLM once its "
            "files are complete"
        )


def release_reserved(*, to_device: bool = False) -> int:
    """Frees what was taken when models were loaded; bytes. PyTorch keeps them for this process; `to_device`: PyTorch
    keeps nothing of it, but takes it from the device again when it needs some. It lends what it keeps neither to other
    streams nor, in large pieces, to small tensors, and a store's records are both."""
    freed = sum(taken.numel() for taken in _reserved.values())
    _reserved.clear()
    if to_device and freed:
        torch.cuda.empty_cache()
    return freed


def _remember(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is None:
        return
    _parents[child] = weakref.ref(parent)
    if hasattr(child, "impl") and hasattr(child, "kv_cache"):
        config = get_current_vllm_config_or_none()
        if config is not None and len(attention_layers(config)) == 1:
            _note_files(config)
            _reserve(child, config, torch.device(config.device_config.device))


def _note_files(config: VllmConfig) -> None:
    """Notes the files that are there before vLLM reads the first weight; it may yet fetch others."""
    with contextlib.suppress(InvalidInputError):
        folder = files_of(config)
        _begun[config.model_config.model] = folder, states_in(folder)


def _reserve(attention: nn.Module, config: VllmConfig, device: torch.device) -> None:
    """Takes the memory that blending will need: vLLM counts it as weights, and makes its KV cache smaller by it. Done
    at the model's first attention module, before vLLM measures what is left. Raises InvalidInputError: the GPU has
    less, or there is none for the store's tier."""
    extra, speculative = connector_settings(config), config.speculative_config
    if extra is None or (speculative is not None and config.model_config is speculative.draft_model_config):
        return  # of a drafter it was taken with the model that it drafts for
    settings = read_config(extra)
    stores.check_device(settings.store, device.type)
    if device.type == "cpu" or (settings.on_unblendable == "plain" and interface.refusals(config)):
        return
    needed = workspace_of(model_sizes(config, device, extra))
    wanted = needed.total if settings.workspace_bytes is None else settings.workspace_bytes + needed.tier
    try:
        _reserved[attention] = torch.empty(wanted, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        of_tier = f", {gib(needed.tier)} of it for stored records (cuda://)" if needed.tier else ""
        raise InvalidInputError(
            f"the GPU has no {gib(wanted)} for blending beside the weights{of_tier}; set workspace_bytes, "
            f"max_model_len{', max_bytes of cuda://' if of_tier else ''} or max_num_batched_tokens lower"
        ) from error


def files_of(config: Any) -> Path:
    """The model's folder: as named in vLLM's configuration, or where vLLM put the files that it fetched from the hub.
    Raises InvalidInputError: they cannot be found."""
    model = config.model_config
    folder = Path(model.model)
    if folder.is_dir():
        return folder
    if envs.VLLM_USE_MODELSCOPE:
        raise InvalidInputError(
            f"{model.model} is fetched from ModelScope (VLLM_USE_MODELSCOPE), whose cache is not read here; download "
            "it, and give vLLM the folder as its model"
        )
    return cached_snapshot(model.model, model.revision, config.load_config.download_dir)


def weights_of(config: Any, folder: Path) -> list[Path]:
    """The files that vLLM reads a folder's weights from, by name: those of the first pattern of its format that there
    are any of, without what an index leaves out. Raises InvalidInputError: an index names a file that is missing."""
    wanted = str(config.load_config.load_format)
    if wanted == "auto" and any(folder.glob(_CONSOLIDATED)):
        wanted = "mistral"
    patterns = _PATTERNS.get(wanted, _PATTERNS["hf"])  # of ranks' shards there is no index
    found = next((files for pattern in patterns if (files := sorted(folder.glob(pattern)))), [])
    index = folder / ("consolidated" if wanted == "mistral" else "model")
    index = index.with_name(f"{index.name}.safetensors.index.json")
    if found and found[0].suffix == ".safetensors" and index.is_file() and patterns != (_OF_RANKS,):
        return shards_of(index)
    return [file for file in found if file.name not in OF_TRAINING]


def config_fields(config: Any, folder: Path) -> dict[str, Any] | None:
    """The model's config as vLLM parses it, where it is not that of the folder's config.json and named changes. Parsed
    anew: models change the one that vLLM holds while they are loaded, in the workers' processes alone."""
    model = config.model_config
    elsewhere = model.hf_config_path not in (None, model.model) or not (folder / "config.json").is_file()
    is_mistral = (folder / "params.json").is_file() and any(folder.glob(_CONSOLIDATED))
    of_folder = model.config_format == "hf" or (model.config_format == "auto" and not is_mistral)
    changes = model.hf_overrides if callable(model.hf_overrides) else None
    if of_folder and not elsewhere and changes is None:
        return None
    parsed = get_config(
        model.hf_config_path or model.model,
        model.trust_remote_code,
        getattr(model, "_hf_config_revision", None) or model.revision,
        model.code_revision,
        model.config_format,
        hf_overrides_fn=changes,
    )
    fields: dict[str, Any] = parsed.to_dict()
    return fields
