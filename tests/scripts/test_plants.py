"""scripts/plants.py: the bugs that it can plant in a toy, and its report of the bugs that a toy's tests miss."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import plants
from scripts.plants import Plant, candidates_of

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "plants.py"


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("x = a < b", {"(a <= b)"}),
        ("x = a is not b", {"(a is b)"}),
        ("x = a + b", {"(a - b)"}),
        ("x = a and b", {"(a or b)", "True and b", "a and True"}),
        ("x = not a", {"(a)"}),
        ("x = [a for a in b if c]", {"[a for a in b if True]"}),
        ("x = a if b else c", {"a if (not b) else c"}),
        ("x = 2, True, 0.5, 'a', 'a message'", {"3,", "1,", "False", "1.0", "'a_planted'"}),
        ("x = f(a, b, c=d)", {"(f(b, a, c=d))", "(f(a, b))"}),
        ("x = max(a, b)", set()),
        ("x = a[b:c]", {"a[:c]", "a[b:]", "a[b + 1:c]", "a[b:c + 1]"}),
        ("x = a[-1]", {"a[1]", "a[-2]", "a[-0]"}),
        ("f(a)", {"pass"}),
        ("a.b = c", {"pass"}),
        ("a += b", {"pass", "a -= b"}),
        ("raise E('a', 1)", {"pass"}),
        (
            "@cache\ndef f(a: 1 = 2) -> 3:\n    'docs'\n    return a",
            {"a: 1 = 3", "a: 1 = 1", "return None"},
        ),
        ("while a:\n    break", {"while (not a)", "pass"}),
        ("if TYPE_CHECKING:\n    a = 1", set()),
        ("x = f'{1 + 1}'", set()),
        ("assert a", set()),
        ("warnings.warn(1, 2, stacklevel=3)", {"pass"}),
    ],
)
def test_every_change(source: str, changes: set[str]) -> None:
    made = {plant.after for plant in plants_of("m.py", source)}
    assert len(made) == len(changes), made
    assert all(any(change in program for program in made) for change in changes), made


def test_a_bug_is_shown_with_its_place() -> None:
    (compared, *_) = (
        plant
        for plant in plants_of(
            "m.py", "é = 'ü ü' + a\n\nclass C:\n    def f(self):\n        return a < 'ü ü'\n"
        )
        if "<=" in plant.after
    )
    assert (
        str(compared)
        == "m.py:5 in C.f\n    -        return a < 'ü ü'\n    +        return (a <= 'ü ü')"
    )


def plants_of(module: str, source: str) -> list[Plant]:
    plants = [candidate.plant() for candidate in candidates_of(module, source)]
    return [plant for plant in plants if plant is not None]


TOY = "def clip(value, most=10):\n    while value > most:\n        value -= 1\n    return value\n"
TESTS = """
import subprocess, sys

def test_clip_in_a_process_of_its_own():
    run = [sys.executable, "-c", "from qsample.numbers import clip; print(clip(3), clip(12))"]
    assert subprocess.run(run, capture_output=True, text=True, timeout=2).stdout.split() == ["3", "10"]
"""


@pytest.mark.slow
def test_a_toy(tmp_path: Path) -> None:
    def plants(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, SCRIPT, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    files = {"qsample/__init__.py": "", "qsample/numbers.py": TOY, "tests/test_numbers.py": TESTS}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    identity = ("-c", "user.name=a", "-c", "user.email=b")
    for command in (["init", "-q"], [*identity, "commit", "-qm", "c", "--allow-empty"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    run = plants("--changed", "--limit", "10", "--table", "table.md")
    assert (
        "missed: qsample/numbers.py:3 in clip\n    -        value -= 1\n    +        value -= 2"
        in run.stdout
    )
    assert "value += 1" not in run.stdout, "a bug that hangs is caught"
    assert "qsample/numbers.py: 9 bugs of 9 possible, 8 caught, 1 missed" in run.stdout
    assert run.returncode == 1
    head, _, *rows = (tmp_path / "table.md").read_text().splitlines()
    assert head.startswith("| # | module and line |")
    assert len(rows) == 9
    missed = [line for line in rows if line.endswith("| **missed** |")]
    (only,) = missed
    assert only.endswith(
        "| qsample/numbers.py:3 | clip | `value -= 1` | `value -= 2` | **missed** |"
    )
    assert sum(line.endswith("::test_clip_in_a_process_of_its_own |") for line in rows) == 8
    assert (tmp_path / "qsample" / "numbers.py").read_text() == TOY

    (tmp_path / "tests" / "test_numbers.py").write_text("def test():\n    assert False\n")
    failing = plants("qsample").stdout
    assert "The tests of qsample/numbers.py fail without a bug" in failing
    assert "0 caught, 0 missed, 9 without a verdict" in failing
    assert "is neither a module nor a folder" in plants("qsample/other.py").stderr


def test_each_verdict_is_counted_and_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit statuses of pytest stand for its runs: with the bug, and again without it."""
    module = tmp_path / "qsample" / "numbers.py"
    module.parent.mkdir()
    module.write_text("x = a < b\ny = a + b\nz = not a\n")
    failed = "FAILED tests/test_numbers.py::test_x - why"
    # Caught; no test notices, of either kind; and the test fails without the bug as well.
    runs = iter([(1, failed), (0, ""), (0, ""), (0, ""), (1, failed), (1, failed)])
    monkeypatch.setattr(plants, "run_tests", lambda *given: next(runs))
    monkeypatch.setattr(plants, "tests_of", lambda root, module: ["tests/test_numbers.py"])
    table = tmp_path / "table.md"
    arguments: Any = SimpleNamespace(number=9, seed=0, limit=1.0, table=str(table))
    assert plants.try_area(tmp_path, tmp_path, "qsample", arguments) == 2
    said = capsys.readouterr().out
    assert "qsample: 3 bugs of 3 possible, 1 caught, 1 missed, 1 without a verdict; " in said
    verdicts = [row.split(" | ")[-1] for row in table.read_text().splitlines()]
    assert verdicts == [
        "tests/test_numbers.py::test_x |",
        "**missed** |",
        "no verdict: the tests fail without the bug, too |",
    ]
    assert module.read_text() == "x = a < b\ny = a + b\nz = not a\n", "each bug is gone again"
    assert next(runs, None) is None
