"""Kernel tests run on the compiled kernels, on those of torch operators, and marked ones on Triton's, too."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from kernels.dispatch import IS_INTERPRETED, has_compiled, implementation
from tests.kernel.promises import IS_TRITON_PROMISED


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `kernels_in_use` that is marked `triton`, or whose module is, runs on one implementation more.

    A test may name the implementations itself, too.
    """
    named = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "kernels_in_use" in metafunc.fixturenames and "kernels_in_use" not in named:
        has_triton = metafunc.definition.get_closest_marker("triton") is not None
        metafunc.parametrize(
            "kernels_in_use", ["compiled", "torch", *(["triton"] if has_triton else [])], indirect=True
        )


@pytest.fixture
def kernels_in_use(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of the implementation that calls in the test take."""
    if request.param == "compiled":
        assert has_compiled(), "numba is a dependency: its kernels must be there to be tested"
        yield "compiled"
        return
    if request.param == "triton":
        needs_interpreter()
    with implementation(request.param):
        yield request.param


@pytest.fixture
def triton_in_use() -> Iterator[None]:
    """Calls in the test take Triton's kernels, by its interpreter."""
    needs_interpreter()
    with implementation("triton"):
        yield


def needs_interpreter() -> None:
    """Skip the test where Triton isn't there, or would compile. In CI on Linux, where both are promised, fail."""
    if find_spec("triton") is None:
        if IS_TRITON_PROMISED:
            pytest.fail("the dev extra brings triton")
        pytest.skip("needs triton")
    if not IS_INTERPRETED:
        if IS_TRITON_PROMISED:
            pytest.fail("make test sets TRITON_INTERPRET=1")
        pytest.skip("needs TRITON_INTERPRET=1")
