"""Slow float64 twins of the kernels, of the same signatures: the specification that the tests hold them to."""
