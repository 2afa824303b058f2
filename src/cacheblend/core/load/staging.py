"""A device's own stream for what is loaded, beside the one that computes.

On CUDA, records go through pinned memory, are decompressed and put in place on that stream while layers are computed;
who computes makes its stream wait for the outcome. Streams wait for each other, the host for neither. On a CPU there
are no streams, and nothing of this is done.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


class Staging:
    """One request's use of it.

    Args:
        device: where records are needed.

    Attributes:
        device: the same, with its number.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:  # another thread may have another device
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is done inside goes onto the stream for loading."""
        if self.device.type != "cuda":
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(_stream(self.device)):
            yield

    def send(self, record: torch.Tensor) -> torch.Tensor:
        """The record on the device, or on its way there on the current stream.

        torch keeps pinned memory that is given back, and hands it out again once its copy is done.
        """
        if self.device.type != "cuda" or record.is_cuda:
            return record
        return record.pin_memory().to(self.device, non_blocking=True)

    def now(self) -> Any:
        """The moment when all that was begun on the current stream is done, for `wait`."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def wait(self, moment: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        """What is begun on the current stream behind this call runs behind that moment of another one.

        Args:
            moment: of the other stream.
            tensors: of the other stream, to be written on this one: their memory is not handed out before this one is
                through with them.
        """
        if moment is None:
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(moment)
        for tensor in tensors:
            tensor.record_stream(stream)


@cache
def _stream(device: torch.device) -> Any:
    """One a device: torch keeps memory by stream, and would keep a request's for each of many."""
    make: Any = torch.cuda.Stream  # torch has no types for it
    return make(device)
