"""The connector's settings, in this project's form and in UCM's, and a request's own: its chunks and options."""

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
        ({"anchor": "system"}, 'use "bos" or "none"'),
        ({"workspace_bytes": -1}, "workspace_bytes must be a whole number of at least 0, got -1"),
        (ucm_store(storage_backends="/mnt/kv", use_direct="yes"), "use_direct"),
        ({"recompute_ration": 0.2}, "unknown key 'recompute_ration'; did you mean recompute_ratio"),
        ({"tile_rows": 5}, "unknown key 'tile_rows'"),
        ({"recompute_ratio": 1.5}, "0..1, got 1.5"),
        ({"store": ""}, "store must be a URL"),
        ({"chunk_end_token_id": "7"}, "chunk_end_token_id must be a whole number of at least 0, got '7'"),
        ({"budget_row_layers": 0}, "at least 1, got 0"),
        ({"min_match_tokens": 10}, "min_match_tokens must be a whole number of at least 63"),
        ({"refresh_s": -1}, "refresh_s must be a number of seconds, 0 or more"),
        ({"refresh_s": float("nan")}, "refresh_s must be a number of seconds, 0 or more"),
        ({"match_content": "no"}, "match_content must be true or false"),
        ({"allow_untested_version": 1}, "allow_untested_version must be true or false"),
        ({"controller": "no"}, "controller must be true or false"),
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
        ({"shadow": 1.5}, r"shadow 1\.5.*above 0 and at most 1"),
        ({"shadow": -0.1}, r"shadow -0\.1.*above 0 and at most 1"),
        ({"shadow": "much"}, "shadow 'much'.*above 0 and at most 1"),
        ({"shadow": True}, "shadow True.*above 0 and at most 1"),
        ({"shadow": False}, "shadow False.*above 0 and at most 1"),
        ({"shadow": None}, "shadow None.*above 0 and at most 1"),
        ({"shadow": 0.1, "shadow_floor": 1}, "shadow_floor 1:.*between 0 and 1"),
        ({"shadow": 0.1, "shadow_floor": "high"}, "shadow_floor 'high'.*must be a number"),
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


def find_chunks(
    ids: list[int], params: Any = None, *, chunk_end_token_id: int | None = None, index: ChunkIndex | None = None
) -> Prompt:
    """By the first way that applies, as the scheduler side does."""
    tokens = as_token_ids(ids)
    found = named_chunks(tokens, read_options(params, len(tokens)).spans, chunk_end_token_id)
    return with_matches(Prompt.of([text(tokens)]), index or index_of()) if found is None else found


def test_chunks_are_what_the_client_names_or_what_ends_with_their_token_or_what_is_stored() -> None:
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


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (spans([5, 8]), r"chunk 0 is \[5, 8\].*0\.\.7"),
        (spans([-1, 2]), "chunk 0 is"),
        (spans([2, 2]), "not empty"),
        (spans([0, 3], [2, 5]), r"\[2, 5\] begins before \[0, 3\] ends"),
        (spans([3, 5], [0, 2]), r"\[0, 2\] begins before \[3, 5\] ends"),
        (spans([0]), "two whole numbers"),
        (spans([0, "3"]), "two whole numbers"),
        (spans([False, True]), "two whole numbers"),
        (spans("03"), "two whole numbers"),
        ({"cacheblend": {"chunks": 3}}, "a list of"),
        ({"cacheblend": [[0, 3]]}, "must be an object"),
        ({"cacheblend": {"chunk": []}}, "unknown key 'chunk'"),
    ],
)
def test_spans_that_cannot_be_meant_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        find_chunks(PROMPT, params)


def test_the_settings_of_a_request() -> None:
    assert read_options(None, 7) == read_options({"other": 1}, 7) == read_options({"cacheblend": {}}, 7)
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
