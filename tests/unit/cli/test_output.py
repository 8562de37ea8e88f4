"""Output that can't be written, for whatever command: one clear line, or none where the reader left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REASONS = {"/dev/full": "No space left on device", "closed": "Bad file descriptor"}


def run_shell(script: str, *words: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a shell script in which `"$@"` is the command."""
    return subprocess.run(
        ["/bin/bash", "-c", f"set -o pipefail; {script}", "bash", sys.executable, "-m", "ops.cli", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"HOME": str(home), "PATH": os.environ["PATH"]},
    )


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A short trace of the simulator's."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_ms": 0, "prompt_tokens": 20, "output_tokens": 5}\n')
    return path


@pytest.mark.parametrize(("redirect", "where"), [(">/dev/full", "/dev/full"), (">&-", "closed")])
def test_output_that_cant_be_written_is_one_line_and_code_2(
    tmp_path: Path, trace: Path, redirect: str, where: str
) -> None:
    for words in (["--version"], ["redis", "--help"], ["simulate", str(trace)]):
        ran = run_shell(f'"$@" {redirect}', *words, home=tmp_path)
        lines = [line for line in ran.stderr.splitlines() if not line.startswith("simulating: ")]
        assert (ran.returncode, lines) == (2, [f"pagemill: the output can't be written: {REASONS[where]}"]), words


def test_a_reader_that_leaves_ends_the_command_without_a_word(tmp_path: Path, trace: Path) -> None:
    for words in (["--version"], ["simulate", str(trace)]):
        ran = run_shell('("$@"; echo "code $?" >&2) | true', *words, home=tmp_path)
        lines = [line for line in ran.stderr.splitlines() if not line.startswith("simulating: ")]
        assert lines == ["code 1"], words


def test_errors_are_not_followed_by_others_where_stderr_cant_be_written(tmp_path: Path) -> None:
    for redirect in ("2>/dev/full", "<&- >&- 2>&-"):
        ran = run_shell(f'"$@" {redirect}', "serve", "--model", "/no/such", home=tmp_path)
        assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", "")


def test_what_was_told_as_unwritten_is_not_told_again_at_the_end() -> None:
    code = """
from ops.output import OutputError, checked_output, discard_output
with checked_output():
    try:
        print("lost", flush=True)
    except OutputError as error:
        discard_output()
        print("dropped")
"""
    command = ["/bin/sh", "-c", 'exec "$@" >/dev/full', "sh", sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, b"")
