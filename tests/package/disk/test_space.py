"""Full disks: any library, in any words, ends in a single line that names the disk."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qsample.errors import PackageError, QsampleError
from qsample.package.disk import space
from qsample.package.disk.scratch import ScratchFolder
from qsample.package.disk.space import check_free, full_disk_named
from tests.helpers.small_packages import write
from tests.helpers.tiny_models import random_model

ROOT = Path(__file__).resolve().parents[2]
DAY = 24 * 3600
Fail = type("Fail", (Exception,), {"__module__": "onnxruntime.capi.onnxruntime_pybind11_state"})


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=(1 << 16) - 1))


FULL = [
    no_space(),
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    Exception("Error while serializing: I/O error: No space left on device (os error 28)"),
    Fail("[ONNXRuntimeError] : 1 : FAIL : write failed, errcode = 28 - No space left on device"),
    caused(QsampleError("cannot load the weights of 'model': cannot write"), no_space()),
]


@pytest.mark.parametrize("error", FULL, ids=lambda error: type(error).__name__)
def test_errors_that_say_so(error: Exception, tmp_path: Path) -> None:
    with (
        pytest.raises(
            PackageError, match=r"^the disk of .* is full; nothing was written\. Free some space"
        ) as caught,
        full_disk_named(tmp_path, 3 * 10**9, "the package"),
    ):
        raise error
    assert str(caught.value).endswith("choose another disk: the package needs about 3.0 GB")
    assert caught.value.__cause__ is error


UNCLEAR = [
    Fail("ToGraphProtoWithExternalInitializers failed"),
    OSError("61440 requested and 14336 written"),
]


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("error", UNCLEAR, ids=lambda error: type(error).__name__)
def test_unclear_errors_on_a_full_disk(error: Exception, tmp_path: Path) -> None:
    missing = tmp_path / "deep" / "missing"
    with (
        pytest.raises(PackageError, match="is full; nothing was written"),
        full_disk_named(missing),
    ):
        raise error


@pytest.mark.parametrize(
    "error", [OSError(errno.EFBIG, "File too large"), UNCLEAR[1]], ids=["EFBIG", "short write"]
)
def test_limits_of_a_file(error: Exception, tmp_path: Path) -> None:
    with (
        pytest.raises(PackageError, match=r"takes no more of a file: .*ulimit -f"),
        full_disk_named(tmp_path),
    ):
        raise error


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(
    "error", [ValueError("no"), QsampleError("a bad option"), OSError(errno.EACCES, "no")]
)
def test_other_errors_pass(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, full_disk_named(tmp_path):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("free", [1 << 16, None], ids=["some room", "much room"])
def test_unclear_errors_on_a_disk_with_room_pass(
    free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free or usage.free))
    with pytest.raises(Fail), full_disk_named(tmp_path):
        raise UNCLEAR[0]
    with pytest.raises(PackageError, match="takes no more of a file"), full_disk_named(tmp_path):
        raise UNCLEAR[1]


def test_sizes_as_text() -> None:
    sizes = (12_300_000, 99_940_000, 100_000_000, 3_000_000_000)
    assert [space.format_bytes(size) for size in sizes] == [
        "12.3 MB",
        "99.9 MB",
        "0.1 GB",
        "3.0 GB",
    ]


def test_a_circle_of_causes_ends(tmp_path: Path) -> None:
    first, second = ValueError("1"), ValueError("2")
    first.__cause__, second.__cause__ = second, first
    with pytest.raises(ValueError, match="1"), full_disk_named(tmp_path):
        raise first


def test_what_was_used_longest_ago_is_trimmed(tmp_path: Path) -> None:
    """Files and folders; what has to stay counts, and what is gone does not."""
    for number, name in enumerate(("old", "kept", "folder", "new")):
        path = tmp_path / name
        if name == "folder":
            path.mkdir()
            path /= "deep"
        path.write_bytes(bytes(100))
        os.utime(tmp_path / name, (number, number))
    asked: list[str] = []

    def remove(path: Path) -> bool:
        asked.append(path.name)
        return path.name != "kept"

    paths = [tmp_path / name for name in ("new", "folder", "gone", "kept", "old")]
    space.trim(paths, 400, remove)
    assert asked == []
    space.trim(paths, 300, remove)
    assert asked == ["old"]
    asked.clear()
    space.trim(paths, 250, remove)
    assert asked == ["old", "kept", "folder"]


def test_times_in_the_future_are_no_reason_to_stay(tmp_path: Path) -> None:
    """A clock that was ahead would otherwise keep its files for years, and remove each new file at once."""
    now = time.time()
    for name, age in (
        ("next", -3600),
        ("new", 0),
        ("ahead", -1000 * DAY),
        ("further", -2000 * DAY),
    ):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (now - age, now - age))
    asked: list[str] = []
    space.trim(tmp_path.iterdir(), 100, lambda path: asked.append(path.name) is None)
    assert asked == ["ahead", "further", "new"]


def test_the_folder_that_is_named_is_the_users(tmp_path: Path) -> None:
    with (
        ScratchFolder(tmp_path) as scratch,
        pytest.raises(
            PackageError, match=re.escape(f"{tmp_path} has ") + r".* free and the copy needs about"
        ),
    ):
        check_free(scratch.new, 10**18, "the copy")
    with (
        ScratchFolder(tmp_path) as scratch,
        pytest.raises(PackageError, match=f"the disk of {tmp_path} is full"),
        full_disk_named(scratch.new / "missing"),
    ):
        raise no_space()


# Real disks of a few kilobytes.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system of so many bytes."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(size: int) -> Path:
        arguments = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
        if subprocess.run(arguments, capture_output=True, check=False).returncode != 0:
            pytest.skip("cannot mount a small disk here")
        return folder

    yield mount
    subprocess.run(["umount", "-l", folder], capture_output=True, check=False)


def write_with_numpy(folder: Path) -> None:
    np.zeros(1 << 18, np.float32).tofile(folder / "weights")


def write_with_safetensors(folder: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"weights": np.zeros(1 << 18, np.float32)}, folder / "weights.safetensors")


def write_with_onnxruntime(folder: Path) -> None:
    from qsample.compiler.write import optimize_file, ort
    from tests.helpers.fake_package import fake_package

    source = folder.parent / "source"
    if not source.exists():
        fake_package(source)
    level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    optimize_file(
        source / "decoder.onnx", folder / "optimized.onnx", ["CPUExecutionProvider"], level
    )


@pytest.mark.parametrize(
    "write_file", [write_with_numpy, write_with_safetensors, write_with_onnxruntime]
)
@pytest.mark.parametrize("size", [4096, 16384])
def test_whoever_writes(write_file: Callable[[Path], None], size: int, disk: Any) -> None:
    folder = disk(size)
    with pytest.raises(PackageError, match="is full; nothing was written"), full_disk_named(folder):
        write_file(folder)


@pytest.mark.parametrize("size", [4096, 8192, 20480, 65536])
def test_a_package_on_a_full_disk_leaves_nothing(size: int, disk: Any) -> None:
    folder = disk(size)
    with pytest.raises(PackageError, match=r"is full; nothing was written|has 0\.0 MB free"):
        write(folder / "deep" / "package")
    assert os.listdir(folder) == []


def test_an_export_is_asked_for_the_room_of_the_weights_as_they_are_stored(
    disk: Any, tmp_path: Path
) -> None:
    import torch

    import qsample
    from qsample.transforms.deferred import SMALLEST

    model = random_model("llama", vocab_size=2000).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "checkpoint")
    counts = [weight.numel() for weight in model.parameters()]
    size = space.format_bytes(sum(count * (2 if count >= SMALLEST else 4) for count in counts))
    folder = disk(1 << 17)
    opened = qsample.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", tokenizer=None)
    with pytest.raises(
        PackageError, match=rf"disk has 0\.1 MB free and the package needs about {size}"
    ):
        opened.export(folder / "package")
    assert os.listdir(folder) == []


def test_a_limit_of_the_process(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from pathlib import Path\n"
        "from tests.helpers.small_packages import write\n"
        "write(Path(sys.argv[1]) / 'package')\n"
    )
    if sys.platform == "win32":
        pytest.skip("no such limit there")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    assert re.search(r"PackageError: .* takes no more of a file: .*\(ulimit -f\)", done.stderr), (
        done.stderr
    )
    assert os.listdir(tmp_path) == []
