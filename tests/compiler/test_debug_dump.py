"""Dumps of the graph after each phase: what they hold, and which folders they may be written to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from qsample import cli
from qsample.compiler.compile import compile_package
from qsample.compiler.debug_dump import DebugDump, read_counts
from qsample.compiler.options import CompileOptions
from qsample.compiler.plan import make_plan
from qsample.compiler.targets.cpu import TARGET
from qsample.errors import CompileError
from qsample.package.package import Package
from tests.helpers.fake_package import fake_package
from tests.helpers.small_graphs import normal, small_graph


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return fake_package(tmp_path_factory.mktemp("dumped") / "package")


def test_a_file_and_counts_for_each_phase(portable: Package, tmp_path: Path) -> None:
    options = CompileOptions(
        ctx_len=32, weights="int4", block_size=16, max_divergence=99, debug_dump=tmp_path / "dump"
    )
    compiled = compile_package(portable, tmp_path / "out", options)
    phases = ["portable", *(phase.name for phase in TARGET.phases(make_plan(portable, options)))]
    counts = read_counts(tmp_path / "dump")
    assert [entry["phase"] for entry in counts] == phases
    files = [f"{number:02}-{phase}.onnx" for number, phase in enumerate(phases)]
    assert [entry["file"] for entry in counts] == files
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == sorted(
        [*files, "counts.json"]
    )
    cut = slice(phases.index("split-sampler"), phases.index("join-sampler"))
    for entry in counts:
        graph = onnx.load(tmp_path / "dump" / entry["file"], load_external_data=False).graph
        assert len(graph.node) <= entry["nodes"] == sum(entry["operators"].values())
        assert {value.name for value in graph.output} >= {
            "logits" if entry in counts[cut] else "next_ids"
        }
    quantized = next(entry for entry in counts if entry["phase"] == "quantize-matrices")
    assert quantized["operators"]["com.microsoft::MatMulNBits"] == 2
    last = onnx.load(tmp_path / "dump" / files[-1], load_external_data=False)
    published = onnx.load(compiled.path / "decoder.onnx", load_external_data=False)
    assert [node.name for node in last.graph.node] == [node.name for node in published.graph.node]


def test_large_weights_are_left_out_and_small_ones_kept(portable: Package, tmp_path: Path) -> None:
    compile_package(
        portable, tmp_path / "out", CompileOptions(ctx_len=32, debug_dump=tmp_path / "dump")
    )
    for path in (tmp_path / "dump").glob("*.onnx"):
        for tensor in onnx.load(path, load_external_data=False).graph.initializer:
            size = onnx.numpy_helper.to_array(tensor).nbytes if not tensor.external_data else 0
            assert size <= 1024
            if tensor.external_data:
                assert tensor.external_data[0].value == "weights-left-out"


def test_what_is_left_of_a_weight(tmp_path: Path) -> None:
    """Of more than 1,024 bytes, where in a file it would lie; the model keeps its numbers."""
    weights = {"most": normal(256), "large": normal(257)}
    model = small_graph(
        "g (float[1] x, float[256] most, float[257] large) => (float[1] y) { y = com.microsoft.Gelu (x) }",
        constants=weights,
    )
    dump = DebugDump(tmp_path / "new" / "dump")
    dump.write("first", model)
    graph = onnx.load(tmp_path / "new/dump/00-first.onnx", load_external_data=False).graph
    places = {
        tensor.name: {entry.key: entry.value for entry in tensor.external_data}
        for tensor in graph.initializer
    }
    place = {"location": "weights-left-out", "offset": "0", "length": "1028"}
    assert places == {"most": {}, "large": place}
    for name, array in weights.items():
        kept = model.graph.initializers[name].const_value
        assert kept is not None
        np.testing.assert_array_equal(kept.numpy(), array)
    entry = {"phase": "first", "file": "00-first.onnx", "nodes": 1}
    assert read_counts(tmp_path / "new" / "dump") == [
        {**entry, "operators": {"com.microsoft::Gelu": 1}}
    ]


def test_places_that_cannot_be(portable: Package, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    for folder, message in (
        (
            tmp_path / "full",
            r"debug_dump is '.*full', which holds files \(thesis.txt\); give a new or empty folder",
        ),
        (tmp_path / "file", r"cannot be written to \(File exists\)"),
        (portable.path / "dump", "is in the package"),
        (tmp_path / "out", "is in the package"),
    ):
        with pytest.raises(CompileError, match=message):
            compile_package(
                portable, tmp_path / "out", CompileOptions(ctx_len=32, debug_dump=folder)
            )
    with pytest.raises(
        CompileError, match="debug_dump is 3; give the path of a new or empty folder"
    ):
        CompileOptions(debug_dump=3)  # type: ignore[arg-type]
    assert not (portable.path / "dump").exists()
    assert not (tmp_path / "out").exists()
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]


def test_the_command_prints_a_table(
    portable: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = tmp_path / "dump"
    command = [
        "compile",
        str(portable.path),
        str(tmp_path / "out"),
        "--ctx-len",
        "32",
        "--debug-dump",
        str(dump),
    ]
    assert cli.run(command) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'out'}\n"
    for entry in json.loads((dump / "counts.json").read_text())["phases"]:
        assert entry["file"] in printed.err
    assert cli.run([*command, "--overwrite"]) == 1  # the folder is not empty any more
