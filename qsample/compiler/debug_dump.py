"""The graph after each phase of a compile, written for Netron, with the number of its nodes.

`NN-phase.onnx` holds the structure; weights of more than 1,024 bytes keep their name, dtype and shape, but refer to a
file that does not exist. `counts.json` lists the phases in order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final

import onnx_ir as ir

from qsample.errors import CompileError
from qsample.graph.edit import all_initializers
from qsample.package.disk.untrusted import read_json

_COUNTS: Final = "counts.json"
_LEFT_OUT_FROM: Final = 1024  # bytes
_LEFT_OUT: Final = "weights-left-out"


class DebugDump:
    """A folder that gets the graph after each phase."""

    def __init__(self, folder: str | PathLike[str], kept: Sequence[Path] = ()) -> None:
        """CompileError if `folder` has content, lies in one of `kept` (read or replaced packages), or is read-only."""
        self._folder = Path(folder)
        self._phases: list[dict[str, Any]] = []
        given = f"debug_dump is {str(folder)!r}, which"
        advice = "give a new or empty folder"
        places = (real := self._folder.resolve(), *real.parents)
        if inside := [other for other in kept if other.resolve() in places]:
            raise CompileError(f"{given} is in the package {inside[0]}; {advice} elsewhere")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            files = sorted(path.name for path in self._folder.iterdir())
        except OSError as error:
            raise CompileError(
                f"{given} cannot be written to ({error.strerror}); {advice}"
            ) from error
        if files:
            raise CompileError(f"{given} holds files ({files[0]}); {advice}")

    def write(self, phase: str, model: ir.Model) -> None:
        """Write `model` as the graph after `phase`; its weights are not read."""
        operators = Counter(
            f"{node.domain}::{node.op_type}".removeprefix("::") for node in model.graph.all_nodes()
        )
        path = self._folder / f"{len(self._phases):02}-{phase}.onnx"
        counts = {"nodes": operators.total(), "operators": dict(sorted(operators.items()))}
        self._phases.append({"phase": phase, "file": path.name, **counts})
        path.write_bytes(_structure(model))
        (self._folder / _COUNTS).write_text(
            json.dumps({"phases": self._phases}, indent=2) + "\n", encoding="utf-8"
        )


def read_counts(folder: str | Path) -> list[dict[str, Any]]:
    """The phases of a dump in order, each with `phase`, `file`, `nodes` and `operators`: operator → count."""
    phases: list[dict[str, Any]] = read_json(Path(folder) / _COUNTS)["phases"]
    return phases


def _structure(model: ir.Model) -> bytes:
    """`model` without its larger weights, serialized; it is left as it was."""
    large = {
        value: tensor
        for value in all_initializers(model.graph)
        if (tensor := value.const_value) is not None and tensor.nbytes > _LEFT_OUT_FROM
    }
    try:
        for value, tensor in large.items():
            shape = ir.Shape(tensor.shape.numpy())
            value.const_value = ir.ExternalTensor(
                _LEFT_OUT,
                0,
                tensor.nbytes,
                tensor.dtype,
                shape=shape,
                name=str(value.name),
                base_dir="",
            )
        serialized: bytes = ir.to_proto(model).SerializeToString()
    finally:
        for value, tensor in large.items():
            value.const_value = tensor
    return serialized
