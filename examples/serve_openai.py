"""OpenAI's client against `cacheblend serve`: passages as content parts, and the report of what was reused.

cacheblend serve --model nano          # in another terminal
python examples/serve_openai.py [--url http://127.0.0.1:8000]
"""

import argparse

from openai import OpenAI

PASSAGES = [
    "The lighthouse at the point was lit for the first time in 1871. It burnt whale oil until the year when the road "
    "was built, and its keeper, a retired captain, wrote down each ship that passed, her flag and her cargo, until he "
    "could no longer climb the stairs. His notes are in the town's museum, where nobody has read all of them.",
    "Mussels grow on ropes that hang from rafts in the bay. They are brought in when they are two years old, washed, "
    "and sold at the pier before noon. The rafts belong to four families, who have shared one boat since the storm in "
    "which the other three were lost, and who settle who takes it out first by drawing straws.",
]


def main() -> None:
    """Asks twice, the passages in another order the second time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="none")
    options = parser.parse_args()
    client = OpenAI(base_url=f"{options.url}/v1", api_key=options.key)
    model = next(iter(client.models.list())).id
    for passages in (PASSAGES, PASSAGES[::-1]):
        parts = [{"type": "text", "text": text} for text in [*passages, "When was the lighthouse lit?"]]
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


if __name__ == "__main__":
    main()
