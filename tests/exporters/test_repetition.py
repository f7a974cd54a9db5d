"""Layers that repeat: copies of the first one give the graph, and every number, of a trace of all layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from torch import Tensor, nn

import qsample.exporters.trace as tracing
from qsample.contract.arrays import Array
from qsample.contract.interface import Features, GraphSpec, Interface
from qsample.contract.tensors import BATCH, CAPACITY, RUNNING, SEQUENCE, TensorSpec
from qsample.errors import ParityError
from qsample.exporters.lowering import align_row_sums, lower_experts, outline_scans
from qsample.exporters.repetition import Repetition
from qsample.exporters.trace import trace
from qsample.transforms.cache import DecodeContext
from qsample.transforms.decoder import Decoder, apply_transforms, state_shapes
from qsample.transforms.repeated_layers import DecoderLayers
from tests.helpers.tiny_models import export_without_sampler, random_model

# Models with layers of two kinds, in turns; None: without `layer_types`.
KINDS: dict[str, list[str] | None] = {
    "lfm2": ["conv", "full_attention"],
    "gemma2": None,
    "gpt_oss": None,
    "gemma3_text": ["sliding_attention", "full_attention"],
    "qwen3_5_text": ["linear_attention", "full_attention"],
    "olmo_hybrid": ["linear_attention", "full_attention"],
}
FAST = ("lfm2",)  # convolutions and attention in turns
TYPES = ("llama", "qwen3", "gpt2", "mixtral", "qwen3_moe", "mamba2", "phi3", *KINDS)


def decoder_of(model_type: str) -> tuple[Decoder, Interface]:
    options: dict[str, Any] = {"num_hidden_layers": 3}
    if model_type in KINDS:
        kinds = KINDS[model_type]
        options = {"num_hidden_layers": 4} | ({} if kinds is None else {"layer_types": kinds * 2})
    if model_type == "gpt2":
        options |= {"n_layer": 3}
    model, context = random_model(model_type, **options), DecodeContext()
    with torch.no_grad():
        for parameter in model.parameters():  # norms, which are 1 otherwise
            parameter.add_(torch.rand_like(parameter), alpha=0.1)
    apply_transforms(model, context)
    key_values, recurrent = state_shapes(model, context)
    interface = Interface(
        int(model.config.vocab_size),
        key_values,
        features=Features(sampler=False),
        recurrent=recurrent,
    )
    return Decoder(model, context, interface), interface


def results(model: ir.Model, interface: Interface) -> list[Array]:
    """All outputs of a row that reads three tokens after four, in random states."""
    rng = np.random.default_rng(0)
    sizes = {BATCH: 1, SEQUENCE: 3, CAPACITY: 16, **interface.sizes}
    feeds = {spec.name: rng.normal(size=spec.shape(sizes)) for spec in interface.cache_states}
    feeds |= {"input_ids": rng.integers(3, 200, (1, 3)), "input_lengths": np.array([3])}
    feeds |= {"lengths": np.array([4]), "status": np.array([RUNNING])}
    specs = (*interface.model.inputs, *interface.cache_states)
    typed = {spec.name: feeds[spec.name].astype(spec.dtype) for spec in specs}
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    return session.run(interface.model.output_names, typed)


def lowered(model: ir.Model) -> ir.Model:
    outline_scans(model)
    lower_experts(model)
    align_row_sums(model)
    return model


@pytest.mark.ci
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in TYPES],
)
def test_copies_are_what_a_trace_of_all_layers_has(model_type: str) -> None:
    decoder, interface = decoder_of(model_type)
    once = lowered(trace(decoder, interface.model, interface.sizes, decoder.layers))
    every = lowered(trace(decoder, interface.model, interface.sizes))
    copied = {
        number for node in once.graph for number in re.findall(r"_layer(\d+)", str(node.name))
    }
    assert copied == ({"2", "3"} if model_type in KINDS else {"1", "2"})
    counts = [Counter(node.op_type for node in model.graph.all_nodes()) for model in (once, every)]
    assert counts[0] == counts[1]
    pairs = zip(results(once, interface), results(every, interface), strict=True)
    for name, (ours, wanted) in zip(interface.model.output_names, pairs, strict=True):
        np.testing.assert_array_equal(ours, wanted, err_msg=name)


class Notes:
    """The products of the blocks that have run."""

    def __init__(self) -> None:
        self.products: list[Tensor] = []


class Block(nn.Module):
    """hidden * weight + shift."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.notes = notes

    def forward(self, hidden: Tensor, shift: Tensor) -> Tensor:
        product = hidden * self.weight
        self.notes.products.append(product)
        return product + shift


class Stack(nn.Module):
    """Three blocks. shares: the way in which they share more than their hidden states."""

    def __init__(self, shares: str) -> None:
        super().__init__()
        self.notes, self.shares = Notes(), shares
        self.layers = nn.ModuleList(Block(self.notes) for _ in range(3))

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        self.notes.products.clear()
        hidden, shift = inputs["values"].sin(), inputs["values"].cos()
        order = (0, 2, 1) if self.shares == "an order of their own" else (0, 1, 2)
        for number, layer in enumerate(self.layers[place] for place in order):
            if self.shares == "an argument":
                shift = inputs["values"] + number
            hidden = layer(hidden, shift)
            if self.shares == "a product":
                hidden = hidden + self.notes.products[0]
        if self.shares == "a layer":
            hidden = self.layers[0](hidden, shift)
        return {"total": hidden}


VALUES = TensorSpec("values", "float32", (BATCH, 4), "numbers")
SPEC = GraphSpec((VALUES,), (), (replace(VALUES, name="total"),))


@pytest.mark.parametrize(
    "shares",
    [
        "nothing",
        "a product",
        *(
            pytest.param(how, marks=pytest.mark.ci)
            for how in ("an argument", "a layer", "an order of their own")
        ),
    ],
)
def test_layers_that_share_more_are_all_traced(shares: str) -> None:
    torch.manual_seed(0)
    stack = Stack(shares)
    model = trace(stack, SPEC, {}, DecoderLayers(3, {}, DecodeContext()))
    is_copied = any("_layer2" in str(node.name) for node in model.graph)
    assert is_copied == (shares == "nothing")
    values = torch.randn(2, 4)
    (total,) = ort.InferenceSession(ir.to_proto(model).SerializeToString()).run(
        None, {"values": values.numpy()}
    )
    np.testing.assert_allclose(
        total, stack({"values": values})["total"].detach().numpy(), rtol=1e-5, atol=1e-6
    )


class Wrong(Mapping[str, Tensor]):
    """The weights of layer 1 under the names of layer 2 as well."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name.replace("layers.2.", "layers.1.")]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@pytest.mark.ci
def test_the_parity_gate_refuses_a_copy_with_the_weights_of_another_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(groups: Any, layers: Any, tensors: Mapping[str, Tensor]) -> Repetition:
        return Repetition(groups, layers, Wrong(tensors))

    monkeypatch.setattr(tracing, "Repetition", wrong)
    with pytest.raises(ParityError):
        export_without_sampler(random_model("llama", num_hidden_layers=3), tmp_path / "package")
