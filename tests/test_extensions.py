"""Entry points: those of a checkout, of installations of qsample, and of other distributions."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qsample import extensions
from qsample.errors import QsampleError
from qsample.extensions import TARGETS, extension_names, load_extension

OWN = SimpleNamespace(name="qsample-onnx")
OTHER = SimpleNamespace(name="npu-target")


@pytest.fixture(autouse=True)
def fresh_caches() -> Iterator[None]:
    for cached in (extensions._entry_points, extensions._entry_points_of_checkout):
        cached.cache_clear()
    yield
    for cached in (extensions._entry_points, extensions._entry_points_of_checkout):
        cached.cache_clear()


def entry(name: str, value: str, distribution: Any) -> EntryPoint:
    point = EntryPoint(name, value, TARGETS)
    vars(point)["dist"] = distribution
    return point


def install(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    monkeypatch.setattr(
        extensions, "entry_points", lambda group: EntryPoints(points).select(group=group)
    )


def test_a_checkout_needs_no_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    assert {"cpu", "cuda", "web", "webgpu"} <= {*extension_names(TARGETS)}
    assert load_extension(TARGETS, "cpu").name == "cpu"


def test_an_older_installation_of_the_checkout_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stale = entry("cpu", "qsample.former.place:TARGET", OWN)
    install(monkeypatch, stale, entry("gone", "qsample.gone:TARGET", OWN))
    assert "gone" not in extension_names(TARGETS)
    assert load_extension(TARGETS, "cpu").name == "cpu"


def test_other_distributions_are_found_beside_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, entry("npu", "json:dumps", OTHER))
    assert {"cpu", "npu"} <= {*extension_names(TARGETS)}
    assert load_extension(TARGETS, "npu").__name__ == "dumps"


@pytest.mark.parametrize("content", [None, '[project]\nname = "another"\n'])
def test_an_installed_package_reads_its_metadata(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "pyproject.toml"
    if content is not None:
        beside.write_text(content)
    monkeypatch.setattr(extensions, "_PYPROJECT", beside)
    install(monkeypatch, entry("cpu", "qsample.compiler.targets.cpu:TARGET", OWN))
    assert extension_names(TARGETS) == ["cpu"]
    with pytest.raises(KeyError):
        load_extension(TARGETS, "cuda")


def test_two_distributions_with_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may register the same object, but no other one; one of the checkout has no distribution."""
    own, more = entry("npu", "json:dumps", OTHER), SimpleNamespace(name="more")
    install(monkeypatch, own, entry("npu", "json:dumps", more))
    assert load_extension(TARGETS, "npu").__name__ == "dumps"
    for name, first in (("npu", r"npu-target \(json:dumps\)"), ("cpu", r"qsample\.\S+")):
        extensions._entry_points.cache_clear()
        install(monkeypatch, own, entry(name, "json:loads", more))
        wanted = rf"^{first} and more \(json:loads\) both register '{name}'"
        with pytest.raises(QsampleError, match=wanted):
            extension_names(TARGETS)
