"""Codes of :class:`moe_kernels.quant.weight.QuantisedWeight` to numbers inside kernels, without a conversion (I2F).

A float whose unit in the last place is 1 holds a small integer in its low mantissa bits: or-ing the code into the
pattern of 2^m (m mantissa bits) gives 2^m + code, and one subtraction takes 2^m and the code's bias away. Both numbers
and their difference are integers that the type holds exactly, so the result is the code, exactly ("Who Says Elephants
Can't Run", section 3.4.1, for float16; the other types follow the same argument).
"""

import triton
import triton.language as tl

from moe_kernels import backend

INTERPRETED = tl.constexpr(backend.INTERPRETED)


@triton.jit
def _minus(pattern, other, DTYPE: tl.constexpr):
    """Difference of two tiles of 16-bit patterns read as DTYPE. The interpreter has no bfloat16 arithmetic."""
    a = pattern.to(tl.uint16).to(DTYPE, bitcast=True)
    b = other.to(tl.uint16).to(DTYPE, bitcast=True)
    if INTERPRETED:
        return (a.to(tl.float32) - b.to(tl.float32)).to(DTYPE)
    else:
        return a - b


@triton.jit
def _int4_value(nibble, DTYPE: tl.constexpr):
    """0..15, uint16, to -8..7 in DTYPE."""
    if DTYPE == tl.float16:
        # 0x6400 = 1024, unit 1: 1024 + n - 1032.
        return _minus(nibble | 0x6400, tl.full(nibble.shape, 0x6408, tl.uint16), DTYPE)
    elif DTYPE == tl.bfloat16:
        # 0x4300 = 128, unit 1: 128 + n - 136.
        return _minus(nibble | 0x4300, tl.full(nibble.shape, 0x4308, tl.uint16), DTYPE)
    else:
        return _float32(nibble, 8)


@triton.jit
def _float32(code, BIAS: tl.constexpr):
    # 0x4B000000 = 2^23, unit 1.
    return (code.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + BIAS)


@triton.jit
def int4_halves(packed, DTYPE: tl.constexpr):
    """uint8 tile -> (columns of the low nibbles, columns of the high nibbles), -8..7 exactly, without their scale.

    DTYPE: tl.float16, tl.bfloat16 or tl.float32.

    Example: bytes ``[0x83, 0x1F]`` give ``[-5, 7]`` and ``[0, -7]``. Byte 0x83 in float16: 0x6403 is 1027, less 1032
    is -5.
    """
    wide = packed.to(tl.uint16)
    return _int4_value(wide & 0xF, DTYPE), _int4_value(wide >> 4, DTYPE)


@triton.jit
def int8_values(packed, DTYPE: tl.constexpr):
    """uint8 tile -> -128..127 exactly, without their scale.

    bfloat16 has 7 mantissa bits, so 128 + the low 7 bits is one number and the top bit chooses what to subtract: 256
    if it is clear, 128 if it is set, which differ in that very bit (0x4380, 0x4300). Integers to 256 are bfloat16s.

    Example: byte 0x85 = 133 means 5. float16: 0x6485 = 1157, less 1152 is 5. bfloat16: 0x4305 = 133, less 0x4300 = 128.
    """
    wide = packed.to(tl.uint16)
    if DTYPE == tl.float16:
        return _minus(wide | 0x6400, tl.full(wide.shape, 0x6480, tl.uint16), DTYPE)
    elif DTYPE == tl.bfloat16:
        return _minus((wide & 0x7F) | 0x4300, (wide & 0x80) ^ 0x4380, DTYPE)
    else:
        return _float32(wide, 128)


@triton.jit
def code_values(code, zero, CODES: tl.constexpr):
    """Codes of any kind of :class:`QuantisedWeight` to the numbers they mean, float32, without their scale.

    zero: what is subtracted from integers. Small floats are moved into the fields of a float16, whose exponent has
    another bias: a product with a power of two makes up for it, and subnormal numbers come out right by themselves.

    Example: e4m3 0x38 is 1.0: 0x1C00 as a float16 is 2^-8, times 256. e2m1 3 is 1.5: 0x0600 is 1.5 x 2^-14.
    """
    if CODES == "int":
        return _float32(code, 0) - zero
    elif CODES == "e4m3":
        wide = code.to(tl.uint16)
        return (((wide & 0x7F) << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        tl.static_assert(CODES == "e2m1", "unknown codes")
        wide = code.to(tl.uint16)
        return (((wide & 7) << 9) | ((wide & 8) << 12)).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def float_fields(word, SHIFT: tl.constexpr, CODES: tl.constexpr):
    """The small float at bit SHIFT of an int32 word, moved into the fields of a float32: E4M3 times 2^-120, E2M1 times
    2^-126, exactly, subnormal numbers too. Three instructions: its top bit goes to the sign, and a shift that repeats
    the sign brings the rest into place.

    Example: e4m3 0x38 is 1.0: 0x03800000 is 2^-120. e2m1 11 is -1.5: 0x80C00000 is -1.5 x 2^-126.
    """
    if CODES == "e4m3":
        return (((word << (24 - SHIFT)) >> 4) & -0x78100000).to(tl.float32, bitcast=True)
    else:
        tl.static_assert(CODES == "e2m1", "unknown codes")
        return (((word << (28 - SHIFT)) >> 6) & -0x7E400000).to(tl.float32, bitcast=True)


@triton.jit
def scale_values(stored, CODES: tl.constexpr):
    """Scales as they are stored to float32. E8M0's byte s is 2^(s - 127): the exponent of a float, but for s = 0."""
    if CODES == "e2m1":
        wide = stored.to(tl.uint32)
        return tl.where(wide == 0, 0x400000, wide << 23).to(tl.float32, bitcast=True)
    else:
        return stored.to(tl.float32)


@triton.jit
def _field(word, pattern, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """Bits of a word moved to MASK, inside the mantissa of ``pattern``. A negative SHIFT is one to the right."""
    moved = word << SHIFT if SHIFT >= 0 else word >> -SHIFT
    return ((moved & MASK) | pattern).to(tl.float32, bitcast=True)


@triton.jit
def int4_products(word, p16, p256, acc, a, b, c, d, e, f, g, h):
    """acc + the sum over an int32 word's eight codes of (offset + code + 8) x column, in float32.

    ``a..d``: the columns of the low nibbles of bytes 0..3, ``e..h`` those of the high ones. For sums in float32, where
    nothing has to be rounded to 16 bits on the way: the code sits high in the mantissa, so that the number or-ed around
    it is small (16, or 256 where one shift serves two nibbles) and may stay in every product. :func:`int4_offset` takes
    it out, once per column instead of once per weight; the sum is larger meanwhile, which costs at most 264 / 2^24 of a
    column's magnitude.

    Example: nibble 4 (bits 16..19) moved left by 3 lies in bits 19..22. In 0x41800000 = 16.0 bit 19 is worth 1, so code
    5, nibble 13, reads 29.0; less 24 is 5.
    """
    acc += _field(word, p16, 19, 0x780000) * a
    acc += _field(word, p256, 11, 0x078000) * e
    acc += _field(word, p16, 11, 0x780000) * b
    acc += _field(word, p256, 3, 0x078000) * f
    acc += _field(word, p16, 3, 0x780000) * c
    acc += _field(word, p256, -5, 0x078000) * g
    acc += _field(word, p16, -5, 0x780000) * d
    return acc + _field(word, p16, -9, 0x780000) * h


@triton.jit
def int4_offset(a, b, c, d, e, f, g, h):
    """What makes :func:`int4_products` a sum of code x column: minus (16 + 8 or 256 + 8) x column."""
    return -24.0 * (((a + b) + (c + d)) + h) - 264.0 * ((e + f) + g)


@triton.jit
def int8_products(word, p256, acc, a, b, c, d):
    """acc + the sum over an int32 word's four bytes of (256 + byte) x column; as :func:`int4_products`.

    The byte's code is byte - 128, so the caller adds -384 x (a + b + c + d).
    """
    acc += _field(word, p256, 15, 0x7F8000) * a
    acc += _field(word, p256, 7, 0x7F8000) * b
    acc += _field(word, p256, -1, 0x7F8000) * c
    return acc + _field(word, p256, -9, 0x7F8000) * d
