"""LlamaIndex against `cacheblend serve`: no adapter, its class for OpenAI-like servers does.

LlamaIndex joins the text blocks of a message into one text, in which passages cannot be recognised; so they are sent as
documents.

pip install llama-index-llms-openai-like
cacheblend serve --model nano          # in another terminal
python examples/serve_llamaindex.py [--url http://127.0.0.1:8000]
"""

import argparse
import time

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from serve_openai import PASSAGES, QUESTION, wait_until_stored


def main() -> None:
    """A question over two passages, streamed, twice: the first answer's passages are stored, the second reuses them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="nano")
    options = parser.parse_args()
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
    for passages in (PASSAGES, PASSAGES[::-1]):
        documents = [{"text": text} for text in passages]
        asked, first, report = time.perf_counter(), None, None
        for piece in model.stream_chat([question], extra_body={"documents": documents}):
            first = first or (time.perf_counter() if piece.delta else None)
            report = (getattr(piece.raw, "model_extra", None) or {}).get("cacheblend", report)
            print(piece.delta or "", end="", flush=True)
        loaded = sum(report["hit_tokens"].values()) - report["recomputed_tokens"] if report else 0
        print(f"\n  first token {1e3 * ((first or asked) - asked):.0f} ms; {loaded} tokens from the store")
        wait_until_stored(options.url)


if __name__ == "__main__":
    main()
