"""What the host knows to the device, without a wait: small arrays such as positions, ids and tables. A copy from
ordinary memory makes the host wait until all earlier work of the stream is done. One from page-locked memory does not:
torch's allocator for it (`pin_memory`) notes which stream copies from it (`record_event` in ATen's cuda/Copy.cu, for
copies with ``non_blocking``), and gives the memory to nobody else before the copy is done. So the source may be dropped
at once."""

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt
import torch


def upload(data: npt.NDArray[np.generic] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """The array on the device, as work sees it that is started on its current stream after this call; one that is there
    already as it is, and on a CPU in the same memory."""
    tensor = data if isinstance(data, torch.Tensor) else torch.from_numpy(data)
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def waits_on(device: torch.device) -> Hashable:
    """Whose work sees what is uploaded now: the device's current stream; of a CPU, everything."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else device


def upload_together(arrays: Sequence[npt.NDArray[np.integer]], device: torch.device) -> list[torch.Tensor]:
    """Arrays of whole numbers as int64 on the device, in one copy: [n] each, views of one tensor."""
    joined = upload(np.concatenate([array.astype(np.int64, copy=False) for array in arrays]), device)
    return list(torch.split(joined, [len(array) for array in arrays]))
