"""The memory of blending: the arithmetic, for models of known sizes."""

from dataclasses import replace

import pytest

from cacheblend.engines.vllm.config import read_config
from cacheblend.engines.vllm.workspace import ModelSizes, workspace_of

GIB = 1 << 30
LLAMA_70B = ModelSizes(
    layers=80, width=8192, intermediate=28672 // 4, kv_width=2 * 128, item_bytes=2, longest=32768, tile_rows=8192
)
"""A rank of four."""


def test_a_rank_of_a_large_model() -> None:
    found = workspace_of(LLAMA_70B)
    assert found.hidden == 3 * 32768 * 8192 * 2  # of the prompt, of what stays of it, of those that wait
    assert found.layers == 5 * 2 * 32768 * 256 * 2 + (128 << 20)  # one, two read ahead, their records; those of others
    assert found.tile == 8192 * (4 * 8192 + 3 * 7168) * 2
    assert found.chunks == 8192 * 2 * 256 * 80 * 2
    assert found.total == sum((found.hidden, found.layers, found.tile, found.attention, found.chunks))
    assert 3 * GIB < found.total < 4 * GIB


def test_a_layer_is_read_ahead_however_large_it_is() -> None:
    huge = replace(LLAMA_70B, longest=1 << 21, kv_width=1024)
    assert workspace_of(huge).layers == 3 * 2 * (1 << 21) * 1024 * 2 + 2 * 2 * 32768 * 1024 * 2  # of those that wait


@pytest.mark.parametrize("name", ["width", "intermediate", "kv_width", "item_bytes", "longest", "tile_rows", "layers"])
def test_more_of_anything_takes_more(name: str) -> None:
    more = replace(LLAMA_70B, **{name: 2 * getattr(LLAMA_70B, name)})
    assert workspace_of(more).total > workspace_of(LLAMA_70B).total


def test_people_read_it_in_gib_by_its_parts() -> None:
    words = str(workspace_of(LLAMA_70B))
    assert words.startswith("3.")
    assert all(part in words for part in ("hidden 1.50 GiB", "layers", "tile", "attention", "chunks"))


def test_the_setting_is_bytes_none_or_nothing() -> None:
    assert read_config({}).workspace_bytes is None
    assert read_config({"workspace_bytes": 0}).workspace_bytes == 0
    with pytest.raises(ValueError, match="workspace_bytes must be a whole number of at least 0, got -1"):
        read_config({"workspace_bytes": -1})
