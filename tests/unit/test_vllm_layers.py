"""The runner of vLLM's layers: the hidden state exists once, whether the layers' kernels work in place or not."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cacheblend.core.fuse.batching import run_together
from cacheblend.core.fuse.prefill import BlendedPrefill, PrefillOptions
from cacheblend.core.kernels.attention import AttentionSpec, attend_rows
from cacheblend.core.load.loader import LayerLoader
from cacheblend.core.plan.blocks import KVLayout, LayerShape
from cacheblend.core.plan.plan import BlendPlan
from cacheblend.core.plan.planner import Planner
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.core.select.selectors import NoRows
from cacheblend.engines.vllm.worker.layers import VllmLayerRunner, join

HEADS, HEAD_DIM, LAYERS, ROWS, TILE = 2, 8, 3, 61, 16
INNER, WIDTH = HEADS * HEAD_DIM, 8 * HEADS * HEAD_DIM  # no tensor of keys or values is as large as a hidden state


class Model:
    """Stands in for `BlendModel`: layers as it calls vLLM's, whose hidden state is a sum."""

    def __init__(self, *, in_place: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(3, WIDTH, INNER, generator=generator) for _ in range(LAYERS)]
        self.table = torch.randn(100, WIDTH, generator=generator)
        self.layers = [self._layer(weight, in_place=in_place) for weight in self.weights]
        self.specs = [AttentionSpec(HEAD_DIM**-0.5)] * LAYERS
        self._answer: Any = None

    def embed(self, token_ids: torch.Tensor, adapter: int) -> torch.Tensor:
        return self.table[token_ids]

    def row_inputs(self, *_: Any) -> list[tuple[torch.Tensor, ...]]:
        return [()] * LAYERS

    @contextmanager
    def answering(self, layer: int, answer: Any, *_: Any) -> Iterator[None]:
        self._answer = answer
        yield

    def _layer(self, weight: torch.Tensor, *, in_place: bool) -> Callable[..., torch.Tensor]:
        def layer(positions: torch.Tensor, hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
            residual, normed = hidden, _norm(hidden)
            q, k, v = ((normed @ part + positions[:, None] / 100).view(-1, HEADS, HEAD_DIM) for part in weight.unbind())
            attended = self._answer(q, k, v).reshape(-1, INNER) @ weight[2].T
            residual = residual.add_(attended) if in_place else residual + attended
            return residual.add_(_norm(residual) @ weight[0] @ weight[1].T)

        return layer


def _norm(hidden: torch.Tensor) -> torch.Tensor:
    return hidden / hidden.norm(dim=1, keepdim=True)


class _Allocations(TorchDispatchMode):
    """The tensors that operations return and that have a storage of their own, of at least so many numbers."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.names = least, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        made = [each for each in (out if isinstance(out, tuple | list) else (out,)) if isinstance(each, torch.Tensor)]
        for each in made:
            is_new = each.untyped_storage().data_ptr() not in given
            if is_new and each.is_floating_point() and each.numel() >= self.least:
                self.names.append(str(func))
        return out


def _prefill(model: Model, ids: list[int], tile_rows: int, kv: list[Any]) -> BlendedPrefill:
    plan = Planner(b"root").plan(Prompt.of([text(ids)]), _Nothing())
    layout = KVLayout((LayerShape(HEADS, HEAD_DIM),) * LAYERS, torch.float32)

    def open_runner(plan: BlendPlan) -> VllmLayerRunner:
        return VllmLayerRunner(model, torch.tensor(ids), torch.arange(len(ids)))

    def open_loader(plan: BlendPlan, first: int) -> LayerLoader:
        return LayerLoader(plan, _Nothing(), layout, [None] * LAYERS, read_ahead=0)

    options = PrefillOptions(tile_rows=tile_rows, on_layer=lambda layer, found: kv.append(found))
    return BlendedPrefill(plan, open_runner, open_loader, NoRows(), options)


class _Nothing:
    """A source without blocks."""

    def __getattr__(self, name: str) -> Any:
        return lambda names, *_: [None] * len(names) if isinstance(names, list | tuple) else None


def _keys_at_once(model: Model, ids: list[int]) -> list[torch.Tensor]:
    """Each layer's keys by vLLM's own order: hidden and residual passed on from layer to layer."""
    hidden, residual, positions, found = model.table[torch.tensor(ids)], None, torch.arange(len(ids)), []
    for weight, spec in zip(model.weights, model.specs, strict=True):
        residual = hidden if residual is None else hidden + residual
        q, k, v = (
            (_norm(residual) @ part + positions[:, None] / 100).view(-1, HEADS, HEAD_DIM).transpose(0, 1)
            for part in weight.unbind()
        )
        found.append(k)
        residual = residual + attend_rows(q, k, v, positions, spec).reshape(-1, INNER) @ weight[2].T
        hidden = _norm(residual) @ weight[0] @ weight[1].T
    return found


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("tile_rows", [1, TILE, ROWS, ROWS + 9])
def test_layers_without_a_residual_give_the_models_own_keys(in_place: bool, tile_rows: int) -> None:
    model, ids, kv = Model(in_place=in_place), [i * 7 % 100 for i in range(ROWS)], list[Any]()
    _prefill(model, ids, tile_rows, kv).advance(LAYERS)
    for found, wanted in zip(kv, _keys_at_once(model, ids), strict=True):
        torch.testing.assert_close(found.keys, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_place", [True, False])
def test_prompts_that_share_a_tile_keep_their_own_states(in_place: bool) -> None:
    model = Model(in_place=in_place)
    prompts = [[(i * 7 + at) % 100 for i in range(11 + at)] for at in range(3)]
    found = [list[Any]() for _ in prompts]
    prefills = [_prefill(model, ids, 64, kv) for ids, kv in zip(prompts, found, strict=True)]
    for _ in range(LAYERS):
        assert run_together([each.next_layer() for each in prefills], join, 64) == [None] * 3
    for ids, kv in zip(prompts, found, strict=True):
        for layer, wanted in zip(kv, _keys_at_once(model, ids), strict=True):
            torch.testing.assert_close(layer.keys, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_place", [True, False])
def test_the_hidden_state_exists_once(in_place: bool) -> None:
    model, ids = Model(in_place=in_place), [i % 100 for i in range(ROWS)]
    prefill = _prefill(model, ids, TILE, [])
    place = prefill._rows.hidden.data_ptr()
    with _Allocations(ROWS * WIDTH) as seen:
        prefill.advance(LAYERS - 1)
    assert prefill._rows.hidden.data_ptr() == place
    assert seen.names == []


def test_projecting_leaves_the_hidden_state_as_it_is() -> None:
    model = Model(in_place=True)
    runner = VllmLayerRunner(model, torch.arange(9), torch.arange(9))
    hidden = runner.embed()
    before = hidden.clone()
    runner.project(1, hidden, torch.arange(9))
    assert torch.equal(hidden, before)
    out = runner.run(1, hidden, torch.arange(9), lambda q, k, v, spec: attend_rows(q, k, v, torch.arange(9), spec))
    assert out.data_ptr() == hidden.data_ptr()
