"""A small model that ships, and the small world it was trained on: passages in which answers need other passages.

It shows, on any laptop, what blending does to answers. What it is and is not: `model/README.md`.
"""

from importlib.resources import files
from pathlib import Path


def model_path() -> Path:
    """The model's folder: what `AutoModelForCausalLM.from_pretrained` and `--model` take."""
    return Path(str(files("cacheblend.nano"))) / "model"
