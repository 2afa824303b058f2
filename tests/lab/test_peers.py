"""Other ways to reuse KV beside blending: equal requests, exact where they say so, skipped where not installed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cacheblend.core.plan.prompt import chunk
from cacheblend.nano import model_path
from lab.settings import Peers
from lab.speed import peers
from lab.speed.peers import MOST_KEPT, Request, TransformersPrefix, shuffled

VOCAB = 3100  # at least as many as the tokenizer that ships


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=1, max_position_embeddings=512, **sizes)
    path = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(model_path()).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "passages.json"
    path.write_text(json.dumps([{"text": " ".join(f"word{n}x{m}" for m in range(40))} for n in range(8)]))
    return path


def _bench(folder: Path, data: Path) -> Peers:
    return Peers(data=data, model=folder, chunks=3, chunk_tokens=20, question_tokens=6, runs=2)


def _requests(count: int) -> list[Request]:
    return shuffled([chunk([n * 7 + m for m in range(7)]) for n in range(4)], count, 5, VOCAB, 1)


def _missing(name: str) -> Any:
    raise peers.NotInstalledError(f"{name} is not installed: pip install {name}")


def test_what_is_not_installed_is_skipped(folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "required", _missing)
    found = peers.run(_bench(folder, data))
    assert set(found["skipped"]) == {"kvboost", "kvboost, chunks of 2", "contextpilot"}
    assert set(found["figures"]) == {
        "full prefill", "transformers' prefix cache", "cacheblend, r = 0.15", "cacheblend, r = 0.05",
    }  # fmt: skip
    assert {len(rows) for rows in found["requests"].values()} == {2}
    assert all(row["same_prompt"] for rows in found["requests"].values() for row in rows)
    assert found["figures"]["full prefill"]["kl"] == found["figures"]["full prefill"]["reused"] == 0
    assert found["figures"]["cacheblend, r = 0.15"]["reused"] > 0.5
    assert "pip install contextpilot" in peers.table(found)


def test_what_stops_is_named_and_left_out(folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def __init__(self, model: Any, tokenizer: Any, **settings: Any) -> None:
            self.asked = 0

        def generate(self, prompt: str, *, max_new_tokens: int, on_token: Any) -> Any:
            self.asked += 1
            if self.asked == 2:
                raise ZeroDivisionError("of its own")
            on_token(1)
            return SimpleNamespace(first_token_logits=np.zeros(VOCAB, np.float32), cached_tokens=4)

    class Pilot:
        def __init__(self, use_gpu: bool) -> None: ...

        def reorder(self, contexts: list[list[int]]) -> Any:
            print("it prints")
            return [sorted(context) for context in contexts], [0]

    packages = {"kvboost": SimpleNamespace(KVBoost=Engine), "contextpilot": SimpleNamespace(ContextPilot=Pilot)}
    monkeypatch.setattr(peers, "required", packages.__getitem__)
    monkeypatch.setattr(peers, "version", lambda name: "0")
    found = peers.run(_bench(folder, data))
    assert "ZeroDivisionError: of its own" in found["skipped"]["kvboost"] and "kvboost" not in found["figures"]
    piloted = found["requests"]["contextpilot"]
    assert all(row["reused"] >= 6 + 3 * 20 for row in piloted), "the same order each time: all but the question"
    assert not all(row["same_prompt"] for row in piloted)


def test_a_package_that_is_broken_is_told_from_one_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks_on_import.py").write_text("raise OSError('no such library')")
    (tmp_path / "needs_another.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, why in {
        "breaks_on_import": "cannot be imported: no such library",
        "needs_another": "needs not_there_at_all",
        "not_there": "pip install not_there",
    }.items():
        with pytest.raises(peers.NotInstalledError, match=why):
            peers.required(name)


def test_the_prefix_cache_is_exact(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    way = TransformersPrefix(model)
    asked = _requests(MOST_KEPT + 4)
    for request in [*asked, *asked[::-1]]:
        got = way.first(request)
        with torch.no_grad():
            full = model(torch.tensor([request.ids])).logits[0, -1]
        torch.testing.assert_close(got.logits, full, atol=1e-5, rtol=1e-4)
        assert 0 <= got.reused < len(request.ids)
    assert way.first(asked[0]).reused == len(asked[0].ids) - 1, "the same prompt again: all but one token"


def test_requests_have_the_same_passages() -> None:
    asked = _requests(6)
    passages = [{passage.token_ids.tobytes() for passage in request.passages} for request in asked]
    assert all(each == passages[0] for each in passages)
    assert len({tuple(request.ids) for request in asked}) == 6
    turned = asked[0].ordered([3, 2, 1, 0])
    assert sorted(turned.ids) == sorted(asked[0].ids) and turned.ids != asked[0].ids
