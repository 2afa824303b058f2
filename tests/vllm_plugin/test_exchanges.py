"""What tensor-parallel ranks exchange for a blend, counted: threads stand in for ranks."""

from typing import Any

import pytest
import torch

import paged_scenes
from cacheblend.core.select.selectors import Hkvd, NoRows
from cacheblend.engines.vllm.jobs import StepJobs
from cacheblend.engines.vllm.worker.ranks import Ranks
from cacheblend.engines.vllm.worker.tasks import WAITING
from cacheblend.engines.vllm.worker.worker import Worker
from rank_threads import Meeting, ThreadGroup, on_all


class Counted(ThreadGroup):
    """Counts what ranks exchange: between devices for selections and in layers, and on the host, but there not how
    often they ask in vain whether a layer has been read, which is as often as the machine is slow."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(meeting, rank)
        self.selections = self.collectives = self.host = 0

    def combine(self, value: torch.Tensor, how: Any, before: Any) -> torch.Tensor:
        self.selections += 1
        return super().combine(value, how, before)

    def collective(self, value: float, at: str = "all reduce") -> float:
        self.collectives += 1
        return super().collective(value, at)

    def maximum(self, values: list[int]) -> list[int]:
        agreed = super().maximum(values)
        self.host += agreed != [WAITING]
        return agreed


@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize("checks", [(), (1,), (1, 2)])
def test_a_check_takes_one_all_reduce_and_no_layer_takes_one_for_selection(
    checks: tuple[int, ...], in_pages: bool
) -> None:
    """And on the host: whether a layer can go on, is loaded, and has ended, and one in front of each collective."""
    layers, tiles = paged_scenes.LAYERS, 5  # of the layers in front of the first check, of 234 rows
    selector = Hkvd(checks, (0.2, 0.1)[: len(checks)]) if checks else NoRows()

    def work(group: ThreadGroup, ranks: Any) -> tuple[Counted, Any]:
        counted = Counted(group._meeting, group.rank)
        between = lambda: counted.collective(1.0, "layer")  # noqa: E731
        one = paged_scenes.Scene(in_pages=in_pages, between=between, ranks=Ranks(counted))
        worker = Worker(one.opener, selector, budget=10**6)
        counted.selections = counted.collectives = counted.host = 0
        worker.step(StepJobs(blend=[one.job(range(1, 16), selector=selector)]))
        while not worker.take_provided():
            worker.step(StepJobs())
        outcomes = worker.take_outcomes()
        worker.close()
        return counted, outcomes["one"]

    found, _ = on_all(2, work)
    for counted, outcome in found:
        assert outcome.failure == ""
        assert counted.selections == len(checks)
        opening, finishing = 1, 1
        assert counted.host == opening + 3 * layers + counted.selections + counted.collectives + finishing
        ran = counted.collectives / 2  # the model's own, for each tile
        assert layers <= ran <= layers * tiles
