"""The forms in which callers have passages and documents: one text, whatever library it comes from."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.documents import Document
from cacheblend.engines.tokens import Passage
from cacheblend.retrievers.client import text_id

TEXT = "The bell was sold."


@dataclass
class LangChainLike:
    page_content: str
    metadata: dict[str, Any] = field(default_factory=dict)
    id: str | None = None


@dataclass
class HaystackLike:
    content: str
    meta: dict[str, Any] = field(default_factory=dict)
    id: str = "h"


class NodeLike:
    """As LlamaIndex's: what a model is shown has metadata in it."""

    node_id, metadata = "n", {"title": "node"}

    def get_content(self, metadata_mode: str = "none") -> str:
        return {"none": TEXT, "llm": f"file: a\n\n{TEXT}"}[metadata_mode]


class PlainNode(NodeLike):
    def get_content(self) -> str:  # type: ignore[override]
        return TEXT


FORMS: list[tuple[Any, Passage]] = [
    (TEXT, Passage(TEXT)),
    (Passage(TEXT, "bell"), Passage(TEXT, "bell")),
    (Document("a", TEXT, "bell"), Passage(TEXT, "bell")),
    ({"text": TEXT}, Passage(TEXT)),
    ({"title": "bell", "text": TEXT}, Passage(TEXT, "bell")),
    ({"title": None, "contents": TEXT}, Passage(TEXT)),
    ({"content": TEXT, "meta": {"title": "bell"}}, Passage(TEXT, "bell")),
    ({"page_content": TEXT, "metadata": {"source": "b.txt"}, "id": None, "type": "Document"}, Passage(TEXT, "b.txt")),
    ({"text": TEXT, "content": None}, Passage(TEXT)),
    (LangChainLike(TEXT, {"source": "b.txt"}), Passage(TEXT, "b.txt")),
    (LangChainLike(TEXT, {"title": "bell", "source": "b.txt"}), Passage(TEXT, "bell")),
    (LangChainLike(TEXT, {"title": 7}), Passage(TEXT)),
    (HaystackLike(TEXT, {"title": "bell"}), Passage(TEXT, "bell")),
    (NodeLike(), Passage(f"file: a\n\n{TEXT}", "node")),
    (PlainNode(), Passage(TEXT, "node")),
    (SimpleNamespace(text=TEXT, title="bell"), Passage(TEXT, "bell")),
]


@pytest.mark.parametrize(("value", "passage"), FORMS, ids=[f"{n}-{type(f[0]).__name__}" for n, f in enumerate(FORMS)])
def test_forms_of_a_passage(value: Any, passage: Passage) -> None:
    assert Passage.is_like(value)
    assert Passage.of(value) == passage


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (None, "got None"),
        (5, "got 5"),
        (b"bytes", "got b'bytes'"),
        ([TEXT], r"got \['The bell"),
        ({}, "got {}"),
        ({"title": "bell"}, "got {'title'"),
        ({"text": 5}, "got {'text': 5}"),
        ({"text": TEXT, "page_content": "another"}, "with one text, not several"),
        ({"role": "user", "content": TEXT}, "not a message"),
        (SimpleNamespace(role="user", content=TEXT), "not a message"),
        (SimpleNamespace(content=TEXT, text=TEXT, type="human", additional_kwargs={}), "got namespace"),
        (LangChainLike, "got <class"),
        (NodeLike, "got <class"),
    ],
)
def test_what_is_no_passage(value: Any, why: str) -> None:
    assert not Passage.is_like(value)
    with pytest.raises(InvalidInputError, match=f"^document 3: a passage is a Passage, .*{why}"):
        Passage.of(value, "document 3")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from(["text", "content", "page_content", "title", "meta", "role", "id"]), inner)
    ),
)


@given(VALUES)
def test_any_value_is_a_passage_or_refused(value: Any) -> None:
    for of in (Passage.of, Document.of):
        try:
            found = of(value)
        except InvalidInputError as error:
            assert "\n" not in str(error)
        else:
            assert isinstance(found, Passage | Document) and isinstance(found.text, str)


def test_forms_of_a_document() -> None:
    for value, document in (
        ({"id": "a", "text": TEXT, "title": "bell"}, Document("a", TEXT, "bell")),
        (LangChainLike(TEXT, {"source": "b"}, "a"), Document("a", TEXT, "b")),
        (HaystackLike(TEXT), Document("h", TEXT)),
        (PlainNode(), Document("n", TEXT, "node")),
    ):
        assert Document.of(value) == document
    with pytest.raises(InvalidInputError, match=r"document 2 has no id.*Document\(id, text\)"):
        Document.of(LangChainLike(TEXT), "document 2")
    assert Document.of(LangChainLike(TEXT, id=text_id(TEXT))).id == text_id(TEXT)


def test_forms_of_the_libraries_themselves() -> None:
    documents = pytest.importorskip("langchain_core.documents")
    messages = pytest.importorskip("langchain_core.messages")
    found = documents.Document(page_content=TEXT, metadata={"source": "b.txt"}, id="7")
    assert Passage.of(found) == Passage.of(found.model_dump()) == Passage(TEXT, "b.txt")
    assert Document.of(found) == Document("7", TEXT, "b.txt")
    assert not Passage.is_like(messages.HumanMessage(TEXT))


def test_forms_of_llamaindex_itself() -> None:
    schema = pytest.importorskip("llama_index.core.schema")
    llms = pytest.importorskip("llama_index.core.llms")
    node = schema.TextNode(text=TEXT, id_="7", metadata={"file": "a"}, excluded_llm_metadata_keys=[])
    shown = f"file: a\n\n{TEXT}"
    assert Passage.of(node) == Passage.of(schema.NodeWithScore(node=node, score=0.5)) == Passage(shown)
    assert Document.of(node) == Document("7", shown)
    assert not Passage.is_like(llms.ChatMessage(role="user", content=TEXT))
