"""The command that installs an extra, told by the metadata that installers leave (PEP 610); errors, their causes, and
what they show of values."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from qsample import errors
from qsample.errors import install_hint

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("direct_url", "target"),
    [
        (None, "qsample-onnx[webgpu]"),  # from an index
        ('{"url": "file:///tmp/x.whl", "archive_info": {}}', "qsample-onnx[webgpu]"),
        ('{"url": "file:///tmp/x", "dir_info": {}}', "qsample-onnx[webgpu]"),
        ('{"url": "file:///tmp/x", "dir_info": {"editable": true}}', f"{ROOT}[webgpu]"),
        ("absent", f"{ROOT}[webgpu]"),
    ],
)
def test_the_hint_to_install_an_extra(
    direct_url: str | None, target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / (
        "qsample-0.0.2.dist-info" if direct_url == "absent" else "qsample_onnx-0.2.0.dist-info"
    )
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: {folder.name.split('-')[0]}\nVersion: 0.2.0\n")
    if direct_url is not None:
        (folder / "direct_url.json").write_text(direct_url)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert (
        install_hint("webgpu") == f'pip install {"-e " if target.startswith("/") else ""}"{target}"'
    )


def test_messages_command_no_terminal() -> None:
    """Control characters are escaped, except line feeds; other objects are kept."""
    assert errors.printable("a\x1b[31m\tb\nc\x7fé日") == "a\\x1b[31m\\tb\nc\\x7fé日"
    error = errors.PackageError("bad\x07", 5)
    assert error.args == ("bad\\x07", 5)
    assert isinstance(error, errors.QsampleError)


def test_an_argument_error_names_its_argument() -> None:
    assert errors.ArgumentError("x is 5").argument is None
    error = errors.ArgumentError("x is 5", "x")
    assert (str(error), error.argument) == ("x is 5", "x")
    assert isinstance(error, ValueError)


def test_a_failure_raises_new_errors_with_its_cause() -> None:
    try:
        raise LookupError("why")
    except LookupError as error:
        cause = error
    failure = errors.Failure.of(errors.EngineClosedError, "it ended ({}); go", cause)
    assert failure.message == "it ended (LookupError: why); go"
    assert cause.__traceback__ is None, "frames would keep their objects alive"
    first, second = failure.error(), failure.error()
    assert first is not second
    assert type(first) is errors.EngineClosedError
    assert str(first) == failure.message
    assert first.__cause__ is cause
    (note,) = first.__notes__
    assert note.startswith('Traceback (most recent call last):\n  File "')
    assert note.endswith("LookupError: why")
    assert errors.Failure.of(errors.QsampleError, "({})", LookupError()).message == "(LookupError)"
    long = errors.Failure.of(errors.QsampleError, "{}", LookupError("x" * 600))
    assert long.message == "LookupError: " + "x" * 500


def test_a_cause_that_cannot_be_described() -> None:
    class HostileError(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    failure = errors.Failure.of(errors.QsampleError, "it ended ({})", HostileError())
    assert (failure.message, failure.cause, failure.details) == (
        "it ended (HostileError)",
        None,
        "",
    )
    error = failure.error()
    assert error.__cause__ is None
    assert not hasattr(error, "__notes__")


def test_every_cause_of_an_error_once() -> None:
    first, context, inner = LookupError("1"), LookupError("2"), LookupError("3")
    group = ExceptionGroup("several", [inner])
    top = LookupError("top")
    top.__cause__, top.__context__ = group, context
    context.__context__ = first
    first.__context__ = context  # a circle
    found = errors.causes_of(top)
    assert found[0] is top
    assert {id(error) for error in found} == {
        id(one) for one in (top, group, inner, context, first)
    }
    assert len(found) == 5


@pytest.mark.parametrize(
    ("value", "most", "text"),
    [
        ("a", 80, "'a'"),
        ("a" * 78, 80, f"'{'a' * 78}'"),
        ("a" * 79, 80, f"'{'a' * 76}..."),
        ([1, 2, 3], 9, "[1, 2, 3]"),
        ([1, 2, 3], 8, "[1, 2..."),
    ],
)
def test_values_in_messages(value: object, most: int, text: str) -> None:
    assert errors.shown(value, most) == text
    assert len(text) <= most


def test_a_value_whose_repr_fails() -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise LookupError

    assert errors.shown(Hostile()) == "an object of type Hostile"
    assert len(errors.shown("a" * 200)) == 80


def test_lists_in_messages() -> None:
    names = ["d", "b", "a", "c", "e"]
    assert [errors.listed(names[:count]) for count in range(6)] == [
        "", "d", "b, d", "a, b, d", "a, b, c and 1 more", "a, b, c and 2 more",
    ]  # fmt: skip


def test_unknown_names() -> None:
    known = ["temperature", "top_k"]
    assert errors.unknown("no option", "temprature", known) == (
        "no option 'temprature'; did you mean 'temperature'?"
    )
    assert errors.unknown("no option", "x", known[::-1]) == (
        "no option 'x'; choose from temperature, top_k"
    )
