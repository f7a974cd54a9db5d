"""The graph after each phase of a compile, written for Netron, with the number of its nodes.

`NN-phase.onnx` holds the structure of the graph. Weights of more than 1,024 bytes are left out: they have their name,
dtype and shape, and refer to a file that does not exist. `counts.json` lists the phases in order.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Final

import onnx_ir as ir

from qsample.errors import CompileError
from qsample.graph.edit import all_initializers

COUNTS: Final = "counts.json"
_MADE_BY: Final = "qsample compile, debug_dump"
_GRAPH: Final = re.compile(r"\d\d-[\w-]+\.onnx")
_LEFT_OUT_FROM: Final = 1024  # bytes
_LEFT_OUT: Final = "weights-left-out"


class DebugDump:
    """A folder that gets the graph after each phase."""

    def __init__(self, folder: str | PathLike[str], kept: Sequence[Path] = ()) -> None:
        """
        Args:
            folder: new, empty, or with an earlier dump, which is replaced.
            kept: folders that it must not lie in: a package that is read or replaced.

        Raises CompileError if `folder` holds anything else, lies in `kept`, or cannot be written to.
        """
        self._folder = Path(folder)
        self._phases: list[dict[str, Any]] = []
        given, advice = f"debug_dump is {str(folder)!r}, which", "give a new or empty folder"
        places = (real := self._folder.resolve(), *real.parents)
        inside = [other for other in kept if other.resolve() in places]
        if inside:
            raise CompileError(f"{given} is in the package {inside[0]}; {advice} elsewhere")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            earlier = _files_of_earlier_dump(self._folder)
            others = sorted(path.name for path in self._folder.iterdir() if path not in earlier)
            if others:
                raise CompileError(f"{given} holds other files ({others[0]}); {advice}")
            for path in earlier:
                path.unlink()
        except OSError as error:
            raise CompileError(f"{given} cannot be written to ({error.strerror}); {advice}") from error

    def write(self, phase: str, model: ir.Model) -> None:
        """Write `model`, whose weights are not read, as the graph after `phase`."""
        operators = Counter(f"{node.domain}::{node.op_type}".removeprefix("::") for node in model.graph.all_nodes())
        path = self._folder / f"{len(self._phases):02}-{phase}.onnx"
        counts = {"nodes": operators.total(), "operators": dict(sorted(operators.items()))}
        self._phases.append({"phase": phase, "file": path.name, **counts})
        # Write the list first: the next dump refuses files that the list does not name.
        listed = {"made_by": _MADE_BY, "phases": self._phases}
        (self._folder / COUNTS).write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
        path.write_bytes(_structure(model))


def read_counts(folder: str | Path) -> list[dict[str, Any]]:
    """The phases of a dump in order, each with `phase`, `file`, `nodes` and `operators`: operator → how many."""
    phases: list[dict[str, Any]] = json.loads((Path(folder) / COUNTS).read_text(encoding="utf-8"))["phases"]
    return phases


def _files_of_earlier_dump(folder: Path) -> list[Path]:
    """The files in `folder` that an earlier dump wrote, by its own list; empty if there was none."""
    try:
        listed = json.loads((folder / COUNTS).read_text(encoding="utf-8"))
        if listed["made_by"] != _MADE_BY:
            return []
        names = {str(entry["file"]) for entry in listed["phases"]}
    except (OSError, ValueError, KeyError, TypeError):
        return []
    ours = [path for path in folder.iterdir() if path.name in names and _GRAPH.fullmatch(path.name)]
    return [*ours, folder / COUNTS]


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
                _LEFT_OUT, 0, tensor.nbytes, tensor.dtype, shape=shape, name=str(value.name), base_dir=""
            )
        serialized: bytes = ir.to_proto(model).SerializeToString()
    finally:
        for value, tensor in large.items():
            value.const_value = tensor
    return serialized
