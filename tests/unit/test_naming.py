"""Names of blocks: chains, length-prefixed roots, ids."""

import hashlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.names import (
    as_token_ids,
    block_name,
    chain_names,
    join_ids,
    root_name,
    split_blocks,
)

ids_lists = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(ids_lists)
def test_ids_are_little_endian_uint32_whatever_they_came_in(ids: list[int]) -> None:
    forms = [ids, np.array(ids, dtype="i8"), np.array(ids, dtype=">u4"), torch.tensor(ids, dtype=torch.int64)]
    for form in forms:
        got = as_token_ids(form)
        assert got.dtype == np.dtype("<u4")
        assert got.flags["C_CONTIGUOUS"]
        assert got.tolist() == ids


def test_a_strided_view_is_hashed_as_what_it_holds() -> None:
    assert as_token_ids(np.arange(10)[::2]).tobytes() == as_token_ids([0, 2, 4, 6, 8]).tobytes()


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([1, -1], OverflowError, r"0\.\.4294967295, got -1\.\.1"),
        ([2**32], OverflowError, r"0\.\.4294967295, got 4294967296"),
        ([1.0], TypeError, "integers, not float64"),
        ([True], TypeError, "integers, not bool"),
        (["a"], TypeError, "integers, not <U1"),
        ([None], TypeError, "integers, not object"),
        ([[1, 2], [3, 4]], TypeError, r"one list.*shape \(2, 2\)"),
        (7, TypeError, "one list"),
    ],
)
def test_what_is_no_list_of_ids_is_refused(ids: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_token_ids(ids)  # type: ignore[arg-type]


@given(ids_lists, st.integers(1, 50))
def test_blocks_of_a_segment_are_full_but_the_last(ids: list[int], size: int) -> None:
    blocks = split_blocks(as_token_ids(ids), size)
    assert join_ids(blocks).tolist() == ids
    assert all(len(block) == size for block in blocks[:-1])
    assert all(1 <= len(block) <= size for block in blocks)


@given(st.lists(ids_lists.filter(bool), max_size=5))
def test_a_chain_is_each_block_behind_the_one_before(blocks: list[list[int]]) -> None:
    root = root_name("f", "bfloat16")
    arrays = [as_token_ids(block) for block in blocks]
    parent, expected = root, []
    for array in arrays:
        parent = hashlib.sha256(parent + np.array(array, dtype="<u4").tobytes()).digest()
        expected.append(parent)
    assert chain_names(root, arrays) == expected


def test_a_name_depends_on_every_token_in_front() -> None:
    root = root_name("f", "bfloat16")
    block = as_token_ids([7, 8])
    names = {
        block_name(root, block),
        *chain_names(root, [as_token_ids([1]), block]),
        *chain_names(root, [as_token_ids([2]), block]),
        *chain_names(root_name("g", "bfloat16"), [block]),
    }
    assert len(names) == 6
    assert all(len(name) == 32 for name in names)


def test_roots_of_different_parts_never_meet() -> None:
    """Parts whose concatenations are equal give different names, because lengths are hashed, too."""
    words = ["", "a", "b", "ab", "ba", "aab", "\0", "\0\0\0\1a", "ü"]
    tuples = list(itertools.product(words, repeat=3))
    roots = {root_name(fingerprint, dtype, salt=salt) for fingerprint, dtype, salt in tuples}
    assert len(roots) == len(tuples)


def test_codec_and_salt_have_roots_of_their_own() -> None:
    parts = [{}, {"codec": "int8"}, {"salt": "int8"}, {"codec": "int8", "salt": "raw"}, {"salt": "raw"}]
    assert len({root_name("f", "bfloat16", **part) for part in parts}) == len(parts)
    assert root_name("f", "bfloat16") == root_name("f", "bfloat16", "raw", "")
