"""docs/cases.md names tests: each of them is there, and each case has one or says why it needs none."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLES = re.findall(r"^\| case \|.*\n\|-.*\n((?:\|.*\n)+)", (ROOT / "docs" / "cases.md").read_text(), re.MULTILINE)
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for table in TABLES for line in table.splitlines()]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def names_in(path: Path) -> set[str]:
    """Functions of a module that pytest takes for tests, and test cases that it assigns to such a name."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return {name for name in names if name.startswith("test_")}


def test_every_test_that_the_page_names_exists() -> None:
    named = [found for row in ROWS for found in NAMED.findall(row[2])]
    assert len(named) > 50
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(ROOT / path)]
    assert missing == []


def test_every_case_names_a_test_or_says_why_it_does_not_apply() -> None:
    assert len(ROWS) > 25
    for case, text, tests in ROWS:
        assert text, case
        assert tests == " ".join(f"`{path}::{name}`" for path, name in NAMED.findall(tests)), f"{case}: {tests}"
        assert tests or "Doesn't apply: " in text, f"{case} has neither a test nor a reason"
