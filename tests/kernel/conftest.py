"""Every kernel test runs on the compiled kernels and on those of torch operators."""

from collections.abc import Iterator

import pytest

from kernels.dispatch import has_compiled, implementation


@pytest.fixture(params=["compiled", "torch"])
def kernels_in_use(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of the implementation that calls in the test take."""
    if request.param == "compiled":
        assert has_compiled(), "numba is a dependency: its kernels must be there to be tested"
        yield "compiled"
    else:
        with implementation("torch"):
            yield "torch"
