"""What kernels are tested with beside their counterparts, and how many cases were compared; `conftest` prints it.

Knows neither hypothesis nor a device: tests draw the cases, or write them down.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from cacheblend.core.kernels.kv_placement import Placement
from cacheblend.core.plan.codec import codec_of
from reference_attention import dense_attention

ATTENTION_TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
STEP = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-6}  # of the number's size


@dataclass
class Counted:
    """Cases in which a kernel was compared, and in how many of them it was wrong."""

    cases: int = 0
    wrong: int = 0


counted = Counted()
"""Since the test began; `conftest` sets it back."""


def compare(is_right: bool, what: object = "") -> None:
    """Counts a case, and fails if the kernel is wrong."""
    counted.cases += 1
    counted.wrong += not is_right
    assert is_right, what


# ---- attention ----------------------------------------------------------------------------------------------


def paged(
    keys: torch.Tensor, values: torch.Tensor, page: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same as a cache of blocks in any order, and its block table; blocks of nobody are NaN."""
    kv_heads, length, head_dim = keys.shape
    used = -(-length // page)
    table = torch.randperm(used + 3, generator=torch.Generator().manual_seed(seed))[:used]
    caches = []
    for each in (keys, values):
        padded = each.new_full((kv_heads, used * page, head_dim), torch.nan)
        padded[:, :length] = each
        cache = each.new_full((used + 3, page, kv_heads, head_dim), torch.nan)
        cache[table.to(each.device)] = padded.view(kv_heads, used, page, head_dim).permute(1, 2, 0, 3)
        caches.append(cache)
    return caches[0], caches[1], table.to(keys.device, torch.int32)


def compare_attention(
    query: Any, keys: Any, values: Any, positions: Any, spec: Any, splits: int | None = None, page: int | None = None
) -> None:
    """The kernel beside the dense oracle, over buffers or over pages."""
    from cacheblend.core.kernels import attention_triton

    expected = dense_attention(query, keys, values, positions, spec)
    table = None
    if page is not None:
        keys, values, table = paged(keys, values, page)
    out = attention_triton.attend_rows(query, keys, values, positions, spec, block_table=table, splits=splits)
    assert out.dtype == query.dtype and out.shape == (query.shape[1], query.shape[0], query.shape[2])
    error = (out.float() - expected.float()).abs().max().item()
    compare(error <= ATTENTION_TOLERANCE[query.dtype], f"off by {error}")


def compare_asking(*given: Any) -> None:
    """The kernel for rows that ask beside plain PyTorch: their attention, and the weights that keys receive."""
    from cacheblend.core.kernels import attention, attention_triton

    expected, found = attention.attend_asking(*given), attention_triton.attend_asking(*given)
    assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(found, expected, strict=True))
    errors = [float((a.float() - b.float()).abs().max()) for a, b in zip(found, expected, strict=True)]
    compare(errors[0] <= ATTENTION_TOLERANCE[given[0].dtype] and errors[1] <= 2e-5, f"off by {errors}")


# ---- placing ------------------------------------------------------------------------------------------------


def records(name: str, tokens: list[int], kv_heads: int, head_dim: int, dtype: Any, seed: int, device: str) -> Any:
    """Random records of a codec, with so many tokens each."""
    random = torch.Generator().manual_seed(seed)
    codec = codec_of(name)
    shapes = [(kv_heads, 2, count, head_dim) for count in tokens]
    return [codec.encode(torch.randn(shape, generator=random).to(dtype)).to(device) for shape in shapes]


def placed(place: Any, records: Any, placement: Placement, rotation: Any, shape: Any, dtype: Any) -> torch.Tensor:
    """Buffers [2, kv_heads, length, head_dim], 9 where nothing was placed."""
    buffers = torch.full((2, *shape), 9.0, dtype=dtype, device=device_of(records))
    place(records, placement, *buffers, rotation)
    return buffers


def placed_in_pages(
    place: Any, records: Any, placement: Placement, rotation: Any, shape: Any, dtype: Any, page: int
) -> Any:
    """As `placed`, from a paged cache, beside whether its other places were left alone."""
    kv_heads, length, head_dim = shape
    blocks, device = -(-length // page), device_of(records)
    table = torch.randperm(blocks + 2)[:blocks].to(device, torch.int32)
    caches = torch.full((2, blocks + 2, page, kv_heads, head_dim), 9.0, dtype=dtype, device=device)
    place(records, placement, *caches, rotation, table)
    rows = caches[:, table.long()].reshape(2, blocks * page, kv_heads, head_dim).transpose(1, 2)
    others = torch.ones(blocks + 2, dtype=torch.bool, device=device).index_fill(0, table.long(), value=False)
    untouched = bool((rows[:, :, length:] == 9).all()) and bool((caches[:, others] == 9).all())
    return rows[:, :, :length], untouched


def is_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Within a step of the type."""
    distance = (found.float() - expected.float()).abs()
    return bool((distance <= STEP[found.dtype] * expected.float().abs().clamp(min=1.0)).all())


def compare_placing(case: Any, page: int | None = None) -> None:
    """The kernel beside plain PyTorch; of raw records, no bit of what is not moved changes. Half of the cases have
    records that are known by their addresses."""
    from cacheblend.core.kernels import kv_placement, kv_placement_triton

    made, placement, rotation, *_ = case
    expected = placed(kv_placement.place, *case)
    if len(placement.pieces) % 2:
        case = located(made), *case[1:]
        assert torch.equal(placed(kv_placement.place, *case), expected)
    if page is None:
        found, is_right = placed(kv_placement_triton.place, *case), True
    else:
        found, is_right = placed_in_pages(kv_placement_triton.place, *case, page)
    is_right = is_right and is_close(found, expected)
    if placement.codec == "raw":
        still = [piece for piece in placement.pieces if rotation is None or not piece.offset]
        is_right = is_right and torch.equal(found[1], expected[1])
        is_right = is_right and all(
            torch.equal(found[0][:, p.start : p.stop], expected[0][:, p.start : p.stop]) for p in still
        )
    compare(is_right, "placed differently")


def located(records: Any) -> Any:
    """The same records in one memory, each at a multiple of 16 bytes."""
    from cacheblend.core.kernels.kv_placement import Located

    step = 16 // records[0].element_size()
    starts = [0, *accumulate(-(-record.numel() // step) * step for record in records)]
    memory = records[0].new_empty(starts.pop())
    for start, record in zip(starts, records, strict=True):
        memory[start : start + record.numel()] = record.flatten()
    table = torch.tensor([memory.data_ptr() + start * memory.element_size() for start in starts], device=memory.device)
    kinds = [(record.nbytes, record.dtype, record.device) for record in records]
    return Located(memory, starts, [record.shape for record in records], kinds, table)


def device_of(records: Any) -> torch.device:
    """Where the records are."""
    device: torch.device = records[0].device
    return device


# ---- deviation ----------------------------------------------------------------------------------------------


def compare_deviation(fresh: Any, loaded: Any, measure: Any, positions: Any = None) -> None:
    """The kernel beside plain PyTorch."""
    from cacheblend.core.kernels import deviation, deviation_triton

    found = deviation_triton.kv_deviation(fresh, loaded, measure, positions)
    expected = deviation.kv_deviation(fresh, loaded, measure, positions)
    compare(torch.allclose(found, expected, rtol=1e-4, atol=1e-6), (found, expected))
