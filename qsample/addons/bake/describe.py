"""Describes decoder files, and says whether they can be baked, by their graphs only: nothing is run
or written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnx_ir as ir

from qsample.addons.bake import attention
from qsample.addons.bake.conventions import ForeignGraph, is_onnx_attention
from qsample.addons.bake.files import decoders, locate, read_settings
from qsample.addons.bake.recognise import load, recognise
from qsample.errors import QsampleError
from qsample.graph.operators import is_matmul_nbits

# Operators that decide whether and how a file is baked.
_DECISIVE_OPERATORS: Final = (
    *(
        "GroupQueryAttention",
        "Attention",
        "MultiHeadAttention",
        "PagedAttention",
        "Softmax",
        "LinearAttention",
    ),
    *(
        "CausalConvWithState",
        "TensorScatter",
        "MoE",
        "QMoE",
        "MatMulNBits",
        "MatMulBnb4",
        "MatMulInteger",
        "Scan",
    ),
    *("Loop", "If"),
)


@dataclass(frozen=True, slots=True)
class Description:
    """A decoder file; "" and None for unknown facts.

    Attributes:
        made_by: the exporter and its version, as the file says.
        file: the path of the file.
        opset: the opset of ONNX's operators; 0 if it states none.
        inputs: the names of the inputs.
        operators: the number of occurrences of each operator that decides how a file is baked.
        refusal: why it cannot be baked, and the remedy; None if bake accepts it, and then runs it
            to measure its attention and to compare.
        layers: the number of layers that attend, and how they do it.
        states: the number of recurrent and convolutional states.
        dtype: the dtype of the caches.
        vocab_size: the size of the vocabulary.
        bits: the bits of its packed weights.
    """

    file: str
    made_by: str
    opset: int
    inputs: tuple[str, ...]
    operators: dict[str, int]
    refusal: str | None
    layers: str = ""
    states: int = 0
    dtype: str = ""
    vocab_size: int | None = None
    bits: tuple[int, ...] = ()


def describe(path: Path) -> list[Description]:
    """Describe every .onnx file of `path`, a file or a folder (see `decoders`). Raises QsampleError
    for a single file that cannot be read; in a folder, such a file is described as refused."""
    if path.is_file():
        return [_describe(path, None)]
    found = []
    for name in decoders(path):
        try:
            found.append(_describe(path, name))
        except QsampleError as error:
            found.append(Description(str(path / name), "unknown", 0, (), {}, str(error)))
    return found


def _describe(path: Path, name: str | None) -> Description:
    location = locate(path, name)
    settings = read_settings(location)
    model = load(location.file)
    facts: dict[str, Any] = {
        "file": str(location.file),
        "made_by": " ".join(filter(None, (model.producer_name, model.producer_version)))
        or "unknown",
        "opset": model.graph.opset_imports.get("", 0),
        "inputs": tuple(
            str(value.name) for value in model.graph.inputs if not value.is_initializer()
        ),
        "operators": dict(Counter(_operators(model))),
        "bits": tuple(
            sorted(
                {
                    node.attributes.get_int("bits", 4)
                    for node in model.graph.all_nodes()
                    if is_matmul_nbits(node)
                }
            )
        ),
    }
    try:
        foreign = recognise(
            location.file, model, head_dim=settings.head_dim, vocab_size=settings.vocab_size
        )
        if foreign.layers[0].attention is not None:
            attention.check_attentions(foreign)
        else:
            attention.unfuse_attentions(foreign)
            for layer in foreign.layers:
                attention.match(foreign, layer)
    except QsampleError as error:
        why = str(error).removeprefix(f"{location.file} cannot be baked: ")
        return Description(**facts, refusal=why)
    return Description(
        **facts,
        refusal=None,
        layers=_layers(foreign),
        states=len(foreign.recurrences),
        dtype=foreign.dtype.numpy().name,
        vocab_size=foreign.vocab_size,
    )


def _operators(model: ir.Model) -> Iterator[str]:
    for node in model.graph.all_nodes():
        if node.op_type in _DECISIVE_OPERATORS:
            yield (
                f"{node.domain}.{node.op_type}"
                if node.op_type == "Attention" and node.domain
                else node.op_type
            )


def _layers(foreign: ForeignGraph) -> str:
    first = foreign.layers[0]
    readers = {node for value in (*first.pasts, *first.presents) for node, _ in value.uses()}
    if first.attention is not None:
        how = "GroupQueryAttention"
    elif first.present_key.producer() is not None and any(map(is_onnx_attention, readers)):
        how = "ONNX's Attention"
    else:
        how = "plain operators"
    size = "a cache that grows" if first.size is None else f"a cache of {first.size} tokens"
    heads = sorted({layer.heads for layer in foreign.layers})
    sizes = sorted({layer.head_dim for layer in foreign.layers})
    shape = f"{' or '.join(map(str, heads))} heads of {' or '.join(map(str, sizes))}"
    return f"{len(foreign.layers)} attend through {how}, {size}, {shape} for keys and values"
