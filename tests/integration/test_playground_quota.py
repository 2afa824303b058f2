"""What the page stores counts against its key's quota before it is stored, and only once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from cacheblend.core.plan.prompt import Prompt, part_of, text
from cacheblend.engines.hf import BlendEngine
from cacheblend.nano import model_path
from cacheblend.serve.keys import ANYONE
from cacheblend.serve.routes import playground
from cacheblend.serve.routes.playground import Explain
from cacheblend.serve.settings import ServeSettings
from cacheblend.serve.state import ServerState
from cacheblend.serve.tenants import Tenants
from cacheblend.store.base import SMALL_FILE_BYTES

WHOLE, PART, CHUNKS = 200, 10, 3


@pytest.fixture(scope="module")
def engine() -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained(model_path(), store="memory", config={"capture": False}) as opened:
        yield opened


@contextmanager
def explaining(
    engine: BlendEngine, store_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], dict[str, Any]]]:
    """The page's answers about a prompt that has a part of each of some chunks."""
    ids = np.arange(CHUNKS * WHOLE) % 199 + 20
    parts = [part_of(each, 1, PART, f"{number}") for number, each in enumerate(np.split(ids, CHUNKS))]
    prompt = Prompt.of([text([20, 21, 22]), *parts, text([23, 24])])
    monkeypatch.setattr(engine, "chat_prompt", lambda *_: prompt)
    state = ServerState(engine, ServeSettings(store_bytes=store_bytes))
    asked = Explain.model_validate({"documents": [{"text": "a"}], "question": "b"})
    try:
        yield lambda: playground._explain(state, asked, ANYONE)
    finally:
        state.scheduler.close()
        state.tenants.close()
        state.close()


def test_a_part_of_a_passage_counts_as_the_whole_which_is_what_is_stored(
    engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = CHUNKS * (Tenants(engine, None, None).size_of(WHOLE) + SMALL_FILE_BYTES)
    with explaining(engine, need - 1, monkeypatch) as explain:
        assert explain()["stored"] == 0 and not engine.store.manifests()
    with explaining(engine, need, monkeypatch) as explain:
        assert explain()["stored"] == CHUNKS
        monkeypatch.setattr(Tenants, "reserve", refuse_more)
        assert explain()["hit_tokens"]["memory"] == CHUNKS * PART


def refuse_more(tenants: Tenants, key: object, tokens: int, files: int = 1) -> bool:
    assert (tokens, files) == (0, 0), "what is stored is reserved again"
    return True
