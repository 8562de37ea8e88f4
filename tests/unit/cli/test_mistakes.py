"""Mistakes in the words of any command: one line that names the option, says what is wrong and whose help says more."""

import click
import pytest

from ops.bench.cli import PARTS
from ops.bench.cli import command as bench
from ops.cli import COMMANDS
from ops.cli import pagemill as group
from tests.unit.cli.conftest import Pagemill, Result
from worker.errors import StartupError

BENCHES = [("bench", name) for name in PARTS]
ALL = [*((name,) for name in COMMANDS), *BENCHES]
SOME_ARGUMENT = {"acl": "worker"}


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that nobody sees would start a worker."""

    def refuse(*_: object) -> None:
        raise StartupError("the mistake was not seen")

    monkeypatch.setattr("ops.commands.serve.find_model", refuse)


def command_of(words: tuple[str, ...]) -> click.Command:
    """The command that these words name."""
    if words == ("bench",):
        return bench
    among = bench if words[0] == "bench" else group
    found = among.get_command(click.Context(among), words[-1])
    assert found is not None
    return found


def options_of(command: click.Command) -> list[click.Option]:
    return [param for param in command.params if isinstance(param, click.Option) and not param.is_flag]


def arguments_of(words: tuple[str, ...]) -> list[str]:
    """Something for each argument, so that only what is tried is wrong."""
    params = command_of(words).params
    return [SOME_ARGUMENT.get(words[-1], "x") for param in params if isinstance(param, click.Argument)]


def check(result: Result, words: tuple[str, ...], named: str, why: str) -> None:
    """One line on stderr."""
    assert (result.code, result.out) == (2, ""), result
    assert named in result.err
    assert why in result.err
    assert result.err.endswith(f". `pagemill {' '.join(words)} --help` shows what is accepted.\n"), result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_an_option_that_is_not_there(pagemill: Pagemill, words: tuple[str, ...]) -> None:
    for option in ("--no-such-thing", "-q"):
        check(pagemill(*words, option), words, option, "No such option")


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_an_option_without_its_value(pagemill: Pagemill, words: tuple[str, ...]) -> None:
    for option in options_of(command_of(words)):
        check(pagemill(*words, option.opts[0]), words, option.opts[0], "requires an argument")


@pytest.mark.parametrize("words", [words for words in ALL if words != ("serve",)], ids=" ".join)
def test_a_value_of_another_type(pagemill: Pagemill, words: tuple[str, ...]) -> None:
    """Whatever isn't text or a path, and numbers out of their range."""
    for option in options_of(command_of(words)):
        if isinstance(option.type, click.types.StringParamType | click.Path):
            continue
        for value in ("@@", *(["-7"] if isinstance(option.type, click.IntRange | click.FloatRange) else [])):
            result = pagemill(*words, option.opts[0], value, *arguments_of(words))
            check(result, words, f"'{option.opts[0]}'", "Invalid value for")


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_a_missing_argument_and_one_too_many(pagemill: Pagemill, words: tuple[str, ...]) -> None:
    arguments = [param for param in command_of(words).params if isinstance(param, click.Argument)]
    needed = [param for param in arguments if param.required]
    if needed:
        check(pagemill(*words), words, f"'{needed[0].make_metavar(click.Context(command_of(words)))}'", "Missing")
    if words != ("bench",) and all(param.nargs == 1 for param in arguments):
        given = [*arguments_of(words), "too-many"]
        check(pagemill(*words, *given), words, "too-many", "unexpected extra argument")


def test_a_setting_that_is_wrong_points_to_the_help_that_explains_settings(pagemill: Pagemill) -> None:
    for words in (("serve", "--block-size", "12"), ("jobs", "--queue", "a b")):
        result = pagemill(*words)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith(f"pagemill: {words[1]} is {words[2]!r}: use ")
        assert result.err.endswith(". `pagemill serve --help` explains every setting.\n")
