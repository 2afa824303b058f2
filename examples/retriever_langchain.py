"""A LangChain retriever whose passages are stored when they are indexed, and reused wherever they stand.

pip install 'cacheblend[langchain]' langchain-openai
cacheblend serve --model nano          # in another terminal
python examples/retriever_langchain.py [--url http://127.0.0.1:8000]
"""

import argparse

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.messages import HumanMessage
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI
from retrieving import PASSAGES_BY_ID, QUESTION, embed

from cacheblend.retrievers import DocumentServer
from cacheblend.retrievers.langchain import PassageRetriever, documents_of


class WordCounts(Embeddings):
    """See `embed`."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Of passages."""
        return [embed(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """Of a question."""
        return embed(text)


def main() -> None:
    """Indexes passages twice, the second time for nothing, and asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="nano")
    options = parser.parse_args()
    documents = [Document(page_content=text, id=name) for name, text in PASSAGES_BY_ID.items()]
    store = InMemoryVectorStore(WordCounts())
    store.add_documents(documents)
    with DocumentServer(options.url, collection="langchain") as server:
        retriever = PassageRetriever(retriever=store.as_retriever(), server=server)
        for _ in range(2):
            report = retriever.index(documents)
            print(f"{report.added} added, {report.kept} kept, {report.computed_tokens} tokens computed")
        found = retriever.invoke(QUESTION)
    model = ChatOpenAI(base_url=f"{options.url}/v1", api_key="none", model=options.model, temperature=0, max_tokens=16)
    for piece in model.stream([HumanMessage(QUESTION)], extra_body={"documents": documents_of(found)}):
        print(piece.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
