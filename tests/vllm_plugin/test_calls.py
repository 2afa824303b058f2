"""How layers are called, learnt from a forward pass: whatever their signature, and what they hand on."""

from typing import Any

import pytest
import torch
from torch import nn

from cacheblend.core.errors import ModelNotBlendableError
from cacheblend.engines.vllm.calls import (
    HiddenForm,
    VllmLayerCall,
    added,
    first,
    hidden_after,
    hidden_before,
    learn_calls,
)
from cacheblend.engines.vllm.internals.decoder import recording_calls

ROWS, WIDTH = 11, 6
POSITIONS = torch.arange(ROWS)


class Layer(nn.Module):
    """Adds a function of the position to what it is given; `kind`: how it is called."""

    def __init__(self, kind: str, index: int) -> None:
        super().__init__()
        self.kind, self.scale = kind, index + 2

    def change(self, hidden: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        return hidden.sin() * self.scale + angles.float()[..., None]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.kind == "residual":
            positions, hidden, residual = args
            total = hidden if residual is None else hidden + residual
            return self.change(total, positions), total
        if self.kind == "swapped":
            hidden, positions, residual = kwargs["x"], args[0], kwargs["residual"]
            total = hidden if residual is None else hidden + residual
            return self.change(total, positions), total
        if self.kind == "unused residual":
            positions, hidden, _ = args
            return hidden + self.change(hidden, positions), hidden
        if self.kind == "one":
            return args[1] + self.change(args[1], args[0])
        (hidden,), (cosines, _) = args, kwargs["rotations"]  # "batch": [1, n, width]
        return hidden + self.change(hidden, cosines)


def call(layer: nn.Module, kind: str, positions: torch.Tensor, handed: Any) -> Any:
    """As a model's forward calls it."""
    if kind in ("residual", "unused residual"):
        return layer(positions, *(handed if isinstance(handed, tuple) else (handed, None)))
    if kind == "swapped":
        hidden, residual = handed if isinstance(handed, tuple) else (handed, None)
        return layer(positions, x=hidden, residual=residual)
    if kind == "one":
        return layer(positions, handed)
    return layer(handed, rotations=(positions[None] * 3, positions[None] * 5), mask=None)


def learn(kind: str, form: HiddenForm) -> tuple[list[VllmLayerCall], list[Any]]:
    layers = [Layer(kind, index) for index in range(3)]
    handed: Any = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    handed = handed[None] if kind == "batch" else handed
    with recording_calls(layers) as recorded:
        for layer in layers:
            handed = call(layer, kind, POSITIONS, handed)
    return learn_calls(layers, recorded, POSITIONS, form), recorded


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("residual", added),
        ("swapped", added),
        ("unused residual", first),
        ("one", added),
        ("batch", added),
    ],
)
def test_any_rows_of_a_layer_give_what_they_give_in_the_forward(kind: str, form: HiddenForm) -> None:
    calls, recorded = learn(kind, form)
    rows = torch.tensor([0, 3, 4, 9])
    for learnt, was in zip(calls, recorded, strict=True):
        inputs = [at.take(was.before)[rows] for at in learnt.inputs]
        assert len(inputs) == (2 if kind == "batch" else 0)
        out = learnt(POSITIONS[rows], hidden_before(was, learnt)[rows], inputs)
        assert torch.allclose(out, hidden_after(was, learnt)[rows], atol=1e-5)
        whole = hidden_after(was, learnt)
        returned = learnt.returned(whole.clone())
        parts = returned if isinstance(returned, tuple) else (returned,)
        assert torch.equal(form([part.reshape(ROWS, WIDTH) for part in parts]), whole)


def test_an_unused_residual_is_no_sum() -> None:
    """So that the check of each layer refuses the first form, and tries the next."""
    calls, recorded = learn("unused residual", added)
    out = calls[1](POSITIONS, hidden_before(recorded[1], calls[1]))
    assert not torch.allclose(out, hidden_after(recorded[1], calls[1]), atol=1e-2)


def test_rows_against_rows_are_refused() -> None:
    class Masked(nn.Module):
        def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return mask @ hidden

    layers, hidden = [Masked(), Masked()], torch.ones(ROWS, WIDTH)
    with recording_calls(layers) as recorded:
        for layer in layers:
            hidden = layer(hidden, torch.ones(ROWS, ROWS).tril())
    with pytest.raises(ModelNotBlendableError, match=r"argument 1 of layer 0 is a tensor \[11, 11\]"):
        learn_calls(layers, recorded, POSITIONS, added)


def test_a_model_that_changes_what_layers_hand_on_is_refused() -> None:
    layers, hidden = [Layer("one", 0), Layer("one", 1)], torch.ones(ROWS, WIDTH)
    with recording_calls(layers) as recorded:
        for layer in layers:
            hidden = layer(POSITIONS, hidden * 2)
    with pytest.raises(ModelNotBlendableError, match="layer 1 does not take what layer 0 gives"):
        learn_calls(layers, recorded, POSITIONS, added)
