"""The pages of cases name tests: each of them is there, and each case has one or says why it needs none."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = re.compile(r"^\| (?:case|fault) \|[^|\n]*\| test \|\n\|-.*\n((?:\|.*\n)+)", re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
# How many cases each page has at least, so that none is lost with a table that isn't read.
PAGES = {"cases.md": 25, "cases-queue.md": 35, "cases-protocol.md": 48, "delivery.md": 30}


def rows_of(page: str) -> list[list[str]]:
    """Cells of all tables of cases."""
    tables = TABLE.findall((ROOT / "docs" / page).read_text())
    return [[cell.strip() for cell in line.strip("|").split("|")] for table in tables for line in table.splitlines()]


def names_in(path: Path) -> set[str]:
    """Functions of a module that pytest takes for tests, and test cases that it assigns to such a name."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return {name for name in names if name.startswith("test_")}


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_the_page_names_exists(page: str) -> None:
    named = [found for row in rows_of(page) for found in NAMED.findall(row[2])]
    assert len(named) > PAGES[page]
    known = {path: names_in(ROOT / path) for path in {path for path, _ in named}}
    assert [f"{path}::{name}" for path, name in named if name not in known[path]] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_case_names_a_test_or_says_why_it_does_not_apply(page: str) -> None:
    rows = rows_of(page)
    assert len(rows) >= PAGES[page]
    for case, text, tests in rows:
        assert text, case
        assert tests == " ".join(f"`{path}::{name}`" for path, name in NAMED.findall(tests)), f"{case}: {tests}"
        assert tests or "Doesn't apply: " in text, f"{case} has neither a test nor a reason"
