"""A model's identity: the anchor's default, the names of tenants, and load options in the fingerprint."""

import hashlib
from pathlib import Path

import pytest

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import root_name
from cacheblend.core.plan.planner import Anchor
from cacheblend.engines.fingerprint import fingerprint_folder
from cacheblend.engines.identity import ModelIdentity

WITH_BOS = ModelIdentity(None, "weights", "bfloat16", 1, "a model")
WITHOUT_BOS = ModelIdentity(None, "weights", "bfloat16", None, "a model")


def test_the_anchor_is_bos_where_there_is_one() -> None:
    assert WITH_BOS.anchor("auto") == Anchor("bos", 1)
    assert WITHOUT_BOS.anchor("auto") == Anchor("none", None)
    assert WITH_BOS.anchor("none") == Anchor("none", 1)
    assert WITH_BOS.anchor("system") == Anchor("system", 1)
    with pytest.raises(InvalidInputError, match="'bos' needs a tokenizer"):
        WITHOUT_BOS.anchor("bos")


def test_the_planner_names_blocks_by_weights_dtype_codec_salt_and_tenant() -> None:
    planner = WITH_BOS.planner(BlendConfig(block_size=32))
    assert planner.root == planner.exact_root == root_name("weights", "bfloat16")
    assert (planner.block_size, planner.codec, planner.anchor) == (32, "raw", Anchor("bos", 1))

    compressed = WITH_BOS.planner(BlendConfig(codec="int8", salt="ours"))
    assert compressed.root == root_name("weights", "bfloat16", "int8", "ours")
    assert compressed.exact_root == root_name("weights", "bfloat16", salt="ours")

    one = WITH_BOS.planner(BlendConfig(salt="ours"), "one")
    assert one.root == root_name("weights", "bfloat16", salt="ours\x1fone")


def test_load_options_change_the_fingerprint_whatever_their_order(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    plain = fingerprint_folder(tmp_path)
    assert fingerprint_folder(tmp_path, {}) == plain
    one = fingerprint_folder(tmp_path, {"sliding_window": 8, "rope_theta": 1e4})
    assert one == fingerprint_folder(tmp_path, {"rope_theta": 1e4, "sliding_window": 8})
    described = "[('rope_theta', '10000.0'), ('sliding_window', '8')]"
    assert one == hashlib.sha256(f"{plain}\n{described}".encode()).hexdigest()  # as blocks have been named so far
