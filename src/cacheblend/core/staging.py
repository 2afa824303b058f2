"""A device's own stream for what is loaded, beside the one that computes.

On CUDA, records go through pinned memory, are decompressed and moved on that stream while layers are computed;
whoever uses the outcome makes its stream wait for that alone, and the host waits for nothing. On a CPU there are no
streams, and nothing of this is done.
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
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, record: torch.Tensor) -> torch.Tensor:
        """The record on the device, or on its way there on the current stream.

        torch keeps pinned memory that is given back, and hands it out again once its copy is done.
        """
        if self._device.type != "cuda" or record.is_cuda:
            return record
        return record.pin_memory().to(self._device, non_blocking=True)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is done inside goes onto the stream for loading."""
        if self._device.type != "cuda":
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(_stream(self._device)):
            yield

    def done(self) -> Any:
        """For `receive`: the moment when all that was begun on the current stream is done."""
        return torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None

    def receive(self, tensors: Sequence[torch.Tensor], done: Any) -> None:
        """Behind this call the caller's stream may use tensors that were made on another, up to that moment."""
        if done is None:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(done)
        for tensor in tensors:
            tensor.record_stream(stream)  # its memory is not handed out before this stream is through


@cache
def _stream(device: torch.device) -> Any:
    """One a device: torch keeps memory by stream, and would keep a request's for each of many."""
    make: Any = torch.cuda.Stream  # torch has no types for it
    return make(device)
