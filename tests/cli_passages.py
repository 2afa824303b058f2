"""Three passages, a file of them with a question, and a tiny model, for the command line."""

import json
from pathlib import Path

from tiny_folder import TinyShape, build_tiny

PASSAGES = [
    "The lighthouse was lit in 1871 and its keepers wrote down the weather.",
    "Mussels grow on ropes, and the harvest stops when algae are found.",
    "A clock that shows the tide needs a wheel for the moon.",
]


def build_model(folder: Path) -> Path:
    """Writes a tiny model to a folder, and returns it."""
    shape = TinyShape(layers=3, width=64, mlp_width=96, heads=4, kv_heads=2, vocab_size=400, context_length=512)
    build_tiny(folder, PASSAGES, shape)
    return folder


def write_rows(file: Path) -> Path:
    """Writes one row with all passages to a file, and returns it."""
    rows = [{"ctxs": [{"title": "", "text": text} for text in PASSAGES], "question": "When was it lit?"}]
    file.write_text(json.dumps(rows))
    return file
