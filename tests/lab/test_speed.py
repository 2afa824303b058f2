"""What measures prefills and stores, and other ways to reuse KV: what is written, not how good or fast anything is."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cacheblend.bench import ttft
from cacheblend.core.plan.codec import CODECS
from cacheblend.core.plan.prompt import chunk
from cacheblend.nano import model_path
from command_line import Run, runner
from lab.cli import main
from lab.settings import Peers
from lab.speed import core, memory, peers, plan
from lab.speed.peers import MOST_KEPT, Request, TransformersPrefix, shuffled
from random_words import text_of
from redis_server import needs_redis, redis_server


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(capsys, main=main)


def test_codecs_are_compared_on_the_model_that_ships(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "codecs.json"
    done = run("codecs", "--limit", 1, "--json-file", out)
    assert done.code == 0, done.err
    result = json.loads(out.read_text())
    assert [(line["how"], line["codec"]) for line in result["arms"]] == [
        (how, codec) for how in ("blend", "reuse") for codec in CODECS
    ]
    assert result["arms"][0]["same_answer"] == 100
    assert set(result["figures"]) == {f"{codec}_top_1" for codec in CODECS if codec != "raw"}
    assert {"machine", "versions", "commit"} < result.keys()


def test_core_holds_every_figure_to_its_bar(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def arms(settings: ttft.TtftSettings) -> dict[str, object]:
        found = [{"arm": "full", "ratio": None, "store": None}, {"arm": "miss", "ratio": None, "store": None}]
        found += [{"arm": "blend", "ratio": r, "store": s} for r in settings.ratios for s in ("memory", "disk")]
        seconds = {"full": 6.0, "miss": 7.0, "blend": 1.0}
        return {"arms": [a | {"ttft_s": {"median": seconds[str(a["arm"])]}, "speedup_vs_full": 6.0} for a in found]}

    monkeypatch.setattr(ttft, "run", arms)
    monkeypatch.setattr(plan, "run", lambda **_: {"plan_s": {"median": 0.01}})
    monkeypatch.setattr(memory, "run", lambda _: {"excess_over_kv": 2.0})
    steps: list[tuple[int, int]] = []
    result = core.run(ttft.TtftSettings(shape="tiny"), lambda *step: steps.append(step))
    assert steps == [(n, core.PARTS) for n in range(1, core.PARTS + 1)]
    reached = {figure["what"]: figure["reached"] for figure in result["figures"]}
    assert reached["full / blend, r = 0.15"] and not reached["full / blend, r = 0.05"]
    assert not reached["all miss / full"] and not reached["(peak of blend - peak of full) / KV cache"]
    shown = run("core", "--shape", "tiny")
    assert shown.code == 0 and "NO" in shown.out and "6/6" in shown.err


TINY = ("--shape", "tiny", "--chunk-tokens", 64, "--runs", 1)


@needs_redis
def test_load_writes_every_figure(run: Run, tmp_path: Path) -> None:
    with redis_server() as server:
        out = tmp_path / "load.json"
        options = ("--chunks", 3, "--folder", tmp_path, "--redis", server.url, "--json-file", out)
        done = run("load", *TINY, *options)
    assert done.code == 0, done.err
    figures = json.loads(out.read_text())["figures"]
    names = {"pipelined_over_max", "serial_over_max", "redis_read_share"}
    names |= {f"{codec}_bytes" for codec in ("int8", "fp8", "int4")}
    names |= {f"{way}_read_share" for way in ("disk", "cold")}
    assert set(figures) == names
    assert figures["int8_bytes"] <= 0.53 and figures["int4_bytes"] <= 0.3
    assert "redis_read_share: " in done.out and "3/3" in done.err
    assert list(tmp_path.iterdir()) == [out]  # nothing is left on the disk


@pytest.mark.slow
def test_controller_writes_a_grid(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A device is throttled to ten times a prefill's time: where bfloat16 is emulated, that takes minutes.
    monkeypatch.setattr(ttft, "build_shape", partial(ttft.build_shape, dtype=torch.float32))
    out = tmp_path / "controller.json"
    done = run("controller", *TINY, "--chunk-tokens", 16, "--chunks", 2, "--chunks", 5, "--json-file", out)
    assert done.code == 0, done.err
    result = json.loads(out.read_text())
    assert len(result["cells"]) == 20
    assert set(result["figures"]) == {"controller_worst", "slow_device_over_full"}
    assert all(cell["reason"] for cell in result["cells"])
    assert [cell["load_over_prefill"] for cell in result["cells"][::2]] == [0.1, 0.3, 1.0, 3.0, 10.0] * 2
    assert [cell["behind_memory"] for cell in result["cells"]] == [False, True] * 10
    arms = [set(cell["seconds"]) for cell in result["cells"][:2]]
    assert arms[0] < arms[1] and any(name.startswith("memory") for name in arms[1] - arms[0])


def test_store_writes_every_figure_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    assert "size" in run("evict", "--trace", tmp_path, "--size", 2).err
    assert "name a model folder with --model, or a shape with --shape" in run("load").err
    out = tmp_path / "store.json"
    done = run("store", "--blocks", 40, "--folder", tmp_path, "--json-file", out)
    assert done.code == 0, done.err
    result = json.loads(out.read_text())
    assert set(result["figures"]) == {"lookup_us", "open_s", "bytes_per_block"}
    assert len(result["first_s"]) == len(result["again_s"]) == 40
    assert list(tmp_path.iterdir()) == [out]


def test_sync_counts_what_is_computed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = tmp_path / "passages.txt"
    data.write_text("\n\n".join(text_of(seed, 12) for seed in range(80)))
    bench = runner(capsys, "sync", "--model", str(model_path()), "--data", str(data), "--json", main=main)
    found = bench("--documents", 9, "--tokens", 400, "--chunk-tokens", 64, "--json-file", tmp_path / "out.json").json
    assert 0 < found["figures"]["sync_recomputed"] < 0.6
    assert found["without_edits"]["computed_tokens"] == 0 and len(found["by_edit"]) == 9
    assert json.loads((tmp_path / "out.json").read_text())["figures"] == found["figures"]
    assert "documents of 400 tokens, 900 are needed" in bench("--documents", 900, "--tokens", 400).json["error"]


# ---- peers ----------------------------------------------------------------------------------------------------------


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


def test_a_way_is_named_where_it_is_missing_or_stops(folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is not installed is skipped
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

    # What stops is named and left out
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


def test_a_broken_package_is_told_from_a_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_prefix_cache_is_exact_on_requests_of_the_same_passages(folder: Path) -> None:
    # The prefix cache is exact
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
    # Requests have the same passages
    asked = _requests(6)
    passages = [{passage.token_ids.tobytes() for passage in request.passages} for request in asked]
    assert all(each == passages[0] for each in passages)
    assert len({tuple(request.ids) for request in asked}) == 6
    turned = asked[0].ordered([3, 2, 1, 0])
    assert sorted(turned.ids) == sorted(asked[0].ids) and turned.ids != asked[0].ids
