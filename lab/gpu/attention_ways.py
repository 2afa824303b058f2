"""Ways to attend with scattered rows: our kernel, and what PyTorch, flash-attn and vLLM have.

A way takes the rows, does what it needs once for a pass, and returns the call of one layer, which gives
[rows, heads, head_dim]. It raises what it likes where it cannot serve.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from cacheblend.core.kernels import attention, operations
from cacheblend.core.kernels.attention import AttentionSpec

_PAGE = 256  # tokens: what flash-attn's pages are multiples of
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a prompt and what they attend to.

    Attributes:
        query: [heads, rows, head_dim].
        keys, values: [kv_heads, length, head_dim].
        positions: [rows] int64, ascending, on the device.
        at: the same on the host.
        spec: of the layer.
        dry_run: whether nothing is to be compiled.
    """

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    at: list[int]
    spec: AttentionSpec
    dry_run: bool

    @property
    def group(self) -> int:
        return self.query.shape[0] // self.keys.shape[0]

    @cached_property
    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as a paged cache, [pages, page, kv_heads, head_dim]: an engine has one, we have not."""
        kv_heads, length, head_dim = self.keys.shape
        shape = (-(-length // _PAGE), _PAGE, kv_heads, head_dim)
        whole = [self.keys.new_zeros(shape) for _ in range(2)]
        for pages, dense in zip(whole, (self.keys, self.values), strict=True):
            pages.view(-1, kv_heads, head_dim)[:length] = dense.transpose(0, 1)
        return whole[0], whole[1]

    @property
    def rows_first(self) -> torch.Tensor:
        return self.query.transpose(0, 1).contiguous()


@dataclass(frozen=True, eq=False)
class Runs:
    """Rows that follow each other, as sequences of a batch: each sees the keys up to its last row.

    Attributes:
        begins: [runs + 1] int32, where each begins among the rows, and the number of rows.
        seen: [runs] int32, keys that its last row sees.
        table: [runs, pages] int32, the same pages for all.
        longest: rows of a run.
        most: keys that the last run sees.
    """

    begins: torch.Tensor
    seen: torch.Tensor
    table: torch.Tensor
    longest: int
    most: int

    @classmethod
    def of(cls, rows: Rows) -> "Runs":
        """From positions on the host: on the device their number would not be known without waiting for it."""
        at, device = rows.at, rows.query.device
        begins = [row for row in range(len(at)) if row == 0 or at[row] != at[row - 1] + 1] + [len(at)]
        seen = [at[end - 1] + 1 for end in begins[1:]]
        pages = torch.arange(len(rows.pages[0]), dtype=torch.int32, device=device)
        make = partial(torch.tensor, dtype=torch.int32, device=device)
        longest = max(end - begin for begin, end in pairwise(begins))
        return cls(make(begins), make(seen), pages.repeat(len(seen), 1), longest, seen[-1])


def ours(rows: Rows) -> Call:
    """What serves this device."""
    return partial(operations.attend_rows, rows.query, rows.keys, rows.values, rows.positions, rows.spec)


def plain(rows: Rows) -> Call:
    """Its counterpart in PyTorch: SDPA by groups of rows, with a mask of each, and the positions read each time."""
    return partial(attention.attend_rows, rows.query, rows.keys, rows.values, rows.positions, rows.spec)


def one_mask(rows: Rows) -> Call:
    """SDPA with one boolean mask, [rows of a KV head's queries, length]."""
    kv_heads, length, head_dim = rows.keys.shape
    seen = torch.arange(length, device=rows.query.device) <= rows.positions[:, None]
    mask = seen.repeat(rows.group, 1)
    query = rows.query.reshape(1, kv_heads, -1, head_dim)

    def call() -> torch.Tensor:
        scale = rows.spec.scaling
        out = scaled_dot_product_attention(query, rows.keys[None], rows.values[None], attn_mask=mask, scale=scale)
        return out.view(len(rows.query), -1, head_dim).transpose(0, 1)

    return call


def flex(rows: Rows) -> Call:
    """FlexAttention with a mask by position; compiled for these numbers of rows and keys."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    positions = rows.positions

    def sees(batch: Any, head: Any, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key <= positions[row]

    count, length, device = rows.query.shape[1], rows.keys.shape[1], str(rows.query.device)
    mask = create_block_mask(sees, None, None, count, length, device=device)
    if rows.dry_run:
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    attend: Any = flex_attention if rows.dry_run else torch.compile(flex_attention, dynamic=False)
    grouped = rows.group > 1

    def call() -> torch.Tensor:
        query, keys, values = rows.query[None], rows.keys[None], rows.values[None]
        out = attend(query, keys, values, block_mask=mask, scale=rows.spec.scaling, enable_gqa=grouped)
        return torch.transpose(out[0], 0, 1)

    return call


def torch_varlen(rows: Rows) -> Call:
    """PyTorch's flash attention over runs in pages (its versions that take a block table)."""
    attend = import_module("torch.nn.attention.varlen").varlen_attn
    runs, query = Runs.of(rows), rows.rows_first
    return partial(
        attend, query, *rows.pages, runs.begins, None, runs.longest, runs.most, scale=rows.spec.scaling,
        window_size=(-1, 0), enable_gqa=rows.group > 1, seqused_k=runs.seen, block_table=runs.table,
    )  # fmt: skip


def flash_attn(rows: Rows) -> Call:
    """flash-attn's kernel over runs in pages."""
    attend = import_module("flash_attn").flash_attn_varlen_func
    runs, query = Runs.of(rows), rows.rows_first
    ends = torch.nn.functional.pad(runs.seen.cumsum(0, dtype=torch.int32), (1, 0))
    return partial(
        attend, query, *rows.pages, runs.begins, ends, runs.longest, runs.most,
        softmax_scale=rows.spec.scaling, causal=True, block_table=runs.table,
    )  # fmt: skip


def vllm_flash_attn(rows: Rows) -> Call:
    """vLLM's build of the same kernel."""
    attend = import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    runs, query = Runs.of(rows), rows.rows_first
    return partial(
        attend, query, *rows.pages, max_seqlen_q=runs.longest, cu_seqlens_q=runs.begins,
        max_seqlen_k=runs.most, seqused_k=runs.seen, softmax_scale=rows.spec.scaling, causal=True,
        block_table=runs.table,
    )  # fmt: skip


OURS = "cacheblend"
WAYS: Mapping[str, Callable[[Rows], Call]] = {
    OURS: ours,
    "PyTorch, masks by group": plain,
    "PyTorch, one mask": one_mask,
    "FlexAttention": flex,
    "PyTorch varlen": torch_varlen,
    "flash-attn varlen": flash_attn,
    "vLLM varlen": vllm_flash_attn,
}
"""By name."""
