"""The command line as a whole: help, versions, mistakes and exit codes."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import click
import pytest

from ops.cli import COMMANDS
from ops.cli import pagemill as group
from ops.commands.serve import tell_stop
from ops.server import own_command
from tests.conftest import server_command
from tests.e2e.workers import eventually
from tests.logging_state import logging_restored
from tests.unit.cli.conftest import Pagemill
from worker.embedded import EmbeddedServer, is_in_use
from worker.logs import configure_logging
from worker.settings import Settings, load_settings, shown_default
from worker.settings_words import env_name, flag_name


def run_process(*words: str, home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with nothing in its environment but what is said."""
    return subprocess.run(
        [sys.executable, "-m", "ops.cli", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"HOME": str(home), "PATH": os.environ["PATH"], **variables},
    )


def test_without_words_it_shows_the_help_and_every_command(pagemill: Pagemill) -> None:
    result = pagemill()
    assert result.code == 0
    assert result.out == pagemill("--help").out
    for name, words in COMMANDS.items():
        assert f"  {name}" in result.out
        assert words in result.out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_loads_and_explains_itself(name: str) -> None:
    command = group.get_command(click.Context(group), name)
    assert command is not None
    assert command.help


def test_the_help_of_serve_shows_every_setting_with_its_default_and_variable(pagemill: Pagemill) -> None:
    words = " ".join(pagemill("serve", "--help").out.split())
    for name, field in Settings.model_fields.items():
        assert flag_name(name) in words
        assert " ".join(str(field.description).split()) in words
        assert f"[default: {shown_default(name)}; env: {env_name(name)}]" in words
    assert "--queue NAME[,NAME...]" in words
    assert "--lane-weights number:number:number|strict" in words


def test_help_needs_none_of_the_slow_imports(tmp_path: Path) -> None:
    code = (
        "import sys, ops.cli; ops.cli.main(['--help']);"
        "slow = {'torch', 'numpy', 'redis', 'pydantic', 'rich', 'structlog', 'transformers', 'asyncio'};"
        "print('slow:', *slow & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1] == "slow:"


def test_no_command_imports_torch_before_it_works() -> None:
    modules = ", ".join(f"ops.commands.{name}" for name in COMMANDS)
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_the_version_is_that_of_the_distribution(pagemill: Pagemill) -> None:
    from importlib.metadata import version

    assert pagemill("--version").out == f"pagemill {version('pagemill')}\n"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["fly"], "pagemill: No such command 'fly'. `pagemill --help` shows what is accepted.\n"),
        (["enqueue"], "pagemill: Missing argument 'TEXT'. `pagemill enqueue --help` shows what is accepted.\n"),
        (
            ["serve", "--block-size"],
            "pagemill: Option '--block-size' requires an argument. `pagemill serve --help` shows what is accepted.\n",
        ),
        (
            ["enqueue", "--raw", "--system", "x", "y"],
            "pagemill: --system belongs to a chat message, so it can't stand beside --raw. "
            "`pagemill enqueue --help` shows what is accepted.\n",
        ),
        (
            ["serve", "--model", "/no/such"],
            "pagemill: no model at /no/such: name a folder with config.json and safetensors, a GGUF file, or smollm2\n",
        ),
    ],
)
def test_a_mistake_is_one_line_and_code_2(pagemill: Pagemill, words: list[str], error: str) -> None:
    result = pagemill(*words)
    assert (result.code, result.out, result.err) == (2, "", error)


def test_bad_settings_stop_the_process_with_one_line_and_code_2(tmp_path: Path) -> None:
    result = run_process("serve", "--block-size", "12", home=tmp_path, PAGEMILL_MAX_NUM_SEQS="none")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [
        "pagemill: --block-size is '12': use one of 8, 16, 32, 64; PAGEMILL_MAX_NUM_SEQS is 'none': use a whole "
        "number. `pagemill serve --help` explains every setting."
    ]


def test_the_traceback_shows_on_request(tmp_path: Path) -> None:
    result = run_process("serve", "--block-size", "12", home=tmp_path, PAGEMILL_DEBUG="1")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_without_a_server_it_says_how_to_start_one(pagemill: Pagemill, tmp_path: Path) -> None:
    for words in (["enqueue", "hi"], ["jobs"], ["workers"], ["dead"], ["cancel", "x"], ["redis", "PING"]):
        result = pagemill(*words)
        assert (result.code, result.out) == (2, "")
        assert result.err == (
            "pagemill: no worker runs here: no --redis-url, and no embedded server has left its address in "
            f"{tmp_path}/data/redis.url; start one with `{own_command()} serve`\n"
        )


@pytest.mark.parametrize("words", [["enqueue", "hi"], ["jobs"], ["cancel", "x"], ["redis", "PING"]])
@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://:hunter2@127.0.0.1:1/0", "127.0.0.1:1"),
        ("redis://:hunter2@127.0.0.1:6379/zero", "no Redis URL"),
        ("http://:hunter2@127.0.0.1", "use a URL that begins with redis://"),
    ],
)
def test_a_server_that_cant_be_used_is_one_line_without_its_password(
    pagemill: Pagemill, words: list[str], url: str, reason: str
) -> None:
    result = pagemill(words[0], "--redis-url", url, *words[1:])
    assert (result.code, result.out) == (2, "")
    assert reason in result.err
    assert len(result.err.splitlines()) == 1
    assert "hunter2" not in result.err


def test_the_embedded_server_is_found_by_the_address_that_it_left(pagemill: Pagemill, tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path / "data", server_command("valkey-9.1")):
        assert pagemill("redis", "PING").out == "PONG\n"
        elsewhere = tmp_path / "elsewhere"
        assert pagemill("redis", "--data-dir", str(elsewhere), "PING").code == 2


@pytest.mark.parametrize(
    "words", [["enqueue", "hi"], ["jobs"], ["workers"], ["dead"], ["cancel", "x"], ["redis", "PING"]]
)
def test_an_address_that_is_left_over_is_told_as_such(pagemill: Pagemill, tmp_path: Path, words: list[str]) -> None:
    with EmbeddedServer(tmp_path / "data", server_command("valkey-9.1")) as server:
        address = server.url_file.read_text()
    eventually(lambda: not is_in_use(tmp_path / "data"), "the folder to be free")
    server.url_file.write_text(address)
    result = pagemill(*words)
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        f"pagemill: no worker runs here: no --redis-url, and {server.url_file} is left over from one that was killed; "
        f"start one with `{own_command()} serve`\n"
    )


def test_this_program_is_named_as_a_shell_here_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scripts = Path(sysconfig.get_path("scripts"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(scripts.parent.parent)
    assert own_command() == f"{scripts.parent.name}/{scripts.name}/pagemill"
    monkeypatch.chdir(tmp_path)
    assert own_command() == str(scripts / "pagemill")
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "pagemill").symlink_to(scripts / "pagemill")
    assert own_command() == "pagemill"
    (tmp_path / "pagemill").unlink()
    (tmp_path / "pagemill").touch(mode=0o755)
    assert own_command() == str(scripts / "pagemill")


def test_where_the_log_is_json_every_line_on_stderr_is(pagemill: Pagemill, tmp_path: Path) -> None:
    """What was misspelt, how far a start is, and why there is none."""
    words = ("serve", "--model", str(tmp_path), "--log-format", "json", "--data-dir", str(tmp_path / "data"))
    result = pagemill(*words)
    assert result.code == 2
    events = [json.loads(line) for line in result.err.splitlines()]
    assert [event["event"] for event in events][-1] == "command_failed"
    assert "start_goes_on" in [event["event"] for event in events]
    assert str(tmp_path) in events[-1]["error"]


@pytest.mark.parametrize("is_again", [False, True])
def test_a_stop_is_told_as_json_where_the_log_is(capsys: pytest.CaptureFixture[str], is_again: bool) -> None:
    with logging_restored():
        configure_logging("info", "json")
        tell_stop(2, is_again, load_settings({}))
    (line,) = capsys.readouterr().err.splitlines()
    event = json.loads(line)
    assert (event["event"], event["num_jobs"], event["is_again"]) == ("stop_asked_for", 2, is_again)
