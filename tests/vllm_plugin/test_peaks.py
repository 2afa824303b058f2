"""The most memory that a blend takes at a time, counted on the CPU, against the arithmetic of the workspace."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import paged_scenes
from cacheblend.core.load import layer_kv
from cacheblend.core.select.question_selectors import Query
from cacheblend.core.select.selectors import Hkvd
from cacheblend.engines.vllm import workspace
from cacheblend.engines.vllm.worker import paged_kv
from cacheblend.engines.vllm.workspace import HELD_COPIES, ModelSizes, workspace_of

ROWS = 234  # of the scene's prompt without its last token
TILE = 48
SIZES = ModelSizes(
    layers=paged_scenes.LAYERS,
    width=paged_scenes.HIDDEN,
    intermediate=0,
    query_width=paged_scenes.HEADS * paged_scenes.WIDTH,
    kv_width=paged_scenes.KV_HEADS * paged_scenes.WIDTH,
    head_dim=paged_scenes.WIDTH,
    item_bytes=4,
    longest=ROWS,
    tile_rows=TILE,
)
LAYER = 2 * SIZES.kv_width * ROWS * 4


class Peak(TorchDispatchMode):
    """Bytes of the storages that this thread's operations made and that are alive, and the most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for each in _tensors(out):
            storage = each.untyped_storage()
            key = storage._cdata
            if key not in given and key not in self._known:
                self._known.add(key)
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._freed, key, storage.nbytes())
                self.most = max(self.most, self.alive)
        return out

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.alive -= nbytes


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [each for part in value.values() for each in _tensors(part)]
    return [each for part in value for each in _tensors(part)] if isinstance(value, list | tuple) else []


def test_what_is_counted_is_what_is_alive() -> None:
    with Peak() as peak:
        one = torch.ones(1000)
        two = one + 1
        view = two[10:]
        assert peak.alive == 8000
        del one, two
        assert peak.alive == 4000
        del view
    assert (peak.alive, peak.most) == (0, 8000)


def test_held_rows_are_copied_so_often_and_no_more() -> None:
    one = paged_scenes.Scene(in_pages=False)
    paged, table = one.opener._paged[0], torch.tensor(paged_scenes.OWN)
    paged.read(table, ROWS)  # the layout is known
    with Peak() as peak:
        paged.read(table, ROWS)
    blocks = 2 * SIZES.kv_width * len(paged_scenes.OWN) * paged_scenes.SIZE * 4  # the rows, rounded up to blocks
    assert HELD_COPIES * blocks >= peak.most > 2 * LAYER


@pytest.mark.parametrize("selector", [Hkvd((1,), (0.3,)), Query(0.3)], ids=["hkvd", "question"])
def test_a_blend_takes_no_more_than_its_parts_and_less_in_pages(selector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention apart, which a device's kernel computes; nobody else waits for the store."""
    for module in (layer_kv, paged_kv):
        monkeypatch.setattr(module, "attend_rows", lambda query, *_: query.transpose(0, 1).contiguous())
    monkeypatch.setattr(workspace, "ROWS_OPEN", 0)
    monkeypatch.setattr(workspace, "READ_AHEAD_BYTES", 0)
    weights = 3 * 4 * paged_scenes.HEADS * 12 * ROWS  # of the question's 12 rows at most
    monkeypatch.setattr(workspace, "_WEIGHTS", weights)
    most = {}
    for in_pages in (False, True):
        one = paged_scenes.Scene(in_pages=in_pages)
        one.blend(one.job(paged_scenes.OWN, 32, selector))  # what is made once is there
        job = one.job(paged_scenes.OWN, 32, selector)
        with Peak() as peak:
            one.blend(job)
        counted = workspace_of(replace(SIZES, in_pages=in_pages))
        parts = counted.hidden + counted.layers + counted.held + max(counted.tile, workspace.question_bytes(SIZES))
        assert parts >= peak.most > parts // 5
        most[in_pages] = peak.most
    assert most[False] - most[True] >= LAYER
