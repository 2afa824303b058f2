"""`doctor` is right about every family of the matrix, about folders that are none, and about models that lie."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from cacheblend.engines.hf.doctor import Diagnosis, diagnose
from campaign import rotating
from families import BLENDABLE, HYBRID, REFUSED, Family, tiny_model
from parity.scenes import DIVERSE
from tokenizers_for_tests import byte_level, sentencepiece

CORE = [family for family in [*BLENDABLE, *HYBRID] if family.name in {*DIVERSE, "lfm2", "jamba", "lfm2-tail"}]
LIVE = ["re-positioned keys", "r = 1 is full prefill", "lone chunk, r = 0"]


def found(diagnosis: Diagnosis, name: str) -> tuple[bool | None, str]:
    return next((check.ok, check.detail) for check in diagnosis.checks if check.name == name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    tokenizer = sentencepiece()
    tokenizer.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("family", rotating([*BLENDABLE, *HYBRID], core=CORE), ids=str)
def test_says_yes(family: Family) -> None:
    diagnosis = diagnose(tiny_model(family.name))
    assert diagnosis.blendable, diagnosis.reason
    assert diagnosis.reason == ""
    assert [check.name for check in diagnosis.checks][-3:] == LIVE


@pytest.mark.parametrize("family", REFUSED, ids=str)
def test_says_no_and_why(family: Family) -> None:
    diagnosis = diagnose(tiny_model(family.name))
    assert not diagnosis.blendable
    assert re.search(family.reason, diagnosis.reason)
    facts = diagnosis.to_dict()
    assert json.loads(json.dumps(facts)) == facts and facts["blendable"] is False


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "qwen3_moe", "glm", "gpt_oss", "deepseek_v3"])
def test_half_precision_is_held_against_the_models_own_noise(name: str) -> None:
    diagnosis = diagnose(tiny_model(name, torch.bfloat16))
    assert diagnosis.blendable, diagnosis.reason


def test_describes_what_it_found() -> None:
    diagnosis = diagnose(tiny_model("gemma2"))
    assert found(diagnosis, "windows") == (True, "layers: 2 sliding by 24; 2 full")
    assert "half pairing, 16 of 16 dims" in found(diagnosis, "re-positioning")[1]
    assert "interleaved pairing" in found(diagnose(tiny_model("cohere")), "re-positioning")[1]
    assert "16 dims" in found(diagnose(tiny_model("phi")), "re-positioning")[1]
    assert "(NoPE)" in found(diagnose(tiny_model("smollm3")), "re-positioning")[1]
    assert found(diagnose(tiny_model("phi3-longrope")), "length")[0] is None


def test_catches_a_model_that_breaks_the_laws() -> None:
    """Rows that meet outside attention only in long prompts pass the survey's few rows, but not the live check."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)  # fmt: skip
    model = LlamaForCausalLM(config).eval()

    class Shifted(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(hidden)
            return out + out.roll(1, dims=1) if hidden.shape[1] > 16 else out

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1)
    model.model.layers[1].mlp = Shifted(model.model.layers[1].mlp)
    diagnosis = diagnose(model)
    assert not diagnosis.blendable
    assert "lone chunk" in diagnosis.reason


def test_a_folder_with_tokenizers(folder: Path) -> None:
    diagnosis = diagnose(folder)
    assert diagnosis.blendable, diagnosis.reason
    assert diagnosis.model == "tiny"
    names = [check.name for check in diagnosis.checks]
    assert names[0] == "files"
    assert {"tokenizer", "anchor", "chat template"} <= set(names)
    assert found(diagnosis, "anchor") == (True, "BOS, id 1")
    for file in folder.glob("*token*"):
        file.unlink()
    diagnosis = diagnose(folder)
    assert not diagnosis.blendable
    assert diagnosis.reason.startswith("tokenizer:")
    byte_level().save_pretrained(folder)
    assert found(diagnose(folder), "anchor")[0] is None  # it sets no BOS


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_folder_that_lacks_a_file(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    diagnosis = diagnose(folder)
    assert [check.name for check in diagnosis.checks] == ["files"]
    assert not diagnosis.blendable


@pytest.mark.parametrize(
    ("file", "content", "check"),
    [
        ("config.json", "{", "config"),
        ("config.json", '{"model_type": "no_such_model"}', "config"),
        ("config.json", '{"model_type": "t5"}', "config"),
        ("model.safetensors", "not weights", "weights"),
    ],
)
def test_a_folder_that_cannot_be_read(folder: Path, file: str, content: str, check: str) -> None:
    (folder / file).write_text(content)
    diagnosis = diagnose(folder)
    assert diagnosis.reason.startswith(f"{check}:")
    assert found(diagnosis, check)[0] is False
