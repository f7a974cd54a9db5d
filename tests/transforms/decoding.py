"""Decoder calls without a trace: the operators that a module leaves in its graph are computed at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx_ir import tensor_adapters
from torch import Tensor
from transformers import PreTrainedModel

from qsample.contract.interface import Features, Interface
from qsample.contract.tensors import BATCH, CAPACITY, RUNNING, STOPPED
from qsample.transforms.cache import DecodeContext
from qsample.transforms.decoder import Decoder, apply_transforms, state_shapes

Operator = Callable[[Sequence[Tensor | None], dict[str, Any]], Sequence[Tensor]]


def compute_operators(monkeypatch: pytest.MonkeyPatch, **markers: Operator) -> None:
    """Let ONNX Runtime compute each operator of com.microsoft, and `markers` those of their names.

    The results have to have the shapes and dtypes that the module declares.
    """

    def several(
        name: str, inputs: Any, attributes: Any, *, dtypes: Any, shapes: Any, version: int
    ) -> list[Tensor]:
        domain, kind = name.split("::")
        if kind in markers:
            results = list(markers[kind](inputs, attributes))
        else:
            assert (domain, version) == ("com.microsoft", 1)
            results = _run(domain, kind, inputs, attributes, len(dtypes))
        assert [tuple(one.shape) for one in results] == [tuple(shape) for shape in shapes]
        assert [one.dtype for one in results] == list(dtypes)
        return results

    def one(name: str, inputs: Any, attributes: Any, *, dtype: Any, shape: Any, **more: Any) -> Any:
        return several(name, inputs, attributes, dtypes=[dtype], shapes=[shape], **more)[0]

    monkeypatch.setattr(torch.onnx.ops, "symbolic_multi_out", several)
    monkeypatch.setattr(torch.onnx.ops, "symbolic", one)


def _run(
    domain: str, kind: str, inputs: Sequence[Tensor | None], attributes: Any, outputs: int
) -> list[Tensor]:
    values, feeds = list[ir.Value | None](), {}
    for index, tensor in enumerate(inputs):
        values.append(None)
        if tensor is not None:
            dtype = ir.TensorType(tensor_adapters.from_torch_dtype(tensor.dtype))
            value = ir.Value(name=f"input{index}", type=dtype, shape=ir.Shape(tensor.shape))
            feeds[f"input{index}"] = tensor.detach().contiguous().numpy()
            values[-1] = value
    node = ir.node(kind, values, attributes, domain=domain, num_outputs=outputs)
    for index, value in enumerate(node.outputs):
        value.name, value.type = f"output{index}", ir.TensorType(ir.DataType.FLOAT)
    opsets = {"": 20, domain: 1}
    given = [value for value in values if value is not None]
    graph = ir.Graph(given, list(node.outputs), nodes=[node], opset_imports=opsets, name="one")
    content = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = 1
    session = ort.InferenceSession(content, settings, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(np.array(array)) for array in session.run(None, feeds)]


class Decoding:
    """A transformed model, called as a host calls the decode graph."""

    def __init__(self, model: PreTrainedModel, *, plain: bool = False) -> None:
        """plain: every attention layer is computed by plain operators."""
        self.context = DecodeContext()
        apply_transforms(model, self.context)
        shapes, recurrent = state_shapes(model, self.context)
        if plain:
            self.context.masked |= {*range(len(shapes))}
        vocab = model.config.get_text_config().vocab_size
        features = Features(sampler=False)
        self.interface = Interface(vocab, shapes, features=features, recurrent=recurrent)
        self.decoder = Decoder(model, self.context, self.interface)

    def start(self, rows: int, capacity: int) -> dict[str, Tensor]:
        """The states of rows that begin; what another row left in their buffers is not read."""
        sizes = self.interface.sizes | {BATCH: rows, CAPACITY: capacity}
        states = {spec.name: torch.full(spec.shape(sizes), 3.0) for spec in self._states}
        return states | {"lengths": torch.zeros(rows, dtype=torch.int32)}

    def step(
        self,
        state: dict[str, Tensor],
        rows: Sequence[Sequence[int]],
        width: int = 0,
        ended: int = -1,
    ) -> Tensor:
        """The logits after a call with these tokens, padded to `width`; `state` becomes the next."""
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        width = max(width, *map(len, rows))
        ids = torch.tensor([[*row, *[7] * (width - len(row))] for row in rows])
        status = torch.tensor([STOPPED if row == ended else RUNNING for row in range(len(rows))])
        given = {"input_ids": ids, "input_lengths": lengths, "status": status.to(torch.int32)}
        with torch.no_grad():
            results = self.decoder({**given, **state})
        for spec in self._states:
            state[spec.name] = results[spec.name.replace("past_key_values", "present")]
        state["lengths"] = state["lengths"] + lengths
        logits: Tensor = results["logits"]
        return logits

    @property
    def _states(self) -> Sequence[Any]:
        return self.interface.cache_states


def check_decoding(model: PreTrainedModel, *, plain: bool = False, capacity: int = 16) -> Decoding:
    """Compare ragged first prompts, a step of each, and a later padded piece with transformers."""
    texts = np.random.default_rng(0).integers(3, 300, (3, 12)).tolist()
    with torch.no_grad():
        wanted = model(torch.tensor(texts), use_cache=False).logits
    decoding = Decoding(model, plain=plain)
    state, ends = decoding.start(3, capacity), [9, 1, 4]
    got = decoding.step(state, [row[:end] for row, end in zip(texts, ends, strict=True)])
    assert (got.shape, got.dtype) == ((3, decoding.interface.vocab_size), torch.float32)
    at = torch.arange(3)
    torch.testing.assert_close(got, wanted[at, torch.tensor(ends) - 1], atol=2e-4, rtol=1e-4)
    got = decoding.step(state, [row[end : end + 1] for row, end in zip(texts, ends, strict=True)])
    torch.testing.assert_close(got, wanted[at, torch.tensor(ends)], atol=2e-4, rtol=1e-4)
    state = decoding.start(1, capacity)
    for begin, end, width in ((0, 5, 5), (5, 8, 6), (8, 12, 4)):
        got = decoding.step(state, [texts[1][begin:end]], width)
        torch.testing.assert_close(got, wanted[1:2, end - 1], atol=2e-4, rtol=1e-4)
    assert not decoding.context.active
    return decoding
