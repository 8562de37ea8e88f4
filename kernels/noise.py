"""Sampling noise without generator state: a pure function of (seed, position, token id).

A draw is therefore the same in any batch slot, after preemption, on a restart, and in every implementation. Numbers:

    key      = splitmix64(seed + GOLDEN * splitmix64(position))         64-bit, one per row
    h        = fmix32(fmix32(token * C + low32(key)) ^ high32(key))     32-bit, one per token
    v        = (h + 1/2) / 2³²                                          uniform in (0, 1)
    gumbel   = -log(-log(1 - v))                                        float64, rounded to float32

splitmix64 is Steele, Lea and Flood's mixer (doi 10.1145/2660193.2660195), fmix32 the finalizer of MurmurHash3. For a
fixed row h is a bijection of the token id, so two tokens never draw the same noise. `log` is the series below and not
the library's, whose last bit differs between implementations; 1 - v is exact in float64, so the noise keeps its
relative resolution in the upper tail, where the winners are.
"""

from typing import Final

import torch

GOLDEN: Final = 0x9E3779B97F4A7C15
SPLIT_1: Final = 0xBF58476D1CE4E5B9
SPLIT_2: Final = 0x94D049BB133111EB
TOKEN_FACTOR: Final = 0x9E3779B1
FMIX_1: Final = 0x85EBCA6B
FMIX_2: Final = 0xC2B2AE35
LN_2: Final = 0.6931471805599453
SQRT_2: Final = 1.4142135623730951
# log((1 + s) / (1 - s)) = 2 s (1 + s²/3 + s⁴/5 + ...): with |s| <= 0.172 the terms up to s¹⁶ leave less than 1e-14.
SERIES: Final = tuple(1.0 / n for n in (17, 15, 13, 11, 9, 7, 5, 3, 1))

_MASK_32: Final = 0xFFFFFFFF


def signed(word: int) -> int:
    """A 64-bit word as the int64 of the same bits."""
    return word - (word >> 63 << 64)


def _logical_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x >> bits of int64 that stands for unsigned words: torch's own shift copies the sign into the upper bits."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _splitmix64(x: torch.Tensor) -> torch.Tensor:
    """int64 in and out, for the unsigned words of the same bits; sums and products wrap."""
    x = x + signed(GOLDEN)
    x = (x ^ _logical_shift(x, 30)) * signed(SPLIT_1)
    x = (x ^ _logical_shift(x, 27)) * signed(SPLIT_2)
    return x ^ _logical_shift(x, 31)


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The key of each row, int64 [rows, 2] on their device: low and high 32 bits. seeds, positions int64 [rows]."""
    keys = _splitmix64(seeds + signed(GOLDEN) * _splitmix64(positions))
    return torch.stack((keys & _MASK_32, _logical_shift(keys, 32)), dim=1)


def _fmix32(h: torch.Tensor) -> torch.Tensor:
    h = ((h ^ (h >> 16)) * FMIX_1) & _MASK_32
    h = ((h ^ (h >> 13)) * FMIX_2) & _MASK_32
    return h ^ (h >> 16)


def token_hash(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """h of every token: keys int64 [rows, 2] → int64 [rows, vocab_size], values in 0 .. 2³² - 1."""
    tokens = torch.arange(vocab_size, device=keys.device)
    h = _fmix32((tokens * TOKEN_FACTOR + keys[:, :1]) & _MASK_32)
    return _fmix32(h ^ keys[:, 1:])


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive normal float64, by the series above; every operation rounds once."""
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).view(torch.float64)
    high = mantissa > SQRT_2
    mantissa = torch.where(high, mantissa * 0.5, mantissa)
    exponent = exponent + high
    s = (mantissa - 1.0) / (mantissa + 1.0)
    z = s * s
    total = torch.full_like(z, SERIES[0])
    for coefficient in SERIES[1:]:
        total = total * z + coefficient
    return exponent.double() * LN_2 + (s + s) * total


def gumbel(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Gumbel noise of every token, float32 [rows, vocab_size], for keys int64 [rows, 2] of `row_keys`."""
    v = (token_hash(keys, vocab_size).double() + 0.5) * 2.0**-32
    return (-log(-log(1.0 - v))).float()
