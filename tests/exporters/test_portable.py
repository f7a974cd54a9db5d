"""The files and the manifest of a portable package, from a graph that returns logits."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import onnxruntime as ort
import pytest

from qsample.exporters import portable


def test_the_version_of_onnxruntime_does_not_depend_on_its_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime-gpu and onnxruntime-openvino install the same module, and no distribution `onnxruntime`."""

    def installed(name: str) -> str:
        if name == "onnxruntime":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(portable, "version", installed)
    assert portable._versions(())["onnxruntime"] == ort.__version__
