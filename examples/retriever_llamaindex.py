"""A LlamaIndex retriever whose nodes are stored when they are indexed, and reused wherever they stand.

pip install 'cacheblend[llamaindex]' llama-index-llms-openai-like
cacheblend serve --model nano          # in another terminal
python examples/retriever_llamaindex.py [--url http://127.0.0.1:8000]
"""

import argparse

from llama_index.core import VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import TextNode
from llama_index.llms.openai_like import OpenAILike
from retrieving import PASSAGES_BY_ID, QUESTION, embed

from cacheblend.retrievers import DocumentServer
from cacheblend.retrievers.llamaindex import PassagePostprocessor, documents_of


class WordCounts(BaseEmbedding):
    """See `embed`."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return embed(text)

    def _get_query_embedding(self, query: str) -> list[float]:
        return embed(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return embed(query)


def main() -> None:
    """Indexes nodes twice, the second time for nothing, and asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="nano")
    options = parser.parse_args()
    nodes = [TextNode(id_=name, text=text) for name, text in PASSAGES_BY_ID.items()]
    index = VectorStoreIndex(nodes, embed_model=WordCounts())
    with DocumentServer(options.url, collection="llamaindex") as server:
        passages = PassagePostprocessor(server=server)
        for _ in range(2):
            report = passages.index(nodes)
            print(f"{report.added} added, {report.kept} kept, {report.computed_tokens} tokens computed")
        found = passages.postprocess_nodes(index.as_retriever().retrieve(QUESTION), query_str=QUESTION)
    model = OpenAILike(
        api_base=f"{options.url}/v1",
        api_key="none",
        model=options.model,
        is_chat_model=True,
        context_window=2048,
        temperature=0,
        max_tokens=16,
    )
    question = ChatMessage(role="user", content=QUESTION)
    for piece in model.stream_chat([question], extra_body={"documents": documents_of(found)}):
        print(piece.delta or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
