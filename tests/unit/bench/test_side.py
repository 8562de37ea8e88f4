"""A side is a process that answers line by line and sleeps in between."""

from collections.abc import Iterator

import psutil
import pytest

from ops.bench.errors import BenchError
from ops.bench.side import SideProcess


@pytest.fixture
def side() -> Iterator[SideProcess]:
    with SideProcess("the echo", "tests.unit.bench.echo_side", {"depth": 3}) as made:
        yield made


def test_what_is_asked_is_answered_though_libraries_print_to_stdout(side: SideProcess) -> None:
    assert side.ask("echo", value="größer") == [{"depth": 3}, "größer"]
    assert side.ask("echo", value=[1.5, None]) == [{"depth": 3}, [1.5, None]]


def test_an_error_is_one_line_with_the_side_s_name_and_the_side_goes_on(side: SideProcess) -> None:
    with pytest.raises(BenchError, match=r"^the echo: this can't be: do that$"):
        side.ask("refuse")
    with pytest.raises(BenchError, match=r"^the echo: ValueError: no such value \(PAGEMILL_DEBUG=1 shows where\)$"):
        side.ask("crash")
    with pytest.raises(BenchError, match=r"^the echo: KeyError: 'dance'"):
        side.ask("dance")
    assert side.ask("echo", value=1) == [{"depth": 3}, 1]


def test_a_side_that_dies_is_told_with_its_exit_code(side: SideProcess) -> None:
    with pytest.raises(BenchError, match=r"^the echo ended with exit code 7 when it was told to leave$"):
        side.ask("leave")
    with pytest.raises(BenchError, match=r"^the echo ended with exit code 7 when it was told to echo$"):
        side.ask("echo", value=1)


def test_processor_time_is_counted_and_a_closed_side_is_gone(side: SideProcess) -> None:
    side.ask("echo", value=1)
    assert side.cpu_seconds() > 0
    children = psutil.Process().children()
    side.close()
    assert side.cpu_seconds() == 0
    assert len(psutil.Process().children()) == len(children) - 1
