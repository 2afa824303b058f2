"""The weights that are named are the weights that run: replaced, incomplete and damaged files, and models by name."""

import json
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError, ModelChangedError, ModelOverflowError
from cacheblend.core.load.capture import CapturedChunk
from cacheblend.engines import fingerprint
from cacheblend.engines.folders import model_folder
from cacheblend.engines.hf import BlendEngine, model_loader, warmup
from cacheblend.nano import model_path
from cacheblend.serve.app import create_app
from cacheblend.serve.settings import ServeSettings
from small_llama import PARTS, PASSAGES

LONG_AGO = 1_577_836_800
SHORT: Any = [PASSAGES[0], " What?"]


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are noted at once, so that every engine could be given a stale one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "SETTLED_S", -1.0)


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return shutil.copytree(built, tmp_path / "tiny-llama")


def error_of(engine: BlendEngine) -> tuple[float, int]:
    """Of a blended prompt's logits against the model's own forward, relative; and the tokens that were loaded."""
    prompt = engine.prompt(SHORT)
    result = engine.prefill(prompt)
    with torch.no_grad():
        wanted = engine.model(input_ids=engine.runtime.ids_of(prompt)[None]).logits[0, -1]
    error = float((result.logits - wanted).norm() / wanted.norm())
    return error, sum(result.report.hit_tokens.values())


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Sets tensors of a folder's weights, or takes them out."""
    file = folder / "model.safetensors"
    held = load_file(file) | {name.replace("__", "."): value for name, value in changes.items() if value is not None}
    gone = [name.replace("__", ".") for name, value in changes.items() if value is None]
    save_file({name: value.clone() for name, value in held.items() if name not in gone}, file, {"format": "pt"})


def test_nothing_of_a_model_that_was_replaced_is_served(folder: Path, tmp_path: Path) -> None:
    """With the same path, size, time of writing and inode: a second model copied over the first."""
    second = shutil.copytree(folder, tmp_path / "second")
    up = load_file(second / "model.safetensors")
    edit(second, **{name: value.roll(1, 0) + 0.01 for name, value in up.items() if "proj" in name})
    for each in (folder, second):
        os.utime(each / "model.safetensors", (LONG_AGO, LONG_AGO))
    names = set()
    for source in (None, second):
        if source is not None:
            before = (folder / "model.safetensors").stat()
            shutil.copytree(source, folder, dirs_exist_ok=True)
            after = (folder / "model.safetensors").stat()
            assert all(getattr(before, each) == getattr(after, each) for each in ("st_size", "st_mtime_ns", "st_ino"))
        with BlendEngine.from_pretrained(folder, store=tmp_path / "kv") as engine:
            error, loaded = error_of(engine)
            assert loaded == 0 and error < 1e-5
            engine.warm(PASSAGES[:1])
            error, loaded = error_of(engine)
            assert loaded > 0 and error < 1e-5
            names.add(engine.fingerprint)
    assert len(names) == 2


def test_a_running_engine_keeps_its_weights_whatever_is_written_to_their_file(folder: Path) -> None:
    """transformers maps the file: a write in its place changed the weights under the model, and their KV's name not."""
    with BlendEngine.from_pretrained(folder, store="memory") as engine:
        prompt = engine.prompt(PARTS)
        before = engine.prefill(prompt).logits
        file = folder / "model.safetensors"
        content = file.read_bytes()
        with file.open("r+b") as stream:
            stream.seek(len(content) // 4)
            stream.write(bytes(len(content) // 2))
        assert torch.equal(engine.prefill(prompt).logits, before)
        os.truncate(file, 100)
        assert torch.equal(engine.prefill(prompt).logits, before)


def test_files_that_change_while_they_are_opened_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = model_loader.read_weights

    def late(*args: Any, **options: Any) -> Any:
        edit(folder, model__norm__weight=load_file(folder / "model.safetensors")["model.norm.weight"] + 1)
        return reads(*args, **options)

    monkeypatch.setattr(model_loader, "read_weights", late)
    with pytest.raises(InvalidInputError, match="were changed while the model was opened from them; open it again"):
        BlendEngine.from_pretrained(folder)


def test_tensors_that_are_not_used_are_a_warning_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(folder, **{f"extra__{i}": torch.ones(3) for i in range(5)})
    with caplog.at_level(logging.WARNING, "cacheblend"), BlendEngine.from_pretrained(folder, store="memory"):
        pass
    [line] = [record.getMessage() for record in caplog.records if record.name.startswith("cacheblend")]
    assert line.endswith("does not use: extra.0, extra.1, extra.2 and 2 more tensors")


def test_load_options_that_leave_the_weights_alone_keep_names_and_profile() -> None:
    folder = model_path()
    with BlendEngine.from_pretrained(folder, store="memory") as engine:
        plain, root = engine.fingerprint, engine.runtime.planner.root
    kept: tuple[dict[str, Any], ...] = (
        {"trust_remote_code": True, "low_cpu_mem_usage": True, "use_safetensors": True},
        {"torch_dtype": torch.bfloat16, "output_loading_info": True},
        {"dtype": "bfloat16", "attn_implementation": "eager", "local_files_only": True, "revision": "main"},
    )
    for options in kept:
        with BlendEngine.from_pretrained(folder, store="memory", **options) as engine:
            assert (engine.fingerprint, engine.runtime.planner.root) == (plain, root), options
            assert engine.runtime.settings.profile is not None, options
    turned = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    with BlendEngine.from_pretrained(folder, store="memory", rope_parameters=turned) as engine:
        assert (
            engine.fingerprint != plain
            and engine.runtime.planner.root != root
            and engine.runtime.settings.profile is None
        )


def test_device_map_says_where_the_model_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without accelerate transformers refuses it, so its place is taken here."""
    given: list[Any] = []
    reads = model_loader.read_weights

    def read(*args: Any, device_map: Any = None, **options: Any) -> Any:
        given.append(device_map)
        return reads(*args, **options)

    monkeypatch.setattr(model_loader, "read_weights", read)
    monkeypatch.setattr(LlamaForCausalLM, "to", lambda *_: pytest.fail("it was moved"))
    with BlendEngine.from_pretrained(folder, store="memory", device_map="auto") as engine:
        assert engine.model.device.type == "cpu" and given == ["auto"]


def test_weights_that_are_handed_over_are_part_of_the_name(folder: Path) -> None:
    """In memory, or in a file of llama.cpp."""
    held = load_file(folder / "model.safetensors")
    plain = fingerprint.fingerprint_folder(folder)
    one = fingerprint.fingerprint_folder(folder, {"state_dict": held})
    assert one == fingerprint.fingerprint_folder(folder, {"state_dict": dict(reversed(held.items()))}) != plain
    held["model.embed_tokens.weight"][200, 30] += 1  # in the middle, which no repr shows
    assert fingerprint.fingerprint_folder(folder, {"state_dict": held}) != one
    (folder / "w.gguf").write_bytes(bytes(5000))
    before = model_loader._changing(folder, {"gguf_file": "w.gguf"})
    (folder / "w.gguf").write_bytes(bytes(4999) + b"1")
    assert model_loader._changing(folder, {"gguf_file": "w.gguf"}) != before
    with pytest.raises(InvalidInputError, match=r"there is no file other\.gguf in .*; give gguf_file a path"):
        model_loader._changing(folder, {"gguf_file": "other.gguf"})


def test_nano_opens_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with BlendEngine.from_pretrained("nano", store="memory") as engine:
        assert engine.name == "nano" and engine.runtime.settings.profile is not None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nano").mkdir()  # a folder of that name counts
    with pytest.raises(InvalidInputError, match="nano is no model folder"):
        BlendEngine.from_pretrained("nano")


def snapshot(hub: Path, folder: Path, name: str) -> Path:
    """A folder as the hub's cache holds it: files that are links to blobs."""
    kept = hub / f"models--{name.replace('/', '--')}"
    held = kept / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    for place in (held, kept / "refs", kept / "blobs"):
        place.mkdir(parents=True)
    (kept / "refs" / "main").write_text(held.name)
    # What the repository has, of which whoever loads a model fetches a part.
    names = ["README.md", "original/consolidated.pth", *(file.name for file in folder.iterdir())]
    listed = {name: {"size": 1, "blob_id": "0" * 40} for name in names}
    (kept / "trees").mkdir()
    (kept / "trees" / f"{held.name}.json").write_text(json.dumps({"format_version": 1, "files": listed}))
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy2(file, kept / "blobs" / f"{number}")
        (held / file.name).symlink_to(Path("../../blobs") / f"{number}")
    return held


def test_a_snapshot_in_the_hubs_cache_opens_by_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = tmp_path / "hub"
    held = snapshot(hub, folder, "org/tiny-llama")
    with BlendEngine.from_pretrained("org/tiny-llama", store=tmp_path / "kv", cache_dir=hub) as engine:
        assert engine.name == "tiny-llama"
        engine.warm(PASSAGES[:1])
        named = engine.fingerprint
    for path in (held, folder):  # the same weights elsewhere have the same names
        with BlendEngine.from_pretrained(path, store=tmp_path / "kv") as engine:
            assert engine.fingerprint == named and engine.name == "tiny-llama"
            assert error_of(engine)[1] > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/other", "no snapshot of a model of that name on this machine; download it with `hf download org/other`"),
        ("./other", r"is no folder; a model is a folder with config\.json and weights, nano, or a name on the hub"),
        ("a/b/c", "a/b/c is no folder"),
    ],
)
def test_a_name_that_is_not_there_says_how_to_get_it(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=message):
        model_folder(name)
    with pytest.raises(InvalidInputError, match=f"hf download {name} --cache-dir .*hub`|is no folder; a model is"):
        BlendEngine.from_pretrained(name, cache_dir=tmp_path / "hub")


def train(model: Any, at: int) -> None:
    with torch.no_grad():
        list(model.parameters())[at].mul_(1.5)


def write_data(model: Any, at: int) -> None:
    for weight in model.parameters():
        weight.data.mul_(1.1)


def replace_layer(model: Any, at: int) -> None:
    layer = model.model.layers[at % 4].self_attn
    layer.v_proj.weight = torch.nn.Parameter(layer.v_proj.weight.detach().flip(0).clone())


def test_weights_that_are_written_to_in_memory_are_named_by_what_they_hold(built: Path, tmp_path: Path) -> None:
    """At random, between the calls of a running engine and of one around a model that was handed over."""
    draws, names = random.Random(3), list[str]()
    options: dict[str, Any] = {"store": tmp_path / "kv", "config": BlendConfig(block_size=8)}
    model, tokenizer = LlamaForCausalLM.from_pretrained(built).eval(), AutoTokenizer.from_pretrained(built)
    for opens in (BlendEngine.from_pretrained, lambda _, **given: BlendEngine(model, tokenizer, **given)):
        with opens(built, **options) as engine:
            for _ in range(6):
                error, loaded = error_of(engine)
                assert loaded == 0 and error < 1e-5  # nothing that other weights computed
                names.append(engine.runtime.planner.root)
                assert engine.warm(PASSAGES[:1]).stored == 1
                error, loaded = error_of(engine)
                assert loaded > 0 and error < 1e-5
                draws.choice((train, write_data, replace_layer))(engine.model, draws.randrange(20))
    assert len(set(names)) == len(names)


def test_a_model_that_changes_while_passages_are_computed_or_is_cast(built: Path) -> None:
    with BlendEngine.from_pretrained(built, store="memory") as engine:
        hook = engine.model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: train(engine.model, 3))
        with pytest.raises(ModelChangedError, match="weights or adapters were changed while passages were computed"):
            engine.warm(PASSAGES[:1])
        hook.remove()
        assert not engine.store.manifests()
        engine.model.to(torch.bfloat16)
        with pytest.raises(ModelChangedError, match=r"KV is of torch\.bfloat16 now.*open another one on it"):
            engine.generate(SHORT)


def test_kv_of_a_lower_precision_of_float32_is_another_models(built: Path, tmp_path: Path) -> None:
    try:
        with BlendEngine.from_pretrained(built, store=tmp_path / "kv") as engine:
            torch.set_float32_matmul_precision("high")
            engine.warm(PASSAGES[:1])
            assert error_of(engine)[1] > 0
            torch.set_float32_matmul_precision("highest")
            assert error_of(engine)[1] == 0
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.may_fail("request")
@pytest.mark.parametrize("coding", ["raw", "int8"])
def test_infinities_and_nan_are_neither_answered_nor_stored(folder: Path, coding: str) -> None:
    """As of a model in float16 that exceeds it behind some token: a prompt with that token is refused, by greedy
    decoding and by sampling, and nothing of its passage is stored; others are answered as before."""
    config = BlendConfig(codec=coding)
    with BlendEngine.from_pretrained(folder, store="memory", config=config) as engine:
        sound = engine.generate([PASSAGES[1], " What?"], max_new_tokens=4, ignore_eos=True).token_ids
        assert engine.flush(60)  # what it missed is captured, as it is
        bad, good = (set(engine.runtime.ids_of(engine.prompt([each])).tolist()) for each in PASSAGES[:2])
    rows = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    rows[min(bad - good)] = float("inf")
    edit(folder, model__embed_tokens__weight=rows)
    with BlendEngine.from_pretrained(folder, store="memory", config=config) as engine:
        with pytest.raises(ModelOverflowError, match=r"NaN is not stored.* the range of float32"):
            engine.warm(PASSAGES[:1])
        for options in ({}, {"temperature": 1.0, "top_p": 0.9}, {"logit_bias": [(5, 1.0)]}):
            with pytest.raises(ModelOverflowError, match=r"logits behind token \d+ have infinities or NaN"):
                engine.generate(SHORT, max_new_tokens=4, **options)
        assert engine.flush(60) and not engine.store.manifests()
        with TestClient(create_app(engine, ServeSettings())) as client:
            for asked in ({}, {"logprobs": 2}, {"temperature": 1.0}):
                refused = client.post("/v1/completions", json={"prompt": PASSAGES[0].text, "max_tokens": 2, **asked})
                error = refused.json()["error"]
                assert (refused.status_code, error["type"], error["code"]) == (500, "server_error", "model_overflow")
            bodies = [
                {"prompt": PASSAGES[number % 2].text, "max_tokens": 4, "temperature": 0, "stream": number == 2}
                for number in range(8)
            ]
            with ThreadPoolExecutor(8) as threads:  # side by side, so that rows of both share products
                answers = [*threads.map(lambda body: client.post("/v1/completions", json=body), bodies)]
            assert [answer.status_code for answer in answers[1::2]] == [200] * 4
            assert len({answer.json()["choices"][0]["text"] for answer in answers[1::2]}) == 1
            assert [answer.status_code for answer in (*answers[:2:2], *answers[4::2])] == [500] * 3
            assert "model_overflow" in answers[2].text and answers[2].status_code in (200, 500)
        assert engine.generate([PASSAGES[1], " What?"], max_new_tokens=4, ignore_eos=True).token_ids == sound


def test_stored_kv_that_is_no_number_is_told_and_harms_no_other_prompt(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As stores have it that were filled before this was refused."""
    with BlendEngine.from_pretrained(folder, store="memory") as engine:
        sound = engine.generate([PASSAGES[1], " What?"], max_new_tokens=4, ignore_eos=True).token_ids
        assert engine.flush(60)  # what it missed is captured, as it is
        with monkeypatch.context() as before:
            before.setattr(warmup, "compute_chunks", partial(_no_numbers, warmup.compute_chunks))
            engine.warm(PASSAGES[:1])
        with pytest.raises(ModelOverflowError, match="another store"):
            engine.generate(SHORT, max_new_tokens=4)
        assert engine.generate([PASSAGES[1], " What?"], max_new_tokens=4, ignore_eos=True).token_ids == sound


def _no_numbers(compute: Callable[..., Iterator[CapturedChunk]], *args: Any) -> Iterator[CapturedChunk]:
    for captured in compute(*args):
        for record in captured.blocks[-1].records:  # those in front of it are the anchor's, of all chunks
            record.fill_(float("nan"))
        yield captured


@pytest.mark.may_fail("ModelOverflowError")
def test_a_prompt_whose_kv_is_partly_no_number_is_not_stored(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As where sliding windows keep it from the last token, so that an answer can be drawn."""
    config = BlendConfig(discover=False, block_size=8)
    with BlendEngine.from_pretrained(folder, store="memory", config=config) as engine:
        result = engine.prefill(engine.prompt(["What is stored at any position of a prompt? ", PASSAGES[0]]))
        result.kv[1].keys[0, 2, 0] = float("nan")
        engine.runtime.store_missed(result)
        bos, *text = [span.name for span in result.plan.publishable]
        assert engine.flush(60) and text and engine.store.find(text) == [None] * len(text)
        assert engine.store.find([bos]) != [None] and engine.store.manifests()  # of the passage, computed alone
    assert "own text is not stored: KV with infinities or NaN" in caplog.text
