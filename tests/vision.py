"""torchvision beside a torch that its C++ operators do not fit, for the processors of images, which use none of them.

`.ci/install-vllm` puts it into a folder that is on no path: vLLM's text models start without it.
"""

import re
import sys
from pathlib import Path

import torch

FOLDER = Path(sys.prefix) / "torchvision"
_declared: list[torch.library.Library] = []


def is_there() -> bool:
    """torchvision's Python part can be imported after `make_importable`."""
    return (FOLDER / "torchvision" / "_meta_registrations.py").is_file()


def make_importable() -> None:
    """Lets this process import torchvision; before anything asks whether it is installed. Idempotent."""
    if _declared:
        return
    source = (FOLDER / "torchvision" / "_meta_registrations.py").read_text()
    named = re.findall(r'register_(?:meta\("|fake\("torchvision::)(\w+)"\)', source)
    library = torch.library.Library("torchvision", "DEF")
    for name in sorted({*named}):
        library.define(f"{name}(Tensor a) -> Tensor")
    _declared.append(library)
    sys.path.append(str(FOLDER))
