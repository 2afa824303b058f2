"""Properties of this CPU that determine the speed of matrix products; results name them."""

import platform

import torch

BF16, AMX = "BF16", "AMX"
_X86 = {"x86_64", "AMD64"}
_QUESTIONS = {BF16: "_is_avx512_bf16_supported", AMX: "_is_amx_tile_supported"}


def extensions() -> set[str]:
    """Those of `BF16` (AVX-512 products of bf16) and `AMX` (tiles) that this CPU has."""
    return {name for name, question in _QUESTIONS.items() if getattr(torch.cpu, question, lambda: False)()}


def instructions() -> str:
    """``"AVX2"``, ``"AVX512 BF16"``, ``"AVX512 BF16 AMX"``, ..., for people."""
    offered = extensions()
    return " ".join([torch.backends.cpu.get_cpu_capability(), *(name for name in _QUESTIONS if name in offered)])


def multiplies_bf16() -> bool:
    """Whether this CPU has instructions for bf16 products; on others they take several times as long as in float32.

    oneDNN answers yes for every x86 with AVX-512, where it converts to float32 and back; its answer counts elsewhere.
    """
    if platform.machine() in _X86:
        return bool(extensions())
    has_kernels = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(has_kernels and torch.ops.mkldnn._is_mkldnn_bf16_supported())
