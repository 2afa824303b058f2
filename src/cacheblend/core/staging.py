"""Records on their way to the device where they are needed.

On a CPU they are there. On CUDA they go through pinned memory on a stream of their own, beside the layers that are
computed meanwhile; whoever uses them makes its stream wait for that copy alone, and the host waits for nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch


class Staging:
    """One request's.

    Args:
        device: where records are needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        make: Any = torch.cuda.Stream  # torch has no types for it
        self._stream = make(device) if device.type == "cuda" else None

    def send(self, records: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """The records on the device, and what `receive` needs. May be called from any thread.

        torch keeps pinned memory that is given back, and hands it out again once its copy is done.
        """
        if self._stream is None:
            return list(records), None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            sent = [r if r.is_cuda else r.pin_memory().to(self._device, non_blocking=True) for r in records]
            return sent, self._stream.record_event()

    def receive(self, records: Sequence[torch.Tensor], sent: Any) -> None:
        """Behind this call the caller's stream may use the records."""
        if sent is None:
            return
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(sent)
        for record in records:
            record.record_stream(stream)  # its memory is not handed out before this stream is through
