"""JSON from strangers: one value, or one ValueError of one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from qsample.disk.strict_json import parse_json, read_json

GOOD = [
    {"a": [1, -2.5, 1e300, True, None, "ü"], "b": {}},
    {"model_max_length": 1000000000000000019884624838656},  # transformers writes this
    [[[[]]]],
    "text",
    0,
]
BAD = [
    ("", "Expecting value"),
    ("{", "Expecting"),
    ('{"a": 1, "a": 2}', "'a' comes twice"),
    ('{"x": {"b": 1, "c": 0, "b": 1}}', "'b' comes twice"),
    ("NaN", "NaN is not JSON"),
    ('{"a": -Infinity}', "-Infinity is not JSON"),
    ("[Infinity]", "Infinity is not JSON"),
    ("1e999", "1e999 is too large"),
    ("[-1E+400]", "too large"),
    ("9" * 401, "too large"),
    ("9" * 5000, "too large"),
    ("[" * 66 + "]" * 66, "more than 64 deep"),
    ('{"a":' * 66 + "1" + "}" * 66, "more than 64 deep"),
    ("[" * 1_000_000, "more than 64 deep"),
    ('{"a":' * 300_000, "more than 64 deep"),
    ("[1] []", "Extra data"),
    ('"\x01"', "Invalid control character"),
]


@pytest.mark.parametrize("value", GOOD, ids=lambda value: json.dumps(value)[:20])
def test_good_json(value: object) -> None:
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize(("text", "problem"), BAD, ids=[text[:12] for text, _ in BAD])
def test_bad_json(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        parse_json(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_the_infinities_of_pythons_own_json() -> None:
    limits = {"time_step_limit": [0.0, float("inf")], "least": -float("inf")}
    assert parse_json(json.dumps(limits), infinities=True) == limits
    for text in ("NaN", "[1e999]"):
        with pytest.raises(ValueError, match=r"JSON|too large"):
            parse_json(text, infinities=True)


def test_64_deep_is_fine() -> None:
    assert parse_json("[" * 64 + "]" * 64)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b'{"a": 1}')
    assert read_json(path) == {"a": 1}
    with pytest.raises(ValueError, match="larger than 0 MiB"):
        read_json(path, largest=7)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="utf-8"):
        read_json(path)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "missing")
    with pytest.raises(ValueError, match="not a plain file"):
        read_json(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a plain file"):
        read_json(tmp_path / "pipe")
