"""What a connector is told and says: settings in this project's form and in UCM's, a request's chunks and options,
versions that are refused, the table of what runs, and the memory of blending.
"""

import json
import logging
import re
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import as_token_ids, block_name, root_name
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.chunk_matches import ChunkIndex
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.core.select.question_selectors import Query
from cacheblend.core.select.selectors import Head, Hkvd
from cacheblend.engines.chunk_index import with_matches
from cacheblend.engines.settings import BlendSettings
from cacheblend.engines.vllm.config import ConnectorConfig, read_config
from cacheblend.engines.vllm.scheduler.options import RequestOptions, named_chunks, read_options
from cacheblend.engines.vllm.versions import TESTED, check_version, explained_imports
from cacheblend.engines.vllm.workspace import COPIED, ModelSizes, attention_bytes, workspace_of
from vllm_table import FAILS, NOT_RUN, REFUSED, RESULTS, merge, verdicts

END = 9
PROMPT = [5, 6, END, 7, END, 8, 8]


def ucm(**blend: Any) -> dict[str, Any]:
    return {"ucm_sparse_config": {"Blend": blend}}


def ucm_store(**config: Any) -> dict[str, Any]:
    return {"ucm_connectors": [{"ucm_connector_name": "UcmNfsStore", "ucm_connector_config": config}]}


UCM_STORE = ucm_store(storage_backends="/mnt/kv", use_direct=False)


def test_the_connectors_settings_are_read_in_this_projects_form_and_in_ucms() -> None:
    nothing = read_config({})
    assert nothing == ConnectorConfig({}, "memory") and nothing.blend == BlendConfig(), (
        "the profile decides, or defaults"
    )
    assert nothing.shadow_settings is None and read_config({"shadow": 0}).shadow_settings is None
    assert nothing.workspace_bytes is None and read_config({"workspace_bytes": 0}).workspace_bytes == 0
    shadow = read_config({"shadow": 0.02, "shadow_floor": 0.95}).shadow_settings
    assert shadow is not None and (shadow.share, shadow.floor, shadow.rows) == (0.02, 0.95, 181)
    own = {
        "store": "file:///var/cache/cacheblend",
        "recompute_ratio": 0.2,
        "check_layers": [2],
        "chunk_end_token_id": 7,
    }
    found = read_config(own)
    assert found.store == "file:///var/cache/cacheblend" and found.chunk_end_token_id == 7
    assert found.blend.make_selector() == Hkvd((2,), (0.2,))
    meta = {"model.layers.1.self_attn.attn": {"ratio": 0.2}}
    found = read_config(UCM_STORE | ucm(chunk_end_token_id=1699, compute_meta=meta))
    assert found.store == "/mnt/kv" and found.chunk_end_token_id == 1699
    assert found.blend.make_selector() == Hkvd((1,), (0.2,))
    meta = {"model.layers.10.self_attn.attn": {"ratio": 0.1}, "model.layers.2.self_attn.attn": {"ratio": 0.3}}
    gradual = read_config(ucm(compute_meta=meta)).blend.make_selector()
    assert gradual == Hkvd((2, 10), (0.3, 0.1)), "several entries filter gradually, in the order of layers"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"anchor": "system"}, 'use "text", "bos" or "none"'),
        ({"workspace_bytes": -1}, "workspace_bytes must be a whole number of at least 0, got -1"),
        (ucm_store(storage_backends="/mnt/kv", use_direct="yes"), "use_direct"),
        ({"recompute_ration": 0.2}, "unknown key 'recompute_ration'; did you mean recompute_ratio"),
        ({"tile_rows": 5}, "unknown key 'tile_rows'"),
        ({"recompute_ratio": 1.5}, "0..1, got 1.5"),
        ({"store": ""}, "store must be a URL"),
        ({"chunk_end_token_id": "7"}, "chunk_end_token_id must be a whole number or None, got '7'"),
        ({"budget_row_layers": 0}, "at least 1, got 0"),
        ({"min_match_tokens": 10}, "min_match_tokens must be a whole number of at least 63"),
        *(({"refresh_s": s}, "refresh_s must be a number of seconds, 0 or more") for s in (-1, float("nan"))),
        *(({name: "no"}, f"{name} must be true or false") for name in ("match_content", "controller")),
        ({"allow_untested_version": 1}, "allow_untested_version must be true or false"),
        ({"cost_model": 5}, "cost_model must be a text or None, got 5"),
        ({"cost_model": "cost.json", "controller": False}, "cost_model 'cost.json' is for the controller"),
        ({"block_size": "big"}, "block_size must be a whole number, got 'big'"),
        ({"capture": "false"}, "capture must be true or false, got 'false'"),
        ({"salt": 5}, "salt must be a text, got 5"),
        ({"check_layers": 5}, "check_layers must be a list or tuple"),
        (UCM_STORE | {"store": "memory"}, "store is given twice"),
        ({"ucm_connectors": []}, "a list of one connector"),
        ({"ucm_connectors": [{"ucm_connector_name": "Other"}]}, "'Other' is not known"),
        ({"ucm_other": 1}, "unknown key 'ucm_other'"),
        ({"ucm_sparse_config": {"GSA": {}}}, "ucm_sparse_config has the unknown key 'GSA'"),
        (ucm(compute_meta={"lm_head": {"ratio": 0.1}}), "'lm_head' names no layer"),
        (ucm(compute_meta={"model.layers.1.self_attn.attn": {}}), "has no ratio"),
        (ucm(compute_meta={"model.layers.0.self_attn.attn": {"ratio": 0.1}}), "at least 1"),
        *(({"shadow": it}, f"shadow {it!r}.*above 0 and at most 1") for it in (1.5, -0.1, "much", True, False, None)),
        ({"shadow": 0.1, "shadow_floor": 1}, "shadow_floor 1:.*between 0 and 1"),
        ({"shadow": 0.1, "shadow_floor": "high"}, "shadow_floor 'high'.*must be between 0 and 1"),
        ({"shadow": 0.1, "shadow_floor": 0.99999}, r"shadow_floor 0\.99999.*lower it"),
        ({"shadow_floor": 0.9}, r"shadow_floor of 0\.9.*also give shadow, the share of the requests to compare"),
        ({"shadow": 0, "shadow_floor": 0.9}, "also give shadow"),
        ({"shadow-floor": 0.9}, "did you mean shadow_floor"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name_with_a_way_out(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_config(extra)


def parts(prompt: Prompt) -> list[tuple[bool, list[int]]]:
    return [(segment.is_chunk, segment.token_ids.tolist()) for segment in prompt.segments]


def spans(*chunks: Any) -> dict[str, Any]:
    return {"cacheblend": {"chunks": list(chunks)}}


def index_of(*chunks: list[int]) -> ChunkIndex:
    root, index = root_name("a model", "float32"), ChunkIndex()
    for ids in (np.array(each, dtype="<u4") for each in chunks):
        name = block_name(root, ids)
        index.add([ChunkManifest(name, root, ids[:0], ids, (name,), label="a title")])
    return index


def test_a_chunk_that_leaves_the_list_and_comes_back_is_found_each_time() -> None:
    ids = list(range(100, 500))
    index = index_of(ids)
    (match,) = index.match(np.array(ids, dtype="<u4"))
    for _ in range(40):
        index.remove([match.chunk.chunk_id])
        index.add([match.chunk])
        assert len(index.match(np.array(ids, dtype="<u4"))) == 1


def find_chunks(
    ids: list[int], params: Any = None, *, chunk_end_token_id: int | None = None, index: ChunkIndex | None = None
) -> Prompt:
    """By the first way that applies, as the scheduler side does."""
    tokens = as_token_ids(ids)
    found = named_chunks(tokens, read_options(params, len(tokens)).spans, chunk_end_token_id)
    return with_matches(Prompt.of([text(tokens)]), index or index_of()) if found is None else found


def test_chunks_and_settings_of_a_request() -> None:
    assert parts(find_chunks(PROMPT)) == [(False, PROMPT)], "nobody knows it"
    assert parts(find_chunks(PROMPT, {"other": 1}, index=index_of(list(range(100))))) == [(False, PROMPT)]
    found = find_chunks(PROMPT, spans([1, 3], (3, 5)), chunk_end_token_id=END, index=index_of())
    assert parts(found) == [(False, [5]), (True, [6, END]), (True, [7, END]), (False, [8, 8])]
    assert parts(find_chunks(PROMPT, spans(), chunk_end_token_id=END)) == [(False, PROMPT)]
    found = find_chunks(PROMPT, chunk_end_token_id=END)
    assert parts(found) == [(True, [5, 6, END]), (True, [7, END]), (False, [8, 8])], "the rest is the question"
    assert parts(find_chunks([5, END], chunk_end_token_id=END)) == [(True, [5, END])], "an empty question"
    assert parts(find_chunks(PROMPT, spans([0, 7]))) == [(True, PROMPT)]
    stored = list(range(100, 200))
    found = find_chunks([1, 2, *stored[3:], 3], chunk_end_token_id=END, index=index_of(stored))
    assert parts(found) == [(False, [1, 2]), (True, stored[3:]), (False, [3])]
    assert found.segments[1].offset == 3 and found.segments[1].label == "a title"
    with pytest.raises(InvalidInputError, match="empty"):
        find_chunks([])
    assert read_options(None, 7) == read_options({"other": 1}, 7) == read_options({"cacheblend": {}}, 7)  # its settings
    settings = BlendSettings(BlendConfig(check_layers=(2,)))
    default = read_options(None, 7)
    assert default == RequestOptions() and not default.sets_selection
    assert default.selector_of(settings) == settings.selector()
    given = read_options({"cacheblend": {"mode": "prefix", "recompute_ratio": 1, "selector": "head"}}, 7)
    assert (given.mode, given.selector_of(settings), given.sets_selection) == ("prefix", Head(1.0), True)
    named = read_options({"cacheblend": {"selector": "query"}}, 7)
    assert named.selector_of(BlendSettings(BlendConfig(check_layers=(2,), lead=3))) == Query(0.15)
    ratio = read_options({"cacheblend": {"recompute_ratio": 0.3}}, 7)
    assert ratio.selector_of(settings) == Hkvd((2,), (0.3,))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (spans([5, 8]), r"chunk 0 is \[5, 8\].*0\.\.7"),
        (spans([-1, 2]), "chunk 0 is"),
        (spans([2, 2]), "not empty"),
        (spans([0, 3], [2, 5]), r"\[2, 5\] begins before \[0, 3\] ends"),
        (spans([3, 5], [0, 2]), r"\[0, 2\] begins before \[3, 5\] ends"),
        *((spans(span), "two whole numbers") for span in ([0], [0, "3"], [False, True], "03")),
        ({"cacheblend": {"chunks": 3}}, "a list of"),
        ({"cacheblend": [[0, 3]]}, "must be an object"),
        ({"cacheblend": {"chunk": []}}, "unknown key 'chunk'"),
    ],
)
def test_spans_that_cannot_be_meant_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        find_chunks(PROMPT, params)


def test_untested_versions_are_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for tested in ("0.31.0", "0.31.1", "0.32.0", "0.32.2", "0.32.0+cpu", "0.32.0.post1", "0.33.0+cpu"):
        check_version(tested, allowed=False)
    others = ("0.28.0", "0.29.0", "0.30.1", "0.34.0", "0.3.2", "1.32.0", "0.320.0", "0.32.0rc1", "0.32.1.dev7", "dev")
    for found in others:
        with pytest.raises(InvalidInputError) as refused:
            check_version(found, allowed=False)
        words = str(refused.value)
        assert found in words and ", ".join(TESTED) in words and '"allow_untested_version": true' in words
        with caplog.at_level(logging.WARNING, logger="cacheblend.vllm"):
            check_version(found, allowed=True)
        assert found in caplog.records[-1].getMessage()
    import cacheblend.engines.vllm

    monkeypatch.delitem(sys.modules, "cacheblend.engines.vllm.connector", raising=False)
    for name in [name for name in sys.modules if name.startswith(("vllm.", "cacheblend.engines.vllm.internals"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.40.0"))  # whose modules are elsewhere
    with pytest.raises(InvalidInputError, match=r"tested with vLLM 0\.31, .* this is vLLM 0\.40\.0, which lacks"):
        _ = cacheblend.engines.vllm.CacheBlendConnector
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.32.0")
    with pytest.raises(ImportError), explained_imports():
        import vllm.config  # noqa: F401


TEXT = (RESULTS.parents[1] / "vllm-reference.md").read_text(encoding="utf-8")
RECORDED = json.loads(RESULTS.read_text(encoding="utf-8"))


def test_the_table_of_what_runs_is_what_was_recorded_and_a_failed_line_fails(tmp_path: Path) -> None:
    told = re.search(r"\]\(results/vllm-reach\.json\)\): ([a-z0-9_, \n-]+)\.", TEXT)
    assert told is not None
    rest = {name: verdict for name, verdict in RECORDED["families"].items() if not verdict.startswith("blends")}
    blended = RECORDED["families"].keys() - rest
    assert set(re.split(r",\s+", told[1])) == blended
    assert RECORDED["figures"]["families"] == len(blended)
    assert all(f"`{name}`" in TEXT and verdict.startswith(NOT_RUN) for name, verdict in rest.items())
    counted = [verdict for verdict in RECORDED["features"].values() if not verdict.startswith(REFUSED)]
    assert not any(verdict.startswith(FAILS) for verdict in counted)
    assert RECORDED["figures"]["features"] == len(counted)
    assert RECORDED["figures"]["wrong"] == 0
    # a line fails if one of its tests does, and is left out if none ran
    reports = [
        report("a", "blends"),
        report("a", "blends", "failed"),
        report("a", "blends"),
        report("b", "blends", when="setup"),
        report("c", "blends", "skipped", "setup"),
        report("d", REFUSED),
        report("e", "blends", "failed", "setup"),
        SimpleNamespace(user_properties=[("other", "x")], outcome="passed", when="call", failed=False, passed=True),
    ]
    assert verdicts(reports) == {"a": FAILS, "d": REFUSED, "e": FAILS}
    path = tmp_path / "results.json"
    path.write_text(
        json.dumps({"families": {"llama": "blends"}, "figures": {"wrong": 0}, "features": {"old": "blends"}})
    )
    assert merge(path, "features", {"new": REFUSED}) == {"new": REFUSED, "old": "blends"}
    found = json.loads(path.read_text())
    assert found["families"] == {"llama": "blends"} and found["figures"] == {"wrong": 0, "features": 1}
    merge(path, "features", {"old": FAILS})
    assert json.loads(path.read_text())["figures"]["features"] == 0
    merge(tmp_path / "none.json", "features", {"one": "blends"})
    assert json.loads((tmp_path / "none.json").read_text())["figures"] == {"features": 1}


def report(line: str, verdict: str, outcome: str = "passed", when: str = "call") -> Any:
    told = [("feature", json.dumps([line, verdict]))]
    return SimpleNamespace(
        user_properties=told, outcome=outcome, when=when, failed=outcome == "failed", passed=outcome == "passed"
    )


GIB = 1 << 30
LLAMA_70B = ModelSizes(
    layers=80,
    width=8192,
    intermediate=28672 // 4,
    query_width=16 * 128,
    kv_width=2 * 128,
    head_dim=128,
    item_bytes=2,
    longest=32768,
    tile_rows=8192,
)
"""A rank of four; without kernels, so in buffers."""
LAYER = 2 * 32768 * 256 * 2


def test_a_rank_of_a_large_model_with_kernels_in_pages_and_with_a_check() -> None:
    found = workspace_of(LLAMA_70B)
    assert found.hidden == 3 * 32768 * 8192 * 2  # of the prompt, of what stays of it, of those that wait
    assert found.layers == 2 * 5 * LAYER + (128 << 20)  # one, four read ahead, their records; those of others
    assert found.held == 4 * LAYER
    assert found.tile == 8192 * (4 * 8192 + 3 * 7168) * 2
    assert found.attention == 5 << 26
    assert found.question == 0  # less than a tile
    assert found.chunks == 8192 * 2 * 256 * 80 * 2
    assert found.total == sum((found.hidden, found.layers, found.held, found.tile, found.attention, found.chunks))
    assert 3 * GIB < found.total < 5 * GIB
    words = str(found)
    assert words.startswith("3.83 GiB (hidden 1.50")
    assert all(part in words for part in ("hidden 1.50 GiB", "layers", "held", "tile", "attention", "chunks"))
    plain = workspace_of(LLAMA_70B)  # kernels need no masks, and pages no buffers
    kernels = workspace_of(replace(LLAMA_70B, has_kernels=True))
    assert kernels == replace(plain, attention=512 * 128 * 130 * 4)
    pages = workspace_of(replace(LLAMA_70B, has_kernels=True, in_pages=True))
    assert pages == replace(kernels, layers=5 * LAYER + (128 << 20), held=0)
    assert plain.total - pages.total > 9 * LAYER
    # a check: hidden states and a layer, parked while prompts go on; a layer as read from the cache, and the fused one
    plain, checked = workspace_of(LLAMA_70B), workspace_of(replace(LLAMA_70B, checked_vocab=128_000))
    assert plain.check == 0 and replace(checked, check=0) == plain
    assert checked.check == 32768 * 8192 * 2 + 2 * LAYER + (2 * 16 + 9) * 128_000 * 4
    pages = replace(LLAMA_70B, has_kernels=True, in_pages=True)
    assert workspace_of(replace(pages, checked_vocab=128_000)).check == checked.check + 4 * LAYER
    # histories: KV of a section that is behind a long prefix, in all layers, and buffers and records of that prefix
    histories = workspace_of(replace(LLAMA_70B, tile_rows=2048, has_histories=True))
    behind = 8192 * 2 * 256 * 80 * 2 + 2 * 5 * LAYER + COPIED
    assert histories == replace(workspace_of(replace(LLAMA_70B, tile_rows=2048)), chunks=behind)
    in_pages = workspace_of(replace(LLAMA_70B, tile_rows=2048, has_histories=True, in_pages=True))
    assert in_pages.chunks == behind, "a history is in no page"
    few = replace(LLAMA_70B, tile_rows=64, longest=4096, has_histories=True)
    assert workspace_of(few).chunks == 4096 * 2 * 256 * 80 * 2 + 2 * 16 * LAYER // 8 + COPIED, (
        "no more than a whole prompt"
    )
    # wide heads, long questions, huge layers, short prompts
    wide = replace(LLAMA_70B, intermediate=512, query_width=8192)
    assert workspace_of(wide).tile == 8192 * (4 * 8192 + 4 * 8192 + 6 * 256) * 2
    found = workspace_of(replace(LLAMA_70B, tile_rows=64, has_kernels=True))
    assert found.question == LAYER + 2 * LAYER + (12 << 24) - found.tile - found.attention > 0
    huge, layer = replace(LLAMA_70B, longest=1 << 21, kv_width=1024), 2 * (1 << 21) * 1024 * 2
    of_waiting = 2 * 2 * 32768 * 1024 * 2
    assert workspace_of(huge).layers == 4 * layer + of_waiting, "a layer is read ahead however large it is"
    short = workspace_of(replace(LLAMA_70B, longest=4096))
    assert short.layers == 32 * LAYER // 8 + (128 << 20), "eight layers ahead and those that are read with the last"
    for name in ("width", "intermediate", "kv_width", "item_bytes", "longest", "tile_rows", "layers"):
        more = replace(LLAMA_70B, **{name: 2 * getattr(LLAMA_70B, name)})
        assert workspace_of(more).total > workspace_of(LLAMA_70B).total, "more of anything takes more"


def test_partial_sums_are_fewer_than_what_is_counted_whatever_is_asked() -> None:
    """By the kernel's own numbers; a GPU has fewer than 256 processors."""
    triton = pytest.importorskip("cacheblend.core.kernels.attention_triton", reason="Triton is not installed here")
    for heads, kv_heads, head_dim, page, processors in product(
        (8, 32, 64), (1, 2, 8), (64, 128, 256), (0, 16), (16, 132, 255)
    ):
        sizes = replace(LLAMA_70B, head_dim=head_dim, has_kernels=True)
        for rows, length in product((1, 7, 100, 2000), (100, 4000, 130000)):
            slots, tile_keys, _, _ = triton.tile_shape(heads // kv_heads, rows, head_dim, page)
            programs = kv_heads * -(-rows // (slots // (heads // kv_heads)))
            splits = triton.splits_of(programs, -(-length // tile_keys), processors)
            taken = splits * rows * heads * (head_dim + 2) * 4 if splits > 1 else 2 * rows * heads * 4
            assert taken <= max(attention_bytes(sizes), 2 * rows * heads * 4)
