"""Which peers there are, and what is said of those that aren't installed."""

import sys
from pathlib import Path

import pytest

from ops.bench.errors import BenchError
from ops.bench.options import pythons_by_name
from ops.bench.peers.catalog import BY_NAME, KINDS, find_peers, variable_of


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """A Python without any package, whatever this one has."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_a_peer_that_is_not_installed_is_one_line_with_how_to_install_it(bare_python: str) -> None:
    found, missing = find_peers(["llamacpp", "vllm"], dict.fromkeys(("llamacpp", "vllm"), bare_python))
    assert found == []
    assert [line.split(":")[0] for line in missing] == [
        f"{name} isn't installed in {bare_python}" for name in ("llamacpp", "vllm")
    ]
    assert all("pip install" in line and "\n" not in line for line in missing)


def test_those_that_are_installed_are_found_in_the_catalogue_s_order(bare_python: str) -> None:
    found, missing = find_peers(["transformers-continuous", "transformers"], {})
    assert [(each.kind.name, each.python) for each in found] == [
        ("transformers", None),
        ("transformers-continuous", None),
    ]
    assert missing == []
    found, missing = find_peers(["all"], dict.fromkeys(BY_NAME, bare_python))
    assert (found, len(missing)) == ([], len(KINDS))
    assert find_peers(["none"], {}) == ([], [])


def test_the_environment_names_an_interpreter_too(monkeypatch: pytest.MonkeyPatch, bare_python: str) -> None:
    monkeypatch.setenv(variable_of(BY_NAME["transformers-continuous"]), bare_python)
    assert variable_of(BY_NAME["transformers-continuous"]) == "PAGEMILL_BENCH_PYTHON_TRANSFORMERS_CONTINUOUS"
    found, missing = find_peers(["transformers-continuous"], {})
    assert found == []
    assert bare_python in missing[0]


@pytest.mark.parametrize(
    ("names", "pythons", "line"),
    [
        (["vlm"], {}, "there is no peer vlm: use transformers, transformers-continuous, llamacpp, vllm, all or none"),
        (["none"], {"vlm": "python"}, "there is no peer vlm"),
        (["none"], {"all": "python"}, "there is no peer all"),
        (["vllm"], {"vllm": "/nowhere/python"}, "can't run /nowhere/python, which is to run vllm"),
    ],
)
def test_a_peer_or_an_interpreter_that_there_is_not_is_refused(
    names: list[str], pythons: dict[str, str], line: str
) -> None:
    with pytest.raises(BenchError, match=line):
        find_peers(names, pythons)


def test_interpreters_are_named_by_their_peers() -> None:
    assert pythons_by_name(("vllm=/a/b=c", "llamacpp=python3")) == {"vllm": "/a/b=c", "llamacpp": "python3"}
    for word in ("vllm", "vllm=", "=python"):
        with pytest.raises(BenchError, match=f"--peer-python {word} says nothing: write NAME=PATH"):
            pythons_by_name((word,))
