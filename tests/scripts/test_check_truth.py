"""scripts/check_truth.py refuses each form that asks for the truth of a number, and accepts the right forms."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_truth.py"
MODULE = """
import enum
from collections.abc import Iterator
from typing import Any, Literal

class Level(enum.IntEnum):
    LOW = 0


def size() -> int | None: ...


def function(
    number: int | None, name: str | None, ratio: float, level: Level, text: str, flag: bool,
    maybe: bool | None, kind: Literal["a", "b"] | None, counts: list[int] | None, bits: Literal[4, 8] | None,
    known: Any,
) -> Iterator[object]:
    BODY
"""
REFUSED = [
    "yield number or 1",
    "yield size() or 1",
    "yield name or 'a'",
    "yield counts and number and 1",
    "yield flag and number or 1",
    "yield not number",
    "yield not name",
    "yield 1 if ratio else 2",
    "yield 1 if flag and not (flag or ratio) else 2",
    "yield [1 for _ in range(2) if level]",
    "yield {1: 2 for one in range(2) if one % 2}",
    "yield bool(number)",
    "yield 1 if (len(text) + 1) % 2 else 2",
    "yield 1 if len(text) & (len(text) - 1) else 2",
    "yield any(one for one in range(2))",
    "yield max(filter(None, (number, 1)), default=1)",
    "yield (number or 0) or 1",
    "yield 1 if (other := number) else other",
    "yield number or None",
    "if number:\n        yield 1",
    "if flag or name:\n        yield 1",
    "if flag:\n        yield 1\n    elif number:\n        yield 2",
    "while number:\n        yield 1",
    "assert len(text)\n    yield 1",
    "match number:\n        case int() if number:\n            yield 1",
    "yield (lambda: number or 1)",
]
ACCEPTED = [
    "yield number if number is not None else 1",
    "yield number or 0",
    "yield name or ''",
    "yield ratio or 0.0",
    "yield number is not None and number > 0",
    "yield 1 if ratio != 0 and len(text) > 0 else 2",
    "yield [1 for _ in range(2) if not text]",
    "yield flag or maybe or kind or counts or bits or known",
    "yield ' '.join(filter(None, text.split(',')))",
    "yield any(one > 0 for one in range(2))",
    "while True:\n        yield 1",
    "if number is not None:\n        yield 1",
]


def checked(folder: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for name, source in files.items():
        (folder / name).write_text(source, "utf-8")
    return subprocess.run(
        [sys.executable, SCRIPT, *files], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.ci
def test_each_form_is_judged(tmp_path: Path) -> None:
    files = {
        f"form_{number}.py": MODULE.replace("BODY", body)
        for number, body in enumerate([*REFUSED, *ACCEPTED])
    }
    result = checked(tmp_path, files)
    lines = [line.split(":")[0] for line in result.stdout.splitlines()]
    assert sorted(lines) == sorted(list(files)[: len(REFUSED)]), result
    assert result.returncode == 1


@pytest.mark.ci
def test_the_name_of_a_file_and_its_own_line(tmp_path: Path) -> None:
    result = checked(
        tmp_path, {"one.py": "", "two.py": "\ndef f(n: int) -> int:\n    return n or 1\n"}
    )
    assert result.stdout.startswith("two.py:3: n: 0 is a number")


@pytest.mark.ci
def test_right_files_pass_and_wrong_types_end_the_check(tmp_path: Path) -> None:
    assert (
        checked(tmp_path, {"right.py": "def f(n: int) -> bool:\n    return n > 0\n"}).returncode
        == 0
    )
    wrong = checked(tmp_path, {"wrong.py": "number: int = 'a'\n"})
    assert wrong.returncode == 2
    assert "run mypy" in wrong.stderr


@pytest.mark.slow
def test_numbers_of_numpy(tmp_path: Path) -> None:
    source = "import numpy as np\n\n\ndef f(n: np.int64, b: np.bool_) -> int:\n    return 1 if b and n else 2\n"
    result = checked(tmp_path, {"one.py": source})
    assert result.stdout.startswith("one.py:5: n: 0 is a number")
    assert result.stdout.count("\n") == 1
