"""Fingerprints of model folders and of models in memory; a model's identity: its anchor, tenants, load options."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import root_name
from cacheblend.core.plan.planner import Anchor
from cacheblend.engines import fingerprint
from cacheblend.engines.fingerprint import ModelIdentity, fingerprint_folder, fingerprint_model

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
def test_any_change_of_weights_and_of_config_fields_that_shape_kv_is_seen(
    folder: Path, change: Callable[[Path], object]
) -> None:
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


def test_copies_agree_and_what_is_no_model_folder_is_refused(folder: Path, tmp_path: Path, cache_home: Path) -> None:
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


def test_digests_are_remembered_and_forgotten_on_change(
    folder: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_load_options_change_the_fingerprint_whatever_their_order(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    plain = fingerprint_folder(tmp_path)
    assert fingerprint_folder(tmp_path, {}) == plain
    one = fingerprint_folder(tmp_path, {"sliding_window": 8, "rope_theta": 1e4})
    assert one == fingerprint_folder(tmp_path, {"rope_theta": 1e4, "sliding_window": 8})
    described = "[('rope_theta', '10000.0'), ('sliding_window', '8')]"
    assert one == hashlib.sha256(f"{plain}\n{described}".encode()).hexdigest()  # as blocks have been named so far
