"""The operations, each served by whatever is fastest and right on its tensors' device."""

from collections.abc import Callable

import torch

from cacheblend.core.kernels import attention
from cacheblend.core.kernels.attention_spec import AttentionSpec, check_shapes
from cacheblend.core.kernels.registry import Kernel, Operation

AttendRows = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, AttentionSpec], torch.Tensor]

_MAX_HEAD_DIM = 256  # of kernels: wider tiles do not fit
_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 6e-2}  # of numbers around 1: a few steps of the type


def attend_rows(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Attention of some rows of a prompt over its keys; see `attention.attend_rows`.

    A kernel does not wait for the device, so it cannot check that positions are below the keys' length: a row behind
    them sees all keys.

    Raises:
        InvalidInputError: the shapes do not fit together.
    """
    check_shapes(query, keys, values, positions)
    if query.shape[2] > _MAX_HEAD_DIM:
        return attention.attend_rows(query, keys, values, positions, spec)
    return ATTEND_ROWS.on(query.device, query.dtype).call(query, keys, values, positions, spec)


def _load_triton_attention() -> AttendRows:
    from cacheblend.core.kernels import attention_triton

    return attention_triton.attend_rows


def _serves(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in _TOLERANCE and torch.cuda.get_device_capability(device) >= (8, 0)


def attention_differs(kernel: AttendRows, plain: AttendRows, device: torch.device, dtype: torch.dtype) -> str:
    """Compares scattered rows with windows, caps and sinks; in fp32 on the host's generator, so that it is the same
    everywhere."""
    draw = torch.Generator().manual_seed(0)
    for head_dim, window, softcap, has_sinks in ((64, None, None, False), (128, 40, 20.0, True)):
        shapes = (8, 37, head_dim), (2, 300, head_dim), (2, 300, head_dim)
        query, keys, values = (torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes)
        positions = torch.randperm(300, generator=draw)[:37].sort().values.to(device)
        sinks = torch.randn(8, generator=draw).to(device) if has_sinks else None
        spec = AttentionSpec(head_dim**-0.5, window, softcap, sinks)
        found, expected = (each(query, keys, values, positions, spec).float() for each in (kernel, plain))
        error = float((found - expected).abs().max())
        if not error <= _TOLERANCE[dtype]:
            return f"differs from PyTorch by {error:.2g} (head_dim {head_dim}), more than {_TOLERANCE[dtype]}"
    return ""


ATTEND_ROWS: Operation[AttendRows] = Operation(
    "attention of rows",
    attention.attend_rows,
    [Kernel("Triton", _serves, _load_triton_attention)],
    attention_differs,
)
