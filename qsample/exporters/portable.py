"""A graph that returns logits enters; the ONNX files and the manifest of a portable package leave:
the sampler, joined to the graph or next to it, and `initial_state.onnx`, the starting value of
every state."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes import common as common_passes

import qsample
from qsample.contract.interface import Interface
from qsample.contract.tensors import (
    BATCH,
    CAPACITY,
    CAPACITY_INPUT,
    NOISE_STREAMS,
    SEED,
    VOCAB,
    TensorSpec,
)
from qsample.errors import ParityError, QsampleError
from qsample.exporters import parity
from qsample.graph import moe
from qsample.graph.join import append_sampler, append_scorer, takes_scorer
from qsample.graph.operators import OPSET, is_matmul_nbits
from qsample.graph.packed import in_nibbles, offsets_of
from qsample.graph.weights import narrow_weights, save_beside
from qsample.package.manifest import Manifest, Source, TokenIds
from qsample.progress import Stage, Stages
from qsample.sampler import build_sampler
from qsample.sampler.philox import noise_buffer
from qsample.sampler.scores import build_scores
from qsample.sampler.tensor import Tensor, building, op, size

_IR_VERSION = 10

Sizes = Mapping[str, Tensor | list[int]]


@dataclass(frozen=True, slots=True)
class Draft:
    """A portable package before it is written: from an export or a bake.

    Attributes:
        model: the graph up to its logits, with the inputs and outputs of `interface.model`.
        interface: the interface of the package.
        expected: the results of the original.
        source: the origin of the model.
        token_ids: the ids that the runtime needs.
        max_position_embeddings: the number of positions that the model knows; None for any number.
        original: see `parity.check`.
        tolerance: see `parity.check`.
        plain_attention_layers: see `parity.check`.
        libraries: the distributions, besides qsample, onnxruntime and onnx, whose versions the
            manifest names.
        images: the manifest's `images`.
    """

    model: ir.Model
    interface: Interface
    expected: parity.Reference
    source: Source
    token_ids: TokenIds
    max_position_embeddings: int | None
    original: str
    tolerance: float | None = None
    plain_attention_layers: int = 0
    libraries: Sequence[str] = ()
    images: Mapping[str, Any] | None = None


def write_draft(draft: Draft, folder: Path, stages: Stages, *, refer: bool = False) -> Manifest:
    """Write the graphs of a draft into `folder`, and pass them through the parity gate.

    Args:
        draft: the draft, whose model is changed.
        folder: the folder of the package.
        stages: the stages of the whole work, which include WRITING_WEIGHTS and COMPARING.
        refer: whether weights stay in other files (`weights.save_beside`), for a package that is
            not published.

    Returns:
        The manifest, to which `package.PackageWriter.finish` adds the files.

    Raises:
        ParityError: the graphs do not run, or `parity.check` raises it.
    """
    interface = possible_interface(draft.model, draft.interface)
    stages.begin(Stage.WRITING_WEIGHTS)
    packed = packed_weights(draft.model)
    in_nibbles(draft.model)
    write_graphs(draft.model, interface, draft.token_ids.pad, folder, refer=refer)
    stages.begin(Stage.COMPARING)
    try:
        figures = parity.check(
            folder,
            interface,
            draft.expected,
            plain_attention_layers=draft.plain_attention_layers,
            tolerance=draft.tolerance,
            original=draft.original,
        )
    except (QsampleError, OSError, MemoryError):
        raise
    except Exception as error:  # onnxruntime's own kinds
        raise ParityError(
            f"onnxruntime cannot run the exported graph ({' '.join(str(error).split())!s:.400}); "
            "docs/architectures.md lists the model types that were exported"
        ) from error
    return Manifest(
        kind="portable",
        contract_version=interface.contract_version,
        interface=interface,
        source=draft.source,
        versions=_versions(draft.libraries),
        token_ids=draft.token_ids,
        max_position_embeddings=draft.max_position_embeddings,
        parity={
            **asdict(figures),
            "max_error": parity.rounded_up(figures.max_error, figures.tolerance),
        },
        packed_weights=packed,
        images=draft.images,
    )


def possible_interface(model: ir.Model, interface: Interface) -> Interface:
    """The interface without the features that the model cannot have. Such a feature changes only the
    speed, and a warning names it."""
    features = interface.features
    if not features.prompt_logprobs or takes_scorer(model):
        return interface
    warnings.warn(
        "prompt_logprobs is left out: more than the last hidden state of each row leads to this model's logits. A "
        "server scores its prompts a token at a time",
        stacklevel=2,
    )
    return replace(interface, features=replace(features, prompt_logprobs=False))


def write_graphs(
    model: ir.Model, interface: Interface, pad_token_id: int, folder: Path, *, refer: bool = False
) -> None:
    """Write every ONNX file of `interface.graphs` into `folder`, and the weights of `model` next to
    `decoder.onnx`.

    pad_token_id: the `next_ids` of a row that emitted nothing. refer: see `write_draft`.
    """
    sampler = build_sampler(interface, pad_token_id)
    if interface.features.sampler:
        append_sampler(model, sampler, interface.decoder)
        if interface.features.prompt_logprobs:
            append_scorer(model, build_scores(interface))
    else:
        ir.save(sampler, folder / "sampler.onnx")
    if refer:
        save_beside(model, folder, "decoder.onnx")
    else:
        narrow_weights(model)
        ir.save(model, folder / "decoder.onnx", external_data="decoder.onnx.data")
    ir.save(build_initial_state(interface), folder / "initial_state.onnx")


def packed_weights(model: ir.Model) -> dict[str, Any] | None:
    """The manifest's figures of weights that were quantized already; None if there are no such
    weights."""
    packed = [node for node in model.graph.all_nodes() if is_matmul_nbits(node)]
    layers = [moe.packed_weights(node) for node in moe.mixtures(model.graph)]
    matrices = [one for layer in layers for one in layer]
    if not packed and not matrices:
        return None
    weights = {value for node in packed for value in node.inputs[1:4] if value is not None}
    weights |= {found.offsets for found in map(offsets_of, packed) if found is not None}
    weights |= {value for one in matrices for value in (one.levels, one.scales)}
    bits = {node.attributes.get_int("bits", 4) for node in packed}
    block_sizes = {node.attributes.get_int("block_size", 32) for node in packed}
    experts = sum(layer[0].shape[0] for layer in layers if layer)
    return {
        "matrices": len(packed),
        **({"experts": experts} if experts > 0 else {}),
        "bits": sorted(bits | {one.bits for one in matrices}),
        "block_sizes": sorted(block_sizes | {one.block_size for one in matrices}),
        "bytes": sum(
            value.const_value.nbytes for value in weights if value.const_value is not None
        ),
    }


def _versions(libraries: Sequence[str]) -> dict[str, str]:
    """The version of each library by its name."""
    # ONNX Runtime has several distributions, so its module states the version.
    installed = {name: version(name) for name in (*libraries, "onnx")}
    return {"qsample": qsample.__version__, "onnxruntime": str(ort.__version__), **installed}


def build_initial_state(interface: Interface) -> ir.Model:
    """`initial_state.onnx`: `seed` int64 [B], any value, and `capacity` int64 scalar, T >= 1 →
    every retained state."""
    seed = _input(SEED)
    capacity = _input(CAPACITY_INPUT)
    graph = ir.Graph(
        [seed, capacity], [], nodes=[], opset_imports={"": OPSET}, name="initial_state"
    )
    with building(graph):
        rows = size(Tensor(seed), 0)
        length = Tensor(capacity).reshape(1)
        sizes: Sizes = {BATCH: rows, CAPACITY: length, VOCAB: [interface.vocab_size]}
        for spec in interface.initial_state.outputs:
            stream = NOISE_STREAMS.get(spec.name)
            start = (
                _zeros(spec, sizes)
                if stream is None
                else noise_buffer(Tensor(seed), Tensor(capacity), stream)
            )
            value = start.value
            value.name = spec.name
            value.dtype = _dtype(spec)
            value.shape = ir.Shape(
                [interface.vocab_size if axis == VOCAB else axis for axis in spec.axes]
            )
            graph.outputs.append(value)
    model = ir.Model(graph, ir_version=_IR_VERSION, producer_name="qsample")
    common_passes.ClearMetadataAndDocStringPass()(model)  # the builder's scopes
    return model


def _zeros(spec: TensorSpec, sizes: Sizes) -> Tensor:
    shape = op(
        "Concat", *(sizes[axis] if isinstance(axis, str) else [axis] for axis in spec.axes), axis=0
    )
    # ConstantOfShape lacks bfloat16 on some execution providers; Cast has it.
    dtype = np.dtype("float32" if spec.dtype == "bfloat16" else spec.dtype)
    return op("ConstantOfShape", shape, value=ir.tensor(np.zeros(1, dtype=dtype))).to(_dtype(spec))


def _input(spec: TensorSpec) -> ir.Value:
    return ir.Value(name=spec.name, shape=ir.Shape(spec.axes), type=ir.TensorType(_dtype(spec)))


def _dtype(spec: TensorSpec) -> ir.DataType:
    return ir.DataType.FLOAT if spec.dtype == "float32" else ir.DataType[spec.dtype.upper()]
