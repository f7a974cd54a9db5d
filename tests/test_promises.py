"""Every promise of the documents names the tests that prove it, and these exist and run where the page says."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Page → the heading of the column with the tests.
PAGES = {
    "docs/security.md": "tested by",
    "docs/testing.md": "proved by",
    "docs/architecture.md": "proved by",
}
NODE = re.compile(r"`((?:js/test|tests)/[\w/.]+\.(?:py|ts))(?:::([^`]+))?`(?: \((\w+)\))?")
MARKERS = ("ci", "slow", "real")


def promises(text: str, heading: str) -> list[tuple[str, str]]:
    """The rows of the tables whose last column is `heading`: the row, and its last cell."""
    rows = []
    is_table = False
    for line in text.splitlines():
        if not line.startswith("| "):
            is_table = False
            continue
        row, _, last = line.rstrip(" |").rpartition(" | ")
        if last == heading:
            is_table = True
        elif is_table and not line.startswith("| ---"):
            rows.append((row, last))
    return rows


@functools.cache
def markers(file: str) -> dict[str, str]:
    """The tests of a file of Python, each with its marker, "" for a default test."""

    def marked(nodes: list[ast.expr]) -> str:
        names = [
            node.attr for one in nodes for node in ast.walk(one) if isinstance(node, ast.Attribute)
        ]
        return next((name for name in names if name in MARKERS), "")

    tree = ast.parse((ROOT / file).read_text("utf-8"))
    of_all = marked(
        [
            node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        ]
    )
    found = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            # A case that is marked by itself leaves the test where it is.
            own = [one for one in node.decorator_list if "parametrize" not in ast.unparse(one)]
            found[node.name] = marked(own) or of_all
    return found


def problem_of(file: str, name: str, marker: str) -> str | None:
    """What is wrong with a test that a page names; None if nothing is."""
    if not (ROOT / file).is_file():
        return f"{file} does not exist"
    if not name:
        return f"{file} is named without a test: write `{file}::test_name`"
    if file.endswith(".ts"):
        is_there = f'("{name}"' in (ROOT / file).read_text("utf-8")
        return None if is_there else f"{file} has no test {name!r}"
    known = markers(file)
    if name not in known:
        return f"{file} has no test {name}"
    if marker != known[name]:
        return f"{file}::{name} is marked {known[name] or 'by nothing'!r}, and the page says {marker!r}"
    return None


@pytest.mark.parametrize("page", PAGES)
def test_every_promise_names_its_tests(page: str) -> None:
    rows = promises((ROOT / page).read_text("utf-8"), PAGES[page])
    assert len(rows) > 5
    assert [row for row, last in rows if not NODE.search(last)] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_tests_that_a_page_names_exist_and_have_their_markers(page: str) -> None:
    text = (ROOT / page).read_text("utf-8")
    if page != "docs/security.md":  # Other pages speak of files of tests, too.
        text = "\n".join(last for _, last in promises(text, PAGES[page]))
    problems = [problem_of(*node) for node in NODE.findall(text)]
    assert [problem for problem in problems if problem] == []


def test_every_promise_of_the_readme_has_a_row() -> None:
    rows = promises((ROOT / "docs/testing.md").read_text("utf-8"), "proved by")
    readme = (ROOT / "README.md").read_text("utf-8").split("## What you can rely on")[1]
    words = re.findall(r"^- (\*\*.+?)\.\*\*", readme.split("\n## ")[0], re.MULTILINE)
    assert len(words) > 5
    assert [f"| {word}**" for word in words] == [row for row, _ in rows][: len(words)]


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ("`tests/test_nowhere.py::test_x`", "does not exist"),
        ("`tests/test_promises.py`", "without a test"),
        ("`tests/test_promises.py::test_x`", "has no test"),
        ("`tests/test_promises.py::test_wrong_names_are_found` (ci)", "by nothing"),
        ("`tests/addons/serve/test_hostile.py::test_large_bodies`", "is marked 'slow'"),
        ("`tests/addons/serve/test_hostile.py::test_large_bodies` (ci)", "is marked 'slow'"),
        ("`js/test/parts.test.ts::are not there`", "has no test"),
    ],
)
def test_wrong_names_are_found(node: str, words: str) -> None:
    (found,) = NODE.findall(node)
    assert words in (problem_of(*found) or "")


def test_right_names_are_right() -> None:
    for node in (
        "`tests/test_promises.py::test_wrong_names_are_found`",
        "`tests/addons/serve/test_hostile.py::test_large_bodies` (slow)",
        "`js/test/parts.test.ts::manifests of strangers are refused`",
    ):
        (found,) = NODE.findall(node)
        assert problem_of(*found) is None
    assert promises(
        "| a | tested by |\n| --- | --- |\n| x | y |\n\n| a | b |\n| x | z |", "tested by"
    ) == [("| x", "y")]
