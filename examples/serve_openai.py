"""OpenAI's client against `cacheblend serve`: passages as content parts, and the report of what was reused.

pip install openai
cacheblend serve --model nano          # in another terminal
python examples/serve_openai.py [--url http://127.0.0.1:8000]
"""

import argparse
import time

import httpx
from openai import OpenAI

PASSAGES = [  # in the vocabulary of the model that ships
    "The harbour was closed again. The lamp is kept with the boot. The river smelled of rain in the morning. The "
    "market was crowded that day. Later Sowico hired people. The rope was sold to Tairn. The library was quiet and "
    "nobody knew why. The garden was cold during the long winter. The bell came to her. The square seemed calm.",
    "The road was crowded in the morning. The horse belongs to Motan. The church was cold again. The boot was sold to "
    "Luden. Today Taira spoke up. The bridge looked grey for a while. The school was quiet as the old papers said. The "
    "firm bought the boat. The mill was closed that day. The station smelled of rain during the long winter.",
]
QUESTION = "Who has the boot?"


def wait_until_stored(url: str, key: str = "none") -> None:
    """Passages are stored behind the answer. No client needs to wait for it; here it shows what the next one gains."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        listed = httpx.get(f"{url}/v1/chunks", headers={"Authorization": f"Bearer {key}"}).json()["data"]
        if len(listed) >= len(PASSAGES):
            return
        time.sleep(0.1)


def main() -> None:
    """Asks twice: the first answer's passages are stored, the second one reuses them in another order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none")
    options = parser.parse_args()
    client = OpenAI(base_url=f"{options.url}/v1", api_key=options.key)
    model = next(iter(client.models.list())).id
    for passages in (PASSAGES, PASSAGES[::-1]):
        parts = [{"type": "text", "text": text} for text in [*passages, QUESTION]]
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": parts}],  # type: ignore[list-item, misc]
            max_tokens=16,
            temperature=0,
        )
        report = (answer.model_extra or {})["cacheblend"]
        print(answer.choices[0].message.content)
        print(
            f"  first token {1e3 * report['ttft_s']:.0f} ms; from the store {report['hit_tokens']}, "
            f"recomputed {report['recomputed_tokens']}, missed {report['missed_tokens']}"
        )
        wait_until_stored(options.url, options.key)


if __name__ == "__main__":
    main()
