"""Numbers in kernels: rounding, on a device the hardware's, under Triton's interpreter the same by hand; and floats of
eight bits, by their bits, since devices before compute capability 8.9 have no such types."""

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


@triton.jit
def of_e4m3(byte):
    """The number of a float8_e4m3fn in fp32: as fp16 with the same exponent bits it is 2 ** 8 too small."""
    bits = ((byte & 0x80).to(tl.uint16) << 8) | ((byte & 0x7F).to(tl.uint16) << 7)
    number = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), number)


@triton.jit
def of_float8(loaded, float8: tl.constexpr, dtype: tl.constexpr):
    """What was loaded in `dtype`: bytes of the kind `float8` (see `float8.FLOAT8`), exactly; 0: as it is."""
    if float8 == 1:
        loaded = of_e4m3(loaded).to(dtype)
    if float8 == 2:  # the first half of an fp16
        loaded = (loaded.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32).to(dtype)
    return loaded


@triton.jit
def to_float8(numbers, scale, float8: tl.constexpr):
    """What is stored: numbers / scale as bytes of the kind `float8`, see `float8.Float8.encode`; 0: as they are."""
    if float8 > 0:
        wide = tl.div_rn(numbers.to(tl.float32), tl.full(numbers.shape, 1.0, tl.float32) * scale)
        if float8 == 1:
            numbers = _byte_of(wide, 448.0, 20, 120, 0.015625, 16384.0)
        else:
            numbers = _byte_of(wide, 57344.0, 21, 112, 0.00006103515625, 128.0)
    return numbers


@triton.jit
def _byte_of(
    number, highest: tl.constexpr, cut: tl.constexpr, bias: tl.constexpr, least: tl.constexpr, magic: tl.constexpr
):  # fmt: skip
    """fp32 to eight bits, to the nearest even. `highest`, `least`: the largest number, and the smallest that is normal;
    `cut`: bits of the mantissa that go; `bias`: by how much the exponents' biases differ; `magic`: numbers in its
    binade are as far apart as those below `least`, so that adding it rounds to them."""
    size = tl.minimum(tl.abs(number), highest)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (cut - 1)) - 1) + ((bits >> cut) & 1)) >> cut) - (bias << (23 - cut))
    start = tl.full(number.shape, magic, tl.float32).to(tl.int32, bitcast=True)
    small = (size + magic).to(tl.int32, bitcast=True) - start
    byte = tl.where(size < least, small, normal)
    byte = tl.where(number != number, 0x7F, byte)
    return (byte | ((number.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
