"""A user's settings of blending; engines and the command line derive from them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from cacheblend.core.errors import InvalidInputError, check_encodable, check_type
from cacheblend.core.plan.chunk_matches import SHORTEST
from cacheblend.core.plan.codec import codec_of
from cacheblend.core.select.selection import Selection
from cacheblend.core.select.selectors import check_ratio

AnchorKind = Literal["auto", "none", "bos", "system", "text"]

ANCHOR_TEXT = (
    "The passages below were collected from different sources. Some of them are long and some are short. They describe "
    "people, places, events, numbers and ideas, and they were written by different authors at different times. Not all "
    "of them are about the same subject, and some of them may not be needed. Each passage stands on its own, but facts "
    "in one of them may be explained in another. Names, dates and quantities are given as they were found. A reader "
    "who looks for one fact should compare what the passages say before giving an answer, and should prefer what is "
    "stated plainly to what is only suggested.\n\n"
)
"""What stands in front of a chunk with the anchor ``text``. In a prompt a chunk has other passages in front of it, so
its KV there is nearer to that behind some hundred tokens than to that behind none; passages of the user's own did no
better, three of them worse (docs/log.md, 2026-11-27)."""


@dataclass(frozen=True)
class BlendConfig(Selection):
    """How prompts are blended: the fields of `Selection`, which decide quality, and those that say how an engine runs.

        BlendConfig(recompute_ratio=0.1, selector="hkvd", block_size=64)

    Attributes:
        anchor: tokens in front of a chunk when it is computed alone: the BOS token, the prompt's whole system prompt,
            none, or text: BOS, and `anchor_text`. auto: text where the tokenizer is known, each layer is attention over
            keys and values, and the text takes at most an eighth of the context; else BOS where the tokenizer sets one.
        anchor_text: the text of the anchor ``text``; None: `ANCHOR_TEXT`.
        block_size: most tokens of a block.
        codec: how stored chunks are compressed: raw (not at all), fp8, int8 or int4.
        salt: separates tenants who must not share a store's contents.
        tile_rows: rows that go through a layer at once; bounds the memory of a long prompt. 0: 1,024 on a CPU, and
            4,096 on a GPU, where the launches of a tile take as long as a small tile's work.
        read_ahead: layers loaded ahead of the one being computed.
        load_timeout_s: seconds that a request may wait for the store, look-ups included; then what it waits for is
            computed. What is loaded while layers compute does not count. None: as long as computing what is loaded
            takes, as measured, but half a second at least; infinite: as long as it takes. Look-ups and each tier have
            half a second of their own, or as long as this is where it is less.
        layer_graphs: on a GPU, start the kernels of a layer's up to 2,048 rows by two CUDA graphs, not one by one;
            pays where the host is slower than the device: short prompts and decoding. They are captured when a number
            of rows comes first, and take some hundred MB of the GPU's memory.
        cost_model: a cost model's file (`cacheblend calibrate`), from which the loading controller decides what is
            loaded, and raises the ratio where loading takes longer. None: everything stored is loaded.
        capture: store missed chunks after the request, in the background.
        capture_queue: most missed chunks that wait to be stored; further ones are dropped and counted.
        capture_batch_tokens: tokens (padding included) that `warm` computes at once.
        discover: find stored chunks in plain text, and learn text that recurs in requests, to be captured as chunks;
            not with the anchor ``system``, which is another one for each prompt.
        min_run_tokens: shorter runs of plain text are neither found nor learnt.
        watch_tokens: ids of recent prompts that are kept to learn from, 4 bytes each.
        edits: keep what prompts had computed in context, and load it where a later prompt of the same conversation has
            it at another place, behind an edit of its history; see `engines.histories`.
        edit_ratio: share of such tokens that is recomputed, the first of each run, where nothing else is loaded; 0..1.

    Raises:
        InvalidInputError: a value outside its limits; the message names field, value and limit.
    """

    anchor: AnchorKind = "auto"
    anchor_text: str | None = None
    block_size: int = 256
    codec: str = "raw"
    salt: str = ""
    tile_rows: int = 0
    read_ahead: int = 8
    load_timeout_s: float | None = None
    layer_graphs: bool = False
    cost_model: str | None = None
    capture: bool = True
    capture_queue: int = 256
    capture_batch_tokens: int = 4096
    discover: bool = True
    min_run_tokens: int = 64
    watch_tokens: int = 16 * 1024 * 1024
    edits: bool = False
    edit_ratio: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()  # the types of all fields, too
        least = {"block_size": 1, "tile_rows": 0, "capture_batch_tokens": 1, "read_ahead": 0, "capture_queue": 0}
        least |= {"min_run_tokens": SHORTEST, "watch_tokens": self.min_run_tokens}
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise InvalidInputError(f"{name} must be at least {limit}, got {getattr(self, name)}")
        if self.load_timeout_s is not None and not self.load_timeout_s > 0:
            raise InvalidInputError(
                f"load_timeout_s must be a number of seconds above 0, or none, got {self.load_timeout_s!r}"
            )
        check_ratio(self.edit_ratio, "edit_ratio")
        if self.edits and not self.capture:
            raise InvalidInputError("edits needs what earlier prompts had stored: set capture, or leave edits out")
        codec_of(self.codec)
        check_encodable(self.salt, f"salt {self.salt!r}")
        check_encodable(self.anchor_text or "", "anchor_text")
        if self.anchor_text is not None and self.anchor != "text":
            raise InvalidInputError("anchor_text has no effect without the anchor 'text'; set it, or give no text")

    @staticmethod
    def of(values: Mapping[str, Any]) -> "BlendConfig":
        """The configuration with these fields, and defaults for the others.

        Raises:
            InvalidInputError: there is no such field, or a value is outside its limits.
        """
        check_type(values, Mapping, "config", 'a BlendConfig or a mapping of its fields, {"recompute_ratio": 0.1}')
        known = [f.name for f in fields(BlendConfig)]
        for name in values:
            if name not in known:
                raise InvalidInputError(f"BlendConfig has no field {name!r}; it has {', '.join(known)}")
        return BlendConfig(**values)

    def on(self, device_type: str) -> "BlendConfig":
        """The same with what a device decides: `tile_rows` of ``cpu`` or another type."""
        return replace(self, tile_rows=self.tile_rows or (1024 if device_type == "cpu" else 4096))

    @property
    def selection(self) -> Selection:
        """The fields that decide quality."""
        return Selection(**{f.name: getattr(self, f.name) for f in fields(Selection)})
