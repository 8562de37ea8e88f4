"""Tensors in, tensors out: the compute kernels, their CPU implementations and their float64 twins."""
