"""Passes of several prompts through a layer together, their rows beside each other in the engine's products.

    prompt 1   . r r . r   \
    prompt 2   r . . r .    >  one call of the layer: r r r r r r r  ->  each prompt's attention over its own KV
    prompt 3   . . r . r   /

Behind the last selection a prompt has few rows, and a product of few rows costs nearly as much as one of many: the
weights have to be read anyway.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from cacheblend.core.attention import AttentionSpec
from cacheblend.core.walk import Attend, LayerWalk


@dataclass(frozen=True)
class LayerRows:
    """Rows of one prompt in front of a layer; the fields are the arguments of `LayerWalk.run`."""

    walk: LayerWalk
    layer: int
    hidden: torch.Tensor
    rows: torch.Tensor
    attend: Attend

    def run(self) -> torch.Tensor:
        """The layer's output for these rows alone."""
        return self.walk.run(self.layer, self.hidden, self.rows, self.attend)


LayerSteps = Generator[LayerRows, torch.Tensor, None]
"""A pass on its way through one layer: it yields rows and is sent the layer's output for them, until it is through."""


class RunsLayer(Protocol):
    """What is left of a walk where rows of several prompts stand in front of a layer."""

    def run(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        """See `LayerWalk.run`; rows 0, 1, ... are those of the prompts, in order."""
        ...


Join = Callable[[Sequence[LayerRows]], RunsLayer]
"""An engine's: puts rows of several prompts side by side in front of the same layer."""


def run_alone(steps: LayerSteps) -> None:
    """One pass through its layer."""
    try:
        rows = next(steps)
        while True:
            rows = steps.send(rows.run())
    except StopIteration:
        return


def run_in_lockstep(
    passes: Sequence[LayerSteps], join: Join, tile_rows: int, *, isolate: bool = True
) -> list[Exception | None]:
    """Passes through the layer that all of them stand in front of.

    Args:
        passes: of prompts that share the model, not the KV cache.
        join: the engine's.
        tile_rows: rows that go through a layer at once; a pass that has more by itself yields tiles of its own.
        isolate: a pass that fails ends alone. Tensor-parallel ranks must not go on without it: False raises at once.

    Returns:
        What ended each pass, None where it is through. Rows that failed together fail all of their passes.
    """
    ended: list[Exception | None] = [None] * len(passes)
    waiting: dict[int, LayerRows] = {}

    def go_on(number: int, output: torch.Tensor | None) -> None:
        try:
            waiting[number] = next(passes[number]) if output is None else passes[number].send(output)
        except StopIteration:
            pass
        except Exception as error:  # of one pass: the others go on
            if not isolate:
                raise
            ended[number] = error

    for number in range(len(passes)):
        go_on(number, None)
    while waiting:
        together = _as_many_as_fit(waiting, tile_rows)
        tile = [waiting.pop(number) for number in together]
        try:
            outputs = _run_together(tile, join) if len(tile) > 1 else [tile[0].run()]
        except Exception as error:
            if not isolate:
                raise
            for number in together:
                passes[number].close()
                ended[number] = error
            continue
        for number, output in zip(together, outputs, strict=True):
            go_on(number, output)
    return ended


def _run_together(tile: Sequence[LayerRows], join: Join) -> Sequence[torch.Tensor]:
    """One call of the layer for the rows of all; each attends over its own prompt's KV."""
    counts = [len(call.rows) for call in tile]
    hidden = torch.cat([call.hidden for call in tile])
    rows = torch.arange(len(hidden), device=hidden.device)

    def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        parts = zip(tile, *(torch.split(part, counts, dim=1) for part in (query, keys, values)), strict=True)
        return torch.cat([call.attend(q, k, v, spec) for call, q, k, v in parts])

    return torch.split(join(tile).run(tile[0].layer, hidden, rows, attend), counts)


def _as_many_as_fit(waiting: dict[int, LayerRows], tile_rows: int) -> list[int]:
    """The first one, and of the others those that leave a tile in its bounds."""
    chosen: list[int] = []
    room = tile_rows
    for number, call in waiting.items():
        if not chosen or len(call.rows) <= room:
            chosen.append(number)
            room -= len(call.rows)
    return chosen
