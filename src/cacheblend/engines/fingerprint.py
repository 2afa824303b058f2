"""A model's fingerprint, from its files: the weights' bytes and the config fields that shape K and V.

Every engine and process that opens the same folder gets the same fingerprint, and a different one after any change of a
weight. Hashing gigabytes takes seconds, so the hash of each weight file is cached under its path, size, time and inode.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.adapters import base_tensors, digest_of

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")

# Fields about how a model is loaded, run or sampled; K and V do not depend on them.
IRRELEVANT = frozenset(
    [
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "max_length",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "return_dict",
        "tie_word_embeddings",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    ]
)


def fingerprint_folder(folder: Path, options: Mapping[str, Any] | None = None) -> str:
    """Hex fingerprint of a model folder, as it is loaded with some options.

    Args:
        folder: with config.json and weights.
        options: of loading, those that may change K and V (RoPE, window, quantisation), by name; None or empty: the
            model is loaded as the folder has it.

    Raises:
        InvalidInputError: the folder has no config or no weights.
    """
    config = folder / "config.json"
    files = sorted({file for pattern in WEIGHT_FILES for file in folder.glob(pattern)})
    if not config.is_file() or not files:
        raise InvalidInputError(f"{folder} is no model folder: it needs config.json and weights (*.safetensors)")
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(_file_digest, files))
    try:
        fields = json.loads(config.read_text())
    except ValueError as error:
        raise InvalidInputError(f"{config} is not JSON ({error}); fetch the model again") from error
    fingerprint = _join(fields, zip((f.name for f in files), digests, strict=True))
    if not options:
        return fingerprint
    described = repr(sorted((name, repr(value)) for name, value in options.items()))
    return hashlib.sha256(f"{fingerprint}\n{described}".encode()).hexdigest()


def fingerprint_model(model: PreTrainedModel) -> str:
    """Hex fingerprint of a model that has no folder, from its parameters and buffers; those of adapters left out."""
    tensors = sorted(base_tensors(model).items())
    return _join(model.config.to_dict(), [(name, digest_of(tensor)) for name, tensor in tensors])


def with_adapters(fingerprint: str, adapters: str) -> str:
    """The fingerprint of a model with adapters in effect, whose digest is `adapters` (`AdapterWatch`); empty: none."""
    return hashlib.sha256(f"{fingerprint}\nadapters {adapters}".encode()).hexdigest() if adapters else fingerprint


def _join(config: Mapping[str, Any], digests: Iterable[tuple[str, str]]) -> str:
    relevant = {key: value for key, value in config.items() if key not in IRRELEVANT}
    parts = [
        json.dumps(relevant, sort_keys=True, default=str),
        *(f"{name} {digest}" for name, digest in digests),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _file_digest(file: Path) -> str:
    """SHA-256 of a file's bytes, cached in the user's cache folder."""
    state = file.stat()
    key = json.dumps([str(file.resolve()), state.st_size, state.st_mtime_ns, state.st_ino])
    note = _cache_folder() / hashlib.sha256(key.encode()).hexdigest()
    try:
        cached = note.read_text()
        if len(cached) == hashlib.sha256().digest_size * 2:  # shorter: cut off by a crash
            return cached
    except OSError:
        pass
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        fresh = note.with_suffix(f".{os.getpid()}")
        fresh.write_text(digest)
        fresh.replace(note)
    except OSError:
        pass  # without the cache the next start hashes the file again
    return digest


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "cacheblend" / "digests"
