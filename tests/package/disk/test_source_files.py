"""Files that change while they are in use: reported if the work fails, and before anything is published."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from qsample.errors import QsampleError
from qsample.package.disk.source_files import SourceFiles

CHANGES: dict[str, Callable[[Path], object]] = {
    "replaced": lambda path: os.replace(path.with_name("other"), path),
    "written to": lambda path: path.write_bytes(b"other"),
    "cut off": lambda path: os.truncate(path, 1),
    "deleted": lambda path: path.unlink(),
}


@pytest.fixture
def files(tmp_path: Path) -> SourceFiles:
    for name in ("first", "second"):
        (tmp_path / name).write_bytes(b"bytes")
        os.utime(tmp_path / name, ns=(1, 1))  # the clock may not tell two writes of a test apart
    (tmp_path / "other").write_bytes(b"other")
    sources = SourceFiles()
    sources.add([tmp_path / "first", tmp_path / "second"])
    return sources


def work(files: SourceFiles, change: Callable[[], object], error: BaseException) -> None:
    with files as entered:
        assert entered is files
        change()
        raise error


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_told_and_so_is_an_error_that_came_of_it(
    change: str, files: SourceFiles, tmp_path: Path
) -> None:
    files.check()
    words = rf"second was {'deleted' if change == 'deleted' else 'replaced or written'}.* nothing was published"
    with pytest.raises(QsampleError, match=words) as caught:
        work(files, lambda: CHANGES[change](tmp_path / "second"), ValueError("the logits differ"))
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(QsampleError, match=words):
        files.check()


def test_other_errors_pass(files: SourceFiles, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"):
        work(files, lambda: None, ValueError("no"))
    with pytest.raises(KeyboardInterrupt):
        work(files, (tmp_path / "first").unlink, KeyboardInterrupt())


def test_the_first_sight_counts(files: SourceFiles, tmp_path: Path) -> None:
    (tmp_path / "first").write_bytes(b"others")
    files.add([tmp_path / "first"])
    with pytest.raises(QsampleError, match="first was"):
        files.check()
