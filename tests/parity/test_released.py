"""What a pass took is released when its result is, and not when the garbage collector comes by."""

import gc
import weakref

import pytest

from cacheblend.core.select.question_selectors import Query
from cacheblend.core.select.selectors import Hkvd, Selector
from families import tiny_model
from parity.scenes import RAG, open_engine


@pytest.mark.parametrize("selector", [Hkvd((1,), (0.2,)), Query(0.2)], ids=["hkvd", "query"])
@pytest.mark.parametrize("tile_rows", [32, 1024], ids=["tiles", "one tile"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_kv_cache_lives_as_long_as_its_result(family: str, tile_rows: int, selector: Selector) -> None:
    with open_engine(tiny_model(family), sentence_end_ids=[5, 9], tile_rows=tile_rows) as engine:
        engine.prefill(RAG, selector=selector)
        gc.collect()
        gc.disable()
        try:
            result = engine.prefill(RAG, selector=selector)
            alive = [weakref.ref(part) for layer in result.kv for part in layer]
            del result
            assert [ref for ref in alive if ref() is not None] == []
        finally:
            gc.enable()
