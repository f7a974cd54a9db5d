"""scripts/plants.py: the bugs that it can plant in a toy, and what it says of those that a toy's tests miss."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.plants import is_program, planted, possible_plants

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "plants.py"
TOY = """
def clip(value, most=10):
    while value > most:
        value -= 1
    return value


def mean(numbers):
    total = 0
    for number in numbers[:]:
        total += number
    return total // len(numbers) if numbers else 0
"""
TESTS = """
import subprocess
import sys

from toy.numbers import clip, mean


def test_clip():
    assert [clip(3), clip(12)] == [3, 10]


def test_mean_in_a_process_of_its_own():
    run = [sys.executable, "-c", "from toy.numbers import mean; print(mean([4, 8]))"]
    assert subprocess.run(run, capture_output=True, text=True).stdout.strip() == "6"
"""


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("x = a < b", {"a <= b"}),
        ("x = a is not b", {"a is b"}),
        ("x = (a) + (b)", {"(a) - (b)"}),
        ("x = a and b", {"a or b", "a and True", "True and b"}),
        ("x = not a", {"(a)"}),
        ("x = [a for a in b if c]", {"[a for a in b if True]"}),
        ("x = a if b else c", {"a if (not (b)) else c"}),
        ("x = 2, True, 0.5, 'a', 'a message'", {"3", "(1)", "False", "(1.0)", "'a_planted'"}),
        ("x = f(a, b, c=d)", {"f(b, a, c=d)", "f(a, b)"}),
        ("x = max(a, b)", set()),
        ("x = a[b:c]", {"a[:c]", "a[b:]", "a[(b) + 1:c]", "a[b:(c) + 1]"}),
        ("x = a[-1]", {"a[0]", "a[(1)]", "a[-2]", "a[-(0)]"}),
        ("f(a)", {"pass"}),
        ("a.b = c", {"pass"}),
        ("a += b", {"pass", "a -= b"}),
        ("raise E('a', 1)", {"pass"}),
        ("def f(a: 1 = 2) -> 3:\n    'docs'\n    return a", {"a: 1 = 3", "a: 1 = (1)", "return None"}),
        ("while a:\n    break", {"while (not (a))", "pass"}),
        ("if TYPE_CHECKING:\n    a = 1", set()),
        ("x = f'{1 + 1}'", set()),
        ("warnings.warn(1, 2, stacklevel=3)", {"pass"}),
    ],
)
def test_every_change(source: str, changes: set[str]) -> None:
    made = {planted(source.encode(), plant).decode() for plant in possible_plants("m.py", source.encode())}
    assert all(is_program(program.encode()) for program in made)
    assert len(made) == len(changes), made
    assert all(any(change in program for program in made) for change in changes), made


def test_changes_are_told_apart_by_function_and_text() -> None:
    source = "é = 'ü' + a\n\nclass C:\n    def f(self):\n        return 1 < 1\n"
    plants = possible_plants("m.py", source.encode())
    assert len({plant.key for plant in plants}) == len(plants)
    assert {(plant.function, plant.line) for plant in plants} == {("<module>", 1), ("C.f", 5)}
    compared = next(plant for plant in plants if "<=" in plant.new)
    assert compared.key == ("m.py", "C.f", "return 1 < 1", "return 1 <= 1")
    assert str(compared) == "m.py:5 in C.f (operator)\n    - return 1 < 1\n    + return 1 <= 1"


@pytest.mark.slow
def test_a_toy(tmp_path: Path) -> None:
    def plants(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, SCRIPT, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    files = {"toy/__init__.py": "", "toy/numbers.py": TOY, "tests/test_numbers.py": TESTS, ".gitignore": "__pycache__"}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    equal = tmp_path / "scripts" / "equal_plants.toml"
    equal.parent.mkdir()
    line = "return total // len(numbers) if numbers else 0"
    entry = '[["toy/numbers.py"]]\nin = "mean"\nold = "{}"\nnew = "{}"\nwhy = "no test has an empty list"\n'
    equal.write_text(entry.format(line, line.replace("else 0", "else 1")))
    page = tmp_path / "docs" / "testing.md"
    page.parent.mkdir()
    page.write_text("| head |\n<!-- plants -->\n")

    run = plants("toy/numbers.py", "--only", "clip|mean .statement|else 1", "--limit", "6", "--verbose", "--record")

    outcomes = re.findall(r"^(\w+): toy/numbers\.py:\d+ in (\w+) \(\w+\)\n    - (.+)\n    \+ (.+)$", run.stdout, re.M)
    assert ("hang", "clip", "value -= 1", "value += 1") in outcomes, run.stdout + run.stderr
    assert ("caught", "clip", "while value > most:", "while value >= most:") in outcomes
    assert ("caught", "mean", "total += number", "pass") in outcomes
    assert ("missed", "clip", "value -= 1", "value -= 2") in outcomes
    assert not [new for *_, new in outcomes if "else 1" in new]
    counts = {name: sum(outcome == name for outcome, *_ in outcomes) for name in ("caught", "hang", "missed")}
    caught, number = counts["caught"] + counts["hang"], len(outcomes) + 1
    assert f"{number} bugs of" in run.stdout
    assert f"{caught} caught ({counts['hang']} by the time limit), {counts['missed']} missed, 1 equal" in run.stdout
    assert run.returncode == 1
    row = page.read_text().splitlines()[1]
    assert row.startswith(f"| `toy/numbers.py` | {caught} of {number} | {number} | {caught} | 1 | ")
    assert (tmp_path / "toy" / "numbers.py").read_text() == TOY

    equal.write_text(entry.format(line, line.replace("else 0", "else 7")))
    stale = plants("toy/numbers.py")
    assert (stale.returncode, "fit no bug of their module any more" in stale.stderr) == (1, True)
    (tmp_path / "tests" / "test_numbers.py").write_text("def test():\n    assert False\n")
    equal.unlink()
    assert "The tests fail without a bug" in plants("toy/numbers.py").stderr
    assert "is neither a module nor a folder" in plants("toy/other.py").stderr
