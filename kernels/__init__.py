"""Tensors in, tensors out: the compute kernels, their CPU implementations and their float64 twins."""

from kernels.compiled import is_compiled, set_cache_root, warmup

__all__ = ["is_compiled", "set_cache_root", "warmup"]
