"""LangChain against `cacheblend serve`: no adapter, its OpenAI class does.

pip install langchain-openai
cacheblend serve --model nano          # in another terminal
python examples/serve_langchain.py [--url http://127.0.0.1:8000]
"""

import argparse

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from serve_openai import PASSAGES, QUESTION


def main() -> None:
    """A question over two passages, streamed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="nano")
    options = parser.parse_args()
    model = ChatOpenAI(base_url=f"{options.url}/v1", api_key="none", model=options.model, temperature=0, max_tokens=16)
    parts = [{"type": "text", "text": text} for text in [*PASSAGES, QUESTION]]
    for piece in model.stream([HumanMessage(content=parts)]):
        print(piece.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
