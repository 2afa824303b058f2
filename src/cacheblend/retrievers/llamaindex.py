"""LlamaIndex: a postprocessor that makes retrieved nodes passages of a request, stored when they are indexed.

passages = PassagePostprocessor(server=DocumentServer("http://127.0.0.1:8000"))
passages.index(nodes)
found = passages.postprocess_nodes(index.as_retriever().retrieve(question), query_str=question)
llm.chat([ChatMessage(role="user", content=question)], extra_body={"documents": documents_of(found)})
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.documents import Document as StoredDocument
from cacheblend.engines.tokens import Passage
from cacheblend.retrievers.client import PassageIndex, distinct

try:
    from llama_index.core.bridge.pydantic import Field
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle
except ImportError as error:
    raise InvalidInputError("the adapter for LlamaIndex needs it: pip install 'cacheblend[llamaindex]'") from error


class PassagePostprocessor(PassageIndex, BaseNodePostprocessor):
    """Leaves of nodes with equal texts the first, and stores nodes when they are indexed, by their `node_id`: `server`
    stores them, in `index`. A parser gives nodes new ids at every run, unless it is told others: then pass the ids that
    are gone to `remove`. No text is computed twice for it."""

    server: Any = Field(default=None, exclude=True)

    @classmethod
    def class_name(cls) -> str:
        """The name by which LlamaIndex serialises it."""
        return "CacheBlendPassagePostprocessor"

    @staticmethod
    def document_of(passage: BaseNode) -> StoredDocument:
        return replace(StoredDocument.of(passage), title="")  # which is in the text that a model is shown

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return distinct(nodes, empty=True)


def documents_of(nodes: Sequence[NodeWithScore]) -> list[dict[str, str]]:
    """The field ``documents`` of a chat request: each is a chunk. LlamaIndex's own parts of a message are joined into
    one text, in which no passage can be recognised."""
    return [{"text": Passage.of(each).text, "title": ""} for each in distinct(nodes)]
