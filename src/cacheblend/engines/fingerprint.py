"""Which model an engine runs: its fingerprint, from the weights' bytes and the config fields that shape K and V, and
what else the names of its stored blocks depend on.

Every engine and process that opens the same folder gets the same fingerprint, and a different one after any change of a
weight. Hashing gigabytes takes seconds, so the hash of each weight file is noted in the user's cache folder. A note is
believed if size, times and inode of the file are the noted ones, among them the time of its last change, which only the
kernel sets, and a sample of the bytes of every tensor is the noted one, whatever the file system says. What neither
shows is a byte outside of the sample that changes behind the kernel's back.
"""

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME

from cacheblend.core.config import ANCHOR_TEXT, AnchorKind, BlendConfig
from cacheblend.core.errors import InvalidInputError, check_encodable
from cacheblend.core.plan.planner import Anchor, Planner
from cacheblend.engines.adapters import base_tensors, digest_of
from cacheblend.engines.checkpoint import loaded_files, sample_of, state_of, weight_files
from cacheblend.engines.files import write_whole

SETTLED_S = 2.0
"""A file that was written so shortly ago may be written again within one tick of its file system's clock, so that the
time of its last change would stay."""
_TRIES = 3

# Fields about how a model is loaded, run or sampled; K and V do not depend on them.
IRRELEVANT = (
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
    "id2label", "initializer_range", "label2id", "max_length", "output_attentions", "output_hidden_states",
    "pad_token_id", "return_dict", "tie_word_embeddings", "tokenizer_class", "torch_dtype", "transformers_version",
    "use_cache",
)  # fmt: skip


def fingerprint_folder(
    folder: Path,
    options: Mapping[str, Any] | None = None,
    *,
    files: Sequence[Path] = (),
    fields: Mapping[str, Any] | None = None,
) -> str:
    """Hex fingerprint of a model folder, as it is loaded with some options, those that may change K and V (RoPE,
    window, quantisation), by name.

    Args:
        files: its weights, where they are not those that transformers loads.
        fields: its config, where it is not that of its config.json.

    Raises:
        InvalidInputError: the folder has no config or no weights, or they are written to meanwhile.
    """
    config = folder / "config.json"
    options = options or {}
    if not files and (found := loaded_files(folder, options.get("variant"), options.get("use_safetensors"))):
        files = sorted({*found, *folder.glob("adapter_model.safetensors")})  # which PEFT puts on the model
    files = files or weight_files(folder)  # transformers would load none of them, but another engine may
    if fields is None and not config.is_file() and (folder / "adapter_config.json").is_file():
        raise InvalidInputError(
            f"{folder} holds an adapter without the model that it belongs to; open that model's folder and put the "
            "adapter on it (engine.model.load_adapter), or save the model with the adapter merged into it"
        )
    if not (config.is_file() or fields) or not files:
        raise InvalidInputError(f"{folder} is no model folder: it needs config.json and weights (*.safetensors)")
    try:
        with ThreadPoolExecutor(4) as pool:
            digests = list(pool.map(file_digest, files))
    except OSError as error:
        raise InvalidInputError(
            f"{error.filename} cannot be read ({error.strerror}); repair it, or download it again"
        ) from error
    try:
        fields = fields or json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInputError(f"{config} is not JSON ({error}); fetch the model again") from error
    names = [file.relative_to(folder).as_posix() for file in files]
    return loaded_with(_join(fields, zip(names, digests, strict=True)), options)


def loaded_with(fingerprint: str, options: Mapping[str, Any]) -> str:
    """The fingerprint of a model folder that is loaded with options, from that of the folder as it is."""
    if not options:
        return fingerprint
    described = repr(sorted((name, repr(_described(value))) for name, value in options.items()))
    return hashlib.sha256(f"{fingerprint}\n{described}".encode()).hexdigest()


def fingerprint_model(model: PreTrainedModel) -> str:
    """Hex fingerprint of a model that has no folder, from its parameters and buffers; those of adapters left out."""
    tensors = sorted(base_tensors(model).items())
    digests = [(name, digest_of(tensor)) for name, tensor in tensors]
    return with_own_code(_join(model.config.to_dict(), digests), model)


def with_own_code(fingerprint: str, model: PreTrainedModel) -> str:
    """The fingerprint of a model whose classes were imported from files beside its weights (`trust_remote_code`), which
    it then covers; unchanged for all other models."""
    classes = {type(part) for part in model.modules()} | {type(model.config)}
    names = {base.__module__ for each in classes for base in each.__mro__}
    modules = [sys.modules.get(name) for name in names if name.startswith(f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}.")]
    files = {str(module.__file__) for module in modules if module is not None}
    files |= {imported for file in files for imported in get_relative_import_files(file)}
    if not files:
        return fingerprint
    code = sorted({f"{Path(file).name} {hashlib.sha256(Path(file).read_bytes()).hexdigest()}" for file in files})
    return hashlib.sha256("\n".join([fingerprint, "code", *code]).encode()).hexdigest()


def with_adapters(fingerprint: str, adapters: str) -> str:
    """The fingerprint of a model with active adapters, whose digest is `adapters` (`AdapterWatch`); empty: none."""
    return hashlib.sha256(f"{fingerprint}\nadapters {adapters}".encode()).hexdigest() if adapters else fingerprint


def _join(config: Mapping[str, Any], digests: Iterable[tuple[str, str]]) -> str:
    relevant = {key: value for key, value in config.items() if key not in IRRELEVANT}
    parts = [json.dumps(relevant, sort_keys=True, default=str), *(f"{name} {digest}" for name, digest in digests)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def file_digest(file: Path) -> str:
    """SHA-256 of a file's bytes, hex, cached in the user's cache folder. Raises `InvalidInputError` if the file keeps
    changing."""
    home = os.path.expanduser("~/.cache")  # noqa: PTH111 - "~" stays of a user who is not known; `Path` would raise
    cache = Path(os.environ.get("XDG_CACHE_HOME") or home) / "cacheblend" / "digests"
    note = cache / f"{hashlib.sha256(str(file.resolve()).encode()).hexdigest()}.json"
    for _ in range(_TRIES):
        state, began = state_of(file), time.time_ns()
        known = {"state": list(state), "sample": sample_of(file)}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # none, or cut off by a crash
            noted = json.loads(note.read_text(encoding="utf-8")) if cache.is_absolute() else {}
            if {name: noted[name] for name in known} == known:
                return str(noted["digest"])
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if state_of(file) == state:
            if cache.is_absolute() and max(state[1:3]) < began - SETTLED_S * 1e9:
                with contextlib.suppress(OSError):  # without the note the next start hashes the file again
                    note.parent.mkdir(parents=True, exist_ok=True)
                    write_whole(note, json.dumps({**known, "digest": digest}))
            return digest
    raise InvalidInputError(f"{file} is being written to; open the model once it is complete")


def _described(value: Any) -> Any:
    """An option's value, in one order, tensors replaced by their digests, since their `repr` omits most of them."""
    if torch.is_tensor(value):
        return digest_of(value)
    if not isinstance(value, Mapping):
        return value
    items = [(name, _described(each)) for name, each in sorted(value.items(), key=lambda item: str(item[0]))]
    return items if any(map(torch.is_tensor, value.values())) else dict(items)


def room_of(context: int | None, is_plain: bool) -> int:
    """`ModelIdentity.room` of a model: an eighth of its context (None: it has no end), so that chunks fit behind the
    text. `is_plain`: each layer keeps keys and values, none a latent or a state."""
    return (sys.maxsize if context is None else context) // 8 if is_plain else 0


@dataclass(frozen=True)
class ModelIdentity:
    """A loaded model, as far as names of blocks need it: engines that agree on it share a store's contents."""

    folder: Path | None  # the model's files; None for a model that was not loaded from a folder
    fingerprint: str  # of the weights and of load options that change K and V (`fingerprint_folder`)
    dtype: str  # of the KV cache, without ``torch.``: ``bfloat16``
    bos_id: int | None  # the token that the tokenizer puts in front of a prompt; None: it puts none
    name: str  # for people
    adapters: str = ""  # digest of the adapters in effect (`AdapterWatch`); empty: none
    has_exact_hits: bool = True  # see `Planner`
    weights: str = ""  # fingerprint of the folder's files alone, however they are loaded; empty: nobody compares it
    # the segments in front of a passage that follows a text (`PromptBuilder.in_front`); None: there is no tokenizer
    in_front: Callable[[str], tuple[tuple[int, ...], ...]] | None = field(default=None, repr=False, compare=False)
    room: int = 0  # most tokens of an anchor's text that is not asked for, see `room_of`; 0: such a model has none

    def resolved(self, config: BlendConfig) -> BlendConfig:
        """The configuration with what ``auto`` means for this model."""
        rule = self.anchor(config.anchor, config.anchor_text).rule
        return replace(config, anchor=rule).chosen(rule if self.room else "")

    def anchor(self, rule: AnchorKind, text: str | None = None) -> Anchor:
        """The anchor of chunks; ``auto``: see `BlendConfig`; `text` is that of the rule ``text``. Raises
        `InvalidInputError`: the tokens that the rule needs are not known."""
        front: tuple[tuple[int, ...], ...] = ()
        if self.in_front is not None and (rule == "text" or (rule == "auto" and self.room)):
            # a tokenizer may not know a letter of it
            with contextlib.suppress(*([InvalidInputError] if rule == "auto" else [])):
                front = self.in_front(ANCHOR_TEXT if text is None else text)
        if rule == "auto":
            fits = 0 < sum(map(len, front)) <= self.room
            rule = "text" if fits else "none" if self.bos_id is None else "bos"
        return Anchor(rule, self.bos_id, front if rule == "text" else ())

    def planner(self, config: BlendConfig, tenant: str = "") -> Planner:
        """The planner for prompts of one tenant; no tenant finds blocks that another one stored. Raises
        `InvalidInputError`: the anchor needs tokens that are not known, or the tenant's name has a lone surrogate."""
        check_encodable(tenant, f"the tenant {tenant!r}")
        planner = Planner.of_model(
            with_adapters(self.fingerprint, self.adapters),
            self.dtype,
            self.anchor(config.anchor, config.anchor_text),
            config.block_size,
            codec=config.codec,
            salt=f"{config.salt}\x1f{tenant}" if tenant else config.salt,
        )
        return replace(planner, has_exact_hits=self.has_exact_hits)
