"""Rows to evaluate, and a tiny model to evaluate them on, as fixtures."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cacheblend.data import QuestionRow, Text
from cacheblend.engines.hf import BlendEngine
from cacheblend.evaluation import Cell, Evaluation
from tiny_folder import TinyShape, build_tiny

LAYERS = 3
SHAPE = TinyShape(layers=LAYERS, width=64, mlp_width=96, heads=4, kv_heads=2, vocab_size=400, context_length=256)
PASSAGES = [
    "The lighthouse was lit in 1871 and its keepers wrote down the weather. None of them ever saw a whale.",
    "Mussels grow on ropes, and the harvest stops when algae are found. The ropes are then left in the water.",
    "A clock that shows the tide needs a wheel for the moon. Most of them were built by two brothers.",
    "Nobody knows who built the bridge, but the toll was paid until 1902. It was two pence for a horse.",
]
KINDS = ["full", "prefix", "reuse", "blend", "map-reduce", "map-rerank"]


def make_row(number: int, passages: int = 3, **fields: Any) -> QuestionRow:
    """The passages in an order of the row's own."""
    order = [PASSAGES[(number + i) % len(PASSAGES)] for i in range(passages)]
    return replace(QuestionRow("When was it lit?", tuple(Text(text, "") for text in order), ("1871",)), **fields)


ROWS = [make_row(number, category=("a", "b")[number % 2]) for number in range(4)]


def build_model(folder: Path) -> Path:
    """Writes a tiny model to a folder, and returns it."""
    build_tiny(folder, PASSAGES, SHAPE)
    return folder


def cells_of(found: Evaluation, method: str) -> list[Cell]:
    return [cell for row in found.rows for cell in row.cells if cell.method == method]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("evaluate") / "tiny-llama")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[BlendEngine]:
    with BlendEngine.from_pretrained(model, device="cpu") as engine:
        yield engine
