"""What a layer is given besides hidden states is cut to a tile's rows once, whatever number of layers runs them."""

import pytest
import torch

from cacheblend.engines.hf.layers import HfLayerRunner, OfRows
from cacheblend.engines.hf.shapes import build_shape
from cacheblend.engines.hf.view import LayerCall, ModelView


def parts_of(call: LayerCall) -> list[torch.Tensor]:
    found = list[torch.Tensor]()
    for value in (*call.args, *call.kwargs.values()):
        parts = value if isinstance(value, tuple) else (value,)
        found += [part.part for part in parts if isinstance(part, OfRows)]
    return found


@pytest.mark.parametrize("tiles", [1, 3, 40])
def test_layers_share_the_arguments_of_the_same_rows(tiles: int) -> None:
    view = ModelView(build_shape("tiny"))
    with torch.no_grad():
        runner = HfLayerRunner(view, torch.arange(90), torch.arange(90) * 2)
        whole = parts_of(runner.arguments(0, torch.arange(90)))
        drawn = torch.Generator().manual_seed(tiles)
        rows = [torch.randperm(90, generator=drawn)[:20].sort().values for _ in range(tiles)]
        first = [parts_of(runner.arguments(0, each)) for each in rows]
        for layer in range(runner.num_layers):
            for each, known in zip(rows, first, strict=True):
                parts = parts_of(runner.arguments(layer, each))
                assert len(parts) == len(whole) >= 2
                assert all(torch.equal(part, all_[:, each]) for part, all_ in zip(parts, whole, strict=True))
                assert tiles > 16 or all(part is one for part, one in zip(parts, known, strict=True))
                assert all(torch.equal(part, one) for part, one in zip(parts, known, strict=True))


def test_other_rows_in_the_memory_of_those_before_have_their_own_arguments() -> None:
    runner = HfLayerRunner(ModelView(build_shape("tiny")), torch.arange(30), torch.arange(30))
    for first in range(25):
        rows = torch.arange(first, first + 5)  # freed with each round, but for what the runner holds
        assert parts_of(runner.arguments(0, rows))[0].shape[1] == 5
        whole = parts_of(runner.arguments(0, torch.arange(30)))
        assert torch.equal(parts_of(runner.arguments(1, rows))[0], whole[0][:, first : first + 5])
