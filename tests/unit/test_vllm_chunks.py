"""Which tokens of a request are chunks, and which spans of a client's are refused."""

from typing import Any

import numpy as np
import pytest

from cacheblend.core.config import BlendConfig
from cacheblend.core.errors import InvalidInputError
from cacheblend.core.names import as_token_ids, block_name, root_name
from cacheblend.core.plan.blocks import ChunkManifest
from cacheblend.core.plan.chunk_matches import ChunkIndex
from cacheblend.core.plan.prompt import Prompt, text
from cacheblend.core.select.question_selectors import Query
from cacheblend.core.select.selectors import Head, Hkvd
from cacheblend.engines.chunk_index import with_matches
from cacheblend.engines.settings import BlendSettings
from cacheblend.engines.vllm.scheduler.options import RequestOptions, named_chunks, read_options

END = 9
PROMPT = [5, 6, END, 7, END, 8, 8]


def parts(prompt: Prompt) -> list[tuple[bool, list[int]]]:
    return [(segment.is_chunk, segment.token_ids.tolist()) for segment in prompt.segments]


def spans(*chunks: Any) -> dict[str, Any]:
    return {"cacheblend": {"chunks": list(chunks)}}


def index_of(*chunks: list[int]) -> ChunkIndex:
    root, index = root_name("a model", "float32"), ChunkIndex()
    for ids in (np.array(each, dtype="<u4") for each in chunks):
        name = block_name(root, ids)
        index.add([ChunkManifest(name, root, ids[:0], ids, (name,), label="a title")])
    return index


def find_chunks(
    ids: list[int], params: Any = None, *, chunk_end_token_id: int | None = None, index: ChunkIndex | None = None
) -> Prompt:
    """By the first way that applies, as the scheduler side does."""
    tokens = as_token_ids(ids)
    found = named_chunks(tokens, read_options(params, len(tokens)).spans, chunk_end_token_id)
    return with_matches(Prompt.of([text(tokens)]), index or index_of()) if found is None else found


def test_a_prompt_that_nobody_knows_is_text() -> None:
    assert parts(find_chunks(PROMPT)) == [(False, PROMPT)]
    assert parts(find_chunks(PROMPT, {"other": 1}, index=index_of(list(range(100))))) == [(False, PROMPT)]


def test_spans_of_the_client_go_before_all_else() -> None:
    found = find_chunks(PROMPT, spans([1, 3], (3, 5)), chunk_end_token_id=END, index=index_of())
    assert parts(found) == [(False, [5]), (True, [6, END]), (True, [7, END]), (False, [8, 8])]
    assert parts(find_chunks(PROMPT, spans(), chunk_end_token_id=END)) == [(False, PROMPT)]


def test_chunks_end_with_their_token_and_the_rest_is_the_question() -> None:
    found = find_chunks(PROMPT, chunk_end_token_id=END)
    assert parts(found) == [(True, [5, 6, END]), (True, [7, END]), (False, [8, 8])]


def test_a_prompt_that_is_one_chunk_or_has_an_empty_question_is_a_prompt() -> None:
    assert parts(find_chunks([5, END], chunk_end_token_id=END)) == [(True, [5, END])]
    assert parts(find_chunks(PROMPT, spans([0, 7]))) == [(True, PROMPT)]


def test_stored_chunks_are_found_where_nothing_is_marked() -> None:
    stored = list(range(100, 200))
    found = find_chunks([1, 2, *stored[3:], 3], chunk_end_token_id=END, index=index_of(stored))
    assert parts(found) == [(False, [1, 2]), (True, stored[3:]), (False, [3])]
    assert found.segments[1].offset == 3 and found.segments[1].label == "a title"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (spans([5, 8]), r"chunk 0 is \[5, 8\].*0\.\.7"),
        (spans([-1, 2]), "chunk 0 is"),
        (spans([2, 2]), "not empty"),
        (spans([0, 3], [2, 5]), r"\[2, 5\] begins before \[0, 3\] ends"),
        (spans([3, 5], [0, 2]), r"\[0, 2\] begins before \[3, 5\] ends"),
        (spans([0]), "two whole numbers"),
        (spans([0, "3"]), "two whole numbers"),
        (spans([False, True]), "two whole numbers"),
        (spans("03"), "two whole numbers"),
        ({"cacheblend": {"chunks": 3}}, "a list of"),
        ({"cacheblend": [[0, 3]]}, "must be an object"),
        ({"cacheblend": {"chunk": []}}, "unknown key 'chunk'"),
    ],
)
def test_spans_that_cannot_be_meant_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        find_chunks(PROMPT, params)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="empty"):
        find_chunks([])


def test_the_settings_of_a_request() -> None:
    assert read_options(None, 7) == read_options({"other": 1}, 7) == read_options({"cacheblend": {}}, 7)
    settings = BlendSettings(BlendConfig(check_layers=(2,)))
    default = read_options(None, 7)
    assert default == RequestOptions() and not default.sets_selection
    assert default.selector_of(settings) == settings.selector()
    given = read_options({"cacheblend": {"mode": "prefix", "recompute_ratio": 1, "selector": "head"}}, 7)
    assert (given.mode, given.selector_of(settings), given.sets_selection) == ("prefix", Head(1.0), True)
    named = read_options({"cacheblend": {"selector": "query"}}, 7)
    assert named.selector_of(BlendSettings(BlendConfig(check_layers=(2,), lead=3))) == Query(0.15)
    ratio = read_options({"cacheblend": {"recompute_ratio": 0.3}}, 7)
    assert ratio.selector_of(settings) == Hkvd((2,), (0.3,))
