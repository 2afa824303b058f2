"""A model folder with latent attention: doctor, plan, a server on a store that an earlier one filled."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from transformers import AutoConfig, AutoModelForCausalLM

from cacheblend.core.config import BlendConfig
from cacheblend.engines.hf import BlendEngine
from cacheblend.serve.app import create_app
from cacheblend.serve.settings import ServeSettings
from command_line import Run, runner
from families import GROUPED_MOE, LATENT, SMALL
from tokenizers_for_tests import CORPUS, sentencepiece


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys)


def config_of(model_type: str, **changes: Any) -> Any:
    return AutoConfig.for_model(model_type, **{**SMALL, **LATENT, **GROUPED_MOE, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, tokenizer = tmp_path_factory.mktemp("models") / "latent", sentencepiece()
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of("deepseek_v3", vocab_size=len(tokenizer)))
    for parameter in model.parameters():
        parameter.data *= 3 if parameter.dim() > 1 else 1
    model.save_pretrained(path)
    return path


def messages(*passages: str) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": text} for text in (*passages, "Who wrote it?")]
    return [{"role": "user", "content": parts}]


PASSAGES = [f"{number}. {' '.join(CORPUS[number:] + CORPUS[:number])}" for number in range(3)]


def test_doctor_says_what_is_kept_and_refuses_sparse_attention_by_name(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("doctor", "--model", folder)
    words = " ".join(result.out.split())
    assert result.code == 0, result.out + result.err
    assert "4 layers: a latent of 16 and a rotated key part of 8, float32: 384 bytes a token" in words
    assert "4 layers keep latents, 18.8% of their keys and values expanded" in words
    assert "half pairing, 8 of 24 dims" in words
    # the weights of the other one are not read
    config_of("deepseek_v32").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    result = run("doctor", "--model", tmp_path)
    words = " ".join((result.out + result.err).split())
    assert result.code != 0
    assert "deepseek_v32 attends sparsely: an indexer selects the 2048 tokens" in words
    assert "serve it without blending" in words


def test_plan_counts_the_bytes_of_latents(run: Run, tmp_path: Path) -> None:
    """DeepSeek-V3's shape, from its config.json alone."""
    AutoConfig.for_model("deepseek_v3", dtype="bfloat16").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    result = run("plan", "--model", tmp_path, "--prefill-s", "3", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["bytes_per_token"] == 61 * (512 + 64) * 2


def ask(web: TestClient, *passages: str, **extra: Any) -> dict[str, Any]:
    body = {"model": "latent", "messages": messages(*passages), "max_tokens": 6, "temperature": 0, "cacheblend": extra}
    answer = web.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("codec", ["raw", "int4"])
def test_a_server_blends_what_an_earlier_one_stored(folder: Path, tmp_path: Path, codec: str) -> None:
    """Several requests at once; then, in another process's place, the same store in another order of passages."""
    config = BlendConfig(codec=codec, block_size=16)
    for round_ in range(2):
        with BlendEngine.from_pretrained(folder, store=tmp_path / "store", config=config) as engine:
            engine.name = "latent"
            with TestClient(create_app(engine, ServeSettings(chunk_tokens=16))) as web:
                order = PASSAGES if round_ == 0 else PASSAGES[::-1]
                with ThreadPoolExecutor(3) as pool:
                    answers = list(
                        pool.map(lambda _, order=order, web=web: ask(web, *order, recompute_ratio=1.0), range(3))
                    )
                full = ask(web, *order, mode="full")["choices"][0]["message"]["content"]
                assert {each["choices"][0]["message"]["content"] for each in answers} == {full}
                if round_:
                    assert all(each["cacheblend"]["missed_tokens"] == 0 for each in answers)
                    blended = ask(web, *order, recompute_ratio=0.2)["cacheblend"]
                    assert 0 < blended["recomputed_tokens"] < sum(blended["hit_tokens"].values())
                    body = {"model": "latent", "messages": messages(*order), "max_tokens": 2}
                    wrong = web.post("/v1/chat/completions", json={**body, "cacheblend": {"recompute_ratio": 2}})
                    assert wrong.status_code == 400
                assert engine.flush(timeout=60)
