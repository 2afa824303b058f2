"""What a layer requires of attention, and what its arguments must be; shared by all implementations."""

from dataclasses import dataclass

import torch

from cacheblend.core.errors import InvalidInputError


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer requires of attention besides causality."""

    scaling: float  # factor on the dot products
    window: int | None = None  # the row at position p sees keys p - window + 1 .. p; None: 0 .. p.
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap); None: unchanged
    # [heads] logit of each head that takes part in the softmax and has no value; None: no sinks
    sinks: torch.Tensor | None = None
    # keys and values are the halves of one vector, twice as wide, that queries are as wide as, and that is both key and
    # value (`latent`); so attention gives vectors of that width
    is_latent: bool = False


@dataclass(frozen=True)
class HeadShape:
    """A layer's heads, as far as kernels are compiled for them."""

    heads: int  # of the query; a multiple of `kv_heads`
    kv_heads: int
    head_dim: int  # numbers of a head, as attention sees it
    # window, is_latent: see `AttentionSpec`; of a latent, what is placed is half as wide
    window: int | None = None
    is_latent: bool = False

    @property
    def placed_dim(self) -> int:  # of a key, and of a value, as they are stored and placed
        return self.head_dim // 2 if self.is_latent else self.head_dim


def check_shapes(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor, *, is_paged: bool = False
) -> None:
    """Raises `InvalidInputError` if these do not fit together; for the shapes see `attention.attend_rows`."""
    fits = (
        query.dim() == 3
        and keys.dim() == 3 + is_paged
        and keys.shape == values.shape
        and query.shape[2] == keys.shape[-1]
        and positions.shape == query.shape[1:2]
    )
    if not fits:
        raise InvalidInputError(
            f"query {tuple(query.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)} and "
            f"positions {tuple(positions.shape)} do not fit together"
        )
    heads, kv_heads = query.shape[0], keys.shape[2 if is_paged else 0]
    if kv_heads == 0 or heads % kv_heads:
        raise InvalidInputError(f"{heads} query heads are not a multiple of {kv_heads} KV heads")


def first_key(position: int, window: int | None) -> int:
    """The first key that is visible to a row at this position."""
    return 0 if window is None else max(0, position - window + 1)
