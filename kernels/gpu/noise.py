"""kernels/noise.py on the device: the same keys, hash and noise, to the bit.

Launches that draw by it must not fuse multiplications with additions (`enable_fp_fusion=False`), which would round once
where `noise.log` rounds twice.
"""

import triton
import triton.language as tl

from kernels import noise

GOLDEN = tl.constexpr(noise.GOLDEN)
SPLIT_1, SPLIT_2 = tl.constexpr(noise.SPLIT_1), tl.constexpr(noise.SPLIT_2)
TOKEN_FACTOR = tl.constexpr(noise.TOKEN_FACTOR)
FMIX_1, FMIX_2 = tl.constexpr(noise.FMIX_1), tl.constexpr(noise.FMIX_2)
LN_2, SQRT_2 = tl.constexpr(noise.LN_2), tl.constexpr(noise.SQRT_2)
S0, S1, S2, S3, S4, S5, S6, S7, S8 = (tl.constexpr(coefficient) for coefficient in noise.SERIES)


@triton.jit
def _splitmix64(x: tl.tensor) -> tl.tensor:
    x = x + GOLDEN
    x = (x ^ (x >> 30)) * SPLIT_1
    x = (x ^ (x >> 27)) * SPLIT_2
    return x ^ (x >> 31)


@triton.jit
def row_key(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """uint64 key of int64 seeds and positions."""
    return _splitmix64(seed.to(tl.uint64) + _splitmix64(position.to(tl.uint64)) * GOLDEN)


@triton.jit
def _fmix32(h: tl.tensor) -> tl.tensor:
    h = (h ^ (h >> 16)) * FMIX_1
    h = (h ^ (h >> 13)) * FMIX_2
    return h ^ (h >> 16)


@triton.jit
def token_hash(tokens: tl.tensor, key: tl.tensor) -> tl.tensor:
    """uint32 hash of int32 token ids under a uint64 key."""
    h = _fmix32(tokens.to(tl.uint32) * TOKEN_FACTOR + key.to(tl.uint32))
    return _fmix32(h ^ (key >> 32).to(tl.uint32))


@triton.jit
def log(x: tl.tensor) -> tl.tensor:
    """Natural logarithm of positive normal float64: `noise.log`."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    is_high = mantissa > SQRT_2
    mantissa = tl.where(is_high, mantissa * 0.5, mantissa)
    exponent += is_high.to(tl.int64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    total = (((((((z * S0 + S1) * z + S2) * z + S3) * z + S4) * z + S5) * z + S6) * z + S7) * z + S8
    return exponent.to(tl.float64) * LN_2 + (s + s) * total


@triton.jit
def gumbel(tokens: tl.tensor, key: tl.tensor) -> tl.tensor:
    """float32 noise of int32 token ids under a uint64 key."""
    v = (token_hash(tokens, key).to(tl.float64) + 0.5) * 2.0**-32
    return (-log(-log(1.0 - v))).to(tl.float32)
