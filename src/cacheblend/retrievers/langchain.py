"""LangChain: a retriever whose passages are stored when they are indexed, and sent as documents.

retriever = PassageRetriever(retriever=store.as_retriever(), server=DocumentServer("http://127.0.0.1:8000"))
retriever.index(documents)
found = retriever.invoke(question)
model.invoke([HumanMessage(question)], extra_body={"documents": documents_of(found)})
"""

from collections.abc import Sequence
from typing import Any

from cacheblend.core.errors import InvalidInputError
from cacheblend.engines.documents import Document as StoredDocument
from cacheblend.engines.tokens import Passage
from cacheblend.retrievers.client import PassageIndex, distinct, text_id

try:
    from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.messages import HumanMessage
    from langchain_core.retrievers import BaseRetriever
    from pydantic import Field
except ImportError as error:
    raise InvalidInputError("the adapter for LangChain needs it: pip install 'cacheblend[langchain]'") from error


class PassageRetriever(PassageIndex, BaseRetriever):
    """A retriever with stored passages: `retriever` finds the documents, and `server` stores them, in `index`. It
    returns the other retriever's documents, of equal texts one; what that raises is raised. A document without an id is
    known by its text: once edited it is another one, and the old one stays until `remove(text_id(old text))`."""

    retriever: BaseRetriever
    server: Any = Field(default=None, exclude=True)

    @staticmethod
    def document_of(passage: Document) -> StoredDocument:
        found = Passage.of(passage)
        return StoredDocument(getattr(passage, "id", None) or text_id(found.text), found.text, found.title[:256])

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return distinct(self.retriever.invoke(query, {"callbacks": run_manager.get_child()}), empty=True)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        return distinct(await self.retriever.ainvoke(query, {"callbacks": run_manager.get_child()}), empty=True)


def documents_of(documents: Sequence[Document]) -> list[dict[str, str]]:
    """The field ``documents`` of a chat request to `cacheblend serve`: each is a chunk, however short it is."""
    return [{"text": each.text, "title": each.title[:256]} for each in map(Passage.of, distinct(documents))]


def chat_message(question: str, documents: Sequence[Document]) -> HumanMessage:
    """A user's message of passages and a question, as content parts, for any server that is OpenAI-compatible.
    `cacheblend serve` takes parts of at least ``--chunk-tokens`` (64) as chunks; vLLM joins them into one text, in
    which its plug-in finds them by content."""
    texts = [*(Passage.of(each).text for each in distinct(documents)), question]
    return HumanMessage(content=[{"type": "text", "text": text} for text in texts])
