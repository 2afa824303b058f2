"""LlamaIndex: a postprocessor that makes retrieved nodes passages of a request, stored when they are indexed.

    passages = PassagePostprocessor(server=DocumentServer("http://127.0.0.1:8000"))
    passages.index(nodes)
    found = passages.postprocess_nodes(index.as_retriever().retrieve(question), query_str=question)
    llm.chat([ChatMessage(role="user", content=question)], extra_body={"documents": documents_of(found)})

Knows LlamaIndex's nodes and postprocessors.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.documents import Document as StoredDocument
from cacheblend.engines.tokens import Passage
from cacheblend.retrievers.client import DocumentServer, IndexReport, distinct

try:
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle
except ImportError as error:
    raise InvalidInputError("the adapter for LlamaIndex needs it: pip install 'cacheblend[llamaindex]'") from error


class PassagePostprocessor(BaseNodePostprocessor):
    """Leaves of nodes with equal texts the first, and stores nodes when they are indexed.

    It asks the server for nothing while a query is answered: a passage that is not stored is computed with the request.

    Attributes:
        server: stores nodes, in `index`.
    """

    server: Any = None

    @classmethod
    def class_name(cls) -> str:
        """The name by which LlamaIndex serialises it."""
        return "CacheBlendPassagePostprocessor"

    def index(self, nodes: Iterable[BaseNode]) -> IndexReport:
        """Stores nodes by their `node_id`; edited ones are replaced. To be called when they are indexed.

        A parser gives nodes new ids at every run, unless it is told others: then pass the ids that are gone to
        `remove`. No text is computed twice for it.

        Raises:
            InvalidInputError: no server was given, an id cannot be kept, or has two texts.
            DocumentServerError: the server does not answer or refuses.
        """
        return self._server().put(StoredDocument(each.node_id, _text(each)) for each in nodes)

    async def aindex(self, nodes: Iterable[BaseNode]) -> IndexReport:
        """See `index`."""
        return await asyncio.to_thread(self.index, nodes)

    def remove(self, node_ids: Iterable[str]) -> int:
        """Drops nodes; how many there were. Raises as `index`."""
        return self._server().drop(node_ids)

    async def aremove(self, node_ids: Iterable[str]) -> int:
        """See `remove`."""
        return await asyncio.to_thread(self.remove, node_ids)

    def _server(self) -> DocumentServer:
        if not isinstance(self.server, DocumentServer):
            raise InvalidInputError(
                "this postprocessor has no server to store nodes: give it server=DocumentServer(...)"
            )
        return self.server

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return distinct(nodes, _text)


def documents_of(nodes: Sequence[NodeWithScore]) -> list[dict[str, str]]:
    """The field ``documents`` of a chat request: each is a chunk. LlamaIndex's own parts of a message are joined into
    one text, in which no passage can be recognised."""
    return [{"text": _text(each), "title": ""} for each in distinct(nodes, _text)]


def _text(node: BaseNode | NodeWithScore) -> str:
    """What LlamaIndex shows a model of a node, its metadata included."""
    return Passage.of(node).text
