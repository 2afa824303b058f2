"""LangChain against `cacheblend serve`: no adapter, its OpenAI class does.

pip install langchain-openai
cacheblend serve --model nano          # in another terminal
python examples/serve_langchain.py [--url http://127.0.0.1:8000]
"""

import argparse
import time

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from serve_openai import PASSAGES, QUESTION, wait_until_stored


def main() -> None:
    """A question over two passages, streamed, twice: the first answer's passages are stored, the second reuses them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="nano")
    options = parser.parse_args()
    model = ChatOpenAI(base_url=f"{options.url}/v1", api_key="none", model=options.model, temperature=0, max_tokens=16)
    for passages in (PASSAGES, PASSAGES[::-1]):
        parts = [{"type": "text", "text": text} for text in [*passages, QUESTION]]
        asked, first, usage = time.perf_counter(), None, None
        for piece in model.stream([HumanMessage(content=parts)], stream_usage=True):
            first = first or (time.perf_counter() if piece.content else None)
            usage = piece.usage_metadata or usage
            print(piece.content, end="", flush=True)
        loaded = usage["input_token_details"].get("cache_read", 0) if usage else 0
        print(f"\n  first token {1e3 * ((first or asked) - asked):.0f} ms; {loaded} tokens from the store")
        wait_until_stored(options.url)


if __name__ == "__main__":
    main()
