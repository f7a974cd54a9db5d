"""Templates of the sampler's graph: ONNX in text, with names in place of the numbers that follow from the vocabulary.

`python scripts/sampler_templates.py` writes them (`tracing.py` has how). A template has every feature; what is known
before a graph runs is a marker with both sides (`transforms.sampler.branching.option`). Filled in, it is what a trace
of the torch module gives with that vocabulary and those features: a test compares them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Final

import numpy as np
import onnx.parser
import onnx_ir as ir
from onnx_ir.passes import common as common_passes

from qsample.contract import MASK_WORDS, GraphSpec, Interface
from qsample.exporters.graph.edit import constant, initializer
from qsample.tensors import Array
from qsample.transforms.markers import MARKER_DOMAIN, OPTION, OPTION_NAME
from qsample.transforms.sampler import sizes

KINDS: Final = ("control_flow", "straight", "resumes")
SUFFIX: Final = ".onnxtxt"
# A constant in a template: a node without inputs. `values`: numbers, or one for all, or COUNT: 0, 1, 2 and so on.
CONSTANT: Final = "Constant"
COUNT: Final = "count"
_TIMES_ONE: Final = re.compile(r"\b1\*(?=[A-Z])")  # in the size of an axis, "1*B"


def numbers(interface: Interface, pad_token_id: int, num_candidates: int, chunk_size: int) -> dict[str, int]:
    """The numbers that a trace takes from its arguments, by their names in a template."""
    vocab, top = interface.vocab_size, interface.features.top_logprobs
    chunks = -(-vocab // chunk_size)
    block = sizes.block_size(vocab)
    blocks = -(-vocab // block)
    words = interface.sizes[MASK_WORDS]
    stride = sizes.sample_stride(vocab)
    samples = -(-vocab // stride)
    return {
        "vocab": vocab,
        "pad_token": pad_token_id,
        "candidates": num_candidates,
        "chunk": chunk_size,
        "chunks": chunks,
        "chunks_vocab": chunks * chunk_size,
        "chunks_padding": chunks * chunk_size - vocab,
        "chosen": min(num_candidates, chunks),
        "pool": min(num_candidates, chunks) * chunk_size,
        "top": top,
        "top_chosen": min(top, chunks),
        "top_pool": min(top, chunks) * chunk_size,
        "block": block,
        "last_in_block": block - 1,
        "blocks": blocks,
        "last_block": blocks - 1,
        "blocks_vocab": blocks * block,
        "blocks_padding": blocks * block - vocab,
        "words": words,
        "bytes": 4 * words,
        "bits": 32 * words,
        "stride": stride,
        "samples": samples,
        "last_sample": samples - 1,
        "sort_size": sizes.sort_size(vocab),
    }


def fill_template(kind: str, given: Mapping[str, int], options: Mapping[str, bool], spec: GraphSpec) -> ir.Model:
    """One of KINDS as a graph, with the inputs and outputs of `spec`. Branches on data are still markers.

    given: as `numbers` has them. options: for each name of an option, whether its first side is wanted.
    """
    text = _TIMES_ONE.sub("", Template(_text(kind)).substitute(given))
    model = ir.from_proto(onnx.parser.parse_model(text))
    graph = model.graph
    names = [value.name for value in graph.outputs]  # an option's side may take the place of one
    for node in list(graph):
        if node.domain == MARKER_DOMAIN and node.op_type == CONSTANT:
            _make_initializer(node)
        elif node.domain == MARKER_DOMAIN and node.op_type == OPTION:
            _choose(node, options[node.attributes[OPTION_NAME].as_string()])
        elif _changes_nothing(node):
            _replace(node, [node.inputs[0]])
    inputs = {value.name: value for value in graph.inputs}
    outputs = dict(zip(names, graph.outputs, strict=True))
    graph.inputs[:] = [inputs[name] for name in spec.input_names]
    graph.outputs[:] = [outputs[name] for name in spec.output_names]
    for name, value in zip(spec.output_names, graph.outputs, strict=True):
        value.name = name
    common_passes.RemoveUnusedNodesPass()(model)
    # Numbers that differ at one size may be the same at another, and so may what is computed with them.
    common_passes.DeduplicateInitializersPass()(model)
    common_passes.CommonSubexpressionEliminationPass()(model)
    return model


@functools.cache
def _text(kind: str) -> str:
    return files(__package__).joinpath(kind + SUFFIX).read_text("utf-8")


def _make_initializer(node: ir.Node) -> None:
    """Put an initializer in the place of a CONSTANT."""
    graph, value = node.graph, node.outputs[0]
    assert graph is not None
    shape = [int(size) for size in _listed(node, "shape")]
    array = _array(_listed(node, "values"), node.attributes["dtype"].as_string(), shape)
    _replace(node, [initializer(graph, f"const_{value.name}", array)])


def _listed(node: ir.Node, name: str) -> list[str]:
    """In brackets, so that it is no number of its own."""
    return node.attributes[name].as_string().strip("[]").split()


def _array(values: list[str], dtype: str, shape: list[int]) -> Array:
    if values == [COUNT]:
        return np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape)
    read = int if np.dtype(dtype).kind in "ib" else float
    if len(values) == 1:
        return np.full(shape, read(values[0]), dtype)
    return np.array([read(value) for value in values], dtype).reshape(shape)


def _choose(option: ir.Node, wanted: bool) -> None:
    """Put the results of one side of an option in its place."""
    half = len(option.outputs)
    _replace(option, option.inputs[:half] if wanted else option.inputs[half:])


def _changes_nothing(node: ir.Node) -> bool:
    """Whether a node pads with nothing, cuts nothing off or multiplies by 1; of such sizes, a trace has none."""
    if node.op_type == "Mul":
        factor = constant(node.inputs[1])
        return factor is not None and factor.ndim == 0 and bool(factor == 1)
    if node.op_type == "Pad":
        padding = constant(node.inputs[1])
        return padding is not None and not padding.any()
    if node.op_type == "Slice" and len(node.inputs) == 5:
        axes, steps = (constant(value) for value in node.inputs[3:])
        before, after = node.inputs[0].shape if node.inputs[0] is not None else None, node.outputs[0].shape
        if axes is None or steps is None or before is None or after is None:
            return False
        kept = all(isinstance(before[axis], int) and before[axis] == after[axis] for axis in axes.tolist())
        return kept and bool((steps == 1).all())
    return False


def _replace(node: ir.Node, values: Sequence[ir.Value | None]) -> None:
    """Let everything that reads the outputs of `node` read `values`, and remove it."""
    for output, value in zip(node.outputs, values, strict=True):
        assert value is not None
        output.replace_all_uses_with(value, replace_graph_outputs=True)
    assert node.graph is not None
    node.graph.remove(node, safe=True)
