"""How the functions that bodies call are compiled."""

from collections.abc import Callable
from typing import Any

from numba import njit


def helper(function: Any) -> Any:
    """Compile a function for use inside bodies only: no wrappers for Python, and integer division as in C's numbers.

    (numba's default raises ZeroDivisionError, which costs a branch and an error path at each division.)
    """
    return njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, error_model="numpy")(function)


def helper_for(kind: str) -> Callable[[Any], Any]:
    """As `helper`, for a function that is made several times, for weights of different kinds.

    The kind becomes part of its name. Bodies may have been compiled by different processes, whose numbering is all that
    tells functions of one name apart: loaded into one process, the second body would call the first one's function.
    """

    def named(function: Any) -> Any:
        function.__qualname__ += f"_{kind}"
        return helper(function)

    return named
