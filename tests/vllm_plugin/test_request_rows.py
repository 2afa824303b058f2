"""Tables of several groups of KV cache: what is written and read of each, and what is kept in vLLM's prefix cache.

Situations: a window that ends behind held rows, inside them, or that sees all; held blocks that are gone; tables that
are all null; random windows and sizes. Whether answers are right in vLLM is shown by `test_families`.
"""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from cacheblend.core.kernels.attention import first_key
from cacheblend.core.select.selectors import Hkvd
from cacheblend.engines.vllm.internals.prefix_cache import (
    PrefixCache,
    groups_of,
    refused_groups,
    windows_of,
)
from cacheblend.engines.vllm.worker.paged_cache import LayerGroups
from paged_scenes import NOTHING, OWN, Scene
from vllm_requests import SIZE, Request

WINDOW = 40  # of `paged_scenes`
OTHERS = range(31, 40)
"""Blocks of other requests."""

SECOND = [16, 18, 20, 13, 7, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30]
"""Blocks of the second group."""


@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize("held", [0, 32, 80])
def test_window_layers_get_what_the_last_token_sees(in_pages: bool, held: int) -> None:
    """And rows in the other layers are those of a request with all of its blocks."""

    def made() -> Any:
        return Scene(in_pages=in_pages, spec="window", groups=LayerGroups([0, 1, 1, 0], (None, WINDOW)))

    whole, passed = made(), made()
    for one in (whole, passed):
        if held:  # an earlier request
            one.blend(replace(one.job(OWN, source=NOTHING), block_ids=[OWN, SECOND]))
    rows = len(whole.prompt.token_ids) - 1
    start = (rows + 1 - WINDOW) // SIZE
    table = [0] * start + SECOND[start:]
    seen = max(0, held - WINDOW + 1) // SIZE
    kept = [0] * seen + SECOND[seen : held // SIZE]
    job = whole.job(OWN, held, Hkvd((1,), (0.3,)))
    right = whole.blend(replace(job, block_ids=[OWN, SECOND]))
    before = passed.bytes_of([0, *SECOND[:start], *OTHERS])
    found = passed.blend(replace(job, block_ids=[OWN, table], held_ids=[OWN[: held // SIZE], kept]))
    assert found.report.row_layers == right.report.row_layers and found.report.fallbacks == []
    for layer, (mine, its) in enumerate(zip(passed.rows(OWN), whole.rows(OWN), strict=True)):
        if layer in (0, 3):
            assert float((mine - its).abs().max()) < 1e-5
    for layer in (1, 2):
        mine, its = (one.bytes_of(SECOND[start:])[layer] for one in (passed, whole))
        assert float((mine - its)[:, :, : rows - start * SIZE].abs().max()) < 1e-5
        # Not the null block, nor what another request may have, nor what is held of it.
        assert torch.equal(passed.bytes_of([0, *SECOND[:start], *OTHERS])[layer], before[layer])


def test_held_rows_that_are_gone_are_computed_again() -> None:
    one = Scene(in_pages=True, spec="window", groups=LayerGroups([0, 1, 1, 0], (None, WINDOW)))
    job = one.job(OWN, 80, Hkvd((1,), (0.3,)))
    tables = [OWN, [0] * 12 + SECOND[12:]]
    before = one.bytes_of([*OWN[:5], *OTHERS])
    found = one.blend(replace(job, block_ids=tables, held_ids=[OWN[:5], [0] * 5]))
    assert found.plan.prefix_length == 0
    for now, then in zip(one.bytes_of([*OWN[:5], *OTHERS]), before, strict=True):
        assert torch.equal(now, then)  # other requests may share them


class FakePool:
    """vLLM's block pool: blocks by name and group, and how often each is used."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[bytes, int], Any] = {}
        self.used: dict[int, int] = {}

    def get_cached_block(self, name: bytes, groups: list[int]) -> Any:
        found = [self.blocks.get((name, group)) for group in groups]
        return None if None in found else found

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            self.used[block.block_id] = self.used.get(block.block_id, 0) + 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            self.used[block.block_id] -= 1
            assert self.used[block.block_id] >= 0


@pytest.mark.parametrize("seed", range(20))
def test_what_rows_behind_held_ones_see_is_kept_and_let_go(seed: int) -> None:
    rng = random.Random(seed)
    windows = [None, rng.randint(1, 100), rng.randint(1, 300)]
    request = Request(list(range(400)))
    stop = rng.randrange(0, 25) * SIZE
    pool, cache = FakePool(), PrefixCache(SIZE, windows)
    gone = set()
    for group in range(3):
        for at, name in enumerate(request.block_hashes):
            if rng.random() < 0.9:
                pool.blocks[name, group] = SimpleNamespace(block_id=1 + 100 * group + at)
            else:
                gone.add((at, group))
    cache.bind(SimpleNamespace(block_pool=pool))
    own = [[500 + 100 * group + at for at in range(25)] for group in range(3)]
    for group, window in enumerate(windows):
        passed = first_key(399, window) // SIZE
        own[group][:passed] = [0] * passed
    found = cache.keep(request, stop, own)
    used = dict(pool.used)
    for group, (window, table) in enumerate(zip(windows, found, strict=True)):
        assert len(table) == stop // SIZE
        for at, block in enumerate(table):
            is_seen = (at + 1) * SIZE - 1 >= first_key(stop, window)
            if not is_seen:
                assert block == 0
            elif own[group][at]:
                assert block == own[group][at]
            else:
                assert block == (0 if (at, group) in gone else 1 + 100 * group + at)
                assert used.pop(block, 0) == (block > 0)
    assert not used  # nothing else is kept
    cache.let_go(request.request_id)
    cache.let_go(request.request_id)
    assert not any(pool.used.values())


def test_groups_that_are_not_served_are_refused_by_name() -> None:
    def config(*specs: Any) -> Any:
        groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=[f"l{n}"]) for n, spec in enumerate(specs)]
        return SimpleNamespace(kv_cache_groups=groups)

    shape = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    full = FullAttentionSpec(block_size=16, **shape)
    window = SlidingWindowSpec(block_size=16, sliding_window=64, **shape)
    larger = SlidingWindowSpec(block_size=32, sliding_window=64, **shape)
    state = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))
    assert refused_groups(config(full, window)) == refused_groups(config(full)) == refused_groups(config(state)) == ""
    assert windows_of(config(window, full)) == [64, None]
    assert groups_of(config(window, full), ["l1", "l0", "l1"]) == [1, 0, 1]
    assert "MambaSpec beside others (--disable-hybrid-kv-cache-manager" in refused_groups(config(full, state))
    assert "blocks of 16 and 32 tokens" in refused_groups(config(full, larger))
