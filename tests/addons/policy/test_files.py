"""Policy components on disk, and in the place of a workflow package's own sampler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml

from qsample.addons.policy.files import METADATA, replace_sampler, write_policy
from qsample.errors import PackageError

ROLES = ("logits", "temperature", "top_k", "top_p", "min_p", "seed", "counter", "active", "done")
ROW = {"shape": ["batch"], "batch_layout": {"kind": "request_aligned", "axis": 0}}
DTYPES = {"logits": "float32", "temperature": "float32", "top_p": "float32", "min_p": "float32"}
DTYPES |= {"active": "bool", "done": "bool"}


def workflow() -> dict[str, Any]:
    """The metadata of a package whose sampler has ports of other names than the contract's roles."""
    ports = {f"in_{role}": {"dtype": DTYPES.get(role, "int64"), **ROW} for role in ROLES}
    ports["in_logits"]["shape"] = ["batch", "sequence", "vocabulary"]
    bindings = {role: f"in_{role}" for role in ROLES} | {"token": "out", "next_counter": "counted"}
    sampler = {
        "implementation": {"kind": "onnx", "artifact": "policies/own.onnx"},
        "ports": {
            "inputs": ports,
            "outputs": {name: {"dtype": "int64", **ROW} for name in ("out", "counted")},
        },
        "contract": {
            "id": "onnx-genai.token-sampler",
            "version": "2",
            "bindings": bindings,
            "parameters": {"batching": "per_row", "inactive_rows": "preserve"},
        },
        "application_overridable": True,
    }
    model = {
        "implementation": {"kind": "onnx", "artifact": "model.onnx"},
        "ports": {
            "outputs": {"scores": {"dtype": "float32", "shape": ["batch", "sequence", 77]}},
            "roles": {"scores": "logits"},
        },
    }
    return {"pipeline": {"workflow": {"components": {"model": model, "sampler": sampler}}}}


def written(folder: Path, document: dict[str, Any]) -> Path:
    (folder / "policies").mkdir()
    (folder / "policies" / "own.onnx").write_bytes(b"own")
    (folder / METADATA).write_text("# kept\n" + yaml.safe_dump(document, sort_keys=False))
    return folder


def test_components_and_their_declaration(tmp_path: Path) -> None:
    files = write_policy(tmp_path / "out", 50)
    assert sorted(str(path.relative_to(tmp_path / "out")) for path in files) == [
        "components.yaml",
        "policies/termination.onnx",
        "policies/token_sampler.onnx",
        "policies/token_state_update.onnx",
    ]
    declared = yaml.safe_load((tmp_path / "out" / "components.yaml").read_text())["components"]
    for component in declared.values():
        graph = onnx.load(tmp_path / "out" / component["implementation"]["artifact"]).graph
        for side, values in (("inputs", graph.input), ("outputs", graph.output)):
            shapes = {
                value.name: [
                    axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim
                ]
                for value in values
            }
            assert shapes == {
                name: port["shape"] for name, port in component["ports"][side].items()
            }
        names = [value.name for value in (*graph.input, *graph.output)]
        assert component["contract"]["bindings"] == {name: name for name in names}
        assert component["contract"]["parameters"] == {
            "batching": "per_row",
            "inactive_rows": "preserve",
        }
    assert [
        name for name, component in declared.items() if component["application_overridable"]
    ] == ["token_sampler"]
    with pytest.raises(PackageError, match="exists; give overwrite"):
        write_policy(tmp_path / "out", 50)
    write_policy(tmp_path / "out", 50, overwrite=True)
    with pytest.raises(ValueError, match=r"onnx-genai\.token-sampler@2"):
        write_policy(tmp_path / "other", 50, contract="onnx-genai.token-sampler@1")
    assert not (tmp_path / "other").exists()


def test_a_package_gets_the_sampler_under_its_own_names(tmp_path: Path) -> None:
    folder = written(tmp_path, workflow())
    made = replace_sampler(folder)
    graph = onnx.load(made).graph
    assert [value.name for value in graph.input] == [f"in_{role}" for role in ROLES]
    assert [value.name for value in graph.output] == ["out", "counted"]
    logits = graph.input[0].type.tensor_type.shape.dim
    assert [axis.dim_param or axis.dim_value for axis in logits] == ["batch", "sequence", 77], (
        "as the model says"
    )
    expected = workflow()
    components = expected["pipeline"]["workflow"]["components"]
    components["sampler"]["implementation"]["artifact"] = str(made.relative_to(folder))
    text = (folder / METADATA).read_text()
    assert text.startswith("# kept\n")
    assert yaml.safe_load(text) == expected
    assert (folder / "policies" / "own.onnx").read_bytes() == b"own"
    replace_sampler(folder)  # again
    assert (folder / METADATA).read_text() == text


def change(*keys: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def apply(document: dict[str, Any]) -> None:
        part = document["pipeline"]["workflow"]["components"]["sampler"]
        for key in keys[:-1]:
            part = part[key]
        part[keys[-1]] = to

    return apply


REFUSED = {
    "another version": (
        change("contract", "version", to="1"),
        "0 components of onnx-genai.token-sampler@2",
    ),
    "not replaceable": (change("application_overridable", to=False), "not application_overridable"),
    "effects": (change("effects", to=["log"]), "has effects"),
    "a binding": (change("implementation", to={"kind": "binding"}), "only an ONNX file"),
    "whole batches": (change("contract", "parameters", "batching", to="whole"), "batching 'whole'"),
    "another port": (change("ports", "inputs", "mask", to=ROW), "must be bound to"),
    "an unbound role": (change("contract", "bindings", "seed", to="noise"), "must be bound to"),
    "another dtype": (
        change("ports", "inputs", "in_logits", "dtype", to="float16"),
        "logits is float32",
    ),
    "another rank": (
        change("ports", "inputs", "in_seed", "shape", to=["batch", 1]),
        "seed is int64 with 1 axes",
    ),
    "no components": (lambda document: document["pipeline"].clear(), "has no pipeline.workflow"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_package_that_cannot_take_it_stays_as_it_is(tmp_path: Path, case: str) -> None:
    document = copy.deepcopy(workflow())
    apply, message = REFUSED[case]
    apply(document)
    folder = written(tmp_path, document)
    before = (folder / METADATA).read_bytes()
    with pytest.raises(PackageError, match=message):
        replace_sampler(folder)
    assert (folder / METADATA).read_bytes() == before
    assert sorted(path.name for path in folder.rglob("*")) == [METADATA, "own.onnx", "policies"]


@pytest.mark.parametrize(
    "text", ["", "a: [", "&a [*a, *a]", "- 1", "pipeline: &x {}\nworkflow: *x"]
)
def test_metadata_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / METADATA).write_text(text)
    with pytest.raises(PackageError, match=r"inference_metadata\.yaml"):
        replace_sampler(tmp_path)


def test_metadata_have_16_mebibytes_at_most(tmp_path: Path) -> None:
    (tmp_path / METADATA).write_bytes(bytes(2**24 + 1))
    with pytest.raises(PackageError, match="it is larger than 16 MiB"):
        replace_sampler(tmp_path)


def test_a_file_that_two_components_share_is_left_alone(tmp_path: Path) -> None:
    document = workflow()
    components = document["pipeline"]["workflow"]["components"]
    components["model"]["implementation"] = components["sampler"]["implementation"]
    folder = written(tmp_path, document)
    with pytest.raises(PackageError, match="stands for several"):
        replace_sampler(folder)


def test_a_component_that_is_merged_from_elsewhere_is_left_alone(tmp_path: Path) -> None:
    document = workflow()
    components = document["pipeline"]["workflow"]["components"]
    sampler = components.pop("sampler")
    components["nothing"] = None
    folder = written(tmp_path, document | {"base": sampler})
    text = (folder / METADATA).read_text()
    text = text.replace("base:\n", "base: &base\n").replace(
        "      nothing: null\n", "      nothing: null\n      own: {<<: *base}\n"
    )
    base = text[text.index("base: &base") :]
    (folder / METADATA).write_text(base + text[: text.index("base: &base")])
    with pytest.raises(PackageError, match="stands for several"):
        replace_sampler(folder)
    assert not (folder / "policies" / "qsample_token_sampler.onnx").exists()


def test_an_unknown_vocabulary_is_asked_for(tmp_path: Path) -> None:
    document = workflow()
    document["pipeline"]["workflow"]["components"]["model"]["ports"]["roles"] = {}
    folder = written(tmp_path, document)
    with pytest.raises(ValueError, match="--vocab-size"):
        replace_sampler(folder)
    graph = onnx.load(replace_sampler(folder, vocab_size=5)).graph
    assert graph.input[0].type.tensor_type.shape.dim[2].dim_value == 5


def test_a_link_out_of_the_package_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "package").mkdir()
    folder = tmp_path / "package"
    (folder / METADATA).write_text(yaml.safe_dump(workflow()))
    (folder / "policies").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PackageError, match="leads out"):
        replace_sampler(folder)
    assert not list((tmp_path / "elsewhere").iterdir())
