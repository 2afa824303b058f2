"""LoRA adapters behind vLLM's OpenAI server: loaded at its start and while it serves, replaced in place, missing."""

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.servers.vllm_server import NAME, Server, ServerSettings, serving
from vllm_adapters import make_adapter
from vllm_running import Texts


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    for seed, name in enumerate("abc", 1):
        make_adapter(folder / name, seed)
    return folder


@pytest.fixture(scope="module")
def server(models: dict[str, Path], root: Path) -> Iterator[Server]:
    extra = {
        "allow_untested_version": True,
        "store": f"file://{root}/store",
        "recompute_ratio": 1.0,
        "refresh_s": 0,
        "controller": False,
        "lookup_timeout_s": 30.0,
    }
    options = ["--enforce-eager", "--skip-tokenizer-init", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
    options += ["--lora-modules", f"first={root}/a"]
    settings = ServerSettings(models["llama"], extra, 2048, 256, "float32", tuple(options))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
        with serving(settings) as running:
            yield running


def post(server: Server, path: str, **body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{server.url}/v1/{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request) as response:
            said = response.read().decode()
            return response.status, json.loads(said) if said.startswith("{") else said
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def ask(server: Server, model: str, ids: list[int], spans: Any) -> tuple[list[int], dict[str, Any]]:
    """The answer's tokens, and what the plug-in says of it."""
    params = {"kv_transfer_params": {"cacheblend": {"chunks": spans}}}
    told = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True, "detokenize": False}
    status, answer = post(server, "completions", model=model, prompt=ids, **params, **told)
    assert status == 200, answer
    return answer["choices"][0]["token_ids"], answer["kv_transfer_params"]["cacheblend"]


def load(server: Server, name: str, path: Path, *, inplace: bool = False) -> int:
    body = {"lora_name": name, "lora_path": str(path), "load_inplace": inplace}
    return post(server, "load_lora_adapter", **body)[0]


def test_adapters_come_change_and_go(server: Server, root: Path) -> None:
    texts = Texts(41)
    passages = texts.passages(4)

    def learn_and_blend(model: str, front: int) -> list[int]:
        """Has the passages stored, then blends them; the answer of a prompt that begins with this token."""
        before = server.counted("captured_tokens")
        one = texts.prompt(texts.rng.sample(passages, 4))
        ask(server, model, one.ids, one.spans)
        if server.counted("captured_tokens") == before:
            server.wait_for_captures(int(before) + sum(map(len, passages)), 0.0)
        return asked(model, front)

    def asked(model: str, front: int) -> list[int]:
        """Blended, and as the server computes it alone."""
        ids = [front, *fixed.ids]
        spans = [[start + 1, stop + 1] for start, stop in fixed.spans]
        found, said = ask(server, model, ids, spans)
        assert said["blended"], said
        ids[0] = next(fresh)  # nothing is shared with what was asked before, also of other weights from the same path
        again, said = ask(server, model, ids, spans)
        alone, told = ask(server, model, ids, [])
        assert said["blended"] and not told["blended"]
        assert again == alone
        return found

    fixed, fresh = texts.prompt(passages), iter(range(1000, 2000))
    base = learn_and_blend(NAME, 20)
    first = learn_and_blend("first", 20)
    assert load(server, "second", root / "missing") == 404
    assert server.is_up()
    assert load(server, "second", root / "b") == 200
    second = learn_and_blend("second", 20)
    assert load(server, "second", root / "c", inplace=True) == 200
    third = learn_and_blend("second", 20)
    assert len({tuple(each) for each in (base, first, second, third)}) == 4
    assert load(server, "second", root / "b", inplace=True) == 200
    captured = server.counted("captured_tokens")
    assert asked("second", 20) == second  # what was stored with these weights
    assert server.counted("captured_tokens") == captured
    shutil.rmtree(root / "a")
    assert asked("first", 21) == asked("first", 21)  # vLLM holds it
    assert asked(NAME, 20) == base
    assert server.counted("fallbacks") == 0
