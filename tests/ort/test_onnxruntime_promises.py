"""What docs/security.md says ONNX Runtime itself refuses: held against the version that is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from qsample.ort.options import session_options

CONFIGURED = (
    "import sys; from tests.ort.test_onnxruntime_promises import opened; opened(sys.argv[1])"
)
ROOT = Path(__file__).resolve().parents[2]


def write(
    folder: Path, location: str, operator: str = "Identity", domain: str = "", **metadata: str
) -> Path:
    """A graph that returns a tensor of 16 numbers from a file."""
    tensor = TensorProto(
        name="w", data_type=TensorProto.FLOAT, dims=[16], data_location=TensorProto.EXTERNAL
    )
    tensor.external_data.add(key="location", value=location)
    node = helper.make_node(operator, ["w"], ["y"], domain=domain)
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [16])
    domains = [helper.make_opsetid("", 20), *([helper.make_opsetid(domain, 1)] if domain else [])]
    model = helper.make_model(
        helper.make_graph([node], "graph", [], [output], [tensor]),
        opset_imports=domains,
        ir_version=10,
    )
    helper.set_model_props(model, metadata)
    folder.mkdir(exist_ok=True)
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def opened(path: str | Path) -> ort.InferenceSession:
    return ort.InferenceSession(path, session_options(), providers=["CPUExecutionProvider"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes(b"\1" * 64)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"\2" * 64)
    return tmp_path / "model"


def test_data_inside_the_folder_is_read(folder: Path) -> None:
    assert opened(write(folder, "weights")).run(None, {})[0].size == 16


@pytest.mark.parametrize(
    "location", ["../secret", "{}/secret", "link", "/dev/zero", "a/../../secret"]
)
def test_data_outside_the_folder_is_refused(location: str, folder: Path) -> None:
    if hasattr(os, "symlink"):
        (folder / "link").symlink_to(folder.parent / "secret")
    path = write(folder, location.format(folder.parent))
    with pytest.raises(Exception, match=r"External data path|external data"):
        opened(path)


@pytest.mark.parametrize(
    ("domain", "operator"), [("evil", "Run"), ("ai.onnx.contrib", "PyOp"), ("", "PyOp")]
)
def test_operators_that_are_not_there_are_refused(domain: str, operator: str, folder: Path) -> None:
    with pytest.raises(Exception, match=r"not a registered function/op|No Op registered"):
        opened(write(folder, "weights", operator, domain))


def test_metadata_sets_no_options(folder: Path) -> None:
    """With the switch that a user may set, ONNX Runtime reads these, and refuses what is no JSON."""
    path = write(folder, "weights", ort_config="{this is no JSON")
    assert "ORT_LOAD_CONFIG_FROM_MODEL" not in os.environ
    opened(path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "ORT_LOAD_CONFIG_FROM_MODEL": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CONFIGURED, str(path)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode != 0
    assert "ort_config" in done.stderr
