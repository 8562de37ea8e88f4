"""Compiled CPU kernels: Python bodies over raw addresses that numba turns into machine code.

Needs numba; nothing outside this folder imports it unless `dispatch.has_compiled()`.
"""
