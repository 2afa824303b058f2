"""What `cacheblend sync` stored is found by vLLM: same names, same dtype, marked by spans or found by content.

Situations: documents that are one chunk, and one that is cut into several; passages in another order, behind other
text, inside a text that is tokenised as a whole; a document dropped since; r = 1, where answers are vLLM's own.
"""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cacheblend.nano import model_path
from cacheblend.store import DiskStore
from command_line import runner
from vllm_running import Vllm


def text_of(seed: int, sentences: int) -> str:
    rng = random.Random(seed)
    words = ["lamp", "ferry", "keeper", "tower", "salt", "rope", "winter", "bell", "harbour", "stone", "letter"]
    return " ".join(f"The {rng.choice(words)} of the {rng.choice(words)} is cold." for _ in range(sentences))


def hits(step: dict[str, float]) -> float:
    """Tokens of chunks that were loaded; the anchor in front of them is an exact prefix of a prompt."""
    kinds = (" disk", " memory")
    return sum(value for name, value in step.items() if "cacheblend_hit_tokens" in name and name.endswith(kinds))


def test_synchronised_documents_are_reused_marked_or_not(
    vllm: Vllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, store = tmp_path / "docs.jsonl", f"file://{tmp_path}/store"
    sync = runner(capsys, "sync", "--model", "nano", "--store", store, "--source", str(source), "--dtype", "float32")
    texts = {"a": text_of(1, 12), "b": text_of(2, 14), "long": text_of(3, 70), "gone": text_of(4, 12)}

    def write(names: list[str]) -> None:
        source.write_text("".join(json.dumps({"id": name, "text": texts[name]}) + "\n" for name in names))

    write(list(texts))
    report = sync("--json").json
    assert report["added"] == 4
    write(["a", "b", "long"])
    assert sync("--json").json["dropped"] == 1
    with DiskStore(tmp_path / "store") as opened:
        lengths = {manifest.label: len(manifest.token_ids) for manifest in opened.manifests()}
    assert sum(label.startswith("long #") for label in lengths) > 1

    tokenizer = AutoTokenizer.from_pretrained(model_path())

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    front, question = [*bos, *ids("Read this first.")], ids("Who has the boot?")
    marked = [*front, *ids(texts["b"]), *ids(texts["a"]), *question]
    at = [len(front), len(front) + len(ids(texts["b"]))]
    spans = [at, [at[1], at[1] + len(ids(texts["a"]))]]
    unmarked = [*front, *ids("Now"), *ids(texts["long"]), *ids(texts["a"]), *question]
    whole = tokenizer.encode(
        " ".join(["Now read.", texts["long"], "Who has the boot?"])
    )  # " The", where "The" is stored
    dropped = [*front, *ids(texts["gone"]), *question]

    extra = {"store": store, "recompute_ratio": 1.0, "min_match_tokens": 64, "min_reused_share": 0.0, "refresh_s": 0}
    asked = {"unmarked": unmarked, "whole": whole, "dropped": dropped}
    steps: list[dict[str, Any]] = [{"ask": [marked], "chunks": [spans]}, {"count": True}]
    for each in asked.values():
        steps += [{"ask": [each]}, {"count": True}]
    engine = {"skip_tokenizer_init": False, "enable_prefix_caching": False}
    answers = vllm.run(model_path(), steps, extra, **engine)["answers"]
    (own,) = vllm.run(model_path(), [{"ask": [marked, *asked.values()]}], None, **engine)["answers"]
    assert [answers[place][0]["tokens"] for place in (0, 2, 4, 6)] == [each["tokens"] for each in own]
    counted = [0.0, *(hits(answers[place]) for place in (1, 3, 5, 7))]
    found = dict(zip(("marked", *asked), [after - before for before, after in pairwise(counted)], strict=True))
    pieces = {label: count for label, count in lengths.items() if label.startswith("long #")}
    assert found["marked"] == lengths["a"] + lengths["b"]
    assert found["unmarked"] == sum(pieces.values()) + lengths["a"]
    assert found["whole"] >= sum(pieces.values()) - pieces["long #1"]  # only the first piece begins with the document
    assert found["dropped"] == 0
