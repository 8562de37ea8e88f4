"""What the pages on the clients show is run as it stands, but for the server's address and the queue's name."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.conftest import FOLDER, node, redis_cli
from tests.e2e.workers import Queue


def blocks(page: str, language: str, url: str, queue: Queue) -> list[str]:
    """Code blocks of a page."""
    text = (FOLDER / page).read_text()
    found = re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert found
    return [block.replace("redis://localhost:6379", url).replace("smollm2", queue.keys.queue) for block in found]


def run(command: list[str], **variables: str) -> str:
    ran = subprocess.run(
        command, cwd=FOLDER, env=os.environ | variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_page_on_python_works(valkey_url: str, served: Queue) -> None:
    code = "\n".join(blocks("python.md", "python", valkey_url, served))
    printed = run([sys.executable, "-c", code], PYTHONPATH=str(FOLDER.parents[1]))
    assert "'completion_tokens': 32" in printed
    assert printed.endswith("cancelled\n")


def test_the_page_on_bash_works(valkey_url: str, served: Queue, tmp_path: Path) -> None:
    (tmp_path / "redis-cli").symlink_to(redis_cli())
    (code,) = blocks("bash.md", "bash", valkey_url, served)
    printed = run(["bash", "-c", code], PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert re.search(r"(done|running)$", printed, re.MULTILINE)
    assert printed.endswith("ended with 1\n")


@pytest.mark.parametrize(("number", "ending"), [(0, "length\n"), (1, "cancelled\n")])
def test_the_page_on_node_works(valkey_url: str, served: Queue, number: int, ending: str) -> None:
    code = blocks("node.md", "js", valkey_url, served)[number]
    assert run([node(), "--input-type=module", "--eval", code]).endswith(ending)
