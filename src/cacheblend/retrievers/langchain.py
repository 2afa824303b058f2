"""LangChain: a retriever whose passages are stored when they are indexed, and sent as documents.

    retriever = PassageRetriever(retriever=store.as_retriever(), server=DocumentServer("http://127.0.0.1:8000"))
    retriever.index(documents)
    found = retriever.invoke(question)
    model.invoke([HumanMessage(question)], extra_body={"documents": documents_of(found)})

Knows LangChain's documents and retrievers.
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.documents import Document as StoredDocument
from cacheblend.engines.tokens import Passage
from cacheblend.retrievers.client import DocumentServer, IndexReport, distinct, text_id

try:
    from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.messages import HumanMessage
    from langchain_core.retrievers import BaseRetriever
except ImportError as error:
    raise InvalidInputError("the adapter for LangChain needs it: pip install 'cacheblend[langchain]'") from error


class PassageRetriever(BaseRetriever):
    """A retriever behind which passages are stored by a server.

    What it returns are the other retriever's documents, of equal texts one; what that raises is raised. It asks the
    server for nothing: a passage that is not stored is computed with the request.

    Attributes:
        retriever: finds the documents.
        server: stores them, in `index`.
    """

    retriever: BaseRetriever
    server: Any = None

    def index(self, documents: Iterable[Document]) -> IndexReport:
        """Stores passages; with ids of their own, edited ones are replaced. To be called when they are indexed.

        A document without an id is known by its text: once it is edited it is another one, and the old one stays until
        `remove(text_id(old text))`.

        Raises:
            InvalidInputError: no server was given, an id cannot be kept, or has two texts.
            DocumentServerError: the server does not answer or refuses.
        """
        return self._server().put(map(_stored, documents))

    async def aindex(self, documents: Iterable[Document]) -> IndexReport:
        """See `index`."""
        return await asyncio.to_thread(self.index, documents)

    def remove(self, ids: Iterable[str]) -> int:
        """Drops passages; how many there were. Raises as `index`."""
        return self._server().drop(ids)

    async def aremove(self, ids: Iterable[str]) -> int:
        """See `remove`."""
        return await asyncio.to_thread(self.remove, ids)

    def _server(self) -> DocumentServer:
        if not isinstance(self.server, DocumentServer):
            raise InvalidInputError(
                "this retriever has no server to store passages: give it server=DocumentServer(...)"
            )
        return self.server

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return distinct(self.retriever.invoke(query, {"callbacks": run_manager.get_child()}), _text)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        return distinct(await self.retriever.ainvoke(query, {"callbacks": run_manager.get_child()}), _text)


def documents_of(documents: Sequence[Document]) -> list[dict[str, str]]:
    """The field ``documents`` of a chat request to `cacheblend serve`: each is a chunk, however short it is."""
    return [{"text": _text(each), "title": _title(each)} for each in distinct(documents, _text)]


def chat_message(question: str, documents: Sequence[Document]) -> HumanMessage:
    """A user's message of passages and a question, as content parts, for any server that is OpenAI-compatible.

    `cacheblend serve` takes parts of at least ``--chunk-tokens`` (64) as chunks; vLLM joins them into one text, in
    which its plug-in finds them by content.
    """
    parts = [{"type": "text", "text": text} for text in (*map(_text, distinct(documents, _text)), question)]
    return HumanMessage(content=parts)


def _stored(document: Document) -> StoredDocument:
    return StoredDocument(document.id or text_id(_text(document)), _text(document), _title(document))


def _text(document: Document) -> str:
    return Passage.of(document).text


def _title(document: Document) -> str:
    return Passage.of(document).title[:256]
