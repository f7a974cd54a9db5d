"""A graph that returns logits enters; the ONNX files and the manifest of a portable package leave: the sampler, joined
to the graph or next to it, and `initial_state.onnx`, the starting value of every state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes import common as common_passes

import qsample
from qsample.contract.interface import Interface
from qsample.contract.tensors import BATCH, CAPACITY, CAPACITY_INPUT, NOISE_STREAMS, SEED, VOCAB, TensorSpec
from qsample.exporters.parity import Parity
from qsample.graph.join import append_sampler
from qsample.graph.operators import OPSET
from qsample.graph.weights import narrow_weights, save_beside
from qsample.package.manifest import Manifest, Source, TokenIds
from qsample.sampler import build_sampler
from qsample.sampler.philox import noise_buffer
from qsample.sampler.tensor import Tensor, building, op, size

_IR_VERSION = 10

Sizes = Mapping[str, Tensor | list[int]]


def write_graphs(
    model: ir.Model, interface: Interface, pad_token_id: int, folder: Path, *, refer: bool = False
) -> None:
    """Write every ONNX file of `interface.graphs` into `folder`, and the weights of `model` next to `decoder.onnx`.

    Args:
        model: its inputs and outputs are those of `interface.model`. With a sampler among the features it is changed in
            place and has those of `interface.decoder` afterwards.
        pad_token_id: `next_ids` of a row that emitted nothing.
        refer: leave weights that lie in other files there (`stored.save_beside`), for a package that is not published.
    """
    sampler = build_sampler(interface, pad_token_id)
    if interface.features.sampler:
        append_sampler(model, sampler, interface.decoder)
    else:
        ir.save(sampler, folder / "sampler.onnx")
    if refer:
        save_beside(model, folder, "decoder.onnx")
    else:
        narrow_weights(model)
        ir.save(model, folder / "decoder.onnx", external_data="decoder.onnx.data")
    ir.save(build_initial_state(interface), folder / "initial_state.onnx")


def portable_manifest(
    interface: Interface,
    source: Source,
    token_ids: TokenIds,
    parity: Parity,
    *,
    max_position_embeddings: int | None,
    packed_weights: Mapping[str, Any] | None = None,
    libraries: Sequence[str] = (),
) -> Manifest:
    """The manifest of a portable package; `package.PackageWriter.finish` adds its files.

    libraries: distributions, besides qsample, onnxruntime and onnx, whose versions it shall name. The rest is as in
    `Manifest`.
    """
    return Manifest(
        kind="portable",
        contract_version=interface.contract_version,
        interface=interface,
        source=source,
        versions=_versions(libraries),
        token_ids=token_ids,
        max_position_embeddings=max_position_embeddings,
        parity=asdict(parity),
        packed_weights=packed_weights,
    )


def _versions(libraries: Sequence[str]) -> dict[str, str]:
    """ONNX Runtime has several distributions, so it is asked itself."""
    installed = {name: version(name) for name in (*libraries, "onnx")}
    return {"qsample": qsample.__version__, "onnxruntime": str(ort.__version__), **installed}


def build_initial_state(interface: Interface) -> ir.Model:
    """`initial_state.onnx`.

    Inputs: `seed` int64 [B], any value; `capacity` int64 scalar, T >= 1. Outputs: every retained state, under its name.
    """
    seed, capacity = _input(SEED), _input(CAPACITY_INPUT)
    graph = ir.Graph([seed, capacity], [], nodes=[], opset_imports={"": OPSET}, name="initial_state")
    with building(graph):
        rows, length = size(Tensor(seed), 0), Tensor(capacity).reshape(1)
        sizes: Sizes = {BATCH: rows, CAPACITY: length, VOCAB: [interface.vocab_size]}
        for spec in interface.initial_state.outputs:
            stream = NOISE_STREAMS.get(spec.name)
            start = _zeros(spec, sizes) if stream is None else noise_buffer(Tensor(seed), Tensor(capacity), stream)
            value = start.value
            value.name = spec.name
            value.dtype = _dtype(spec)
            value.shape = ir.Shape([interface.vocab_size if axis == VOCAB else axis for axis in spec.axes])
            graph.outputs.append(value)
    model = ir.Model(graph, ir_version=_IR_VERSION, producer_name="qsample")
    common_passes.ClearMetadataAndDocStringPass()(model)  # the builder's scopes
    return model


def _zeros(spec: TensorSpec, sizes: Sizes) -> Tensor:
    shape = op("Concat", *(sizes[axis] if isinstance(axis, str) else [axis] for axis in spec.axes), axis=0)
    # ConstantOfShape lacks bfloat16 on some execution providers; Cast has it.
    dtype = np.dtype("float32" if spec.dtype == "bfloat16" else spec.dtype)
    return op("ConstantOfShape", shape, value=ir.tensor(np.zeros(1, dtype=dtype))).to(_dtype(spec))


def _input(spec: TensorSpec) -> ir.Value:
    return ir.Value(name=spec.name, shape=ir.Shape(spec.axes), type=ir.TensorType(_dtype(spec)))


def _dtype(spec: TensorSpec) -> ir.DataType:
    return ir.DataType.FLOAT if spec.dtype == "float32" else ir.DataType[spec.dtype.upper()]
