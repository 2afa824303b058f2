"""The parts of `lab cuda`: what each needs, and in which process it runs.

tests      tests/gpu of the checkout: kernels beside plain PyTorch, the invariants
kernels    each kernel by what the device can do, attention beside other ways to the same
ttft       time to first token by length, share and place of the store, llama-3.1-8b
timeline   one pass: what was read, copied, placed and computed when, as a picture
vllm       the plug-in in vLLM, where vLLM is installed
compiled   blends by layers that torch.compile has joined the small kernels of, beside plain ones
large      as ttft, qwen3-32b: no figure depends on it, so it has the time that is left
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lab.gpu import kernels, others, timeline, ttft
from lab.gpu.context import Bench, Found

HERE = ""
"""The process of parts that start other programs themselves."""


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        measure: returns what it found.
        least: seconds; it is not begun if fewer are left.
        most: seconds that it may take.
        process: parts that follow each other with one name share a process.
        is_reserved: whether parts before it leave it its seconds.
        missing: what it lacks on this machine; "": nothing.
    """

    measure: Callable[[Bench], Found]
    least: float
    most: float = math.inf
    process: str = HERE
    is_reserved: bool = True
    missing: Callable[[], str] = lambda: ""


PARTS: Mapping[str, Part] = {
    "tests": Part(others.tests, 20, 180, missing=others.tests_miss),
    "kernels": Part(kernels.measure, 20, 100, "kernels"),
    "ttft": Part(ttft.measure, 30, process="model"),
    "timeline": Part(timeline.measure, 20, 60, "model"),
    "vllm": Part(others.vllm, 240, 360, missing=others.vllm_misses),
    "compiled": Part(ttft.measure_compiled, 45, process="model compiled", is_reserved=False),
    "large": Part(ttft.measure_large, 45, process="large", is_reserved=False),
}
"""In their order."""
