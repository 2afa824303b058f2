"""Which weights vLLM's blocks are named by: of the folder, or none; files that are written to while they load."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.fingerprint import fingerprint_folder
from cacheblend.engines.vllm.identity import identify
from cacheblend.engines.vllm.internals import weight_loader
from vllm_families import write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"w": torch.arange(50)}, made / "model.safetensors")
    return made


def config_of(model: str, dtype: torch.dtype = torch.float32, *, use_mla: bool = False, **load: Any) -> Any:
    same = {"revision": None, "hf_overrides": {}, "quantization": None, "use_mla": use_mla}
    loads = {"load_format": "auto", "download_dir": None, "model_loader_extra_config": {}} | load
    return SimpleNamespace(
        model_config=SimpleNamespace(model=model, hf_config=SimpleNamespace(), dtype=dtype, **same),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(**loads),
    )


def test_formats_of_the_folder_keep_its_name_and_others_have_their_own(folder: Path) -> None:
    plain = fingerprint_folder(folder)
    for of_folder in ("auto", "safetensors", "runai_streamer"):
        assert identify(config_of(str(folder), load_format=of_folder), None).fingerprint == plain
    others = [{"load_format": "dummy"}, {"load_format": "tensorizer"}]
    others += [{"load_format": "tensorizer", "model_loader_extra_config": {"tensorizer_uri": "s3://a"}}]
    named = [identify(config_of(str(folder), **each), None).fingerprint for each in others]
    assert len({plain, *named}) == 4


def test_a_lower_precision_of_float32_has_its_own_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = identify(config_of(str(folder)), None).fingerprint
    monkeypatch.setenv("VLLM_FLOAT32_MATMUL_PRECISION", "high")
    assert identify(config_of(str(folder)), None).fingerprint != plain
    assert identify(config_of(str(folder), torch.bfloat16), None).fingerprint == plain


def test_records_of_latents_have_names_of_their_own(tmp_path: Path) -> None:
    """transformers orders DeepSeek-V3's rotated numbers otherwise: its records are not vLLM's."""
    folder = write_model("deepseek_v3", tmp_path)
    expanded, latents = (identify(config_of(str(folder), use_mla=each), None).fingerprint for each in (False, True))
    assert expanded == fingerprint_folder(folder, {}) != latents


def test_a_name_of_the_hub_is_looked_for_where_vllm_downloads_to(folder: Path, tmp_path: Path) -> None:
    kept = tmp_path / "hub" / "models--org--m"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0123456789abcdef0123456789abcdef01234567")
    (kept / "snapshots").mkdir()
    folder.rename(kept / "snapshots" / "0123456789abcdef0123456789abcdef01234567")
    found = identify(config_of("org/m", download_dir=str(tmp_path / "hub")), None)
    assert found.name == "m" and found.folder is not None
    with pytest.raises(InvalidInputError, match="`hf download org/m"):
        identify(config_of("org/m", download_dir=str(tmp_path / "other")), None)


def test_files_that_are_written_to_while_vllm_loads_them_end_the_start(folder: Path) -> None:
    config = config_of(str(folder))
    weight_loader.check_files(folder)  # nothing was loaded in this process
    weight_loader._note_files(config)
    weight_loader.check_files(folder)
    weight_loader._note_files(config)
    save_file({"w": torch.arange(50)}, folder / "fetched.safetensors")  # by vLLM itself
    weight_loader.check_files(folder)
    weight_loader._note_files(config)
    save_file({"w": torch.arange(50) + 1}, folder / "model.safetensors")
    os.utime(folder / "model.safetensors", (1, 1))
    with pytest.raises(InvalidInputError, match=r"model\.safetensors in .* was changed while vLLM loaded .*; restart"):
        weight_loader.check_files(folder)
