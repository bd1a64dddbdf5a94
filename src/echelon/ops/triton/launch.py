"""What every launch has in common."""

from __future__ import annotations

import triton
import triton.language as tl

EXACT = {"enable_fp_fusion": False}  # a product is rounded before it is added, in every kernel and version of one
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def power_of_two(count: int) -> int:
    """The smallest block that holds `count` values and fits a matrix instruction."""
    return max(16, int(triton.next_power_of_2(count)))


@triton.jit
def dot(a, b, acc):
    """a [M, K] · b [K, N] + acc [M, N], in float32."""
    if INTERPRETED:  # its dot multiplies the bits of bfloat16, and hands the rest to a library whose rows differ with their place
        return acc + tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 → dtype, to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:  # the interpreter would cut the last bits off
        bits = x.to(tl.uint32, bitcast=True)
        rounded = tl.where(x == x, bits + 0x7FFF + (bits >> 16 & 1), 0x7FC00000) >> 16
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)
