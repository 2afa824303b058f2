"""A separate CUDA stream for loading, so that copies overlap with computing.

Records go through pinned memory, and are decompressed and written into their buffers on that stream while layers
compute on another, which waits for the result. Streams wait for each other; the host waits for neither. On a CPU all
methods do nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch


class Staging:
    """One request's use of the loading stream.

    Args:
        device: on which records are needed.

    Attributes:
        device: the same with its index.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda" and device.index is None:  # another thread may have another device
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Work that is started inside goes onto the loading stream."""
        if self.device.type != "cuda":
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(_stream(self.device)):
            yield

    def send(self, record: torch.Tensor) -> torch.Tensor:
        """The record on the device; the copy may still be in progress on the current stream.

        torch reuses freed pinned memory only once its copy is done.
        """
        if self.device.type != "cuda" or record.is_cuda:
            return record
        return record.pin_memory().to(self.device, non_blocking=True)

    def now(self) -> Any:
        """An event for `wait`: all work started so far on the current stream is done."""
        return torch.cuda.current_stream(self.device).record_event() if self.device.type == "cuda" else None

    def wait(self, event: Any, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Work that is started on the current stream after this call runs after an event of another stream.

        Args:
            event: of the other stream; None: no wait.
            tensors: allocated on the other stream and used on this one: their memory is not reused before this stream
                is done with them.
        """
        if event is None:
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(stream)


@cache
def _stream(device: torch.device) -> Any:
    """One for each device: torch caches memory by stream, so a stream for each request would cost memory for each."""
    make: Any = torch.cuda.Stream  # torch has no types for it
    return make(device)
