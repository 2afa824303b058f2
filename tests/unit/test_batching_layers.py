"""Several passes batched through a layer: the same numbers as one by one, and an error ends only its own pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from cacheblend.core.fuse.batching import LayerRows, LayerSteps, run_alone, run_together
from cacheblend.core.fuse.runner import Attend
from cacheblend.core.kernels.attention_spec import AttentionSpec

HEADS, WIDTH = 2, 8
SPEC = AttentionSpec(scaling=1.0)


@dataclass
class Runner:
    """A layer that mixes a row's features, adds its position, and attends; on integers, so that sums are exact."""

    positions: torch.Tensor
    counts: list[int] = field(default_factory=list)

    num_layers = 1

    def embed(self) -> torch.Tensor:
        return torch.zeros(len(self.positions), HEADS * WIDTH)

    def project(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def run(self, layer: int, hidden: torch.Tensor, rows: torch.Tensor, attend: Attend) -> torch.Tensor:
        self.counts.append(len(rows))
        mixed = hidden.roll(layer + 1, dims=1) + self.positions[rows, None]
        heads = mixed.view(len(rows), HEADS, WIDTH).transpose(0, 1)
        return attend(heads, heads + 1, heads + 2, SPEC).flatten(1)


@dataclass
class Pass:
    """One prompt's pass through a layer, in tiles; attention is a running sum over its own rows."""

    first: int
    rows: int
    tile: int = 100
    fails_at: str = ""
    seen: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner = Runner(torch.arange(self.first, self.first + self.rows))
        self.hidden = torch.arange(self.rows * HEADS * WIDTH).view(self.rows, -1).float()

    def steps(self, layer: int = 0) -> LayerSteps:
        if self.fails_at == "load":
            raise OSError("cannot be read")
        for start in range(0, self.rows, self.tile):
            rows = torch.arange(start, min(start + self.tile, self.rows))
            self.hidden[rows] = yield LayerRows(self.runner, layer, self.hidden[rows], rows, self.attend)
        if self.fails_at == "end":
            raise ValueError("wrong output")

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        if self.fails_at == "attention":
            raise RuntimeError("attention failed")
        self.seen.append(values)
        return (query + keys + values.cumsum(1)).transpose(0, 1)


class Join:
    """Combines runners of several prompts; records the number of rows per prompt in each call."""

    def __init__(self) -> None:
        self.tiles: list[list[int]] = []

    def __call__(self, calls: Sequence[LayerRows]) -> Runner:
        self.tiles.append([len(call.rows) for call in calls])
        runners = [call.runner for call in calls]
        assert all(isinstance(runner, Runner) for runner in runners)
        return Runner(torch.cat([runner.positions[call.rows] for runner, call in zip(runners, calls, strict=True)]))  # type: ignore[attr-defined]


def alone(first: int, rows: int, tile: int = 100) -> torch.Tensor:
    one = Pass(first, rows, tile)
    run_alone(one.steps())
    return one.hidden


@pytest.mark.parametrize(("tile_rows", "tiles"), [(12, [[5, 3, 4]]), (8, [[5, 3]]), (4, []), (9, [[5, 4]])])
def test_batched_passes_equal_single_passes(tile_rows: int, tiles: list[list[int]]) -> None:
    shapes = [(0, 5), (7, 3), (2, 4)]
    if tile_rows == 9:
        shapes = [(0, 5), (2, 4), (7, 3)]  # the pass that does not fit runs alone
    passes, join = [Pass(*shape) for shape in shapes], Join()
    assert run_together([each.steps() for each in passes], join, tile_rows) == [None] * 3
    assert join.tiles == tiles
    for each, shape in zip(passes, shapes, strict=True):
        assert torch.equal(each.hidden, alone(*shape))


def test_a_pass_of_several_tiles_runs_them_in_order() -> None:
    passes, join = [Pass(0, 10, tile=4), Pass(3, 3)], Join()
    assert run_together([each.steps() for each in passes], join, 7) == [None] * 2
    assert join.tiles == [[4, 3]]
    assert torch.equal(passes[0].hidden, alone(0, 10, tile=4))
    assert torch.equal(passes[1].hidden, alone(3, 3))


@pytest.mark.parametrize(("where", "kind"), [("load", OSError), ("end", ValueError)])
def test_an_error_ends_only_its_own_pass(where: str, kind: type[Exception]) -> None:
    passes = [Pass(0, 5), Pass(7, 3, fails_at=where), Pass(2, 4)]
    ended = run_together([each.steps() for each in passes], Join(), 100)
    assert isinstance(ended[1], kind)
    assert (ended[0], ended[2]) == (None, None)
    assert torch.equal(passes[2].hidden, alone(2, 4))


def test_a_failed_tile_fails_all_its_passes_and_no_others() -> None:
    passes = [Pass(0, 5), Pass(7, 3, fails_at="attention"), Pass(2, 40)]
    steps = [each.steps() for each in passes]
    ended = run_together(steps, Join(), 10)
    assert [type(error) for error in ended] == [RuntimeError, RuntimeError, type(None)]
    assert torch.equal(passes[2].hidden, alone(2, 40))
    assert all(next(step, "closed") == "closed" for step in steps)


@pytest.mark.parametrize("where", ["load", "attention"])
def test_without_isolation_the_first_error_is_raised(where: str) -> None:
    passes, join = [Pass(0, 5), Pass(7, 3, fails_at=where), Pass(2, 40)], Join()
    with pytest.raises((OSError, RuntimeError)):
        run_together([each.steps() for each in passes], join, 10, isolate=False)
    assert join.tiles == ([] if where == "load" else [[5, 3]])
