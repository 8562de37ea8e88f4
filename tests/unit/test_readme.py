"""What the first page and the other pages show to be pasted must work where it is pasted."""

import re
from pathlib import Path

import pytest

from ops.commands.redis import command as redis_command

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def job_ids(text: str) -> set[str]:
    """Ids of the jobs that a page adds, cancels or reads."""
    return set(re.findall(r"(?:\bid |:reply:|:cancel:|:state:)([a-z]+-\d+)", text))


def test_every_command_names_a_program_that_is_there_after_make_install() -> None:
    lines = [line for block in BLOCKS for line in block.splitlines()]
    commands = [line for line in lines if re.match(r"\S*(pagemill|python)\b", line)]
    assert len(commands) > 4
    assert [line for line in commands if not line.startswith(".venv/bin/")] == []


def test_the_frames_of_the_picture_are_closed() -> None:
    (picture,) = [block for block in BLOCKS if "┌" in block]
    framed = [line for line in picture.splitlines() if line.lstrip()[0] in "┌└│" and line.rstrip()[-1] in "┐┘│"]
    assert len(framed) > 6
    assert {len(line) for line in framed[:1]} == {len(line) for line in framed}
    corners = {char: {line.index(char) for line in framed if char in line} for char in "┐┘"}
    assert corners["┐"] == corners["┘"]


def test_no_two_pages_use_one_job_id() -> None:
    """A mark that cancels a job of one page would call off the next page's, and a resend is dropped."""
    pages = {page.name: page.read_text() for page in PAGES}
    pages["pagemill redis --help"] = str(redis_command.help)
    seen: dict[str, str] = {}
    for name, text in pages.items():
        for job_id in job_ids(text):
            assert seen.setdefault(job_id, name) == name, job_id
    assert {"README.md", "wire.md", "pagemill redis --help"} <= set(seen.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page: Path) -> None:
    links = sorted(set(re.findall(r"\]\(([^)#:]+)\)", page.read_text())))
    assert [link for link in links if not (page.parent / link).exists()] == []
