"""How a model calls its decoder layers, learnt from one forward pass of its own. Names no architecture.

    recorded:  layer 2 (positions, hidden, residual) -> (hidden, residual)
               layer 3 (positions, hidden, residual) -> ...
    learnt:    argument 0 is the positions; what comes out at 0 and 1 goes in at 1 and 2; the rest is as recorded

A layer is then called with other rows: their positions, and their hidden state, which a `HiddenForm` makes of what the
layers hand on. Whether that is right is not decided here: `BlendModel` compares each layer with the model's own
forward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cacheblend.core.errors import ModelNotBlendableError


@dataclass(frozen=True)
class RecordedCall:
    """One call of a layer in the model's own forward."""

    leaves: list[Any]  # the arguments, nested ones flattened; the objects that were passed
    spec: Any  # how they are nested, as (args, kwargs)
    before: list[Any]  # copies of them, as they were before the layer ran
    outputs: list[Any]  # what the layer returned, flattened; the objects
    output_spec: Any  # how they are nested
    after: list[Any]  # copies of them, as they were when the layer returned


HiddenForm = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""From the tensors that a layer hands on, [n, width] each, to the one hidden state; may write over the last."""


def added(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their sum: a layer's output, and the residual sum of all before it, which the next layer's norm adds."""
    *others, last = parts
    for part in others:
        last = last.add_(part)
    return last


def first(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first: it is the whole sum already, and the others are not needed (Cohere's layers)."""
    return parts[0]


FORMS: tuple[HiddenForm, ...] = (added, first)
"""Tried in this order; the first serves with which all layers compute what they do in the model's own forward."""


@dataclass(frozen=True)
class RowsAt:
    """A tensor of rows, [n, ...], among arguments or results."""

    place: int  # which one, of all of them flattened
    ones: int  # dimensions of size 1 in front of the rows: transformers' layers take [1, n, width]

    def take(self, leaves: Sequence[Any]) -> torch.Tensor:
        tensor: torch.Tensor = leaves[self.place]
        return tensor.reshape(tensor.shape[self.ones :])

    def put(self, leaves: list[Any], rows: torch.Tensor) -> None:
        leaves[self.place] = rows.reshape((1,) * self.ones + rows.shape)


@dataclass(frozen=True)
class VllmLayerCall:
    """Calls one layer with any rows. The hidden state is passed as the first of `state`, and None as the others, as
    layer 0 is called."""

    module: Callable[..., Any]
    leaves: tuple[Any, ...]  # see `RecordedCall`; None in place of tensors of rows
    spec: Any
    positions: tuple[RowsAt, ...]
    state: tuple[RowsAt, ...]  # what is handed on from layer to layer
    inputs: tuple[RowsAt, ...]  # further ones, which the model computes in front of its layers: cosines and sines
    handed_on: tuple[RowsAt, ...]
    results: tuple[RowsAt, ...]  # all that are returned
    output_spec: Any
    form: HiddenForm

    def __call__(
        self, positions: torch.Tensor, hidden: torch.Tensor, inputs: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        leaves = list(self.leaves)
        for at in self.positions:
            at.put(leaves, positions)
        for at, rows in zip(self.inputs, inputs, strict=True):
            at.put(leaves, rows)
        self.state[0].put(leaves, hidden)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        outputs = pytree.tree_leaves(self.module(*args, **kwargs))
        return self.form([at.take(outputs) for at in self.handed_on])

    def returned(self, hidden: torch.Tensor) -> Any:
        """What the layer would return if [n, width] were the hidden state behind it."""
        leaves: list[Any] = [None] * self.output_spec.num_leaves
        for at in self.results:
            at.put(leaves, torch.zeros_like(hidden))
        self.handed_on[0].put(leaves, hidden)
        return pytree.tree_unflatten(leaves, self.output_spec)


def learn_calls(
    modules: Sequence[Callable[..., Any]], recorded: Sequence[RecordedCall], positions: torch.Tensor, form: HiddenForm
) -> list[VllmLayerCall]:
    """How each layer is called; `positions`: [n] of that forward, where n is the size of no other dimension. Raises
    ModelNotBlendableError: a layer does not take what the one before gives, or takes rows against rows."""
    links = [_link(index, before, after) for index, (before, after) in enumerate(pairwise(recorded))]
    if not links:
        raise ModelNotBlendableError("the model has one decoder layer; blending needs two or more")
    calls = []
    for index, (module, call) in enumerate(zip(modules, recorded, strict=True)):
        rows = _rows_at(f"argument {{}} of layer {index}", call.before, len(positions))
        results = _rows_at(f"result {{}} of layer {index}", call.after, len(positions))
        places = links[index - 1][1] if index else _first_state(call, recorded[1], links[0][1], rows)
        state = tuple(rows[place] for place in places if place in rows)
        of_positions = tuple(at for at in rows.values() if torch.equal(at.take(call.before), positions))
        inputs = tuple(at for at in rows.values() if at not in state and at not in of_positions)
        kept = [None if place in (*rows, *places) else leaf for place, leaf in enumerate(call.leaves)]
        handed_on = tuple(results[place] for place in links[min(index, len(links) - 1)][0])
        given = tuple(kept), call.spec, of_positions, state, inputs
        calls.append(VllmLayerCall(module, *given, handed_on, tuple(results.values()), call.output_spec, form))
    return calls


def hidden_before(call: RecordedCall, learnt: VllmLayerCall) -> torch.Tensor:
    """The hidden state [n, width] in front of a recorded layer."""
    return learnt.form([at.take(call.before).clone() for at in learnt.state])


def hidden_after(call: RecordedCall, learnt: VllmLayerCall) -> torch.Tensor:
    """The hidden state [n, width] behind a recorded layer."""
    return learnt.form([at.take(call.after).clone() for at in learnt.handed_on])


def _link(index: int, before: RecordedCall, after: RecordedCall) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which results of a layer are which arguments of the next: (places of results, places of arguments)."""
    pairs = [
        (result, place)
        for result, output in enumerate(before.outputs)
        for place, leaf in enumerate(after.leaves)
        if isinstance(output, torch.Tensor) and leaf is output
    ]
    if not pairs:
        raise ModelNotBlendableError(
            f"layer {index + 1} does not take what layer {index} gives: the model changes it between them"
        )
    return tuple(result for result, _ in pairs), tuple(place for _, place in pairs)


def _first_state(
    call: RecordedCall, second: RecordedCall, places: tuple[int, ...], rows: dict[int, RowsAt]
) -> tuple[int, ...]:
    """Where layer 0 takes the embeddings: where layer 1 takes what layer 0 gives, unless it is called otherwise."""
    if call.spec == second.spec:
        return places
    floats = tuple(place for place in rows if call.before[place].is_floating_point())
    if len(floats) != 1:
        raise ModelNotBlendableError(
            f"layer 0 is called otherwise than layer 1, with {len(floats)} tensors of rows; blending needs one"
        )
    return floats


def _rows_at(what: str, leaves: Sequence[Any], rows: int) -> dict[int, RowsAt]:
    found = {}
    for place, leaf in enumerate(leaves):
        shape = list(leaf.shape) if isinstance(leaf, torch.Tensor) else []
        if rows not in shape:
            continue
        ones = shape.index(rows)
        if shape.count(rows) > 1 or shape[:ones] != [1] * ones:
            raise ModelNotBlendableError(
                f"{what.format(place)} is a tensor {shape} that has the {rows} rows elsewhere than in its first "
                "dimension, or more than once; blending cannot take some of them"
            )
        found[place] = RowsAt(place, ones)
    return found
