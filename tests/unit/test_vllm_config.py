"""The connector's settings: this project's form, UCM's form, and what is refused by name."""

from typing import Any

import pytest

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.select.selectors import Hkvd
from cacheblend.engines.vllm.config import ConnectorConfig, read_config

UCM_STORE = {
    "ucm_connectors": [
        {
            "ucm_connector_name": "UcmNfsStore",
            "ucm_connector_config": {"storage_backends": "/mnt/kv", "use_direct": False},
        }
    ]
}


def ucm(**blend: Any) -> dict[str, Any]:
    return {"ucm_sparse_config": {"Blend": blend}}


def test_nothing_said_leaves_it_to_the_models_profile_or_the_defaults() -> None:
    found = read_config({})
    assert found == ConnectorConfig({}, "memory")
    assert found.blend == BlendConfig()


def test_the_anchor_system_is_refused() -> None:
    with pytest.raises(InvalidInputError, match='use "bos" or "none"'):
        read_config({"anchor": "system"})


def test_this_projects_form() -> None:
    found = read_config(
        {"store": "file:///var/cache/cacheblend", "recompute_ratio": 0.2, "check_layers": [2], "chunk_end_token_id": 7}
    )
    assert found.store == "file:///var/cache/cacheblend" and found.chunk_end_token_id == 7
    assert found.blend.make_selector() == Hkvd((2,), (0.2,))


def test_the_form_of_ucms_users() -> None:
    meta = {"model.layers.1.self_attn.attn": {"ratio": 0.2}}
    found = read_config(UCM_STORE | ucm(chunk_end_token_id=1699, compute_meta=meta))
    assert found.store == "/mnt/kv" and found.chunk_end_token_id == 1699
    assert found.blend.make_selector() == Hkvd((1,), (0.2,))


def test_several_entries_of_ucm_are_gradual_filtering_in_order_of_layers() -> None:
    meta = {"model.layers.10.self_attn.attn": {"ratio": 0.1}, "model.layers.2.self_attn.attn": {"ratio": 0.3}}
    assert read_config(ucm(compute_meta=meta)).blend.make_selector() == Hkvd((2, 10), (0.3, 0.1))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
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
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        read_config(extra)


def test_reading_past_the_page_cache_is_refused() -> None:
    config = {"storage_backends": "/mnt/kv", "use_direct": "yes"}
    with pytest.raises(InvalidInputError, match="use_direct"):
        read_config({"ucm_connectors": [{"ucm_connector_name": "UcmNfsStore", "ucm_connector_config": config}]})


def test_the_shadow_check_is_off_unless_a_share_is_given() -> None:
    assert read_config({}).shadow_settings is None
    assert read_config({"shadow": 0}).shadow_settings is None
    found = read_config({"shadow": 0.02, "shadow_floor": 0.95}).shadow_settings
    assert found is not None and (found.share, found.floor, found.rows) == (0.02, 0.95, 181)


@pytest.mark.parametrize(
    ("given", "words"),
    [
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
def test_wrong_settings_of_the_shadow_check_name_value_limit_and_way_out(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        read_config(given)
