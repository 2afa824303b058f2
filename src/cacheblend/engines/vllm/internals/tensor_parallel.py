"""vLLM's tensor-parallel group. Written for vLLM 0.31 to 0.33, in which the layers' collectives end in the methods
`COLLECTIVES` of the group, called directly or by the custom operations `torch.ops.vllm.*`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from vllm.distributed.parallel_state import get_tp_group

COLLECTIVES = ("_all_reduce_out_place", "_all_gather_out_place", "_reduce_scatter_out_place")
"""Methods of vLLM's group through which its layers exchange tensors."""


class TensorParallel:
    """The tensor-parallel ranks of this worker."""

    def __init__(self) -> None:
        self._group: Any = get_tp_group()
        self.size, self.rank = int(self._group.world_size), int(self._group.rank_in_group)

    def maximum(self, values: list[int]) -> list[int]:
        """The maximum of each value over all ranks; on the host, without waiting for devices."""
        found = torch.tensor(values, dtype=torch.int64)
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX, group=self._group.cpu_group)
        return [int(value) for value in found.tolist()]

    def combine(self, value: torch.Tensor, how: Literal["sum", "max"], before: Callable[[str], Any]) -> torch.Tensor:
        """The sum or the maximum of `value` over all ranks; calls `before` when nothing is left but to exchange."""
        joined = value.clone()
        before(f"{how} {value.numel()}")
        operation = torch.distributed.ReduceOp.SUM if how == "sum" else torch.distributed.ReduceOp.MAX
        torch.distributed.all_reduce(joined, op=operation, group=self._group.device_group)
        return joined

    def gather_heads(self, part: torch.Tensor) -> torch.Tensor:
        """Concatenates [kv_heads of a rank, ...] over all ranks, in their order."""
        gathered: torch.Tensor = self._group.all_gather(part.contiguous(), dim=0)
        return gathered

    @contextmanager
    def guarded(self, before: Callable[[str], Any]) -> Iterator[None]:
        """Inside, `before` is called in front of every collective of vLLM's layers with its name and size. What it
        raises is raised instead of the collective."""

        def checked(name: str, real: Callable[..., Any], input_: torch.Tensor, *args: Any, **options: Any) -> Any:
            # The output's memory is taken and given back here: it then is there in the collective, where a rank that
            # runs out of memory would leave the others waiting.
            input_.new_empty((self.size if name == "_all_gather_out_place" else 1) * input_.numel())
            before(f"{name} {input_.numel()}")
            return real(input_, *args, **options)

        names = [name for name in COLLECTIVES if hasattr(self._group, name)]
        for name in names:
            setattr(self._group, name, partial(checked, name, getattr(self._group, name)))
        try:
            yield
        finally:
            for name in names:
                delattr(self._group, name)  # the class has the method
