"""Rounding in kernels: on a device the hardware's, under Triton's interpreter the same by hand."""

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rounded(numbers, dtype: tl.constexpr):
    """fp32 numbers in another type, rounded to the nearest."""
    if IS_INTERPRETED and dtype == tl.bfloat16:  # the interpreter cuts bits off (Triton 3.9)
        bits = numbers.to(tl.uint32, bitcast=True)
        numbers = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return numbers.to(dtype)
