"""The torch module enters; the sampler's graph leaves, traced: what templates are made of and compared with.

A template is made of two traces whose arguments differ in every number. They have the same nodes, in the same order;
where one has another number than the other, the template has the name of the argument that is both.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx.printer
import onnx_ir as ir
from torch import Tensor, nn

from qsample.contract import ADJUSTED_LOGITS, LOGITS, Features, GraphSpec, Interface, with_searched_rows
from qsample.exporters.control_flow import outline_branches
from qsample.exporters.graph.edit import constant
from qsample.exporters.sampler.rewrites import simplify
from qsample.exporters.sampler.template import CONSTANT, COUNT, numbers
from qsample.exporters.trace import trace
from qsample.tensors import Array
from qsample.transforms.markers import MARKER_DOMAIN
from qsample.transforms.sampler import sizes
from qsample.transforms.sampler.branching import inline_branches, keep_options
from qsample.transforms.sampler.module import Sampler

_EVERYTHING = Features(logit_bias=True, allowed_tokens=True, logprobs=True, top_logprobs=1, probs=True)


class _FromLogits(nn.Module):
    """The sampler with its logits among the named inputs."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self.sampler = sampler

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        rest = {name: tensor for name, tensor in inputs.items() if name != LOGITS.name}
        results: dict[str, Tensor] = self.sampler(inputs[LOGITS.name], rest)
        return results


def trace_sampler(interface: Interface, pad_token_id: int, **options: Any) -> ir.Model:
    """`sampler.onnx` as the torch module gives it. The options are those of `Sampler`."""
    features = replace(interface.features, sampler=True)
    interface = Interface(interface.vocab_size, (), features=features)
    spec = interface.sampler if options.get("control_flow", True) else with_searched_rows(interface.sampler)
    model = _trace(interface, pad_token_id, spec, options)
    outline_branches(model)
    return model


def make_template(kind: str) -> str:
    """The text of one of `template.KINDS`."""
    options = {"control_flow": kind != "straight", "resumes": kind == "resumes"}
    traces, given = [], []
    for point in _POINTS:
        interface = Interface(point.vocab, (), features=replace(_EVERYTHING, top_logprobs=point.top_logprobs))
        spec = interface.sampler if options["control_flow"] else with_searched_rows(interface.sampler)
        spec = replace(spec, outputs=(*spec.outputs, ADJUSTED_LOGITS))
        chosen = {"num_candidates": point.num_candidates, "chunk_size": point.chunk_size, **options}
        with point.sizes(), keep_options():
            traces.append(_trace(interface, point.pad_token, spec, chosen))
            given.append(numbers(interface, point.pad_token, point.num_candidates, point.chunk_size))
    return _as_text(traces, _names(given))


@dataclass(frozen=True)
class _Point:
    """Arguments of one trace. sample, block, sort: what `sizes` has instead, for every number to differ."""

    vocab: int
    num_candidates: int
    chunk_size: int
    top_logprobs: int
    pad_token: int
    sample: int
    block: int
    sort: int

    @contextmanager
    def sizes(self) -> Iterator[None]:
        own: dict[str, Any] = {"_SAMPLE_SIZE": self.sample, "_BEST_SIZE": self.block, "_SORT_SIZE": self.sort}
        with patch.multiple(sizes, **own):
            yield


# Primes, so that every cut leaves a rest: that there is nothing to pad is seen when a template is filled in. One has
# fewer chunks than candidates, the other fewer than alternatives.
_POINTS = (
    _Point(5003, num_candidates=37, chunk_size=101, top_logprobs=60, pad_token=13, sample=1024, block=128, sort=1024),
    _Point(701, num_candidates=31, chunk_size=29, top_logprobs=11, pad_token=17, sample=100, block=131, sort=512),
)


def _trace(interface: Interface, pad_token_id: int, spec: GraphSpec, options: Mapping[str, Any]) -> ir.Model:
    sampler = Sampler(interface, pad_token_id, **options)
    with inline_branches():
        model = trace(_FromLogits(sampler), spec, interface.sizes)
    simplify(model, bool_maximum=options.get("control_flow", True) and not options.get("resumes", False))
    return model


def _names(given: Sequence[Mapping[str, int]]) -> dict[tuple[int, ...], str]:
    """The numbers of all points → their name."""
    names: dict[tuple[int, ...], str] = {}
    for name in given[0]:
        key = tuple(point[name] for point in given)
        assert len(set(key)) == len(key), f"{name} is {key[0]} at two points"
        assert key not in names, f"{name} is {names.get(key)} at every point"
        names[key] = name
    return names


def _as_text(traces: Sequence[ir.Model], names: Mapping[tuple[int, ...], str]) -> str:
    graphs = [model.graph for model in traces]
    merged = _Merged(names)
    inputs = [merged.value(values) for values in zip(*(graph.inputs for graph in graphs), strict=True)]
    for nodes in zip(*graphs, strict=True):
        merged.add_node(nodes)
    outputs = [merged.values[value] for value in graphs[0].outputs]
    for value, original in zip((*inputs, *outputs), (*graphs[0].inputs, *graphs[0].outputs), strict=True):
        value.name = original.name
    graph = ir.Graph(inputs, outputs, nodes=merged.nodes, opset_imports=graphs[0].opset_imports, name="sampler")
    graph.opset_imports.setdefault(MARKER_DOMAIN, 1)
    model = ir.Model(graph, ir_version=traces[0].ir_version, producer_name="qsample")
    text: str = onnx.printer.to_text(ir.to_proto(model))
    return re.sub(r'"(\$\{\w+\})"', r"\1", text) + "\n"  # a dimension that is a number is none in quotes


class _Merged:
    """The traces of all points, node by node, as one: with names where they have different numbers.

    values: of the first trace → the template's. nodes: the template's.
    """

    def __init__(self, names: Mapping[tuple[int, ...], str]) -> None:
        self._names = names
        self._constants: dict[object, ir.Value] = {}
        self._counts: Counter[str] = Counter()
        self.values: dict[ir.Value, ir.Value] = {}
        self.nodes: list[ir.Node] = []

    def add_node(self, nodes: Sequence[ir.Node]) -> None:
        """The same node of each trace."""
        first = nodes[0]
        kinds = {(node.domain, node.op_type, str(_attributes(node))) for node in nodes}
        assert len(kinds) == 1, f"the traces have different nodes: {kinds}"
        inputs = [self._input(values) for values in zip(*(node.inputs for node in nodes), strict=True)]
        node = ir.node(first.op_type, inputs, _attributes(first), domain=first.domain, num_outputs=len(first.outputs))
        for values, output in zip(zip(*(node.outputs for node in nodes), strict=True), node.outputs, strict=True):
            like = self.value(values)
            output.name, output.shape, output.type = self._name(first.op_type), like.shape, like.type
            self.values[values[0]] = output
        self.nodes.append(node)

    def value(self, values: Sequence[ir.Value]) -> ir.Value:
        """The same value of each trace, without a name."""
        first = values[0]
        shape = None
        if first.shape is not None:
            shapes = [value.shape for value in values if value.shape is not None]
            shape = ir.Shape([self._dim(dims) for dims in zip(*shapes, strict=True)])
        self.values[first] = ir.Value(shape=shape, type=None if first.dtype is None else ir.TensorType(first.dtype))
        return self.values[first]

    def _input(self, values: Sequence[ir.Value | None]) -> ir.Value | None:
        if values[0] is None:
            return None
        arrays = [constant(value) for value in values]
        if any(array is None for array in arrays):
            return self.values[values[0]]
        return self._constant([array for array in arrays if array is not None])

    def _constant(self, arrays: Sequence[Array]) -> ir.Value:
        dtype = str(arrays[0].dtype)
        shape = " ".join(self._number(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True))
        key = dtype, shape, self._numbers([array.astype(int) if dtype == "bool" else array for array in arrays])
        if key not in self._constants:
            attributes = {"dtype": dtype, "shape": f"[{shape}]", "values": f"[{key[2]}]"}
            node = ir.node(CONSTANT, [], attributes, domain=MARKER_DOMAIN)
            self._constants[key] = node.outputs[0]
            node.outputs[0].name = self._name("Constant")
            self.nodes.append(node)
        return self._constants[key]

    def _numbers(self, arrays: Sequence[Array]) -> str:
        if all(array.size > 1 and np.array_equal(array.ravel(), np.arange(array.size)) for array in arrays):
            return COUNT
        if all(array.size > 1 and (array == array.ravel()[0]).all() for array in arrays):
            return self._number([array.ravel()[0].item() for array in arrays])
        return " ".join(self._number(each) for each in zip(*(array.ravel().tolist() for array in arrays), strict=True))

    def _number(self, numbers: Sequence[Any]) -> str:
        """One number of all points: itself, or its name."""
        if len(set(numbers)) == 1:
            return repr(numbers[0])
        if tuple(numbers) not in self._names:
            raise ValueError(f"the traces have {numbers} in one place, which template.numbers() has no name for")
        return f"${{{self._names[tuple(numbers)]}}}"

    def _dim(self, dims: Sequence[int | ir.SymbolicDim]) -> ir.SymbolicDim | int:
        texts = [str(dim) if isinstance(dim, int) else str(dim.value) for dim in dims]
        if len(set(texts)) == 1:
            return dims[0]
        numbers = zip(*(map(int, re.findall(r"\d+", text)) for text in texts), strict=True)
        written = "".join(
            part + after
            for part, after in zip_longest(re.split(r"\d+", texts[0]), map(self._number, numbers), fillvalue="")
        )
        return ir.SymbolicDim(written)

    def _name(self, op_type: str) -> str:
        self._counts[op_type] += 1
        return f"{op_type.lower()}_{self._counts[op_type]}"


def _attributes(node: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in node.attributes.items()}
