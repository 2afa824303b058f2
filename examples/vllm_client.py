"""Asks a vLLM server about passages in changing orders, with the official OpenAI client, and shows times and hits.

python examples/vllm_client.py --url http://127.0.0.1:8000 --model FOLDER
"""

import argparse
import random
import time
import urllib.request

from openai import OpenAI
from transformers import AutoTokenizer

SUBJECTS = ("lighthouse", "mussel farm", "railway", "observatory", "salt works", "printing house")


def passage(subject: str, rng: random.Random) -> str:
    """A made-up text, long enough to be found by content."""
    year = rng.randint(1800, 1950)
    visits = [
        f"In {year + at} the {subject} was visited by {rng.randint(20, 900)} people from town." for at in range(5)
    ]
    return " ".join([f"The {subject} was opened in {year}.", *visits])


def main() -> None:
    """Asks a few times, and prints the server's own counters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="the served model's folder, for its tokenizer")
    parser.add_argument("--served-name", default="served")
    parser.add_argument("--requests", type=int, default=4)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    client = OpenAI(base_url=f"{arguments.url}/v1", api_key="none")
    rng = random.Random(0)
    passages = [passage(subject, rng) for subject in SUBJECTS]

    for number in range(arguments.requests):
        subject = rng.choice(SUBJECTS)
        ids, spans = tokenizer("Answer from the passages.\n\n").input_ids, []
        for text in rng.sample(passages, len(passages)):
            inside = tokenizer(text, add_special_tokens=False).input_ids
            spans.append([len(ids), len(ids) + len(inside)])
            ids += inside + tokenizer("\n\n", add_special_tokens=False).input_ids
        ids += tokenizer(f"When was the {subject} opened?", add_special_tokens=False).input_ids

        started, first, answer = time.perf_counter(), 0.0, ""
        for event in client.completions.create(
            model=arguments.served_name,
            prompt=ids,
            max_tokens=16,
            temperature=0,
            stream=True,
            extra_body={"kv_transfer_params": {"cacheblend": {"chunks": spans}}},
        ):
            first = first or time.perf_counter() - started
            answer += event.choices[0].text if event.choices else ""
        print(f"{number}: {len(ids)} tokens, first one after {first:.3f} s: {answer!r}")

    with urllib.request.urlopen(f"{arguments.url}/metrics") as response:
        for line in response.read().decode().splitlines():
            if line.startswith("vllm:cacheblend") and "created" not in line:
                print(line)


if __name__ == "__main__":
    main()
