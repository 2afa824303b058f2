"""Rows for the gate, and a tiny model with random weights, which blending changes, so that little passes: fixtures."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cacheblend.engines.hf import Passage
from cacheblend.evaluation.candidates import Candidate
from cacheblend.evaluation.gate import Bar, GateRow
from tiny_folder import TinyShape, build_tiny

WORDS = ["lamp", "harbour", "clock", "mussel", "rope", "tide", "keeper", "moon"]
WORDS += ["wheel", "bread", "storm", "letter", "orchard", "bridge", "winter", "salt"]
EXACT = Candidate("all", {"selector": "all"})
LOW = Bar(threshold=0.6, answer_tokens=3)  # 6 rows without an error are enough


def passages(seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=8)) + "." for _ in range(2)]


def rows(count: int, seed: int = 0, answers: tuple[str, ...] = ()) -> list[GateRow]:
    return [
        GateRow(["Town. ", *map(Passage, passages(1000 * seed + i)), f" Which {WORDS[i % 16]}?"], answers)
        for i in range(count)
    ]


def build_model(folder: Path) -> Path:
    """Writes a tiny model to a folder, and returns it."""
    shape = TinyShape(layers=3, width=32, mlp_width=48, heads=4, kv_heads=2, vocab_size=300, gain=3, context_length=160)
    build_tiny(folder, [" ".join(WORDS), *passages(0)], shape)
    return folder


@pytest.fixture(scope="module", autouse=True)
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One thread, and a cache folder of the tests' own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("gate") / "tiny-llama")
