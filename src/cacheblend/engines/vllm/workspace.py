"""The memory that blending takes of a GPU beside vLLM's own. Knows sizes; knows neither vLLM nor tensors."""

from dataclasses import dataclass, fields

from cacheblend.core.fuse.batching import ROWS_OPEN

READ_AHEAD = 2  # layers
READ_AHEAD_BYTES = 128 << 20
"""Of each prompt's layers that are loaded ahead, but always one layer: eight prompts at once take 1 GiB."""

_ATTENTION = 5 << 26  # a mask of 64 Mi numbers of 2 bytes, at most as large before it is repeated, and booleans


@dataclass(frozen=True)
class ModelSizes:
    """What the memory depends on.

    Attributes:
        layers: of the model.
        width: of the hidden state.
        intermediate: width of the MLP; of a mixture of experts, of those that a row goes through.
        kv_width: KV heads of this rank x head dimension.
        item_bytes: of a number.
        longest: tokens of the longest prompt.
        tile_rows: rows that go through a layer at once.
    """

    layers: int
    width: int
    intermediate: int
    kv_width: int
    item_bytes: int
    longest: int
    tile_rows: int


@dataclass(frozen=True)
class Workspace:
    """Bytes at most, by what they are for.

    Attributes:
        hidden: hidden states of all rows of a prompt and of those that wait, and the copy of the rows that are kept.
        layers: a layer's KV of the whole prompt, those that are read ahead, and their records as stored; and what
            waiting prompts read ahead.
        tile: a layer's intermediate results for the rows that go through it at once.
        attention: masks.
        chunks: KV of the chunks that are being captured, in all layers.
    """

    hidden: int
    layers: int
    tile: int
    attention: int
    chunks: int

    @property
    def total(self) -> int:
        """Bytes of all."""
        return sum(getattr(self, each.name) for each in fields(self))

    def __str__(self) -> str:
        parts = ", ".join(f"{each.name} {gib(getattr(self, each.name))}" for each in fields(self))
        return f"{gib(self.total)} ({parts})"


def workspace_of(sizes: ModelSizes) -> Workspace:
    """The memory that blending needs at most on one rank."""
    layer = 2 * sizes.kv_width * sizes.longest * sizes.item_bytes
    ahead = max(1, min(READ_AHEAD, READ_AHEAD_BYTES // max(1, layer)))
    rows = 2 * sizes.longest + ROWS_OPEN
    waiting = 2 * sizes.kv_width * ROWS_OPEN * sizes.item_bytes  # one layer of the prompts that wait
    return Workspace(
        hidden=rows * sizes.width * sizes.item_bytes,
        layers=layer * (1 + 2 * ahead) + max(2 * waiting, READ_AHEAD_BYTES),
        tile=sizes.tile_rows * (4 * sizes.width + 3 * sizes.intermediate) * sizes.item_bytes,
        attention=_ATTENTION,
        chunks=2 * sizes.kv_width * sizes.tile_rows * sizes.layers * sizes.item_bytes,
    )


def gib(nbytes: int) -> str:
    """As people read it."""
    return f"{nbytes / 2**30:.2f} GiB"
