"""A Chroma collection whose documents are stored by id, and reused wherever they stand.

pip install 'cacheblend[chroma]' openai
cacheblend serve --model nano          # in another terminal
python examples/retriever_chroma.py [--url http://127.0.0.1:8000]
"""

import argparse

import chromadb
from openai import OpenAI
from retrieving import PASSAGES_BY_ID, QUESTION, embed

from cacheblend.retrievers import DocumentServer
from cacheblend.retrievers.chroma import documents_of, sync_collection


def main() -> None:
    """Synchronises a collection twice, the second time after an entry was deleted, and asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    options = parser.parse_args()
    collection = chromadb.EphemeralClient(chromadb.Settings(anonymized_telemetry=False)).create_collection("passages")
    texts = {**PASSAGES_BY_ID, "old": "Nothing of interest."}
    collection.add(ids=list(texts), documents=list(texts.values()), embeddings=[embed(each) for each in texts.values()])
    with DocumentServer(options.url, collection=collection.name) as server:
        for _ in range(2):
            report = sync_collection(collection, server)
            print(
                f"{report.added} added, {report.kept} kept, {report.dropped} dropped, {report.computed_tokens} computed"
            )
            collection.delete(ids=["old"])
    found = collection.query(query_embeddings=[embed(QUESTION)], n_results=2)
    client = OpenAI(base_url=f"{options.url}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=next(iter(client.models.list())).id,
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=16,
        temperature=0,
        extra_body={"documents": documents_of(found)},
    )
    report = (answer.model_extra or {})["cacheblend"]
    print(answer.choices[0].message.content)
    print(f"  from the store {report['hit_tokens']}, missed {report['missed_tokens']}")


if __name__ == "__main__":
    main()
