"""How the functions that bodies call are compiled."""

from typing import Any

from numba import njit


def helper(function: Any) -> Any:
    """Compile a function for use inside bodies only: no wrappers for Python, and integer division as in C's numbers.

    (numba's default raises ZeroDivisionError, which costs a branch and an error path at each division.)
    """
    return njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")(function)
