"""The 8-bit float of KV pools, e4m3 (Micikevicius et al. 2022, "FP8 formats for deep learning"): 4 bits of exponent with a
bias of 7, 3 of mantissa.

Pools in it are handed to kernels as bytes. Chips from sm_89 on convert in hardware; older ones by integer operations, which
the interpreter uses as well. The largest number is 448, beyond which writing saturates. There are no infinities: they are written
as NaN, so that what a step got wrong is found.
"""

from __future__ import annotations

from runtime.torch_backend.cuda.language import tl, triton

LARGEST = tl.constexpr(448.0)


@triton.jit
def decoded(byte, NATIVE: tl.constexpr):
    """float32 of e4m3 bytes (uint8), exactly. ``NATIVE``: by the chip's own conversion."""
    if NATIVE:
        x = byte.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    else:
        # as float16 the same exponent and mantissa bits are 2^(7 - 15) times the number, subnormal ones too
        bits = byte.to(tl.int32)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.uint16).to(tl.float16, bitcast=True)
        x = half.to(tl.float32) * 256.0
        x = tl.where((bits & 0x7F) == 0x7F, float("nan"), x)
    return x


@triton.jit
def encoded(x):
    """e4m3 bytes (uint8) of float32, rounded to the nearest, ties to even; NaN for what is not finite."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    size = magnitude.to(tl.int32, bitcast=True)
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # adding 2^14 leaves in the last bits of a float32 how many times 2^-9, the smallest step, it is
    shifted = magnitude + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) & 0xFF
    small = tl.where(magnitude < 0.015625, subnormal, normal)
    return (sign | tl.where((bits & 0x7FFFFFFF) >= 0x7F800000, 0x7F, small)).to(tl.uint8)
