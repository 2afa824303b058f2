"""The memory that blending takes of a GPU beside vLLM's own."""

from dataclasses import dataclass, fields

from cacheblend.core.fuse.batching import ROWS_OPEN
from cacheblend.engines.histories import MOST_SECTION
from cacheblend.engines.shadow import ANSWER_TOKENS, MOST_WAITING

READ_AHEAD = 8  # layers
"""As many as the embedded engine: a store answers unevenly, and short prompts' layers are small. Those of long prompts
are bounded by `READ_AHEAD_BYTES`, so that the workspace hardly grows with it."""

COPIED = 1 << 28  # bytes of histories that a step may copy from vLLM's cache: a millisecond of a GPU
READ_AHEAD_BYTES = 128 << 20  # of each prompt's layers loaded ahead, but always one: eight prompts take 1 GiB
HELD_COPIES = 4  # copies of held rows while they are read from the paged cache: blocks, in one order, rows, the record
_MASKS = 5 << 26  # a mask of 64 Mi numbers of 2 bytes, at most as large before it is repeated, and booleans
_PROGRAMS = 512  # of the attention kernel that share rows: less than two for each of a GPU's processors
_SLOTS = 128  # rows times query heads that a program computes
_WEIGHTS = 3 * 4 << 24  # the question's attention weights: 16 Mi numbers in fp32, three times


@dataclass(frozen=True)
class ModelSizes:
    """What the memory depends on, of one rank."""

    layers: int
    width: int
    intermediate: int  # of a mixture of experts, of those that a row goes through
    query_width: int  # heads x head dimension
    kv_width: int
    head_dim: int
    item_bytes: int
    longest: int  # prompt, in tokens
    tile_rows: int  # that go through a layer at once
    has_kernels: bool = False  # `core.kernels` serves the device
    in_pages: bool = False  # prompts are blended in vLLM's own cache
    checked_vocab: int = 0  # tokens of the vocabulary, if answers are compared with full prefill
    tier_bytes: int = 0  # of stored records that the device keeps
    has_histories: bool = False  # text is computed behind what the store holds of it, in buffers


@dataclass(frozen=True)
class Workspace:
    """Bytes at most, by what they are for."""

    hidden: int  # states of all rows of a prompt and of those that wait, and the copy of the rows that are kept
    # a layer's records as stored, and those that are read ahead; without pages also as many buffers of the prompt's
    # length; and what waiting prompts read ahead
    layers: int
    held: int  # copies of what vLLM's own cache holds of a prompt; none with pages
    tile: int  # a layer's intermediate results for the rows that go through it at once
    attention: int  # masks, or the parts that several programs of the kernel compute
    question: int  # what the question's pass takes more than a tile and its attention
    # KV of the chunks that are being captured, in all layers, and of what is copied; what a history's prefix is loaded
    # into
    chunks: int
    check: int = 0  # a prompt that is computed once more in full, beside those above
    tier: int = 0  # stored records that are kept there, with ``cuda://`` in the store's URL

    @property
    def total(self) -> int:
        return sum(getattr(self, each.name) for each in fields(self))

    def __str__(self) -> str:
        parts = ", ".join(f"{each.name} {gib(getattr(self, each.name))}" for each in fields(self))
        return f"{gib(self.total)} ({parts})"


def workspace_of(sizes: ModelSizes) -> Workspace:
    """The memory that blending needs at most on one rank, and that of the records that are kept there."""
    layer = 2 * sizes.kv_width * sizes.longest * sizes.item_bytes
    ahead = max(1, min(2 * READ_AHEAD - 1, READ_AHEAD_BYTES // max(1, layer)))  # several are read at once
    records, buffers = (1 + ahead) * layer, 0 if sizes.in_pages else (1 + ahead) * layer
    rows = 2 * sizes.longest + ROWS_OPEN
    waiting = 2 * sizes.kv_width * ROWS_OPEN * sizes.item_bytes  # one layer of the prompts that wait
    attending = 4 * sizes.query_width + 6 * sizes.kv_width  # as projected, rotated and laid out; or the MLP's results
    tile = sizes.tile_rows * (4 * sizes.width + max(3 * sizes.intermediate, attending)) * sizes.item_bytes
    attention = attention_bytes(sizes)
    captured = max(sizes.tile_rows, min(sizes.longest, MOST_SECTION) if sizes.has_histories else 0)
    # Of the shadow check: hidden states and a layer's KV of the prompt that is computed in full; a layer as read from
    # vLLM's cache and with the answer's rows behind it; logits of two passes, and of the answers that wait.
    read = (HELD_COPIES if sizes.in_pages else 0) + 1  # `Workspace.held` has the copies otherwise
    logits = (2 * ANSWER_TOKENS + MOST_WAITING + 1) * sizes.checked_vocab * 4
    check = sizes.longest * sizes.width * sizes.item_bytes + (1 + read) * layer + logits
    return Workspace(
        hidden=rows * sizes.width * sizes.item_bytes,
        layers=records + buffers + max(waiting if sizes.in_pages else 2 * waiting, READ_AHEAD_BYTES),
        held=0 if sizes.in_pages else HELD_COPIES * layer,
        tile=tile,
        attention=attention,
        question=max(0, question_bytes(sizes) - tile - attention),
        chunks=2 * sizes.kv_width * captured * sizes.layers * sizes.item_bytes
        + (COPIED + records + (1 + ahead) * layer if sizes.has_histories else 0),
        check=check if sizes.checked_vocab else 0,
        tier=sizes.tier_bytes,
    )


def attention_bytes(sizes: ModelSizes) -> int:
    """Of attention beside its result: the kernel's partial sums in fp32, or PyTorch's masks."""
    return _PROGRAMS * _SLOTS * (sizes.head_dim + 2) * 4 if sizes.has_kernels else _MASKS


def question_bytes(sizes: ModelSizes) -> int:
    """Of the question's pass: a copy of a layer's stored rows, the same in fp32, and attention weights. Correcting keys
    takes less, of the active rows: fresh and stored keys, and both in fp32; and never at the same time."""
    return 2 * sizes.kv_width * sizes.longest * (sizes.item_bytes + 4) + _WEIGHTS


def gib(nbytes: int) -> str:
    """As people read it."""
    return f"{nbytes / 2**30:.2f} GiB"
